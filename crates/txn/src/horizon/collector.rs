//! The rule that chooses the horizon.

use std::collections::VecDeque;
use std::marker::PhantomData;

use crate::cut::Cut;
use crate::rules::{Rules, Shipped};

/// The largest number of cuts that a collector remembers. With more, the horizon could advance a little
/// earlier while there is an old snapshot.
const MOST_KNOWN: usize = 64;

/// Chooses horizons. There is one at a time.
#[derive(Debug)]
pub struct Collector<R = Shipped> {
    /// Published cuts later than the horizon, in their order.
    known: VecDeque<Cut>,
    horizon: Option<Cut>,
    rules: PhantomData<R>,
}

impl<R: Rules> Collector<R> {
    /// Goes on from the last horizon that a previous collector published, if there is one.
    pub fn after(horizon: Option<Cut>) -> Self {
        Collector { known: VecDeque::new(), horizon, rules: PhantomData }
    }

    /// The present horizon.
    pub fn horizon(&self) -> Option<&Cut> {
        self.horizon.as_ref()
    }

    /// The last cut that it knows.
    fn last_known(&self) -> Option<&Cut> {
        self.known.back().or(self.horizon.as_ref())
    }

    /// Adds a published cut. Returns whether it is new.
    pub fn add(&mut self, cut: Cut) -> bool {
        if self.last_known().map(Cut::sequence) >= Some(cut.sequence()) {
            return false;
        }
        if self.known.len() == MOST_KNOWN {
            // Drops every other cut, so that some of all ages stay.
            let mut keeps = false;
            self.known.retain(|_| {
                keeps = !keeps;
                keeps
            });
        }
        self.known.push_back(cut);
        true
    }

    /// Whether it knows a published cut that the horizon has not reached.
    pub(crate) fn is_behind(&self) -> bool {
        !self.known.is_empty()
    }

    /// The next horizon, if workers may have cuts with the number `least` or higher. `None`: the horizon
    /// stays as it is. All cuts were read before the workers' words were.
    pub fn next(&mut self, least: Option<u64>) -> Option<&Cut> {
        let most = R::horizon_up_to(least.unwrap_or(u64::MAX));
        let mut next = None;
        while self.known.front().is_some_and(|cut| cut.sequence() <= most) {
            next = self.known.pop_front();
        }
        self.horizon = Some(next?);
        self.horizon.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(number: u64) -> Cut {
        Cut::new(number, [number * 10].into())
    }

    #[test]
    fn the_horizon_is_the_last_known_cut_that_no_worker_is_behind() {
        let mut collector = Collector::<Shipped>::after(None);
        assert_eq!(collector.next(None), None, "nothing was published");
        let are_new = [3, 5, 5, 4, 8].map(|number| collector.add(cut(number)));
        assert_eq!(are_new, [true, true, false, false, true]);
        assert_eq!(collector.next(Some(2)), None);
        assert_eq!(collector.next(Some(7)), Some(&cut(5)));
        assert_eq!(collector.next(Some(7)), None, "it is the same");
        assert_eq!(collector.next(Some(0)), None, "it does not go back");
        assert_eq!(collector.next(None), Some(&cut(8)));
        collector.add(cut(8));
        assert_eq!(collector.next(None), None);
    }

    #[test]
    fn a_collector_goes_on_from_the_horizon_of_the_one_before() {
        let mut collector = Collector::<Shipped>::after(Some(cut(9)));
        collector.add(cut(7));
        assert_eq!(collector.next(None), None);
        assert_eq!(collector.horizon(), Some(&cut(9)));
    }

    proptest! {
        /// For any number of cuts, and snapshots of any age.
        #[test]
        fn the_horizon_only_grows_and_no_worker_is_behind_it(steps in prop::collection::vec((any::<bool>(), 0..300_u64), 0..400)) {
            let mut collector = Collector::<Shipped>::after(None);
            let mut published = 0;
            for (is_published, number) in steps {
                if is_published {
                    published += 1 + number % 3;
                    collector.add(cut(published));
                } else {
                    let before = collector.horizon().map(Cut::sequence);
                    if let Some(next) = collector.next(Some(number)).map(Cut::sequence) {
                        prop_assert!(next <= number && before < Some(next));
                    }
                    prop_assert!(collector.known.len() <= MOST_KNOWN);
                }
            }
            collector.next(None);
            prop_assert_eq!(collector.horizon().map_or(0, Cut::sequence), published);
        }
    }
}
