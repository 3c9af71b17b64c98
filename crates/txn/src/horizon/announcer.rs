//! A worker's announcements, and what it knows of the horizon.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::Duration;

use farpool_wire::Slot;

use super::{HorizonAt, NOBODY, read_horizon, word_of};
use crate::cut::Cut;
use crate::error::LeaveError;
use crate::memory::{Memory, MemoryError};
use crate::rules::Rules;

/// Least time between two announcements: one WRITE serves many transactions, and versions are kept for this
/// much longer.
const ANNOUNCE_EVERY: Duration = Duration::from_micros(50);
/// How often a worker that commits reads the horizon. Room in its log becomes free at most this much later.
const REFRESH_EVERY: Duration = Duration::from_millis(1);

/// A worker's side of the horizon.
pub(crate) struct Announcer {
    at: HorizonAt,
    /// The place of its word.
    word: u64,
    /// How many open transactions began from each cut, by the cut's number.
    open: RefCell<BTreeMap<u64, u32>>,
    /// The number of the last cut that it has read.
    latest: Cell<u64>,
    /// No transaction begins from a cut with a lower number.
    floor: Cell<u64>,
    /// The number in its word, if the word is set.
    announced: Cell<Option<u64>>,
    announced_at_ns: Cell<u64>,
    /// Whether its word is being written: one write at a time.
    is_writing: Cell<bool>,
    /// The latest horizon that it has read, and when.
    horizon: RefCell<Cut>,
    refreshed_at_ns: Cell<u64>,
}

/// A snapshot in use: its worker announces no higher number than this.
pub(crate) struct Open<'a> {
    announcer: &'a Announcer,
    sequence: u64,
}

impl Open<'_> {
    /// Keeps the snapshot announced for good, because its transaction is in doubt: the recoverer, which
    /// decides the outcome once the worker is gone, may need the same versions.
    pub(crate) fn keep_announced(self) {
        std::mem::forget(self);
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let mut open = self.announcer.open.borrow_mut();
        let count = open.get_mut(&self.sequence).expect("it was opened");
        *count -= 1;
        if *count == 0 {
            open.remove(&self.sequence);
        }
    }
}

/// The worker's word is being written, until this is dropped.
struct Writing<'a>(&'a Cell<bool>);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl Announcer {
    /// The announcer of a worker that has the place `worker` and has not announced itself yet. `None`: there
    /// is no such place.
    pub(crate) fn new(at: HorizonAt, worker: u16, slots: usize) -> Option<Announcer> {
        Some(Announcer {
            at,
            word: at.layout.word(worker)? as u64,
            open: RefCell::default(),
            latest: Cell::new(0),
            floor: Cell::new(0),
            announced: Cell::new(None),
            announced_at_ns: Cell::new(0),
            is_writing: Cell::new(false),
            horizon: RefCell::new(Cut::first(slots)),
            refreshed_at_ns: Cell::new(0),
        })
    }

    /// Pins all versions (Z2). After this, the worker reads its first cut itself and goes on from that one:
    /// the cut that a fetch thread has may be an earlier one.
    pub(crate) async fn join<R: Rules>(&self, memory: &Memory) -> Result<(), MemoryError> {
        if R::announces_first() {
            memory.write_word(&self.at.piece, self.word, word_of(0)).await?;
            self.announced.set(Some(0));
        } else {
            self.announced_at_ns.set(memory.endpoint().now_ns());
        }
        Ok(())
    }

    /// The first cut, read after joining.
    pub(crate) fn starts_at(&self, sequence: u64) {
        self.note_read(sequence);
        self.floor.set(sequence);
    }

    /// A cut was read: transactions that begin later may have it or a later one.
    pub(crate) fn note_read(&self, sequence: u64) {
        self.latest.set(self.latest.get().max(sequence));
    }

    /// A transaction begins from a cut. `None`: the cut is too old for that.
    pub(crate) fn open(&self, sequence: u64) -> Option<Open<'_>> {
        if sequence < self.floor.get() {
            return None;
        }
        self.note_read(sequence);
        *self.open.borrow_mut().entry(sequence).or_default() += 1;
        Some(Open { announcer: self, sequence })
    }

    /// Announces the lowest number that the worker still needs, if the last announcement is old enough.
    pub(crate) async fn announce_if_due<R: Rules>(&self, memory: &Memory) -> Result<(), MemoryError> {
        let next_at = self.announced_at_ns.get() + ANNOUNCE_EVERY.as_nanos() as u64;
        if memory.endpoint().now_ns() < next_at { Ok(()) } else { self.announce::<R>(memory).await }
    }

    /// Announces the lowest number that the worker still needs (Z1).
    pub(crate) async fn announce<R: Rules>(&self, memory: &Memory) -> Result<(), MemoryError> {
        let oldest = self.open.borrow().keys().next().copied();
        let least = R::least_needed(oldest, self.latest.get());
        if self.announced.get() >= Some(least) || self.is_writing.replace(true) {
            return Ok(());
        }
        let _writing = Writing(&self.is_writing);
        // Before the word is written, and before any other task of this thread runs.
        self.floor.set(self.floor.get().max(least));
        self.announced_at_ns.set(memory.endpoint().now_ns());
        if R::settles_first() {
            memory.settle().await?;
        }
        memory.write_word(&self.at.piece, self.word, word_of(least)).await?;
        self.announced.set(Some(least));
        Ok(())
    }

    /// Clears the word of a worker that leaves. Fails if a transaction is open or in doubt.
    pub(crate) async fn leave(&self, memory: &Memory) -> Result<(), LeaveError> {
        if self.has_open() {
            return Err(LeaveError::Stuck);
        }
        memory.settle().await.map_err(LeaveError::Memory)?;
        memory.write_word(&self.at.piece, self.word, NOBODY).await.map_err(LeaveError::Memory)
    }

    /// Whether a transaction is open, or in doubt.
    pub(crate) fn has_open(&self) -> bool {
        !self.open.borrow().is_empty()
    }

    /// The count of a slot's last commit that all snapshots see, as far as the worker knows.
    pub(crate) fn seen_by_all(&self, slot: Slot) -> u64 {
        self.horizon.borrow().counts().get(slot.index()).copied().unwrap_or(0)
    }

    /// Reads the horizon again, if the last look is long enough ago. Returns whether it did.
    pub(crate) async fn refresh_if_due(&self, memory: &Memory) -> Result<bool, MemoryError> {
        let next_at = self.refreshed_at_ns.get() + REFRESH_EVERY.as_nanos() as u64;
        let is_due = memory.endpoint().now_ns() >= next_at;
        if is_due {
            self.refresh(memory).await?;
        }
        Ok(is_due)
    }

    /// Reads the horizon again.
    pub(crate) async fn refresh(&self, memory: &Memory) -> Result<Cut, MemoryError> {
        self.refreshed_at_ns.set(memory.endpoint().now_ns());
        if let Some((_, cut)) = read_horizon(memory, &self.at).await? {
            let mut horizon = self.horizon.borrow_mut();
            if cut.sequence() > horizon.sequence() {
                *horizon = cut;
            }
        }
        Ok(self.horizon.borrow().clone())
    }
}
