//! A thread's end of the fabric: its queues, the operations in flight, their buffers and deadlines.
//!
//! E1. An operation's buffer belongs to the table of operations from posting until its link has completed it
//!     or was dropped; dropping the future does not free it earlier.
//! E2. Every operation ends: completed, refused, or *unknown* when its deadline passes or its link closes.
//! E3. Once one operation of a queue is unknown for want of an answer, the queue is closed; only
//!     [`Queue::reconnect`], a new incarnation, opens it again.
//! E4. At most [`MAX_IN_FLIGHT`] operations are in flight on an endpoint; the next ones wait for a place.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use farpool_wire::{
    AccessKey, Epoch, Hello, Incarnation, MAX_CALL_BYTES, MAX_TRANSFER_BYTES, NodeId, Refusal, RegionId,
    RemoteAddr, SessionId,
};

use crate::arena::{Arena, ArenaBuf};
use crate::clock::Clock;
use crate::op::{CallAnswer, OpError, Uncertain};
use crate::seam::{Done, Link, LocalSlice, Op, Outcome, Peer, Posted, Transport};

/// Operations in flight per endpoint (paper 1, section 4.2: 128 transfers per staging buffer).
pub const MAX_IN_FLIGHT: usize = 128;

/// What an endpoint is made of.
pub struct EndpointConfig {
    /// Opens links.
    pub transport: Rc<dyn Transport>,
    /// Tells the time.
    pub clock: Rc<dyn Clock>,
    /// Gives session ids, unique among all clients of a node; random bits outside the simulator.
    pub session_ids: Box<dyn FnMut() -> SessionId>,
    /// Size of the staging arena.
    pub arena_bytes: usize,
    /// From posting to *unknown*.
    pub deadline: Duration,
}

/// One thread's end of the fabric. Clones share it.
#[derive(Clone)]
pub struct Endpoint {
    shared: Rc<Shared>,
}

struct Shared {
    transport: Rc<dyn Transport>,
    clock: Rc<dyn Clock>,
    arena: Arena,
    deadline_ns: u64,
    table: RefCell<Table>,
}

struct Table {
    session_ids: Box<dyn FnMut() -> SessionId>,
    queues: Vec<QueueState>,
    operations: Vec<Operation>,
    free: Vec<u32>,
    /// Who waits for a place in the table.
    waiting: Vec<Waker>,
    /// Who sleeps, and until when.
    sleeping: Vec<(u64, Waker)>,
    /// Scratch for completions, kept for its capacity.
    done: Vec<Done>,
}

struct QueueState {
    peer: Peer,
    session: SessionId,
    incarnation: u64,
    link: Option<Box<dyn Link>>,
    in_flight: usize,
    /// A handle exists; otherwise the place is reused.
    open: bool,
}

/// A place in the table of operations.
struct Operation {
    queue: usize,
    deadline_ns: u64,
    /// Held for the transport; see E1.
    buffer: Option<ArenaBuf>,
    state: OperationState,
}

enum OperationState {
    Free,
    InFlight(Option<Waker>),
    /// In flight, but nobody wants the outcome.
    Abandoned,
    Finished(Outcome),
}

impl Endpoint {
    /// An endpoint without queues.
    pub fn new(config: EndpointConfig) -> Self {
        Endpoint {
            shared: Rc::new(Shared {
                transport: config.transport,
                clock: config.clock,
                arena: Arena::new(config.arena_bytes),
                deadline_ns: config.deadline.as_nanos() as u64,
                table: RefCell::new(Table {
                    session_ids: config.session_ids,
                    queues: Vec::new(),
                    operations: Vec::new(),
                    free: Vec::new(),
                    waiting: Vec::new(),
                    sleeping: Vec::new(),
                    done: Vec::new(),
                }),
            }),
        }
    }

    /// The staging arena.
    pub fn arena(&self) -> &Arena {
        &self.shared.arena
    }

    /// The endpoint's clock.
    pub fn now_ns(&self) -> u64 {
        self.shared.clock.now_ns()
    }

    /// Opens a queue to a node. The connection may still be under way; operations may be posted at once.
    pub fn open(&self, peer: Peer) -> std::io::Result<Queue> {
        let mut table = self.shared.table.borrow_mut();
        let session = (table.session_ids)();
        let mut state = QueueState { peer, session, incarnation: 0, link: None, in_flight: 0, open: true };
        state.connect(&*self.shared.transport)?;
        let free = table.queues.iter().position(|queue| !queue.open && queue.in_flight == 0);
        let index = free.unwrap_or(table.queues.len());
        let node = state.peer.node;
        match free {
            Some(place) => table.queues[place] = state,
            None => table.queues.push(state),
        }
        drop(table);
        Ok(Queue { endpoint: self.clone(), index, node })
    }

