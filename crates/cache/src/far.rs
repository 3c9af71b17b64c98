//! Slots in far memory. The owner of the cache leases regions and says where slots lie. Other processes of
//! its host read and write the slots without asking it (`farpool_pool::direct`).
//!
//! F1. Slots lie in groups, each in an extent of its own. A table that all processes share has the number of
//!     each group's extent, and until when regions may be used.
//! F2. Memory that is taken back or lost needs no copy, because the disk has all pages. The owner takes the
//!     groups out of the table at once, and drops their extents. An operation that is in progress there fails
//!     at the node, reads the old page, or writes to memory that nobody reads any more. All three are
//!     harmless (C1, C7).
//! F3. A group that has lost its extent gets another one when the pool has room.
//! F4. The stock serves the cache alone. A process that was stopped in an operation may write to an extent
//!     that the owner has dropped. If the extent has another group by then, the checksums show it (C7).
//!
//! Not here: which process is the owner, how the others ask it, and what the slots hold.

mod pauses;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use farpool_fabric::{ArenaBuf, Clock, Endpoint, Mapping, block_on};
use farpool_keep::Kept;
use farpool_pool::direct::{GuestRegions, RequestRegion, Terms};
use farpool_pool::{
    AccessError, Adoption, EXTENT_BYTES, Extent, OVERFLOW_NODE, SessionCore, Stock, Where, kept_regions,
};
use futures_util::future::join_all;
use rustix_futex_sync::Mutex;

use crate::ahead::FETCHED_MAX;
use crate::ground::{Fetch, PageSink, collect_into};
use crate::layout::MAX_SLOTS;
use crate::layout::WORD_BYTES;
use crate::shared::Slots;
pub use pauses::NodePauses;

/// Bytes of a page: PostgreSQL's default block size.
pub const PAGE_BYTES: usize = 8192;

/// Slots of a group.
pub const SLOTS_PER_EXTENT: u32 = (EXTENT_BYTES / PAGE_BYTES as u64) as u32;

/// Most numbers of regions. A region that is lost while it is in use does not free its number, so there are
/// far more numbers than a pool has regions. Each takes 24 B, of which the kernel allocates only the pages
/// that are used.
const MAX_REGIONS: u64 = 1 << 20;

/// Where the slots lie: a table in shared memory, zero at the beginning.
///
/// ```text
/// groups   one word each: the number of the group's extent plus 1; 0: it has no memory
/// terms    see [`Terms`]
/// ```
#[derive(Clone)]
pub struct FarTable {
    memory: Arc<Mapping>,
    groups: u32,
}

/// The reason for which accesses succeed: [`FarTable::new`] has checked the bounds.
const WITHIN: &str = "the table lies within its memory";

impl FarTable {
    /// Bytes of shared memory for the table of this many slots. Most of them are never touched.
    pub fn bytes(slots: u32) -> u64 {
        Self::terms_at(slots / SLOTS_PER_EXTENT) + Terms::bytes(MAX_REGIONS)
    }

    /// A table for this many slots: whole groups, and at most [`MAX_SLOTS`]. `None`: it is another number, or
    /// the memory is too small.
    pub fn new(memory: Arc<Mapping>, slots: u32) -> Option<FarTable> {
        if !slots.is_multiple_of(SLOTS_PER_EXTENT) || slots > MAX_SLOTS {
            return None;
        }
        memory.load(Self::bytes(slots) - WORD_BYTES).ok()?;
        Some(FarTable { memory, groups: slots / SLOTS_PER_EXTENT })
    }

    fn terms_at(groups: u32) -> u64 {
        u64::from(groups) * WORD_BYTES
    }

    fn terms(&self) -> Terms {
        Terms::new(self.memory.clone(), Self::terms_at(self.groups), MAX_REGIONS)
    }

    /// The regions in which the slots lie, as one process sees them; its threads share them. `None`:
    /// `extents_per_region` is zero.
    pub fn regions(
        &self,
        extents_per_region: u64,
        clock: Arc<dyn Clock + Send + Sync>,
        ask: RequestRegion,
    ) -> Option<Arc<GuestRegions>> {
        GuestRegions::new(self.terms(), extents_per_region, clock, ask).map(Arc::new)
    }

    /// The number of a group's extent; `None`: it has none.
    fn extent(&self, group: u32) -> Option<u64> {
        let word =
            (group < self.groups).then(|| self.memory.load(u64::from(group) * WORD_BYTES).expect(WITHIN));
        word?.checked_sub(1)
    }

    fn set_extent(&self, group: u32, number: Option<u64>) {
        let word = number.map_or(0, |number| number.wrapping_add(1));
        self.memory.store(u64::from(group) * WORD_BYTES, word).expect(WITHIN);
    }
}

