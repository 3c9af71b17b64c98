//! The report on several database servers whose caches lie on one node.

use anyhow::Result;

use crate::chart::{Bar, Chart, OURS, draw};
use crate::files::{Figure, Section, conditions};
use crate::paper::several_servers::{self, COUNTS, SESSIONS, ServersReport, TRANSPORTS};
use crate::paper::{Effort, ServerFacts};
use crate::spread::{Spread, many, middle, ratio};
use crate::stop::StopFlag;

/// Measures, and reports.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<Section> {
    Ok(section(&several_servers::measure(effort, stop)?, effort))
}

fn section(report: &ServersReport, effort: &Effort<'_>) -> Section {
    let speed = |transport, servers| Spread::of(report.per_second(transport, servers));
    let mut body = String::from(
        "| node | servers | scans/s of all | × one server | mean latency, ms |\n|---|--:|--:|--:|--:|\n",
    );
    for (transport, servers) in TRANSPORTS.into_iter().flat_map(|it| COUNTS.map(|servers| (it, servers))) {
        let latency_ms = |per_second: f64| f64::from(SESSIONS) * servers as f64 * 1e3 / per_second;
        let latency = Spread::of(report.per_second(transport, servers).into_iter().map(latency_ms));
        let (all, of_one) = (speed(transport, servers), Spread::of(report.ratios(transport, servers)));
        body += &format!(
            "| {transport} | {servers} | {} | {} | {} |\n",
            middle(all, 0),
            ratio(of_one),
            middle(latency, 2)
        );
    }
    let chart = |transport: &'static str| Chart {
        title: format!("{transport}: scans per second of all servers (more is better)"),
        digits: 0,
        mark: None,
        bars: COUNTS
            .into_iter()
            .filter_map(|servers| {
                let spread = speed(transport, servers)?;
                Some(Bar { name: many(servers, "server"), colour: OURS, spread })
            })
            .collect(),
    };
    Section {
        figure: Figure::Sigmod25,
        notes: notes(report, effort),
        body,
        verdicts: Vec::new(),
        drawing: Some(draw(&TRANSPORTS.map(chart))),
    }
}

fn notes(report: &ServersReport, effort: &Effort<'_>) -> Vec<(&'static str, String)> {
    let ServerFacts { rows, limit_mib, buffers_mib, postgres, data_bytes } = &report.facts;
    vec![
        ("Question", "how much do database servers slow each other down when their caches lie on one node?".into()),
        ("Compared with", "one server alone.".into()),
        (
            "Method",
            format!(
                "the scans of cached-scan, on up to {} servers at a time, each with {SESSIONS} sessions and a table of its \
                 own of {rows} rows ({} MiB with the index) on the machine's disk; at least nine tenths of its pages are in \
                 its cache. One node lends the memory of all caches. A control group limits each server to {limit_mib} MiB; \
                 PostgreSQL's own buffers have {buffers_mib} MiB. Servers, node and pgbench share the machine's two \
                 processors, which one server keeps busy already: so their sum is expected to stay the same. {} rounds, in each \
                 of which each number of servers is measured for {} s; ratios paired by round, medians with the smallest \
                 and the largest. In the end one page in 20 of each cache is compared with the disk.",
                COUNTS[COUNTS.len() - 1],
                data_bytes >> 20,
                effort.rounds,
                effort.slice.as_secs_f64()
            ),
        ),
        (
            "Paper",
            "figure 25: with up to eight servers, each on a machine of its own, the sum grows almost linearly, with hardly \
             higher latencies, until the network card of the node is saturated."
                .into(),
        ),
        conditions(&format!("PostgreSQL {postgres}")),
    ]
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::paper::several_servers::Worked;

    #[test]
    fn the_sum_of_all_servers_is_compared_with_one() {
        let worked = |transport, servers| {
            let per_second = if transport == "shm" { 8000.0 } else { 1000.0 * servers as f64 };
            Worked { transport, servers, per_second }
        };
        let report = ServersReport {
            slices: TRANSPORTS.into_iter().flat_map(|it| COUNTS.map(|servers| worked(it, servers))).collect(),
            facts: ServerFacts::sample(),
        };
        let (work_dir, farpool) = (Path::new("/"), Path::new("/"));
        let effort = Effort { rounds: 1, scale: 0.01, slice: Duration::from_secs(3), work_dir, farpool };
        let section = section(&report, &effort);
        let tables = section.tables();
        assert!(tables.contains("| shm | 4 | 8\u{202f}000 | 1.00 (1.00–1.00) | 4.00 |"), "{tables}");
        assert!(tables.contains("| tcp | 4 | 4\u{202f}000 | 4.00 (4.00–4.00) | 8.00 |"), "{tables}");
        assert!(section.drawing.unwrap().contains("4 servers"));
    }
}
