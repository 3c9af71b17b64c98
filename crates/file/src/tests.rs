//! Files over a real broker and real nodes in this process.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use farpool_fabric::{Clock, Endpoint, EndpointConfig, Negotiated, OpError, TransportChoice};
use farpool_lease::Millis;
use farpool_pool::{EXTENT_BYTES, Pool, PoolConfig};
use farpool_testpool::{REGION_BYTES, Rig, wait_until};
use farpool_wire::{BLOCK_BYTES, Epoch, GrantMode, MAX_TRANSFER_BYTES, Refusal, RegionId, SessionId};
use futures_util::future::join;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::split::pieces;
use crate::{FarFile, FileError, FileStore, Redundancy, Session};

mod avoiding;
mod bare;
mod dead_client;
mod direct;
mod extents;
mod keeper;
mod keeping;
mod losses;
pub(crate) mod mover;
mod moving;
mod only_copy;
mod overflow;
mod repair;
mod row_parity;
mod row_write;
mod rows;
mod seek;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Stores on a [`Rig`].
trait Stores {
    fn store(&self, transport: TransportChoice) -> (FileStore, Session);

    /// Has every living node take back leases of a store, as [`Rig::take_back_from`] does.
    fn take_back(&self, store: &FileStore, count: u32, grace: Duration) -> u32;
}

impl Stores for Rig {
    fn store(&self, transport: TransportChoice) -> (FileStore, Session) {
        let store = FileStore::new(self.pool(transport)).unwrap();
        let session = store.session();
        (store, session)
    }

    fn take_back(&self, store: &FileStore, count: u32, grace: Duration) -> u32 {
        self.take_back_from(store.pool.owner(), count, grace)
    }
}

/// A clock that advances by a second at each reading.
#[derive(Default)]
pub(crate) struct Hasty(Cell<u64>);

impl Clock for Hasty {
    fn now_ns(&self) -> u64 {
        self.0.set(self.0.get() + 1_000_000_000);
        self.0.get()
    }
}

/// How much memory a file in memory takes, in the units of `stat`.
pub(crate) fn taken_blocks(memory: impl AsFd) -> i64 {
    rustix::fs::fstat(memory).unwrap().st_blocks
}

/// A clock that stands still: no sleep ever ends.
pub(crate) struct Stopped;

impl Clock for Stopped {
    fn now_ns(&self) -> u64 {
        0
    }
}

/// An endpoint that is connected to no node.
pub(crate) fn endpoint(clock: impl Clock + 'static) -> Endpoint {
    let deadline = Duration::from_secs(1);
    Endpoint::new(EndpointConfig {
        transport: Rc::new(Negotiated::new(TransportChoice::Tcp, deadline)),
        clock: Rc::new(clock),
        session_ids: Box::new(|| SessionId(1)),
        arena_bytes: MAX_TRANSFER_BYTES,
        deadline,
    })
}

fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    (0..bytes as u64).map(|place| (place.wrapping_mul(seed | 1) >> 3) as u8).collect()
}

fn read(file: &FarFile, session: &Session, offset: u64, length: usize) -> Result<Vec<u8>, FileError> {
    file.read(session, offset, length).map(|bytes| bytes.to_vec())
}

/// Puts bytes into far memory without changing the block words.
fn tamper(file: &FarFile, session: &Session, stripe: u64, offset: u64, bytes: &[u8]) {
    let extent = file.inner.map.read().extent(stripe).unwrap();
    let guard = session.lock();
    // SAFETY: the buffer and the future end here, before the guard.
    let core = unsafe { guard.core() };
    let mut buffer = core.buffer(bytes.len()).unwrap();
    buffer.copy_from_slice(bytes);
    guard.block_on(core.write(&extent, offset, buffer)).1.unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Write { offset: u64, bytes: usize, seed: u64 },
    Read { offset: u64, bytes: usize },
    SetSize(u64),
    Punch { offset: u64, bytes: u64 },
    Reserve { offset: u64, bytes: u64 },
}

/// Offsets near the boundaries of blocks and extents, where mistakes are likely.
fn places() -> impl Strategy<Value = u64> {
    let near = |unit: u64| (0..6u64, -2i64..=2).prop_map(move |(n, by)| (n * unit).saturating_add_signed(by));
    prop_oneof![near(EXTENT_BYTES), near(BLOCK), 0..3 * EXTENT_BYTES]
}

