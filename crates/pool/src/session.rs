//! Sessions: how a thread reads and writes extents.
//!
//! S1. A session uses a region only after attaching it, and detaches it once the region is given back or
//!     lost, even if the session is idle.
//! S2. After an operation that may still be in flight, the session reconnects before it does anything else.
//!     Then the operation can take no effect any more, and repeating it is safe (`docs/src/fabric.md`).
//! S3. A write puts its extent in doubt if it is dropped half-way, or if it is given up before a new
//!     incarnation has answered.
//! S4. `giving_up` decides what a failed try says about the node. Operations are tried again until the node
//!     is given up, and end soon after that, even before their deadlines.
//! S5. A session that a node has refused a place uses the connections of its siblings (`borrowing`). By then
//!     none of its own operations is in flight there, since the refusal came from its newest incarnation.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::{ArenaBuf, ArenaFull, Endpoint, OpError, Queue, Uncertain, block_on};
use farpool_lease::Millis;
use farpool_wire::{MAX_TRANSFER_BYTES, NodeId, Refusal, RegionId};
use futures_util::future::{Either, select};
use rustix_futex_sync::MutexGuard;

use crate::NODE_DEADLINE;
use crate::borrowing::{Borrowed, OtherSessions, Siblings};
use crate::error::{AccessError, is_shortage};
use crate::giving_up::{LOOK_EVERY, Sign};
use crate::pool::Shared;
use crate::region::{LeasedRegion, NodeState};
use crate::space::Extent;
use crate::stock::{LeaseKeeper, RetryPolicy};
use crate::timed_mutex::TimedMutex;
use crate::watch::endpoint;

/// Room for two transfers of the largest size, each extended to whole blocks at both ends.
const ARENA_BYTES: usize = 2 * MAX_TRANSFER_BYTES + (128 << 10);
/// Bytes that [`SessionCore::read_now`] reads at a time: few enough to stay in the L1 data cache until the
/// sink has copied them, and enough to be read with few calls.
const PIECE_BYTES: usize = 4096;
/// Pause before the third try; each later pause is longer by as much. The second try comes at once: a
/// connection that was idle may have had to make room for another.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause: a burst has ended by then, and a node that is back is found soon.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// Pause before busy siblings are asked again, beside the wait for one of them.
const SIBLING_PAUSE: Duration = Duration::from_millis(2);
/// If a node refused this session a place, the session uses its siblings' connections for this long before it
/// asks the node again.
const CROWDED_FOR: Millis = Millis(1_000);

/// The blocking interface of a session. Any thread may use it, one at a time.
#[derive(Clone)]
pub struct Session {
    confined: Arc<TimedMutex<Confined>>,
}

/// A session locked by one thread.
pub struct SessionGuard<'a> {
    confined: MutexGuard<'a, Confined>,
}

/// A core that moves between threads as a whole.
pub(crate) struct Confined(pub(crate) SessionCore);

// SAFETY: a core is made of reference-counted pointers whose counts are not atomic. All of them live inside
// the core: what its methods hand out (buffers, futures) may not outlive the guard, by the contract of
// `SessionGuard::core`, and the guard stays on one thread. So a core moves between threads only as a whole,
// never a part of it, and the mutex orders the moves.
unsafe impl Send for Confined {}

impl Session {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let confined = Arc::new_cyclic(|own| {
            let siblings = OtherSessions { shared: Arc::downgrade(&shared), own: own.clone() };
            let endpoint = endpoint(&shared, ARENA_BYTES, NODE_DEADLINE);
            TimedMutex::new(Confined(
                SessionCore::new(shared.stock.clone(), endpoint).among(Arc::new(siblings)),
            ))
        });
        shared.register_session(Arc::downgrade(&confined));
        Session { confined }
    }

    /// Waits until no other thread uses the session.
    pub fn lock(&self) -> SessionGuard<'_> {
        SessionGuard { confined: self.confined.lock() }
    }
}

