//! A node's memory: regions that are opened for one lease, fenced, and made clean again.
//!
//! R1. An access takes effect only while its region is open under its epoch; [`RegionSet::fence`] returns only
//!     when no access through this process is under way and every later one is refused.
//! R2. Accesses by shared memory are not stopped but found out: the epoch word changes before the fence
//!     returns, so that they end as *unknown* (design, section 3).
//! R3. Memory that was handed to other processes is never lent again: the next lease gets new memory, once
//!     every holder has let go. Memory that was not is overwritten with zeros.
//! R4. Memory lent to a network card is reached by it without asking anybody: a fence cuts that access off before it
//!     returns, and the memory is not reused while anybody still counts as its holder.
//! Not here: who gets a region and for how long (crate `lease`).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};

use farpool_wire::{AccessKey, Epoch, Refusal, ShmAttached};
use parking_lot::RwLock;

use crate::host::{Cut, LentMemory, SharedRegion, access_refusal};
use crate::memory::{AccessError, Mapping, SharedMemory, reopen_read_only};

/// All regions of one node.
#[derive(Debug)]
pub struct RegionSet {
    region_bytes: u64,
    locked: bool,
    slots: Vec<RwLock<Slot>>,
    /// One word per region: the epoch under which it is open, or zero.
    epochs: SharedMemory,
    epochs_read_only: OwnedFd,
}

#[derive(Debug)]
struct Slot {
    /// Absent only when replacing it failed.
    memory: Option<SharedMemory>,
    open: Option<(Epoch, AccessKey)>,
    /// Tells whether processes that were handed this memory still have it; `None`: it was never handed out.
    holder: Option<Weak<Holder>>,
    /// Network cards that reach this memory.
    lent: Vec<Lent>,
}

/// One network card's access; over once its holder is gone.
struct Lent {
    cut: Weak<dyn Cut>,
    holder: Weak<Holder>,
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lent(held: {})", self.holder.strong_count() > 0)
    }
}

/// Shared by all connections that have a region's memory.
#[derive(Debug)]
struct Holder;

/// What [`RegionSet::scrub`] came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scrubbed {
    /// The region may be lent again.
    Clean,
    /// Some process still maps the memory; try again when it has let go.
    StillHeld,
}

impl RegionSet {
    /// Takes memory for `regions` regions: prefaulted, and kept out of swap when `locked`.
    /// `progress` is told how many regions are done.
    pub fn create(
        regions: u32,
        region_bytes: u64,
        locked: bool,
        mut progress: impl FnMut(u32),
    ) -> io::Result<Self> {
        let epochs = SharedMemory::create("farpool-epochs", (regions as u64 * 8).max(8))?;
        let epochs_read_only = reopen_read_only(epochs.fd())?;
        let mut set = RegionSet { region_bytes, locked, slots: Vec::new(), epochs, epochs_read_only };
        for region in 0..regions {
            let memory = Some(set.new_memory()?);
            set.slots.push(RwLock::new(Slot { memory, open: None, holder: None, lent: Vec::new() }));
            progress(region + 1);
        }
        Ok(set)
    }

