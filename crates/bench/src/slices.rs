//! When a closed loop measures: in slices of equal length after a warm-up; the median of the slices is the
//! result.

use std::time::{Duration, Instant};

use crate::spread::Spread;

/// Length of a slice: long compared with whatever a thread waits for.
const SLICE: Duration = Duration::from_millis(100);
/// Fewest slices: with fewer, a median is no better than its worst neighbour.
const SLICES_MIN: usize = 5;

/// The division of a thread's time.
#[derive(Clone, Copy, Debug)]
pub struct SlicePlan {
    /// Time before the first slice, not counted.
    pub warm_up: Duration,
    /// Number of slices.
    pub slices: usize,
    /// Length of a slice.
    pub slice: Duration,
}

impl SlicePlan {
    /// Divides `duration` into slices.
    pub fn of(duration: Duration, warm_up: Duration) -> SlicePlan {
        let wanted = (duration.as_secs_f64() / SLICE.as_secs_f64()) as usize;
        let slices = wanted.max(SLICES_MIN);
        SlicePlan { warm_up, slices, slice: duration / slices as u32 }
    }

    /// The number of the slice at `now`, if the first one began at `began`; `None` before that. After the
    /// last slice the number is too large.
    pub fn slice_at(&self, began: Instant, now: Instant) -> Option<usize> {
        let since = now.checked_duration_since(began)?;
        Some((since.as_nanos() / self.slice.as_nanos()) as usize)
    }

    /// Operations per second of all threads together, from what each counted in each slice; `None` if there
    /// is no slice.
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
        let plan = SlicePlan::of(Duration::from_secs(1), Duration::ZERO);
        assert_eq!((plan.slices, plan.slice), (10, SLICE));
        assert_eq!(SlicePlan::of(Duration::from_millis(10), Duration::ZERO).slices, SLICES_MIN);
        let began = Instant::now() + SLICE;
        let at = |slices: u32| plan.slice_at(began, began - SLICE + SLICE * slices);
        assert_eq!((at(0), at(1), at(12)), (None, Some(0), Some(11)));
        let plan = SlicePlan { slices: 3, ..plan };
        let rates = plan.rates([&[1, 2, 3][..], &[10, 20, 30]].into_iter()).unwrap();
        assert_eq!((rates.least, rates.middle, rates.most), (110.0, 220.0, 330.0));
    }
}
