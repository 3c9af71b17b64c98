//! When a closed loop measures: slices of equal length after a warm-up, of which the median counts.

use std::time::{Duration, Instant};

use crate::spread::Spread;

/// Length of a slice; long against whatever a thread waits for.
const SLICE: Duration = Duration::from_millis(100);
/// Fewest slices: with fewer, a median is no better than its worst neighbour.
const SLICES_MIN: usize = 5;

/// When a thread measures.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Before that, nothing counts.
    pub warm_up: Duration,
    /// How many slices follow.
    pub slices: usize,
    /// How long each is.
    pub slice: Duration,
}

impl Plan {
    /// Slices that take so long together.
    pub fn of(duration: Duration, warm_up: Duration) -> Plan {
        let wanted = (duration.as_secs_f64() / SLICE.as_secs_f64()) as usize;
        let slices = wanted.max(SLICES_MIN);
        Plan { warm_up, slices, slice: duration / slices as u32 }
    }

    /// Which slice it is at `now`, where the first began at `began`. `None`: it has not; there may be none of
    /// that number any more.
    pub fn slice_at(&self, began: Instant, now: Instant) -> Option<usize> {
        let since = now.checked_duration_since(began)?;
        Some((since.as_nanos() / self.slice.as_nanos()) as usize)
    }

    /// How many a second there were of what each of several threads has counted in each slice; `None` of no
    /// thread.
    pub fn rates<'a>(&self, threads: impl Iterator<Item = &'a [u64]>) -> Option<Spread> {
        let mut counts = vec![0; self.slices];
        for thread in threads {
            counts.iter_mut().zip(thread).for_each(|(count, more)| *count += more);
        }
        Spread::of(counts.into_iter().map(|count| count as f64 / self.slice.as_secs_f64()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_follow_the_warm_up_and_add_up_over_threads() {
        let plan = Plan::of(Duration::from_secs(1), Duration::ZERO);
        assert_eq!((plan.slices, plan.slice), (10, SLICE));
        assert_eq!(Plan::of(Duration::from_millis(10), Duration::ZERO).slices, SLICES_MIN);
        let began = Instant::now() + SLICE;
        let at = |slices: u32| plan.slice_at(began, began - SLICE + SLICE * slices);
        assert_eq!((at(0), at(1), at(12)), (None, Some(0), Some(11)));
        let plan = Plan { slices: 3, ..plan };
        let rates = plan.rates([&[1, 2, 3][..], &[10, 20, 30]].into_iter()).unwrap();
        assert_eq!((rates.least, rates.middle, rates.most), (110.0, 220.0, 330.0));
    }
}