impl SessionGuard<'_> {
    /// The session itself, for `async` code.
    ///
    /// # Safety
    /// Nothing obtained from it (buffers, queues, endpoints, futures) may outlive the guard.
    pub unsafe fn core(&self) -> &SessionCore {
        &self.confined.0
    }

    /// Runs a future that uses the session's core.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        block_on(&self.confined.0.endpoint, future)
    }
}

impl Confined {
    /// Detaches regions that are lost or given back. The watch calls this, since the session may be idle.
    pub(crate) fn let_go(&self) {
        if self.0.has_ended_regions() {
            block_on(&self.0.endpoint, self.0.let_go());
        }
    }
}

/// A session for one thread's `async` code: an endpoint, and a queue per node.
pub struct SessionCore {
    leases: Arc<dyn LeaseKeeper>,
    retries: RetryPolicy,
    endpoint: Endpoint,
    queues: RefCell<BTreeMap<NodeId, Rc<NodeQueue>>>,
    siblings: Option<Arc<dyn Siblings>>,
    /// Nodes that had no place for this session's connection, and when the session asks them again.
    crowded: RefCell<BTreeMap<NodeId, Millis>>,
}

/// Where a piece lies until the sink has copied it. Aligned for vector instructions: the checksum of an
/// unaligned piece takes three times as long.
#[repr(align(64))]
struct Piece([u8; PIECE_BYTES]);

struct NodeQueue {
    node: Arc<NodeState>,
    queue: Queue,
    /// By index within the node.
    attached: RefCell<BTreeMap<u32, Arc<LeasedRegion>>>,
}

impl NodeQueue {
    fn has_attached(&self, region: &LeasedRegion) -> bool {
        self.attached.borrow().get(&region.id.index).is_some_and(|known| known.epoch == region.epoch)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// Which connections a transfer may use.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Own,
    OwnOrSiblings,
}

/// How many times an operation was tried again, and until when it may be.
struct Tries {
    made: u32,
    until: Millis,
}

/// Puts an extent in doubt if it is dropped while a write to the extent may still land.
struct Landing<'a> {
    extent: &'a Extent,
    may_land: bool,
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        if self.may_land {
            self.extent.doubt();
        }
    }
}

struct Transfer<'a> {
    direction: Direction,
    extent: &'a Extent,
    offset: u64,
    /// It may use siblings' connections.
    may_borrow: bool,
    tries: Tries,
    /// It is a write, and an earlier try of it may have taken effect.
    in_doubt: bool,
    landing: Landing<'a>,
}

/// What to do after an operation failed.
enum Next {
    TryAgain,
    /// The node has no place for this connection.
    Borrow,
    /// The siblings are busy or have no place. `in_doubt`: one of them may have done the write.
    BorrowSoon {
        in_doubt: bool,
    },
    Fail(AccessError),
}

/// Why a transfer was not done.
pub(crate) enum Failure {
    /// The node has no place for the session's connection. None of its operations is in flight there, but an
    /// earlier try of a write may have taken effect.
    NoPlace {
        in_doubt: bool,
    },
    Error(AccessError),
}

impl Failure {
    fn into_error(self, region: RegionId) -> AccessError {
        match self {
            Failure::NoPlace { in_doubt } => {
                settled(AccessError::Short { node: region.node }, region, in_doubt)
            }
            Failure::Error(error) => error,
        }
    }
}

/// What the error of one try means for the operation. That this try had no effect says nothing about an
/// earlier try whose outcome is in doubt.
fn settled(error: AccessError, region: RegionId, in_doubt: bool) -> AccessError {
    match error {
        AccessError::Refused(_) if in_doubt => AccessError::LeaseLost { region },
        AccessError::Short { node } if in_doubt => AccessError::NodeLost { node },
        other => other,
    }
}

impl SessionCore {
    /// A session over an endpoint of its own, whose clock is that of the leases.
    pub fn new(leases: Arc<dyn LeaseKeeper>, endpoint: Endpoint) -> Self {
        let retries = leases.retries();
        let (queues, crowded) = (RefCell::default(), RefCell::default());
        SessionCore { leases, retries, endpoint, queues, siblings: None, crowded }
    }

