//! The thread that talks to the broker and the nodes: it gets more regions, renews leases, and gives regions
//! back.
//!
//! K1. No request delays another: each runs as a task of its own with its own deadline, so that a broker that
//!     hangs costs no lease.
//! K2. The broker is asked only for regions and for the pool's size; leases are renewed and released at the
//!     nodes themselves.
//!
//! [`Holder`](crate::Holder) decides what to ask and what the answers mean.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_control::limits::MAX_LEASES_PER_REQUEST;
use farpool_control::{Fault, Tls, ask, dial, explain, fault_of};
use farpool_lease::LeaseClass;
use farpool_throttle::Throttle;
use farpool_wire::control::broker_client::BrokerClient;
use farpool_wire::control::node_client::NodeClient;
use farpool_wire::control::{
    AwaitRevocationRequest, AwaitRevocationResponse, Lease, ReleaseRequest, StatusRequest,
};
use farpool_wire::{Epoch, NodeId};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tonic::Status;
use tonic::transport::Channel;

use crate::adoption::Adoption;
use crate::blocking::outside_of_runtimes;
use crate::error::PoolError;
use crate::holder::{GrowthOutcome, Renewal};
use crate::pool::{PoolConfig, Shared};
use crate::region::{LeasedRegion, NodeState};
use crate::stock::Stock;

/// Size of regions unless the nodes say otherwise.
pub(crate) const DEFAULT_REGION_BYTES: u64 = 64 << 20;
/// How often leases are checked.
pub(crate) const TICK: Duration = Duration::from_millis(100);
/// How long a broker without nodes is asked for its first node: a node that was started together with the
/// broker may not have registered yet.
const FIRST_NODE_WITHIN: Duration = Duration::from_secs(3);
/// How often the broker is asked for it.
const FIRST_NODE_POLL: Duration = Duration::from_millis(50);
/// How often the broker is asked for the pool's size.
const VIEW_INTERVAL: Duration = Duration::from_secs(1);
/// Deadline of a request for regions. The broker may let the request wait for its turn, and may wait for
/// several nodes that do not answer. Leases that it then grants should not arrive too late to be used.
pub(crate) const ACQUIRE_DEADLINE: Duration = Duration::from_secs(8);
/// Deadline of any other request. A lease's renewal is repeated several times within its life.
pub(crate) const REQUEST_DEADLINE: Duration = Duration::from_secs(3);
/// Deadline of the request that a node answers when it takes leases back, or after five seconds.
const REVOCATION_DEADLINE: Duration = Duration::from_secs(7);
/// Pause after a node did not answer it.
const REVOCATION_PAUSE: Duration = Duration::from_secs(1);
/// How long nodes are asked about leases of an earlier process: most of the time that a lease can have left.
/// A node that was restarted has none of them.
const ADOPT_WITHIN: Duration = Duration::from_secs(4);
const ADOPT_PAUSE: Duration = Duration::from_millis(100);
/// Regions that stay empty for this long go back to the pool: longer than the gap between two queries that
/// spill.
const LINGER: Duration = Duration::from_secs(5);

/// The pool's size as the broker sees it.
pub(crate) struct View {
    pub(crate) region_bytes: u64,
    pub(crate) free_regions: u64,
}

/// Asks the broker for the pool's size, which also shows that the broker answers. Waits a little for the
/// broker's first node: a node that was started together with the broker may not have registered yet.
pub(crate) fn first_view(config: &PoolConfig) -> Result<View, PoolError> {
    block_on(async {
        let broker = BrokerClient::new(dial(&config.broker, config.tls.as_ref())?);
        let started = tokio::time::Instant::now();
        loop {
            let view = view(&broker)
                .await
                .map_err(|reason| PoolError::BrokerUnreachable { broker: config.broker.clone(), reason })?;
            if view.region_bytes != 0 || started.elapsed() >= FIRST_NODE_WITHIN {
                return Ok(view);
            }
            tokio::time::sleep(FIRST_NODE_POLL).await;
        }
    })
}

