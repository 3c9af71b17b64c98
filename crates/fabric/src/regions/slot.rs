//! One region: its memory, its open grants, and the processes and transports that have the memory.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use farpool_wire::{AccessKey, Epoch, GrantMode, MAX_GRANTS_PER_REGION, Refusal};

use super::words::Words;
use crate::host::{AccessKind, CutOff};
use crate::memory::{Mapping, SharedMemory, reopen_read_only};

/// Kept by a transport that was lent a region's memory.
#[derive(Debug)]
pub(super) struct Holder;

/// A grant in force.
#[derive(Debug)]
pub(super) struct OpenGrant {
    pub(super) epoch: Epoch,
    pub(super) key: AccessKey,
    pub(super) mode: GrantMode,
    /// The index of its word among the region's words.
    pub(super) place: usize,
    /// What the word holds.
    pub(super) stamp: u64,
    /// Its process was handed the present memory.
    pub(super) shared: bool,
}

/// Memory lent to a transport.
struct Lent {
    epoch: Epoch,
    cut: Arc<dyn CutOff>,
    holder: Weak<Holder>,
}

/// The state of a move of the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Move {
    /// There is none.
    None,
    /// The memory is about to be replaced: it is not handed out or lent any more.
    Announced,
    /// It is being copied: all accesses are refused.
    Copying,
}

pub(super) struct Slot {
    /// Absent only when replacing it failed, while it is being scrubbed, and while the region is withdrawn.
    pub(super) memory: Option<SharedMemory>,
    pub(super) grants: Vec<OpenGrant>,
    /// The present memory was handed to a process, which cannot be kept from storing there.
    pub(super) handed_out: bool,
    /// Such a process was fenced: unless the memory moves, it may still store where others read.
    pub(super) exposed: bool,
    pub(super) moving: Move,
    lent: Vec<Lent>,
}

impl Slot {
    pub(super) fn new(memory: SharedMemory) -> Self {
        Slot {
            memory: Some(memory),
            grants: Vec::new(),
            handed_out: false,
            exposed: false,
            moving: Move::None,
            lent: Vec::new(),
        }
    }

    /// Whether the region may be lent to a new owner.
    pub(super) fn is_clean(&self) -> bool {
        self.memory.is_some() && self.grants.is_empty() && !self.handed_out && !self.is_held()
    }

    /// Whether the memory is lent to a transport or being moved, so that the region may not be lent again
    /// yet.
    pub(super) fn is_held(&self) -> bool {
        self.moving != Move::None || self.lent.iter().any(|lent| lent.holder.strong_count() > 0)
    }

    pub(super) fn grant(
        &mut self,
        epoch: Epoch,
        key: AccessKey,
        mode: GrantMode,
        region: u32,
        words: &Words,
    ) {
        let taken = |place| self.grants.iter().any(|grant| grant.place == place);
        let place = (0..MAX_GRANTS_PER_REGION).find(|&place| !taken(place));
        let place = place.expect("the lease table grants no more than there are places");
        let stamp = words.stamp(region, place);
        self.grants.push(OpenGrant { epoch, key, mode, place, stamp, shared: false });
    }

    /// Ends one grant; the caller has to pass the barrier.
    pub(super) fn end(&mut self, epoch: Epoch, region: u32, words: &Words) {
        if let Some(at) = self.grants.iter().position(|grant| grant.epoch == epoch) {
            let grant = self.grants.swap_remove(at);
            words.close(region, grant.place);
            self.exposed |= grant.shared;
        }
    }

    /// The memory, for an access under a grant.
    pub(super) fn access(&self, epoch: Epoch, kind: AccessKind) -> Result<&SharedMemory, Refusal> {
        let grant = self.grants.iter().find(|grant| grant.epoch == epoch).ok_or(Refusal::StaleEpoch)?;
        if kind == AccessKind::Write && grant.mode == GrantMode::ReadOnly {
            return Err(Refusal::ReadOnly);
        }
        if self.moving == Move::Copying {
            return Err(Refusal::Busy);
        }
        self.memory.as_ref().ok_or(Refusal::StaleEpoch)
    }

