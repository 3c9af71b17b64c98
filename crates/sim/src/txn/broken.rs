//! Rules of transactions that are wrong on purpose, one in each run.
//!
//! All are one type, so that the engine is compiled once for all of them; which one holds is the thread's, as a run is.

use std::cell::Cell;

use farpool_txn::{Cut, Rules, Shipped};
use farpool_wire::{RecordHeader, Version};

/// A session patches its own last commit into a published cut, instead of waiting for one that has it.
pub(super) const OWN_SLOT: &str = "own-slot-patched-into-the-cut";
/// A transaction begins from a scan of the slots of its own.
pub(super) const UNPUBLISHED: &str = "begin-from-unpublished-scan";
/// A record counts as locked whatever was found there.
pub(super) const VALIDATION: &str = "validation-skipped";
/// Data are taken as they are found.
pub(super) const CHECKSUM: &str = "checksum-off";
/// A commit is shown before it is installed.
pub(super) const SHOWN_FIRST: &str = "visibility-before-install";
/// A record that somebody has locked is locked again.
pub(super) const LOCK_IGNORED: &str = "lock-bit-ignored";
/// Records are locked before it is written down what they held.
pub(super) const LOCKED_FIRST: &str = "lock-before-intent";
/// What a client has left is undone before its grants are fenced.
pub(super) const UNFENCED: &str = "locks-released-before-fence";
/// A slot has its next client before what the last one left is undone.
pub(super) const REUSED: &str = "slot-reused-before-rollback";

/// Several parts of an oracle are read once, whatever was published meanwhile.
pub(super) const PARTS_ONCE: &str = "partitions-read-one-after-another";
/// A publisher's next cut has less of what stood still than the one before.
pub(super) const OUT_OF_ORDER: &str = "publish-out-of-order";

pub(super) const MUTATIONS: &[&str] = &[
    OWN_SLOT,
    UNPUBLISHED,
    VALIDATION,
    CHECKSUM,
    SHOWN_FIRST,
    LOCK_IGNORED,
    LOCKED_FIRST,
    UNFENCED,
    REUSED,
    PARTS_ONCE,
    OUT_OF_ORDER,
];

thread_local! {
    static BROKEN: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// From now on that is wrong, in the runs of this thread.
pub(super) fn set(mutation: Option<&'static str>) {
    BROKEN.set(mutation);
}

/// Whether that is wrong in this run.
pub(super) fn is(mutation: &str) -> bool {
    BROKEN.get() == Some(mutation)
}

/// The rules of a run: as they ship, but for the one that is wrong.
pub(super) enum Chosen {}

impl Rules for Chosen {
    fn begin(published: Cut, own: Option<Version>) -> Option<Cut> {
        let unseen = own.filter(|own| is(OWN_SLOT) && !published.sees(*own));
        let Some(unseen) = unseen else { return Shipped::begin(published, own) };
        let mut counts = published.counts().to_vec();
        if let Some(count) = counts.get_mut(unseen.slot().index()) {
            *count = unseen.count();
        }
        Some(Cut::new(published.sequence(), counts.into()))
    }

    fn begins_from_words() -> bool {
        is(UNPUBLISHED) || Shipped::begins_from_words()
    }

    fn looks_twice() -> bool {
        !is(PARTS_ONCE) && Shipped::looks_twice()
    }

    fn next_counts(last: &[u64], words: &[u64]) -> Vec<u64> {
        if !is(OUT_OF_ORDER) {
            return Shipped::next_counts(last, words);
        }
        let next = |(&last, &word): (&u64, &u64)| if word > last { word } else { last.saturating_sub(1) };
        last.iter().zip(words).map(next).collect()
    }

    fn has_locked(seen: RecordHeader, found: RecordHeader) -> bool {
        is(VALIDATION) || Shipped::has_locked(seen, found)
    }

    fn takes(checksum_is_right: bool) -> bool {
        is(CHECKSUM) || Shipped::takes(checksum_is_right)
    }

    fn may_be_locked(seen: RecordHeader, data: RecordHeader) -> bool {
        (is(LOCK_IGNORED) && seen.is_locked()) || Shipped::may_be_locked(seen, data)
    }

    fn logs_first() -> bool {
        !is(LOCKED_FIRST) && Shipped::logs_first()
    }

    fn installs_first() -> bool {
        !is(SHOWN_FIRST) && Shipped::installs_first()
    }
}
