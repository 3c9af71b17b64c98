//! The pool as one process sees it, and the state its threads share.

use std::collections::BTreeMap;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use farpool_control::{Tls, this_host};
use farpool_fabric::{Clock, Peer, TransportChoice, Transports};
use farpool_lease::Millis;
use farpool_wire::control::{AcquireResponse, Lease, NodeAddress, RenewResponse};
use farpool_wire::{Epoch, GrantMode, NodeId, OwnerId, RegionId};
use parking_lot::Mutex;

use crate::error::{GrantError, NoSpace, PoolError};
use crate::growth::{GROW_PATIENCE, Growth};
use crate::holder::{Acquired, Change, ClientGrant, GrowthOutcome, HeldLease, Holder, Renewal};
use crate::keeper::{self, Keeper};
use crate::region::{LeasedRegion, NodeState};
use crate::session::{Confined, Session};
use crate::sharing;
use crate::space::{EXTENT_BYTES, Extent, Space};
use crate::watch::Watch;

/// More regions are asked for when fewer free extents than this are left: 32 MiB, some milliseconds of writing,
/// about as long as asking takes.
const LOW_WATER_EXTENTS: u64 = 128;
/// How to reach the pool, and how much of it to use.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Address of the broker, HOST:PORT.
    pub broker: String,
    /// Certificates of the control plane; without them only a broker on loopback is asked.
    pub tls: Option<Tls>,
    /// Which transports may be used.
    pub transport: Transports,
    /// Most bytes to lease; `None`: as many as the pool gives.
    pub limit_bytes: Option<u64>,
}

/// Sizes of the pool, for `statfs`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Capacity {
    /// What this owner holds and could still get.
    pub total_bytes: u64,
    /// What of it is not in use by this owner.
    pub free_bytes: u64,
}

/// A connection to the pool under one owner's name. Clones share it; the last to go gives all leases back.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

struct Inner {
    // Dropped in this order: no more looking after nodes, then the leases go back.
    _watch: Watch,
    keeper: Keeper,
    shared: Arc<Shared>,
}

/// What the keeper, the watch and the sessions share.
pub(crate) struct Shared {
    pub(crate) config: PoolConfig,
    pub(crate) owner: OwnerId,
    pub(crate) region_bytes: u64,
    started: Instant,
    space: Arc<Mutex<Space>>,
    ledger: Mutex<Ledger>,
    growing: Mutex<Growing>,
    pub(crate) growth_wanted: tokio::sync::Notify,
    /// Regions that the pool could still lend, as last heard.
    pool_free_regions: AtomicU64,
    sessions: Mutex<Vec<Weak<Mutex<Confined>>>>,
}

/// Leases by region, and the nodes they lie on.
struct Ledger {
    holder: Holder,
    regions: BTreeMap<RegionId, Arc<LeasedRegion>>,
    nodes: BTreeMap<NodeId, Arc<NodeState>>,
}

/// Attempts to get more regions, and who waits for the next to end.
#[derive(Default)]
struct Growing {
    growth: Growth,
    waiting: Vec<Waker>,
}

impl Pool {
    /// Connects to the broker; leases are taken when extents are.
    pub fn connect(config: PoolConfig) -> Result<Pool, PoolError> {
        let view = keeper::first_view(&config)?;
        // Before the first node has registered the size is not known; extents cannot be taken then anyway.
        let region_bytes =
            if view.region_bytes == 0 { keeper::DEFAULT_REGION_BYTES } else { view.region_bytes };
        if !region_bytes.is_multiple_of(EXTENT_BYTES) {
            return Err(PoolError::RegionSize { region_bytes, extent_bytes: EXTENT_BYTES });
        }
        if let Some(limit_bytes) = config.limit_bytes
            && limit_bytes < region_bytes
        {
            return Err(PoolError::LimitTooSmall { limit_bytes, region_bytes });
        }
        let owner = OwnerId(random_id());
        let holder = Holder::new(owner, region_bytes);
        let ledger = Ledger { holder, regions: BTreeMap::new(), nodes: BTreeMap::new() };
        let shared = Arc::new(Shared {
            config,
            owner,
            region_bytes,
            started: Instant::now(),
            space: Arc::default(),
            ledger: Mutex::new(ledger),
            growing: Mutex::default(),
            growth_wanted: tokio::sync::Notify::new(),
            pool_free_regions: AtomicU64::new(view.free_regions),
            sessions: Mutex::default(),
        });
        let keeper = Keeper::start(shared.clone())?;
        let watch = Watch::start(shared.clone()).map_err(PoolError::Start)?;
        Ok(Pool { inner: Arc::new(Inner { _watch: watch, keeper, shared }) })
    }

