//! The pool as one process sees it, and the state its threads share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use farpool_control::Tls;
use farpool_fabric::{Clock, Transports};
use farpool_lease::{Holdings, Millis};
use farpool_wire::{NodeId, OwnerId, RegionId};
use parking_lot::Mutex;

use crate::error::{NoSpace, PoolError};
use crate::keeper::{self, Keeper};
use crate::region::{LeasedRegion, NodeState};
use crate::session::{Confined, Session};
use crate::space::{EXTENT_BYTES, Extent, Space};
use crate::watch::Watch;

/// More regions are asked for when fewer free extents than this are left: 32 MiB, some milliseconds of writing,
/// about as long as asking takes.
const LOW_WATER_EXTENTS: u64 = 128;
/// How long a taker waits for an unreachable broker before it is told *no space*: a broker's restart fits in.
const GROW_PATIENCE: Duration = Duration::from_secs(3);
/// How long *full* is taken for granted: a full pool is not asked again for each page that does not fit.
const FULL_FOR: Duration = Duration::from_millis(500);
/// How long *unreachable* is taken for granted once the patience is used up: longer than an attempt on a broker that hangs.
const UNREACHABLE_FOR: Duration = Duration::from_secs(10);
/// Between two attempts within that time.
const GROW_RETRY: Duration = Duration::from_millis(100);
/// A node that was given up is not asked for regions again before this has passed: by then the broker knows.
const AVOID_MS: u64 = 15_000;

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
    _keeper: Keeper,
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
    growth: Mutex<Growth>,
    pub(crate) growth_wanted: tokio::sync::Notify,
    /// Regions that the pool could still lend, as last heard.
    pool_free_regions: AtomicU64,
    sessions: Mutex<Vec<Weak<Mutex<Confined>>>>,
}

/// Leases by region, and the nodes they lie on.
#[derive(Default)]
struct Ledger {
    holdings: Holdings,
    regions: BTreeMap<RegionId, Arc<LeasedRegion>>,
    nodes: BTreeMap<NodeId, Arc<NodeState>>,
    avoid_until_ms: BTreeMap<NodeId, u64>,
}

/// Attempts to get more regions.
#[derive(Default)]
struct Growth {
    attempts: u64,
    last: GrowthOutcome,
    /// When the last attempt ended, and since when none has brought anything.
    ended_ms: u64,
    failing_since_ms: Option<u64>,
    waiting: Vec<Waker>,
}

