//! Figure 14 of paper 1: Hash+Sort by where its temporary files lie, and what it reads and writes meanwhile.
//!
//! What is sampled is what the server's process reads and writes by system calls: temporary files, and the tables.

use std::path::Path;

use anyhow::{Result, ensure};

use super::stage::{Spot, Stage, StageOptions};
use super::watch::{Sample, Watch};
use crate::progress::Progress;
use crate::query::{HashSort, TempSpace};
use crate::stop::StopFlag;

/// How to measure.
#[derive(Clone, Debug)]
pub struct HashSortOptions<'a> {
    /// TPC-H's scale factor.
    pub scale: f64,
    /// How often each place is measured.
    pub rounds: usize,
    /// Where the database lives meanwhile; on a real disk.
    pub work_dir: &'a Path,
    /// The `farpool` binary.
    pub farpool: &'a Path,
}

/// A run.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    /// Where its temporary files lay.
    pub spot: Spot,
    /// Counted from 0.
    pub round: usize,
    /// How long it took.
    pub seconds: f64,
    /// Temporary bytes that it wrote.
    pub temp_bytes: u64,
    /// What it did meanwhile.
    pub samples: Vec<Sample>,
}

impl Timed {
    /// What the server's process read and wrote by system calls.
    pub fn bytes_by_calls(&self) -> u64 {
        self.samples.last().map_or(0, |last| last.read_bytes + last.written_bytes)
    }
}

/// All runs.
#[derive(Clone, Debug)]
pub struct HashSortReport {
    /// Each place once per round.
    pub runs: Vec<Timed>,
    /// The server's version.
    pub postgres: String,
    /// The database's memory limit in MiB, and the one while files lie on tmpfs.
    pub limits_mib: Option<(u64, u64)>,
    /// What could not be had.
    pub notes: Vec<String>,
}

/// Measures. An error if two runs return different rows.
pub fn measure(options: &HashSortOptions<'_>, stop: &StopFlag) -> Result<HashSortReport> {
    let progress = Progress::on_stderr();
    let &HashSortOptions { scale, work_dir, farpool, .. } = options;
    let mut stage = Stage::set_up(&StageOptions { scale, work_dir, farpool }, stop, progress)?;
    let query = HashSort::default();
    let step = progress.step("warming up, and checking that join and sort spill");
    query.explain(&stage.server, TempSpace::DataDirectory, stop, || ())?;
    step.done("they do");
    let spots = stage.spots();
    let (mut runs, mut rows) = (Vec::new(), None);
    for round in 0..options.rounds {
        for turn in 0..spots.len() {
            let spot = spots[(turn + round) % spots.len()];
            let step = progress.step(format!("round {}: temporary files on {}", round + 1, spot.name()));
            let mut watch = Watch::default();
            let run = stage.run(&query, spot, stop, |pid| watch.look(pid))?;
            step.done(&format!("{:.1} s", run.seconds));
            let first = *rows.get_or_insert(run.rows_hash);
            ensure!(run.rows_hash == first, "other rows with temporary files on {}", spot.name());
            let (seconds, temp_bytes) = (run.seconds, run.temp_bytes);
            runs.push(Timed { spot, round, seconds, temp_bytes, samples: watch.samples });
        }
    }
    let (postgres, limits_mib, notes) = (stage.server.version()?, stage.limits_mib(), stage.notes.clone());
    stage.tear_down()?;
    Ok(HashSortReport { runs, postgres, limits_mib, notes })
}

impl HashSortReport {
    /// Seconds of a place, round by round.
    pub fn seconds(&self, spot: Spot) -> Vec<f64> {
        self.runs.iter().filter(|run| run.spot == spot).map(|run| run.seconds).collect()
    }

    /// Seconds of a place by those of another, round by round.
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
        let run = |spot, round, seconds| Timed { spot, round, seconds, temp_bytes: 1, samples: Vec::new() };
        let runs = vec![
            run(Spot::Tmpfs, 0, 10.0),
            run(Spot::Disk, 0, 20.0),
            run(Spot::Disk, 1, 60.0),
            run(Spot::Tmpfs, 1, 20.0),
        ];
        let report = HashSortReport { runs, postgres: "15".into(), limits_mib: None, notes: Vec::new() };
        assert_eq!(report.ratios(Spot::Disk, Spot::Tmpfs), [2.0, 3.0]);
        assert!(report.ratios(Spot::Throttled, Spot::Tmpfs).is_empty());
    }
}
