//! Step-by-step tests of slabs with too little room, and of operations on slabs that are held or abandoned
//! half-way.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::{Faults, HostId, Path, Span, WorldConfig};
use farpool_txn::horizon::{forget, horizon};
use farpool_txn::recovery::recover_by;
use farpool_txn::{CommitError, ReadError, SessionState, Table, Worker};
use farpool_wire::{RecordHeader, Version};
use futures_util::future::{Either, join, select};

use super::super::Access;
use super::super::broken::Chosen;
use super::super::tests::{in_order_with, in_world};
use super::*;

/// The most attempts of a writer for which there should be room.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_micros(20);
/// A chunk has room for fourteen blocks of the first length, or two of the second.
const SHORT: usize = 100;
const LONG: usize = 600;
/// The place in the horizon of a second member's worker.
const SECOND_PLACE: u16 = 3;
/// Between two looks at a commit: less than any of its steps takes.
const INSTANT: Duration = Duration::from_nanos(20);

fn chunks(chunks: u64) -> Option<SlabLayout> {
    SlabLayout::new(chunks, CHUNK_BYTES)
}

/// The table as the member with that grant uses it, in the seat of that slot.
fn table(run: &Run, slot: u16, grant: Epoch) -> Table {
    run.seat(slot, Some(grant));
    run.table(grant).with_slab(run.slab(grant).unwrap()).unwrap()
}

fn grant_of(worker: &Worker<Chosen>, run: &Run) -> Epoch {
    worker.memory().whole(run.piece(0, RECORDS, OWNER, 0).region).unwrap().epoch
}

async fn write_once(worker: &Worker<Chosen>, table: &Table, payload: &[u8]) -> Result<(), ReadError> {
    let mut session = SessionState::new();
    let transaction = worker.begin(&mut session).await.unwrap();
    transaction.write(table, 0, Some(payload)).await?;
    transaction.commit().await.unwrap();
    // Waits until a published cut has the commit, so that the next transaction sees it.
    worker.begin(&mut session).await.unwrap();
    Ok(())
}

async fn write(run: &Run, worker: &Worker<Chosen>, table: &Table, payload: &[u8]) {
    for _ in 0..TRIES {
        match write_once(worker, table, payload).await {
            Ok(()) => return,
            Err(ReadError::NoSpace { .. }) => run.world.sleep(PAUSE).await,
            Err(error) => panic!("{error}"),
        }
    }
    panic!("there is no room for {} bytes", payload.len());
}

async fn read(worker: &Worker<Chosen>, table: &Table) -> Option<Vec<u8>> {
    let mut session = SessionState::new();
    let transaction = worker.begin(&mut session).await.unwrap();
    transaction.read(table, 0).await.unwrap().data
}

#[test]
fn blocks_of_replaced_payloads_are_reused() {
    in_order_with(chunks(2), async |run, worker| {
        let table = table(run, 0, grant_of(worker, run));
        for round in 0..100_u8 {
            let length = if round % 20 < 10 { SHORT } else { LONG };
            let payload = vec![round; length + usize::from(round % 7)];
            write(run, worker, &table, &payload).await;
            assert_eq!(read(worker, &table).await, Some(payload));
        }
    });
}

#[test]
fn payloads_grow_and_shrink_and_can_be_deleted() {
    in_order_with(chunks(8), async |run, worker| {
        let table = table(run, 0, grant_of(worker, run));
        assert_eq!(table.longest(), 2_048);
        for length in [0, 2_048, 40, 41, 7, 513, 1] {
            let payload: Vec<u8> = (0..length).map(|byte| byte as u8).collect();
            write(run, worker, &table, &payload).await;
            assert_eq!(read(worker, &table).await, Some(payload), "{length} bytes");
        }
        let too_long = write_once(worker, &table, &[1; 2_049]).await;
        assert!(matches!(too_long, Err(ReadError::TooLong { most: 2_048, found: 2_049 })), "{too_long:?}");
        let mut session = SessionState::new();
        let transaction = worker.begin(&mut session).await.unwrap();
        transaction.write(&table, 0, Some(&[2; LONG])).await.unwrap();
        assert_eq!(transaction.read(&table, 0).await.unwrap().data, Some(vec![2; LONG]), "its own");
        let before = transaction.write(&table, 0, None).await.unwrap();
        assert_eq!(before.data, Some(vec![2; LONG]));
        transaction.commit().await.unwrap();
        assert_eq!(transaction_after(worker, &mut session, &table).await, None);
    });
}

