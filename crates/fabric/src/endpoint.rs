//! A thread's end of the fabric: its queues, the operations in flight, their buffers and deadlines.
//!
//! E1. An operation's buffer belongs to the endpoint from posting until its link has completed it or was
//!     dropped; dropping the future does not free it earlier.
//! E2. Every operation ends: completed, refused, or *unknown* when its deadline passes or its link closes.
//! E3. Once an operation of a queue ends as unknown because no answer came, the queue is closed; only
//!     [`Queue::reconnect`], a new incarnation, opens it again.
//! E4. At most [`MAX_IN_FLIGHT`] operations are in flight on an endpoint; the next ones wait for a place.

mod batch;
#[cfg(test)]
mod fakes;
mod operation;
mod queue;
mod sleep;
mod table;
mod turns;

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use farpool_wire::SessionId;

use crate::arena::Arena;
use crate::clock::{Clock, MonotonicClock};
use crate::seam::{Peer, Readiness, Transport};
pub use batch::{Batch, Running};
pub use queue::{ChangingWord, Queue, Transferring};
use sleep::Sleep;
use table::{QueueState, Table};
pub use turns::Turns;

/// Operations in flight per endpoint (paper 1, section 4.2: 128 transfers per staging buffer).
pub const MAX_IN_FLIGHT: usize = 128;

/// Operations in one batch: half of what may be in flight, so that a second one can be posted meanwhile.
pub const MAX_BATCH: usize = MAX_IN_FLIGHT / 2;

/// The parts of an endpoint.
pub struct EndpointConfig {
    /// Opens links.
    pub transport: Rc<dyn Transport>,
    /// Tells the time.
    pub clock: Rc<dyn Clock>,
    /// Yields session ids, unique among all clients of a node; random bits outside the simulator.
    pub session_ids: Box<dyn FnMut() -> SessionId>,
    /// Size of the staging arena.
    pub arena_bytes: usize,
    /// Time limit of an operation, counted from posting. After it, the operation ends as *unknown*.
    pub deadline: Duration,
}

impl EndpointConfig {
    /// The parts of an endpoint outside of simulations: the monotonic clock, and random session ids.
    pub fn real(transport: Rc<dyn Transport>, arena_bytes: usize, deadline: Duration) -> Self {
        EndpointConfig {
            transport,
            clock: Rc::new(MonotonicClock),
            session_ids: Box::new(|| SessionId(getrandom::u64().expect("the kernel gives random bytes"))),
            arena_bytes,
            deadline,
        }
    }
}

/// One thread's end of the fabric. Clones share it.
#[derive(Clone)]
pub struct Endpoint {
    shared: Rc<Shared>,
}

// The table comes first: its links are dropped before the transport and the arena that they use.
struct Shared {
    table: RefCell<Table>,
    transport: Rc<dyn Transport>,
    clock: Rc<dyn Clock>,
    arena: Arena,
    deadline_ns: u64,
    turns: Turns,
}

impl Shared {
    fn deadline_from_now(&self) -> u64 {
        self.clock.now_ns().saturating_add(self.deadline_ns)
    }
}

/// A duration in the clock's unit. One that does not fit becomes the longest one, which never ends.
fn in_ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Endpoint {
    /// An endpoint without queues. Ends the process when there is no memory for its arena.
    pub fn new(config: EndpointConfig) -> Self {
        let arena = Arena::new(config.arena_bytes);
        Self::with_arena(config, arena)
    }

    /// As [`new`](Self::new), for callers that can do without an endpoint.
    ///
    /// # Errors
    /// When there is no memory for the arena.
    pub fn try_new(config: EndpointConfig) -> std::io::Result<Self> {
        let arena = Arena::try_new(config.arena_bytes)?;
        Ok(Self::with_arena(config, arena))
    }

    fn with_arena(config: EndpointConfig, arena: Arena) -> Self {
        config.transport.local_memory(arena.as_local());
        Endpoint {
            shared: Rc::new(Shared {
                table: RefCell::new(Table::new(config.session_ids)),
                transport: config.transport,
                clock: config.clock,
                arena,
                deadline_ns: in_ns(config.deadline),
                turns: Turns::default(),
            }),
        }
    }

    /// The staging arena.
    pub fn arena(&self) -> &Arena {
        &self.shared.arena
    }

    /// Time limit of an operation, counted from posting. After it, the operation ends as *unknown*.
    pub fn deadline(&self) -> Duration {
        Duration::from_nanos(self.shared.deadline_ns)
    }

    /// The endpoint's clock.
    pub fn now_ns(&self) -> u64 {
        self.shared.clock.now_ns()
    }

    /// Opens a queue to a node. The connection may still be incomplete; operations may be posted at once.
    pub fn open(&self, peer: Peer) -> std::io::Result<Queue> {
        let mut table = self.shared.table.borrow_mut();
        let session = (table.session_ids)();
        let node = peer.node;
        let mut state = QueueState::new(peer, session);
        state.connect(&*self.shared.transport)?;
        let index = table.place_queue(state);
        drop(table);
        Ok(Queue { endpoint: self.clone(), index, node })
    }

    /// Sends what is waiting, collects finished operations, and closes queues whose deadline has passed.
    /// Returns how many operations ended. Never blocks.
    pub fn poll(&self) -> usize {
        self.shared.turns.another();
        self.shared.table.borrow_mut().poll(self.shared.clock.now_ns())
    }

    /// How often the endpoint was polled. Other threads may read it.
    pub fn turns(&self) -> Turns {
        self.shared.turns.clone()
    }

    /// When [`Endpoint::poll`] has something to do even if nothing arrives: the earliest deadline or end of a
    /// sleep.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        self.shared.table.borrow().next_deadline_ns()
    }

    /// Sleeps by the endpoint's clock.
    pub async fn sleep(&self, duration: Duration) {
        Sleep::new(self, self.now_ns().saturating_add(in_ns(duration))).await;
    }

    /// Whether any operation is in flight.
    pub(crate) fn is_waiting(&self) -> bool {
        self.shared.table.borrow().is_waiting()
    }

    /// Calls `visit` with the readiness of each link that has operations in flight; false when one of them
    /// can only be polled.
    pub(crate) fn for_each_busy_link(&self, mut visit: impl FnMut(Readiness<'_>)) -> bool {
        let table = self.shared.table.borrow();
        let mut all_can_wait = true;
        for queue in table.busy_queues() {
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
