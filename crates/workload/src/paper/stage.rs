//! A PostgreSQL with TPC-H's two large tables and a tablespace in every place where temporary files may lie.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::cgroup::MemoryLimit;
use crate::machine;
use crate::pool::{FarMemory, Guests, PoolOptions, Transport, interposer};
use crate::postgres::{Server, ServerOptions};
use crate::progress::Progress;
use crate::query::{HashSort, Run, TempSpace};
use crate::stop::StopFlag;
use crate::throttle::ThrottledVolume;
use crate::tpch;

/// The database's limit: at scale factor 1 tables and temporary data are several times as large.
const MEMORY_LIMIT_MIB: u64 = 1024;
/// Files on tmpfs are charged to who writes them: with those the limit is larger by what is written.
pub const LOCAL_LIMIT_MIB: u64 = 8192;
const NODES: u32 = 2;
/// As for the demo: temporary files hold 1.6 GiB at once at scale factor 1, and stripes need room.
const FAR_MIB_PER_SCALE: f64 = 3072.0;
const NODE_MIN_MIB: u64 = 256;
/// The pool's region size, of which a node lends whole ones.
const REGION_MIB: u64 = 64;
const VOLUME_MIN_MIB: u64 = 512;

/// Where temporary files lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Spot {
    /// In the machine's own memory.
    Tmpfs,
    /// In far memory reached by shared memory, with the interposer.
    InterposedShm,
    /// In far memory reached by shared memory, by the mount alone.
    FarShm,
    /// In far memory reached over TCP, by the mount alone.
    FarTcp,
    /// On the machine's disk.
    Disk,
    /// On a disk throttled like a cloud volume.
    Throttled,
}

impl Spot {
    /// All of them; where there is no throttled disk it is left out.
    pub const ALL: [Self; 6] =
        [Self::Tmpfs, Self::InterposedShm, Self::FarShm, Self::FarTcp, Self::Disk, Self::Throttled];

    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tmpfs => "tmpfs",
            Self::InterposedShm => "interposer, 2 nodes, shm",
            Self::FarShm => "mount alone, 2 nodes, shm",
            Self::FarTcp => "mount alone, 2 nodes, tcp",
            Self::Disk => "the machine's disk",
            Self::Throttled => "throttled, 3,000 IOPS, 125 MiB/s",
        }
    }

    /// Whether far memory is reached by the mount alone.
    pub fn is_mount_alone(self) -> bool {
        matches!(self, Self::FarShm | Self::FarTcp)
    }

    fn tablespace(self) -> &'static str {
        match self {
            Self::Tmpfs => "local_memory",
            Self::InterposedShm => "interposed_shm",
            Self::FarShm => "far_shm",
            Self::FarTcp => "far_tcp",
            Self::Disk => "pg_default",
            Self::Throttled => "throttled_volume",
        }
    }
}

/// Everything that runs or is mounted meanwhile. Fields are dropped in this order.
pub struct Stage {
    pub server: Server,
    far: Vec<(Spot, FarMemory)>,
    volume: Option<ThrottledVolume>,
    limit: Option<MemoryLimit>,
    _tmpfs: TempDir,
    _work: TempDir,
    /// What could not be had.
    pub notes: Vec<String>,
}

/// What a stage is made with.
#[derive(Clone, Debug)]
pub struct StageOptions<'a> {
    /// TPC-H's scale factor.
    pub scale: f64,
    /// Where the database and the volume live meanwhile; on a real disk.
    pub work_dir: &'a Path,
    /// The `farpool` binary.
    pub farpool: &'a Path,
}

impl Stage {
    /// Starts and loads everything.
    pub fn set_up(options: &StageOptions<'_>, stop: &StopFlag, progress: Progress) -> Result<Self> {
        let work = machine::scratch_dir(options.work_dir, "farpool-paper-")?;
        let tmpfs = machine::scratch_dir(Path::new("/dev/shm"), "farpool-paper-")?;
        let mut notes = Vec::new();
        let group = format!("farpool-paper-{}", std::process::id());
        let limit = MemoryLimit::create(&group, MEMORY_LIMIT_MIB);
        let limit = noted(limit, "the database's memory was not limited", &mut notes);
        let volume = make_volume(options.scale, work.path(), limit.as_ref());
        let volume = noted(volume, "there was no throttled disk", &mut notes);
        let mut far = Vec::new();
        for spot in [Spot::InterposedShm, Spot::FarShm, Spot::FarTcp] {
            far.push((spot, start_pool(options.farpool, work.path(), spot, node_mib(options.scale), stop)?));
        }
        let dir = &subfolder(work.path(), "postgres")?;
        let log = &work.path().join("postgres.log");
        let wrapper = &interposer(options.farpool);
        let options_of_server =
            ServerOptions { limit: limit.as_ref(), wrapper, ..ServerOptions::new(dir, log) };
        let server = Server::start(&options_of_server, stop)?;
        let step = progress.step(format!("loading TPC-H at scale factor {}", options.scale));
        tpch::load(&mut server.connect()?, options.scale, stop, |done, all| step.advance(done, all))?;
        step.done("loaded");
        let mut places = vec![(Spot::Tmpfs, tmpfs.path())];
        places.extend(far.iter().map(|(spot, far)| (*spot, far.mount_point())));
        places.extend(volume.as_ref().map(|volume| (Spot::Throttled, volume.mount_point())));
        for (spot, dir) in places {
            server.create_tablespace(spot.tablespace(), &dir.join("tablespace"))?;
        }
        Ok(Self { server, far, volume, limit, _tmpfs: tmpfs, _work: work, notes })
    }

