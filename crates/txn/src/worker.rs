//! A thread that runs transactions: its slot of the timestamp vector, and how it begins.

mod announcing;
mod loading;
mod looking;
mod stamping;

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::ArenaBuf;
use farpool_wire::{Slot, Version};
use futures_util::future::{Either, select};

use crate::cut::Cut;
use crate::error::{BeginError, CommitError, LeaveError};
use crate::horizon::{Announcer, Open};
use crate::log::LogAt;
use crate::memory::{Memory, MemoryError, Piece};
use crate::oracle::{Copied, Fetched, Latest, Oracle, read_published};
use crate::rules::{Rules, Shipped};
use crate::slot::{Hand, Holding, SharedSlot, Turn, Writer, Writing};
use crate::transaction::Transaction;
use looking::Looks;
pub use stamping::{StampError, Stamped};

/// How long a transaction waits for a cut that it can begin from; they are published within far less, unless
/// who does so has died: then it takes until another has found out.
const BEGIN_PATIENCE: Duration = Duration::from_secs(30);
/// How long a commit that is installed waits for earlier ones of its slot: longer than memory takes to move.
const SHOW_PATIENCE: Duration = Duration::from_secs(30);

/// Runs transactions, several at a time, in one slot of the timestamp vector.
pub struct Worker<R = Shipped> {
    pub(crate) memory: Memory,
    oracle: Oracle,
    pub(crate) log: LogAt,
    fetched: Option<(Arc<Fetched>, Copied)>,
    /// If it has announced itself.
    pub(crate) announcer: Option<Announcer>,
    looks: Looks,
    slot: Arc<SharedSlot>,
    /// What the compute server sees of its commits.
    hand: Arc<Hand>,
    /// Where the slot's word lies.
    word: (Piece, u64),
    /// For the slot's word, of which one write is under way at a time.
    buffer: RefCell<Option<ArenaBuf>>,
    /// This worker writes it just now; for ever, if that was given up half-way, and the slot is stuck.
    is_writing: Cell<bool>,
    /// Its last commit was refused as busy, perhaps because too many counts are not shown.
    is_put_off: Cell<bool>,
    rules: PhantomData<R>,
}

/// A cut is too old to begin from.
struct TooOld;

