use std::collections::BTreeSet;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use farpool_control::limits::{MAX_REGIONS_PER_ACQUIRE, REGION_GRANULE_BYTES};
use farpool_control::{Identity, Peer, REQUEST_TIMEOUT, Tls, check_address};
use farpool_lease::{LeaseClass, Millis};
use farpool_throttle::Throttle;
use farpool_wire::control::broker_server::Broker;
use farpool_wire::control::{
    AcquireRequest, AcquireResponse, HeartbeatRequest, HeartbeatResponse, NodeAddress, RegisterRequest,
    RegisterResponse, RevokeRequest, RevokeResponse, StatusRequest, StatusResponse,
};
use farpool_wire::{NodeId, OwnerId};
use futures_util::stream::{self, StreamExt};
use rustix_futex_sync::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout};
use tonic::{Request, Response, Status};

use crate::acquire::{ACQUIRE_DEADLINE, acquire, take_back};
use crate::claims::{Claims, MAX_OWNERS_PER_IDENTITY};
use crate::peers::{InVain, MAX_ASKED_AT_ONCE, Peers};
use crate::placing::Wish;
use crate::state::{MAX_NODES, Pool, ReportRefusal};
use crate::store::{Store, StoreError};

/// Maximum number of requests that ask nodes at the same time. Each may hold [`MAX_ASKED_AT_ONCE`]
/// connections. Later requests wait for their turn.
const MAX_ACQUIRES: usize = 16;

/// Longest wait for that turn. Together with [`ACQUIRE_DEADLINE`] it is less than [`REQUEST_TIMEOUT`].
const TURN_DEADLINE: Duration = Duration::from_secs(2);
const _: () = assert!(TURN_DEADLINE.as_secs() + ACQUIRE_DEADLINE.as_secs() < REQUEST_TIMEOUT.as_secs());

/// Longest time that a status request waits for nodes; for the others it shows their last report.
const REFRESH_DEADLINE: Duration = Duration::from_millis(1_500);

/// A view up to this age is shown again, so that many watchers cost the nodes no more than one.
const REFRESH_EVERY: Duration = Duration::from_millis(100);

/// The gRPC service over the broker's view of the nodes and its store.
pub struct BrokerService {
    pool: Mutex<Pool>,
    /// Lock order: before `pool`.
    claims: Mutex<Claims>,
    store: Arc<Store>,
    peers: Peers,
    started: Instant,
    acquires: Semaphore,
    refreshed: tokio::sync::Mutex<Option<Instant>>,
    rejected: AtomicU64,
    /// Limits the warnings about changes that the store did not write.
    unwritten: Throttle,
}

impl BrokerService {
    /// Starts from the nodes in the store; nothing is placed on them until they report.
    pub fn new(store: Store, tls: Option<Tls>) -> Result<Self, StoreError> {
        let mut pool = Pool::default();
        store.reports()?.iter().for_each(|report| pool.remember(Millis(0), report));
        Ok(BrokerService {
            pool: Mutex::new(pool),
            claims: Mutex::default(),
            store: Arc::new(store),
            peers: Peers::new(tls),
            started: Instant::now(),
            acquires: Semaphore::new(MAX_ACQUIRES),
            refreshed: tokio::sync::Mutex::new(None),
            rejected: AtomicU64::new(0),
            unwritten: Throttle::new(),
        })
    }

    /// Asks every node that may be alive for its table, and records it.
    pub async fn refresh(&self) {
        let nodes = self.pool.lock().reachable(self.now());
        let ask = async |address: NodeAddress| {
            let node = NodeId(address.node);
            let report = match self.peers.regions(&address).await {
                Ok(report) => report,
                Err(error) => return tracing::debug!(%node, %error, "a node did not show its table"),
            };
            let registrar = self.claims.lock().registrar(node);
            if let Err(refusal) = self.believe(&report, registrar) {
                self.peers.warn(InVain::Table, node, &refusal);
            }
        };
        let asking = stream::iter(nodes).for_each_concurrent(MAX_ASKED_AT_ONCE, ask);
        let _ = timeout(REFRESH_DEADLINE, asking).await; // later answers are ignored: the last report stays
    }

