//! Paper 1's figures for which a PostgreSQL runs: Hash+Sort by where its temporary files lie, with its traffic over time
//! ([`hash_sort`], figure 14), and what lending memory costs the machine that lends it ([`lending`], figure 13).
//!
//! Rounds alternate between what is compared, so that ratios can be paired. What is written down is made by the caller.

pub mod hash_sort;
pub mod lending;
mod process;
mod stage;

pub use stage::Spot;
