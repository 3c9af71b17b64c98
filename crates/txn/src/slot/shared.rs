//! A slot of which several threads of a compute server commit (paper 3, section 4.2: compression of the timestamp vector).
//!
//! H1. One thread at a time writes the slot's word: one that has something over and finds nobody writing. It writes how far all is over
//!     without a gap, whoever's that is; others wait for it, or write next.
//! H2. The next write begins only once the one before has taken effect. So the word never goes back, though the threads' queues have
//!     no order among each other.
//! H3. Once nobody knows what became of a commit or of a write of the word, nothing more is shown: whatever comes later stands
//!     behind it.
//! H4. What the log has of a commit stays there until the word has it, or nothing of it is left: till then it may have to be undone.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Poll, Waker};

use farpool_wire::{Slot, Version};
use parking_lot::Mutex;

use super::SlotCommits;
use crate::error::{CommitError, LeaveError};
use crate::log::{LogAt, LogRoom};

/// Looks at another thread's write before this one waits to be woken: a word in shared memory is written within some of them, and
/// waking a thread takes a hundred times as long.
const LOOKS: u32 = 128;
/// Looks from one yield to the next: if who writes was preempted, it may be by this very thread.
const LOOKS_PER_YIELD: u32 = 16;

/// A slot, for all workers that share it.
#[derive(Debug)]
pub struct SharedSlot {
    slot: Slot,
    log: LogAt,
    state: Mutex<State>,
    /// The slot's word says so much at least. Changed by who holds the lock; looked at without it.
    shown: AtomicU64,
    /// Whether somebody writes the word; likewise.
    is_writing: AtomicBool,
}

#[derive(Debug)]
struct State {
    commits: SlotCommits,
    /// The same commits, each until its place in the log is free (H4).
    logged: SlotCommits,
    /// Of the log, for their intents.
    room: LogRoom,
    is_stuck: bool,
    /// No more commits begin, since the slot was given up.
    has_left: bool,
    /// Who waits for the slot to come further, by commit.
    waiting: BTreeMap<u64, Waker>,
}

/// The right to write the slot's word, and the duty: dropped before it is [`done`](Self::done), nobody knows what the word is.
#[derive(Debug)]
pub(crate) struct Writing<'a> {
    slot: &'a SharedSlot,
    come: u64,
}

/// How it goes on for who waits for a commit.
pub(crate) enum Turn<'a> {
    /// The slot's word has it.
    Shown,
    /// It will not be shown by this slot's threads.
    Stuck,
    /// Nobody else writes: the caller does.
    Write(Writing<'a>),
}

impl SharedSlot {
    /// Of a slot with its log, in which nothing is under way, and no count behind `last` was used.
    pub fn after(slot: Slot, log: LogAt, last: u64) -> SharedSlot {
        let state = State {
            commits: SlotCommits::after(slot, last),
            logged: SlotCommits::after(slot, last),
            room: LogRoom::new(log.layout.ring_bytes()),
            is_stuck: false,
            has_left: false,
            waiting: BTreeMap::new(),
        };
        SharedSlot {
            slot,
            log,
            state: Mutex::new(state),
            shown: AtomicU64::new(last),
            is_writing: AtomicBool::new(false),
        }
    }

    /// Which it is.
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Its log, for whoever commits in it.
    pub(crate) fn log(&self) -> LogAt {
        self.log
    }

    /// Begins a commit with so many bytes of intents; says where in the log's ring these have room.
    pub(crate) fn begin(&self, log_bytes: u64) -> Result<(Version, u64), CommitError> {
        let most = self.log.layout.most_bytes();
        if log_bytes > most {
            return Err(CommitError::TooLarge { bytes: log_bytes, most });
        }
        let mut state = self.state.lock();
        if state.is_stuck || state.has_left {
            return Err(CommitError::Stuck);
        }
        if !state.logged.has_room() {
            return Err(CommitError::Busy);
        }
        let log_start = state.room.take(log_bytes).ok_or(CommitError::Busy)?;
        state.logged.begin().expect("there is room");
        Ok((state.commits.begin().expect("what is logged is no less than what is under way"), log_start))
    }

