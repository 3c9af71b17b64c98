//! The suite's node and its client, with which every check starts.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farpool_wire::{AccessKey, Epoch, NodeId, Refusal, RegionId, RemoteAddr, SessionId};

use super::Carrier;
use crate::{
    AccessError, AccessKind, ArenaBuf, Endpoint, EndpointConfig, Host, Locking, Mapping, OpError, Peer,
    Queue, RegionSet, block_on,
};

pub(super) const NODE: NodeId = NodeId(0xF00D);
pub(super) const KEY: AccessKey = AccessKey::from_bytes([0x5A; 16]);
pub(super) const REGIONS: u32 = 2;
pub(super) const REGION_BYTES: u64 = 4 << 20;
pub(super) const EPOCH: Epoch = Epoch(1);
pub(super) const DEADLINE: Duration = Duration::from_secs(20);
/// How long a check waits for something that takes several operations, each of which may take until its
/// deadline.
const PATIENCE: Duration = Duration::from_secs(5 * DEADLINE.as_secs());
pub(super) const ECHO: &[u8] = b"echo ";
/// Like [`ECHO`], with an answer of twice the length.
pub(super) const TWICE: &[u8] = b"twice ";

/// The node of the suite: two regions, of which the first is lent, and a call that echoes.
pub struct SuiteHost {
    pub(crate) regions: RegionSet,
    /// While set, calls wait, which stands for a node that has stopped.
    pub(super) stalled: AtomicBool,
    /// This many accesses are refused as if their memory was being moved.
    pub(super) moving: AtomicU32,
    rejected: AtomicU64,
}

impl SuiteHost {
    /// A node with its regions, the first of which is lent.
    #[allow(clippy::new_without_default)] // it is shared from the start
    pub fn new() -> Arc<Self> {
        let regions =
            RegionSet::create(REGIONS, REGION_BYTES, Locking::None, |_| {}).expect("a few MiB of memory");
        regions.open(0, EPOCH, KEY);
        let (stalled, moving) = (AtomicBool::new(false), AtomicU32::new(0));
        Arc::new(SuiteHost { regions, stalled, moving, rejected: AtomicU64::new(0) })
    }

    /// Whether calls wait for now.
    pub fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed) // a flag of the test, which its other actions order
    }

    /// How many connections were cut off for malformed input.
    pub fn rejected_connections(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }
}

impl Host for SuiteHost {
    fn node(&self) -> NodeId {
        NODE
    }

    fn regions(&self) -> &RegionSet {
        &self.regions
    }

    fn with_region(
        &self,
        region: u32,
        epoch: Epoch,
        kind: AccessKind,
        access: &mut dyn FnMut(&Mapping) -> Result<(), AccessError>,
    ) -> Result<(), Refusal> {
        // Relaxed: a count of the test, which its other actions order.
        let one_less = |moving: u32| moving.checked_sub(1);
        if self.moving.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok() {
            return Err(Refusal::Busy);
        }
        self.regions.with_region(region, epoch, kind, access)
    }

    fn call(&self, request: &[u8], answer: &mut Vec<u8>) -> Result<(), Refusal> {
        while self.stalled.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let twice = request.strip_prefix(TWICE);
        let message = twice.or(request.strip_prefix(ECHO)).ok_or(Refusal::UnknownCall)?;
        answer.extend_from_slice(message);
        if twice.is_some() {
            answer.extend_from_slice(message);
        }
        Ok(())
    }

    fn rejected(&self) {
        self.rejected.fetch_add(1, Ordering::Relaxed);
    }
}

/// A served host and a client's endpoint.
pub(super) struct Rig {
    pub(super) host: Arc<SuiteHost>,
    pub(super) peer: Peer,
    pub(super) guard: Option<Box<dyn Any>>,
    pub(super) endpoint: Endpoint,
}

impl Rig {
    pub(super) fn new(carrier: &dyn Carrier) -> Self {
        Self::with_deadline(carrier, DEADLINE)
    }

    pub(super) fn with_deadline(carrier: &dyn Carrier, deadline: Duration) -> Self {
        let host = SuiteHost::new();
        let (peer, guard) = carrier.serve(host.clone(), None);
        Rig { host, peer, guard: Some(guard), endpoint: endpoint(carrier, deadline) }
    }

    /// Ends the node and starts another process at the same addresses, with memory of its own.
    pub(super) fn restart(&mut self, carrier: &dyn Carrier) {
        self.guard = None;
        self.host = SuiteHost::new();
        let (peer, guard) = carrier.serve(self.host.clone(), Some(&self.peer));
        assert_eq!(peer, self.peer, "it is reached as before");
        self.guard = Some(guard);
    }

    pub(super) fn open(&self) -> Queue {
        self.endpoint.open(self.peer.clone()).expect("the node listens")
    }

    pub(super) fn attached(&self) -> Queue {
        let queue = self.open();
        block_on(&self.endpoint, queue.attach(region(0), EPOCH, KEY)).expect("the key is right");
        queue
    }

