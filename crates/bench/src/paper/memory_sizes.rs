//! RangeScan by how much memory a server has: far memory for its cache (figure 12 of paper 1, section 6.2.2),
//! and memory of its own (figure 24, appendix B.2).
//!
//! Two servers with the same data lie on the throttled volume. One of them has a cache; the other shows what
//! the disk alone gives. Sizes are measured one after the other, and the two servers take turns.

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::Effort;
use super::cached_server::{
    FULL, LimitedServer, ServerFacts, Shared, Sizes, VERIFIED_ONE_IN, fill, forget_pages,
};
use super::range_scan::{load, pgbench};
use super::stage::subfolder;
use crate::machine;
use crate::page_cache::{CacheOptions, PageCache};
use crate::postgres::Server;
use crate::progress::Progress;
use crate::spread::many;
use crate::stop::StopFlag;
use crate::throttle::ThrottledVolume;

/// Rows at scale 1: 1.2 GB with the index.
const ROWS_PER_SCALE: f64 = 3_850_000.0;
/// Concurrent sessions.
pub const SESSIONS: u32 = 8;
/// Sizes of the cache, in quarters of the data. The last has room for everything.
const CACHE_QUARTERS: [u32; 4] = [1, 2, 3, 4];
/// PostgreSQL's own buffers, as parts of the data. The last have room for everything.
const BUFFER_SHARES: [f64; 4] = [1.0 / 16.0, 0.25, 0.5, 1.1];
/// The least memory of a server beside its buffers: for its processes, and pages in the kernel's page cache.
const BESIDE_BUFFERS_MIN_MIB: u64 = 320;
/// Slices of each server that do not count, after each change: until the kernel's page cache has as many
/// pages as it can hold.
pub const WARM_UP_SLICES: usize = 3;
/// A cache that is smaller than the data counts as full when this share of its memory is used: its keeper
/// keeps some free.
const USED: f64 = 0.8;
const TRANSPORT: &str = "shm";
/// Reads the table and its index into PostgreSQL's own buffers.
const WARM_BUFFERS: &str = "CREATE EXTENSION IF NOT EXISTS pg_prewarm; \
                            SELECT pg_prewarm('ranges'), pg_prewarm('ranges_id_idx')";

/// A size, and what it gave.
#[derive(Clone, Debug)]
pub struct MeasuredSize {
    /// Far memory of the cache.
    pub cache_mib: u64,
    /// On so many nodes.
    pub nodes: u32,
    /// Each server's own buffers.
    pub buffers_mib: u64,
    /// The limit of each server's memory.
    pub limit_mib: u64,
    /// Scans per second with the cache and without it, round by round.
    pub per_second: Vec<[f64; 2]>,
    /// The share of pages that were found in the cache; `None` if none was asked for.
    pub hit_rate: Option<f64>,
}

impl MeasuredSize {
    /// Scans per second with the cache, round by round.
    pub fn with_cache(&self) -> impl Iterator<Item = f64> {
        self.per_second.iter().map(|pair| pair[0])
    }

    /// Scans per second without it, round by round.
    pub fn without(&self) -> impl Iterator<Item = f64> {
        self.per_second.iter().map(|pair| pair[1])
    }

    /// Scans per second with the cache over those without it, round by round.
    pub fn ratios(&self) -> impl Iterator<Item = f64> {
        self.per_second.iter().map(|[with, without]| with / without)
    }
}

/// All sizes.
#[derive(Clone, Debug)]
pub struct SizesReport {
    /// In the order of the report.
    pub sizes: Vec<MeasuredSize>,
    /// Of each server; for [`Varied::Local`], its buffers and its limit change from size to size.
    pub facts: ServerFacts,
}

/// What is changed from size to size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Varied {
    /// Far memory, on one node and on several.
    Cache,
    /// Memory of the server, while the cache has room for everything.
    Local,
}

/// Measures all sizes.
pub fn measure(varied: Varied, effort: &Effort<'_>, stop: &StopFlag) -> Result<SizesReport> {
    ensure!(machine::is_root(), "only root can limit the memory of the servers, and make a throttled volume");
    let progress = Progress::on_stderr();
    let work = machine::scratch_dir(effort.work_dir, "farpool-sizes-bench-")?;
    let sizes = Sizes::of((ROWS_PER_SCALE * effort.scale) as u64);
    let step = progress.step(format!("loading {} rows, twice", sizes.rows()));
    let mut bench = Bench::set_up(Shared::prepare(effort, &work, sizes)?, &work, stop)?;
    step.done("loaded");
    let measured = match varied {
        Varied::Cache => bench.cache_sizes(&progress, stop),
        Varied::Local => bench.local_sizes(&progress, stop),
    };
    let report = SizesReport { sizes: measured?, facts: bench.facts.clone() };
    bench.tear_down()?;
    Ok(report)
}

/// Both servers. Fields are dropped in this order.
struct Bench<'a> {
    with_cache: LimitedServer,
    without: LimitedServer,
    volume: ThrottledVolume,
    facts: ServerFacts,
    shared: Shared<'a>,
}

impl<'a> Bench<'a> {
    fn set_up(shared: Shared<'a>, work: &TempDir, stop: &StopFlag) -> Result<Self> {
        let room_mib = 2 * shared.sizes.room_mib();
        machine::require_disk(work.path(), room_mib)?;
        let mount_point = subfolder(work.path(), "volume")?;
        let volume = ThrottledVolume::make(work.path(), &mount_point, room_mib, None)?;
        let server = |name, module| {
            let made =
                shared.server(&mount_point, name, module, &[], |options| Server::start(options, stop))?;
            load(&made.server, shared.sizes.rows()).map(|()| made)
        };
        let (with_cache, without) = (server("with-cache", true)?, server("without", false)?);
        let facts = shared.sizes.facts(&without.server)?;
        Ok(Bench { with_cache, without, volume, facts, shared })
    }

