//! A measurement: it starts the nodes, the publisher, and threads with their lanes, and checks the records in
//! the end.

use std::cell::RefCell;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use farpool_fabric::{CardTransport, Transports, block_on};
use farpool_txn::horizon::CollectPauses;
use farpool_txn::oracle::LOOK;
use farpool_txn::{SessionState, Traffic, Worker};
use farpool_wire::{Slot, Version};
use futures_util::TryStreamExt;
use futures_util::stream::FuturesUnordered;
use rustix::time::ClockId;

use super::chooser::Chooser;
use super::content::fill;
use super::ground::{Ground, Laid};
use super::lane::{Course, Lanes, check_data, wait_until_seen};
use super::options::{KvMix, KvOptions};
use super::report::{KvReport, Measured};
use crate::by_key::run_by_key;
use crate::crew::Crew;
use crate::meeting::Seat;
use crate::service::Service;
use crate::site::Site;
use crate::slices::SlicePlan;
use crate::stop::check_stop;

/// Room for a thread's transfers: for filling the table, and some pages for each step of each transaction in
/// flight.
const ARENA_BYTES: usize = 1 << 20;
const ARENA_BYTES_EACH: usize = 128 << 10;
/// Number of counters that one transaction increments.
const INCREMENTS: u64 = 2;

/// Measures; over network cards if `card` brings their transport. `farpool` is this program's file, for child
/// processes. Call it on the main thread, since they are tied to the thread that starts them. Once `stop` is
/// set it ends soon, with an error.
///
/// # Errors
/// If something cannot be started, fails, or breaks a promise.
pub fn run_kv(
    options: &KvOptions,
    card: Option<CardTransport>,
    farpool: &Path,
    stop: &AtomicBool,
) -> Result<KvReport> {
    if options.index.is_some() {
        return run_by_key(options, card, farpool, stop);
    }
    let transports = Transports { choice: options.transport.0, card };
    let ground = Ground::of(options)?;
    let arena_bytes = ARENA_BYTES + options.in_flight * ARENA_BYTES_EACH;
    let site = Site::start(transports, ground.lend, arena_bytes, farpool, stop)?;
    let laid = ground.lay(&site.pieces())?;
    let plan = SlicePlan::of(options.duration, options.warm_up);
    let run = Run { options, site: &site, laid: &laid, plan, stop, loaded: OnceLock::new() };
    let pace = laid.oracle.pace(LOOK); // as in a database
    let mut services: Vec<_> =
        laid.oracle.parts().iter().map(|part| Service::Publisher(*part, pace)).collect();
    if options.announce {
        services.push(Service::Collector(laid.oracle.clone(), laid.horizon, CollectPauses::SHIPPED));
    }
    let crew = Crew { site: &site, stop, services, workers: options.threads };
    let done = crew.run(|number, seat| run.thread(number, seat), |threads| run.check(threads))?;
    check_stop(stop)?;
    ensure!(site.is_whole(), "a lease was lost during the measurement, so its results are meaningless");
    let measured = Measured { threads: done.workers, plan, service_traffic: Some(done.service_traffic) };
    KvReport::new(options, ground.bytes(), &measured)
}

/// The results of a thread.
pub struct Thread {
    /// What all its lanes counted.
    pub course: Course,
    /// The traffic of all its transactions.
    pub traffic: Traffic,
    /// The processor time that they took.
    pub processor: Duration,
}

struct Run<'a> {
    options: &'a KvOptions,
    site: &'a Site,
    laid: &'a Laid,
    plan: SlicePlan,
    stop: &'a AtomicBool,
    /// The commit that filled the table.
    loaded: OnceLock<Version>,
}