/// A cut, and that it is in use.
struct Snapshot<'a> {
    cut: Cut,
    open: Option<Open<'a>>,
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
    /// A worker in a slot that it has alone, with its log, in which it begins behind the count `last`: what
    /// its client before has said when it [left](Self::leave_slot), or what its [recovery](crate::recovery)
    /// has. `None`: the oracle has no such slot.
    pub fn new(memory: Memory, oracle: impl Into<Oracle>, log: LogAt, slot: Slot, last: u64) -> Option<Self> {
        Self::sharing(memory, oracle, Arc::new(SharedSlot::after(slot, log, last)))
    }

    /// A worker in a slot that it shares with others of its compute server. `None`: the oracle has no such
    /// slot.
    pub fn sharing(memory: Memory, oracle: impl Into<Oracle>, slot: Arc<SharedSlot>) -> Option<Self> {
        let oracle = oracle.into();
        let word = oracle.word(slot.slot())?;
        let hand = slot.joins(memory.endpoint().turns());
        Some(Worker {
            memory,
            oracle,
            log: slot.log(),
            fetched: None,
            announcer: None,
            looks: Looks::default(),
            slot,
            hand,
            word,
            buffer: RefCell::new(None),
            is_writing: Cell::new(false),
            is_put_off: Cell::new(false),
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

    /// Its slot, which others may share.
    pub(crate) fn slot(&self) -> &Arc<SharedSlot> {
        &self.slot
    }

    /// Begins a transaction from a published cut that has all commits of its session.
    ///
    /// # Errors
    /// When far memory is not to be had, or nothing is published any more.
    pub async fn begin<'a>(&'a self, session: &'a mut Session) -> Result<Transaction<'a, R>, BeginError> {
        if self.is_put_off.take() {
            self.show_over().await?;
        }
        let Snapshot { cut, open } = self.snapshot(session).await?;
        Ok(Transaction::new(self, session, cut, open))
    }

    /// What a transaction begins from.
    async fn snapshot(&self, session: &mut Session) -> Result<Snapshot<'_>, BeginError> {
        let mut give_up_at = None;
        loop {
            // The later image may be torn just now where it was not before: a session does not go back to the
            // earlier.
            let published = match give_up_at {
                None => self.published().await?,
                Some(_) => self.published_next().await?,
            };
            if let Some(published) = published
                && published.sequence() >= session.begun_from
                && let Some(cut) = R::begin(published, session.own)
                && let Ok(open) = self.open(cut.sequence())
            {
                session.begun_from = cut.sequence();
                if let Some(announcer) = &self.announcer {
                    announcer.announce_if_due::<R>(&self.memory).await?;
                }
                return Ok(Snapshot { cut, open });
            }
            self.check_patience(&mut give_up_at)?;
        }
    }

    /// A snapshot that the worker's announcement does not pass; an error if it has announced already that it
    /// has none so old.
    fn open(&self, sequence: u64) -> Result<Option<Open<'_>>, TooOld> {
        let Some(announcer) = &self.announcer else { return Ok(None) };
        announcer.open(sequence).map(Some).ok_or(TooOld)
    }

    /// Whether another cut is waited for; an error if that has been for too long.
    fn check_patience(&self, give_up_at: &mut Option<u64>) -> Result<(), BeginError> {
        let now = self.memory.endpoint().now_ns();
        match now > *give_up_at.get_or_insert(now + BEGIN_PATIENCE.as_nanos() as u64) {
            true => Err(BeginError::OracleStopped),
            false => Ok(()),
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
        // Taken now: once something is locked, a commit must not fail for want of memory.
        self.keep_buffer().map_err(CommitError::Nothing)?;
        let begun = self.slot.begin(log_bytes);
        self.is_put_off.set(matches!(begun, Err(CommitError::Busy)));
        let (version, log_start) = begun?;
        let holding = Some(self.hand.holds());
        let (open, is_over, is_touched) = (None, false, false);
        Ok(UnderWay { worker: self, version, log_start, holding, open, is_over, is_touched })
    }

    /// Takes room for the slot's word.
    fn keep_buffer(&self) -> Result<(), MemoryError> {
        let mut buffer = self.buffer.borrow_mut();
        if buffer.is_none() && !self.is_writing.get() {
            *buffer = Some(self.memory.word_buffer()?);
        }
        Ok(())
    }

    /// Writes the slot's word; whoever waits for that is woken.
    async fn write(&self, writing: Writing<'_>) -> Result<(), MemoryError> {
        let buffer = self.buffer.borrow_mut().take().expect("one write is under way at a time");
        let (piece, at) = &self.word;
        self.is_writing.set(true);
        let written = self.memory.write_word_from(buffer, piece, *at, writing.come()).await;
        self.is_writing.set(false);
        *self.buffer.borrow_mut() = Some(written?);
        writing.done();
        Ok(())
    }

    /// Shows what of the slot has finished and is not shown. Where many commits failed, no commit can begin
    /// before that.
    async fn show_over(&self) -> Result<(), MemoryError> {
        self.keep_buffer()?;
        match self.slot.show_over() {
            Some(writing) => self.write(writing).await,
            None => Ok(()), // nothing to show, or another worker does
        }
    }

    /// Gives up the slot, for all who share it: behind the count that it returns, its next client begins. Who
    /// just begins behind the slot's word would use counts again that this one has used for commits of which
    /// nothing is left, and may find their verdicts.
    ///
    /// # Errors
    /// When something is under way: try again once it has ended. Else the slot has to be looked after as if
    /// its client had died.
    pub async fn leave_slot(&self) -> Result<u64, LeaveError> {
        self.keep_buffer().map_err(LeaveError::Memory)?;
        let (last, writing) = self.slot.leave()?;
        if let Some(writing) = writing {
            self.write(writing).await.map_err(LeaveError::Memory)?;
        }
        Ok(last)
    }

    /// Shows a commit that is installed whole, and waits until it is shown; false: it will not be, by this
    /// slot's workers.
    async fn show(&self, version: Version, holding: Option<Holding<'_>>) -> bool {
        let writing = self.slot.end(version);
        if R::frees_log_when_over() {
            self.slot.forget(version);
        }
        if let Some(writing) = writing {
            // Where that fails, the slot is stuck.
            let _ = self.write(writing).await;
        }
        // From here on this commit waits for others, not others for it.
        drop(holding);
        // Mostly this write had it: then there is nothing to be patient for, nor a clock to be read.
        if self.slot.is_shown(version) {
            return true;
        }
        loop {
            let patience = pin!(self.memory.endpoint().sleep(SHOW_PATIENCE));
            let writer = if self.is_writing.get() { Writer::ThisWorker } else { Writer::Another };
            let turn = pin!(self.slot.turn(version, writer));
            match select(turn, patience).await {
                Either::Left((Turn::Shown, _)) => return true,
                Either::Left((Turn::Stuck, _)) => return false,
                Either::Left((Turn::Write(writing), _)) => {
                    let _holding = self.hand.holds();
                    drop(self.write(writing).await);
                }
                // An earlier commit of the slot does not go on: this one is in doubt with it.
                Either::Right(_) => self.slot.mark_stuck(),
            }
        }
    }
}

/// A commit from its beginning to its end. Dropped before that, nobody knows what of it took effect, unless
/// nothing has been touched.
pub(crate) struct UnderWay<'a, R: Rules> {
    worker: &'a Worker<R>,
    version: Version,
    log_start: u64,
    /// Others wait for it.
    holding: Option<Holding<'a>>,
    /// What its snapshot needs is kept for so long: it writes there.
    open: Option<Open<'a>>,
    is_over: bool,
    is_touched: bool,
}

