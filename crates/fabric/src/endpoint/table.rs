//! The operations in flight on an endpoint: their places, buffers, deadlines and waiters.
//!
//! T1. A place is free, in flight or finished; the holder of its number (a future, a batch, a link) gives it
//!     back exactly once.
//! T2. All operations have the same timeout, so their deadlines pass in the order posted. The list of
//!     operations in flight has that order, and only its head is checked.
//! T3. Operations and batches that wait for places get them in the order in which they asked, so that single
//!     operations do not overtake a batch, which needs many places, for ever.
//! No allocation in the steady state: every vector keeps its capacity.

use std::collections::VecDeque;
use std::task::Waker;

use farpool_wire::{Hello, Incarnation, NodeId, SessionId};

use super::MAX_IN_FLIGHT;
use super::batch::Batch;
use crate::arena::ArenaBuf;
use crate::op::Uncertain;
use crate::seam::{Done, Link, Outcome, Peer, Posted, Transport};

/// How many operations may complete at once before those in flight are polled: some ten microseconds of small
/// ones.
pub(super) const AT_ONCE_PER_POLL: u32 = 32;

/// No neighbour.
const NONE: u32 = u32::MAX;

/// Everything that an endpoint has in flight.
pub(super) struct Table {
    pub(super) session_ids: Box<dyn FnMut() -> SessionId>,
    pub(super) queues: Vec<QueueState>,
    /// Queues with operations in flight.
    busy: Vec<u32>,
    operations: Vec<Operation>,
    free: Vec<u32>,
    /// The operations that have been in flight for the longest and the shortest time.
    oldest: u32,
    newest: u32,
    batches: Vec<BatchState>,
    free_batches: Vec<u32>,
    waiting: VecDeque<Waiter>,
    last_ticket: u64,
    sleeping: Vec<Sleeper>,
    /// Operations that were completed at once while others waited, since those were last polled.
    at_once: u32,
    scratch: Scratch,
    /// Scratch: the outcomes of operations that were carried out at once.
    pub(super) outcomes: Vec<Outcome>,
}

/// Kept for the capacity; empty while it is not lent.
#[derive(Default)]
pub(super) struct Scratch {
    /// Operations of a batch.
    pub(super) posting: Vec<Posted>,
    /// The place of each in the batch.
    pub(super) places: Vec<u32>,
    /// Completions.
    pub(super) done: Vec<Done>,
}

/// One queue: a session with a node, and the link of its present incarnation.
pub(super) struct QueueState {
    pub(super) peer: Peer,
    pub(super) session: SessionId,
    pub(super) incarnation: u64,
    pub(super) link: Option<Box<dyn Link>>,
    /// The node has answered something on this incarnation.
    pub(super) answered: bool,
    in_flight: usize,
    /// A handle exists; otherwise the place may be reused.
    pub(super) open: bool,
}

struct Operation {
    queue: u32,
    deadline_ns: u64,
    older: u32,
    newer: u32,
    state: State,
}

enum State {
    Free,
    InFlight {
        waker: Waker,
        buffer: Option<ArenaBuf>,
    },
    /// In flight, but its future was dropped; the buffer stays until the link is done with it.
    Abandoned {
        _buffer: Option<ArenaBuf>,
    },
    /// In flight as a part of a batch.
    Member {
        batch: u32,
        place: u32,
    },
    Finished {
        outcome: Outcome,
        buffer: Option<ArenaBuf>,
    },
}

/// A batch with operations in flight.
struct BatchState {
    batch: Option<Batch>,
    unfinished: u32,
    /// `None`: its future was dropped.
    waker: Option<Waker>,
}

struct Waiter {
    ticket: u64,
    waker: Waker,
}

struct Sleeper {
    ticket: u64,
    until_ns: u64,
    waker: Waker,
}

/// What a finished single operation gives back.
pub(super) type Settled = (Outcome, Option<ArenaBuf>);

impl Table {
    pub(super) fn new(session_ids: Box<dyn FnMut() -> SessionId>) -> Self {
        Table {
            session_ids,
            queues: Vec::new(),
            busy: Vec::new(),
            operations: Vec::new(),
            free: Vec::new(),
            oldest: NONE,
            newest: NONE,
            batches: Vec::new(),
            free_batches: Vec::new(),
            waiting: VecDeque::new(),
            last_ticket: 0,
            sleeping: Vec::new(),
            at_once: 0,
            scratch: Scratch::default(),
            outcomes: Vec::new(),
        }
    }

