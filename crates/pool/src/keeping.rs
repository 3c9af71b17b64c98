//! What a successor must find again about leases: which regions are held under which numbers, and where a
//! write of a dead process may still land. Pure, except for the journal to which this module writes.
//!
//! ```text
//! P                      KeptPool
//! R number               the lease, as it came        (numbers big-endian, 8 bytes)
//!                        of a region of the overflow directory: as if the node OVERFLOW_NODE had lent it
//! R number 0             the region's data are lost
//! R number 1 place       in doubt; place: 4 bytes
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use farpool_keep::{Change, Journal, Kept, tables};
use farpool_wire::control::Lease;
use farpool_wire::{AccessKey, Epoch, RegionId};
use prost::Message;

use crate::overflow::OVERFLOW_NODE;

/// Upper bound of regions' numbers: with more regions, the numbers of extents would not fit in a word.
const MAX_NUMBERS: u64 = 1 << 32;
const GONE: u8 = 0;
const DOUBT: u8 = 1;

/// The pool to which the state belongs.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeptPool {
    #[prost(fixed64, tag = "1")]
    pub(crate) owner: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) region_bytes: u64,
}

impl KeptPool {
    pub(crate) fn find(kept: &Kept) -> Option<KeptPool> {
        KeptPool::decode(kept.get(&[tables::POOL])?).ok()
    }

    pub(crate) fn put(&self) -> Change {
        Change::Put { key: vec![tables::POOL], value: self.encode_to_vec() }
    }
}

/// Records what happens to regions in the journal.
#[derive(Clone, Debug)]
pub(crate) struct Keeping {
    journal: Arc<dyn Journal>,
}

fn key_of(number: u64) -> Vec<u8> {
    let mut key = vec![tables::REGION];
    key.extend_from_slice(&number.to_be_bytes());
    key
}

impl Keeping {
    pub(crate) fn new(journal: Arc<dyn Journal>) -> Self {
        Keeping { journal }
    }

    /// Records that a region has this number from now on. It must be called before an extent of the region is
    /// taken.
    pub(crate) fn held(&self, number: u64, lease: &Lease) {
        let key = key_of(number);
        let anew = Change::RemoveAll { prefix: key.clone() };
        self.journal.append(&[anew, Change::Put { key, value: lease.encode_to_vec() }]);
    }

    /// Records that a number has no region any more.
    pub(crate) fn free(&self, number: u64) {
        self.journal.append(&[Change::RemoveAll { prefix: key_of(number) }]);
    }

    /// Records that a region's data are lost, whatever its node says.
    pub(crate) fn gone(&self, number: u64) {
        let mut key = key_of(number);
        key.push(GONE);
        self.journal.append(&[Change::Put { key, value: Vec::new() }]);
    }

    /// Records that a write may still land on this place of a region.
    pub(crate) fn doubted(&self, number: u64, place: u32) {
        let mut key = key_of(number);
        key.push(DOUBT);
        key.extend_from_slice(&place.to_be_bytes());
        self.journal.append(&[Change::Put { key, value: Vec::new() }]);
    }
}

/// A region of which an earlier process held a lease.
#[derive(Clone, Debug)]
pub(crate) struct KeptRegion {
    pub(crate) id: RegionId,
    pub(crate) epoch: Epoch,
    pub(crate) key: AccessKey,
    pub(crate) lease: Lease,
    /// The earlier process had lost the region already.
    pub(crate) is_gone: bool,
    /// Places where a write of the earlier process may still land.
    pub(crate) doubts: BTreeSet<u32>,
}

impl KeptRegion {
    /// Whether the region still exists, in the overflow directory.
    pub(crate) fn is_in_overflow(&self) -> bool {
        self.id.node == OVERFLOW_NODE && !self.is_gone
    }

    /// Whether the region still exists, on a node.
    pub(crate) fn is_lent(&self) -> bool {
        self.id.node != OVERFLOW_NODE && !self.is_gone
    }
}

/// The indices of the regions in the state that lie in the overflow directory.
pub(crate) fn overflow_indices(kept: &Kept) -> BTreeSet<u32> {
    let regions = regions_of(kept).into_values();
    regions.filter(KeptRegion::is_in_overflow).map(|region| region.id.index).collect()
}

/// The regions in the state, by number. Invalid entries are left out.
pub(crate) fn regions_of(kept: &Kept) -> BTreeMap<u64, KeptRegion> {
    let mut regions: BTreeMap<u64, KeptRegion> = BTreeMap::new();
    for (key, value) in kept.under(&[tables::REGION]) {
        let Some((number, rest)) = key.split_first_chunk() else { continue };
        let number = u64::from_be_bytes(*number);
        match rest.split_first() {
            None if number < MAX_NUMBERS => {
                let region = Lease::decode(value).ok().and_then(region_of);
                regions.extend(region.map(|region| (number, region)));
            }
            // This entry comes after that of the region itself, whose key is shorter.
            Some((&GONE, [])) => {
                if let Some(region) = regions.get_mut(&number) {
                    region.is_gone = true;
                }
            }
            Some((&DOUBT, place)) => {
                if let (Some(region), Ok(place)) = (regions.get_mut(&number), place.try_into()) {
                    region.doubts.insert(u32::from_be_bytes(place));
                }
            }
            _ => {}
        }
    }
    regions
}

