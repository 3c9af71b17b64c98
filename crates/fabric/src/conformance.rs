//! The contract, as tests that every transport passes unchanged.
//!
//! A transport's test file implements [`Carrier`] and lists [`CHECKS`] with [`conformance_tests!`]. A check
//! panics when the transport breaks its promise. What is promised is written in `docs/fabric.md`.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farpool_wire::{AccessKey, Epoch, MAX_TRANSFER_BYTES, NodeId, Refusal, RegionId, RemoteAddr, SessionId};
use futures_util::future::join_all;

use crate::{
    AccessError, ArenaBuf, Cut, Endpoint, EndpointConfig, Host, HostIdentity, LentMemory, Mapping, MonotonicClock, OpError,
    Peer, Queue, RegionSet, SharedRegion, Transport, block_on,
};

/// How the suite gets at a transport.
pub trait Carrier: Sync {
    /// Serves `host` until the guard is dropped; dropping it stands for the death of the node.
    fn serve(&self, host: Arc<SuiteHost>) -> (Peer, Box<dyn Any>);

    /// Opens links to peers that [`Carrier::serve`] returned.
    fn transport(&self) -> Rc<dyn Transport>;
}

/// Makes one `#[test]` of each check for the carrier that an expression gives.
#[macro_export]
macro_rules! conformance_tests {
    ($carrier:expr; $($check:ident),* $(,)?) => {
        $(#[test]
        fn $check() {
            $crate::conformance::$check(&$carrier);
        })*

        #[test]
        fn every_check_of_the_suite_is_listed() {
            let listed = [$(stringify!($check)),*];
            assert_eq!(listed.as_slice(), $crate::conformance::CHECKS);
        }
    };
}

/// Names of all checks, so that a transport cannot leave one out unnoticed.
pub const CHECKS: &[&str] = &[
    "bytes_written_are_read_back",
    "a_completed_write_is_seen_by_every_queue",
    "the_largest_transfer_works_and_a_larger_one_is_refused",
    "out_of_bounds_is_refused_and_changes_nothing",
    "misaligned_atomics_are_refused",
    "a_region_that_was_not_attached_is_refused",
    "a_wrong_key_is_refused",
    "an_old_epoch_is_refused",
    "a_detached_region_is_refused",
    "compare_and_swap_swaps_only_on_equality",
    "fetch_and_add_loses_no_addition_under_contention",
    "more_operations_than_places_all_complete",
    "a_dropped_operation_does_not_free_its_buffer_early",
    "more_answers_than_a_connection_may_hold_back_all_come",
    "calls_are_answered_and_unknown_calls_refused",
    "what_was_acknowledged_before_a_fence_stays_and_nothing_follows_it",
    "a_lent_again_region_shows_nothing_of_its_last_holder",
    "an_older_incarnation_is_dead_once_a_newer_one_is_answered",
    "the_death_of_the_node_ends_every_operation",
    "a_silent_node_ends_operations_by_their_deadline",
    "hundreds_of_queues_come_and_go",
];

const NODE: NodeId = NodeId(0xF00D);
const KEY: AccessKey = AccessKey::from_bytes([0x5A; 16]);
const REGIONS: u32 = 2;
const REGION_BYTES: u64 = 4 << 20;
const EPOCH: Epoch = Epoch(1);
const DEADLINE: Duration = Duration::from_secs(20);
const ECHO: &[u8] = b"echo ";

/// The node of the suite: two regions, of which the first is lent, and a call that echoes.
pub struct SuiteHost {
    regions: RegionSet,
    /// While set, calls wait: stands for a node that has stopped.
    stalled: AtomicBool,
    rejected: AtomicU64,
}

impl SuiteHost {
    fn new() -> Arc<Self> {
        let regions = RegionSet::create(REGIONS, REGION_BYTES, false, |_| {}).expect("a few MiB of memory");
        regions.open(0, EPOCH, KEY);
        Arc::new(SuiteHost { regions, stalled: AtomicBool::new(false), rejected: AtomicU64::new(0) })
    }

