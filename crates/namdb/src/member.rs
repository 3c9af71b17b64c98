//! A member of a database without threads: a seat among its compute servers, and what all parts of the
//! member share.
//!
//! D1. A member works under grants of its own. Once it has a seat, other members fence these before they roll
//!     back its commits.
//! D2. It sends heartbeats from a task that does nothing else for long. Once it is evicted, nothing that it
//!     does takes effect, and its clients are told so.
//! D3. It gives its seat back only when nothing of it is in flight. Otherwise the others recover the seat, as
//!     after a member that has died.

mod collecting;
mod ending;
mod joining;
mod learning;
pub(crate) mod living;
mod recovering;
mod tidying;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use farpool_fabric::Endpoint;
use farpool_pool::ClientGrant;
use farpool_txn::hash::{IndexLayout, IndexSpares};
use farpool_txn::membership::{Duties, Duty, Seat};
use farpool_txn::oracle::Fetched;
use farpool_txn::slab::{Slab, SlabLayout};
use farpool_txn::tree::{TreeLayout, TreeSpares};
use farpool_txn::{DatabaseAt, DatabaseLayout, Growth, Memory, Piece, SharedSlot, StaleEntries};
use farpool_wire::{Epoch, RegionId};
use rustix_futex_sync::{Mutex, RwLock};

use crate::environment::{Environment, News, Timing};
use crate::error::{DatabaseError, Ended, TxError};
use crate::regions::{Later, Regions};
use crate::workers::Places;
#[cfg(test)]
pub(crate) use joining::add_grants;
pub(crate) use joining::attach_all;
pub use living::MemberInfo;

/// Most tables whose spares a member keeps; above that, it drops those of tables that no client has open.
const MOST_SPARES: usize = 1_024;
/// Heartbeats of a member per heartbeat timeout (*patience*): some may be late.
const BEATS: u32 = 10;

/// A member of a database. Its parts are futures that run side by side, each with an endpoint of its own:
/// [the main one](Self::run_main_part), [its duties](Self::run_duty), and its [clients](crate::ClientCore).
pub struct MemberCore<E> {
    environment: E,
    layout: DatabaseLayout,
    /// Those of the layout's regions,
    grants: Vec<ClientGrant>,
    /// and their epochs.
    epochs: Vec<Epoch>,
    /// The regions that the database got later.
    later: RwLock<Arc<Later>>,
    seat: Seat,
    slot: Arc<SharedSlot>,
    patience: Duration,
    /// The places of its clients.
    pub(crate) places: Arc<Places>,
    duties: Duties,
    /// The cut that the fetcher has read last, if there is a fetcher.
    fetched: Option<Arc<Fetched>>,
    /// Slabs, by the first record of their table. All clients share what the member knows of the chunks.
    slabs: Mutex<BTreeMap<u64, Arc<Slab>>>,
    /// Record numbers and buckets that the member has taken from tables' indexes for later use, likewise.
    spares: Mutex<BTreeMap<u64, Arc<IndexSpares>>>,
    /// The same of leaves of their orders.
    leaves: Mutex<BTreeMap<u64, Arc<TreeSpares>>>,
    /// Entries of secondary indexes that are noted as perhaps of no use, by the number of the index.
    stale: Mutex<BTreeMap<u64, Arc<StaleEntries>>>,
    /// A client changes the catalog.
    pub(crate) changes_catalog: AtomicBool,
    /// The main part frees memory: it waits until its commits are published, so this member goes on
    /// publishing.
    frees_memory: AtomicBool,
    /// The pool refused more memory.
    refused: Mutex<Option<Refused>>,
    ended: Mutex<Option<Ended>>,
    has_ended: AtomicBool,
    /// The seat was given back.
    has_left: AtomicBool,
}

/// The pool did not lend more memory.
struct Refused {
    /// It is not asked again before this time.
    until_ns: u64,
    /// What it said.
    why: String,
}

/// What a member does for all members of its database.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DutyKind {
    /// Publishes cuts while no other member does.
    Publisher,
    /// Publishes the horizon, while no other member does.
    Collector,
    /// Recovers the seats of silent members.
    Recoverer,
    /// Reads cuts for all clients of this member.
    Fetcher,
}

impl DutyKind {
    /// The duties of a member without a fetcher.
    pub const ALL: [DutyKind; 3] = [DutyKind::Publisher, DutyKind::Collector, DutyKind::Recoverer];

