//! The keeper against a broker and a node whose answers the tests choose.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::atomic::AtomicUsize;

use farpool_control::Listener;
use farpool_fabric::TransportChoice;
use farpool_keep::{Journal, MemoryJournal};
use farpool_wire::OwnerId;
use farpool_wire::control::broker_server::{Broker, BrokerServer};
use farpool_wire::control::node_server::{Node, NodeServer};
use farpool_wire::control::{
    AcquireRequest, AcquireResponse, AddGrantRequest, AddGrantResponse, FenceGrantRequest,
    FenceGrantResponse, GrantRequest, GrantResponse, HeartbeatRequest, HeartbeatResponse, NodeAddress,
    RegionsRequest, RegionsResponse, RegisterRequest, RegisterResponse, ReleaseResponse, RenewOutcome,
    RenewRequest, RenewResponse, ResizeRequest, ResizeResponse, RevokeRequest, RevokeResponse,
    StatusResponse,
};
use rustix_futex_sync::Mutex;
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tonic::{Request, Response};

use super::*;
use crate::keeping::{Keeping, KeptPool};
use crate::pool::{KeptState, Pool};
use crate::space::{EXTENT_BYTES, Extent};

const REGION_BYTES: u64 = 4 * EXTENT_BYTES;
/// An hour, so that no lease comes due for renewal during a test.
const TTL_MS: u64 = 3_600_000;
/// How long the node takes to release a region. It is so long that a pool that does not wait for the answer
/// has been dropped before the release is recorded.
const RELEASE_TAKES: Duration = Duration::from_millis(100);
/// Longest wait for one step: whatever takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a node was asked for.
#[derive(Clone, PartialEq, Debug)]
enum Asked {
    Renew(RenewRequest),
    Release(ReleaseRequest),
    /// To say when leases are taken back, with the number of the last answer.
    AwaitRevocation(u64),
}

/// A fake broker and a fake node; the tests set their answers.
#[derive(Default)]
struct FakePool {
    /// How many regions the broker says it could lend; `None`: it refuses to say.
    free_regions: Mutex<Option<u64>>,
    /// Its next answers to requests for regions. Afterwards it has none to lend.
    lends: Mutex<VecDeque<AcquireResponse>>,
    asked_of_node: Mutex<Vec<Asked>>,
    /// How many renewals the node is still going to fail.
    failing_renewals: Mutex<u32>,
    is_taken_back: Mutex<bool>,
    taking_back: Notify,
}

impl FakePool {
    fn record(&self, asked: Asked) {
        self.asked_of_node.lock().push(asked);
    }
}

fn unexpected<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("no client asks this"))
}

#[tonic::async_trait]
impl Broker for FakePool {
    async fn register(&self, _: Request<RegisterRequest>) -> Result<Response<RegisterResponse>, Status> {
        unexpected()
    }

    async fn heartbeat(&self, _: Request<HeartbeatRequest>) -> Result<Response<HeartbeatResponse>, Status> {
        unexpected()
    }

    async fn acquire(&self, _: Request<AcquireRequest>) -> Result<Response<AcquireResponse>, Status> {
        let full = AcquireResponse { region_bytes: REGION_BYTES, ..Default::default() };
        Ok(Response::new(self.lends.lock().pop_front().unwrap_or(full)))
    }

    async fn revoke(&self, _: Request<RevokeRequest>) -> Result<Response<RevokeResponse>, Status> {
        unexpected()
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        let regions_free = self.free_regions.lock().ok_or_else(|| Status::unavailable("not now"))?;
        Ok(Response::new(StatusResponse { region_bytes: REGION_BYTES, regions_free, ..Default::default() }))
    }
}

#[tonic::async_trait]
impl Node for FakePool {
    async fn grant(&self, _: Request<GrantRequest>) -> Result<Response<GrantResponse>, Status> {
        unexpected()
    }

    async fn renew(&self, request: Request<RenewRequest>) -> Result<Response<RenewResponse>, Status> {
        let request = request.into_inner();
        self.record(Asked::Renew(request.clone()));
        let mut failing = self.failing_renewals.lock();
        if *failing > 0 {
            *failing -= 1;
            return Err(Status::unavailable("not yet"));
        }
        let revoked = *self.is_taken_back.lock();
        let outcome = RenewOutcome { renewed: true, remaining_ms: TTL_MS, revoked, ..Default::default() };
        Ok(Response::new(RenewResponse { outcomes: vec![outcome; request.leases.len()] }))
    }

    async fn add_grant(&self, _: Request<AddGrantRequest>) -> Result<Response<AddGrantResponse>, Status> {
        unexpected()
    }

    async fn fence_grant(
        &self,
        _: Request<FenceGrantRequest>,
    ) -> Result<Response<FenceGrantResponse>, Status> {
        unexpected()
    }

    async fn revoke(&self, _: Request<RevokeRequest>) -> Result<Response<RevokeResponse>, Status> {
        unexpected()
    }

