//! Which extents of the leased regions are free.
//!
//! A1. An extent is free, or belongs to one [`Extent`] value, or lies in a region that was removed.
//! A2. Consecutive places go to consecutive nodes, as far as they have room: this stripes a file.
//! A3. Fuller regions are preferred, so that others become empty and can go back to the pool.
//! A4. An extent on which a write may still land is not reused as long as its region is held.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use farpool_wire::control::Lease;
use farpool_wire::{NodeId, RegionId, RemoteAddr};
use parking_lot::Mutex;

use crate::keeping::Keeping;
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
        if self.is_in_doubt() {
            return; // a write that may still land must not hit data of another holder
        }
        if let Some(space) = self.space.upgrade() {
            space.lock().give_back(&self.region, self.place);
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
}

/// The extents of all regions held.
#[derive(Debug, Default)]
pub(crate) struct Space {
    nodes: BTreeMap<NodeId, Vec<RegionSpace>>,
    /// Numbers of removed regions, to be reused. A region's number times its extents is the number of its
    /// first extent.
    free_numbers: Vec<u64>,
    next_number: u64,
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
        let number = self.free_numbers.pop().unwrap_or_else(|| {
            self.next_number += 1;
            self.next_number - 1
        });
        if let Some(keeping) = &self.keeping {
            keeping.held(number, lease);
        }
        self.insert(number, region, extents, (0..extents).rev().collect(), now_ms);
        number
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
        let free = (0..extents).rev().filter(|place| !doubts.contains(place)).collect();
        self.insert(number, region, extents, free, now_ms);
        self.doubted.extend(doubts.iter().map(|place| number * u64::from(extents) + u64::from(*place)));
    }

    fn insert(&mut self, number: u64, region: Arc<LeasedRegion>, extents: u32, free: Vec<u32>, now_ms: u64) {
        self.free += free.len() as u64;
        self.nodes.entry(region.id.node).or_default().push(RegionSpace {
            region,
            number,
            extents,
            free,
            empty_since_ms: Some(now_ms),
            leaving: false,
        });
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
        let held = self.nodes.values_mut().flatten().find(|held| held.number == region)?;
        let number = region * u64::from(held.extents) + u64::from(place);
        let in_doubt = self.doubted.remove(&number);
        if !in_doubt {
            let at = held.free.iter().position(|free| *free == place)?;
            held.free.remove(at);
            self.free -= !held.leaving as u64;
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
    /// only on nodes that `within` allows.
    pub(crate) fn take(&mut self, place: u64, within: &Where, space: &Arc<Mutex<Space>>) -> Option<Extent> {
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

    fn give_back(&mut self, region: &Arc<LeasedRegion>, place: u32) {
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
            let since = *held.empty_since_ms.get_or_insert(now_ms);
            if now_ms.saturating_sub(since) >= linger_ms && free >= keep_free + held.extents as u64 {
                free -= held.extents as u64;
                idle.push((held.region.id, held.region.epoch.0));
            }
        }
        if idle.is_empty() {
            return Vec::new();
        }
        self.remove(|region| idle.contains(&(region.id, region.epoch.0)))
    }

    /// Whether no extent of the regions held is in use.
    pub(crate) fn is_unused(&self) -> bool {
        self.nodes.values().flatten().all(|held| held.free.len() == held.extents as usize)
    }

    /// Extents that can be taken.
    pub(crate) fn free(&self) -> u64 {
        self.free
    }

    /// Regions held, with their numbers.
    pub(crate) fn numbered(&self) -> impl Iterator<Item = (u64, &Arc<LeasedRegion>)> {
        self.nodes.values().flatten().map(|held| (held.number, &held.region))
    }

    /// Regions held.
    pub(crate) fn regions(&self) -> impl Iterator<Item = &Arc<LeasedRegion>> {
        self.nodes.values().flatten().map(|held| &held.region)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keeping::regions_of;
    use crate::region::NodeState;
    use farpool_fabric::Peer;
    use farpool_keep::MemoryJournal;
    use farpool_wire::control::NodeAddress;
    use farpool_wire::{AccessKey, Epoch};
    use proptest::prelude::*;
    use std::collections::HashSet;

    const REGION_BYTES: u64 = 4 * EXTENT_BYTES;

    fn region(node: u64, index: u32) -> Arc<LeasedRegion> {
        let peer = Peer { node: NodeId(node), tcp: None, verbs: None, shm_socket: None };
        let state = Arc::new(NodeState::new(peer, String::new()));
        let id = RegionId { node: NodeId(node), index };
        Arc::new(LeasedRegion::new(id, Epoch(1), AccessKey::from_bytes([0; 16]), state, u64::MAX))
    }

    fn space(nodes: u64, regions: u32) -> Arc<Mutex<Space>> {
        let space = Arc::new(Mutex::new(Space::default()));
        for node in 0..nodes {
            for index in 0..regions {
                space.lock().add(region(node, index), REGION_BYTES, 0, &Lease::default());
            }
        }
        space
    }

    fn take(space: &Arc<Mutex<Space>>, place: u64) -> Option<Extent> {
        space.lock().take(place, &Where::Anywhere, space)
    }

    #[test]
    fn consecutive_places_go_to_consecutive_nodes() {
        let space = space(3, 2);
        let extents: Vec<_> = (0..6).map(|place| take(&space, place).unwrap()).collect();
        let nodes: Vec<u64> = extents.iter().map(|extent| extent.region().id.node.0).collect();
        assert_eq!(nodes, [0, 1, 2, 0, 1, 2]);
        assert_eq!(extents[5].address(5).offset, EXTENT_BYTES + 5, "the second of its region");
    }

    #[test]
    fn a_node_to_avoid_gives_nothing_though_it_alone_has_room() {
        let space = space(2, 1);
        let not_on_0 = Where::NotOn(vec![NodeId(0)]);
        let take = |within: &Where| space.lock().take(0, within, &space);
        let all: Vec<_> = (0..4).map(|_| take(&not_on_0).unwrap()).collect();
        assert!(all.iter().all(|extent| extent.region().id.node == NodeId(1)));
        assert!(take(&not_on_0).is_none() && take(&Where::On(NodeId(1))).is_none());
        assert_eq!(take(&Where::On(NodeId(0))).unwrap().region().id.node, NodeId(0));
    }

    #[test]
    fn a_full_node_leaves_its_share_to_the_others() {
        let space = space(2, 1);
        let all: Vec<_> = (0..8).map(|_| take(&space, 0).unwrap()).collect();
        assert!(take(&space, 0).is_none());
        drop(all);
        assert_eq!(space.lock().free(), 8);
    }

    #[test]
    fn empty_regions_are_let_go_after_a_while_and_used_ones_stay() {
        let space = space(1, 3);
        let kept = take(&space, 0).unwrap();
        assert!(space.lock().shrink(1_000, 2_000, 0).is_empty());
        let gone = space.lock().shrink(2_000, 2_000, 4);
        assert_eq!(gone.len(), 1, "four free extents are kept");
        assert!(!gone.iter().any(|region| Arc::ptr_eq(region, kept.region())));
        drop(kept);
        assert_eq!(space.lock().shrink(2_100, 2_000, 4).len(), 1, "the region that was never used");
        assert_eq!(space.lock().shrink(2_200, 2_000, 0).len(), 0, "the other has only just become empty");
        assert_eq!(space.lock().shrink(4_200, 2_000, 0).len(), 1);
    }

    #[test]
    fn a_region_to_leave_gets_nothing_new_and_goes_as_soon_as_it_is_empty() {
        let space = space(1, 2);
        let kept = take(&space, 0).unwrap();
        space.lock().leave(kept.region().id);
        assert_eq!(space.lock().free(), 4);
        let others: Vec<_> = (0..4).map(|_| take(&space, 0).unwrap()).collect();
        assert!(others.iter().all(|extent| extent.region().id != kept.region().id));
        assert!(take(&space, 0).is_none());
        assert!(space.lock().shrink(1, 2_000, 0).is_empty());
        drop(kept);
        assert_eq!(space.lock().free(), 0);
        assert_eq!(space.lock().shrink(1, 2_000, 100).len(), 1);
    }

    #[test]
    fn an_extent_on_which_a_write_may_still_land_is_not_used_again() {
        let space = space(1, 1);
        let (doubtful, other) = (take(&space, 0).unwrap(), take(&space, 0).unwrap());
        doubtful.doubt();
        drop((doubtful, other));
        assert_eq!(space.lock().free(), 3);
        assert!(space.lock().shrink(1_000_000, 0, 0).is_empty(), "nor is its region taken for empty");
        assert_eq!(space.lock().remove(|_| true).len(), 1, "but it can be removed");
    }

    #[test]
    fn extents_of_a_removed_region_do_not_become_free_again() {
        let space = space(1, 1);
        let extent = take(&space, 0).unwrap();
        assert_eq!(space.lock().remove(|_| true).len(), 1);
        drop(extent);
        assert_eq!(space.lock().free(), 0);
        assert!(take(&space, 0).is_none());
    }

    #[test]
    fn the_share_of_a_full_node_goes_to_the_others_in_turn() {
        let space = space(3, 1);
        let _full: Vec<_> =
            (0..4).map(|_| space.lock().take(0, &Where::On(NodeId(0)), &space).unwrap()).collect();
        let others: Vec<_> = (0..6).map(|_| take(&space, 0).unwrap()).collect();
        let nodes: Vec<u64> = others.iter().map(|extent| extent.region().id.node.0).collect();
        assert_eq!(nodes, [1, 2, 1, 2, 1, 2]);
    }

    #[test]
    fn all_idle_regions_go_at_once_but_those_whose_extents_are_to_stay_free() {
        let space = space(1, 4);
        assert_eq!(space.lock().shrink(2_000, 2_000, 4).len(), 3);
        assert_eq!(space.lock().free(), 4);
    }

    #[test]
    fn numbers_of_removed_regions_are_used_again_once_no_extent_of_theirs_is_in_use() {
        let space = space(1, 3);
        let number = |extent: &Extent| extent.number() / 4;
        let kept = take(&space, 0).unwrap();
        assert!(!space.lock().is_unused());
        assert_eq!(space.lock().remove(|_| true).len(), 3);
        let free: Vec<u64> = (0..3).filter(|of| *of != number(&kept)).collect();
        let mut anew: Vec<u64> = (0..3)
            .map(|index| space.lock().add(region(1, index), REGION_BYTES, 0, &Lease::default()))
            .collect();
        anew.sort_unstable();
        assert_eq!(anew, [free, vec![3]].concat());
        assert!(space.lock().is_unused());
    }

    #[test]
    fn regions_of_an_earlier_process_keep_their_numbers_and_doubted_places_their_holders() {
        let space = Arc::new(Mutex::new(Space::default()));
        space.lock().numbers_in_use([1, 3].into_iter());
        space.lock().adopt(1, region(0, 0), REGION_BYTES, 0, &BTreeSet::from([2, 9]));
        assert_eq!(space.lock().free(), 3, "place 9 is none of this region");
        let at = |number, place| space.lock().take_at(number, place, &space);
        let (doubted, sound) = (at(1, 2).unwrap(), at(1, 1).unwrap());
        assert_eq!((doubted.number(), doubted.is_in_doubt()), (6, true));
        assert_eq!((sound.number(), sound.is_in_doubt()), (5, false));
        assert_eq!(space.lock().free(), 2);
        assert!(at(1, 2).is_none() && at(1, 1).is_none() && at(2, 0).is_none(), "taken, or not there");
        space.lock().adopt(3, region(0, 1), REGION_BYTES, 0, &BTreeSet::new());
        assert!(space.lock().shrink(1_000_000, 0, 0).is_empty(), "its holders may still come");
        space.lock().mark_adopted();
        assert_eq!(space.lock().shrink(1_000_000, 0, 0).len(), 1);
        let add = |index| space.lock().add(region(5, index), REGION_BYTES, 0, &Lease::default());
        assert_eq!([add(0), add(1), add(2), add(3)], [3, 0, 2, 4]);
        space.lock().free_number(7);
        assert_eq!(add(4), 7);
    }

    #[test]
    fn a_region_lost_during_an_adoption_leaves_its_number_to_its_holders() {
        let space = Arc::new(Mutex::new(Space::default()));
        space.lock().numbers_in_use([0].into_iter());
        space.lock().adopt(0, region(0, 0), REGION_BYTES, 0, &BTreeSet::new());
        assert_eq!(space.lock().remove(|_| true).len(), 1);
        assert_eq!(space.lock().add(region(0, 1), REGION_BYTES, 0, &Lease::default()), 1);
    }

    #[test]
    fn taking_an_adopted_extent_of_a_region_to_leave_does_not_count_it_as_free() {
        let space = Arc::new(Mutex::new(Space::default()));
        space.lock().numbers_in_use([0].into_iter());
        space.lock().adopt(0, region(0, 0), REGION_BYTES, 0, &BTreeSet::new());
        space.lock().leave(RegionId { node: NodeId(0), index: 0 });
        let taken = space.lock().take_at(0, 3, &space).unwrap();
        assert_eq!(space.lock().free(), 0);
        drop(taken);
        assert_eq!(space.lock().free(), 0);
    }

    #[test]
    fn a_doubt_is_kept_once_for_a_later_process() {
        let journal = Arc::new(MemoryJournal::default());
        let keeping = Keeping::new(journal.clone());
        let space = Arc::new(Mutex::new(Space::keeping(Some(keeping))));
        let lease = Lease { address: Some(NodeAddress::default()), key: vec![1; 16], ..Lease::default() };
        let number = space.lock().add(region(0, 0), REGION_BYTES, 0, &lease);
        let extent = take(&space, 0).unwrap();
        extent.doubt();
        let doubts = |journal: &MemoryJournal| {
            regions_of(&journal.kept()).get(&number).map(|region| (region.is_gone, region.doubts.clone()))
        };
        assert_eq!(doubts(&journal), Some((false, BTreeSet::from([0]))));
        space.lock().remove(|_| true);
        assert_eq!(doubts(&journal), Some((true, BTreeSet::from([0]))), "its number is still in use");
        space.lock().free_number(number);
        assert_eq!(doubts(&journal), None);
        let unused = space.lock().add(region(0, 1), REGION_BYTES, 0, &lease);
        space.lock().remove(|_| true);
        assert!(!regions_of(&journal.kept()).contains_key(&unused), "its number may be used again");
        space.lock().add(region(0, 2), REGION_BYTES, 0, &lease);
        space.lock().gone(unused);
        assert!(regions_of(&journal.kept())[&unused].is_gone);
    }

    proptest! {
        #[test]
        fn no_extent_has_two_holders(steps in proptest::collection::vec((0u8..10, 0u64..7), 1..200)) {
            let space = space(2, 2);
            let mut taken: Vec<Extent> = Vec::new();
            let mut index = 10;
            for (step, place) in steps {
                match step {
                    0..=4 => taken.extend(take(&space, place)),
                    5..=6 if !taken.is_empty() => drop(taken.swap_remove(place as usize % taken.len())),
                    7 => space.lock().leave(RegionId { node: NodeId(place % 2), index: place as u32 % 2 }),
                    8 => {
                        index += 1;
                        space.lock().add(region(place % 3, index), REGION_BYTES, 0, &Lease::default());
                    }
                    _ => drop(space.lock().remove(|region| region.id.node.0 == place)),
                }
                let places: HashSet<_> = taken.iter().map(|extent| extent.address(0)).collect();
                let numbers: HashSet<_> = taken.iter().map(Extent::number).collect();
                prop_assert_eq!(places.len(), taken.len());
                prop_assert_eq!(numbers.len(), taken.len());
                let counted: u64 = {
                    let space = space.lock();
                    let usable = space.nodes.values().flatten().filter(|held| !held.leaving);
                    usable.map(|held| held.free.len() as u64).sum()
                };
                prop_assert_eq!(space.lock().free(), counted);
            }
        }
    }
}
