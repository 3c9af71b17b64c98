//! A node's memory: the real regions, behind a shell that can be broken.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farpool_fabric::{
    AccessError, AccessKind, Cut, Host, HostIdentity, LentMemory, Mapping, RegionSet, SharedRegion,
};
use farpool_wire::{AccessKey, Epoch, NodeId, Refusal};

use super::layout::REGION_BYTES;

/// Regions of a node.
pub(super) const REGIONS: u32 = 2;

pub(super) struct LendingHost {
    node: NodeId,
    pub(super) regions: RegionSet,
    /// Broken: a fence stops nobody. By region, the epoch under which it is lent now.
    unfenced: Option<[AtomicU64; REGIONS as usize]>,
}

impl LendingHost {
    pub(super) fn new(node: NodeId, without_fences: bool) -> Arc<Self> {
        let regions = RegionSet::create(REGIONS, REGION_BYTES, false, |_| {}).expect("a few pages of memory");
        Arc::new(LendingHost { node, regions, unfenced: without_fences.then(Default::default) })
    }

    /// Opens a clean region under its owner's grant.
    pub(super) fn open(&self, region: u32, epoch: Epoch, key: AccessKey) {
        self.regions.open(region, epoch, key);
        if let Some(unfenced) = &self.unfenced {
            unfenced[region as usize].store(epoch.0, Ordering::Relaxed); // one thread per world
        }
    }

    /// The region's first words as they are now.
    pub(super) fn look(&self, region: u32, epoch: Epoch, words: u64) -> Vec<u64> {
        let mut found = Vec::new();
        let looked = self.regions.with_region(region, epoch, AccessKind::Read, &mut |memory| {
            found = (0..words).map(|word| memory.load(8 * word)).collect::<Result<_, _>>()?;
            Ok(())
        });
        assert_eq!(looked, Ok(()), "the owner's grant is open");
        found
    }
}

impl Host for LendingHost {
    fn identity(&self) -> HostIdentity {
        HostIdentity { node: self.node, region_bytes: REGION_BYTES, regions: REGIONS }
    }

    fn attach(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<(), Refusal> {
        self.regions.check(region, epoch, key)
    }

    fn with_region(
        &self,
        region: u32,
        epoch: Epoch,
        kind: AccessKind,
        access: &mut dyn FnMut(&Mapping) -> Result<(), AccessError>,
    ) -> Result<(), Refusal> {
        match (self.regions.with_region(region, epoch, kind, access), &self.unfenced) {
            (Err(Refusal::StaleEpoch), Some(unfenced)) => {
                let present = Epoch(unfenced[region as usize].load(Ordering::Relaxed)); // as in `open`
                self.regions.with_region(region, present, kind, access)
            }
            (result, _) => result,
        }
    }

    fn share(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<SharedRegion, Refusal> {
        self.regions.share(region, epoch, key)
    }

    fn lend(
        &self,
        region: u32,
        epoch: Epoch,
        key: &AccessKey,
        cut: Arc<dyn Cut>,
    ) -> Result<LentMemory, Refusal> {
        self.regions.lend(region, epoch, key, cut)
    }

    fn call(&self, request: &[u8], answer: &mut Vec<u8>) -> Result<(), Refusal> {
        answer.extend_from_slice(request);
        Ok(())
    }

    fn rejected(&self) {}
}
