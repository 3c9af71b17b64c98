//! A measurement: it starts the nodes, the oracle's threads and the clients, and checks in the end what was
//! published.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use farpool_fabric::{CardTransport, Transports, block_on};
use farpool_txn::log::{LogAt, LogLayout, Logs};
use farpool_txn::oracle::{LOOK, NaiveAt, read_published};
use farpool_txn::{Fetched, Memory, Oracle, SessionState, SharedSlot, Shipped, Worker};
use farpool_wire::Slot;

use super::client::{Client, Course, NaiveClient, VectorClient, drive};
use super::options::{OracleKind, OracleOptions};
use super::report::{Measured, OracleReport};
use crate::crew::Crew;
use crate::local_pool::Lend;
use crate::meeting::Seat;
use crate::service::Service;
use crate::site::Site;
use crate::slices::SlicePlan;
use crate::stop::check_stop;

/// Bytes that a node lends: the smallest region.
const REGION_BYTES: u64 = 1 << 20;
/// Room for a thread's transfers: the images of as many slots as there can be, and some words.
const ARENA_BYTES: usize = 256 << 10;
/// Before the first slice: caches, spin budgets and publication settle.
const WARM_UP: Duration = Duration::from_millis(300);
/// Transactions between two readings of the clock over shm, where the thread itself carries out the
/// operations.
const TIMED_TOGETHER: usize = 32;
/// How far the naive read timestamp may lag: a list of half a megabyte.
const NAIVE_PLACES: u64 = 1 << 16;
/// Longest wait until all acknowledged transactions are published.
const LAST_PUBLICATION: Duration = Duration::from_secs(5);
/// Time between two checks.
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// Measures an oracle, over network cards if `card` brings their transport. `farpool` is the path of this
/// program, which runs as child processes, too. Call this function on the main thread: child processes are
/// tied to the thread that starts them. Once `stop` is set, this function soon returns an error.
///
/// # Errors
/// If a process or thread cannot be started, an operation fails, or the oracle breaks a promise.
pub fn run_oracle(
    options: &OracleOptions,
    card: Option<CardTransport>,
    farpool: &Path,
    stop: &AtomicBool,
) -> Result<OracleReport> {
    let transports = Transports { choice: options.transport.0, card };
    let lend =
        Lend { nodes: options.partitions as u32, bytes_each: REGION_BYTES, region_bytes: REGION_BYTES };
    let site = Site::start(transports, lend, ARENA_BYTES, farpool, stop)?;
    let measured = match options.oracle {
        OracleKind::Vector => vector(options, &site, stop)?,
        OracleKind::Naive => naive(options, &site, stop)?,
    };
    check_stop(stop)?;
    ensure!(site.is_whole(), "a lease was lost during the measurement, so its results are meaningless");
    OracleReport::new(options, &measured)
}

fn vector(options: &OracleOptions, site: &Site, stop: &AtomicBool) -> Result<Measured> {
    let &OracleOptions { clients, servers, fetch_thread, compress, partitions, .. } = options;
    let used = if compress { servers } else { clients };
    let oracle = Oracle::split(used.max(partitions) as u16, &site.pieces());
    let oracle = oracle.context("there are more clients than slots")?;
    let fetched: Vec<_> = (0..servers).map(|_| fetch_thread.then(|| Arc::new(Fetched::new()))).collect();
    // Timestamp transactions write no log, so this one is never used.
    let log = LogAt {
        copies: [site.pieces()[0]; 2],
        layout: LogLayout::new(8).context("a log of one word is not possible")?,
    };
    let logs = Logs::new(vec![log; used]);
    let slot = |number: usize| Some(Arc::new(SharedSlot::after(Slot::new(number as u16)?, logs.clone(), 0)?));
    let slots: Option<Vec<_>> = (0..used).map(slot).collect();
    let slots = slots.context("there are more clients than slots")?;

    // Publishers and fetch threads pause as long as those of a database.
    let pace = oracle.pace(LOOK);
    let mut services: Vec<_> = oracle.parts().iter().map(|part| Service::Publisher(*part, pace)).collect();
    let fetchers = fetched.iter().flatten();
    services
        .extend(fetchers.map(|fetched| Service::Fetcher(oracle.clone(), fetched.clone(), Duration::ZERO)));
    let run = Run::new(options, site, stop, services);
    let client = |number: usize, seat: &Seat<'_>| {
        let ready = seat.note(site.memory().and_then(|memory| {
            let slot = slots[number % used].clone();
            let worker = Worker::sharing(memory, oracle.clone(), slot).context("there is no such slot")?;
            let worker = match &fetched[number % servers] {
                Some(fetched) => worker.with_fetched(fetched.clone()),
                None => worker,
            };
            Ok(VectorClient { worker, session: SessionState::new() })
        }));
        run.client(seat, ready)
    };
    let check = |transactions| {
        let memory = site.memory()?;
        wait_until_published(&memory, transactions, async || {
            let cut = read_published::<Shipped>(&memory, &oracle).await?;
            Ok(cut.map_or(0, |cut| cut.counts().iter().sum()))
        })
    };
    run.all(client, check)
}