    /// Under which name this process leases.
    pub fn owner(&self) -> OwnerId {
        self.inner.shared.owner
    }

    /// A session; each thread has its own, and any thread may use any.
    pub fn session(&self) -> Session {
        Session::new(self.inner.shared.clone())
    }

    /// Takes an extent for the `place`-th stripe of something; consecutive places go to consecutive nodes.
    pub async fn take_extent(&self, place: u64) -> Result<Extent, NoSpace> {
        self.inner.shared.take_extent(place).await
    }

    /// Lets another client into a region, and says for how long. The client counts that from when it asked us, by its
    /// own clock, and asks us again before it is over.
    pub async fn add_grant(
        &self,
        region: &Arc<LeasedRegion>,
        mode: GrantMode,
    ) -> Result<(ClientGrant, Millis), GrantError> {
        let (shared, region) = (self.inner.shared.clone(), region.clone());
        let node = region.id.node;
        let asked = self.inner.keeper.run(async move { sharing::add_grant(&shared, &region, mode).await });
        asked.await.ok_or_else(|| ended(node))?
    }

    /// Shuts a client out. Afterwards nothing of its grant takes effect any more; what it was told is done stays.
    pub async fn fence_grant(&self, region: &Arc<LeasedRegion>, grant: Epoch) -> Result<(), GrantError> {
        let (shared, region) = (self.inner.shared.clone(), region.clone());
        let node = region.id.node;
        let asked = self.inner.keeper.run(async move { sharing::fence_grant(&shared, &region, grant).await });
        asked.await.ok_or_else(|| ended(node))?
    }

    /// Whether some region is being taken back.
    pub fn is_to_leave(&self) -> bool {
        self.inner.shared.with_holder(|holder| holder.to_leave().next().is_some())
    }

    /// Size of the pool's regions.
    pub fn region_bytes(&self) -> u64 {
        self.inner.shared.region_bytes
    }

    /// How large the pool is for this owner. Free regions elsewhere are as last heard, at most seconds ago.
    pub fn capacity(&self) -> Capacity {
        self.inner.shared.capacity()
    }
}

impl Shared {
    /// The pool's clock: milliseconds since it was connected.
    pub(crate) fn now(&self) -> Millis {
        Millis(self.started.elapsed().as_millis() as u64)
    }

    async fn take_extent(&self, place: u64) -> Result<Extent, NoSpace> {
        let give_up_at = self.now().plus(GROW_PATIENCE);
        loop {
            let attempts = self.growing.lock().growth.attempts();
            let (extent, free) = self.take_now(place);
            let may_grow = self.may_grow(); // asked once: who waits for growth has asked for it
            if free < LOW_WATER_EXTENTS && may_grow {
                self.growth_wanted.notify_one();
            }
            if let Some(extent) = extent {
                return Ok(extent);
            }
            let outcome = if !may_grow {
                GrowthOutcome::Full
            } else if self.growing.lock().growth.is_hopeless(self.now()) {
                return self.take_now(place).0.ok_or(NoSpace);
            } else {
                self.growth_after(attempts).await
            };
            match outcome {
                GrowthOutcome::Grown | GrowthOutcome::Unreachable if self.now() < give_up_at => {}
                // What came since the look above made it full: then there is something to take.
                _ => {
                    return self.take_now(place).0.ok_or(NoSpace);
                }
            }
        }
    }

    /// An extent if one is free, and how many are then.
    fn take_now(&self, place: u64) -> (Option<Extent>, u64) {
        let mut space = self.space.lock();
        (space.take(place, &self.space), space.free())
    }

