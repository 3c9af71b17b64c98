//! A node's memory: real regions behind a shell that can be broken on purpose.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use farpool_fabric::sim::HostId;
use farpool_fabric::{AccessError, AccessKind, Host, Locking, Mapping, Peer, RegionSet};
use farpool_wire::{AccessKey, Epoch, NodeId, Refusal};

/// A node of a world in which nodes do not restart.
pub(crate) struct LendingNode {
    pub(crate) host: HostId,
    pub(crate) peer: Peer,
    pub(crate) memory: Arc<LendingHost>,
    /// Serves one operation at a time. On a node that serves word by word, as a NIC does, memory that moves
    /// in the middle of an operation costs the connection.
    pub(crate) is_whole: bool,
}

/// The key of a grant. Any key will do, as long as each grant has a different one.
pub(crate) fn key_of(grant: Epoch) -> AccessKey {
    let mut bytes = [9; AccessKey::BYTES];
    bytes[..8].copy_from_slice(&grant.0.to_le_bytes());
    AccessKey::from_bytes(bytes)
}

/// A node's memory, as it is served.
pub(crate) struct LendingHost {
    node: NodeId,
    count: u32,
    pub(crate) regions: RegionSet,
    /// Set under the mutation that makes fences ineffective: for each region, the epoch of its current lease.
    unfenced: Option<Vec<AtomicU64>>,
    /// For each region, the number of moves of its memory in progress, in a world where moves take time.
    moving: Vec<AtomicU64>,
    /// For each region, whether its memory is moving until the next access.
    moving_until_asked: Vec<AtomicBool>,
}

impl LendingHost {
    /// A node with `count` regions of `region_bytes` each.
    pub(crate) fn new(node: NodeId, count: u32, region_bytes: u64) -> Self {
        let regions =
            RegionSet::create(count, region_bytes, Locking::None, |_| {}).expect("a few pages of memory");
        let moving = (0..count).map(|_| AtomicU64::new(0)).collect();
        let moving_until_asked = (0..count).map(|_| AtomicBool::new(false)).collect();
        LendingHost { node, count, regions, unfenced: None, moving, moving_until_asked }
    }

    /// Mutation: fences have no effect.
    pub(crate) fn without_fences(mut self) -> Self {
        self.unfenced = Some((0..self.count).map(|_| AtomicU64::new(0)).collect());
        self
    }

    /// Starts a move of the region's memory. Until it ends, accesses are refused as `Busy`.
    pub(crate) fn begin_move(&self, region: u32) {
        self.moving[region as usize].fetch_add(1, Ordering::Relaxed); // one thread per world
    }

    /// Starts a move of the region's memory that ends with the next access. That access is still refused as
    /// `Busy`.
    pub(crate) fn move_until_asked(&self, region: u32) {
        self.moving_until_asked[region as usize].store(true, Ordering::Relaxed); // one thread per world
    }

    /// Ends a move.
    pub(crate) fn end_move(&self, region: u32) {
        self.moving[region as usize].fetch_sub(1, Ordering::Relaxed); // one thread per world
    }

    fn check_rest(&self, region: u32) -> Result<(), Refusal> {
        // Relaxed: one thread per world.
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

    /// Reads the first words of the region.
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
    fn node(&self) -> NodeId {
        self.node
    }

    fn regions(&self) -> &RegionSet {
        &self.regions
    }

    fn admit(&self, region: u32, _: Epoch, _: &AccessKey) -> Result<(), Refusal> {
        self.check_rest(region)
    }

    fn with_region(
        &self,
        region: u32,
        epoch: Epoch,
        kind: AccessKind,
        access: &mut dyn FnMut(&Mapping) -> Result<(), AccessError>,
    ) -> Result<(), Refusal> {
        self.check_rest(region)?;
        // Relaxed: one thread per world.
        let asked = self.moving_until_asked.get(region as usize);
        if asked.is_some_and(|asked| asked.swap(false, Ordering::Relaxed)) {
            return Err(Refusal::Busy);
        }
        match (self.regions.with_region(region, epoch, kind, access), &self.unfenced) {
            (Err(Refusal::StaleEpoch), Some(unfenced)) => {
                // Relaxed: one thread per world.
                let present = Epoch(unfenced[region as usize].load(Ordering::Relaxed));
                self.regions.with_region(region, present, kind, access)
            }
            (result, _) => result,
        }
    }

    fn call(&self, request: &[u8], answer: &mut Vec<u8>) -> Result<(), Refusal> {
        answer.extend_from_slice(request);
        Ok(())
    }
}