#[test]
fn a_table_with_a_slab_can_be_filled_with_payloads_that_fit_their_places() {
    in_order_with(chunks(1), async |run, worker| {
        let table = table(run, 0, grant_of(worker, run));
        let mut session = SessionState::new();
        worker.load(&mut session, &table, |_, payload| payload.fill(7)).await.unwrap();
        assert_eq!(transaction_after(worker, &mut session, &table).await, Some(vec![7; MOST_HERE]));
        write(run, worker, &table, &[8; LONG]).await;
    });
}

async fn transaction_after(
    worker: &Worker<Chosen>,
    session: &mut SessionState,
    table: &Table,
) -> Option<Vec<u8>> {
    let transaction = worker.begin(session).await.unwrap();
    transaction.read(table, 0).await.unwrap().data
}

#[test]
fn while_snapshots_need_all_blocks_writes_fail_and_change_nothing() {
    in_order_with(chunks(1), async |run, worker| {
        let table = table(run, 0, grant_of(worker, run));
        write(run, worker, &table, &[1; LONG]).await;
        let mut old = SessionState::new();
        let snapshot = worker.begin(&mut old).await.unwrap();
        write(run, worker, &table, &[2; LONG]).await;
        let mut is_full = false;
        for _ in 0..TRIES {
            match write_once(worker, &table, &[3; LONG]).await {
                Err(ReadError::NoSpace { bytes: LONG }) => is_full = true,
                other => panic!("a payload that a snapshot needs is lost: {other:?}"),
            }
            run.world.sleep(PAUSE).await;
        }
        assert!(is_full);
        assert_eq!(read(worker, &table).await, Some(vec![2; LONG]));
        assert_eq!(snapshot.read(&table, 0).await.unwrap().data, Some(vec![1; LONG]));
        drop(snapshot);
        write(run, worker, &table, &[3; LONG]).await;
        assert_eq!(read(worker, &table).await, Some(vec![3; LONG]));
    });
}

#[test]
fn blocks_of_an_abandoned_transaction_are_reused() {
    in_order_with(chunks(1), async |run, worker| {
        let table = table(run, 0, grant_of(worker, run));
        for _ in 0..5 {
            let mut session = SessionState::new();
            let transaction = worker.begin(&mut session).await.unwrap();
            transaction.write(&table, 0, Some(&[1; LONG])).await.unwrap();
            transaction.write(&table, 0, Some(&[2; LONG])).await.unwrap();
            let third = transaction.write(&table, 0, Some(&[3; LONG])).await;
            assert!(matches!(third, Err(ReadError::NoSpace { .. })), "there are two blocks: {third:?}");
        }
        write(run, worker, &table, &[4; LONG]).await;
    });
}

/// Begins to write a long payload, and abandons the write after this time. Returns whether it may still land.
async fn abandon_write(run: &Run, worker: &Worker<Chosen>, table: &Table, after: Duration) -> bool {
    let mut session = SessionState::new();
    let transaction = worker.begin(&mut session).await.unwrap();
    let write = Box::pin(transaction.write(table, 0, Some(&[1; LONG])));
    drop(select(write, Box::pin(run.world.sleep(after))).await);
    drop(transaction);
    worker.is_needed()
}

#[test]
fn a_block_is_not_reused_while_an_abandoned_payload_may_still_land_there() {
    let in_flight = Rc::new(Cell::new(0));
    for after in (0..200).map(|step| Duration::from_nanos(50 * step)) {
        let count = in_flight.clone();
        in_order_with(chunks(1), async move |run, worker| {
            let table = table(run, 0, grant_of(worker, run));
            let may_land = abandon_write(run, worker, &table, after).await;
            let mut session = SessionState::new();
            let transaction = worker.begin(&mut session).await.unwrap();
            transaction.write(&table, 0, Some(&[2; SHORT / 4])).await.unwrap();
            let mut taken = 0;
            while transaction.write(&table, 0, Some(&[2; LONG])).await.is_ok() {
                taken += 1;
            }
            assert!(taken <= if may_land { 1 } else { 2 }, "{after:?}: {taken} blocks, {may_land}");
            assert!(may_land || taken == 2, "{after:?}: {taken} blocks");
            count.set(count.get() + u32::from(may_land));
        });
    }
    assert!(
        in_flight.get() > 10,
        "nearly all payloads were written before they were abandoned: {in_flight:?}"
    );
}