    /// Waits for an attempt later than the `attempts`-th, and says what it brought.
    async fn growth_after(&self, attempts: u64) -> GrowthOutcome {
        std::future::poll_fn(|context| {
            let mut growing = self.growing.lock();
            if growing.growth.attempts() > attempts {
                return Poll::Ready(growing.growth.last());
            }
            growing.waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Ends an attempt to grow and wakes those who wait for it. Returns how long to pause before the next.
    pub(crate) fn growth_ended(&self, outcome: GrowthOutcome) -> Duration {
        let now = self.now();
        let mut growing = self.growing.lock();
        let pause = growing.growth.ended(now, outcome);
        growing.waiting.drain(..).for_each(Waker::wake);
        Duration::from_millis(pause.0)
    }

    fn may_grow(&self) -> bool {
        self.regions_wanted() > 0
    }

    /// How many regions to ask for next.
    pub(crate) fn regions_wanted(&self) -> u32 {
        let held = self.ledger.lock().regions.len() as u64;
        Growth::wanted(held, self.config.limit_bytes.map(|limit| limit / self.region_bytes))
    }

    /// Whether so few extents are free that more regions should be asked for.
    pub(crate) fn is_low(&self) -> bool {
        self.space.lock().free() < LOW_WATER_EXTENTS
    }

    /// What came of asking the broker at `asked_at`. Returns the leases to give back.
    pub(crate) fn acquisition_answered(
        &self,
        asked_at: Millis,
        answer: Option<AcquireResponse>,
    ) -> (GrowthOutcome, Vec<Lease>) {
        let now = self.now();
        let mut ledger = self.ledger.lock();
        let Acquired { leases, unusable, outcome } =
            ledger.holder.acquisition_answered(now, asked_at, answer);
        for held in leases {
            self.add_region(&mut ledger, now, held);
        }
        drop(ledger);
        let unusable = unusable.into_iter().map(|(lease, reason)| {
            tracing::error!(reason, "a lease of no use; giving it back");
            lease
        });
        (outcome, unusable.collect())
    }

    /// Adds a region that was just leased. One lease of a region replaces another.
    fn add_region(&self, ledger: &mut Ledger, now: Millis, held: HeldLease) {
        let address = held.lease.address.unwrap_or_default(); // present: the holder has looked
        let node = NodeState::new(peer_of(&address, self.config.transport.choice), address.control);
        // A node that was restarted under its name is reached elsewhere.
        let same = |known: &&Arc<NodeState>| {
            !known.is_lost() && known.peer == node.peer && known.control == node.control
        };
        let known = ledger.nodes.get(&held.region.node).filter(same).cloned();
        let node = known.unwrap_or_else(|| Arc::new(node));
        ledger.nodes.insert(held.region.node, node.clone());
        let leased =
            Arc::new(LeasedRegion::new(held.region, held.epoch, held.key, node, held.usable_until.0));
        if let Some(older) = ledger.regions.insert(held.region, leased.clone()) {
            older.lose();
        }
        // Still under the ledger's lock: whoever counts this region as held finds its extents.
        let mut space = self.space.lock();
        space.remove(|other| other.id == leased.id);
        space.add(leased, self.region_bytes, now.0);
    }

    /// Asks the rules.
    pub(crate) fn with_holder<R>(&self, ask: impl FnOnce(&mut Holder) -> R) -> R {
        ask(&mut self.ledger.lock().holder)
    }

    /// A node answered a renewal.
    pub(crate) fn renewal_answered(&self, renewal: &Renewal, answer: &RenewResponse) {
        let now = self.now();
        let mut ledger = self.ledger.lock();
        let changes = ledger.holder.renewal_answered(now, renewal, answer);
        let mut lost = Vec::new();
        for change in changes {
            match change {
                Change::Extended { region, usable_until } => {
                    if let Some(leased) = ledger.regions.get(&region) {
                        leased.extend(usable_until.0);
                    }
                }
                Change::Leave { region, usable_until } => {
                    if let Some(leased) = ledger.regions.get(&region) {
                        tracing::warn!(%region, within_ms = usable_until.since(now).0, "the region is being taken back");
                        leased.extend(usable_until.0);
                        leased.leave();
                        self.space.lock().leave(region);
                    }
                }
                Change::Lost { region, epoch } => lost.push((region, epoch)),
            }
        }
        drop(ledger);
        for (region, epoch) in lost {
            tracing::warn!(%region, "the node refused to renew");
            self.lease_lost(region, epoch);
        }
    }

    /// A lease is over, whatever the reason: what lies there is lost.
    pub(crate) fn lease_lost(&self, region: RegionId, epoch: Epoch) {
        let mut ledger = self.ledger.lock();
        ledger.holder.dropped(region, epoch);
        let leased = ledger.regions.get(&region).filter(|leased| leased.epoch == epoch).cloned();
        if let Some(leased) = leased {
            tracing::warn!(%region, %epoch, "lease lost; what lay there is gone");
            leased.lose();
            ledger.regions.remove(&region);
        }
        drop(ledger);
        self.space.lock().remove(|held| held.id == region && held.epoch == epoch);
    }

    /// Gives a node up, with all that lies there.
    pub(crate) fn node_lost(&self, node: &NodeState) {
        if !node.give_up() {
            return;
        }
        let id = node.peer.node;
        tracing::warn!(node = %id, "the node does not answer; what lay there is lost");
        let mut ledger = self.ledger.lock();
        let gone: Vec<_> = ledger
            .regions
            .extract_if(.., |_, region| region.node.is_lost())
            .map(|(_, region)| region)
            .collect();
        for region in gone {
            ledger.holder.dropped(region.id, region.epoch);
        }
        ledger.nodes.retain(|_, known| !known.is_lost());
        ledger.holder.avoid(self.now(), id);
        drop(ledger);
        self.space.lock().remove(|region| region.node.is_lost());
    }

    /// Forgets nodes on which nothing of ours lies any more.
    pub(crate) fn forget_idle_nodes(&self) {
        let mut ledger = self.ledger.lock();
        let Ledger { regions, nodes, .. } = &mut *ledger;
        nodes.retain(|id, _| regions.keys().any(|region| region.node == *id));
    }

    /// Nodes that hold something of ours.
    pub(crate) fn nodes(&self) -> Vec<Arc<NodeState>> {
        self.ledger.lock().nodes.values().cloned().collect()
    }

    /// Lets go of regions that are no longer needed; the caller tells their nodes.
    pub(crate) fn shrink(&self, linger: Duration) -> Vec<Arc<LeasedRegion>> {
        let idle = {
            let mut space = self.space.lock();
            // What is in use will want to grow; what is not needs nothing.
            let keep_free = if space.is_unused() { 0 } else { 2 * LOW_WATER_EXTENTS };
            space.shrink(self.now().0, linger.as_millis() as u64, keep_free)
        };
        self.retire(&idle);
        idle
    }

    /// Lets go of everything.
    pub(crate) fn retire_all(&self) -> Vec<Arc<LeasedRegion>> {
        let all: Vec<_> = self.ledger.lock().regions.values().cloned().collect();
        self.space.lock().remove(|_| true);
        self.retire(&all);
        all
    }

    fn retire(&self, regions: &[Arc<LeasedRegion>]) {
        let mut ledger = self.ledger.lock();
        for region in regions {
            region.retire();
            ledger.holder.dropped(region.id, region.epoch);
            if ledger.regions.get(&region.id).is_some_and(|held| held.epoch == region.epoch) {
                ledger.regions.remove(&region.id);
            }
        }
    }

    /// Notes how many regions the pool could still lend.
    pub(crate) fn pool_has_free(&self, regions: u64) {
        self.pool_free_regions.store(regions, Ordering::Relaxed); // a statistic: pairs with nothing
    }

    /// Notes that regions which the pool could lend are ours now.
    pub(crate) fn pool_has_lent(&self, regions: u64) {
        // Relaxed: see above.
        let less = |free: u64| Some(free.saturating_sub(regions));
        let _always = self.pool_free_regions.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    fn capacity(&self) -> Capacity {
        let (held, free_extents) = {
            let space = self.space.lock();
            (space.regions().count() as u64, space.free())
        };
        let limit = self.config.limit_bytes.map_or(u64::MAX, |limit| limit / self.region_bytes);
        let more = self.pool_free_regions.load(Ordering::Relaxed).min(limit.saturating_sub(held));
        Capacity {
            total_bytes: (held + more) * self.region_bytes,
            free_bytes: free_extents * EXTENT_BYTES + more * self.region_bytes,
        }
    }

    pub(crate) fn register_session(&self, session: Weak<Mutex<Confined>>) {
        let mut sessions = self.sessions.lock();
        sessions.retain(|session| session.strong_count() > 0);
        sessions.push(session);
    }

    pub(crate) fn sessions(&self) -> Vec<Arc<Mutex<Confined>>> {
        self.sessions.lock().iter().filter_map(Weak::upgrade).collect()
    }
}

fn ended(node: NodeId) -> GrantError {
    GrantError::NoAnswer { node, reason: "the pool is being closed".to_owned() }
}

/// Where a node's data plane is reached from here.
fn peer_of(address: &NodeAddress, transport: TransportChoice) -> Peer {
    let same_host = !address.host.is_empty() && address.host == this_host();
    let shm = (same_host || transport == TransportChoice::Shm) && !address.shm_socket.is_empty();
    Peer {
        node: NodeId(address.node),
        tcp: address.tcp.to_socket_addrs().ok().and_then(|mut found| found.next()),
        verbs: address.rdma.parse().ok(),
        shm_socket: shm.then(|| PathBuf::from(&address.shm_socket)),
    }
}

/// The pool's clock for endpoints.
pub(crate) struct PoolClock(pub(crate) Arc<Shared>);

impl Clock for PoolClock {
    fn now_ns(&self) -> u64 {
        self.0.started.elapsed().as_nanos() as u64
    }
}

pub(crate) fn random_id() -> u64 {
    getrandom::u64().expect("the kernel gives random bytes")
}
