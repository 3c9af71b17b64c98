//! What a planned switchover costs, with and without the pages of the old server's cache: figure 16 of paper
//! 1 (section 6.5).
//!
//! The files of the server and of its standby lie on the throttled volume, and at least 93 % of the pages are
//! in the server's cache. The server is shut down, and the standby promoted, once with a cache that begins
//! empty, and once with the cache of the old server, which was handed over. The new server is the old one of
//! the next switchover.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Effort;
use super::cached_server::{
    LimitedServer, REPLICATION, ServerFacts, Shared, Sizes, VERIFIED_ONE_IN, data_bytes, fill, forget_pages,
};
use super::range_scan::{Timed, load, pgbench, timed_pgbench};
use super::stage::subfolder;
use crate::machine;
use crate::meanwhile::looking_meanwhile;
use crate::page_cache::{CacheOptions, PageCache};
use crate::postgres::Server;
use crate::progress::Progress;
use crate::stop::StopFlag;
use crate::tally::quantile;
use crate::throttle::ThrottledVolume;

/// Rows at scale 1: nine tenths of their pages are 1 GiB.
const ROWS_PER_SCALE: f64 = 3_850_000.0;
/// The share of the pages that the cache has before a switchover.
pub const FILLED: f64 = 0.93;
/// The share of the pages that makes a new cache usable.
pub const USABLE: f64 = 0.9;
/// Concurrent sessions.
pub const SESSIONS: u32 = 8;
/// The first minute after the promotion, in slices.
const MINUTE_SLICES: u32 = 20;
/// How long a cache that begins empty may take until it is usable.
const USABLE_WITHIN: Duration = Duration::from_secs(600);
/// How often it is looked how many pages a cache has.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How often the standby is asked for a restartpoint while the cache is handed over.
const CHECKPOINT_EVERY: Duration = Duration::from_millis(200);
const TRANSPORT: &str = "shm";
const NODES: u32 = 2;

/// With what the new server's cache begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Case {
    /// Nothing: pages come in as they are read.
    Empty,
    /// The pages of the old server's cache.
    HandedOver,
}

impl Case {
    /// In the order of the report.
    pub const ALL: [Case; 2] = [Case::HandedOver, Case::Empty];

    /// The name that readers see.
    pub fn name(self) -> &'static str {
        match self {
            Case::Empty => "begins empty",
            Case::HandedOver => "handed over",
        }
    }
}

/// The results of a switchover.
#[derive(Clone, Debug)]
pub struct Switched {
    /// With what the new cache began.
    pub case: Case,
    /// Seconds from the old server's end until the new cache was usable.
    pub usable_after_s: f64,
    /// Seconds from the old server's end until the new server could be written.
    pub promoted_after_s: f64,
    /// Scans per second in the first minute after the promotion.
    pub per_second: f64,
    /// One in ten of the scans in this minute.
    pub scans: Vec<Timed>,
}

/// The results of all switchovers.
#[derive(Clone, Debug)]
pub struct SwitchoverReport {
    /// Both cases once per round.
    pub switched: Vec<Switched>,
    /// The first minute, as long as it was measured.
    pub minute: Duration,
    /// Of each server.
    pub facts: ServerFacts,
}

/// Where all servers are, and what they share.
struct Stage<'a> {
    shared: Shared<'a>,
    volume: &'a Path,
}

