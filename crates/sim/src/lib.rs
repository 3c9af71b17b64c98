//! Whole-system simulation: production code runs in a seeded world, and independent checkers judge what it
//! does.
//!
//! - A [`Scenario`] runs one seed: it builds a world, starts clients and faults in it, and hands the history
//!   of requests and answers to its checker.
//! - [`sweep`] runs many seeds on all processors; each seed is single-threaded and independent of the others.
//! - [`hunt`] breaks the code under test on purpose and looks for the first seeds that notice. A checker that
//!   cannot fail proves nothing.
//!
//! Not here: the simulated world itself (`farpool_fabric::sim`), the command line (crate `cli`).

mod cache;
mod fabric;
mod file;
mod hash;
mod index;
mod indexing;
mod lending;
mod members;
mod mutation;
mod notebook;
mod place;
mod plane;
mod pool;
mod register;
mod runner;
mod staying;
mod transacting;
mod txn;

pub use cache::CACHE;
pub use fabric::FABRIC;
pub use file::FILE;
pub use hash::HASH;
pub use index::INDEX;
pub use members::MEMBERS;
pub use pool::POOL;
pub use runner::{Catch, RunReport, Scenario, Sweep, find_scenario, hunt, run_guarded, sweep};
pub use txn::TXN;