    /// The place in `grants` of the grant that `key` opens.
    pub(super) fn check(&self, epoch: Epoch, key: &AccessKey) -> Result<usize, Refusal> {
        let at = self.grants.iter().position(|grant| grant.epoch == epoch).ok_or(Refusal::StaleEpoch)?;
        if self.grants[at].key != *key {
            return Err(Refusal::WrongKey);
        }
        if self.moving == Move::Copying {
            return Err(Refusal::Busy);
        }
        if self.memory.is_none() {
            return Err(Refusal::StaleEpoch);
        }
        Ok(at)
    }

    /// A descriptor of the memory for one grant's process.
    pub(super) fn hand_out(&mut self, at: usize) -> io::Result<OwnedFd> {
        let memory = self.memory.as_ref().expect("checked with the key");
        let fd = match self.grants[at].mode {
            GrantMode::ReadWrite => memory.fd().try_clone_to_owned()?,
            GrantMode::ReadOnly => reopen_read_only(memory.fd())?,
        };
        self.grants[at].shared = true;
        self.handed_out = true;
        Ok(fd)
    }

    /// Notes a loan of the memory to a transport; `None` when there are `limit` loans.
    pub(super) fn lend(&mut self, epoch: Epoch, cut: Arc<dyn CutOff>, limit: usize) -> Option<Arc<Holder>> {
        self.lent.retain(|lent| lent.holder.strong_count() > 0);
        if self.lent.len() >= limit {
            return None;
        }
        let holder = Arc::new(Holder);
        self.lent.push(Lent { epoch, cut, holder: Arc::downgrade(&holder) });
        Some(holder)
    }

    /// The cuts of one grant's loans, or of all. Loans stay listed until their holders are gone: another
    /// fence that comes meanwhile has to wait for the same cuts.
    pub(super) fn cuts(&self, of: Option<Epoch>) -> Vec<Arc<dyn CutOff>> {
        let wanted = self.lent.iter().filter(|lent| of.is_none_or(|epoch| lent.epoch == epoch));
        wanted.map(|lent| lent.cut.clone()).collect()
    }

    /// Refuses all accesses from now on, and changes the words, so that processes which were handed the
    /// memory notice it. Returns the memory, to be copied; `None` when the lease has ended: then nothing
    /// reads it any more, and nothing moves.
    pub(super) fn begin_copy(&mut self, region: u32, words: &Words) -> Option<Arc<Mapping>> {
        let memory = self.memory.as_ref().filter(|_| !self.grants.is_empty());
        let Some(memory) = memory.map(|memory| memory.mapping().clone()) else {
            self.moving = Move::None;
            return None;
        };
        self.moving = Move::Copying;
        for grant in &mut self.grants {
            grant.stamp = words.stamp(region, grant.place);
            grant.shared = false;
        }
        Words::barrier();
        Some(memory)
    }

    /// Replaces the memory by the copy; returns the old memory.
    pub(super) fn end_copy(&mut self, copy: SharedMemory) -> Option<SharedMemory> {
        self.moving = Move::None;
        self.handed_out = false;
        self.exposed = false;
        self.memory.replace(copy)
    }

    /// Takes the memory of a fenced region that is not [held](Self::is_held); says whether it was ever handed
    /// out.
    pub(super) fn take_for_scrub(&mut self) -> (Option<SharedMemory>, bool) {
        self.lent.clear();
        self.exposed = false;
        (self.memory.take(), std::mem::take(&mut self.handed_out))
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (grants, moving) = (&self.grants, self.moving);
        f.debug_struct("Slot").field("grants", grants).field("moving", &moving).finish_non_exhaustive()
    }
}
