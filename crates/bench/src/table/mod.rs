//! Everything that is published about the fabric's speed, beside peers, measured in one run.
//!
//! T1. Every line and every peer is measured once per round, so the figures of one round saw the same
//!     machine.
//! T2. Every line is an invocation of `farpool bench io`, which the document shows.
//! T3. Peers are our own instances on free ports of loopback, ended by process id; the machine's own services
//!     are left alone.

mod document;
mod lines;
pub mod peers;
mod plot;
mod results;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};

use crate::child::output;
use crate::folder::{make_folder, save};
use crate::progress::Tasks;
use crate::report::IoReport;
use crate::stop::check_stop;

use document::About;
use lines::{LINES, Line, PEER_LINES};
use peers::Peers;
use results::Results;

/// The document's name in its folder.
const DOCUMENT: &str = "io.md";
/// The plot's name.
const PLOT: &str = "io.svg";

/// How much to measure, and where to write it.
#[derive(Clone, Debug)]
pub struct TableOptions {
    /// Folder of the document and the plot.
    pub out_dir: PathBuf,
    /// Number of rounds; each measures everything once.
    pub rounds: usize,
    /// Seconds per measurement.
    pub seconds: f64,
    /// Size of the far memory, and of the data that each peer holds.
    pub footprint_bytes: u64,
}

/// Measures everything, writes the document and the plot, and returns the tables. `farpool` is this program's
/// file.
pub fn run_table(options: &TableOptions, farpool: &Path, stop: &AtomicBool) -> Result<String> {
    ensure!(options.rounds > 0, "there must be at least one round: give --rounds 1 or more");
    make_folder(&options.out_dir)?;
    let mut progress = Tasks::start(options.rounds * (LINES.len() + PEER_LINES.len()));
    progress.step("starting and filling nbdkit, memcached and redis");
    let peers = Peers::start(options.footprint_bytes, stop)?;
    let mut results = Results::default();
    let mut about = None;
    for round in 1..=options.rounds {
        for line in LINES {
            progress.step(&format!("round {round}: {}", line.name));
            let report = measure(line, options, farpool, stop)?;
            about.get_or_insert_with(|| About::of(&report)).add(&report);
            results.add(line.id, report.into());
            progress.done();
        }
        for &(id, name) in PEER_LINES {
            progress.step(&format!("round {round}: {name}"));
            results.add(id, peers.measure(id, options.seconds, stop)?);
            progress.done();
        }
    }
    drop(peers);
    let about = about.context("nothing was measured")?;
    let document = document::write(&about, options, &results, PLOT);
    save(&options.out_dir.join(PLOT), &plot::draw(&results))?;
    save(&options.out_dir.join(DOCUMENT), &document)?;
    Ok(format!("{}\n{}", document::table(&results), document::promises(&results)))
}

fn measure(line: &Line, options: &TableOptions, farpool: &Path, stop: &AtomicBool) -> Result<IoReport> {
    check_stop(stop)?;
    let mut command = Command::new(farpool);
    command.args(["bench", "io", "--json"]).args(line.args.split(' '));
    command.arg("--seconds").arg(options.seconds.to_string());
    command.arg("--footprint").arg(options.footprint_bytes.to_string());
    let said = output("farpool bench io", command, stop).with_context(|| line.name)?;
    serde_json::from_str(&said).with_context(|| format!("cannot parse the report of {}", line.name))
}
