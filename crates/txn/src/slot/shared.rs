//! A slot in which several threads of a compute server commit (paper 3, section 4.2: compression of the
//! timestamp vector).
//!
//! H1. One thread at a time writes the slot's word: a thread whose commit has finished, and that finds no
//!     other thread writing. It writes how far all commits have finished without a gap, whichever thread they
//!     belong to. Other threads wait for that write, or write next.
//! H2. The next write begins only once the one before has taken effect. So the word never goes back, although
//!     the threads' queues have no order among each other.
//! H3. Once the outcome of a commit or of a write of the word is unknown, the watermark moves no further: all
//!     later commits come after the one in doubt.
//! H4. A commit's head stays in the log until the watermark has reached the commit, or nothing of it is left:
//!     until then it may have to be undone. Its intents stay for longer (L4).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Poll, Waker};

use farpool_fabric::{Endpoint, Turns};
use farpool_wire::{Slot, Version};
use futures_util::task::AtomicWaker;
use rustix_futex_sync::Mutex;

use super::MAX_COMMITS_IN_FLIGHT;
use super::hands::{Hand, Hands, Held};
use super::ledger::{Awaited, Ledger, Look, NotBegun};
use crate::error::{CommitError, LeaveError};
use crate::log::{IntentPlace, LogAt, LogRoom, Logs};
use crate::recovery::Recovered;

/// How often a thread looks at another thread's write before it waits to be woken. A word in shared memory is
/// mostly written before the second look, and waking a thread takes as long as many looks.
const LOOKS: u32 = 32;
/// Looks from one yield to the next: it may be this very thread that keeps the writing thread from its
/// processor.
const LOOKS_PER_YIELD: u32 = 16;
/// Pauses from one look to the next, about 0.8 us in all on the machine of docs/bench/txn.md. Each look takes
/// the slot's words away from the writing thread's processor. So a waiting thread looks seldom, and finds
/// that the other's next write has its commit, which costs less than writing in turns.
const PAUSES_PER_LOOK: u32 = 32;

/// A slot, for all workers that share it.
#[derive(Debug)]
pub struct SharedSlot {
    slot: Slot,
    logs: Logs,
    ledger: Ledger<AtomicU64, MAX_COMMITS_IN_FLIGHT>,
    /// Room in the log for intents. Each commit that has some locks it once.
    room: Mutex<LogRoom>,
    /// The wakers of commits that sleep until the watermark has moved further.
    sleeping: Mutex<BTreeMap<u64, Waker>>,
    /// Whether a write of this compute server may still land in far memory, at any time. Writes of commits
    /// do not count here: the ledger knows of these.
    has_writes_in_flight: AtomicBool,
    /// The threads that commit here.
    hands: Hands,
    /// The task that waits for the watermark to move: the publisher's, if it is in this process.
    watcher: AtomicWaker,
    is_watched: AtomicBool,
}

/// The right and the duty to write the slot's word. If this is dropped before it is [`done`](Self::done), it
/// is unknown what the word is.
#[derive(Debug)]
pub(crate) struct Writing<'a> {
    slot: &'a SharedSlot,
    up_to: u64,
}

/// Which worker writes the slot's word while a commit waits for that.
pub(crate) enum Writer {
    /// The same one: its write goes on only when this thread does.
    ThisWorker,
    /// Another one, mostly of another thread.
    Another,
}

/// How a commit's wait for the watermark goes on.
pub(crate) enum Turn<'a> {
    /// The slot's word has the commit.
    Reached,
    /// The threads of this slot will not move the watermark to it.
    Stuck,
    /// No other thread writes: the caller does.
    Write(Writing<'a>),
}

impl SharedSlot {
    /// A slot in which nothing is in flight, and no count after `last` was used; `logs` are those of all
    /// slots. Its log is used again once the horizon sees that count; if that is 0, nothing is in the log
    /// yet. `None`: it has no log.
    pub fn after(slot: Slot, logs: Logs, last: u64) -> Option<SharedSlot> {
        let bytes = logs.of(slot)?.layout.area_bytes();
        Some(Self::with_room(slot, logs, last, LogRoom::taken_until(bytes, last)))
    }

