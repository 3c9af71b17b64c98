//! Index rules that are wrong on purpose.

use farpool_txn::hash::{Again, Bucket, IndexRules, KeyHash};

/// A client splits a bucket that has one empty entry left, although another client may be filling that entry.
pub(super) enum SplitUnclosed {}

impl IndexRules for SplitUnclosed {
    fn splits_ahead(empty: usize) -> bool {
        empty == 1
    }
}

/// A client that has searched a bucket for a key does not search the buckets into which it was split.
pub(super) enum BlindAcrossSplits {}

impl IndexRules for BlindAcrossSplits {
    fn looks_again(after: Again) -> bool {
        after != Again::Split
    }
}

/// A client that was not the first to fill an entry takes the next one, without checking whose key is in the
/// first.
pub(super) enum BlindAfterLosing {}

impl IndexRules for BlindAfterLosing {
    fn looks_again(after: Again) -> bool {
        after != Again::LostEntry
    }
}

/// A new key gets any empty entry of its bucket, not the first.
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

/// An entry with the hash of a key is taken for that key's entry.
pub(super) enum HashAlone {}

impl IndexRules for HashAlone {
    fn is_key(_found: &[u8], _wanted: &[u8]) -> bool {
        true
    }
}

/// Numbers and buckets are reused while it is in doubt whether an entry names them.
pub(super) enum DoubtIgnored {}

impl IndexRules for DoubtIgnored {
    fn reuses_numbers_in_doubt() -> bool {
        true
    }
}

/// A record is committed, and never has an entry in the order of keys.
pub(super) enum NotInOrder {}

impl IndexRules for NotInOrder {
    fn enters_in_order() -> bool {
        false
    }
}

/// A scan takes each entry for a row.
pub(super) enum EntryIsRow {}

impl IndexRules for EntryIsRow {
    fn scans_visible_rows() -> bool {
        false
    }
}

/// A row is committed, and never has its entry in a secondary index.
pub(super) enum NotEntered {}

impl IndexRules for NotEntered {
    fn enters_by() -> bool {
        false
    }
}

/// A scan of a secondary index takes each entry for the key of its row.
pub(super) enum EntryIsKey {}

impl IndexRules for EntryIsKey {
    fn compares_keys_of_rows() -> bool {
        false
    }
}

/// A commit does not look whether another row has got its key in a unique index since its cut.
pub(super) enum KeyTwice {}

impl IndexRules for KeyTwice {
    fn looks_before_it_installs() -> bool {
        false
    }
}

/// An entry is removed although a transaction that relies on it is about to commit.
pub(super) enum RemovedUnderInsert {}

impl IndexRules for RemovedUnderInsert {
    fn waits_to_remove() -> bool {
        false
    }
}

/// An entry is removed although a snapshot may see a version with its key.
pub(super) enum RemovedTooEarly {}

impl IndexRules for RemovedTooEarly {
    fn removes_behind_the_horizon() -> bool {
        false
    }
}

/// An entry of a record in a piece that the client does not know is taken for another key's.
pub(super) enum UnknownPassedOver {}

impl IndexRules for UnknownPassedOver {
    fn stops_at_unknown_pieces() -> bool {
        false
    }
}
