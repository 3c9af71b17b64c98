//! Leases that several processes hold together. Each process has all the keys, renews the leases, and may
//! admit other processes and evict them. So the regions keep their data as long as one of the processes lives
//! (`docs/src/leases.md`, *held together*).
//!
//! J1. All processes that have the keys have the same rights. No process is special, and none has to outlive
//!     the others.
//! J2. No process uses a region under the lease's own grant. Each process has a grant of its own for each
//!     region, which the others can fence.
//! J3. A lease that ends is lost to all its holders and is not replaced: its data are lost. So a holder gives
//!     a lease up only when the node says that it has ended, or when it must have ended by any clock. Until
//!     then, holders wait for a node that has stopped for a while.
//!
//! [`Holder`] decides what to ask and what the answers mean; the thread that asks is here.
//! Not here: which process is evicted, and when.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_control::limits::MAX_LEASES_PER_REQUEST;
use farpool_control::{Tls, ask, dial, explain};
use farpool_fabric::{Clock, Endpoint, EndpointConfig, MonotonicClock, Negotiated, Peer, Transports};
use farpool_lease::{Holding, LeaseClass, Millis, longest};
use farpool_wire::control::broker_client::BrokerClient;
use farpool_wire::control::node_client::NodeClient;
use farpool_wire::control::{AddGrantRequest, Lease, NodeAddress, ReleaseRequest};
use farpool_wire::{AccessKey, Epoch, GrantMode, NodeId, OwnerId, RegionId};
use prost::Message;
use rustix_futex_sync::{Mutex, RwLock};
use tokio::runtime::{Handle, Runtime};
use tonic::transport::Channel;

use crate::NODE_DEADLINE;
use crate::blocking::outside_of_runtimes;
use crate::error::{GrantError, JointError, PoolError};
use crate::holder::{ClientGrant, Holder, Renewal};
use crate::keeper::{ACQUIRE_DEADLINE, REQUEST_DEADLINE, first_view, no_broker};
use crate::pool::{PoolConfig, peer_of, random_id};
use crate::sharing::{ask_for_fence, ask_for_grant, dial_node};

/// Most regions in one request; a broker may answer with fewer.
const MOST_PER_REQUEST: u32 = 256;

/// The interval of renewals. When a node stops, a lease there has used up at most this much of its time, plus
/// the time that an answer takes. The node may stay stopped for the rest. A lease is renewed forty times in
/// its time; if 63 processes hold leases on a node, the node gets 250 requests a second.
const RENEW_EVERY: Duration = Duration::from_millis(250);
/// A node that has answered no renewal for this long has stopped, or is cut off.
const SILENCE: Millis = Millis(1_500);
/// Upper bound of an operation's deadline. The deadline is as long as a lease may last by any clock, and a
/// lease's time comes from a node.
const MOST_DEADLINE: Duration = Duration::from_secs(60);

/// What a process needs to be one of the holders. With it, the process can do all that an owner can.
#[derive(Clone, PartialEq, Message)]
pub struct JointKeys {
    /// The owner of the leases.
    #[prost(fixed64, tag = "1")]
    owner: u64,
    /// Size of each region.
    #[prost(uint64, tag = "2")]
    region_bytes: u64,
    /// The leases, in an order that is the same for all holders.
    #[prost(message, repeated, tag = "3")]
    leases: Vec<Lease>,
}

impl JointKeys {
    /// Size of each region.
    pub fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    /// All regions, in an order that is the same for all holders. `None`: the keys were damaged.
    pub fn regions(&self) -> Option<Vec<RegionId>> {
        self.leases.iter().map(Lease::region_id).collect()
    }

    /// Gives all regions back, for all holders: their data are overwritten. End the holders of this process
    /// first, because they renew the leases.
    pub fn release(&self, tls: Option<&Tls>) {
        outside_of_runtimes(|| {
            // A lease that is not released expires.
            if let Ok(runtime) = runtime() {
                runtime.block_on(release_all(self, tls));
            }
        });
    }