/// Renews the leases of an earlier process on the nodes that answer.
pub(crate) fn adopt(config: &PoolConfig, stock: &Stock, adoption: &mut Adoption) -> Result<(), PoolError> {
    block_on(async {
        let give_up_at = tokio::time::Instant::now() + ADOPT_WITHIN;
        loop {
            let mut asked = tokio::task::JoinSet::new();
            for (address, renewal) in stock.adoption_questions(adoption, MAX_LEASES_PER_REQUEST) {
                let mut node = NodeClient::new(dial(&address.control, config.tls.as_ref())?);
                let request = renewal.request(stock.owner());
                asked.spawn(async move {
                    let answer = tokio::time::timeout_at(give_up_at, node.renew(request)).await;
                    (renewal, answer)
                });
            }
            while let Some(Ok((renewal, answer))) = asked.join_next().await {
                if let Ok(Ok(answer)) = answer {
                    stock.adoption_answered(adoption, &renewal, answer.get_ref());
                }
            }
            if adoption.is_answered() || tokio::time::Instant::now() >= give_up_at {
                return Ok(());
            }
            tokio::time::sleep(ADOPT_PAUSE).await;
        }
    })
}

async fn view(broker: &BrokerClient<Channel>) -> Result<View, String> {
    let request = StatusRequest { only_sums: true, ..StatusRequest::default() };
    let asked = ask(REQUEST_DEADLINE, || {
        let mut broker = broker.clone();
        async move { broker.status(request).await }
    });
    let status = asked.await.map_err(|status| no_broker(&status))?;
    Ok(View { region_bytes: status.region_bytes, free_regions: status.regions_free })
}

/// Why the broker gave no answer, and what to do about it.
pub(crate) fn no_broker(status: &Status) -> String {
    let reason = explain(status);
    match fault_of(status) {
        Some(Fault::Unreachable(_) | Fault::Late | Fault::Closed | Fault::NotFarpool) | None => {
            format!("{reason}; start one with `farpool up`, or name it with --broker HOST:PORT")
        }
        Some(_) => reason, // the text says what to do
    }
}

/// Blocks on a runtime of its own.
fn block_on<T: Send>(work: impl Future<Output = Result<T, PoolError>> + Send) -> Result<T, PoolError> {
    outside_of_runtimes(|| runtime().map_err(PoolError::Start)?.block_on(work))
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// The running keeper. Dropping it gives all leases back, or, if a later process is to take them over, renews
/// them. Either takes at most [`REQUEST_DEADLINE`].
pub(crate) struct Keeper {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    runtime: Handle,
}

impl Keeper {
    pub(crate) fn start(shared: Arc<Shared>) -> Result<Self, PoolError> {
        let runtime = runtime().map_err(PoolError::Start)?;
        let broker = {
            let _inside = runtime.enter(); // channels belong to a runtime
            BrokerClient::new(dial(&shared.config.broker, shared.config.tls.as_ref())?)
        };
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("pool-keeper".into())
            .spawn(move || runtime.block_on(keep(shared, broker, stopped)))
            .map_err(PoolError::Start)?;
        Ok(Keeper { stop: Some(stop), thread: Some(thread), runtime: handle })
    }

    /// Runs a request on the keeper's thread. The caller may wait on any executor. `None`: the keeper has
    /// ended.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        request: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        self.runtime.spawn(request).await.ok()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the pool's keeper panicked");
        }
    }
}

async fn keep(shared: Arc<Shared>, broker: BrokerClient<Channel>, mut stopped: oneshot::Receiver<()>) {
    let mut nodes =
        Nodes { tls: shared.config.tls.clone(), clients: BTreeMap::new(), listening: BTreeMap::new() };
    let growing = tokio::spawn(grow_when_wanted(shared.clone(), broker.clone()));
    let viewing = tokio::spawn(watch_capacity(shared.clone(), broker));
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = &mut stopped => break,
            _ = tick.tick() => maintain_leases(&shared, &mut nodes),
        }
    }
    growing.abort();
    viewing.abort();
    if shared.stock.is_kept() {
        // A later process takes the leases over. It then has a whole lease time, from now on, to start.
        let now = shared.stock.now();
        let renewals = shared.stock.with_holder(|holder| holder.last_renewals(now, MAX_LEASES_PER_REQUEST));
        let asked = renewals.into_iter().filter_map(|renewal| {
            let client = nodes.client(&shared, renewal.node)?;
            Some(tokio::spawn(renew(shared.clone(), client, renewal)))
        });
        for task in asked.collect::<Vec<_>>() {
            // It has its own deadline; without an answer the lease lasts as long as it did.
            let _ = task.await;
        }
        return;
    }
    let releases = release(&shared, &mut nodes, shared.stock.retire_all());
    for task in releases {
        let _ = task.await; // it has its own deadline; leases that are not released expire
    }
}

