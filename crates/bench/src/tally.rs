//! Counts operations, records their latencies, and computes rates and quantiles.

use std::time::Duration;

use anyhow::{Context, Result};
use hdrhistogram::Histogram;

/// Longest latency that is resolved, in picoseconds: 100 s, more than any deadline of the fabric.
const LONGEST_PS: u64 = 100_000_000_000_000;
/// Three significant digits: more than repeated runs agree on.
const DIGITS: u8 = 3;

/// Latencies and operations of one slice, or of several.
#[derive(Clone, Debug)]
pub struct Tally {
    /// Of doorbells, in picoseconds, since a compare-and-swap takes only five nanoseconds.
    latencies_ps: Histogram<u64>,
    /// How many operations ended.
    pub operations: u64,
    /// Operations per second, added up over threads.
    pub per_second: f64,
}

impl Tally {
    /// An empty tally.
    pub fn new() -> Result<Self> {
        let latencies_ps =
            Histogram::new_with_bounds(1, LONGEST_PS, DIGITS).context("cannot make a histogram")?;
        Ok(Tally { latencies_ps, operations: 0, per_second: 0.0 })
    }

    /// Records `doorbells` that took `elapsed` together, one after the other, as one value: their mean.
    #[inline]
    pub fn record(&mut self, elapsed: Duration, doorbells: usize) {
        let each_ps = (elapsed.as_nanos() as u64).saturating_mul(1000) / doorbells as u64;
        self.latencies_ps.saturating_record(each_ps.max(1));
    }

    /// Ends a slice in which `operations` ended within `elapsed`.
    pub fn finish(&mut self, operations: u64, elapsed: Duration) {
        self.operations += operations;
        self.per_second += operations as f64 / elapsed.as_secs_f64();
    }

    /// Adds what another thread counted in the same slice.
    pub fn join(&mut self, other: &Tally) -> Result<()> {
        self.latencies_ps.add(&other.latencies_ps).context("cannot add histograms")?;
        self.operations += other.operations;
        self.per_second += other.per_second;
        Ok(())
    }

    /// The latency in microseconds that this share of the recorded values does not exceed.
    pub fn quantile_us(&self, quantile: f64) -> f64 {
        self.latencies_ps.value_at_quantile(quantile) as f64 / 1e6
    }

    /// Whether anything was counted.
    pub fn is_empty(&self) -> bool {
        self.latencies_ps.is_empty()
    }
}

/// The value that this part of the values does not exceed. `None` if there are none.
pub fn quantile(values: impl IntoIterator<Item = f64>, part: f64) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let at = (values.len() as f64 * part).ceil() as usize;
    values.get(at.saturating_sub(1)).copied()
}

/// The median; of an even number of values the mean of the two in the middle. `None` if there are none.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        return values.get(middle).copied();
    }
    let pair = values.get(middle.checked_sub(1)?..=middle)?;
    Some((pair[0] + pair[1]) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn latencies_of_nanoseconds_are_resolved() {
        let mut tally = Tally::new().unwrap();
        tally.record(Duration::from_nanos(1280), 256);
        assert!((tally.quantile_us(0.5) - 0.005).abs() < 0.00001);
    }

    #[test]
    fn threads_add_their_rates_and_their_latencies() {
        let (mut one, mut other) = (Tally::new().unwrap(), Tally::new().unwrap());
        one.record(Duration::from_micros(1), 1);
        one.finish(10, Duration::from_secs(1));
        other.record(Duration::from_micros(3), 1);
        other.finish(30, Duration::from_secs(1));
        one.join(&other).unwrap();
        assert_eq!((one.operations, one.per_second.round()), (40, 40.0));
        assert!(one.quantile_us(1.0) > 2.9);
    }
}