impl Run<'_> {
    fn thread(&self, number: usize, seat: &Seat<'_>) -> Result<Thread> {
        let ready = seat.note(self.prepare(number));
        seat.work(ready, |worker| self.measure(worker, number))
    }

    /// Makes a thread's worker; the first thread also fills the table.
    fn prepare(&self, number: usize) -> Result<Worker> {
        let worker = self.worker(number)?;
        if number == 0 {
            let mut session = SessionState::new();
            let load = worker.load(&mut session, &self.laid.table, |number, data| fill(data, number, 0));
            let loaded = block_on(worker.memory().endpoint(), load).context("cannot fill the table")?;
            self.loaded.get_or_init(|| loaded);
        }
        self.announced(worker, number)
    }

    /// Makes the worker announce its snapshots at `place`, if that is to be measured.
    fn announced(&self, worker: Worker, place: usize) -> Result<Worker> {
        if !self.options.announce {
            return Ok(worker);
        }
        let endpoint = worker.memory().endpoint().clone();
        let announced = block_on(&endpoint, worker.announcing(self.laid.horizon, place as u16))?;
        announced.context("the horizon has no such place")
    }

    fn worker(&self, number: usize) -> Result<Worker> {
        let slot = Slot::new(number as u16).context("there are more threads than slots")?;
        let worker =
            Worker::new(self.site.memory()?, self.laid.oracle.clone(), self.laid.logs.clone(), slot, 0);
        worker.context("the oracle has no slot for this thread")
    }

    fn measure(&self, worker: &Worker, number: usize) -> Result<Thread> {
        let course = RefCell::new(Course::new(&self.plan)?);
        let loaded = *self.loaded.get().context("the table was not filled")?;
        let before = (worker.memory().traffic(), processor_time());
        let lanes = Lanes {
            worker,
            table: &self.laid.table,
            mix: self.options.mix,
            plan: self.plan,
            began: Instant::now() + self.plan.warm_up,
            takes_turns: self.options.in_flight > 1,
            stop: self.stop,
            course: &course,
        };
        let lane = |lane: usize| {
            let seed = (number * self.options.in_flight + lane) as u64;
            lanes.run(Chooser::new(self.options.records, self.options.skew, seed), loaded)
        };
        // Polls only the lanes that were woken.
        let lanes: FuturesUnordered<_> = (0..self.options.in_flight).map(lane).collect();
        block_on(worker.memory().endpoint(), lanes.try_collect::<()>())?;
        let traffic = worker.memory().traffic() - before.0;
        let processor = processor_time().saturating_sub(before.1);
        // Other threads may still need room in their logs, and this thread's place pins the versions that its
        // last snapshot needs.
        block_on(worker.memory().endpoint(), worker.leave())?;
        Ok(Thread { course: course.into_inner(), traffic, processor })
    }

    /// Reads all records in one snapshot that has all commits.
    fn check(&self, threads: &[Thread]) -> Result<()> {
        let commits: Vec<Version> = threads.iter().filter_map(|thread| thread.course.last).collect();
        // The worker commits nothing, so it may share the slot of the first thread.
        let worker = self.announced(self.worker(0)?, self.options.threads)?;
        let sum = block_on(worker.memory().endpoint(), async {
            let mut session = SessionState::new();
            wait_until_seen(&worker, &mut session, &commits).await?;
            self.sum(&worker, &mut session).await
        })?;
        let committed: u64 = threads.iter().map(|thread| thread.course.committed).sum();
        check_sum(self.options.mix, committed, sum)
    }

    async fn sum(&self, worker: &Worker, session: &mut SessionState) -> Result<u64> {
        let transaction = worker.begin(session).await?;
        let table = &self.laid.table;
        let (mut sum, mut wrong) = (0_u64, None);
        let visit = |number, _, data: Option<&[u8]>| match check_data(number, data) {
            Ok(value) => sum = sum.wrapping_add(value),
            Err(error) => wrong = wrong.take().or(Some(error)),
        };
        transaction.scan(table, 0..table.records(), visit).await?;
        wrong.map_or(Ok(sum), Err)
    }
}

/// Processor time of this thread so far.
pub fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Whether the sum of all values is what the transactions must have left.
pub fn check_sum(mix: KvMix, committed: u64, sum: u64) -> Result<()> {
    let wanted = committed * INCREMENTS;
    let is_kept = mix != KvMix::Rmw || sum == wanted;
    ensure!(is_kept, "{committed} transactions left {sum} increments instead of {wanted}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_increment_that_is_lost_or_counted_twice_is_an_error() {
        assert!(check_sum(KvMix::Rmw, 3, 6).is_ok() && check_sum(KvMix::Update, 3, 0).is_ok());
        assert!(check_sum(KvMix::Rmw, 3, 5).is_err() && check_sum(KvMix::Rmw, 3, 7).is_err());
    }
}