    /// Checks a node's report and records it.
    fn believe(
        &self,
        report: &RegisterRequest,
        identity: Option<Identity>,
    ) -> Result<RegisterResponse, ReportRefusal> {
        if report.region_bytes == 0 || !report.region_bytes.is_multiple_of(REGION_GRANULE_BYTES) {
            return Err(ReportRefusal::Malformed("regions are multiples of 1 MiB"));
        }
        let address = report.address.clone().unwrap_or_default();
        let served = [&address.control, &address.tcp].into_iter().filter(|address| !address.is_empty());
        if served.into_iter().any(|address| check_address(address).is_err()) {
            return Err(ReportRefusal::Malformed("addresses are HOST:PORT"));
        }
        let node = NodeId(address.node);
        let owners: BTreeSet<u64> =
            report.lent.iter().filter(|region| region.held).map(|region| region.owner).collect();
        let mut claims = self.claims.lock();
        let mut pool = self.pool.lock();
        if !claims.has_room(node, &identity, owners.len(), |node| pool.owners_on(node)) {
            return Err(ReportRefusal::TooManyOwners);
        }
        let answer = pool.report(self.now(), report)?;
        claims.registered(node, identity);
        Ok(answer)
    }

    /// Drops nodes that have long been silent, here and in the store, and the names of owners that hold
    /// nothing.
    pub async fn forget_silent(&self) {
        let forgotten = self.pool.lock().forget(self.now());
        let holding = self.pool.lock().owners();
        self.claims.lock().keep_only(&holding);
        for node in forgotten {
            self.claims.lock().forget(node);
            tracing::info!(%node, "a node has long been silent and is forgotten");
            self.change_store(move |store| store.forget(node)).await;
        }
    }

    /// Counts a connection that the listener has refused.
    pub fn connection_rejected(&self) {
        self.rejected.fetch_add(1, Ordering::Relaxed); // a statistic: pairs with nothing
    }

    fn page(&self, asked: &StatusRequest) -> StatusResponse {
        let connections_rejected = self.rejected.load(Ordering::Relaxed); // see `connection_rejected`
        StatusResponse { connections_rejected, ..self.pool.lock().status(self.now(), asked) }
    }

    /// Waits until a request may ask nodes.
    async fn turn(&self) -> Result<SemaphorePermit<'_>, Status> {
        let turn = timeout(TURN_DEADLINE, self.acquires.acquire()).await;
        let turn = turn.ok().and_then(Result::ok);
        turn.ok_or_else(|| Status::resource_exhausted("too many requests need nodes at once: ask again"))
    }

    fn now(&self) -> Millis {
        Millis(self.started.elapsed().as_millis() as u64)
    }

    /// Changes the store. A failure is only logged: the store only saves time after a restart, so a failing
    /// disk must not stop the pool.
    async fn change_store(&self, change: impl FnOnce(&Store) -> Result<(), StoreError> + Send + 'static) {
        let store = self.store.clone();
        let failed: Box<dyn Error> = match tokio::task::spawn_blocking(move || change(&store)).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.into(),
            Err(error) => error.into(),
        };
        if let Some(left_out) = self.unwritten.occurs(std::time::Instant::now()) {
            tracing::warn!(error = %failed, left_out, "the broker's store was not written");
        }
    }
}

#[tonic::async_trait]
impl Broker for BrokerService {
    async fn register(
        &self,
        request: Request<RegisterRequest>,
    ) -> Result<Response<RegisterResponse>, Status> {
        let identity = identity_of(&request);
        let mut report = request.into_inner();
        let node = NodeId(report.address.as_ref().map_or(0, |address| address.node));
        let answer = self.believe(&report, identity).map_err(|refusal| {
            tracing::info!(%node, %refusal, "a node was not registered");
            refused(refusal)
        })?;
        tracing::debug!(%node, lent = report.lent.len(), of = report.regions_total, "a node has registered");
        report.lent = Vec::new(); // the store keeps which nodes to ask, not what they lent
        self.change_store(move |store| store.remember(node, &report)).await;
        Ok(Response::new(answer))
    }

