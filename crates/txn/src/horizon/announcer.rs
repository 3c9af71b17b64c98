//! What a worker announces, and what it knows of the horizon.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::Duration;

use super::{HorizonAt, NOBODY, read_horizon, word_of};
use crate::cut::Cut;
use crate::error::LeaveError;
use crate::memory::{Memory, MemoryError};
use crate::rules::Rules;

/// From one announcement to the next, at least: one WRITE for many transactions, and versions are kept for so
/// much longer.
const ANNOUNCE_EVERY: Duration = Duration::from_micros(50);

/// A worker's side of the horizon.
pub(crate) struct Announcer {
    at: HorizonAt,
    /// Where its word lies.
    word: u64,
    /// How many transactions are open that began from a cut, by its number.
    open: RefCell<BTreeMap<u64, u32>>,
    /// The number of the last cut that it has read.
    latest: Cell<u64>,
    /// No transaction begins from a cut with a lower number.
    floor: Cell<u64>,
    /// What its word says, if it is there.
    announced: Cell<Option<u64>>,
    announced_at_ns: Cell<u64>,
    /// Its word is being written: one write at a time.
    is_writing: Cell<bool>,
    /// As far as it knows.
    horizon: RefCell<Cut>,
}

/// A snapshot that is in use: its worker does not announce that it has gone beyond it.
pub(crate) struct Open<'a> {
    announcer: &'a Announcer,
    sequence: u64,
}

impl Open<'_> {
    /// Whether its transaction has taken effect will be known when its worker is gone: what it needs, those
    /// may need who find out.
    pub(crate) fn stays(self) {
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
    /// Of a worker that has the place `worker`, and is not there yet. `None`: there is no such place.
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
        })
    }

    /// Pins everything (Z2). Then the worker reads its first cut itself, and goes on from that: what a fetch
    /// thread has may be from before.
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

    /// A cut was read: those who begin later may have it, or a later one.
    pub(crate) fn note_read(&self, sequence: u64) {
        self.latest.set(self.latest.get().max(sequence));
    }

    /// A transaction begins from a cut; `None`: it is too old for that.
    pub(crate) fn open(&self, sequence: u64) -> Option<Open<'_>> {
        if sequence < self.floor.get() {
            return None;
        }
        self.note_read(sequence);
        *self.open.borrow_mut().entry(sequence).or_default() += 1;
        Some(Open { announcer: self, sequence })
    }

    /// Announces how far the worker has come, if it has not for a while.
    pub(crate) async fn announce_if_due<R: Rules>(&self, memory: &Memory) -> Result<(), MemoryError> {
        let next_at = self.announced_at_ns.get() + ANNOUNCE_EVERY.as_nanos() as u64;
        if memory.endpoint().now_ns() < next_at { Ok(()) } else { self.announce::<R>(memory).await }
    }

    /// Announces how far the worker has come (Z1).
    pub(crate) async fn announce<R: Rules>(&self, memory: &Memory) -> Result<(), MemoryError> {
        let oldest = self.open.borrow().keys().next().copied();
        let least = R::least_needed(oldest, self.latest.get());
        if self.announced.get() >= Some(least) || self.is_writing.replace(true) {
            return Ok(());
        }
        let _writing = Writing(&self.is_writing);
        // Before the word says so, and before anything else of the thread goes on.
        self.floor.set(self.floor.get().max(least));
        self.announced_at_ns.set(memory.endpoint().now_ns());
        if R::settles_first() {
            memory.settle().await?;
        }
        memory.write_word(&self.at.piece, self.word, word_of(least)).await?;
        self.announced.set(Some(least));
        Ok(())
    }

    /// The worker goes. It has no transactions any more, or one that is in doubt.
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

    /// The horizon, as far as the worker knows.
    pub(crate) fn horizon(&self) -> Cut {
        self.horizon.borrow().clone()
    }

    /// Reads it again.
    pub(crate) async fn refresh(&self, memory: &Memory) -> Result<Cut, MemoryError> {
        if let Some((_, cut)) = read_horizon(memory, &self.at).await? {
            let mut horizon = self.horizon.borrow_mut();
            if cut.sequence() > horizon.sequence() {
                *horizon = cut;
            }
        }
        Ok(self.horizon())
    }
}