fn steps() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![
        1..100usize,
        8000..8400usize,
        1..700_000usize,
        Just(BLOCK_BYTES),
        Just(MAX_TRANSFER_BYTES)
    ];
    prop_oneof![
        4 => (places(), bytes.clone(), any::<u64>()).prop_map(|(offset, bytes, seed)| Step::Write { offset, bytes, seed }),
        4 => (places(), bytes).prop_map(|(offset, bytes)| Step::Read { offset, bytes }),
        1 => places().prop_map(Step::SetSize),
        1 => (places(), places()).prop_map(|(offset, bytes)| Step::Punch { offset, bytes }),
        1 => (places(), 0..EXTENT_BYTES).prop_map(|(offset, bytes)| Step::Reserve { offset, bytes }),
    ]
}

/// Carries out steps on a file and on a vector, and compares.
fn agrees_with_model(store: &FileStore, session: &Session, steps: Vec<Step>) -> Result<(), TestCaseError> {
    let file = store.create();
    let mut model: Vec<u8> = Vec::new();
    for step in steps {
        match step.clone() {
            Step::Write { offset, bytes, seed } => {
                let data = pattern(bytes, seed);
                file.write(session, offset, &data).unwrap();
                let end = offset as usize + bytes;
                model.resize(model.len().max(end), 0);
                model[offset as usize..end].copy_from_slice(&data);
            }
            Step::Read { offset, bytes } => {
                let start = (offset as usize).min(model.len());
                let end = (start + bytes).min(model.len());
                prop_assert!(read(&file, session, offset, bytes).unwrap() == model[start..end], "{:?}", step);
            }
            Step::SetSize(size) => {
                file.set_size(session, size).unwrap();
                model.resize(size as usize, 0);
            }
            Step::Punch { offset, bytes } => {
                file.punch(session, offset, bytes).unwrap();
                let end = ((offset + bytes) as usize).min(model.len());
                model[(offset as usize).min(end)..end].fill(0);
            }
            Step::Reserve { offset, bytes } => file.reserve(session, offset, bytes).unwrap(),
        }
        prop_assert_eq!(file.size(), model.len() as u64);
    }
    for (index, chunk) in model.chunks(MAX_TRANSFER_BYTES).enumerate() {
        let offset = (index * MAX_TRANSFER_BYTES) as u64;
        prop_assert!(read(&file, session, offset, chunk.len()).unwrap() == chunk, "at the end, {}", offset);
    }
    seek::holes_agree_with_model(&file, &model)
}

fn files_agree_with_a_model_over(transport: TransportChoice) {
    let rig = Rig::new(2, 16);
    let (store, session) = rig.store(transport);
    let mut runner = TestRunner::new(Config { cases: 60, failure_persistence: None, ..Config::default() });
    runner
        .run(&proptest::collection::vec(steps(), 1..30), |steps| agrees_with_model(&store, &session, steps))
        .unwrap();
}

#[test]
fn files_agree_with_a_model_over_shared_memory() {
    files_agree_with_a_model_over(TransportChoice::Shm);
}

#[test]
fn files_agree_with_a_model_over_tcp() {
    files_agree_with_a_model_over(TransportChoice::Tcp);
}

#[test]
fn a_damaged_block_is_an_error_and_its_neighbours_are_not() {
    let rig = Rig::new(1, 4);
    let (store, session) = rig.store(TransportChoice::Tcp);
    let file = store.create();
    file.write(&session, 0, &pattern(4 * BLOCK_BYTES, 3)).unwrap();
    tamper(&file, &session, 0, BLOCK + 100, &[0xFF, 0, 1]);
    assert_eq!(read(&file, &session, BLOCK, BLOCK_BYTES), Err(FileError::Damaged { offset: BLOCK }));
    assert!(read(&file, &session, 2 * BLOCK, BLOCK_BYTES).is_ok());
    assert_eq!(file.write(&session, BLOCK + 1, &[1]), Err(FileError::Damaged { offset: BLOCK }));
    file.write(&session, BLOCK, &pattern(BLOCK_BYTES, 5)).unwrap();
    assert_eq!(read(&file, &session, BLOCK, BLOCK_BYTES).unwrap(), pattern(BLOCK_BYTES, 5));
}

