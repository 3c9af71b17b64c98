//! RangeScan of paper 1 (section 5.2.1; figures 7 to 11) on a database that is larger than its memory, by
//! where pages come from that are not in the server's buffers: the machine's memory, far memory, a disk.
//!
//! Each case has a server of its own, with the same data. A control group limits the memory of the server and
//! of the kernel's page cache for it. Nine tenths of the pages at least are in far memory before anything is
//! measured. In the end, a server whose cache is warm is stopped and started again: its first second shows
//! whether it still finds its pages.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Effort;
use super::cached_server::{
    FULL, SPARE_MIB, ServerFacts, ServerPlace, Sizes, VERIFIED_ONE_IN, fill, readable_module,
};
use super::range_scan::{self, Watched, load, pgbench, watched_pgbench};
use super::stage::subfolder;
use crate::cgroup::MemoryLimit;
use crate::loop_volume::LoopVolume;
use crate::machine;
use crate::nbd_file::NbdFile;
use crate::page_cache::{CacheOptions, CacheUse, PageCache};
use crate::postgres::Server;
use crate::progress::Progress;
use crate::stop::StopFlag;
use crate::throttle::ThrottledVolume;

/// Rows at scale 1: 3.1 GB with the index.
const ROWS_PER_SCALE: f64 = 10_000_000.0;
/// Numbers of concurrent sessions.
pub const SESSIONS: [u32; 2] = [8, 32];
/// The case in which the server is started again.
pub const RESTARTED: Case = Case::CacheShm;
/// Concurrent sessions before and after a restart.
pub const RESTART_SESSIONS: u32 = 8;
/// Most restarts: if the cache is lost, each costs as long as filling it.
const RESTARTS_MAX: usize = 3;
/// How long is measured after a restart.
const FIRST_SECOND: Duration = Duration::from_secs(1);
/// Memory of a cache in which hardly any read finds its page.
const TINY_CACHE_BYTES: u64 = 64 << 20;
/// Where pages come from that are not in the server's buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Case {
    /// Files on tmpfs.
    Tmpfs,
    /// Far memory over shared memory. The files lie on the throttled volume.
    CacheShm,
    /// The same over TCP.
    CacheTcp,
    /// Files on the machine's disk.
    Disk,
    /// The same, with a cache that is far smaller than the data: what the cache costs if it finds nothing.
    TinyCache,
    /// Files on a file system in the memory of nbdkit, over TCP.
    Nbdkit,
    /// Files on a disk that is throttled like a cloud volume.
    Throttled,
}

impl Case {
    /// In the order of the report.
    pub const ALL: [Case; 7] = [
        Case::Tmpfs,
        Case::CacheShm,
        Case::CacheTcp,
        Case::Nbdkit,
        Case::Disk,
        Case::TinyCache,
        Case::Throttled,
    ];

    /// The name that readers see.
    pub fn name(self) -> &'static str {
        match self {
            Case::Tmpfs => "tmpfs",
            Case::CacheShm => "page cache, shm",
            Case::CacheTcp => "page cache, tcp",
            Case::Disk => "the machine's disk",
            Case::TinyCache => "the machine's disk, with a cache of 64 MiB",
            Case::Nbdkit => "nbdkit, tcp",
            Case::Throttled => "throttled, 3,000 IOPS, 125 MiB/s",
        }
    }

    fn folder(self) -> &'static str {
        match self {
            Case::Tmpfs => "tmpfs",
            Case::CacheShm => "shm",
            Case::CacheTcp => "tcp",
            Case::Disk => "disk",
            Case::TinyCache => "tiny-cache",
            Case::Nbdkit => "nbdkit",
            Case::Throttled => "throttled",
        }
    }

    /// How the cache reaches its nodes, if there is one.
    fn transport(self) -> Option<&'static str> {
        match self {
            Case::CacheShm | Case::TinyCache => Some("shm"),
            Case::CacheTcp => Some("tcp"),
            Case::Tmpfs | Case::Nbdkit | Case::Disk | Case::Throttled => None,
        }
    }

    /// Whether the cache has room for all pages.
    fn is_cached(self) -> bool {
        matches!(self, Case::CacheShm | Case::CacheTcp)
    }

    fn is_on_disk(self) -> bool {
        matches!(self, Case::Disk | Case::TinyCache)
    }

    fn is_on_volume(self) -> bool {
        self.is_cached() || self == Case::Throttled
    }
}

/// What sessions do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mix {
    /// Scans alone.
    Scans,
    /// One update of a row to four scans.
    Updates,
}

