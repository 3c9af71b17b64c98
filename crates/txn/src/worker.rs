//! A thread that runs transactions: its slot of the timestamp vector, and how it begins.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::task::{Poll, Waker};
use std::time::Duration;

use farpool_wire::{Slot, Version};

use crate::cut::Cut;
use crate::error::{BeginError, CommitError};
use crate::log::{LogAt, LogRoom};
use crate::memory::{Memory, MemoryError, Piece, Plan};
use crate::oracle::Board;
use crate::rules::{Rules, Shipped};
use crate::slot::SlotCommits;
use crate::transaction::Transaction;

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
    pub(crate) log: LogAt,
    word: u64,
    state: RefCell<State>,
    rules: PhantomData<R>,
}

/// What the transactions of a worker share.
struct State {
    commits: SlotCommits,
    /// Of the log, for the intents of these.
    room: LogRoom,
    /// The slot's word says so much at least.
    shown: u64,
    /// Somebody is writing it.
    is_showing: bool,
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
    /// A worker in a slot that it has alone, with its log, whose last commit is `last`, with nothing under way. `None`: the oracle has
    /// no such slot.
    pub fn new(memory: Memory, oracle: OracleAt, log: LogAt, slot: Slot, last: u64) -> Option<Self> {
        let state = State {
            commits: SlotCommits::after(slot, last),
            room: LogRoom::new(log.layout.ring_bytes()),
            shown: last,
            is_showing: false,
            is_stuck: false,
            waiting: BTreeMap::new(),
        };
        let word = oracle.board.word(slot)? as u64;
        Some(Worker { memory, oracle, log, word, state: RefCell::new(state), rules: PhantomData })
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
            let published = self.published().await?.filter(|cut| cut.sequence() >= session.begun_from);
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

    async fn published(&self) -> Result<Option<Cut>, MemoryError> {
        if R::begins_from_words() {
            let words = self.oracle.board.words();
            let bytes = self.memory.read(&self.oracle.piece, words.start as u64..words.end as u64).await?;
            let words = self.oracle.board.decode_words(&bytes);
            return Ok(words.map(|counts| Cut::new(counts.iter().sum(), counts.into())));
        }
        let images = self.oracle.board.images();
        let bytes = self.memory.read(&self.oracle.piece, images.start as u64..images.end as u64).await?;
        Ok(self.oracle.board.decode(&bytes))
    }

    /// The next commit, with room for so many bytes of intents, unless too many are under way.
    pub(crate) fn begin_commit(&self, log_bytes: u64) -> Result<UnderWay<'_, R>, CommitError> {
        // For the slot's word, taken now: once something is locked, a commit must not fail for want of memory.
        let word = self
            .memory
            .plan(self.oracle.piece.region.node, size_of::<u64>())
            .map_err(CommitError::Nothing)?;
        let mut state = self.state.borrow_mut();
        if state.is_stuck {
            return Err(CommitError::Stuck);
        }
        let most = self.log.layout.most_bytes();
        if log_bytes > most {
            return Err(CommitError::TooLarge { bytes: log_bytes, most });
        }
        if !state.commits.has_room() {
            return Err(CommitError::Busy);
        }
        let log_start = state.room.take(log_bytes).ok_or(CommitError::Busy)?;
        let version = state.commits.begin().expect("there is room");
        Ok(UnderWay { worker: self, version, log_start, word: Some(word), is_touched: false })
    }

    /// Shows how far the slot has come, once that is as far as `version`; false: nobody knows any more how far it has come.
    async fn show(&self, version: Version, word: Plan<'_>) -> bool {
        let count = version.count();
        let come = std::future::poll_fn(|context| {
            let mut state = self.state.borrow_mut();
            let over = state.commits.over();
            let is_settled = state.shown >= count || state.is_stuck;
            if is_settled || (over >= count && !state.is_showing) {
                state.waiting.remove(&count);
                state.is_showing |= !is_settled;
                return Poll::Ready((!is_settled).then_some(over));
            }
            state.waiting.insert(count, context.waker().clone());
            Poll::Pending
        });
        if let Some(come) = come.await {
            let showing = Showing { state: &self.state };
            let mut word = word;
            word.write(&self.oracle.piece, self.word, &come.to_le_bytes());
            showing.ended(come, word.run().await.check().is_ok());
        }
        self.state.borrow().shown >= count
    }
}

/// Somebody writes the slot's word. Dropped before that is done, somebody else does.
struct Showing<'a> {
    state: &'a RefCell<State>,
}

impl Showing<'_> {
    fn ended(self, come: u64, is_shown: bool) {
        let mut state = self.state.borrow_mut();
        if is_shown {
            state.shown = state.shown.max(come);
        } else {
            state.is_stuck = true;
        }
    }
}

impl Drop for Showing<'_> {
    fn drop(&mut self) {
        let mut state = self.state.borrow_mut();
        state.is_showing = false;
        state.wake();
    }
}

impl State {
    /// A commit is over, in whichever way.
    fn end(&mut self, version: Version) {
        let before = self.commits.over();
        if let Some(come) = self.commits.end(version) {
            self.room.give_back((come - before) as usize);
            self.wake();
        }
    }

    fn wake(&self) {
        self.waiting.values().for_each(Waker::wake_by_ref);
    }
}

/// A commit from its beginning to its end. Dropped before that, nobody knows what of it took effect, unless nothing has been touched.
pub(crate) struct UnderWay<'a, R: Rules> {
    worker: &'a Worker<R>,
    version: Version,
    log_start: u64,
    word: Option<Plan<'a>>,
    is_touched: bool,
}

impl<R: Rules> UnderWay<'_, R> {
    /// Which it is.
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Where in the log's ring its intents have room.
    pub(crate) fn log_start(&self) -> u64 {
        self.log_start
    }

    /// From now on something of it may be found in far memory.
    pub(crate) fn touches(&mut self) {
        self.is_touched = true;
    }

    /// Nothing of it is left, and nothing under way any more.
    pub(crate) fn vanished(mut self) {
        self.is_touched = false;
    }

    /// It is installed whole: shows it, with those that waited for it. False: nobody knows any more whether it is shown.
    pub(crate) async fn is_shown(&mut self) -> bool {
        let word = self.word.take().expect("a commit ends once");
        self.worker.state.borrow_mut().end(self.version);
        self.worker.show(self.version, word).await
    }
}

impl<R: Rules> Drop for UnderWay<'_, R> {
    fn drop(&mut self) {
        if self.word.is_none() {
            return;
        }
        let mut state = self.worker.state.borrow_mut();
        if self.is_touched {
            state.is_stuck = true; // nothing behind it is shown
            state.wake();
        } else {
            state.end(self.version);
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
