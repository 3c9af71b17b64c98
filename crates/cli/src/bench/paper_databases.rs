//! The papers' figures that run a database. This module has the reports on sigmod13 and sigmod14; the modules
//! beside it have the others.

use anyhow::Result;
use farpool_bench::StopFlag;
use farpool_bench::paper::hash_sort::{self, HashSortOptions, HashSortReport, MOUNT_ALONE_ROUNDS, Timed};
use farpool_bench::paper::lending::{self, Slice, Use};
use farpool_bench::paper::{Effort, Sample, Spot};
use farpool_bench::{
    Bar, Chart, Course, FLOOR, Figure, Line, OURS, PEER, Section, Spread, Verdict, conditions, draw_all,
    middle, ratio,
};

use super::{paper_queries, paper_range_scan, paper_small_transactions};

/// Tables of this size fit in the server's buffers, as figure 13 requires.
const LENDING_SCALE_MAX: f64 = 0.05;

/// Whether [`measure`] gives this figure.
pub fn has(figure: Figure) -> bool {
    let here = [Figure::RangeScan, Figure::Sigmod13, Figure::Sigmod14, Figure::SmallTransactions];
    here.contains(&figure) || paper_queries::has(figure)
}

/// Measures the requested figures.
pub fn measure(figures: &[Figure], effort: &Effort<'_>, stop: &StopFlag) -> Result<Vec<Section>> {
    let mut sections = Vec::new();
    if figures.iter().any(|&figure| paper_queries::has(figure)) {
        sections.extend(paper_queries::measure(figures, effort, stop)?);
    }
    if figures.contains(&Figure::RangeScan) {
        sections.push(paper_range_scan::measure(effort, stop)?);
    }
    if figures.contains(&Figure::SmallTransactions) {
        sections.push(paper_small_transactions::measure(effort, stop)?);
    }
    if figures.contains(&Figure::Sigmod13) {
        let scale = effort.scale.min(LENDING_SCALE_MAX);
        let slices = lending::measure(&Effort { scale, ..effort.clone() }, stop)?;
        sections.push(lending_section(&slices, scale, effort));
    }
    if figures.contains(&Figure::Sigmod14) {
        let &Effort { rounds, scale, work_dir, farpool, .. } = effort;
        let options = HashSortOptions {
            scale,
            rounds,
            work_dir,
            farpool,
            spots: &Spot::ALL,
            log_dir: None,
            keep_data: false,
        };
        let (report, cleaned) = hash_sort::measure(&options, stop)?;
        report.check_rows().and(cleaned)?;
        sections.push(hash_sort_section(&report, effort));
    }
    Ok(sections)
}

fn lending_section(slices: &[Slice], scale: f64, effort: &Effort<'_>) -> Section {
    let figures = |usage: Use, figure: fn(&Slice) -> f64| -> Vec<f64> {
        slices.iter().filter(|slice| slice.usage == usage).map(figure).collect()
    };
    let spread = |usage, figure| Spread::of(figures(usage, figure));
    let paired = |usage, figure| {
        let pairs = figures(usage, figure).into_iter().zip(figures(Use::Nobody, figure));
        Spread::of(pairs.map(|(one, other)| one / other))
    };
    let mut body = String::from(
        "| | scans/s | × nobody | mean ms | p99 ms | p99 × nobody | borrower reads MiB/s |\n\
         |---|--:|--:|--:|--:|--:|--:|\n",
    );
    for usage in Use::ALL {
        body += &format!(
            "| {} | {} | {} | {} | {} | {} | {} |\n",
            usage.name(),
            middle(spread(usage, |it| it.per_second), 1),
            ratio(paired(usage, |it| it.per_second)),
            middle(spread(usage, |it| it.mean_ms), 2),
            middle(spread(usage, |it| it.p99_ms), 2),
            ratio(paired(usage, |it| it.p99_ms)),
            middle(spread(usage, |it| it.borrowed_mib_s), 0),
        );
    }
    let chart = |title: &str, digits, figure: fn(&Slice) -> f64| Chart {
        title: title.into(),
        digits,
        mark: None,
        bars: Use::ALL
            .into_iter()
            .filter_map(|usage| {
                let colour = if usage == Use::Nobody { FLOOR } else { OURS };
                Some(Bar { name: usage.name().into(), colour, spread: spread(usage, figure)? })
            })
            .collect(),
    };
    let charts = [
        chart("scans per second on the lender (more is better)", 0, |it| it.per_second),
        chart("99 % of scans take at most, in ms (less is better)", 2, |it| it.p99_ms),
    ];
    let notes = vec![
        ("Question", "what does a machine lose whose idle memory another machine uses?".to_owned()),
        ("Floor", "the same server while nobody borrows.".into()),
        (
            "Method",
            format!(
                "the lender is the first processor (PostgreSQL, node), the borrower the second (mount, and fio with \
                 8 KiB random reads, O_DIRECT, one thread); two sessions scan ranges of 10,000 keys in tables that \
                 fit in memory; {} rounds of {} s each, ratios paired by round, medians with the smallest and the \
                 largest. Both processors share their caches and their memory's bandwidth, as two machines would not.",
                effort.rounds,
                effort.slice.as_secs_f64()
            ),
        ),
        conditions(&format!("TPC-H at scale factor {scale}")),
    ];
    let drawing = Some(draw_all(&charts, &[]));
    Section { figure: Figure::Sigmod13, notes, body, verdicts: Vec::new(), drawing }
}