impl Mix {
    /// Both.
    pub const ALL: [Mix; 2] = [Mix::Scans, Mix::Updates];

    /// The name that readers see.
    pub fn name(self) -> &'static str {
        match self {
            Mix::Scans => "scans",
            Mix::Updates => "20 % updates",
        }
    }
}

/// The results of a slice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scanned {
    /// Where pages came from.
    pub case: Case,
    /// What sessions did.
    pub mix: Mix,
    /// How many there were.
    pub sessions: u32,
    /// Counted from 0.
    pub round: usize,
    /// Transactions per second.
    pub per_second: f64,
    /// How long it was measured, in seconds.
    pub seconds: f64,
    /// The largest page tables of a session's process, in KiB; `None` if no session was seen.
    pub page_tables_kib: Option<u64>,
    /// The share of the time in which the machine's processors were busy.
    pub busy: f64,
    /// Pages that were found in the cache, and those that were not; `None` without a cache.
    pub cache_use: Option<CacheUse>,
}

impl Scanned {
    /// How many transactions there were.
    pub fn transactions(&self) -> f64 {
        self.per_second * self.seconds
    }
}

/// A restart of a server whose cache was warm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Restarted {
    /// Scans per second before.
    pub warm: f64,
    /// Those of the first second in which the server could be used again.
    pub first_second: f64,
}

/// The results of all slices.
#[derive(Clone, Debug)]
pub struct CachedScanReport {
    /// Each case once per round, mix and number of sessions.
    pub slices: Vec<Scanned>,
    /// Restarts of [`RESTARTED`].
    pub restarts: Vec<Restarted>,
    /// Of each server; that on tmpfs has a higher limit.
    pub facts: ServerFacts,
    /// Memory of the database's machine for each page of a cache, in bytes.
    pub local_bytes_per_page: f64,
}

/// A server with its data. Fields are dropped in this order.
struct Scene {
    case: Case,
    server: Server,
    cache: Option<PageCache>,
    limit: MemoryLimit,
}

/// What all scenes share.
struct Stage<'a> {
    effort: &'a Effort<'a>,
    work: &'a Path,
    tmpfs: &'a Path,
    nbd: &'a Path,
    volume: &'a Path,
    module: PathBuf,
    sizes: Sizes,
}

/// Measures all cases in turn, round by round.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<CachedScanReport> {
    ensure!(machine::is_root(), "only root can limit the memory of the servers, and make a throttled volume");
    let progress = Progress::on_stderr();
    let work = machine::scratch_dir(effort.work_dir, "farpool-cache-bench-")?;
    let tmpfs = machine::scratch_dir(Path::new("/dev/shm"), "farpool-cache-bench-")?;
    let sizes = Sizes::of((ROWS_PER_SCALE * effort.scale) as u64);
    let rows = sizes.rows();
    let mount_point = subfolder(work.path(), "volume")?;
    let module = readable_module(effort.farpool, &work)?;
    let nbd_mount_point = subfolder(work.path(), "nbd")?;
    let stage = Stage {
        effort,
        work: work.path(),
        tmpfs: tmpfs.path(),
        nbd: &nbd_mount_point,
        volume: &mount_point,
        module,
        sizes,
    };
    let on_volume = Case::ALL.iter().filter(|case| case.is_on_volume()).count() as u64;
    let on_disk = Case::ALL.iter().filter(|case| case.is_on_disk()).count() as u64;
    let volume_mib = on_volume * sizes.room_mib();
    machine::require_space(tmpfs.path(), sizes.room_mib())?;
    machine::require_disk(work.path(), volume_mib + on_disk * sizes.room_mib())?;
    let mut volume = ThrottledVolume::make(work.path(), &mount_point, volume_mib, None)?;
    let nbd = NbdFile::over_tcp(sizes.room_mib() << 20)?;
    let mut nbd_volume = LoopVolume::make(nbd.path(), &nbd_mount_point)?; // dropped before the file
    let scripts = Scripts::write(work.path(), rows)?;
    let mut scenes = Vec::new();
    for case in Case::ALL {
        let step = progress.step(format!("loading {rows} rows: {}", case.name()));
        scenes.push(Scene::set_up(case, &stage, stop)?);
        step.done("loaded");
    }
    let facts = sizes.facts(&scenes[0].server)?;
    for scene in &mut scenes {
        if scene.case.is_cached() {
            let step = progress.step(format!("filling the cache: {}", scene.case.name()));
            scene.fill(facts.data_bytes, stop)?;
            step.done("filled");
        }
    }
    let slices = rounds(&mut scenes, effort, &scripts, &progress, stop)?;
    let restarts = restarts(&mut scenes, effort, &scripts, facts.data_bytes, stop)?;
    let cache = scenes.iter().filter(|scene| scene.case == RESTARTED).find_map(|scene| scene.cache.as_ref());
    let local_bytes_per_page = cache.context("there is no cache")?.local_bytes_per_page()?;
    scenes.into_iter().try_for_each(Scene::tear_down)?;
    nbd_volume.remove()?;
    volume.remove()?;
    Ok(CachedScanReport { slices, restarts, facts, local_bytes_per_page })
}

