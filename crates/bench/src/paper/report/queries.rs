//! The report on TPC-H's queries: damon4, damon5 and damon-table1.

use anyhow::Result;

use super::{bar, middle_run, slope};
use crate::chart::{Bar, Chart, Course, Line, PEER, draw_all};
use crate::files::{Figure, Section, conditions};
use crate::paper::tpch_queries::{self, QueriesOptions, QueriesReport, QueryRun};
use crate::paper::{Effort, Sample, Spot};
use crate::spread::{Spread, middle, ratio};
use crate::stop::StopFlag;

/// The paper has five. Each round takes the time of all queries in all places, and all figures together must
/// take no more than half an hour.
const ROUNDS_MAX: usize = 3;
/// Limited for the same reason; the paper has 10. The memory limit of each query is found at any scale.
const SCALE_MAX: f64 = 0.5;
/// Rows of the table, as in the paper.
const MOST_TRAFFIC: usize = 5;
const SPOTS: [Spot; 5] = [Spot::Tmpfs, Spot::InterposedShm, Spot::FarShm, Spot::Disk, Spot::Throttled];
/// What disks are compared with: far memory as users would access it.
const FAR: Spot = Spot::InterposedShm;

const WHO_COPIES: &str = "DuckDB, the mount and the nodes share the machine's processors. By the mount alone the kernel copies each \
byte twice more, and the mount's threads check it. With the interposer DuckDB itself moves and checks the bytes. A disk's files \
are in the kernel's cache as long as they fit there.";

/// Whether [`measure`] gives this figure.
pub fn has(figure: Figure) -> bool {
    matches!(figure, Figure::DamonTable1 | Figure::Damon4 | Figure::Damon5)
}

/// Runs the measurements that the figures share once, and reports each figure.
pub fn measure(figures: &[Figure], effort: &Effort<'_>, stop: &StopFlag) -> Result<Vec<Section>> {
    let &Effort { work_dir, farpool, .. } = effort;
    let (rounds, scale) = (effort.rounds.min(ROUNDS_MAX), effort.scale.min(SCALE_MAX));
    let report = tpch_queries::measure(&QueriesOptions { scale, rounds, work_dir, farpool }, stop)?;
    let about = About { report: &report, rounds, scale };
    let section = |&figure: &Figure| match figure {
        Figure::DamonTable1 => Some(about.traffic()),
        Figure::Damon4 => Some(about.times()),
        Figure::Damon5 => Some(about.course()),
        _ => None,
    };
    Ok(figures.iter().filter_map(section).collect())
}

struct About<'a> {
    report: &'a QueriesReport,
    rounds: usize,
    scale: f64,
}

