//! A measurement: its threads, its slices, and their results.
//!
//! R1. Operation and floor are measured in turn, in short slices of one process, so that both see the same
//!     machine; ratios are medians over the pairs.
//! R2. All threads are in the same slice at the same time. A thread that fails still meets the others before
//!     each slice, and one that ends gives up its seat, so that no thread waits for another for ever.
//! R3. Measured operations are checked: a wrong byte, a wrong word or a lost lease fails the measurement.

use std::cell::RefCell;
use std::future::ready;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use farpool_control::Tls;
use farpool_fabric::{
    ARENA_GRANULE_BYTES, CardTransport, MAX_IN_FLIGHT, TransportChoice, Transports, block_on,
};
use futures_util::stream::{FuturesUnordered, TryStreamExt};

use crate::floors::{Floor, Ground};
use crate::footprint::Footprint;
use crate::lane::{Counts, Lane};
use crate::local_pool::LocalPool;
use crate::meeting::{Meeting, Seat};
use crate::options::{IoOp, IoOptions};
use crate::pages::Pages;
use crate::places::{Places, initial_sum};
use crate::reach::Reach;
use crate::report::{IoReport, Measured};
use crate::stop::check_stop;
use crate::tally::Tally;

/// Length of a slice: long compared with waking a sleeping process, short compared with other events on a
/// machine.
const SLICE: Duration = Duration::from_millis(100);
/// Fewest pairs of slices: with fewer, a median is no better than its worst neighbour.
const PAIRS_MIN: u32 = 5;
/// Time before each slice, not counted: caches, spin budgets and the other side's processor settle.
const SETTLE: Duration = Duration::from_millis(10);
/// Time before the first slice, not counted.
const WARM_UP: Duration = Duration::from_millis(300);
/// Buffers for blocks that are read back, beside those in flight.
const SPARE_BUFFERS: usize = 2;
/// Name of the nodes' region memory, in `/proc/PID/maps`.
const REGION_MEMORY: &str = "farpool-region";

/// Where the far memory comes from.
pub enum Source<'a> {
    /// A broker and a node of this program, started for this measurement.
    Own,
    /// The pool of the broker at this address.
    Broker(&'a str, Option<Tls>),
}

/// Measures; over network cards if `card` brings their transport. `farpool` is this program's file, for child
/// processes. Call it on the main thread, since they are tied to the thread that starts them. Once `stop` is
/// set it ends soon, with an error.
pub fn run_io(
    options: &IoOptions,
    card: Option<CardTransport>,
    source: Source<'_>,
    farpool: &Path,
    stop: &AtomicBool,
) -> Result<IoReport> {
    let (own, broker, tls) = match source {
        Source::Own => {
            let pool = LocalPool::start(farpool, options.footprint_bytes, options.transport.0)?;
            let broker = pool.broker.clone();
            (Some(pool), broker, None)
        }
        Source::Broker(broker, tls) => (None, broker.to_owned(), tls),
    };
    check_stop(stop)?;
    let transports = Transports { choice: options.transport.0, card };
    let footprint = Footprint::lease(&broker, tls, transports, options.footprint_bytes, stop)?;
    let options = &IoOptions { footprint_bytes: footprint.bytes(), ..*options };
    let first = Reach::open(&footprint, transports, 0)?; // kept, as its mapping tells the page size
    first.sum()?; // touches the whole mapping
    let pages = pages(options, own.as_ref())?;
    let ground = options.floor.then(|| Ground::prepare(options, pages.unwrap_or(Pages::Small), farpool));
    let ground = ground.transpose()?;
    let plan = Plan::of(options);
    let run = Run { options, transports, footprint: &footprint, ground: ground.as_ref(), stop, plan };
    let threads = run.threads()?;
    check_stop(stop)?;
    let checked = check_sum(&first, options, &footprint, &threads)?;
    ensure!(footprint.is_whole(), "a lease was lost during the measurement, so its results are meaningless");
    let measured = Measured::of(threads.iter().map(|thread| thread.slices.as_slice()), ground.is_some())?;
    let kind = ground.as_ref().map(|ground| ground.kind(options));
    Ok(IoReport::new(options, &measured, kind, pages, checked))
}

