//! Transactions by key: on the tables of a database, as a program uses them.
//!
//! Question: what do keys, rows of the program's types, and the catalog cost on top of transactions on
//! numbered records ([`kv`](crate::kv))? Sketch: a find by hash is a READ of a bucket and one of a key, that
//! of the record together with the second; shm, 4 reads are 12 cache misses, some of which overlap, and some
//! 2 us of computing. 100 rows in order are three to five leaves, each a READ, and a READ of each record.
//! tcp: the reads of a new-order of ten lines take as many round trips as one read, if they are sent
//! together. Method: as for records, but in one compute server of a database of its own, whose threads
//! publish and collect. Check: every row that a transaction reads holds its own key and is of one write. At
//! the end, read, update and rmw read all rows in one snapshot, and count the increments; new-order counts
//! the orders, and looks for all their lines; insert looks for each inserted row, by its key and, if keys are
//! kept in order, by a scan.

mod lane;
mod orders;
mod run;

pub use run::{far_bytes, run_by_key};