fn maintain_leases(shared: &Arc<Shared>, nodes: &mut Nodes) {
    let now = shared.stock.now();
    for (region, epoch) in shared.stock.with_holder(|holder| holder.lapsed(now)) {
        shared.stock.lease_lost(region, epoch);
    }
    for renewal in shared.stock.with_holder(|holder| holder.renewals(now, MAX_LEASES_PER_REQUEST)) {
        if let Some(client) = nodes.client(shared, renewal.node) {
            tokio::spawn(renew(shared.clone(), client, renewal));
        }
    }
    drop(release(shared, nodes, shared.stock.shrink(LINGER)));
    nodes.listen(shared);
    shared.stock.forget_idle_nodes();
    nodes.forget_strangers(shared);
}

/// Clients of the control services of the nodes on which this process holds regions.
struct Nodes {
    tls: Option<Tls>,
    clients: BTreeMap<NodeId, (Arc<NodeState>, NodeClient<Channel>)>,
    /// The tasks that wait for revocations at these nodes, with the clients that they use.
    listening: BTreeMap<NodeId, (Arc<NodeState>, tokio::task::JoinHandle<()>)>,
}

impl Nodes {
    fn client(&mut self, shared: &Shared, node: NodeId) -> Option<NodeClient<Channel>> {
        let state = shared.stock.nodes().into_iter().find(|state| state.peer.node == node)?;
        self.client_of(&state)
    }

    fn client_of(&mut self, state: &Arc<NodeState>) -> Option<NodeClient<Channel>> {
        let node = state.peer.node;
        if let Some((known, client)) = self.clients.get(&node)
            && Arc::ptr_eq(known, state)
        {
            return Some(client.clone());
        }
        match dial(&state.control, self.tls.as_ref()) {
            Ok(channel) => {
                let client = NodeClient::new(channel);
                self.clients.insert(node, (state.clone(), client.clone()));
                Some(client)
            }
            Err(error) => {
                tracing::warn!(%node, %error, "leases on this node cannot be renewed");
                None
            }
        }
    }

    /// Waits for revocations at each node, by one task each.
    fn listen(&mut self, shared: &Arc<Shared>) {
        for state in shared.stock.nodes() {
            let node = state.peer.node;
            if self.listening.get(&node).is_some_and(|(known, _)| Arc::ptr_eq(known, &state)) {
                continue;
            }
            let Some(client) = self.client_of(&state) else { continue };
            let task = tokio::spawn(await_revocations(shared.clone(), client, node));
            if let Some((_, old)) = self.listening.insert(node, (state, task)) {
                old.abort();
            }
        }
    }

    fn forget_strangers(&mut self, shared: &Shared) {
        let known: Vec<NodeId> = shared.stock.nodes().iter().map(|state| state.peer.node).collect();
        self.clients.retain(|node, _| known.contains(node));
        let gone = self.listening.extract_if(.., |node, _| !known.contains(node));
        gone.for_each(|(_, (_, task))| task.abort());
    }
}

/// Has leases on a node renewed as soon as the node says that some of them are taken back. Without this, the
/// owner learns of it from the next renewal.
async fn await_revocations(shared: Arc<Shared>, mut client: NodeClient<Channel>, node: NodeId) {
    let mut seen = 0;
    loop {
        let request = AwaitRevocationRequest { owner: shared.stock.owner().0, seen };
        match tokio::time::timeout(REVOCATION_DEADLINE, client.await_revocation(request)).await {
            Ok(Ok(answer)) => {
                let AwaitRevocationResponse { seen: last, revoked } = answer.into_inner();
                seen = last;
                if revoked {
                    let now = shared.stock.now();
                    shared.stock.with_holder(|holder| holder.revocation_announced(now, node));
                }
            }
            // The node may have been restarted, and counts anew.
            Ok(Err(_)) | Err(_) => {
                seen = 0;
                tokio::time::sleep(REVOCATION_PAUSE).await;
            }
        }
    }
}

async fn renew(shared: Arc<Shared>, mut client: NodeClient<Channel>, renewal: Renewal) {
    let node = renewal.node;
    match tokio::time::timeout(REQUEST_DEADLINE, client.renew(renewal.request(shared.stock.owner()))).await {
        Ok(Ok(answer)) => shared.stock.renewal_answered(&renewal, answer.get_ref()),
        Ok(Err(status)) => {
            tracing::warn!(%node, error = explain(&status), "renewal failed; trying again");
        }
        Err(_) => tracing::warn!(%node, "renewal got no answer; trying again"),
    }
}