fn rounds(
    scenes: &mut [Scene],
    effort: &Effort<'_>,
    scripts: &Scripts,
    progress: &Progress,
    stop: &StopFlag,
) -> Result<Vec<Scanned>> {
    let mut slices = Vec::new();
    // All scans first: updates leave dead rows behind.
    for mix in Mix::ALL {
        for round in 0..effort.rounds {
            let step = progress.step(format!("{}, round {}", mix.name(), round + 1));
            for sessions in SESSIONS {
                for turn in 0..scenes.len() {
                    stop.check()?;
                    let scene = &mut scenes[(turn + round) % Case::ALL.len()];
                    slices.push(scene.slice(scripts, (mix, sessions, round), effort.slice)?);
                }
            }
            step.done("measured");
        }
    }
    Ok(slices)
}

/// Starts a server with a warm cache again, some times.
fn restarts(
    scenes: &mut [Scene],
    effort: &Effort<'_>,
    scripts: &Scripts,
    data_bytes: u64,
    stop: &StopFlag,
) -> Result<Vec<Restarted>> {
    let progress = Progress::on_stderr();
    let scene = scenes.iter_mut().find(|scene| scene.case == RESTARTED).context("nothing to start again")?;
    let scans = scripts.of(Mix::Scans);
    let restart = |round| {
        let step = progress.step(format!("restart, round {}", round + 1));
        // Otherwise the shutdown would write what the updates have changed, for as long as that takes.
        scene.checkpoint()?;
        scene.fill(data_bytes, stop)?;
        let warm = pgbench(&mut scene.server, &scans, RESTART_SESSIONS, effort.slice)?;
        scene.server.start_again(stop)?;
        let first_second = pgbench(&mut scene.server, &scans, RESTART_SESSIONS, FIRST_SECOND)?;
        step.done("measured");
        Ok(Restarted { warm, first_second })
    };
    (0..effort.rounds.min(RESTARTS_MAX)).map(restart).collect()
}

/// What pgbench repeats.
struct Scripts {
    scan: PathBuf,
    update: PathBuf,
}

impl Scripts {
    fn write(work: &Path, rows: u64) -> Result<Scripts> {
        let scripts = Scripts { scan: work.join("scan.sql"), update: work.join("update.sql") };
        let update =
            format!("\\set id random(1, {rows})\nUPDATE ranges SET value = value + 1 WHERE id = :id;\n");
        fs::write(&scripts.scan, range_scan::scan(rows)).context("cannot write the scan")?;
        fs::write(&scripts.update, update).context("cannot write the update")?;
        Ok(scripts)
    }

    /// The scripts with their weights, as pgbench takes them.
    fn of(&self, mix: Mix) -> Vec<OsString> {
        let weighted = |path: &Path, weight: u32| {
            let mut script = path.as_os_str().to_owned();
            script.push(format!("@{weight}"));
            script
        };
        match mix {
            Mix::Scans => vec![weighted(&self.scan, 1)],
            Mix::Updates => vec![weighted(&self.scan, 4), weighted(&self.update, 1)],
        }
    }
}

impl Scene {
    fn set_up(case: Case, stage: &Stage<'_>, stop: &StopFlag) -> Result<Self> {
        let parent = match case {
            Case::Tmpfs => stage.tmpfs,
            Case::Nbdkit => stage.nbd,
            Case::Disk | Case::TinyCache => stage.work,
            Case::CacheShm | Case::CacheTcp | Case::Throttled => stage.volume,
        };
        let dir = subfolder(parent, case.folder())?;
        // Files on tmpfs count as memory of the server.
        let limit_mib = match case {
            Case::Tmpfs => 3 * stage.sizes.data_mib() + SPARE_MIB,
            _ => stage.sizes.limit_mib(),
        };
        let limit = MemoryLimit::create(&format!("farpool-cache-bench-{}", case.folder()), limit_mib)?;
        let log = stage.work.join(format!("{}.log", case.folder()));
        let module = case.transport().map(|_| &*stage.module);
        let place = ServerPlace { dir: &dir, log: &log, limit: &limit, module };
        let server = stage.sizes.with_options(&place, &[], |options| Server::start(options, stop))?;
        load(&server, stage.sizes.rows())?;
        let mut scene = Scene { case, server, cache: None, limit };
        if let Some(transport) = case.transport() {
            scene.attach(stage, transport)?;
        }
        Ok(scene)
    }

