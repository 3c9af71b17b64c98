//! The threads that commit in a slot, as their compute server watches them: a thread that stands still while a commit of it is under way
//! holds locks, or keeps the slot's later commits from being shown, for as long as it does.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use farpool_fabric::Turns;
use parking_lot::Mutex;

/// A worker's side.
#[derive(Debug)]
pub(crate) struct Hand {
    /// No other of its slot has this number.
    number: u64,
    turns: Turns,
    /// Commits of its own that others wait for: under way and not installed, or with the turn to write the slot's word.
    holding: AtomicU32,
    /// How often it was one more: in shared memory a thread commits again and again, and its endpoint has no turn.
    begun: AtomicU64,
}

/// Others wait for something of this worker's, until this is dropped.
#[derive(Debug)]
pub(crate) struct Holding<'a>(&'a Hand);

/// Others wait for something that is no commit of a worker, until this is dropped.
#[derive(Debug)]
pub struct Held {
    /// Forgotten with this.
    _hand: Arc<Hand>,
}

impl Held {
    pub(super) fn new(hand: Arc<Hand>) -> Held {
        std::mem::forget(hand.holds());
        Held { _hand: hand }
    }
}

/// All of a slot.
#[derive(Debug, Default)]
pub(super) struct Hands(Mutex<Joined>);

#[derive(Debug, Default)]
struct Joined {
    last: u64,
    hands: Vec<Weak<Hand>>,
}

impl Hand {
    /// Others wait for something from now on.
    #[inline]
    pub(crate) fn holds(&self) -> Holding<'_> {
        // By the worker's own thread alone, both; they carry no data.
        self.begun.store(self.begun.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.holding.store(self.held() + 1, Ordering::Relaxed);
        Holding(self)
    }

    /// Changed by the worker's own thread alone; who watches it sees it a moment later.
    #[inline]
    fn held(&self) -> u32 {
        self.holding.load(Ordering::Relaxed) // carries no data
    }
}

impl Drop for Holding<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.holding.store(self.0.held() - 1, Ordering::Relaxed); // as in `holds`
    }
}

impl Hands {
    /// Another worker, whose thread turns like this.
    pub(super) fn joins(&self, turns: Turns) -> Arc<Hand> {
        let mut joined = self.0.lock();
        joined.last += 1;
        joined.hands.retain(|hand| hand.strong_count() > 0);
        let (number, holding, begun) = (joined.last, AtomicU32::new(0), AtomicU64::new(0));
        let hand = Arc::new(Hand { number, turns, holding, begun });
        joined.hands.push(Arc::downgrade(&hand));
        hand
    }

    /// Those for whom others wait, and a number for each that changes while its thread runs.
    pub(super) fn holding(&self) -> Vec<(u64, u64)> {
        let joined = self.0.lock();
        let hands = joined.hands.iter().filter_map(Weak::upgrade).filter(|hand| hand.held() > 0);
        let progress = |hand: &Hand| hand.turns.count().wrapping_add(hand.begun.load(Ordering::Relaxed));
        hands.map(|hand| (hand.number, progress(&hand))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_named_while_others_wait_for_it() {
        let hands = Hands::default();
        let [one, other] = std::array::from_fn(|_| hands.joins(Turns::default()));
        assert_eq!(hands.holding(), []);
        let first = other.holds();
        let second = other.holds();
        drop(first);
        assert_eq!(hands.holding(), [(2, 2)]);
        drop(second);
        assert_eq!(hands.holding(), []);
        let held = Held::new(one);
        assert_eq!(hands.holding(), [(1, 1)]);
        drop(held);
        assert_eq!(hands.holding(), []);
        let another = hands.joins(Turns::default());
        let _holding = another.holds();
        assert_eq!(hands.holding(), [(3, 1)]);
        assert_eq!(hands.0.lock().hands.len(), 2, "those that are gone are forgotten");
    }
}
