//! Queues: a thread's operations on one node.

use std::pin::Pin;
use std::task::{Context, Poll};

use farpool_wire::{
    AccessKey, Epoch, MAX_CALL_BYTES, MAX_TRANSFER_BYTES, NodeId, Refusal, RegionId, RemoteAddr,
};

use super::Endpoint;
use super::operation::{Operating, Target};
use crate::arena::ArenaBuf;
use crate::op::{CallAnswer, OpError, Uncertain};
use crate::seam::{LocalSlice, Op, Outcome, Posted};

/// The slot of an operation that is carried out at once, and so is never in flight.
pub(super) const NO_SLOT: u32 = u32::MAX;

/// One connection to one node. Dropping it closes it.
pub struct Queue {
    pub(super) endpoint: Endpoint,
    pub(super) index: usize,
    pub(super) node: NodeId,
}

impl Queue {
    /// The node at the other end.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Name of the transport that carries this queue, for people to read; `None` while it is closed.
    pub fn transport(&self) -> Option<&'static str> {
        let table = self.endpoint.shared.table.borrow();
        table.queues[self.index].link.as_ref().map(|link| link.transport())
    }

    /// The endpoint of this queue.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Whether the queue is open. It is closed when an answer fails to come or the connection ends;
    /// [`Queue::reconnect`] then opens a new incarnation.
    pub fn is_open(&self) -> bool {
        self.endpoint.shared.table.borrow().queues[self.index].link.is_some()
    }

    /// Whether the node has answered anything on the present incarnation. If not, there may be no connection
    /// at all.
    pub fn has_answered(&self) -> bool {
        self.endpoint.shared.table.borrow().queues[self.index].answered
    }

    /// Closes the queue: what is in flight ends as *unknown*.
    pub fn close(&self) {
        self.endpoint.shared.table.borrow_mut().close(self.index, Uncertain::ConnectionLost);
    }

    /// Opens a new incarnation: once the node answers it, nothing of an older one takes effect any more.
    /// Regions have to be attached again. What was in flight ends as *unknown*.
    pub fn reconnect(&self) -> std::io::Result<()> {
        let mut table = self.endpoint.shared.table.borrow_mut();
        table.close(self.index, Uncertain::ConnectionLost);
        table.queues[self.index].connect(&*self.endpoint.shared.transport)
    }

    /// Opens a leased region for this queue. Until then one-sided operations on it are refused.
    pub async fn attach(&self, region: RegionId, epoch: Epoch, key: AccessKey) -> Result<(), OpError> {
        let target = Target { region, epoch, offset: 0 };
        self.post(Op::Attach(key), target, None, false).await.1.map(drop)
    }

    /// Closes a region for this queue.
    pub async fn detach(&self, region: RegionId, epoch: Epoch) -> Result<(), OpError> {
        self.post(Op::Detach, Target { region, epoch, offset: 0 }, None, false).await.1.map(drop)
    }

    /// Fills `buffer` from far memory; it comes back either way, its contents undefined after an error.
    ///
    /// # Panics
    /// When the address is another node's: a bug of the caller. Every operation panics then.
    #[inline]
    pub fn read(&self, from: RemoteAddr, epoch: Epoch, buffer: ArenaBuf) -> Transferring<'_> {
        Transferring(self.post(Op::Read, Target::of(from, epoch), Some(buffer), false))
    }

    /// Fills `to` from far memory before it returns, if the transport accesses far memory itself; `to` need
    /// not lie in the arena. `None`: not possible now, and nothing was done; use [`Queue::read`]. After an
    /// error, the contents of `to` are undefined.
    ///
    /// # Panics
    /// As [`Queue::read`].
    pub fn read_now(&self, from: RemoteAddr, epoch: Epoch, to: &mut [u8]) -> Option<Result<(), OpError>> {
        assert_eq!(from.region.node, self.node, "an address of another node");
        if to.len() > MAX_TRANSFER_BYTES {
            return Some(Err(OpError::Refused(Refusal::TooLong)));
        }
        let shared = &*self.endpoint.shared;
        let mut table = shared.table.borrow_mut();
        let link = table.queues[self.index].link.as_mut()?;
        let (region, offset) = (from.region.index, from.offset);
        let local = LocalSlice { start: to.as_mut_ptr(), bytes: to.len() };
        let outcome = link.run_now(&Posted {
            slot: NO_SLOT,
            op: Op::Read,
            region,
            epoch,
            offset,
            local,
            fence: false,
        })?;
        if table.note_completed_at_once(1) {
            table.poll(shared.clock.now_ns());
        }
        Some(to_result(self.node, outcome).map(drop))
    }

    /// Has the processor fetch the first cache lines of far memory that will soon be accessed, if the
    /// transport accesses it itself. Any range may be named, since nothing is accessed.
    pub fn prefetch(&self, at: RemoteAddr, bytes: usize) {
        let table = self.endpoint.shared.table.borrow();
        if let Some(link) = &table.queues[self.index].link {
            link.prefetch(at.region.index, at.offset, bytes);
        }
    }

    /// Copies `buffer` to far memory.
    #[inline]
    pub fn write(&self, to: RemoteAddr, epoch: Epoch, buffer: ArenaBuf) -> Transferring<'_> {
        Transferring(self.post(Op::Write, Target::of(to, epoch), Some(buffer), false))
    }

    /// Like [`Queue::write`], after every READ and atomic posted before it on this queue.
    #[inline]
    pub fn write_fenced(&self, to: RemoteAddr, epoch: Epoch, buffer: ArenaBuf) -> Transferring<'_> {
        Transferring(self.post(Op::Write, Target::of(to, epoch), Some(buffer), true))
    }

    /// Puts `new` in place of `expected` at an aligned word; returns the word before.
    #[inline]
    pub fn compare_and_swap(
        &self,
        at: RemoteAddr,
        epoch: Epoch,
        expected: u64,
        new: u64,
    ) -> ChangingWord<'_> {
        let op = Op::CompareAndSwap { expected, new };
        ChangingWord(self.post(op, Target::of(at, epoch), None, false))
    }

    /// Adds to an aligned word, wrapping; returns the word before.
    #[inline]
    pub fn fetch_and_add(&self, at: RemoteAddr, epoch: Epoch, addend: u64) -> ChangingWord<'_> {
        ChangingWord(self.post(Op::FetchAndAdd { addend }, Target::of(at, epoch), None, false))
    }

    /// Sends the first `request` bytes of `buffer` to the node's processor; the answer replaces them, and
    /// must fit the buffer.
    ///
    /// # Panics
    /// When `request` is longer than the buffer: a bug of the caller.
    pub async fn call(&self, buffer: ArenaBuf, request: usize) -> Result<CallAnswer, OpError> {
        assert!(request <= buffer.len(), "a request of {request} bytes in a buffer of {}", buffer.len());
        if request > MAX_CALL_BYTES {
            return Err(OpError::Refused(Refusal::TooLong));
        }
        let target = Target { region: RegionId { node: self.node, index: 0 }, epoch: Epoch(0), offset: 0 };
        let (buffer, result) = self.post(Op::Call { request }, target, Some(buffer), false).await;
        let bytes = result? as usize;
        Ok(CallAnswer { buffer: buffer.expect("the buffer comes back with its outcome"), bytes })
    }

    #[inline]
    fn post(&self, op: Op, target: Target, buffer: Option<ArenaBuf>, fence: bool) -> Operating<'_> {
        Operating::new(self, op, target, buffer, fence)
    }
}