    /// The address of each lease's node.
    pub fn addresses(&self) -> impl Iterator<Item = &NodeAddress> {
        self.leases.iter().filter_map(|lease| lease.address.as_ref())
    }

    /// The same, mutable: tests reach nodes by proxies, whose addresses differ.
    pub fn addresses_mut(&mut self) -> impl Iterator<Item = &mut NodeAddress> {
        self.leases.iter_mut().filter_map(|lease| lease.address.as_mut())
    }
}

/// Leases of several holders, as this one has them. Dropping it leaves the leases to the other holders, or to
/// expire.
pub struct JointLeases {
    shared: Arc<Shared>,
    runtime: Handle,
    /// Dropped with the value, which ends the thread that renews.
    _renewing: Renewing,
}

struct Shared {
    /// The leases that there were when this process became a holder.
    keys: JointKeys,
    known: RwLock<Known>,
    holder: Mutex<Holder>,
    transport: Transports,
    tls: Option<Tls>,
    /// Nodes that were last logged as not answering.
    silent: Mutex<BTreeSet<NodeId>>,
}

/// How the nodes of all leases are reached.
#[derive(Default)]
struct Known {
    /// Of each region, under which lease. A region may be leased again after it was given back.
    peers: BTreeMap<RegionId, (Epoch, Peer)>,
    clients: BTreeMap<NodeId, NodeClient<Channel>>,
}

impl Known {
    /// Adds the nodes of these leases. Call it inside the runtime to which the channels shall belong.
    fn add(&mut self, leases: &[Lease], transport: Transports, tls: Option<&Tls>) -> Result<(), JointError> {
        for lease in leases {
            let (Some(region), Some(address)) = (lease.region_id(), &lease.address) else {
                return Err(JointError::Damaged);
            };
            self.peers.insert(region, (Epoch(lease.epoch), peer_of(address, transport.choice)));
            if let std::collections::btree_map::Entry::Vacant(place) = self.clients.entry(region.node) {
                place.insert(dial_node(region.node, &address.control, tls)?);
            }
        }
        Ok(())
    }

    /// Whether this lease is among them.
    fn has(&self, lease: &Lease) -> bool {
        let known = lease.region_id().and_then(|region| self.peers.get(&region));
        known.is_some_and(|(epoch, _)| *epoch == Epoch(lease.epoch))
    }
}