/// The goals for far memory over shm with the interposer: the most that its time may be, as a multiple of the
/// time on tmpfs, and the least that the times on the disks must be, as multiples of its own.
const AT_MOST_TMPFS: f64 = 1.10;
const DISK_AT_LEAST: f64 = 1.2;
const THROTTLED_AT_LEAST: f64 = 2.5;

fn hash_sort_verdicts(report: &HashSortReport) -> Vec<Verdict> {
    let ours = Spot::InterposedShm;
    let paired = |spot, other| Spread::of(report.ratios(spot, other));
    let seconds = |spot: Spot| format!("Hash+Sort, seconds: {}", spot.name());
    let slower = |spot, times| {
        paired(spot, ours).map(|reached| Verdict::at_least(&seconds(spot), times, ours.name(), reached))
    };
    let tmpfs = paired(ours, Spot::Tmpfs)
        .map(|reached| Verdict::at_most(&seconds(ours), AT_MOST_TMPFS, Spot::Tmpfs.name(), reached));
    let all = [tmpfs, slower(Spot::Disk, DISK_AT_LEAST), slower(Spot::Throttled, THROTTLED_AT_LEAST)];
    all.into_iter().flatten().collect()
}

fn hash_sort_section(report: &HashSortReport, effort: &Effort) -> Section {
    let spots: Vec<Spot> = Spot::ALL.into_iter().filter(|&spot| !report.seconds(spot).is_empty()).collect();
    let mut body = String::from(
        "| temporary files on | seconds | × tmpfs | × interposer, shm | MB by system calls |\n|---|--:|--:|--:|--:|\n",
    );
    for &spot in &spots {
        let by_calls =
            report.runs.iter().filter(|run| run.spot == spot).map(|run| run.bytes_by_calls() as f64 / 1e6);
        body += &format!(
            "| {} | {} | {} | {} | {} |\n",
            spot.name(),
            ratio(Spread::of(report.seconds(spot))),
            ratio(Spread::of(report.ratios(spot, Spot::Tmpfs))),
            ratio(Spread::of(report.ratios(spot, Spot::InterposedShm))),
            middle(Spread::of(by_calls), 0),
        );
    }
    for note in &report.notes {
        body += &format!("\nNote: {note}.\n");
    }
    let temp_mb = Spread::of(report.runs.iter().map(|timed| timed.run.temp_bytes as f64 / 1e6));
    let limits = report.limits_mib.map_or("memory not limited".into(), |(limit, local)| {
        format!("server limited to {limit} MiB of memory, {local} MiB with files on tmpfs, which are charged to it")
    });
    let notes = vec![
        (
            "Question",
            "how long does a join and a sort take that spill, by where their temporary files lie?".into(),
        ),
        ("Floor", "temporary files on tmpfs: what is left is the server's own work.".to_owned()),
        (
            "Method",
            format!(
                "Hash+Sort of Li et al., section 5.2.2, with work_mem of 4 MiB and no parallel workers; {} rounds, in \
                 each of which all places take turns, those by the mount alone in {MOUNT_ALONE_ROUNDS} at most; the \
                 server starts anew before each run, by `farpool run` for the interposer and plainly elsewhere; ratios paired by round, medians with the smallest and the \
                 largest; all runs return the same rows. Traffic is what the server's process reads and writes by \
                 system calls, tables included, in the round of the median: what the interposer serves is not among it.",
                effort.rounds
            ),
        ),
        conditions(&format!(
            "TPC-H at scale factor {}; PostgreSQL {}; {limits}; {} MB of temporary data written",
            effort.scale,
            report.postgres,
            middle(temp_mb, 0)
        )),
    ];
    let drawing = hash_sort_drawing(report, &spots);
    let verdicts = hash_sort_verdicts(report);
    Section { figure: Figure::Sigmod14, notes, body, verdicts, drawing: Some(drawing) }
}