    /// How many connections were cut off for malformed input.
    pub fn rejected_connections(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }
}

impl Host for SuiteHost {
    fn identity(&self) -> HostIdentity {
        HostIdentity { node: NODE, region_bytes: REGION_BYTES, regions: REGIONS }
    }

    fn attach(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<(), Refusal> {
        self.regions.check(region, epoch, key)
    }

    fn with_region(
        &self,
        region: u32,
        epoch: Epoch,
        access: &mut dyn FnMut(&Mapping) -> Result<(), AccessError>,
    ) -> Result<(), Refusal> {
        self.regions.with_region(region, epoch, access)
    }

    fn share(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<SharedRegion, Refusal> {
        self.regions.share(region, epoch, key)
    }

    fn lend(
        &self,
        region: u32,
        epoch: Epoch,
        key: &AccessKey,
        cut: Arc<dyn Cut>,
    ) -> Result<LentMemory, Refusal> {
        self.regions.lend(region, epoch, key, cut)
    }

    fn call(&self, request: &[u8], answer: &mut Vec<u8>) -> Result<(), Refusal> {
        while self.stalled.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let message = request.strip_prefix(ECHO).ok_or(Refusal::UnknownCall)?;
        answer.extend_from_slice(message);
        Ok(())
    }

    fn rejected(&self) {
        self.rejected.fetch_add(1, Ordering::Relaxed);
    }
}

/// A served host and a client's endpoint.
struct Rig {
    host: Arc<SuiteHost>,
    peer: Peer,
    guard: Option<Box<dyn Any>>,
    endpoint: Endpoint,
}

impl Rig {
    fn new(carrier: &dyn Carrier) -> Self {
        Self::with_deadline(carrier, DEADLINE)
    }

    fn with_deadline(carrier: &dyn Carrier, deadline: Duration) -> Self {
        let host = SuiteHost::new();
        let (peer, guard) = carrier.serve(host.clone());
        Rig { host, peer, guard: Some(guard), endpoint: endpoint(carrier, deadline) }
    }

    fn open(&self) -> Queue {
        self.endpoint.open(self.peer.clone()).expect("the node listens")
    }

    fn attached(&self) -> Queue {
        let queue = self.open();
        block_on(&self.endpoint, queue.attach(region(0), EPOCH, KEY)).expect("the key is right");
        queue
    }

    fn write(&self, queue: &Queue, offset: u64, data: &[u8]) -> Result<(), OpError> {
        let buffer = self.buffer(data);
        block_on(&self.endpoint, queue.write(at(offset), EPOCH, buffer)).1
    }

    fn read(&self, queue: &Queue, offset: u64, bytes: usize) -> Result<Vec<u8>, OpError> {
        let buffer = self.endpoint.arena().take(bytes).expect("arena has room");
        let (buffer, result) = block_on(&self.endpoint, queue.read(at(offset), EPOCH, buffer));
        result.map(|()| buffer.to_vec())
    }

    fn buffer(&self, data: &[u8]) -> ArenaBuf {
        let mut buffer = self.endpoint.arena().take(data.len()).expect("arena has room");
        buffer.copy_from_slice(data);
        buffer
    }

    fn far_byte(&self, offset: u64) -> u8 {
        let mut byte = [0];
        self.host.regions.with_region(0, EPOCH, &mut |memory| memory.read(offset, &mut byte)).expect("open");
        byte[0]
    }
}

fn endpoint(carrier: &dyn Carrier, deadline: Duration) -> Endpoint {
    static NEXT_SESSION: AtomicU64 = AtomicU64::new(1);
    Endpoint::new(EndpointConfig {
        transport: carrier.transport(),
        clock: Rc::new(MonotonicClock::new()),
        session_ids: Box::new(|| SessionId(NEXT_SESSION.fetch_add(1, Ordering::Relaxed))),
        arena_bytes: 4 << 20,
        deadline,
    })
}

fn region(index: u32) -> RegionId {
    RegionId { node: NODE, index }
}

fn at(offset: u64) -> RemoteAddr {
    RemoteAddr { region: region(0), offset }
}

fn refused(refusal: Refusal) -> OpError {
    OpError::Refused(refusal)
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|place| (place as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

#[allow(missing_docs)] // the names say it
mod checks {
    use super::*;

    pub fn bytes_written_are_read_back(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let queue = rig.attached();
        for (bytes, offset) in [(1, 5), (8, 64), (100, 1001), (8192, 8192), (8193, 3), (300_000, 7)] {
            let data = pattern(bytes, offset as u8);
            rig.write(&queue, offset, &data).unwrap();
            assert!(rig.read(&queue, offset, bytes).unwrap() == data, "{bytes} bytes at {offset}");
        }
    }

    pub fn a_completed_write_is_seen_by_every_queue(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let (one, other) = (rig.attached(), rig.attached());
        for round in 0..100 {
            let data = pattern(8192, round);
            rig.write(&one, 8192, &data).unwrap();
            assert!(rig.read(&other, 8192, 8192).unwrap() == data, "round {round}");
        }
    }

    pub fn the_largest_transfer_works_and_a_larger_one_is_refused(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let queue = rig.attached();
        let data = pattern(MAX_TRANSFER_BYTES, 3);
        rig.write(&queue, 0, &data).unwrap();
        assert!(rig.read(&queue, 0, MAX_TRANSFER_BYTES).unwrap() == data);
        assert_eq!(rig.read(&queue, 0, MAX_TRANSFER_BYTES + 1).unwrap_err(), refused(Refusal::TooLong));
        let data = pattern(MAX_TRANSFER_BYTES + 1, 4);
        assert_eq!(rig.write(&queue, 0, &data).unwrap_err(), refused(Refusal::TooLong));
    }

    pub fn out_of_bounds_is_refused_and_changes_nothing(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let queue = rig.attached();
        let data = pattern(8192, 1);
        for offset in [REGION_BYTES - 8191, REGION_BYTES, u64::MAX - 100] {
            assert_eq!(rig.write(&queue, offset, &data).unwrap_err(), refused(Refusal::OutOfBounds));
            assert_eq!(rig.read(&queue, offset, 8192).unwrap_err(), refused(Refusal::OutOfBounds));
        }
        let swap = queue.compare_and_swap(at(REGION_BYTES), EPOCH, 0, 1);
        assert_eq!(block_on(&rig.endpoint, swap).unwrap_err(), refused(Refusal::OutOfBounds));
        assert_eq!(rig.far_byte(REGION_BYTES - 1), 0);
        assert!(rig.write(&queue, REGION_BYTES - 8192, &data).is_ok(), "the queue goes on");
    }

    pub fn misaligned_atomics_are_refused(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let queue = rig.attached();
        let swap = block_on(&rig.endpoint, queue.compare_and_swap(at(4), EPOCH, 0, 1));
        assert_eq!(swap.unwrap_err(), refused(Refusal::Misaligned));
        let add = block_on(&rig.endpoint, queue.fetch_and_add(at(9), EPOCH, 1));
        assert_eq!(add.unwrap_err(), refused(Refusal::Misaligned));
        assert_eq!(rig.far_byte(4), 0);
    }

    pub fn a_region_that_was_not_attached_is_refused(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let queue = rig.open();
        assert_eq!(rig.read(&queue, 0, 8).unwrap_err(), refused(Refusal::NotAttached));
        assert_eq!(rig.write(&queue, 0, &[1; 8]).unwrap_err(), refused(Refusal::NotAttached));
        let other = rig.attached();
        assert_eq!(rig.read(&queue, 0, 8).unwrap_err(), refused(Refusal::NotAttached));
        assert!(rig.read(&other, 0, 8).is_ok());
    }

    pub fn a_wrong_key_is_refused(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let queue = rig.open();
        let wrong = AccessKey::from_bytes([0x5B; 16]);
        let attach = block_on(&rig.endpoint, queue.attach(region(0), EPOCH, wrong));
        assert_eq!(attach.unwrap_err(), refused(Refusal::WrongKey));
        assert_eq!(rig.read(&queue, 0, 8).unwrap_err(), refused(Refusal::NotAttached));
    }

    pub fn an_old_epoch_is_refused(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        rig.host.regions.fence(0);
        rig.host.regions.scrub(0).unwrap();
        rig.host.regions.open(0, Epoch(2), KEY);
        let queue = rig.open();
        let attach = block_on(&rig.endpoint, queue.attach(region(0), EPOCH, KEY));
        assert_eq!(attach.unwrap_err(), refused(Refusal::StaleEpoch));
        block_on(&rig.endpoint, queue.attach(region(0), Epoch(2), KEY)).unwrap();
        assert_eq!(rig.read(&queue, 0, 8).unwrap_err(), refused(Refusal::StaleEpoch));
    }

    pub fn a_detached_region_is_refused(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let queue = rig.attached();
        block_on(&rig.endpoint, queue.detach(region(0), EPOCH)).unwrap();
        assert_eq!(rig.read(&queue, 0, 8).unwrap_err(), refused(Refusal::NotAttached));
    }

    pub fn compare_and_swap_swaps_only_on_equality(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let queue = rig.attached();
        let swap = |expected, new| {
            block_on(&rig.endpoint, queue.compare_and_swap(at(4096), EPOCH, expected, new)).unwrap()
        };
        assert_eq!(swap(0, 10), 0);
        assert_eq!(swap(0, 11), 10);
        assert_eq!(swap(10, u64::MAX), 10);
        let add = block_on(&rig.endpoint, queue.fetch_and_add(at(4096), EPOCH, 2)).unwrap();
        assert_eq!(add, u64::MAX);
        assert_eq!(rig.read(&queue, 4096, 8).unwrap(), 1u64.to_le_bytes());
    }

    pub fn fetch_and_add_loses_no_addition_under_contention(carrier: &dyn Carrier) {
        const THREADS: u64 = 3;
        const ADDITIONS: u64 = 500;
        let rig = Rig::new(carrier);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                let peer = rig.peer.clone();
                scope.spawn(move || {
                    let endpoint = endpoint(carrier, DEADLINE);
                    let queue = endpoint.open(peer).unwrap();
                    block_on(&endpoint, queue.attach(region(0), EPOCH, KEY)).unwrap();
                    for _ in 0..ADDITIONS {
                        block_on(&endpoint, queue.fetch_and_add(at(8), EPOCH, 1)).unwrap();
                    }
                });
            }
        });
        let queue = rig.attached();
        assert_eq!(rig.read(&queue, 8, 8).unwrap(), (THREADS * ADDITIONS).to_le_bytes());
    }

    pub fn more_operations_than_places_all_complete(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let queue = rig.attached();
        let count = 3 * crate::MAX_IN_FLIGHT as u64;
        let all = join_all((0..count).map(|place| {
            let buffer = rig.buffer(&pattern(64, place as u8));
            queue.write(at(place * 64), EPOCH, buffer)
        }));
        assert!(block_on(&rig.endpoint, all).into_iter().all(|(_, result)| result.is_ok()));
        let all = join_all((0..count).map(|place| {
            queue.read(at(place * 64), EPOCH, rig.endpoint.arena().take(64).expect("buffers came back"))
        }));
        for (place, (buffer, result)) in block_on(&rig.endpoint, all).into_iter().enumerate() {
            result.unwrap();
            assert_eq!(&buffer[..], pattern(64, place as u8), "place {place}");
        }
    }

    pub fn a_dropped_operation_does_not_free_its_buffer_early(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let queue = rig.attached();
        rig.write(&queue, 0, &pattern(8192, 9)).unwrap();
        for _ in 0..50 {
            // Posted, then given up; whatever buffer is taken next must not be written by the late answer.
            let buffer = rig.endpoint.arena().take(8192).unwrap();
            block_on(&rig.endpoint, async {
                let given_up = queue.read(at(0), EPOCH, buffer);
                futures_util::pin_mut!(given_up);
                let once = futures_util::future::poll_fn(|context| {
                    let _ = given_up.as_mut().poll(context);
                    std::task::Poll::Ready(())
                });
                once.await;
            });
            let mine = rig.buffer(&[0x77; 8192]);
            rig.read(&queue, 8192, 8192).unwrap();
            assert!(mine.iter().all(|&byte| byte == 0x77));
        }
    }

    pub fn more_answers_than_a_connection_may_hold_back_all_come(carrier: &dyn Carrier) {
        const READS: u64 = 12;
        const BYTES: usize = 256 << 10;
        let rig = Rig::new(carrier);
        let queue = rig.attached();
        for round in 0..20 {
            let all = join_all((0..READS).map(|place| {
                let buffer = rig.endpoint.arena().take(BYTES).expect("buffers came back");
                queue.read(at(place * BYTES as u64), EPOCH, buffer)
            }));
            let ended = block_on(&rig.endpoint, all);
            assert!(ended.iter().all(|(_, result)| result.is_ok()), "round {round}");
        }
    }

    pub fn calls_are_answered_and_unknown_calls_refused(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let queue = rig.open();
        let call = |message: &[u8]| block_on(&rig.endpoint, queue.call(rig.buffer(message), message.len()));
        let answer = call(b"echo hello").unwrap();
        assert_eq!(&answer.buffer[..answer.bytes], b"hello");
        assert_eq!(call(b"sing").unwrap_err(), refused(Refusal::UnknownCall));
        assert_eq!(call(b"echo ").unwrap().bytes, 0);
    }

    pub fn what_was_acknowledged_before_a_fence_stays_and_nothing_follows_it(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let acknowledged = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| write_counters_until_refused(carrier, &rig.peer, &acknowledged));
            wait_until(|| acknowledged.load(Ordering::Acquire) > 100);
            let before = acknowledged.load(Ordering::Acquire);
            let mut found = 0;
            let look = &mut |memory: &Mapping| memory.load(0).map(|word| found = word);
            rig.host.regions.with_region(0, EPOCH, look).unwrap();
            rig.host.regions.fence(0);
            let at_fence = acknowledged.load(Ordering::Acquire);
            let error = writer.join().expect("the writer ends");
            assert!(found >= before, "an acknowledged write is gone");
            // One acknowledgement may have been on its way while the fence was raised; no second one follows.
            assert!(
                acknowledged.load(Ordering::Acquire) <= at_fence + 1,
                "a write was acknowledged after the fence"
            );
            let ended = matches!(error, OpError::Refused(Refusal::StaleEpoch) | OpError::Unknown { .. });
            assert!(ended, "{error}");
        });
        let queue = rig.open();
        let attach = block_on(&rig.endpoint, queue.attach(region(0), EPOCH, KEY));
        assert_eq!(attach.unwrap_err(), refused(Refusal::StaleEpoch));
    }

    pub fn a_lent_again_region_shows_nothing_of_its_last_holder(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let old = rig.attached();
        rig.write(&old, 0, &[0xAA; 8192]).unwrap();
        rig.host.regions.fence(0);
        assert!(rig.write(&old, 0, &[0xBB; 8192]).is_err());
        drop(old);
        wait_until(|| rig.host.regions.scrub(0).unwrap() == crate::Scrubbed::Clean);
        rig.host.regions.open(0, Epoch(2), KEY);
        let queue = rig.open();
        block_on(&rig.endpoint, queue.attach(region(0), Epoch(2), KEY)).unwrap();
        let buffer = rig.endpoint.arena().take(8192).unwrap();
        let (buffer, result) = block_on(&rig.endpoint, queue.read(at(0), Epoch(2), buffer));
        result.unwrap();
        assert!(buffer.iter().all(|&byte| byte == 0));
    }

    pub fn an_older_incarnation_is_dead_once_a_newer_one_is_answered(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let queue = rig.attached();
        queue.reconnect().unwrap();
        assert_eq!(
            rig.read(&queue, 0, 8).unwrap_err(),
            refused(Refusal::NotAttached),
            "attachments end with it"
        );
        block_on(&rig.endpoint, queue.attach(region(0), EPOCH, KEY)).unwrap();
        assert!(rig.write(&queue, 0, &[1; 8]).is_ok());
    }

    pub fn the_death_of_the_node_ends_every_operation(carrier: &dyn Carrier) {
        let mut rig = Rig::with_deadline(carrier, Duration::from_secs(5));
        let queue = rig.attached();
        rig.guard = None;
        let started = Instant::now();
        let message = rig.buffer(b"echo x");
        let call = block_on(&rig.endpoint, queue.call(message, 6));
        assert!(matches!(call, Err(OpError::Unknown { .. } | OpError::NotSent { .. })), "{call:?}");
        assert!(started.elapsed() < Duration::from_secs(10));
        assert!(!queue.is_open());
        let write = rig.write(&queue, 0, &[1; 8]);
        assert!(matches!(write, Err(OpError::NotSent { .. })), "{write:?}");
        let reconnected = queue.reconnect().is_ok() && rig.read(&queue, 0, 8).is_ok();
        assert!(!reconnected, "nobody is there");
    }

    pub fn a_silent_node_ends_operations_by_their_deadline(carrier: &dyn Carrier) {
        let rig = Rig::with_deadline(carrier, Duration::from_millis(300));
        let queue = rig.attached();
        rig.host.stalled.store(true, Ordering::Relaxed);
        let started = Instant::now();
        let message = rig.buffer(b"echo x");
        let call = block_on(&rig.endpoint, queue.call(message, 6));
        assert!(matches!(call, Err(OpError::Unknown { .. })), "{call:?}");
        assert!(started.elapsed() >= Duration::from_millis(300));
        assert!(started.elapsed() < Duration::from_secs(10));
        rig.host.stalled.store(false, Ordering::Relaxed);
        queue.reconnect().unwrap();
        block_on(&rig.endpoint, queue.attach(region(0), EPOCH, KEY)).unwrap();
        assert!(rig.read(&queue, 0, 8).is_ok());
    }

    pub fn hundreds_of_queues_come_and_go(carrier: &dyn Carrier) {
        let rig = Rig::new(carrier);
        let descriptors = || std::fs::read_dir("/proc/self/fd").map(Iterator::count).unwrap_or(0);
        drop(rig.attached());
        let before = descriptors();
        for _ in 0..300 {
            let queue = rig.attached();
            rig.write(&queue, 0, &[1; 8]).unwrap();
        }
        // The node notices a closed connection a little later; other tests of this process open files too.
        wait_until(|| descriptors() < before + 100);
    }
}
pub use checks::*;

/// Writes 1, 2, 3 … to a word until an operation fails; returns that failure.
fn write_counters_until_refused(carrier: &dyn Carrier, peer: &Peer, acknowledged: &AtomicU64) -> OpError {
    let endpoint = endpoint(carrier, DEADLINE);
    let queue = endpoint.open(peer.clone()).expect("the node listens");
    block_on(&endpoint, queue.attach(region(0), EPOCH, KEY)).expect("the key is right");
    let mut buffer = endpoint.arena().take(8).expect("an empty arena");
    for counter in 1u64.. {
        buffer.copy_from_slice(&counter.to_le_bytes());
        let (returned, result) = block_on(&endpoint, queue.write(at(0), EPOCH, buffer));
        buffer = returned;
        match result {
            Ok(()) => acknowledged.store(counter, Ordering::Release),
            Err(error) => return error,
        }
    }
    unreachable!("a u64 does not run out")
}

fn wait_until(mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(20), "waited too long");
        std::thread::yield_now();
    }
}
