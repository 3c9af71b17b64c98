//! A slot's private log (paper 3, section 6.2): what the commits of its client do to each record. From it,
//! the slot's recoverer finds the records that the client has locked, and what was there before.
//!
//! L1. An *intent* says what a commit does to one record. It is whole in both copies before that record is
//!     locked. So either copy tells what a locked record held before.
//! L2. A commit's *head* names its intents. It lies at the commit's count modulo
//!     [`MAX_COMMITS_IN_FLIGHT`](crate::MAX_COMMITS_IN_FLIGHT); the intents lie in a ring of bytes. A head or
//!     an intent is overwritten only after the watermark has reached its commit, or when nothing of that
//!     commit is left.
//! L3. What is read from the log is checked by checksums. Bytes that a transaction writes to records are
//!     never taken for a head.

mod entry;
mod room;

pub use entry::{Head, Intent};
pub(crate) use room::LogRoom;

use std::ops::Range;

use farpool_wire::{MAX_TRANSFER_BYTES, Version};

use crate::memory::Piece;
use crate::slot::MAX_COMMITS_IN_FLIGHT;

const WORD_BYTES: u64 = 8;

/// Where a slot's log lies: two copies, on two nodes if there are two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogAt {
    /// The memory of each copy.
    pub copies: [Piece; 2],
    /// The layout of each.
    pub layout: LogLayout,
}

/// The layout of a log: heads of commits, then the ring of their intents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogLayout {
    ring_bytes: u64,
}

impl LogLayout {
    /// `ring_bytes`, a multiple of eight, is the room for the intents of one slot's commits in flight.
    /// `None`: not a valid size.
    pub fn new(ring_bytes: u64) -> Option<LogLayout> {
        let fits = ring_bytes > 0 && ring_bytes.is_multiple_of(WORD_BYTES) && ring_bytes <= u64::MAX / 2;
        fits.then_some(LogLayout { ring_bytes })
    }

    /// Bytes that a copy takes; it starts at a multiple of eight.
    pub fn bytes(&self) -> u64 {
        self.heads().end + self.ring_bytes
    }

    /// Bytes for intents.
    pub fn ring_bytes(&self) -> u64 {
        self.ring_bytes
    }

    /// Most bytes of intents that one commit may have: they are written with one transfer.
    pub fn most_bytes(&self) -> u64 {
        self.ring_bytes.min(MAX_TRANSFER_BYTES as u64)
    }

    /// Where all heads lie.
    pub fn heads(&self) -> Range<u64> {
        0..(MAX_COMMITS_IN_FLIGHT * Head::PLACE_BYTES) as u64
    }

    /// Where the head of a commit lies, without its verdict.
    pub fn head(&self, version: Version) -> Range<u64> {
        let start = version.count() % MAX_COMMITS_IN_FLIGHT as u64 * Head::PLACE_BYTES as u64;
        start..start + Head::BYTES as u64
    }

    /// Where the verdict on a commit lies: the commit's word, see [`Head::verdict_on`], if its client or a
    /// recoverer has rolled it back.
    pub fn verdict(&self, version: Version) -> Range<u64> {
        let start = self.head(version).end;
        start..start + WORD_BYTES
    }

    /// Where the intents lie that a head names; `None`: the head names a place outside the ring.
    pub fn intents(&self, head: &Head) -> Option<Range<u64>> {
        let end = head.start.checked_add(head.length).filter(|end| *end <= self.ring_bytes)?;
        Some(self.heads().end + head.start..self.heads().end + end)
    }
}
