//! Step-by-step tests of snapshots that are older than the versions in rings.

use farpool_fabric::AccessKind;
use farpool_txn::{ReadError, SessionState, Worker};
use farpool_wire::Slot;

use super::broken::Chosen;
use super::*;

/// The most attempts of a writer for which there should be room.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_micros(20);

/// Runs a task in a world of its own without faults. It has one record, whose ring has `old_versions` places
/// and whose piece has `overflow` entries for more.
fn in_order(old_versions: usize, overflow: u64, task: impl AsyncFnOnce(&Run, &Worker<Chosen>) + 'static) {
    in_order_with(old_versions, overflow, None, async |run, worker| task(run, worker).await);
}

/// The same, with a slab beside the table.
pub(super) fn in_order_with(
    old_versions: usize,
    overflow: u64,
    slab: Option<SlabLayout>,
    task: impl AsyncFnOnce(&Rc<Run>, &Worker<Chosen>) + 'static,
) {
    in_world(WorldConfig::new(1), old_versions, overflow, slab, task);
}

/// The same, in a world with these settings.
pub(super) fn in_world(
    config: WorldConfig,
    old_versions: usize,
    overflow: u64,
    slab: Option<SlabLayout>,
    task: impl AsyncFnOnce(&Rc<Run>, &Worker<Chosen>) + 'static,
) {
    let seed = config.seed;
    let mut random = Random::new(seed, 1);
    let world = World::new(config);
    let executor = Executor::new(world.clone());
    let mut setting = setting(world.clone(), executor.tasks(), seed, &mut random);
    setting.nodes.truncate(1);
    let records = RecordLayout::new(1, DATA_WORDS * 8, old_versions).unwrap();
    setting.records = records.with_overflow(overflow).unwrap();
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
        let worker = Worker::new(memory, here.oracle(grant), here.log(0, grant), slot, 0).unwrap();
        let worker = worker.announcing(here.horizon(grant), 0).await.unwrap().unwrap();
        task(&here, &worker).await;
        worker.leave().await.unwrap();
        here.has_ended.set(true);
    });
    let (panicked, failure) = run_to_end(executor, RUN_NS, || 0);
    assert!(!panicked && failure.is_none() && run.ledger.notes.complaints.borrow().is_empty(), "{failure:?}");
}

/// Writes the record, if its ring has room for the version that is replaced. Returns whether it did.
async fn write_once(run: &Run, worker: &Worker<Chosen>, session: &mut SessionState, value: u8) -> bool {
    let table = run.table(worker.memory().whole(RECORD_REGION).unwrap().epoch);
    let mut transaction = worker.begin(session).await.unwrap();
    match transaction.write(&table, 0, Some(&[value; DATA_WORDS * 8])).await {
        Ok(_) => transaction.commit().await.unwrap().is_some(),
        Err(ReadError::RingFull) => false,
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
fn a_snapshot_older_than_the_ring_reads_a_moved_version() {
    in_order(1, 8, async |run, worker| {
        let (mut session, mut old) = (SessionState::new(), SessionState::new());
        write(run, worker, &mut session, 1).await;
        run.world.sleep(PAUSE).await;
        let snapshot = worker.begin(&mut old).await.unwrap();
        for value in 2..=6 {
            write(run, worker, &mut session, value).await;
        }
        let table = run.table(worker.memory().whole(RECORD_REGION).unwrap().epoch);
        let row = snapshot.read(&table, 0).await.unwrap();
        assert_eq!(row.data, Some(vec![1; DATA_WORDS * 8]));
    });
}

#[test]
fn a_moved_version_is_found_while_its_place_in_the_ring_is_being_overwritten() {
    in_order(1, 8, async |run, worker| {
        let (mut session, mut old) = (SessionState::new(), SessionState::new());
        write(run, worker, &mut session, 1).await;
        run.world.sleep(PAUSE).await;
        let snapshot = worker.begin(&mut old).await.unwrap();
        write(run, worker, &mut session, 2).await;
        let ring = run.records.old_header(0, 1).start;
        let is_moved = || {
            let mut word = 0;
            let regions = &run.nodes[0].memory.regions;
            let read = regions.with_region(RECORDS, OWNER, AccessKind::Read, &mut |memory| {
                word = memory.load(ring)?;
                Ok(())
            });
            assert_eq!(read, Ok(()));
            farpool_wire::RecordHeader(word).is_moved()
        };
        for _ in 0..TRIES {
            if is_moved() {
                break;
            }
            run.world.sleep(PAUSE).await;
        }
        assert!(is_moved());
        // What a writer leaves that dies after it has written the first word of a version's data.
        let place = run.records.old(0, 1).start;
        let regions = &run.nodes[0].memory.regions;
        let written = regions
            .with_region(RECORDS, OWNER, AccessKind::Write, &mut |memory| memory.store(place, u64::MAX));
        assert_eq!(written, Ok(()));
        let table = run.table(worker.memory().whole(RECORD_REGION).unwrap().epoch);
        let row = snapshot.read(&table, 0).await.unwrap();
        assert_eq!(row.data, Some(vec![1; DATA_WORDS * 8]));
    });
}

#[test]
fn writers_without_room_wait_until_old_snapshots_have_ended() {
    in_order(2, 2, async |run, worker| {
        let (mut session, mut old) = (SessionState::new(), SessionState::new());
        let snapshot = worker.begin(&mut old).await.unwrap();
        // One version is current, two are in the ring, two in the overflow region.
        for value in 1..=4 {
            write(run, worker, &mut session, value).await;
        }
        for _ in 0..TRIES {
            assert!(!write_once(run, worker, &mut session, 5).await, "the initial version would be lost");
            run.world.sleep(PAUSE).await;
        }
        let table = run.table(worker.memory().whole(RECORD_REGION).unwrap().epoch);
        assert_eq!(snapshot.read(&table, 0).await.unwrap().data, None, "there was none");
        drop(snapshot);
        for value in 5..=20 {
            write(run, worker, &mut session, value).await;
        }
    });
}
