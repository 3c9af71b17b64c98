//! Rules of indexes that are wrong on purpose.

use farpool_txn::hash::{Again, Bucket, IndexRules, KeyHash};

/// Who leaves one entry empty splits the bucket, though others may be filling that.
pub(super) enum SplitUnclosed {}

impl IndexRules for SplitUnclosed {
    fn splits_ahead(empty: usize) -> bool {
        empty == 1
    }
}

/// Who has looked for a key in a bucket does not look in what it was split into.
pub(super) enum BlindAcrossSplits {}

impl IndexRules for BlindAcrossSplits {
    fn looks_again(after: Again) -> bool {
        after != Again::Split
    }
}

/// Who was not the first to fill an entry goes on to the next, whoever it was.
pub(super) enum BlindAfterLosing {}

impl IndexRules for BlindAfterLosing {
    fn looks_again(after: Again) -> bool {
        after != Again::LostEntry
    }
}

/// Any empty entry is as good as another.
pub(super) enum AnyEntry {}

impl IndexRules for AnyEntry {
    fn place(bucket: &Bucket, hash: KeyHash) -> Option<usize> {
        let empty: Vec<usize> = bucket.empty_places().collect();
        let any = hash.0 as usize % empty.len().max(1);
        empty.get(any).copied()
    }
}

/// An entry names a record before its key is written.
pub(super) enum EntryFirst {}

impl IndexRules for EntryFirst {
    fn writes_keys_first() -> bool {
        false
    }
}

/// What fits the hash is the key.
pub(super) enum HashAlone {}

impl IndexRules for HashAlone {
    fn is_key(_found: &[u8], _wanted: &[u8]) -> bool {
        true
    }
}

/// Numbers and buckets of which nobody knows whether they were named are used for something else.
pub(super) enum DoubtIgnored {}

impl IndexRules for DoubtIgnored {
    fn uses_again_what_is_in_doubt() -> bool {
        true
    }
}
