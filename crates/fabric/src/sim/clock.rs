//! Clocks that run fast or slow.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Clock;

/// The rate, in parts in a million, of a clock that is right.
pub(super) const TRUE_RATE_PPM: u64 = 1_000_000;

/// What a clock of rate `ppm` shows at a true time.
pub(super) fn shown(true_ns: u64, ppm: u64) -> u64 {
    (u128::from(true_ns) * u128::from(ppm) / u128::from(TRUE_RATE_PPM)) as u64
}

/// The first true time at which a clock of rate `ppm` shows at least `local_ns`.
pub(super) fn true_time_of(local_ns: u64, ppm: u64) -> u64 {
    (u128::from(local_ns) * u128::from(TRUE_RATE_PPM)).div_ceil(u128::from(ppm)).min(u128::from(u64::MAX))
        as u64
}

/// A host's clock. Reading it takes no lock, so that what a node serves may do so too.
#[derive(Clone)]
pub struct SimClock {
    pub(super) time: Arc<AtomicU64>,
    pub(super) rate_ppm: u64,
}

impl Clock for SimClock {
    fn now_ns(&self) -> u64 {
        // Relaxed: time changes under the world's lock, and all readers run in the world.
        shown(self.time.load(Ordering::Relaxed), self.rate_ppm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skewed_clock_reaches_a_time_exactly_when_it_is_said_to() {
        for ppm in [900_000, 999_999, TRUE_RATE_PPM, 1_000_001, 1_100_000] {
            for local_ns in [0, 1, 17, 1_000_003, 123_456_789_012] {
                let at = true_time_of(local_ns, ppm);
                assert!(shown(at, ppm) >= local_ns, "{ppm} {local_ns}");
                assert!(at == 0 || shown(at - 1, ppm) < local_ns, "{ppm} {local_ns}");
            }
        }
    }
}