fn naive(options: &OracleOptions, site: &Site, stop: &AtomicBool) -> Result<Measured> {
    let oracle = NaiveAt::new(site.pieces()[0], NAIVE_PLACES).context("the list has no place")?;
    let run = Run::new(options, site, stop, vec![Service::Advancer(oracle)]);
    let client = |_, seat: &Seat<'_>| {
        let ready = seat.note(site.memory().map(|memory| NaiveClient { memory, oracle }));
        run.client(seat, ready)
    };
    let check = |transactions| {
        let memory = site.memory()?;
        wait_until_published(&memory, transactions, async || Ok(oracle.read_timestamp(&memory).await?))
    };
    run.all(client, check)
}

/// Waits until exactly the acknowledged commits are published.
fn wait_until_published(
    memory: &Memory,
    acknowledged: u64,
    mut published: impl AsyncFnMut() -> Result<u64>,
) -> Result<()> {
    let started = Instant::now();
    loop {
        let found = block_on(memory.endpoint(), published())?;
        ensure!(found <= acknowledged, "{acknowledged} commits were acknowledged, but {found} are published");
        if found == acknowledged {
            return Ok(());
        }
        ensure!(
            started.elapsed() < LAST_PUBLICATION,
            "of {acknowledged} commits only {found} were published"
        );
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Everything that a measurement needs.
struct Run<'a> {
    options: &'a OracleOptions,
    crew: Crew<'a>,
}

impl<'a> Run<'a> {
    fn new(
        options: &'a OracleOptions,
        site: &'a Site,
        stop: &'a AtomicBool,
        services: Vec<Service>,
    ) -> Run<'a> {
        let workers = options.clients;
        Run { options, crew: Crew { site, stop, services, workers } }
    }

    fn timed_together(&self) -> usize {
        if self.crew.site.is_shared_memory() { TIMED_TOGETHER } else { 1 }
    }

    fn plan(&self) -> SlicePlan {
        SlicePlan::of(self.options.duration, WARM_UP.min(self.options.duration))
    }

    /// Lets a client work once all clients are ready.
    fn client(&self, seat: &Seat<'_>, ready: Result<impl Client>) -> Result<Course> {
        let (plan, stop) = (self.plan(), self.crew.stop);
        seat.work(ready, |client| drive(client, plan, self.timed_together(), stop))
    }

    /// Runs services and clients, and checks in the end what was published.
    fn all(
        &self,
        client: impl Fn(usize, &Seat<'_>) -> Result<Course> + Sync,
        check: impl FnOnce(u64) -> Result<()>,
    ) -> Result<Measured> {
        let done = self
            .crew
            .run(client, |courses| check(courses.iter().map(|course: &Course| course.transactions).sum()))?;
        Ok(Measured {
            courses: done.workers,
            plan: self.plan(),
            timed_together: self.timed_together(),
            service_traffic: done.service_traffic,
        })
    }
}
