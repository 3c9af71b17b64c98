//! One thread's way to far memory: a queue to each node, and the pieces of regions that hold the database.
//!
//! Where several processes of a host share memory, the fence of one moves the memory from under the others: what they have under way is
//! in doubt until they attach again, and nothing of it takes effect from then on. So it is done again here. That is safe for READs; for
//! WRITEs of who alone writes there; and for a compare-and-swap to a word that nobody else writes, nor replaces before
//! this is over: if it is found there, the first try has succeeded.

mod loose;
mod plan;
mod traffic;
mod words;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::pin::Pin;
use std::time::Duration;

use farpool_fabric::{ArenaBuf, ArenaFull, Endpoint, OpError, Peer, Queue, Uncertain};
use farpool_wire::{AccessKey, Epoch, NodeId, Refusal, RegionId, RemoteAddr};

use loose::LooseEnds;
use plan::Spares;
pub(crate) use plan::{Plan, run_all};
pub use traffic::Traffic;

/// For so long an operation is done again whose memory moves: as long as the copying of a region of many GiB may take.
const MOVE_PATIENCE: Duration = Duration::from_secs(20);
/// Between two looks at whether it has moved.
const MOVE_PAUSE: Duration = Duration::from_micros(50);

/// Bytes that are overwritten by one WRITE.
const CLEARED_AT_ONCE: u64 = 128 << 10;

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

