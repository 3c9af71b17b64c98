//! Tests of ordered indexes with many leaves, or in memory with arbitrary contents.

use farpool_fabric::AccessKind;
use farpool_fabric::sim::{Path, Service, WorldConfig};
use farpool_txn::Memory;
use farpool_txn::tree::TreeError;
use farpool_wire::NodeId;

use super::*;
use crate::indexing::{EPOCH, IndexNode, LAST_DEADLINE, REGION_BYTES, key, piece};
use crate::lending::LendingHost;

const KEY_BYTES: usize = 8;

fn growth() -> TreeGrowth {
    let leaf = LeafLayout::new(KEY_BYTES).unwrap().with_entries(4);
    TreeGrowth { leaf, pairs: 500, layer: 1, most_times: 1 }
}

fn rank(number: u64) -> Rank {
    Rank::new(&number.to_be_bytes(), number)
}

/// Runs a task in a world of its own, over an index whose words `word` gives.
fn alone<T: 'static>(
    seed: u64,
    mut word: impl FnMut(&mut Random) -> u64,
    task: impl AsyncFnOnce(&Rc<Run>, &Memory) -> T + 'static,
) -> T {
    let mut random = Random::new(seed, 1);
    let world = World::new(WorldConfig::new(seed));
    let executor = Executor::new(world.clone());
    let host = world.add_host(1_000_000);
    let memory = Arc::new(LendingHost::new(NodeId(1), 1, REGION_BYTES));
    memory.open(0, EPOCH, key());
    let filled = memory.regions.with_region(0, EPOCH, AccessKind::Write, &mut |memory| {
        (0..growth().layout(1).bytes_of(0) / 8)
            .try_for_each(|place| memory.store(8 * place, word(&mut random)))
    });
    assert_eq!(filled, Ok(()));
    let peer = world.serve(host, memory, Service::Whole);
    let process = world.add_process(host);
    let setting = Setting {
        nodes: vec![IndexNode { host, peer }],
        notes: Notebook::new(world.clone(), seed),
        world,
        tasks: executor.tasks(),
        regions: 1,
        clients: RefCell::default(),
        left: Left::default(),
    };
    let (pieces, ranks) = (vec![piece(NodeId(1), 0, 0)], Vec::new());
    let (history, operations) = (RefCell::default(), RefCell::default());
    let (next_slot, next_operation) = (Cell::new(0), Cell::new(0));
    let (growth, is_roomy) = (growth(), true);
    let run =
        Run { setting, growth, pieces, ranks, is_roomy, history, next_slot, operations, next_operation };
    let run = Rc::new(run);
    let came_to = Rc::new(RefCell::new(None));
    let (there, told, staying) = (run.clone(), came_to.clone(), run.setting.left.stay());
    run.setting.tasks.spawn(process, async move {
        let place = ClientPlace { index: 0, host, path: Path::Shared };
        let memory = Setting::memory(&there, process, place, LAST_DEADLINE).await.expect("the node is there");
        let what = task(&there, &memory).await;
        *told.borrow_mut() = Some(what);
        drop(staying);
    });
    let (panicked, failure) = run_to_end(executor, RUN_NS, || run.setting.left.get());
    assert!(!panicked && failure.is_none(), "seed {seed}: {failure:?}");
    came_to.take().expect("the task has ended")
}

/// The READs of a search by a client that has read nothing before, in an index that was filled in this order.
fn reads_of_a_first_search(keys: impl Iterator<Item = u64> + 'static) -> u64 {
    alone(
        1,
        |_| 0,
        async |run, memory| {
            let tree = run.tree::<Shipped>(1, &run.spares());
            for key in keys {
                tree.enter(memory, &key.to_be_bytes(), key).await.unwrap();
            }
            let (fresh, before) = (run.tree::<Shipped>(1, &run.spares()), memory.traffic().operations);
            let found = fresh.run_from(memory, &rank(500)).await.unwrap();
            assert_eq!(found.ranks().first(), Some(&rank(500)));
            memory.traffic().operations - before
        },
    )
}

#[test]
fn a_client_that_has_read_nothing_finds_a_leaf_in_a_few_steps() {
    let keys = 0..1_000;
    for reads in [reads_of_a_first_search(keys.clone()), reads_of_a_first_search(keys.rev())] {
        assert!(reads < 60, "{reads} READs");
    }
}

#[test]
fn damaged_memory_causes_errors_or_answers_but_never_panics() {
    let mut damaged = 0;
    for seed in 0..40 {
        // The words range from nearly arbitrary ones to references within the index; in some seeds most are
        // zeros.
        let (bits, zeros) = (5 + seed % 12 * 5, 900 * (seed % 3) as u32 / 2);
        let word = move |random: &mut Random| {
            let word = random.bits() & random.bits() >> (64 - bits);
            if random.chance(zeros) { 0 } else { word }
        };
        damaged += alone(seed, word, async |run, memory| {
            let tree = run.tree::<Shipped>(1, &run.spares());
            let mut damaged = 0;
            for number in 0..3_u64 {
                let entered = tree.enter(memory, &number.to_be_bytes(), 7).await;
                let found = tree.run_from(memory, &rank(number)).await.map(drop);
                let below = tree.run_below(memory, None).await.map(drop);
                let is_damaged = |answer: &Result<(), TreeError>| matches!(answer, Err(TreeError::Damaged));
                damaged += [entered, found, below].iter().filter(|answer| is_damaged(answer)).count();
            }
            damaged
        });
    }
    assert!(damaged > 0);
}
