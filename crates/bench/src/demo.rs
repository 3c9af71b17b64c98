//! The demo: TPC-H's *Hash+Sort* on a real PostgreSQL, with its temporary files in one place after another.
//!
//! Figure 14 of the first paper is measured in the same way ([`hash_sort`]). This module adds what the demo
//! requires of the machine, and an estimate of its duration.

mod report;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::far_memory::Transport;
use crate::machine;
use crate::paper::Spot;
use crate::paper::hash_sort::{self, HashSortOptions, MOUNT_ALONE_ROUNDS};
use crate::paper::stage::{HELD_MIB_PER_SCALE, NODES, memory_limit_mib};
use crate::progress::Progress;
use crate::query::HashSort;
use crate::stop::StopFlag;
pub use report::DemoReport;
use report::Setting;

/// A folder on a disk even where /tmp is memory.
pub const DEFAULT_WORK_DIR: &str = "/var/tmp";

/// Largest scale factor: beyond it a laptop would be busy for hours.
const SCALE_MAX: f64 = 100.0;
/// What a node needs beside the memory that it lends, with a share of what a mount needs.
const POOL_SURPLUS_MIB: u64 = 64;
/// Memory that must remain for the rest of the machine.
const MACHINE_RESERVE_MIB: u64 = 512;
/// Tables, temporary files, log and the volume's image at scale factor 1.
const DISK_MIB_PER_SCALE: f64 = 9216.0;
const DISK_MIN_MIB: u64 = 1536;
/// Time to start the pools and the server, at any scale. This time and the following ones were measured on
/// two slow processors.
const START_SECONDS: f64 = 20.0;
/// Time to load and to warm up, at scale factor 1.
const LOAD_SECONDS_PER_SCALE: f64 = 110.0;
/// Time of one run at scale factor 1; on the throttled volume a run takes half as long again.
const RUN_SECONDS_PER_SCALE: f64 = 42.0;

/// The options of the demo.
#[derive(Clone, Debug)]
pub struct DemoOptions {
    /// TPC-H's scale factor: 1.0 is the usual size, 0.05 a small one that still spills.
    pub scale: f64,
    /// The mount's transport; `None` for every one that works on a single machine.
    pub transport: Option<Transport>,
    /// Where `report.json` and the logs go.
    pub out_dir: PathBuf,
    /// Where the database, the volume and the mount are meanwhile; must be on a real disk.
    pub work_dir: PathBuf,
    /// How often each place is measured.
    pub rounds: u32,
    /// The `farpool` binary.
    pub farpool: PathBuf,
    /// Whether to keep the database's files for inspection.
    pub keep_data: bool,
}

impl DemoOptions {
    fn check(&self) -> Result<()> {
        if !(self.scale > 0.0 && self.scale <= SCALE_MAX) {
            bail!(
                "--scale (DEMO_SCALE) cannot be {}: give a number above 0, up to {SCALE_MAX}, say 0.05",
                self.scale
            );
        }
        if self.rounds == 0 {
            bail!("there must be at least one round: give --rounds 1 or more");
        }
        machine::require_disk(&self.work_dir, DISK_MIN_MIB + self.mib(DISK_MIB_PER_SCALE))?;
        let of_pool = |spot: Spot| u64::from(NODES) * (spot.node_mib(self.scale) + POOL_SURPLUS_MIB);
        let pools: u64 = self.spots().into_iter().filter(|spot| spot.is_far()).map(of_pool).sum();
        let needed =
            pools + self.mib(HELD_MIB_PER_SCALE) + memory_limit_mib(self.scale) + MACHINE_RESERVE_MIB;
        let available = machine::available_memory_mib()?;
        if available < needed {
            bail!(
                "the demo needs {needed} MiB of memory, but {available} MiB are available: take a smaller \
                 --scale (DEMO_SCALE); FARPOOL_TRANSPORT=tcp needs the least"
            );
        }
        Ok(())
    }

    fn mib(&self, per_scale: f64) -> u64 {
        (per_scale * self.scale).ceil() as u64
    }

    /// The places of temporary files that are to be measured.
    fn spots(&self) -> Vec<Spot> {
        let is_wanted = |spot: &Spot| match self.transport {
            Some(Transport::Shm) => *spot != Spot::FarTcp,
            Some(Transport::Tcp) => *spot != Spot::FarShm && !spot.is_interposed(),
            None => true,
        };
        Spot::ALL.into_iter().filter(is_wanted).collect()
    }

