//! One region over several transports at once: an operation completed on one path is visible on every other,
//! and the atomics of all paths are atomic with respect to each other.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use farpool_fabric::{
    Endpoint, EndpointConfig, Host, Listeners, Locking, MonotonicClock, Peer, Queue, RegionSet, ServerHandle,
    ShmTransport, TcpTransport, Transport, block_on, serve,
};
use farpool_wire::{AccessKey, Epoch, NodeId, RegionId, RemoteAddr, SessionId};

const NODE: NodeId = NodeId(3);
const KEY: AccessKey = AccessKey::from_bytes([4; 16]);
const EPOCH: Epoch = Epoch(1);
const REGION_BYTES: u64 = 1 << 20;
const DEADLINE: Duration = Duration::from_secs(20);

/// A node with one region, which is lent.
struct Node(RegionSet);

impl Host for Node {
    fn node(&self) -> NodeId {
        NODE
    }

    fn regions(&self) -> &RegionSet {
        &self.0
    }
}

/// The node, and how clients reach it. The directory of its socket is dropped last.
struct Served {
    peer: Peer,
    _server: ServerHandle,
    _directory: tempfile::TempDir,
}

impl Served {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.sock");
        let regions = RegionSet::create(1, REGION_BYTES, Locking::None, |_| {}).unwrap();
        regions.open(0, EPOCH, KEY);
        let listeners = Listeners {
            tcp: Some(TcpListener::bind("127.0.0.1:0").unwrap()),
            unix: Some((UnixListener::bind(&path).unwrap(), path.clone())),
        };
        let server = serve(Arc::new(Node(regions)), listeners).unwrap();
        let peer = Peer { node: NODE, tcp: server.tcp(), verbs: None, shm_socket: Some(path) };
        Served { peer, _server: server, _directory: directory }
    }

    fn client(&self, transport: Rc<dyn Transport>) -> Client {
        static NEXT_SESSION: AtomicU64 = AtomicU64::new(1);
        let endpoint = Endpoint::new(EndpointConfig {
            transport,
            clock: Rc::new(MonotonicClock),
            // A session id only has to be unique.
            session_ids: Box::new(|| SessionId(NEXT_SESSION.fetch_add(1, Ordering::Relaxed))),
            arena_bytes: 64 << 10,
            deadline: DEADLINE,
        });
        let queue = endpoint.open(self.peer.clone()).unwrap();
        block_on(&endpoint, queue.attach(RegionId { node: NODE, index: 0 }, EPOCH, KEY)).unwrap();
        Client { endpoint, queue }
    }
}

struct Client {
    endpoint: Endpoint,
    queue: Queue,
}

impl Client {
    fn write(&self, data: &[u8]) {
        let mut buffer = self.endpoint.arena().take(data.len()).unwrap();
        buffer.copy_from_slice(data);
        block_on(&self.endpoint, self.queue.write(at(0), EPOCH, buffer)).1.unwrap();
    }

    fn read(&self, bytes: usize) -> Vec<u8> {
        let buffer = self.endpoint.arena().take(bytes).unwrap();
        let (buffer, result) = block_on(&self.endpoint, self.queue.read(at(0), EPOCH, buffer));
        result.unwrap();
        buffer.to_vec()
    }

    fn add(&self) -> u64 {
        block_on(&self.endpoint, self.queue.fetch_and_add(at(COUNTER_AT), EPOCH, 1)).unwrap()
    }

    /// Adds one with a loop of compare-and-swap: it repeats until no other client has changed the word
    /// between.
    fn increment(&self) {
        let mut seen = 0;
        loop {
            let swap = self.queue.compare_and_swap(at(COUNTER_AT), EPOCH, seen, seen + 1);
            match block_on(&self.endpoint, swap).unwrap() {
                before if before == seen => return,
                other => seen = other,
            }
        }
    }
}

const COUNTER_AT: u64 = 64 << 10;

fn at(offset: u64) -> RemoteAddr {
    RemoteAddr { region: RegionId { node: NODE, index: 0 }, offset }
}

#[test]
fn operations_completed_on_one_path_are_visible_on_the_other() {
    let served = Served::new();
    let (shared, remote) = (served.client(Rc::new(ShmTransport)), served.client(Rc::new(TcpTransport)));
    for round in 0..200u8 {
        shared.write(&[round; 8192]);
        assert!(remote.read(8192) == [round; 8192], "round {round}: stored, not seen over the network");
        remote.write(&[!round; 8192]);
        assert!(shared.read(8192) == [!round; 8192], "round {round}: sent, not seen in memory");
    }
}

#[test]
fn atomics_of_both_paths_count_together() {
    const EACH: u64 = 2000;
    let served = Served::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let client = served.client(Rc::new(ShmTransport));
            (0..EACH).for_each(|_| client.increment());
        });
        scope.spawn(|| {
            let client = served.client(Rc::new(ShmTransport));
            (0..EACH).for_each(|_| _ = client.add());
        });
        scope.spawn(|| {
            let client = served.client(Rc::new(TcpTransport));
            (0..EACH).for_each(|_| client.increment());
        });
        let client = served.client(Rc::new(TcpTransport));
        (0..EACH).for_each(|_| _ = client.add());
    });
    assert_eq!(served.client(Rc::new(TcpTransport)).add(), 4 * EACH);
}
