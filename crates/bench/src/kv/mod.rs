//! Transactions on records that are addressed by number: the engine without indexes and without a schema.
//!
//! Question: how many small transactions does a thread run, and what does each cost in operations and bytes
//! of far memory?
//! Sketch: shm, 4 cache misses of 0.4 us and 4 checksums for 4 reads: some 2 us, less where misses overlap;
//! tcp, 6 round trips of 20 us for a commit, so 16 in flight give some 100 k/s if only latency matters.
//! Method: threads in a closed loop, each in a slot of its own with some transactions in flight, beside the
//! oracle's publisher; slices of 0.1 s after a warm-up, median and range; transactions that conflict are
//! tried again.
//! Check: every record that is read holds its own number and is of one write. Where counters are incremented,
//! a final read-only scan must find as many increments as were committed.

mod chooser;
mod content;
mod ground;
mod lane;
mod options;
mod report;
mod run;

pub use chooser::Chooser;
pub use content::RECORD_BYTES;
pub use lane::Course;
pub use options::{KvIndex, KvMix, KvOptions};
pub use report::{KvReport, Measured};
pub use run::{Thread, check_sum, processor_time, run_kv};
