//! The results of the demo, as a table for people and as JSON for programs.
//!
//! It shows medians with the range, never the best of several runs, and says what could not be limited or
//! throttled.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::far_memory::Transport;
use crate::folder::save;
use crate::paper::Spot;
use crate::paper::hash_sort::{HashSortReport, Timed};
use crate::paper::stage::NODES;
use crate::tally::median;
use crate::throttle::{BYTES_PER_S, IOPS};

/// One measured run, as the report lists it.
#[derive(Clone, Debug, Serialize)]
pub struct RunRecord {
    /// Where its temporary files were: `far` is the mount alone over [`Setting::transport`].
    pub place: &'static str,
    /// How long it took.
    pub seconds: f64,
    /// Temporary bytes written.
    pub temp_bytes: u64,
    /// The sum of the sizes of its temporary files.
    pub temp_file_bytes: u64,
    /// Hash of its rows, in hexadecimal: as a number it would lose digits in most JSON readers.
    pub rows_hash: String,
}

/// What is the same for all runs.
#[derive(Clone, Debug, Serialize)]
pub struct Setting {
    /// The database's memory limit; `None` if memory could not be limited.
    pub memory_limit_mib: Option<u64>,
    /// The limit while temporary files lie on tmpfs, since these are charged to the database.
    pub memory_limit_tmpfs_mib: Option<u64>,
    /// The transport of the runs called `far`.
    pub transport: Transport,
    /// Nodes of each pool.
    pub nodes: u32,
    /// TPC-H's scale factor.
    pub scale: f64,
    /// `work_mem`, for each hash table and sort.
    pub work_mem_kib: u32,
    /// Rows that each run returned.
    pub rows: u32,
    /// Number of batches of the hash join.
    pub hash_batches: u64,
    /// The database's version.
    pub postgres: String,
    /// What could not be limited or throttled, and why.
    pub notes: Vec<String>,
}

impl Setting {
    /// The place of the runs called `far`.
    fn far(&self) -> Spot {
        match self.transport {
            Transport::Shm => Spot::FarShm,
            Transport::Tcp => Spot::FarTcp,
        }
    }

    fn record(&self, timed: &Timed) -> RunRecord {
        let place = match timed.spot {
            Spot::Tmpfs => "tmpfs",
            Spot::InterposedShm => "interposed",
            spot if spot == self.far() => "far",
            Spot::FarShm => "far-shm",
            Spot::FarTcp => "far-tcp",
            Spot::HalfRoom => "half-room",
            Spot::HalfTaken => "half-taken-back",
            Spot::Disk => "disk",
            Spot::Throttled => "throttled",
        };
        let run = &timed.run;
        RunRecord {
            place,
            seconds: run.seconds,
            temp_bytes: run.temp_bytes,
            temp_file_bytes: run.temp_file_bytes,
            rows_hash: format!("{:016x}", run.rows_hash),
        }
    }
}

/// The whole result. Times are medians in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct DemoReport {
    /// Temporary files in the machine's own memory.
    pub tmpfs_s: Option<f64>,
    /// Temporary files on the local disk.
    pub disk_s: f64,
    /// Temporary files in far memory, through the mount alone.
    pub far_s: f64,
    /// Temporary files in far memory, with the interposer; `None` if only TCP was asked for, or the
    /// interposer does not work here.
    pub interposed_s: Option<f64>,
    /// Temporary files on the throttled volume; `None` if there was none.
    pub throttled_s: Option<f64>,
    /// Temporary bytes that each run wrote: the minimum over the runs.
    pub temp_bytes: u64,
    /// Whether every run returned the same rows.
    pub rows_match: bool,
    /// What is the same for all runs.
    #[serde(flatten)]
    pub setting: Setting,
    /// Every run, in the order of measurement.
    pub runs: Vec<RunRecord>,
}

