//! The hash table over one-sided operations, which maps keys to records (paper 3, section 5.2;
//! `docs/src/txn.md`, *keys*).
//!
//! H1. An entry is empty first, and then one record's for good. So a full bucket does not change any more:
//!     being full closes it.
//! H2. Entries are filled in their order, each by compare-and-swap. A client that fills one has seen all
//!     entries before it, and none had its key. So no key has two entries.
//! H3. A key is written whole, in the place that its record's number determines, before an entry names the
//!     number. It is never written again.
//! H4. A full bucket is split by copying it to two buckets that no other client knows of, and then naming
//!     these by one compare-and-swap. A split that is not named has not happened: no client waits for
//!     another.
//! H5. What another client may know of is not used for anything else: numbers and buckets whose naming is in
//!     doubt are given up.
//! H6. A client that meets a number or a bucket beyond the pieces that it knows stops there: the entry may be
//!     its key's.
//!
//! Not here: versions of records, transactions ([`KeyedTable`](crate::KeyedTable)), removing entries, leasing
//! memory.

mod bucket;
mod index;
mod key;
mod layout;
mod rules;
mod spares;

pub use bucket::{Bucket, Entry, MOST_DEPTH};
pub(crate) use index::is_unknown_to_others;
pub use index::{Index, IndexError, Numbered};
pub use key::{KeyHash, MOST_KEY_BYTES};
pub use layout::{IndexLayout, IndexShape, MOST_ENTRIES};
pub use rules::{Again, IndexRules};
pub use spares::IndexSpares;
pub(crate) use spares::{Spares, take_spare};