/// The pages of the region memory, as mapped here or by our own node; those of another node are unknown.
fn pages(options: &IoOptions, own: Option<&LocalPool>) -> Result<Option<Pages>> {
    let here = options.transport.0 == TransportChoice::Shm;
    let process = if here { Some(std::process::id()) } else { own.map(LocalPool::node_id) };
    process.map_or(Ok(None), |id| Pages::of_process(id, REGION_MEMORY))
}

/// Checks that the footprint's sum has grown by the number of fetch-and-adds. Returns how many operations
/// were checked.
fn check_sum(reach: &Reach, options: &IoOptions, footprint: &Footprint, threads: &[Thread]) -> Result<u64> {
    let operations: u64 = threads.iter().map(|thread| thread.counts.operations).sum();
    match options.op {
        IoOp::Faa => {
            let before = initial_sum(footprint.regions.len(), footprint.region_bytes);
            let grown = reach.sum()?.wrapping_sub(before);
            ensure!(grown == operations, "{operations} additions made the sum grow by {grown}");
            Ok(operations)
        }
        IoOp::Cas => Ok(operations),
        _ => Ok(threads.iter().map(|thread| thread.counts.checked).sum()),
    }
}

/// Size of each thread's staging arena.
pub fn arena_bytes(options: &IoOptions) -> usize {
    let &IoOptions { block_bytes, depth, batch, .. } = options;
    let buffer = |bytes: usize| bytes.next_multiple_of(ARENA_GRANULE_BYTES);
    depth * buffer(batch * block_bytes) + SPARE_BUFFERS * depth * buffer(block_bytes)
}

/// How the measurement's time is divided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Number of slices of operations, and of slices of the floor.
    pub pairs: u32,
    slice: Duration,
    settle: Duration,
    warm_up: Duration,
}

impl Plan {
    /// Divides the duration that was asked for.
    pub fn of(options: &IoOptions) -> Self {
        let wanted = options.duration.as_secs_f64() / SLICE.as_secs_f64();
        let pairs = (wanted as u32).max(PAIRS_MIN);
        let slice = options.duration / pairs;
        Plan { pairs, slice, settle: SETTLE.min(slice), warm_up: WARM_UP.min(options.duration) }
    }
}

/// The results of one thread in a slice.
pub struct Slice {
    /// The operations.
    pub operation: Tally,
    /// The floor.
    pub floor: Option<Tally>,
}

/// The results of one thread.
struct Thread {
    slices: Vec<Slice>,
    counts: Counts,
}

struct Run<'a> {
    options: &'a IoOptions,
    transports: Transports,
    footprint: &'a Footprint,
    ground: Option<&'a Ground>,
    stop: &'a AtomicBool,
    plan: Plan,
}