fn slots_of(group: u32) -> Range<u32> {
    group * SLOTS_PER_EXTENT..(group + 1) * SLOTS_PER_EXTENT
}

/// The owner's side: the extents in which slots lie.
pub struct FarMemory {
    stock: Arc<Stock>,
    table: FarTable,
    groups: Mutex<Groups>,
}

struct Groups {
    extents: Vec<Option<Extent>>,
    /// Those without an extent.
    vacant: Vec<u32>,
    /// How many are to have an extent.
    wanted: usize,
}

impl Groups {
    /// The `count` groups with the highest extents, without `excluded`. Dropping the last extents empties
    /// whole regions.
    fn last_in_the_stock(&self, count: usize, excluded: &[u32]) -> Vec<u32> {
        let held = (0..).zip(&self.extents).filter(|(group, _)| !excluded.contains(group));
        let mut held: Vec<(u64, u32)> =
            held.filter_map(|(group, held)| Some((held.as_ref()?.number(), group))).collect();
        held.sort_unstable();
        held.iter().rev().take(count).map(|(_, group)| *group).collect()
    }

    /// How many groups lack an extent. Negative: so many have one too many.
    fn missing(&self) -> isize {
        self.wanted as isize - (self.extents.len() - self.vacant.len()) as isize
    }
}

impl FarMemory {
    /// Clears the table: no slot has memory until [`grow`](Self::grow) gives it some. Nothing else takes
    /// extents of the stock (F4), which leases regions only on demand from now on ([`Stock::keep_no_spare`]).
    ///
    /// # Panics
    /// If the table's memory is read-only.
    pub fn new(stock: Arc<Stock>, table: FarTable) -> FarMemory {
        let extents = (0..table.groups).map(|_| None).collect();
        (0..table.groups).for_each(|group| table.set_extent(group, None));
        let vacant = (0..table.groups).rev().collect();
        let wanted = table.groups as usize;
        stock.keep_no_spare();
        FarMemory { stock, table, groups: Mutex::new(Groups { extents, vacant, wanted }) }
    }

    /// Sets how many slots are to have memory, all at most. Until the first call, all are. The next
    /// [`update`](Self::update) drops what is too much.
    pub fn want(&self, slots: u32) {
        let mut groups = self.groups.lock();
        groups.wanted = (slots.div_ceil(SLOTS_PER_EXTENT) as usize).min(groups.extents.len());
    }

    /// Whether as many groups have memory as are to have some.
    pub fn is_complete(&self) -> bool {
        self.groups.lock().missing() <= 0
    }

    /// Leases memory for one group that has none. Returns the group's slots, for `Keeper::restore_slots`.
    /// `None`: all groups have memory, or the pool has no room now. Waits while the broker is asked, which
    /// can take longer than the term of a lease: another task calls [`update`](Self::update) meanwhile.
    pub async fn grow(&self) -> Option<Range<u32>> {
        let group = {
            let groups = self.groups.lock();
            if groups.missing() > 0 { *groups.vacant.last()? } else { return None }
        };
        // Not on the local disk, should the stock have an overflow directory: the pages come from there.
        let within = Where::NotOn(vec![OVERFLOW_NODE]);
        let extent = self.stock.take_extent_within(u64::from(group), &within).await.ok()?;
        let region = self.region_of(&extent);
        let mut groups = self.groups.lock();
        let group = if region < MAX_REGIONS { groups.vacant.pop()? } else { return None };
        self.hold(&mut groups, group, extent);
        Some(slots_of(group))
    }

    /// Lets a group have an extent, and tells the table.
    fn hold(&self, groups: &mut Groups, group: u32, extent: Extent) {
        self.table.terms().publish(self.region_of(&extent), extent.region());
        self.table.set_extent(group, Some(extent.number()));
        groups.extents[group as usize] = Some(extent);
    }

    /// The groups that have memory, with the numbers of their extents.
    pub fn extents(&self) -> Vec<(u32, u64)> {
        let groups = self.groups.lock();
        let numbered = (0..).zip(&groups.extents);
        numbered.filter_map(|(group, held)| Some((group, held.as_ref()?.number()))).collect()
    }

    /// Of the records of leases, those of the regions in which these extents lie.
    pub(crate) fn kept_regions(&self, kept: &Kept, extents: impl Iterator<Item = u64>) -> Kept {
        kept_regions(kept, &extents.map(|extent| extent / self.stock.extents_per_region()).collect())
    }

