//! The demo from beginning to end: load, start the pool, run the query in every place, compare, clean up.
//!
//! Everything that must not stay behind is held by a guard, and guards are dropped in the order in which things
//! depend on each other: the database first, then the mount and the pool, the volume, the control group, the files.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::cgroup::MemoryLimit;
use crate::machine;
use crate::pool::{FarMemory, Guests, PoolOptions, Transport};
use crate::postgres::{Server, ServerOptions};
use crate::progress::Progress;
use crate::query::{HashSort, Spill, TempSpace};
use crate::report::{DemoReport, Place, RunRecord, Setting};
use crate::stop::StopFlag;
use crate::throttle::ThrottledVolume;
use crate::tpch;

/// On disk even where /tmp is memory.
pub const DEFAULT_WORK_DIR: &str = "/var/tmp";

/// The database's limit: at scale factor 1 tables and temporary data are several times as large.
const MEMORY_LIMIT_MIB: u64 = 1024;
const NODES: u32 = 2;
/// Beyond it a laptop would be busy for hours.
const SCALE_MAX: f64 = 100.0;
/// Temporary files hold 1.6 GiB at once at scale factor 1 (measured); about twice that leaves room for striping
/// and for blocks that were freed and cannot be reused yet.
const FAR_MIB_PER_SCALE: f64 = 3072.0;
/// The least a node lends: some regions for each of the files that are open at once.
const NODE_MIN_MIB: u64 = 256;
/// The pool's region size, of which a node lends whole ones.
const REGION_MIB: u64 = 64;
/// What the machine keeps when nodes and database have theirs.
const MACHINE_RESERVE_MIB: u64 = 512;
/// Tables, temporary files, log and the volume's image at scale factor 1.
const DISK_MIB_PER_SCALE: f64 = 9216.0;
const DISK_MIN_MIB: u64 = 1536;
const VOLUME_MIN_MIB: u64 = 512;

/// What the demo is told.
#[derive(Clone, Debug)]
pub struct DemoOptions {
    /// TPC-H's scale factor: 1.0 is the real thing, 0.05 a small form that still spills.
    pub scale: f64,
    /// How far memory is reached.
    pub transport: Transport,
    /// Where `report.json` and the logs go.
    pub out_dir: PathBuf,
    /// Where the database, the volume and the mount live meanwhile; on a real disk.
    pub work_dir: PathBuf,
    /// How often each place is measured.
    pub rounds: u32,
    /// The `farpool` binary.
    pub farpool: PathBuf,
    /// Whether the database's files stay for a closer look.
    pub keep_data: bool,
}

impl DemoOptions {
    /// The full demo with everything else at its default.
    pub fn new(farpool: PathBuf, out_dir: PathBuf) -> Self {
        Self {
            scale: 1.0,
            transport: Transport::default(),
            out_dir,
            work_dir: DEFAULT_WORK_DIR.into(),
            rounds: 3,
            farpool,
            keep_data: false,
        }
    }

    fn check(&self) -> Result<()> {
        if !(self.scale > 0.0 && self.scale <= SCALE_MAX) {
            bail!(
                "a scale of {} is impossible: DEMO_SCALE is a number up to {SCALE_MAX}, say 0.05",
                self.scale
            );
        }
        if self.rounds == 0 {
            bail!("no rounds, no result: ask for one at least");
        }
        machine::require_disk(&self.work_dir, DISK_MIN_MIB + self.mib(DISK_MIB_PER_SCALE))?;
        let needed =
            u64::from(NODES) * (self.node_mib() + REGION_MIB) + MEMORY_LIMIT_MIB + MACHINE_RESERVE_MIB;
        let available = machine::available_memory_mib()?;
        if available < needed {
            bail!(
                "the demo needs {needed} MiB of memory and {available} MiB are available: take a smaller DEMO_SCALE"
            );
        }
        Ok(())
    }

    fn mib(&self, per_scale: f64) -> u64 {
        (per_scale * self.scale).ceil() as u64
    }

    fn node_mib(&self) -> u64 {
        let share = self.mib(FAR_MIB_PER_SCALE).div_ceil(u64::from(NODES));
        share.max(NODE_MIN_MIB).next_multiple_of(REGION_MIB)
    }
}

/// Runs the demo, writes `report.json` and has its table printed. An error if rows differ, whatever the times say.
pub fn run_demo(
    options: &DemoOptions,
    stop: &StopFlag,
    print: impl FnOnce(String) -> Result<()>,
) -> Result<DemoReport> {
    options.check()?;
    let progress = Progress::on_stderr();
    let mut stage = Stage::set_up(options, stop, progress)?;
    let report = stage.measure(options, stop)?;
    stage.tear_down(options.keep_data)?;
    let file = options.out_dir.join("report.json");
    report.write(&file)?;
    print(report.table())?;
    progress.note(&format!("written to {}", file.display()));
    if !report.rows_match {
        bail!("the runs returned different rows: see {}", file.display());
    }
    Ok(report)
}