#[test]
fn swapped_and_replayed_blocks_do_not_pass() {
    let rig = Rig::new(1, 4);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    let (first, second) = (pattern(BLOCK_BYTES, 3), pattern(BLOCK_BYTES, 7));
    file.write(&session, 0, &first).unwrap();
    file.write(&session, BLOCK, &second).unwrap();
    tamper(&file, &session, 0, 0, &second);
    assert_eq!(read(&file, &session, 0, 1), Err(FileError::Damaged { offset: 0 }));
    file.write(&session, 0, &second).unwrap();
    tamper(&file, &session, 0, 0, &first);
    assert_eq!(read(&file, &session, 0, 1), Err(FileError::Damaged { offset: 0 }));
}

#[test]
fn a_session_without_free_memory_reports_that_and_not_a_request_that_is_too_long() {
    let rig = Rig::new(1, 4);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    file.write(&session, 0, &pattern(BLOCK_BYTES, 3)).unwrap();
    let guard = session.lock();
    // SAFETY: the buffers and the future end here, before the guard.
    let core = unsafe { guard.core() };
    let taken: Vec<_> = std::iter::from_fn(|| core.buffer(BLOCK_BYTES).ok()).collect();
    assert_eq!(guard.block_on(file.inner.read(core, 0, BLOCK_BYTES)).err(), Some(FileError::NoStaging));
    drop(taken);
    assert!(guard.block_on(file.inner.read(core, 0, BLOCK_BYTES)).is_ok());
}

#[test]
fn an_extent_used_again_shows_nothing_of_its_last_file() {
    let rig = Rig::new(1, 2);
    let (store, session) = rig.store(TransportChoice::Shm);
    for round in 0..20 {
        let file = store.create();
        file.write(&session, 100, &[round]).unwrap();
        let mut expected = vec![0; 101];
        expected[100] = round;
        assert_eq!(read(&file, &session, 0, 200).unwrap(), expected);
        file.set_size(&session, EXTENT_BYTES).unwrap();
        assert!(read(&file, &session, 101, 20_000).unwrap().iter().all(|&byte| byte == 0));
        file.write(&session, 0, &[0xEE; 20_000]).unwrap();
    }
}

#[test]
fn a_file_s_redundancy_can_be_chosen_while_it_has_neither_a_size_nor_extents() {
    let rig = Rig::new(2, 2);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    assert!(file.set_redundancy(Redundancy::Mirror) && file.redundancy() == Redundancy::Mirror);
    file.set_size(&session, 1).unwrap();
    assert!(!file.set_redundancy(Redundancy::Stripe) && file.redundancy() == Redundancy::Mirror);
    file.set_size(&session, 0).unwrap();
    assert!(file.set_redundancy(Redundancy::Stripe) && file.redundancy() == Redundancy::Stripe);
}

#[test]
fn a_full_pool_refuses_writes_and_deleting_makes_room() {
    let rig = Rig::new(2, 2);
    let (store, session) = rig.store(TransportChoice::Shm);
    let total = 4 * REGION_BYTES;
    let file = store.create();
    file.write(&session, 0, &pattern(MAX_TRANSFER_BYTES, 3)).unwrap();
    assert_eq!(file.reserve(&session, 0, 2 * total), Err(FileError::NoSpace));
    let mut offset = MAX_TRANSFER_BYTES as u64;
    let full = loop {
        match file.write(&session, offset, &[1; BLOCK_BYTES]) {
            Ok(()) => offset += EXTENT_BYTES,
            Err(error) => break error,
        }
    };
    assert_eq!((full, offset), (FileError::NoSpace, total));
    assert!(file.write(&session, 0, &[2; BLOCK_BYTES]).is_ok(), "what is allocated can still be written");
    assert!(read(&file, &session, BLOCK, BLOCK_BYTES).is_ok());
    drop(file);
    let other = store.create();
    assert!(other.write(&session, 0, &[3; BLOCK_BYTES]).is_ok());
}

