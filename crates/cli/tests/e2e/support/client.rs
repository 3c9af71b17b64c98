//! A client that talks to broker, node and fabric directly, so that it can break the rules of real clients.

use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;
use std::time::Duration;

use farpool_control::dial;
use farpool_fabric::{
    Endpoint, EndpointConfig, MonotonicClock, Negotiated, OpError, Peer, Queue, TransportChoice, block_on,
};
use farpool_wire::control::broker_client::BrokerClient;
use farpool_wire::control::node_client::NodeClient;
use farpool_wire::control::{
    self, AcquireRequest, AddGrantRequest, FenceGrantRequest, Lease, LeaseClass, LeaseRef, ReleaseRequest,
    RenewOutcome, RenewRequest, RevokeRequest, RevokeResponse,
};
use farpool_wire::{AccessKey, Epoch, GrantMode, NodeId, RemoteAddr, SessionId};
use tokio::runtime::Runtime;
use tonic::transport::Channel;

const DEADLINE: Duration = Duration::from_secs(20);

/// One owner, with an endpoint of its own.
pub struct Client {
    runtime: Runtime,
    broker: String,
    owner: u64,
    endpoint: Endpoint,
}

impl Client {
    /// An owner of this name.
    pub fn new(broker: &str, owner: u64, transport: TransportChoice) -> Self {
        let endpoint = Endpoint::new(EndpointConfig {
            transport: Rc::new(Negotiated::new(transport, DEADLINE)),
            clock: Rc::new(MonotonicClock),
            session_ids: Box::new(|| SessionId(RandomState::new().hash_one(0))),
            arena_bytes: 1 << 20,
            deadline: DEADLINE,
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Client { runtime, broker: broker.to_owned(), owner, endpoint }
    }

    fn channel(&self, address: &str) -> Channel {
        let _inside = self.runtime.enter();
        dial(address, None).unwrap()
    }

    /// Revocable leases, at most `count`.
    pub fn acquire(&self, count: u32) -> Vec<Lease> {
        self.acquire_of(LeaseClass::Revocable, count)
    }

    /// A lease that the node cannot take back.
    pub fn acquire_pinned(&self) -> Lease {
        self.acquire_of(LeaseClass::Pinned, 1).remove(0)
    }

    fn acquire_of(&self, class: LeaseClass, count: u32) -> Vec<Lease> {
        let class = class.into();
        let request = AcquireRequest { owner: self.owner, count, class, avoid: Vec::new() };
        let mut broker = BrokerClient::new(self.channel(&self.broker));
        self.runtime.block_on(broker.acquire(request)).unwrap().into_inner().leases
    }

    fn node(&self, lease: &Lease) -> NodeClient<Channel> {
        NodeClient::new(self.channel(&lease.address.as_ref().unwrap().control))
    }

    /// Asks the node for more time.
    pub fn renew(&self, lease: &Lease) -> RenewOutcome {
        let request = RenewRequest { owner: self.owner, leases: vec![reference(lease)] };
        let answer = self.runtime.block_on(self.node(lease).renew(request)).unwrap().into_inner();
        answer.outcomes.into_iter().next().unwrap()
    }

    /// Gives a region back.
    pub fn release(&self, lease: &Lease) {
        let request = ReleaseRequest { owner: self.owner, leases: vec![reference(lease)] };
        self.runtime.block_on(self.node(lease).release(request)).unwrap();
    }

    /// Lets another client in: the lease as that client would see it.
    pub fn let_in(&self, lease: &Lease, mode: GrantMode) -> Lease {
        let mode = control::GrantMode::from(mode).into();
        let request = AddGrantRequest { owner: self.owner, lease: Some(reference(lease)), mode };
        let grant = self.runtime.block_on(self.node(lease).add_grant(request)).unwrap().into_inner();
        Lease { epoch: grant.epoch, key: grant.key, ..lease.clone() }
    }

    /// Ends the access of a client that was let in.
    pub fn fence(&self, lease: &Lease, client: &Lease) {
        let lease = Some(reference(lease));
        let request = FenceGrantRequest { owner: self.owner, lease, grant: client.epoch };
        self.runtime.block_on(self.node(client).fence_grant(request)).unwrap();
    }

    /// Has the broker revoke leases of this owner.
    pub fn take_back(&self, count: u32, grace_ms: u64) -> RevokeResponse {
        let request = RevokeRequest { owner: self.owner, count, grace_ms };
        let mut broker = BrokerClient::new(self.channel(&self.broker));
        self.runtime.block_on(broker.revoke(request)).unwrap().into_inner()
    }

    /// A connection to the node of a lease, with nothing attached.
    pub fn connect(&self, lease: &Lease) -> Queue {
        let address = lease.address.as_ref().unwrap();
        let socket = Some(address.shm_socket.clone()).filter(|path| !path.is_empty()).map(Into::into);
        let peer = Peer {
            node: NodeId(address.node),
            tcp: address.tcp.parse().ok(),
            verbs: address.rdma.parse().ok(),
            shm_socket: socket,
        };
        self.endpoint.open(peer).unwrap()
    }

    /// Opens the region of a lease with a key.
    pub fn attach(&self, queue: &Queue, lease: &Lease, key: AccessKey) -> Result<(), OpError> {
        block_on(&self.endpoint, queue.attach(lease.region_id().unwrap(), Epoch(lease.epoch), key))
    }

    /// A connection that may read and write the region of a lease.
    pub fn open(&self, lease: &Lease) -> Queue {
        let queue = self.connect(lease);
        self.attach(&queue, lease, lease.access_key().unwrap()).unwrap();
        queue
    }

    /// Writes to the start of a region.
    pub fn write(&self, queue: &Queue, lease: &Lease, data: &[u8]) -> Result<(), OpError> {
        let mut buffer = self.endpoint.arena().take(data.len()).unwrap();
        buffer.copy_from_slice(data);
        block_on(&self.endpoint, queue.write(start(lease), Epoch(lease.epoch), buffer)).1
    }

    /// Reads from the start of a region.
    pub fn read(&self, queue: &Queue, lease: &Lease, bytes: usize) -> Result<Vec<u8>, OpError> {
        let buffer = self.endpoint.arena().take(bytes).unwrap();
        let (buffer, result) = block_on(&self.endpoint, queue.read(start(lease), Epoch(lease.epoch), buffer));
        result.map(|()| buffer.to_vec())
    }
}

fn start(lease: &Lease) -> RemoteAddr {
    RemoteAddr { region: lease.region_id().unwrap(), offset: 0 }
}

fn reference(lease: &Lease) -> LeaseRef {
    LeaseRef::new(lease.region, Epoch(lease.epoch), &lease.access_key().unwrap())
}
