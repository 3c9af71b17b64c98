//! The report on switchovers to a standby.

use anyhow::Result;

use crate::chart::{Bar, Chart, Course, Line, OURS, PEER, draw_all};
use crate::files::{Figure, Section, Verdict, conditions};
use crate::paper::report::middle_run;
use crate::paper::switchover::{self, Case, FILLED, SESSIONS, Switched, SwitchoverReport, USABLE};
use crate::paper::{Effort, ServerFacts};
use crate::spread::{Spread, middle, ratio};
use crate::stop::StopFlag;

/// Time until the cache is usable, begins empty over handed over: the least ratio promised, and the aim.
const USABLE_SOONER: (f64, f64) = (20.0, 100.0);
/// The same for the p95 of scans in the first minute.
const P95_LOWER: (f64, f64) = (4.0, 10.0);

/// Measures, and reports.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<Section> {
    Ok(section(&switchover::measure(effort, stop)?, effort))
}

fn section(report: &SwitchoverReport, effort: &Effort<'_>) -> Section {
    let of = |case, value: fn(&Switched) -> f64| Spread::of(report.of(case, value));
    let mut body = String::from(
        "| the new server's cache | usable after, s | promoted after, s | first minute: p95 ms | scans per second \
         | until the empty one is usable: p95 ms |\n|---|--:|--:|--:|--:|--:|\n",
    );
    for case in Case::ALL {
        let usable = middle(of(case, |it| it.usable_after_s), 2);
        let promoted = middle(of(case, |it| it.promoted_after_s), 2);
        let p95 = middle(of(case, Switched::p95_ms), 2);
        let per_second = middle(of(case, |it| it.per_second), 0);
        let filling = middle(Spread::of(report.p95_ms_while_filling(case)), 2);
        body += &format!("| {} | {usable} | {promoted} | {p95} | {per_second} | {filling} |\n", case.name());
    }
    let usable = Spread::of(report.ratios(|it| it.usable_after_s));
    let p95 = Spread::of(report.ratios(Switched::p95_ms));
    let filling = Spread::of(SwitchoverReport::paired_ratios(|case| report.p95_ms_while_filling(case)));
    let ratios = [usable, p95, filling].map(ratio);
    body += &format!("| begins empty ÷ handed over | {} | | {} | | {} |\n", ratios[0], ratios[1], ratios[2]);
    let verdict = |what: &str, (must, aim): (f64, f64), reached: Option<Spread>| {
        let than = Case::HandedOver.name();
        Some(Verdict::at_least(what, must, than, reached?).aiming_at(Some(aim)))
    };
    let verdicts = [
        verdict("time until the cache is usable: begins empty", USABLE_SOONER, usable),
        verdict("p95 of scans in the first minute: begins empty", P95_LOWER, p95),
    ];
    let chart = |title: &str, digits, value: fn(&Switched) -> f64| Chart {
        title: title.into(),
        digits,
        mark: None,
        bars: Case::ALL.into_iter().filter_map(|case| bar(case, of(case, value))).collect(),
    };
    let charts = [
        chart("seconds until the cache is usable (less is better)", 2, |it| it.usable_after_s),
        chart("scans in the first minute: p95, ms (less is better)", 2, Switched::p95_ms),
    ];
    let line = |case: Case| {
        let of_case = report.switched.iter().filter(|it| it.case == case);
        let run = middle_run(of_case, Switched::p95_ms)?;
        Some(Line { name: case.name().into(), points: run.p95_by_second() })
    };
    let lines = Case::ALL.into_iter().filter_map(line).collect();
    let courses = [Course { title: "p95 of scans, ms, by seconds after the promotion".into(), lines }];
    Section {
        figure: Figure::Sigmod16,
        notes: notes(report, effort),
        body,
        verdicts: verdicts.into_iter().flatten().collect(),
        drawing: Some(draw_all(&charts, &courses)),
    }
}

