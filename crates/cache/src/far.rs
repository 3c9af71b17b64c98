//! Slots in far memory. The owner of the cache leases regions and says where slots lie. Other processes of
//! its host read and write the slots without asking it (`farpool_pool::direct`).
//!
//! F1. Slots lie in groups, each in an extent of its own. A table that all processes share has the number of
//!     each group's extent, and until when regions may be used.
//! F2. Memory that is taken back or lost needs no copy, because the disk has all pages. The owner takes the
//!     groups out of the table at once, and drops their extents. An operation that is in progress there fails
//!     at the node, or its write lands in memory that nobody reads.
//! F3. A group that has lost its extent gets another one when the pool has room.

use std::ops::Range;
use std::sync::Arc;

use farpool_fabric::{Endpoint, Mapping, block_on};
use farpool_pool::direct::{AskOwner, GuestRegions, Terms};
use farpool_pool::{EXTENT_BYTES, Extent, SessionCore, Stock};

use crate::shared::Slots;

/// Bytes of a page: those of PostgreSQL's.
pub const PAGE_BYTES: usize = 8192;

/// Slots of a group.
pub const SLOTS_PER_EXTENT: u32 = (EXTENT_BYTES / PAGE_BYTES as u64) as u32;

/// Most numbers of regions. A region's number is used once more each time the region is lost, so this is far
/// more than a pool has. The table is sparse.
const MAX_REGIONS: u64 = 1 << 20;

const WORD_BYTES: u64 = 8;

/// Where the slots lie: a table in shared memory, zero at the beginning.
#[derive(Clone)]
pub struct FarTable {
    memory: Arc<Mapping>,
    groups: u32,
}

/// The reason for which accesses succeed: [`FarTable::new`] has checked the bounds.
const WITHIN: &str = "the table lies within its memory";

impl FarTable {
    /// The shared memory that a table for so many slots takes.
    pub fn bytes(slots: u32) -> u64 {
        Self::terms_at(slots / SLOTS_PER_EXTENT) + Terms::bytes(MAX_REGIONS)
    }

    /// A table for so many slots, rounded down to whole groups. `None`: the memory is too small.
    pub fn new(memory: Arc<Mapping>, slots: u32) -> Option<FarTable> {
        memory.load(Self::bytes(slots) - WORD_BYTES).ok()?;
        Some(FarTable { memory, groups: slots / SLOTS_PER_EXTENT })
    }

    fn terms_at(groups: u32) -> u64 {
        u64::from(groups) * WORD_BYTES
    }

    fn terms(&self) -> Terms {
        Terms::new(self.memory.clone(), Self::terms_at(self.groups), MAX_REGIONS)
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
    /// By group.
    extents: Vec<Option<Extent>>,
}

impl FarMemory {
    /// No slot has memory yet.
    pub fn new(stock: Arc<Stock>, table: FarTable) -> FarMemory {
        let extents = (0..table.groups).map(|_| None).collect();
        (0..table.groups).for_each(|group| table.set_extent(group, None));
        FarMemory { stock, table, extents }
    }

    /// Whether every group has memory.
    pub fn is_complete(&self) -> bool {
        self.extents.iter().all(Option::is_some)
    }

    /// Gives a group memory that has none. Returns its slots, which may then be restored. `None`: all groups
    /// have memory, or the pool has no room now. Waits as long as the pool's broker takes to answer.
    pub async fn grow(&mut self) -> Option<Range<u32>> {
        let group = self.extents.iter().position(Option::is_none)? as u32;
        let extent = self.stock.take_extent(u64::from(group)).await.ok()?;
        self.table.terms().publish(self.region_of(&extent), extent.region());
        self.table.set_extent(group, Some(extent.number()));
        self.extents[group as usize] = Some(extent);
        Some(slots_of(group))
    }

    /// Tells callers until when they may use regions, and drops the memory that is being taken back or has
    /// ended. Returns the slots without memory, which must be withdrawn. Call it several times in the term
    /// of a lease.
    pub fn update(&mut self) -> Vec<Range<u32>> {
        for held in self.stock.numbered_regions() {
            self.table.terms().publish(held.number, &held.region);
        }
        let is_gone = |extent: &mut Extent| extent.region().is_leaving() || extent.region().has_ended();
        let mut gone = Vec::new();
        for (group, held) in (0..).zip(&mut self.extents) {
            if held.take_if(is_gone).is_some() {
                self.table.set_extent(group, None);
                gone.push(slots_of(group));
            }
        }
        gone
    }

    fn region_of(&self, extent: &Extent) -> u64 {
        extent.number() / (self.stock.region_bytes() / EXTENT_BYTES)
    }
}

/// What one thread of a process needs to read and write slots.
pub struct FarSlots {
    core: SessionCore,
    table: FarTable,
    regions: Arc<GuestRegions>,
}

impl FarSlots {
    /// The regions of a process, which its threads share. `None`: regions have at least one extent.
    pub fn regions(
        table: &FarTable,
        extents_per_region: u64,
        clock: Arc<dyn farpool_fabric::Clock + Send + Sync>,
        ask: AskOwner,
    ) -> Option<Arc<GuestRegions>> {
        GuestRegions::new(table.terms(), extents_per_region, clock, ask).map(Arc::new)
    }

    /// The slots in this table, reached through this endpoint.
    pub fn new(table: FarTable, regions: Arc<GuestRegions>, endpoint: Endpoint) -> FarSlots {
        FarSlots { core: SessionCore::new(regions.clone(), endpoint), table, regions }
    }

    /// The extent in which a slot lies, and where in it.
    fn find(&self, slot: u32) -> Option<(Extent, u64)> {
        let extent = self.regions.extent(self.table.extent(slot / SLOTS_PER_EXTENT)?)?;
        Some((extent, u64::from(slot % SLOTS_PER_EXTENT) * PAGE_BYTES as u64))
    }

    /// As [`Ground::read_slot`](crate::Ground::read_slot).
    pub async fn read_page(&self, slot: u32, to: &mut [u8]) -> bool {
        let Some((extent, offset)) = self.find(slot) else { return false };
        let Ok(buffer) = self.core.buffer(PAGE_BYTES) else { return false };
        let (page, read) = self.core.read(&extent, offset, buffer).await;
        let is_read = read.is_ok() && to.len() == PAGE_BYTES;
        if is_read {
            to.copy_from_slice(&page);
        }
        is_read
    }

    /// As [`Ground::write_slot`](crate::Ground::write_slot).
    pub async fn write_page(&self, slot: u32, page: &[u8]) -> bool {
        let Some((extent, offset)) = self.find(slot) else { return false };
        let Ok(mut buffer) = self.core.buffer(PAGE_BYTES) else { return false };
        if page.len() != PAGE_BYTES {
            return false;
        }
        buffer.copy_from_slice(page);
        self.core.write(&extent, offset, buffer).await.1.is_ok()
    }

    /// Detaches regions that have ended. Long-lived threads call this now and then.
    pub async fn let_go(&self) {
        self.core.let_go().await;
    }
}

impl Slots for FarSlots {
    fn read(&self, slot: u32, to: &mut [u8]) -> bool {
        block_on(self.core.endpoint(), self.read_page(slot, to))
    }

    fn write(&self, slot: u32, page: &[u8]) -> bool {
        block_on(self.core.endpoint(), self.write_page(slot, page))
    }
}
