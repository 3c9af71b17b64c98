//! A worker: a thread that runs transactions. Its slot of the timestamp vector, and how its transactions
//! begin.

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
use crate::log::{IntentPlace, LogAt, Logs};
use crate::memory::{Memory, MemoryError, Piece};
use crate::oracle::{Copied, Fetched, Latest, Oracle, read_published};
use crate::rules::{Rules, Shipped};
use crate::slot::{Hand, Holding, SharedSlot, Turn, Writer, Writing};
use crate::transaction::Transaction;
use looking::Looks;
pub use stamping::{StampError, Stamped};

/// How long a transaction waits for a cut that it can begin from. Cuts are published far sooner, unless the
/// publisher has died: then it takes until another member has noticed.
const BEGIN_PATIENCE: Duration = Duration::from_secs(30);
/// How long an installed commit waits for earlier ones of its slot: longer than moving memory takes.
const WATERMARK_PATIENCE: Duration = Duration::from_secs(30);

/// Runs transactions, several at a time, in one slot of the timestamp vector.
pub struct Worker<R = Shipped> {
    pub(crate) memory: Memory,
    oracle: Oracle,
    /// The logs of all slots, in which old versions lie.
    pub(crate) logs: Logs,
    fetched: Option<(Arc<Fetched>, Copied)>,
    /// Set if the worker announces its snapshots.
    pub(crate) announcer: Option<Announcer>,
    looks: Looks,
    slot: Arc<SharedSlot>,
    /// What the compute server's heartbeats see of this worker's commits.
    hand: Arc<Hand>,
    /// The place of the slot's word.
    word: (Piece, u64),
    /// The buffer for writes of the slot's word. One such write is in flight at a time.
    buffer: RefCell<Option<ArenaBuf>>,
    /// This worker is writing the word. If the write was given up half-way, this stays set, and the slot is
    /// stuck.
    is_writing: Cell<bool>,
    /// Its last commit was refused, perhaps because too many counts are ahead of the watermark, or its log is
    /// full.
    is_put_off: Cell<bool>,
    /// It has begun a commit since it read the horizon last.
    has_begun_commit: Cell<bool>,
    rules: PhantomData<R>,
}

/// The error that a cut is too old to begin from.
struct TooOld;

/// A cut that is in use.
struct Snapshot<'a> {
    cut: Cut,
    open: Option<Open<'a>>,
}

/// The state of one session of a worker. A session belongs to one user, and runs one transaction at a time.
#[derive(Debug, Default)]
pub struct SessionState {
    /// Its last commit.
    own: Option<Version>,
    /// The number of the cut from which it last began.
    begun_from: u64,
}

impl<R: Rules> Worker<R> {
    /// A worker that has a slot and its log to itself. It begins after the count `last`, which the slot's
    /// previous client got when it [left](Self::leave_slot), or which the slot's [recovery](crate::recovery)
    /// returned; `logs` are those of all slots. `None`: there is no such slot.
    pub fn new(memory: Memory, oracle: impl Into<Oracle>, logs: Logs, slot: Slot, last: u64) -> Option<Self> {
        Self::sharing(memory, oracle, Arc::new(SharedSlot::after(slot, logs, last)?))
    }

    /// A worker in a slot that it shares with other workers of its compute server. `None`: the oracle has no
    /// such slot.
    pub fn sharing(memory: Memory, oracle: impl Into<Oracle>, slot: Arc<SharedSlot>) -> Option<Self> {
        let oracle = oracle.into();
        let word = oracle.word(slot.slot())?;
        let hand = slot.add_worker(memory.endpoint().turns());
        Some(Worker {
            memory,
            oracle,
            logs: slot.logs().clone(),
            fetched: None,
            announcer: None,
            looks: Looks::default(),
            slot,
            hand,
            word,
            buffer: RefCell::new(None),
            is_writing: Cell::new(false),
            is_put_off: Cell::new(false),
            has_begun_commit: Cell::new(false),
            rules: PhantomData,
        })
    }

    /// Lets the worker begin from the cuts that its compute server's fetch thread has read, instead of
    /// reading them itself.
    pub fn with_fetched(mut self, fetched: Arc<Fetched>) -> Self {
        self.fetched = Some((fetched, Copied::new()));
        self
    }

    /// Its access to far memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Its slot's log.
    pub(crate) fn log(&self) -> &LogAt {
        self.slot.log()
    }

    /// Its slot, which other workers may share.
    pub(crate) fn slot(&self) -> &Arc<SharedSlot> {
        &self.slot
    }

