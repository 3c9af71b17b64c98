//! RangeScan on several database servers whose caches lie on one node: figure 25 of paper 1 (appendix B.3).
//!
//! Each server has its own data and its own cache, which has all pages. The pool has a single node.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, ensure};
use farpool_fabric::TransportChoice;

use super::Effort;
use super::cached_server::{FULL, ServerPlace, Sizes, data_bytes, fill, readable_module};
use super::range_scan::{self, load, pgbench};
use super::stage::subfolder;
use crate::cgroup::MemoryLimit;
use crate::local_pool::{Lend, LocalPool};
use crate::machine;
use crate::page_cache::PageCache;
use crate::postgres::Server;
use crate::progress::Progress;
use crate::stop::StopFlag;

/// Rows of each server's table at scale 1.
const ROWS_PER_SCALE: f64 = 1_000_000.0;
/// How many servers work at a time.
pub const COUNTS: [usize; 3] = [1, 2, 4];
/// How many there are.
const SERVERS: usize = COUNTS[COUNTS.len() - 1];
/// Concurrent sessions of each.
pub const SESSIONS: u32 = 8;
/// How the node is reached.
pub const TRANSPORTS: [&str; 2] = ["shm", "tcp"];
const REGION_BYTES: u64 = 16 << 20;
/// Which part of the pages are compared with the disk in the end.
const VERIFIED_ONE_IN: u32 = 20;

/// The results of a slice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Worked {
    /// How the node was reached.
    pub transport: &'static str,
    /// How many servers worked.
    pub servers: usize,
    /// Scans per second of all of them.
    pub per_second: f64,
}

/// The results of all slices.
#[derive(Clone, Debug)]
pub struct ServersReport {
    /// Each number of servers once per round and transport.
    pub slices: Vec<Worked>,
    /// Rows of each table.
    pub rows: u64,
    /// The limit of each server's memory.
    pub limit_mib: u64,
    /// Each server's own buffers.
    pub buffers_mib: u64,
    /// The server's version.
    pub postgres: String,
    /// Bytes of each table and its index.
    pub data_bytes: u64,
}

/// What all servers share.
struct Stage<'a> {
    effort: &'a Effort<'a>,
    work: &'a Path,
    module: PathBuf,
    sizes: Sizes,
    scan: [OsString; 1],
}

/// A server with its data. Fields are dropped in this order.
struct Scene {
    server: Server,
    limit: MemoryLimit,
}

/// Measures over each transport in turn, and there all numbers of servers, round by round.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<ServersReport> {
    ensure!(machine::is_root(), "only root can limit the memory of the servers");
    let progress = Progress::on_stderr();
    let work = machine::scratch_dir(effort.work_dir, "farpool-servers-bench-")?;
    let sizes = Sizes::of((ROWS_PER_SCALE * effort.scale) as u64);
    let module = readable_module(effort.farpool, &work)?;
    machine::require_disk(work.path(), SERVERS as u64 * sizes.room_mib())?;
    let script = work.path().join("scan.sql");
    fs::write(&script, range_scan::scan(sizes.rows())).context("cannot write the scan")?;
    let stage = Stage { effort, work: work.path(), module, sizes, scan: [script.into_os_string()] };
    let mut scenes = Vec::new();
    for number in 0..SERVERS {
        let step = progress.step(format!("loading {} rows, server {}", sizes.rows(), number + 1));
        scenes.push(stage.scene(number, stop)?);
        step.done("loaded");
    }
    let (data_bytes, postgres) = (data_bytes(&scenes[0].server)?, scenes[0].server.version()?);
    let mut slices = Vec::new();
    for transport in TRANSPORTS {
        let step = progress.step(format!("one node, {transport}"));
        slices.extend(stage.over(transport, &mut scenes, data_bytes, stop)?);
        step.done("measured");
    }
    for mut scene in scenes {
        scene.server.stop()?;
        scene.limit.remove()?;
    }
    let (rows, limit_mib, buffers_mib) = (sizes.rows(), sizes.limit_mib(), sizes.buffers_mib());
    Ok(ServersReport { slices, rows, limit_mib, buffers_mib, postgres, data_bytes })
}

impl Stage<'_> {
    fn scene(&self, number: usize, stop: &StopFlag) -> Result<Scene> {
        let name = format!("server-{number}");
        let dir = subfolder(self.work, &name)?;
        let limit = MemoryLimit::create(&format!("farpool-servers-bench-{number}"), self.sizes.limit_mib())?;
        let log = self.work.join(format!("{name}.log"));
        let place = ServerPlace { dir: &dir, log: &log, limit: &limit, module: Some(&self.module) };
        let server = self.sizes.with_options(&place, &[], |options| Server::start(options, stop))?;
        load(&server, self.sizes.rows())?;
        Ok(Scene { server, limit })
    }

    fn over(
        &self,
        transport: &'static str,
        scenes: &mut [Scene],
        data_bytes: u64,
        stop: &StopFlag,
    ) -> Result<Vec<Worked>> {
        let memory_bytes = self.sizes.cache_bytes();
        let bytes_each = SERVERS as u64 * (memory_bytes.next_multiple_of(REGION_BYTES) + REGION_BYTES);
        let lend = Lend { nodes: 1, bytes_each, region_bytes: REGION_BYTES };
        let pool = LocalPool::lending(self.effort.farpool, lend, TransportChoice::Auto)?;
        let mut caches = Vec::new();
        for scene in &mut *scenes {
            // The door of an earlier cache was removed with it, and a server looks for a door only when it
            // starts.
            scene.server.start_again(stop)?;
            let memory = memory_bytes.to_string();
            let options = ["--memory", &memory, "--broker", &pool.broker, "--transport", transport];
            let options = options.map(OsString::from);
            let cache = PageCache::attach(self.effort.farpool, scene.server.data_directory(), options)?;
            fill(&scene.server, &cache, (FULL * data_bytes as f64) as u64, stop)?;
            caches.push(cache);
        }
        let mut slices = Vec::new();
        for round in 0..self.effort.rounds {
            let mut counts = COUNTS;
            counts.rotate_left(round % COUNTS.len());
            for servers in counts {
                stop.check()?;
                let per_second = self.together(&mut scenes[..servers])?;
                slices.push(Worked { transport, servers, per_second });
            }
        }
        for mut cache in caches {
            cache.verify(VERIFIED_ONE_IN)?;
            cache.detach()?;
        }
        Ok(slices)
    }

    /// Scans per second of these servers, which work at the same time.
    fn together(&self, scenes: &mut [Scene]) -> Result<f64> {
        let work = |scene: &mut Scene| pgbench(&mut scene.server, &self.scan, SESSIONS, self.effort.slice);
        let work = &work;
        thread::scope(|scope| {
            let working: Vec<_> = scenes.iter_mut().map(|scene| scope.spawn(move || work(scene))).collect();
            working.into_iter().map(|working| working.join().expect("pgbench's thread does not panic")).sum()
        })
    }
}

impl ServersReport {
    /// Scans per second of so many servers together, round by round.
    pub fn per_second(&self, transport: &str, servers: usize) -> Vec<f64> {
        let is_it = |it: &&Worked| (it.transport, it.servers) == (transport, servers);
        self.slices.iter().filter(is_it).map(|slice| slice.per_second).collect()
    }

    /// The same over that of one server, round by round.
    pub fn ratios(&self, transport: &str, servers: usize) -> Vec<f64> {
        let ones = self.per_second(transport, 1);
        self.per_second(transport, servers).into_iter().zip(ones).map(|(all, one)| all / one).collect()
    }
}