impl<'a, R: Rules> UnderWay<'a, R> {
    /// Which it is.
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Its worker's way to far memory.
    pub(crate) fn memory(&self) -> &'_ Memory {
        &self.worker.memory
    }

    /// Where in the log's ring its intents have room.
    pub(crate) fn log_start(&self) -> u64 {
        self.log_start
    }

    /// What its transaction began from is in use until it has ended, or, in doubt, was looked after.
    pub(crate) fn keeps(&mut self, open: Option<Open<'a>>) {
        self.open = open;
    }

    /// From now on something of it may be found in far memory.
    pub(crate) fn touches(&mut self) {
        self.is_touched = true;
    }

    /// Nothing of it is left, and nothing under way any more.
    pub(crate) fn vanished(mut self) {
        self.is_touched = false;
    }

    /// The commit is installed whole: waits until the watermark has reached it. False: it is in doubt whether
    /// the watermark ever will.
    pub(crate) async fn finish(&mut self) -> bool {
        // From here on others may show it: dropped, it is in doubt, also where it has no records.
        self.is_touched = true;
        self.is_over = self.worker.show(self.version, self.holding.take()).await;
        self.is_over
    }
}

impl<R: Rules> Drop for UnderWay<'_, R> {
    fn drop(&mut self) {
        match (self.is_over, self.is_touched) {
            (true, _) => {}
            (false, true) => {
                self.worker.slot.mark_stuck();
                self.open.take().into_iter().for_each(Open::stays);
            }
            (false, false) => self.worker.slot.vanish(self.version),
        }
    }
}

impl Session {
    /// One that has committed nothing yet.
    pub fn new() -> Session {
        Session::default()
    }

    /// One that begins from that cut, or a later one.
    pub fn behind(cut: &Cut) -> Session {
        Session { own: None, begun_from: cut.sequence() }
    }

    pub(crate) fn committed(&mut self, version: Version) {
        self.own = Some(version);
    }
}