#[test]
fn truncating_and_deleting_give_memory_back_to_other_owners() {
    let rig = Rig::new(1, 4);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    for place in 0..4 {
        file.write(&session, place * REGION_BYTES, &pattern(MAX_TRANSFER_BYTES, place)).unwrap();
    }
    let (other_store, other_session) = rig.store(TransportChoice::Tcp);
    let other = other_store.create();
    assert_eq!(other.write(&other_session, 0, &[1; BLOCK_BYTES]), Err(FileError::NoSpace));
    file.set_size(&session, 10).unwrap();
    assert_eq!(file.allocated_bytes(), EXTENT_BYTES);
    drop(file);
    drop((session, store));
    wait_until(|| other.write(&other_session, 0, &[1; BLOCK_BYTES]).is_ok());
    assert_eq!(read(&other, &other_session, 0, 1).unwrap(), [1]);
}

#[test]
fn what_could_not_be_stored_stays_an_error_until_written_anew() {
    let rig = Rig::new(1, 2);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    file.write(&session, 0, &[1; 3 * BLOCK_BYTES]).unwrap();
    file.mark_lost(BLOCK + 5, 10, FileError::Unavailable { offset: 0 });
    assert_eq!(read(&file, &session, BLOCK, 1), Err(FileError::Lost { offset: BLOCK }));
    assert_eq!(file.write(&session, BLOCK, &[2]), Err(FileError::Lost { offset: BLOCK }));
    assert!(read(&file, &session, 2 * BLOCK, 1).is_ok());
    file.write(&session, BLOCK, &[2; BLOCK_BYTES]).unwrap();
    assert_eq!(read(&file, &session, BLOCK, 1).unwrap(), [2]);
    let end = file.size();
    file.mark_lost(end + BLOCK, 10, FileError::Unavailable { offset: 0 });
    assert_eq!(file.size(), end + BLOCK + 10);
    assert_eq!(read(&file, &session, end + BLOCK, 10), Err(FileError::Lost { offset: end + BLOCK }));
    assert_eq!(read(&file, &session, end, 10).unwrap(), [0; 10]);
    file.mark_lost(0, 1, FileError::Unavailable { offset: 0 });
    file.punch(&session, 0, BLOCK).unwrap();
    assert_eq!(read(&file, &session, 0, 1).unwrap(), [0]);
}

#[test]
fn writing_the_other_half_of_a_block_that_found_no_room_fails_with_no_space() {
    let rig = Rig::new(1, 2);
    let (store, session) = rig.store(TransportChoice::Shm);
    for redundancy in [Redundancy::None, Redundancy::Stripe] {
        let file = store.create_as(redundancy);
        file.write(&session, 0, &[1; 3 * BLOCK_BYTES]).unwrap();
        file.mark_lost(BLOCK, BLOCK / 2, FileError::NoSpace);
        let half = [2; BLOCK_BYTES / 2];
        assert_eq!(file.write(&session, BLOCK + BLOCK / 2, &half), Err(FileError::NoSpace));
        assert_eq!(read(&file, &session, BLOCK, 1), Err(FileError::Lost { offset: BLOCK }));
        // Losing a node later does not change the first reason.
        file.mark_lost(BLOCK, BLOCK, FileError::Lost { offset: BLOCK });
        assert_eq!(file.write(&session, BLOCK, &half), Err(FileError::NoSpace));
        file.write(&session, BLOCK, &[2; BLOCK_BYTES]).unwrap();
        assert_eq!(read(&file, &session, BLOCK, 1).unwrap(), [2]);
    }
}

fn losing_a_node_is_an_error_at_once_over(transport: TransportChoice) {
    let mut rig = Rig::new(2, 8);
    let (store, session) = rig.store(transport);
    let file = store.create();
    file.write(&session, 0, &pattern(MAX_TRANSFER_BYTES, 9)).unwrap();
    rig.kill_node(0);
    let started = Instant::now();
    let mut lost = Vec::new();
    wait_until(|| {
        // The node may be given up between two of these reads, so the test waits for all of its stripes.
        lost = (0..4).filter(|stripe| read(&file, &session, stripe * EXTENT_BYTES, 1).is_err()).collect();
        lost.len() >= 2
    });
    assert!(started.elapsed() < 2 * farpool_pool::NODE_DEADLINE, "{:?}", started.elapsed());
    assert_eq!(lost.len(), 2, "the stripes of the other node are still there");
    let started = Instant::now();
    for _ in 0..1000 {
        assert!(read(&file, &session, lost[0] * EXTENT_BYTES, 1).is_err());
    }
    assert!(started.elapsed() < farpool_pool::NODE_DEADLINE, "one deadline per node, not per call");
    let fresh = store.create();
    fresh.write(&session, 0, &pattern(MAX_TRANSFER_BYTES, 4)).unwrap();
    assert!(read(&fresh, &session, 0, MAX_TRANSFER_BYTES).unwrap() == pattern(MAX_TRANSFER_BYTES, 4));
}