    /// Gives groups the extents that they had in another daemon's cache, if these still exist. Returns their
    /// slots. The keeper learns of a slot (`Keeper::restore_slots`) only once its page was taken over or
    /// given up.
    pub fn adopt(&self, extents: &[(u32, u64)], adoption: &mut Adoption) -> Vec<Range<u32>> {
        let groups = &mut *self.groups.lock();
        let mut adopted = Vec::new();
        for &(group, number) in extents {
            if !matches!(groups.extents.get(group as usize), Some(None)) {
                continue;
            }
            let extent = self.stock.adopt_extent(adoption, number);
            let Some(extent) = extent.filter(|extent| !extent.region().has_ended()) else { continue };
            if self.region_of(&extent) < MAX_REGIONS {
                self.hold(groups, group, extent);
                adopted.push(slots_of(group));
            }
        }
        let Groups { extents, vacant, .. } = groups;
        vacant.retain(|group| extents[*group as usize].is_none());
        adopted
    }

    /// Publishes until when regions may be used, and drops memory that is being taken back or is lost, and
    /// what is not wanted any more. Returns the slots that have lost their memory, for
    /// `Keeper::withdraw_slots`. Call it several times in the term of a lease.
    pub fn update(&self) -> Vec<Range<u32>> {
        for held in self.stock.numbered_regions() {
            self.table.terms().publish(held.number, &held.region);
        }
        let is_gone = |extent: &Extent| extent.region().is_leaving() || extent.region().has_ended();
        let groups = &mut *self.groups.lock();
        let held = (0..).zip(&groups.extents);
        let mut gone: Vec<u32> =
            held.filter(|(_, held)| held.as_ref().is_some_and(is_gone)).map(|(group, _)| group).collect();
        let surplus = usize::try_from(-groups.missing()).unwrap_or(0).saturating_sub(gone.len());
        if surplus > 0 {
            gone.extend(groups.last_in_the_stock(surplus, &gone));
        }
        for &group in &gone {
            self.table.set_extent(group, None); // before the extent is dropped (F2)
            groups.extents[group as usize] = None;
            groups.vacant.push(group);
        }
        gone.into_iter().map(slots_of).collect()
    }

    fn region_of(&self, extent: &Extent) -> u64 {
        extent.number() / self.stock.extents_per_region()
    }
}

impl Drop for FarMemory {
    fn drop(&mut self) {
        // Before the extents are dropped: callers may go on for a while.
        (0..self.table.groups).for_each(|group| self.table.set_extent(group, None));
    }
}

/// What one thread of a process needs to read and write slots.
pub struct FarSlots {
    core: SessionCore,
    table: FarTable,
    regions: Arc<GuestRegions>,
    pauses: Arc<NodePauses>,
    /// Whether the last read of a slot had to go through its node, which takes a round trip.
    takes_round_trips: Cell<bool>,
    /// Pages that were fetched and not read yet, the oldest first.
    fetched: RefCell<VecDeque<(Fetch, ArenaBuf)>>,
}

impl FarSlots {
    /// The slots in this table, reached through this endpoint.
    pub fn new(
        table: FarTable,
        regions: Arc<GuestRegions>,
        pauses: Arc<NodePauses>,
        endpoint: Endpoint,
    ) -> FarSlots {
        let core = SessionCore::new(regions.clone(), endpoint);
        let (takes_round_trips, fetched) = (Cell::new(false), RefCell::new(VecDeque::new()));
        FarSlots { core, table, regions, pauses, takes_round_trips, fetched }
    }

    /// The extent in which a slot lies, and where in it. `None`: it has no memory.
    fn find(&self, slot: u32) -> Option<(Extent, u64)> {
        let extent = self.regions.extent(self.table.extent(slot / SLOTS_PER_EXTENT)?)?;
        Some((extent, u64::from(slot % SLOTS_PER_EXTENT) * PAGE_BYTES as u64))
    }

    /// Whether the node may be asked: it is left alone for a while after it has failed.
    fn may_ask(&self, extent: &Extent) -> bool {
        self.pauses.may_try(extent.region().id.node, || self.now_ns())
    }

    fn now_ns(&self) -> u64 {
        self.core.endpoint().now_ns()
    }

    /// Learns from the end of an operation whether the node fails. Returns whether the operation succeeded.
    fn note(&self, extent: &Extent, done: &Result<(), AccessError>) -> bool {
        let node = extent.region().id.node;
        match done {
            Ok(()) => self.pauses.answered(node),
            // The node has answered, or was not asked.
            Err(AccessError::LeaseLost { .. } | AccessError::ArenaFull) => {}
            Err(_) => self.pauses.failed(node, self.now_ns()),
        }
        done.is_ok()
    }

    /// Passes the first `bytes` bytes of a slot to `sink`. False: they cannot be read; `sink` may have got
    /// some of them.
    fn read_bytes(&self, slot: u32, bytes: usize, sink: &mut PageSink<'_>) -> bool {
        let Some((extent, offset)) = self.find(slot) else { return false };
        if self.core.read_now(&extent, offset, bytes, &mut *sink) {
            self.takes_round_trips.set(false);
            return true; // the node was not asked
        }
        let Ok(buffer) = self.core.buffer(bytes) else { return false };
        if !self.may_ask(&extent) {
            return false;
        }
        let page = block_on(self.core.endpoint(), self.ask_node(&extent, offset, buffer));
        let Some(page) = page else { return false };
        // Over shared memory, the first read attaches the region, and later ones do not ask the node.
        self.takes_round_trips.set(!self.core.read_now(&extent, offset, WORD_BYTES as usize, |_, _| ()));
        sink(0, &page);
        true
    }

