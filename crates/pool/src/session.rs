//! Sessions: how a thread reaches the extents.
//!
//! S1. A session reaches a region only after attaching it, and lets go of it once the region is given back or
//!     lost, idle or not.
//! S2. After an operation that may still be under way the session reconnects before anything else: what was under
//!     way is dead then, and doing it again is safe (design, section 3: incarnations).
//! S3. A write that is dropped half-way, or given up without an answer from a new incarnation, puts its extent in doubt.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::{ArenaBuf, ArenaFull, Endpoint, OpError, Queue, Uncertain, block_on};
use farpool_lease::Millis;
use farpool_wire::{MAX_TRANSFER_BYTES, NodeId, Refusal, RegionId};
use parking_lot::{Mutex, MutexGuard};

use crate::error::{AccessError, is_shortage};
use crate::pool::Shared;
use crate::region::{LeasedRegion, NodeState};
use crate::space::Extent;
use crate::stock::{LeaseKeeper, Trouble};
use crate::watch::endpoint;

/// Room for the largest transfer with its blocks completed at both ends, twice.
const ARENA_BYTES: usize = 2 * MAX_TRANSFER_BYTES + (128 << 10);
/// How often an operation is tried: anew after a broken connection, and once more when the repeat ran into the
/// reconnection of a sibling.
const TRIES: u32 = 5;
/// Before the second try, and as much longer before each later one: half a second in all, for a node that is besieged.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// The blocking edge of a session. Any thread may use it, one at a time.
#[derive(Clone)]
pub struct Session {
    confined: Arc<Mutex<Confined>>,
}

/// A session that one thread uses now.
pub struct SessionGuard<'a> {
    confined: MutexGuard<'a, Confined>,
}

/// A core that wanders between threads as a whole.
pub(crate) struct Confined(SessionCore);

// SAFETY: a core is made of counted pointers that are not atomic. All of them live inside the core: what its
// methods hand out (buffers, futures) may not outlive the guard, by the contract of `SessionGuard::core`, and the
// guard is on one thread. So the whole moves between threads, never a part; the mutex orders the moves.
unsafe impl Send for Confined {}

impl Session {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let confined = Arc::new(Mutex::new(Confined(SessionCore::new(
            shared.stock.clone(),
            endpoint(&shared, ARENA_BYTES),
        ))));
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
    /// Nothing obtained from it (buffers, queues, endpoints, futures) outlives the guard.
    pub unsafe fn core(&self) -> &SessionCore {
        &self.confined.0
    }

    /// Runs a future that uses the session's core.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        block_on(&self.confined.0.endpoint, future)
    }
}

impl Confined {
    /// Lets go of regions that are over. Called when the owner of the session may be idle.
    pub(crate) fn let_go(&self) {
        if self.0.has_regions_over() {
            block_on(&self.0.endpoint, self.0.let_go());
        }
    }
}

/// A session for one thread's `async` code: an endpoint, and a queue per node.
pub struct SessionCore {
    leases: Arc<dyn LeaseKeeper>,
    trouble: Trouble,
    endpoint: Endpoint,
    queues: RefCell<BTreeMap<NodeId, Rc<NodeQueue>>>,
}

struct NodeQueue {
    node: Arc<NodeState>,
    queue: Queue,
    /// By index within the node.
    attached: RefCell<BTreeMap<u32, Arc<LeasedRegion>>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

/// A transfer that is being tried. If it ends, or is dropped, while a write of it may still land, the extent is in doubt.
struct UnderWay<'a> {
    extent: &'a Extent,
    may_land: Cell<bool>,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if self.may_land.get() {
            self.extent.doubt();
        }
    }
}

/// What to do after an operation failed.
enum Next {
    TryAgain,
    Fail(AccessError),
}

