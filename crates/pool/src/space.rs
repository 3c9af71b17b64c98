//! Which extents of the leased regions are free.
//!
//! A1. An extent is free, or belongs to one [`Extent`] value, or lies in a region that was removed.
//! A2. Consecutive places go to consecutive nodes, as far as they have room: this stripes a file.
//! A3. Fuller regions are preferred, so that others become empty and can go back to the pool.
//! A4. An extent on which a write may still land is not reused as long as its region is held.
//! A5. Regions of the overflow directory are used only if no far memory is free where it is wanted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use farpool_wire::control::Lease;
use farpool_wire::{NodeId, RegionId, RemoteAddr};
use rustix_futex_sync::Mutex;

use crate::keeping::Keeping;
use crate::overflow::{OVERFLOW_NODE, as_lease};
use crate::region::LeasedRegion;

/// Size of an extent, and of a file's stripe unit.
///
/// It is large enough that an 8 KiB or 128 KiB request touches one node, and that a gigabyte needs only 4,096
/// extents. It is small enough that the largest request (1 MiB) is spread over four extents, that the many
/// small spill files of a hash join waste little, and that a region of 64 MiB has room for 256 files.
pub const EXTENT_BYTES: u64 = 256 << 10;

/// Most numbers of an earlier process that are reused: only a damaged state has more.
const MAX_FREE_NUMBERS: usize = 1 << 20;

/// An extent in use. Dropping it makes it free, so every operation on it keeps a reference.
#[derive(Debug)]
pub struct Extent {
    region: Arc<LeasedRegion>,
    place: u32,
    number: u64,
    space: Weak<Mutex<Space>>,
    in_doubt: AtomicBool,
    /// The journal in which a doubt is recorded, and the number of the region.
    kept: Option<(Keeping, u64)>,
}

impl Extent {
    /// The region it lies in.
    pub fn region(&self) -> &Arc<LeasedRegion> {
        &self.region
    }

    /// The remote address of its byte `offset`.
    pub fn address(&self, offset: u64) -> RemoteAddr {
        debug_assert!(offset < EXTENT_BYTES);
        RemoteAddr { region: self.region.id, offset: self.place as u64 * EXTENT_BYTES + offset }
    }

    /// Whether an in-flight write, whose outcome is unknown, may still land here. The mark is permanent: the
    /// extent's data must be moved elsewhere, and its place is not used again under this lease.
    pub fn is_in_doubt(&self) -> bool {
        // Acquire: pairs with the release half of the swap in `doubt`. A thread that finds a block's lock
        // released also sees the doubt.
        self.in_doubt.load(Ordering::Acquire)
    }

    /// An extent that another holder has taken and keeps, as a direct client (called *guest* in the code)
    /// sees it: dropping it gives nothing back.
    pub fn of_guest(region: Arc<LeasedRegion>, place: u32, number: u64) -> Self {
        Extent { region, place, number, space: Weak::new(), in_doubt: AtomicBool::new(false), kept: None }
    }

    /// Records that an in-flight write, whose outcome is unknown, may still land here.
    pub fn doubt(&self) {
        let before = self.in_doubt.swap(true, Ordering::AcqRel);
        if !before && let Some((keeping, number)) = &self.kept {
            keeping.doubted(*number, self.place);
        }
    }

    /// A small number that no other extent of the process has at the same time: an index for tables kept
    /// beside the extents.
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        let in_doubt = self.is_in_doubt();
        if in_doubt && !self.region.is_overflow() {
            return; // a write that may still land must not hit data of another holder
        }
        if let Some(space) = self.space.upgrade() {
            match in_doubt {
                true => space.lock().give_up_overflow(&self.region),
                false => space.lock().give_back(&self.region, self.place),
            }
        }
    }
}

/// On which nodes an extent may be taken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Where {
    /// On any node.
    Anywhere,
    /// On none of these nodes: extents that must not be lost together with this one lie there.
    NotOn(Vec<NodeId>),
    /// Only on this node.
    On(NodeId),
}

