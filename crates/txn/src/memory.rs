//! One thread's access to far memory: a queue to each node, and the pieces of regions that hold the database.
//!
//! Where several processes of a host share memory, fencing one of them moves the memory from under the
//! others. The operations that they have in flight are in doubt until they attach the region again, and take
//! no effect from then on. So these operations are retried here. That is safe for READs; for WRITEs to a
//! place that only this client writes to; and for a compare-and-swap that puts a word which no other client
//! puts there, and which no other client replaces before the swap has ended: if that word is found there, the
//! first try has succeeded.
//!
//! A broken connection is treated in the same way: its operations are in doubt until the node has answered
//! the queue's next incarnation, and take no effect from then on (`docs/src/fabric.md`). Operations that a
//! node does not answer at all are not retried.

mod again;
mod in_flight;
mod plan;
mod traffic;
mod words;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use elsa::FrozenBTreeMap;
use farpool_fabric::{ArenaBuf, ArenaFull, Endpoint, OpError, Peer, Queue};
use farpool_wire::{AccessKey, Epoch, NodeId, RegionId, RemoteAddr};

use again::Trying;
use in_flight::InFlight;
use plan::Spares;
pub(crate) use plan::{Plan, run_all};
pub use traffic::Traffic;

/// How long an operation waits for a buffer while others have them all, and the pause between two tries.
const BUFFER_PATIENCE: Duration = Duration::from_millis(100);
const BUFFER_PAUSE: Duration = Duration::from_micros(10);
/// Bytes that `clear` overwrites with one WRITE, at most, and the part of all buffers that this takes at
/// most.
const CLEARED_AT_ONCE: u64 = 128 << 10;
const CLEARING_PART: u64 = 8;

/// A part of a leased region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Which region.
    pub region: RegionId,
    /// Under which grant.
    pub epoch: Epoch,
    /// Where in the region it starts, a multiple of eight.
    pub start: u64,
}

impl Piece {
    fn address(&self, offset: u64) -> RemoteAddr {
        RemoteAddr { region: self.region, offset: self.start + offset }
    }
}

