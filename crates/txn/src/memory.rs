//! One thread's way to far memory: a queue to each node, and the pieces of regions that hold the database.
//!
//! Where several processes of a host share memory, the fence of one moves the memory from under the others:
//! what they have under way is in doubt until they attach again, and nothing of it takes effect from then on.
//! So it is done again here. That is safe for READs; for WRITEs to a place that only this client writes to;
//! and for a compare-and-swap that puts a word which no other client writes, and which none replaces before
//! the swap has ended: if that word is found there, the first try has succeeded.
//!
//! A broken connection is treated alike: its operations are in doubt until the node has answered the queue's
//! next incarnation, and take no effect from then on (`docs/src/fabric.md`). Operations that a node does not
//! answer at all are not retried.

mod again;
mod loose;
mod plan;
mod traffic;
mod words;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;

use farpool_fabric::{ArenaBuf, ArenaFull, Endpoint, OpError, Peer, Queue};
use farpool_wire::{AccessKey, Epoch, NodeId, RegionId, RemoteAddr};

use again::Trying;
use loose::LooseEnds;
use plan::Spares;
pub(crate) use plan::{Plan, run_all};
pub use traffic::Traffic;

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
    /// As the fabric says: the operation had no effect, or it is not known whether it had.
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
    /// A node has not answered by the deadline. From then on no connection is opened again, because each wait
    /// would last as long.
    has_given_up: Cell<bool>,
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
            has_given_up: Cell::new(false),
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
        let mut buffer = self.take(bytes.len())?;
        buffer.copy_from_slice(bytes);
        self.write_from(buffer, piece, at).await.map(drop)
    }

    /// Overwrites a range of a piece, which no other client uses, with zeros.
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

    /// Writes a buffer to a piece, to a place that no other client writes to; the buffer comes back.
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
            let sent = self.loose.sent(piece.region.node);
            let (returned, written) = queue.write(piece.address(at), piece.epoch, buffer).await;
            sent.over(&written);
            buffer = returned;
            match written {
                Ok(()) => return Ok(buffer),
                Err(error) => self.ready_again(piece.region, error, &mut trying).await?,
            }
        }
    }

    /// Replaces a word if it is what is expected; returns what it was. Nobody else writes `new` there, nor
    /// replaces it before this returns.
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

    /// Adds to a word of a piece; says what was there. If its memory moves meanwhile, or the connection is
    /// lost, it may be added twice.
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
            let sent = self.loose.sent(piece.region.node);
            let added = queue.fetch_and_add(piece.address(at), piece.epoch, addend).await;
            sent.over(&added);
            match added {
                Ok(before) => return Ok(before),
                Err(error) => self.ready_again(piece.region, error, &mut trying).await?,
            }
        }
    }
}
