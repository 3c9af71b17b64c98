//! Tests of indexes in memory with arbitrary contents, or with too little room.

use std::time::Duration;

use farpool_fabric::AccessKind;
use farpool_fabric::sim::{Path, ProcessId, Service, WorldConfig};
use farpool_txn::hash::{IndexError, IndexSpares};
use farpool_txn::log::Logs;
use farpool_txn::oracle::{Board, publish};
use farpool_txn::{
    KeyError, KeyedTable, Memory, OracleAt, ReadError, RecordId, RecordLayout, SessionState, Table, Worker,
};
use farpool_wire::{NodeId, Slot};

use super::*;
use crate::indexing::{EPOCH, IndexNode, LAST_DEADLINE, REGION_BYTES, key, piece};
use crate::lending::LendingHost;

const SHAPE: IndexShape = IndexShape { homes: 2, pairs: 8, records: 16, key_bytes: 8, entries: 3, seed: 5 };

/// A process on the host of the node that holds the whole index.
struct Alone {
    run: Rc<Run>,
    process: ProcessId,
    place: ClientPlace,
}

impl Alone {
    async fn memory(&self) -> Memory {
        Setting::memory(&self.run, self.process, self.place, LAST_DEADLINE).await.expect("the node is there")
    }
}

/// Runs a task in a world of its own, over an index whose words `word` gives. Returns the result of the task.
fn alone<T: 'static>(
    seed: u64,
    mut word: impl FnMut(&mut Random) -> u64,
    task: impl AsyncFnOnce(&Alone) -> T + 'static,
) -> T {
    let mut random = Random::new(seed, 1);
    let world = World::new(WorldConfig::new(seed));
    let executor = Executor::new(world.clone());
    let host = world.add_host(1_000_000);
    let layout = IndexLayout::new(SHAPE, 1).unwrap();
    let memory = Arc::new(LendingHost::new(NodeId(1), REGIONS, REGION_BYTES));
    (0..REGIONS).for_each(|region| memory.open(region, EPOCH, key()));
    let filled = memory.regions.with_region(INDEX, EPOCH, AccessKind::Write, &mut |memory| {
        (0..layout.bytes() / 8).try_for_each(|place| memory.store(8 * place, word(&mut random)))
    });
    assert_eq!(filled, Ok(()));
    let peer = world.serve(host, memory, Service::Whole);
    let process = world.add_process(host);
    let run = Rc::new(Run {
        keys: Keys::choose(&layout, &mut random),
        setting: Setting {
            nodes: vec![IndexNode { host, peer }],
            notes: Notebook::new(world.clone(), seed),
            world,
            tasks: executor.tasks(),
            regions: REGIONS,
            clients: RefCell::default(),
            left: Left::default(),
        },
        pieces: vec![piece(NodeId(1), INDEX, 0)],
        layout,
        growth: IndexGrowth { shape: SHAPE, layer: 1, most_times: 1 },
        is_of_transactions: true,
        is_roomy: false,
        history: RefCell::default(),
    });
    let came_to = Rc::new(RefCell::new(None));
    let (there, told, staying) = (run.clone(), came_to.clone(), run.setting.left.stay());
    run.setting.tasks.spawn(process, async move {
        let alone = Alone { run: there, process, place: ClientPlace { index: 0, host, path: Path::Shared } };
        let what = task(&alone).await;
        *told.borrow_mut() = Some(what);
        drop(staying);
    });
    let (panicked, failure) = run_to_end(executor, RUN_NS, || run.setting.left.get());
    assert!(!panicked && failure.is_none(), "seed {seed}: {failure:?}");
    came_to.take().expect("the task has ended")
}

/// Looks up some keys and inserts them, in memory whose words `word` gives.
fn answers(seed: u64, word: impl FnMut(&mut Random) -> u64) -> Vec<Result<Option<u64>, IndexError>> {
    alone(seed, word, async |alone| {
        let memory = alone.memory().await;
        let index = alone.run.index::<Shipped>();
        let mut told = Vec::new();
        for number in 0..50_u64 {
            let key = number.to_le_bytes();
            told.push(index.find(&memory, &key).await);
            told.push(index.find_or_insert(&memory, &key).await.map(|found| Some(found.number())));
        }
        told
    })
}

#[test]
fn damaged_memory_causes_errors_or_answers_but_never_panics() {
    let mut damaged = 0;
    for seed in 0..60 {
        // The words range from nearly arbitrary references to references within the index.
        let bits = 5 + seed % 12 * 5;
        let told = answers(seed, |random| random.bits() & random.bits() >> (64 - bits));
        assert_eq!(told.len(), 100);
        damaged += told.iter().filter(|answer| matches!(answer, Err(IndexError::Damaged))).count();
        let is_told = |answer: &_| {
            matches!(
                answer,
                Ok(_)
                    | Err(IndexError::Damaged
                        | IndexError::BeyondPieces
                        | IndexError::Full
                        | IndexError::Crowded)
            )
        };
        assert!(told.iter().all(is_told), "seed {seed}: {told:?}");
    }
    assert!(damaged > 1_000, "{damaged}");
}