/// Gives regions back to their nodes, one task per request.
fn release(
    shared: &Arc<Shared>,
    nodes: &mut Nodes,
    regions: Vec<Arc<LeasedRegion>>,
) -> Vec<tokio::task::JoinHandle<()>> {
    let mut by_node: BTreeMap<NodeId, Vec<Arc<LeasedRegion>>> = BTreeMap::new();
    for region in regions {
        by_node.entry(region.id.node).or_default().push(region);
    }
    let mut tasks = Vec::new();
    for (node, regions) in by_node {
        let Some(client) = nodes.client_of(&regions[0].node) else { continue };
        for regions in regions.chunks(MAX_LEASES_PER_REQUEST) {
            let request = shared.stock.release_request(regions);
            tasks.push(tokio::spawn(release_at(client.clone(), node, request)));
        }
    }
    tasks
}

async fn release_at(mut client: NodeClient<Channel>, node: NodeId, request: ReleaseRequest) {
    let answer = tokio::time::timeout(REQUEST_DEADLINE, client.release(request)).await;
    if !matches!(answer, Ok(Ok(_))) {
        tracing::debug!(%node, "regions could not be given back; their leases will run out");
    }
}

async fn watch_capacity(shared: Arc<Shared>, broker: BrokerClient<Channel>) {
    loop {
        tokio::time::sleep(VIEW_INTERVAL).await;
        match view(&broker).await {
            Ok(view) => shared.stock.pool_has_free(view.free_regions),
            Err(error) => tracing::debug!(error, "the broker does not answer"),
        }
    }
}

async fn grow_when_wanted(shared: Arc<Shared>, mut broker: BrokerClient<Channel>) {
    let failures = Throttle::new();
    loop {
        shared.stock.growth_wanted().await;
        let outcome = match shared.stock.is_low() {
            true => grow(&shared, &mut broker, &failures).await,
            false => GrowthOutcome::Grown,
        };
        let pause = shared.stock.attempt_ended(outcome).await;
        tokio::time::sleep(pause).await;
    }
}

/// Asks the broker for more regions. The log throttles failures: while the broker is away, writing programs
/// cause one attempt after another.
async fn grow(
    shared: &Arc<Shared>,
    broker: &mut BrokerClient<Channel>,
    failures: &Throttle,
) -> GrowthOutcome {
    let count = shared.stock.regions_wanted();
    if count == 0 {
        return GrowthOutcome::Full;
    }
    let asked_at = shared.stock.now();
    let request =
        shared.stock.with_holder(|holder| holder.acquisition(asked_at, LeaseClass::Revocable, count));
    let answer = match tokio::time::timeout(ACQUIRE_DEADLINE, broker.acquire(request)).await {
        Ok(Ok(answer)) => Some(answer.into_inner()),
        Ok(Err(status)) => {
            if let Some(left_out) = failures.occurs(Instant::now()) {
                tracing::warn!(error = explain(&status), left_out, "the broker gave no regions");
            }
            None
        }
        Err(_) => {
            if let Some(left_out) = failures.occurs(Instant::now()) {
                tracing::warn!(left_out, "the broker did not answer");
            }
            None
        }
    };
    let lent = answer.as_ref().map_or(0, |answer| answer.leases.len() as u64);
    let reason = answer.as_ref().map(|answer| answer.short_reason.clone()).unwrap_or_default();
    let (outcome, unusable) = shared.stock.acquisition_answered(asked_at, answer);
    match outcome {
        GrowthOutcome::Full if lent == 0 => {
            tracing::info!(reason, "the pool has no more regions");
            shared.stock.pool_has_free(0);
        }
        _ => shared.stock.pool_has_lent(lent),
    }
    for lease in unusable {
        give_back(shared, lease).await;
    }
    outcome
}

/// Releases a lease that cannot be used.
async fn give_back(shared: &Shared, lease: Lease) {
    let (Some(address), Some(key)) = (&lease.address, lease.access_key()) else { return };
    let Ok(channel) = dial(&address.control, shared.config.tls.as_ref()) else { return };
    let lease = (lease.region, Epoch(lease.epoch), &key);
    let request = shared.stock.with_holder(|holder| holder.release(std::iter::once(lease)));
    release_at(NodeClient::new(channel), NodeId(address.node), request).await;
}

#[cfg(test)]
mod tests;
