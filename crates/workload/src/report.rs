//! What the demo found, as a table for people and as JSON for programs.
//!
//! Medians with the range beside them, never the best of several; what could not be limited or throttled is said.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::median::median;
use crate::pool::Transport;
use crate::query::Run;

/// Where a run's temporary files were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// The disk the data directory is on.
    Disk,
    /// The mount of far memory.
    Far,
    /// The throttled volume.
    Throttled,
}

/// One measured run, as the report lists it.
#[derive(Clone, Debug, Serialize)]
pub struct RunRecord {
    /// Where its temporary files were.
    pub place: Place,
    /// How long it took.
    pub seconds: f64,
    /// Temporary bytes written.
    pub temp_bytes: u64,
    /// Sizes of its temporary files, added up.
    pub temp_file_bytes: u64,
    /// Hash of its rows, in hexadecimal: as a number it would lose digits in most JSON readers.
    pub rows_hash: String,
}

impl RunRecord {
    /// The record of a run.
    pub fn new(place: Place, run: &Run) -> Self {
        Self {
            place,
            seconds: run.seconds,
            temp_bytes: run.temp_bytes,
            temp_file_bytes: run.temp_file_bytes,
            rows_hash: format!("{:016x}", run.rows_hash),
        }
    }
}

/// What is fixed before the first run.
#[derive(Clone, Debug, Serialize)]
pub struct Setting {
    /// The database's memory limit; `None` where it could not be limited.
    pub memory_limit_mib: Option<u64>,
    /// How far memory was reached.
    pub transport: Transport,
    /// How many nodes lent memory.
    pub nodes: u32,
    /// TPC-H's scale factor.
    pub scale: f64,
    /// Memory of each hash table and sort.
    pub work_mem_kib: u32,
    /// Rows that each run returned.
    pub rows: u32,
    /// Parts the hash join was split into.
    pub hash_batches: u64,
    /// The database's version.
    pub postgres: String,
    /// What could not be limited or throttled, and why.
    pub notes: Vec<String>,
}

/// The whole result. Times are medians in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct DemoReport {
    /// Temporary files on the local disk.
    pub disk_s: f64,
    /// Temporary files in far memory.
    pub far_s: f64,
    /// Temporary files on the throttled volume; `None` where there could be none.
    pub throttled_s: Option<f64>,
    /// Temporary bytes that each run wrote (the least of them, should they differ).
    pub temp_bytes: u64,
    /// Whether every run returned the same rows.
    pub rows_match: bool,
    /// What was fixed.
    #[serde(flatten)]
    pub setting: Setting,
    /// Every run in the order it was made.
    pub runs: Vec<RunRecord>,
}

impl DemoReport {
    /// Sums up the runs; an error unless there is one on the disk and one in far memory.
    pub fn new(setting: Setting, runs: Vec<RunRecord>) -> Result<Self> {
        let median = |place| Times::of(&runs, place).map(|times| times.median);
        Ok(Self {
            disk_s: median(Place::Disk).context("there was no run on the disk")?,
            far_s: median(Place::Far).context("there was no run in far memory")?,
            throttled_s: median(Place::Throttled),
            temp_bytes: runs.iter().map(|run| run.temp_bytes).min().unwrap_or(0),
            rows_match: runs.windows(2).all(|pair| pair[0].rows_hash == pair[1].rows_hash),
            setting,
            runs,
        })
    }

    /// Writes it as JSON.
    pub fn write(&self, file: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
    }

    /// It as a table, with what must be known to read it right.
    pub fn table(&self) -> String {
        let Setting { scale, postgres, work_mem_kib, rows, hash_batches, .. } = &self.setting;
        let mut text = format!(
            "Hash+Sort, top {rows} of lineitem and orders: TPC-H scale factor {scale}, PostgreSQL {postgres}, \
             work_mem {work_mem_kib} KiB\n(hash join in {hash_batches} batches, external merge sort)\n\n"
        );
        let head =
            ["temporary files on", "seconds: median (min–max)", "temporary bytes written", "rows' hash"];
        text += &line(&head);
        let far = format!("far memory ({}, {} nodes)", self.setting.transport, self.setting.nodes);
        for (place, name) in
            [(Place::Disk, "local disk"), (Place::Far, &far), (Place::Throttled, "throttled volume")]
        {
            text += &line(&self.cells(place, name).each_ref().map(String::as_str));
        }
        let same = if self.rows_match { "the same rows" } else { "DIFFERENT ROWS" };
        // Writing to a String cannot fail.
        let _ =
            writeln!(text, "\n{} runs, alternating between the places, returned {same}.", self.runs.len());
        if let Some(limit) = self.setting.memory_limit_mib {
            let _ = writeln!(text, "The database, not the nodes, was limited to {limit} MiB of memory.");
        }
        if self.throttled_s.is_some() {
            let (iops, mib) = (crate::throttle::IOPS, crate::throttle::BYTES_PER_S >> 20);
            let _ = writeln!(
                text,
                "The throttled volume stands in for a small cloud volume: {iops} IOPS, {mib} MiB/s."
            );
        }
        for note in &self.setting.notes {
            let _ = writeln!(text, "Note: {note}");
        }
        text
    }

