//! A broker and nodes in one process, on loopback, over real gRPC.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use farpool_broker::{BrokerConfig, BrokerError, run};
use farpool_control::{Listener, Tls, dial};
use farpool_lease::{DEFAULT_TTL, LeaseClass, Lending, Millis, RegionStatus, RegionTable};
use farpool_wire::control::broker_client::BrokerClient;
use farpool_wire::control::node_server::{Node, NodeServer};
use farpool_wire::control::{
    AcquireRequest, AcquireResponse, AddGrantRequest, AddGrantResponse, AwaitRevocationRequest,
    AwaitRevocationResponse, FenceGrantRequest, FenceGrantResponse, GrantRequest, GrantResponse,
    HeartbeatRequest, Lease, NodeAddress, NodeStatus, RegionState, RegionsRequest, RegionsResponse,
    RegisterRequest, ReleaseRequest, ReleaseResponse, RenewRequest, RenewResponse, ResizeRequest,
    ResizeResponse, RevokeRequest, RevokeResponse, StatusRequest, StatusResponse,
};
use farpool_wire::{AccessKey, OwnerId};
use rustix_futex_sync::Mutex;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

pub const REGION_BYTES: u64 = 64 << 20;
/// Longest wait of the tests: whatever takes longer hangs.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub struct RunningBroker {
    pub address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), BrokerError>>,
    tls: Option<Tls>,
}

impl RunningBroker {
    pub async fn start(store: &Path, tls: Option<Tls>) -> Self {
        let listen = "127.0.0.1:0".parse().unwrap();
        let config = BrokerConfig { listen, store: store.to_owned(), tls: tls.clone() };
        let (ready, address) = oneshot::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let stopped = async { stopped.await.unwrap_or_default() };
        let task = tokio::spawn(run(config, |address| ready.send(address).unwrap(), stopped));
        RunningBroker { address: address.await.unwrap(), stop, task, tls }
    }

    pub fn client(&self) -> BrokerClient<Channel> {
        BrokerClient::new(dial(&self.address.to_string(), self.tls.as_ref()).unwrap())
    }

    pub async fn acquire(&self, owner: u64, count: u32) -> AcquireResponse {
        let class = LeaseClass::Revocable.to_wire();
        let request = AcquireRequest { owner, count, class, avoid: Vec::new() };
        self.client().acquire(request).await.unwrap().into_inner()
    }

    pub async fn status(&self) -> StatusResponse {
        self.client().status(StatusRequest::default()).await.unwrap().into_inner()
    }

    pub async fn stop(self) {
        self.stop.send(()).unwrap();
        tokio::time::timeout(PATIENCE, self.task).await.expect("the broker ends").unwrap().unwrap();
    }
}

/// A node that lends by the real rules but has no memory.
pub struct FakeNode {
    address: NodeAddress,
    regions: u32,
    pub table: Mutex<RegionTable>,
    /// If set, the node does not answer grants.
    pub stalled: AtomicBool,
    server: Mutex<Option<JoinHandle<()>>>,
}

impl FakeNode {
    /// Starts a node that is known to no broker yet.
    pub async fn start(node: u64, regions: u32, tls: Option<Tls>) -> Arc<Self> {
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), tls).await.unwrap();
        let control = listener.address().to_string();
        let fake = Arc::new(FakeNode {
            address: NodeAddress { node, incarnation: 1, control, ..Default::default() },
            regions,
            table: Mutex::new(RegionTable::new(1, regions, DEFAULT_TTL)),
            stalled: AtomicBool::new(false),
            server: Mutex::new(None),
        });
        let serving = listener.serve(NodeServer::from_arc(fake.clone()), std::future::pending());
        *fake.server.lock() = Some(tokio::spawn(async { serving.await.unwrap() }));
        fake
    }

    /// Starts a node and registers it.
    pub async fn join(broker: &RunningBroker, node: u64, regions: u32) -> Arc<Self> {
        let fake = Self::start(node, regions, broker.tls.clone()).await;
        fake.register(broker).await.unwrap();
        fake
    }

    pub async fn register(&self, broker: &RunningBroker) -> Result<(), Status> {
        self.register_with(broker, REGION_BYTES).await
    }

    /// Registers with regions of this size.
    pub async fn register_with(&self, broker: &RunningBroker, region_bytes: u64) -> Result<(), Status> {
        let report = RegisterRequest {
            address: Some(self.address.clone()),
            region_bytes,
            regions_total: self.regions,
            lent: self.states(),
        };
        broker.client().register(report).await.map(drop)
    }

    /// Sends a heartbeat. Returns whether the node must register again.
    pub async fn beat(&self, broker: &RunningBroker) -> bool {
        let counts = self.table.lock().counts();
        let beat = HeartbeatRequest {
            node: self.address.node,
            incarnation: 1,
            regions_free: counts.free,
            regions_lent: counts.held,
            regions_withdrawn: counts.withdrawn,
            frames_rejected: 3,
            table: self.states().iter().fold(0, |sum, state| sum.wrapping_add(state.mark())),
        };
        broker.client().heartbeat(beat).await.unwrap().into_inner().register_again
    }

    /// From now on connections to the node are refused.
    pub async fn kill(&self) {
        let server = self.server.lock().take().unwrap();
        server.abort();
        assert!(server.await.unwrap_err().is_cancelled());
    }

    pub fn held(&self) -> u32 {
        self.table.lock().counts().held
    }

    fn states(&self) -> Vec<RegionState> {
        let table = self.table.lock();
        let states = (0..).zip(table.statuses()).filter_map(|(region, status)| match status {
            RegionStatus::Free => None,
            RegionStatus::Held { epoch, owner, class, until, grants, revoked } => Some(RegionState {
                region,
                owner: owner.0,
                epoch: epoch.0,
                class: class.to_wire(),
                remaining_ms: until.0,
                held: true,
                revoked,
                grants,
                withdrawn: false,
            }),
            RegionStatus::Fenced { epoch } | RegionStatus::Scrubbing { epoch } => {
                Some(RegionState { region, epoch: epoch.0, ..Default::default() })
            }
            RegionStatus::Withdrawn => Some(RegionState { region, withdrawn: true, ..Default::default() }),
        });
        states.collect()
    }
}