    /// Counts operations that completed at once. Returns whether so many did that those in flight have to be
    /// polled: a task that posts one after the other never returns to the executor.
    pub(super) fn note_completed_at_once(&mut self, operations: usize) -> bool {
        if self.busy.is_empty() {
            return false;
        }
        self.at_once += operations as u32;
        if self.at_once < AT_ONCE_PER_POLL {
            return false;
        }
        self.at_once = 0;
        true
    }

    /// Sends and collects on every busy queue, wakes sleepers, ends overdue operations; returns how many
    /// operations ended.
    pub(super) fn poll(&mut self, now_ns: u64) -> usize {
        let mut ended = 0;
        let mut done = std::mem::take(&mut self.scratch.done);
        let mut at = 0;
        while let Some(&index) = self.busy.get(at) {
            let queue = &mut self.queues[index as usize];
            if let Some(link) = queue.link.as_mut() {
                let polled = link.poll(&mut done);
                queue.answered |= !done.is_empty();
                ended += done.len();
                for finished in done.drain(..) {
                    self.finish(finished.slot, finished.outcome);
                }
                if let Err(closed) = polled {
                    ended += self.close(index as usize, closed.cause);
                }
            }
            // A queue that became idle has left its place to the last one.
            at += usize::from(self.busy.get(at) == Some(&index));
        }
        self.scratch.done = done;
        if !self.sleeping.is_empty() {
            self.sleeping
                .extract_if(.., |sleeper| sleeper.until_ns <= now_ns)
                .for_each(|sleeper| sleeper.waker.wake());
        }
        ended + self.close_overdue(now_ns)
    }

    fn close_overdue(&mut self, now_ns: u64) -> usize {
        let mut ended = 0;
        while let Some(oldest) = self.operations.get(self.oldest as usize)
            && oldest.deadline_ns <= now_ns
        {
            ended += self.close(oldest.queue as usize, Uncertain::Deadline);
        }
        ended
    }

    /// The earliest deadline or end of a sleep.
    pub(super) fn next_deadline_ns(&self) -> Option<u64> {
        let oldest = self.operations.get(self.oldest as usize).map(|operation| operation.deadline_ns);
        self.sleeping.iter().map(|sleeper| sleeper.until_ns).chain(oldest).min()
    }

    /// Wakes the holder of `ticket` at that time. A sleeper without a ticket gets one.
    pub(super) fn sleep_until(&mut self, until_ns: u64, ticket: &mut Option<u64>, waker: &Waker) {
        let known = ticket.and_then(|ticket| self.sleeping.iter_mut().find(|known| known.ticket == ticket));
        match known {
            Some(sleeper) => sleeper.waker.clone_from(waker),
            None => {
                self.last_ticket += 1;
                *ticket = Some(self.last_ticket);
                self.sleeping.push(Sleeper { ticket: self.last_ticket, until_ns, waker: waker.clone() });
            }
        }
    }

    /// Forgets the sleeper that held `ticket`.
    pub(super) fn stop_sleeping(&mut self, ticket: u64) {
        self.sleeping.retain(|sleeper| sleeper.ticket != ticket);
    }

    #[cfg(test)]
    pub(super) fn sleepers(&self) -> usize {
        self.sleeping.len()
    }

    pub(super) fn is_waiting(&self) -> bool {
        !self.busy.is_empty()
    }

    /// The queues that have operations in flight.
    pub(super) fn busy_queues(&self) -> impl Iterator<Item = &QueueState> {
        self.busy.iter().map(|&index| &self.queues[index as usize])
    }

    /// Drops the link, so that it touches no buffer any more, then ends all operations in flight on it;
    /// returns how many.
    pub(super) fn close(&mut self, index: usize, cause: Uncertain) -> usize {
        self.queues[index].link = None;
        let mut ended = 0;
        let mut next = self.oldest;
        while next != NONE {
            let slot = next;
            let operation = &self.operations[slot as usize];
            next = operation.newer;
            if operation.queue as usize == index {
                self.finish(slot, Outcome::Unknown(cause));
                ended += 1;
            }
        }
        ended
    }

    /// A place for a new queue: that of a closed one, or the next.
    pub(super) fn place_queue(&mut self, state: QueueState) -> usize {
        match self.queues.iter().position(|queue| !queue.open && queue.in_flight == 0) {
            Some(place) => {
                self.queues[place] = state;
                place
            }
            None => {
                self.queues.push(state);
                self.queues.len() - 1
            }
        }
    }