#[test]
fn blocks_of_commits_that_conflicted_are_reused() {
    in_order_with(chunks(1), async |run, worker| {
        let table = table(run, 0, grant_of(worker, run));
        for _ in 0..5 {
            let mut session = SessionState::new();
            let transaction = worker.begin(&mut session).await.unwrap();
            transaction.write(&table, 0, Some(&[1; LONG])).await.unwrap();
            write(run, worker, &table, &[2; 8]).await;
            assert!(matches!(transaction.commit().await, Err(CommitError::Conflict)));
        }
    });
}

/// A member in the seat of slot 1, with its grant.
async fn second_member(run: &Rc<Run>) -> (Worker<Chosen>, Epoch) {
    let place = (run.nodes[0].host, Path::Shared);
    let grant = run.grant();
    let memory = run.access(run.world.add_process(place.0), place, grant).await.unwrap().memory;
    let slot = Slot::new(1).unwrap();
    let worker = Worker::new(memory, run.oracle(grant), run.logs(grant), slot, 0).unwrap();
    (worker.announcing(run.horizon(grant), SECOND_PLACE).await.unwrap().unwrap(), grant)
}

/// Begins to write a short payload, and abandons the commit once the record is installed. Returns the
/// commit's version if the slot's word has not reached it.
async fn abandon_installed(run: &Run, worker: &Worker<Chosen>, table: &Table) -> Option<Version> {
    let mut session = SessionState::new();
    let transaction = worker.begin(&mut session).await.unwrap();
    transaction.write(table, 0, Some(&[2; 8])).await.unwrap();
    let committing = transaction.prepare().unwrap().unwrap();
    let version = committing.version();
    let installed = async {
        let (piece, header) = (run.piece(0, RECORDS, OWNER, 0), run.records.current(0).start);
        while RecordHeader(run.look(&piece, header)) != RecordHeader::of(version) {
            run.world.sleep(INSTANT).await;
        }
    };
    drop(select(Box::pin(committing.commit()), Box::pin(installed)).await);
    (run.word(1) < version.count()).then_some(version)
}

/// Rolls back what the second member has left, and waits until the horizon sees its counts.
async fn recover_second(run: &Rc<Run>, worker: &Worker<Chosen>, of: Epoch, version: Version) {
    run.fence(of, &mut Random::new(1, 2)).await;
    let place = (run.nodes[0].host, Path::Shared);
    let access = run.access(run.world.add_process(place.0), place, run.grant()).await;
    let Access { memory, grant } = access.unwrap();
    let log = run.log(1, grant);
    recover_by::<Chosen>(&memory, &run.oracle(grant), &log, version.slot()).await.unwrap();
    let at = run.horizon(grant);
    forget(&memory, &at, SECOND_PLACE..SECOND_PLACE + 1).await.unwrap();
    let sees = async || horizon(&memory, &at).await.unwrap().is_some_and(|cut| cut.sees(version));
    while !sees().await {
        worker.begin(&mut SessionState::new()).await.unwrap();
        worker.keep_up().await.unwrap();
        run.world.sleep(PAUSE).await;
    }
}