fn hash_sort_drawing(report: &HashSortReport, spots: &[Spot]) -> String {
    let bar = |&spot: &Spot| {
        let colour = match spot {
            Spot::Tmpfs => FLOOR,
            Spot::InterposedShm | Spot::FarShm | Spot::FarTcp => OURS,
            Spot::Disk | Spot::Throttled => PEER,
        };
        Some(Bar { name: spot.name().into(), colour, spread: Spread::of(report.seconds(spot))? })
    };
    let bars = Chart {
        title: "Hash+Sort: seconds (less is better)".into(),
        digits: 1,
        mark: None,
        bars: spots.iter().filter_map(bar).collect(),
    };
    let course = |title: &str, figure: fn(&Sample) -> f64| Course {
        title: title.into(),
        lines: spots
            .iter()
            .filter_map(|&spot| {
                Some(Line {
                    name: spot.name().into(),
                    points: slope(&middle_run(report, spot)?.samples, figure),
                })
            })
            .collect(),
    };
    let courses = [
        course("written, MB/s over time", |it| it.written_bytes as f64 / 1e6),
        course("read, MB/s over time", |it| it.read_bytes as f64 / 1e6),
        course("processor time, % over time", |it| it.cpu_s * 100.0),
    ];
    draw_all(&[bars], &courses)
}

/// The run with the median time.
fn middle_run(report: &HashSortReport, spot: Spot) -> Option<&Timed> {
    let mut runs: Vec<&Timed> = report.runs.iter().filter(|run| run.spot == spot).collect();
    runs.sort_by(|one, other| one.run.seconds.total_cmp(&other.run.seconds));
    runs.get(runs.len() / 2).copied()
}

/// Most points of a line: more could not be told apart.
const POINTS: usize = 60;

/// How fast a figure grows, between samples that are not too close.
pub fn slope(samples: &[Sample], figure: fn(&Sample) -> f64) -> Vec<(f64, f64)> {
    let samples: Vec<&Sample> = samples.iter().step_by(samples.len().div_ceil(POINTS).max(1)).collect();
    let pairs = samples.windows(2).filter(|pair| pair[1].at_s > pair[0].at_s);
    pairs
        .map(|pair| (pair[1].at_s, (figure(pair[1]) - figure(pair[0])) / (pair[1].at_s - pair[0].at_s)))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use farpool_bench::query::{Run, Spill};

    use super::*;

    fn effort() -> Effort<'static> {
        let (work_dir, farpool) = (Path::new("/"), Path::new("/"));
        Effort { rounds: 2, scale: 0.05, slice: Duration::from_secs(1), work_dir, farpool }
    }

    fn sample(at_s: f64) -> Sample {
        let bytes = (at_s * 5e6) as u64;
        Sample { at_s, read_bytes: bytes, written_bytes: 2 * bytes, cpu_s: at_s / 2.0 }
    }

    #[test]
    fn hash_sort_is_written_with_every_place_and_losses_are_marked() {
        let seconds = |spot| match spot {
            Spot::Tmpfs => 10.0,
            Spot::InterposedShm => 11.5,
            Spot::FarShm => 12.0,
            Spot::FarTcp => 13.0,
            Spot::Disk => 14.0,
            Spot::Throttled => 30.0,
        };
        let run = |round, spot| Timed {
            spot,
            round,
            run: Run {
                seconds: seconds(spot),
                rows: 100,
                rows_hash: 1,
                temp_bytes: 1_000_000,
                temp_files: 1,
                temp_file_bytes: 1,
            },
            samples: (0..200).map(|tenth| sample(f64::from(tenth) / 10.0)).collect(),
        };
        let runs = (0..2).flat_map(|round| Spot::ALL.map(|spot| run(round, spot))).collect();
        let notes = vec!["something was missing".to_owned()];
        let spill = Spill { hash_batches: 2, sort_method: "external merge".into() };
        let report =
            HashSortReport { runs, spill, postgres: "15".into(), limits_mib: Some((1024, 8192)), notes };
        let section = hash_sort_section(&report, &effort());
        assert!(Spot::ALL.iter().all(|spot| section.body.contains(&format!("| {} |", spot.name()))));
        let tables = section.tables();
        assert!(
            tables.contains("interposer, 2 nodes, shm ≤ 1.1 × tmpfs | 1.15 (1.15–1.15) | **no** |"),
            "{tables}"
        );
        assert_eq!(tables.matches("| yes |").count(), 2, "{tables}");
        assert!(section.body.contains("Note: something was missing."));
        let speed = slope(&report.runs[0].samples, |it| it.written_bytes as f64 / 1e6);
        assert!(
            speed.len() <= POINTS && speed.iter().all(|point| (point.1 - 10.0).abs() < 0.01),
            "{speed:?}"
        );
        assert_eq!(section.drawing.unwrap().matches("<polyline").count(), 3 * Spot::ALL.len());
    }

    #[test]
    fn lending_is_reported_for_every_use_beside_none() {
        let slice = |round, usage| {
            let per_second = if usage == Use::Tcp { 90.0 } else { 100.0 };
            Slice { usage, round, per_second, mean_ms: 10.0, p99_ms: 20.0, borrowed_mib_s: 500.0 }
        };
        let slices: Vec<Slice> = (0..2).flat_map(|round| Use::ALL.map(|usage| slice(round, usage))).collect();
        let section = lending_section(&slices, 0.05, &effort());
        assert!(section.body.contains("| borrowed over tcp | 90.0 | 0.90 (0.90–0.90) |"), "{}", section.body);
        assert_eq!(section.body.lines().count(), 2 + Use::ALL.len());
    }
}
