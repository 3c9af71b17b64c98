//! Which commits of a slot are in flight, which have finished, and how far the watermark has come. All of it
//! is kept in atomic words, so that threads that share the slot wait for no lock.
//!
//! S1. Each commit gets a count of its own. Counts only grow, also when one client of the slot follows
//!     another.
//! S2. The watermark reaches only as far as commits have finished *without a gap*: a later commit that has
//!     already finished is seen only together with all before it. A commit that fails has finished once
//!     nothing of it is left (`docs/src/txn.md`).
//! S3. One thread at a time has the *turn*: it alone moves the watermark. It finds everything that had
//!     finished before it took the turn.
//! S4. A thread that is about to sleep says so in the word of the turn, and then looks again. The changes of
//!     that word have an order: either the sleeper finds what has happened, or the thread that makes it
//!     happen finds that another thread sleeps.
//! S5. A commit's place in the ring is used again by the commit `PLACES` later, and only once all commits up
//!     to the earlier one are settled: the watermark has reached them, or nothing is left of them. So a
//!     thread that finds another commit in a place was looking for a commit that is settled, and finds that
//!     out, too.
//! S6. Counts are at most [`MAX_COUNTS_AHEAD`] ahead of the watermark, including those of commits of which
//!     nothing is left. So a recoverer that reads the slot's word after the client's death has a bound on the
//!     counts that were given out.
//!
//! The code is generic over the words, so that the models of its interleavings run the same code.

#[cfg(test)]
mod models;

use std::sync::atomic::{AtomicU64, Ordering};

use super::MAX_COUNTS_AHEAD;

/// The highest count that a slot can give out: counts have 49 bits.
const LAST: u64 = (1 << 49) - 1;
/// In `begun`, above the count: no more commits begin.
const CLOSED: u64 = 1 << 63;
/// In `turn`: a thread has it.
const TAKEN: u64 = 1;
/// In `turn`: a thread sleeps, and must be woken when something has changed.
const AWAITED: u64 = 1 << 1;
/// In `turn`: no thread gets it any more.
const STUCK: u64 = 1 << 2;

/// A word that threads share.
pub(super) trait Word {
    fn new(value: u64) -> Self;
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn compare_exchange(&self, current: u64, new: u64, order: Ordering) -> Result<u64, u64>;
    fn fetch_or(&self, bits: u64, order: Ordering) -> u64;
    fn fetch_and(&self, bits: u64, order: Ordering) -> u64;
    fn fetch_sub(&self, subtrahend: u64, order: Ordering) -> u64;
    fn fetch_max(&self, value: u64, order: Ordering) -> u64;
}

macro_rules! word {
    ($atomic:ty) => {
        impl Word for $atomic {
            fn new(value: u64) -> Self {
                <$atomic>::new(value)
            }

            #[inline]
            fn load(&self, order: Ordering) -> u64 {
                self.load(order)
            }

            #[inline]
            fn store(&self, value: u64, order: Ordering) {
                self.store(value, order);
            }

            #[inline]
            fn compare_exchange(&self, current: u64, new: u64, order: Ordering) -> Result<u64, u64> {
                // Relaxed: a thread that fails looks again.
                self.compare_exchange(current, new, order, Ordering::Relaxed)
            }

            #[inline]
            fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
                self.fetch_or(bits, order)
            }

            #[inline]
            fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
                self.fetch_and(bits, order)
            }

            #[inline]
            fn fetch_sub(&self, subtrahend: u64, order: Ordering) -> u64 {
                self.fetch_sub(subtrahend, order)
            }

            #[inline]
            fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
                self.fetch_max(value, order)
            }
        }
    };
}
#[cfg(test)]
use word;

word!(AtomicU64);

/// The ledger of a slot, with at most `PLACES` commits in flight.
///
/// The first four words share a cache line: threads that commit in turns change all of them, and would wait
/// for each line separately.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Ledger<W, const PLACES: usize> {
    /// The last count that was given out.
    begun: W,
    /// The watermark: every commit up to this count has finished, and the slot's word in far memory says so.
    /// Only the thread with the turn changes it.
    watermark: W,
    /// Whether a thread has the turn, and whether others sleep.
    turn: W,
    /// All commits up to this count are settled: the watermark has reached them, or nothing is left of them.
    /// `watermark` may be further.
    vanished: W,
    /// For each commit after both, in the place of its count: twice the count once the commit has finished,
    /// and one more if nothing of it is left or needed.
    finished: [W; PLACES],
}

/// Why a commit does not begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NotBegun {
    /// Too many commits are in flight, or the slot has used its last count.
    Full,
    /// Too many counts are ahead of the watermark: later commits may begin once it has moved (S6).
    TooFarAhead,
    /// No commit begins any more.
    Closed,
}

/// What a commit that has finished does next, to be reached by the watermark.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Look {
    /// Nothing: the watermark has reached it.
    Reached,
    /// Nothing: the watermark will not reach it.
    Stuck,
    /// Its thread has the turn, and moves the watermark to this count.
    Write(u64),
    /// It looks again soon: another thread has the turn.
    Soon,
    /// It sleeps: an earlier commit has not finished or, after [`Ledger::look`], another thread has the turn.
    Sleep,
}

