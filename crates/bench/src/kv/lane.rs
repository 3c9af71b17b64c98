//! One transaction after the other, as one of those that a thread has in flight.

use std::cell::RefCell;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use farpool_txn::{CommitError, ReadError, Row, Session, Table, Transaction, Worker};
use farpool_wire::Version;

use super::chooser::Chooser;
use super::content::{RECORD_BYTES, fill, value};
use super::options::KvMix;
use crate::child::check_stop;
use crate::slices::Plan;
use crate::tally::Tally;

/// Records of a transaction that reads, and of one that writes.
const READ: usize = 4;
const WRITTEN: usize = 2;
/// Until a transaction must have been committed, however often it has to begin again.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bounds of the pause before a transaction begins again: what one takes without waiting, and long against
/// that.
const BACK_OFF_NS: u64 = 2_000;
const BACK_OFF_DOUBLINGS: u32 = 7;
/// Until all see a commit that was acknowledged, and between two looks.
const LAST_PUBLICATION: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// What a thread counted.
pub struct Course {
    /// Transactions of each slice.
    pub slices: Vec<u64>,
    /// Acknowledged, the warm-up's included.
    pub committed: u64,
    /// Begun again.
    pub aborted: u64,
    /// From the first beginning to the acknowledgement.
    pub latencies: Tally,
    /// The last commit of its slot that was acknowledged.
    pub last: Option<Version>,
}

impl Course {
    /// Nothing yet.
    pub fn new(plan: &Plan) -> Result<Course> {
        let slices = vec![0; plan.slices];
        Ok(Course { slices, committed: 0, aborted: 0, latencies: Tally::new()?, last: None })
    }

    /// One more; false: the last slice is over.
    fn note(&mut self, version: Option<Version>, aborted: u64, slice: Option<usize>, took: Duration) -> bool {
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

/// What the lanes of a thread have in common.
pub struct Lanes<'a> {
    /// Commits.
    pub worker: &'a Worker,
    /// On what they work.
    pub table: &'a Table,
    /// What they do.
    pub mix: KvMix,
    /// When they measure.
    pub plan: Plan,
    /// When the first slice begins.
    pub began: Instant,
    /// Whether others of the thread wait for their turn.
    pub takes_turns: bool,
    /// Ends it early.
    pub stop: &'a AtomicBool,
    /// All that they count.
    pub course: &'a RefCell<Course>,
}

impl Lanes<'_> {
    /// Runs transactions until the last slice is over, none of which began before `loaded` could be seen.
    pub async fn run(&self, mut chooser: Chooser, loaded: Version) -> Result<()> {
        let mut session = Session::new();
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

    /// Runs a transaction until it is committed; says as what, and how often it had to begin again.
    async fn transact(
        &self,
        session: &mut Session,
        chooser: &mut Chooser,
        since: Instant,
    ) -> Result<(Option<Version>, u64)> {
        let (read, written) = match self.mix {
            KvMix::Read => (chooser.choose::<READ>(), [0; WRITTEN]),
            KvMix::Update | KvMix::Rmw => ([0; READ], chooser.choose::<WRITTEN>()),
        };
        for aborted in 0.. {
            let outcome = match self.mix {
                KvMix::Read => self.read(session, &read).await?,
                KvMix::Update => {
                    let value = chooser.random().bits();
                    self.write(session, &written, |_| value).await?
                }
                KvMix::Rmw => self.write(session, &written, |value| value + 1).await?,
            };
            match outcome {
                Outcome::Committed(version) => return Ok((version, aborted)),
                Outcome::Again => {
                    ensure!(since.elapsed() < PATIENCE, "a transaction has begun {aborted} times in vain");
                    check_stop(self.stop)?;
                    let longest = BACK_OFF_NS << aborted.min(BACK_OFF_DOUBLINGS.into());
                    let pause = Duration::from_nanos(chooser.random().below(longest));
                    self.worker.memory().endpoint().sleep(pause).await;
                }
            }
        }
        bail!("a transaction has begun too often")
    }

    async fn read(&self, session: &mut Session, numbers: &[u64; READ]) -> Result<Outcome> {
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
        session: &mut Session,
        numbers: &[u64; WRITTEN],
        next: impl Fn(u64) -> u64,
    ) -> Result<Outcome> {
        let mut transaction = self.worker.begin(session).await?;
        let Some(rows) = again(transaction.take_many(self.table, numbers).await)? else {
            return Ok(Outcome::Again);
        };
        for (&number, row) in numbers.iter().zip(&rows) {
            let mut data = [0; RECORD_BYTES];
            fill(&mut data, number, next(check(number, row)?));
            // They were taken: nobody is asked, and nobody can have been first.
            transaction.write(self.table, number, Some(&data)).await?;
        }
        commit(transaction).await
    }
}

/// How an attempt ended.
enum Outcome {
    /// As that version, if it has written.
    Committed(Option<Version>),
    /// Somebody else was first, or there is no room now.
    Again,
}

async fn commit(transaction: Transaction<'_, farpool_txn::Shipped>) -> Result<Outcome> {
    match transaction.commit().await {
        Ok(version) => Ok(Outcome::Committed(version)),
        Err(CommitError::Conflict | CommitError::Busy) => Ok(Outcome::Again),
        Err(error) => Err(error.into()),
    }
}

/// `None`: the transaction has to begin again.
fn again<T>(read: Result<T, ReadError>) -> Result<Option<T>> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(ReadError::Conflict | ReadError::RingFull | ReadError::SnapshotTooOld) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn check(number: u64, row: &Row) -> Result<u64> {
    check_data(number, row.data.as_deref())
}

/// The value of a record; an error if there is none that is whole.
pub fn check_data(number: u64, data: Option<&[u8]>) -> Result<u64> {
    let data = data.with_context(|| format!("there is no record {number}"))?;
    value(data, number).with_context(|| format!("record {number} holds what was never written there"))
}

/// Waits until a session begins from a cut that has some commits.
pub async fn wait_until_seen(worker: &Worker, session: &mut Session, commits: &[Version]) -> Result<()> {
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