/// Why far memory could not be worked on.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// There is no queue to that node.
    #[error("node {0} is not connected")]
    NotConnected(NodeId),
    /// More is under way than the thread's buffers hold: try again when something has ended.
    #[error("no room for more transfers: {0}")]
    Short(#[from] ArenaFull),
    /// As the fabric says: nothing happened, or nobody knows.
    #[error(transparent)]
    Failed(#[from] OpError),
}

/// Queues of one endpoint.
pub struct Memory {
    endpoint: Endpoint,
    queues: BTreeMap<NodeId, Queue>,
    /// Under which grant each region was attached.
    grants: BTreeMap<RegionId, (Epoch, AccessKey)>,
    /// Plans with WRITEs that were posted and are not over.
    writing: Cell<u32>,
    /// One of these was dropped before it was over: its WRITEs may be under way for ever.
    is_abandoned: Cell<bool>,
    /// How many wait to attach a region again.
    following: Cell<u32>,
    /// Sent, given up, and perhaps still to land.
    loose: LooseEnds,
    traffic: Cell<Traffic>,
    /// Of plans that are over.
    spares: Spares,
}

impl Memory {
    /// No node yet.
    pub fn new(endpoint: Endpoint) -> Memory {
        Memory {
            endpoint,
            queues: BTreeMap::new(),
            grants: BTreeMap::new(),
            writing: Cell::new(0),
            is_abandoned: Cell::new(false),
            following: Cell::new(0),
            loose: LooseEnds::default(),
            traffic: Cell::default(),
            spares: Spares::default(),
        }
    }

    /// The endpoint that has to be polled.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// What was asked of far memory so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic.get()
    }

    /// Opens a region for this thread.
    ///
    /// # Errors
    /// When the node cannot be reached, or does not let this thread in.
    pub async fn attach(
        &mut self,
        peer: &Peer,
        region: RegionId,
        epoch: Epoch,
        key: AccessKey,
    ) -> Result<(), MemoryError> {
        if !self.queues.contains_key(&peer.node) {
            let queue = self.endpoint.open(peer.clone()).map_err(|_| MemoryError::NotConnected(peer.node))?;
            self.queues.insert(peer.node, queue);
        }
        self.queue(peer.node)?.attach(region, epoch, key).await?;
        self.grants.insert(region, (epoch, key));
        Ok(())
    }

    /// All of a region that was attached.
    pub fn whole(&self, region: RegionId) -> Option<Piece> {
        self.grants.get(&region).map(|&(epoch, _)| Piece { region, epoch, start: 0 })
    }

    fn queue(&self, node: NodeId) -> Result<&Queue, MemoryError> {
        self.queues.get(&node).ok_or(MemoryError::NotConnected(node))
    }

    /// Room for a transfer.
    pub(crate) fn take(&self, bytes: usize) -> Result<ArenaBuf, ArenaFull> {
        let arena = self.endpoint.arena();
        arena.take(bytes).or_else(|_| {
            self.spares.clear();
            arena.take(bytes)
        })
    }

    /// Reads a range of a piece. Words may be of different times.
    pub(crate) async fn read(&self, piece: &Piece, range: Range<u64>) -> Result<ArenaBuf, MemoryError> {
        let mut buffer = self.take((range.end - range.start) as usize)?;
        let queue = self.queue(piece.region.node)?;
        Traffic::of(buffer.len()).count(&self.traffic);
        let mut moving = Moving::default();
        loop {
            let (returned, read) = queue.read(piece.address(range.start), piece.epoch, buffer).await;
            buffer = returned;
            match read {
                Ok(()) => return Ok(buffer),
                Err(error) if is_moved(&error) && self.follow(piece.region, &mut moving).await => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Writes to a piece, where nobody else does.
    pub(crate) async fn write(&self, piece: &Piece, at: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let mut buffer = self.take(bytes.len())?;
        buffer.copy_from_slice(bytes);
        self.write_from(buffer, piece, at).await.map(drop)
    }

    /// Overwrites a range of a piece with zeros, which nobody else uses.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn clear(&self, piece: &Piece, range: Range<u64>) -> Result<(), MemoryError> {
        let mut at = range.start;
        while at < range.end {
            let bytes = CLEARED_AT_ONCE.min(range.end - at);
            let mut zeros = self.endpoint.arena().take(bytes as usize)?;
            zeros.fill(0);
            self.write_from(zeros, piece, at).await?;
            at += bytes;
        }
        Ok(())
    }

    /// Writes a buffer to a piece, where nobody else does; it comes back.
    pub(crate) async fn write_from(
        &self,
        mut buffer: ArenaBuf,
        piece: &Piece,
        at: u64,
    ) -> Result<ArenaBuf, MemoryError> {
        let queue = self.queue(piece.region.node)?;
        Traffic::of(buffer.len()).count(&self.traffic);
        let mut moving = Moving::default();
        loop {
            let sent = self.loose.sent(piece.region.node);
            let (returned, written) = queue.write(piece.address(at), piece.epoch, buffer).await;
            sent.over(&written);
            buffer = returned;
            match written {
                Ok(()) => return Ok(buffer),
                Err(error) if is_moved(&error) && self.follow(piece.region, &mut moving).await => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Attaches a region again whose memory has moved; false: it is not ours any more, or does not come to rest.
    ///
    /// Only once no plan with WRITEs is under way: of one whose first WRITEs were refused, the last must not take effect. In a box of its
    /// own, since it is rare, and would make every operation's future larger.
    fn follow<'a>(
        &'a self,
        region: RegionId,
        moving: &'a mut Moving,
    ) -> Pin<Box<dyn Future<Output = bool> + 'a>> {
        Box::pin(self.attach_again(region, moving))
    }

    async fn attach_again(&self, region: RegionId, moving: &mut Moving) -> bool {
        let now = self.endpoint.now_ns();
        let give_up_at = *moving.give_up_at_ns.get_or_insert(now + MOVE_PATIENCE.as_nanos() as u64);
        let (Some(&(epoch, key)), Ok(queue)) = (self.grants.get(&region), self.queue(region.node)) else {
            return false;
        };
        let _following = Following::new(self);
        while self.endpoint.now_ns() < give_up_at && !self.is_abandoned.get() {
            if self.writing.get() > 0 {
                self.endpoint.sleep(MOVE_PAUSE).await;
                continue;
            }
            match queue.attach(region, epoch, key).await {
                Ok(()) => return true,
                Err(OpError::Refused(Refusal::Busy)) => self.endpoint.sleep(MOVE_PAUSE).await,
                Err(_) => return false,
            }
        }
        false
    }

    /// Replaces a word if it is what is expected; returns what it was. Nobody else writes `new` there, nor replaces it before this returns.
    pub(crate) async fn compare_and_swap(
        &self,
        piece: &Piece,
        at: u64,
        expected: u64,
        new: u64,
    ) -> Result<u64, MemoryError> {
        let mut plan = self.plan(piece.region.node, 0)?;
        plan.compare_and_swap(piece, at, expected, new);
        plan.run().await.last_word()
    }

    /// Adds to a word of a piece; says what was there. If its memory moves meanwhile, it may be added twice.
    pub(crate) async fn fetch_and_add(
        &self,
        piece: &Piece,
        at: u64,
        addend: u64,
    ) -> Result<u64, MemoryError> {
        let queue = self.queue(piece.region.node)?;
        Traffic::of(size_of::<u64>()).count(&self.traffic);
        let mut moving = Moving::default();
        loop {
            let sent = self.loose.sent(piece.region.node);
            let added = queue.fetch_and_add(piece.address(at), piece.epoch, addend).await;
            sent.over(&added);
            match added {
                Ok(before) => return Ok(before),
                Err(error) if is_moved(&error) && self.follow(piece.region, &mut moving).await => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Since when an operation has been waiting for memory to come to rest.
#[derive(Default)]
struct Moving {
    give_up_at_ns: Option<u64>,
}

/// Somebody waits to attach a region again: no plan with WRITEs is posted meanwhile.
struct Following<'a>(&'a Cell<u32>);

impl<'a> Following<'a> {
    fn new(memory: &'a Memory) -> Self {
        memory.following.set(memory.following.get() + 1);
        Following(&memory.following)
    }
}

impl Drop for Following<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Plans with WRITEs are under way. Where this is dropped before that is over, nobody attaches a region again.
struct Posted<'a> {
    memory: &'a Memory,
    plans: u32,
}

impl<'a> Posted<'a> {
    fn new(memory: &'a Memory, plans: u32) -> Self {
        memory.writing.set(memory.writing.get() + plans);
        Posted { memory, plans }
    }

    fn end(self) {
        self.memory.writing.set(self.memory.writing.get() - self.plans);
        std::mem::forget(self);
    }
}

impl Drop for Posted<'_> {
    fn drop(&mut self) {
        if self.plans > 0 {
            self.memory.is_abandoned.set(true);
        }
    }
}

/// Whether attaching again tells what became of an operation, and makes it safe to do it again.
fn is_moved(error: &OpError) -> bool {
    matches!(
        error,
        OpError::Refused(Refusal::NotAttached | Refusal::Busy)
            | OpError::Unknown { cause: Uncertain::EpochMoved, .. }
    )
}
