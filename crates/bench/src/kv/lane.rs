//! One lane of a thread: a transaction after the other. A thread has as many lanes as transactions in flight.

use std::cell::RefCell;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use farpool_txn::{CommitError, ReadError, Row, SessionState, Table, Transaction, Worker};
use farpool_wire::Version;

use super::chooser::Chooser;
use super::content::{RECORD_BYTES, fill, value};
use super::options::KvMix;
use crate::slices::SlicePlan;
use crate::stop::check_stop;
use crate::tally::Tally;

/// Records of a transaction that reads, and of one that writes.
const READ: usize = 4;
const WRITTEN: usize = 2;
/// A transaction must commit within this time, however often it has to start again.
const PATIENCE: Duration = Duration::from_secs(10);
/// The random pause before a transaction starts again is shorter than this at first, about the time of a
/// transaction that does not wait. Each further attempt doubles that bound, with at most this many doublings.
const BACK_OFF_NS: u64 = 2_000;
const BACK_OFF_DOUBLINGS: u32 = 7;
/// Longest wait until an acknowledged commit is published, and the time between two checks.
const LAST_PUBLICATION: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// What the lanes of a thread counted.
pub struct Course {
    /// Committed transactions of each slice.
    pub slices: Vec<u64>,
    /// Committed transactions, the warm-up's included.
    pub committed: u64,
    /// How often a transaction was started again.
    pub aborted: u64,
    /// From the start of the first attempt to the acknowledgement.
    pub latencies: Tally,
    /// The last commit of its slot that was acknowledged.
    pub last: Option<Version>,
}

impl Course {
    /// A course that has counted nothing yet.
    pub fn new(plan: &SlicePlan) -> Result<Course> {
        let slices = vec![0; plan.slices];
        Ok(Course { slices, committed: 0, aborted: 0, latencies: Tally::new()?, last: None })
    }

    /// Counts a committed transaction; false after the last slice.
    pub fn note(
        &mut self,
        version: Option<Version>,
        aborted: u64,
        slice: Option<usize>,
        took: Duration,
    ) -> bool {
        self.committed += 1;
        self.aborted += aborted;
        self.last = self.last.max(version);
        let Some(slice) = slice else { return true };
        let Some(count) = self.slices.get_mut(slice) else { return false };
        *count += 1;
        self.latencies.record(took, 1);
        true
    }
}

/// What the lanes of a thread share.
pub struct Lanes<'a> {
    /// The thread's worker, which commits.
    pub worker: &'a Worker,
    /// The table that they work on.
    pub table: &'a Table,
    /// What each transaction does.
    pub mix: KvMix,
    /// The division of time.
    pub plan: SlicePlan,
    /// When the first slice begins.
    pub began: Instant,
    /// Whether the thread has other lanes that wait for their turn.
    pub takes_turns: bool,
    /// Ends the lanes early once set.
    pub stop: &'a AtomicBool,
    /// Where all lanes count.
    pub course: &'a RefCell<Course>,
}

