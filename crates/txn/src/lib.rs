//! NAM-DB: transactions with snapshot isolation over one-sided operations (paper 3, completed where it leaves
//! something open).
//!
//! - A [`Worker`] runs transactions on [`Table`]s, for users whose sessions have a [`SessionState`] each;
//!   [`Transaction`] reads, writes and commits.
//! - A [`Cut`] is a read timestamp: how many commits of each slot a transaction sees.
//! - [`oracle`] makes cuts: each transaction begins from a published one, and published ones are totally
//!   ordered.
//! - [`horizon`] says which old versions no snapshot needs any more.
//! - [`judge`] tells whether a history of transactions is snapshot isolation.
//! - [`log`] holds the versions that commits have replaced. Older snapshots read them there, and with them
//!   [`recovery`] rolls back the commits of a dead client.
//! - [`membership`] says which compute servers work on a database, and which of them recovers the slot of a
//!   dead one.
//! - A [`DatabaseLayout`] says where all this lies in a database's regions; [`later`] is the list of those
//!   that the database got after it was created.
//! - A [`slab::Slab`] holds payloads that do not fit their records.
//! - A [`hash::Index`] says which record has which key; a [`KeyedTable`] is a table with one. A
//!   [`tree::Tree`] has records in the order of keys.
//! - A [`SharedSlot`] numbers the commits of one slot, by one thread or several of a compute server, and
//!   keeps the watermark: every commit up to it has finished.
//!
//! `docs/src/txn.md` has the argument for each ordering. Not here: threads, sockets, clocks other than the
//! endpoint's, leasing memory.

mod checksum;
mod cut;
mod error;
mod growth;
pub mod hash;
pub mod horizon;
pub mod judge;
mod keyed;
pub mod later;
pub mod layout;
pub mod log;
pub mod membership;
mod memory;
pub mod oracle;
mod record;
pub mod recovery;
mod rules;
pub mod slab;
mod slot;
mod table;
mod transaction;
pub mod tree;
mod worker;

pub use cut::Cut;
pub use error::{BeginError, CommitError, LeaveError, ReadError};
pub use growth::Growth;
pub use keyed::{
    BadRow, Direction, Fault, FoundBy, KeyError, KeyOfRow, KeyedTable, Scan, Scanned, Secondary,
    StaleEntries, Verified,
};
pub use layout::{DatabaseAt, DatabaseLayout, DatabaseShape, LayoutError, Limits};
pub use memory::{Memory, MemoryError, Piece, Traffic};
pub use oracle::{Fetched, Oracle, OracleAt};
pub use record::{FoundVersion, Label, MOST_RECORD_BYTES, RecordId, RecordLayout};
pub use rules::{Rules, Shipped, Step};
pub use slot::{Held, MAX_COMMITS_IN_FLIGHT, MAX_COUNTS_AHEAD, SharedSlot};
pub use table::Table;
pub use transaction::{Committing, Row, Transaction};
pub use worker::{SessionState, StampError, Stamped, Worker};
