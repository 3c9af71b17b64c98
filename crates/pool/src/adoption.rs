//! Takes over what a killed process held: its owner's id, and those of its leases that still run.
//!
//! A1. The nodes say which leases still run. Regions of a node are not used until the node has answered.
//!     Regions of the overflow directory need no answer.
//! A2. A region that the earlier process recorded as lost stays lost.
//! A3. A place where a write of the earlier process may still land is given only to the holder that had it.
//! A4. Regions keep their numbers, because tables kept beside the extents use them. A number to which files
//!     refer is not given to another region.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use farpool_keep::Kept;
use farpool_wire::control::{NodeAddress, RenewResponse};
use farpool_wire::{NodeId, RegionId};

use crate::holder::{HeldLease, Renewal};
use crate::keeping::{KeptRegion, regions_of};
use crate::region::{LeasedRegion, NodeState};
use crate::space::{EXTENT_BYTES, Extent};
use crate::stock::Stock;

/// Leases of an earlier process that this one is taking over.
#[derive(Debug)]
pub struct Adoption {
    regions: BTreeMap<u64, KeptRegion>,
    /// Regions about which their nodes have not answered yet, with their numbers.
    open: BTreeMap<RegionId, u64>,
    /// The lost regions by number, as the holders of extents there see them.
    lost: BTreeMap<u64, Arc<LeasedRegion>>,
    taken: BTreeSet<u64>,
    extents_per_region: u64,
}

impl Adoption {
    /// Whether nodes have answered about every lease that may still run.
    pub fn is_answered(&self) -> bool {
        self.open.is_empty()
    }

    /// Whether an extent was taken already.
    pub fn is_taken(&self, extent: u64) -> bool {
        self.taken.contains(&extent)
    }

    fn overflow(&self) -> impl Iterator<Item = (u64, &KeptRegion)> {
        let regions = self.regions.iter().map(|(number, region)| (*number, region));
        regions.filter(|(_, region)| region.is_in_overflow())
    }

    /// The numbers of the extents of regions that are held now.
    pub fn extents_held(&self) -> impl Iterator<Item = u64> + '_ {
        let held = self.regions.keys().filter(|number| !self.lost.contains_key(number));
        held.flat_map(|number| number * self.extents_per_region..(number + 1) * self.extents_per_region)
    }
}

impl Stock {
    /// Begins to take over the regions in `kept`.
    pub fn begin_adoption(&self, kept: &Kept) -> Adoption {
        let extents_per_region = self.region_bytes() / EXTENT_BYTES;
        let regions = regions_of(kept);
        let mut open: BTreeMap<RegionId, u64> = BTreeMap::new();
        for (number, region) in regions.iter().filter(|(_, region)| region.is_lent()) {
            let later = |other: &u64| regions.get(other).is_none_or(|other| other.epoch < region.epoch);
            if open.get(&region.id).is_none_or(later) {
                open.insert(region.id, *number);
            }
        }
        self.space.lock().numbers_in_use(regions.keys().copied());
        Adoption { regions, open, lost: BTreeMap::new(), taken: BTreeSet::new(), extents_per_region }
    }

    /// The requests to nodes, with at most `most` leases in each.
    pub fn adoption_questions(&self, adoption: &Adoption, most: usize) -> Vec<(NodeAddress, Renewal)> {
        let mut by_node: BTreeMap<NodeId, Vec<&KeptRegion>> = BTreeMap::new();
        for number in adoption.open.values() {
            let region = &adoption.regions[number];
            by_node.entry(region.id.node).or_default().push(region);
        }
        let now = self.now();
        let mut questions = Vec::new();
        for (node, regions) in by_node {
            for regions in regions.chunks(most) {
                let address = regions[0].lease.address.clone().unwrap_or_default();
                let leases = regions.iter().map(|region| (region.id.index, region.epoch, region.key));
                questions.push((address, Renewal::of(node, now, leases)));
            }
        }
        questions
    }