    /// Lets the session use the connections of siblings.
    pub(crate) fn among(self, siblings: Arc<dyn Siblings>) -> Self {
        SessionCore { siblings: Some(siblings), ..self }
    }

    /// The session's endpoint of the fabric.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// A buffer of the session's arena.
    pub fn buffer(&self, bytes: usize) -> Result<ArenaBuf, ArenaFull> {
        self.endpoint.arena().take(bytes)
    }

    /// Reads bytes of an extent at `offset` into `buffer`. Returns the buffer also after an error.
    pub async fn read(
        &self,
        from: &Extent,
        offset: u64,
        buffer: ArenaBuf,
    ) -> (ArenaBuf, Result<(), AccessError>) {
        let way = Way::OwnOrSiblings;
        let (buffer, result) = self.transfer(Direction::Read, from, offset, buffer, way).await;
        (buffer, result.map_err(|failure| failure.into_error(from.region().id)))
    }

    /// Reads bytes of an extent at `offset` before it returns, if it need not wait for anything. `sink` gets
    /// them in pieces, each with its offset in what is read: so they reach their destination by one copy
    /// through the processor's cache. `false`: not possible now, or it failed after some pieces; call
    /// [`read`](Self::read), which tries again and reports errors.
    pub fn read_now(
        &self,
        from: &Extent,
        offset: u64,
        bytes: usize,
        mut sink: impl FnMut(usize, &[u8]),
    ) -> bool {
        let region = from.region();
        if region.storage().is_some() || region.check(self.leases.now().0).is_err() {
            return false;
        }
        let queues = self.queues.borrow();
        let queue = queues.get(&region.id.node).filter(|queue| Arc::ptr_eq(&queue.node, &region.node));
        let Some(queue) = queue.filter(|queue| queue.has_attached(region)) else { return false };
        let mut piece = Piece([0; PIECE_BYTES]);
        (0..bytes).step_by(PIECE_BYTES).all(|at| {
            let piece = &mut piece.0[..PIECE_BYTES.min(bytes - at)];
            let read = queue.queue.read_now(from.address(offset + at as u64), region.epoch, piece);
            let next = at + piece.len();
            if next < bytes {
                queue.queue.prefetch(from.address(offset + next as u64), PIECE_BYTES);
            }
            let is_read = matches!(read, Some(Ok(())));
            if is_read {
                sink(at, piece);
            }
            is_read
        })
    }

    /// Writes `buffer` to an extent at `offset`. Returns the buffer also after an error.
    pub async fn write(
        &self,
        to: &Extent,
        offset: u64,
        buffer: ArenaBuf,
    ) -> (ArenaBuf, Result<(), AccessError>) {
        let way = Way::OwnOrSiblings;
        let (buffer, result) = self.transfer(Direction::Write, to, offset, buffer, way).await;
        (buffer, result.map_err(|failure| failure.into_error(to.region().id)))
    }

    pub(crate) async fn transfer(
        &self,
        direction: Direction,
        extent: &Extent,
        offset: u64,
        mut buffer: ArenaBuf,
        way: Way,
    ) -> (ArenaBuf, Result<(), Failure>) {
        if let Some(storage) = extent.region().storage() {
            return self.transfer_overflow(direction, extent, &**storage, offset, buffer).await;
        }
        let may_borrow = way == Way::OwnOrSiblings && self.siblings.is_some();
        let tries = Tries { made: 0, until: self.leases.now().plus(self.retries.try_within) };
        let landing = Landing { extent, may_land: false };
        let mut transfer =
            Transfer { direction, extent, offset, may_borrow, tries, in_doubt: false, landing };
        loop {
            if let Err(error) = extent.region().check(self.leases.now().0) {
                return (buffer, Err(Failure::Error(error)));
            }
            let (returned, tried) = self.try_once(&mut transfer, buffer).await;
            buffer = returned;
            let next = match tried {
                Ok(()) => {
                    transfer.landing.may_land = false;
                    return (buffer, Ok(()));
                }
                Err(next) => next,
            };
            if let Err(failure) = self.go_on(&mut transfer, next).await {
                return (buffer, Err(failure));
            }
        }
    }

