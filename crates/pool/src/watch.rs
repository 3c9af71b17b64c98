//! The thread that checks whether the nodes live, and makes idle sessions detach regions.
//!
//! A client learns of a node's death when its operations fail. But over shared memory they do not fail, since
//! mapped memory outlives the node, and an idle mount has no operations. So each node is pinged over the
//! fabric.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use farpool_fabric::{Clock, Endpoint, EndpointConfig, Negotiated, OpError, Queue, block_on};
use farpool_wire::{CALL_PING, Refusal};
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::error::is_shortage;
use crate::giving_up::{LOOK_EVERY, SILENCE, Sign};
use crate::pool::Shared;
use crate::region::{LeasedRegion, NodeState};
use crate::stock::Stock;

/// Room for the pings of several hundred nodes; those that do not fit wait for the next round.
const ARENA_BYTES: usize = 64 << 10;

/// The running watch; ends when dropped.
pub(crate) struct Watch {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(crate) fn start(shared: Arc<Shared>) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name("pool-watch".into()).spawn(move || {
            let endpoint = endpoint(&shared, ARENA_BYTES, SILENCE);
            block_on(&endpoint, watch_all(&shared, &endpoint, &stopped));
        })?;
        Ok(Watch { stop, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed); // read once an interval; guards no other memory
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the pool's watch panicked");
        }
    }
}

/// An endpoint of this process with the transports that the operator allows.
pub(crate) fn endpoint(shared: &Arc<Shared>, arena_bytes: usize, deadline: Duration) -> Endpoint {
    let transport = Rc::new(Negotiated::new(shared.config.transport, deadline));
    let clock = Rc::new(StockClock(shared.stock.clock()));
    Endpoint::new(EndpointConfig { clock, ..EndpointConfig::real(transport, arena_bytes, deadline) })
}

/// The stock's clock, in the form that endpoints take.
struct StockClock(Arc<dyn Clock + Send + Sync>);

impl Clock for StockClock {
    fn now_ns(&self) -> u64 {
        self.0.now_ns()
    }
}

async fn watch_all(shared: &Shared, endpoint: &Endpoint, stopped: &AtomicBool) {
    let sessions = async {
        while !stopped.load(Ordering::Relaxed) {
            for session in shared.sessions() {
                // A busy session is tried again in the next round.
                if let Some(session) = session.try_lock() {
                    session.let_go();
                }
            }
            endpoint.sleep(LOOK_EVERY).await;
        }
    };
    let nodes = watch_nodes(&shared.stock, endpoint);
    futures_util::future::select(std::pin::pin!(sessions), std::pin::pin!(nodes)).await;
}

/// Pings all nodes on which the stock holds regions, and gives up those that do not answer. Does not end.
pub async fn watch_nodes(stock: &Stock, endpoint: &Endpoint) {
    let mut watched: Vec<Arc<NodeState>> = Vec::new();
    let mut watches = FuturesUnordered::new();
    loop {
        let nodes = stock.nodes();
        watched.retain(|known| nodes.iter().any(|node| Arc::ptr_eq(known, node)));
        for node in nodes {
            if !watched.iter().any(|known| Arc::ptr_eq(known, &node)) {
                watched.push(node.clone());
                watches.push(watch_node(stock, endpoint, node));
            }
        }
        let pause = std::pin::pin!(endpoint.sleep(LOOK_EVERY));
        let ended = async {
            // `next` of an empty set would return at once, again and again.
            if watches.is_empty() { std::future::pending().await } else { watches.next().await }
        };
        futures_util::future::select(std::pin::pin!(ended), pause).await;
    }
}

