//! What one process holds of the pool: leases, regions, nodes and extents, and how they change.
//!
//! The caller supplies the clock, and a function that says how to reach a node. A shell (`keeper`, or a
//! simulation's) asks brokers and nodes, and passes the answers to this module.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Waker};
use std::time::Duration;

use farpool_fabric::{Clock, Peer, ShmTransport};
use farpool_keep::Journal;
use farpool_lease::Millis;
use farpool_wire::control::{AcquireResponse, Lease, NodeAddress, ReleaseRequest, RenewResponse};
use farpool_wire::{Epoch, NodeId, OwnerId, RegionId};
use rustix_futex_sync::Mutex;

use crate::error::NoSpace;
use crate::giving_up::{Sign, is_given_up};
use crate::growth::{GROW_PATIENCE, Growth};
use crate::holder::{Acquired, Change, GrowthOutcome, HeldLease, Holder, Renewal};
use crate::keeping::Keeping;
use crate::overflow::{Overflow, Overflowing};
use crate::region::{LeasedRegion, NodeState};
use crate::space::{EXTENT_BYTES, Extent, Space, Where};

/// The stock requests more regions when fewer free extents than this are left, unless it keeps no spare. This
/// many extents are 32 MiB, which some milliseconds of writing fill; a request takes about as long.
const LOW_WATER_EXTENTS: u64 = 128;

/// How much longer a task waits while the overflow directory still gives regions, but other tasks take their
/// extents first. An allocation takes at most five seconds, so this allows for six.
const OVERFLOW_PATIENCE: Millis = Millis(30_000);

/// Sizes of the pool, for `statfs`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Capacity {
    /// What this owner holds and could still get.
    pub total_bytes: u64,
    /// The part of it that this owner does not use.
    pub free_bytes: u64,
}

/// Finds how to reach a node's data plane from here, by the addresses that came with a lease.
pub type Reach = Box<dyn Fn(&NodeAddress) -> Peer + Send + Sync>;

/// How a stock is set up.
pub struct StockConfig {
    /// The owner of all leases.
    pub owner: OwnerId,
    /// Size of the pool's regions, a multiple of [`EXTENT_BYTES`].
    pub region_bytes: u64,
    /// Most regions to lease; `None`: as many as the pool gives.
    pub limit_regions: Option<u64>,
    /// The clock by which leases are used.
    pub clock: Arc<dyn Clock + Send + Sync>,
    /// How to reach nodes.
    pub reach: Reach,
    /// The journal in which the stock records all that it holds, for a later process, if there is one.
    pub journal: Option<Arc<dyn Journal>>,
}

/// What one process holds of the pool. The sessions and the shell of the process share it.
pub struct Stock {
    owner: OwnerId,
    region_bytes: u64,
    limit_regions: Option<u64>,
    clock: Arc<dyn Clock + Send + Sync>,
    reach: Reach,
    pub(crate) space: Arc<Mutex<Space>>,
    ledger: Mutex<Ledger>,
    /// The journal in which the stock records all that it holds, if there is one.
    journal: Option<Arc<dyn Journal>>,
    growing: Mutex<Growing>,
    growth_wanted: tokio::sync::Notify,
    /// The stock requests more regions when fewer free extents than this are left.
    spare_extents: AtomicU64,
    /// Regions that the pool could still lend, by the broker's last answer.
    pool_free_regions: AtomicU64,
    /// How often regions were lost.
    losses: AtomicU64,
    /// What gives regions if the pool gives none.
    overflowing: Option<Overflowing>,
    /// Until when no regions are requested, because the last request brought none. Zero without overflow.
    no_far_until_ms: AtomicU64,
}

/// Leases by region, and the nodes they lie on.
struct Ledger {
    holder: Holder,
    regions: BTreeMap<RegionId, Arc<LeasedRegion>>,
    nodes: BTreeMap<NodeId, Arc<NodeState>>,
}

