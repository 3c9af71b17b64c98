//! The report on Hash+Sort, by where its temporary files lie.

use anyhow::Result;

use super::{bar, middle_run, slope};
use crate::chart::{Chart, Course, Line, draw_all};
use crate::files::{Figure, Section, Verdict, conditions};
use crate::paper::hash_sort::{self, HashSortOptions, HashSortReport, MOUNT_ALONE_ROUNDS};
use crate::paper::{Effort, Overflowed, Sample, Spot};
use crate::spread::{Spread, middle, ratio};
use crate::stop::StopFlag;

/// Measures, and reports.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<Section> {
    let &Effort { rounds, scale, work_dir, farpool, .. } = effort;
    let spots = &Spot::ALL;
    let options =
        HashSortOptions { scale, rounds, work_dir, farpool, spots, log_dir: None, keep_data: false };
    let (report, cleaned) = hash_sort::measure(&options, stop)?;
    report.check_rows().and(cleaned)?;
    Ok(section(&report, effort))
}

/// The goals for far memory over shm with the interposer: the most that its time may be, as a multiple of the
/// time on tmpfs, and the least that the times on the disks must be, as multiples of its own.
const AT_MOST_TMPFS: f64 = 1.10;
const DISK_AT_LEAST: f64 = 1.2;
const THROTTLED_AT_LEAST: f64 = 2.5;
/// The goal where half of the files lies in the overflow directory, as a multiple of the time on the disk.
const AT_MOST_DISK: f64 = 1.0;

fn verdicts(report: &HashSortReport) -> Vec<Verdict> {
    let ours = Spot::InterposedShm;
    let paired = |spot, other| Spread::of(report.ratios(spot, other));
    let seconds = |spot: Spot| format!("Hash+Sort, seconds: {}", spot.name());
    let slower = |spot, times| {
        paired(spot, ours).map(|reached| Verdict::at_least(&seconds(spot), times, ours.name(), reached))
    };
    let tmpfs = paired(ours, Spot::Tmpfs)
        .map(|reached| Verdict::at_most(&seconds(ours), AT_MOST_TMPFS, Spot::Tmpfs.name(), reached));
    let half = |spot: Spot| {
        let reached = paired(spot, Spot::Disk)?;
        Some(Verdict::at_most(&seconds(spot), AT_MOST_DISK, Spot::Disk.name(), reached))
    };
    let all = [
        tmpfs,
        slower(Spot::Disk, DISK_AT_LEAST),
        slower(Spot::Throttled, THROTTLED_AT_LEAST),
        half(Spot::HalfRoom),
        half(Spot::HalfTaken),
    ];
    all.into_iter().flatten().collect()
}

fn section(report: &HashSortReport, effort: &Effort) -> Section {
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
    body += &overflow_lines(report);
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
    let (verdicts, drawing) = (verdicts(report), Some(drawing(report, &spots)));
    Section { figure: Figure::Sigmod14, notes, body, verdicts, drawing }
}

/// What lay in the overflow directory, and how long a node took to give its memory back.
fn overflow_lines(report: &HashSortReport) -> String {
    let of = |spot: Spot, figure: fn(&Overflowed) -> Option<f64>| {
        let runs = report.runs.iter().filter(|run| run.spot == spot);
        Spread::of(runs.filter_map(|run| figure(run.overflowed.as_ref()?)))
    };
    let most = |spot: Spot| of(spot, |overflowed| Some(overflowed.most_mib as f64));
    let mut lines = String::new();
    for spot in Spot::ALL.into_iter().filter(|spot| most(*spot).is_some()) {
        lines += &format!(
            "\nOn *{}*, at most {} MiB lay in the overflow directory at a time{}.\n",
            spot.name(),
            middle(most(spot), 0),
            match of(spot, |overflowed| Some(overflowed.taken_back?.as_secs_f64())) {
                Some(seconds) => format!(
                    "; the node had given its memory back after {} s (the command waits until the broker knows)",
                    ratio(Some(seconds))
                ),
                None => String::new(),
            }
        );
    }
    lines
}

fn drawing(report: &HashSortReport, spots: &[Spot]) -> String {
    let bars = Chart {
        title: "Hash+Sort: seconds (less is better)".into(),
        digits: 1,
        mark: None,
        bars: spots.iter().filter_map(|&spot| bar(spot, Spread::of(report.seconds(spot)))).collect(),
    };
    let course = |title: &str, figure: fn(&Sample) -> f64| Course {
        title: title.into(),
        lines: spots
            .iter()
            .filter_map(|&spot| {
                let runs = report.runs.iter().filter(|run| run.spot == spot);
                let middle = middle_run(runs, |run| run.run.seconds)?;
                Some(Line { name: spot.name().into(), points: slope(&middle.samples, figure) })
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

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::paper::hash_sort::Timed;
    use crate::query::{Run, Spill};

    #[test]
    fn hash_sort_is_written_with_every_place_and_losses_are_marked() {
        let seconds = |spot| match spot {
            Spot::Tmpfs => 10.0,
            Spot::InterposedShm => 11.5,
            Spot::FarShm => 12.0,
            Spot::FarTcp => 13.0,
            Spot::HalfRoom | Spot::HalfTaken => 13.5,
            Spot::Disk => 14.0,
            Spot::Throttled => 30.0,
        };
        let sample = |tenth: u32| {
            let (at_s, bytes) = (f64::from(tenth) / 10.0, u64::from(tenth) * 500_000);
            Sample { at_s, read_bytes: bytes, written_bytes: 2 * bytes, cpu_s: at_s / 2.0 }
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
            samples: (0..200).map(sample).collect(),
            overflowed: spot.overflows().then_some(Overflowed {
                most_mib: 700,
                taken_back: (spot == Spot::HalfTaken).then_some(Duration::from_millis(300)),
            }),
        };
        let runs = (0..2).flat_map(|round| Spot::ALL.map(|spot| run(round, spot))).collect();
        let notes = vec!["something was missing".to_owned()];
        let spill = Spill { hash_batches: 2, sort_method: "external merge".into() };
        let report =
            HashSortReport { runs, spill, postgres: "15".into(), limits_mib: Some((1024, 8192)), notes };
        let (work_dir, farpool) = (Path::new("/"), Path::new("/"));
        let effort = Effort { rounds: 2, scale: 0.05, slice: Duration::from_secs(1), work_dir, farpool };
        let section = section(&report, &effort);
        assert!(Spot::ALL.iter().all(|spot| section.body.contains(&format!("| {} |", spot.name()))));
        let tables = section.tables();
        assert!(
            tables.contains("interposer, 2 nodes, shm ≤ 1.1 × tmpfs | 1.15 (1.15–1.15) | **no** |"),
            "{tables}"
        );
        assert_eq!(tables.matches("| yes |").count(), 4, "{tables}");
        assert!(tables.contains("700 MiB lay in the overflow directory"), "{tables}");
        assert!(section.body.contains("Note: something was missing."));
        assert_eq!(section.drawing.unwrap().matches("<polyline").count(), 3 * Spot::ALL.len());
    }
}
