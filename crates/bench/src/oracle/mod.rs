//! Timestamp transactions (paper 3, section 7.2: *t-trx*): begin, take a commit timestamp, move the
//! watermark, and nothing else.
//!
//! Question: what is the oracle's throughput in transactions, and how long until others see a commit?
//! Sketch: shm, a READ of two images of a few slots and a WRITE of a word: some 100 ns with their checksums.
//! Method: client threads in a closed loop beside the oracle's own threads; slices of 0.1 s after a warm-up,
//! median and range.
//! Check: no client ever begins from an earlier cut than before, and in the end the published cut has exactly
//! the commits that were acknowledged.

mod client;
mod options;
mod report;
mod run;

pub use options::{OracleKind, OracleOptions};
pub use report::OracleReport;
pub use run::run_oracle;
