//! The publisher's rule for making cuts.

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
    /// Goes on from the last cut that the previous publisher published, or from [`Cut::first`].
    pub fn after(last: Cut) -> Self {
        Publisher { last, rules: PhantomData }
    }

    /// The cut published last.
    pub fn last(&self) -> &Cut {
        &self.last
    }

    /// Two cuts to publish, one after the other, if a publisher has died while it wrote the successor of the
    /// last whole cut. Parts of that successor may be there, or all of it, and a client may have seen it. So
    /// no other cut gets its number. The first of the two goes to the same image, and sees at least as much.
    pub fn after_torn(&mut self, words: &[u64]) -> [Cut; 2] {
        let counts: Arc<[u64]> = R::next_counts(self.last.counts(), words).into();
        let number = self.last.sequence();
        self.last = Cut::new(number + 4, counts.clone());
        [Cut::new(number + 3, counts), self.last.clone()]
    }

    /// The next cut, from the slots' words. Each was read once, after the cut before was made. `None`:
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
    fn no_cut_is_made_without_a_new_commit() {
        let mut publisher = Publisher::<Shipped>::after(Cut::first(2));
        assert_eq!(publisher.next(&[0, 0]), None);
        assert_eq!(publisher.next(&[0, 1]).map(Cut::sequence), Some(1));
        assert_eq!(publisher.next(&[0, 1]), None);
    }

    #[test]
    fn after_a_torn_cut_two_cuts_follow_that_see_no_less_and_the_first_replaces_it() {
        let mut publisher = Publisher::<Shipped>::after(Cut::new(6, [1, 5].into()));
        let cuts = publisher.after_torn(&[2, 4]);
        assert_eq!(cuts, [Cut::new(9, [2, 5].into()), Cut::new(10, [2, 5].into())]);
        assert_eq!(publisher.last(), &cuts[1]);
    }

    proptest! {
        /// Scans may find any words, even lower ones than an earlier scan.
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