    pub(super) fn write(&self, queue: &Queue, offset: u64, data: &[u8]) -> Result<(), OpError> {
        let buffer = self.buffer(data);
        block_on(&self.endpoint, queue.write(at(offset), EPOCH, buffer)).1
    }

    pub(super) fn read(&self, queue: &Queue, offset: u64, bytes: usize) -> Result<Vec<u8>, OpError> {
        let buffer = self.endpoint.arena().take(bytes).expect("arena has room");
        let (buffer, result) = block_on(&self.endpoint, queue.read(at(offset), EPOCH, buffer));
        result.map(|()| buffer.to_vec())
    }

    pub(super) fn buffer(&self, data: &[u8]) -> ArenaBuf {
        let mut buffer = self.endpoint.arena().take(data.len()).expect("arena has room");
        buffer.copy_from_slice(data);
        buffer
    }

    pub(super) fn far_byte(&self, offset: u64) -> u8 {
        let mut byte = [0];
        let look = &mut |memory: &Mapping| memory.read(offset, &mut byte);
        self.host.regions.with_region(0, EPOCH, AccessKind::Read, look).expect("open");
        byte[0]
    }
}

/// A separate client: it acts under one grant of region 0, on a queue and an endpoint of its own.
pub(super) struct Member {
    pub(super) endpoint: Endpoint,
    pub(super) queue: Queue,
    epoch: Epoch,
    key: AccessKey,
}

impl Member {
    pub(super) fn join(carrier: &dyn Carrier, peer: &Peer, epoch: Epoch, key: AccessKey) -> Member {
        let endpoint = endpoint(carrier, DEADLINE);
        let queue = endpoint.open(peer.clone()).expect("the node listens");
        let member = Member { endpoint, queue, epoch, key };
        member.attach_again().expect("the grant is in force");
        member
    }

    /// Does what the contract tells a client to do after a failure that may have been caused by a move:
    /// reconnects if the queue is closed, and attaches until the node accepts or refuses.
    pub(super) fn attach_again(&self) -> Result<(), OpError> {
        let started = Instant::now();
        loop {
            assert!(started.elapsed() < DEADLINE, "the node neither accepts nor refuses");
            if !self.queue.is_open() {
                self.queue.reconnect().expect("the node listens");
            }
            match block_on(&self.endpoint, self.queue.attach(region(0), self.epoch, self.key)) {
                Err(OpError::Refused(Refusal::Busy) | OpError::Unknown { .. } | OpError::NotSent { .. }) => {}
                answer => return answer,
            }
        }
    }

    pub(super) fn write(&self, offset: u64, data: &[u8]) -> Result<(), OpError> {
        let mut buffer = self.endpoint.arena().take(data.len()).expect("arena has room");
        buffer.copy_from_slice(data);
        block_on(&self.endpoint, self.queue.write(at(offset), self.epoch, buffer)).1
    }

    pub(super) fn read(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, OpError> {
        let buffer = self.endpoint.arena().take(bytes).expect("arena has room");
        let (buffer, result) = block_on(&self.endpoint, self.queue.read(at(offset), self.epoch, buffer));
        result.map(|()| buffer.to_vec())
    }

    /// Writes until the write is acknowledged, for a grant that is not fenced.
    pub(super) fn write_while_memory_moves(&self, offset: u64, data: &[u8]) {
        while self.write(offset, data).is_err() {
            self.attach_again().expect("the grant is in force");
        }
    }
}

/// Raises a flag when dropped, so that threads end with a check that failed.
pub(super) struct Raise<'a>(pub(super) &'a AtomicBool);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed); // only asks threads to end: pairs with nothing
    }
}

/// The key of a grant that a check opens beside the owner's.
pub(super) fn key_of(epoch: Epoch) -> AccessKey {
    AccessKey::from_bytes((0xA5A5_u128 << 64 | u128::from(epoch.0)).to_le_bytes())
}

pub(super) fn endpoint(carrier: &dyn Carrier, deadline: Duration) -> Endpoint {
    static NEXT_SESSION: AtomicU64 = AtomicU64::new(1);
    Endpoint::new(EndpointConfig {
        transport: carrier.transport(),
        clock: carrier.clock(),
        session_ids: Box::new(|| {
            // Several processes may be clients of one node.
            let process = u64::from(std::process::id()) << 32;
            SessionId(process | NEXT_SESSION.fetch_add(1, Ordering::Relaxed))
        }),
        arena_bytes: 4 << 20,
        deadline,
    })
}

pub(super) fn region(index: u32) -> RegionId {
    RegionId { node: NODE, index }
}

pub(super) fn at(offset: u64) -> RemoteAddr {
    RemoteAddr { region: region(0), offset }
}

pub(super) fn refused(refusal: Refusal) -> OpError {
    OpError::Refused(refusal)
}

pub(super) fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|place| (place as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

pub(super) fn wait_until(mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "waited too long");
        std::thread::yield_now();
    }
}
