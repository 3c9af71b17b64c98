//! The rules that make an index correct, apart from the code that follows them.
//!
//! They are a type parameter of [`Index`](super::Index), like [`crate::Rules`] of workers. A simulation
//! replaces one rule by a wrong one, and verifies that its judge notices. Production is compiled with
//! [`Shipped`] alone.

use super::bucket::Bucket;
use super::key::KeyHash;
use crate::rules::Shipped;

/// Why a client looks for a key once more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Again {
    /// Another client has filled the entry.
    LostEntry,
    /// The bucket was split.
    Split,
}

/// Decides where a key is put, and whether it is there already.
pub trait IndexRules: 'static {
    /// Whether the key of an entry's record is the wanted one.
    fn is_key(found: &[u8], wanted: &[u8]) -> bool {
        found == wanted
    }

    /// The entry that a new key gets: the first empty one. `None`: the bucket has to be split.
    fn place(bucket: &Bucket, _hash: KeyHash) -> Option<usize> {
        bucket.empty_places().next()
    }

    /// Whether a client that could not put its key into an entry looks for the key once more.
    fn looks_again(_after: Again) -> bool {
        true
    }

    /// Whether a key is written before an entry names its record.
    fn writes_keys_first() -> bool {
        true
    }

    /// Whether a bucket is split while this many of its entries are empty, and other clients may be about to
    /// fill one.
    fn splits_ahead(_empty: usize) -> bool {
        false
    }

    /// Whether a number or pair of buckets is reused although another client may know of it.
    fn reuses_numbers_in_doubt() -> bool {
        false
    }

    /// Whether a client that finds an entry with a number beyond the pieces that it knows stops there.
    /// Otherwise it passes the entry over.
    fn stops_at_unknown_pieces() -> bool {
        true
    }

    /// Whether a record has its entry in the order of keys before it is committed (`keyed.rs`, K3).
    fn enters_in_order() -> bool {
        true
    }

    /// Whether a scan passes over entries whose record the transaction does not see (`keyed.rs`, K1).
    fn scans_visible_rows() -> bool {
        true
    }

    /// Whether a row has its entries in secondary indexes before it is committed (`keyed/secondary.rs`, S1).
    fn enters_by() -> bool {
        true
    }

    /// Whether a scan of a secondary index passes over rows that have another key there (S2).
    fn compares_keys_of_rows() -> bool {
        true
    }

    /// Whether a commit looks, behind its locks, whether other rows have its keys in unique indexes (S3).
    fn looks_before_it_installs() -> bool {
        true
    }

    /// Whether a client that removes an entry of a secondary index waits until the transactions that may have
    /// relied on it have ended (`keyed/removing.rs`, 3).
    fn waits_to_remove() -> bool {
        true
    }

    /// Whether an entry of a secondary index stays while a snapshot may need it (`keyed/removing.rs`, 4).
    fn removes_behind_the_horizon() -> bool {
        true
    }
}

impl IndexRules for Shipped {}
