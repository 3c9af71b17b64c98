//! The papers' figures for which a database runs. Of paper 1: Hash+Sort by where its temporary files lie,
//! with its traffic over time ([`hash_sort`], figure 14), RangeScan by where the whole database lies
//! ([`range_scan`]), and the cost of lending memory for the lender ([`lending`], figure 13). Of paper 2:
//! TPC-H's queries ([`tpch_queries`], figures 4 and 5, table 1). The page cache has a document of its own:
//! RangeScan through it ([`cached_scan`], figures 7 to 11), the same by how much memory the server or its
//! cache has ([`memory_sizes`], figures 12 and 24), switchovers to a standby ([`switchover`], figure 16),
//! TPC-H and TPC-DS ([`cached_queries`], figures 18 to 21), several servers with one node
//! ([`several_servers`], figure 25), a page that is in it (`files/cached.rs`), and which pages stay in it
//! ([`cached_hits`]).
//!
//! Every round measures all variants in turn, so that ratios can be paired. [`run_paper`] measures these
//! figures and those about files alone ([`files`](crate::files)), and writes them down ([`report`]).

pub mod cached_hits;
pub mod cached_queries;
pub mod cached_scan;
mod cached_server;
mod effort;
mod half;
pub mod hash_sort;
pub mod lending;
pub mod memory_sizes;
mod process;
pub mod range_scan;
mod report;
mod run;
pub mod several_servers;
pub mod small_transactions;
pub(crate) mod stage;
pub mod switchover;
pub mod tpch_queries;
mod watch;

pub use cached_server::ServerFacts;
pub use effort::Effort;
pub use half::Overflowed;
pub use run::{PaperOptions, run_paper, run_paper_cache};
pub use stage::Spot;
pub use watch::Sample;
