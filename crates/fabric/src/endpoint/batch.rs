//! Batches: operations of one queue that are posted together, with one doorbell, and come back together.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use farpool_wire::{Epoch, MAX_TRANSFER_BYTES, NodeId, Refusal, RemoteAddr};

use super::queue::{NO_SLOT, Queue, to_result};
use super::table::{Scratch, Table};
use super::{MAX_BATCH, Shared};
use crate::arena::ArenaBuf;
use crate::op::OpError;
use crate::seam::{Link, LocalSlice, Op, Outcome, Posted};

/// Operations to be posted together on one queue, and the buffer in which their bytes lie.
///
/// A batch can be used again and again: [`Batch::clear`] keeps the buffer and the room for operations, so
/// that the steady state allocates nothing. A part of the buffer that several operations fill ends up with
/// bytes of any of them.
///
/// # Panics
/// When an operation is added whose address is on another node than those before, or whose range is no part
/// of the buffer, or that is one more than [`MAX_BATCH`]: bugs of the caller.
#[derive(Debug)]
pub struct Batch {
    buffer: ArenaBuf,
    /// The node of all operations.
    node: Option<NodeId>,
    /// As a link gets them, except for their slots. In bounds: `add` checks that each local slice is a part
    /// of the buffer, which is never replaced and keeps its length. Exclusive: during a call of the link
    /// nobody else uses the batch; after it, the batch is in the table while operations are in flight, and
    /// nobody touches the buffer there. Alive: the batch stays in the table until the link has completed
    /// them or is dropped.
    operations: Vec<Posted>,
    results: Vec<Result<u64, OpError>>,
    /// The first operation that has not been handed over. All before it have ended, or are in flight.
    next: usize,
    fence_next: bool,
}

impl Batch {
    /// An empty batch whose transfers go to and come from `buffer`.
    pub fn new(buffer: ArenaBuf) -> Self {
        Batch { buffer, node: None, operations: Vec::new(), results: Vec::new(), next: 0, fence_next: false }
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
        self.node = None;
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
        let node = *self.node.get_or_insert(at.region.node);
        assert_eq!(at.region.node, node, "an address of another node");
        self.operations.push(Posted {
            slot: NO_SLOT,
            op,
            region: at.region.index,
            epoch,
            offset: at.offset,
            local: LocalSlice {
                start: self.buffer.as_local().start.wrapping_add(range.start),
                bytes: range.len(),
            },
            fence: std::mem::take(&mut self.fence_next),
        });
    }

    pub(super) fn settle(&mut self, place: u32, node: NodeId, outcome: Outcome) {
        self.results[place as usize] = to_result(node, outcome);
    }

    /// Makes room for the results.
    fn begin(&mut self, node: NodeId) {
        assert_eq!(self.node.unwrap_or(node), node, "an address of another node");
        self.next = 0;
        self.results.clear();
        // Replaced by the outcomes; stays only for operations that were never handed over.
        self.results.extend(self.operations.iter().map(|posted| {
            Err(if is_too_long(posted) {
                OpError::Refused(Refusal::TooLong)
            } else {
                OpError::NotSent { node }
            })
        }));
    }

    /// Carries out operations for as long as the link can do so at once; passes over those that are too long.
    /// Returns how many the link has carried out. `outcomes` is scratch, and empty.
    fn carry_out(&mut self, link: &mut dyn Link, node: NodeId, outcomes: &mut Vec<Outcome>) -> usize {
        let mut carried_out = 0;
        loop {
            let left = &self.operations[self.next..];
            let wanted = left.iter().position(is_too_long).unwrap_or(left.len());
            link.run_all_now(&left[..wanted], outcomes);
            let done = outcomes.len();
            assert!(done <= wanted, "a link has carried out what it was not given");
            for (result, outcome) in self.results[self.next..].iter_mut().zip(outcomes.drain(..)) {
                *result = to_result(node, outcome);
            }
            self.next += done;
            carried_out += done;
            if done < wanted || self.next == self.operations.len() {
                return carried_out;
            }
            self.next += 1; // too long
        }
    }
}

