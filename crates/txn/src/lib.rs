//! NAM-DB: transactions with snapshot isolation over one-sided operations (paper 3, mended where it leaves something open).
//!
//! So far the timestamp oracle's rules; tables, commits and recovery are to come.
//!
//! - A [`Cut`] is a read timestamp: how many commits of each slot a transaction sees.
//! - [`oracle`] makes cuts: each transaction begins from a published one, and published ones are totally ordered.
//! - [`judge`] tells whether a history of transactions is snapshot isolation.
//! - [`SlotCommits`] numbers the commits of one slot, and says how far they are over without a gap.
//!
//! Everything here takes what it needs as arguments: no clock, no randomness, no memory but its own.

mod cut;
pub mod judge;
pub mod oracle;
mod slot;

pub use cut::Cut;
pub use slot::{MAX_COMMITS_UNDER_WAY, SlotCommits};
