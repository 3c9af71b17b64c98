//! Unmodified databases on a real mount: they must get the same results there as on the local disk.
//!
//! | module | database | what lies in far memory |
//! |---|---|---|
//! | [`postgres_spills`] | PostgreSQL | temporary files, also of parallel workers that share them |
//! | [`postgres_tables`] | PostgreSQL | a whole tablespace |
//! | [`postgres_inserts`] | PostgreSQL | several clients that insert into one table at the same time |
//! | [`duckdb`] | DuckDB | `temp_directory` |
//! | [`sqlite`] | SQLite | temporary files; databases with each kind of journal |
//! | [`columns`] | a program of our own | mapped intermediates, MonetDB's pattern |
//!
//! Everything runs twice, in a folder on the local disk and in one on the mount ([`Ground`]), and is compared
//! by [`Digest`]s of the rows. The test suite `databases` of the binary asserts that the digests are equal.
//! `farpool bench databases` does the same at a larger scale and also shows the seconds.
//!
//! Servers are run by a *wrapper* if [`Ground::wrapper`] has one: `farpool run --` for [`Access::Direct`], or
//! any other program.

mod bench;
pub mod columns;
mod digest;
pub mod duckdb;
mod ground;
mod job;
mod mapping;
pub mod postgres_inserts;
pub mod postgres_spills;
pub mod postgres_tables;
pub mod sqlite;

pub use bench::{BenchOptions, Database, node_mib, run_bench};
pub use digest::Digest;
pub use ground::{Access, DirectBytes, Ground, GroundOptions, Place, Runner};
pub use job::{Finished, Job, Running};
