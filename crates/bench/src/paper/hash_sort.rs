//! Figure 14 of paper 1: Hash+Sort by where its temporary files lie, and what the server reads and writes
//! meanwhile.
//!
//! The samples count what the server's process reads and writes by system calls: the tables, and temporary
//! files unless the interposer serves them.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail};

use super::half::Overflowed;
use super::stage::{Spot, Stage, StageOptions};
use super::watch::{Sample, Watch};
use crate::progress::Progress;
use crate::query::{HashSort, Run, Spill};
use crate::stop::StopFlag;

/// Only the first rounds, this many, also measure mounts without the interposer: nothing is promised of those
/// here, and each run takes most of a minute.
pub const MOUNT_ALONE_ROUNDS: usize = 3;

/// The options of a measurement.
#[derive(Clone, Debug)]
pub struct HashSortOptions<'a> {
    /// TPC-H's scale factor.
    pub scale: f64,
    /// Number of rounds; but see [`MOUNT_ALONE_ROUNDS`].
    pub rounds: usize,
    /// Where the database is meanwhile; must be on a real disk.
    pub work_dir: &'a Path,
    /// The `farpool` binary.
    pub farpool: &'a Path,
    /// Where temporary files are to lie; a place that is not available on this machine is left out.
    pub spots: &'a [Spot],
    /// Where logs go; `None` for the database's folder.
    pub log_dir: Option<&'a Path>,
    /// Whether to keep the database's files.
    pub keep_data: bool,
}

/// A run of the query.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    /// Where its temporary files lay.
    pub spot: Spot,
    /// Counted from 0.
    pub round: usize,
    /// Its time, rows and temporary bytes.
    pub run: Run,
    /// What its process read and wrote meanwhile.
    pub samples: Vec<Sample>,
    /// How far memory and the overflow directory shared its files, if far memory had too little room.
    pub overflowed: Option<Overflowed>,
}

impl Timed {
    /// Bytes that the server's process read and wrote by system calls.
    pub fn bytes_by_calls(&self) -> u64 {
        self.samples.last().map_or(0, |last| last.read_bytes + last.written_bytes)
    }
}

/// All runs.
#[derive(Clone, Debug)]
pub struct HashSortReport {
    /// The runs of all rounds; every place that is due in a round has one.
    pub runs: Vec<Timed>,
    /// How join and sort spilled.
    pub spill: Spill,
    /// The server's version.
    pub postgres: String,
    /// The database's memory limit in MiB, and the higher one while files lie on tmpfs.
    pub limits_mib: Option<(u64, u64)>,
    /// What was not available, and why.
    pub notes: Vec<String>,
}

/// Runs the query in every place, round by round. The second result says whether cleaning up succeeded: if
/// not, the measurements are still returned.
pub fn measure(options: &HashSortOptions<'_>, stop: &StopFlag) -> Result<(HashSortReport, Result<()>)> {
    let progress = Progress::on_stderr();
    let &HashSortOptions { scale, rounds, work_dir, farpool, spots, log_dir, keep_data } = options;
    let stage_options = StageOptions { scale, work_dir, farpool, spots, log_dir };
    let mut stage = Stage::set_up(&stage_options, stop, progress)?;
    let query = HashSort::default();
    let spill = stage.warm_up(&query, stop)?;
    let spots = stage.spots.clone();
    let mut runs = Vec::new();
    for round in 0..rounds {
        let is_due = |spot: &Spot| round < MOUNT_ALONE_ROUNDS || !spot.is_mount_alone();
        let spots: Vec<Spot> = spots.iter().copied().filter(is_due).collect();
        for turn in 0..spots.len() {
            let spot = spots[(turn + round) % spots.len()];
            let number = round + 1;
            let step =
                progress.step(format!("round {number} of {rounds}: temporary files on {}", spot.name()));
            let (mut watch, started) = (Watch::default(), Instant::now());
            let look = |pid| {
                watch.look(pid);
                step.alive(started);
            };
            let (run, overflowed) = stage.run(&query, spot, stop, look)?;
            step.done(&format!("{:.1} s, {} MB written", run.seconds, run.temp_bytes / 1_000_000));
            runs.push(Timed { spot, round, run, samples: watch.samples, overflowed });
        }
    }
    let (postgres, limits_mib, notes) = (stage.server.version()?, stage.limits_mib(), stage.notes.clone());
    let cleaned = stage.tear_down(keep_data);
    Ok((HashSortReport { runs, spill, postgres, limits_mib, notes }, cleaned))
}

impl HashSortReport {
    /// An error that names the first place whose rows differ from those of the first run.
    pub fn check_rows(&self) -> Result<()> {
        let first = self.runs.first().map(|timed| timed.run.rows_hash);
        match self.runs.iter().find(|timed| Some(timed.run.rows_hash) != first) {
            Some(timed) => bail!("the rows differ with temporary files on {}", timed.spot.name()),
            None => Ok(()),
        }
    }

    /// The times of a place in seconds, round by round.
    pub fn seconds(&self, spot: Spot) -> Vec<f64> {
        self.runs.iter().filter(|timed| timed.spot == spot).map(|timed| timed.run.seconds).collect()
    }

    /// The ratio of two places' times, round by round.
    pub fn ratios(&self, spot: Spot, other: Spot) -> Vec<f64> {
        // Runs are in the order of their rounds.
        self.seconds(spot).into_iter().zip(self.seconds(other)).map(|(one, other)| one / other).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_pair_the_runs_of_a_round() {
        let run = |spot, round, seconds| Timed {
            spot,
            round,
            run: Run { seconds, rows: 1, rows_hash: 1, temp_bytes: 1, temp_files: 1, temp_file_bytes: 1 },
            samples: Vec::new(),
            overflowed: None,
        };
        let mut runs = vec![
            run(Spot::Tmpfs, 0, 10.0),
            run(Spot::Disk, 0, 20.0),
            run(Spot::Disk, 1, 60.0),
            run(Spot::Tmpfs, 1, 20.0),
        ];
        let report_of = |runs| HashSortReport {
            runs,
            spill: Spill { hash_batches: 2, sort_method: "external merge".into() },
            postgres: "15".into(),
            limits_mib: None,
            notes: Vec::new(),
        };
        let report = report_of(runs.clone());
        assert_eq!(report.ratios(Spot::Disk, Spot::Tmpfs), [2.0, 3.0]);
        assert!(report.ratios(Spot::Throttled, Spot::Tmpfs).is_empty());
        report.check_rows().unwrap();
        runs[2].run.rows_hash = 2;
        let error = report_of(runs).check_rows().unwrap_err().to_string();
        assert!(error.contains(Spot::Disk.name()), "{error}");
    }
}