impl Where {
    /// Whether the extent may lie on `node`.
    pub fn allows(&self, node: NodeId) -> bool {
        match self {
            Where::Anywhere => true,
            Where::NotOn(nodes) => !nodes.contains(&node),
            Where::On(only) => *only == node,
        }
    }

    /// Whether the extent may lie in the overflow directory ([`OVERFLOW_NODE`]).
    pub(crate) fn allows_overflow(&self) -> bool {
        !matches!(self, Where::On(_)) && self.allows(OVERFLOW_NODE)
    }
}

/// The extents of all regions held.
#[derive(Debug, Default)]
pub(crate) struct Space {
    nodes: BTreeMap<NodeId, Vec<RegionSpace>>,
    /// Regions of the overflow directory.
    overflow: Vec<RegionSpace>,
    /// Numbers of removed regions, to be reused. A region's number times its extents is the number of its
    /// first extent.
    free_numbers: Vec<u64>,
    next_number: u64,
    /// Free extents in far memory.
    free: u64,
    /// The position of the rotation over nodes, used when the wanted node has no room.
    hand: u64,
    /// Extents of an earlier process on which one of its writes may still land, until they are taken.
    doubted: BTreeSet<u64>,
    /// Regions look empty until the holders of extents there have taken them again.
    is_adopting: bool,
    /// The journal in which changes are recorded, if there is one.
    keeping: Option<Keeping>,
}

#[derive(Debug)]
struct RegionSpace {
    region: Arc<LeasedRegion>,
    number: u64,
    extents: u32,
    /// Free places; the last is taken first.
    free: Vec<u32>,
    /// Since when the region is empty, by the pool's clock.
    empty_since_ms: Option<u64>,
    /// The region is being taken back: no extent is taken here any more, and its free extents are not
    /// counted.
    leaving: bool,
    /// Extents that nobody holds and that are not free, because a write in doubt may still land there. Only
    /// counted in the overflow directory.
    given_up: u32,
}

impl RegionSpace {
    fn new(number: u64, region: Arc<LeasedRegion>, extents: u32, free: Vec<u32>, now_ms: u64) -> Self {
        let empty_since_ms = Some(now_ms);
        RegionSpace { region, number, extents, free, empty_since_ms, leaving: false, given_up: 0 }
    }

    /// Whether nobody holds an extent there.
    fn is_empty(&self) -> bool {
        self.free.len() + self.given_up as usize == self.extents as usize
    }

    /// Whether nobody has held an extent there for `linger_ms`.
    fn is_idle(&mut self, now_ms: u64, linger_ms: u64) -> bool {
        self.is_empty() && now_ms.saturating_sub(*self.empty_since_ms.get_or_insert(now_ms)) >= linger_ms
    }
}

impl Space {
    /// An empty space whose changes are recorded in a journal, if there is one.
    pub(crate) fn keeping(keeping: Option<Keeping>) -> Self {
        Space { keeping, ..Space::default() }
    }

    /// Adds a region that was just leased, and returns its number.
    pub(crate) fn add(
        &mut self,
        region: Arc<LeasedRegion>,
        region_bytes: u64,
        now_ms: u64,
        lease: &Lease,
    ) -> u64 {
        let extents = (region_bytes / EXTENT_BYTES) as u32;
        let number = self.take_number();
        if let Some(keeping) = &self.keeping {
            keeping.held(number, lease);
        }
        self.insert(number, region, extents, (0..extents).rev().collect(), now_ms);
        number
    }

    fn take_number(&mut self) -> u64 {
        self.free_numbers.pop().unwrap_or_else(|| {
            self.next_number += 1;
            self.next_number - 1
        })
    }