    /// Whether the holder of `ticket` may take `wanted` places. If not, it gets a ticket and is woken when it
    /// is worth asking again.
    #[inline]
    pub(super) fn admit(&mut self, wanted: usize, ticket: &mut Option<u64>, waker: &Waker) -> bool {
        let first = self.waiting.front().map(|waiter| waiter.ticket);
        if first.is_none_or(|first| *ticket == Some(first)) && self.places_left() >= wanted {
            if ticket.take().is_some() {
                self.waiting.pop_front();
                self.wake_first();
            }
            return true;
        }
        let known = ticket.and_then(|ticket| self.waiting.iter_mut().find(|waiter| waiter.ticket == ticket));
        match known {
            Some(waiter) => waiter.waker.clone_from(waker),
            None => {
                self.last_ticket += 1;
                *ticket = Some(self.last_ticket);
                self.waiting.push_back(Waiter { ticket: self.last_ticket, waker: waker.clone() });
            }
        }
        false
    }

    /// Forgets the waiter that held `ticket`.
    pub(super) fn leave(&mut self, ticket: u64) {
        self.waiting.retain(|waiter| waiter.ticket != ticket);
        self.wake_first();
    }

    fn wake_first(&self) {
        if let Some(first) = self.waiting.front() {
            first.waker.wake_by_ref();
        }
    }

    fn places_left(&self) -> usize {
        self.free.len() + (MAX_IN_FLIGHT - self.operations.len())
    }

    /// Takes a place.
    ///
    /// # Panics
    /// When there is none: [`Table::admit`] comes first.
    #[inline]
    pub(super) fn take_place(&mut self) -> u32 {
        if let Some(slot) = self.free.pop() {
            return slot;
        }
        assert!(self.operations.len() < MAX_IN_FLIGHT, "a place was taken without being admitted");
        self.operations.push(Operation {
            queue: 0,
            deadline_ns: 0,
            older: NONE,
            newer: NONE,
            state: State::Free,
        });
        self.operations.len() as u32 - 1
    }

    /// Gives back a place that was taken but never in flight.
    #[inline]
    pub(super) fn return_place(&mut self, slot: u32) {
        self.free.push(slot);
        self.wake_first();
    }

    /// Enters a single operation in flight; its buffer belongs to the table from now on.
    pub(super) fn launch(
        &mut self,
        slot: u32,
        queue: usize,
        deadline_ns: u64,
        waker: Waker,
        buffer: Option<ArenaBuf>,
    ) {
        self.enlist(slot, queue, deadline_ns, State::InFlight { waker, buffer });
    }

    /// Enters an operation of a batch in flight.
    pub(super) fn launch_member(
        &mut self,
        slot: u32,
        queue: usize,
        deadline_ns: u64,
        batch: u32,
        place: u32,
    ) {
        self.batches[batch as usize].unfinished += 1;
        self.enlist(slot, queue, deadline_ns, State::Member { batch, place });
    }

    fn enlist(&mut self, slot: u32, queue: usize, deadline_ns: u64, state: State) {
        let older = std::mem::replace(&mut self.newest, slot);
        match self.operations.get_mut(older as usize) {
            Some(older) => older.newer = slot,
            None => self.oldest = slot,
        }
        self.operations[slot as usize] =
            Operation { queue: queue as u32, deadline_ns, older, newer: NONE, state };
        let state = &mut self.queues[queue];
        state.in_flight += 1;
        if state.in_flight == 1 {
            self.busy.push(queue as u32);
        }
    }

    fn delist(&mut self, slot: u32) {
        let Operation { queue, older, newer, .. } = self.operations[slot as usize];
        match self.operations.get_mut(older as usize) {
            Some(older) => older.newer = newer,
            None => self.oldest = newer,
        }
        match self.operations.get_mut(newer as usize) {
            Some(newer) => newer.older = older,
            None => self.newest = older,
        }
        let state = &mut self.queues[queue as usize];
        state.in_flight -= 1;
        if state.in_flight == 0 {
            let place = self.busy.iter().position(|&busy| busy == queue).expect("it was busy");
            self.busy.swap_remove(place);
        }
    }