    /// A slot that was recovered: its log goes on where it ended. `None`: it has no log.
    pub fn recovered(slot: Slot, logs: Logs, recovered: &Recovered) -> Option<SharedSlot> {
        logs.of(slot)?;
        Some(Self::with_room(slot, logs, recovered.last, recovered.room.clone()))
    }

    fn with_room(slot: Slot, logs: Logs, last: u64, room: LogRoom) -> SharedSlot {
        SharedSlot {
            slot,
            logs,
            ledger: Ledger::after(last),
            room: Mutex::new(room),
            sleeping: Mutex::default(),
            has_writes_in_flight: AtomicBool::new(false),
            hands: Hands::default(),
            watcher: AtomicWaker::new(),
            is_watched: AtomicBool::new(false),
        }
    }

    /// Waits until the watermark has moved to something that is committed after this call. One task at a time
    /// may wait. This may miss a commit, so the caller must wait no longer than it would without this.
    pub async fn wait_for_watermark(&self) {
        let before = self.ledger.watermark();
        std::future::poll_fn(|context| {
            self.watcher.register(context.waker());
            // Relaxed, as in `done`: a commit that does not see it wakes no task, which is allowed.
            self.is_watched.store(true, Ordering::Relaxed);
            if self.ledger.watermark() == before { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
    }

    /// Its place in the timestamp vector.
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Adds a worker that commits here; `turns` shows whether its thread runs.
    pub(crate) fn add_worker(&self, turns: Turns) -> Arc<Hand> {
        self.hands.add(turns)
    }

    /// Until the returned value is dropped, others wait for the thread that polls `endpoint`, for another
    /// reason than a commit here.
    pub fn held_by(&self, endpoint: &Endpoint) -> Held {
        Held::new(self.hands.add(endpoint.turns()))
    }

    /// The workers that others wait for: the number of each, and a number that changes while its thread runs.
    pub(crate) fn holding(&self) -> Vec<(u64, u64)> {
        self.hands.holding()
    }

    /// Whether others wait for a commit of one of the workers: it may hold locks.
    pub fn is_held(&self) -> bool {
        !self.holding().is_empty()
    }

    /// The count of the oldest commit in flight.
    pub(crate) fn oldest_in_flight(&self) -> Option<u64> {
        self.ledger.oldest_in_flight()
    }

    /// The logs of all slots.
    pub(crate) fn logs(&self) -> &Logs {
        &self.logs
    }

    /// Its log, for the workers that commit in it.
    pub(crate) fn log(&self) -> &LogAt {
        self.logs.of(self.slot).expect("it was there when this was made")
    }

    /// Begins a commit with so many bytes of intents; returns where these have room in the log. No
    /// snapshot needs the intents of commits up to the count `unneeded`.
    pub(crate) fn begin(&self, log_bytes: u64, unneeded: u64) -> Result<(Version, IntentPlace), CommitError> {
        let most = self.log().layout.most_bytes();
        if log_bytes > most {
            return Err(CommitError::TooLarge { of: "the log", bytes: log_bytes, most });
        }
        if log_bytes == 0 {
            return Ok((self.begin_unlogged()?, IntentPlace { start: 0, segments: 0 }));
        }
        if self.ledger.is_closed() {
            return Err(CommitError::Stuck);
        }
        let mut room = self.room.lock();
        let freed = self.ledger.settled().min(unneeded);
        let place = room.find(log_bytes, freed).ok_or(CommitError::LogFull)?;
        let version = self.begin_unlogged()?;
        Ok((version, room.take(place, version.count(), freed)))
    }

    fn begin_unlogged(&self) -> Result<Version, CommitError> {
        let count = self.ledger.begin().map_err(|not_begun| match not_begun {
            NotBegun::Full | NotBegun::TooFarAhead => CommitError::Busy,
            NotBegun::Closed => CommitError::Stuck,
        })?;
        Ok(Version::new(self.slot, count).expect("the ledger has no more counts than a slot"))
    }

    /// Lets no more commits begin, if nothing is in flight. Returns the last count that was used and, if the
    /// last commits have vanished, the right to write that count to the slot's word.
    pub(crate) fn leave(&self) -> Result<(u64, Option<Writing<'_>>), LeaveError> {
        // Acquire, here and below: pairs with the worker that has noted a write in flight before.
        if self.ledger.is_stuck() || self.has_writes_in_flight.load(Ordering::Acquire) {
            return Err(LeaveError::Stuck);
        }
        let (last, awaited) = self.ledger.close(Ledger::finished_up_to);
        self.wake(awaited);
        let last = last.ok_or(LeaveError::InFlight)?;
        if last > self.ledger.watermark() {
            return Ok((last, Some(Writing { slot: self, up_to: last })));
        }
        self.wake(self.ledger.give_turn_back());
        Ok((last, None))
    }

    /// A commit is installed. If the watermark can move and no other thread writes, the caller does.
    pub(crate) fn end(&self, version: Version) -> Option<Writing<'_>> {
        // Commits that wait for this one are woken when that write, or the one in flight, is done.
        let (up_to, awaited) = self.ledger.end(version.count());
        self.wake(awaited);
        up_to.map(|up_to| Writing { slot: self, up_to })
    }

    /// The right to move the watermark as far as all commits have finished without a gap. `None`: it is there
    /// already, or another worker is writing.
    pub(crate) fn start_write(&self) -> Option<Writing<'_>> {
        let (up_to, awaited) = self.ledger.take_turn_if_behind();
        self.wake(awaited);
        up_to.map(|up_to| Writing { slot: self, up_to })
    }

    /// A commit has finished, and nothing of it is left. Nothing has to be written for that, but a commit
    /// that waits for it may have to be.
    pub(crate) fn vanish(&self, version: Version) {
        self.wake(self.ledger.vanish(version.count()));
    }

    /// A commit was given up before anything of it was written.
    pub(crate) fn give_up(&self, version: Version, place: IntentPlace, log_bytes: u64) {
        if log_bytes > 0 {
            self.room.lock().release(place, log_bytes);
        }
        self.vanish(version);
    }

    /// Whether the watermark has reached a commit that has finished.
    pub(crate) fn is_reached(&self, version: Version) -> bool {
        self.ledger.watermark() >= version.count()
    }

    /// Waits until the watermark has reached a commit that has finished, or it is the caller's turn to write.
    pub(crate) async fn turn(&self, version: Version, writer: Writer) -> Turn<'_> {
        let count = version.count();
        let looks = match writer {
            Writer::ThisWorker => 0, // looking would only keep it from writing
            Writer::Another => LOOKS,
        };
        for look in 1..=looks {
            let (found, awaited) = self.ledger.glance(count);
            self.wake(awaited);
            match self.turn_of(found) {
                Some(turn) => return turn,
                None if found == Look::Sleep => break,
                None if look % LOOKS_PER_YIELD == 0 => std::thread::yield_now(),
                None => (0..PAUSES_PER_LOOK).for_each(|_| std::hint::spin_loop()),
            }
        }
        std::future::poll_fn(|context| self.poll_turn(count, context.waker())).await
    }