    /// No more commits from now on, if nothing is under way. Says which count was used last, and lets the caller write it, where the
    /// last commits have vanished.
    pub(crate) fn leave(&self) -> Result<(u64, Option<Writing<'_>>), LeaveError> {
        let mut state = self.state.lock();
        if state.is_stuck {
            return Err(LeaveError::Stuck);
        }
        // Relaxed: changed under the lock.
        if !state.commits.is_quiet() || self.is_writing.load(Ordering::Relaxed) {
            return Err(LeaveError::UnderWay);
        }
        let writing = self.begin_writing(&state);
        state.has_left = true;
        Ok((state.commits.over(), writing))
    }

    /// A commit is installed. If the slot has come further and nobody writes, the caller does.
    pub(crate) fn end(&self, version: Version) -> Option<Writing<'_>> {
        let mut state = self.state.lock();
        state.commits.end(version);
        // Who waits behind this commit is woken when that write, or the one under way, is done.
        self.begin_writing(&state)
    }

    /// A commit is over of which nothing is left. Nothing has to be written for that; who waits behind it may have to.
    pub(crate) fn vanish(&self, version: Version) {
        let mut state = self.state.lock();
        state.commits.end(version);
        state.forget(|logged| {
            logged.end(version);
        });
        self.wake(state);
    }

    /// The log does not need a commit any more that is over.
    pub(crate) fn forget(&self, version: Version) {
        self.state.lock().forget(|logged| {
            logged.end(version);
        });
    }

    /// For who holds the lock.
    fn begin_writing(&self, state: &State) -> Option<Writing<'_>> {
        let come = state.commits.over();
        // Relaxed, both: changed under the lock, which the caller holds.
        let is_behind = self.shown.load(Ordering::Relaxed) < come;
        if state.is_stuck || !is_behind || self.is_writing.load(Ordering::Relaxed) {
            return None;
        }
        self.is_writing.store(true, Ordering::Relaxed);
        Some(Writing { slot: self, come })
    }

    /// Waits until a commit that is over is shown, or it is the caller's turn to write.
    pub(crate) async fn turn(&self, version: Version) -> Turn<'_> {
        let count = version.count();
        for look in 1..=LOOKS {
            // Acquire: pairs with the release of who wrote it, whose commits are complete for the caller's session from here on.
            if self.shown.load(Ordering::Acquire) >= count {
                return Turn::Shown;
            }
            // Relaxed: a hint that it is worth to take the lock.
            if !self.is_writing.load(Ordering::Relaxed) {
                break;
            }
            if look % LOOKS_PER_YIELD == 0 {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        std::future::poll_fn(|context| self.poll_turn(count, context.waker())).await
    }

    fn poll_turn(&self, count: u64, waker: &Waker) -> Poll<Turn<'_>> {
        let mut state = self.state.lock();
        // Relaxed: changed under the lock.
        if self.shown.load(Ordering::Relaxed) >= count {
            state.waiting.remove(&count);
            return Poll::Ready(Turn::Shown);
        }
        if state.is_stuck {
            state.waiting.remove(&count);
            return Poll::Ready(Turn::Stuck);
        }
        if state.commits.over() >= count
            && let Some(writing) = self.begin_writing(&state)
        {
            state.waiting.remove(&count);
            return Poll::Ready(Turn::Write(writing));
        }
        state.waiting.insert(count, waker.clone());
        Poll::Pending
    }

    /// H3.
    pub(crate) fn is_stuck(&self) {
        let mut state = self.state.lock();
        state.is_stuck = true;
        self.wake(state);
    }

    /// Whether nobody knows what became of something (H3): nothing is committed here any more, and the slot has to be looked after.
    pub fn is_in_doubt(&self) -> bool {
        self.state.lock().is_stuck
    }

    /// Nothing begins any more, if nothing is under way; false: something is, or nobody knows.
    pub fn retire(&self) -> bool {
        let mut state = self.state.lock();
        // Relaxed: changed under the lock.
        let is_quiet = state.logged.is_quiet() && !self.is_writing.load(Ordering::Relaxed) && !state.is_stuck;
        state.is_stuck |= is_quiet;
        is_quiet
    }

    /// Lets all who wait look again.
    fn wake(&self, mut state: parking_lot::MutexGuard<'_, State>) {
        if !state.waiting.is_empty() {
            let waiting = std::mem::take(&mut state.waiting);
            drop(state);
            waiting.into_values().for_each(Waker::wake);
        }
    }
}

