//! Shows the other threads of a process whether an endpoint's thread runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How often an endpoint was polled. While its thread runs [`block_on`](crate::block_on), the count grows at
/// least every 50 ms, also while operations wait for a node that does not answer. While the thread stands
/// still, so does the count. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Turns(Arc<Line>);

/// In a cache line of its own, since each thread writes its count all the time.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Line(AtomicU64);

impl Turns {
    /// The count so far.
    pub fn count(&self) -> u64 {
        self.0.0.load(Ordering::Relaxed) // carries no data
    }

    /// Counts one more. Only the endpoint's own thread calls this, so a load and a store are enough.
    pub(super) fn another(&self) {
        self.0.0.store(self.count().wrapping_add(1), Ordering::Relaxed); // carries no data
    }
}
