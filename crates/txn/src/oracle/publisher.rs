//! Who makes cuts.

use std::marker::PhantomData;

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

    /// The next cut, from the slots' words, each read once and after the cut before was made; `None` if nothing was committed since.
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
