//! A node's memory: the real regions, behind a shell that can be broken.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use farpool_fabric::{
    AccessError, AccessKind, Cut, Host, HostIdentity, LentMemory, Locking, Mapping, RegionSet, SharedRegion,
};
use farpool_wire::{AccessKey, Epoch, NodeId, Refusal};

pub(crate) struct LendingHost {
    node: NodeId,
    count: u32,
    region_bytes: u64,
    pub(crate) regions: RegionSet,
    /// Broken: a fence stops nobody. By region, the epoch under which it is lent now.
    unfenced: Option<Vec<AtomicU64>>,
    /// By region, how many are moving its memory, in a world where that takes time.
    moving: Vec<AtomicU64>,
    /// By region, whether that is over behind the next access.
    moving_until_asked: Vec<AtomicBool>,
}

impl LendingHost {
    /// A node with so many regions.
    pub(crate) fn new(node: NodeId, count: u32, region_bytes: u64) -> Self {
        let regions =
            RegionSet::create(count, region_bytes, Locking::None, |_| {}).expect("a few pages of memory");
        let moving = (0..count).map(|_| AtomicU64::new(0)).collect();
        let moving_until_asked = (0..count).map(|_| AtomicBool::new(false)).collect();
        LendingHost { node, count, region_bytes, regions, unfenced: None, moving, moving_until_asked }
    }

    /// Broken: a fence stops nobody.
    pub(crate) fn without_fences(mut self) -> Self {
        self.unfenced = Some((0..self.count).map(|_| AtomicU64::new(0)).collect());
        self
    }

    /// From now on the region's memory is being moved: whoever asks for it is told to come again.
    pub(crate) fn begin_move(&self, region: u32) {
        self.moving[region as usize].fetch_add(1, Ordering::Relaxed); // one thread per world
    }

    /// The memory is being moved, and comes to rest right behind the next access, which is told to come again.
    pub(crate) fn move_until_asked(&self, region: u32) {
        self.moving_until_asked[region as usize].store(true, Ordering::Relaxed); // as above
    }

    /// It has moved.
    pub(crate) fn end_move(&self, region: u32) {
        self.moving[region as usize].fetch_sub(1, Ordering::Relaxed); // as above
    }

    fn check_rest(&self, region: u32) -> Result<(), Refusal> {
        // As above.
        let is_moving =
            self.moving.get(region as usize).is_some_and(|moving| moving.load(Ordering::Relaxed) > 0);
        if is_moving { Err(Refusal::Busy) } else { Ok(()) }
    }

    /// Opens a clean region under its owner's grant.
    pub(crate) fn open(&self, region: u32, epoch: Epoch, key: AccessKey) {
        self.regions.open(region, epoch, key);
        if let Some(unfenced) = &self.unfenced {
            unfenced[region as usize].store(epoch.0, Ordering::Relaxed); // one thread per world
        }
    }

    /// The region's first words as they are now.
    pub(crate) fn look(&self, region: u32, epoch: Epoch, words: u64) -> Vec<u64> {
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
        HostIdentity { node: self.node, region_bytes: self.region_bytes, regions: self.count }
    }

    fn attach(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<(), Refusal> {
        self.check_rest(region)?;
        self.regions.check(region, epoch, key)
    }

    fn with_region(
        &self,
        region: u32,
        epoch: Epoch,
        kind: AccessKind,
        access: &mut dyn FnMut(&Mapping) -> Result<(), AccessError>,
    ) -> Result<(), Refusal> {
        self.check_rest(region)?;
        // As above.
        let asked = self.moving_until_asked.get(region as usize);
        if asked.is_some_and(|asked| asked.swap(false, Ordering::Relaxed)) {
            return Err(Refusal::Busy);
        }
        match (self.regions.with_region(region, epoch, kind, access), &self.unfenced) {
            (Err(Refusal::StaleEpoch), Some(unfenced)) => {
                let present = Epoch(unfenced[region as usize].load(Ordering::Relaxed)); // as in `open`
                self.regions.with_region(region, present, kind, access)
            }
            (result, _) => result,
        }
    }

    fn share(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<SharedRegion, Refusal> {
        self.check_rest(region)?;
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