    /// The name of the duty, for messages and threads.
    pub fn name(self) -> &'static str {
        match self {
            DutyKind::Publisher => "publisher",
            DutyKind::Collector => "collector",
            DutyKind::Recoverer => "recoverer",
            DutyKind::Fetcher => "fetcher",
        }
    }
}

/// A duty that has begun: the seat is not given back before it has ended.
pub struct BegunDuty {
    kind: DutyKind,
    duty: Duty,
}

impl BegunDuty {
    /// Which duty it is.
    pub fn kind(&self) -> DutyKind {
        self.kind
    }
}

impl<E: Environment> MemberCore<E> {
    /// The member's surroundings.
    pub fn environment(&self) -> &E {
        &self.environment
    }

    /// The seat.
    pub fn seat(&self) -> Seat {
        self.seat
    }

    /// The slot in which the member's clients commit.
    pub fn slot(&self) -> &Arc<SharedSlot> {
        &self.slot
    }

    /// The member's grants: in the order of the layout's regions, then of regions that the database got
    /// later.
    pub fn grants(&self) -> Vec<ClientGrant> {
        self.grants.iter().chain(self.later.read().grants()).copied().collect()
    }

    /// The regions that it can use.
    pub(crate) fn regions(&self) -> Regions<'_> {
        Regions::new(&self.layout, &self.grants, self.later.read().clone())
    }

    /// The layout of the database.
    pub fn layout(&self) -> &DatabaseLayout {
        &self.layout
    }

    /// The addresses of the database, for this member.
    pub fn at(&self) -> DatabaseAt<'_> {
        DatabaseAt { layout: &self.layout, grants: &self.epochs }
    }

    pub(crate) fn timing(&self) -> &Timing {
        self.environment.timing()
    }

    pub(crate) fn patience(&self) -> Duration {
        self.patience
    }

    pub(crate) fn fetched(&self) -> Option<&Arc<Fetched>> {
        self.fetched.as_ref()
    }

    /// Begins a duty. Call it for all duties before any part runs, so that the seat is not given back early.
    pub fn begin_duty(&self, kind: DutyKind) -> BegunDuty {
        BegunDuty { kind, duty: self.duties.begin(kind.name()) }
    }

    /// Does a duty until the member has ended.
    pub async fn run_duty(&self, begun: BegunDuty, endpoint: Endpoint) {
        let BegunDuty { kind, duty } = begun;
        let mut ends_if_dropped = EndsIfDropped { member: self, part: Some(kind.name()) };
        let done = async {
            let memory = self.memory(endpoint).await?;
            match kind {
                DutyKind::Publisher => self.publish_if_role_is_free(&memory, &duty).await?,
                DutyKind::Collector => self.collect_if_role_is_free(memory, &duty).await?,
                DutyKind::Recoverer => self.recover_others(&memory, &duty).await?,
                DutyKind::Fetcher => self.fetch_for_all(&memory, &duty).await?,
            }
            duty.end();
            Ok(())
        };
        let _ = self.or_end(done).await; // the member has ended, and knows why
        ends_if_dropped.part = None;
    }

    /// A client's or a part's access to all regions.
    ///
    /// # Errors
    /// When a node does not answer, or this member was evicted.
    pub async fn memory(&self, endpoint: Endpoint) -> Result<Memory, DatabaseError> {
        let memory = attach_all(&self.environment, endpoint, &self.grants).await?;
        let later = self.later.read().clone();
        for grant in later.grants() {
            self.open_unless_gone(&memory, grant).await?;
        }
        Ok(memory)
    }

    /// A region that the member uses whose lease has ended, if there is one. Leases of regions that it does
    /// not use yet, or no more, may end.
    pub(crate) fn lost_region(&self) -> Option<RegionId> {
        let (lost, used) = (self.environment.lost_regions(), self.grants());
        lost.into_iter().find(|lost| used.iter().any(|grant| grant.region == *lost))
    }

    /// The slab of the table that has this first record. `None`: no table has such a slab.
    pub(crate) fn slab(
        &self,
        first_record: u64,
        layout: SlabLayout,
        growth: Growth,
        pieces: Vec<Piece>,
    ) -> Option<Arc<Slab>> {
        let mut slabs = self.slabs.lock();
        if let Some(slab) = slabs.get(&first_record) {
            return slab.grow(&pieces).then(|| slab.clone());
        }
        let slab = Slab::grown(pieces, layout, growth, self.at().members(), self.seat.claim)?;
        slabs.insert(first_record, slab.clone());
        Some(slab)
    }

    /// What the member has taken from the index of the table that has this first record.
    pub(crate) fn spares(&self, first_record: u64, layout: &IndexLayout) -> Arc<IndexSpares> {
        shared(&self.spares, first_record, || IndexSpares::new(layout))
    }

    /// What the member has taken from the order of the table that has this first record.
    pub(crate) fn leaves(&self, first_record: u64, layout: &TreeLayout) -> Arc<TreeSpares> {
        shared(&self.leaves, first_record, || TreeSpares::new(layout, self.seat.slot))
    }

    /// Entries of the secondary index with this number that are noted as perhaps of no use.
    pub(crate) fn stale_entries(&self, index: u64) -> Arc<StaleEntries> {
        shared(&self.stale, index, StaleEntries::default)
    }

    /// Checks that this is still a member.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), Ended> {
        if self.has_ended() { Err(self.end_reason()) } else { Ok(()) }
    }

    /// Why the member has ended; [`Ended::Closed`] if it has not.
    pub fn end_reason(&self) -> Ended {
        self.ended.lock().clone().unwrap_or(Ended::Closed)
    }

    /// Whether the member has ended, or is to end.
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst) // see `has_ended_publishing`; pairs with the store in `end`
    }

    /// Ends the member, for this reason. If the member has ended already, the first reason stays.
    pub fn end(&self, why: Ended) {
        self.ended.lock().get_or_insert(why);
        self.has_ended.store(true, Ordering::SeqCst);
    }

    /// Whether the seat was given back: nothing is done under the grants any more.
    pub fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire) // pairs with the release in `mark_left`
    }

    fn mark_left(&self) {
        self.has_left.store(true, Ordering::Release);
    }

    /// Fences the member's own grants, once it [has left](Self::has_left): a region has few grants, and no
    /// other process knows of these. Grants that cannot be fenced end with the leases.
    pub async fn fence_own_grants(&self) {
        joining::fence_all(&self.environment, &self.grants()).await;
    }

    /// Whether the pool may be asked for more memory: it has not refused that a moment ago, and the database
    /// may get more.
    pub(crate) fn may_lease(&self, endpoint: &Endpoint) -> bool {
        let later = self.later.read().grants().count();
        later < usize::from(self.layout.limits.later_regions) && self.check_may_lease(endpoint).is_ok()
    }

    /// Checks that the pool has not refused more memory a moment ago.
    pub(crate) fn check_may_lease(&self, endpoint: &Endpoint) -> Result<(), TxError> {
        match &*self.refused.lock() {
            Some(refused) if endpoint.now_ns() < refused.until_ns => {
                Err(TxError::NoSpace(refused.why.clone()))
            }
            _ => Ok(()),
        }
    }

    /// The pool has refused more memory: it is not asked again for a while. Returns the error for that.
    pub(crate) fn refused_to_lease(&self, endpoint: &Endpoint, why: String) -> TxError {
        let until_ns = endpoint.now_ns() + self.timing().lease_pause.as_nanos() as u64;
        self.environment.report(News::NotLent(&why));
        *self.refused.lock() = Some(Refused { until_ns, why: why.clone() });
        TxError::NoSpace(why)
    }

    /// Sleeps. Returns early once the member has ended.
    pub(crate) async fn pause(&self, endpoint: &Endpoint, long: Duration) {
        let until = endpoint.now_ns() + long.as_nanos() as u64;
        while endpoint.now_ns() < until && !self.has_ended() {
            endpoint.sleep(long.min(self.timing().role_pause)).await;
        }
    }
}

/// What the threads of a member share of the table that has this first record.
fn shared<T>(of_tables: &Mutex<BTreeMap<u64, Arc<T>>>, first_record: u64, new: impl FnOnce() -> T) -> Arc<T> {
    let mut of_tables = of_tables.lock();
    if of_tables.len() > MOST_SPARES {
        // Of tables that no client has open. Some numbers of tables that still exist are lost.
        of_tables.retain(|_, of_table| Arc::strong_count(of_table) > 1);
    }
    of_tables.entry(first_record).or_insert_with(|| Arc::new(new())).clone()
}

/// Ends the member if this is dropped while `part` is set: then that part was dropped half-way.
struct EndsIfDropped<'a, E: Environment> {
    member: &'a MemberCore<E>,
    part: Option<&'static str>,
}

impl<E: Environment> Drop for EndsIfDropped<'_, E> {
    fn drop(&mut self) {
        if let Some(part) = self.part {
            self.member.end(Ended::Failed(format!(
                "the {part} of this compute server was stopped: open the database again"
            )));
        }
    }
}