/// Attempts to get more regions, and the tasks that wait for the next one to end.
#[derive(Default)]
struct Growing {
    growth: Growth,
    waiting: Vec<Waker>,
}

/// How long an operation is retried while its node lives and no connection can be made. If the operation
/// failed sooner, data written to the file would be lost.
const TRY_WITHIN: Millis = Millis(30_000);
/// How long a session waits for a region that is being moved to other memory: many GiB take seconds.
const MOVE_PATIENCE: Millis = Millis(30_000);

/// Keeps the leases that a session uses. The session reports the outcomes of its operations to it.
pub trait LeaseKeeper: Send + Sync {
    /// The clock by which leases are used.
    fn now(&self) -> Millis;

    /// Records a failed try and its sign. Returns whether the node is given up, now or earlier.
    fn node_failed(&self, node: &NodeState, sign: Sign) -> bool;

    /// Records that a node's data plane has answered after trouble.
    fn node_answered(&self, node: &NodeState);

    /// Records that the time for an operation's retries is used up. Returns whether the node is given up.
    fn patience_ended(&self, node: &NodeState) -> bool;

    /// Records that a node says that a lease has ended.
    fn lease_lost(&self, region: RegionId, epoch: Epoch);

    /// The retry policy of its sessions.
    fn retries(&self) -> RetryPolicy {
        RetryPolicy { try_within: TRY_WITHIN, while_moved: MOVE_PATIENCE }
    }
}

/// A session's retry policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RetryPolicy {
    /// For how long, from its beginning, an operation is retried.
    pub try_within: Millis,
    /// How long a region may take to be moved to other memory.
    pub while_moved: Millis,
}

impl LeaseKeeper for Stock {
    fn now(&self) -> Millis {
        Stock::now(self)
    }

    fn node_failed(&self, node: &NodeState, sign: Sign) -> bool {
        Stock::node_failed(self, node, sign)
    }

    fn node_answered(&self, node: &NodeState) {
        node.hearing.answered(Stock::now(self));
    }

    fn patience_ended(&self, node: &NodeState) -> bool {
        node.is_lost()
    }

    fn lease_lost(&self, region: RegionId, epoch: Epoch) {
        Stock::lease_lost(self, region, epoch);
    }
}

/// A region held, and its number. That number times the extents of a region is the number of its first
/// extent.
#[derive(Clone, Debug)]
pub struct NumberedRegion {
    /// Unique among the regions held.
    pub number: u64,
    /// The region.
    pub region: Arc<LeasedRegion>,
}

impl Stock {
    /// A stock that holds nothing yet.
    pub fn new(config: StockConfig) -> Self {
        let StockConfig { owner, region_bytes, limit_regions, clock, reach, journal } = config;
        debug_assert!(region_bytes.is_multiple_of(EXTENT_BYTES), "regions are carved into extents");
        let holder = Holder::new(owner, region_bytes);
        Stock {
            owner,
            region_bytes,
            limit_regions,
            clock,
            reach,
            space: Arc::new(Mutex::new(Space::keeping(journal.clone().map(Keeping::new)))),
            journal,
            ledger: Mutex::new(Ledger { holder, regions: BTreeMap::new(), nodes: BTreeMap::new() }),
            growing: Mutex::default(),
            growth_wanted: tokio::sync::Notify::new(),
            spare_extents: AtomicU64::new(LOW_WATER_EXTENTS),
            pool_free_regions: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            overflowing: None,
            no_far_until_ms: AtomicU64::new(0),
        }
    }

    /// The stock with a giver of regions for what the pool has no room for. If the stock has a journal, the
    /// giver keeps its regions for a later process.
    #[must_use]
    pub fn with_overflow(self, giver: Arc<dyn Overflow>) -> Self {
        Stock { overflowing: Some(Overflowing::new(giver)), ..self }
    }