struct Renewing {
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl JointLeases {
    /// Size of the regions that a pool lends.
    ///
    /// # Errors
    /// When no broker answers, or it knows no node.
    pub fn region_bytes_of(config: &PoolConfig) -> Result<u64, JointError> {
        match first_view(config)?.region_bytes {
            0 => Err(JointError::NoNode { broker: config.broker.clone() }),
            region_bytes => Ok(region_bytes),
        }
    }

    /// Leases `regions` regions, as few of them on one node as the pool allows, until they are given back or
    /// no process renews them.
    ///
    /// # Errors
    /// When the pool has fewer regions, or they cannot be used: those already leased are given back, or
    /// expire.
    pub fn acquire(config: &PoolConfig, regions: u32) -> Result<JointLeases, JointError> {
        outside_of_runtimes(|| Self::acquire_here(config, regions))
    }

    fn acquire_here(config: &PoolConfig, regions: u32) -> Result<JointLeases, JointError> {
        let region_bytes = Self::region_bytes_of(config)?;
        let runtime = runtime()?;
        let owner = random_id();
        let holder = Mutex::new(Holder::new(OwnerId(owner), region_bytes));
        let mut leases = Vec::new();
        let acquired = runtime.block_on(acquire_all(config, regions, &holder, region_bytes, &mut leases));
        let keys = JointKeys { owner, region_bytes, leases };
        if let Err(error) = acquired {
            runtime.block_on(release_all(&keys, config.tls.as_ref()));
            return Err(error);
        }
        Self::start(runtime, keys, holder, config.transport, config.tls.clone())
    }

    /// Becomes one of the holders.
    ///
    /// # Errors
    /// When a lease has ended, or its node does not answer.
    pub fn join(keys: JointKeys, transport: Transports, tls: Option<Tls>) -> Result<JointLeases, JointError> {
        outside_of_runtimes(|| {
            let runtime = runtime()?;
            let holder = Mutex::new(Holder::new(OwnerId(keys.owner), keys.region_bytes));
            runtime.block_on(adopt_all(&keys, &holder, tls.as_ref()))?;
            Self::start(runtime, keys, holder, transport, tls)
        })
    }

    fn start(
        runtime: Runtime,
        keys: JointKeys,
        holder: Mutex<Holder>,
        transport: Transports,
        tls: Option<Tls>,
    ) -> Result<JointLeases, JointError> {
        let mut known = Known::default();
        {
            let _inside = runtime.enter();
            known.add(&keys.leases, transport, tls.as_ref())?;
        }
        let shared = Arc::new(Shared {
            keys,
            known: RwLock::new(known),
            holder,
            transport,
            tls,
            silent: Mutex::default(),
        });
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let (handle, renewed) = (runtime.handle().clone(), shared.clone());
        let thread = std::thread::Builder::new()
            .name("leases".into())
            .spawn(move || runtime.block_on(renew_until(renewed, stopped)))
            .map_err(JointError::Start)?;
        let renewing = Renewing { stop: Some(stop), thread: Some(thread) };
        Ok(JointLeases { shared, runtime: handle, _renewing: renewing })
    }

    /// What another process needs to become a holder. Leases that were acquired later are not part of it.
    pub fn keys(&self) -> &JointKeys {
        &self.shared.keys
    }

    /// How to reach a region's node. `None`: the region is not one of these.
    pub fn peer(&self, region: RegionId) -> Option<Peer> {
        self.shared.known.read().peers.get(&region).map(|(_, peer)| peer.clone())
    }

    /// Leases up to so many more regions, at least one, for the same owner. This process renews them from now
    /// on. Other holders [adopt](Self::adopt) them.
    ///
    /// # Errors
    /// When the pool has none, or they cannot be used.
    pub async fn acquire_more(&self, config: &PoolConfig, regions: u32) -> Result<Vec<Lease>, JointError> {
        let (shared, config) = (self.shared.clone(), config.clone());
        self.inside(async move {
            let (region_bytes, mut leases) = (shared.keys.region_bytes, Vec::new());
            let acquired = acquire_all(&config, regions, &shared.holder, region_bytes, &mut leases).await;
            let all = shared.known.write().add(&leases, shared.transport, shared.tls.as_ref());
            match (all, acquired) {
                (Ok(()), acquired) if acquired.is_ok() || !leases.is_empty() => Ok(leases),
                (all, acquired) => {
                    shared.give_back(leases).await;
                    Err(all.and(acquired).expect_err("one of them has failed"))
                }
            }
        })
        .await
    }

    /// Becomes a holder of leases that another holder has [got](Self::acquire_more). Those that this process
    /// has already are left out.
    ///
    /// # Errors
    /// When a lease has ended, or its node does not answer: then none of them is adopted.
    pub async fn adopt(&self, leases: Vec<Lease>) -> Result<(), JointError> {
        let shared = self.shared.clone();
        self.inside(async move {
            let mut keys = JointKeys { leases, ..shared.keys.clone() };
            keys.leases.retain(|lease| !shared.known.read().has(lease));
            let adopted = adopt_all(&keys, &shared.holder, shared.tls.as_ref()).await;
            let adopted = adopted
                .and_then(|()| shared.known.write().add(&keys.leases, shared.transport, shared.tls.as_ref()));
            if adopted.is_err() {
                shared.forget(&keys.leases);
            }
            adopted
        })
        .await
    }

    /// Stops renewing these leases. Other holders may go on.
    pub fn forget(&self, leases: &[Lease]) {
        self.shared.forget(leases);
    }

    /// Gives leases back, for all holders: their regions are overwritten.
    pub async fn give_back(&self, leases: Vec<Lease>) {
        let shared = self.shared.clone();
        let given_back = self.inside(async move {
            shared.give_back(leases).await;
            Ok(())
        });
        let _ = given_back.await; // leases that are not given back run out
    }

    /// Runs a request on the thread that renews the leases. The caller may wait on any executor.
    async fn inside<T: Send + 'static>(
        &self,
        request: impl Future<Output = Result<T, JointError>> + Send + 'static,
    ) -> Result<T, JointError> {
        self.runtime.spawn(request).await.map_err(|_| JointError::Closed)?
    }

