//! A PostgreSQL with TPC-H's two large tables and a tablespace in every place where temporary files may lie.
//!
//! The server is started again before each run, as a user would start it for that place: by `farpool run` if
//! temporary files are accessed with the interposer, directly otherwise.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::half::{Operator, OverflowWatch, Overflowed};
use crate::cgroup::MemoryLimit;
use crate::child::run_as;
use crate::far_memory::{
    FarMemory, Guests, PoolOptions, REGION_MIB, Transport, copied_for_others, interposer,
};
use crate::machine;
use crate::postgres::{Server, ServerOptions};
use crate::progress::Progress;
use crate::query::{HashSort, Run, Spill, TempSpace};
use crate::stop::StopFlag;
use crate::throttle::ThrottledVolume;
use crate::tpch;

/// The database's memory limit at scale factor 1, where tables and temporary files are several times as
/// large.
const MEMORY_LIMIT_MIB: f64 = 1024.0;
/// The lowest limit: lower ones were not tried. At scale factors under 0.5 tables and temporary files may fit
/// in it.
const MEMORY_LIMIT_MIN_MIB: u64 = 512;
/// Added to the limit, at scale factor 1, for temporary files on tmpfs: these count as memory of the process
/// that writes them, up to 1.6 GiB at once (measured).
const TMPFS_MIB_PER_SCALE: f64 = 2048.0;
/// Nodes of each pool.
pub const NODES: u32 = 2;
/// About twice what temporary files hold at once at scale factor 1. This leaves room for striping, and for
/// blocks that were freed and cannot be reused yet.
const FAR_MIB_PER_SCALE: f64 = 3072.0;
/// What temporary files hold at once at scale factor 1 (measured on tmpfs).
pub const HELD_MIB_PER_SCALE: f64 = 1700.0;
/// The least memory that a node lends: some regions for each of the files that are open at once.
const NODE_MIN_MIB: u64 = 256;
/// Regions that a node with little memory lends, about: enough that each open file has some on each node.
const REGIONS_OF_SMALL_NODES: u64 = 16;
const VOLUME_MIN_MIB: u64 = 512;

/// Prefix of the names of folders and of the control group.
const PREFIX: &str = "farpool-hash-sort-";
/// Longest time of a program that does nothing, run with the interposer.
const INTERPOSER_DEADLINE: Duration = Duration::from_secs(10);

/// Where temporary files lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Spot {
    /// In the machine's own memory.
    Tmpfs,
    /// In far memory over shared memory, with the interposer.
    InterposedShm,
    /// In far memory over shared memory, through the mount alone.
    FarShm,
    /// In far memory over TCP, through the mount alone.
    FarTcp,
    /// As `InterposedShm`, but the pool has room for only half of the temporary files. The rest lies in an
    /// overflow directory on the machine's disk.
    HalfRoom,
    /// As `InterposedShm`, with an overflow directory; one of the two nodes gives all of its memory back to
    /// its machine while the query runs.
    HalfTaken,
    /// On the machine's disk.
    Disk,
    /// On a disk throttled like a cloud volume.
    Throttled,
}

impl Spot {
    /// All places; a place that is not available on this machine is left out.
    pub const ALL: [Self; 8] = [
        Self::Tmpfs,
        Self::InterposedShm,
        Self::FarShm,
        Self::FarTcp,
        Self::HalfRoom,
        Self::HalfTaken,
        Self::Disk,
        Self::Throttled,
    ];

    /// The name that readers see.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tmpfs => "tmpfs",
            Self::InterposedShm => "interposer, 2 nodes, shm",
            Self::FarShm => "mount alone, 2 nodes, shm",
            Self::FarTcp => "mount alone, 2 nodes, tcp",
            Self::HalfRoom => "interposer, shm, half on the disk",
            Self::HalfTaken => "interposer, shm, half taken back",
            Self::Disk => "the machine's disk",
            Self::Throttled => "throttled, 3,000 IOPS, 125 MiB/s",
        }
    }

    /// Whether far memory is accessed through the mount alone.
    pub fn is_mount_alone(self) -> bool {
        matches!(self, Self::FarShm | Self::FarTcp)
    }

    /// Whether far memory is accessed with the interposer.
    pub fn is_interposed(self) -> bool {
        self == Self::InterposedShm || self.overflows()
    }

    /// Whether it needs a pool.
    pub fn is_far(self) -> bool {
        self.is_mount_alone() || self.is_interposed()
    }

    /// Whether far memory has less room than the temporary files need.
    pub fn overflows(self) -> bool {
        matches!(self, Self::HalfRoom | Self::HalfTaken)
    }

    /// Memory that each node of its pool lends: whole regions.
    pub fn node_mib(self, scale: f64) -> u64 {
        self.room_mib(scale).next_multiple_of(region_mib(self, self.room_mib(scale)))
    }

    fn room_mib(self, scale: f64) -> u64 {
        let held = (HELD_MIB_PER_SCALE * scale) as u64;
        match self {
            Self::HalfRoom => held / 2 / u64::from(NODES),
            Self::HalfTaken => held / u64::from(NODES),
            _ => node_mib(scale),
        }
    }

    fn tablespace(self) -> &'static str {
        match self {
            Self::Tmpfs => "local_memory",
            Self::InterposedShm => "interposed_shm",
            Self::FarShm => "far_shm",
            Self::FarTcp => "far_tcp",
            Self::HalfRoom => "far_half_room",
            Self::HalfTaken => "far_half_taken",
            Self::Disk => "pg_default",
            Self::Throttled => "throttled_volume",
        }
    }
}