    /// Begins a transaction from a published cut that has all commits of its session.
    ///
    /// # Errors
    /// When far memory does not answer, or nothing is published any more.
    pub async fn begin<'a>(
        &'a self,
        session: &'a mut SessionState,
    ) -> Result<Transaction<'a, R>, BeginError> {
        if self.is_put_off.take() {
            self.write_watermark().await?;
            self.refresh_horizon().await?;
        }
        let Snapshot { cut, open } = self.snapshot(session).await?;
        Ok(Transaction::new(self, session, cut, open))
    }

    /// The snapshot from which a transaction begins.
    async fn snapshot(&self, session: &mut SessionState) -> Result<Snapshot<'_>, BeginError> {
        let (mut give_up_at, mut looks) = (None, 0);
        loop {
            // The later image may be torn now although it was not before. A session does not go back to the
            // earlier cut.
            let published = match looks {
                0 => self.published().await?,
                _ => self.published_next(looks).await?,
            };
            if let Some(published) = published
                && published.sequence() >= session.begun_from
                && let Some(cut) = R::begin(published, session.own)
                && let Ok(open) = self.open(cut.sequence())
            {
                session.begun_from = cut.sequence();
                if let Some(announcer) = &self.announcer {
                    announcer.announce_if_due::<R>(&self.memory).await?;
                    if self.has_begun_commit.get() && announcer.refresh_if_due(&self.memory).await? {
                        self.has_begun_commit.set(false);
                    }
                }
                return Ok(Snapshot { cut, open });
            }
            self.check_patience(&mut give_up_at)?;
            looks += 1;
        }
    }

    /// Marks a snapshot as in use, so that the worker announces no higher number. An error if it has
    /// announced a higher one already.
    fn open(&self, sequence: u64) -> Result<Option<Open<'_>>, TooOld> {
        let Some(announcer) = &self.announcer else { return Ok(None) };
        announcer.open(sequence).map(Some).ok_or(TooOld)
    }

    /// Checks how long the worker has waited for a cut. An error if that is too long.
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

    /// Begins the next commit, with room for this many bytes of intents, unless too many commits are in
    /// flight.
    pub(crate) fn begin_commit(&self, log_bytes: u64) -> Result<CommitInFlight<'_, R>, CommitError> {
        // The buffer is taken now: once something is locked, a commit must not fail for lack of memory.
        self.keep_buffer().map_err(CommitError::Nothing)?;
        let seen_by_all = self.announcer.as_ref().map(|announcer| announcer.seen_by_all(self.slot.slot()));
        let begun = self.slot.begin(log_bytes, R::intents_unneeded_up_to(seen_by_all));
        self.is_put_off.set(matches!(begun, Err(CommitError::Busy | CommitError::LogFull)));
        self.has_begun_commit.set(true);
        let (version, log_place) = begun?;
        let holding = Some(self.hand.hold());
        Ok(CommitInFlight {
            worker: self,
            version,
            log_place,
            log_bytes,
            holding,
            open: None,
            has_finished: false,
            is_touched: false,
            has_vanished: false,
        })
    }

    /// Reads the horizon again after a commit was refused, and announces this worker's own progress, which
    /// may hold the horizon back.
    pub(crate) async fn refresh_horizon(&self) -> Result<(), MemoryError> {
        let Some(announcer) = &self.announcer else { return Ok(()) };
        announcer.refresh(&self.memory).await?;
        announcer.announce::<R>(&self.memory).await
    }

    /// Takes a buffer for the slot's word.
    fn keep_buffer(&self) -> Result<(), MemoryError> {
        let mut buffer = self.buffer.borrow_mut();
        if buffer.is_none() && !self.is_writing.get() {
            *buffer = Some(self.memory.word_buffer()?);
        }
        Ok(())
    }

    /// Writes the slot's word, and wakes the workers that wait for that.
    async fn write(&self, writing: Writing<'_>) -> Result<(), MemoryError> {
        let buffer = self.buffer.borrow_mut().take().expect("one write is in flight at a time");
        let (piece, at) = &self.word;
        self.is_writing.set(true);
        let written = self.memory.write_word_from(buffer, piece, *at, writing.up_to()).await;
        self.is_writing.set(false);
        *self.buffer.borrow_mut() = Some(written?);
        writing.done();
        Ok(())
    }

    /// Moves the watermark over commits that have finished, if it is behind. After many failed commits, no
    /// commit can begin before that.
    async fn write_watermark(&self) -> Result<(), MemoryError> {
        self.keep_buffer()?;
        match self.slot.start_write() {
            Some(writing) => self.write(writing).await,
            None => Ok(()), // nothing to write, or another worker writes
        }
    }

    /// Gives up the slot, for all workers that share it. Returns the count after which the slot's next client
    /// begins. If that client began after the slot's word, it would reuse counts of commits that left
    /// nothing, and might find their verdicts in the log.
    ///
    /// # Errors
    /// When something is in flight: try again once it has finished. After any other error, the slot has to be
    /// recovered as if its client had died.
    pub async fn leave_slot(&self) -> Result<u64, LeaveError> {
        self.keep_buffer().map_err(LeaveError::Memory)?;
        let (last, writing) = self.slot.leave()?;
        if let Some(writing) = writing {
            self.write(writing).await.map_err(LeaveError::Memory)?;
        }
        Ok(last)
    }

    /// Waits until the watermark has reached a commit that is installed whole, and writes the watermark if it
    /// is this worker's turn. False: this slot's workers will not move the watermark that far.
    async fn raise_watermark(&self, version: Version, holding: Option<Holding<'_>>) -> bool {
        let writing = self.slot.end(version);
        if R::frees_log_when_finished() {
            self.slot.vanish(version);
        }
        if let Some(writing) = writing {
            // If that fails, the slot is stuck.
            let _ = self.write(writing).await;
        }
        // From here on this commit waits for others, and no other commit waits for it.
        drop(holding);
        // Usually this write has included the commit: then there is no need to wait, or to read a clock.
        if self.slot.is_reached(version) {
            return true;
        }
        loop {
            let patience = pin!(self.memory.endpoint().sleep(WATERMARK_PATIENCE));
            let writer = if self.is_writing.get() { Writer::ThisWorker } else { Writer::Another };
            let turn = pin!(self.slot.turn(version, writer));
            match select(turn, patience).await {
                Either::Left((Turn::Reached, _)) => return true,
                Either::Left((Turn::Stuck, _)) => return false,
                Either::Left((Turn::Write(writing), _)) => {
                    let _holding = self.hand.hold();
                    drop(self.write(writing).await);
                }
                // An earlier commit of the slot makes no progress: this one is in doubt with it.
                Either::Right(_) => self.slot.mark_stuck(),
            }
        }
    }
}