fn notes(report: &SwitchoverReport, effort: &Effort<'_>) -> Vec<(&'static str, String)> {
    let SwitchoverReport { minute, facts, .. } = report;
    let ServerFacts { rows, limit_mib, buffers_mib, postgres, data_bytes } = facts;
    let usable_mib = (USABLE * *data_bytes as f64) as u64 >> 20;
    vec![
        (
            "Question",
            "how soon does a standby that takes the place of its server find its pages in far memory, and how long do \
             queries take until then?"
                .into(),
        ),
        ("Compared with", "a cache that begins empty: pages come in as queries read them from the throttled volume.".into()),
        (
            "Method",
            format!(
                "the scans of cached-scan, {SESSIONS} sessions, {rows} rows ({} MiB with the index). At least {} % of the pages are in the \
                 cache of the old server. A control group limits each server to {limit_mib} MiB, and PostgreSQL's own buffers have \
                 {buffers_mib} MiB. The standby is made by a base backup, and its pages are dropped from the kernel's page cache. \
                 The old server is shut down, then the cache is handed over as in \
                 [the how-to page](../src/how-to/postgresql-switchover.md), or another one has been attached \
                 to the standby before, and then the standby is promoted. A cache is *usable* when it has {usable_mib} MiB of \
                 the pages. Times begin at the end of the old server; the first minute ({} s) begins after the promotion, and \
                 latencies are of one scan in ten. The last column is the p95 from the promotion until the cache that begins \
                 empty is usable in the same round, but of the first minute at most. {} rounds, in each of which both cases take turns; ratios \
                 paired by round, medians with the smallest and the largest. After each switchover one page in 20 of the new \
                 cache is compared with the disk.",
                data_bytes >> 20,
                (FILLED * 100.0).round(),
                minute.as_secs_f64(),
                effort.rounds,
            ),
        ),
        (
            "Paper",
            "figure 16: on a database of 100 GB, priming buffers of 10 to 25 GB takes about a hundredth of the time in which \
             they fill by themselves, and the p95 of scans is 4 to 10 times lower with them. There, pages are copied into \
             the new server's buffers; here, they stay in far memory, and only a list of them moves."
                .into(),
        ),
        conditions(&format!("PostgreSQL {postgres}")),
    ]
}

fn bar(case: Case, spread: Option<Spread>) -> Option<Bar> {
    let colour = if case == Case::HandedOver { OURS } else { PEER };
    Some(Bar { name: case.name().into(), colour, spread: spread? })
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::paper::range_scan::Timed;

    #[test]
    fn both_cases_are_written_and_promises_are_judged() {
        let switched = |case, usable_after_s, ms| {
            let scans = [1.5, 2.5].map(|at_s| Timed { at_s, latency: Duration::from_millis(ms) });
            let scans = scans.into_iter().chain([Timed { at_s: 70.0, latency: Duration::from_millis(10) }]);
            let scans = scans.collect();
            Switched { case, usable_after_s, promoted_after_s: 0.5, per_second: 1000.0, scans }
        };
        let report = SwitchoverReport {
            switched: vec![switched(Case::Empty, 60.0, 30), switched(Case::HandedOver, 2.0, 10)],
            minute: Duration::from_secs(60),
            facts: ServerFacts::sample(),
        };
        let (work_dir, farpool) = (Path::new("/"), Path::new("/"));
        let effort = Effort { rounds: 1, scale: 0.01, slice: Duration::from_secs(3), work_dir, farpool };
        let section = section(&report, &effort);
        let tables = section.tables();
        assert!(tables.contains("| handed over | 2.00 | 0.50 | 10.0 | 1\u{202f}000 | 10.0 |"), "{tables}");
        assert!(
            tables.contains("| 30.00 (30.00–30.00) | | 3.00 (3.00–3.00) | | 3.00 (3.00–3.00) |"),
            "{tables}"
        );
        let met = ["| yes, but not the aim |", "| **missed** |"];
        assert_eq!(met.map(|verdict| tables.matches(verdict).count()), [1, 1], "{tables}");
        assert!(section.drawing.unwrap().contains("p95 of scans, ms"));
    }
}