/// A copy of a pool's state. Of the records of regions, it has only those with these numbers.
pub fn kept_regions(kept: &Kept, numbers: &BTreeSet<u64>) -> Kept {
    let mut some = Kept::default();
    let is_wanted = |key: &[u8]| match key.split_first() {
        Some((&tables::REGION, rest)) => {
            rest.first_chunk().is_some_and(|number| numbers.contains(&u64::from_be_bytes(*number)))
        }
        _ => true,
    };
    let wanted = kept.under(&[]).filter(|(key, _)| is_wanted(key));
    some.apply(wanted.map(|(key, value)| Change::Put { key: key.into(), value: value.into() }));
    some
}

fn region_of(lease: Lease) -> Option<KeptRegion> {
    Some(KeptRegion {
        id: lease.region_id()?,
        epoch: Epoch(lease.epoch),
        key: lease.access_key()?,
        lease,
        is_gone: false,
        doubts: BTreeSet::new(),
    })
}

#[cfg(test)]
mod tests {
    use farpool_keep::MemoryJournal;
    use farpool_wire::control::NodeAddress;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::overflow::as_lease;

    fn lease(index: u32) -> Lease {
        let address = Some(NodeAddress { node: 1, ..Default::default() });
        Lease { address, region: index, epoch: 9, key: vec![3; 16], ..Default::default() }
    }

    #[test]
    fn regions_are_found_with_their_losses_and_doubts() {
        let journal = Arc::new(MemoryJournal::default());
        let keeping = Keeping::new(journal.clone());
        keeping.held(0, &lease(10));
        keeping.held(1, &lease(11));
        keeping.held(2, &lease(12));
        keeping.doubted(0, 5);
        keeping.doubted(1, 6);
        keeping.gone(1);
        keeping.held(0, &lease(13)); // another region under the same number
        keeping.doubted(0, 7);
        keeping.free(2);
        let found = regions_of(&journal.kept());
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), [0, 1]);
        assert_eq!((found[&0].id.index, found[&0].is_gone), (13, false));
        assert_eq!(found[&0].doubts, BTreeSet::from([7]));
        assert_eq!((found[&1].is_gone, &found[&1].doubts), (true, &BTreeSet::from([6])));
    }

    #[test]
    fn records_of_other_regions_are_left_out() {
        let journal = Arc::new(MemoryJournal::default());
        let pool = KeptPool { owner: 7, region_bytes: 64 << 20 };
        journal.append(&[pool.put()]);
        let keeping = Keeping::new(journal.clone());
        (0..3).for_each(|number| keeping.held(number, &lease(10 + number as u32)));
        keeping.doubted(1, 6);
        let some = kept_regions(&journal.kept(), &BTreeSet::from([1, 9]));
        assert_eq!(KeptPool::find(&some), Some(pool));
        let found = regions_of(&some);
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), [1]);
        assert_eq!(found[&1].doubts, BTreeSet::from([6]));
    }

    #[test]
    fn a_pool_is_found_as_it_was_put_and_numbers_that_are_too_large_are_not() {
        let journal = Arc::new(MemoryJournal::default());
        let pool = KeptPool { owner: 7, region_bytes: 64 << 20 };
        journal.append(&[pool.put()]);
        let keeping = Keeping::new(journal.clone());
        keeping.held(MAX_NUMBERS - 1, &lease(1));
        keeping.held(MAX_NUMBERS, &lease(2));
        let kept = journal.kept();
        assert_eq!(KeptPool::find(&kept), Some(pool));
        assert_eq!(regions_of(&kept).into_keys().collect::<Vec<_>>(), [MAX_NUMBERS - 1]);
    }

    #[test]
    fn regions_of_the_overflow_directory_are_told_from_lost_ones_and_from_those_of_nodes() {
        let journal = Arc::new(MemoryJournal::default());
        let keeping = Keeping::new(journal.clone());
        keeping.held(0, &lease(4));
        keeping.held(1, &as_lease(5));
        keeping.held(2, &as_lease(6));
        keeping.gone(2);
        assert_eq!(overflow_indices(&journal.kept()), BTreeSet::from([5]));
    }

    proptest! {
        #[test]
        fn reading_arbitrary_kept_state_terminates(entries in vec((vec(any::<u8>(), 0..16), vec(any::<u8>(), 0..40)), 0..20)) {
            let mut kept = Kept::default();
            for (mut key, value) in entries {
                key.insert(0, tables::REGION);
                kept.apply([Change::Put { key, value: value.clone() }, Change::Put { key: vec![tables::POOL], value }]);
            }
            let _ = (regions_of(&kept), KeptPool::find(&kept));
        }
    }
}