fn is_too_long(posted: &Posted) -> bool {
    posted.local.bytes > MAX_TRANSFER_BYTES
}

impl Queue {
    /// Posts all operations of `batch` with one doorbell and waits for all of them; see [`Batch::results`].
    ///
    /// They are posted in the order added. When the queue is closed, all are [`OpError::NotSent`].
    /// Dropping the future keeps the batch's buffer until nothing of it is in flight.
    ///
    /// # Panics
    /// When the operations are on another node than this queue: a bug of the caller.
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

/// Carries out as much of a batch as can be done at once. Returns how many operations are left to be posted.
fn run_now(queue: &Queue, shared: &Shared, table: &mut Table, batch: &mut Batch) -> usize {
    let Table { queues, outcomes, .. } = table;
    let Some(link) = &mut queues[queue.index].link else { return 0 };
    let carried_out = batch.carry_out(&mut **link, queue.node, outcomes);
    if table.note_completed_at_once(carried_out) {
        table.poll(shared.clock.now_ns());
    }
    batch.operations[batch.next..].iter().filter(|posted| !is_too_long(posted)).count()
}

/// Hands what is left of a batch to its link. Returns the batch if all operations completed at once, else the
/// index under which the table keeps it.
fn post(
    queue: &Queue,
    shared: &Shared,
    table: &mut Table,
    mut batch: Batch,
    context: &mut Context<'_>,
) -> Result<Batch, u32> {
    let index = queue.index;
    if batch.next == batch.operations.len() || table.queues[index].link.is_none() {
        return Ok(batch);
    }
    let Scratch { mut posting, mut places, mut done } = table.take_scratch();
    for (place, posted) in batch.operations.iter().enumerate().skip(batch.next) {
        if !is_too_long(posted) {
            posting.push(Posted { slot: table.take_place(), ..*posted });
            places.push(place as u32);
        }
    }
    batch.next = batch.operations.len();
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
    table.return_scratch(Scratch { posting, places, done });
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::fakes::{at, queues};
    use crate::endpoint::table::AT_ONCE_PER_POLL;

    const EPOCH: Epoch = Epoch(1);
    const LONG: usize = MAX_TRANSFER_BYTES + 1;

    fn poll(running: &mut Running<'_>) -> Poll<Batch> {
        Pin::new(running).poll(&mut Context::from_waker(std::task::Waker::noop()))
    }

    #[test]
    fn each_result_is_in_its_place_however_much_is_carried_out_at_once_and_whatever_is_too_long() {
        let [(node, queue)] = queues();
        node.completes.set(true);
        let mut batch = Batch::new(queue.endpoint.arena().take(LONG).unwrap());
        for (at_once, bits) in (0..=6).flat_map(|at_once| (0..1 << 6).map(move |bits| (at_once, bits))) {
            let is_long = |place: usize| bits >> place & 1 == 1;
            let lengths: Vec<usize> = (0..6).map(|place| if is_long(place) { LONG } else { place }).collect();
            batch.clear();
            lengths.iter().zip(1..).for_each(|(length, offset)| batch.read(at(1, offset), EPOCH, 0..*length));
            node.at_once.set(at_once);
            node.lengths.borrow_mut().clear();
            let mut running = queue.run(batch);
            batch = loop {
                match poll(&mut running) {
                    Poll::Ready(batch) => break batch,
                    Poll::Pending => queue.endpoint.poll(),
                };
            };
            for (place, (result, offset)) in batch.results().iter().zip(1..).enumerate() {
                let expected =
                    if is_long(place) { Err(OpError::Refused(Refusal::TooLong)) } else { Ok(offset) };
                assert_eq!(*result, expected, "place {place} of {lengths:?}, {at_once} at once");
            }
            let sent: Vec<usize> = lengths.into_iter().filter(|length| *length != LONG).collect();
            assert_eq!(*node.lengths.borrow(), sent, "each once, in order, {at_once} at once");
        }
    }

    #[test]
    fn a_batch_that_waits_for_places_carries_nothing_out_twice() {
        let [(node, queue)] = queues();
        let endpoint = &queue.endpoint;
        let mut filling: Vec<Running<'_>> = Vec::new();
        loop {
            let mut batch = Batch::new(endpoint.arena().take(8).unwrap());
            (0..MAX_BATCH).for_each(|_| batch.fetch_and_add(at(1, 0), EPOCH, 1));
            filling.push(queue.run(batch));
            let before = node.lengths.borrow().len();
            assert!(poll(filling.last_mut().unwrap()).is_pending());
            if node.lengths.borrow().len() == before {
                break; // it waits for places
            }
        }
        node.at_once.set(2);
        let mut batch = Batch::new(endpoint.arena().take(8).unwrap());
        (0..MAX_BATCH as u64).for_each(|offset| batch.fetch_and_add(at(1, offset), EPOCH, 1));
        let mut running = queue.run(batch);
        let before = node.lengths.borrow().len();
        assert!((0..3).all(|_| poll(&mut running).is_pending()));
        assert_eq!(node.lengths.borrow().len(), before + 2);
        node.completes.set(true);
        let batch = loop {
            filling.retain_mut(|other| poll(other).is_pending());
            match poll(&mut running) {
                Poll::Ready(batch) => break batch,
                Poll::Pending => endpoint.poll(),
            };
        };
        assert!(batch.results().iter().copied().eq((0..MAX_BATCH as u64).map(Ok)));
    }

    #[test]
    fn batches_that_are_carried_out_at_once_leave_other_queues_their_turns() {
        let [(at_once, busy), (never, slow)] = queues();
        at_once.at_once.set(u32::MAX);
        let mut waiting = Box::pin(slow.detach(at(2, 0).region, EPOCH));
        assert!(waiting.as_mut().poll(&mut Context::from_waker(std::task::Waker::noop())).is_pending());
        let mut batch = Batch::new(busy.endpoint.arena().take(LONG).unwrap());
        for length in [8, LONG, 8] {
            batch.read(at(1, 0), EPOCH, 0..length);
        }
        // Each poll takes a fifth of the deadline.
        let polls = 3;
        for _ in 0..polls * AT_ONCE_PER_POLL / 2 {
            let Poll::Ready(done) = poll(&mut busy.run(batch)) else { panic!("it completes at once") };
            batch = done;
        }
        assert_eq!(never.polls.get(), polls);
    }

    #[test]
    fn a_cleared_batch_may_go_to_another_node() {
        let [(one, first), (other, second)] = queues();
        one.at_once.set(1);
        other.at_once.set(1);
        let mut batch = Batch::new(first.endpoint.arena().take(8).unwrap());
        batch.fetch_and_add(at(1, 1), EPOCH, 1);
        let Poll::Ready(mut batch) = poll(&mut first.run(batch)) else { panic!("it completes at once") };
        batch.clear();
        batch.fetch_and_add(at(2, 2), EPOCH, 1);
        let Poll::Ready(batch) = poll(&mut second.run(batch)) else { panic!("it completes at once") };
        assert_eq!(batch.results(), [Ok(2)]);
    }

    #[test]
    #[should_panic(expected = "an address of another node")]
    fn an_address_of_another_node_panics_when_it_is_added() {
        let [(_, queue)] = queues();
        let mut batch = Batch::new(queue.endpoint.arena().take(8).unwrap());
        batch.fetch_and_add(at(1, 0), EPOCH, 1);
        batch.fetch_and_add(at(2, 0), EPOCH, 1);
    }

    #[test]
    #[should_panic(expected = "an address of another node")]
    fn a_batch_for_another_node_panics_when_it_is_run() {
        let [(_, queue)] = queues();
        let mut batch = Batch::new(queue.endpoint.arena().take(8).unwrap());
        batch.fetch_and_add(at(2, 0), EPOCH, 1);
        drop(queue.run(batch));
    }
}
