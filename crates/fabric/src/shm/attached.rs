//! A region's memory and the word that says whether it is still the grant's.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use farpool_wire::{Epoch, GrantMode, Refusal, ShmAttached};

use crate::host::access_refusal;
use crate::memory::{AccessError, Mapping, Protection, is_sealed_against_shrinking};
use crate::seam::{Op, Outcome, Posted};

/// A region that is mapped.
pub(super) struct Attached {
    epoch: Epoch,
    memory: Mapping,
    words: Mapping,
    word_offset: u64,
    stamp: u64,
}

/// The grant's word is another: the memory is of no use any more.
pub(super) struct Moved {
    /// The operation was under way.
    pub(super) begun: bool,
}

impl Attached {
    pub(super) fn map(
        epoch: Epoch,
        layout: ShmAttached,
        memory: OwnedFd,
        words: OwnedFd,
    ) -> io::Result<Self> {
        if !is_sealed_against_shrinking(memory.as_fd()) || !is_sealed_against_shrinking(words.as_fd()) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the memory's size is not sealed"));
        }
        let protection = match layout.mode {
            GrantMode::ReadOnly => Protection::ReadOnly,
            GrantMode::ReadWrite => Protection::ReadWrite,
        };
        let memory = Mapping::new(memory.as_fd(), layout.region_bytes, protection)?;
        let words_bytes = layout.word_offset.checked_add(8);
        let words_bytes = words_bytes.filter(|_| layout.word_offset.is_multiple_of(8));
        let words_bytes = words_bytes.ok_or(io::Error::from(io::ErrorKind::InvalidData))?;
        let words = Mapping::new(words.as_fd(), words_bytes, Protection::ReadOnly)?;
        Ok(Attached { epoch, memory, words, word_offset: layout.word_offset, stamp: layout.stamp })
    }

    pub(super) fn access(&self, posted: &Posted) -> Result<Outcome, Moved> {
        if posted.epoch != self.epoch {
            return Ok(Outcome::Refused(Refusal::StaleEpoch));
        }
        if !self.is_valid() {
            return Err(Moved { begun: false });
        }
        let value = match self.touch(posted) {
            Ok(value) => value,
            Err(error) => return Ok(Outcome::Refused(access_refusal(error))),
        };
        // S1; pairs with the barrier between changing the word and copying or reusing the memory (S2). Loads before
        // a load need no more than an acquire; a store before a load needs the full barrier; atomics are
        // sequentially consistent, as is the load of the word behind them.
        match posted.op {
            Op::Write => fence(Ordering::SeqCst),
            _ => fence(Ordering::Acquire),
        }
        if self.is_valid() { Ok(Outcome::Done(value)) } else { Err(Moved { begun: true }) }
    }

    /// Starts to fetch what an operation will touch.
    pub(super) fn prefetch(&self, posted: &Posted) {
        self.memory.prefetch(posted.offset, posted.local.bytes);
    }

    fn touch(&self, posted: &Posted) -> Result<u64, AccessError> {
        let local = posted.local;
        match posted.op {
            Op::Read => {
                // SAFETY: `local` is the operation's own buffer, valid and exclusive while it is in flight.
                unsafe { self.memory.read_to(posted.offset, local.start, local.bytes) }.map(|()| 0)
            }
            Op::Write => {
                // SAFETY: as above.
                unsafe { self.memory.write_from(posted.offset, local.start, local.bytes) }.map(|()| 0)
            }
            Op::CompareAndSwap { expected, new } => {
                self.memory.compare_and_swap(posted.offset, expected, new)
            }
            Op::FetchAndAdd { addend } => self.memory.fetch_and_add(posted.offset, addend),
            Op::Attach(_) | Op::Detach | Op::Call { .. } => unreachable!("for the node to do"),
        }
    }

    fn is_valid(&self) -> bool {
        // The place was checked when it was mapped.
        self.words.load(self.word_offset) == Ok(self.stamp)
    }
}