    fn attach(&mut self, stage: &Stage<'_>, transport: &'static str) -> Result<()> {
        let memory_bytes = if self.case.is_cached() { stage.sizes.cache_bytes() } else { TINY_CACHE_BYTES };
        let options = CacheOptions { memory_bytes, nodes: 2, transport };
        let cache = PageCache::attach_with_pool(stage.effort.farpool, self.server.data_directory(), options)?;
        self.cache = Some(cache);
        Ok(())
    }

    fn fill(&mut self, data_bytes: u64, stop: &StopFlag) -> Result<()> {
        let cache = self.cache.as_ref().context("there is no cache to fill")?;
        fill(&self.server, cache, (FULL * data_bytes as f64) as u64, stop)
    }

    fn slice(
        &mut self,
        scripts: &Scripts,
        (mix, sessions, round): (Mix, u32, usize),
        length: Duration,
    ) -> Result<Scanned> {
        let used = self.cache_use()?;
        let watched = watched_pgbench(&mut self.server, &scripts.of(mix), sessions, length)?;
        let Watched { per_second, seconds, page_tables_kib, busy } = watched;
        let cache_use = self.cache_use()?.zip(used).map(|(now, before)| now.since(before));
        let case = self.case;
        Ok(Scanned { case, mix, sessions, round, per_second, seconds, page_tables_kib, busy, cache_use })
    }

    fn cache_use(&self) -> Result<Option<CacheUse>> {
        let status = self.cache.as_ref().map(PageCache::status).transpose()?;
        Ok(status.map(|status| status.cache_use()))
    }

    /// Writes what is only in memory.
    fn checkpoint(&self) -> Result<()> {
        self.server.connect()?.batch_execute("CHECKPOINT").context("cannot make a checkpoint")
    }

    fn tear_down(mut self) -> Result<()> {
        if let Some(cache) = &self.cache {
            cache.verify(VERIFIED_ONE_IN)?;
        }
        self.checkpoint()?;
        let cache = self.cache.as_mut().map_or(Ok(()), PageCache::detach);
        [self.server.stop(), cache, self.limit.remove()].into_iter().collect()
    }
}

impl CachedScanReport {
    /// Transactions per second of a case, round by round.
    pub fn per_second(&self, case: Case, mix: Mix, sessions: u32) -> Vec<f64> {
        let is_it = |it: &&Scanned| (it.case, it.mix, it.sessions) == (case, mix, sessions);
        self.slices.iter().filter(is_it).map(|slice| slice.per_second).collect()
    }

    /// What a value is in the slices in which a case scans, round by round.
    pub fn of_scans(&self, case: Case, sessions: u32, value: impl Fn(&Scanned) -> Option<f64>) -> Vec<f64> {
        let is_it = |it: &&Scanned| (it.case, it.mix, it.sessions) == (case, Mix::Scans, sessions);
        self.slices.iter().filter(is_it).filter_map(value).collect()
    }

    /// The ratio of two cases' transactions per second, round by round.
    pub fn ratios(&self, case: Case, other: Case, mix: Mix, sessions: u32) -> Vec<f64> {
        let others = self.per_second(other, mix, sessions);
        self.per_second(case, mix, sessions).into_iter().zip(others).map(|(one, other)| one / other).collect()
    }

    /// What the page tables of a session grow by for each GiB in the cache, in MB: the largest while it scans
    /// through the cache, without those of a session that scans files on tmpfs.
    pub fn page_tables_mb_per_gib(&self) -> Option<f64> {
        let largest = |case| {
            let slices = self.slices.iter().filter(|it| (it.case, it.mix) == (case, Mix::Scans));
            slices.filter_map(|slice| slice.page_tables_kib).max()
        };
        let grown_kib = largest(Case::CacheShm)?.saturating_sub(largest(Case::Tmpfs)?);
        Some((grown_kib << 10) as f64 / 1e6 / (self.facts.data_bytes as f64 / (1u64 << 30) as f64))
    }

    /// What a value is at each restart.
    pub fn of_restarts(&self, value: impl Fn(&Restarted) -> f64) -> Vec<f64> {
        self.restarts.iter().map(value).collect()
    }
}