/// Everything that runs or is mounted during the runs. Fields are dropped in this order.
pub struct Stage {
    pub server: Server,
    far: Vec<(Spot, FarMemory)>,
    volume: Option<ThrottledVolume>,
    limit: Option<MemoryLimit>,
    _tmpfs: Option<TempDir>,
    work: TempDir,
    /// What was not available, and why.
    pub notes: Vec<String>,
    /// Where temporary files may lie on this machine.
    pub spots: Vec<Spot>,
    /// The program and arguments that run the server with the interposer.
    interposer: Option<[OsString; 3]>,
    /// The database's memory limit, and the higher one while files lie on tmpfs.
    limits_mib: (u64, u64),
    scale: f64,
    /// The `farpool` binary.
    farpool: PathBuf,
    progress: Progress,
}

/// The options of a stage.
#[derive(Clone, Debug)]
pub struct StageOptions<'a> {
    /// TPC-H's scale factor.
    pub scale: f64,
    /// Where the database and the volume are meanwhile; must be on a real disk.
    pub work_dir: &'a Path,
    /// The `farpool` binary.
    pub farpool: &'a Path,
    /// Where temporary files are to lie. A place that is not available on this machine is left out.
    pub spots: &'a [Spot],
    /// Where logs go; `None` for the database's folder.
    pub log_dir: Option<&'a Path>,
}

impl Stage {
    /// Starts and loads everything.
    pub fn set_up(options: &StageOptions<'_>, stop: &StopFlag, progress: Progress) -> Result<Self> {
        let &StageOptions { scale, farpool, .. } = options;
        let mut spots = options.spots.to_vec();
        let work = machine::scratch_dir(options.work_dir, PREFIX)?;
        let log_dir = options.log_dir.unwrap_or(work.path());
        let mut notes = Vec::new();
        let tmpfs = noted(make_tmpfs(scale), "there was no tmpfs", &mut notes);
        let interposer = interposer_for_server(farpool, work.path());
        let interposer = noted(interposer, "the interposer was not used", &mut notes);
        let group = format!("{PREFIX}{}", std::process::id());
        let memory_limit_mib = memory_limit_mib(scale);
        let limit = limit_memory(&group, memory_limit_mib);
        let limit = noted(limit, "the database's memory was not limited", &mut notes);
        let mut volume = None;
        if spots.contains(&Spot::Throttled) {
            let made = make_volume(scale, work.path(), limit.as_ref());
            volume = noted(made, "there was no throttled volume", &mut notes);
        }
        spots.retain(|spot| match spot {
            Spot::Tmpfs => tmpfs.is_some(),
            spot if spot.is_interposed() => interposer.is_some(),
            Spot::Throttled => volume.is_some(),
            _ => true,
        });
        let far = start_pools(options, work.path(), &spots, &mut notes, stop, &progress)?;
        spots.retain(|spot| !spot.is_far() || far.iter().any(|(started, _)| started == spot));
        notes.iter().for_each(|note| progress.note(&format!("note: {note}")));
        let dir = &subfolder(work.path(), "postgres")?;
        let log = &log_dir.join("postgres.log");
        let step = progress.step("starting PostgreSQL");
        let server =
            Server::start(&ServerOptions { limit: limit.as_ref(), ..ServerOptions::new(dir, log) }, stop)?;
        step.done(&format!("version {}", server.version()?));
        let step = progress.step(format!("loading TPC-H at scale factor {scale}"));
        let loaded = tpch::load(&mut server.connect()?, scale, stop, |done, all| step.advance(done, all))?;
        step.done(&format!("{} orders, {} line items", loaded.orders, loaded.lineitem));
        let mut places = Vec::new();
        places.extend(tmpfs.as_ref().map(|dir| (Spot::Tmpfs, dir.path())));
        places.extend(far.iter().map(|(spot, far)| (*spot, far.mount_point())));
        places.extend(volume.as_ref().map(|volume| (Spot::Throttled, volume.mount_point())));
        for (spot, dir) in places {
            server.create_tablespace(spot.tablespace(), &dir.join("tablespace"))?;
        }
        let tmpfs_limit_mib = memory_limit_mib + (TMPFS_MIB_PER_SCALE * scale).ceil() as u64;
        Ok(Self {
            server,
            far,
            volume,
            limit,
            _tmpfs: tmpfs,
            work,
            notes,
            spots,
            interposer,
            limits_mib: (memory_limit_mib, tmpfs_limit_mib),
            scale,
            farpool: farpool.to_owned(),
            progress,
        })
    }