    async fn heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatResponse>, Status> {
        let agreed = self.pool.lock().heartbeat(self.now(), request.get_ref());
        Ok(Response::new(HeartbeatResponse { register_again: !agreed }))
    }

    async fn acquire(&self, request: Request<AcquireRequest>) -> Result<Response<AcquireResponse>, Status> {
        let wish = wish_from(request.get_ref())?;
        if !self.claims.lock().asks(wish.owner, &identity_of(&request)) {
            let text = format!(
                "this certificate, or this address, has asked for leases of {MAX_OWNERS_PER_IDENTITY} \
                 owners, which is the limit: give leases back"
            );
            return Err(Status::resource_exhausted(text));
        }
        let _turn = self.turn().await?;
        let owner = wish.owner;
        let answer = acquire(&self.pool, &self.peers, || self.now(), wish).await;
        tracing::debug!(%owner, regions = answer.leases.len(), short = answer.short_reason, "regions placed");
        Ok(Response::new(answer))
    }

    async fn revoke(&self, request: Request<RevokeRequest>) -> Result<Response<RevokeResponse>, Status> {
        let request = request.into_inner();
        check_count(request.count)?;
        let _turn = self.turn().await?;
        let answer = take_back(&self.pool, &self.peers, || self.now(), request).await;
        tracing::info!(owner = %OwnerId(request.owner), revoked = answer.revoked, "leases taken back");
        Ok(Response::new(answer))
    }

    async fn status(&self, request: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        let asked = request.into_inner();
        if asked.nodes_after.is_some() || asked.owners_after.is_some() {
            return Ok(Response::new(self.page(&asked))); // the first page has refreshed the view
        }
        let mut refreshed = self.refreshed.lock().await;
        if refreshed.is_none_or(|at| at.elapsed() >= REFRESH_EVERY) {
            self.refresh().await;
            *refreshed = Some(Instant::now());
        }
        drop(refreshed);
        Ok(Response::new(self.page(&asked)))
    }
}

/// The identity of a request's sender; `None` for a request that did not come over a connection.
fn identity_of<T>(request: &Request<T>) -> Option<Identity> {
    request.extensions().get::<Peer>().map(|peer| peer.identity.clone())
}

fn check_count(count: u32) -> Result<(), Status> {
    if count == 0 || count > MAX_REGIONS_PER_ACQUIRE {
        let text = format!("a request is for 1 to {MAX_REGIONS_PER_ACQUIRE} regions, not {count}");
        return Err(Status::invalid_argument(text));
    }
    Ok(())
}

fn wish_from(request: &AcquireRequest) -> Result<Wish, Status> {
    let Some(class) = LeaseClass::from_wire(request.class) else {
        return Err(Status::invalid_argument("the class of the lease is missing"));
    };
    check_count(request.count)?;
    if request.avoid.len() > MAX_NODES {
        return Err(Status::invalid_argument(format!("more than {MAX_NODES} nodes to avoid")));
    }
    let avoid: BTreeSet<_> = request.avoid.iter().copied().map(NodeId).collect();
    Ok(Wish { owner: OwnerId(request.owner), class, count: request.count, avoid })
}

fn refused(refusal: ReportRefusal) -> Status {
    let text = refusal.to_string();
    match refusal {
        ReportRefusal::Malformed(_) => Status::invalid_argument(text),
        ReportRefusal::RegionSize { .. } | ReportRefusal::OlderIncarnation => {
            Status::failed_precondition(text)
        }
        ReportRefusal::Full | ReportRefusal::TooManyOwners => Status::resource_exhausted(text),
    }
}
