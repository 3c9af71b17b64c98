//! The rules on which a file's promises rest, apart from the code that applies them.
//!
//! They are a type parameter of [`FileCore`](crate::FileCore) and [`StoreCore`](crate::StoreCore), so that a
//! simulation can replace a correct rule by a wrong one and test that its checker notices. Production is
//! compiled with [`Shipped`] alone.

use farpool_pool::Extent;
use farpool_wire::BlockWord;

/// Decides when a block is correct, how far a file reaches, and how writes in doubt are treated.
pub trait Rules: Send + Sync + 'static {
    /// The checksum in a block's word.
    fn checksum(block: &[u8]) -> u64 {
        crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, block)
    }

    /// How far a file of `size` bytes reaches once bytes up to `end` are stored.
    fn size_after_write(size: u64, end: u64) -> u64 {
        size.max(end)
    }

    /// Where clearing begins when a file is truncated to `size`: nothing beyond may appear when the file
    /// grows again.
    fn cleared_from(size: u64) -> u64 {
        size
    }

    /// Where clearing begins after a write at `offset` to a file of `size` bytes has failed.
    fn failed_write_cleared_from(size: u64, offset: u64) -> u64 {
        size.max(offset)
    }

    /// Whether a write in doubt may still land on an extent; if so, nothing new is written there.
    fn may_still_change(extent: &Extent) -> bool {
        extent.is_in_doubt() && !extent.region().has_ended()
    }

    /// Whether a direct client (called *guest* in the code) may work on a file, given whether the file is
    /// open to direct clients.
    fn guests_may_enter(is_open: bool) -> bool {
        is_open
    }

    /// Whether direct clients stop making a file longer once the owner forbids it.
    fn takes_growth_back() -> bool {
        true
    }

    /// Whether a write updates the parity of what it writes.
    fn updates_parity() -> bool {
        true
    }

    /// Whether an extent that is being rebuilt stays locked until the new one is in place.
    fn rebuild_keeps_locks() -> bool {
        true
    }

    /// Whether an extent that moves stays locked until the new one is in place (M1).
    fn move_keeps_locks() -> bool {
        true
    }

    /// Whether the removal of an extent from a file is recorded before the extent can be used again.
    fn journals_frees() -> bool {
        true
    }

    /// Whether extents to which a dead owner may have been writing are in doubt, and not reused, because such
    /// a write may still land.
    fn doubts_what_was_left() -> bool {
        true
    }

    /// Whether a successor settles the locks that a dead owner has left.
    fn settles_locks() -> bool {
        true
    }

    /// The word of a block of which it is indeterminate whether its new contents were stored.
    fn in_doubt(before: BlockWord) -> BlockWord {
        before.lost()
    }
}

/// The rules as they ship.
#[derive(Clone, Copy, Debug)]
pub enum Shipped {}

impl Rules for Shipped {}
