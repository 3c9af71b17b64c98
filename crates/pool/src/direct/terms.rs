//! A table in shared memory that says until when each region may be used. The owner of the leases writes it,
//! and its direct clients (called *guests* in the code) read it.

use std::sync::Arc;

use farpool_fabric::Mapping;

use crate::region::LeasedRegion;

const WORD_BYTES: u64 = 8;
const REGION_BYTES: u64 = 3 * WORD_BYTES;

/// Offsets within a region's entry.
const LEASE_NODE: u64 = 0;
const LEASE_EPOCH: u64 = WORD_BYTES;
const USABLE_UNTIL: u64 = 2 * WORD_BYTES;

/// The table, as the owner or a direct client sees it. All its words are zero at the beginning. For each
/// region: the node and the epoch of its lease, and until when it may be used, in milliseconds of the host's
/// monotonic clock (0: it may not be used).
pub struct Terms {
    mapping: Arc<Mapping>,
    at: u64,
    regions: u64,
}

/// A region's lease, and until when the region may be used. Node and epoch name the lease: numbers of regions
/// are reused, and epochs of two nodes may be the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RegionTerm {
    pub(crate) node: u64,
    pub(crate) epoch: u64,
    pub(crate) usable_until_ms: u64,
}

/// The reason for which accesses succeed: the caller of [`Terms::new`] has checked the bounds.
const WITHIN: &str = "the table lies within its memory";

impl Terms {
    /// The memory that a table of so many regions takes.
    pub const fn bytes(regions: u64) -> u64 {
        regions * REGION_BYTES
    }

    /// The table that begins at the byte `at` of this memory, which has room for so many regions. Later
    /// accesses panic if the memory ends before the table does, or if the owner's memory is read-only.
    pub fn new(mapping: Arc<Mapping>, at: u64, regions: u64) -> Terms {
        Terms { mapping, at, regions }
    }

    fn load(&self, at: u64) -> u64 {
        self.mapping.load(at).expect(WITHIN)
    }

    fn store(&self, at: u64, value: u64) {
        self.mapping.store(at, value).expect(WITHIN);
    }

    /// Tells direct clients until when they may use the region with this number. If they must not use it at
    /// all, nothing that they find permits it.
    pub fn publish(&self, number: u64, region: &LeasedRegion) {
        let usable_until_ms = if region.guests_may_use() { region.usable_until_ms() } else { 0 };
        self.put(number, RegionTerm { node: region.id.node.0, epoch: region.epoch.0, usable_until_ms });
    }

    fn put(&self, number: u64, term: RegionTerm) {
        if number >= self.regions {
            return; // direct clients find nothing there
        }
        let at = self.at + number * REGION_BYTES;
        if self.lease_at(at) != (term.node, term.epoch) {
            // In this order, so that no lease is read with another's time.
            self.store(at + USABLE_UNTIL, 0);
            self.store(at + LEASE_NODE, term.node);
            self.store(at + LEASE_EPOCH, term.epoch);
        }
        self.store(at + USABLE_UNTIL, term.usable_until_ms);
    }

    /// Until when a region may be used; `None`: it may not.
    pub(crate) fn find(&self, number: u64) -> Option<RegionTerm> {
        if number >= self.regions {
            return None;
        }
        let at = self.at + number * REGION_BYTES;
        let (node, epoch) = self.lease_at(at);
        let usable_until_ms = self.load(at + USABLE_UNTIL);
        // The lease may have changed between the loads.
        let is_consistent = usable_until_ms != 0 && self.lease_at(at) == (node, epoch);
        is_consistent.then_some(RegionTerm { node, epoch, usable_until_ms })
    }

    fn lease_at(&self, at: u64) -> (u64, u64) {
        (self.load(at + LEASE_NODE), self.load(at + LEASE_EPOCH))
    }
}

#[cfg(test)]
mod tests {
    use farpool_fabric::SharedMemory;

    use super::*;

    #[test]
    fn a_region_is_known_only_while_it_may_be_used() {
        const AT: u64 = 4096;
        const REGIONS: u64 = 9;
        let memory = SharedMemory::create("terms", AT + Terms::bytes(REGIONS)).unwrap();
        let terms = Terms::new(memory.mapping().clone(), AT, REGIONS);
        let term = RegionTerm { node: 1, epoch: 7, usable_until_ms: 100 };
        assert_eq!(terms.find(3), None);
        terms.put(3, term);
        assert_eq!(terms.find(3), Some(term));
        terms.put(3, RegionTerm { usable_until_ms: 0, ..term });
        assert_eq!(terms.find(3), None);
        let other = RegionTerm { node: 2, ..term };
        terms.put(3, other);
        assert_eq!(terms.find(3), Some(other), "of another node, with the same epoch");
        terms.put(REGIONS - 1, term);
        terms.put(REGIONS, term);
        assert_eq!((terms.find(REGIONS - 1), terms.find(REGIONS)), (Some(term), None));
    }

    #[test]
    fn a_region_with_a_new_lease_changes_nothing_for_its_neighbours() {
        let memory = SharedMemory::create("terms", Terms::bytes(3)).unwrap();
        let terms = Terms::new(memory.mapping().clone(), 0, 3);
        let term = |node| RegionTerm { node, epoch: 7, usable_until_ms: 100 };
        (0..3).for_each(|number| terms.put(number, term(1)));
        terms.put(1, term(2));
        assert_eq!([0, 1, 2].map(|number| terms.find(number)), [1, 2, 1].map(|node| Some(term(node))));
    }
}
