//! Time as the fabric sees it: nanoseconds since some start, never going back.

use std::time::Instant;

/// A monotonic clock. The simulator has its own.
pub trait Clock {
    /// Nanoseconds since an arbitrary, fixed start.
    fn now_ns(&self) -> u64;
}

/// The machine's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct MonotonicClock {
    start: Instant,
}

impl MonotonicClock {
    /// A clock that starts at zero now.
    #[allow(clippy::new_without_default)] // a default clock would hide that the start matters
    pub fn new() -> Self {
        MonotonicClock { start: Instant::now() }
    }
}

impl Clock for MonotonicClock {
    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}
