//! Unmodified databases on a real mount, and behind a real page cache: they must get the same results there
//! as on the local disk.
//!
//! | module | database | what lies in far memory |
//! |---|---|---|
//! | [`postgres_spills`] | PostgreSQL | temporary files, also of parallel workers that share them |
//! | [`postgres_tables`] | PostgreSQL | a whole tablespace |
//! | [`postgres_inserts`] | PostgreSQL | several clients that insert into one table at the same time |
//! | [`duckdb`] | DuckDB | `temp_directory`; pages of a database on the disk |
//! | [`sqlite`] | SQLite | temporary files; databases with each kind of journal, or pages of them |
//! | [`columns`] | a program of our own | mapped intermediates, MonetDB's pattern |
//!
//! Everything runs twice, in a folder on the local disk and in one on the mount or with a cache ([`Ground`]),
//! and is compared by [`Digest`]s of the rows. The test suite `databases` of the binary asserts that the
//! digests are equal. `farpool bench databases` does the same at a larger scale, but without a cache, and
//! also shows the seconds.
//!
//! Databases are run by a *wrapper* if [`Ground::runner`] has one: `farpool run --` for [`Access::Direct`],
//! `farpool run --cache` for [`Access::Cached`], or any other program.

mod bench;
mod cached_files;
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

pub use crate::page_cache::CacheUse;
pub use bench::{BenchOptions, Database, node_mib, run_bench};
pub use digest::Digest;
pub use ground::{Access, DirectBytes, Ground, GroundOptions, Home, Place, Runner};
pub use job::{Finished, Job, Running};