    /// Ends an operation. Ending it again changes nothing.
    fn finish(&mut self, slot: u32, outcome: Outcome) {
        let Some(operation) = self.operations.get_mut(slot as usize) else { return };
        match std::mem::replace(&mut operation.state, State::Free) {
            State::InFlight { waker, buffer } => {
                operation.state = State::Finished { outcome, buffer };
                self.delist(slot);
                waker.wake();
            }
            State::Abandoned { .. } => {
                self.delist(slot);
                self.return_place(slot);
            }
            State::Member { batch, place } => {
                let node = self.queues[operation.queue as usize].peer.node;
                self.delist(slot);
                let state = &mut self.batches[batch as usize];
                state.unfinished -= 1;
                if let Some(batch) = &mut state.batch {
                    batch.settle(place, node, outcome);
                }
                if state.unfinished == 0 {
                    match state.waker.take() {
                        Some(waker) => waker.wake(),
                        None => drop(self.take_batch(batch)),
                    }
                }
                self.return_place(slot);
            }
            state @ (State::Free | State::Finished { .. }) => operation.state = state,
        }
    }

    /// The outcome of a launched operation, if it has ended; its place is then free.
    pub(super) fn take_finished(&mut self, slot: u32, waker: &Waker) -> Option<Settled> {
        let state = &mut self.operations[slot as usize].state;
        match state {
            State::InFlight { waker: known, .. } => {
                known.clone_from(waker);
                None
            }
            State::Finished { .. } => {
                let State::Finished { outcome, buffer } = std::mem::replace(state, State::Free) else {
                    unreachable!("matched above")
                };
                self.return_place(slot);
                Some((outcome, buffer))
            }
            State::Free | State::Abandoned { .. } | State::Member { .. } => {
                unreachable!("a launched operation owns its place")
            }
        }
    }

    /// Notes that the future of a launched operation was dropped.
    pub(super) fn abandon(&mut self, slot: u32) {
        let state = &mut self.operations[slot as usize].state;
        match std::mem::replace(state, State::Free) {
            State::InFlight { buffer, .. } => *state = State::Abandoned { _buffer: buffer },
            _ => self.return_place(slot),
        }
    }

    /// Enters the outcome of an operation of a kept batch that was never in flight.
    pub(super) fn settle_member(&mut self, index: u32, place: u32, node: NodeId, outcome: Outcome) {
        if let Some(batch) = &mut self.batches[index as usize].batch {
            batch.settle(place, node, outcome);
        }
    }

    /// Lends the scratch for posting a batch.
    pub(super) fn take_scratch(&mut self) -> Scratch {
        std::mem::take(&mut self.scratch)
    }

    pub(super) fn return_scratch(&mut self, mut scratch: Scratch) {
        scratch.posting.clear();
        scratch.places.clear();
        scratch.done.clear();
        self.scratch = scratch;
    }

    /// Keeps a batch while parts of it are in flight.
    pub(super) fn keep_batch(&mut self, batch: Batch, waker: Waker) -> u32 {
        let state = BatchState { batch: Some(batch), unfinished: 0, waker: Some(waker) };
        match self.free_batches.pop() {
            Some(place) => {
                self.batches[place as usize] = state;
                place
            }
            None => {
                self.batches.push(state);
                self.batches.len() as u32 - 1
            }
        }
    }

    /// The batch, if none of its operations is in flight any more.
    pub(super) fn take_finished_batch(&mut self, index: u32, waker: &Waker) -> Option<Batch> {
        let state = &mut self.batches[index as usize];
        if state.unfinished > 0 {
            match &mut state.waker {
                Some(known) => known.clone_from(waker),
                None => state.waker = Some(waker.clone()),
            }
            return None;
        }
        self.take_batch(index)
    }

    fn take_batch(&mut self, index: u32) -> Option<Batch> {
        self.free_batches.push(index);
        self.batches[index as usize].batch.take()
    }

    /// Notes that the future of the batch was dropped; its buffer stays until none of its operations is in
    /// flight.
    pub(super) fn abandon_batch(&mut self, index: u32) {
        let state = &mut self.batches[index as usize];
        state.waker = None;
        if state.unfinished == 0 {
            drop(self.take_batch(index));
        }
    }
}

impl QueueState {
    pub(super) fn new(peer: Peer, session: SessionId) -> Self {
        QueueState { peer, session, incarnation: 0, link: None, answered: false, in_flight: 0, open: true }
    }

    /// Opens the link of the next incarnation.
    pub(super) fn connect(&mut self, transport: &dyn Transport) -> std::io::Result<()> {
        self.link = None;
        self.answered = false;
        self.incarnation += 1;
        let hello =
            Hello { session: self.session, incarnation: Incarnation(self.incarnation), node: self.peer.node };
        self.link = Some(transport.open(&self.peer, hello)?);
        Ok(())
    }
}