#[test]
fn losing_a_node_is_an_error_at_once_over_shared_memory() {
    losing_a_node_is_an_error_at_once_over(TransportChoice::Shm);
}

#[test]
fn losing_a_node_is_an_error_at_once_over_tcp() {
    losing_a_node_is_an_error_at_once_over(TransportChoice::Tcp);
}

#[test]
fn a_lost_extent_that_cannot_be_written_anew_stays_lost() {
    let mut rig = Rig::new(1, 2);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    let whole = pattern(EXTENT_BYTES as usize, 3);
    file.write(&session, 0, &whole).unwrap();
    rig.kill_node(0);
    wait_until(|| read(&file, &session, 0, 1).is_err());
    assert!(file.write(&session, 0, &whole).is_err(), "there is no other node");
    assert_eq!(read(&file, &session, 0, 1), Err(FileError::Lost { offset: 0 }));
}

/// A file of four stripes of which two lie on a node that was killed.
fn half_lost(transport: TransportChoice) -> (Rig, FileStore, Session, FarFile) {
    let mut rig = Rig::new(2, 16);
    let (store, session) = rig.store(transport);
    let file = store.create();
    file.write(&session, 0, &pattern(MAX_TRANSFER_BYTES, 9)).unwrap();
    rig.kill_node(0);
    let lost = |stripe| read(&file, &session, stripe * EXTENT_BYTES, 1).is_err();
    wait_until(|| (0..4).filter(|&stripe| lost(stripe)).count() == 2);
    (rig, store, session, file)
}

#[test]
fn failing_reads_leave_a_session_as_good_as_before() {
    let (_rig, store, session, file) = half_lost(TransportChoice::Tcp);
    for _ in 0..40 {
        assert!(read(&file, &session, 0, MAX_TRANSFER_BYTES).is_err());
    }
    let healthy = store.create();
    healthy.write(&session, 0, &pattern(MAX_TRANSFER_BYTES, 4)).unwrap();
    assert!(read(&healthy, &session, 0, MAX_TRANSFER_BYTES).unwrap() == pattern(MAX_TRANSFER_BYTES, 4));
}

#[test]
fn truncating_a_file_with_losses_leaves_no_old_contents() {
    let (_rig, _store, session, file) = half_lost(TransportChoice::Shm);
    file.set_size(&session, 100).unwrap();
    assert_eq!(file.allocated_bytes(), EXTENT_BYTES);
    file.set_size(&session, MAX_TRANSFER_BYTES as u64).unwrap();
    for offset in (BLOCK..MAX_TRANSFER_BYTES as u64).step_by(BLOCK_BYTES) {
        assert_eq!(read(&file, &session, offset, BLOCK_BYTES).unwrap(), [0; BLOCK_BYTES], "offset {offset}");
    }
    // The first block is lost, or it holds what it held: never anything else.
    if let Ok(bytes) = read(&file, &session, 0, 200) {
        assert_eq!(bytes[..100], pattern(100, 9));
        assert_eq!(bytes[100..], [0; 100]);
    }
}

#[test]
fn a_truncation_that_overtakes_another_leaves_no_loss_in_what_both_cleared() {
    let rig = Rig::new(1, 2);
    let (store, session) = rig.store(TransportChoice::Tcp);
    let file = store.create();
    file.write(&session, 0, &pattern(4 * BLOCK_BYTES, 3)).unwrap();
    let extent = file.inner.map.read().extent(0).unwrap();
    let second = store.core().words.place(&extent, 1);
    store.core().words.store(second, store.core().words.load(second).lost());
    let guard = session.lock();
    // SAFETY: the buffers and futures end in `block_on`, before the guard.
    let core = unsafe { guard.core() };
    // The first one waits for the node in block 0, and clears block 1 as a whole only afterwards. The second
    // one finds block 1 lost, and cannot clear a part of it.
    let both = join(file.inner.set_size(core, 100), file.inner.set_size(core, BLOCK + 100));
    let (first, second) = guard.block_on(both);
    drop(guard);
    first.unwrap();
    second.unwrap();
    assert_eq!(file.size(), BLOCK + 100);
    assert_eq!(read(&file, &session, BLOCK, 100).unwrap(), [0; 100]);
}

