//! What a member does beside its transactions, on threads of its own. While something of that is under way, its seat is not given back:
//! who has the role next would meet writes of two.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The duties of a member. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Duties(Arc<State>);

#[derive(Debug, Default)]
struct State {
    under_way: AtomicU32,
    are_in_doubt: AtomicBool,
}

/// One of them. Dropped before it has [ended](Self::ends), nobody knows what of it is under way.
#[derive(Debug)]
pub struct Duty {
    duties: Arc<State>,
    has_ended: bool,
}

impl Duties {
    /// Begins one.
    pub fn begin(&self) -> Duty {
        self.0.under_way.fetch_add(1, Ordering::Relaxed); // by who has the member, before anybody asks
        Duty { duties: self.0.clone(), has_ended: false }
    }

    /// Whether one has begun and is not over.
    pub fn are_under_way(&self) -> bool {
        // Acquire: pairs with the release of each that is over, whose writes have taken effect by then.
        self.0.under_way.load(Ordering::Acquire) > 0
    }

    /// Whether something of one that is over may be under way.
    pub fn are_in_doubt(&self) -> bool {
        // Relaxed: asked behind `are_under_way`, which orders it.
        self.0.are_in_doubt.load(Ordering::Relaxed)
    }
}

impl Duty {
    /// It is over, and nothing of it is under way.
    pub fn ends(mut self) {
        self.has_ended = true;
    }
}

impl Drop for Duty {
    fn drop(&mut self) {
        if !self.has_ended {
            self.duties.are_in_doubt.store(true, Ordering::Relaxed); // ordered by the release below
        }
        self.duties.under_way.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duties_are_over_once_each_has_ended_and_in_doubt_if_one_was_dropped() {
        let duties = Duties::default();
        let [one, other] = std::array::from_fn(|_| duties.begin());
        one.ends();
        assert!(duties.are_under_way() && !duties.are_in_doubt());
        drop(other);
        assert!(!duties.are_under_way() && duties.are_in_doubt());
    }
}