/// Measures both cases in turn, round by round.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<SwitchoverReport> {
    ensure!(machine::is_root(), "only root can limit the memory of the servers, and make a throttled volume");
    let progress = Progress::on_stderr();
    let work = machine::scratch_dir(effort.work_dir, "farpool-switchover-bench-")?;
    let sizes = Sizes::of((ROWS_PER_SCALE * effort.scale) as u64);
    let mount_point = subfolder(work.path(), "volume")?;
    machine::require_disk(work.path(), 2 * sizes.room_mib())?;
    let mut volume = ThrottledVolume::make(work.path(), &mount_point, 2 * sizes.room_mib(), None)?;
    let stage = Stage { shared: Shared::prepare(effort, &work, sizes)?, volume: &mount_point };

    let step = progress.step(format!("loading {} rows", sizes.rows()));
    let mut primary = stage.member(0, None, stop)?;
    load(&primary.server, sizes.rows())?;
    let facts = stage.shared.sizes.facts(&primary.server)?;
    let mut cache = stage.attach(&primary.server)?;
    step.done("loaded");
    let mut switched = Vec::new();
    let all = (0..effort.rounds).flat_map(|round| {
        let mut cases = Case::ALL;
        cases.rotate_left(round % Case::ALL.len());
        cases.map(|case| (round, case))
    });
    for (number, (round, case)) in (1..).zip(all) {
        let step = progress.step(format!("switchover, round {}: cache {}", round + 1, case.name()));
        fill(&primary.server, &cache, (FILLED * facts.data_bytes as f64) as u64, stop)?;
        let standby = stage.member(number, Some(&primary.server), stop)?;
        let (found, next);
        (found, next, cache) = stage.switch_over(&mut primary, standby, cache, case, stop)?;
        std::mem::replace(&mut primary, next).remove()?;
        switched.push(found);
        step.done("measured");
    }
    primary.server.stop()?;
    cache.detach()?;
    primary.remove()?;
    volume.remove()?;
    let minute = effort.slice * MINUTE_SLICES;
    Ok(SwitchoverReport { switched, minute, facts })
}

impl Stage<'_> {
    /// Starts an empty server, or the standby of a server. None of its pages are in the kernel's page cache
    /// then.
    fn member(&self, number: usize, of: Option<&Server>, stop: &StopFlag) -> Result<LimitedServer> {
        let name = format!("server-{number}");
        let member = self.shared.server(self.volume, &name, true, &REPLICATION, |options| match of {
            Some(primary) => primary.start_standby(options, stop),
            None => Server::start(options, stop),
        })?;
        forget_pages(&member.dir)?;
        Ok(member)
    }

    fn attach(&self, server: &Server) -> Result<PageCache> {
        let options = CacheOptions {
            memory_bytes: self.shared.sizes.cache_bytes(),
            nodes: NODES,
            transport: TRANSPORT,
        };
        PageCache::attach_with_pool(self.shared.effort.farpool, server.data_directory(), options)
    }

    /// Lets the standby `new` take the place of `old`, and measures. Returns the new server with its cache.
    fn switch_over(
        &self,
        old: &mut LimitedServer,
        mut new: LimitedServer,
        old_cache: PageCache,
        case: Case,
        stop: &StopFlag,
    ) -> Result<(Switched, LimitedServer, PageCache)> {
        let usable = (USABLE * data_bytes(&old.server)? as f64) as u64;
        let attached = if case == Case::Empty { Some(self.attach(&new.server)?) } else { None };
        old.server.stop()?;
        let begun = Instant::now();
        let cache = match attached {
            Some(cache) => cache,
            None => hand_over(old_cache, &new.server)?,
        };
        let mut usable_at = None;
        let look = || {
            let is_usable = || cache.status().is_ok_and(|status| status.used_bytes() >= usable);
            if usable_at.is_none() && is_usable() {
                usable_at = Some(begun.elapsed());
            }
        };
        let (promoted, measured) = looking_meanwhile(LOOK_EVERY, look, || {
            let promoted = new.server.promote().map(|()| begun.elapsed());
            (promoted, self.first_minute(&mut new.server))
        });
        let (promoted, (per_second, scans)) = (promoted?, measured?);
        while usable_at.is_none() {
            stop.check()?;
            pgbench(&mut new.server, &self.shared.scan, SESSIONS, self.shared.effort.slice)?;
            let used = cache.status()?.used_bytes();
            usable_at = (used >= usable).then(|| begun.elapsed());
            let (used, usable) = (used >> 20, usable >> 20);
            ensure!(begun.elapsed() < USABLE_WITHIN, "the cache has only {used} of {usable} MiB");
        }
        cache.verify(VERIFIED_ONE_IN)?;
        Ok((
            Switched {
                case,
                usable_after_s: usable_at.unwrap_or_default().as_secs_f64(),
                promoted_after_s: promoted.as_secs_f64(),
                per_second,
                scans,
            },
            new,
            cache,
        ))
    }

    fn first_minute(&self, server: &mut Server) -> Result<(f64, Vec<Timed>)> {
        let dir = tempfile::tempdir_in(self.shared.work).context("cannot make a folder for the latencies")?;
        timed_pgbench(
            server,
            &self.shared.scan,
            SESSIONS,
            self.shared.effort.slice * MINUTE_SLICES,
            dir.path(),
        )
    }
}

