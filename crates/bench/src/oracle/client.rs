//! A client in a closed loop: one timestamp transaction after the other.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use farpool_fabric::block_on;
use farpool_txn::oracle::NaiveAt;
use farpool_txn::{Memory, SessionState, Traffic, Worker};
use farpool_wire::Version;

use crate::slices::SlicePlan;
use crate::stop::check_stop;
use crate::tally::Tally;

/// Time between two commits whose publication is timed: with a longer one rare delays would be missed, and a
/// shorter one would cost time.
const WATCH_EVERY: Duration = Duration::from_micros(50);

/// The result of one timestamp transaction.
pub struct Stamp<C> {
    /// Its commit.
    pub commit: C,
    /// The number of the cut, or the timestamp, that it began from; it never decreases.
    pub begun_from: u64,
    /// Whether the cut or timestamp that it began from includes the watched commit.
    pub has_watched: bool,
}

/// How a client uses its oracle.
pub trait Client {
    /// Identifies a commit whose publication can be watched.
    type Commit: Copy;

    /// Its access to far memory.
    fn memory(&self) -> &Memory;

    /// Runs one timestamp transaction.
    async fn stamp(&mut self, watched: Option<Self::Commit>) -> Result<Stamp<Self::Commit>>;
}

/// A client of the timestamp vector.
pub struct VectorClient {
    /// The client's worker, with its slot.
    pub worker: Worker,
    /// Its session, which continues over all transactions.
    pub session: SessionState,
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
    /// Its access to far memory.
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
    /// All acknowledged transactions, the warm-up's included.
    pub transactions: u64,
    /// From the end of one transaction to the end of the next.
    pub latencies: Tally,
    /// From the acknowledgement of a commit to the next begin of this client that sees it.
    pub publications: Tally,
    /// The traffic of all transactions.
    pub traffic: Traffic,
}

/// Runs transactions as planned, `timed_together` of them between two readings of the clock; an error once
/// `stop` is set.
pub fn drive(
    client: &mut impl Client,
    plan: SlicePlan,
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
    plan: SlicePlan,
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