#[tonic::async_trait]
impl Node for FakeNode {
    async fn grant(&self, request: Request<GrantRequest>) -> Result<Response<GrantResponse>, Status> {
        if self.stalled.load(Ordering::Acquire) {
            std::future::pending::<()>().await;
        }
        let GrantRequest { owner, count, class } = request.into_inner();
        let known = LeaseClass::from_wire(class).unwrap();
        let mut keys = || AccessKey::from_bytes([7; 16]);
        let grants = self.table.lock().grant(Millis(0), OwnerId(owner), known, count, &mut keys);
        let leases = grants.into_iter().map(|grant| Lease {
            address: Some(self.address.clone()),
            region: grant.lending.region,
            epoch: grant.lending.epoch.0,
            key: grant.key.as_bytes().to_vec(),
            ttl_ms: DEFAULT_TTL.0,
            class,
        });
        Ok(Response::new(GrantResponse { leases: leases.collect() }))
    }

    async fn renew(&self, _: Request<RenewRequest>) -> Result<Response<RenewResponse>, Status> {
        Err(Status::unimplemented("owners renew, not brokers"))
    }

    async fn add_grant(&self, _: Request<AddGrantRequest>) -> Result<Response<AddGrantResponse>, Status> {
        Err(Status::unimplemented("owners let clients in, not brokers"))
    }

    async fn fence_grant(
        &self,
        _: Request<FenceGrantRequest>,
    ) -> Result<Response<FenceGrantResponse>, Status> {
        Err(Status::unimplemented("owners shut clients out, not brokers"))
    }

    async fn revoke(&self, request: Request<RevokeRequest>) -> Result<Response<RevokeResponse>, Status> {
        let RevokeRequest { owner, count, grace_ms } = request.into_inner();
        let mut table = self.table.lock();
        let held: Vec<_> = (0u32..)
            .zip(table.statuses())
            .filter_map(|(region, status)| match status {
                RegionStatus::Held { epoch, owner: whose, .. } if whose == OwnerId(owner) => {
                    Some(Lending { region, epoch })
                }
                _ => None,
            })
            .collect();
        let taken =
            held.into_iter().filter(|lease| table.revoke(Millis(0), *lease, Millis(grace_ms)).is_ok());
        let revoked = taken.take(count as usize).count() as u32;
        Ok(Response::new(RevokeResponse { revoked, remaining_ms: grace_ms, ..Default::default() }))
    }

    async fn release(&self, _: Request<ReleaseRequest>) -> Result<Response<ReleaseResponse>, Status> {
        Err(Status::unimplemented("owners release, not brokers"))
    }

    async fn await_revocation(
        &self,
        _: Request<AwaitRevocationRequest>,
    ) -> Result<Response<AwaitRevocationResponse>, Status> {
        Err(Status::unimplemented("brokers do not ask this"))
    }

    async fn resize(&self, _: Request<ResizeRequest>) -> Result<Response<ResizeResponse>, Status> {
        Err(Status::unimplemented("brokers do not ask this"))
    }

    async fn regions(&self, _: Request<RegionsRequest>) -> Result<Response<RegionsResponse>, Status> {
        Ok(Response::new(RegionsResponse {
            address: Some(self.address.clone()),
            region_bytes: REGION_BYTES,
            regions_total: self.regions,
            lent: self.states(),
            ..RegionsResponse::default()
        }))
    }
}

/// `(node, alive, free, lent)` of each node.
pub fn summary(status: &StatusResponse) -> Vec<(u64, bool, u32, u32)> {
    let line = |node: &NodeStatus| {
        (node.address.as_ref().unwrap().node, node.alive, node.regions_free, node.regions_lent)
    };
    status.nodes.iter().map(line).collect()
}