impl DemoReport {
    /// Computes the report; an error unless there is a run on the disk and one in far memory.
    pub fn new(setting: Setting, measured: &HashSortReport) -> Result<Self> {
        let of = |spot| median(measured.seconds(spot));
        Ok(Self {
            tmpfs_s: of(Spot::Tmpfs),
            disk_s: of(Spot::Disk).context("there was no run on the disk")?,
            far_s: of(setting.far()).context("there was no run in far memory")?,
            interposed_s: of(Spot::InterposedShm),
            throttled_s: of(Spot::Throttled),
            temp_bytes: measured.runs.iter().map(|timed| timed.run.temp_bytes).min().unwrap_or(0),
            rows_match: measured.check_rows().is_ok(),
            runs: measured.runs.iter().map(|timed| setting.record(timed)).collect(),
            setting,
        })
    }

    /// Writes it as JSON.
    pub fn write(&self, file: &Path) -> Result<()> {
        save(file, &(serde_json::to_string_pretty(self)? + "\n"))
    }

    /// The report as a table, with what a reader must know about it.
    pub fn table(&self, measured: &HashSortReport) -> String {
        let Setting { scale, postgres, work_mem_kib, rows, hash_batches, .. } = &self.setting;
        let mut text = format!(
            "Hash+Sort, top {rows} of lineitem and orders: TPC-H scale factor {scale}, PostgreSQL {postgres}, \
             work_mem {work_mem_kib} KiB\n(hash join in {hash_batches} batches, external merge sort)\n\n"
        );
        text += &line(&["temporary files on", "seconds: median (min–max)", "× tmpfs, paired", "rows"]);
        for spot in Spot::ALL {
            text += &line(&cells(measured, spot).each_ref().map(String::as_str));
        }
        let same = if self.rows_match { "the same rows" } else { "DIFFERENT ROWS" };
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "\n{} runs, alternating between the places, wrote at least {} temporary bytes each and returned {same}.",
            self.runs.len(),
            thousands(self.temp_bytes)
        );
        if let Some((limit, local)) = measured.limits_mib {
            let _ = writeln!(
                text,
                "The database, but not the nodes, was limited to {limit} MiB of memory, and to {local} MiB \
                 with files on tmpfs, which are charged to it."
            );
        }
        if measured.runs.iter().any(|timed| timed.overflowed.is_some()) {
            text += "What far memory had no room for lay in a directory on the local disk (--overflow).\n";
        }
        if self.throttled_s.is_some() {
            text += "The throttled volume stands in for a small cloud volume.\n";
        }
        for note in &self.setting.notes {
            let _ = writeln!(text, "Note: {note}");
        }
        text
    }
}

/// A place's name in the table, as in the README.
fn name(spot: Spot) -> String {
    match spot {
        Spot::Tmpfs => "tmpfs, in memory of the server's own".into(),
        Spot::InterposedShm => format!("far memory, {NODES} nodes, farpool run"),
        Spot::FarShm => format!("far memory, {NODES} nodes, by the kernel"),
        Spot::FarTcp => "far memory by the kernel, over TCP".into(),
        Spot::HalfRoom => "farpool run, with room for half".into(),
        Spot::HalfTaken => "farpool run, half taken back".into(),
        Spot::Disk => "local disk".into(),
        Spot::Throttled => format!("throttled volume ({IOPS} IOPS, {} MiB/s)", BYTES_PER_S >> 20),
    }
}

fn cells(measured: &HashSortReport, spot: Spot) -> [String; 4] {
    let name = name(spot);
    let seconds = measured.seconds(spot);
    let Some(middle) = median(seconds.iter().copied()) else {
        return [name, "not measured".into(), "-".into(), "-".into()];
    };
    let (min, max) =
        (seconds.iter().copied().fold(middle, f64::min), seconds.iter().copied().fold(middle, f64::max));
    let ratio = median(measured.ratios(spot, Spot::Tmpfs)).map_or("-".into(), |ratio| format!("{ratio:.2}"));
    let reference = measured.runs[0].run.rows_hash;
    let here = measured.runs.iter().filter(|timed| timed.spot == spot);
    let equal = here.into_iter().all(|timed| timed.run.rows_hash == reference);
    let rows = if equal { format!("{reference:016x} equal") } else { "NOT EQUAL".into() };
    [name, format!("{middle:.1} ({min:.1}–{max:.1})"), ratio, rows]
}