    /// Where temporary files may lie here.
    pub fn spots(&self) -> Vec<Spot> {
        let is_there = |spot: &Spot| *spot != Spot::Throttled || self.volume.is_some();
        Spot::ALL.into_iter().filter(is_there).collect()
    }

    /// The database's limit, if there is one, and what it is while files lie on tmpfs.
    pub fn limits_mib(&self) -> Option<(u64, u64)> {
        self.limit.as_ref().map(|_| (MEMORY_LIMIT_MIB, LOCAL_LIMIT_MIB))
    }

    /// One run with temporary files in a place. `tick` is called from time to time with the server process that works.
    pub fn run(
        &mut self,
        query: &HashSort,
        spot: Spot,
        stop: &StopFlag,
        tick: impl FnMut(u32),
    ) -> Result<Run> {
        self.set_limit(if spot == Spot::Tmpfs { LOCAL_LIMIT_MIB } else { MEMORY_LIMIT_MIB })?;
        let space = match spot {
            Spot::Disk => TempSpace::DataDirectory,
            spot => TempSpace::Tablespace(spot.tablespace()),
        };
        query.run_watched(&self.server, space, stop, tick).or_else(|error| {
            stop.check()?;
            // If a process has ended, that is the cause and the query's failure its consequence.
            self.far.iter_mut().try_for_each(|(_, far)| far.check_alive())?;
            self.server.check_alive()?;
            Err(error.context(format!("temporary files on {}: the query failed", spot.name())))
        })
    }

    fn set_limit(&mut self, mib: u64) -> Result<()> {
        self.limit.as_mut().map_or(Ok(()), |limit| limit.change(mib))
    }

    /// Ends everything in order and reports what did not go.
    pub fn tear_down(mut self) -> Result<()> {
        let mut results = vec![self.server.stop()];
        results.extend(self.far.iter_mut().map(|(_, far)| far.stop()));
        results.extend(self.volume.as_mut().map(ThrottledVolume::remove));
        results.extend(self.limit.as_mut().map(MemoryLimit::remove));
        results.into_iter().collect()
    }
}

/// What could not be had becomes a note.
pub fn noted<T>(result: Result<T>, consequence: &str, notes: &mut Vec<String>) -> Option<T> {
    result.map_err(|error| notes.push(format!("{consequence}: {error:#}"))).ok()
}

pub(super) fn subfolder(work: &Path, name: &str) -> Result<std::path::PathBuf> {
    let dir = work.join(name);
    fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

/// A throttled disk with room for temporary files.
pub fn make_volume(scale: f64, work: &Path, limit: Option<&MemoryLimit>) -> Result<ThrottledVolume> {
    let mount_point = subfolder(work, "throttled")?;
    let size_mib = VOLUME_MIN_MIB + (FAR_MIB_PER_SCALE * scale) as u64;
    ThrottledVolume::make(work, &mount_point, size_mib, limit)
}

/// What each of two nodes lends.
pub fn node_mib(scale: f64) -> u64 {
    let share = (FAR_MIB_PER_SCALE * scale) as u64 / u64::from(NODES);
    share.max(NODE_MIN_MIB).next_multiple_of(REGION_MIB)
}

/// A pool of two nodes with a mount, in a folder of its own.
pub(super) fn start_pool(
    farpool: &Path,
    work: &Path,
    spot: Spot,
    memory_per_node_mib: u64,
    stop: &StopFlag,
) -> Result<FarMemory> {
    let dir = subfolder(work, spot.tablespace())?;
    let guests = match (spot, Server::user()?) {
        (Spot::InterposedShm, Some(user)) => Guests::Of(user),
        (Spot::InterposedShm, None) => Guests::Ours,
        _ => Guests::None,
    };
    let pool = PoolOptions {
        farpool,
        run_dir: &dir.join("pool"),
        mount_point: &subfolder(&dir, "far")?,
        log_dir: &dir,
        nodes: NODES,
        memory_per_node_mib,
        transport: if spot == Spot::FarTcp { Transport::Tcp } else { Transport::Shm },
        allow_other: Server::is_other_user(),
        guests,
    };
    FarMemory::start(&pool, stop)
}