    async fn try_once(
        &self,
        transfer: &mut Transfer<'_>,
        mut buffer: ArenaBuf,
    ) -> (ArenaBuf, Result<(), Next>) {
        let &mut Transfer { direction, extent, offset, may_borrow, .. } = transfer;
        let region = extent.region();
        if may_borrow && self.is_crowded(region.id.node) {
            let done = self.by_sibling(direction, extent, offset, &mut buffer);
            return (buffer, done);
        }
        let queue = match self.attach(region, &mut transfer.tries).await {
            Ok(queue) => queue,
            Err(next) => return (buffer, Err(next)),
        };
        let (at, epoch) = (extent.address(offset), region.epoch);
        let transferring = match direction {
            Direction::Read => queue.queue.read(at, epoch, buffer),
            Direction::Write => {
                transfer.landing.may_land = true;
                queue.queue.write(at, epoch, buffer)
            }
        };
        let (buffer, result) = self.unless_lost(&queue, transferring).await;
        let Err(error) = result else { return (buffer, Ok(())) };
        // A read changes nothing, so it is never in doubt.
        transfer.in_doubt |= direction == Direction::Write && matches!(error, OpError::Unknown { .. });
        transfer.landing.may_land = transfer.in_doubt;
        (buffer, Err(self.after(error, &queue, region)))
    }

    /// Prepares the next try of a transfer, or says why there is none.
    async fn go_on(&self, transfer: &mut Transfer<'_>, next: Next) -> Result<(), Failure> {
        let region = transfer.extent.region();
        let error = match next {
            Next::Fail(error) => error,
            Next::Borrow => {
                transfer.landing.may_land = false; // S5
                let in_doubt = transfer.in_doubt;
                return if transfer.may_borrow { Ok(()) } else { Err(Failure::NoPlace { in_doubt }) };
            }
            Next::BorrowSoon { in_doubt } => {
                transfer.in_doubt |= in_doubt;
                if transfer.tries.soon(self).await {
                    return Ok(());
                }
                self.out_of_patience(region)
            }
            Next::TryAgain if transfer.tries.again(self).await => return Ok(()),
            Next::TryAgain => self.out_of_patience(region),
        };
        Err(Failure::Error(settled(error, region.id, transfer.in_doubt)))
    }

    /// Waits for an operation. Ends it soon after the node is given up, perhaps because of another session's
    /// operations.
    async fn unless_lost<F: Future>(&self, queue: &NodeQueue, operation: F) -> F::Output {
        let mut operation = pin!(operation);
        loop {
            match select(operation.as_mut(), pin!(self.endpoint.sleep(LOOK_EVERY))).await {
                Either::Left((ended, _)) => return ended,
                Either::Right(_) if queue.node.is_lost() => queue.queue.close(),
                Either::Right(_) => {}
            }
        }
    }

    /// The error of an operation whose retries have used up the time of the retry policy.
    fn out_of_patience(&self, region: &LeasedRegion) -> AccessError {
        let node = region.id.node;
        match self.leases.patience_ended(&region.node) {
            true => AccessError::NodeLost { node },
            false => AccessError::Short { node },
        }
    }

    /// Whether the node has lately had no place for this session, so that the session borrows from siblings.
    fn is_crowded(&self, node: NodeId) -> bool {
        let crowded = self.crowded.borrow();
        !crowded.is_empty() && crowded.get(&node).is_some_and(|&until| self.leases.now() < until)
    }

    /// Whether this session has a connection to the node that siblings can use.
    pub(crate) fn is_connected(&self, node: &NodeState) -> bool {
        let queues = self.queues.borrow();
        let queue = queues.get(&node.peer.node);
        queue.is_some_and(|queue| queue.queue.is_open() && !queue.attached.borrow().is_empty())
    }

