//! The versions in the overflow region of a piece.

use std::collections::{BTreeMap, VecDeque};

use farpool_wire::RecordHeader;

use crate::cut::Cut;
use crate::record::NumberedHeader;

/// The contents of a piece's entries.
#[derive(Debug)]
pub(super) struct Chains {
    /// The chain of each record, by its place in the piece. No chain is empty.
    chains: BTreeMap<u64, VecDeque<Moved>>,
    free: Vec<u64>,
}

/// A version that was moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Moved {
    pub(super) entry: u64,
    pub(super) named: NumberedHeader,
}

/// The answer to a request to move a version.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Push {
    /// It goes to this entry. `before` is the entry of the version before it, unless no snapshot needs that
    /// one.
    At { entry: u64, before: Option<u64> },
    /// There is no room.
    Full,
    /// Not now: earlier versions have to be moved first.
    NotYet,
}

impl Chains {
    /// Chains of a region with this many entries. `found` are the chains that lie there, each from its latest
    /// version on.
    pub(super) fn new(entries: u64, found: impl IntoIterator<Item = (u64, Vec<Moved>)>) -> Chains {
        let chains: BTreeMap<u64, VecDeque<Moved>> =
            found.into_iter().map(|(index, chain)| (index, chain.into())).collect();
        let chains: BTreeMap<_, _> = chains.into_iter().filter(|(_, chain)| !chain.is_empty()).collect();
        let mut is_used = vec![false; entries as usize];
        chains.values().flatten().for_each(|moved| is_used[moved.entry as usize] = true);
        let free = (0..entries).rev().filter(|&entry| !is_used[entry as usize]).collect();
        Chains { chains, free }
    }

    /// Whether the region has no version.
    pub(super) fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    /// Whether the region has any version of a record.
    pub(super) fn has_any(&self, index: u64) -> bool {
        self.chains.contains_key(&index)
    }

    /// Whether the region has this version of a record.
    pub(super) fn has(&self, index: u64, named: NumberedHeader) -> bool {
        let mut chain = self.chains.get(&index).into_iter().flatten();
        chain.any(|moved| {
            moved.named.number == named.number && moved.named.header.version() == named.header.version()
        })
    }

    /// Takes room for a version of a record (M1).
    pub(super) fn push(&mut self, index: u64, named: NumberedHeader, horizon: &Cut) -> Push {
        let last = self.chains.get(&index).and_then(VecDeque::front).copied();
        let follows = match last {
            Some(last) => named.number.checked_sub(1) == Some(last.named.number),
            None => named.number == 0,
        };
        let is_later = last.is_none_or(|last| last.named.number < named.number);
        let is_first = horizon.sees(named.header.version());
        if !is_later || !(follows || is_first) {
            return Push::NotYet;
        }
        if is_first {
            self.give_up(index);
        }
        let Some(entry) = self.free.pop() else { return Push::Full };
        let before = last.filter(|_| !is_first).map(|last| last.entry);
        self.chains.entry(index).or_default().push_front(Moved { entry, named });
        Push::At { entry, before }
    }

    /// Gives up the entries of a record that no snapshot needs any more (M3). `current` is the record's
    /// current version, if that is known.
    pub(super) fn collect(&mut self, index: u64, current: Option<RecordHeader>, horizon: &Cut) {
        let Some(chain) = self.chains.get_mut(&index) else { return };
        let last = chain.front().expect("a chain has a version").named.header.version();
        // If both are the same, a commit that had replaced this version was rolled back.
        if current.is_some_and(|current| current.version() != last && horizon.sees(current.version())) {
            return self.give_up(index);
        }
        while chain.len() > 1 && horizon.sees(chain[chain.len() - 2].named.header.version()) {
            self.free.extend(chain.pop_back().map(|moved| moved.entry));
        }
    }

    fn give_up(&mut self, index: u64) {
        self.free.extend(self.chains.remove(&index).into_iter().flatten().map(|moved| moved.entry));
    }
}