/// A commit from its beginning to its end. If this is dropped before that, the commit is in doubt, unless
/// nothing has been touched.
pub(crate) struct CommitInFlight<'a, R: Rules> {
    worker: &'a Worker<R>,
    version: Version,
    log_place: IntentPlace,
    log_bytes: u64,
    /// Set while others may wait for this commit.
    holding: Option<Holding<'a>>,
    /// While this is there, its snapshot stays announced: the commit, or its rollback, may still write to the
    /// records.
    open: Option<Open<'a>>,
    has_finished: bool,
    is_touched: bool,
    /// Something of it was written, and nothing of it is left.
    has_vanished: bool,
}

impl<'a, R: Rules> CommitInFlight<'a, R> {
    /// Its version.
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Its worker's access to far memory.
    pub(crate) fn memory(&self) -> &'_ Memory {
        &self.worker.memory
    }

    /// The place of its intents in the log.
    pub(crate) fn log_place(&self) -> IntentPlace {
        self.log_place
    }

    /// Keeps its transaction's snapshot in use until the commit has finished. If it is in doubt, until its
    /// slot has been recovered.
    pub(crate) fn keep_snapshot(&mut self, open: Option<Open<'a>>) {
        self.open = open;
    }

    /// From now on something of it may be in far memory.
    pub(crate) fn mark_touched(&mut self) {
        self.is_touched = true;
    }

    /// Nothing of it is left, and nothing in flight any more.
    pub(crate) fn vanish(mut self) {
        (self.is_touched, self.has_vanished) = (false, true);
    }

    /// The commit is installed whole: waits until the watermark has reached it. False: it is in doubt whether
    /// the watermark ever will.
    pub(crate) async fn finish(&mut self) -> bool {
        // From here on other workers may move the watermark over it. If this is dropped, the commit is in
        // doubt, even if it has no records.
        self.is_touched = true;
        self.has_finished = self.worker.raise_watermark(self.version, self.holding.take()).await;
        self.has_finished
    }
}

impl<R: Rules> Drop for CommitInFlight<'_, R> {
    fn drop(&mut self) {
        match (self.has_finished, self.is_touched) {
            (true, _) => {}
            (false, true) => {
                self.worker.slot.mark_stuck();
                self.open.take().into_iter().for_each(Open::keep_announced);
            }
            (false, false) if self.has_vanished => self.worker.slot.vanish(self.version),
            (false, false) => self.worker.slot.give_up(self.version, self.log_place, self.log_bytes),
        }
    }
}

impl SessionState {
    /// A session that has committed nothing yet.
    pub fn new() -> SessionState {
        SessionState::default()
    }

    pub(crate) fn committed(&mut self, version: Version) {
        self.own = Some(version);
    }
}