/// Everything that runs or is mounted meanwhile. Fields are dropped in this order.
struct Stage {
    server: Server,
    far: FarMemory,
    volume: Option<ThrottledVolume>,
    limit: Option<MemoryLimit>,
    work: TempDir,
    notes: Vec<String>,
    progress: Progress,
}

impl Stage {
    fn set_up(options: &DemoOptions, stop: &StopFlag, progress: Progress) -> Result<Self> {
        let log_dir = make_log_dir(&options.out_dir)?;
        let work = machine::scratch_dir(&options.work_dir, "farpool-demo-")?;
        let mut notes = Vec::new();
        let limit = note_failure(limit_memory(), "the database's memory was not limited", &mut notes);
        let volume = make_volume(options, work.path(), limit.as_ref());
        let volume = note_failure(volume, "there was no throttled volume to compare with", &mut notes);
        for note in &notes {
            progress.note(&format!("note: {note}"));
        }
        let far = start_pool(options, work.path(), &log_dir, stop, progress)?;
        let dir = &work.path().join("postgres");
        fs::create_dir(dir)?;
        let log = &log_dir.join("postgres.log");
        let server_options = ServerOptions { limit: limit.as_ref(), ..ServerOptions::new(dir, log) };
        let step = progress.step("starting PostgreSQL");
        let server = Server::start(&server_options, stop)?;
        step.done(&format!("version {}", server.version()?));
        load(&server, options.scale, stop, progress)?;
        server.create_tablespace(space_name(Place::Far), &far.mount_point().join("tablespace"))?;
        if let Some(volume) = &volume {
            server
                .create_tablespace(space_name(Place::Throttled), &volume.mount_point().join("tablespace"))?;
        }
        Ok(Self { server, far, volume, limit, work, notes, progress })
    }

    fn places(&self) -> Vec<Place> {
        let throttled = self.volume.as_ref().map(|_| Place::Throttled);
        [Place::Disk, Place::Far].into_iter().chain(throttled).collect()
    }

    fn measure(&mut self, options: &DemoOptions, stop: &StopFlag) -> Result<DemoReport> {
        let query = HashSort::default();
        let spill = self.explain(&query, stop)?;
        let mut runs = Vec::new();
        for round in 1..=options.rounds {
            for place in self.places() {
                let what =
                    format!("round {round} of {}: temporary files on {}", options.rounds, place_name(place));
                runs.push(self.run(&query, place, &what, stop)?);
            }
        }
        let setting = Setting {
            memory_limit_mib: self.limit.as_ref().map(MemoryLimit::limit_mib),
            transport: options.transport,
            nodes: NODES,
            scale: options.scale,
            work_mem_kib: query.work_mem_kib,
            rows: query.top,
            hash_batches: spill.hash_batches,
            postgres: self.server.version()?,
            notes: self.notes.clone(),
        };
        DemoReport::new(setting, runs)
    }

    fn explain(&self, query: &HashSort, stop: &StopFlag) -> Result<Spill> {
        let step = self.progress.step("warming up, and checking that join and sort spill");
        let started = Instant::now();
        let spill = query.explain(&self.server, TempSpace::DataDirectory, stop, || step.alive(started))?;
        step.done(&format!("hash join in {} batches, {}", spill.hash_batches, spill.sort_method));
        Ok(spill)
    }

    fn run(&mut self, query: &HashSort, place: Place, what: &str, stop: &StopFlag) -> Result<RunRecord> {
        let space = match place {
            Place::Disk => TempSpace::DataDirectory,
            Place::Far | Place::Throttled => TempSpace::Tablespace(space_name(place)),
        };
        let step = self.progress.step(what);
        let started = Instant::now();
        let run = match query.run(&self.server, space, stop, || step.alive(started)) {
            Ok(run) => run,
            Err(error) => {
                stop.check()?;
                // If a process has ended, that is the cause and the query's failure its consequence.
                self.far.check_alive()?;
                self.server.check_alive()?;
                return Err(error.context(format!("{what}: the query failed")));
            }
        };
        step.done(&format!("{:.1} s, {} MB written", run.seconds, run.temp_bytes / 1_000_000));
        Ok(RunRecord::new(place, &run))
    }

