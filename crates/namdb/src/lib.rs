//! A database in far memory (paper 3: NAM-DB), for programs. Processes that open it are its compute servers.
//! They join and leave, and recover each other after failures. None of them is special: the database lives as
//! long as one of them does.
//!
//! - A [`Database`] is a process's seat among the compute servers.
//! - A [`Client`] is a thread that runs transactions. A [`Session`] is one of several users of it.
//! - A [`Table`] has keys and rows of types that the program chooses; a [`Tx`] reads and writes them.
//!
//! [`MemberCore`] and [`ClientCore`] are the same without threads. They run in an [`Environment`]: a process
//! or a simulation.
//!
//! `docs/src/namdb.md` says how to use it, and `docs/src/txn.md` why it is correct. This crate has threads,
//! files and the catalog; the engine is crate `txn`.

mod catalog;
mod client;
mod database;
pub mod dynamic;
mod environment;
mod error;
mod file;
mod handle;
mod key;
mod maps;
mod member;
mod regions;
mod rows;
mod rules;
mod table;
#[cfg(test)]
mod tests;
mod threads;
mod transacting;
mod verifying;
pub mod work;
mod workers;

pub use catalog::{IndexInfo, TableInfo};
pub use client::{BusyGuard, Client, ClientCore, Session};
pub use database::{CreateOptions, Credentials, Database, Process, Reach};
pub use environment::{Environment, News, Timing};
pub use error::{DatabaseError, Ended, TxError};
// Types in errors and options of this crate, so that programs need no other Farpool crate.
pub use farpool_control::{ControlError, Tls};
pub use farpool_fabric::{TransportChoice, Transports};
pub use farpool_pool::{GrantError, JointError, PoolConfig};
pub use farpool_txn::recovery::{Fate, RecoveryError};
pub use farpool_txn::{BeginError, CommitError, Fault, LayoutError, MemoryError, Traffic};
pub use farpool_wire::{RegionId, Version};
pub use file::DatabaseFile;
pub use handle::ClientHandle;
pub use key::{Key, KeyBytes, OwnedKey};
pub use member::{BegunDuty, DutyKind, MemberCore, MemberInfo};
pub use rows::{Rows, RowsBy};
pub use rules::MemberRules;
pub use table::{Index, Table, TableOptions};
pub use transacting::Tx;
pub use verifying::VerifiedTable;
