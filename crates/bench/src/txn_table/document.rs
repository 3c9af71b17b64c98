//! The published document: the question, the method, and all results, including losses.

use anyhow::Result;

use super::TxnTableOptions;
use super::lines::{Kind, LINES, Line};
use super::results::Results;
use crate::machine::Origin;
use crate::spread::{Spread, grouped, middle};

const HEADER: &str = "\
# The speed of transactions

<!-- Written by `make bench-txn`; do not edit. -->

- **Question**: what is the throughput of the timestamp oracle, how many transactions does a thread run on
  records in far memory, and how far is that from the best that the machine can do?
- **Sketch**: over shm, a timestamp transaction is a WRITE of a word and a check of what a thread has fetched,
  some 100 ns; one that reads 4 records waits for 4 cache misses of 0.2 to 0.4 µs, which overlap; one that
  reads and writes 2 has some 6 steps, each a round trip over tcp.
- **Method**: threads in a closed loop, in slices of 0.1 s; everything is measured once per round, floors
  included. The tables show the median over the rounds, with the smallest and largest. Nodes, clients,
  publishers and fetch threads share the machine's processors.
- **Check**: no client ever begins from an earlier cut than before, and in the end exactly the acknowledged
  commits are published; every record that is read is whole, and every acknowledged increment is there.
";

/// Writes the whole document.
pub fn write(options: &TxnTableOptions, results: &Results, plot: &str) -> Result<String> {
    let Origin { machine, commit } = results.origin()?;
    let commit = commit.as_deref().unwrap_or("unknown");
    let TxnTableOptions { rounds, seconds, records, .. } = options;
    let records = grouped(*records as f64, 0);
    let conditions = format!(
        "- **Conditions**: {machine}; commit {commit}; {records} records of 64 B; {rounds} rounds of {seconds} s each.\n"
    );
    let commands: Vec<String> =
        LINES.iter().map(|line| format!("farpool bench {}\n", options.command(line))).collect();
    let again = format!("\n## Each line again\n\n```sh\n{}```\n", commands.concat());
    let drawing = format!("\n![Transactions per second]({plot})\n");
    Ok([HEADER, &conditions, "\n", &tables(results), &drawing, &again].concat())
}

/// All tables.
pub fn tables(results: &Results) -> String {
    let promises = section(
        results,
        "What was promised",
        "| what | at least | aim | reached | met |\n|---|--:|--:|--:|---|\n",
        promise,
    );
    let oracle = section(
        results,
        "The oracle, with two clients unless it says otherwise",
        "| oracle | t-trx/s | p50 µs | p99 µs | published after, p50 µs | p99 µs | longest µs |\n|---|--:|--:|--:|--:|--:|--:|\n",
        oracle,
    );
    let records = section(
        results,
        "Transactions on records, by one thread unless it says otherwise",
        "| what | trx/s | p50 µs | p99 µs | begun again per 1000 | far operations each |\n|---|--:|--:|--:|--:|--:|\n",
        records,
    );
    let floors = section(
        results,
        "What the machine can do at all",
        "| operation of the fabric | op/s | p50 µs | its floor | op/s | p50 µs |\n|---|--:|--:|---|--:|--:|\n",
        floor,
    );
    [promises, oracle, records, floors].join("\n")
}

fn section(
    results: &Results,
    title: &str,
    header: &str,
    row: impl Fn(&Results, &Line) -> Option<String>,
) -> String {
    let rows: String = LINES.iter().filter_map(|line| row(results, line)).collect();
    format!("## {title}\n\n{header}{rows}")
}

fn promise(results: &Results, line: &Line) -> Option<String> {
    let (least, aim) = line.promised?;
    let rate = results.rate(line)?;
    let met = match rate.middle {
        reached if reached >= aim => "yes, and the aim",
        reached if reached >= least => "yes",
        _ => "**no**",
    };
    let what = line.name;
    let (least, aim) = (grouped(least, 0), grouped(aim, 0));
    Some(format!("| {what} | {least} | {aim} | {} | {met} |\n", range(rate)))
}