    /// The owner of all leases.
    pub fn owner(&self) -> OwnerId {
        self.owner
    }

    /// Size of the pool's regions.
    pub fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    /// Extents of a region.
    pub fn extents_per_region(&self) -> u64 {
        self.region_bytes / EXTENT_BYTES
    }

    /// The clock by which leases are used.
    pub fn now(&self) -> Millis {
        Millis(self.clock.now_ns() / 1_000_000)
    }

    /// The same clock, for endpoints.
    pub fn clock(&self) -> Arc<dyn Clock + Send + Sync> {
        self.clock.clone()
    }

    /// Whether some region is being taken back.
    pub fn is_to_leave(&self) -> bool {
        self.with_holder(|holder| holder.to_leave().next().is_some())
    }

    /// Takes an extent for the `place`-th stripe of a file; consecutive places go to consecutive nodes.
    ///
    /// # Errors
    /// When none is free and no more regions can be leased.
    pub async fn take_extent(&self, place: u64) -> Result<Extent, NoSpace> {
        self.take_extent_within(place, &Where::Anywhere).await
    }

    /// Like [`take_extent`](Self::take_extent), but only on nodes that `within` allows.
    ///
    /// # Errors
    /// When none is free on such a node, and no regions of such a node can be leased.
    pub async fn take_extent_within(&self, place: u64, within: &Where) -> Result<Extent, NoSpace> {
        let give_up_at = self.now().plus(GROW_PATIENCE);
        loop {
            let attempts = self.growing.lock().growth.attempts();
            let (extent, free) = self.take_far(place, within);
            let may_grow = self.may_grow(); // read once: a task that waits for growth has requested it
            // Where extents are free that this task cannot use, `want_elsewhere` says what it waits for.
            let is_short = free < self.spare_extents() || (free == 0 && extent.is_none());
            if is_short && may_grow {
                self.growth_wanted.notify_one();
            }
            if let Some(extent) = extent {
                return Ok(extent);
            }
            let is_hopeless = !may_grow
                || self.growing.lock().growth.is_hopeless(self.now()) && !self.is_full_elsewhere(within);
            let may_overflow = self.want_overflow(within);
            if is_hopeless && (!may_overflow || self.has_overflow()) {
                // Regions may have arrived since the first look, and may be why the limit is reached. So look
                // once more.
                return self.take_now(place, within).ok_or(NoSpace);
            }
            self.want_elsewhere(within);
            let outcome = self.growth_after(attempts).await;
            match outcome {
                GrowthOutcome::Grown | GrowthOutcome::Unreachable if self.now() < give_up_at => {}
                GrowthOutcome::Full if self.now() < give_up_at && self.is_full_elsewhere(within) => {}
                // The directory still gives regions, even if other tasks have taken the last one whole.
                _ if self.may_overflow(within) && self.now() < give_up_at.plus(OVERFLOW_PATIENCE) => {}
                _ => return self.take_now(place, within).ok_or(NoSpace),
            }
        }
    }

    /// Whether the answer *full* was about some nodes only, and this caller accepts an extent on any node.
    fn is_full_elsewhere(&self, within: &Where) -> bool {
        *within == Where::Anywhere && self.with_holder(|holder| holder.was_limited())
    }

    /// Makes the next request for regions leave out the nodes that `within` does not allow. The request is
    /// sent however many extents are free on those nodes.
    fn want_elsewhere(&self, within: &Where) {
        let unwanted: Vec<NodeId> = match within {
            Where::Anywhere => return,
            Where::NotOn(nodes) => nodes.clone(),
            Where::On(only) => {
                self.nodes().iter().map(|node| node.peer.node).filter(|node| node != only).collect()
            }
        };
        self.with_holder(|holder| holder.want_elsewhere(unwanted));
        self.growth_wanted.notify_one();
    }