    fn cells(&self, place: Place, name: &str) -> [String; 4] {
        let Some(times) = Times::of(&self.runs, place) else {
            return [name.into(), "not measured".into(), "-".into(), "-".into()];
        };
        let here: Vec<&RunRecord> = self.runs.iter().filter(|run| run.place == place).collect();
        let reference = &self.runs[0].rows_hash;
        let equal = here.iter().all(|run| &run.rows_hash == reference);
        [
            name.into(),
            format!("{:.1} ({:.1}–{:.1})", times.median, times.min, times.max),
            thousands(here.iter().map(|run| run.temp_bytes).min().unwrap_or(0)),
            if equal { format!("{reference} equal") } else { "NOT EQUAL".into() },
        ]
    }
}

struct Times {
    median: f64,
    min: f64,
    max: f64,
}

impl Times {
    fn of(runs: &[RunRecord], place: Place) -> Option<Self> {
        let seconds = runs.iter().filter(|run| run.place == place).map(|run| run.seconds);
        let seconds: Vec<f64> = seconds.collect();
        let (min, max) =
            (seconds.iter().copied().reduce(f64::min)?, seconds.iter().copied().reduce(f64::max)?);
        let median = median(&seconds)?;
        Some(Self { median, min, max })
    }
}

fn line(cells: &[&str; 4]) -> String {
    let [name, seconds, bytes, rows] = cells;
    format!("  {name:<26} {seconds:>26} {bytes:>24}   {rows}\n")
}

/// `5841731584` as `5,841,731,584`.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting() -> Setting {
        Setting {
            memory_limit_mib: Some(1024),
            transport: Transport::Shm,
            nodes: 2,
            scale: 1.0,
            work_mem_kib: 4096,
            rows: 100_000,
            hash_batches: 32,
            postgres: "15.14".into(),
            notes: vec!["the wind was strong".into()],
        }
    }

    fn run(place: Place, seconds: f64, rows_hash: &str) -> RunRecord {
        RunRecord {
            place,
            seconds,
            temp_bytes: 5_841_731_584,
            temp_file_bytes: 1,
            rows_hash: rows_hash.into(),
        }
    }

    #[test]
    fn medians_of_odd_and_even_numbers_of_runs_are_those_of_the_sorted_times() {
        let runs: Vec<RunRecord> = [9.0, 1.0, 5.0].iter().map(|&s| run(Place::Disk, s, "a")).collect();
        let times = Times::of(&runs, Place::Disk).unwrap();
        assert_eq!((times.median, times.min, times.max), (5.0, 1.0, 9.0));
        assert_eq!(Times::of(&runs[..2], Place::Disk).unwrap().median, 5.0);
        assert!(Times::of(&runs, Place::Far).is_none());
    }

    #[test]
    fn report_has_the_promised_fields_and_null_for_what_was_not_measured() {
        let runs = vec![run(Place::Disk, 20.0, "a"), run(Place::Far, 18.5, "a")];
        let report = DemoReport::new(setting(), runs).unwrap();
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["disk_s"], 20.0);
        assert_eq!(json["far_s"], 18.5);
        assert!(json.as_object().unwrap().contains_key("throttled_s") && json["throttled_s"].is_null());
        assert_eq!(json["memory_limit_mib"], 1024);
        assert_eq!(json["temp_bytes"], 5_841_731_584_u64);
        assert_eq!(json["rows_match"], true);
        assert_eq!(json["transport"], "shm");
        assert_eq!(json["nodes"], 2);
    }

    #[test]
    fn one_run_with_other_rows_means_that_rows_do_not_match() {
        let runs = vec![run(Place::Disk, 1.0, "a"), run(Place::Far, 1.0, "b"), run(Place::Disk, 1.0, "a")];
        let report = DemoReport::new(setting(), runs).unwrap();
        assert!(!report.rows_match);
        assert!(report.table().contains("NOT EQUAL"), "{}", report.table());
        assert!(report.table().contains("DIFFERENT ROWS"));
    }

    #[test]
    fn table_says_what_was_limited_and_what_could_not_be() {
        let runs = vec![run(Place::Disk, 20.04, "a"), run(Place::Far, 18.5, "a")];
        let table = DemoReport::new(setting(), runs).unwrap().table();
        for part in ["20.0 (20.0–20.0)", "5,841,731,584", "not measured", "1024 MiB", "the wind was strong"]
        {
            assert!(table.contains(part), "{part} is missing in\n{table}");
        }
    }

    #[test]
    fn demo_without_a_run_in_far_memory_is_no_result() {
        assert!(DemoReport::new(setting(), vec![run(Place::Disk, 1.0, "a")]).is_err());
    }

    #[test]
    fn thousands_are_set_apart() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(999), "999");
        assert_eq!(thousands(1_234_567), "1,234,567");
    }
}
