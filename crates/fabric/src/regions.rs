//! A node's memory: regions that are opened for leases and their grants, fenced, and made clean again.
//!
//! R1. An access takes effect only while its grant is open; a fence returns only when no access of the grant
//!     through this process is in progress and every later one is refused.
//! R2. Accesses through shared memory cannot be stopped, but they are detected: the grant's word changes
//!     before the fence returns, so that they end as *unknown* (`docs/src/fabric.md`, shared memory).
//! R3. Memory that was handed to other processes is never lent again: the next lease gets new memory. Before
//!     that, the old memory's pages go back to the system, even if processes still map them. Memory that was
//!     not handed out is overwritten with zeros.
//! R4. When one of several grants is fenced and its process was handed the memory, the contents *move* to new
//!     memory before the fence returns. What that process still stores goes to the old memory, which nothing
//!     reads any more. The copy holds everything that was acknowledged; the other grants attach again. Only
//!     the caller of the fence waits for the copying: accesses are refused as busy meanwhile. With the spare
//!     memory, a fence needs no allocation that could fail.
//! R5. Access that no check per operation guards (a network card's) is cut before a fence of its grant
//!     returns, and before the contents move. Cuts run without the lock of the region, since they may have to
//!     wait for threads that wait for it. From the announcement of a move until its end, the memory is
//!     neither handed out nor lent.
//! R6. A *withdrawn* region has no memory: its pages went back to the system, even if processes still map
//!     them. It is opened again only after [`restore`](RegionSet::restore) has given it new memory.
//! Not here: who gets a region and for how long (crate `lease`).

mod slot;
#[cfg(test)]
mod tests;
mod words;

use std::io;
use std::sync::Arc;
use std::time::Instant;

use farpool_throttle::Throttle;
use farpool_wire::{AccessKey, Epoch, GrantMode, Refusal, ShmAttached};
use rustix_futex_sync::{Mutex, RwLock};

use crate::host::{AccessKind, CutOff, LentMemory, SharedRegion, access_refusal};
use crate::memory::{AccessError, Mapping, SharedMemory};
use slot::{Move, Slot};
use words::Words;

/// Most loans of one region's memory to transports at once: one for each connection that a node serves.
const MAX_LENT_PER_REGION: usize = 1024;

/// Whether regions are kept out of swap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Locking {
    /// All of them: memory that cannot be locked is an error.
    Required,
    /// As many of them as the limit on locked memory (RLIMIT_MEMLOCK) has room for.
    AsAllowed,
    /// None of them.
    None,
}

/// All regions of one node.
#[derive(Debug)]
pub struct RegionSet {
    region_bytes: u64,
    locking: Locking,
    slots: Vec<RwLock<Slot>>,
    words: Words,
    /// The spare memory, if it is kept. The lock is held while a region moves: one region moves at a time, so
    /// that moving takes one region's memory at most.
    spare: Mutex<Option<SharedMemory>>,
    keeps_spare: bool,
    /// Throttles the warnings about missing descriptors.
    shortages: Throttle,
}

/// The outcome of [`RegionSet::scrub`] and [`RegionSet::withdraw`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scrubbed {
    /// No byte of the last lease is left.
    Clean,
    /// The memory is still lent to a transport or being moved; try again when that has ended.
    StillHeld,
}

impl RegionSet {
    /// Allocates memory for `regions` regions: prefaulted, and kept out of swap as `locking` says. Calls
    /// `progress` with the number of regions that are done.
    pub fn create(
        regions: u32,
        region_bytes: u64,
        locking: Locking,
        mut progress: impl FnMut(u32),
    ) -> io::Result<Self> {
        let words = Words::create(regions)?;
        let mut set = RegionSet {
            region_bytes,
            locking,
            slots: Vec::new(),
            words,
            spare: Mutex::new(None),
            keeps_spare: false,
            shortages: Throttle::new(),
        };
        for region in 0..regions {
            let memory = set.new_memory()?;
            set.slots.push(RwLock::new(Slot::new(memory)));
            progress(region + 1);
        }
        Ok(set)
    }

    /// Allocates memory for one more region, to which the next fence of a grant can move contents; otherwise
    /// the fence has to allocate it.
    pub fn keep_spare(&mut self) -> io::Result<()> {
        self.keeps_spare = true;
        self.restore_spare()
    }

    /// Allocates memory to replace the [spare](Self::keep_spare) that a fence has used. Does nothing while a
    /// region moves.
    pub fn restore_spare(&self) -> io::Result<()> {
        let is_there = || self.spare.try_lock().is_none_or(|spare| spare.is_some());
        if !self.keeps_spare || is_there() {
            return Ok(());
        }
        // Without the lock: a fence must not wait for this. One that comes meanwhile allocates its own
        // memory.
        let memory = self.new_memory()?;
        self.spare.lock().get_or_insert(memory);
        Ok(())
    }