#[test]
fn a_full_table_reports_that_and_has_used_every_number() {
    let told = answers(1, |_| 0);
    let (sought, inserted): (Vec<_>, Vec<_>) = told.chunks(2).map(|both| (&both[0], &both[1])).unzip();
    assert!(sought.iter().all(|answer| matches!(answer, Ok(None))), "{sought:?}");
    let mut numbers: Vec<u64> = inserted.iter().filter_map(|answer| *answer.as_ref().ok()?).collect();
    assert!(
        inserted
            .iter()
            .all(|answer| matches!(answer, Ok(Some(_)) | Err(IndexError::Full | IndexError::Crowded)))
    );
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers, (0..SHAPE.records).collect::<Vec<_>>(), "each number belongs to a key");
}

/// Inserts two keys for each number, each pair through an [`Index`] of its own, as separate threads do.
/// Returns how many keys got a number.
fn inserted_by_many(share: bool) -> usize {
    alone(
        1,
        |_| 0,
        async move |alone| {
            let memory = alone.memory().await;
            let spares = Arc::new(IndexSpares::new(&alone.run.layout));
            let mut inserted = 0;
            for number in 0..SHAPE.records {
                let spares =
                    if share { spares.clone() } else { Arc::new(IndexSpares::new(&alone.run.layout)) };
                let index = Index::<Shipped>::sharing(alone.run.layout, alone.run.pieces.clone(), spares);
                let mut told = Vec::new();
                for key in [2 * number, 2 * number + 1].map(u64::to_le_bytes) {
                    told.push(index.as_ref().unwrap().find_or_insert(&memory, &key).await);
                }
                inserted += told.iter().filter(|told| told.is_ok()).count();
            }
            inserted
        },
    )
}

#[test]
fn threads_that_share_reserved_numbers_use_all_of_them() {
    let (alone, together) = (inserted_by_many(false), inserted_by_many(true));
    assert_eq!(together as u64, SHAPE.records);
    assert!(alone < together, "{alone}");
}

const DATA: [[u8; 8]; 3] = [[1; 8], [2; 8], [3; 8]];

#[test]
fn inserting_an_existing_key_and_updating_a_missing_one_are_errors() {
    alone(
        2,
        |_| 0,
        async |alone| {
            let layout = RecordLayout::new(SHAPE.records, DATA[0].len()).unwrap();
            let table = Table::new(RecordId(0), layout, vec![piece(NodeId(1), RECORDS, 0)]);
            let oracle = OracleAt { piece: piece(NodeId(1), ORACLE, 0), board: Board::new(1).unwrap() };
            let (publishing, run) = (alone.memory().await, alone.run.clone());
            alone.run.setting.tasks.spawn(alone.process, async move {
                publish::<Shipped>(&publishing, oracle, Duration::ZERO, None, || run.setting.left.get() == 0)
                    .await
                    .expect("the node is there");
            });
            let logs = Logs::new([transactions::log_at(&alone.run, 0)]);
            let slot = Slot::new(0).unwrap();
            let worker: Worker = Worker::new(alone.memory().await, oracle, logs, slot, 0).unwrap();
            let table = KeyedTable::new(table, alone.run.index::<Shipped>()).unwrap();
            script(&worker, &table, b"some key").await;
        },
    );
}

async fn script(worker: &Worker, table: &KeyedTable, key: &[u8]) {
    let (mut session, mut other) = (SessionState::new(), SessionState::new());
    let late = worker.begin(&mut other).await.unwrap();

    let first = worker.begin(&mut session).await.unwrap();
    assert!(matches!(table.update(&first, key, &DATA[0]).await, Err(KeyError::NoSuchKey)));
    assert_eq!(table.insert(&first, key, &DATA[0]).await.unwrap().data, None);
    assert!(
        matches!(table.insert(&first, key, &DATA[1]).await, Err(KeyError::Duplicate)),
        "inserted by the same transaction"
    );
    assert_eq!(table.get(&first, key).await.unwrap().data, Some(DATA[0].to_vec()));
    assert!(first.commit().await.unwrap().is_some());

    assert_eq!(table.get(&late, key).await.unwrap().data, None, "not in its snapshot");
    let conflict = table.insert(&late, key, &DATA[1]).await;
    assert!(matches!(conflict, Err(KeyError::Record(ReadError::Conflict))), "{conflict:?}");
    drop(late);

    let second = worker.begin(&mut session).await.unwrap();
    assert!(matches!(table.insert(&second, key, &DATA[1]).await, Err(KeyError::Duplicate)));
    assert_eq!(table.update(&second, key, &DATA[1]).await.unwrap().data, Some(DATA[0].to_vec()));
    assert_eq!(table.delete(&second, key).await.unwrap().data, Some(DATA[1].to_vec()));
    assert!(
        matches!(table.delete(&second, key).await, Err(KeyError::NoSuchKey)),
        "deleted by the same transaction"
    );
    second.commit().await.unwrap();

    let third = worker.begin(&mut session).await.unwrap();
    assert_eq!(table.get(&third, key).await.unwrap().data, None);
    assert_eq!(table.insert(&third, key, &DATA[2]).await.unwrap().data, None, "deleted, so not there");
    third.commit().await.unwrap();
    let fourth = worker.begin(&mut session).await.unwrap();
    assert_eq!(table.get(&fourth, key).await.unwrap().data, Some(DATA[2].to_vec()));
    let wrong = table.get(&fourth, b"short").await;
    assert!(matches!(wrong, Err(KeyError::Index(IndexError::WrongKeySize { wanted: 8, found: 5 }))));
}
