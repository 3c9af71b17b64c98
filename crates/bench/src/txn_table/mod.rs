//! Everything that is published about the speed of transactions, measured in one run.
//!
//! T1. Every line and every floor is measured once per round, so the figures of one round saw the same
//!     machine.
//! T2. Every line is an invocation of `farpool bench`, which the document shows.

mod document;
mod lines;
mod plot;
mod results;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::child::output;
use crate::folder::{make_folder, save};
use crate::progress::Tasks;
use crate::stop::check_stop;

use lines::{Kind, LINES, Line};
use results::Results;

/// The document's name in its folder.
const DOCUMENT: &str = "txn.md";
/// The plot's.
const PLOT: &str = "txn.svg";

/// How much to measure, and where to write it.
#[derive(Clone, Debug)]
pub struct TxnTableOptions {
    /// Folder of the document.
    pub out_dir: PathBuf,
    /// Number of rounds; each measures everything once.
    pub rounds: usize,
    /// Seconds per measurement.
    pub seconds: f64,
    /// Number of records in the tables.
    pub records: u64,
}

impl TxnTableOptions {
    /// A line's command, without `farpool bench`.
    fn command(&self, line: &Line) -> String {
        let TxnTableOptions { seconds, records, .. } = self;
        let mut words = format!("{} {} --seconds {seconds}", line.kind.command(), line.args);
        if line.kind == Kind::Kv {
            words.push_str(&format!(" --records {records}"));
        }
        words
    }
}

/// Measures everything, writes the document, and returns its tables. `farpool` is this program's file.
///
/// # Errors
/// If something cannot be measured, or a check fails. A rate below its promise is no error.
pub fn run_txn_table(options: &TxnTableOptions, farpool: &Path, stop: &AtomicBool) -> Result<String> {
    ensure!(options.rounds > 0, "there must be at least one round: give --rounds 1 or more");
    make_folder(&options.out_dir)?;
    let mut progress = Tasks::start(options.rounds * LINES.len());
    let mut results = Results::default();
    for round in 1..=options.rounds {
        for line in LINES {
            progress.step(&format!("round {round}: {}", line.name));
            results.add(line, measure(line, options, farpool, stop)?)?;
            progress.done();
        }
    }
    save(&options.out_dir.join(PLOT), &plot::draw(&results))?;
    save(&options.out_dir.join(DOCUMENT), &document::write(options, &results, PLOT)?)?;
    Ok(document::tables(&results))
}

fn measure(line: &Line, options: &TxnTableOptions, farpool: &Path, stop: &AtomicBool) -> Result<Value> {
    check_stop(stop)?;
    let mut command = Command::new(farpool);
    command.arg("bench").args(options.command(line).split(' ')).arg("--json");
    let said = output("farpool bench", command, stop).with_context(|| line.name)?;
    serde_json::from_str(&said).with_context(|| format!("cannot parse the report of {}", line.name))
}