    /// Size of each region.
    pub fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    /// How many there are.
    pub fn regions(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Opens a clean region for a lease; `epoch` and `key` are those of its first grant, the owner's.
    ///
    /// # Panics
    /// When there is no such region or it is not clean: bugs of the lease table.
    pub fn open(&self, region: u32, epoch: Epoch, key: AccessKey) {
        let mut slot = self.slots[region as usize].write();
        assert!(slot.is_clean(), "region {region} is not clean");
        slot.grant(epoch, key, GrantMode::ReadWrite, region, &self.words);
    }

    /// Opens another grant of a region that is lent.
    ///
    /// # Panics
    /// When the region is not open, the epoch is in use, or all
    /// [`MAX_GRANTS_PER_REGION`](farpool_wire::MAX_GRANTS_PER_REGION) places are taken: bugs of the lease
    /// table.
    pub fn open_grant(&self, region: u32, epoch: Epoch, key: AccessKey, mode: GrantMode) {
        let mut slot = self.slots[region as usize].write();
        assert!(!slot.grants.is_empty(), "region {region} is not lent");
        assert!(slot.grants.iter().all(|grant| grant.epoch != epoch), "epoch {epoch} comes twice");
        slot.grant(epoch, key, mode, region, &self.words);
    }

    /// Fences all grants of the region: from now on none of their accesses takes effect unnoticed (R1, R2,
    /// R5).
    ///
    /// Waits for cuts, see [`CutOff`]; the threads that these wait for must not call it.
    pub fn fence(&self, region: u32) {
        let cuts = {
            let mut slot = self.slots[region as usize].write();
            for grant in std::mem::take(&mut slot.grants) {
                self.words.close(region, grant.place);
            }
            Words::barrier();
            slot.cuts(None)
        };
        cuts.iter().for_each(|cut| cut.cut());
    }

    /// Refuses one grant every access through this process from now on, and frees its place for another. This
    /// does not fence it: [`fence_grant`](Self::fence_grant) has to follow.
    pub fn close_grant(&self, region: u32, epoch: Epoch) {
        if let Some(place) = self.slots.get(region as usize) {
            place.write().end(epoch, region, &self.words);
        }
    }

    /// Fences one grant: from now on none of its accesses takes effect where another grant could see it (R1,
    /// R2, R4, R5). May be called again for a grant that was fenced before.
    ///
    /// May take as long as copying a region's length of memory, and as allocating it without a
    /// [spare](Self::keep_spare); while it is copied, accesses are refused as [`Busy`](Refusal::Busy). Waits
    /// for cuts as [`fence`](Self::fence) does.
    ///
    /// # Errors
    /// When there is no memory to move to. The grant's accesses through this process are refused then, but a
    /// process that was handed the memory may still store there: call this again.
    pub fn fence_grant(&self, region: u32, epoch: Epoch) -> io::Result<()> {
        let Some(place) = self.slots.get(region as usize) else { return Ok(()) };
        let (may_move, cuts) = {
            let mut slot = place.write();
            slot.end(epoch, region, &self.words);
            Words::barrier();
            // A move in progress may have been begun for this grant, by an earlier caller.
            (slot.exposed || slot.moving != Move::None, slot.cuts(Some(epoch)))
        };
        cuts.iter().for_each(|cut| cut.cut());
        if may_move { self.move_exposed(region, place) } else { Ok(()) }
    }

    /// Waits for its turn, and moves the region's contents if a fenced process has the memory then.
    fn move_exposed(&self, region: u32, place: &RwLock<Slot>) -> io::Result<()> {
        let mut spare = self.spare.lock();
        {
            let mut slot = place.write();
            if !slot.exposed || slot.grants.is_empty() {
                return Ok(());
            }
            slot.moving = Move::Announced;
        }
        self.move_memory(region, place, &mut spare)
    }

    /// Moves a region that is marked [`Move::Announced`] to new memory.
    fn move_memory(
        &self,
        region: u32,
        place: &RwLock<Slot>,
        spare: &mut Option<SharedMemory>,
    ) -> io::Result<()> {
        let fresh = match spare.take() {
            Some(spare) => spare,
            None => self.new_memory().inspect_err(|_| place.write().moving = Move::None)?,
        };
        let cuts = place.read().cuts(None);
        cuts.iter().for_each(|cut| cut.cut());
        let Some(from) = place.write().begin_copy(region, &self.words) else {
            *spare = Some(fresh).filter(|_| self.keeps_spare);
            return Ok(());
        };
        // Without the region's lock: a thread that also serves other regions must not wait for the copying.
        fresh.mapping().copy_all(&from).expect("regions are equally long, and the node's own");
        drop(from);
        let old = place.write().end_copy(fresh);
        old.iter().for_each(SharedMemory::discard);
        Ok(())
    }

    /// Whether the memory of the region's present or last lease is lent to a transport or being moved, which
    /// has to end before [`scrub`](Self::scrub).
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
            assert!(slot.grants.is_empty(), "region {region} is still lent");
            if slot.is_held() {
                return Ok(Scrubbed::StillHeld);
            }
            slot.take_for_scrub()
        };
        // Without the lock: a late access must not wait for this.
        let memory = match memory {
            Some(memory) if !handed_out => {
                memory.mapping().scrub().expect("the node's own mapping is writable");
                memory
            }
            old => {
                // Given back before there is new memory, so that the two never take room together, even if a
                // process still maps the old one.
                old.iter().for_each(SharedMemory::discard);
                drop(old);
                self.new_memory()?
            }
        };
        self.slots[region as usize].write().memory = Some(memory);
        Ok(Scrubbed::Clean)
    }

    /// Gives the memory of a region that is not lent back to the system. Nothing of the last lease is left,
    /// so this takes the place of [`scrub`](Self::scrub).
    ///
    /// # Panics
    /// When the region is open: a bug of the lease table.
    pub fn withdraw(&self, region: u32) -> Scrubbed {
        let (memory, _) = {
            let mut slot = self.slots[region as usize].write();
            assert!(slot.grants.is_empty(), "region {region} is still lent");
            if slot.is_held() {
                return Scrubbed::StillHeld;
            }
            slot.take_for_scrub()
        };
        memory.iter().for_each(SharedMemory::discard);
        Scrubbed::Clean
    }

    /// Allocates memory for a region that was [withdrawn](Self::withdraw): prefaulted and kept out of swap,
    /// as the others. May take as long as writing a region's length of memory.
    ///
    /// # Errors
    /// When there is no memory; the region stays withdrawn.
    pub fn restore(&self, region: u32) -> io::Result<()> {
        let memory = self.new_memory()?; // without the lock, as in `scrub`
        self.slots[region as usize].write().memory.get_or_insert(memory);
        Ok(())
    }

    /// Checks that `key` opens the region under `epoch`.
    pub fn check(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<(), Refusal> {
        self.slot(region)?.read().check(epoch, key).map(drop)
    }

    /// Runs `access`, an access of the given `kind`, on the region's memory; a fence waits for it.
    pub fn with_region(
        &self,
        region: u32,
        epoch: Epoch,
        kind: AccessKind,
        access: &mut dyn FnMut(&Mapping) -> Result<(), AccessError>,
    ) -> Result<(), Refusal> {
        let slot = self.slot(region)?.read();
        access(slot.access(epoch, kind)?.mapping()).map_err(access_refusal)
    }

    /// Hands the region's memory out, after checking the key.
    pub fn share(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<SharedRegion, Refusal> {
        let mut slot = self.slot(region)?.write();
        let at = slot.check(epoch, key)?;
        if slot.moving != Move::None {
            return Err(Refusal::Busy);
        }
        let words = self.words.share();
        let (Ok(words), Ok(memory)) = (words, slot.hand_out(at)) else {
            if let Some(left_out) = self.shortages.occurs(Instant::now()) {
                tracing::warn!(region, left_out, "out of descriptors: raise the limit on open files");
            }
            return Err(Refusal::Exhausted);
        };
        let grant = &slot.grants[at];
        let attached = ShmAttached {
            region_bytes: self.region_bytes,
            word_offset: Words::offset(region, grant.place),
            stamp: grant.stamp,
            mode: grant.mode,
        };
        Ok(SharedRegion { memory, words, attached })
    }

    /// Lends the region's memory to a transport, after checking the key; `cut` is kept until the holder is
    /// gone.
    pub fn lend(
        &self,
        region: u32,
        epoch: Epoch,
        key: &AccessKey,
        cut: Arc<dyn CutOff>,
    ) -> Result<LentMemory, Refusal> {
        let mut slot = self.slot(region)?.write();
        let at = slot.check(epoch, key)?;
        if slot.moving != Move::None {
            return Err(Refusal::Busy);
        }
        let holder = slot.lend(epoch, cut, MAX_LENT_PER_REGION).ok_or(Refusal::Exhausted)?;
        let mapping = slot.memory.as_ref().expect("checked with the key").mapping().clone();
        Ok(LentMemory { mapping, writable: slot.grants[at].mode == GrantMode::ReadWrite, holder })
    }

    fn slot(&self, region: u32) -> Result<&RwLock<Slot>, Refusal> {
        self.slots.get(region as usize).ok_or(Refusal::NotAttached)
    }

    fn new_memory(&self) -> io::Result<SharedMemory> {
        let memory = SharedMemory::create("farpool-region", self.region_bytes)?;
        memory.mapping().prefault()?;
        if self.locking != Locking::None
            && let Err(error) = memory.mapping().lock()
            && (self.locking == Locking::Required || !is_over_the_limit(&error))
        {
            return Err(error);
        }
        Ok(memory)
    }
}

/// Whether memory was not locked because of the limit on locked memory (mlock(2)).
fn is_over_the_limit(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM | libc::EAGAIN))
}