    /// The regions whose leases have ended: either their nodes have said so, or this process could not renew
    /// the leases and they must have ended by any clock. In the second case other holders may have renewed
    /// them, and this process may join again.
    ///
    /// A region that is not among these may be used, even if its lease has ended by the holder's own clock
    /// (H1): the node refuses access under a lease that has ended.
    pub fn lost(&self) -> Vec<RegionId> {
        let holder = self.shared.holder.lock();
        let held = |region: &RegionId| holder.held(*region).is_some_and(|held| now() < held.ended_by());
        self.shared.known.read().peers.keys().filter(|region| !held(region)).copied().collect()
    }

    /// Whether all nodes have answered lately. A node that has not answered may do so before its leases end.
    pub fn are_answered(&self) -> bool {
        let holder = self.shared.holder.lock();
        let is_answered = |region: &RegionId| {
            holder.held(*region).is_some_and(|held| now().since(held.asked_at()) < SILENCE)
        };
        self.shared.known.read().peers.keys().all(is_answered)
    }

    /// The time after which a posted operation ends as *unknown*. A node that has stopped may continue before
    /// its leases end, and then carries out the operations that it has received.
    fn deadline(&self) -> Duration {
        let longest_ms = self.shared.keys.leases.iter().map(|lease| longest(Millis(lease.ttl_ms)).0).max();
        Duration::from_millis(longest_ms.unwrap_or(0)).clamp(NODE_DEADLINE, MOST_DEADLINE)
    }

    /// An endpoint with the transports that reach these regions.
    pub fn endpoint(&self, arena_bytes: usize) -> Endpoint {
        let deadline = self.deadline();
        let transport = Rc::new(Negotiated::new(self.shared.transport, deadline));
        Endpoint::new(EndpointConfig::real(transport, arena_bytes, deadline))
    }

    /// Adds a grant of a region, for this process or another.
    ///
    /// # Errors
    /// When the lease has ended, or the node does not answer.
    pub async fn add_grant(&self, region: RegionId) -> Result<ClientGrant, GrantError> {
        let shared = self.shared.clone();
        self.run(region, async move { shared.add_grant(region).await }).await
    }

    /// Fences a grant. Afterwards no operation under it takes effect any more. Operations that were
    /// acknowledged before stay.
    ///
    /// # Errors
    /// When the lease has ended, and with it all grants. When the node does not answer: then the grant's
    /// client may still use the region.
    pub async fn fence_grant(&self, region: RegionId, grant: Epoch) -> Result<(), GrantError> {
        let shared = self.shared.clone();
        self.run(region, async move { shared.fence_grant(region, grant).await }).await
    }

    /// Gives all regions back, for all holders: their data are overwritten.
    pub fn release(self) {
        let shared = self.shared.clone();
        drop(self);
        shared.keys.release(shared.tls.as_ref());
    }

    /// Runs a request on the thread that renews the leases. The caller may wait on any executor.
    async fn run<T: Send + 'static>(
        &self,
        region: RegionId,
        request: impl Future<Output = Result<T, GrantError>> + Send + 'static,
    ) -> Result<T, GrantError> {
        let ended =
            || GrantError::NoAnswer { node: region.node, reason: "the leases are being closed".into() };
        self.runtime.spawn(request).await.map_err(|_| ended())?
    }
}

impl Drop for Renewing {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that renews leases panicked");
        }
    }
}

impl Shared {
    fn client(&self, region: RegionId) -> Result<NodeClient<Channel>, GrantError> {
        self.known.read().clients.get(&region.node).cloned().ok_or(GrantError::LeaseLost { region })
    }