    /// Adds a region of the overflow directory.
    pub(crate) fn add_overflow(&mut self, region: Arc<LeasedRegion>, region_bytes: u64, now_ms: u64) {
        let extents = (region_bytes / EXTENT_BYTES) as u32;
        let number = self.take_number();
        if let Some(keeping) = &self.keeping {
            keeping.held(number, &as_lease(region.id.index));
        }
        let free = (0..extents).rev().collect();
        self.overflow.push(RegionSpace::new(number, region, extents, free, now_ms));
    }

    /// Adds a region that an earlier process had under this number. The places in `doubts` are not free.
    pub(crate) fn adopt(
        &mut self,
        number: u64,
        region: Arc<LeasedRegion>,
        region_bytes: u64,
        now_ms: u64,
        doubts: &BTreeSet<u32>,
    ) {
        let extents = (region_bytes / EXTENT_BYTES) as u32;
        let doubts = doubts.range(..extents); // larger ones would be places of another region
        let doubts: BTreeSet<u32> = doubts.copied().collect();
        let free: Vec<u32> = (0..extents).rev().filter(|place| !doubts.contains(place)).collect();
        if region.is_overflow() {
            let given_up = doubts.len() as u32;
            let space = RegionSpace::new(number, region, extents, free, now_ms);
            self.overflow.push(RegionSpace { given_up, ..space });
        } else {
            self.insert(number, region, extents, free, now_ms);
        }
        self.doubted.extend(doubts.iter().map(|place| number * u64::from(extents) + u64::from(*place)));
    }

    fn insert(&mut self, number: u64, region: Arc<LeasedRegion>, extents: u32, free: Vec<u32>, now_ms: u64) {
        self.free += free.len() as u64;
        let space = RegionSpace::new(number, region, extents, free, now_ms);
        self.nodes.entry(space.region.id.node).or_default().push(space);
    }

    /// Begins an adoption: these numbers belong to regions of an earlier process. All other numbers below the
    /// last of them are free.
    pub(crate) fn numbers_in_use(&mut self, numbers: impl Iterator<Item = u64>) {
        self.is_adopting = true;
        let numbers: BTreeSet<u64> = numbers.collect();
        self.next_number = numbers.last().map_or(0, |last| last + 1);
        let free = (0..self.next_number).rev().filter(|number| !numbers.contains(number));
        self.free_numbers = free.take(MAX_FREE_NUMBERS).collect();
    }

    /// Ends the adoption: the holders of an earlier process's extents have taken them.
    pub(crate) fn mark_adopted(&mut self) {
        self.is_adopting = false;
    }

    /// Frees a number of an earlier process that has no region any more.
    pub(crate) fn free_number(&mut self, number: u64) {
        self.free_numbers.push(number);
        if let Some(keeping) = &self.keeping {
            keeping.free(number);
        }
    }

    /// Records that the earlier process's region of this number is lost.
    pub(crate) fn gone(&self, number: u64) {
        if let Some(keeping) = &self.keeping {
            keeping.gone(number);
        }
    }

    /// Takes the extent at a place, for the caller that had it. An extent in doubt stays in doubt.
    pub(crate) fn take_at(&mut self, region: u64, place: u32, space: &Arc<Mutex<Space>>) -> Option<Extent> {
        let mut all = self.nodes.values_mut().flatten().chain(&mut self.overflow);
        let held = all.find(|held| held.number == region)?;
        let number = region * u64::from(held.extents) + u64::from(place);
        let in_doubt = self.doubted.remove(&number);
        let is_overflow = held.region.is_overflow();
        if in_doubt {
            held.given_up -= u32::from(is_overflow); // until its holder drops it again
        } else {
            let at = held.free.iter().position(|free| *free == place)?;
            held.free.remove(at);
            self.free -= u64::from(!held.leaving && !is_overflow);
        }
        held.empty_since_ms = None;
        Some(Extent {
            region: held.region.clone(),
            place,
            number,
            space: Arc::downgrade(space),
            in_doubt: AtomicBool::new(in_doubt),
            kept: self.keeping.clone().map(|keeping| (keeping, region)),
        })
    }