/// What the last attempt brought.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum GrowthOutcome {
    /// Some regions.
    #[default]
    Grown,
    /// The pool or this owner's share is used up.
    Full,
    /// No broker answered.
    Unreachable,
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
        let shared = Arc::new(Shared {
            config,
            owner: OwnerId(random_id()),
            region_bytes,
            started: Instant::now(),
            space: Arc::default(),
            ledger: Mutex::default(),
            growth: Mutex::default(),
            growth_wanted: tokio::sync::Notify::new(),
            pool_free_regions: AtomicU64::new(view.free_regions),
            sessions: Mutex::default(),
        });
        let keeper = Keeper::start(shared.clone())?;
        let watch = Watch::start(shared.clone()).map_err(PoolError::Start)?;
        Ok(Pool { inner: Arc::new(Inner { _watch: watch, _keeper: keeper, shared }) })
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
        let give_up_at = self.now().plus(Millis(GROW_PATIENCE.as_millis() as u64));
        loop {
            let attempts = self.growth.lock().attempts;
            let (extent, free) = self.take_now(place);
            let may_grow = self.may_grow(); // asked once: who waits for growth has asked for it
            if free < LOW_WATER_EXTENTS && may_grow {
                self.growth_wanted.notify_one();
            }
            if let Some(extent) = extent {
                return Ok(extent);
            }
            let outcome = match self.growth_known() {
                _ if !may_grow => GrowthOutcome::Full,
                Some(outcome) => return self.take_now(place).0.ok_or(outcome),
                None => self.growth_after(attempts).await,
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

    /// That an attempt would bring nothing, as far as the last ones tell: one patience for an outage, not for a taker.
    fn growth_known(&self) -> Option<NoSpace> {
        let growth = self.growth.lock();
        let now = self.now().0;
        let known = match growth.last {
            GrowthOutcome::Grown => false,
            GrowthOutcome::Full => growth.attempts > 0 && now < growth.ended_ms + FULL_FOR.as_millis() as u64,
            GrowthOutcome::Unreachable => {
                let recent = now < growth.ended_ms + UNREACHABLE_FOR.as_millis() as u64;
                let patience_ms = GROW_PATIENCE.as_millis() as u64;
                recent && growth.failing_since_ms.is_some_and(|since| now >= since + patience_ms)
            }
        };
        known.then_some(NoSpace)
    }

    /// Waits for an attempt later than the `attempts`-th, and says what it brought.
    async fn growth_after(&self, attempts: u64) -> GrowthOutcome {
        std::future::poll_fn(|context| {
            let mut growth = self.growth.lock();
            if growth.attempts > attempts {
                return Poll::Ready(growth.last);
            }
            growth.waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Ends an attempt to grow and wakes those who wait for it.
    pub(crate) fn growth_ended(&self, outcome: GrowthOutcome) {
        let mut growth = self.growth.lock();
        growth.attempts += 1;
        growth.last = outcome;
        growth.ended_ms = self.now().0;
        growth.failing_since_ms = match outcome {
            GrowthOutcome::Grown => None,
            _ => growth.failing_since_ms.or(Some(growth.ended_ms)),
        };
        growth.waiting.drain(..).for_each(Waker::wake);
    }

    /// How long the keeper pauses after an attempt, so that a full pool is not asked for every page.
    pub(crate) fn growth_pause(outcome: GrowthOutcome) -> Duration {
        if outcome == GrowthOutcome::Grown { Duration::ZERO } else { GROW_RETRY }
    }

    fn may_grow(&self) -> bool {
        self.regions_wanted() > 0
    }

    /// How many regions to ask for next: an eighth of what is held, at least two, within the owner's limit.
    pub(crate) fn regions_wanted(&self) -> u32 {
        const LEAST: u64 = 2;
        const MOST: u64 = 64;
        let held = self.ledger.lock().regions.len() as u64;
        let wanted = (held / 8).clamp(LEAST, MOST);
        let room = self
            .config
            .limit_bytes
            .map_or(u64::MAX, |limit| (limit / self.region_bytes).saturating_sub(held));
        wanted.min(room) as u32
    }

    /// Whether so few extents are free that more regions should be asked for.
    pub(crate) fn is_low(&self) -> bool {
        self.space.lock().free() < LOW_WATER_EXTENTS
    }

    /// Adds a region that was leased when asked for at `asked_at`. One lease of a region replaces another.
    pub(crate) fn lease_acquired(
        &self,
        asked_at: Millis,
        ttl: Millis,
        region: LeasedRegionParts,
    ) -> Arc<LeasedRegion> {
        let now = self.now();
        let mut ledger = self.ledger.lock();
        ledger.holdings.acquired(asked_at, ttl, region.id, region.epoch, region.key);
        let usable_until = ledger.holdings.usable(now, region.id).map_or(0, |held| held.usable_until().0);
        // A node that was restarted under its name is reached elsewhere.
        let same = |node: &&Arc<NodeState>| {
            !node.is_lost() && node.peer == region.node.peer && node.control == region.node.control
        };
        let known = ledger.nodes.get(&region.id.node).filter(same).cloned();
        let node = known.unwrap_or_else(|| Arc::new(region.node));
        ledger.nodes.insert(region.id.node, node.clone());
        let leased = Arc::new(LeasedRegion::new(region.id, region.epoch, region.key, node, usable_until));
        if let Some(older) = ledger.regions.insert(region.id, leased.clone()) {
            older.lose();
        }
        // Still under the ledger's lock: whoever counts this region as held finds its extents.
        let mut space = self.space.lock();
        space.remove(|held| held.id == leased.id);
        space.add(leased.clone(), self.region_bytes, now.0);
        leased
    }

    /// Runs `change` on the lease rules.
    pub(crate) fn with_holdings<R>(&self, change: impl FnOnce(&mut Holdings) -> R) -> R {
        change(&mut self.ledger.lock().holdings)
    }

    /// The node answered: the lease lasts longer.
    pub(crate) fn lease_renewed(
        &self,
        asked_at: Millis,
        ttl: Millis,
        region: RegionId,
        epoch: farpool_wire::Epoch,
    ) {
        let mut ledger = self.ledger.lock();
        ledger.holdings.renewed(asked_at, ttl, region, epoch);
        let now = self.now();
        let until = ledger.holdings.usable(now, region).map(|held| held.usable_until().0);
        if let (Some(until), Some(leased)) = (until, ledger.regions.get(&region)) {
            leased.extend(until);
        }
    }

    /// A lease is over, whatever the reason: what lies there is lost.
    pub(crate) fn lease_lost(&self, region: RegionId, epoch: farpool_wire::Epoch) {
        let mut ledger = self.ledger.lock();
        ledger.holdings.dropped(region, epoch);
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
            ledger.holdings.dropped(region.id, region.epoch);
        }
        ledger.nodes.retain(|_, known| !known.is_lost());
        let until = self.now().0 + AVOID_MS;
        ledger.avoid_until_ms.insert(id, until);
        drop(ledger);
        self.space.lock().remove(|region| region.node.is_lost());
    }

    /// Nodes that should not be asked for regions now.
    pub(crate) fn nodes_to_avoid(&self) -> Vec<NodeId> {
        let now = self.now().0;
        let mut ledger = self.ledger.lock();
        ledger.avoid_until_ms.retain(|_, until| *until > now);
        ledger.avoid_until_ms.keys().copied().collect()
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
            ledger.holdings.dropped(region.id, region.epoch);
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

/// A lease as the broker answered it, checked.
pub(crate) struct LeasedRegionParts {
    pub(crate) id: RegionId,
    pub(crate) epoch: farpool_wire::Epoch,
    pub(crate) key: farpool_wire::AccessKey,
    pub(crate) node: NodeState,
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
