//! Tests of operations that a worker has abandoned half-way, and of what it announces meanwhile.

use farpool_txn::{LeaveError, SessionState, Table, Worker};
use farpool_wire::Slot;
use futures_util::future::{Either, select};

use super::broken::Chosen;
use super::*;
use crate::mutation;

const SEEDS: u64 = 400;
/// The time within which the write of a long payload is abandoned: before it begins, in any of its steps, or
/// not at all.
const GIVEN_UP_WITHIN_NS: u64 = 200_000;
/// Longer than any delay here.
const LONG: Duration = Duration::from_micros(1_000);
const PAUSE: Duration = Duration::from_micros(3);
const PAYLOAD_BYTES: usize = 600;
const PLACE: u16 = 0;

/// Puts the oracle, the records and the horizon on separate nodes, so that the order of one queue cannot hide
/// a fault. `None`: the seed has too few nodes.
fn setting_of(seed: u64) -> Option<(Executor, Run)> {
    let mut random = Random::new(seed, 10);
    let faults = Faults { late_permille: 60, late: Some(Span::new(100_000, 900_000)), ..Faults::default() };
    let world = World::new(WorldConfig { faults, ..WorldConfig::new(seed) });
    let executor = Executor::new(world.clone());
    let mut run = setting(world, executor.tasks(), seed, &mut random);
    (run.nodes.len() == 3).then_some(())?;
    run.parts = 1;
    run.firsts.fill(0); // nobody collects here, so the log has to be free from the start
    run.slab = SlabLayout::new(4, payloads::CHUNK_BYTES);
    Some((executor, run))
}

/// Begins to write a payload and abandons the write. Returns the number of the cut from which the transaction
/// began.
async fn write_and_give_up(run: &Run, worker: &Worker<Chosen>, table: &Table, random: &mut Random) -> u64 {
    let mut session = SessionState::new();
    let transaction = worker.begin(&mut session).await.unwrap();
    let sequence = transaction.cut().sequence();
    let number = random.below(table.records());
    let patience = run.world.sleep(Duration::from_nanos(random.below(GIVEN_UP_WITHIN_NS)));
    let write = Box::pin(transaction.write(table, number, Some(&[1; PAYLOAD_BYTES])));
    if let Either::Left((written, _)) = select(write, Box::pin(patience)).await {
        drop(written); // it may have failed for lack of room; the transaction does not commit in any case
    }
    sequence
}

/// Abandons the write of a payload, then continues. Returns whether anything landed in the records' memory
/// after the worker had announced that it no longer needs this snapshot.
async fn give_up(run: &Run, worker: &Worker<Chosen>, table: &Table, random: &mut Random) -> bool {
    let sequence = write_and_give_up(run, worker, table, random).await;
    let horizon = run.horizon(table_epoch(run, worker));
    let word = horizon.layout.word(PLACE).unwrap() as u64;
    while run.look(&Piece { epoch: OWNER, ..horizon.piece }, word) <= sequence + 1 {
        worker.stamp(&mut SessionState::new()).await.unwrap();
        worker.keep_up().await.unwrap();
        run.world.sleep(PAUSE).await;
    }
    let before = records(run);
    run.world.sleep(LONG).await;
    before != records(run)
}

fn table_epoch(run: &Run, worker: &Worker<Chosen>) -> Epoch {
    worker.memory().whole(run.piece(0, RECORDS, OWNER, 0).region).unwrap().epoch
}

/// All words of the regions with records.
fn records(run: &Run) -> Vec<u64> {
    let mut words = Vec::new();
    for node in 0..run.nodes.len() {
        let piece = run.piece(node, RECORDS, OWNER, 0);
        run.touch(piece.region, AccessKind::Read, &mut |memory| {
            for at in (0..REGION_BYTES).step_by(8) {
                words.push(memory.load(at)?);
            }
            Ok(())
        });
    }
    words
}

