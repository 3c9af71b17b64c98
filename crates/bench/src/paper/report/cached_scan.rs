//! The report on RangeScan through the page cache.

use anyhow::Result;

use crate::chart::{Bar, Chart, FLOOR, OURS, PEER, draw};
use crate::files::{Figure, Section, Verdict, conditions};
use crate::paper::cached_scan::{
    self, CachedScanReport, Case, Mix, RESTART_SESSIONS, RESTARTED, Restarted, SESSIONS, Scanned,
};
use crate::paper::{Effort, ServerFacts};
use crate::spread::{Spread, middle, ratio};
use crate::stop::StopFlag;

/// A promise: a case is at least so many times as fast as another one.
struct Promise {
    mix: Mix,
    sessions: u32,
    case: Case,
    than: Case,
    must: f64,
    aim: Option<f64>,
}

const fn scans(sessions: u32, case: Case, than: Case, (must, aim): (f64, f64)) -> Promise {
    Promise { mix: Mix::Scans, sessions, case, than, must, aim: Some(aim) }
}

const fn updates(sessions: u32, must: f64) -> Promise {
    let (case, than) = (Case::CacheShm, Case::Throttled);
    Promise { mix: Mix::Updates, sessions, case, than, must, aim: None }
}

const PROMISES: [Promise; 11] = [
    scans(8, Case::CacheShm, Case::Tmpfs, (0.8, 0.95)),
    scans(32, Case::CacheShm, Case::Tmpfs, (0.9, 1.0)),
    scans(8, Case::CacheShm, Case::Throttled, (20.0, 30.0)),
    scans(32, Case::CacheShm, Case::Throttled, (20.0, 30.0)),
    scans(8, Case::CacheShm, Case::Disk, (3.0, 5.0)),
    scans(32, Case::CacheShm, Case::Disk, (3.0, 5.0)),
    scans(32, Case::CacheTcp, Case::Throttled, (8.0, 15.0)),
    scans(8, Case::TinyCache, Case::Disk, (0.97, 1.0)),
    scans(32, Case::TinyCache, Case::Disk, (0.97, 1.0)),
    updates(8, 6.0),
    updates(32, 3.0),
];
/// What is promised for the first second after a restart, in multiples of the speed before.
const RESTART_AT_LEAST: f64 = 0.7;
const RESTART_AIM: f64 = 0.9;
/// The most memory of the database's machine for a page, in bytes, and the aim.
const LOCAL_BYTES: (f64, f64) = (64.0, 48.0);
/// The most by which the page tables of a session grow for a GiB of pages, in MB, and the aim.
const PAGE_TABLES_MB: (f64, f64) = (0.4, 0.1);

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
    body += &drill_down(report);
    body += &restart_table(report);
    let page_tables = Spread::of(report.page_tables_mb_per_gib());
    let local = Spread::of([report.local_bytes_per_page]);
    body += &format!(
        "\n| memory of the database's machine | |\n|---|--:|\n\
         | index and daemon, bytes for each page of the cache | {} |\n\
         | page tables of a session, MB for each GiB of pages | {} |\n",
        middle(local, 1),
        middle(page_tables, 3)
    );
    let promised = |promise: &Promise| {
        let &Promise { mix, sessions, case, than, must, aim } = promise;
        let what = format!("{}, {sessions} sessions: {}", mix.name(), case.name());
        let reached = paired(case, than, mix, sessions)?;
        Some(Verdict::at_least(&what, must, than.name(), reached).aiming_at(aim))
    };
    let restart = Spread::of(report.of_restarts(kept)).map(|reached| {
        let what = format!("first second after a restart, {RESTART_SESSIONS} sessions: {}", RESTARTED.name());
        Verdict::at_least(&what, RESTART_AT_LEAST, "before", reached).aiming_at(Some(RESTART_AIM))
    });
    let in_memory = |what, (must, aim), unit, reached: Option<Spread>| {
        Some(Verdict::at_most_in(what, must, unit, reached?).aiming_at(Some(aim)))
    };
    let memory = [
        in_memory("memory of the database's machine for a page", LOCAL_BYTES, "B", local),
        in_memory("page tables of a session for a GiB of pages", PAGE_TABLES_MB, "MB", page_tables),
    ];
    let chart = |mix: Mix, sessions| Chart {
        title: format!("{}, {sessions} sessions: transactions per second (more is better)", mix.name()),
        digits: 0,
        mark: None,
        bars: Case::ALL.into_iter().filter_map(|case| bar(case, speed(case, mix, sessions))).collect(),
    };
    let loads = Mix::ALL.into_iter().flat_map(|mix| SESSIONS.map(|sessions| chart(mix, sessions)));
    let charts: Vec<Chart> = loads.chain([restart_chart(report)]).collect();
    Section {
        figure: Figure::CachedScan,
        notes: notes(report, effort),
        body,
        verdicts: PROMISES
            .iter()
            .filter_map(promised)
            .chain(restart)
            .chain(memory.into_iter().flatten())
            .collect(),
        drawing: Some(draw(&charts)),
    }
}

