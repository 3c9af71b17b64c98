//! The reports on TPC-H and TPC-DS with tables and temporary files in far memory.

use anyhow::Result;

use crate::chart::{Bar, Chart, FLOOR, OURS, PEER, draw};
use crate::databases::duckdb::Benchmark;
use crate::files::{Figure, Section, conditions};
use crate::paper::Effort;
use crate::paper::cached_queries::{self, Case, QueriesReport, left_out};
use crate::spread::{Spread, middle, ratio};
use crate::stop::StopFlag;

/// Where a class of improvements begins, and its name.
const CLASSES: [(f64, &str); 6] = [
    (0.0, "slower"),
    (1.0, "1 to 2 ×"),
    (2.0, "2 to 5 ×"),
    (5.0, "5 to 10 ×"),
    (10.0, "10 to 50 ×"),
    (50.0, "50 × and more"),
];
/// Cases whose improvements over the throttled volume are shown.
const IMPROVED: [Case; 3] = [Case::Tmpfs, Case::FarShm, Case::FarTcp];

/// Measures, and reports.
pub fn measure(benchmark: Benchmark, effort: &Effort<'_>, stop: &StopFlag) -> Result<Section> {
    Ok(section(benchmark, &cached_queries::measure(benchmark, effort, stop)?))
}

fn section(benchmark: Benchmark, report: &QueriesReport) -> Section {
    Section {
        figure: match benchmark {
            Benchmark::TpcH => Figure::Sigmod18,
            Benchmark::TpcDs => Figure::Sigmod20,
        },
        notes: notes(benchmark, report),
        body: tables(report),
        verdicts: Vec::new(),
        drawing: Some(draw(&charts(benchmark, report))),
    }
}

fn tables(report: &QueriesReport) -> String {
    let speed = |case| Spread::of(report.per_hour(case));
    let mut body = String::from(
        "| tables and temporary files | queries per hour | × tmpfs | × throttled | found in the cache, % |\n\
         |---|--:|--:|--:|--:|\n",
    );
    for case in Case::ALL {
        let [tmpfs, throttled] =
            [Case::Tmpfs, Case::Throttled].map(|other| ratio(Spread::of(report.ratios(case, other))));
        let found = report.cache_use.iter().find(|(of, _)| *of == case).and_then(|(_, used)| used.hit_rate());
        let found = found.map_or("–".into(), |rate| format!("{:.1}", rate * 100.0));
        let per_hour = middle(speed(case), 0);
        body += &format!("| {} | {per_hour} | {tmpfs} | {throttled} | {found} |\n", case.name());
    }
    body += &format!(
        "\n| number of queries by their speed, × throttled | {} |\n|---|{}\n",
        CLASSES.map(|(_, name)| name).join(" | "),
        "--:|".repeat(CLASSES.len())
    );
    for case in IMPROVED {
        let counts = classes(report, case).map(|counts| middle(counts, 0));
        body += &format!("| {} | {} |\n", case.name(), counts.join(" | "));
    }
    body
}

fn charts(benchmark: Benchmark, report: &QueriesReport) -> [Chart; 2] {
    let speed = |case| Spread::of(report.per_hour(case));
    let bars = Case::ALL.into_iter().filter_map(|case| {
        let colour = match case {
            Case::Tmpfs => FLOOR,
            Case::Throttled => PEER,
            Case::FarShm | Case::FarTcp => OURS,
        };
        Some(Bar { name: case.name().into(), colour, spread: speed(case)? })
    });
    let speeds = Chart {
        title: format!("{}: queries per hour (more is better)", benchmark.name()),
        digits: 0,
        mark: None,
        bars: bars.collect(),
    };
    let counts = classes(report, Case::FarShm).into_iter().zip(CLASSES);
    let histogram = Chart {
        title: format!("{}: number of queries by their speed, × throttled", Case::FarShm.name()),
        digits: 0,
        mark: None,
        bars: counts
            .filter_map(|(spread, (_, name))| Some(Bar { name: name.into(), colour: OURS, spread: spread? }))
            .collect(),
    };
    [speeds, histogram]
}

/// How many queries are in each class.
fn classes(report: &QueriesReport, case: Case) -> [Option<Spread>; CLASSES.len()] {
    let improvements = report.improvements(case);
    std::array::from_fn(|class| {
        let from = CLASSES[class].0;
        let below = CLASSES.get(class + 1).map_or(f64::INFINITY, |next| next.0);
        let count = improvements.iter().filter(|&&it| it >= from && it < below).count();
        Spread::of([count as f64])
    })
}

