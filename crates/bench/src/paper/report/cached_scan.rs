//! The report on RangeScan through the page cache.

use anyhow::Result;

use crate::chart::{Bar, Chart, FLOOR, OURS, PEER, draw};
use crate::files::{Figure, Section, Verdict, conditions};
use crate::paper::Effort;
use crate::paper::cached_scan::{self, CachedScanReport, Case, Mix, SESSIONS};
use crate::spread::{Spread, middle, ratio};
use crate::stop::StopFlag;

/// What is promised: the case, beside which other it is at least how many times as fast, for what, and how
/// many sessions.
const PROMISES: [(Case, f64, Case, Mix, u32); 7] = [
    (Case::CacheShm, 0.8, Case::Tmpfs, Mix::Scans, 8),
    (Case::CacheShm, 0.9, Case::Tmpfs, Mix::Scans, 32),
    (Case::CacheShm, 20.0, Case::Throttled, Mix::Scans, 32),
    (Case::CacheShm, 3.0, Case::Disk, Mix::Scans, 32),
    (Case::CacheTcp, 8.0, Case::Throttled, Mix::Scans, 32),
    (Case::CacheShm, 6.0, Case::Throttled, Mix::Updates, 8),
    (Case::CacheShm, 3.0, Case::Throttled, Mix::Updates, 32),
];

/// Measures, and reports.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<Section> {
    Ok(section(&cached_scan::measure(effort, stop)?, effort))
}

fn section(report: &CachedScanReport, effort: &Effort<'_>) -> Section {
    let speed = |case, mix, sessions| Spread::of(report.per_second(case, mix, sessions));
    let paired = |case, other, mix, sessions| Spread::of(report.ratios(case, other, mix, sessions));
    let mut body = String::from(
        "| pages come from | transactions | sessions | per second | × tmpfs | × throttled |\n|---|---|--:|--:|--:|--:|\n",
    );
    for (mix, sessions) in Mix::ALL.into_iter().flat_map(|mix| SESSIONS.map(|sessions| (mix, sessions))) {
        for case in Case::ALL {
            let per_second = middle(speed(case, mix, sessions), 0);
            let [tmpfs, throttled] =
                [Case::Tmpfs, Case::Throttled].map(|other| ratio(paired(case, other, mix, sessions)));
            let (name, mix) = (case.name(), mix.name());
            body += &format!("| {name} | {mix} | {sessions} | {per_second} | {tmpfs} | {throttled} |\n");
        }
    }
    let promised = |(case, limit, other, mix, sessions): (Case, f64, Case, Mix, u32)| {
        let what = format!("{}, {sessions} sessions: {}", mix.name(), case.name());
        Some(Verdict::at_least(&what, limit, other.name(), paired(case, other, mix, sessions)?))
    };
    let chart = |mix: Mix, sessions| Chart {
        title: format!("{}, {sessions} sessions: transactions per second (more is better)", mix.name()),
        digits: 0,
        mark: None,
        bars: Case::ALL.into_iter().filter_map(|case| bar(case, speed(case, mix, sessions))).collect(),
    };
    let charts: Vec<Chart> =
        Mix::ALL.into_iter().flat_map(|mix| SESSIONS.map(|sessions| chart(mix, sessions))).collect();
    Section {
        figure: Figure::CachedScan,
        notes: notes(report, effort),
        body,
        verdicts: PROMISES.into_iter().filter_map(promised).collect(),
        drawing: Some(draw(&charts)),
    }
}

fn notes(report: &CachedScanReport, effort: &Effort<'_>) -> Vec<(&'static str, String)> {
    let CachedScanReport { rows, limit_mib, data_bytes, .. } = report;
    vec![
        (
            "Question",
            "how fast is a database that is larger than its memory, if its pages are found in far memory?"
                .into(),
        ),
        (
            "Floor",
            "the same files on tmpfs: the server's own work, and a copy of each page by the kernel.".into(),
        ),
        (
            "Method",
            format!(
                "RangeScan of Li et al., section 5.2.1: the sum over 100 keys in a row, by the index, of {rows} rows of 245 \
                 bytes ({} MiB with the index and data checksums), chosen uniformly; for 20 % updates, every fifth \
                 transaction adds one to a value. PostgreSQL's own buffers have 128 MiB. A control group limits the memory \
                 of each server, with the kernel's page cache for it, to {limit_mib} MiB; on tmpfs the limit has room for \
                 the files. The files of the cached databases lie on the throttled volume. At the beginning, nine tenths of \
                 all pages at least are in the cache (two nodes on this machine). pgbench runs on the same two processors. {} rounds, in each \
                 of which all cases take turns for {} s each; ratios paired by round, medians with the smallest and the \
                 largest. Afterwards one page in 20 of the cache is compared with the disk.",
                data_bytes >> 20,
                effort.rounds,
                effort.slice.as_secs_f64()
            ),
        ),
        conditions(&format!("PostgreSQL {}", report.postgres)),
    ]
}

/// A case's bar, in the colour of its kind.
fn bar(case: Case, spread: Option<Spread>) -> Option<Bar> {
    let colour = match case {
        Case::Tmpfs => FLOOR,
        Case::CacheShm | Case::CacheTcp => OURS,
        Case::Disk | Case::Throttled => PEER,
    };
    Some(Bar { name: case.name().into(), colour, spread: spread? })
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::paper::cached_scan::Scanned;

    #[test]
    fn each_case_is_written_for_each_load_and_promises_are_judged() {
        let per_second = |case| match case {
            Case::Tmpfs => 1000.0,
            Case::CacheShm => 850.0,
            Case::CacheTcp => 300.0,
            Case::Disk => 200.0,
            Case::Throttled => 40.0,
        };
        let loads = Mix::ALL.into_iter().flat_map(|mix| SESSIONS.map(|sessions| (mix, sessions)));
        let cases = loads.flat_map(|load| Case::ALL.map(|case| (load, case)));
        let slices = cases.flat_map(|((mix, sessions), case)| {
            [0, 1].map(|round| Scanned { case, mix, sessions, round, per_second: per_second(case) })
        });
        let report = CachedScanReport {
            slices: slices.collect(),
            rows: 10_000,
            limit_mib: 384,
            postgres: "15".into(),
            data_bytes: 3 << 20,
        };
        let (work_dir, farpool) = (Path::new("/"), Path::new("/"));
        let effort = Effort { rounds: 2, scale: 0.01, slice: Duration::from_secs(1), work_dir, farpool };
        let section = section(&report, &effort);
        let tables = section.tables();
        let row = "| page cache, shm | scans | 32 | 850 | 0.85 (0.85–0.85) | 21.25 (21.25–21.25) |";
        assert!(tables.contains(row), "{tables}");
        // Not: 0.9 of tmpfs with 32 sessions, and 8 times the throttled volume over TCP.
        let counts = ["| yes |", "| **no** |"].map(|verdict| tables.matches(verdict).count());
        assert_eq!(counts, [5, 2], "{tables}");
    }
}