/// Runs a task with a worker and a table in a world of its own.
fn with_worker(
    seed: u64,
    (executor, run): (Executor, Run),
    task: impl AsyncFnOnce(&Run, &Worker<Chosen>, &Table, &mut Random) + 'static,
) {
    let mut random = Random::new(seed, 11);
    let run = Rc::new(run);
    run.write_first_words();
    publishers::start(&run, &mut random);
    let place = (run.world.add_host(1_000_000), Path::Checked);
    let process = run.world.add_process(place.0);
    let here = run.clone();
    run.tasks.spawn(process, async move {
        let grant = here.grant();
        let memory = here.access(process, place, grant).await.unwrap().memory;
        let (slot, first) = (Slot::new(0).unwrap(), here.firsts[0]);
        let worker = Worker::new(memory, here.oracle(grant), here.logs(grant), slot, first).unwrap();
        let worker = worker.announcing(here.horizon(grant), PLACE).await.unwrap().unwrap();
        here.seat(0, Some(grant));
        let table = here.table(grant).with_slab(here.slab(grant).unwrap()).unwrap();
        task(&here, &worker, &table, &mut random).await;
        here.has_ended.set(true);
    });
    let (panicked, failure) = run_to_end(executor, RUN_NS, || 0);
    assert!(!panicked && failure.is_none(), "seed {seed}: {failure:?}");
}

fn settings() -> impl Iterator<Item = (u64, (Executor, Run))> {
    (1..=SEEDS).filter_map(|seed| Some((seed, setting_of(seed)?)))
}

/// The number of seeds for which a write landed too late.
fn too_late(mutation: Option<&'static str>) -> u32 {
    mutation::set(mutation);
    let count = Rc::new(Cell::new(0));
    for (seed, setting) in settings() {
        let count = count.clone();
        with_worker(seed, setting, async move |run, worker, table, random| {
            let is_late = give_up(run, worker, table, random).await;
            count.set(count.get() + u32::from(is_late));
        });
    }
    mutation::set(None);
    count.get()
}

#[test]
fn no_abandoned_write_lands_after_its_snapshot_is_no_longer_announced() {
    assert_eq!(too_late(None), 0);
    assert!(too_late(Some(broken::IN_FLIGHT_FORGOTTEN)) > 0, "the test does not notice the mutation");
}

#[test]
fn the_snapshot_of_a_commit_in_doubt_stays_announced() {
    let in_doubt = Rc::new(Cell::new(0));
    for (seed, setting) in settings() {
        let count = in_doubt.clone();
        with_worker(seed, setting, async move |run, worker, table, random| {
            let mut session = SessionState::new();
            let transaction = worker.begin(&mut session).await.unwrap();
            let sequence = transaction.cut().sequence();
            transaction.write(table, 0, Some(&[1; 8])).await.unwrap();
            let patience = run.world.sleep(Duration::from_nanos(random.below(GIVEN_UP_WITHIN_NS)));
            if let Either::Left((done, _)) = select(Box::pin(transaction.commit()), Box::pin(patience)).await
            {
                done.unwrap();
                return worker.leave().await.unwrap();
            }
            let horizon = run.horizon(table_epoch(run, worker));
            let word = horizon.layout.word(PLACE).unwrap() as u64;
            for _ in 0..20 {
                worker.keep_up().await.unwrap();
                assert!(run.look(&Piece { epoch: OWNER, ..horizon.piece }, word) <= sequence + 1);
                run.world.sleep(PAUSE).await;
            }
            assert!(worker.is_needed() && matches!(worker.leave().await, Err(LeaveError::Stuck)));
            count.set(count.get() + 1);
        });
    }
    assert!(in_doubt.get() > 10, "nearly all commits finished before they were abandoned");
}

#[test]
fn a_slot_is_not_given_up_while_an_abandoned_payload_may_still_land() {
    let in_flight = Rc::new(Cell::new(0));
    for (seed, setting) in settings() {
        let count = in_flight.clone();
        with_worker(seed, setting, async move |run, worker, table, random| {
            write_and_give_up(run, worker, table, random).await;
            if worker.is_needed() {
                assert!(matches!(worker.leave_slot().await, Err(LeaveError::Stuck)), "seed {seed}");
                count.set(count.get() + 1);
            }
        });
    }
    assert!(in_flight.get() > 10, "nearly all payloads were written before they were abandoned");
}
