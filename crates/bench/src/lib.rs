//! How fast the fabric is, beside what the machine could do at best and beside peers.
//!
//! Question: how much of the hardware's speed is left when memory is accessed through the fabric?
//! Sketch: shm adds the check of an epoch word to a copy; tcp adds a header to a request and a response.
//! Method: operation and floor in short slices in turn; ratios are medians over the pairs.
//! Check: every atomic, and transfers from time to time; one wrong byte fails the measurement.
//!
//! [`run_io`] is one measurement, [`run_table`] all that are published, beside peers. [`run_oracle`] measures
//! the oracle of transactions, [`run_kv`] transactions on records, [`run_txn_table`] everything that is
//! published about both. Not here: the command line.

// These macros panic when the stream is closed or full; see `child::complain`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod chart;
mod child;
mod crew;
mod files;
mod floors;
mod folder;
mod footprint;
mod kv;
mod lane;
mod local_pool;
mod machine;
mod meeting;
mod options;
mod oracle;
mod pages;
mod places;
mod progress;
mod reach;
mod report;
mod room;
mod run;
mod service;
mod site;
mod slices;
mod spread;
mod table;
mod tally;
mod txn_table;

pub use chart::{Bar, Chart, Course, FLOOR, Line, OURS, PEER, draw_all};
pub use files::{
    Figure, FilesOptions, Section, Verdict, conditions, is_about_files_alone, run_files, serve_file_client,
    serve_fuse_floor, write_sections,
};
pub use floors::{serve_ping_pong, serve_tcp};
pub use kv::{KvMix, KvOptions, KvReport, run_kv};
pub use machine::Machine;
pub use options::{IoOp, IoOptions, IoTransport, Pattern, THREADS_MAX};
pub use oracle::{OracleKind, OracleOptions, OracleReport, run_oracle};
pub use pages::Pages as FloorPages;
pub use report::{FloorReport, IoReport};
pub use room::check as check_room;
pub use run::{Source, run_io};
pub use spread::{Spread, middle, ratio};
pub use table::{TableOptions, run_table};
pub use txn_table::{TxnTableOptions, run_txn_table};
