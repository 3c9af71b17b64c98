//! Rules of files that are wrong on purpose, one in each run.

use std::sync::Arc;

use farpool_file::{Rules, Shipped};
use farpool_lease::Millis;
use farpool_pool::{Extent, LeaseKeeper, NodeState, Sign, Stock};
use farpool_wire::{BLOCK_BYTES, BlockWord, Epoch, RegionId};

use crate::mutation::is;

/// A block is accepted whatever it holds.
pub(super) const UNCHECKED: &str = "checksum-skipped";
/// A connection acknowledges a write as soon as it is posted.
pub(super) const UNLOCKED_EARLY: &str = "block-word-unlocked-before-the-data";
/// A connection acknowledges a write that it never sent.
pub(super) const LOST_WRITE: &str = "lost-write-acknowledged";
/// An extent is reused while a write in doubt may still land there.
pub(super) const REUSED_EARLY: &str = "extent-reused-too-early";
/// A write past the end of a file does not make the file longer.
pub(super) const STALE_SIZE: &str = "size-not-shared";
/// The truncated part of a block stays there, and shows again once the file grows.
pub(super) const TAIL_SHOWS: &str = "cut-tail-shows-again";
/// A failed write also clears what the file held there, not only what lay past its end.
pub(super) const TOO_MUCH_CLEARED: &str = "failed-write-clears-the-file";
/// A block keeps its old word after a write whose outcome is in doubt.
pub(super) const DOUBT_IGNORED: &str = "write-in-doubt-taken-for-none";
/// A direct client (called *guest* in the code) works on files that are closed to it.
pub(super) const NOT_REVOKED: &str = "acceleration-not-revoked";
/// Direct clients go on making a file longer after the owner has forbidden it.
pub(super) const GROWTH_GOES_ON: &str = "growth-not-taken-back";
/// The kernel is not told how long direct clients have made a file.
pub(super) const UNTOLD: &str = "grown-size-not-told";
/// A write does not update the parity.
pub(super) const STALE_PARITY: &str = "stale-parity";
/// Other clients write to an extent while it is rebuilt elsewhere.
pub(super) const LATE_WRITE_MISSED: &str = "rebuild-misses-a-late-write";
/// The removal of an extent from a file is not recorded.
pub(super) const FREES_UNWRITTEN: &str = "freed-extent-not-written-down";
/// Extents to which a dead owner was writing are used as if no write could still land there.
pub(super) const LATE_FORGOTTEN: &str = "late-write-of-a-dead-owner-forgotten";
/// Sessions give up a node that refuses a connection, though it answers renewals.
pub(super) const REFUSED_IS_DEAD: &str = "refused-connection-taken-for-death";
/// A successor does not settle the locks that a dead owner has left.
pub(super) const LOCKS_LEFT: &str = "locks-of-a-dead-owner-not-settled";

/// The overflow directory gives a region for which it has no storage.
pub(super) const OVERFLOW_UNRESERVED: &str = "overflow-handed-out-unreserved";
/// The overflow directory acknowledges a write before it can be read.
pub(super) const OVERFLOW_UNWRITTEN: &str = "overflow-read-before-written";
/// A successor does not find the regions of the overflow directory.
pub(super) const OVERFLOW_NOT_FOUND: &str = "kept-overflow-not-taken-over";
/// A successor finds the regions of the overflow directory empty.
pub(super) const OVERFLOW_EMPTY: &str = "kept-overflow-without-its-data";
/// Other clients write to an extent while it moves.
pub(super) const MOVED_OVER_NEWER: &str = "moved-back-over-newer";

pub(super) const MUTATIONS: &[&str] = &[
    UNCHECKED,
    UNLOCKED_EARLY,
    LOST_WRITE,
    REUSED_EARLY,
    STALE_SIZE,
    TAIL_SHOWS,
    TOO_MUCH_CLEARED,
    DOUBT_IGNORED,
    NOT_REVOKED,
    GROWTH_GOES_ON,
    UNTOLD,
    STALE_PARITY,
    LATE_WRITE_MISSED,
    FREES_UNWRITTEN,
    LOCKS_LEFT,
    LATE_FORGOTTEN,
    REFUSED_IS_DEAD,
    OVERFLOW_UNRESERVED,
    OVERFLOW_UNWRITTEN,
    OVERFLOW_NOT_FOUND,
    OVERFLOW_EMPTY,
    MOVED_OVER_NEWER,
];

/// A stock that gives up a node at the first sign of a failure.
pub(super) struct Hasty(pub(super) Arc<Stock>);

impl LeaseKeeper for Hasty {
    fn now(&self) -> Millis {
        self.0.now()
    }

    fn node_failed(&self, node: &NodeState, _: Sign) -> bool {
        self.0.node_lost(node);
        true
    }

    fn node_answered(&self, _: &NodeState) {}

    fn patience_ended(&self, node: &NodeState) -> bool {
        node.is_lost()
    }

    fn lease_lost(&self, region: RegionId, epoch: Epoch) {
        self.0.lease_lost(region, epoch);
    }
}

/// Whether the kernel is told how long direct clients have made a file.
pub(super) fn growth_is_told() -> bool {
    !is(UNTOLD)
}

/// The rules of a run: the shipped ones, except for the one that the mutation breaks.
pub(super) enum Chosen {}

impl Rules for Chosen {
    fn checksum(block: &[u8]) -> u64 {
        if is(UNCHECKED) { 0 } else { Shipped::checksum(block) }
    }

    fn size_after_write(size: u64, end: u64) -> u64 {
        if is(STALE_SIZE) { size } else { Shipped::size_after_write(size, end) }
    }

    fn cleared_from(size: u64) -> u64 {
        if is(TAIL_SHOWS) { size.next_multiple_of(BLOCK_BYTES as u64) } else { Shipped::cleared_from(size) }
    }

    fn failed_write_cleared_from(size: u64, offset: u64) -> u64 {
        if is(TOO_MUCH_CLEARED) { offset } else { Shipped::failed_write_cleared_from(size, offset) }
    }

    fn may_still_change(extent: &Extent) -> bool {
        !is(REUSED_EARLY) && Shipped::may_still_change(extent)
    }

    fn guests_may_enter(is_open: bool) -> bool {
        is(NOT_REVOKED) || Shipped::guests_may_enter(is_open)
    }

    fn takes_growth_back() -> bool {
        !is(GROWTH_GOES_ON) && Shipped::takes_growth_back()
    }

    fn updates_parity() -> bool {
        !is(STALE_PARITY) && Shipped::updates_parity()
    }

    fn rebuild_keeps_locks() -> bool {
        !is(LATE_WRITE_MISSED) && Shipped::rebuild_keeps_locks()
    }

    fn move_keeps_locks() -> bool {
        !is(MOVED_OVER_NEWER) && Shipped::move_keeps_locks()
    }

    fn journals_frees() -> bool {
        !is(FREES_UNWRITTEN) && Shipped::journals_frees()
    }

    fn doubts_what_was_left() -> bool {
        !is(LATE_FORGOTTEN) && Shipped::doubts_what_was_left()
    }

    fn settles_locks() -> bool {
        !is(LOCKS_LEFT) && Shipped::settles_locks()
    }

    fn in_doubt(before: BlockWord) -> BlockWord {
        if is(DOUBT_IGNORED) { before } else { Shipped::in_doubt(before) }
    }
}