    /// Does a transfer through the connection of a sibling, if one is free.
    fn by_sibling(
        &self,
        direction: Direction,
        extent: &Extent,
        offset: u64,
        buffer: &mut ArenaBuf,
    ) -> Result<(), Next> {
        let siblings = self.siblings.as_ref().expect("crowded only among siblings");
        match siblings.transfer(direction, extent, offset, &mut buffer[..]) {
            Borrowed::Done(Ok(())) => Ok(()),
            // The sibling has lost its connection meanwhile.
            Borrowed::Done(Err(Failure::NoPlace { in_doubt })) => Err(Next::BorrowSoon { in_doubt }),
            Borrowed::Done(Err(Failure::Error(AccessError::Short { .. }))) | Borrowed::AllBusy => {
                Err(Next::BorrowSoon { in_doubt: false })
            }
            Borrowed::Done(Err(Failure::Error(error))) => Err(Next::Fail(error)),
            // No sibling has a connection, so ask the node for a place again.
            Borrowed::NoneConnected => {
                self.crowded.borrow_mut().remove(&extent.region().id.node);
                Err(Next::TryAgain)
            }
        }
    }

    /// Asks the node to attach a region. While the node is moving the memory, asks again, for as long as the
    /// retry policy allows.
    async fn attach_after_move(&self, queue: &NodeQueue, region: &LeasedRegion) -> Result<(), OpError> {
        let give_up_at = self.leases.now().plus(self.retries.while_moved);
        loop {
            let attaching = queue.queue.attach(region.id, region.epoch, region.key);
            match self.unless_lost(queue, attaching).await {
                Err(OpError::Refused(Refusal::Busy))
                    if !region.has_ended() && self.leases.now() < give_up_at =>
                {
                    self.endpoint.sleep(RETRY_PAUSE).await;
                }
                answer => return answer,
            }
        }
    }

    /// The queue to a region's node, with the region attached.
    async fn attach(&self, region: &Arc<LeasedRegion>, tries: &mut Tries) -> Result<Rc<NodeQueue>, Next> {
        loop {
            let next = match self.queue(&region.node) {
                Err(next) => next,
                Ok(queue) => {
                    if queue.has_attached(region) {
                        return Ok(queue);
                    }
                    match self.attach_after_move(&queue, region).await {
                        Ok(()) => {
                            queue.attached.borrow_mut().insert(region.id.index, region.clone());
                            self.crowded.borrow_mut().remove(&region.id.node);
                            self.leases.node_answered(&region.node);
                            return Ok(queue);
                        }
                        // The node is still moving the memory. It answers, so it is not a failure of the
                        // node.
                        Err(busy @ OpError::Refused(Refusal::Busy)) => {
                            return Err(Next::Fail(AccessError::Refused(busy)));
                        }
                        Err(error) => self.after(error, &queue, region),
                    }
                }
            };
            match next {
                Next::TryAgain if tries.again(self).await => {
                    region.check(self.leases.now().0).map_err(Next::Fail)?
                }
                Next::TryAgain => return Err(Next::Fail(self.out_of_patience(region))),
                next => return Err(next),
            }
        }
    }

    /// The queue to a node. A broken queue is reconnected here, after the pause that follows a failure, and
    /// not before it: a node that needs room closes connections that have shown no key, so it might close the
    /// new connection before the session uses it.
    fn queue(&self, node: &Arc<NodeState>) -> Result<Rc<NodeQueue>, Next> {
        let id = node.peer.node;
        let known = self.queues.borrow().get(&id).filter(|known| Arc::ptr_eq(&known.node, node)).cloned();
        if let Some(known) = known {
            if !known.queue.is_open() {
                known.attached.borrow_mut().clear();
                known.queue.reconnect().map_err(|error| self.not_connected(node, &error))?;
            }
            return Ok(known);
        }
        let queue =
            self.endpoint.open(node.peer.clone()).map_err(|error| self.not_connected(node, &error))?;
        let queue = Rc::new(NodeQueue { node: node.clone(), queue, attached: RefCell::default() });
        self.queues.borrow_mut().insert(id, queue.clone());
        Ok(queue)
    }

