//! The demo: TPC-H's Hash+Sort on a real PostgreSQL, with its temporary files in one place after another.
//!
//! Paper 1 (Li et al., SIGMOD 2016), section 5.2.2, joins `lineitem` with `orders` and returns the top
//! 100,000 rows by extended price; with little `work_mem` both the hash join and the sort spill. [`run_demo`]
//! runs that query with `temp_tablespaces` on a tmpfs, in far memory, on the local disk and, if the machine
//! allows it, on a throttled volume, and compares times and rows.
//!
//! The pieces are public because tests that need a real server use them too: [`postgres::Server`],
//! [`tpch::load`], [`query::HashSort`].
//!
//! Nothing here depends on how far memory works: the `farpool` binary is run as child processes, as a user
//! would run it.

// These macros panic when the stream is closed or full; see `progress`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod cgroup;
pub mod child;
pub mod databases;
mod demo;
pub mod machine;
mod meanwhile;
mod median;
pub mod paper;
pub mod pool;
pub mod postgres;
pub mod progress;
pub mod query;
pub mod report;
pub mod stop;
pub mod throttle;
pub mod tpch;

pub use demo::{DEFAULT_WORK_DIR, DemoOptions, run_demo};
pub use pool::Transport;
pub use report::DemoReport;
pub use stop::StopFlag;