    fn turn_of(&self, look: Look) -> Option<Turn<'_>> {
        match look {
            Look::Reached => Some(Turn::Reached),
            Look::Stuck => Some(Turn::Stuck),
            Look::Write(up_to) => Some(Turn::Write(Writing { slot: self, up_to })),
            Look::Soon | Look::Sleep => None,
        }
    }

    fn poll_turn(&self, count: u64, waker: &Waker) -> Poll<Turn<'_>> {
        // Before the look, so that a thread that changes something after the look finds the waker.
        self.sleeping.lock().insert(count, waker.clone());
        let (look, awaited) = self.ledger.look(count);
        self.wake(awaited);
        let Some(turn) = self.turn_of(look) else { return Poll::Pending };
        self.sleeping.lock().remove(&count);
        Poll::Ready(turn)
    }

    /// Lets the watermark move no further (H3).
    pub(crate) fn mark_stuck(&self) {
        self.ledger.mark_stuck();
        self.wake(Awaited(true));
    }

    /// A write may still land in far memory, at any time. Commits go on, but the slot is not given up without
    /// a fence.
    pub(crate) fn note_write_in_flight(&self) {
        self.has_writes_in_flight.store(true, Ordering::Release); // pairs with `leave` and `retire`
    }

    /// Whether the outcome of something is unknown (H3), or the slot was [retired](Self::retire): nothing is
    /// committed here any more, and the slot has to be recovered.
    pub fn is_in_doubt(&self) -> bool {
        self.ledger.is_stuck()
    }

    /// Lets nothing begin any more, if nothing is in flight. False: something is in flight, or in doubt.
    pub fn retire(&self) -> bool {
        if self.has_writes_in_flight.load(Ordering::Acquire) {
            return false;
        }
        let (settled, awaited) = self.ledger.close(Ledger::settled);
        self.wake(awaited);
        if settled.is_some() {
            self.mark_stuck();
        }
        settled.is_some()
    }

    /// Lets all commits that sleep look again.
    fn wake(&self, Awaited(is_awaited): Awaited) {
        if is_awaited {
            let sleeping = std::mem::take(&mut *self.sleeping.lock());
            sleeping.into_values().for_each(Waker::wake);
        }
    }
}

