//! Indexes in memory that holds anything, or too little.

use farpool_fabric::AccessKind;
use farpool_txn::hash::IndexError;

use super::*;

const SHAPE: IndexShape = IndexShape { homes: 2, pairs: 8, records: 16, key_bytes: 8, entries: 3, seed: 5 };

/// Asks for some keys, and inserts some more, in memory whose words are as `word` says.
fn answers(seed: u64, mut word: impl FnMut(&mut Random) -> u64) -> Vec<Result<Option<u64>, IndexError>> {
    let mut random = Random::new(seed, 1);
    let world = World::new(WorldConfig::new(seed));
    let executor = Executor::new(world.clone());
    let host = world.add_host(1_000_000);
    let layout = IndexLayout::new(SHAPE, 1).unwrap();
    let memory = Arc::new(LendingHost::new(NodeId(1), REGIONS, REGION_BYTES));
    memory.open(INDEX, EPOCH, key());
    let filled = memory.regions.with_region(INDEX, EPOCH, AccessKind::Write, &mut |memory| {
        (0..layout.bytes() / 8).try_for_each(|place| memory.store(8 * place, word(&mut random)))
    });
    assert_eq!(filled, Ok(()));
    let peer = world.serve(host, memory, Service::Whole);
    let process = world.add_process(host);
    let run = Rc::new(Run {
        keys: Keys::choose(&layout, &mut random),
        nodes: vec![Node { host, peer }],
        pieces: vec![piece(NodeId(1), INDEX, 0)],
        world,
        tasks: executor.tasks(),
        seed,
        layout,
        is_of_transactions: false,
        is_roomy: false,
        history: RefCell::default(),
        complaints: RefCell::default(),
        clients: RefCell::default(),
        left: Cell::default(),
        names: Cell::default(),
    });
    let answers = Rc::new(RefCell::new(Vec::new()));
    let (here, told) = (run.clone(), answers.clone());
    run.tasks.spawn(process, async move {
        let place = Place { index: 0, host, path: Path::Shared };
        let memory = here.memory(process, place, LAST_DEADLINE).await.expect("the node is there");
        let index = here.index::<Shipped>();
        for number in 0..50_u64 {
            let key = number.to_le_bytes();
            let found = index.find(&memory, &key).await;
            told.borrow_mut().push(found);
            let inserted = index.find_or_insert(&memory, &key).await;
            told.borrow_mut().push(inserted.map(|found| Some(found.number())));
        }
    });
    let (panicked, trouble) = run_to_end(executor, RUN_NS, || 0);
    assert!(!panicked && trouble.is_none(), "seed {seed}: {trouble:?}");
    drop(run);
    Rc::into_inner(answers).expect("the task has ended").into_inner()
}

#[test]
fn damaged_memory_is_an_error_or_an_answer_and_never_a_panic() {
    let mut damaged = 0;
    for seed in 0..60 {
        // From words that name nearly anything to such as name what there is.
        let bits = 5 + seed % 12 * 5;
        let told = answers(seed, |random| random.bits() & random.bits() >> (64 - bits));
        assert_eq!(told.len(), 100);
        damaged += told.iter().filter(|answer| matches!(answer, Err(IndexError::Damaged))).count();
        let is_told = |answer: &_| matches!(answer, Ok(_) | Err(IndexError::Damaged | IndexError::Full));
        assert!(told.iter().all(is_told), "seed {seed}: {told:?}");
    }
    assert!(damaged > 1_000, "{damaged}");
}

#[test]
fn a_table_that_is_full_says_so_and_finds_what_it_has() {
    let told = answers(1, |_| 0);
    let (sought, inserted): (Vec<_>, Vec<_>) = told.chunks(2).map(|both| (&both[0], &both[1])).unzip();
    assert!(sought.iter().all(|answer| matches!(answer, Ok(None))), "{sought:?}");
    let mut numbers: Vec<u64> = inserted.iter().filter_map(|answer| *answer.as_ref().ok()?).collect();
    assert!(inserted.iter().all(|answer| matches!(answer, Ok(Some(_)) | Err(IndexError::Full))));
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers, (0..SHAPE.records).collect::<Vec<_>>(), "each is some key's");
}
