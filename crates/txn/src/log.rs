//! A slot's private log (paper 3, section 6.2): what each commit of its client has replaced. From it, the
//! slot's recoverer finds the records that the client has locked, and what was there before; and transactions
//! read the versions of records that their snapshots see.
//!
//! L1. An *intent* holds the version of one record that a commit replaces. It is whole in both copies before
//!     that record is locked. So either copy tells what a locked record held before.
//! L2. A commit's *head* names its intents. It lies at the commit's count modulo
//!     [`MAX_COMMITS_IN_FLIGHT`](crate::MAX_COMMITS_IN_FLIGHT); the intents lie behind all heads. A head is
//!     overwritten only after the watermark has reached its commit, or when nothing of that commit is left.
//! L3. What is read from the log is checked by checksums. Bytes that a transaction writes to records are
//!     never taken for a head.
//! L4. An intent is overwritten only once the horizon sees its commit. (Where no worker announces its
//!     snapshots: once the watermark has reached the commit, or nothing of it is left.) Until then a snapshot
//!     may need the version that it holds, or pass it on the way to an earlier one.

mod entry;
mod link;
mod room;

pub use entry::{Head, Intent};
pub use link::Link;
pub use room::{IntentPlace, LogRoom};

use std::ops::Range;
use std::sync::Arc;

use farpool_wire::{MAX_TRANSFER_BYTES, Slot, Version};

use crate::memory::{Memory, MemoryError, Piece};
use crate::slot::MAX_COMMITS_IN_FLIGHT;

const WORD_BYTES: u64 = 8;
/// A link can name every place of so many bytes.
const MOST_AREA_BYTES: u64 = 1 << 54;

/// Where a slot's log lies: two copies, on two nodes if there are two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogAt {
    /// The memory of each copy.
    pub copies: [Piece; 2],
    /// The layout of each.
    pub layout: LogLayout,
}

impl LogAt {
    /// What `decode` finds in a range of the log: in the first copy, or else in the second. A client may
    /// still have the address of a copy that a recovery has lost. That copy lacks what was written since, so
    /// the other one is read, too.
    pub(crate) async fn find<T>(
        &self,
        memory: &Memory,
        range: Range<u64>,
        decode: impl Fn(&[u8]) -> Option<T>,
    ) -> Result<Option<T>, MemoryError> {
        let mut failure = None;
        for copy in &self.copies {
            match memory.read(copy, range.clone()).await {
                Ok(bytes) => {
                    if let Some(found) = decode(&bytes) {
                        return Ok(Some(found));
                    }
                }
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        failure.map_or(Ok(None), Err)
    }
}

/// The logs of all slots, in the slots' order. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Logs(Arc<[LogAt]>);

impl Logs {
    /// The logs of these slots.
    pub fn new(logs: impl IntoIterator<Item = LogAt>) -> Logs {
        Logs(logs.into_iter().collect())
    }

    /// All of them, in the slots' order.
    pub fn iter(&self) -> impl Iterator<Item = &LogAt> {
        self.0.iter()
    }

    /// The log of a slot. `None`: there is no such slot.
    pub fn of(&self, slot: Slot) -> Option<&LogAt> {
        self.0.get(slot.index())
    }
}

/// The layout of a log: heads of commits, then the area for their intents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogLayout {
    area_bytes: u64,
}

impl LogLayout {
    /// `area_bytes`, a multiple of eight, is the room for the intents of one slot's commits. `None`: not a
    /// valid size.
    pub fn new(area_bytes: u64) -> Option<LogLayout> {
        let fits = area_bytes.is_multiple_of(WORD_BYTES) && (1..=MOST_AREA_BYTES).contains(&area_bytes);
        fits.then_some(LogLayout { area_bytes })
    }

    /// Bytes that a copy takes; it starts at a multiple of eight.
    pub fn bytes(&self) -> u64 {
        self.heads().end + self.area_bytes
    }

    /// Bytes for intents.
    pub fn area_bytes(&self) -> u64 {
        self.area_bytes
    }

    /// Most bytes of intents that one commit may have: they are written with one transfer.
    pub fn most_bytes(&self) -> u64 {
        LogRoom::most_bytes(self.area_bytes).min(MAX_TRANSFER_BYTES as u64)
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

    /// Where the head of a commit lies, with its verdict.
    pub fn place_of_head(&self, version: Version) -> Range<u64> {
        let start = self.head(version).start;
        start..start + Head::PLACE_BYTES as u64
    }

    /// Where the verdict on a commit lies: the commit's word, see [`Head::verdict_on`], if its client or a
    /// recoverer has rolled it back.
    pub fn verdict(&self, version: Version) -> Range<u64> {
        let start = self.head(version).end;
        start..start + WORD_BYTES
    }

    /// Where the intents lie that a head names; `None`: the head names a place outside the log.
    pub fn intents(&self, head: &Head) -> Option<Range<u64>> {
        self.intent_range(head.place.start, head.length)
    }

    /// The range of the log with these bytes of the intents area. `None`: the area does not have all of them.
    pub fn intent_range(&self, start: u64, length: u64) -> Option<Range<u64>> {
        let end = start.checked_add(length).filter(|end| *end <= self.area_bytes)?;
        Some(self.heads().end + start..self.heads().end + end)
    }
}