    async fn await_revocation(
        &self,
        request: Request<AwaitRevocationRequest>,
    ) -> Result<Response<AwaitRevocationResponse>, Status> {
        let AwaitRevocationRequest { seen, .. } = request.into_inner();
        self.record(Asked::AwaitRevocation(seen));
        self.taking_back.notified().await;
        Ok(Response::new(AwaitRevocationResponse { seen: seen + 1, revoked: true }))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseResponse>, Status> {
        tokio::time::sleep(RELEASE_TAKES).await;
        self.record(Asked::Release(request.into_inner()));
        Ok(Response::new(ReleaseResponse { released: 1 }))
    }

    async fn resize(&self, _: Request<ResizeRequest>) -> Result<Response<ResizeResponse>, Status> {
        unexpected()
    }

    async fn regions(&self, _: Request<RegionsRequest>) -> Result<Response<RegionsResponse>, Status> {
        unexpected()
    }
}

struct Rig {
    played: Arc<FakePool>,
    broker: SocketAddr,
    node: NodeAddress,
    runtime: Runtime,
    /// The node's data plane: it takes connections and answers nothing, so that the node is not given up
    /// before several seconds have passed.
    _data: TcpListener,
}

impl Rig {
    fn new() -> Rig {
        let runtime = Runtime::new().unwrap();
        let played = Arc::new(FakePool::default());
        *played.free_regions.lock() = Some(10);
        let bind = || runtime.block_on(Listener::bind("127.0.0.1:0".parse().unwrap(), None)).unwrap();
        let (broker, node) = (bind(), bind());
        let data = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = NodeAddress {
            node: 3,
            control: node.address().to_string(),
            tcp: data.local_addr().unwrap().to_string(),
            ..NodeAddress::default()
        };
        let rig = Rig { played, broker: broker.address(), node: address, runtime, _data: data };
        rig.runtime.spawn(broker.serve(BrokerServer::from_arc(rig.played.clone()), std::future::pending()));
        rig.runtime.spawn(node.serve(NodeServer::from_arc(rig.played.clone()), std::future::pending()));
        rig
    }

    fn config(&self) -> PoolConfig {
        let transport = TransportChoice::Tcp.into();
        PoolConfig { broker: self.broker.to_string(), tls: None, transport, limit_bytes: None }
    }

    fn lease(&self) -> Lease {
        let address = Some(self.node.clone());
        let epoch = Epoch::new(1, 1).0;
        Lease { address, region: 5, epoch, key: vec![1; 16], ttl_ms: TTL_MS, ..Default::default() }
    }

    /// The broker's next answer lends a region, and says that regions have this size.
    fn lends_region_of(&self, region_bytes: u64) {
        let answer =
            AcquireResponse { leases: vec![self.lease()], region_bytes, short_reason: String::new() };
        self.played.lends.lock().push_back(answer);
    }

    /// A pool of which an extent is held.
    fn pool_in_use(&self) -> (Pool, Extent) {
        self.lends_region_of(REGION_BYTES);
        let pool = Pool::connect(self.config()).unwrap();
        let extent = self.runtime.block_on(pool.take_extent(0)).unwrap();
        (pool, extent)
    }

    /// What was asked of the node, but for requests to say when leases are taken back.
    fn asked_of_node(&self) -> Vec<Asked> {
        let asked = self.played.asked_of_node.lock();
        asked.iter().filter(|asked| !matches!(asked, Asked::AwaitRevocation(_))).cloned().collect()
    }

    /// The request that gives the region of [`lease`](Self::lease) back.
    fn release_by(&self, owner: OwnerId) -> Asked {
        let key = self.lease().access_key().unwrap();
        let lease = farpool_wire::control::LeaseRef::new(5, Epoch::new(1, 1), &key);
        Asked::Release(ReleaseRequest { owner: owner.0, leases: vec![lease] })
    }
}

fn wait_until(mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "the condition did not hold in time");
        std::thread::yield_now();
    }
}

fn regions_of(pool: &Pool) -> u64 {
    pool.capacity().total_bytes / REGION_BYTES
}

#[test]
fn regions_have_gone_back_to_their_node_when_the_pool_is_closed() {
    let rig = Rig::new();
    let (pool, _extent) = rig.pool_in_use();
    let owner = pool.owner();
    assert_eq!(rig.asked_of_node(), []);
    drop(pool);
    assert_eq!(rig.asked_of_node(), [rig.release_by(owner)]);
}

#[test]
fn leases_that_a_node_takes_back_are_renewed_at_once_and_go_back_when_they_are_empty() {
    let rig = Rig::new();
    let (pool, extent) = rig.pool_in_use();
    let is_asked = |asked| rig.played.asked_of_node.lock().contains(&asked);
    wait_until(|| is_asked(Asked::AwaitRevocation(0)));
    assert!(!pool.is_to_leave() && rig.asked_of_node().is_empty());
    *rig.played.is_taken_back.lock() = true;
    rig.played.taking_back.notify_one();
    wait_until(|| pool.is_to_leave());
    wait_until(|| is_asked(Asked::AwaitRevocation(1)));
    assert!(!is_asked(rig.release_by(pool.owner())), "an extent of the region is in use");
    drop(extent);
    wait_until(|| is_asked(rig.release_by(pool.owner())));
}