/// Figure 11 of the paper: how busy the processors are, and what comes from the cache. The latency of a
/// page is measured by cached-page.
fn drill_down(report: &CachedScanReport) -> String {
    let mut table = String::from(
        "\n| scans: pages come from | sessions | processors busy, % | found in the cache, % of reads | pages found per scan |\n\
         |---|--:|--:|--:|--:|\n",
    );
    for (sessions, case) in SESSIONS.into_iter().flat_map(|sessions| Case::ALL.map(|case| (sessions, case))) {
        let of = |value: fn(&Scanned) -> Option<f64>| Spread::of(report.of_scans(case, sessions, value));
        let busy = middle(of(|it| Some(it.busy * 100.0)), 0);
        let found = middle(of(|it| Some(it.cache_use?.hit_rate()? * 100.0)), 1);
        let per_scan = |it: &Scanned| Some(it.cache_use?.hits as f64 / it.transactions());
        table +=
            &format!("| {} | {sessions} | {busy} | {found} | {} |\n", case.name(), middle(of(per_scan), 2));
    }
    table
}

/// What was kept of the speed before a restart.
fn kept(restarted: &Restarted) -> f64 {
    restarted.first_second / restarted.warm
}

fn restart_table(report: &CachedScanReport) -> String {
    let of_restarts = |value: fn(&Restarted) -> f64| Spread::of(report.of_restarts(value));
    let [warm, first] =
        [of_restarts(|it| it.warm), of_restarts(|it| it.first_second)].map(|it| middle(it, 0));
    let (name, kept) = (RESTARTED.name(), ratio(of_restarts(kept)));
    format!(
        "\n| restart | sessions | scans per second before | in the first second | × before |\n\
         |---|--:|--:|--:|--:|\n| {name} | {RESTART_SESSIONS} | {warm} | {first} | {kept} |\n"
    )
}

fn restart_chart(report: &CachedScanReport) -> Chart {
    let bar = |name: &str, value: fn(&Restarted) -> f64| {
        Some(Bar { name: name.into(), colour: OURS, spread: Spread::of(report.of_restarts(value))? })
    };
    let bars = [bar("before", |it| it.warm), bar("in the first second after it", |it| it.first_second)];
    let name = RESTARTED.name();
    Chart {
        title: format!("restart, {RESTART_SESSIONS} sessions, {name}: scans per second (more is better)"),
        digits: 0,
        mark: None,
        bars: bars.into_iter().flatten().collect(),
    }
}

fn notes(report: &CachedScanReport, effort: &Effort<'_>) -> Vec<(&'static str, String)> {
    let ServerFacts { rows, limit_mib, buffers_mib, postgres, data_bytes } = &report.facts;
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
                 transaction adds one to a value. PostgreSQL's own buffers have {buffers_mib} MiB. A control group limits the memory \
                 of each server, with the kernel's page cache for it, to {limit_mib} MiB; on tmpfs the limit has room for \
                 the files. The files of the cached databases lie on the throttled volume. At the beginning, nine tenths of \
                 all pages at least are in the cache (two nodes on this machine). A cache of 64 MiB shows what the cache costs \
                 where it is of no use. The machine's disk also shows the most that a cache in a file on a local SSD could \
                 give. In the memory of nbdkit lie all files of a server, on an ext4 on a loop device on the file that nbdfuse \
                 makes of it: this kernel has no nbd. pgbench and the nodes run on the same two processors, and count where \
                 processors are *busy*. {} rounds, in each \
                 of which all cases take turns for {} s each; ratios paired by round, medians with the smallest and the \
                 largest. Then the server is shut down with its cache warm, and started again, {} times: the first second \
                 begins when it accepts connections. In the end one page in 20 of the cache is compared with the disk.",
                data_bytes >> 20,
                effort.rounds,
                effort.slice.as_secs_f64(),
                report.restarts.len()
            ),
        ),
        (
            "Paper",
            "figures 7 to 11: with 20 % updates, the throughput is 10 % below that with local memory; a cache in remote \
             memory makes the processors the bottleneck, which an SSD leaves idle for four fifths of the time."
                .into(),
        ),
        conditions(&format!("PostgreSQL {postgres}")),
    ]
}