fn oracle(results: &Results, line: &Line) -> Option<String> {
    let rate = results.rate(line).filter(|_| line.kind == Kind::Oracle)?;
    let figures = ["p50_us", "p99_us", "publication_p50_us", "publication_p99_us", "publication_max_us"];
    let figures = figures.map(|figure| middle(results.spread(line, &format!("/{figure}")), 3));
    Some(format!("| {} | {} | {} |\n", line.name, range(rate), figures.join(" | ")))
}

fn records(results: &Results, line: &Line) -> Option<String> {
    let rate = results.rate(line).filter(|_| line.kind == Kind::Kv)?;
    let figure = |figure: &str| results.spread(line, &format!("/{figure}"));
    let again = 1000.0 * figure("aborted")?.middle / figure("committed")?.middle;
    let [p50, p99] = ["p50_us", "p99_us"].map(|name| middle(figure(name), 3));
    let operations = middle(figure("operations_per_trx"), 2);
    Some(format!(
        "| {} | {} | {p50} | {p99} | {} | {operations} |\n",
        line.name,
        range(rate),
        grouped(again, 2)
    ))
}

fn floor(results: &Results, line: &Line) -> Option<String> {
    let rate = results.rate(line).filter(|_| line.kind == Kind::Floor)?;
    let p50 = |pointer: &str| middle(results.spread(line, pointer), 3);
    Some(format!(
        "| {} | {} | {} | {} | {} | {} |\n",
        line.name,
        grouped(rate.middle, 0),
        p50("/p50_us"),
        results.word(line, "/floor/kind")?,
        middle(results.spread(line, "/floor/iops"), 0),
        p50("/floor/p50_us"),
    ))
}

fn range(Spread { middle, least, most }: Spread) -> String {
    format!("{} ({}–{})", grouped(middle, 0), grouped(least, 0), grouped(most, 0))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;
    use crate::machine::Machine;

    fn results(rate: f64) -> Results {
        let mut results = Results::default();
        for _ in 0..2 {
            for line in LINES {
                let mut report = json!({
                    "p50_us": 1.0, "p99_us": 2.0, "publication_p50_us": 3.0, "publication_p99_us": 4.0, "publication_max_us": 5.0,
                    "aborted": 1, "committed": 1000, "operations_per_trx": 6.0, "machine": Machine::this(), "commit": "abc",
                    "floor": { "kind": "bare loads", "iops": 7.0, "p50_us": 8.0 },
                });
                report[line.kind.rate()] = json!(rate);
                results.add(line, report).unwrap();
            }
        }
        results
    }

    #[test]
    fn every_line_is_shown_with_its_command_and_rows_of_a_table_are_equally_long() {
        let options = TxnTableOptions { out_dir: PathBuf::new(), rounds: 2, seconds: 0.5, records: 10 };
        let text = write(&options, &results(1e5), "txn.svg").unwrap();
        for line in LINES {
            assert!(text.contains(&format!("| {} |", line.name)), "{}", line.name);
            assert!(text.contains(&format!("farpool bench {}\n", options.command(line))));
        }
        for table in text.split("\n\n").filter(|part| part.starts_with("| ")) {
            let columns: BTreeSet<usize> = table.lines().map(|line| line.matches('|').count()).collect();
            assert_eq!(columns.len(), 1, "rows of different length in {table}");
        }
    }

    #[test]
    fn losses_are_marked() {
        let verdicts = |rate| {
            let tables = tables(&results(rate));
            ["| **no** |", "| yes |", "| yes, and the aim |"].map(|verdict| tables.matches(verdict).count())
        };
        assert_eq!((verdicts(1.0), verdicts(1e8)), ([10, 0, 0], [0, 0, 10]));
        assert_eq!(verdicts(2e5), [7, 1, 2]);
    }

    #[test]
    fn a_report_without_a_rate_is_refused() {
        assert!(Results::default().add(&LINES[0], json!({ "trx_s": 1.0 })).is_err());
    }
}