#[test]
fn a_node_on_which_nothing_is_held_any_more_is_asked_nothing_and_its_clients_are_dropped() {
    let rig = Rig::new();
    let (pool, _extent) = rig.pool_in_use();
    let (config, stock) = (rig.config(), pool.stock().clone());
    let shared =
        Arc::new(Shared { config, stock, sessions: Mutex::default(), next_lender: AtomicUsize::new(0) });
    let mut nodes = Nodes { tls: None, clients: BTreeMap::new(), listening: BTreeMap::new() };
    let _inside = rig.runtime.enter();
    nodes.listen(&shared);
    nodes.forget_strangers(&shared);
    let node = NodeId(rig.node.node);
    assert!(nodes.clients.contains_key(&node));
    let listening = nodes.listening[&node].1.abort_handle();

    shared.stock.retire_all();
    shared.stock.forget_idle_nodes();
    nodes.forget_strangers(&shared);
    assert!(nodes.clients.is_empty() && nodes.listening.is_empty());
    wait_until(|| listening.is_finished());
}

#[test]
fn the_capacity_of_a_pool_follows_what_the_broker_says() {
    let rig = Rig::new();
    let pool = Pool::connect(rig.config()).unwrap();
    assert_eq!(regions_of(&pool), 10);
    *rig.played.free_regions.lock() = Some(4);
    wait_until(|| regions_of(&pool) == 4);
}

#[test]
fn a_pool_that_lends_nothing_has_no_free_regions_whatever_the_broker_said_before() {
    let rig = Rig::new();
    let pool = Pool::connect(rig.config()).unwrap();
    assert_eq!(regions_of(&pool), 10);
    *rig.played.free_regions.lock() = None;
    wait_until(|| {
        // An answer that was under way may have overwritten the number.
        assert!(rig.runtime.block_on(pool.take_extent(0)).is_err());
        regions_of(&pool) == 0
    });
}

#[test]
fn a_lease_that_cannot_be_used_is_given_back_and_says_nothing_about_the_other_regions() {
    let rig = Rig::new();
    rig.lends_region_of(2 * REGION_BYTES);
    let pool = Pool::connect(rig.config()).unwrap();
    *rig.played.free_regions.lock() = None;
    assert!(rig.runtime.block_on(pool.take_extent(0)).is_err());
    assert_eq!(rig.asked_of_node(), [rig.release_by(pool.owner())]);
    assert!(regions_of(&pool) >= 9);
}

/// The journal of a process that had the region of [`Rig::lease`], and was killed.
fn left_by_a_killed_process(rig: &Rig, region_bytes: u64) -> Arc<MemoryJournal> {
    let journal = Arc::new(MemoryJournal::default());
    journal.append(&[KeptPool { owner: 7, region_bytes }.put()]);
    Keeping::new(journal.clone()).held(0, &rig.lease());
    journal.abandon();
    journal
}

#[test]
fn leases_of_a_killed_process_are_asked_for_again_until_the_node_answers_and_outlive_this_one() {
    let rig = Rig::new();
    let left = left_by_a_killed_process(&rig, REGION_BYTES);
    *rig.played.failing_renewals.lock() = 2;
    let (kept, dir) = (left.kept(), Path::new("/"));
    let state = KeptState { journal: Arc::new(left.successor()), kept: &kept, dir };
    let (pool, adoption) = Pool::connect_keeping(rig.config(), None, state).unwrap();
    assert_eq!(adoption.extents_held().collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!((pool.owner(), regions_of(&pool)), (OwnerId(7), 11));
    assert_eq!(rig.asked_of_node().len(), 3);
    drop(pool);
    let asked = rig.asked_of_node();
    let is_renewal = |asked: &Asked| matches!(asked, Asked::Renew(request) if request.leases.len() == 1);
    assert!(asked.len() == 4 && asked.iter().all(is_renewal), "{asked:?}");
}

#[test]
fn a_pool_whose_regions_have_another_size_than_those_of_a_killed_process_is_refused() {
    let rig = Rig::new();
    let left = left_by_a_killed_process(&rig, 2 * REGION_BYTES);
    let (kept, dir) = (left.kept(), Path::new("/"));
    let state = KeptState { journal: Arc::new(left.successor()), kept: &kept, dir };
    let connected = Pool::connect_keeping(rig.config(), None, state);
    let Err(PoolError::OtherRegionSize { kept, found }) = connected else { panic!("it is not refused") };
    assert_eq!((kept, found), (2 * REGION_BYTES, REGION_BYTES));
}

#[test]
fn an_error_says_how_to_start_or_name_a_broker_unless_the_broker_itself_says_what_to_do() {
    let said = |fault: &Fault| no_broker(&Status::from_error(Box::new(fault.clone())));
    let nobody = Fault::Unreachable("nobody listens there".to_owned());
    let told = said(&nobody);
    assert!(told.contains(&nobody.to_string()) && told.contains("--broker HOST:PORT"), "{told}");
    assert_eq!(said(&Fault::WantsTls), Fault::WantsTls.to_string());
}
