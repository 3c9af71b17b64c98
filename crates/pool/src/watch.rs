//! The thread that looks after the nodes' lives, and makes idle sessions let go of regions.
//!
//! A client learns of a node's death from its own operations; but memory that is mapped here outlives the node,
//! and an idle mount has no operations. So each node is pinged over the fabric.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use farpool_fabric::{Clock, Endpoint, EndpointConfig, Negotiated, OpError, Queue, block_on};
use farpool_wire::{CALL_PING, SessionId};
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::NODE_DEADLINE;
use crate::error::is_shortage;
use crate::pool::{Shared, random_id};
use crate::region::NodeState;
use crate::stock::Stock;

/// How often a node is pinged, and sessions are looked at.
const INTERVAL: Duration = Duration::from_millis(250);

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
            let endpoint = endpoint(&shared, 64 << 10);
            block_on(&endpoint, watch_all(&shared, &endpoint, &stopped));
        })?;
        Ok(Watch { stop, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed); // looked at every interval; guards nothing
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the pool's watch panicked");
        }
    }
}

/// An endpoint of this process with the transports that the operator allows.
pub(crate) fn endpoint(shared: &Arc<Shared>, arena_bytes: usize) -> Endpoint {
    Endpoint::new(EndpointConfig {
        transport: Rc::new(Negotiated::new(shared.config.transport, NODE_DEADLINE)),
        clock: Rc::new(StockClock(shared.stock.clock())),
        session_ids: Box::new(|| SessionId(random_id())),
        arena_bytes,
        deadline: NODE_DEADLINE,
    })
}

/// The stock's clock, as endpoints keep it.
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
                // A session that is busy will let go by itself soon, or at the next look.
                if let Some(session) = session.try_lock() {
                    session.let_go();
                }
            }
            endpoint.sleep(INTERVAL).await;
        }
    };
    let nodes = watch_nodes(&shared.stock, endpoint);
    futures_util::future::select(std::pin::pin!(sessions), std::pin::pin!(nodes)).await;
}

/// Pings all nodes that hold something, and gives up those that do not answer. Does not end.
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
        let pause = std::pin::pin!(endpoint.sleep(INTERVAL));
        let ended = async {
            // An empty set would end at once, again and again.
            if watches.is_empty() { std::future::pending().await } else { watches.next().await }
        };
        futures_util::future::select(std::pin::pin!(ended), pause).await;
    }
}

/// Pings one node until it does not answer or nothing of ours lies there any more.
async fn watch_node(stock: &Stock, endpoint: &Endpoint, node: Arc<NodeState>) {
    let mut said = false;
    let queue = loop {
        match endpoint.open(node.peer.clone()) {
            Ok(queue) => break queue,
            // Says nothing of the node; who uses it finds out by himself meanwhile.
            Err(error) if is_shortage(&error) && is_known(stock, &node) => {
                if !said {
                    tracing::warn!(node = %node.peer.node, %error, "cannot look after the node for now; trying on");
                }
                said = true;
                endpoint.sleep(INTERVAL).await;
            }
            Err(_) => return stock.node_lost(&node),
        }
    };
    let mut failures = 0;
    while is_known(stock, &node) {
        match ping(endpoint, &queue).await {
            Ok(()) => {
                failures = 0;
                endpoint.sleep(INTERVAL).await;
            }
            // One connection may break while the node lives; a second one shows.
            Err(error) => {
                failures += 1;
                tracing::debug!(node = %node.peer.node, %error, failures, "ping failed");
                let deadline_passed =
                    matches!(error, OpError::Unknown { cause: farpool_fabric::Uncertain::Deadline, .. });
                if failures > 1 || deadline_passed {
                    stock.node_lost(&node);
                    continue;
                }
                match queue.reconnect() {
                    Ok(()) => {}
                    Err(error) if is_shortage(&error) => {
                        failures = 0; // as above
                        endpoint.sleep(INTERVAL).await;
                    }
                    Err(_) => stock.node_lost(&node),
                }
            }
        }
    }
}

/// Whether something of ours still lies on the node.
fn is_known(stock: &Stock, node: &Arc<NodeState>) -> bool {
    stock.nodes().iter().any(|known| Arc::ptr_eq(known, node))
}

async fn ping(endpoint: &Endpoint, queue: &Queue) -> Result<(), OpError> {
    let Ok(mut buffer) = endpoint.arena().take(CALL_PING.len()) else {
        return Ok(()); // more nodes than the arena has room for: the next round will do
    };
    buffer.copy_from_slice(CALL_PING);
    queue.call(buffer, CALL_PING.len()).await.map(drop)
}
