//! `farpool db work`: random transactions that record what they saw.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use farpool_namdb::work::{Blow, Rows, Signal, Step, Strike, Work, work_table};

use super::{Beginning, DatabaseAt};
use crate::output::{say, tell};

/// Run random transactions, and record what they saw
///
/// Reads, writes and deletes random rows of a table of its own. Each transaction is a line of JSON in
/// --history, written before it commits and again afterwards, so that a killed process leaves all that is
/// known. Run several processes at the same time, and pass all their histories to `farpool db judge`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool db work bank.far --history a.jsonl --seconds 10
  farpool db work bank.far --history b.jsonl --seed 2 --rows 4    more conflicts")]
pub struct WorkArgs {
    #[command(flatten)]
    at: DatabaseAt,

    #[command(flatten)]
    beginning: Beginning,

    /// File for the history; if it exists, lines are added
    #[arg(long, value_name = "FILE")]
    history: PathBuf,

    /// Number of rows; fewer rows cause more conflicts. The first process sets the upper bound for all
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    rows: u64,

    /// Rows of 10 to this many bytes, instead of 48 each. The first process decides for all
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(10..=1_048_576))]
    longest: Option<u32>,

    /// Also insert new rows, and scan rows in the order of their keys. The first process decides for all
    #[arg(long)]
    scans: bool,

    /// Seed of the random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// How long to run, in seconds
    #[arg(long, value_name = "N", default_value_t = 5)]
    seconds: u64,

    /// Most transactions per second; each takes a line of a few hundred bytes
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,

    /// Send this process a signal at a step of one of its commits, or let its thread hang there, for tests:
    /// kill:locked:20
    #[arg(long, value_name = "BLOW:STEP:N", value_parser = parse_strike, hide = true)]
    strike: Option<Strike>,
}

fn parse_strike(text: &str) -> Result<Strike, String> {
    let wrong = || "write for instance kill:locked:20, stop:reached:1, or hang:logged:2".to_owned();
    let mut parts = text.split(':');
    let (Some(blow), Some(step), Some(commit), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(wrong());
    };
    let blow = match blow {
        "kill" => Blow::Signal(Signal::KILL),
        "stop" => Blow::Signal(Signal::STOP),
        "hang" => Blow::Hang,
        _ => return Err(wrong()),
    };
    let step = match step {
        "prepared" => Step::Prepared,
        "logged" => Step::Logged,
        "locked" => Step::Locked,
        "installed" => Step::Installed,
        "reached" => Step::Reached,
        _ => return Err(wrong()),
    };
    Ok(Strike { blow, step, commit: commit.parse().map_err(|_| wrong())? })
}

/// Works until the time is up, or an error occurs.
pub fn run(args: WorkArgs) -> Result<()> {
    let database = args.at.open_to_begin(&args.beginning)?;
    let client = database.client()?;
    let longest = args.longest.map(|longest| longest as usize);
    let rows = Rows { count: args.rows, longest, are_scanned: args.scans };
    let table = work_table(&client, rows)?;
    let file = continued(&args.history);
    let mut file = file.with_context(|| format!("cannot write {}", args.history.display()))?;
    let mut work = Work::new(&client, &table, rows, args.seed, &mut file, args.strike)?;
    say("ready");
    let started = Instant::now();
    let end = started + Duration::from_secs(args.seconds);
    let (mut committed, mut aborted) = (0_u64, 0_u64);
    while Instant::now() < end {
        let due = started + Duration::from_secs_f64((committed + aborted) as f64 / f64::from(args.rate));
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        match work.run_one()? {
            true => committed += 1,
            false => aborted += 1,
        }
    }
    tell(format!("{committed} transactions committed, {aborted} aborted"))
}

/// Opens a history to which lines are added. A last line that was cut off is removed.
fn continued(path: &Path) -> std::io::Result<File> {
    let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
    let mut found = Vec::new();
    file.read_to_end(&mut found)?;
    let whole = found.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    if whole < found.len() {
        file.set_len(whole as u64)?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_line_that_was_cut_off_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history.jsonl");
        for (before, after) in [("", "c\n"), ("a\nb", "a\nc\n"), ("a\n", "a\nc\n"), ("b", "c\n")] {
            std::fs::write(&path, before).unwrap();
            continued(&path).unwrap().write_all(b"c\n").unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), after);
        }
    }
}
