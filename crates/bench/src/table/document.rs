//! The published document: the question, the method, and all results, including losses.

use std::collections::BTreeSet;

use super::TableOptions;
use super::lines::{LINES, Line, PEER_LINES};
use super::results::{Figures, Results, Verdict};
use crate::machine::Origin;
use crate::report::IoReport;
use crate::spread::{Spread, middle, ratio};

/// What all figures have in common.
pub struct About {
    origin: Origin,
    pages_kib: BTreeSet<u64>,
}

impl About {
    /// Takes machine and commit from the first report.
    pub fn of(report: &IoReport) -> Self {
        About { origin: report.origin.clone(), pages_kib: BTreeSet::new() }
    }

    /// Adds what may differ from report to report.
    pub fn add(&mut self, report: &IoReport) {
        self.pages_kib.extend(report.page_size_kib);
    }
}

const HEADER: &str = "\
# The fabric's speed

<!-- Written by `make bench-io`; do not edit. -->

- **Question**: how much of the hardware's speed is left when memory is accessed through the fabric, and what
  do peers reach?
- **Sketch**: shm adds the check of an epoch word to a copy of 0.5–1 µs and to a load of 0.2–0.4 µs; tcp
  adds headers and a copy to a round trip of 8 µs between polling processes.
- **Method**: operation and floor are measured in turn, in slices of 0.1 s within one process; ratios are
  medians over these pairs. All lines and all peers are measured once per round. The tables show the median
  over the rounds, and the smallest and largest where there is room. Ratios between lines, or to peers, are
  paired by round.
- **Check**: every compare-and-swap, the sum of all fetch-and-adds, and the bytes of a sample of transfers;
  one wrong byte and nothing is published.
";

/// Writes the whole document.
pub fn write(about: &About, options: &TableOptions, results: &Results, plot: &str) -> String {
    let About { origin: Origin { machine, commit }, pages_kib } = about;
    let commit = commit.as_deref().unwrap_or("unknown");
    let pages: Vec<String> = pages_kib.iter().map(|kib| format!("{kib} KiB")).collect();
    let TableOptions { rounds, seconds, footprint_bytes, .. } = options;
    let footprint = footprint_bytes >> 20;
    let conditions = format!(
        "- **Conditions**: {machine}; commit {commit}; {footprint} MiB in {} pages; {rounds} rounds of {seconds} s each.\n",
        pages.join(" and ")
    );
    let commands: Vec<String> = LINES.iter().map(|line| command(line, options)).collect();
    [
        HEADER,
        &conditions,
        "\n## What was promised\n\n",
        &promises(results),
        "\n## Operations beside their floors\n\n",
        &table(results),
        "\nThe floor of tcp is a process that answers a place with the bytes stored there, from memory of \
         the same size and page size: no keys, no checks, no copy, and one system call answers all requests \
         that arrive together.\n",
        "\n## Peers in the same rounds\n\n",
        &peers(results),
        "\nAll peers run over loopback TCP on the same machine and hold as much data as the footprint. The \
         client of memcached and redis is our own and polls; that of nbdkit is fio. The fabric, its floor \
         and nbdkit use TCP Reno, which does not pace; memcached and redis use the system's default.\n",
        &format!("\n![Operations and peers]({plot})\n"),
        "\n## Each line again\n\n```sh\n",
        &commands.concat(),
        "```\n",
    ]
    .concat()
}

fn command(line: &Line, options: &TableOptions) -> String {
    let (args, seconds, mib) = (line.args, options.seconds, options.footprint_bytes >> 20);
    format!("farpool bench io {args} --seconds {seconds} --footprint {mib}MiB\n")
}

/// The table of the fabric's lines.
pub fn table(results: &Results) -> String {
    let mut text = String::from(
        "| what | p50 µs | p99 µs | op/s | MiB/s | floor | its p50 µs | its op/s | p50 ratio | op/s ratio |\n\
         |---|--:|--:|--:|--:|---|--:|--:|--:|--:|\n",
    );
    for line in LINES {
        text.push_str(&row(line, results));
    }
    text
}

fn row(line: &Line, results: &Results) -> String {
    let Some(first) = results.0.get(line.id).and_then(|rounds| rounds.first()) else { return String::new() };
    let spread = |figure: fn(&Figures) -> Option<f64>| results.spread(line.id, figure);
    let kind = first.floor.as_ref().map_or("", |floor| floor.kind.as_str());
    format!(
        "| {} | {} | {} | {} | {kind} | {} | {} | {} | {} |\n",
        line.name,
        figures(spread),
        middle(spread(|it| Some(it.iops)), 0),
        middle(spread(|it| Some(it.mib_s)), 0),
        middle(spread(|it| Some(it.floor.as_ref()?.p50_us)), 3),
        middle(spread(|it| Some(it.floor.as_ref()?.iops)), 0),
        ratio(spread(|it| it.ratio_p50)),
        ratio(spread(|it| it.ratio_iops)),
    )
}

/// The table of promises, and whether each was met.
pub fn promises(results: &Results) -> String {
    let mut text = String::from("| what | promised | reached | met |\n|---|---|---|---|\n");
    for line in LINES {
        for verdict in line.targets.iter().filter_map(|&target| results.verdict(line.id, target)) {
            let Verdict { promise, reached, met } = verdict;
            let met = if met { "yes" } else { "**no**" };
            text.push_str(&format!("| {} | {promise} | {reached} | {met} |\n", line.name));
        }
    }
    text
}

fn peers(results: &Results) -> String {
    let mut text = String::from("| what | p50 µs | p99 µs | op/s | MiB/s |\n|---|--:|--:|--:|--:|\n");
    for (id, name) in PEER_LINES {
        let spread = |figure: fn(&Figures) -> Option<f64>| results.spread(id, figure);
        text.push_str(&format!(
            "| {name} | {} | {} | {} |\n",
            figures(spread),
            middle(spread(|it| Some(it.iops)), 0),
            middle(spread(|it| Some(it.mib_s)), 0),
        ));
    }
    text
}

fn figures(spread: impl Fn(fn(&Figures) -> Option<f64>) -> Option<Spread>) -> String {
    format!("{} | {}", middle(spread(|it| Some(it.p50_us)), 3), middle(spread(|it| Some(it.p99_us)), 3))
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::figures;
    use super::*;

    fn results() -> Results {
        let mut results = Results::default();
        for round in 1..=3 {
            let slower = f64::from(round);
            LINES.iter().for_each(|line| results.add(line.id, figures(1e6 / slower, slower, 1.3)));
            PEER_LINES.iter().for_each(|(id, _)| results.add(id, figures(1e6 / slower, slower, 1.0)));
        }
        results
    }

    #[test]
    fn every_line_and_every_peer_is_shown_and_losses_are_marked() {
        let results = results();
        let table = table(&results);
        assert!(LINES.iter().all(|line| table.contains(&format!("| {} |", line.name))));
        let promises = promises(&results);
        let lost = "| shm, 8 KiB random read | p50 ≤ 1.25 × floor | 1.30 × | **no** |";
        assert!(promises.contains(lost) && promises.contains("| yes |"), "{promises}");
        assert!(PEER_LINES.iter().all(|(_, name)| peers(&results).contains(name)));
        for table in [table, promises] {
            let columns: BTreeSet<usize> = table.lines().map(|line| line.matches('|').count()).collect();
            assert_eq!(columns.len(), 1, "rows of different length in {table}");
        }
    }
}
