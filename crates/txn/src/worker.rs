//! A thread that runs transactions: its slot of the timestamp vector, and how it begins.

mod stamping;

use std::cell::RefCell;
use std::marker::PhantomData;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::ArenaBuf;
use farpool_wire::{Slot, Version};
use futures_util::future::{Either, select};

use crate::cut::Cut;
use crate::error::{BeginError, CommitError};
use crate::log::LogAt;
use crate::memory::{Memory, MemoryError, Piece};
use crate::oracle::{Copied, Fetched, Latest, Oracle, read_published};
use crate::rules::{Rules, Shipped};
use crate::slot::{SharedSlot, Turn, Writing};
use crate::transaction::Transaction;
pub use stamping::{StampError, Stamped};

/// How long a transaction waits for a cut that it can begin from; they are published within far less.
const BEGIN_PATIENCE: Duration = Duration::from_secs(2);
/// How long a commit that is installed waits for earlier ones of its slot: longer than memory takes to move.
const SHOW_PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at what was published.
const BEGIN_PAUSE: Duration = Duration::from_micros(5);

/// Runs transactions, several at a time, in one slot of the timestamp vector.
pub struct Worker<R = Shipped> {
    pub(crate) memory: Memory,
    oracle: Oracle,
    pub(crate) log: LogAt,
    fetched: Option<(Arc<Fetched>, Copied)>,
    slot: Arc<SharedSlot>,
    /// Where the slot's word lies.
    word: (Piece, u64),
    /// For the slot's word, of which one write is under way at a time.
    buffer: RefCell<Option<ArenaBuf>>,
    rules: PhantomData<R>,
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
    pub fn new(memory: Memory, oracle: impl Into<Oracle>, log: LogAt, slot: Slot, last: u64) -> Option<Self> {
        Self::sharing(memory, oracle, Arc::new(SharedSlot::after(slot, log, last)))
    }

    /// A worker in a slot that it shares with others of its compute server. `None`: the oracle has no such slot.
    pub fn sharing(memory: Memory, oracle: impl Into<Oracle>, slot: Arc<SharedSlot>) -> Option<Self> {
        let oracle = oracle.into();
        let word = oracle.word(slot.slot())?;
        Some(Worker {
            memory,
            oracle,
            log: slot.log(),
            fetched: None,
            slot,
            word,
            buffer: RefCell::new(None),
            rules: PhantomData,
        })
    }

    /// Begins from what its compute server's fetch thread has read, instead of reading it itself.
    pub fn with_fetched(mut self, fetched: Arc<Fetched>) -> Self {
        self.fetched = Some((fetched, Copied::new()));
        self
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
        let mut give_up_at = None;
        loop {
            // The later image may be torn just now where it was not before: a session does not go back to the earlier.
            let published = self.published().await?.filter(|cut| cut.sequence() >= session.begun_from);
            if let Some(cut) = published.and_then(|cut| R::begin(cut, session.own)) {
                session.begun_from = cut.sequence();
                return Ok(Transaction::new(self, session, cut));
            }
            let endpoint = self.memory.endpoint();
            let now = endpoint.now_ns();
            if now > *give_up_at.get_or_insert(now + BEGIN_PATIENCE.as_nanos() as u64) {
                return Err(BeginError::OracleStopped);
            }
            endpoint.sleep(BEGIN_PAUSE).await;
        }
    }

    async fn published(&self) -> Result<Option<Cut>, BeginError> {
        let Some((fetched, copied)) = &self.fetched else {
            return Ok(read_published::<R>(&self.memory, &self.oracle).await?);
        };
        match copied.latest(fetched) {
            Latest::Cut(cut) => Ok(Some(cut)),
            Latest::Nothing => Ok(None),
            Latest::Ended => Err(BeginError::OracleStopped),
        }
    }

    /// The next commit, with room for so many bytes of intents, unless too many are under way.
    pub(crate) fn begin_commit(&self, log_bytes: u64) -> Result<UnderWay<'_, R>, CommitError> {
        // For the slot's word, taken now: once something is locked, a commit must not fail for want of memory.
        let mut buffer = self.buffer.borrow_mut();
        if buffer.is_none() {
            *buffer = Some(self.memory.word_buffer().map_err(CommitError::Nothing)?);
        }
        let (version, log_start) = self.slot.begin(log_bytes)?;
        Ok(UnderWay { worker: self, version, log_start, is_over: false, is_touched: false })
    }

    /// Writes the slot's word; whoever waits for that is woken.
    async fn write(&self, writing: Writing<'_>) -> Result<(), MemoryError> {
        let buffer = self.buffer.borrow_mut().take().expect("one write is under way at a time");
        let (piece, at) = &self.word;
        let buffer = self.memory.write_word_from(buffer, piece, *at, writing.come()).await?;
        *self.buffer.borrow_mut() = Some(buffer);
        writing.done();
        Ok(())
    }

    /// Shows a commit that is installed whole, and waits until it is shown; false: it will not be, by this slot's workers.
    async fn show(&self, version: Version) -> bool {
        if let Some(writing) = self.slot.end(version) {
            // Where that fails, the slot is stuck.
            let _ = self.write(writing).await;
        }
        loop {
            let patience = pin!(self.memory.endpoint().sleep(SHOW_PATIENCE));
            match select(pin!(self.slot.turn(version)), patience).await {
                Either::Left((Turn::Shown, _)) => return true,
                Either::Left((Turn::Stuck, _)) => return false,
                Either::Left((Turn::Write(writing), _)) => drop(self.write(writing).await),
                // An earlier commit of the slot does not go on: this one is in doubt with it.
                Either::Right(_) => self.slot.is_stuck(),
            }
        }
    }
}

/// A commit from its beginning to its end. Dropped before that, nobody knows what of it took effect, unless nothing has been touched.
pub(crate) struct UnderWay<'a, R: Rules> {
    worker: &'a Worker<R>,
    version: Version,
    log_start: u64,
    is_over: bool,
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
        let is_shown = self.worker.show(self.version).await;
        self.is_over = true;
        is_shown
    }
}

impl<R: Rules> Drop for UnderWay<'_, R> {
    fn drop(&mut self) {
        match (self.is_over, self.is_touched) {
            (true, _) => {}
            (false, true) => self.worker.slot.is_stuck(),
            (false, false) => self.worker.slot.vanish(self.version),
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
