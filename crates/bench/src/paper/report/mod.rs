//! The reports on the papers' figures that run a database, each with its goals and its drawing.

mod cached_hits;
mod cached_queries;
mod cached_scan;
mod hash_sort;
mod lending;
mod memory_sizes;
mod queries;
mod range_scan;
mod several_servers;
mod small_transactions;
mod switchover;

use anyhow::Result;

use super::memory_sizes::Varied;
use super::{Effort, Sample, Spot};
use crate::chart::{Bar, FLOOR, OURS, PEER};
use crate::databases::duckdb::Benchmark;
use crate::files::{Figure, Section};
use crate::spread::Spread;
use crate::stop::StopFlag;

/// Whether [`measure`] gives this figure.
pub fn has(figure: Figure) -> bool {
    let here = [
        Figure::CachedHits,
        Figure::CachedScan,
        Figure::RangeScan,
        Figure::Sigmod12,
        Figure::Sigmod13,
        Figure::Sigmod14,
        Figure::Sigmod16,
        Figure::Sigmod18,
        Figure::Sigmod20,
        Figure::Sigmod24,
        Figure::Sigmod25,
        Figure::SmallTransactions,
    ];
    here.contains(&figure) || queries::has(figure)
}

/// Measures the requested figures.
pub fn measure(figures: &[Figure], effort: &Effort<'_>, stop: &StopFlag) -> Result<Vec<Section>> {
    let mut sections = Vec::new();
    if figures.iter().any(|&figure| queries::has(figure)) {
        sections.extend(queries::measure(figures, effort, stop)?);
    }
    if figures.contains(&Figure::RangeScan) {
        sections.push(range_scan::measure(effort, stop)?);
    }
    if figures.contains(&Figure::SmallTransactions) {
        sections.push(small_transactions::measure(effort, stop)?);
    }
    if figures.contains(&Figure::Sigmod13) {
        sections.push(lending::measure(effort, stop)?);
    }
    if figures.contains(&Figure::CachedScan) {
        sections.push(cached_scan::measure(effort, stop)?);
    }
    if figures.contains(&Figure::Sigmod12) {
        sections.push(memory_sizes::measure(Varied::Cache, effort, stop)?);
    }
    if figures.contains(&Figure::Sigmod16) {
        sections.push(switchover::measure(effort, stop)?);
    }
    if figures.contains(&Figure::Sigmod18) {
        sections.push(cached_queries::measure(Benchmark::TpcH, effort, stop)?);
    }
    if figures.contains(&Figure::Sigmod20) {
        sections.push(cached_queries::measure(Benchmark::TpcDs, effort, stop)?);
    }
    if figures.contains(&Figure::Sigmod24) {
        sections.push(memory_sizes::measure(Varied::Local, effort, stop)?);
    }
    if figures.contains(&Figure::Sigmod25) {
        sections.push(several_servers::measure(effort, stop)?);
    }
    if figures.contains(&Figure::CachedHits) {
        sections.push(cached_hits::measure(effort, stop)?);
    }
    if figures.contains(&Figure::Sigmod14) {
        sections.push(hash_sort::measure(effort, stop)?);
    }
    Ok(sections)
}

/// A place's bar, in the colour of its kind.
fn bar(spot: Spot, spread: Option<Spread>) -> Option<Bar> {
    let colour = match spot {
        Spot::Tmpfs => FLOOR,
        Spot::Disk | Spot::Throttled => PEER,
        _ => OURS,
    };
    Some(Bar { name: spot.name().into(), colour, spread: spread? })
}

/// The run with the median time.
fn middle_run<'a, R>(runs: impl Iterator<Item = &'a R>, seconds: fn(&R) -> f64) -> Option<&'a R> {
    let mut runs: Vec<&R> = runs.collect();
    runs.sort_by(|one, other| seconds(one).total_cmp(&seconds(other)));
    runs.get(runs.len() / 2).copied()
}

/// Most points of a line: more could not be told apart.
const POINTS: usize = 60;

/// How fast a figure grows, between samples that are not too close.
fn slope(samples: &[Sample], figure: fn(&Sample) -> f64) -> Vec<(f64, f64)> {
    let samples: Vec<&Sample> = samples.iter().step_by(samples.len().div_ceil(POINTS).max(1)).collect();
    let pairs = samples.windows(2).filter(|pair| pair[1].at_s > pair[0].at_s);
    pairs
        .map(|pair| (pair[1].at_s, (figure(pair[1]) - figure(pair[0])) / (pair[1].at_s - pair[0].at_s)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_has_few_points_and_the_slope_of_its_samples() {
        let sample = |tenth: u32| {
            let at_s = f64::from(tenth) / 10.0;
            Sample { at_s, read_bytes: 0, written_bytes: (at_s * 1e7) as u64, cpu_s: 0.0 }
        };
        let speed = slope(&(0..200).map(sample).collect::<Vec<_>>(), |it| it.written_bytes as f64 / 1e6);
        assert!(
            speed.len() <= POINTS && speed.iter().all(|point| (point.1 - 10.0).abs() < 0.01),
            "{speed:?}"
        );
    }
}
