//! Whether the thread of an endpoint runs, for its other threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How often an endpoint was polled. While its thread runs [`block_on`](crate::block_on), this grows each 50 ms at least, also while
/// operations wait for a node that does not answer; it stands still while the thread does. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Turns(Arc<Line>);

/// In a cache line of its own: each thread changes its own all the time.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Line(AtomicU64);

impl Turns {
    /// So many, until now.
    pub fn count(&self) -> u64 {
        self.0.0.load(Ordering::Relaxed) // carries no data
    }

    /// By the endpoint's own thread alone, so that no atomic addition is needed.
    pub(super) fn another(&self) {
        self.0.0.store(self.count().wrapping_add(1), Ordering::Relaxed); // carries no data
    }
}
