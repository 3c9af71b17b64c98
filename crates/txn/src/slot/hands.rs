//! The threads that commit in a slot, as their compute server watches them. A thread that stands still in a
//! commit holds locks, or keeps the watermark from reaching later commits of the slot, until it goes on.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use farpool_fabric::Turns;
use rustix_futex_sync::Mutex;

/// What the compute server sees of one worker.
#[derive(Debug)]
pub(crate) struct Hand {
    /// Unique in its slot.
    number: u64,
    turns: Turns,
    /// How many things of the worker others wait for: commits in flight that are not installed yet, or the
    /// turn to write the slot's word.
    holding: AtomicU32,
    /// How often `holding` has grown. That is progress, too: in shared memory a thread may commit again and
    /// again without polling its endpoint.
    begun: AtomicU64,
}

/// Until this is dropped, others wait for something of this worker.
#[derive(Debug)]
pub(crate) struct Holding<'a>(&'a Hand);

/// Until this is dropped, others wait for something that is no worker's commit.
#[derive(Debug)]
pub struct Held {
    /// Dropping it removes it from its slot.
    _hand: Arc<Hand>,
}

impl Held {
    pub(super) fn new(hand: Arc<Hand>) -> Held {
        std::mem::forget(hand.hold());
        Held { _hand: hand }
    }
}

/// All hands of a slot.
#[derive(Debug, Default)]
pub(super) struct Hands(Mutex<Joined>);

#[derive(Debug, Default)]
struct Joined {
    last: u64,
    hands: Vec<Weak<Hand>>,
}

impl Hand {
    /// Until the returned value is dropped, others wait for something of this worker.
    #[inline]
    pub(crate) fn hold(&self) -> Holding<'_> {
        // Only the worker's own thread writes either; they carry no data.
        self.begun.store(self.begun.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.holding.store(self.held() + 1, Ordering::Relaxed);
        Holding(self)
    }

    /// Only the worker's own thread changes it; its compute server may see the change a moment later.
    #[inline]
    fn held(&self) -> u32 {
        self.holding.load(Ordering::Relaxed) // carries no data
    }
}

impl Drop for Holding<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.holding.store(self.0.held() - 1, Ordering::Relaxed); // as in `hold`
    }
}

impl Hands {
    /// Adds a worker; `turns` shows whether its thread runs.
    pub(super) fn add(&self, turns: Turns) -> Arc<Hand> {
        let mut joined = self.0.lock();
        joined.last += 1;
        joined.hands.retain(|hand| hand.strong_count() > 0);
        let (number, holding, begun) = (joined.last, AtomicU32::new(0), AtomicU64::new(0));
        let hand = Arc::new(Hand { number, turns, holding, begun });
        joined.hands.push(Arc::downgrade(&hand));
        hand
    }

    /// The hands that others wait for, each with a number that changes while its thread runs.
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
        let [one, other] = std::array::from_fn(|_| hands.add(Turns::default()));
        assert_eq!(hands.holding(), []);
        let first = other.hold();
        let second = other.hold();
        drop(first);
        assert_eq!(hands.holding(), [(2, 2)]);
        drop(second);
        assert_eq!(hands.holding(), []);
        let held = Held::new(one);
        assert_eq!(hands.holding(), [(1, 1)]);
        drop(held);
        assert_eq!(hands.holding(), []);
        let another = hands.add(Turns::default());
        let _holding = another.hold();
        assert_eq!(hands.holding(), [(3, 1)]);
        assert_eq!(hands.0.lock().hands.len(), 2, "dropped hands are forgotten");
    }
}