fn line(cells: &[&str; 4]) -> String {
    let [name, seconds, ratio, rows] = cells;
    format!("  {name:<39} {seconds:>26} {ratio:>16}   {rows}\n")
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
    use crate::query::{Run, Spill};

    fn setting(transport: Transport) -> Setting {
        Setting {
            memory_limit_mib: Some(1024),
            memory_limit_tmpfs_mib: Some(3072),
            transport,
            nodes: 2,
            scale: 1.0,
            work_mem_kib: 4096,
            rows: 100_000,
            hash_batches: 32,
            postgres: "15.14".into(),
            notes: vec!["the wind was strong".into()],
        }
    }

    fn measured(runs: &[(Spot, f64, u64)]) -> HashSortReport {
        let timed = |&(spot, seconds, rows_hash): &(Spot, f64, u64)| Timed {
            spot,
            round: 0,
            run: Run {
                seconds,
                rows: 100_000,
                rows_hash,
                temp_bytes: 5_841_731_584,
                temp_files: 1,
                temp_file_bytes: 1,
            },
            samples: Vec::new(),
            overflowed: None,
        };
        HashSortReport {
            runs: runs.iter().map(timed).collect(),
            spill: Spill { hash_batches: 32, sort_method: "external merge".into() },
            postgres: "15.14".into(),
            limits_mib: Some((1024, 3072)),
            notes: Vec::new(),
        }
    }

    #[test]
    fn report_has_the_promised_fields_and_null_for_what_was_not_measured() {
        let runs = measured(&[(Spot::Disk, 20.0, 1), (Spot::FarShm, 18.5, 1), (Spot::FarTcp, 22.5, 1)]);
        let report = DemoReport::new(setting(Transport::Shm), &runs).unwrap();
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["disk_s"], 20.0);
        assert_eq!(json["far_s"], 18.5);
        assert!(json.as_object().unwrap().contains_key("throttled_s") && json["throttled_s"].is_null());
        assert_eq!(json["memory_limit_mib"], 1024);
        assert_eq!(json["temp_bytes"], 5_841_731_584_u64);
        assert_eq!(json["rows_match"], true);
        assert_eq!(json["transport"], "shm");
        assert_eq!(json["nodes"], 2);
        let places = |json: &serde_json::Value| -> Vec<String> {
            let runs = json["runs"].as_array().unwrap();
            runs.iter().map(|run| run["place"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(places(&json), ["disk", "far", "far-tcp"]);
        let over_tcp = DemoReport::new(setting(Transport::Tcp), &runs).unwrap();
        assert_eq!(over_tcp.far_s, 22.5);
        assert_eq!(places(&serde_json::to_value(&over_tcp).unwrap()), ["disk", "far-shm", "far"]);
    }

    #[test]
    fn one_run_with_other_rows_means_that_rows_do_not_match() {
        let runs = measured(&[(Spot::Disk, 1.0, 1), (Spot::FarShm, 1.0, 2), (Spot::Disk, 1.0, 1)]);
        let report = DemoReport::new(setting(Transport::Shm), &runs).unwrap();
        assert!(!report.rows_match);
        let table = report.table(&runs);
        assert!(table.contains("NOT EQUAL") && table.contains("DIFFERENT ROWS"), "{table}");
    }

    #[test]
    fn table_pairs_with_tmpfs_and_says_what_was_limited_and_what_could_not_be() {
        let runs = measured(&[(Spot::Tmpfs, 10.0, 1), (Spot::Disk, 20.04, 1), (Spot::FarShm, 18.5, 1)]);
        let table = DemoReport::new(setting(Transport::Shm), &runs).unwrap().table(&runs);
        for part in
            ["20.0 (20.0–20.0)", "1.85", "5,841,731,584", "not measured", "1024 MiB", "the wind was strong"]
        {
            assert!(table.contains(part), "{part} is missing in\n{table}");
        }
    }

    #[test]
    fn demo_without_a_run_in_far_memory_is_no_result() {
        assert!(DemoReport::new(setting(Transport::Shm), &measured(&[(Spot::Disk, 1.0, 1)])).is_err());
    }

    #[test]
    fn thousands_are_set_apart() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(999), "999");
        assert_eq!(thousands(1_234_567), "1,234,567");
    }
}