#[test]
fn lost_extents_written_anew_as_a_whole_lie_elsewhere() {
    let (_rig, _store, session, file) = half_lost(TransportChoice::Shm);
    file.write(&session, 0, &pattern(MAX_TRANSFER_BYTES, 5)).unwrap();
    assert!(read(&file, &session, 0, MAX_TRANSFER_BYTES).unwrap() == pattern(MAX_TRANSFER_BYTES, 5));
}

#[test]
fn reservation_that_fails_keeps_what_was_written_meanwhile() {
    let rig = Rig::new(1, 2);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    std::thread::scope(|scope| {
        let (file, store) = (&file, &store);
        scope.spawn(move || {
            let session = store.session();
            for _ in 0..10 {
                assert_eq!(file.reserve(&session, 0, 64 * REGION_BYTES), Err(FileError::NoSpace));
            }
        });
        for round in 0..200u64 {
            let offset = (round % 4) * EXTENT_BYTES;
            // If the other thread has taken all room, nothing was written; else it must be there.
            if file.write(&session, offset, &[round as u8; BLOCK_BYTES]).is_ok() {
                assert_eq!(read(file, &session, offset, BLOCK_BYTES).unwrap(), [round as u8; BLOCK_BYTES]);
            }
        }
    });
}

#[test]
fn readers_see_whole_blocks_while_writers_change_them() {
    let rig = Rig::new(2, 8);
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let (store, session) = rig.store(transport);
        let file = store.create();
        file.write(&session, 0, &[0; 64 * BLOCK_BYTES]).unwrap();
        std::thread::scope(|scope| {
            for writer in 1..=2u8 {
                let (file, session) = (file.clone(), store.session());
                scope.spawn(move || {
                    for round in 0..200u64 {
                        let block = (round * 7 + writer as u64) % 64;
                        let data = [writer.wrapping_mul(100).wrapping_add(round as u8); BLOCK_BYTES];
                        file.write(&session, block * BLOCK, &data).unwrap();
                    }
                });
            }
            for _ in 0..200 {
                for block in read(&file, &session, 0, 64 * BLOCK_BYTES).unwrap().chunks(BLOCK_BYTES) {
                    assert!(block.iter().all(|&byte| byte == block[0]), "a torn block passed");
                }
            }
        });
    }
}

#[test]
fn impossible_ranges_are_refused() {
    let rig = Rig::new(1, 1);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    assert_eq!(file.write(&session, u64::MAX - 1, &[1; 10]), Err(FileError::TooLarge));
    assert_eq!(file.set_size(&session, u64::MAX), Err(FileError::TooLarge));
    assert_eq!(file.punch(&session, u64::MAX, 1), Err(FileError::TooLarge));
    assert_eq!(file.write(&session, 0, &vec![0; MAX_TRANSFER_BYTES + 1]), Err(FileError::TooLong));
    assert_eq!(read(&file, &session, u64::MAX, 10).unwrap(), []);
    file.set_size(&session, crate::MAX_FILE_BYTES).unwrap();
    assert_eq!(read(&file, &session, crate::MAX_FILE_BYTES - 5, 100).unwrap(), [0; 5]);
}

