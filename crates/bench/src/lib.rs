//! Measurements: the fabric, files on it and transactions, beside what the machine could do at best and
//! beside peers; and real databases, with their files in far memory and elsewhere.
//!
//! Question: how much of the hardware's speed is left when memory is accessed through the fabric?
//! Sketch: shm adds the check of an epoch word to a copy; tcp adds a header to a request and a response.
//! Method: operation and floor in short slices in turn; ratios are medians over the pairs.
//! Check: every atomic, and transfers from time to time; one wrong byte fails the measurement.
//!
//! [`run_io`] is one measurement, [`run_table`] all that are published, beside peers. [`run_oracle`] measures
//! the oracle of transactions, [`run_kv`] transactions on records, [`run_txn_table`] everything that is
//! published about both. Not here: the command line.
//!
//! [`run_reclaim`] measures how fast a node gives memory back to its machine.
//!
//! [`run_demo`] runs TPC-H's Hash+Sort on a real PostgreSQL, with its temporary files in one place after
//! another: paper 1 (Li et al., SIGMOD 2016), section 5.2.2, joins `lineitem` with `orders` and returns the
//! top 100,000 rows by extended price; with little `work_mem` both the hash join and the sort spill.
//! [`run_paper`] measures the other figures of the papers, and [`databases`] compares databases on a mount
//! with databases on the local disk. For all of these the `farpool` binary is run as child processes, as a
//! user would run it.
//!
//! Modules are public if tests that need a real server use them: [`postgres::Server`], [`tpch::load`],
//! [`query::HashSort`].

// These macros panic when the stream is closed or full; see `progress::complain`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod by_key;
mod cgroup;
mod chart;
mod child;
mod crew;
pub mod databases;
mod demo;
mod far_memory;
mod files;
mod floors;
mod folder;
mod footprint;
mod kv;
mod lane;
mod local_pool;
mod loop_volume;
pub mod machine;
mod meanwhile;
mod meeting;
mod nbd_file;
mod options;
mod oracle;
mod page_cache;
mod pages;
mod paper;
mod places;
pub mod postgres;
mod progress;
pub mod query;
mod reach;
mod reclaim;
mod report;
mod room;
mod run;
mod service;
mod site;
mod slices;
mod spread;
mod stop;
mod table;
mod tally;
mod throttle;
pub mod tpch;
mod txn_table;

pub use demo::{DEFAULT_WORK_DIR, DemoOptions, DemoReport, run_demo};
pub use far_memory::Transport;
pub use files::{Document, Figure, Opening, is_about_files_alone, serve_file_client, serve_fuse_floor};
pub use floors::{serve_ping_pong, serve_tcp};
pub use kv::{KvIndex, KvMix, KvOptions, KvReport, run_kv};
pub use machine::Machine;
pub use options::{IoOp, IoOptions, IoTransport, Pattern, THREADS_MAX};
pub use oracle::{OracleKind, OracleOptions, OracleReport, run_oracle};
pub use pages::Pages as FloorPages;
pub use paper::{Effort as PaperEffort, PaperOptions, run_paper, run_paper_cache};
pub use reclaim::{ReclaimOptions, ReclaimReport, run_reclaim, serve_demand};
pub use report::{FloorReport, IoReport};
pub use room::check as check_room;
pub use run::{Source, run_io};
pub use stop::StopFlag;
pub use table::{TableOptions, run_table};
pub use txn_table::{TxnTableOptions, run_txn_table};