    fn tear_down(mut self) -> Result<()> {
        self.with_cache.remove()?;
        self.without.remove()?;
        self.volume.remove()
    }

    /// Each size on one node, and from two quarters on also with a node for each quarter.
    fn cache_sizes(&mut self, progress: &Progress, stop: &StopFlag) -> Result<Vec<MeasuredSize>> {
        let on_one = CACHE_QUARTERS.map(|quarters| (quarters, 1));
        let on_several = CACHE_QUARTERS.into_iter().filter(|&quarters| quarters > 1).map(|it| (it, it));
        let mut measured = Vec::new();
        for (quarters, nodes) in on_one.into_iter().chain(on_several) {
            let memory_bytes = self.cache_bytes(quarters);
            let cache_mib = memory_bytes >> 20;
            let step =
                progress.step(format!("a cache of {cache_mib} MiB on {}", many(nodes as usize, "node")));
            let mut cache = self.attach(memory_bytes, nodes, stop)?;
            let (per_second, hit_rate) = self.rounds(&mut cache, stop)?;
            cache.detach()?;
            let ServerFacts { buffers_mib, limit_mib, .. } = self.facts;
            measured.push(MeasuredSize { cache_mib, nodes, buffers_mib, limit_mib, per_second, hit_rate });
            step.done("measured");
        }
        Ok(measured)
    }

    /// From few buffers to room for everything. The cache is the same all the time.
    fn local_sizes(&mut self, progress: &Progress, stop: &StopFlag) -> Result<Vec<MeasuredSize>> {
        let (memory_bytes, nodes) = (self.shared.sizes.cache_bytes(), 1);
        let step = progress.step("filling the cache");
        let mut cache = self.attach(memory_bytes, nodes, stop)?;
        step.done("filled");
        let mut measured = Vec::new();
        let data_mib = self.facts.data_bytes >> 20;
        for share in BUFFER_SHARES {
            let buffers_mib = ((share * data_mib as f64) as u64).max(1);
            let limit_mib = buffers_mib + BESIDE_BUFFERS_MIN_MIB.max(data_mib / 4);
            let step = progress.step(format!("buffers of {buffers_mib} MiB"));
            for LimitedServer { server, limit, dir } in [&mut self.with_cache, &mut self.without] {
                limit.change(limit_mib)?;
                server.set("shared_buffers", &format!("{buffers_mib}MB"));
                server.start_again(stop)?;
                server.connect()?.batch_execute(WARM_BUFFERS).context("cannot warm the server's buffers")?;
                // Those that are left there are in the buffers as well.
                forget_pages(dir)?;
            }
            let (per_second, hit_rate) = self.rounds(&mut cache, stop)?;
            measured.push(MeasuredSize {
                cache_mib: memory_bytes >> 20,
                nodes,
                buffers_mib,
                limit_mib,
                per_second,
                hit_rate,
            });
            step.done("measured");
        }
        cache.detach()?;
        Ok(measured)
    }

    fn cache_bytes(&self, quarters: u32) -> u64 {
        match quarters {
            4 => self.shared.sizes.cache_bytes(),
            // Whole MiB, as the report shows.
            _ => (self.facts.data_bytes * u64::from(quarters) / 4).next_multiple_of(1 << 20),
        }
    }

    /// Starts the server again, attaches a cache with this much memory, and fills it.
    fn attach(&mut self, memory_bytes: u64, nodes: u32, stop: &StopFlag) -> Result<PageCache> {
        let server = &mut self.with_cache.server;
        // The door of an earlier cache was removed with it, and a server looks for a door only when it
        // starts.
        server.start_again(stop)?;
        let options = CacheOptions { memory_bytes, nodes, transport: TRANSPORT };
        let cache =
            PageCache::attach_with_pool(self.shared.effort.farpool, server.data_directory(), options)?;
        let most = (FULL * self.facts.data_bytes as f64).min(USED * memory_bytes as f64);
        fill(server, &cache, most as u64, stop)?;
        Ok(cache)
    }

    /// Scans per second of both servers in turn, round by round, and the share of hits. Slices before that do
    /// not count.
    fn rounds(&mut self, cache: &mut PageCache, stop: &StopFlag) -> Result<(Vec<[f64; 2]>, Option<f64>)> {
        for has_cache in [true, false] {
            (0..WARM_UP_SLICES).try_for_each(|_| self.slice(has_cache, stop).map(drop))?;
        }
        let before = cache.status()?.cache_use();
        let mut per_second = Vec::new();
        for round in 0..self.shared.effort.rounds {
            let mut pair = [0.0; 2];
            let mut turns = [true, false];
            turns.rotate_left(round % 2);
            for has_cache in turns {
                pair[usize::from(!has_cache)] = self.slice(has_cache, stop)?;
            }
            per_second.push(pair);
        }
        let hit_rate = cache.status()?.cache_use().since(before).hit_rate();
        ensure!(cache.verify(VERIFIED_ONE_IN)? > 0, "no page of the cache could be compared with the disk");
        Ok((per_second, hit_rate))
    }

    fn slice(&mut self, has_cache: bool, stop: &StopFlag) -> Result<f64> {
        stop.check()?;
        let server = if has_cache { &mut self.with_cache.server } else { &mut self.without.server };
        pgbench(server, &self.shared.scan, SESSIONS, self.shared.effort.slice)
    }
}