    /// Takes an extent on the node that the rotation assigns to `place`, or on another that has room, but
    /// only on nodes that `within` allows. If there is none, takes one in the overflow directory.
    pub(crate) fn take(&mut self, place: u64, within: &Where, space: &Arc<Mutex<Space>>) -> Option<Extent> {
        self.take_far(place, within, space).or_else(|| {
            let overflow = within.allows_overflow().then_some(&mut self.overflow)?;
            Self::take_from(overflow, space, &self.keeping)
        })
    }

    /// Like [`take`](Self::take), but only in far memory.
    pub(crate) fn take_far(
        &mut self,
        place: u64,
        within: &Where,
        space: &Arc<Mutex<Space>>,
    ) -> Option<Extent> {
        if self.free == 0 {
            return None;
        }
        let nodes = self.nodes.len() as u64;
        for step in 0..nodes {
            let start = if step == 0 { place } else { self.hand };
            if step > 0 {
                self.hand = self.hand.wrapping_add(1);
            }
            let (node, regions) =
                self.nodes.iter_mut().nth((start % nodes) as usize).expect("taken modulo their number");
            if within.allows(*node)
                && let Some(extent) = Self::take_from(regions, space, &self.keeping)
            {
                self.free -= 1;
                return Some(extent);
            }
        }
        // The rotation may have missed a node that has room.
        let mut allowed = self.nodes.iter_mut().filter(|(node, _)| within.allows(**node));
        let extent = allowed.find_map(|(_, regions)| Self::take_from(regions, space, &self.keeping))?;
        self.free -= 1;
        Some(extent)
    }

    fn take_from(
        regions: &mut [RegionSpace],
        space: &Arc<Mutex<Space>>,
        keeping: &Option<Keeping>,
    ) -> Option<Extent> {
        let fullest = regions
            .iter_mut()
            .filter(|region| !region.free.is_empty() && !region.leaving)
            .min_by_key(|region| region.free.len())?;
        let place = fullest.free.pop()?;
        fullest.empty_since_ms = None;
        Some(Extent {
            region: fullest.region.clone(),
            place,
            number: fullest.number * fullest.extents as u64 + place as u64,
            space: Arc::downgrade(space),
            in_doubt: AtomicBool::new(false),
            kept: keeping.clone().map(|keeping| (keeping, fullest.number)),
        })
    }

    fn in_overflow(&mut self, region: &Arc<LeasedRegion>) -> Option<&mut RegionSpace> {
        self.overflow.iter_mut().find(|held| Arc::ptr_eq(&held.region, region))
    }

    /// An extent of the overflow directory has no holder any more, and a write in doubt may still land there.
    fn give_up_overflow(&mut self, region: &Arc<LeasedRegion>) {
        if let Some(held) = self.in_overflow(region) {
            held.given_up += 1;
        }
    }

    fn give_back(&mut self, region: &Arc<LeasedRegion>, place: u32) {
        if region.is_overflow() {
            if let Some(held) = self.in_overflow(region) {
                held.free.push(place);
            }
            return;
        }
        let regions = self.nodes.get_mut(&region.id.node);
        let held =
            regions.and_then(|regions| regions.iter_mut().find(|held| Arc::ptr_eq(&held.region, region)));
        if let Some(held) = held {
            held.free.push(place);
            self.free += !held.leaving as u64;
        }
    }

