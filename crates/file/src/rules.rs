//! The rules on which a file's promises rest, apart from the code that follows them.
//!
//! They are a type parameter of [`FileCore`](crate::FileCore) and [`StoreCore`](crate::StoreCore), so that a simulation can
//! put a wrong rule in the place of a right one and see that its checker notices. Production is compiled with [`Shipped`]
//! alone.

use farpool_pool::Extent;
use farpool_wire::BlockWord;

/// What decides when a block is right, how far a file reaches, and what becomes of a write in doubt.
pub trait Rules: Send + Sync + 'static {
    /// The checksum that a block's word keeps.
    fn checksum(block: &[u8]) -> u64 {
        crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, block)
    }

    /// How far a file of `size` bytes reaches once bytes up to `end` were stored.
    fn size_after_write(size: u64, end: u64) -> u64 {
        size.max(end)
    }

    /// From where on a file that is cut off at `size` is cleared: what lies behind must not show when it grows again.
    fn cleared_from(size: u64) -> u64 {
        size
    }

    /// From where on a write at `offset` that failed is cut off again, of a file of `size` bytes.
    fn failed_write_cleared_from(size: u64, offset: u64) -> u64 {
        size.max(offset)
    }

    /// Whether a write of which nobody knows may still land on an extent: nothing new is written there.
    fn may_still_change(extent: &Extent) -> bool {
        extent.is_in_doubt() && !extent.region().is_over()
    }

    /// Whether a guest may work on a file that is open to guests, or not.
    fn guests_may_enter(is_open: bool) -> bool {
        is_open
    }

    /// Whether guests stop making a file longer once the owner forbids it.
    fn takes_growth_back() -> bool {
        true
    }

    /// Whether a write changes the parity of what it writes.
    fn updates_parity() -> bool {
        true
    }

    /// Whether an extent that is made anew stays locked until it is in its place.
    fn rebuild_keeps_locks() -> bool {
        true
    }

    /// Whether an extent's leaving a file is written down before it can be used again.
    fn journals_frees() -> bool {
        true
    }

    /// Whether nobody gets what a dead owner may have been writing to, since that may still land.
    fn doubts_what_was_left() -> bool {
        true
    }

    /// Whether locks that a dead owner has left are settled by the one who takes over.
    fn settles_locks() -> bool {
        true
    }

    /// The word of a block when nobody knows whether its new contents were stored.
    fn in_doubt(before: BlockWord) -> BlockWord {
        before.lost()
    }
}

/// The rules as they ship.
#[derive(Clone, Copy, Debug)]
pub enum Shipped {}

impl Rules for Shipped {}
