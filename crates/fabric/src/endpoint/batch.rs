//! Batches: operations of one queue that are posted together, with one doorbell, and come back together.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use farpool_wire::{Epoch, MAX_TRANSFER_BYTES, NodeId, Refusal, RemoteAddr};

use super::queue::{NO_SLOT, Queue, to_result};
use super::table::Table;
use super::{MAX_BATCH, Shared};
use crate::arena::ArenaBuf;
use crate::op::OpError;
use crate::seam::{LocalSlice, Op, Outcome, Posted};

/// Operations to be posted together on one queue, and the buffer in which their bytes lie.
///
/// A batch can be used again and again: [`Batch::clear`] keeps the buffer and the room for operations, so
/// that the steady state allocates nothing. A part of the buffer that several operations fill ends up with
/// bytes of any of them.
#[derive(Debug)]
pub struct Batch {
    buffer: ArenaBuf,
    operations: Vec<Planned>,
    results: Vec<Result<u64, OpError>>,
    /// The first operation that has not been handed over. All before it have ended.
    next: usize,
    fence_next: bool,
}

#[derive(Clone, Debug)]
struct Planned {
    op: Op,
    at: RemoteAddr,
    epoch: Epoch,
    range: Range<usize>,
    fence: bool,
}

impl Batch {
    /// An empty batch whose transfers go to and come from `buffer`.
    pub fn new(buffer: ArenaBuf) -> Self {
        Batch { buffer, operations: Vec::new(), results: Vec::new(), next: 0, fence_next: false }
    }

    /// Adds a READ into a part of the buffer.
    pub fn read(&mut self, from: RemoteAddr, epoch: Epoch, into: Range<usize>) {
        self.add(Op::Read, from, epoch, into);
    }

    /// Adds a WRITE from a part of the buffer.
    pub fn write(&mut self, to: RemoteAddr, epoch: Epoch, from: Range<usize>) {
        self.add(Op::Write, to, epoch, from);
    }

    /// Adds a compare-and-swap; its result is the word before.
    pub fn compare_and_swap(&mut self, at: RemoteAddr, epoch: Epoch, expected: u64, new: u64) {
        self.add(Op::CompareAndSwap { expected, new }, at, epoch, 0..0);
    }

    /// Adds a fetch-and-add; its result is the word before.
    pub fn fetch_and_add(&mut self, at: RemoteAddr, epoch: Epoch, addend: u64) {
        self.add(Op::FetchAndAdd { addend }, at, epoch, 0..0);
    }

    /// The operation added next waits for every READ and atomic that was posted before it on the queue.
    pub fn fence(&mut self) {
        self.fence_next = true;
    }

    /// How many operations it has.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// How the operations ended, in the order added; empty before the batch was run.
    /// Atomics give the word before, transfers zero.
    pub fn results(&self) -> &[Result<u64, OpError>] {
        &self.results
    }

    /// The buffer. After an error the range of that READ is undefined.
    pub fn buffer(&self) -> &[u8] {
        &self.buffer
    }

    /// The buffer, to be filled for WRITEs.
    pub fn buffer_mut(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Forgets the operations and their results.
    pub fn clear(&mut self) {
        self.operations.clear();
        self.results.clear();
        self.fence_next = false;
    }

    /// Gives the buffer back.
    pub fn into_buffer(self) -> ArenaBuf {
        self.buffer
    }

    fn add(&mut self, op: Op, at: RemoteAddr, epoch: Epoch, range: Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= self.buffer.len(),
            "{range:?} is no part of a buffer of {} bytes",
            self.buffer.len()
        );
        assert!(self.operations.len() < MAX_BATCH, "a batch has at most {MAX_BATCH} operations");
        let fence = std::mem::take(&mut self.fence_next);
        self.operations.push(Planned { op, at, epoch, range, fence });
    }

    pub(super) fn settle(&mut self, place: u32, node: NodeId, outcome: Outcome) {
        self.results[place as usize] = to_result(node, outcome);
    }

    /// Makes room for the results.
    fn begin(&mut self, node: NodeId) {
        self.next = 0;
        self.results.clear();
        // Replaced by the outcomes; stays only for operations that were never handed over.
        self.results.resize(self.operations.len(), Err(OpError::NotSent { node }));
    }

    /// Collects the operations that have not been handed over; `posting_places` holds the place of each in
    /// the batch.
    fn collect(&mut self, node: NodeId, table: &mut Table) {
        table.posting.clear();
        table.posting_places.clear();
        let local = self.buffer.as_local();
        for (place, planned) in self.operations.iter().enumerate().skip(self.next) {
            assert_eq!(planned.at.region.node, node, "an address of another node");
            if planned.range.len() > MAX_TRANSFER_BYTES {
                self.results[place] = Err(OpError::Refused(Refusal::TooLong));
                continue;
            }
            table.posting_places.push(place as u32);
            table.posting.push(Posted {
                slot: NO_SLOT,
                op: planned.op,
                region: planned.at.region.index,
                epoch: planned.epoch,
                offset: planned.at.offset,
                // In bounds: checked when the operation was added; the buffer's length never changes.
                local: LocalSlice {
                    start: local.start.wrapping_add(planned.range.start),
                    bytes: planned.range.len(),
                },
                fence: planned.fence,
            });
        }
    }
}