    /// Ends everything in order and reports what did not go; the guards then find nothing left to do.
    fn tear_down(mut self, keep_data: bool) -> Result<()> {
        let step = self.progress.step("cleaning up");
        let mut results = vec![self.server.stop(), self.far.stop()];
        results.extend(self.volume.as_mut().map(ThrottledVolume::remove));
        results.extend(self.limit.as_mut().map(MemoryLimit::remove));
        results.into_iter().collect::<Result<Vec<()>>>()?;
        if keep_data {
            step.done(&format!("the database stays in {}", self.work.keep().display()));
        } else {
            self.work.close().context("cannot remove the work directory")?;
            step.done("nothing left behind");
        }
        Ok(())
    }
}

fn note_failure<T>(result: Result<T>, consequence: &str, notes: &mut Vec<String>) -> Option<T> {
    result.map_err(|error| notes.push(format!("{consequence}: {error:#}"))).ok()
}

fn make_log_dir(out_dir: &Path) -> Result<PathBuf> {
    let dir = out_dir.join("logs");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    // Children run in another directory, and messages should name files that can be found from anywhere.
    dir.canonicalize().with_context(|| format!("cannot find {}", dir.display()))
}

fn limit_memory() -> Result<MemoryLimit> {
    if !machine::is_root() {
        bail!("only root can make a control group");
    }
    MemoryLimit::create(&format!("farpool-demo-{}", std::process::id()), MEMORY_LIMIT_MIB)
}

fn make_volume(options: &DemoOptions, work: &Path, limit: Option<&MemoryLimit>) -> Result<ThrottledVolume> {
    if !machine::is_root() {
        bail!("only root can make one");
    }
    let mount_point = work.join("throttled");
    fs::create_dir(&mount_point)?;
    let size_mib = VOLUME_MIN_MIB + options.mib(FAR_MIB_PER_SCALE);
    ThrottledVolume::make(work, &mount_point, size_mib, limit)
}

fn start_pool(
    options: &DemoOptions,
    work: &Path,
    log_dir: &Path,
    stop: &StopFlag,
    progress: Progress,
) -> Result<FarMemory> {
    let mount_point = work.join("far");
    fs::create_dir(&mount_point)?;
    let memory_per_node_mib = options.node_mib();
    let step = progress.step(format!("starting a pool of {NODES} nodes with {memory_per_node_mib} MiB each"));
    let pool = PoolOptions {
        farpool: &options.farpool,
        run_dir: &work.join("pool"),
        mount_point: &mount_point,
        log_dir,
        nodes: NODES,
        memory_per_node_mib,
        transport: options.transport,
        allow_other: Server::is_other_user(),
        guests: Guests::None,
    };
    let far = FarMemory::start(&pool, stop)?;
    step.done(&format!("mounted over {}", options.transport));
    Ok(far)
}

fn load(server: &Server, scale: f64, stop: &StopFlag, progress: Progress) -> Result<()> {
    let step = progress.step(format!("loading TPC-H at scale factor {scale}"));
    let mut client = server.connect()?;
    let loaded = tpch::load(&mut client, scale, stop, |done, all| step.advance(done, all))?;
    step.done(&format!("{} orders, {} line items", loaded.orders, loaded.lineitem));
    Ok(())
}

fn space_name(place: Place) -> &'static str {
    match place {
        Place::Disk => "pg_default",
        Place::Far => "far_memory",
        Place::Throttled => "throttled_volume",
    }
}

fn place_name(place: Place) -> &'static str {
    match place {
        Place::Disk => "the local disk",
        Place::Far => "far memory",
        Place::Throttled => "the throttled volume",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(scale: f64) -> DemoOptions {
        DemoOptions { scale, ..DemoOptions::new("/no/such/farpool".into(), "/no/such/folder".into()) }
    }

    #[test]
    fn impossible_scales_are_refused_with_a_possible_one() {
        for scale in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e9] {
            let error = options(scale).check().unwrap_err().to_string();
            assert!(error.contains("say 0.05"), "{error}");
        }
    }

    #[test]
    fn nodes_lend_whole_regions_that_hold_the_temporary_files_together() {
        assert_eq!(options(1.0).node_mib(), 1536);
        assert_eq!(options(0.05).node_mib(), NODE_MIN_MIB);
        assert!(options(0.33).node_mib().is_multiple_of(REGION_MIB));
    }

    #[test]
    fn place_that_cannot_be_had_becomes_a_note() {
        let mut notes = Vec::new();
        let none: Option<()> = note_failure(Err(anyhow::anyhow!("no loop device")), "no volume", &mut notes);
        assert_eq!((none, notes), (None, vec!["no volume: no loop device".to_owned()]));
    }
}