    /// Reads a part of a slot from its node. `None`: it cannot be read.
    async fn ask_node(&self, extent: &Extent, offset: u64, buffer: ArenaBuf) -> Option<ArenaBuf> {
        let (page, read) = self.core.read(extent, offset, buffer).await;
        self.note(extent, &read).then_some(page)
    }

    /// Drops the oldest fetched pages, so that there is room for so many new ones.
    fn make_room(&self, pages: usize) {
        let mut fetched = self.fetched.borrow_mut();
        let most = (FETCHED_MAX as usize).saturating_sub(pages);
        let surplus = fetched.len().saturating_sub(most);
        fetched.drain(..surplus);
    }

    async fn write_page(&self, slot: u32, page: &[u8]) -> bool {
        if page.len() != PAGE_BYTES {
            return false;
        }
        let Some((extent, offset)) = self.find(slot) else { return false };
        let Ok(mut buffer) = self.core.buffer(PAGE_BYTES) else { return false };
        if !self.may_ask(&extent) {
            return false;
        }
        buffer.copy_from_slice(page);
        let (_, written) = self.core.write(&extent, offset, buffer).await;
        self.note(&extent, &written)
    }

    /// Closes connections to lost nodes, and detaches regions that have ended. Idle threads call this now and
    /// then.
    pub async fn let_go(&self) {
        self.core.let_go().await;
    }
}

impl Slots for FarSlots {
    fn read(&self, slot: u32, sink: &mut PageSink<'_>) -> bool {
        self.read_bytes(slot, PAGE_BYTES, sink)
    }

    fn gains_by_fetching(&self) -> bool {
        self.takes_round_trips.get()
    }

    fn fetch(&self, fetches: &[Fetch]) {
        self.make_room(fetches.len());
        let mut reads = Vec::with_capacity(fetches.len());
        for &fetch in fetches.iter().take(FETCHED_MAX as usize) {
            let Some((extent, offset)) = self.find(fetch.slot) else { continue };
            let Ok(buffer) = self.core.buffer(PAGE_BYTES) else { break };
            if !self.may_ask(&extent) {
                continue;
            }
            reads.push(async move { Some((fetch, self.ask_node(&extent, offset, buffer).await?)) });
        }
        let pages = block_on(self.core.endpoint(), join_all(reads));
        self.fetched.borrow_mut().extend(pages.into_iter().flatten());
    }

    fn read_fetched(&self, fetch: Fetch, sink: &mut PageSink<'_>) -> bool {
        let take = |fetched: &mut VecDeque<(Fetch, ArenaBuf)>| {
            let at = fetched.iter().position(|(found, _)| *found == fetch)?;
            fetched.remove(at)
        };
        // Not borrowed any more when `sink` runs.
        let Some((_, page)) = take(&mut self.fetched.borrow_mut()) else { return false };
        sink(0, &page);
        true
    }

    fn read_head(&self, slot: u32) -> Option<[u8; 8]> {
        let mut head = Vec::new();
        self.read_bytes(slot, 8, &mut collect_into(&mut head)).then_some(())?;
        head.first_chunk().copied()
    }

    fn write(&self, slot: u32, page: &[u8]) -> bool {
        block_on(self.core.endpoint(), self.write_page(slot, page))
    }
}

#[cfg(test)]
mod tests {
    use farpool_fabric::SharedMemory;

    use super::*;

    #[test]
    fn the_table_has_a_word_for_each_group_and_the_terms_behind_them() {
        let slots = 4 * SLOTS_PER_EXTENT;
        let memory = SharedMemory::create("far-table", FarTable::bytes(slots)).unwrap();
        let table = FarTable::new(memory.mapping().clone(), slots).unwrap();
        table.set_extent(3, Some(7));
        assert_eq!(memory.mapping().load(3 * WORD_BYTES), Ok(8));
        assert_eq!([2, 3, 4].map(|group| table.extent(group)), [None, Some(7), None]);
        table.set_extent(3, None);
        assert_eq!(table.extent(3), None);
        assert_eq!(FarTable::terms_at(table.groups), 4 * WORD_BYTES);
        assert!(FarTable::new(memory.mapping().clone(), slots + SLOTS_PER_EXTENT).is_none(), "too small");
        assert!(FarTable::new(memory.mapping().clone(), slots - 1).is_none(), "not whole groups");
    }
}
