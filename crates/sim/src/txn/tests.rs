//! Step-by-step tests of snapshots that need versions which were replaced.

use std::pin::pin;

use farpool_txn::{CommitError, SessionState, Worker};
use farpool_wire::{RecordHeader, Slot};
use futures_util::future::{Either, select};

use super::broken::Chosen;
use super::*;

/// The most attempts of a writer for which there should be room.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_micros(20);
const INSTANT: Duration = Duration::from_nanos(50);
/// Bytes for the intents of the log: room for some versions.
const INTENT_BYTES: u64 = 2_048;

/// Runs a task in a world of its own without faults, with one record.
fn in_order(task: impl AsyncFnOnce(&Run, &Worker<Chosen>) + 'static) {
    in_order_with(None, async |run, worker| task(run, worker).await);
}

/// The same, with a slab beside the table.
pub(super) fn in_order_with(
    slab: Option<SlabLayout>,
    task: impl AsyncFnOnce(&Rc<Run>, &Worker<Chosen>) + 'static,
) {
    in_world(WorldConfig::new(1), slab, task);
}

/// The same, in a world with these settings.
pub(super) fn in_world(
    config: WorldConfig,
    slab: Option<SlabLayout>,
    task: impl AsyncFnOnce(&Rc<Run>, &Worker<Chosen>) + 'static,
) {
    let seed = config.seed;
    let mut random = Random::new(seed, 1);
    let world = World::new(config);
    let executor = Executor::new(world.clone());
    let mut setting = setting(world.clone(), executor.tasks(), seed, &mut random);
    setting.nodes.truncate(1);
    setting.records = RecordLayout::new(1, DATA_WORDS * 8).unwrap();
    setting.log = LogLayout::new(INTENT_BYTES).unwrap();
    setting.slab = slab;
    let run = Rc::new(setting);
    publishers::start(&run, &mut random);
    let place = (run.nodes[0].host, Path::Shared);
    collector::start_one(&run, &mut random);
    let process = world.add_process(place.0);
    let here = run.clone();
    run.tasks.spawn(process, async move {
        let grant = here.grant();
        let memory = here.access(process, place, grant).await.unwrap().memory;
        let slot = Slot::new(0).unwrap();
        let worker = Worker::new(memory, here.oracle(grant), here.logs(grant), slot, 0).unwrap();
        let worker = worker.announcing(here.horizon(grant), 0).await.unwrap().unwrap();
        task(&here, &worker).await;
        if let Err(error) = worker.leave().await {
            assert!(worker.is_needed(), "{error}");
        }
        here.has_ended.set(true);
    });
    let (panicked, failure) = run_to_end(executor, RUN_NS, || 0);
    assert!(!panicked && failure.is_none() && run.ledger.notes.complaints.borrow().is_empty(), "{failure:?}");
}

fn table(run: &Run, worker: &Worker<Chosen>) -> Table {
    run.table(worker.memory().whole(RECORD_REGION).unwrap().epoch)
}

/// Writes the record, if the log has room for the version that is replaced. Returns whether it did.
async fn write_once(run: &Run, worker: &Worker<Chosen>, session: &mut SessionState, value: u8) -> bool {
    let table = table(run, worker);
    let transaction = worker.begin(session).await.unwrap();
    transaction.write(&table, 0, Some(&[value; DATA_WORDS * 8])).await.unwrap();
    match transaction.commit().await {
        Ok(version) => version.is_some(),
        Err(CommitError::LogFull) => false,
        Err(error) => panic!("{error}"),
    }
}

async fn write(run: &Run, worker: &Worker<Chosen>, session: &mut SessionState, value: u8) {
    for _ in 0..TRIES {
        if write_once(run, worker, session, value).await {
            return;
        }
        run.world.sleep(PAUSE).await;
    }
    panic!("there is no room for {value}");
}

const RECORD_REGION: RegionId = RegionId { node: NodeId(1), index: RECORDS };

#[test]
fn a_snapshot_reads_its_version_after_five_later_commits() {
    in_order(async |run, worker| {
        let (mut session, mut old) = (SessionState::new(), SessionState::new());
        let absent = worker.begin(&mut old).await.unwrap();
        write(run, worker, &mut session, 1).await;
        run.world.sleep(PAUSE).await;
        let mut old = SessionState::new();
        let snapshot = worker.begin(&mut old).await.unwrap();
        for value in 2..=6 {
            write(run, worker, &mut session, value).await;
        }
        let table = table(run, worker);
        let row = snapshot.read(&table, 0).await.unwrap();
        assert_eq!(row.data, Some(vec![1; DATA_WORDS * 8]));
        assert_eq!(absent.read(&table, 0).await.unwrap().data, None, "there was none");
    });
}

#[test]
fn a_record_whose_commit_was_abandoned_half_way_is_read_from_that_commit_s_log() {
    let found_torn = Rc::new(Cell::new(0));
    for after in (0..200).map(|step| Duration::from_nanos(100 * step)) {
        let count = found_torn.clone();
        in_order(async move |run, worker| {
            let mut session = SessionState::new();
            write(run, worker, &mut session, 1).await;
            let table = table(run, worker);
            let transaction = worker.begin(&mut session).await.unwrap();
            transaction.write(&table, 0, Some(&[2; DATA_WORDS * 8])).await.unwrap();
            let committing = transaction.prepare().unwrap().unwrap();
            let (version, current) = (committing.version(), run.records.current(0).start);
            let piece = run.piece(0, RECORDS, OWNER, 0);
            let locked = async {
                while RecordHeader(run.look(&piece, current)) != RecordHeader::of(version).locked() {
                    run.world.sleep(INSTANT).await;
                }
                run.world.sleep(after).await;
            };
            if let Either::Left(_) = select(pin!(committing.commit()), pin!(locked)).await {
                return;
            }
            if run.word(0) >= version.count() {
                return;
            }
            // What a client leaves that dies while its WRITE of the body lands.
            run.touch(piece.region, AccessKind::Write, &mut |memory| {
                memory.store(piece.start + current, RecordHeader::of(version).locked().0)?;
                memory.store(piece.start + current + 48, u64::MAX)
            });
            count.set(count.get() + 1);
            let mut reading = SessionState::new();
            let row = worker.begin(&mut reading).await.unwrap().read(&table, 0).await.unwrap();
            assert_eq!(row.data, Some(vec![1; DATA_WORDS * 8]), "{after:?}");
            // The recoverer of this slot is not part of the test.
            run.touch(piece.region, AccessKind::Write, &mut |memory| memory.store(piece.start + current, 0));
        });
    }
    assert!(found_torn.get() > 10, "nearly all commits ended before they were abandoned");
}

#[test]
fn a_full_log_takes_no_commit_until_the_snapshot_that_needs_its_versions_ends() {
    in_order(async |run, worker| {
        let (mut session, mut old) = (SessionState::new(), SessionState::new());
        write(run, worker, &mut session, 1).await;
        run.world.sleep(PAUSE).await;
        let snapshot = worker.begin(&mut old).await.unwrap();
        let mut value = 2;
        while write_once(run, worker, &mut session, value).await {
            value += 1;
        }
        assert!(value > 10, "the log has room for some versions");
        for _ in 0..TRIES {
            assert!(!write_once(run, worker, &mut session, value).await, "the first version would be lost");
            run.world.sleep(PAUSE).await;
        }
        let table = table(run, worker);
        assert_eq!(snapshot.read(&table, 0).await.unwrap().data, Some(vec![1; DATA_WORDS * 8]));
        drop(snapshot);
        for value in value..value + 20 {
            write(run, worker, &mut session, value).await;
        }
    });
}
