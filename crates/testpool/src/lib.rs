//! A pool for tests: a broker and nodes in the test's own process.

use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use farpool_broker::BrokerConfig;
use farpool_control::dial;
use farpool_fabric::TransportChoice;
use farpool_node::NodeConfig;
use farpool_pool::{Pool, PoolConfig};
use farpool_wire::OwnerId;
use farpool_wire::control::broker_client::BrokerClient;
use farpool_wire::control::node_client::NodeClient;
use farpool_wire::control::{NodeStatus, RevokeRequest, StatusRequest};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

/// Size of the regions of [`Rig::new`].
pub const REGION_BYTES: u64 = 1 << 20;

/// A broker and nodes, ended when dropped.
pub struct Rig {
    /// Where broker and nodes run.
    pub runtime: Runtime,
    /// The broker's address.
    pub broker: SocketAddr,
    region_bytes: u64,
    nodes: Vec<JoinHandle<()>>,
    /// Nodes that were ever started.
    started: usize,
    directory: tempfile::TempDir,
}

impl Rig {
    /// A broker, and nodes that lend so many regions each.
    ///
    /// # Panics
    /// If they do not start.
    pub fn new(nodes: u32, regions_each: u64) -> Rig {
        Rig::with_regions_of(REGION_BYTES, nodes, regions_each)
    }

    /// The same with regions of this size.
    ///
    /// # Panics
    /// If they do not start.
    pub fn with_regions_of(region_bytes: u64, nodes: u32, regions_each: u64) -> Rig {
        let runtime = Runtime::new().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let (ready, is_ready) = mpsc::channel();
        let config =
            BrokerConfig { listen: any_port(), store: directory.path().join("broker.redb"), tls: None };
        runtime.spawn(async move {
            let on_ready = |address| ready.send(address).unwrap();
            farpool_broker::run(config, on_ready, std::future::pending()).await.unwrap();
        });
        let broker = is_ready.recv_timeout(Duration::from_secs(20)).unwrap();
        let mut rig = Rig { runtime, broker, region_bytes, nodes: Vec::new(), started: 0, directory };
        rig.add_nodes(nodes, regions_each);
        rig
    }

    /// Starts more nodes, and waits until the pool has them.
    ///
    /// # Panics
    /// If they do not start.
    pub fn add_nodes(&mut self, nodes: u32, regions_each: u64) {
        let there = self.nodes_known().len() + nodes as usize;
        for _ in 0..nodes {
            self.start_node(regions_each);
        }
        wait_until(|| self.nodes_known().len() == there);
    }

    /// Starts one more node.
    pub fn start_node(&mut self, regions: u64) {
        let config = NodeConfig {
            broker: self.broker.to_string(),
            control_listen: any_port(),
            data_listen: any_port(),
            advertise: None,
            register_within: std::time::Duration::from_secs(20),
            shm_socket: Some(self.directory.path().join(format!("node{}.sock", self.started))),
            card: None,
            memory_bytes: regions * self.region_bytes,
            reserve_bytes: 0,
            region_bytes: self.region_bytes,
            locking: farpool_node::Locking::None,
            state_dir: None,
            tls: None,
        };
        self.started += 1;
        self.nodes.push(self.runtime.spawn(async move {
            farpool_node::run(config, |_| {}, std::future::pending()).await.unwrap();
        }));
    }

    /// Ends a node without letting it shut down: aborts its task. Later nodes move down by one index.
    ///
    /// # Panics
    /// If there is no node with this index.
    pub fn kill_node(&mut self, index: usize) {
        let node = self.nodes.remove(index);
        node.abort();
        let _ = self.runtime.block_on(node);
    }

    /// The nodes that the broker knows, with how many regions they have free.
    ///
    /// # Panics
    /// If the broker does not answer.
    pub fn nodes_known(&self) -> Vec<NodeStatus> {
        self.runtime.block_on(async {
            let mut broker = BrokerClient::new(dial(&self.broker.to_string(), None).unwrap());
            broker.status(StatusRequest::default()).await.unwrap().into_inner().nodes
        })
    }

    /// A client of the pool.
    ///
    /// # Panics
    /// If the broker does not answer.
    pub fn pool(&self, transport: TransportChoice) -> Pool {
        Pool::connect(self.config(transport)).unwrap()
    }

    /// How to reach the pool.
    pub fn config(&self, transport: TransportChoice) -> PoolConfig {
        let broker = self.broker.to_string();
        PoolConfig { broker, tls: None, transport: transport.into(), limit_bytes: None }
    }

    /// Asks each living node in turn to take back leases of an owner, as nodes do whose machines need memory:
    /// `count` in all, rounded up to the same number on each. Returns how many are taken back.
    ///
    /// # Panics
    /// If the broker does not answer, or no node is alive.
    pub fn take_back_from(&self, owner: OwnerId, count: u32, grace: Duration) -> u32 {
        let nodes = self.nodes_known();
        self.runtime.block_on(async {
            let alive = || nodes.iter().filter(|node| node.alive);
            let share = count.div_ceil(alive().count() as u32);
            let request = RevokeRequest { owner: owner.0, count: share, grace_ms: grace.as_millis() as u64 };
            let mut revoked = 0;
            for address in alive().filter_map(|node| node.address.as_ref()) {
                let mut node = NodeClient::new(dial(&address.control, None).unwrap());
                // A node that was just killed may still count as alive.
                revoked += node.revoke(request).await.map_or(0, |answer| answer.into_inner().revoked);
            }
            revoked
        })
    }
}

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// Waits until a condition holds.
///
/// # Panics
/// If it does not hold within half a minute.
#[track_caller]
pub fn wait_until(mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(30), "the condition did not hold in time");
        std::thread::yield_now();
    }
}