/// Hands the cache over while the standby makes restartpoints, as the how-to page says.
fn hand_over(cache: PageCache, standby: &Server) -> Result<PageCache> {
    let mut client = standby.connect()?;
    let checkpoint = || {
        // It fails once the standby has ended; then the handover fails as well, and says more.
        let _ = client.batch_execute("CHECKPOINT");
    };
    looking_meanwhile(CHECKPOINT_EVERY, checkpoint, || cache.hand_over(standby.data_directory(), TRANSPORT))
}

impl Switched {
    /// The latency that 95 % of the scans in the first minute do not exceed.
    pub fn p95_ms(&self) -> f64 {
        self.p95_ms_within(f64::INFINITY)
    }

    /// The same for the scans in the first `seconds` seconds.
    fn p95_ms_within(&self, seconds: f64) -> f64 {
        let end_s = self.first_s() + seconds;
        p95_ms(self.scans.iter().filter(|scan| scan.at_s < end_s).map(|scan| scan.latency))
    }

    /// When the first scan was measured, in seconds.
    fn first_s(&self) -> f64 {
        self.scans.iter().map(|scan| scan.at_s).fold(f64::INFINITY, f64::min)
    }

    /// The same second by second: pairs of the second and the latency.
    pub fn p95_by_second(&self) -> Vec<(f64, f64)> {
        let first_s = self.first_s();
        let mut seconds: BTreeMap<u64, Vec<Duration>> = BTreeMap::new();
        for scan in &self.scans {
            seconds.entry((scan.at_s - first_s) as u64).or_default().push(scan.latency);
        }
        seconds
            .iter()
            .map(|(&second, latencies)| (second as f64, p95_ms(latencies.iter().copied())))
            .collect()
    }
}

fn p95_ms(latencies: impl Iterator<Item = Duration>) -> f64 {
    quantile(latencies.map(|latency| latency.as_secs_f64() * 1e3), 0.95).unwrap_or(f64::NAN)
}

impl SwitchoverReport {
    /// The p95 of the scans, in milliseconds, until the empty cache of the same round is usable (in the first
    /// minute at most), round by round.
    pub fn p95_ms_while_filling(&self, case: Case) -> Vec<f64> {
        let filling_s = self.of(Case::Empty, |it| it.usable_after_s - it.promoted_after_s);
        let switched = self.switched.iter().filter(|it| it.case == case);
        switched.zip(filling_s).map(|(it, seconds)| it.p95_ms_within(seconds)).collect()
    }

    /// A value of each switchover with this case, round by round.
    pub fn of(&self, case: Case, value: impl Fn(&Switched) -> f64) -> Vec<f64> {
        self.switched.iter().filter(|it| it.case == case).map(value).collect()
    }

    /// What a value is with an empty cache, over what it is with the one that was handed over, round by
    /// round.
    pub fn ratios(&self, value: impl Fn(&Switched) -> f64 + Copy) -> Vec<f64> {
        Self::paired_ratios(|case| self.of(case, value))
    }

    /// Values with an empty cache over those with the one that was handed over, round by round.
    pub fn paired_ratios(values: impl Fn(Case) -> Vec<f64>) -> Vec<f64> {
        let pairs = values(Case::Empty).into_iter().zip(values(Case::HandedOver));
        pairs.map(|(empty, handed_over)| empty / handed_over).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_whole_minute_and_of_each_second() {
        let scan = |at_s, ms| Timed { at_s, latency: Duration::from_millis(ms) };
        let scans = [(7.5, 100), (7.9, 20), (8.6, 9)].into_iter().map(|(at_s, ms)| scan(at_s, ms));
        let scans: Vec<Timed> = scans.chain((0..97).map(|_| scan(9.6, 1))).collect();
        let switched = Switched {
            case: Case::Empty,
            usable_after_s: 1.0,
            promoted_after_s: 1.0,
            per_second: 1.0,
            scans,
        };
        assert_eq!(switched.p95_ms(), 1.0);
        assert_eq!(switched.p95_by_second(), [(0.0, 100.0), (1.0, 9.0), (2.0, 1.0)]);
    }
}