#[test]
fn a_commit_that_is_rolled_back_during_a_sweep_frees_no_block_of_the_version_before() {
    let held = Rc::new(Cell::new(0));
    for after in (0..60).map(|step| Duration::from_nanos(100 * step)) {
        let count = held.clone();
        in_order_with(chunks(1), async move |run, worker| {
            let table_of_first = table(run, 0, grant_of(worker, run));
            write(run, worker, &table_of_first, &[1; LONG]).await;
            let (second, grant) = second_member(run).await;
            let version = abandon_installed(run, &second, &table(run, 1, grant)).await;
            let version = version.expect("the word is written after the record");
            let sweep = Box::pin(worker.tend(&table_of_first));
            let sweep = match select(sweep, Box::pin(run.world.sleep(after))).await {
                Either::Left((swept, _)) => return swept.unwrap(),
                Either::Right((_, sweep)) => sweep,
            };
            recover_second(run, worker, grant, version).await;
            sweep.await.unwrap();
            let mut old = SessionState::new();
            let snapshot = worker.begin(&mut old).await.unwrap();
            write(run, worker, &table_of_first, &[3; LONG]).await;
            let found = snapshot.read(&table_of_first, 0).await.unwrap();
            assert_eq!(found.data, Some(vec![1; LONG]), "held after {after:?}");
            count.set(count.get() + 1);
        });
    }
    assert!(held.get() > 10, "nearly all sweeps ended before they were held: {held:?}");
}

/// Another worker of the member with that grant, on a host of its own.
async fn far_worker(run: &Rc<Run>, grant: Epoch) -> (Worker<Chosen>, HostId) {
    let host = run.world.add_host(1_000_000);
    let process = run.world.add_process(host);
    let memory = run.access(process, (host, Path::Checked), grant).await.unwrap().memory;
    let worker = Worker::new(memory, run.oracle(grant), run.logs(grant), Slot::new(1).unwrap(), 0).unwrap();
    (worker.announcing(run.horizon(grant), SECOND_PLACE).await.unwrap().unwrap(), host)
}

#[test]
fn a_version_that_is_replaced_during_a_sweep_does_not_make_older_blocks_unneeded() {
    let overlapped = Rc::new(Cell::new(0));
    for seed in 0..400 {
        let faults =
            Faults { stall_permille: 200, stall: Some(Span::new(2_000, 60_000)), ..Faults::default() };
        let config = WorldConfig { faults, ..WorldConfig::new(seed) };
        let count = overlapped.clone();
        // The third version replaces the second one while the sweep reads.
        in_world(config, chunks(2), async move |run, worker| {
            let grant = grant_of(worker, run);
            let table = table(run, 0, grant);
            write(run, worker, &table, &[1; LONG]).await;
            let (mut old, mut session) = (SessionState::new(), SessionState::new());
            let snapshot = worker.begin(&mut old).await.unwrap();
            write(run, worker, &table, &[2; LONG]).await;
            run.world.sleep(PAUSE).await;
            let transaction = worker.begin(&mut session).await.unwrap();
            transaction.write(&table, 0, Some(&[3; LONG])).await.unwrap();
            let committing = transaction.prepare().unwrap().unwrap();
            let (sweeper, _) = far_worker(run, grant).await;
            let ends = (Cell::new(0), Cell::new(0));
            let sweep = async {
                run.world.sleep(Duration::from_micros(seed % 50)).await;
                sweeper.tend(&table).await.unwrap();
                ends.0.set(run.world.now_ns());
            };
            let commit = async {
                committing.commit().await.unwrap();
                ends.1.set(run.world.now_ns());
            };
            join(sweep, commit).await;
            count.set(count.get() + u32::from(ends.0 > ends.1));
            for _ in 0..3 {
                // Waits until a cut with the session's last commit is published.
                worker.begin(&mut session).await.unwrap();
                let next = worker.begin(&mut session).await.unwrap();
                if next.write(&table, 0, Some(&[4; LONG])).await.is_ok() {
                    next.commit().await.unwrap();
                }
            }
            assert_eq!(snapshot.read(&table, 0).await.unwrap().data, Some(vec![1; LONG]), "seed {seed}");
            drop(snapshot);
            sweeper.leave().await.unwrap();
        });
    }
    assert!(overlapped.get() > 30, "nearly all sweeps ended before the commit: {overlapped:?}");
}

