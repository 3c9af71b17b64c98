//! A client in a closed loop: one timestamp transaction after the other.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use farpool_fabric::block_on;
use farpool_txn::oracle::NaiveAt;
use farpool_txn::{Memory, Session, Traffic, Worker};
use farpool_wire::Version;

use crate::child::check_stop;
use crate::slices::Plan;
use crate::tally::Tally;

/// From one commit whose publication is watched to the next: fewer would miss rare delays, and more cost
/// time.
const WATCH_EVERY: Duration = Duration::from_micros(50);

/// What a client did in one oracle's way.
pub struct Stamp<C> {
    /// Its commit.
    pub commit: C,
    /// The number of what it began from, which only grows.
    pub begun_from: u64,
    /// Whether what it began from has the commit that is watched.
    pub has_watched: bool,
}

/// How a client uses its oracle.
pub trait Client {
    /// A commit that may be watched.
    type Commit: Copy;

    /// Its way to far memory.
    fn memory(&self) -> &Memory;

    /// Runs one timestamp transaction.
    async fn stamp(&mut self, watched: Option<Self::Commit>) -> Result<Stamp<Self::Commit>>;
}

/// A client of the timestamp vector.
pub struct VectorClient {
    /// In its slot.
    pub worker: Worker,
    /// Goes on from one transaction to the next.
    pub session: Session,
}

impl Client for VectorClient {
    type Commit = Version;

    fn memory(&self) -> &Memory {
        self.worker.memory()
    }

    #[inline]
    async fn stamp(&mut self, watched: Option<Version>) -> Result<Stamp<Version>> {
        let stamped = self.worker.stamp(&mut self.session).await?;
        let has_watched = watched.is_some_and(|version| stamped.begun_from.sees(version));
        Ok(Stamp { commit: stamped.version, begun_from: stamped.begun_from.sequence(), has_watched })
    }
}

/// A client of the naive oracle.
pub struct NaiveClient {
    /// Its way to far memory.
    pub memory: Memory,
    /// Where the oracle lies.
    pub oracle: NaiveAt,
}

impl Client for NaiveClient {
    type Commit = u64;

    fn memory(&self) -> &Memory {
        &self.memory
    }

    #[inline]
    async fn stamp(&mut self, watched: Option<u64>) -> Result<Stamp<u64>> {
        let stamped = self.oracle.stamp(&self.memory).await?;
        let has_watched = watched.is_some_and(|commit| commit <= stamped.read);
        Ok(Stamp { commit: stamped.commit, begun_from: stamped.read, has_watched })
    }
}

/// What a client measured.
pub struct Course {
    /// Transactions of each slice.
    pub slices: Vec<u64>,
    /// All that were acknowledged, the warm-up's included.
    pub transactions: u64,
    /// From one end to the next.
    pub latencies: Tally,
    /// From a commit's acknowledgement to a transaction that began from something that has it.
    pub publications: Tally,
    /// Of all transactions.
    pub traffic: Traffic,
}

/// Runs transactions as planned, with so many from one look at the clock to the next; an error once `stop` is
/// raised.
pub fn drive(
    client: &mut impl Client,
    plan: Plan,
    timed_together: usize,
    stop: &AtomicBool,
) -> Result<Course> {
    let before = client.memory().traffic();
    let endpoint = client.memory().endpoint().clone();
    let mut course = block_on(&endpoint, transact(client, plan, timed_together, stop))?;
    course.traffic = client.memory().traffic() - before;
    Ok(course)
}

async fn transact<K: Client>(
    client: &mut K,
    plan: Plan,
    timed_together: usize,
    stop: &AtomicBool,
) -> Result<Course> {
    let mut course = Course {
        slices: vec![0; plan.slices],
        transactions: 0,
        latencies: Tally::new()?,
        publications: Tally::new()?,
        traffic: Traffic::default(),
    };
    let mut watched: Option<(K::Commit, Instant)> = None;
    let mut begun_from = 0;
    let began = Instant::now() + plan.warm_up;
    let mut last = Instant::now();
    let mut watch_at = began;
    loop {
        let mut commit = None;
        for _ in 0..timed_together {
            let stamp = client.stamp(watched.map(|(commit, _)| commit)).await?;
            ensure!(stamp.begun_from >= begun_from, "a later transaction began from an earlier timestamp");
            begun_from = stamp.begun_from;
            if stamp.has_watched
                && let Some((_, acknowledged)) = watched.take()
            {
                course.publications.record(acknowledged.elapsed(), 1);
            }
            commit = Some(stamp.commit);
        }
        let now = Instant::now();
        course.transactions += timed_together as u64;
        if let Some(slice) = plan.slice_at(began, now) {
            let Some(count) = course.slices.get_mut(slice) else { return Ok(course) };
            *count += timed_together as u64;
            course.latencies.record(now - last, timed_together);
            if watched.is_none() && now >= watch_at {
                watched = commit.map(|commit| (commit, now));
                watch_at = now + WATCH_EVERY;
            }
        }
        check_stop(stop)?;
        last = now;
    }
}