impl Run<'_> {
    fn threads(&self) -> Result<Vec<Thread>> {
        Meeting::new(self.stop).hold(self.options.threads, |number, seat| self.thread(number, seat))
    }

    /// Goes through all slices, without measuring once a thread has failed or `stop` is set.
    fn thread(&self, number: usize, meeting: &Seat<'_>) -> Result<Thread> {
        let reach = meeting.note(self.reach(number));
        let mut worker = match &reach {
            Ok(reach) => meeting.note(Worker::new(self, reach, number)).map(Some),
            Err(_) => Ok(None),
        };
        let mut slices = Vec::new();
        for pair in 0..self.plan.pairs {
            let settle = if pair == 0 { self.plan.warm_up } else { self.plan.settle };
            meeting.meet();
            let operation = meeting.attempt(&mut worker, |worker| worker.operations(settle, self.plan.slice));
            meeting.meet();
            let floor = meeting.attempt(&mut worker, |worker| worker.floor(settle, self.plan.slice));
            slices.extend(operation.map(|operation| Slice { operation, floor: floor.flatten() }));
        }
        let counts = worker?.map(|worker| worker.counts).unwrap_or_default();
        reach.map(|_| Thread { slices, counts })
    }

    /// Opens the thread's access to the footprint, and fills the footprint.
    fn reach(&self, number: usize) -> Result<Reach> {
        let &IoOptions { transport, threads, .. } = self.options;
        let reach = Reach::open(self.footprint, self.transports, arena_bytes(self.options))?;
        // Over shared memory each thread fills everything: it has a mapping of its own, whose pages are all
        // touched in this way.
        let shared = transport.0 == TransportChoice::Shm;
        let (first, step) = if shared { (0, 1) } else { (number, threads) };
        reach.fill(first, step)?;
        Ok(reach)
    }

    /// A series of places that differs from that of every other lane and floor of this run.
    fn places(&self, thread: usize, lane: usize) -> Places {
        let seed = (thread * (MAX_IN_FLIGHT + 1) + lane + 1) as u64;
        let &IoOptions { pattern, block_bytes, .. } = self.options;
        Places::new(pattern, self.footprint.regions.len(), self.footprint.region_bytes, block_bytes, seed)
    }
}

/// A thread at work.
struct Worker<'a> {
    reach: &'a Reach,
    lanes: Vec<Lane<'a>>,
    floor: Option<Floor>,
    counts: Counts,
}

impl<'a> Worker<'a> {
    fn new(run: &Run<'_>, reach: &'a Reach, number: usize) -> Result<Self> {
        let lane = |lane| Lane::new(reach, run.options, run.places(number, lane));
        let lanes = (0..run.options.depth).map(lane).collect::<Result<_>>()?;
        let places = run.places(number, MAX_IN_FLIGHT);
        let floor = run.ground.map(|ground| ground.floor(run.options, number, places)).transpose()?;
        Ok(Worker { reach, lanes, floor, counts: Counts::default() })
    }

    fn operations(&mut self, settle: Duration, slice: Duration) -> Result<Tally> {
        self.ring(settle)?;
        self.ring(slice)
    }

    /// Keeps all lanes busy for `time`.
    fn ring(&mut self, time: Duration) -> Result<Tally> {
        let tally = RefCell::new(Tally::new()?);
        let started = Instant::now();
        let end = started + time;
        let endpoint = &self.reach.endpoint;
        let lanes = &mut self.lanes;
        let counts = match lanes.as_mut_slice() {
            [lane] => block_on(endpoint, lane.run(end, &tally))?,
            lanes => {
                let running: FuturesUnordered<_> =
                    lanes.iter_mut().map(|lane| lane.run(end, &tally)).collect();
                block_on(endpoint, running.try_fold(Counts::default(), |sum, more| ready(Ok(sum + more))))?
            }
        };
        let mut tally = tally.into_inner();
        tally.finish(counts.operations, started.elapsed());
        self.counts = self.counts + counts;
        Ok(tally)
    }

    fn floor(&mut self, settle: Duration, slice: Duration) -> Result<Option<Tally>> {
        let Some(floor) = &mut self.floor else { return Ok(None) };
        floor.run(Instant::now() + settle, &mut Tally::new()?)?;
        let mut tally = Tally::new()?;
        let started = Instant::now();
        let operations = floor.run(started + slice, &mut tally)?;
        tally.finish(operations, started.elapsed());
        Ok(Some(tally))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::small;

    #[test]
    fn time_is_divided_into_at_least_five_pairs_that_use_all_of_it() {
        let options = small(TransportChoice::Shm, IoOp::Read);
        for (seconds, pairs) in [(0.005, 5), (1.0, 10), (10.0, 100)] {
            let duration = Duration::from_secs_f64(seconds);
            let plan = Plan::of(&IoOptions { duration, ..options });
            assert_eq!(plan.pairs, pairs);
            assert!((plan.slice * pairs).abs_diff(duration) < Duration::from_micros(1));
        }
    }
}