#[cfg(test)]
mod tests {
    use farpool_wire::{Slot, Version};
    use proptest::prelude::*;

    use super::*;

    /// Number *n* is commit *n* of slot 0.
    fn named(number: u64) -> NumberedHeader {
        let version = Version::new(Slot::new(0).unwrap(), number).unwrap();
        NumberedHeader { number, header: RecordHeader::of(version) }
    }

    fn horizon(count: u64) -> Cut {
        Cut::new(count, [count].into())
    }

    #[test]
    fn versions_are_moved_in_their_order() {
        let mut chains = Chains::new(3, []);
        let seen = horizon(4);
        assert_eq!(chains.push(1, named(6), &seen), Push::NotYet, "number 5 may be needed");
        assert_eq!(chains.push(1, named(4), &seen), Push::At { entry: 0, before: None });
        assert_eq!(chains.push(1, named(4), &seen), Push::NotYet, "it is there");
        assert_eq!(chains.push(1, named(5), &seen), Push::At { entry: 1, before: Some(0) });
        assert_eq!(chains.push(2, named(0), &horizon(0)), Push::At { entry: 2, before: None });
        assert_eq!(chains.push(1, named(6), &seen), Push::Full);
        assert!(chains.has(1, named(4)) && chains.has(1, named(5)) && !chains.has(1, named(6)));
        assert!(!chains.has(2, named(4)) && chains.has_any(2) && !chains.has_any(3));
    }

    #[test]
    fn versions_that_the_horizon_sees_replaced_are_given_up() {
        let found = (1..=3).map(|number| Moved { entry: number, named: named(number) }).rev().collect();
        let mut chains = Chains::new(4, [(7, found)]);
        chains.collect(7, None, &horizon(1));
        assert_eq!(chains.free, [0]);
        chains.collect(7, Some(named(4).header), &horizon(2));
        assert_eq!(chains.free, [0, 1]);
        chains.collect(7, Some(named(3).header), &horizon(3));
        assert_eq!((&chains.free[..], chains.has_any(7)), (&[0, 1, 2][..], true));
        chains.collect(7, Some(named(4).header), &horizon(4));
        assert_eq!((&chains.free[..], chains.has_any(7)), (&[0, 1, 2, 3][..], false));
    }

    #[test]
    fn a_version_that_the_horizon_sees_begins_a_chain_anew() {
        let mut chains = Chains::new(3, [(7, vec![Moved { entry: 1, named: named(3) }])]);
        assert_eq!(chains.push(7, named(9), &horizon(9)), Push::At { entry: 1, before: None });
        assert_eq!(chains.push(7, named(10), &horizon(9)), Push::At { entry: 0, before: Some(1) });
    }

    proptest! {
        /// Versions are written and moved, and the horizon advances after them.
        #[test]
        fn every_moved_version_that_is_needed_is_there(steps in prop::collection::vec(0..4_u8, 0..300)) {
            let (mut chains, mut seen, mut moved) = (Chains::new(6, []), 0, None);
            for step in steps {
                let next = moved.map_or(0, |moved| moved + 1);
                if step != 2 {
                    chains.collect(5, Some(named(next).header), &horizon(seen));
                }
                match step {
                    0 | 1 => match chains.push(5, named(next), &horizon(seen)) {
                        Push::At { .. } => moved = Some(next),
                        Push::Full => prop_assert!(next - seen >= 6),
                        Push::NotYet => prop_assert!(false, "it follows"),
                    },
                    2 => seen = next.min(seen + 1),
                    _ => {}
                }
                // Snapshots may need the last version that the horizon sees, and later ones.
                for number in seen..next {
                    prop_assert!(chains.has(5, named(number)), "{number} of {seen} to {moved:?}");
                }
                let used = chains.chains.values().map(VecDeque::len).sum::<usize>();
                prop_assert_eq!(used + chains.free.len(), 6);
            }
        }
    }
}
