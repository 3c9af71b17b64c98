//! A mapped region, and the word that says whether its memory is still the grant's.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use farpool_wire::{Epoch, GrantMode, Refusal, ShmAttached};

use crate::host::access_refusal;
use crate::memory::{AccessError, MappedWord, Mapping, Protection, is_sealed_against_shrinking};
use crate::seam::{Op, Outcome, Posted};
use crate::stamp::{self, Moved, Touch};

/// A region that is mapped.
pub(super) struct Attached {
    epoch: Epoch,
    memory: Mapping,
    words: Mapping,
    word_offset: u64,
    stamp: u64,
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
        let touch = if matches!(posted.op, Op::Write) { Touch::Store } else { Touch::LoadOrAtomic };
        let touched = stamp::guarded(&self.word(), self.stamp, touch, || self.touch(posted))?;
        Ok(touched.map_or_else(|error| Outcome::Refused(access_refusal(error)), Outcome::Done))
    }

    fn word(&self) -> MappedWord<'_> {
        MappedWord { words: &self.words, offset: self.word_offset }
    }

    /// Prefetches the beginning of a range.
    pub(super) fn prefetch(&self, offset: u64, bytes: usize) {
        self.memory.prefetch(offset, bytes);
    }

    fn touch(&self, posted: &Posted) -> Result<u64, AccessError> {
        let local = posted.local;
        match posted.op {
            Op::Read => {
                // SAFETY: `local` is the operation's own buffer, valid and exclusive while it is in flight,
                // or until `read_now` returns.
                unsafe { self.memory.read_to(posted.offset, local.start, local.bytes) }.map(|()| 0)
            }
            Op::Write => {
                // SAFETY: `local` is the operation's own buffer, valid and unchanged while it is in flight.
                unsafe { self.memory.write_from(posted.offset, local.start, local.bytes) }.map(|()| 0)
            }
            Op::CompareAndSwap { expected, new } => {
                self.memory.compare_and_swap(posted.offset, expected, new)
            }
            Op::FetchAndAdd { addend } => self.memory.fetch_and_add(posted.offset, addend),
            Op::Attach(_) | Op::Detach | Op::Call { .. } => unreachable!("for the node to do"),
        }
    }
}