/// Whether threads have slept until now: then the caller must wake them.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Awaited(pub(super) bool);

impl<W: Word, const PLACES: usize> Ledger<W, PLACES> {
    /// The ledger of a slot whose last commit is `last`, and in which nothing is in flight: everything that
    /// the client before has begun has ended, too.
    pub(super) fn after(last: u64) -> Self {
        let word = W::new;
        // Zero is the place of count 0, which is before all counts that are looked for.
        let finished = std::array::from_fn(|_| word(0));
        Ledger { begun: word(last), watermark: word(last), turn: word(0), vanished: word(last), finished }
    }

    /// Begins a commit, and returns its count.
    pub(super) fn begin(&self) -> Result<u64, NotBegun> {
        // Relaxed, here and in the exchange: a count carries no data.
        let mut begun = self.begun.load(Ordering::Relaxed);
        loop {
            if begun & CLOSED != 0 {
                return Err(NotBegun::Closed);
            }
            // The number in flight may be overestimated. If `begun` is outdated, it may even come out below
            // zero: then the exchange fails, and the loop looks again.
            if begun.saturating_sub(self.settled()) >= PLACES as u64 || begun == LAST {
                return Err(NotBegun::Full);
            }
            // The watermark that this thread sees may be outdated: then the word is merely written once more.
            if begun.saturating_sub(self.watermark()) >= MAX_COUNTS_AHEAD {
                return Err(NotBegun::TooFarAhead);
            }
            match self.begun.compare_exchange(begun, begun + 1, Ordering::Relaxed) {
                Ok(_) => return Ok(begun + 1),
                Err(found) => begun = found,
            }
        }
    }

    /// A commit is installed. If the turn is free and all commits before this one have finished, the caller
    /// gets the turn, and moves the watermark to the returned count.
    ///
    /// A thread that moves the watermark over its own commit does not note that the commit has finished: no
    /// other thread looks for it before the watermark has reached it, or the turn is given back. Where
    /// threads commit in turns, that halves the time for which they wait for each other's caches.
    #[inline]
    pub(super) fn end(&self, count: u64) -> (Option<u64>, Awaited) {
        let has_turn = self.take_turn();
        if has_turn {
            let up_to = self.finished_up_to_with(Some(count));
            if up_to >= count {
                return (Some(up_to), Awaited(false));
            }
        }
        self.note(count, 0);
        // A thread that sleeps behind a gap is woken by the thread that closes the gap: that thread changes
        // the turn either before this or after it.
        (None, if has_turn { self.give_turn_back() } else { Awaited(false) })
    }

    /// A commit has finished, and nothing of it is left or needed.
    pub(super) fn vanish(&self, count: u64) -> Awaited {
        self.note(count, 1);
        // Release: a thread that sleeps behind this commit, or will, finds that it has finished (S4).
        let awaited = self.no_longer_awaited();
        self.settle();
        awaited
    }

    fn note(&self, count: u64, is_needless: u64) {
        // Release: pairs with the acquire of the thread that moves the watermark over the commit, and must
        // find it installed.
        self.place(count).store(count << 1 | is_needless, Ordering::Release);
    }

    fn place(&self, count: u64) -> &W {
        &self.finished[count as usize % PLACES]
    }

    /// The watermark: every commit up to this count has finished.
    #[inline]
    pub(super) fn watermark(&self) -> u64 {
        // Acquire: pairs with the release of the thread that moved it. From here on, the commits that it has
        // reached are complete for the caller.
        self.watermark.load(Ordering::Acquire)
    }

    /// All commits up to this count are settled: the watermark has reached them, or nothing is left of them.
    pub(super) fn settled(&self) -> u64 {
        // Acquire, both: pairs with the release of the thread that found that.
        self.watermark().max(self.vanished.load(Ordering::Acquire))
    }

    /// The count of the oldest commit in flight: the watermark has not reached it, and it has not vanished.
    pub(super) fn oldest_in_flight(&self) -> Option<u64> {
        let settled = self.settled();
        // Relaxed: a count carries no data.
        let begun = self.begun.load(Ordering::Relaxed) & !CLOSED;
        (begun > settled).then_some(settled + 1)
    }

    /// The count up to which all commits have finished without a gap.
    pub(super) fn finished_up_to(&self) -> u64 {
        self.finished_up_to_with(None)
    }

    /// As [`finished_up_to`](Self::finished_up_to), with one commit that has finished and is not noted.
    fn finished_up_to_with(&self, count: Option<u64>) -> u64 {
        let mut up_to = self.settled();
        // Acquire: pairs with `note`, and with what the noting thread had found settled before (S5).
        let has_finished =
            |next: u64| count == Some(next) || self.place(next).load(Ordering::Acquire) >> 1 == next;
        loop {
            while has_finished(up_to + 1) {
                up_to += 1;
            }
            let settled = self.settled();
            if settled <= up_to {
                return up_to;
            }
            up_to = settled;
        }
    }

