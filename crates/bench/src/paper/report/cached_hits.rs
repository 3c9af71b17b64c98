//! The report on which pages stay in the page cache.

use anyhow::Result;

use crate::chart::{Bar, Chart, OURS, PEER, draw};
use crate::files::{Figure, Section, Verdict, conditions};
use crate::paper::Effort;
use crate::paper::cached_hits::{self, CachedHitsReport, HitRates, Reads};
use crate::spread::{Spread, middle};
use crate::stop::StopFlag;

/// What is promised for the hotspot: so many points below the list at most.
const POINTS_BELOW_LRU: f64 = 0.5;
/// What is promised for Zipf's law and scans.
const HIT_RATE_AT_LEAST: f64 = 0.6;

/// Measures, and reports.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<Section> {
    Ok(section(&cached_hits::measure(effort, stop)?, effort))
}

fn section(report: &CachedHitsReport, effort: &Effort<'_>) -> Section {
    let spread = |reads, value: fn(&HitRates) -> f64| Spread::of(report.values(reads, value));
    let percent = |spread: Option<Spread>| spread.map(|spread| spread.in_units_of(0.01));
    let mut body = String::from(
        "| reads | cache, % of the data | hits, page cache, % | hits, LRU, % | difference, points |\n\
         |---|--:|--:|--:|--:|\n",
    );
    for reads in Reads::ALL {
        let [cache, lru] = [spread(reads, |it| it.cache), spread(reads, |it| it.lru)].map(percent);
        let (name, of_data) = (reads.name(), reads.cache_percent());
        let points = spread(reads, points).map_or("–".into(), |it| format!("{:+.2}", it.middle));
        let (cache, lru, points) = (middle(cache, 1), middle(lru, 1), points.replace('-', "−"));
        body += &format!("| {name} | {of_data} | {cache} | {lru} | {points} |\n");
    }
    let hotspot = spread(Reads::Hotspot, points).map(|reached| {
        let what = format!("hit rate, {}", Reads::Hotspot.name());
        Verdict::points_below(&what, POINTS_BELOW_LRU, "LRU", reached)
    });
    let scans = spread(Reads::ZipfAndScans, |it| it.cache).map(|reached| {
        let what = format!("hit rate, {}", Reads::ZipfAndScans.name());
        Verdict::share_at_least(&what, HIT_RATE_AT_LEAST, reached)
    });
    let charts = Reads::ALL.map(|reads| Chart {
        title: format!(
            "{}; cache: {} % of the data: hits in % of the reads (more is better)",
            reads.name(),
            reads.cache_percent()
        ),
        digits: 1,
        mark: None,
        bars: [
            bar("page cache", OURS, percent(spread(reads, |it| it.cache))),
            bar("LRU", PEER, percent(spread(reads, |it| it.lru))),
        ]
        .into_iter()
        .flatten()
        .collect(),
    });
    Section {
        figure: Figure::CachedHits,
        notes: notes(report, effort),
        body,
        verdicts: hotspot.into_iter().chain(scans).collect(),
        drawing: Some(draw(&charts)),
    }
}

/// How much more the cache found than the list.
fn points(rates: &HitRates) -> f64 {
    100.0 * (rates.cache - rates.lru)
}

fn notes(report: &CachedHitsReport, effort: &Effort<'_>) -> Vec<(&'static str, String)> {
    vec![
        ("Question", "which share of the reads finds its page in a cache that is smaller than the data?".into()),
        (
            "Floor",
            "LRU: a list of the pages that were read last, as long as the cache has slots. Processes that share \
             such a list have to change it at each hit."
                .into(),
        ),
        (
            "Method",
            format!(
                "the cache's callers and keeper, as they ship, over an index in this process's memory, and without a \
                 disk; {} pages, {} reads for each, of which the second half counts. The keeper has a round whenever \
                 half of the slots that it keeps free have been taken. *Zipf and scans*: Zipf's law with the exponent \
                 0.99 and a scan of all pages take turns, a tenth of the pages at a time. {} rounds with other seeds; a \
                 seed gives the same result each time. Medians.",
                report.pages,
                cached_hits::READS_PER_PAGE,
                effort.rounds
            ),
        ),
        conditions("no times are measured"),
    ]
}

fn bar(name: &str, colour: &'static str, spread: Option<Spread>) -> Option<Bar> {
    Some(Bar { name: name.into(), colour, spread: spread? })
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;

    #[test]
    fn rates_stand_beside_those_of_lru_and_promises_are_judged() {
        let rates = |reads| {
            let (cache, lru) = if reads == Reads::Hotspot { (0.9841, 0.99) } else { (0.65, 0.5) };
            [0.0, 0.002].map(|more| HitRates { reads, cache: cache + more, lru })
        };
        let report = CachedHitsReport { rates: Reads::ALL.into_iter().flat_map(rates).collect(), pages: 100 };
        let (work_dir, farpool) = (Path::new("/"), Path::new("/"));
        let effort = Effort { rounds: 2, scale: 0.01, slice: Duration::from_secs(1), work_dir, farpool };
        let section = section(&report, &effort);
        let tables = section.tables();
        for row in [
            "| hotspot: 99 % of reads on 20 % of pages | 25 | 98.5 | 99.0 | −0.49 |",
            "≥ LRU − 0.5 points | none | −0.49 points (−0.59 to −0.39) | yes |",
            "≥ 60 % | none | 65.1 % (65.0 %–65.2 %) | yes |",
        ] {
            assert!(tables.contains(row), "{row} in {tables}");
        }
        assert_eq!(section.drawing.unwrap().matches("<rect x=").count(), 6);
    }
}