/// Pings one node until it is given up, or the stock holds no region there any more.
async fn watch_node(stock: &Stock, endpoint: &Endpoint, node: Arc<NodeState>) {
    let mut eye = Eye { endpoint, queue: None, attached: None };
    let mut said = false;
    while !node.is_lost() && is_known(stock, &node) {
        match eye.look(stock, &node).await {
            Ok(Seen::Answer) => node.hearing.answered(stock.now()),
            Ok(Seen::Nothing) => {}
            Err(Blind::Sign(sign)) => {
                tracing::debug!(node = %node.peer.node, ?sign, "ping failed");
                stock.node_failed(&node, sign);
            }
            // A shortage here says nothing about the node. Meanwhile, sessions that use the node notice if it
            // dies.
            Err(Blind::Short(error)) => {
                if !said {
                    tracing::warn!(node = %node.peer.node, %error, "cannot ping the node for now; trying again");
                }
                said = true;
            }
        }
        endpoint.sleep(LOOK_EVERY).await;
    }
}

/// The connection by which a node is watched. It has a region attached, so it need not make room for
/// connections without a key.
struct Eye<'a> {
    endpoint: &'a Endpoint,
    queue: Option<Queue>,
    attached: Option<Arc<LeasedRegion>>,
}

enum Seen {
    Answer,
    /// No request was sent.
    Nothing,
}

enum Blind {
    /// The node did not answer.
    Sign(Sign),
    /// This process is short of a resource.
    Short(io::Error),
}

impl Eye<'_> {
    async fn look(&mut self, stock: &Stock, node: &Arc<NodeState>) -> Result<Seen, Blind> {
        if let Err(error) = self.open(node) {
            return Err(match is_shortage(&error) {
                true => Blind::Short(error),
                false => Blind::Sign(Sign::of_error(&error)),
            });
        }
        let Some(queue) = &self.queue else { return Ok(Seen::Nothing) };
        match ask(self.endpoint, queue, &mut self.attached, stock, node).await {
            Ok(seen) => Ok(seen),
            // A refusal is an answer: the node lives.
            Err(OpError::Refused(refusal)) => {
                if refusal == Refusal::NotAttached {
                    self.attached = None; // the memory has moved
                }
                Ok(Seen::Answer)
            }
            Err(OpError::Unknown { cause, .. }) => {
                Err(Blind::Sign(Sign::of(Some(cause), queue.has_answered())))
            }
            Err(OpError::NotSent { .. }) => Err(Blind::Sign(Sign::Closed)),
        }
    }

    /// Makes a connection, unless there is one already or one is being made.
    fn open(&mut self, node: &NodeState) -> io::Result<()> {
        match &self.queue {
            Some(queue) if queue.is_open() => Ok(()),
            Some(queue) => {
                self.attached = None;
                queue.reconnect()
            }
            None => {
                self.queue = Some(self.endpoint.open(node.peer.clone())?);
                Ok(())
            }
        }
    }
}

/// Sends the node a request that it answers at once: to attach a region of this process, or a ping.
async fn ask(
    endpoint: &Endpoint,
    queue: &Queue,
    attached: &mut Option<Arc<LeasedRegion>>,
    stock: &Stock,
    node: &Arc<NodeState>,
) -> Result<Seen, OpError> {
    if let Some(ended) = attached.take_if(|region| region.has_ended()) {
        queue.detach(ended.id, ended.epoch).await?;
    }
    if attached.is_some() {
        return ping(endpoint, queue).await;
    }
    let usable = |region: &Arc<LeasedRegion>| Arc::ptr_eq(&region.node, node) && !region.has_ended();
    let Some(region) = stock.regions().into_iter().find(usable) else { return Ok(Seen::Nothing) };
    region.attach(queue).await?;
    *attached = Some(region);
    Ok(Seen::Answer)
}

/// Whether the stock still holds a region on the node.
fn is_known(stock: &Stock, node: &Arc<NodeState>) -> bool {
    stock.nodes().iter().any(|known| Arc::ptr_eq(known, node))
}