#[test]
fn files_continue_when_a_client_is_admitted_to_their_region_and_fenced() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let rig = Rig::new(1, 2);
        let (store, session) = rig.store(transport);
        let file = store.create();
        file.write(&session, 0, &pattern(MAX_TRANSFER_BYTES, 6)).unwrap();
        let region = file.inner.map.read().extent(0).unwrap().region().clone();
        let pool = &store.pool;
        let client = store.session();
        let client = client.lock();
        for _ in 0..3 {
            let (grant, usable_for) = client.block_on(pool.add_grant(&region, GrantMode::ReadWrite)).unwrap();
            assert!(usable_for > Millis(0));
            // SAFETY: the queue ends within this round, before the guard.
            let queue = unsafe { client.core() }.endpoint().open(region.node.peer.clone()).unwrap();
            client.block_on(queue.attach(grant.region, grant.epoch, grant.key)).unwrap();
            client.block_on(pool.fence_grant(&region, grant.epoch)).unwrap();
            let again = client.block_on(queue.attach(grant.region, grant.epoch, grant.key));
            assert_eq!(again, Err(OpError::Refused(Refusal::StaleEpoch)));
            assert!(read(&file, &session, 0, MAX_TRANSFER_BYTES).unwrap() == pattern(MAX_TRANSFER_BYTES, 6));
            file.write(&session, 0, &pattern(MAX_TRANSFER_BYTES, 6)).unwrap();
        }
    }
}

/// Regions in which a file's extents lie.
fn regions_of(file: &FarFile) -> BTreeSet<(RegionId, Epoch)> {
    let map = file.inner.map.read();
    let extents = map.stripes(0, u64::MAX).into_iter().filter_map(|stripe| map.extent(stripe));
    extents.map(|extent| (extent.region().id, extent.region().epoch)).collect()
}

#[test]
fn files_move_out_of_regions_that_are_taken_back_while_they_are_written() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let rig = Rig::new(2, 8);
        let (store, session) = rig.store(transport);
        let (quiet, busy) = (store.create(), store.create());
        quiet.write(&session, 0, &pattern(MAX_TRANSFER_BYTES, 8)).unwrap();
        busy.write(&session, 0, &[0; 2 * BLOCK_BYTES]).unwrap();
        let before = regions_of(&quiet);
        let old = quiet.inner.map.read().extent(0).unwrap();
        // The store may still be getting regions; the last ones are taken back first.
        let mut taken = 0;
        wait_until(|| match rig.take_back(&store, 16, Duration::from_secs(600)) {
            0 => true,
            more => {
                taken += more;
                false
            }
        });
        assert!(taken as usize >= before.len(), "only {taken} leases were taken back");
        let mut round = 0u8;
        wait_until(|| {
            round = round.wrapping_add(1);
            if round == 0 {
                // A node that had no time to answer the first time has revoked nothing yet.
                rig.take_back(&store, 16, Duration::from_secs(600));
            }
            busy.write(&session, BLOCK / 2, &[round; BLOCK_BYTES]).unwrap();
            assert_eq!(read(&busy, &session, BLOCK / 2, BLOCK_BYTES).unwrap(), [round; BLOCK_BYTES]);
            regions_of(&quiet).union(&regions_of(&busy)).all(|region| !before.contains(region))
        });
        {
            let guard = session.lock();
            // SAFETY: the future ends in `block_on`, before the guard.
            let core = unsafe { guard.core() };
            let piece = pieces(0, BLOCK).next().unwrap();
            let late = guard.block_on(quiet.inner.store_piece(core, piece, &old, |target| target.fill(1)));
            assert_eq!(
                late,
                Ok(crate::write::Stored::Elsewhere),
                "a writer that comes late finds that the extent was moved"
            );
        }
        assert!(read(&quiet, &session, 0, MAX_TRANSFER_BYTES).unwrap() == pattern(MAX_TRANSFER_BYTES, 8));
        assert_eq!(read(&busy, &session, 0, BLOCK_BYTES / 2).unwrap(), [0; BLOCK_BYTES / 2]);
    }
}

#[test]
fn an_extent_that_cannot_be_moved_serves_until_its_lease_ends_and_is_an_error_then() {
    let rig = Rig::new(1, 1);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    file.write(&session, 0, &pattern(MAX_TRANSFER_BYTES, 8)).unwrap();
    assert_eq!(rig.take_back(&store, 1, Duration::ZERO), 1);
    wait_until(|| match read(&file, &session, 0, MAX_TRANSFER_BYTES) {
        Ok(bytes) => {
            assert!(bytes == pattern(MAX_TRANSFER_BYTES, 8));
            false
        }
        Err(error) => matches!(error, FileError::Lost { .. }),
    });
    wait_until(|| !store.pool.is_to_leave());
}