    /// Sends what is waiting, collects what has finished, closes queues whose deadline has passed.
    /// Returns how many operations ended. Never blocks.
    pub fn poll(&self) -> usize {
        self.shared.table.borrow_mut().poll(self.shared.clock.now_ns())
    }

    /// When [`Endpoint::poll`] has something to do even if nothing arrives: the earliest deadline or end of a sleep.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        let table = self.shared.table.borrow();
        let in_flight = table.operations.iter().filter(|operation| operation.is_in_flight());
        let sleeps = table.sleeping.iter().map(|&(until, _)| until);
        in_flight.map(|operation| operation.deadline_ns).chain(sleeps).min()
    }

    /// Sleeps by the endpoint's clock.
    pub async fn sleep(&self, duration: Duration) {
        let until = self.now_ns().saturating_add(duration.as_nanos() as u64);
        std::future::poll_fn(|context| {
            if self.now_ns() >= until {
                return Poll::Ready(());
            }
            self.shared.table.borrow_mut().sleeping.push((until, context.waker().clone()));
            Poll::Pending
        })
        .await;
    }

    /// Whether any operation is in flight.
    pub(crate) fn is_waiting(&self) -> bool {
        self.shared.table.borrow().queues.iter().any(|queue| queue.in_flight > 0)
    }

    /// Calls `visit` with the readiness of each link that has operations in flight; false when one of them
    /// can only be polled.
    pub(crate) fn for_each_busy_link(&self, mut visit: impl FnMut(crate::seam::Readiness<'_>)) -> bool {
        let table = self.shared.table.borrow();
        let mut all_can_wait = true;
        for queue in table.queues.iter().filter(|queue| queue.in_flight > 0) {
            match queue.link.as_ref().and_then(|link| link.readiness()) {
                Some(readiness) => visit(readiness),
                None => all_can_wait = false,
            }
        }
        all_can_wait
    }

    /// Gives other tasks of this thread a turn, and the fabric a poll.
    pub fn yield_now(&self) -> impl Future<Output = ()> + use<> {
        let mut yielded = false;
        std::future::poll_fn(move |context| {
            if yielded {
                return Poll::Ready(());
            }
            yielded = true;
            context.waker().wake_by_ref();
            Poll::Pending
        })
    }
}

impl Table {
    fn poll(&mut self, now_ns: u64) -> usize {
        let mut ended = 0;
        let mut done = std::mem::take(&mut self.done);
        for index in 0..self.queues.len() {
            let queue = &mut self.queues[index];
            if queue.in_flight == 0 {
                continue;
            }
            let Some(link) = queue.link.as_mut() else { continue };
            let polled = link.poll(&mut done);
            ended += done.len();
            for finished in done.drain(..) {
                self.finish(finished.slot, finished.outcome);
            }
            if let Err(closed) = polled {
                ended += self.close(index, closed.cause);
            }
        }
        self.done = done;
        self.sleeping.extract_if(.., |&mut (until, _)| until <= now_ns).for_each(|(_, waker)| waker.wake());
        ended + self.close_overdue(now_ns)
    }

    fn close_overdue(&mut self, now_ns: u64) -> usize {
        let mut ended = 0;
        for slot in 0..self.operations.len() {
            let operation = &self.operations[slot];
            if operation.is_in_flight() && operation.deadline_ns <= now_ns {
                ended += self.close(operation.queue, Uncertain::Deadline);
            }
        }
        ended
    }

    /// Drops the link, so that it touches no buffer any more, then ends all that was in flight on it.
    fn close(&mut self, index: usize, cause: Uncertain) -> usize {
        self.queues[index].link = None;
        let mut ended = 0;
        for slot in 0..self.operations.len() {
            let operation = &self.operations[slot];
            if operation.is_in_flight() && operation.queue == index {
                self.finish(slot as u32, Outcome::Unknown(cause));
                ended += 1;
            }
        }
        ended
    }

    fn finish(&mut self, slot: u32, outcome: Outcome) {
        let operation = &mut self.operations[slot as usize];
        match std::mem::replace(&mut operation.state, OperationState::Finished(outcome)) {
            OperationState::InFlight(waker) => {
                self.queues[operation.queue].in_flight -= 1;
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            OperationState::Abandoned => {
                self.queues[operation.queue].in_flight -= 1;
                self.release(slot);
            }
            state @ (OperationState::Free | OperationState::Finished(_)) => operation.state = state,
        }
    }

    /// Takes the outcome and the buffer out of a finished place and frees it.
    fn release(&mut self, slot: u32) -> Option<ArenaBuf> {
        let operation = &mut self.operations[slot as usize];
        operation.state = OperationState::Free;
        let buffer = operation.buffer.take();
        self.free.push(slot);
        // All of them: the one in front may have given up meanwhile.
        self.waiting.drain(..).for_each(Waker::wake);
        buffer
    }

    fn place(&mut self) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        if self.operations.len() == MAX_IN_FLIGHT {
            return None;
        }
        self.operations.push(Operation {
            queue: 0,
            deadline_ns: 0,
            buffer: None,
            state: OperationState::Free,
        });
        Some(self.operations.len() as u32 - 1)
    }
}