    /// Stops renewing these leases.
    fn forget(&self, leases: &[Lease]) {
        for lease in leases {
            let Some(region) = lease.region_id() else { continue };
            let mut known = self.known.write();
            if known.has(lease) {
                known.peers.remove(&region);
            }
            drop(known);
            self.holder.lock().dropped(region, Epoch(lease.epoch));
        }
    }

    async fn give_back(&self, leases: Vec<Lease>) {
        self.forget(&leases);
        release_all(&JointKeys { leases, ..self.keys.clone() }, self.tls.as_ref()).await;
    }

    async fn add_grant(&self, region: RegionId) -> Result<ClientGrant, GrantError> {
        let request = self.grant_request(now(), region)?;
        let answer = ask_for_grant(self.client(region)?, region.node, request.clone()).await?;
        let added = self.holder.lock().grant_added(now(), region, &request, &answer);
        added.ok_or_else(|| self.unusable(now(), region))
    }

    fn grant_request(&self, now: Millis, region: RegionId) -> Result<AddGrantRequest, GrantError> {
        let request = self.holder.lock().add_grant(now, region, GrantMode::ReadWrite);
        request.ok_or_else(|| self.unusable(now, region))
    }

    /// Why no grant can be added: the lease has ended, or its renewals have been unanswered for too long.
    fn unusable(&self, now: Millis, region: RegionId) -> GrantError {
        let may_be_renewed = |held: &Holding| now < held.ended_by();
        match self.holder.lock().held(region).is_some_and(may_be_renewed) {
            true => {
                let reason = "renewals of its leases have not been answered for too long".into();
                GrantError::NoAnswer { node: region.node, reason }
            }
            false => GrantError::LeaseLost { region },
        }
    }

    async fn fence_grant(&self, region: RegionId, grant: Epoch) -> Result<(), GrantError> {
        let question = || self.holder.lock().fence_grant(region, grant);
        ask_for_fence(self.client(region)?, region, question).await
    }
}

async fn renew_until(shared: Arc<Shared>, mut stopped: tokio::sync::oneshot::Receiver<()>) {
    let mut tick = tokio::time::interval(RENEW_EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = &mut stopped => return,
            _ = tick.tick() => {}
        }
        let renewals = shared.holder.lock().last_renewals(now(), MAX_LEASES_PER_REQUEST);
        for renewal in renewals {
            tokio::spawn(renew(shared.clone(), renewal));
        }
    }
}

async fn renew(shared: Arc<Shared>, renewal: Renewal) {
    let Some(mut client) = shared.known.read().clients.get(&renewal.node).cloned() else { return };
    let request = renewal.request(OwnerId(shared.keys.owner));
    let node = renewal.node;
    match tokio::time::timeout(REQUEST_DEADLINE, client.renew(request)).await {
        Ok(Ok(answer)) => {
            // Lost leases are reported by `lost`.
            let _changes = shared.holder.lock().renewal_answered(now(), &renewal, answer.get_ref());
            if shared.silent.lock().remove(&node) {
                tracing::warn!(%node, "the node answers again");
            }
        }
        Ok(Err(status)) if shared.silent.lock().insert(node) => {
            tracing::warn!(%node, error = explain(&status), "leases cannot be renewed; trying again until they have ended");
        }
        Err(_) if shared.silent.lock().insert(node) => {
            tracing::warn!(%node, "the node does not answer; trying again until its leases have ended");
        }
        _ => {} // logged already
    }
}

