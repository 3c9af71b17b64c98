//! Which commits of a slot are under way, which are over, and how far they are shown: in words, so that
//! threads that share the slot wait for no lock.
//!
//! S1. Each commit gets a count of its own; counts only grow, also where clients of the slot come and go.
//! S2. A slot is said to have come as far as its commits are over *without a gap*: a later one that is over
//!     already is seen only with all before it. One that fails counts as over once nothing of it is left
//!     (`docs/src/txn.md`).
//! S3. One thread at a time has the *turn*: it alone says how far the slot is shown. It finds all that was
//!     over before it took the turn.
//! S4. Who is about to sleep says so in the word of the turn, and then looks once more. That word's changes
//!     have an order: either he finds there what has happened, or who makes it happen finds that somebody
//!     sleeps.
//! S5. A commit's place in the ring is taken again by the one `PLACES` behind it, and only once all up to it
//!     are settled: shown, or nothing is left of them. So who finds another commit there has looked for one
//!     that is settled, and finds that out, too.
//! S6. Counts are at most [`MAX_COUNTS_UNSHOWN`] ahead of what is shown, also where nothing is left of their
//!     commits. So a recoverer that reads the slot's word after its client's death knows a bound on the
//!     counts that were given out.
//!
//! The code is generic over the words, so that models of all interleavings run the very same code.

#[cfg(test)]
mod models;

use std::sync::atomic::{AtomicU64, Ordering};

use super::MAX_COUNTS_UNSHOWN;

/// The last count of a slot, for good.
const LAST: u64 = (1 << 49) - 1;
/// In `begun`, above the count: no more commits begin.
const CLOSED: u64 = 1 << 63;
/// In `turn`: somebody has it.
const TAKEN: u64 = 1;
/// In `turn`: somebody sleeps until it is given back.
const AWAITED: u64 = 1 << 1;
/// In `turn`: nobody gets it any more.
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
                // Relaxed: who fails looks again.
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

/// Of a slot, with so many commits under way at most.
///
/// The first four words share a cache line: threads that commit by turns change all of them, and wait for
/// each line by itself.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Ledger<W, const PLACES: usize> {
    /// The last count that was given out.
    begun: W,
    /// All up to this count are shown. Changed by who has the turn.
    shown: W,
    /// Who has the turn, and whether others sleep.
    turn: W,
    /// All up to this count are shown, or nothing is left of them; `shown` may have come further.
    vanished: W,
    /// Of the commits behind both, each in the place of its count: twice the count once it is over, and one
    /// more if nothing of it is left or needed.
    over: [W; PLACES],
}

/// Why a commit does not begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NotBegun {
    /// Later ones may.
    Full,
    /// Later ones may, once the slot is shown as far as its commits have finished (S6).
    Unshown,
    /// None will.
    Closed,
}

/// How it goes on for who wants to be shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Look {
    /// It is.
    Shown,
    /// It will not be.
    Stuck,
    /// He has the turn, and shows all up to this count.
    Show(u64),
    /// Somebody else has the turn.
    Soon,
    /// An earlier commit is not over.
    Sleep,
}

/// Others sleep until now: wake them.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Awaited(pub(super) bool);

impl<W: Word, const PLACES: usize> Ledger<W, PLACES> {
    /// Of a slot whose last commit is `last`, with nothing under way: what the client before began has ended,
    /// too.
    pub(super) fn after(last: u64) -> Self {
        let word = W::new;
        // Places whose commit was before this all.
        let over = std::array::from_fn(|_| word(0));
        Ledger { begun: word(last), shown: word(last), turn: word(0), vanished: word(last), over }
    }

    /// Begins a commit, and says which it is.
    pub(super) fn begin(&self) -> Result<u64, NotBegun> {
        // Relaxed, here and in the exchange: a count carries no data.
        let mut begun = self.begun.load(Ordering::Relaxed);
        loop {
            if begun & CLOSED != 0 {
                return Err(NotBegun::Closed);
            }
            // What is under way may be overestimated, if `begun` is outdated even as less than nothing: then
            // it is looked at again.
            if begun.saturating_sub(self.settled()) >= PLACES as u64 || begun == LAST {
                return Err(NotBegun::Full);
            }
            // This thread may see less than is shown: then the word is merely written once more.
            if begun.saturating_sub(self.shown()) >= MAX_COUNTS_UNSHOWN {
                return Err(NotBegun::Unshown);
            }
            match self.begun.compare_exchange(begun, begun + 1, Ordering::Relaxed) {
                Ok(_) => return Ok(begun + 1),
                Err(found) => begun = found,
            }
        }
    }

    /// A commit is installed. If the turn is free and the slot has come further, the caller has the turn, and
    /// shows all up to a count.
    ///
    /// Whoever shows his commit himself does not note that it is over: nobody else looks for it before it is
    /// shown, or the turn is given back. Where threads commit by turns, that halves what they wait for each
    /// other's caches.
    #[inline]
    pub(super) fn end(&self, count: u64) -> (Option<u64>, Awaited) {
        let has_turn = self.take_turn();
        if has_turn {
            let over = self.over_with(Some(count));
            if over >= count {
                return (Some(over), Awaited(false));
            }
        }
        self.note(count, 0);
        // He who is behind a gap, and sleeps, is woken by whoever closes it: that one's changes of the turn
        // come before this, or after.
        (None, if has_turn { self.give_turn_back() } else { Awaited(false) })
    }

    /// A commit is over, and nothing of it is left or needed.
    pub(super) fn vanish(&self, count: u64) -> Awaited {
        self.note(count, 1);
        // Release: who sleeps behind it, or will, finds it over (S4).
        let awaited = self.no_longer_awaited();
        self.settle();
        awaited
    }

