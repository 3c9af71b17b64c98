//! Who makes cuts.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::cut::Cut;
use crate::rules::{Rules, Shipped};

/// Makes the cuts of one oracle. There is one at a time.
#[derive(Debug)]
pub struct Publisher<R = Shipped> {
    last: Cut,
    rules: PhantomData<R>,
}

impl<R: Rules> Publisher<R> {
    /// Goes on from the last cut that was published: by whoever was the publisher before, or [`Cut::first`].
    pub fn after(last: Cut) -> Self {
        Publisher { last, rules: PhantomData }
    }

    /// The cut published last.
    pub fn last(&self) -> &Cut {
        &self.last
    }

    /// What to publish, one after the other, behind a cut over whose successor somebody has died: parts of
    /// that may be there, or all of it, and somebody may have seen it. So nothing else gets its number. The
    /// first goes to the same image, and has no less.
    pub fn after_torn(&mut self, words: &[u64]) -> [Cut; 2] {
        let counts: Arc<[u64]> = R::next_counts(self.last.counts(), words).into();
        let number = self.last.sequence();
        self.last = Cut::new(number + 4, counts.clone());
        [Cut::new(number + 3, counts), self.last.clone()]
    }

    /// The next cut, from the slots' words, each read once and after the cut before was made; `None` if
    /// nothing was committed since.
    pub fn next(&mut self, words: &[u64]) -> Option<&Cut> {
        let before = self.last.counts();
        debug_assert_eq!(words.len(), before.len(), "a board has as many slots as its cuts");
        let counts = R::next_counts(before, words);
        if counts == before {
            return None;
        }
        self.last = Cut::new(self.last.sequence() + 1, counts.into());
        Some(&self.last)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_new_makes_no_cut() {
        let mut publisher = Publisher::<Shipped>::after(Cut::first(2));
        assert_eq!(publisher.next(&[0, 0]), None);
        assert_eq!(publisher.next(&[0, 1]).map(Cut::sequence), Some(1));
        assert_eq!(publisher.next(&[0, 1]), None);
    }

    #[test]
    fn behind_a_cut_that_is_torn_come_two_that_have_no_less_and_the_first_is_where_that_was() {
        let mut publisher = Publisher::<Shipped>::after(Cut::new(6, [1, 5].into()));
        let cuts = publisher.after_torn(&[2, 4]);
        assert_eq!(cuts, [Cut::new(9, [2, 5].into()), Cut::new(10, [2, 5].into())]);
        assert_eq!(publisher.last(), &cuts[1]);
    }

    proptest! {
        /// Whatever a scan finds, also where it finds less than one before.
        #[test]
        fn each_cut_reaches_all_before_it(scans in prop::collection::vec(prop::array::uniform4(0..50_u64), 1..40)) {
            let mut publisher = Publisher::<Shipped>::after(Cut::first(4));
            let mut published = vec![publisher.last().clone()];
            for words in scans {
                if let Some(cut) = publisher.next(&words) {
                    prop_assert!(published.iter().all(|before| cut.reaches(before) && before.sequence() < cut.sequence()));
                    prop_assert!(words.iter().zip(cut.counts()).all(|(word, count)| word <= count));
                    published.push(cut.clone());
                }
            }
        }
    }
}