impl Writing<'_> {
    /// The count to write: all commits up to it have finished.
    pub(crate) fn up_to(&self) -> u64 {
        self.up_to
    }

    /// The write has taken effect.
    pub(crate) fn done(self) {
        self.slot.wake(self.slot.ledger.move_watermark(self.up_to));
        if self.slot.is_watched.load(Ordering::Relaxed) {
            self.slot.is_watched.store(false, Ordering::Relaxed);
            self.slot.watcher.wake();
        }
        std::mem::forget(self);
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.slot.mark_stuck();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::Context;

    use farpool_wire::{Epoch, NodeId, RegionId};

    use super::*;
    use crate::log::LogLayout;
    use crate::memory::Piece;
    use crate::slot::MAX_COUNTS_AHEAD;

    const LOG_BYTES: u64 = 64;

    fn slot() -> SharedSlot {
        slot_with_log(LOG_BYTES)
    }

    fn slot_with_log(bytes: u64) -> SharedSlot {
        let region = RegionId { node: NodeId(1), index: 0 };
        let copies = [Piece { region, epoch: Epoch(1), start: 0 }; 2];
        let log = LogAt { copies, layout: LogLayout::new(bytes).unwrap() };
        SharedSlot::after(Slot::new(3).unwrap(), Logs::new([log; 4]), 10).unwrap()
    }

    fn begin(slot: &SharedSlot) -> Version {
        slot.begin(8, u64::MAX).unwrap().0
    }

    #[test]
    fn a_slot_with_a_write_in_flight_goes_on_and_is_not_given_up() {
        let slot = slot();
        slot.note_write_in_flight();
        let version = begin(&slot);
        slot.vanish(version);
        assert!(matches!(slot.leave(), Err(LeaveError::Stuck)) && !slot.retire());
        assert!(slot.begin(8, u64::MAX).is_ok());
    }

    #[test]
    fn the_log_keeps_an_installed_commit_until_the_watermark_has_reached_it() {
        let slot = slot();
        let [first, second, third] = std::array::from_fn(|_| begin(&slot));
        let writing = slot.end(first).expect("no other thread writes");
        assert!(slot.end(second).is_none(), "another thread writes");
        writing.done();
        slot.vanish(third);
        assert_eq!(slot.ledger.settled(), first.count());
        slot.start_write().expect("the watermark is behind").done();
        assert_eq!(slot.ledger.settled(), third.count());
    }

    fn look<'a>(slot: &'a SharedSlot, version: Version) -> Poll<Turn<'a>> {
        let mut context = Context::from_waker(Waker::noop());
        pin!(slot.turn(version, Writer::Another)).poll(&mut context)
    }

    #[test]
    fn one_thread_writes_at_a_time_and_the_next_writes_all_that_has_finished_meanwhile() {
        let slot = slot();
        let [first, second, third] = std::array::from_fn(|_| begin(&slot));
        let writing = slot.end(first).expect("no other thread writes");
        assert_eq!(writing.up_to(), 11);
        assert!(slot.end(third).is_none() && slot.end(second).is_none(), "another thread writes");
        assert!(look(&slot, second).is_pending());
        writing.done();
        assert!(matches!(look(&slot, first), Poll::Ready(Turn::Reached)));
        let Poll::Ready(Turn::Write(writing)) = look(&slot, second) else { panic!("it is its turn") };
        assert_eq!(writing.up_to(), 13);
        assert!(look(&slot, third).is_pending());
        writing.done();
        assert!(matches!(look(&slot, third), Poll::Ready(Turn::Reached)));
    }

    #[test]
    fn a_commit_that_has_finished_waits_for_an_earlier_one_and_is_written_with_it() {
        let slot = slot();
        let [first, second] = std::array::from_fn(|_| begin(&slot));
        assert!(slot.end(second).is_none() && look(&slot, second).is_pending());
        let writing = slot.end(first).unwrap();
        assert_eq!(writing.up_to(), 12);
        writing.done();
        assert!(matches!(look(&slot, second), Poll::Ready(Turn::Reached)));
    }

    #[test]
    fn a_commit_that_waits_for_one_that_vanishes_is_written() {
        let slot = slot();
        let [first, second] = std::array::from_fn(|_| begin(&slot));
        assert!(slot.end(second).is_none() && look(&slot, second).is_pending());
        slot.vanish(first);
        let Poll::Ready(Turn::Write(writing)) = look(&slot, second) else { panic!("it is its turn") };
        assert_eq!(writing.up_to(), 12);
        writing.done();
    }

    #[test]
    fn counts_of_vanished_commits_are_written_before_there_are_too_many() {
        let slot = slot();
        for _ in 0..MAX_COUNTS_AHEAD {
            slot.vanish(begin(&slot));
        }
        assert!(
            matches!(slot.begin(8, u64::MAX), Err(CommitError::Busy)),
            "a recoverer would not know of it"
        );
        let writing = slot.start_write().expect("no other thread writes");
        assert_eq!(writing.up_to(), 10 + MAX_COUNTS_AHEAD);
        assert!(slot.start_write().is_none() && slot.begin(8, u64::MAX).is_err(), "it is being written");
        writing.done();
        assert_eq!(begin(&slot).count(), 11 + MAX_COUNTS_AHEAD);
        assert!(slot.start_write().is_none(), "all are reached");
    }

    #[test]
    fn commits_share_the_room_for_intents_that_their_slot_has() {
        let slot = slot();
        assert!(matches!(
            slot.begin(LOG_BYTES + 1, u64::MAX),
            Err(CommitError::TooLarge { of: "the log", bytes: 65, most: 64 })
        ));
        let (first, place) = slot.begin(LOG_BYTES, u64::MAX).unwrap();
        assert_eq!(place.start, 0);
        assert!(matches!(slot.begin(8, u64::MAX), Err(CommitError::LogFull)));
        slot.end(first).unwrap().done();
        assert!(slot.begin(8, u64::MAX).is_ok());
    }

    #[test]
    fn the_log_s_room_is_taken_until_the_commit_is_reached_or_has_vanished() {
        let slot = slot();
        let (first, _) = slot.begin(LOG_BYTES, u64::MAX).unwrap();
        let writing = slot.end(first).unwrap();
        let refused = slot.begin(LOG_BYTES, u64::MAX);
        assert!(matches!(refused, Err(CommitError::LogFull)), "it is installed, and not reached");
        writing.done();
        let (second, _) = slot.begin(LOG_BYTES, u64::MAX).unwrap();
        slot.vanish(second);
        assert!(slot.begin(LOG_BYTES, u64::MAX).is_ok());
    }

    #[test]
    fn the_log_s_room_is_taken_until_no_snapshot_needs_what_the_commit_has_replaced() {
        let slot = slot();
        let (first, _) = slot.begin(LOG_BYTES, 10).unwrap();
        slot.end(first).unwrap().done();
        let refused = slot.begin(8, first.count() - 1);
        assert!(matches!(refused, Err(CommitError::LogFull)), "it is reached, and not seen by all");
        assert!(slot.begin(8, first.count()).is_ok());
    }

    #[test]
    fn leaving_a_slot_writes_the_last_count_that_was_used() {
        let slot = slot();
        let [first, second] = std::array::from_fn(|_| begin(&slot));
        assert!(matches!(slot.leave(), Err(LeaveError::InFlight)));
        slot.vanish(second);
        let writing = slot.end(first).unwrap();
        assert!(matches!(slot.leave(), Err(LeaveError::InFlight)), "its word is being written");
        writing.done();
        slot.vanish(begin(&slot));
        let (last, writing) = slot.leave().unwrap();
        let writing = writing.expect("the word has less");
        assert_eq!((last, writing.up_to()), (13, 13));
        assert!(matches!(slot.begin(8, u64::MAX), Err(CommitError::Stuck)));
        writing.done();
        assert!(matches!(slot.leave(), Ok((13, None))), "that is so already");
    }

    #[test]
    fn the_oldest_commit_in_flight_is_neither_reached_nor_vanished() {
        let slot = slot();
        assert_eq!(slot.oldest_in_flight(), None);
        let [first, second] = std::array::from_fn(|_| begin(&slot));
        slot.vanish(second);
        assert_eq!(slot.oldest_in_flight(), Some(first.count()));
        let writing = slot.end(first).unwrap();
        assert_eq!(slot.oldest_in_flight(), Some(first.count()), "its word is being written");
        writing.done();
        assert_eq!(slot.oldest_in_flight(), None);
        assert!(slot.retire() && slot.oldest_in_flight().is_none());
    }

    #[test]
    fn a_slot_in_doubt_is_not_left() {
        let slot = slot();
        assert!(!slot.is_in_doubt());
        drop(slot.end(begin(&slot)));
        assert!(slot.is_in_doubt());
        assert!(matches!(slot.leave(), Err(LeaveError::Stuck)));
    }

    #[test]
    fn a_slot_is_retired_only_once_nothing_is_in_flight_and_then_nothing_begins() {
        let slot = slot();
        let first = begin(&slot);
        assert!(!slot.retire());
        let writing = slot.end(first).unwrap();
        assert!(!slot.retire(), "its word is being written");
        writing.done();
        assert!(slot.retire() && !slot.retire());
        assert!(matches!(slot.begin(8, u64::MAX), Err(CommitError::Stuck)));
    }

    #[test]
    fn nothing_is_reached_or_begun_after_a_write_in_doubt() {
        let slot = slot();
        let [first, second] = std::array::from_fn(|_| begin(&slot));
        drop(slot.end(first));
        assert!(slot.end(second).is_none());
        assert!(matches!(look(&slot, second), Poll::Ready(Turn::Stuck)));
        assert!(matches!(slot.begin(8, u64::MAX), Err(CommitError::Stuck)));
    }

    #[test]
    fn threads_that_share_a_slot_never_set_its_word_back() {
        const THREADS: u64 = 4;
        const COMMITS: u64 = 2_000;
        // Two segments or more are free, whichever commits of the others are in flight.
        const LOG_BYTES: u64 = 4 * 512;
        let (slot, word) = (Arc::new(slot_with_log(LOG_BYTES)), Arc::new(AtomicU64::new(10)));
        let commit = |slot: &SharedSlot, word: &AtomicU64| {
            let version = begin(slot);
            let mut writing = slot.end(version);
            loop {
                if let Some(writing) = writing.take() {
                    // Relaxed: the slot orders the threads that write.
                    assert!(word.swap(writing.up_to(), Ordering::Relaxed) < writing.up_to(), "it went back");
                    writing.done();
                }
                match look(slot, version) {
                    Poll::Ready(Turn::Reached) => break,
                    Poll::Ready(Turn::Write(turn)) => writing = Some(turn),
                    Poll::Ready(Turn::Stuck) => panic!("no commit failed"),
                    Poll::Pending => std::thread::yield_now(),
                }
            }
            assert!(word.load(Ordering::Relaxed) >= version.count(), "the word does not have it");
        };
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| (0..COMMITS).for_each(|_| commit(&slot, &word)));
            }
        });
        assert_eq!(word.load(Ordering::Relaxed), 10 + THREADS * COMMITS);
    }
}