/// A case's bar, in the colour of its kind.
fn bar(case: Case, spread: Option<Spread>) -> Option<Bar> {
    let colour = match case {
        Case::Tmpfs => FLOOR,
        Case::CacheShm | Case::CacheTcp | Case::TinyCache => OURS,
        Case::Nbdkit | Case::Disk | Case::Throttled => PEER,
    };
    Some(Bar { name: case.name().into(), colour, spread: spread? })
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::page_cache::CacheUse;

    #[test]
    fn each_case_is_written_for_each_load_and_promises_are_judged() {
        let per_second = |case| match case {
            Case::Tmpfs => 1000.0,
            Case::CacheShm => 850.0,
            Case::CacheTcp => 300.0,
            Case::Nbdkit => 150.0,
            Case::Disk => 200.0,
            Case::TinyCache => 196.0,
            Case::Throttled => 40.0,
        };
        let loads = Mix::ALL.into_iter().flat_map(|mix| SESSIONS.map(|sessions| (mix, sessions)));
        let cases = loads.flat_map(|load| Case::ALL.map(|case| (load, case)));
        let slices = cases.flat_map(|((mix, sessions), case)| {
            let page_tables_kib = Some(if case == Case::CacheShm { 500 } else { 200 });
            let per_second = per_second(case);
            let cache_use =
                (case == Case::CacheShm).then_some(CacheUse { hits: 2550, misses: 850, turns: 0 });
            let (busy, seconds) = (0.5, 1.0);
            [0, 1].map(|round| Scanned {
                case,
                mix,
                sessions,
                round,
                per_second,
                seconds,
                page_tables_kib,
                busy,
                cache_use,
            })
        });
        let report = CachedScanReport {
            slices: slices.collect(),
            restarts: vec![Restarted { warm: 1000.0, first_second: 750.0 }],
            facts: ServerFacts { data_bytes: 3 << 30, ..ServerFacts::sample() },
            local_bytes_per_page: 50.0,
        };
        let (work_dir, farpool) = (Path::new("/"), Path::new("/"));
        let effort = Effort { rounds: 2, scale: 0.01, slice: Duration::from_secs(1), work_dir, farpool };
        let section = section(&report, &effort);
        let tables = section.tables();
        let row = "| page cache, shm | scans | 32 | 850 | 0.85 (0.85–0.85) | 21.25 (21.25–21.25) |";
        assert!(tables.contains(row), "{tables}");
        assert!(section.drawing.unwrap().contains(">in the first second after it<"));
        let row = "| page cache, shm | 8 | 1\u{202f}000 | 750 | 0.75 (0.75–0.75) |";
        assert!(tables.contains(row), "{tables}");
        assert!(tables.contains("for each page of the cache | 50.0 |"), "{tables}");
        assert!(tables.contains("| page cache, shm | 8 | 50 | 75.0 | 3.00 |"), "{tables}");
        // 300 KiB for 3 GiB.
        assert!(tables.contains("MB for each GiB of pages | 0.102 |"), "{tables}");
        // Missed: 0.9 of tmpfs with 32 sessions, and 8 times the throttled volume over TCP. The updates have
        // no aim, and no other aim is met.
        let met = ["| yes |", "| yes, but not the aim |", "| yes, the aim too |", "| **missed** |"];
        assert_eq!(met.map(|verdict| tables.matches(verdict).count()), [2, 10, 0, 2], "{tables}");
    }
}
