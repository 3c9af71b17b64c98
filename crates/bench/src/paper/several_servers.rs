//! RangeScan on several database servers whose caches lie on one node: figure 25 of paper 1 (appendix B.3).
//!
//! Each server has its own data and its own cache, which has all pages. The pool has a single node.

use std::ffi::OsString;
use std::thread;

use anyhow::{Result, ensure};
use farpool_fabric::TransportChoice;

use super::Effort;
use super::cached_server::{FULL, LimitedServer, ServerFacts, Shared, Sizes, VERIFIED_ONE_IN, fill};
use super::range_scan::{load, pgbench};
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
    /// Of each server.
    pub facts: ServerFacts,
}

/// Measures over each transport in turn, and there all numbers of servers, round by round.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<ServersReport> {
    ensure!(machine::is_root(), "only root can limit the memory of the servers");
    let progress = Progress::on_stderr();
    let work = machine::scratch_dir(effort.work_dir, "farpool-servers-bench-")?;
    let sizes = Sizes::of((ROWS_PER_SCALE * effort.scale) as u64);
    machine::require_disk(work.path(), SERVERS as u64 * sizes.room_mib())?;
    let shared = Shared::prepare(effort, &work, sizes)?;
    let mut scenes = Vec::new();
    for number in 0..SERVERS {
        let step = progress.step(format!("loading {} rows, server {}", sizes.rows(), number + 1));
        let scene = shared.server(shared.work, &format!("server-{number}"), true, &[], |options| {
            Server::start(options, stop)
        })?;
        load(&scene.server, sizes.rows())?;
        scenes.push(scene);
        step.done("loaded");
    }
    let facts = shared.sizes.facts(&scenes[0].server)?;
    let mut slices = Vec::new();
    for transport in TRANSPORTS {
        let step = progress.step(format!("one node, {transport}"));
        slices.extend(over(&shared, transport, &mut scenes, facts.data_bytes, stop)?);
        step.done("measured");
    }
    scenes.into_iter().try_for_each(LimitedServer::remove)?;
    Ok(ServersReport { slices, facts })
}

fn over(
    shared: &Shared<'_>,
    transport: &'static str,
    scenes: &mut [LimitedServer],
    data_bytes: u64,
    stop: &StopFlag,
) -> Result<Vec<Worked>> {
    let memory_bytes = shared.sizes.cache_bytes();
    let bytes_each = SERVERS as u64 * (memory_bytes.next_multiple_of(REGION_BYTES) + REGION_BYTES);
    let lend = Lend { nodes: 1, bytes_each, region_bytes: REGION_BYTES };
    let pool = LocalPool::lending(shared.effort.farpool, lend, TransportChoice::Auto)?;
    let mut caches = Vec::new();
    for scene in &mut *scenes {
        // The door of an earlier cache was removed with it, and a server looks for a door only when it
        // starts.
        scene.server.start_again(stop)?;
        let memory = memory_bytes.to_string();
        let options = ["--memory", &memory, "--broker", &pool.broker, "--transport", transport];
        let options = options.map(OsString::from);
        let cache = PageCache::attach(shared.effort.farpool, scene.server.data_directory(), options)?;
        fill(&scene.server, &cache, (FULL * data_bytes as f64) as u64, stop)?;
        caches.push(cache);
    }
    let mut slices = Vec::new();
    for round in 0..shared.effort.rounds {
        let mut counts = COUNTS;
        counts.rotate_left(round % COUNTS.len());
        for servers in counts {
            stop.check()?;
            let per_second = together(shared, &mut scenes[..servers])?;
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
fn together(shared: &Shared<'_>, scenes: &mut [LimitedServer]) -> Result<f64> {
    let work =
        |scene: &mut LimitedServer| pgbench(&mut scene.server, &shared.scan, SESSIONS, shared.effort.slice);
    let work = &work;
    thread::scope(|scope| {
        let working: Vec<_> = scenes.iter_mut().map(|scene| scope.spawn(move || work(scene))).collect();
        working.into_iter().map(|working| working.join().expect("pgbench's thread does not panic")).sum()
    })
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