/// The future of a READ or WRITE: its buffer comes back with the outcome. A future of its own, since the
/// state of an `async` function around it would be written and read again with every operation.
#[must_use = "nothing is posted before it is polled"]
pub struct Transferring<'a>(Operating<'a>);

impl Future for Transferring<'_> {
    type Output = (ArenaBuf, Result<(), OpError>);

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|(buffer, result)| {
            (buffer.expect("the buffer comes back with its outcome"), result.map(drop))
        })
    }
}

/// The future of an atomic: its outcome is the word before. See [`Transferring`].
#[must_use = "nothing is posted before it is polled"]
pub struct ChangingWord<'a>(Operating<'a>);

impl Future for ChangingWord<'_> {
    type Output = Result<u64, OpError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|(_, result)| result)
    }
}

/// An outcome as the caller of `node` sees it.
pub(super) fn to_result(node: NodeId, outcome: Outcome) -> Result<u64, OpError> {
    match outcome {
        Outcome::Done(value) => Ok(value),
        Outcome::Refused(refusal) => Err(OpError::Refused(refusal)),
        Outcome::Unknown(cause) => Err(OpError::Unknown { node, cause }),
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let mut table = self.endpoint.shared.table.borrow_mut();
        table.close(self.index, Uncertain::ConnectionLost);
        table.queues[self.index].open = false;
    }
}
