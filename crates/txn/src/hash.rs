//! The hash table over one-sided operations: which record has which key (paper 3, section 5.2;
//! `docs/src/txn.md`, *keys*).
//!
//! H1. An entry is empty, then it is one record's for good. So a full bucket does not change any more: it is
//!     closed by being full.
//! H2. Entries are filled in their order, each by compare-and-swap: who fills one has seen all before it, and
//!     in none was its key. So no key has two entries.
//! H3. A key is written where its record's number says, whole, before an entry names the number; and never
//!     again.
//! H4. A full bucket is split by copying it into two buckets of which nobody else knows, and then naming them
//!     by one compare-and-swap. A split that nobody has named has not happened: nobody waits for anybody.
//! H5. What somebody else may know of is not used for anything else: numbers and buckets whose naming is in
//!     doubt are given up.
//!
//! Not here: versions of records, transactions ([`KeyedTable`](crate::KeyedTable)), removing entries, who
//! leases the memory.

mod bucket;
mod index;
mod key;
mod layout;
mod rules;
mod spares;

pub use bucket::{Bucket, Entry, MOST_DEPTH};
pub use index::{Index, IndexError, Numbered};
pub use key::{KeyHash, MOST_KEY_BYTES};
pub use layout::{IndexLayout, IndexShape, MOST_ENTRIES};
pub use rules::{Again, IndexRules};
pub use spares::IndexSpares;