    /// Removes the regions for which `ended` is true, with their free extents. Extents in use stay with their
    /// holders.
    pub(crate) fn remove(&mut self, mut ended: impl FnMut(&LeasedRegion) -> bool) -> Vec<Arc<LeasedRegion>> {
        let mut removed = Vec::new();
        for regions in self.nodes.values_mut() {
            for held in regions.extract_if(.., |held| ended(&held.region)) {
                if !held.leaving {
                    self.free -= held.free.len() as u64;
                }
                // A number whose extents are still in use is not reused, because tables kept beside the
                // extents use it. During an adoption no number is: it is unknown which extents are in use.
                let is_unused = !self.is_adopting && held.free.len() == held.extents as usize;
                if is_unused {
                    self.free_numbers.push(held.number);
                }
                match &self.keeping {
                    Some(keeping) if is_unused => keeping.free(held.number),
                    Some(keeping) => keeping.gone(held.number),
                    None => {}
                }
                removed.push(held.region);
            }
        }
        self.nodes.retain(|_, regions| !regions.is_empty());
        removed
    }

    /// Takes no extents of a region any more.
    pub(crate) fn leave(&mut self, region: RegionId) {
        let regions = self.nodes.get_mut(&region.node).into_iter().flatten();
        for held in regions.filter(|held| held.region.id == region && !held.leaving) {
            held.leaving = true;
            self.free -= held.free.len() as u64;
        }
    }

    /// Removes regions that were empty for `linger_ms`, as long as `keep_free` extents stay free, and empty
    /// regions that are being taken back.
    pub(crate) fn shrink(&mut self, now_ms: u64, linger_ms: u64, keep_free: u64) -> Vec<Arc<LeasedRegion>> {
        if self.is_adopting {
            return Vec::new();
        }
        let mut idle: Vec<(RegionId, u64)> = Vec::new();
        let mut free = self.free;
        for held in self.nodes.values_mut().flatten() {
            if held.free.len() < held.extents as usize {
                continue;
            }
            if held.leaving {
                idle.push((held.region.id, held.region.epoch.0));
                continue;
            }
            if held.is_idle(now_ms, linger_ms) && free >= keep_free + held.extents as u64 {
                free -= held.extents as u64;
                idle.push((held.region.id, held.region.epoch.0));
            }
        }
        if idle.is_empty() {
            return Vec::new();
        }
        self.remove(|region| idle.contains(&(region.id, region.epoch.0)))
    }

    /// Removes regions of the overflow directory that were empty for `linger_ms`. Returns them, so that the
    /// caller discards them outside of locks.
    pub(crate) fn shrink_overflow(&mut self, now_ms: u64, linger_ms: u64) -> Vec<Arc<LeasedRegion>> {
        if self.is_adopting {
            return Vec::new();
        }
        let idle = self.overflow.extract_if(.., |held| held.is_idle(now_ms, linger_ms));
        let (numbers, regions): (Vec<u64>, Vec<_>) = idle.map(|held| (held.number, held.region)).unzip();
        numbers.into_iter().for_each(|number| self.free_number(number));
        regions
    }

    /// Whether no extent of the regions held is in use.
    pub(crate) fn is_unused(&self) -> bool {
        self.nodes.values().flatten().chain(&self.overflow).all(RegionSpace::is_empty)
    }

    /// Extents of far memory that can be taken.
    pub(crate) fn free(&self) -> u64 {
        self.free
    }

    /// Extents of the overflow directory that can be taken.
    pub(crate) fn free_in_overflow(&self) -> u64 {
        self.overflow.iter().map(|held| held.free.len() as u64).sum()
    }

    /// Extents of the overflow directory that are in use.
    pub(crate) fn used_in_overflow(&self) -> u64 {
        let used = |held: &RegionSpace| u64::from(held.extents - held.given_up) - held.free.len() as u64;
        self.overflow.iter().map(used).sum()
    }

    /// Regions held, with their numbers.
    pub(crate) fn numbered(&self) -> impl Iterator<Item = (u64, &Arc<LeasedRegion>)> {
        self.nodes.values().flatten().chain(&self.overflow).map(|held| (held.number, &held.region))
    }

    /// Leased regions held.
    pub(crate) fn regions(&self) -> impl Iterator<Item = &Arc<LeasedRegion>> {
        self.nodes.values().flatten().map(|held| &held.region)
    }
}

#[cfg(test)]
mod tests;
