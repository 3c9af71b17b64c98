//! The reports on RangeScan by how much memory a server has.

use anyhow::Result;

use crate::chart::{Bar, Chart, OURS, PEER, draw};
use crate::files::{Figure, Section, conditions};
use crate::paper::memory_sizes::{self, MeasuredSize, SESSIONS, SizesReport, Varied, WARM_UP_SLICES};
use crate::paper::{Effort, ServerFacts};
use crate::spread::{Spread, many, middle, ratio};
use crate::stop::StopFlag;

const WITHOUT: &str = "without a cache";

/// Measures, and reports.
pub fn measure(varied: Varied, effort: &Effort<'_>, stop: &StopFlag) -> Result<Section> {
    Ok(section(varied, &memory_sizes::measure(varied, effort, stop)?, effort))
}

fn section(varied: Varied, report: &SizesReport, effort: &Effort<'_>) -> Section {
    let mut body = String::from(match varied {
        Varied::Cache => "| cache, MiB | nodes |",
        Varied::Local => "| PostgreSQL's buffers, MiB | limit of the server's memory, MiB |",
    });
    body += " scans/s with the cache | scans/s without | × without | found in the cache, % | mean latency with the cache, ms |\n\
             |--:|--:|--:|--:|--:|--:|--:|\n";
    for size in &report.sizes {
        let size_columns = match varied {
            Varied::Cache => [size.cache_mib, size.nodes.into()],
            Varied::Local => [size.buffers_mib, size.limit_mib],
        };
        let [with, without] = [Spread::of(size.with_cache()), Spread::of(size.without())];
        let latency_ms = |per_second: f64| f64::from(SESSIONS) * 1e3 / per_second;
        body += &format!(
            "| {} | {} | {} | {} | {} | {} | {} |\n",
            size_columns[0],
            size_columns[1],
            middle(with, 0),
            middle(without, 0),
            ratio(Spread::of(size.ratios())),
            size.hit_rate.map_or("–".into(), |rate| format!("{:.0}", rate * 100.0)),
            middle(Spread::of(size.with_cache().map(latency_ms)), 2),
        );
    }
    Section {
        figure: figure(varied),
        notes: notes(varied, &report.facts, effort),
        body,
        verdicts: Vec::new(),
        drawing: Some(draw(&charts(varied, &report.sizes))),
    }
}

fn figure(varied: Varied) -> Figure {
    match varied {
        Varied::Cache => Figure::Sigmod12,
        Varied::Local => Figure::Sigmod24,
    }
}

fn charts(varied: Varied, sizes: &[MeasuredSize]) -> Vec<Chart> {
    let chart = |title: &str, bars: Vec<Option<Bar>>| Chart {
        title: format!("{title}: scans per second (more is better)"),
        digits: 0,
        mark: None,
        bars: bars.into_iter().flatten().collect(),
    };
    let with = |name: String, size: &MeasuredSize| {
        Some(Bar { name, colour: OURS, spread: Spread::of(size.with_cache())? })
    };
    let without = |name: String, size: &MeasuredSize| {
        Some(Bar { name, colour: PEER, spread: Spread::of(size.without())? })
    };
    match varied {
        Varied::Cache => {
            let without = Spread::of(sizes.iter().flat_map(MeasuredSize::without));
            let without = || without.map(|spread| Bar { name: WITHOUT.into(), colour: PEER, spread });
            let of = |chosen: Vec<&MeasuredSize>| {
                let bars = chosen
                    .into_iter()
                    .map(|it| with(format!("{} MiB, {}", it.cache_mib, many(it.nodes as usize, "node")), it));
                std::iter::once(without()).chain(bars).collect()
            };
            let on_one = sizes.iter().filter(|it| it.nodes == 1).collect();
            // A single quarter lies on one node in either case.
            let on_several = sizes.iter().take(1).chain(sizes.iter().filter(|it| it.nodes > 1)).collect();
            vec![
                chart("a cache on one node", of(on_one)),
                chart("a cache on a node for each quarter of the data", of(on_several)),
            ]
        }
        Varied::Local => {
            let pair = |it: &MeasuredSize| {
                let name = format!("buffers of {} MiB", it.buffers_mib);
                [with(name.clone(), it), without(format!("{name}, {WITHOUT}"), it)]
            };
            vec![chart("by the size of PostgreSQL's buffers", sizes.iter().flat_map(pair).collect())]
        }
    }
}