impl Operation {
    fn is_in_flight(&self) -> bool {
        matches!(self.state, OperationState::InFlight(_) | OperationState::Abandoned)
    }
}

impl QueueState {
    fn connect(&mut self, transport: &dyn Transport) -> std::io::Result<()> {
        self.link = None;
        self.incarnation += 1;
        let hello =
            Hello { session: self.session, incarnation: Incarnation(self.incarnation), node: self.peer.node };
        self.link = Some(transport.open(&self.peer, hello)?);
        Ok(())
    }
}

/// One connection to one node. Dropping it closes it.
pub struct Queue {
    endpoint: Endpoint,
    index: usize,
    node: NodeId,
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

    /// False once an answer failed to come; [`Queue::reconnect`] then opens a new incarnation.
    pub fn is_open(&self) -> bool {
        self.endpoint.shared.table.borrow().queues[self.index].link.is_some()
    }

    /// Opens a new incarnation: once the node answers it, nothing of an older one takes effect any more.
    /// Regions have to be attached again. What was in flight ends as *unknown*.
    pub fn reconnect(&self) -> std::io::Result<()> {
        let mut table = self.endpoint.shared.table.borrow_mut();
        table.close(self.index, Uncertain::ConnectionLost);
        table.queues[self.index].connect(&*self.endpoint.shared.transport)
    }

    /// Opens a leased region for this queue. One-sided operations on it are refused before.
    pub async fn attach(&self, region: RegionId, epoch: Epoch, key: AccessKey) -> Result<(), OpError> {
        let target = Target { region, epoch, offset: 0 };
        self.post(Op::Attach(key), target, None, false).await.1.map(drop)
    }

    /// Lets go of a region.
    pub async fn detach(&self, region: RegionId, epoch: Epoch) -> Result<(), OpError> {
        self.post(Op::Detach, Target { region, epoch, offset: 0 }, None, false).await.1.map(drop)
    }

    /// Fills `buffer` from far memory; it comes back either way, its contents undefined after an error.
    pub async fn read(
        &self,
        from: RemoteAddr,
        epoch: Epoch,
        buffer: ArenaBuf,
    ) -> (ArenaBuf, Result<(), OpError>) {
        self.transfer(Op::Read, from, epoch, buffer).await
    }

    /// Copies `buffer` to far memory.
    pub async fn write(
        &self,
        to: RemoteAddr,
        epoch: Epoch,
        buffer: ArenaBuf,
    ) -> (ArenaBuf, Result<(), OpError>) {
        self.transfer(Op::Write, to, epoch, buffer).await
    }

    async fn transfer(
        &self,
        op: Op,
        at: RemoteAddr,
        epoch: Epoch,
        buffer: ArenaBuf,
    ) -> (ArenaBuf, Result<(), OpError>) {
        if buffer.len() > MAX_TRANSFER_BYTES {
            return (buffer, Err(OpError::Refused(Refusal::TooLong)));
        }
        let (buffer, result) = self.post(op, Target::of(at, epoch), Some(buffer), false).await;
        (buffer.expect("the buffer comes back with its outcome"), result.map(drop))
    }

    /// Puts `new` in place of `expected` at an aligned word; returns the word before.
    pub async fn compare_and_swap(
        &self,
        at: RemoteAddr,
        epoch: Epoch,
        expected: u64,
        new: u64,
    ) -> Result<u64, OpError> {
        let op = Op::CompareAndSwap { expected, new };
        self.post(op, Target::of(at, epoch), None, false).await.1
    }

    /// Adds to an aligned word, wrapping; returns the word before.
    pub async fn fetch_and_add(&self, at: RemoteAddr, epoch: Epoch, addend: u64) -> Result<u64, OpError> {
        self.post(Op::FetchAndAdd { addend }, Target::of(at, epoch), None, false).await.1
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

    /// Posts an operation that waits for every READ and atomic posted before it on this queue.
    pub async fn write_fenced(
        &self,
        to: RemoteAddr,
        epoch: Epoch,
        buffer: ArenaBuf,
    ) -> (ArenaBuf, Result<(), OpError>) {
        let (buffer, result) = self.post(Op::Write, Target::of(to, epoch), Some(buffer), true).await;
        (buffer.expect("the buffer comes back with its outcome"), result.map(drop))
    }

    fn post(&self, op: Op, target: Target, buffer: Option<ArenaBuf>, fence: bool) -> Operating<'_> {
        debug_assert_eq!(target.region.node, self.node, "an address of another node");
        Operating { queue: self, op, target, fence, stage: Stage::Unposted(buffer) }
    }