fn notes(benchmark: Benchmark, report: &QueriesReport) -> Vec<(&'static str, String)> {
    let QueriesReport { factor, data_bytes, temporary_bytes, limit_mib, buffers_mib, postgres, .. } = report;
    let name = benchmark.name();
    let left_out = match left_out(benchmark) {
        [] => "No query is left out".to_owned(),
        queries => format!(
            "Left out are queries that take minutes with these indexes wherever the tables are ({})",
            queries.join(", ")
        ),
    };
    let indexes = match benchmark {
        Benchmark::TpcH => "an index on the first column of each table and one on l_partkey of lineitem",
        Benchmark::TpcDs => "an index on the first column of each table",
    };
    let paper = match benchmark {
        Benchmark::TpcH => {
            "figures 18 and 19: the throughput of TPC-H with remote memory exceeds even that with local memory, \
             since two queries spill, and with local memory they spill to an SSD; against disks and an SSD, 8 queries are up to 2 times as fast, 10 queries 2 to 5 times, and 3 \
             queries 5 to 10 times."
        }
        Benchmark::TpcDs => {
            "figures 20 and 21: the throughput of TPC-DS with remote memory is slightly below that with local memory; against \
             disks and an SSD, 18 queries are 2 to 5 times as fast, 21 queries 5 to 10 times, 11 queries 10 to 50 times, and \
             some more than 100 times."
        }
    };
    vec![
        (
            "Question",
            format!(
                "how much faster is {name} if its tables are in the page cache, and its temporary files in far memory?"
            ),
        ),
        ("Floor", "a server all of whose files are on tmpfs.".into()),
        (
            "Compared with",
            "a server all of whose files are on a throttled volume. The paper compares with hard disks \
             that read more than 1 GB/s in order, and an SSD for temporary files."
                .into(),
        ),
        (
            "Method",
            format!(
                "{name} at scale factor {factor}: {} MiB with {indexes}. There are no parallel workers, and work_mem is 4 MiB; \
                 all queries together write {} MB of temporary files. With far memory, tables lie on the throttled volume, \
                 behind a page cache that has room for all of them, and temporary files on a mount; cache and mount share a \
                 pool of two nodes. A control group limits each server, with the kernel's page cache for it, to {limit_mib} MiB; \
                 on tmpfs the limit has room for the files. PostgreSQL's own buffers have {buffers_mib} MiB. All servers are copies \
                 of one, and they have the same plans, for which effective_cache_size is the limit of a \
                 server's memory. A LIMIT at the end of a query is removed, since ties make its choice \
                 arbitrary. All queries run one after the other; their first run is not measured. {left_out}. {} rounds, in each of \
                 which all servers take turns; ratios paired by round, medians with the smallest and the largest. \
                 The rows of each run are compared with those of the first one on tmpfs, and in \
                 the end one page in 20 of each cache with the disk.",
                data_bytes >> 20,
                temporary_bytes / 1_000_000,
                report.rounds()
            ),
        ),
        ("Paper", paper.into()),
        conditions(&format!("PostgreSQL {postgres}")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_cache::CacheUse;
    use crate::paper::cached_queries::QueryRun;

    #[test]
    fn queries_are_counted_by_their_improvement() {
        let seconds = |case, query: usize| match case {
            Case::Throttled => 30.0,
            Case::FarShm => [31.0, 10.0, 6.0, 1.0][query],
            Case::Tmpfs | Case::FarTcp => 15.0,
        };
        let run = |case, query: usize| QueryRun {
            query: query.to_string(),
            case,
            round: 0,
            seconds: seconds(case, query),
        };
        let runs = Case::ALL.into_iter().flat_map(|case| (0..4).map(move |query| run(case, query))).collect();
        let report = QueriesReport {
            runs,
            factor: 0.3,
            cache_use: vec![(Case::FarTcp, CacheUse { hits: 9, misses: 1, turns: 0 })],
            data_bytes: 3 << 20,
            temporary_bytes: 5_000_000,
            limit_mib: 192,
            buffers_mib: 32,
            postgres: "15".into(),
        };
        let section = section(Benchmark::TpcDs, &report);
        let tables = section.tables();
        assert!(tables.contains("| far memory, shm | 1 | 0 | 1 | 1 | 1 | 0 |"), "{tables}");
        assert!(
            tables.contains("| far memory, tcp | 240 | 1.00 (1.00–1.00) | 2.00 (2.00–2.00) | 90.0 |"),
            "{tables}"
        );
        assert!(section.notes.iter().any(|(_, text)| text.contains("(1, 4, 11, 74)")));
        assert!(section.drawing.unwrap().contains("50 × and more"));
    }
}