    /// Runs the query once, so that the page cache holds as much of the tables as fits. Returns how the query
    /// spilled.
    pub fn warm_up(&self, query: &HashSort, stop: &StopFlag) -> Result<Spill> {
        let step = self.progress.step("warming up, and checking that join and sort spill");
        let started = Instant::now();
        let spill = query.explain(&self.server, TempSpace::DataDirectory, stop, || step.alive(started))?;
        step.done(&format!("hash join in {} batches, {}", spill.hash_batches, spill.sort_method));
        Ok(spill)
    }

    /// The database's memory limit and the higher one while files lie on tmpfs; `None` if memory is not
    /// limited.
    pub fn limits_mib(&self) -> Option<(u64, u64)> {
        self.limit.as_ref().map(|_| self.limits_mib)
    }

    /// Runs the query with temporary files in a place. `tick` is called from time to time with the id of the
    /// server process that runs it.
    pub fn run(
        &mut self,
        query: &HashSort,
        spot: Spot,
        stop: &StopFlag,
        mut tick: impl FnMut(u32),
    ) -> Result<(Run, Option<Overflowed>)> {
        self.set_limit(if spot == Spot::Tmpfs { self.limits_mib.1 } else { self.limits_mib.0 })?;
        let wrapper = self.interposer.as_ref().filter(|_| spot.is_interposed());
        self.server.set_wrapper(wrapper.map_or(&[], |wrapper| wrapper));
        let started = self.server.start_again(stop);
        started.with_context(|| format!("temporary files on {}: the server did not start", spot.name()))?;
        let space = match spot {
            Spot::Disk => TempSpace::DataDirectory,
            spot => TempSpace::Tablespace(spot.tablespace()),
        };
        let far = self.far.iter().find(|(of, _)| *of == spot).map(|(_, far)| far);
        let operator = far.filter(|_| spot == Spot::HalfTaken);
        let operator = operator.map(|far| Operator::of(self.farpool.clone(), far, stop)).transpose()?;
        let node_mib = spot.node_mib(self.scale);
        let mut watched = far.filter(|_| spot.overflows()).map(|far| match &operator {
            Some(operator) => OverflowWatch::emptying(far, operator, u64::from(NODES) * node_mib, stop),
            None => OverflowWatch::new(far, stop),
        });
        let run = query.run_watched(&self.server, space, stop, |pid| {
            tick(pid);
            watched.iter_mut().for_each(OverflowWatch::look);
        });
        let overflowed = run.and_then(|run| Ok((run, watched.map(OverflowWatch::end).transpose()?)));
        let (run, overflowed) = overflowed.or_else(|error| {
            stop.check()?;
            // If a process has ended, that is the cause, and the failed query only the consequence.
            self.far.iter_mut().try_for_each(|(_, far)| far.check_alive())?;
            self.server.check_alive()?;
            Err(error.context(format!("temporary files on {}: the query failed", spot.name())))
        })?;
        operator.map_or(Ok(()), |operator| operator.restore(node_mib, stop))?;
        Ok((run, overflowed))
    }

    fn set_limit(&mut self, mib: u64) -> Result<()> {
        self.limit.as_mut().map_or(Ok(()), |limit| limit.change(mib))
    }