impl About<'_> {
    fn notes(&self, question: &str) -> Vec<(&'static str, String)> {
        let limited = if self.report.is_limited { "limited to that and 256 MiB" } else { "not limited" };
        vec![
            ("Question", question.to_owned()),
            ("Floor", "temporary files on tmpfs: what is left is the query's own work.".into()),
            (
                "Method",
                format!(
                    "DuckDB with two threads; each query with the least memory it can be done with, and its process \
                     {limited} (8 GiB with files on tmpfs, which are charged to it); {} rounds, in each of which all \
                     places take turns, query by query; medians, ratios paired by round; all runs of a query return \
                     the same rows.",
                    self.rounds
                ),
            ),
            conditions(&format!("TPC-H at scale factor {}", self.scale)),
        ]
    }

    fn section(&self, figure: Figure, question: &str, mut body: String, drawing: Option<String>) -> Section {
        for note in &self.report.notes {
            body += &format!("\nNote: {note}.\n");
        }
        Section { figure, notes: self.notes(question), body, verdicts: Vec::new(), drawing }
    }

    fn spread(&self, query: &str, spot: Spot, figure: impl Fn(&QueryRun) -> f64) -> Option<Spread> {
        Spread::of(self.report.of(query, spot).map(figure))
    }

    fn seconds(&self, query: &str, spot: Spot) -> Option<Spread> {
        self.spread(query, spot, |run| run.seconds)
    }

    fn paired(&self, query: &str, spot: Spot, other: Spot) -> Option<Spread> {
        let pairs = self.report.of(query, spot).zip(self.report.of(query, other));
        Spread::of(pairs.map(|(one, other)| one.seconds / other.seconds))
    }

    /// Queries by what they write, most first.
    fn by_traffic(&self) -> Vec<&str> {
        let written = |&query: &&str| {
            self.spread(query, Spot::FarShm, |run| run.traffic().1 as f64).map_or(0.0, |spread| spread.middle)
        };
        let mut queries = self.report.queries();
        queries.sort_by(|one, other| written(other).total_cmp(&written(one)));
        queries
    }

    fn traffic(&self) -> Section {
        let mut body = String::from(
            "| query | memory, MB | read, MB | written, MB | in temporary files at most, MB |\n|---|--:|--:|--:|--:|\n",
        );
        for query in self.by_traffic().into_iter().take(MOST_TRAFFIC) {
            let megabytes = |figure: fn(&QueryRun) -> u64| {
                middle(self.spread(query, Spot::FarShm, |run| figure(run) as f64 / 1e6), 0)
            };
            let memory = middle(self.spread(query, Spot::FarShm, |run| f64::from(run.memory_mb)), 0);
            body += &format!(
                "| {query} | {memory} | {} | {} | {} |\n",
                megabytes(|run| run.traffic().0),
                megabytes(|run| run.traffic().1),
                megabytes(|run| run.temp_bytes),
            );
        }
        body += "\nRead and written is what the process asks of the system, the tables included, in far memory over shm.\n";
        let question = "which queries write most, with as little memory as they can be done with?";
        self.section(Figure::DamonTable1, question, body, None)
    }

    fn times(&self) -> Section {
        let spots: Vec<Spot> =
            SPOTS.into_iter().filter(|spot| self.report.runs.iter().any(|run| run.spot == *spot)).collect();
        let names: String = spots.iter().map(|spot| format!(" {}, s |", spot.name())).collect();
        let lines = "--:|".repeat(spots.len() + 3);
        let mut body = format!(
            "| query | MB spilled |{names} interposer × tmpfs | disk × interposer |{}\n|---|{lines}--:|\n",
            " throttled × interposer |"
        );
        for query in self.report.queries() {
            let spilled = middle(self.spread(query, Spot::FarShm, |run| run.temp_bytes as f64 / 1e6), 0);
            let seconds: String =
                spots.iter().map(|&spot| format!(" {} |", middle(self.seconds(query, spot), 2))).collect();
            body += &format!(
                "| {query} | {spilled} |{seconds} {} | {} | {} |\n",
                ratio(self.paired(query, FAR, Spot::Tmpfs)),
                ratio(self.paired(query, Spot::Disk, FAR)),
                ratio(self.paired(query, Spot::Throttled, FAR)),
            );
        }
        let total = |spot: Spot| -> f64 {
            let middles = self.report.queries().into_iter().filter_map(|query| self.seconds(query, spot));
            middles.map(|spread| spread.middle).sum()
        };
        let totals: String = spots.iter().map(|&spot| format!(" {:.1} |", total(spot))).collect();
        body += &format!("| all | |{totals} | | |\n\n{WHO_COPIES}\n");
        let totals = Chart {
            title: "all queries: seconds, sum of medians (less is better)".into(),
            digits: 1,
            mark: None,
            bars: spots.iter().filter_map(|&spot| bar(spot, Spread::of([total(spot)]))).collect(),
        };
        let each = |title: &str, spot| Chart {
            title: title.into(),
            digits: 2,
            mark: Some(1.0),
            bars: self
                .report
                .queries()
                .into_iter()
                .filter_map(|query| {
                    let spread = self.paired(query, spot, FAR)?;
                    Some(Bar { name: query.into(), colour: PEER, spread })
                })
                .collect(),
        };
        let charts = [
            totals,
            each("the machine's disk: times the interposer's seconds", Spot::Disk),
            each("throttled disk: times the interposer's seconds", Spot::Throttled),
        ];
        let question = "how long does each query take, by where its temporary files lie?";
        self.section(Figure::Damon4, question, body, Some(draw_all(&charts, &[])))
    }

    fn course(&self) -> Section {
        let query = self.by_traffic().first().copied().unwrap_or_default();
        let mut body =
            String::from("| temporary files on | seconds | read, MB | written, MB |\n|---|--:|--:|--:|\n");
        let mut lines: [Vec<Line>; 2] = Default::default();
        // The interposer's traffic is not by system calls, so it is not counted.
        for spot in SPOTS.into_iter().filter(|&spot| spot != Spot::InterposedShm) {
            let Some(run) = middle_run(self.report.of(query, spot), |run| run.seconds) else { continue };
            let (read, written) = run.traffic();
            body += &format!(
                "| {} | {:.2} | {:.0} | {:.0} |\n",
                spot.name(),
                run.seconds,
                read as f64 / 1e6,
                written as f64 / 1e6
            );
            let figures: [fn(&Sample) -> f64; 2] =
                [|it| it.written_bytes as f64 / 1e6, |it| it.read_bytes as f64 / 1e6];
            for (lines, figure) in lines.iter_mut().zip(figures) {
                lines.push(Line { name: spot.name().into(), points: slope(&run.samples, figure) });
            }
        }
        let [written, read] = lines;
        let courses = [
            Course { title: format!("{query}: written, MB/s over time"), lines: written },
            Course { title: format!("{query}: read, MB/s over time"), lines: read },
        ];
        let question = "what does the query that writes most read and write, over time?";
        self.section(Figure::Damon5, question, body, Some(draw_all(&[], &courses)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_query_has_a_row_and_those_that_write_most_come_first() {
        let run = |number: u32, spot, seconds| {
            let sample = |at_s: f64| Sample {
                at_s,
                read_bytes: (at_s * 1e6) as u64,
                written_bytes: (at_s * f64::from(number) * 1e6) as u64,
                cpu_s: at_s,
            };
            let samples = vec![sample(0.0), sample(1.0), sample(2.0)];
            let query = format!("q{number:02}");
            QueryRun { query, spot, seconds, memory_mb: 32, temp_bytes: 5_000_000, samples }
        };
        let place = |query, spot| match spot {
            Spot::Throttled => run(query, spot, 6.0),
            Spot::InterposedShm | Spot::FarShm => run(query, spot, 2.0),
            _ => run(query, spot, 1.0),
        };
        let runs = (1..=22).flat_map(|query| SPOTS.map(|spot| place(query, spot))).collect();
        let report = QueriesReport { runs, is_limited: true, notes: Vec::new() };
        let about = About { report: &report, rounds: 1, scale: 0.1 };
        let times = about.times();
        assert!((1..=22).all(|query| times.body.contains(&format!("| q{query:02} | 5 |"))), "{}", times.body);
        assert!(times.body.contains("2.00 (2.00–2.00) | 0.50 (0.50–0.50) | 3.00 (3.00–3.00) |"));
        let rows = times.body.lines().take_while(|line| !line.is_empty());
        let columns: Vec<usize> = rows.map(|line| line.matches('|').count()).collect();
        assert!(columns.iter().all(|count| *count == columns[0]), "{}", times.body);
        let traffic = about.traffic().body;
        assert!(traffic.contains("| q22 | 32 | 2 | 44 | 5 |") && !traffic.contains("q17"), "{traffic}");
        assert!(about.course().drawing.unwrap().contains("q22: written"));
    }
}
