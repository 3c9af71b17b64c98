//! A thread that runs transactions: its slot of the timestamp vector, and how it begins.

mod stamping;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::task::{Poll, Waker};
use std::time::Duration;

use farpool_wire::{Slot, Version};

use crate::error::{BeginError, CommitError};
use crate::memory::{Memory, MemoryError, Piece, Plan};
use crate::oracle::{Board, read_published};
use crate::rules::{Rules, Shipped};
use crate::slot::SlotCommits;
use crate::transaction::Transaction;
pub use stamping::{StampError, Stamped};

/// How long a transaction waits for a cut that it can begin from; they are published within far less.
const BEGIN_PATIENCE: Duration = Duration::from_secs(2);
/// Between two looks at what was published.
const BEGIN_PAUSE: Duration = Duration::from_micros(5);

/// Where an oracle lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OracleAt {
    /// The memory.
    pub piece: Piece,
    /// Its layout.
    pub board: Board,
}

/// Runs transactions, several at a time, in one slot of the timestamp vector.
pub struct Worker<R = Shipped> {
    pub(crate) memory: Memory,
    oracle: OracleAt,
    word: u64,
    state: RefCell<State>,
    rules: PhantomData<R>,
}

/// What the transactions of a worker share.
struct State {
    commits: SlotCommits,
    /// The slot's word says so much at least.
    shown: u64,
    /// Nobody knows what became of a commit: the slot stands still until somebody has looked after it.
    is_stuck: bool,
    /// Who waits for the slot to come further, by commit.
    waiting: BTreeMap<u64, Waker>,
}

/// What one user of a worker does, one transaction after the other.
#[derive(Debug, Default)]
pub struct Session {
    /// Its last commit.
    own: Option<Version>,
    /// The number of the cut from which it last began.
    begun_from: u64,
}

impl<R: Rules> Worker<R> {
    /// A worker in a slot that it has alone, whose last commit is `last`, with nothing under way. `None`: the oracle has no such slot.
    pub fn new(memory: Memory, oracle: OracleAt, slot: Slot, last: u64) -> Option<Self> {
        let state = State {
            commits: SlotCommits::after(slot, last),
            shown: last,
            is_stuck: false,
            waiting: BTreeMap::new(),
        };
        let word = oracle.board.word(slot)? as u64;
        Some(Worker { memory, oracle, word, state: RefCell::new(state), rules: PhantomData })
    }

    /// Its way to far memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Begins a transaction from a published cut that has all commits of its session.
    ///
    /// # Errors
    /// When far memory is not to be had, or nothing is published any more.
    pub async fn begin<'a>(&'a self, session: &'a mut Session) -> Result<Transaction<'a, R>, BeginError> {
        let endpoint = self.memory.endpoint();
        let give_up_at = endpoint.now_ns() + BEGIN_PATIENCE.as_nanos() as u64;
        loop {
            // The later image may be torn just now where it was not before: a session does not go back to the earlier.
            let published = read_published::<R>(&self.memory, &self.oracle).await?;
            let published = published.filter(|cut| cut.sequence() >= session.begun_from);
            if let Some(cut) = published.and_then(|cut| R::begin(cut, session.own)) {
                session.begun_from = cut.sequence();
                return Ok(Transaction::new(self, session, cut));
            }
            if endpoint.now_ns() > give_up_at {
                return Err(BeginError::OracleStopped);
            }
            endpoint.sleep(BEGIN_PAUSE).await;
        }
    }

    /// The next commit, unless too many are under way.
    pub(crate) fn begin_commit(&self) -> Result<UnderWay<'_, R>, CommitError> {
        // For the slot's word, taken now: once something is locked, a commit must not fail for want of memory.
        let word = self
            .memory
            .plan(self.oracle.piece.region.node, size_of::<u64>())
            .map_err(CommitError::Nothing)?;
        let mut state = self.state.borrow_mut();
        if state.is_stuck {
            return Err(CommitError::Stuck);
        }
        let version = state.commits.begin().ok_or(CommitError::Busy)?;
        Ok(UnderWay { worker: self, version, word: Some(word) })
    }

    /// A commit is over, in whichever way: shows it, with those that waited for it.
    async fn ended(&self, version: Version, mut word: Plan<'_>) -> Result<(), MemoryError> {
        let come = self.state.borrow_mut().commits.end(version);
        let Some(come) = come else { return Ok(()) };
        word.write(&self.oracle.piece, self.word, &come.to_le_bytes());
        let shown = word.run().await.check();
        let mut state = self.state.borrow_mut();
        if shown.is_ok() {
            state.shown = state.shown.max(come);
        } else {
            state.is_stuck = true;
        }
        state.waiting.values().for_each(Waker::wake_by_ref);
        shown
    }

    /// Nobody knows what of a commit took effect: nothing behind it is shown.
    fn is_stuck(&self) {
        let mut state = self.state.borrow_mut();
        state.is_stuck = true;
        state.waiting.values().for_each(Waker::wake_by_ref);
    }

    /// Waits until a commit is shown; false: it will not be, by this worker.
    pub(crate) async fn is_shown(&self, version: Version) -> bool {
        let count = version.count();
        std::future::poll_fn(|context| {
            let mut state = self.state.borrow_mut();
            if state.shown >= count || state.is_stuck {
                state.waiting.remove(&count);
                return Poll::Ready(state.shown >= count);
            }
            state.waiting.insert(count, context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

/// A commit from its beginning to its end. Dropped before that, nobody knows what of it took effect.
pub(crate) struct UnderWay<'a, R: Rules> {
    worker: &'a Worker<R>,
    version: Version,
    word: Option<Plan<'a>>,
}

impl<R: Rules> UnderWay<'_, R> {
    /// Which it is.
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Nothing of it is under way any more: installed whole, or nothing is left.
    pub(crate) async fn ended(&mut self) -> Result<(), MemoryError> {
        let word = self.word.take().expect("a commit ends once");
        self.worker.ended(self.version, word).await
    }
}

impl<R: Rules> Drop for UnderWay<'_, R> {
    fn drop(&mut self) {
        if self.word.is_some() {
            self.worker.is_stuck();
        }
    }
}

impl Session {
    /// One that has committed nothing yet.
    pub fn new() -> Session {
        Session::default()
    }

    pub(crate) fn committed(&mut self, version: Version) {
        self.own = Some(version);
    }
}