    /// Size of each region.
    pub fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    /// How many there are.
    pub fn regions(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Opens a clean region for a lease.
    ///
    /// # Panics
    /// When there is no such region or it is open already: bugs of the lease table.
    pub fn open(&self, region: u32, epoch: Epoch, key: AccessKey) {
        let mut slot = self.slots[region as usize].write();
        assert!(slot.open.is_none() && slot.holder.is_none(), "region {region} is not clean");
        slot.open = Some((epoch, key));
        self.set_word(region, epoch);
    }

    /// From now on nothing of the present epoch takes effect unnoticed (R1, R2, R4).
    pub fn fence(&self, region: u32) {
        let lent: Vec<_> = {
            let mut slot = self.slots[region as usize].write();
            slot.open = None;
            self.set_word(region, Epoch(0));
            // Pairs with the barrier of a shared-memory client between its access and its look at the word.
            fence(Ordering::SeqCst);
            slot.lent.iter().filter_map(|lent| lent.holder.upgrade().and(lent.cut.upgrade())).collect()
        };
        // Without the lock: it takes as long as a card does, and nothing is lent any more (the epoch is closed).
        lent.iter().for_each(|cut| cut.cut());
    }

    /// Whether some process still has the region's memory of a lease that was fenced or is in force.
    pub fn is_held(&self, region: u32) -> bool {
        self.slots[region as usize].read().is_held()
    }

    /// Makes a fenced region clean. May take as long as writing a region's length of memory.
    ///
    /// # Panics
    /// When the region is open: a bug of the lease table.
    pub fn scrub(&self, region: u32) -> io::Result<Scrubbed> {
        let (memory, handed_out) = {
            let mut slot = self.slots[region as usize].write();
            assert!(slot.open.is_none(), "region {region} is still lent");
            if slot.is_held() {
                return Ok(Scrubbed::StillHeld);
            }
            (slot.memory.take(), slot.holder.take().is_some())
        };
        // Without the lock: a late access must not wait for this.
        let memory = match memory {
            Some(memory) if !handed_out => {
                memory.mapping().scrub().expect("the node's own mapping is writable");
                memory
            }
            old => {
                drop(old); // before there is new memory, so that the two never count together
                self.new_memory()?
            }
        };
        self.slots[region as usize].write().memory = Some(memory);
        Ok(Scrubbed::Clean)
    }

    /// Checks that `key` opens the region under `epoch`.
    pub fn check(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<(), Refusal> {
        self.slot(region)?.read().check(epoch, key).map(drop)
    }

    /// Runs `access` on the region's memory; a fence waits for it.
    pub fn with_region(
        &self,
        region: u32,
        epoch: Epoch,
        access: &mut dyn FnMut(&Mapping) -> Result<(), AccessError>,
    ) -> Result<(), Refusal> {
        let slot = self.slot(region)?.read();
        match (&slot.open, &slot.memory) {
            (Some((current, _)), Some(memory)) if *current == epoch => {
                access(memory.mapping()).map_err(access_refusal)
            }
            _ => Err(Refusal::StaleEpoch),
        }
    }

    /// Hands the region's memory out, after checking the key.
    pub fn share(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<SharedRegion, Refusal> {
        let mut slot = self.slot(region)?.write();
        let memory = slot.check(epoch, key)?.fd().try_clone_to_owned();
        let epochs = self.epochs_read_only.as_fd().try_clone_to_owned();
        let (Ok(memory), Ok(epochs)) = (memory, epochs) else {
            tracing::warn!(region, "out of descriptors: raise the limit on open files");
            return Err(Refusal::Exhausted);
        };
        let holder = slot.holder.as_ref().and_then(Weak::upgrade).unwrap_or_else(|| Arc::new(Holder));
        slot.holder = Some(Arc::downgrade(&holder));
        let attached = ShmAttached { region_bytes: self.region_bytes, epoch_offset: region as u64 * 8 };
        Ok(SharedRegion { memory, epochs, attached, holder })
    }

    /// Lends the region's memory to a network card, after checking the key.
    pub fn lend(
        &self,
        region: u32,
        epoch: Epoch,
        key: &AccessKey,
        cut: Arc<dyn Cut>,
    ) -> Result<LentMemory, Refusal> {
        let mut slot = self.slot(region)?.write();
        let mapping = slot.check(epoch, key)?.mapping().clone();
        let holder = Arc::new(Holder);
        slot.lent.retain(|lent| lent.holder.strong_count() > 0);
        slot.lent.push(Lent { cut: Arc::downgrade(&cut), holder: Arc::downgrade(&holder) });
        Ok(LentMemory { mapping, writable: true, holder })
    }

    fn slot(&self, region: u32) -> Result<&RwLock<Slot>, Refusal> {
        self.slots.get(region as usize).ok_or(Refusal::NotAttached)
    }

    fn set_word(&self, region: u32, epoch: Epoch) {
        self.epochs.mapping().store(region as u64 * 8, epoch.0).expect("one word per region");
    }

    fn new_memory(&self) -> io::Result<SharedMemory> {
        let memory = SharedMemory::create("farpool-region", self.region_bytes)?;
        memory.mapping().prefault()?;
        if self.locked {
            memory.mapping().lock()?;
        }
        Ok(memory)
    }
}

impl Slot {
    fn is_held(&self) -> bool {
        self.holder.as_ref().is_some_and(|holder| holder.strong_count() > 0)
            || self.lent.iter().any(|lent| lent.holder.strong_count() > 0)
    }

    fn check(&self, epoch: Epoch, key: &AccessKey) -> Result<&SharedMemory, Refusal> {
        let (current, current_key) = self.open.as_ref().ok_or(Refusal::StaleEpoch)?;
        if *current != epoch {
            return Err(Refusal::StaleEpoch);
        }
        if current_key != key {
            return Err(Refusal::WrongKey);
        }
        self.memory.as_ref().ok_or(Refusal::StaleEpoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: AccessKey = AccessKey::from_bytes([7; 16]);
    const REGION_BYTES: u64 = 64 << 10;

    fn set() -> RegionSet {
        RegionSet::create(2, REGION_BYTES, false, |_| {}).unwrap()
    }

    fn first_byte(set: &RegionSet, epoch: Epoch) -> u8 {
        let mut byte = [0];
        set.with_region(0, epoch, &mut |memory| memory.read(0, &mut byte)).unwrap();
        byte[0]
    }

    #[test]
    fn a_region_lent_again_shows_nothing_of_its_last_holder() {
        let set = set();
        set.open(0, Epoch(1), KEY);
        set.with_region(0, Epoch(1), &mut |memory| memory.write(0, &[1; 100])).unwrap();
        set.fence(0);
        assert_eq!(set.scrub(0).unwrap(), Scrubbed::Clean);
        set.open(0, Epoch(2), KEY);
        assert_eq!(first_byte(&set, Epoch(2)), 0);
    }

    #[test]
    fn a_fenced_epoch_is_refused() {
        let set = set();
        set.open(0, Epoch(1), KEY);
        set.fence(0);
        let access = set.with_region(0, Epoch(1), &mut |memory| memory.write(0, &[1]));
        assert_eq!(access, Err(Refusal::StaleEpoch));
        assert_eq!(set.check(0, Epoch(1), &KEY), Err(Refusal::StaleEpoch));
    }

    #[test]
    fn memory_handed_out_is_replaced_and_only_when_its_holders_have_let_go() {
        let set = set();
        set.open(0, Epoch(1), KEY);
        let shared = set.share(0, Epoch(1), &KEY).unwrap();
        let view = Mapping::new(shared.memory.as_fd(), REGION_BYTES, crate::Protection::ReadWrite).unwrap();
        set.fence(0);
        assert_eq!(set.scrub(0).unwrap(), Scrubbed::StillHeld);
        drop(shared);
        assert_eq!(set.scrub(0).unwrap(), Scrubbed::Clean);
        set.open(0, Epoch(2), KEY);
        view.write(0, &[9]).unwrap(); // a liar that kept its mapping
        assert_eq!(first_byte(&set, Epoch(2)), 0);
    }

    struct CutCounter(std::sync::atomic::AtomicU32);

    impl Cut for CutCounter {
        fn cut(&self) {
            self.0.fetch_add(1, Ordering::Relaxed); // looked at by this thread alone
        }
    }

    #[test]
    fn a_fence_cuts_cards_off_and_the_memory_waits_for_their_holders() {
        let set = set();
        set.open(0, Epoch(1), KEY);
        let (ended, cut) = (Arc::new(CutCounter(0.into())), Arc::new(CutCounter(0.into())));
        drop(set.lend(0, Epoch(1), &KEY, ended.clone()).unwrap());
        let lent = set.lend(0, Epoch(1), &KEY, cut.clone()).unwrap();
        set.fence(0);
        assert_eq!(cut.0.load(Ordering::Relaxed), 1);
        assert_eq!(ended.0.load(Ordering::Relaxed), 0, "an access that was over already");
        assert!(matches!(set.lend(0, Epoch(1), &KEY, cut), Err(Refusal::StaleEpoch)));
        assert_eq!(set.scrub(0).unwrap(), Scrubbed::StillHeld);
        drop(lent);
        assert_eq!(set.scrub(0).unwrap(), Scrubbed::Clean);
    }

    #[test]
    fn a_wrong_key_opens_nothing() {
        let set = set();
        set.open(0, Epoch(1), KEY);
        let wrong = AccessKey::from_bytes([8; 16]);
        assert_eq!(set.check(0, Epoch(1), &wrong), Err(Refusal::WrongKey));
        assert!(matches!(set.share(0, Epoch(1), &wrong), Err(Refusal::WrongKey)));
        assert_eq!(set.check(5, Epoch(1), &KEY), Err(Refusal::NotAttached));
    }
}