impl Lanes<'_> {
    /// Runs transactions until the last slice has ended. All of them see the commit `loaded`.
    pub async fn run(&self, mut chooser: Chooser, loaded: Version) -> Result<()> {
        let mut session = SessionState::new();
        wait_until_seen(self.worker, &mut session, &[loaded]).await?;
        let endpoint = self.worker.memory().endpoint();
        let mut last = Instant::now();
        loop {
            let (version, aborted) = self.transact(&mut session, &mut chooser, last).await?;
            let now = Instant::now();
            let slice = self.plan.slice_at(self.began, now);
            if !self.course.borrow_mut().note(version, aborted, slice, now - last) {
                return Ok(());
            }
            check_stop(self.stop)?;
            last = now;
            if self.takes_turns {
                endpoint.yield_now().await;
                last = Instant::now();
            }
        }
    }

    /// Runs a transaction until it commits. Returns its version, if it wrote, and how often it was started
    /// again.
    async fn transact(
        &self,
        session: &mut SessionState,
        chooser: &mut Chooser,
        since: Instant,
    ) -> Result<(Option<Version>, u64)> {
        let (read, written) = match self.mix {
            KvMix::Read => (chooser.choose::<READ>(), [0; WRITTEN]),
            KvMix::Update | KvMix::Rmw => ([0; READ], chooser.choose::<WRITTEN>()),
            KvMix::NewOrder | KvMix::Insert | KvMix::Scan => ([0; READ], [0; WRITTEN]),
        };
        for aborted in 0.. {
            let outcome = match self.mix {
                KvMix::Read => self.read(session, &read).await?,
                KvMix::Update => {
                    let value = chooser.random().bits();
                    self.write(session, &written, |_| value).await?
                }
                KvMix::Rmw => self.write(session, &written, |value| value + 1).await?,
                KvMix::NewOrder | KvMix::Insert | KvMix::Scan => bail!("{} works by key only", self.mix),
            };
            match outcome {
                Outcome::Committed(version) => return Ok((version, aborted)),
                Outcome::Again => {
                    ensure!(since.elapsed() < PATIENCE, "a transaction was aborted {aborted} times in a row");
                    check_stop(self.stop)?;
                    let longest = BACK_OFF_NS << aborted.min(BACK_OFF_DOUBLINGS.into());
                    let pause = Duration::from_nanos(chooser.random().below(longest));
                    self.worker.memory().endpoint().sleep(pause).await;
                }
            }
        }
        bail!("a transaction was started again too often")
    }

    async fn read(&self, session: &mut SessionState, numbers: &[u64; READ]) -> Result<Outcome> {
        let transaction = self.worker.begin(session).await?;
        let Some(rows) = again(transaction.read_many(self.table, numbers).await)? else {
            return Ok(Outcome::Again);
        };
        for (number, row) in numbers.iter().zip(&rows) {
            check(*number, row)?;
        }
        Ok(Outcome::Committed(None))
    }

    async fn write(
        &self,
        session: &mut SessionState,
        numbers: &[u64; WRITTEN],
        next: impl Fn(u64) -> u64,
    ) -> Result<Outcome> {
        let transaction = self.worker.begin(session).await?;
        let Some(rows) = again(transaction.take_many(self.table, numbers).await)? else {
            return Ok(Outcome::Again);
        };
        for (&number, row) in numbers.iter().zip(&rows) {
            let mut data = [0; RECORD_BYTES];
            fill(&mut data, number, next(check(number, row)?));
            // `take_many` has read them already, so this accesses no node and cannot conflict.
            transaction.write(self.table, number, Some(&data)).await?;
        }
        commit(transaction).await
    }
}

/// The outcome of an attempt.
enum Outcome {
    /// Committed; with the version, if it wrote.
    Committed(Option<Version>),
    /// A conflict, or no room at the moment: start again.
    Again,
}

async fn commit(transaction: Transaction<'_, farpool_txn::Shipped>) -> Result<Outcome> {
    match transaction.commit().await {
        Ok(version) => Ok(Outcome::Committed(version)),
        Err(CommitError::Conflict | CommitError::Busy | CommitError::LogFull) => Ok(Outcome::Again),
        Err(error) => Err(error.into()),
    }
}

/// `None` if the transaction has to start again.
fn again<T>(read: Result<T, ReadError>) -> Result<Option<T>> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(ReadError::Conflict | ReadError::SnapshotTooOld) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn check(number: u64, row: &Row) -> Result<u64> {
    check_data(number, row.data.as_deref())
}

/// The value of a record; an error unless the data are there and whole.
pub fn check_data(number: u64, data: Option<&[u8]>) -> Result<u64> {
    let data = data.with_context(|| format!("there is no record {number}"))?;
    value(data, number).with_context(|| format!("record {number} holds data that were never written there"))
}

/// Waits until a session begins from a cut that has all these commits.
pub async fn wait_until_seen(worker: &Worker, session: &mut SessionState, commits: &[Version]) -> Result<()> {
    let started = Instant::now();
    loop {
        let has_all = {
            let transaction = worker.begin(session).await?;
            commits.iter().all(|&version| transaction.cut().sees(version))
        };
        if has_all {
            return Ok(());
        }
        ensure!(started.elapsed() < LAST_PUBLICATION, "a commit that was acknowledged was not published");
        worker.memory().endpoint().sleep(LOOK_EVERY).await;
    }
}