/// What an error of one try means for the operation. That nothing came of this try says nothing about an earlier one
/// whose fate is in doubt.
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
        let trouble = leases.bears();
        SessionCore { leases, trouble, endpoint, queues: RefCell::default() }
    }

    /// The session's end of the fabric.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// A buffer of the session's arena.
    pub fn buffer(&self, bytes: usize) -> Result<ArenaBuf, ArenaFull> {
        self.endpoint.arena().take(bytes)
    }

    /// Fills `buffer` from an extent's bytes at `offset`. The buffer comes back either way.
    pub async fn read(
        &self,
        from: &Extent,
        offset: u64,
        buffer: ArenaBuf,
    ) -> (ArenaBuf, Result<(), AccessError>) {
        self.transfer(Direction::Read, from, offset, buffer).await
    }

    /// Copies `buffer` to an extent's bytes at `offset`.
    pub async fn write(
        &self,
        to: &Extent,
        offset: u64,
        buffer: ArenaBuf,
    ) -> (ArenaBuf, Result<(), AccessError>) {
        self.transfer(Direction::Write, to, offset, buffer).await
    }

    async fn transfer(
        &self,
        direction: Direction,
        extent: &Extent,
        offset: u64,
        mut buffer: ArenaBuf,
    ) -> (ArenaBuf, Result<(), AccessError>) {
        let region = extent.region();
        let under_way = UnderWay { extent, may_land: Cell::new(false) };
        let mut in_doubt = false;
        let no_try_after = self.leases.now().plus(self.trouble.try_within);
        for attempt in 0..TRIES {
            if attempt > 0 && self.leases.now() > no_try_after {
                break;
            }
            self.pause_before(attempt).await;
            if let Err(error) = region.check(self.leases.now().0) {
                return (buffer, Err(error));
            }
            let attached = self.attach(region, no_try_after).await;
            let (queue, result) = match attached {
                Err(error) => return (buffer, Err(settled(error, region.id, in_doubt))),
                Ok(queue) => {
                    let at = extent.address(offset);
                    let (returned, result) = match direction {
                        Direction::Read => queue.queue.read(at, region.epoch, buffer).await,
                        Direction::Write => {
                            under_way.may_land.set(true);
                            queue.queue.write(at, region.epoch, buffer).await
                        }
                    };
                    buffer = returned;
                    (queue, result)
                }
            };
            match result {
                Ok(()) => {
                    under_way.may_land.set(false);
                    return (buffer, Ok(()));
                }
                Err(error) => {
                    // A read changes nothing, so nothing of it is in doubt.
                    in_doubt |= direction == Direction::Write && matches!(error, OpError::Unknown { .. });
                    under_way.may_land.set(in_doubt);
                    match self.after(error, &queue, region) {
                        Next::TryAgain => {}
                        Next::Fail(error) => return (buffer, Err(settled(error, region.id, in_doubt))),
                    }
                }
            }
        }
        self.leases.node_lost(&region.node);
        (buffer, Err(AccessError::NodeLost { node: region.id.node }))
    }

    /// Asks the node to attach a region, for as long as it says that the memory is just being moved: that takes as long
    /// as copying a region, and says nothing against the node.
    async fn attach_once_it_stays(&self, queue: &NodeQueue, region: &LeasedRegion) -> Result<(), OpError> {
        let give_up_at = self.leases.now().plus(self.trouble.while_moved);
        loop {
            match queue.queue.attach(region.id, region.epoch, region.key).await {
                Err(OpError::Refused(Refusal::Busy))
                    if !region.is_over() && self.leases.now() < give_up_at =>
                {
                    self.endpoint.sleep(RETRY_PAUSE).await;
                }
                answer => return answer,
            }
        }
    }

    /// The queue to a region's node, with the region attached.
    async fn attach(
        &self,
        region: &Arc<LeasedRegion>,
        no_try_after: Millis,
    ) -> Result<Rc<NodeQueue>, AccessError> {
        for attempt in 0..TRIES {
            if attempt > 0 && self.leases.now() > no_try_after {
                break;
            }
            self.pause_before(attempt).await;
            let queue = self.queue(&region.node)?;
            let known = queue
                .attached
                .borrow()
                .get(&region.id.index)
                .is_some_and(|known| known.epoch == region.epoch);
            if known {
                return Ok(queue);
            }
            match self.attach_once_it_stays(&queue, region).await {
                Ok(()) => {
                    queue.attached.borrow_mut().insert(region.id.index, region.clone());
                    return Ok(queue);
                }
                // Its patience is over: that says nothing against the node.
                Err(busy @ OpError::Refused(Refusal::Busy)) => return Err(AccessError::Refused(busy)),
                Err(error) => match self.after(error, &queue, region) {
                    Next::TryAgain => {}
                    Next::Fail(error) => return Err(error),
                },
            }
        }
        self.leases.node_lost(&region.node);
        Err(AccessError::NodeLost { node: region.id.node })
    }

    fn queue(&self, node: &Arc<NodeState>) -> Result<Rc<NodeQueue>, AccessError> {
        let id = node.peer.node;
        if let Some(known) = self.queues.borrow().get(&id)
            && Arc::ptr_eq(&known.node, node)
        {
            return Ok(known.clone());
        }
        let queue = match self.endpoint.open(node.peer.clone()) {
            Ok(queue) => queue,
            Err(error) if is_shortage(&error) => return Err(AccessError::Short { node: id }),
            Err(_) => {
                self.leases.node_lost(node);
                return Err(AccessError::NodeLost { node: id });
            }
        };
        let queue = Rc::new(NodeQueue { node: node.clone(), queue, attached: RefCell::default() });
        self.queues.borrow_mut().insert(id, queue.clone());
        Ok(queue)
    }

    async fn pause_before(&self, attempt: u32) {
        if attempt > 0 {
            self.endpoint.sleep(RETRY_PAUSE * attempt).await;
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
                // A sibling reconnected the queue meanwhile, or the region's memory is another since a grant was
                // fenced, or the lease is over: the node says which when it is asked to attach. Writing again is
                // safe, since nothing of the lost try takes effect any more.
                queue.attached.borrow_mut().remove(&region.id.index);
                Next::TryAgain
            }
            OpError::Refused(Refusal::Exhausted) => Next::Fail(AccessError::Short { node: region.id.node }),
            OpError::Refused(_) => Next::Fail(AccessError::Refused(error)),
            OpError::Unknown { cause: Uncertain::Deadline, node } => {
                self.leases.node_lost(&queue.node);
                Next::Fail(AccessError::NodeLost { node })
            }
            OpError::Unknown { node, .. } | OpError::NotSent { node } => {
                if queue.queue.is_open() {
                    return Next::TryAgain; // a sibling has reconnected it
                }
                queue.attached.borrow_mut().clear();
                match queue.queue.reconnect() {
                    Ok(()) => Next::TryAgain,
                    Err(error) if is_shortage(&error) => Next::Fail(AccessError::Short { node }),
                    Err(_) => {
                        self.leases.node_lost(&queue.node);
                        Next::Fail(AccessError::NodeLost { node })
                    }
                }
            }
        }
    }

    fn has_regions_over(&self) -> bool {
        self.queues.borrow().values().any(|queue| {
            queue.node.is_lost() || queue.attached.borrow().values().any(|region| region.is_over())
        })
    }

    /// Closes queues to lost nodes, and detaches regions that are over.
    pub async fn let_go(&self) {
        self.queues.borrow_mut().retain(|_, queue| !queue.node.is_lost());
        let queues: Vec<_> = self.queues.borrow().values().cloned().collect();
        for queue in queues {
            let over: Vec<_> = queue
                .attached
                .borrow_mut()
                .extract_if(.., |_, region| region.is_over())
                .map(|(_, region)| region)
                .collect();
            for region in over {
                if let Err(error) = queue.queue.detach(region.id, region.epoch).await {
                    // The connection is in trouble; the next operation or the watch will find out.
                    tracing::debug!(region = %region.id, %error, "detaching failed");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_is_no_loss_unless_an_earlier_try_is_in_doubt() {
        let node = NodeId(1);
        let region = RegionId { node, index: 0 };
        let short = AccessError::Short { node };
        assert_eq!(settled(short, region, false), short);
        assert_eq!(settled(short, region, true), AccessError::NodeLost { node });
        let refused = AccessError::Refused(OpError::Refused(Refusal::TooLong));
        assert_eq!(settled(refused, region, false), refused);
        assert_eq!(settled(refused, region, true), AccessError::LeaseLost { region });
    }
}