    /// Finds out how far all commits are settled: beyond the watermark, as far as nothing is left of them.
    fn settle(&self) {
        let settled = self.settled();
        let mut vanished = settled;
        // Acquire: pairs with `note`.
        while self.place(vanished + 1).load(Ordering::Acquire) == (vanished + 1) << 1 | 1 {
            vanished += 1;
        }
        if vanished > settled {
            self.vanished.fetch_max(vanished, Ordering::Release); // pairs with `settled`
        }
    }

    fn take_turn(&self) -> bool {
        // Relaxed: a hint. A thread that does not take the turn because of it looks again before it sleeps.
        let mut turn = self.turn.load(Ordering::Relaxed);
        while turn & (TAKEN | STUCK) == 0 {
            // Acquire: finds what had finished when other threads last changed this word. Release: they do
            // the same.
            match self.turn.compare_exchange(turn, turn | TAKEN, Ordering::AcqRel) {
                Ok(_) => return true,
                Err(found) => turn = found,
            }
        }
        false
    }

    /// The caller gives the turn back.
    pub(super) fn give_turn_back(&self) -> Awaited {
        // Release: what the caller has found, or how far it has moved the watermark. Acquire: what sleeping
        // threads have found before.
        match self.turn.fetch_sub(TAKEN, Ordering::AcqRel) & AWAITED {
            0 => Awaited(false),
            _ => self.no_longer_awaited(),
        }
    }

    fn no_longer_awaited(&self) -> Awaited {
        Awaited(self.turn.fetch_and(!AWAITED, Ordering::AcqRel) & AWAITED != 0)
    }

    /// Takes the turn if it is free and the watermark can move; returns the count to move it to.
    pub(super) fn take_turn_if_behind(&self) -> (Option<u64>, Awaited) {
        if !self.take_turn() {
            return (None, Awaited(false));
        }
        let up_to = self.finished_up_to();
        if up_to > self.watermark() { (Some(up_to), Awaited(false)) } else { (None, self.give_turn_back()) }
    }

    /// The caller has the turn, and has written this count to the slot's word: moves the watermark there, and
    /// gives the turn back.
    pub(super) fn move_watermark(&self, count: u64) -> Awaited {
        self.watermark.store(count, Ordering::Release); // pairs with `watermark`
        let awaited = self.give_turn_back();
        self.settle();
        awaited
    }

    /// What a commit that has finished does next. A caller that sleeps after this is not woken.
    pub(super) fn glance(&self, count: u64) -> (Look, Awaited) {
        if self.watermark() >= count {
            return (Look::Reached, Awaited(false));
        }
        // Relaxed: a hint, except for a thread that has just changed this word itself (S4).
        let turn = self.turn.load(Ordering::Relaxed);
        if turn & STUCK != 0 {
            return (Look::Stuck, Awaited(false));
        }
        if turn & TAKEN != 0 {
            return (Look::Soon, Awaited(false));
        }
        if self.finished_up_to() < count {
            return (Look::Sleep, Awaited(false));
        }
        match self.take_turn_if_behind() {
            (Some(up_to), awaited) => (Look::Write(up_to), awaited),
            (None, awaited) if self.watermark() >= count => (Look::Reached, awaited),
            (None, awaited) => (Look::Soon, awaited),
        }
    }

    /// As [`glance`](Self::glance), for a caller that can be woken from now on, and that sleeps if it does
    /// not get the turn.
    pub(super) fn look(&self, count: u64) -> (Look, Awaited) {
        self.turn.fetch_or(AWAITED, Ordering::AcqRel); // before the look (S4)
        match self.glance(count) {
            (Look::Soon, awaited) => (Look::Sleep, awaited),
            other => other,
        }
    }

    /// From now on no thread gets the turn (a thread that has it keeps it), and no commit begins. The caller
    /// must wake all threads that sleep.
    pub(super) fn mark_stuck(&self) {
        self.begun.fetch_or(CLOSED, Ordering::Relaxed); // carries no data
        self.turn.fetch_or(STUCK, Ordering::AcqRel);
    }

    /// Whether no thread gets the turn any more.
    pub(super) fn is_stuck(&self) -> bool {
        // Relaxed: carries no data.
        self.turn.load(Ordering::Relaxed) & STUCK != 0
    }

    /// Closes the slot, if the last count that was given out is the one that `far` returns: no commit begins
    /// any more. Then the caller has the turn. It either moves the watermark to the returned count, or gives
    /// the turn back.
    pub(super) fn close(&self, far: impl FnOnce(&Self) -> u64) -> (Option<u64>, Awaited) {
        if !self.take_turn() {
            return (None, Awaited(false));
        }
        let far = far(self);
        // Relaxed, both: a count carries no data.
        let begun = self.begun.load(Ordering::Relaxed);
        let is_quiet = begun & !CLOSED == far
            && self.begun.compare_exchange(begun, begun | CLOSED, Ordering::Relaxed).is_ok();
        if is_quiet { (Some(far), Awaited(false)) } else { (None, self.give_turn_back()) }
    }

    /// Whether no commit begins any more.
    pub(super) fn is_closed(&self) -> bool {
        self.begun.load(Ordering::Relaxed) & CLOSED != 0 // carries no data
    }
}
