//! One thread's way to far memory: a queue to each node, and the pieces of regions that hold the database.

use std::collections::BTreeMap;
use std::ops::Range;

use farpool_fabric::{ArenaBuf, ArenaFull, Batch, Endpoint, OpError, Peer, Queue};
use farpool_wire::{AccessKey, Epoch, NodeId, RegionId, RemoteAddr};

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
}

impl Memory {
    /// No node yet.
    pub fn new(endpoint: Endpoint) -> Memory {
        Memory { endpoint, queues: BTreeMap::new() }
    }

    /// The endpoint that has to be polled.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
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
        Ok(self.queue(peer.node)?.attach(region, epoch, key).await?)
    }

    fn queue(&self, node: NodeId) -> Result<&Queue, MemoryError> {
        self.queues.get(&node).ok_or(MemoryError::NotConnected(node))
    }

    /// Reads a range of a piece. Words may be of different times.
    pub(crate) async fn read(&self, piece: &Piece, range: Range<u64>) -> Result<ArenaBuf, MemoryError> {
        let buffer = self.endpoint.arena().take((range.end - range.start) as usize)?;
        let (buffer, read) =
            self.queue(piece.region.node)?.read(piece.address(range.start), piece.epoch, buffer).await;
        read?;
        Ok(buffer)
    }

    /// Writes to a piece.
    pub(crate) async fn write(&self, piece: &Piece, at: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let mut buffer = self.endpoint.arena().take(bytes.len())?;
        buffer.copy_from_slice(bytes);
        let (_, written) = self.queue(piece.region.node)?.write(piece.address(at), piece.epoch, buffer).await;
        Ok(written?)
    }

    /// Puts `new` in place of `expected` at a word of a piece; says what was there.
    pub(crate) async fn compare_and_swap(
        &self,
        piece: &Piece,
        at: u64,
        expected: u64,
        new: u64,
    ) -> Result<u64, MemoryError> {
        let queue = self.queue(piece.region.node)?;
        Ok(queue.compare_and_swap(piece.address(at), piece.epoch, expected, new).await?)
    }

    /// Adds to a word of a piece; says what was there.
    pub(crate) async fn fetch_and_add(
        &self,
        piece: &Piece,
        at: u64,
        addend: u64,
    ) -> Result<u64, MemoryError> {
        Ok(self.queue(piece.region.node)?.fetch_and_add(piece.address(at), piece.epoch, addend).await?)
    }

    /// Operations on one node, with one doorbell.
    pub(crate) fn plan(&self, node: NodeId, bytes: usize) -> Result<Plan<'_>, MemoryError> {
        let buffer = self.endpoint.arena().take(bytes)?;
        Ok(Plan { queue: self.queue(node)?, batch: Batch::new(buffer), used: 0 })
    }
}

/// Operations of one node that are posted together, in their order.
pub(crate) struct Plan<'a> {
    queue: &'a Queue,
    batch: Batch,
    used: usize,
}

/// What became of a plan.
pub(crate) struct Ran {
    batch: Batch,
}

impl Plan<'_> {
    fn place(&mut self, bytes: usize) -> Range<usize> {
        let place = self.used..self.used + bytes;
        self.used = place.end;
        place
    }

    /// Adds a READ; says where in the buffer its bytes will be.
    pub(crate) fn read(&mut self, piece: &Piece, range: Range<u64>) -> Range<usize> {
        let place = self.place((range.end - range.start) as usize);
        self.batch.read(piece.address(range.start), piece.epoch, place.clone());
        place
    }

    /// Adds a WRITE.
    pub(crate) fn write(&mut self, piece: &Piece, at: u64, bytes: &[u8]) {
        let place = self.place(bytes.len());
        self.batch.buffer_mut()[place.clone()].copy_from_slice(bytes);
        self.batch.write(piece.address(at), piece.epoch, place);
    }

    /// Adds a compare-and-swap.
    pub(crate) fn compare_and_swap(&mut self, piece: &Piece, at: u64, expected: u64, new: u64) {
        self.batch.compare_and_swap(piece.address(at), piece.epoch, expected, new);
    }

    /// What comes next waits for all READs and atomics before it.
    pub(crate) fn fence(&mut self) {
        self.batch.fence();
    }

    /// Posts all of it, and waits for all of it.
    pub(crate) async fn run(self) -> Ran {
        Ran { batch: self.queue.run(self.batch).await }
    }
}

impl Ran {
    /// What was read into that place, or why not all was done.
    pub(crate) fn bytes(&self, place: Range<usize>) -> &[u8] {
        &self.batch.buffer()[place]
    }

    /// Whether all was done; else the first trouble, and an unknown one before all others.
    pub(crate) fn check(&self) -> Result<(), MemoryError> {
        let failed = || self.batch.results().iter().filter_map(|result| result.as_ref().err());
        let unknown = failed().find(|error| matches!(error, OpError::Unknown { .. }));
        unknown.or_else(|| failed().next()).map_or(Ok(()), |error| Err((*error).into()))
    }

    /// The word before the plan's last operation, an atomic, if all was done.
    pub(crate) fn last_word(&self) -> Result<u64, MemoryError> {
        Ok(self.words()?.last().copied().unwrap_or_default())
    }

    /// The words before the plan's atomics, in its order, if all was done. For plans of nothing else.
    pub(crate) fn words(&self) -> Result<Vec<u64>, MemoryError> {
        self.check()?;
        Ok(self.batch.results().iter().flatten().copied().collect())
    }
}