    fn outcome_to_result(&self, outcome: Outcome) -> Result<u64, OpError> {
        match outcome {
            Outcome::Done(value) => Ok(value),
            Outcome::Refused(refusal) => Err(OpError::Refused(refusal)),
            Outcome::Unknown(cause) => Err(OpError::Unknown { node: self.node, cause }),
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let mut table = self.endpoint.shared.table.borrow_mut();
        table.close(self.index, Uncertain::ConnectionLost);
        table.queues[self.index].open = false;
    }
}

#[derive(Clone, Copy)]
struct Target {
    region: RegionId,
    epoch: Epoch,
    offset: u64,
}

impl Target {
    fn of(at: RemoteAddr, epoch: Epoch) -> Self {
        Target { region: at.region, epoch, offset: at.offset }
    }
}

/// An operation, from before it is posted to its outcome.
struct Operating<'a> {
    queue: &'a Queue,
    op: Op,
    target: Target,
    fence: bool,
    stage: Stage,
}

enum Stage {
    Unposted(Option<ArenaBuf>),
    Posted(u32),
    Over,
}

impl Future for Operating<'_> {
    type Output = (Option<ArenaBuf>, Result<u64, OpError>);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let shared = this.queue.endpoint.shared.clone();
        let mut table = shared.table.borrow_mut();
        match std::mem::replace(&mut this.stage, Stage::Over) {
            Stage::Unposted(buffer) => this.poll_unposted(&shared, &mut table, buffer, context),
            Stage::Posted(slot) => this.poll_posted(&mut table, slot, context),
            Stage::Over => panic!("polled after its outcome"),
        }
    }
}

impl Operating<'_> {
    fn poll_unposted(
        &mut self,
        shared: &Shared,
        table: &mut Table,
        buffer: Option<ArenaBuf>,
        context: &mut Context<'_>,
    ) -> Poll<(Option<ArenaBuf>, Result<u64, OpError>)> {
        let node = self.queue.node;
        let index = self.queue.index;
        if table.queues[index].link.is_none() {
            return Poll::Ready((buffer, Err(OpError::NotSent { node })));
        }
        let Some(slot) = table.place() else {
            table.waiting.push(context.waker().clone());
            self.stage = Stage::Unposted(buffer);
            return Poll::Pending;
        };
        let posted = Posted {
            slot,
            op: self.op,
            region: self.target.region.index,
            epoch: self.target.epoch,
            offset: self.target.offset,
            local: buffer.as_ref().map_or(LocalSlice::NONE, ArenaBuf::as_local),
            fence: self.fence,
        };
        // The buffer is in the table before the link sees it (E1).
        table.operations[slot as usize] = Operation {
            queue: index,
            deadline_ns: shared.clock.now_ns().saturating_add(shared.deadline_ns),
            buffer,
            state: OperationState::InFlight(Some(context.waker().clone())),
        };
        let queue = &mut table.queues[index];
        queue.in_flight += 1;
        let link = queue.link.as_mut().expect("checked above");
        match link.post(posted) {
            Some(outcome) => {
                queue.in_flight -= 1;
                let buffer = table.release(slot);
                Poll::Ready((buffer, self.queue.outcome_to_result(outcome)))
            }
            None => {
                self.stage = Stage::Posted(slot);
                Poll::Pending
            }
        }
    }

    fn poll_posted(
        &mut self,
        table: &mut Table,
        slot: u32,
        context: &mut Context<'_>,
    ) -> Poll<(Option<ArenaBuf>, Result<u64, OpError>)> {
        match &mut table.operations[slot as usize].state {
            OperationState::Finished(outcome) => {
                let outcome = *outcome;
                let buffer = table.release(slot);
                Poll::Ready((buffer, self.queue.outcome_to_result(outcome)))
            }
            OperationState::InFlight(waker) => {
                if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
                    *waker = Some(context.waker().clone());
                }
                self.stage = Stage::Posted(slot);
                Poll::Pending
            }
            OperationState::Free | OperationState::Abandoned => {
                unreachable!("a posted operation owns its place")
            }
        }
    }
}

impl Drop for Operating<'_> {
    fn drop(&mut self) {
        let Stage::Posted(slot) = self.stage else { return };
        let mut table = self.queue.endpoint.shared.table.borrow_mut();
        match table.operations[slot as usize].state {
            OperationState::InFlight(_) => {
                table.operations[slot as usize].state = OperationState::Abandoned;
            }
            _ => drop(table.release(slot)),
        }
    }
}