impl State {
    /// The log does not need some of the commits any more.
    fn forget(&mut self, end: impl FnOnce(&mut SlotCommits)) {
        let before = self.logged.over();
        end(&mut self.logged);
        self.room.give_back((self.logged.over() - before) as usize);
    }
}

impl Writing<'_> {
    /// What is to be written.
    pub(crate) fn come(&self) -> u64 {
        self.come
    }

    /// It has taken effect.
    pub(crate) fn done(self) {
        let mut state = self.slot.state.lock();
        state.forget(|logged| logged.end_up_to(self.come));
        // Release: pairs with the acquire in `turn`.
        self.slot.shown.store(self.come, Ordering::Release);
        self.slot.is_writing.store(false, Ordering::Relaxed); // under the lock
        self.slot.wake(state);
        std::mem::forget(self);
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.slot.is_stuck();
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

    const LOG_BYTES: u64 = 64;

    fn slot() -> SharedSlot {
        let region = RegionId { node: NodeId(1), index: 0 };
        let copies = [Piece { region, epoch: Epoch(1), start: 0 }; 2];
        let log = LogAt { copies, layout: LogLayout::new(LOG_BYTES).unwrap() };
        SharedSlot::after(Slot::new(3).unwrap(), log, 10)
    }

    fn begin(slot: &SharedSlot) -> Version {
        slot.begin(8).unwrap().0
    }

    fn look<'a>(slot: &'a SharedSlot, version: Version) -> Poll<Turn<'a>> {
        let mut context = Context::from_waker(Waker::noop());
        pin!(slot.turn(version)).poll(&mut context)
    }

    #[test]
    fn one_writes_at_a_time_and_the_next_writes_all_that_has_ended_meanwhile() {
        let slot = slot();
        let [first, second, third] = std::array::from_fn(|_| begin(&slot));
        let writing = slot.end(first).expect("nobody else writes");
        assert_eq!(writing.come(), 11);
        assert!(slot.end(third).is_none() && slot.end(second).is_none(), "somebody writes");
        assert!(look(&slot, second).is_pending());
        writing.done();
        assert!(matches!(look(&slot, first), Poll::Ready(Turn::Shown)));
        let Poll::Ready(Turn::Write(writing)) = look(&slot, second) else { panic!("it is its turn") };
        assert_eq!(writing.come(), 13);
        assert!(look(&slot, third).is_pending());
        writing.done();
        assert!(matches!(look(&slot, third), Poll::Ready(Turn::Shown)));
    }

    #[test]
    fn a_commit_behind_one_that_goes_on_waits_and_writes_once_that_is_over() {
        let slot = slot();
        let [first, second] = std::array::from_fn(|_| begin(&slot));
        assert!(slot.end(second).is_none() && look(&slot, second).is_pending());
        let writing = slot.end(first).unwrap();
        assert_eq!(writing.come(), 12);
        writing.done();
        assert!(matches!(look(&slot, second), Poll::Ready(Turn::Shown)));
    }

    #[test]
    fn who_waits_behind_a_commit_that_vanishes_writes() {
        let slot = slot();
        let [first, second] = std::array::from_fn(|_| begin(&slot));
        assert!(slot.end(second).is_none() && look(&slot, second).is_pending());
        slot.vanish(first);
        let Poll::Ready(Turn::Write(writing)) = look(&slot, second) else { panic!("it is its turn") };
        assert_eq!(writing.come(), 12);
        writing.done();
    }

    #[test]
    fn commits_share_the_room_for_intents_that_their_slot_has() {
        let slot = slot();
        assert!(matches!(slot.begin(LOG_BYTES + 1), Err(CommitError::TooLarge { bytes: 65, most: 64 })));
        let (first, start) = slot.begin(LOG_BYTES).unwrap();
        assert_eq!(start, 0);
        assert!(matches!(slot.begin(8), Err(CommitError::Busy)));
        slot.end(first).unwrap().done();
        assert!(slot.begin(8).is_ok());
    }

    #[test]
    fn the_log_s_room_is_taken_until_the_commit_is_shown_or_has_vanished() {
        let slot = slot();
        let (first, _) = slot.begin(LOG_BYTES).unwrap();
        let writing = slot.end(first).unwrap();
        assert!(matches!(slot.begin(LOG_BYTES), Err(CommitError::Busy)), "it is installed, and not shown");
        writing.done();
        let (second, _) = slot.begin(LOG_BYTES).unwrap();
        slot.vanish(second);
        assert!(slot.begin(LOG_BYTES).is_ok());
    }

    #[test]
    fn who_leaves_a_slot_writes_the_last_count_that_was_used_for_nothing() {
        let slot = slot();
        let [first, second] = std::array::from_fn(|_| begin(&slot));
        assert!(matches!(slot.leave(), Err(LeaveError::UnderWay)));
        slot.vanish(second);
        let writing = slot.end(first).unwrap();
        assert!(matches!(slot.leave(), Err(LeaveError::UnderWay)), "its word is being written");
        writing.done();
        slot.vanish(begin(&slot));
        let (last, writing) = slot.leave().unwrap();
        let writing = writing.expect("the word has less");
        assert_eq!((last, writing.come()), (13, 13));
        assert!(matches!(slot.begin(8), Err(CommitError::Stuck)));
        writing.done();
        assert!(matches!(slot.leave(), Ok((13, None))), "that is so already");
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
    fn a_slot_is_retired_only_once_nothing_is_under_way_and_then_nothing_begins() {
        let slot = slot();
        let first = begin(&slot);
        assert!(!slot.retire());
        let writing = slot.end(first).unwrap();
        assert!(!slot.retire(), "its word is being written");
        writing.done();
        assert!(slot.retire() && !slot.retire());
        assert!(matches!(slot.begin(8), Err(CommitError::Stuck)));
    }

    #[test]
    fn nothing_is_shown_or_begun_behind_a_write_of_which_nobody_knows() {
        let slot = slot();
        let [first, second] = std::array::from_fn(|_| begin(&slot));
        drop(slot.end(first));
        assert!(slot.end(second).is_none());
        assert!(matches!(look(&slot, second), Poll::Ready(Turn::Stuck)));
        assert!(matches!(slot.begin(8), Err(CommitError::Stuck)));
    }

    #[test]
    fn threads_that_share_a_slot_write_a_word_that_never_goes_back_and_are_shown_what_they_commit() {
        const THREADS: u64 = 4;
        const COMMITS: u64 = 2_000;
        let (slot, word) = (Arc::new(slot()), Arc::new(AtomicU64::new(10)));
        let commit = |slot: &SharedSlot, word: &AtomicU64| {
            let version = begin(slot);
            let mut writing = slot.end(version);
            loop {
                if let Some(writing) = writing.take() {
                    // Relaxed: the slot orders those who write.
                    assert!(word.swap(writing.come(), Ordering::Relaxed) < writing.come(), "it went back");
                    writing.done();
                }
                match look(slot, version) {
                    Poll::Ready(Turn::Shown) => break,
                    Poll::Ready(Turn::Write(turn)) => writing = Some(turn),
                    Poll::Ready(Turn::Stuck) => panic!("nobody failed"),
                    Poll::Pending => std::thread::yield_now(),
                }
            }
            assert!(word.load(Ordering::Relaxed) >= version.count(), "it was said to be shown");
        };
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| (0..COMMITS).for_each(|_| commit(&slot, &word)));
            }
        });
        assert_eq!(word.load(Ordering::Relaxed), 10 + THREADS * COMMITS);
    }
}