    /// Records a node's answer: the leases that it has renewed are held from now on.
    pub fn adoption_answered(&self, adoption: &mut Adoption, question: &Renewal, answer: &RenewResponse) {
        let now = self.now();
        let answers = self.with_holder(|holder| holder.adoption_answered(now, question, answer));
        for (region, renewed) in answers {
            let Some(number) = adoption.open.remove(&region) else { continue };
            let kept = &adoption.regions[&number];
            let Some((usable_until, is_revoked)) = renewed else {
                tracing::warn!(%region, "the lease has ended; the region's data are lost");
                continue;
            };
            let (epoch, key, lease) = (kept.epoch, kept.key, kept.lease.clone());
            let held = HeldLease { region, epoch, key, usable_until, lease };
            let leased = self.adopt_region(number, held, &kept.doubts);
            if is_revoked {
                leased.leave();
                self.space.lock().leave(region);
            }
        }
    }

    /// Takes over the regions of the overflow directory, if they are still there.
    ///
    /// # Errors When one cannot be opened now: whether its data are lost is unknown, so nothing may be
    /// recorded as lost.
    pub fn adopt_overflow(&self, adoption: &Adoption) -> io::Result<()> {
        let mut regions = adoption.overflow();
        regions.try_for_each(|(number, region)| {
            self.adopt_overflow_region(number, region.id.index, &region.doubts)
        })
    }

    /// Stops waiting for answers: regions whose nodes have not answered are lost.
    pub fn adoption_ends(&self, adoption: &mut Adoption) {
        adoption.open.clear();
        let held = self.numbers_held();
        for (number, region) in adoption.regions.iter().filter(|(number, _)| !held.contains(number)) {
            adoption.lost.insert(*number, self.lost_region(region));
            self.space.lock().gone(*number);
        }
    }

    fn numbers_held(&self) -> BTreeSet<u64> {
        self.numbered_regions().iter().map(|held| held.number).collect()
    }

    /// A lost region of the earlier process as the holders of extents there see it.
    fn lost_region(&self, region: &KeptRegion) -> Arc<LeasedRegion> {
        let address = region.lease.address.clone().unwrap_or_default();
        let node = Arc::new(NodeState::new(self.reach(&address), address.control));
        Arc::new(LeasedRegion::new(region.id, region.epoch, region.key, node, 0))
    }

    /// Gives the extent of this number to the caller, which had it before. `None`: there is no such extent,
    /// or it was taken already.
    pub fn adopt_extent(&self, adoption: &mut Adoption, number: u64) -> Option<Extent> {
        let (region, place) = (number / adoption.extents_per_region, number % adoption.extents_per_region);
        if !adoption.taken.insert(number) {
            return None;
        }
        let taken = self.space.lock().take_at(region, place as u32, &self.space);
        if taken.is_some() || self.numbers_held().contains(&region) {
            return taken;
        }
        // Its region is lost, perhaps only since the nodes answered.
        let kept = adoption.regions.get(&region)?;
        let lost = adoption.lost.entry(region).or_insert_with(|| self.lost_region(kept));
        Some(Extent::of_guest(lost.clone(), place as u32, number))
    }

    /// Withholds an extent that has no holder, because a write of the earlier process may still land on it.
    pub fn shun_extent(&self, adoption: &Adoption, number: u64) {
        let (region, place) = (number / adoption.extents_per_region, number % adoption.extents_per_region);
        let extent = self.space.lock().take_at(region, place as u32, &self.space);
        if let Some(extent) = extent {
            extent.doubt(); // so that dropping it does not free its place
        }
    }

    /// Ends the adoption: all extents that were in use are taken. Numbers of lost regions in which none was
    /// taken are free again.
    pub fn finish_adoption(&self, adoption: Adoption) {
        let per_region = adoption.extents_per_region;
        let in_use: BTreeSet<u64> = adoption.taken.iter().map(|number| number / per_region).collect();
        let held = self.numbers_held();
        let mut space = self.space.lock();
        space.mark_adopted();
        let without_region = adoption.regions.keys().filter(|number| !held.contains(number));
        for number in without_region.filter(|number| !in_use.contains(number)) {
            space.free_number(*number);
        }
    }
}
