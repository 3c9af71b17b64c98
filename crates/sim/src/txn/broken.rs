//! Rules of transactions that are wrong on purpose.

use farpool_txn::{Cut, Rules};
use farpool_wire::{RecordHeader, Version};

/// A session patches its own last commit into a published cut, instead of waiting for one that has it.
pub(super) enum OwnSlotPatched {}

impl Rules for OwnSlotPatched {
    fn begin(published: Cut, own: Option<Version>) -> Option<Cut> {
        let Some(own) = own.filter(|own| !published.sees(*own)) else { return Some(published) };
        let mut counts = published.counts().to_vec();
        if let Some(count) = counts.get_mut(own.slot().index()) {
            *count = own.count();
        }
        Some(Cut::new(published.sequence(), counts.into()))
    }
}

/// A transaction begins from a scan of the slots of its own.
pub(super) enum UnpublishedScan {}

impl Rules for UnpublishedScan {
    fn begins_from_words() -> bool {
        true
    }
}

/// A record counts as locked whatever was found there.
pub(super) enum ValidationSkipped {}

impl Rules for ValidationSkipped {
    fn has_locked(_seen: RecordHeader, _found: RecordHeader) -> bool {
        true
    }
}

/// Data are taken as they are found.
pub(super) enum ChecksumOff {}

impl Rules for ChecksumOff {
    fn data_of<'a>(_verified: Option<&'a [u8]>, as_found: &'a [u8]) -> Option<&'a [u8]> {
        Some(as_found)
    }
}

/// A commit is shown before it is installed.
pub(super) enum ShownFirst {}

impl Rules for ShownFirst {
    fn installs_first() -> bool {
        false
    }
}

/// Several parts of an oracle are read once, whatever was published meanwhile.
pub(super) enum PartsReadOnce {}

impl Rules for PartsReadOnce {
    fn looks_twice() -> bool {
        false
    }
}

/// A publisher's next cut has less of what stood still than the one before.
pub(super) enum PublishedOutOfOrder {}

impl Rules for PublishedOutOfOrder {
    fn next_counts(last: &[u64], words: &[u64]) -> Vec<u64> {
        let next = |(&last, &word): (&u64, &u64)| if word > last { word } else { last.saturating_sub(1) };
        last.iter().zip(words).map(next).collect()
    }
}