    fn note(&self, count: u64, is_needless: u64) {
        // Release: pairs with the acquire of who shows it, by whom it must be installed.
        self.place(count).store(count << 1 | is_needless, Ordering::Release);
    }

    fn place(&self, count: u64) -> &W {
        &self.over[count as usize % PLACES]
    }

    /// How far the slot is shown.
    #[inline]
    pub(super) fn shown(&self) -> u64 {
        // Acquire: pairs with the release of who shows it, whose commits are complete for the caller from
        // here on.
        self.shown.load(Ordering::Acquire)
    }

    /// All up to this count are shown, or nothing is left of them.
    pub(super) fn settled(&self) -> u64 {
        // Acquire, both: pairs with the release of who found that.
        self.shown().max(self.vanished.load(Ordering::Acquire))
    }

    /// The count of the oldest commit in flight: neither shown nor vanished.
    pub(super) fn oldest_under_way(&self) -> Option<u64> {
        let settled = self.settled();
        // Relaxed: a count carries no data.
        let begun = self.begun.load(Ordering::Relaxed) & !CLOSED;
        (begun > settled).then_some(settled + 1)
    }

    /// How far all is over without a gap.
    pub(super) fn over(&self) -> u64 {
        self.over_with(None)
    }

    /// How far, with a commit that is over and not noted.
    fn over_with(&self, count: Option<u64>) -> u64 {
        let mut over = self.settled();
        // Acquire: pairs with `note`, and with whatever its thread had found settled before (S5).
        let is_over =
            |next: u64| count == Some(next) || self.place(next).load(Ordering::Acquire) >> 1 == next;
        loop {
            while is_over(over + 1) {
                over += 1;
            }
            let settled = self.settled();
            if settled <= over {
                return over;
            }
            over = settled;
        }
    }

    /// Finds out how far all is settled: behind what is shown, as far as nothing is left.
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
        // Relaxed: a hint; who does not take the turn for it looks again before he sleeps.
        let mut turn = self.turn.load(Ordering::Relaxed);
        while turn & (TAKEN | STUCK) == 0 {
            // Acquire: finds what was over when others last changed this word. Release: so do others.
            match self.turn.compare_exchange(turn, turn | TAKEN, Ordering::AcqRel) {
                Ok(_) => return true,
                Err(found) => turn = found,
            }
        }
        false
    }

    /// Who has the turn has it no longer.
    pub(super) fn give_turn_back(&self) -> Awaited {
        // Release: what was shown, or found. Acquire: what whoever sleeps has found before.
        match self.turn.fetch_sub(TAKEN, Ordering::AcqRel) & AWAITED {
            0 => Awaited(false),
            _ => self.no_longer_awaited(),
        }
    }

    fn no_longer_awaited(&self) -> Awaited {
        Awaited(self.turn.fetch_and(!AWAITED, Ordering::AcqRel) & AWAITED != 0)
    }

    /// Takes the turn if it is free and the slot has come further; returns the count up to which to show.
    pub(super) fn take_to_show(&self) -> (Option<u64>, Awaited) {
        if !self.take_turn() {
            return (None, Awaited(false));
        }
        let over = self.over();
        if over > self.shown() { (Some(over), Awaited(false)) } else { (None, self.give_turn_back()) }
    }

    /// Who has the turn has shown all up to a count.
    pub(super) fn show(&self, count: u64) -> Awaited {
        self.shown.store(count, Ordering::Release); // pairs with `shown`
        let awaited = self.give_turn_back();
        self.settle();
        awaited
    }

    /// How it goes on for a commit that is over. Who sleeps then is not woken.
    pub(super) fn glance(&self, count: u64) -> (Look, Awaited) {
        if self.shown() >= count {
            return (Look::Shown, Awaited(false));
        }
        // Relaxed: a hint, but for who has just changed this word himself (S4).
        let turn = self.turn.load(Ordering::Relaxed);
        if turn & STUCK != 0 {
            return (Look::Stuck, Awaited(false));
        }
        if turn & TAKEN != 0 {
            return (Look::Soon, Awaited(false));
        }
        if self.over() < count {
            return (Look::Sleep, Awaited(false));
        }
        match self.take_to_show() {
            (Some(over), awaited) => (Look::Show(over), awaited),
            (None, awaited) if self.shown() >= count => (Look::Shown, awaited),
            (None, awaited) => (Look::Soon, awaited),
        }
    }

    /// As [`glance`](Self::glance), for who can be woken from now on, and will sleep if it is not his turn.
    pub(super) fn look(&self, count: u64) -> (Look, Awaited) {
        self.turn.fetch_or(AWAITED, Ordering::AcqRel); // before he looks (S4)
        match self.glance(count) {
            (Look::Soon, awaited) => (Look::Sleep, awaited),
            other => other,
        }
    }

    /// Nobody has the turn any more but who has it, and no more commits begin. All who sleep have to be
    /// woken.
    pub(super) fn mark_stuck(&self) {
        self.begun.fetch_or(CLOSED, Ordering::Relaxed); // carries no data
        self.turn.fetch_or(STUCK, Ordering::AcqRel);
    }

    /// Whether nobody gets the turn any more.
    pub(super) fn is_stuck(&self) -> bool {
        // Relaxed: carries no data.
        self.turn.load(Ordering::Relaxed) & STUCK != 0
    }

    /// Closes the slot, if all that has begun has come `far`: no more commits begin. The caller has the turn
    /// then, and either shows all up to the count that this returns, or gives the turn back.
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

    /// Whether no more commits begin.
    pub(super) fn is_closed(&self) -> bool {
        self.begun.load(Ordering::Relaxed) & CLOSED != 0 // carries no data
    }
}
