//! What a client remembers of an index's leaves. Never wrong, only incomplete: a leaf stays for what it is,
//! or leads to those that have replaced it (T5).

use std::collections::BTreeMap;

use super::leaf::Rank;

/// Most leaves that a client remembers: up to about a hundred megabytes for each level of an index, with the
/// longest keys.
const MOST: usize = 1 << 18;
/// The leaf with which an index begins.
pub(super) const FIRST_LEAF: u64 = 0;

/// Leaves by their low fences.
#[derive(Clone, Default)]
pub(super) struct Known {
    /// The leaf for the lowest ranks.
    lowest: Option<u64>,
    others: BTreeMap<Rank, u64>,
}

impl Known {
    /// The leaf in which the search for a rank begins.
    pub(super) fn at(&self, rank: &Rank) -> u64 {
        self.found(self.others.range(..=rank).next_back())
    }

    /// The leaf in which the search for the highest ranks below `end` begins; `None`: for the highest of all.
    pub(super) fn below(&self, end: Option<&Rank>) -> u64 {
        match end {
            Some(end) => self.found(self.others.range(..end).next_back()),
            None => self.found(self.others.last_key_value()),
        }
    }

    fn found(&self, other: Option<(&Rank, &u64)>) -> u64 {
        other.map(|(_, leaf)| *leaf).or(self.lowest).unwrap_or(FIRST_LEAF)
    }

    /// The ranks from this one on begin in this leaf; `None`: the lowest ranks.
    pub(super) fn note(&mut self, low: Option<Rank>, leaf: u64) {
        match low {
            None => self.lowest = Some(leaf),
            Some(low) if self.others.len() < MOST || self.others.contains_key(&low) => {
                self.others.insert(low, leaf);
            }
            // Forgets all of them, which is simpler than choosing some. Hints lead to the current leaves
            // again.
            Some(_) => self.others.clear(),
        }
    }

    /// The same, if nothing is known of these ranks.
    pub(super) fn note_unless_known(&mut self, low: Option<Rank>, leaf: u64) {
        if low.as_ref().is_some_and(|low| !self.others.contains_key(low)) {
            self.note(low, leaf);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(key: u8, number: u64) -> Rank {
        Rank::new(&[key], number)
    }

    #[test]
    fn a_search_begins_at_the_last_leaf_that_is_known_not_to_be_too_high() {
        let mut known = Known::default();
        assert_eq!((known.at(&rank(5, 0)), known.below(None)), (0, 0));
        known.note(None, 1);
        known.note(Some(rank(3, 7)), 2);
        known.note(Some(rank(6, 0)), 3);
        assert_eq!(
            [rank(3, 6), rank(3, 7), rank(5, 9), rank(6, 0)].map(|rank| known.at(&rank)),
            [1, 2, 2, 3]
        );
        assert_eq!([rank(3, 7), rank(3, 8), rank(6, 0)].map(|rank| known.below(Some(&rank))), [1, 2, 2]);
        assert_eq!(known.below(None), 3);
        known.note(Some(rank(3, 7)), 9);
        assert_eq!(known.at(&rank(4, 0)), 9);
        known.note_unless_known(Some(rank(3, 7)), 4);
        known.note_unless_known(Some(rank(3, 9)), 5);
        assert_eq!([rank(3, 8), rank(4, 0)].map(|rank| known.at(&rank)), [9, 5]);
    }

    #[test]
    fn what_is_remembered_is_limited() {
        let mut known = Known::default();
        known.note(None, 1);
        for number in 0..=MOST as u64 {
            known.note(Some(rank(1, number)), number);
        }
        assert!(known.others.is_empty() && known.at(&rank(1, 5)) == 1);
    }
}