/// Why an operation on far memory failed.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// There is no queue to that node.
    #[error("node {0} is not connected")]
    NotConnected(NodeId),
    /// The thread's buffers are all in use: try again when an operation has ended.
    #[error("no room for more transfers: {0}")]
    Short(#[from] ArenaFull),
    /// As the fabric says: the operation had no effect, or it is not known whether it had.
    #[error(transparent)]
    Failed(#[from] OpError),
}

/// Far memory, by the queues of one endpoint.
pub struct Memory {
    endpoint: Endpoint,
    queues: FrozenBTreeMap<NodeId, Box<Queue>>,
    /// Under which grant each region was attached.
    grants: RefCell<BTreeMap<RegionId, (Epoch, AccessKey)>>,
    /// Plans with WRITEs that were posted and have not finished.
    writing: Cell<u32>,
    /// One of these was dropped before it finished: its WRITEs may land at any time.
    is_abandoned: Cell<bool>,
    /// How many futures wait to attach a region again.
    following: Cell<u32>,
    /// A node has not answered by the deadline. From then on no connection is opened again, because each wait
    /// would last as long.
    has_given_up: Cell<bool>,
    /// Operations that were given up after they were sent, and may still land.
    in_flight: InFlight,
    traffic: Cell<Traffic>,
    /// Parts of finished plans, for the next ones.
    spares: Spares,
    /// The bytes that were read last by [`read_now`](Self::read_now).
    scratch: RefCell<Vec<u8>>,
}

impl Memory {
    /// Without any node.
    pub fn new(endpoint: Endpoint) -> Memory {
        Memory {
            endpoint,
            queues: FrozenBTreeMap::new(),
            grants: RefCell::default(),
            writing: Cell::new(0),
            is_abandoned: Cell::new(false),
            following: Cell::new(0),
            has_given_up: Cell::new(false),
            in_flight: InFlight::default(),
            traffic: Cell::default(),
            spares: Spares::default(),
            scratch: RefCell::default(),
        }
    }

    /// The endpoint, which has to be polled.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// What was asked of far memory so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic.get()
    }

    /// Opens a region for this thread. Operations on other regions may be under way. A connection that there
    /// was before, and that breaks, is opened again.
    ///
    /// # Errors
    /// When the node cannot be reached, or refuses this thread.
    pub async fn attach(
        &self,
        peer: &Peer,
        region: RegionId,
        epoch: Epoch,
        key: AccessKey,
    ) -> Result<(), MemoryError> {
        let is_first = self.queues.get(&peer.node).is_none();
        if is_first {
            let queue = self.endpoint.open(peer.clone()).map_err(|_| MemoryError::NotConnected(peer.node))?;
            self.queues.insert(peer.node, Box::new(queue));
        }
        let mut attached = self.queue(peer.node)?.attach(region, epoch, key).await;
        self.grants.borrow_mut().insert(region, (epoch, key));
        if let Err(error) = attached
            && !is_first
        {
            attached = self.ready_again(region, error, &mut Trying::default()).await;
        }
        if attached.is_err() {
            self.grants.borrow_mut().remove(&region);
        }
        Ok(attached?)
    }

    /// Forgets a region that was attached with this grant, and is used no more.
    pub fn detach(&self, region: RegionId, epoch: Epoch) {
        let mut grants = self.grants.borrow_mut();
        if grants.get(&region).is_some_and(|(attached, _)| *attached == epoch) {
            grants.remove(&region);
        }
    }

    /// All regions that are attached, with their grants.
    pub fn attached(&self) -> Vec<(RegionId, Epoch)> {
        self.grants.borrow().iter().map(|(region, (epoch, _))| (*region, *epoch)).collect()
    }

    /// All of a region that was attached.
    pub fn whole(&self, region: RegionId) -> Option<Piece> {
        self.grants.borrow().get(&region).map(|&(epoch, _)| Piece { region, epoch, start: 0 })
    }

    /// To how many nodes there are queues.
    pub(crate) fn nodes(&self) -> usize {
        self.queues.len()
    }

    fn queue(&self, node: NodeId) -> Result<&Queue, MemoryError> {
        self.queues.get(&node).ok_or(MemoryError::NotConnected(node))
    }

    /// A buffer for a transfer.
    pub(crate) fn take(&self, bytes: usize) -> Result<ArenaBuf, ArenaFull> {
        let arena = self.endpoint.arena();
        arena.take(bytes).or_else(|_| {
            self.spares.clear();
            arena.take(bytes)
        })
    }

    /// Repeats `take` while it fails for lack of buffers, but for no longer than [`BUFFER_PATIENCE`].
    async fn soon<T>(&self, take: impl Fn() -> Result<T, MemoryError>) -> Result<T, MemoryError> {
        let mut give_up_at_ns = None;
        loop {
            match take() {
                Err(short @ MemoryError::Short(_)) => {
                    let now_ns = self.endpoint.now_ns();
                    if now_ns >= *give_up_at_ns.get_or_insert(now_ns + BUFFER_PATIENCE.as_nanos() as u64) {
                        return Err(short);
                    }
                }
                taken => return taken,
            }
            self.endpoint.sleep(BUFFER_PAUSE).await;
        }
    }

    /// Waits for a buffer for a transfer. A caller that holds other buffers meanwhile may wait for a caller
    /// that waits for these. Then the wait ends with an error.
    async fn take_soon(&self, bytes: usize) -> Result<ArenaBuf, MemoryError> {
        self.soon(|| Ok(self.take(bytes)?)).await
    }

    /// As [`plan`](Self::plan), but waits for a buffer as [`take_soon`](Self::take_soon) does.
    pub(crate) async fn plan_soon(&self, node: NodeId, bytes: usize) -> Result<Plan<'_>, MemoryError> {
        self.soon(|| self.plan(node, bytes)).await
    }

    /// Has the processor fetch the beginning of a range that will soon be read, if it can.
    pub(crate) fn prefetch(&self, piece: &Piece, range: Range<u64>) {
        if let Some(queue) = self.queues.get(&piece.region.node) {
            queue.prefetch(piece.address(range.start), (range.end - range.start) as usize);
        }
    }

    /// Reads a range of a piece before it returns, and passes the bytes to `decode`. Words may be of
    /// different times. `None`: not possible now, or it failed; use [`read`](Self::read), or a plan, which
    /// tries again and reports errors.
    pub(crate) fn read_now<T>(
        &self,
        piece: &Piece,
        range: Range<u64>,
        decode: impl FnOnce(&[u8]) -> T,
    ) -> Option<T> {
        let queue = self.queues.get(&piece.region.node)?;
        let bytes = (range.end - range.start) as usize;
        let mut read = self.scratch.borrow_mut();
        if read.len() < bytes {
            read.resize(bytes, 0);
        }
        let to = &mut read[..bytes];
        queue.read_now(piece.address(range.start), piece.epoch, to)?.ok()?;
        Traffic::of(bytes).count(&self.traffic);
        Some(decode(to))
    }

    /// Reads a range of a piece. Words may be of different times.
    pub(crate) async fn read(&self, piece: &Piece, range: Range<u64>) -> Result<ArenaBuf, MemoryError> {
        let mut buffer = self.take_soon((range.end - range.start) as usize).await?;
        let queue = self.queue(piece.region.node)?;
        Traffic::of(buffer.len()).count(&self.traffic);
        let mut trying = Trying::default();
        loop {
            let (returned, read) = queue.read(piece.address(range.start), piece.epoch, buffer).await;
            buffer = returned;
            match read {
                Ok(()) => return Ok(buffer),
                Err(error) => self.ready_again(piece.region, error, &mut trying).await?,
            }
        }
    }

    /// Writes to a piece, to a place that no other client writes to.
    pub(crate) async fn write(&self, piece: &Piece, at: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let mut buffer = self.take_soon(bytes.len()).await?;
        buffer.copy_from_slice(bytes);
        self.write_from(buffer, piece, at).await.map(drop)
    }

    /// Overwrites a range of a piece, which no other client uses, with zeros.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn clear(&self, piece: &Piece, range: Range<u64>) -> Result<(), MemoryError> {
        let at_once = CLEARED_AT_ONCE.min(self.endpoint.arena().bytes() as u64 / CLEARING_PART);
        let mut at = range.start;
        while at < range.end {
            let bytes = at_once.min(range.end - at);
            let mut zeros = self.take_soon(bytes as usize).await?;
            zeros.fill(0);
            self.write_from(zeros, piece, at).await?;
            at += bytes;
        }
        Ok(())
    }

    /// Writes a buffer to a piece, to a place that no other client writes to; returns the buffer.
    pub(crate) async fn write_from(
        &self,
        mut buffer: ArenaBuf,
        piece: &Piece,
        at: u64,
    ) -> Result<ArenaBuf, MemoryError> {
        let queue = self.queue(piece.region.node)?;
        Traffic::of(buffer.len()).count(&self.traffic);
        let mut trying = Trying::default();
        loop {
            let sent = self.in_flight.sent(piece.region.node);
            let (returned, written) = queue.write(piece.address(at), piece.epoch, buffer).await;
            sent.ended(&written);
            buffer = returned;
            match written {
                Ok(()) => return Ok(buffer),
                Err(error) => self.ready_again(piece.region, error, &mut trying).await?,
            }
        }
    }

    /// Replaces a word if it is `expected`; returns what it was. No other client may put `new` there, or
    /// replace it before this returns.
    pub(crate) async fn compare_and_swap(
        &self,
        piece: &Piece,
        at: u64,
        expected: u64,
        new: u64,
    ) -> Result<u64, MemoryError> {
        let mut plan = self.plan_soon(piece.region.node, 0).await?;
        plan.compare_and_swap(piece, at, expected, new);
        plan.run().await.last_word()
    }

    /// Adds to a word of a piece; returns what was there. If its memory moves meanwhile, or the connection
    /// breaks, it may be added twice.
    pub(crate) async fn fetch_and_add(
        &self,
        piece: &Piece,
        at: u64,
        addend: u64,
    ) -> Result<u64, MemoryError> {
        let queue = self.queue(piece.region.node)?;
        Traffic::of(size_of::<u64>()).count(&self.traffic);
        let mut trying = Trying::default();
        loop {
            let sent = self.in_flight.sent(piece.region.node);
            let added = queue.fetch_and_add(piece.address(at), piece.epoch, addend).await;
            sent.ended(&added);
            match added {
                Ok(before) => return Ok(before),
                Err(error) => self.ready_again(piece.region, error, &mut trying).await?,
            }
        }
    }
}