async fn ping(endpoint: &Endpoint, queue: &Queue) -> Result<Seen, OpError> {
    let Ok(mut buffer) = endpoint.arena().take(CALL_PING.len()) else {
        return Ok(Seen::Nothing); // the arena is full: the next round asks again
    };
    buffer.copy_from_slice(CALL_PING);
    queue.call(buffer, CALL_PING.len()).await.map(|_| Seen::Answer)
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicU64, AtomicUsize};

    use farpool_fabric::{Peer, TransportChoice};
    use farpool_wire::control::{AcquireResponse, Lease, NodeAddress};
    use farpool_wire::{Epoch, NodeId, OwnerId};
    use futures_util::future::select;
    use rustix::io::Errno;
    use rustix_futex_sync::Mutex;

    use super::*;
    use crate::pool::PoolConfig;
    use crate::session::SessionCore;
    use crate::session::scripted::{Answer, Kind, Leases, World, node};
    use crate::space::EXTENT_BYTES;
    use crate::stock::StockConfig;

    /// Longer than any node is waited for.
    const LONG: Duration = Duration::from_secs(60);

    /// A stock that holds nothing, and nodes to which no connection can be made.
    fn unreachable_nodes(errno: Errno) -> (World, SessionCore, Stock) {
        let world = World::new();
        world.answers(move |_| Answer::Fail(errno));
        let core = world.core(Leases::new(&world));
        let stock = empty_stock(Arc::new(world.clone()));
        (world, core, stock)
    }

    /// A stock that holds nothing.
    fn empty_stock(clock: Arc<dyn Clock + Send + Sync>) -> Stock {
        Stock::new(StockConfig {
            owner: OwnerId(7),
            region_bytes: EXTENT_BYTES,
            limit_regions: None,
            clock,
            reach: Box::new(|at| Peer { node: NodeId(at.node), tcp: None, verbs: None, shm_socket: None }),
            journal: None,
        })
    }

    /// A clock that jumps ahead at each reading, so that no pause outlasts the next one.
    #[derive(Default)]
    struct Racing(AtomicU64);

    impl Clock for Racing {
        fn now_ns(&self) -> u64 {
            self.0.fetch_add(LONG.as_nanos() as u64, Ordering::Relaxed) // guards nothing
        }
    }

    /// Adds a region to the stock, and watches its node for long.
    fn watched_node(errno: Errno) -> Arc<NodeState> {
        let (world, core, stock) = unreachable_nodes(errno);
        let address = Some(NodeAddress { node: 1, ..NodeAddress::default() });
        let (epoch, key) = (Epoch::new(1, 1).0, vec![1; 16]);
        let lease = Lease { address, epoch, key, ttl_ms: 10_000, ..Lease::default() };
        let answer =
            AcquireResponse { leases: vec![lease], region_bytes: EXTENT_BYTES, ..Default::default() };
        stock.acquisition_answered(stock.now(), Some(answer));
        let node = stock.nodes()[0].clone();
        let watching = pin!(watch_nodes(&stock, core.endpoint()));
        world.run(&core, select(watching, pin!(core.endpoint().sleep(LONG))));
        assert_eq!(stock.regions().is_empty(), node.is_lost());
        node
    }

    #[test]
    fn a_node_whose_process_has_ended_is_given_up_though_nobody_uses_it() {
        assert!(watched_node(Errno::CONNREFUSED).is_lost());
    }

    #[test]
    fn a_shortage_of_this_process_costs_no_node() {
        assert!(!watched_node(Errno::MFILE).is_lost());
    }

    #[test]
    fn a_node_on_which_nothing_is_held_is_not_watched() {
        let (world, core, stock) = unreachable_nodes(Errno::CONNREFUSED);
        let node = node(1);
        let watching = pin!(watch_node(&stock, core.endpoint(), node.clone()));
        world.run(&core, select(watching, pin!(core.endpoint().sleep(LONG))));
        assert_eq!((world.asked(NodeId(1), Kind::Connect), node.is_lost()), (0, false));
    }

    #[test]
    fn the_thread_of_a_dropped_watch_has_ended() {
        let transport = TransportChoice::Tcp.into();
        let shared = Arc::new(Shared {
            config: PoolConfig { broker: String::new(), tls: None, transport, limit_bytes: None },
            stock: Arc::new(empty_stock(Arc::new(Racing::default()))),
            sessions: Mutex::default(),
            next_lender: AtomicUsize::new(0),
        });
        let watch = Watch::start(shared.clone()).unwrap();
        drop(watch);
        assert_eq!(Arc::strong_count(&shared), 1, "the thread still has what it watches");
    }
}