/// Sends requests to the broker, one after another, until there are `regions` leases.
async fn acquire_all(
    config: &PoolConfig,
    regions: u32,
    holder: &Mutex<Holder>,
    region_bytes: u64,
    leases: &mut Vec<Lease>,
) -> Result<(), JointError> {
    let broker = BrokerClient::new(dial(&config.broker, config.tls.as_ref())?);
    while leases.len() < regions as usize {
        let missing = regions - leases.len() as u32;
        let asked_at = now();
        let request = holder.lock().acquisition(asked_at, LeaseClass::Pinned, missing.min(MOST_PER_REQUEST));
        // Leases whose answer was lost expire, since no process renews them.
        let answer = ask(ACQUIRE_DEADLINE, || {
            let (mut broker, request) = (broker.clone(), request.clone());
            async move { broker.acquire(request).await }
        });
        let (answer, reason) = match answer.await {
            Ok(answer) => {
                let reason = answer.short_reason.clone();
                (Some(answer), reason)
            }
            Err(status) => (None, no_broker(&status)),
        };
        if answer.is_none() && leases.is_empty() {
            return Err(PoolError::BrokerUnreachable { broker: config.broker.clone(), reason }.into());
        }
        let acquired = holder.lock().acquisition_answered(now(), asked_at, answer);
        if acquired.leases.is_empty() {
            let mib = |regions: u64| (regions * region_bytes) >> 20;
            return Err(JointError::NoSpace {
                wanted_mib: mib(regions.into()),
                free_mib: mib(leases.len() as u64),
                reason,
            });
        }
        leases.extend(acquired.leases.into_iter().map(|held| held.lease));
    }
    Ok(())
}

/// Asks all nodes about the leases; all leases must still run.
async fn adopt_all(keys: &JointKeys, holder: &Mutex<Holder>, tls: Option<&Tls>) -> Result<(), JointError> {
    for (node, control, leases) in by_node(keys)? {
        for leases in leases.chunks(MAX_LEASES_PER_REQUEST) {
            let question = Renewal::of(node, now(), leases.iter().cloned());
            let mut client = dial_node(node, &control, tls)?;
            let asked = client.renew(question.request(OwnerId(keys.owner)));
            let answer = tokio::time::timeout(REQUEST_DEADLINE, asked).await;
            let silent = |reason: String| GrantError::NoAnswer { node, reason };
            let answer = answer
                .map_err(|_| silent(format!("nothing within {} s", REQUEST_DEADLINE.as_secs())))?
                .map_err(|status| silent(explain(&status)))?;
            let adopted = holder.lock().adoption_answered(now(), &question, answer.get_ref());
            if let Some((region, _)) = adopted.iter().find(|(_, held)| held.is_none()) {
                return Err(JointError::Ended { region: *region });
            }
            if adopted.len() < leases.len() {
                return Err(JointError::Damaged);
            }
        }
    }
    Ok(())
}

/// Gives all leases back on the nodes that answer.
async fn release_all(keys: &JointKeys, tls: Option<&Tls>) {
    for (node, control, leases) in by_node(keys).unwrap_or_default() {
        let Ok(mut client) = dial_node(node, &control, tls) else { continue };
        for leases in leases.chunks(MAX_LEASES_PER_REQUEST) {
            let refs = leases
                .iter()
                .map(|(region, epoch, key)| farpool_wire::control::LeaseRef::new(*region, *epoch, key));
            let request = ReleaseRequest { owner: keys.owner, leases: refs.collect() };
            let answer = tokio::time::timeout(REQUEST_DEADLINE, client.release(request)).await;
            if !matches!(answer, Ok(Ok(_))) {
                tracing::debug!(%node, "regions could not be given back; their leases will run out");
            }
        }
    }
}

/// A node, the address of its control service, and the leases there.
type OfNode = (NodeId, String, Vec<(u32, Epoch, AccessKey)>);

fn by_node(keys: &JointKeys) -> Result<Vec<OfNode>, JointError> {
    let mut nodes: BTreeMap<NodeId, OfNode> = BTreeMap::new();
    for lease in &keys.leases {
        let (Some(address), Some(key)) = (&lease.address, lease.access_key()) else {
            return Err(JointError::Damaged);
        };
        let node = NodeId(address.node);
        let of_node = nodes.entry(node).or_insert_with(|| (node, address.control.clone(), Vec::new()));
        of_node.2.push((lease.region, Epoch(lease.epoch), key));
    }
    Ok(nodes.into_values().collect())
}

fn now() -> Millis {
    Millis(MonotonicClock.now_ns() / 1_000_000)
}

fn runtime() -> Result<Runtime, JointError> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(JointError::Start)
}

#[cfg(test)]
mod tests;
