//! A database in far memory (paper 3: NAM-DB), for programs: processes that open it are its compute servers.
//! They come and go, look after each other, and none of them is the first: the database lives as long as one
//! of them does.
//!
//! - A [`Database`] is one process's seat among the compute servers.
//! - A [`Client`] is a thread that runs transactions, a [`Session`] one of several users of it.
//! - A [`Table`] has keys and rows of types that the program chooses; a [`Tx`] reads and writes them.
//!
//! `docs/src/namdb.md` tells how to use it, and `docs/src/txn.md` why it is right. Here are threads, files
//! and the catalog; the engine is crate `txn`.

mod catalog;
mod client;
mod collecting;
mod database;
mod error;
mod file;
mod maps;
mod plan;
mod service;
mod table;
#[cfg(test)]
mod tests;
mod transacting;
mod trouble;
pub mod work;
mod workers;

pub use catalog::TableInfo;
pub use client::{Client, Session};
pub use database::{CreateOptions, Credentials, Database, Reach};
pub use error::{DatabaseError, Ended, TxError};
pub use farpool_txn::recovery::Fate;
pub use farpool_wire::Version;
pub use file::DatabaseFile;
pub use service::MemberInfo;
pub use table::{Key, Table, TableOptions};
pub use transacting::Tx;
