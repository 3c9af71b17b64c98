//! The report on RangeScan, by where the whole database lies.

use anyhow::Result;

use super::bar;
use crate::chart::{Chart, draw};
use crate::files::{Figure, Section, Verdict, conditions};
use crate::paper::range_scan::{self, RangeScanReport, SESSIONS, SPOTS};
use crate::paper::{Effort, Spot};
use crate::spread::{Spread, middle, ratio};
use crate::stop::StopFlag;

/// The goal for far memory over shm with the interposer, for each number of sessions.
const TMPFS_AT_LEAST: f64 = 0.8;

/// Measures, and reports.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<Section> {
    Ok(section(&range_scan::measure(effort, stop)?, effort))
}

fn section(report: &RangeScanReport, effort: &Effort<'_>) -> Section {
    let speed = |spot, sessions| Spread::of(report.per_second(spot, sessions));
    let paired = |spot, sessions| Spread::of(report.ratios(spot, Spot::Tmpfs, sessions));
    let mut body = String::from(
        "| the database on | sessions | scans/s | × tmpfs | page tables of a session, at most, KiB |\n|---|--:|--:|--:|--:|\n",
    );
    for sessions in SESSIONS {
        for spot in SPOTS {
            let (speed, paired) = (speed(spot, sessions), paired(spot, sessions));
            let tables =
                report.page_tables_kib(spot, sessions).map_or("–".to_owned(), |kib| kib.to_string());
            let (name, speed, paired) = (spot.name(), middle(speed, 0), ratio(paired));
            body += &format!("| {name} | {sessions} | {speed} | {paired} | {tables} |\n");
        }
    }
    let promised = |sessions| {
        let what = format!("RangeScan, scans/s of {sessions} sessions: {}", Spot::InterposedShm.name());
        let reached = paired(Spot::InterposedShm, sessions)?;
        Some(Verdict::at_least(&what, TMPFS_AT_LEAST, Spot::Tmpfs.name(), reached))
    };
    let chart = |sessions| Chart {
        title: format!("RangeScan, {sessions} sessions: scans per second (more is better)"),
        digits: 0,
        mark: None,
        bars: SPOTS.into_iter().filter_map(|spot| bar(spot, speed(spot, sessions))).collect(),
    };
    let notes = vec![
        (
            "Question",
            "how fast is a database all of whose files, its log among them, lie in far memory?".to_owned(),
        ),
        ("Floor", "the same on tmpfs: what is left is the server's own work.".into()),
        (
            "Method",
            format!(
                "RangeScan of Li et al., section 5.2.1, read-only: the sum over 100 keys in a row, by the index, of {} rows \
                 of 245 bytes; PostgreSQL with its own settings for buffers (128 MiB), half of whose reads miss them; pgbench \
                 with plans made anew for each scan, on the same two processors; {} rounds, in each of which all places take \
                 turns for {} s each; ratios paired by round, medians with the smallest and the largest. The disk's files \
                 are in the kernel's page cache.",
                report.rows,
                effort.rounds,
                effort.slice.as_secs_f64()
            ),
        ),
        conditions(&format!("PostgreSQL {}", report.postgres)),
    ];
    let drawing = Some(draw(&SESSIONS.map(chart)));
    let verdicts = SESSIONS.into_iter().filter_map(promised).collect();
    Section { figure: Figure::RangeScan, notes, body, verdicts, drawing }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::paper::range_scan::Scanned;

    #[test]
    fn every_place_is_written_beside_tmpfs_for_each_number_of_sessions() {
        let per_second = |spot, sessions| match (spot, sessions) {
            (Spot::Tmpfs, _) => 1000.0,
            (Spot::InterposedShm, 8) => 900.0,
            _ => 300.0,
        };
        let slice = |round, sessions, spot| {
            let per_second = per_second(spot, sessions);
            Scanned { spot, sessions, round, per_second, page_tables_kib: Some(700) }
        };
        let places = SESSIONS.into_iter().flat_map(|sessions| SPOTS.map(|spot| (sessions, spot)));
        let slices = (0..2).flat_map(|round| {
            places.clone().map(move |(sessions, spot)| slice(round, sessions, spot)).collect::<Vec<_>>()
        });
        let report = RangeScanReport { slices: slices.collect(), rows: 10_000, postgres: "15".into() };
        let (work_dir, farpool) = (Path::new("/"), Path::new("/"));
        let effort = Effort { rounds: 2, scale: 0.01, slice: Duration::from_secs(1), work_dir, farpool };
        let tables = section(&report, &effort).tables();
        assert!(
            tables.contains("| mount alone, 2 nodes, shm | 32 | 300 | 0.30 (0.30–0.30) | 700 |"),
            "{tables}"
        );
        assert_eq!(tables.matches("| yes |").count(), 1, "{tables}");
        assert_eq!(tables.matches("| **no** |").count(), 1, "{tables}");
    }
}