    /// What to do after a connection could not be started.
    fn not_connected(&self, node: &NodeState, error: &std::io::Error) -> Next {
        let id = node.peer.node;
        match error {
            error if is_shortage(error) => Next::Fail(AccessError::Short { node: id }),
            error => self.failed(node, Sign::of_error(error)),
        }
    }

    /// What to do after a try has failed with this sign.
    fn failed(&self, node: &NodeState, sign: Sign) -> Next {
        match self.leases.node_failed(node, sign) {
            true => Next::Fail(AccessError::NodeLost { node: node.peer.node }),
            false => Next::TryAgain,
        }
    }

    /// Decides what an error means for the lease, the node and the operation.
    fn after(&self, error: OpError, queue: &NodeQueue, region: &LeasedRegion) -> Next {
        match error {
            OpError::Refused(Refusal::StaleEpoch | Refusal::WrongKey) => {
                self.leases.lease_lost(region.id, region.epoch);
                region.lose();
                Next::Fail(AccessError::LeaseLost { region: region.id })
            }
            OpError::Refused(Refusal::NotAttached | Refusal::Busy)
            | OpError::Unknown { cause: Uncertain::EpochMoved, .. } => {
                // Another operation has reconnected the queue, or a fence has moved the region to other
                // memory, or the lease has ended. The next attach shows which. Writing again is safe, since
                // the failed try can take no effect any more.
                queue.attached.borrow_mut().remove(&region.id.index);
                Next::TryAgain
            }
            OpError::Refused(Refusal::Exhausted) => {
                let node = region.id.node;
                if !queue.attached.borrow().is_empty() {
                    return Next::Fail(AccessError::Short { node });
                }
                // An open queue would occupy one of the node's places for connections that have shown no key.
                self.queues.borrow_mut().remove(&node);
                self.crowded.borrow_mut().insert(node, self.leases.now().plus(CROWDED_FOR));
                self.leases.node_answered(&queue.node);
                Next::Borrow
            }
            OpError::Refused(_) => Next::Fail(AccessError::Refused(error)),
            OpError::Unknown { .. } | OpError::NotSent { .. } => {
                if queue.queue.is_open() {
                    return Next::TryAgain; // another operation has reconnected it
                }
                let cause = if let OpError::Unknown { cause, .. } = error { Some(cause) } else { None };
                self.failed(&queue.node, Sign::of(cause, queue.queue.has_answered()))
            }
        }
    }

    fn has_ended_regions(&self) -> bool {
        self.queues.borrow().values().any(|queue| {
            queue.node.is_lost() || queue.attached.borrow().values().any(|region| region.has_ended())
        })
    }

    /// Closes queues to lost nodes, and detaches regions that are lost or given back.
    pub async fn let_go(&self) {
        self.queues.borrow_mut().retain(|_, queue| !queue.node.is_lost());
        let queues: Vec<_> = self.queues.borrow().values().cloned().collect();
        for queue in queues {
            let ended: Vec<_> = queue
                .attached
                .borrow_mut()
                .extract_if(.., |_, region| region.has_ended())
                .map(|(_, region)| region)
                .collect();
            for region in ended {
                if let Err(error) = queue.queue.detach(region.id, region.epoch).await {
                    // The connection has failed; the next operation or the watch will notice.
                    tracing::debug!(region = %region.id, %error, "detaching failed");
                }
            }
        }
    }
}

impl Tries {
    /// Pauses after a failed try; returns whether there is time for another.
    async fn again(&mut self, session: &SessionCore) -> bool {
        if self.made > 0 {
            session.endpoint.sleep((RETRY_PAUSE * self.made).min(LONGEST_PAUSE)).await;
        }
        self.made += 1;
        session.leases.now() <= self.until
    }

    /// Pauses after siblings were busy; returns whether there is time for another try.
    async fn soon(&mut self, session: &SessionCore) -> bool {
        session.endpoint.sleep(SIBLING_PAUSE).await;
        session.leases.now() <= self.until
    }
}

mod overflow;
#[cfg(test)]
pub(crate) mod scripted;
#[cfg(test)]
mod tests;
