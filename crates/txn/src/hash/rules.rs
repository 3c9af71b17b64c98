//! The rules on which an index rests, apart from the code that follows them.
//!
//! They are a type parameter of [`Index`](super::Index), as [`crate::Rules`] are of workers: a simulation
//! puts a wrong one in the place of a right one and sees that its judge notices. Production is compiled with
//! [`Shipped`] alone.

use super::bucket::Bucket;
use super::key::KeyHash;
use crate::rules::Shipped;

/// After what a key's place is looked at once more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Again {
    /// Somebody else has filled the entry.
    LostEntry,
    /// The bucket was split.
    Split,
}

/// What decides where a key is put, and whether it is there already.
pub trait IndexRules: 'static {
    /// Whether the key of an entry's record is the one that is looked for.
    fn is_key(found: &[u8], wanted: &[u8]) -> bool {
        found == wanted
    }

    /// Which entry a new key gets: the first that is empty. `None`: the bucket has to be split.
    fn place(bucket: &Bucket, _hash: KeyHash) -> Option<usize> {
        bucket.empty_places().next()
    }

    /// Whether who was about to put a key somewhere looks once more whether it is there.
    fn looks_again(_after: Again) -> bool {
        true
    }

    /// Whether a key is written before an entry names its record.
    fn writes_keys_first() -> bool {
        true
    }

    /// Whether a bucket is split though so many of its entries are empty, and others may be about to fill
    /// one.
    fn splits_ahead(_empty: usize) -> bool {
        false
    }

    /// Whether a number, or a pair of buckets, of which somebody else may know is used for something else.
    fn uses_again_what_is_in_doubt() -> bool {
        false
    }
}

impl IndexRules for Shipped {}