fn notes(varied: Varied, facts: &ServerFacts, effort: &Effort<'_>) -> Vec<(&'static str, String)> {
    let ServerFacts { rows, limit_mib, buffers_mib, postgres, data_bytes } = facts;
    let data_mib = data_bytes >> 20;
    let question = match varied {
        Varied::Cache => {
            "how does the speed of a database depend on the size of its cache, and on the number of nodes?"
        }
        Varied::Local => "how much does the cache help a server that has more memory of its own?",
    };
    let memory = match varied {
        Varied::Cache => format!(
            "A control group limits each server to {limit_mib} MiB; PostgreSQL's own buffers have {buffers_mib} MiB. The \
             caches have room for a quarter, for half, for three quarters and for all of the data: first on one node, then on a \
             node for each quarter."
        ),
        Varied::Local => "The cache has room for all pages, on one node. A control group limits each server to the size of its own buffers and \
             a quarter of the data (at least 320 MiB) for its processes and the kernel's page cache. pg_prewarm fills the buffers after each \
             change of their size. The kernel's page cache has only pages that were read from the disk, so it helps mostly the \
             server without a cache.".into(),
    };
    let paper = match varied {
        Varied::Cache => {
            "figure 12: throughput grows and latency falls with the size of the cache, slowly while the disk is the limit, \
             and steeply when it holds nearly all of the data; it makes no difference whether one node \
             lends all the memory, or several lend a part each."
        }
        Varied::Local => {
            "figure 24: the more memory the server has, the less remote memory adds; when the server holds all data, both \
             are equally fast. With remote memory, the throughput rises slightly."
        }
    };
    vec![
        ("Question", question.into()),
        (
            "Compared with",
            "a server with the same data on the same throttled volume, without a cache. (The paper's has a cache on an SSD.)".into(),
        ),
        (
            "Method",
            format!(
                "the scans of cached-scan, {SESSIONS} sessions, {rows} rows ({data_mib} MiB with the index), chosen uniformly. {memory} \
                 Far memory is reached over shm. {} rounds for each size, in each of which the two servers are measured for \
                 {} s in turn; ratios paired by round, medians with the smallest and the largest. The mean latency is the \
                 number of sessions over the scans per second. One page in 20 of each cache is compared with the disk.",
                effort.rounds,
                effort.slice.as_secs_f64()
            ),
        ),
        ("Warm-up", format!("after each change, each server scans for {WARM_UP_SLICES} slices that do not count.")),
        ("Paper", paper.into()),
        conditions(&format!("PostgreSQL {postgres}")),
    ]
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;

    fn section_of(varied: Varied, sizes: Vec<MeasuredSize>) -> Section {
        let report = SizesReport { sizes, facts: ServerFacts::sample() };
        let (work_dir, farpool) = (Path::new("/"), Path::new("/"));
        let effort = Effort { rounds: 1, scale: 0.01, slice: Duration::from_secs(3), work_dir, farpool };
        section(varied, &report, &effort)
    }

    fn size(cache_mib: u64, nodes: u32, buffers_mib: u64) -> MeasuredSize {
        let per_second = vec![[4000.0, 1000.0]];
        MeasuredSize {
            cache_mib,
            nodes,
            buffers_mib,
            limit_mib: buffers_mib + 320,
            per_second,
            hit_rate: Some(0.5),
        }
    }

    #[test]
    fn sizes_of_the_cache_are_compared_with_none_and_drawn_by_the_number_of_nodes() {
        let section = section_of(Varied::Cache, vec![size(256, 1, 8), size(512, 1, 8), size(512, 2, 8)]);
        let tables = section.tables();
        let row = "| 512 | 2 | 4\u{202f}000 | 1\u{202f}000 | 4.00 (4.00–4.00) | 50 | 2.00 |";
        assert!(tables.contains(row), "{tables}");
        let drawing = section.drawing.unwrap();
        let counts = ["256 MiB, 1 node<", "512 MiB, 1 node<", "512 MiB, 2 nodes<", WITHOUT]
            .map(|name| drawing.matches(name).count());
        assert_eq!(counts, [2, 1, 1, 2]);
    }

    #[test]
    fn each_size_of_the_servers_memory_has_both_servers() {
        let section = section_of(Varied::Local, vec![size(512, 1, 64), size(512, 1, 256)]);
        let tables = section.tables();
        assert!(tables.contains("| 256 | 576 | 4\u{202f}000 |"), "{tables}");
        assert_eq!(section.drawing.unwrap().matches(WITHOUT).count(), 2);
    }
}