    /// Takes an extent of far memory if one is free. Also returns how many are free afterwards.
    fn take_far(&self, place: u64, within: &Where) -> (Option<Extent>, u64) {
        let mut space = self.space.lock();
        (space.take_far(place, within, &self.space), space.free())
    }

    /// Takes an extent if one is free, in far memory or else in the overflow directory.
    fn take_now(&self, place: u64, within: &Where) -> Option<Extent> {
        self.space.lock().take(place, within, &self.space)
    }

    /// Waits until more than `attempts` attempts have ended, and returns the outcome of the last one.
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

    /// How often a lease or a node was lost. A caller that keeps redundant data checks that data when this
    /// number has changed.
    pub fn losses(&self) -> u64 {
        // Acquire: pairs with the release in `note_loss`. A thread that sees the number also sees the regions
        // as lost.
        self.losses.load(Ordering::Acquire)
    }

    fn note_loss(&self) {
        self.losses.fetch_add(1, Ordering::Release);
    }

    /// Records the answer to a request that was sent to the broker at `asked_at`; `None`: there was none.
    /// Returns the outcome, and the leases to give back.
    pub fn acquisition_answered(
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
            tracing::error!(reason, "a lease cannot be used; giving it back");
            lease
        });
        (outcome, unusable.collect())
    }

    /// Adds a region that was just leased. A newer lease of a region replaces an older one.
    fn add_region(&self, ledger: &mut Ledger, now: Millis, held: HeldLease) {
        let lease = held.lease.clone();
        let leased = self.enter_region(ledger, held);
        // Still under the ledger's lock, so that a thread that counts this region as held also finds its
        // extents.
        let mut space = self.space.lock();
        space.remove(|other| other.id == leased.id);
        let _number = space.add(leased, self.region_bytes, now.0, &lease);
    }

    /// Adds a region that an earlier process had under this number.
    pub(crate) fn adopt_region(
        &self,
        number: u64,
        held: HeldLease,
        doubts: &BTreeSet<u32>,
    ) -> Arc<LeasedRegion> {
        let mut ledger = self.ledger.lock();
        let leased = self.enter_region(&mut ledger, held);
        self.space.lock().adopt(number, leased.clone(), self.region_bytes, self.now().0, doubts);
        leased
    }

    /// Adds the region of the overflow directory that an earlier process had under this number, if it is
    /// still there.
    pub(crate) fn adopt_overflow_region(
        &self,
        number: u64,
        index: u32,
        doubts: &BTreeSet<u32>,
    ) -> io::Result<()> {
        let Some(overflowing) = &self.overflowing else { return Err(io::ErrorKind::NotFound.into()) };
        match overflowing.find(index, self.region_bytes)? {
            Some(region) => {
                self.space.lock().adopt(number, region, self.region_bytes, self.now().0, doubts);
            }
            None => tracing::warn!(index, "a region of the overflow directory is lost: its file is gone"),
        }
        Ok(())
    }

    /// How to reach a node.
    pub(crate) fn reach(&self, address: &NodeAddress) -> Peer {
        (self.reach)(address)
    }

    /// Records that a region is held, and on which node it lies.
    fn enter_region(&self, ledger: &mut Ledger, held: HeldLease) -> Arc<LeasedRegion> {
        let address = held.lease.address.unwrap_or_default(); // present: the holder has checked that
        let node = NodeState::new((self.reach)(&address), address.control);
        // A node that was restarted under its id is reached elsewhere.
        let same = |known: &&Arc<NodeState>| {
            !known.is_lost() && known.peer == node.peer && known.control == node.control
        };
        let known = ledger.nodes.get(&held.region.node).filter(same).cloned();
        let node = known.unwrap_or_else(|| Arc::new(node));
        node.hearing.renewed(self.now()); // it has just answered a request for this lease
        ledger.nodes.insert(held.region.node, node.clone());
        let leased =
            Arc::new(LeasedRegion::new(held.region, held.epoch, held.key, node, held.usable_until.0));
        if let Some(older) = ledger.regions.insert(held.region, leased.clone()) {
            older.lose();
            self.note_loss();
        }
        leased
    }

    /// Calls `ask` with the holder, which has the rules.
    pub fn with_holder<R>(&self, ask: impl FnOnce(&mut Holder) -> R) -> R {
        ask(&mut self.ledger.lock().holder)
    }

    /// Records a node's answer to a renewal.
    pub fn renewal_answered(&self, renewal: &Renewal, answer: &RenewResponse) {
        let now = self.now();
        let mut ledger = self.ledger.lock();
        if let Some(node) = ledger.nodes.get(&renewal.node) {
            node.hearing.renewed(now);
        }
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
                        tracing::info!(%region, within_ms = usable_until.since(now).0, "the region is being taken back");
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

    /// Records that a lease has ended, whatever the reason: the region's data are lost.
    pub fn lease_lost(&self, region: RegionId, epoch: Epoch) {
        let mut ledger = self.ledger.lock();
        ledger.holder.dropped(region, epoch);
        let leased = ledger.regions.get(&region).filter(|leased| leased.epoch == epoch).cloned();
        if let Some(leased) = leased {
            tracing::warn!(%region, %epoch, "lease lost; the region's data are lost");
            leased.lose();
            ledger.regions.remove(&region);
        }
        drop(ledger);
        self.space.lock().remove(|held| held.id == region && held.epoch == epoch);
        self.note_loss();
    }

    /// Records a failed try and its sign, and gives the node up if that is enough evidence. Returns whether
    /// the node is given up.
    pub fn node_failed(&self, node: &NodeState, sign: Sign) -> bool {
        let now = self.now();
        let heard = node.hearing.trouble(now);
        if !node.is_lost() && is_given_up(now, sign, heard) {
            tracing::debug!(node = %node.peer.node, ?sign, ?heard, %now, "given up");
            self.node_lost(node);
        }
        node.is_lost()
    }

    /// Gives a node up; all data there are lost.
    pub fn node_lost(&self, node: &NodeState) {
        if !node.give_up() {
            return;
        }
        let id = node.peer.node;
        tracing::warn!(node = %id, "the node does not answer; its data are lost");
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
        self.note_loss();
    }

    /// Forgets nodes on which this stock holds no region any more.
    pub fn forget_idle_nodes(&self) {
        let mut ledger = self.ledger.lock();
        let Ledger { regions, nodes, .. } = &mut *ledger;
        nodes.retain(|id, _| regions.keys().any(|region| region.node == *id));
    }

    /// Nodes on which this stock holds regions.
    pub fn nodes(&self) -> Vec<Arc<NodeState>> {
        self.ledger.lock().nodes.values().cloned().collect()
    }

    /// The regions in which extents lie, with their numbers.
    pub fn numbered_regions(&self) -> Vec<NumberedRegion> {
        self.space
            .lock()
            .numbered()
            .map(|(number, region)| NumberedRegion { number, region: region.clone() })
            .collect()
    }

    /// How to reach a node of this host of which direct clients have learnt; `None`: no extent lies there, or
    /// none does any more.
    pub fn peer_of_guests(&self, node: NodeId, shm_socket: &Path) -> Option<Peer> {
        let is_it = |peer: &&Peer| peer.node == node && peer.shm_socket.as_deref() == Some(shm_socket);
        self.space.lock().numbered().map(|(_, region)| &region.node.peer).find(is_it).cloned()
    }

    /// Connects to a node of this host, for a direct client that may not reach the node's socket itself.
    ///
    /// # Errors
    /// When no extent lies on such a node ([`io::ErrorKind::NotFound`]), or this process cannot reach the
    /// socket either.
    pub fn connect_guest(&self, node: NodeId, shm_socket: &Path) -> io::Result<OwnedFd> {
        let peer = self.peer_of_guests(node, shm_socket).ok_or(io::ErrorKind::NotFound)?;
        ShmTransport::connect(&peer)
    }

    /// The regions held.
    pub fn regions(&self) -> Vec<Arc<LeasedRegion>> {
        self.ledger.lock().regions.values().cloned().collect()
    }

    /// Removes regions that are no longer needed; the caller gives them back to their nodes.
    pub fn shrink(&self, linger: Duration) -> Vec<Arc<LeasedRegion>> {
        let (idle, unused_overflow) = {
            let mut space = self.space.lock();
            // A stock in use will need more extents; an unused one needs none.
            let keep_free = if space.is_unused() { 0 } else { 2 * self.spare_extents() };
            let (now, linger_ms) = (self.now().0, linger.as_millis() as u64);
            let unused_overflow = space.shrink_overflow(now, linger_ms);
            (space.shrink(now, linger_ms, keep_free), unused_overflow)
        };
        // Outside the lock.
        for region in &unused_overflow {
            region.retire(); // for direct clients, whose table may have been read before
            region.storage().into_iter().for_each(|storage| storage.discard());
        }
        drop(unused_overflow);
        self.retire(&idle);
        idle
    }

    /// Whether a later process is to take over what this one holds.
    pub fn is_kept(&self) -> bool {
        self.journal.as_ref().is_some_and(|journal| journal.is_whole())
    }

    /// The journal in which the stock records all that it holds, if there is one.
    pub fn journal(&self) -> Option<&Arc<dyn Journal>> {
        self.journal.as_ref()
    }

    /// Removes all regions, and returns them.
    pub fn retire_all(&self) -> Vec<Arc<LeasedRegion>> {
        let all = self.regions();
        self.space.lock().remove(|_| true);
        self.retire(&all);
        all
    }

    /// The request that gives regions back to their node, after this stock has removed them.
    pub fn release_request(&self, regions: &[Arc<LeasedRegion>]) -> ReleaseRequest {
        let leases = regions.iter().map(|held| (held.id.index, held.epoch, &held.key));
        self.with_holder(|holder| holder.release(leases))
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

    /// Records how many regions the pool could still lend.
    pub fn pool_has_free(&self, regions: u64) {
        self.pool_free_regions.store(regions, Ordering::Relaxed); // a statistic: pairs with nothing
    }

    /// Records that this stock now holds `regions` regions that the pool could lend.
    pub fn pool_has_lent(&self, regions: u64) {
        // Relaxed: a statistic, which pairs with nothing.
        let less = |free: u64| Some(free.saturating_sub(regions));
        let _always = self.pool_free_regions.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// How large the pool and the overflow directory are for this owner. The pool's number of free regions is
    /// the broker's last answer.
    pub fn capacity(&self) -> Capacity {
        let (held, free, overflow_free, overflow_used) = {
            let space = self.space.lock();
            let held = space.regions().count() as u64;
            (held, space.free(), space.free_in_overflow(), space.used_in_overflow())
        };
        let lendable = self.lendable_regions() * self.region_bytes;
        let room = self.overflowing.as_ref().map_or(0, |overflowing| overflowing.giver.room_bytes());
        let allocatable = room - room % self.region_bytes; // whole regions only
        let free_bytes = (free + overflow_free) * EXTENT_BYTES + lendable + allocatable;
        let overflow_bytes = (overflow_free + overflow_used) * EXTENT_BYTES + allocatable;
        Capacity { total_bytes: held * self.region_bytes + lendable + overflow_bytes, free_bytes }
    }

    /// Regions that the pool could still lend to this owner, by the broker's last answer.
    fn lendable_regions(&self) -> u64 {
        let held = self.space.lock().regions().count() as u64;
        let limit = self.limit_regions.unwrap_or(u64::MAX);
        self.pool_free_regions.load(Ordering::Relaxed).min(limit.saturating_sub(held))
    }
}

mod growing;
mod overflow;
#[cfg(test)]
mod tests;