impl Queue {
    /// Posts all operations of `batch` with one doorbell and waits for all of them; see [`Batch::results`].
    ///
    /// They are posted in the order added. When the queue is closed, all are [`OpError::NotSent`].
    /// Dropping the future keeps the batch's buffer until nothing of it is in flight.
    pub fn run(&self, mut batch: Batch) -> Running<'_> {
        batch.begin(self.node);
        Running { queue: self, stage: Stage::Unposted(Some(batch), None) }
    }
}

/// The future of a batch: it posts the batch when first polled, and ends when all operations of it have
/// ended.
#[must_use = "nothing is posted before it is polled"]
pub struct Running<'a> {
    queue: &'a Queue,
    stage: Stage,
}

enum Stage {
    /// The ticket is that of a batch that waits for places.
    Unposted(Option<Batch>, Option<u64>),
    Posted(u32),
    Finished,
}

impl Future for Running<'_> {
    type Output = Batch;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Batch> {
        let this = &mut *self;
        let shared = &*this.queue.endpoint.shared;
        let mut table = shared.table.borrow_mut();
        let finished = match &mut this.stage {
            Stage::Unposted(batch, ticket) => {
                let wanted = batch.as_mut().map_or(0, |batch| run_now(this.queue, shared, &mut table, batch));
                let open = table.queues[this.queue.index].link.is_some();
                if open && wanted > 0 && !table.admit(wanted, ticket, context.waker()) {
                    return Poll::Pending;
                }
                if let Some(ticket) = ticket.take() {
                    table.leave(ticket);
                }
                let batch = batch.take().expect("a future is not polled after its outcome");
                match post(this.queue, shared, &mut table, batch, context) {
                    Ok(batch) => Some(batch),
                    Err(index) => {
                        this.stage = Stage::Posted(index);
                        None
                    }
                }
            }
            Stage::Posted(index) => table.take_finished_batch(*index, context.waker()),
            Stage::Finished => panic!("polled after its outcome"),
        };
        match finished {
            Some(batch) => {
                this.stage = Stage::Finished;
                Poll::Ready(batch)
            }
            None => Poll::Pending,
        }
    }
}

/// Carries out as much of a batch as can be done at once. Returns how many operations are left; the table's
/// scratch has them.
fn run_now(queue: &Queue, shared: &Shared, table: &mut Table, batch: &mut Batch) -> usize {
    batch.collect(queue.node, table);
    let Table { queues, posting, posting_places, outcomes, .. } = table;
    if let Some(link) = &mut queues[queue.index].link {
        link.run_all_now(posting, outcomes);
    }
    let ended = outcomes.len();
    for (&place, outcome) in posting_places.iter().zip(outcomes.drain(..)) {
        batch.settle(place, queue.node, outcome);
    }
    posting.drain(..ended);
    posting_places.drain(..ended);
    batch.next = posting_places.first().map_or(batch.operations.len(), |place| *place as usize);
    let left = posting.len();
    if table.note_completed_at_once(ended) {
        table.poll(shared.clock.now_ns());
    }
    left
}

/// Hands what is left of a batch to its link. Returns the batch if all operations completed at once, else the
/// index under which the table keeps it.
fn post(
    queue: &Queue,
    shared: &Shared,
    table: &mut Table,
    batch: Batch,
    context: &mut Context<'_>,
) -> Result<Batch, u32> {
    let index = queue.index;
    if table.posting.is_empty() || table.queues[index].link.is_none() {
        return Ok(batch);
    }
    let mut posting = std::mem::take(&mut table.posting);
    posting.iter_mut().for_each(|posted| posted.slot = table.take_place());
    let places = std::mem::take(&mut table.posting_places);
    let mut done = table.take_scratch();
    let link = table.queues[index].link.as_mut().expect("checked above");
    link.post_batch(&posting, &mut done);
    let mut at_once = done.iter().peekable();
    let mut kept: Option<(u32, u64)> = None;
    let mut batch = Some(batch);
    for (posted, &place) in posting.iter().zip(&places) {
        // Completions come in the order of the batch, so the next one is this operation's, or this operation
        // has not completed.
        if let Some(done) = at_once.next_if(|done| done.slot == posted.slot) {
            table.return_place(posted.slot);
            match (&mut batch, kept) {
                (Some(batch), _) => batch.settle(place, queue.node, done.outcome),
                (None, Some((kept, _))) => table.settle_member(kept, place, queue.node, done.outcome),
                (None, None) => unreachable!("a batch is here or kept"),
            }
            continue;
        }
        let (kept, deadline_ns) = *kept.get_or_insert_with(|| {
            let batch = batch.take().expect("kept once");
            (table.keep_batch(batch, context.waker().clone()), shared.deadline_from_now())
        });
        table.launch_member(posted.slot, index, deadline_ns, kept, place);
    }
    debug_assert!(at_once.next().is_none(), "a link completed what was not posted, or out of order");
    table.return_scratch(posting, places, done);
    match (batch, kept) {
        (Some(batch), _) => Ok(batch),
        (None, kept) => Err(kept.expect("a batch is here or kept").0),
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        match self.stage {
            Stage::Unposted(_, Some(ticket)) => self.queue.endpoint.shared.table.borrow_mut().leave(ticket),
            Stage::Posted(index) => self.queue.endpoint.shared.table.borrow_mut().abandon_batch(index),
            Stage::Unposted(_, None) | Stage::Finished => {}
        }
    }
}