    /// The estimated duration, in seconds.
    fn estimate(&self) -> f64 {
        let runs = |spot: Spot| match spot {
            spot if spot.is_mount_alone() => f64::from(self.rounds.min(MOUNT_ALONE_ROUNDS as u32)),
            Spot::Throttled => 1.5 * f64::from(self.rounds),
            _ => f64::from(self.rounds),
        };
        let runs: f64 = self.spots().into_iter().map(runs).sum();
        START_SECONDS + self.scale * (LOAD_SECONDS_PER_SCALE + runs * RUN_SECONDS_PER_SCALE)
    }
}

/// Runs the demo, writes `report.json` and passes its table to `print`. An error if rows differ, whatever the
/// times.
pub fn run_demo(
    options: &DemoOptions,
    stop: &StopFlag,
    print: impl FnOnce(String) -> Result<()>,
) -> Result<DemoReport> {
    options.check()?;
    let progress = Progress::on_stderr();
    let minutes = (options.estimate() / 60.0).ceil();
    let minutes = if minutes > 1.0 { format!("{minutes} minutes") } else { "a minute".into() };
    progress.note(&format!("this takes about {minutes} on a machine with two processors"));
    let (query, log_dir) = (HashSort::default(), make_log_dir(&options.out_dir)?);
    let (measured, cleaned) = hash_sort::measure(
        &HashSortOptions {
            scale: options.scale,
            rounds: options.rounds as usize,
            work_dir: &options.work_dir,
            farpool: &options.farpool,
            spots: &options.spots(),
            log_dir: Some(&log_dir),
            keep_data: options.keep_data,
        },
        stop,
    )?;
    let setting = Setting {
        memory_limit_mib: measured.limits_mib.map(|(limit, _)| limit),
        memory_limit_tmpfs_mib: measured.limits_mib.map(|(_, limit)| limit),
        transport: options.transport.unwrap_or_default(),
        nodes: NODES,
        scale: options.scale,
        work_mem_kib: query.work_mem_kib,
        rows: query.top,
        hash_batches: measured.spill.hash_batches,
        postgres: measured.postgres.clone(),
        notes: measured.notes.clone(),
    };
    let report = DemoReport::new(setting, &measured)?;
    let file = options.out_dir.join("report.json");
    report.write(&file)?;
    print(report.table(&measured))?;
    progress.note(&format!("written to {}", file.display()));
    measured
        .check_rows()
        .with_context(|| format!("the runs returned different rows (see {})", file.display()))?;
    cleaned?;
    Ok(report)
}

fn make_log_dir(out_dir: &Path) -> Result<PathBuf> {
    let dir = out_dir.join("logs");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    // An absolute path: child processes run in another directory, and messages should name files in a way
    // that works everywhere.
    dir.canonicalize().with_context(|| format!("cannot find {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(scale: f64) -> DemoOptions {
        let nowhere = PathBuf::from("/no/such/folder");
        DemoOptions {
            scale,
            transport: None,
            out_dir: nowhere.clone(),
            work_dir: nowhere.clone(),
            rounds: 1,
            farpool: nowhere,
            keep_data: false,
        }
    }

    #[test]
    fn impossible_scales_are_refused_with_a_possible_one() {
        for scale in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e9] {
            let error = options(scale).check().unwrap_err().to_string();
            assert!(error.contains("say 0.05"), "{error}");
        }
    }

    #[test]
    fn only_the_requested_transport_is_measured() {
        assert_eq!(options(1.0).spots(), Spot::ALL);
        let tcp = DemoOptions { transport: Some(Transport::Tcp), ..options(1.0) };
        assert_eq!(tcp.spots(), [Spot::Tmpfs, Spot::FarTcp, Spot::Disk, Spot::Throttled]);
        let shm = DemoOptions { transport: Some(Transport::Shm), ..options(1.0) };
        assert!(!shm.spots().contains(&Spot::FarTcp) && shm.spots().contains(&Spot::InterposedShm));
    }

    #[test]
    fn more_rounds_take_longer() {
        let more = DemoOptions { rounds: 7, ..options(1.0) };
        assert!(more.estimate() > 3.0 * options(1.0).estimate());
    }
}