    /// Ends everything in order, and returns the first error. Dropping the value then finds nothing left to
    /// do. The database's files are kept if `keep_data` is set.
    pub fn tear_down(mut self, keep_data: bool) -> Result<()> {
        let step = self.progress.step("cleaning up");
        let mut results = vec![self.server.stop()];
        results.extend(self.far.iter_mut().map(|(_, far)| far.stop()));
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

/// Turns an error into a note that names its consequence.
pub fn noted<T>(result: Result<T>, consequence: &str, notes: &mut Vec<String>) -> Option<T> {
    result.map_err(|error| notes.push(format!("{consequence}: {error:#}"))).ok()
}

pub(super) fn subfolder(work: &Path, name: &str) -> Result<PathBuf> {
    let dir = work.join(name);
    fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

fn limit_memory(group: &str, mib: u64) -> Result<MemoryLimit> {
    ensure!(machine::is_root(), "only root can make a control group");
    MemoryLimit::create(group, mib)
}

/// The memory limit of a database at this scale factor.
pub fn memory_limit_mib(scale: f64) -> u64 {
    ((MEMORY_LIMIT_MIB * scale.min(1.0)) as u64).max(MEMORY_LIMIT_MIN_MIB)
}

fn make_tmpfs(scale: f64) -> Result<TempDir> {
    let shm = Path::new("/dev/shm");
    machine::require_space(shm, (TMPFS_MIB_PER_SCALE * scale).ceil() as u64)?;
    machine::scratch_dir(shm, PREFIX)
}

/// What runs the server with the interposer. The server's user may not be able to enter the folder of our
/// binaries, so it gets copies.
fn interposer_for_server(farpool: &Path, work: &Path) -> Result<[OsString; 3]> {
    let user = Server::user()?;
    let copied = user.is_some().then(|| copied_for_others(farpool, &subfolder(work, "bin")?)).transpose()?;
    let wrapper = interposer(copied.as_deref().unwrap_or(farpool));
    let [program, args @ ..] = &wrapper;
    let mut args: Vec<&OsStr> = args.iter().map(OsString::as_os_str).collect();
    args.push("true".as_ref());
    run_as(user.as_ref(), Path::new(program), &args, INTERPOSER_DEADLINE)?;
    Ok(wrapper)
}

/// Makes a throttled volume with room for temporary files.
pub fn make_volume(scale: f64, work: &Path, limit: Option<&MemoryLimit>) -> Result<ThrottledVolume> {
    ensure!(machine::is_root(), "only root can make one");
    let mount_point = subfolder(work, "throttled")?;
    let size_mib = VOLUME_MIN_MIB + (FAR_MIB_PER_SCALE * scale) as u64;
    ThrottledVolume::make(work, &mount_point, size_mib, limit)
}

/// Size of the regions of a place's pool.
fn region_mib(spot: Spot, node_mib: u64) -> u64 {
    let fitting = 1 << (node_mib / REGIONS_OF_SMALL_NODES).max(1).ilog2();
    if spot.overflows() { REGION_MIB.min(fitting) } else { REGION_MIB }
}

/// Memory that each node lends that has room for all files.
pub fn node_mib(scale: f64) -> u64 {
    let share = (FAR_MIB_PER_SCALE * scale) as u64 / u64::from(NODES);
    share.max(NODE_MIN_MIB).next_multiple_of(REGION_MIB)
}

/// Starts the pools of the places that need one. If the pool of a place with overflow does not start (its
/// overflow directory may lie on a file system that is refused), the place is left out with a note.
fn start_pools(
    options: &StageOptions<'_>,
    work: &Path,
    spots: &[Spot],
    notes: &mut Vec<String>,
    stop: &StopFlag,
    progress: &Progress,
) -> Result<Vec<(Spot, FarMemory)>> {
    let log_dir = options.log_dir.unwrap_or(work);
    let mut pools = Vec::new();
    for &spot in spots.iter().filter(|spot| spot.is_far()) {
        let memory_mib = spot.node_mib(options.scale);
        let step = progress.step(format!("starting {NODES} nodes with {memory_mib} MiB each"));
        let started = start_pool(options.farpool, work, log_dir, spot, memory_mib, stop);
        let pool = if spot.overflows() && !stop.is_raised() {
            noted(started, &format!("{} was not measured", spot.name()), notes)
        } else {
            Some(started?)
        };
        if let Some(pool) = pool {
            pools.push((spot, pool));
            step.done(&format!("for {}", spot.name()));
        }
    }
    Ok(pools)
}

/// Starts a pool of two nodes with a mount, in a folder of its own; logs go to another folder below
/// `log_dir`.
pub(super) fn start_pool(
    farpool: &Path,
    work: &Path,
    log_dir: &Path,
    spot: Spot,
    memory_per_node_mib: u64,
    stop: &StopFlag,
) -> Result<FarMemory> {
    let dir = subfolder(work, spot.tablespace())?;
    let log_dir = &log_dir.join(format!("{}.logs", spot.tablespace()));
    fs::create_dir_all(log_dir).with_context(|| format!("cannot make {}", log_dir.display()))?;
    let guests = match (spot.is_interposed(), Server::user()?) {
        (true, Some(user)) => Guests::Of(user),
        (true, None) => Guests::Ours,
        (false, _) => Guests::None,
    };
    let overflow = spot.overflows().then(|| subfolder(&dir, "overflow")).transpose()?;
    let pool = PoolOptions {
        farpool,
        run_dir: &dir.join("pool"),
        mount_point: &subfolder(&dir, "far")?,
        log_dir,
        nodes: NODES,
        memory_per_node_mib,
        region_mib: region_mib(spot, memory_per_node_mib),
        overflow: overflow.as_deref(),
        transport: if spot == Spot::FarTcp { Transport::Tcp } else { Transport::Shm },
        allow_other: Server::is_other_user(),
        guests,
    };
    FarMemory::start(&pool, stop)
}