#[test]
fn blocks_of_a_chunk_are_given_out_only_once_its_class_is_in_far_memory() {
    let refused = Rc::new(Cell::new(0));
    for after in (0..150).map(|step| Duration::from_nanos(400 * step)) {
        let count = refused.clone();
        in_order_with(chunks(1), async move |run, worker| {
            let grant = grant_of(worker, run);
            let table = table(run, 0, grant);
            let (far, host) = far_worker(run, grant).await;
            let node = run.nodes[0].host;
            let (mut first, mut second) = (SessionState::new(), SessionState::new());
            let slow = far.begin(&mut first).await.unwrap();
            let transaction = worker.begin(&mut second).await.unwrap();
            let taking = slow.write(&table, 0, Some(&[1; LONG]));
            let meanwhile = async {
                run.world.sleep(after).await;
                run.world.cut(host, node);
                let written = transaction.write(&table, 0, Some(&[2; LONG])).await;
                let class = run.look(&run.slab_piece(0, OWNER), run.slab.unwrap().class(0));
                match written {
                    Ok(_) => assert_ne!(class, 0, "cut after {after:?}"),
                    Err(ReadError::NoSpace { .. }) => count.set(count.get() + 1),
                    Err(error) => panic!("cut after {after:?}: {error}"),
                }
                run.world.heal(host, node);
            };
            let (taken, ()) = join(taking, meanwhile).await;
            drop((taken, slow, transaction));
            far.leave().await.unwrap();
        });
    }
    assert!((10..140).contains(&refused.get()), "the cuts miss the moment: {refused:?}");
}

#[test]
fn a_chunk_that_changes_hands_during_a_search_is_left_to_its_living_owner() {
    let held = Rc::new(Cell::new(0));
    for after in (0..120).map(|step| Duration::from_nanos(100 * step)) {
        let count = held.clone();
        in_order_with(chunks(1), async move |run, worker| {
            let (second, grant) = second_member(run).await;
            // A member that is gone has left a chunk.
            let layout = run.slab.unwrap();
            let (piece, owner) = (run.slab_piece(0, OWNER), layout.owner(0));
            run.touch(piece.region, AccessKind::Write, &mut |memory| memory.store(piece.start + owner, 1));
            let table_of_first = table(run, 0, grant_of(worker, run));
            let mut session = SessionState::new();
            let transaction = worker.begin(&mut session).await.unwrap();
            let search = Box::pin(transaction.write(&table_of_first, 0, Some(&[1; LONG])));
            let Either::Right((_, search)) = select(search, Box::pin(run.world.sleep(after))).await else {
                return;
            };
            let table_of_second = table(run, 1, grant);
            let is_taken = write_once(&second, &table_of_second, &[2; LONG]).await.is_ok();
            let _ = search.await;
            if is_taken {
                assert_eq!(run.look(&piece, owner), grant.0, "held after {after:?}");
                count.set(count.get() + 1);
            }
            drop(transaction);
            second.leave().await.unwrap();
        });
    }
    assert!(held.get() > 10, "nearly all searches ended before they were held: {held:?}");
}

#[test]
fn chunks_of_a_member_without_a_seat_are_taken_over_with_their_payloads() {
    in_order_with(chunks(1), async |run, worker| {
        let table_of_first = table(run, 0, grant_of(worker, run));
        write(run, worker, &table_of_first, &[1; LONG]).await;
        let place = (run.nodes[0].host, Path::Shared);
        let grant = run.grant();
        let memory = run.access(run.world.add_process(place.0), place, grant).await.unwrap().memory;
        let slot = Slot::new(1).unwrap();
        let other = Worker::<Chosen>::new(memory, run.oracle(grant), run.logs(grant), slot, 0).unwrap();
        let other = other.announcing(run.horizon(grant), 3).await.unwrap().unwrap();
        let table = table(run, 1, grant);
        let mut old = SessionState::new();
        let snapshot = other.begin(&mut old).await.unwrap();
        let refused = write_once(&other, &table, &[2; LONG]).await;
        assert!(matches!(refused, Err(ReadError::NoSpace { .. })), "its owner has a seat: {refused:?}");
        // What the recoverer of the seat does.
        forget(other.memory(), &run.horizon(grant), 0..1).await.unwrap();
        run.seat(0, None);
        write(run, &other, &table, &[2; LONG]).await;
        assert_eq!(read(&other, &table).await, Some(vec![2; LONG]));
        assert_eq!(snapshot.read(&table, 0).await.unwrap().data, Some(vec![1; LONG]));
        let refused = write_once(&other, &table, &[3; LONG]).await;
        assert!(matches!(refused, Err(ReadError::NoSpace { .. })), "{refused:?}");
        drop(snapshot);
        write(run, &other, &table, &[3; LONG]).await;
        other.leave().await.unwrap();
    });
}
