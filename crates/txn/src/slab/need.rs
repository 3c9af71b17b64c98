//! Decides whether a snapshot may need a block of a slab, by the record that the block was written for. Pure.
//!
//! Callers see to two things. The transaction that wrote the block has finished. And the horizon was read
//! first, then the record's current version, then versions before it.

use super::layout::BlockAt;
use super::payload::Held;
use crate::cut::Cut;
use crate::record::{FoundVersion, Label};

/// What a record's current version says of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Need {
    /// A snapshot may need it.
    Needed,
    /// No snapshot needs it, now or ever.
    Free,
    /// It is needed unless all snapshots see a version between that of the block and the current one.
    UnlessReplaced,
}

/// What is known of a block that was written for version `number` of a record whose current version was
/// found. If that has words of several versions, nothing is known, and the block counts as needed.
pub(super) fn need_of((at, number): (BlockAt, u64), current: &FoundVersion<'_>, horizon: &Cut) -> Need {
    if !current.is_right {
        return Need::Needed;
    }
    if current.label.number < number {
        // If that version had been committed, the current version would have its number or a later one.
        return Need::Free;
    }
    if current.label.number == number {
        // If another version has its number, that version was not committed.
        return if Held::block_of(current.data) == Some(at) { Need::Needed } else { Need::Free };
    }
    if horizon.sees(current.label.version()) { Need::Free } else { Need::UnlessReplaced }
}

/// Whether all snapshots see a version after that of a block, by one of the versions before the current one.
/// They are looked at from the latest on. `None`: it depends on earlier ones.
pub(super) fn is_replaced_for_all(number: u64, version: &Label, horizon: &Cut) -> Option<bool> {
    if version.number <= number {
        return Some(false);
    }
    horizon.sees(version.version()).then_some(true)
}

#[cfg(test)]
mod tests {
    use farpool_wire::{RecordHeader, Slot, Version};
    use proptest::prelude::*;

    use super::super::layout::Class;
    use super::super::payload::Pointer;
    use super::*;
    use crate::log::Link;

    fn at(block: u32) -> BlockAt {
        BlockAt { chunk: 1, class: Class::of(1).unwrap(), block }
    }

    fn label(number: u64, count: u64) -> Label {
        let header = RecordHeader::of(Version::new(Slot::new(0).unwrap(), count).unwrap());
        Label { header, number, link: Link::NONE }
    }

    fn horizon(count: u64) -> Cut {
        Cut::new(count, [count].into())
    }

    fn data_of(block: u32) -> Vec<u8> {
        Held::There(Pointer { at: at(block), length: 1, sum: 0 }).encode(24)
    }

    /// Of block `block`, written for version `number`, if version 5 is the current one and points to block 7.
    fn need(block: u32, number: u64, seen: u64, is_right: bool) -> Need {
        let current = FoundVersion { label: label(5, 50), data: &data_of(7), is_right };
        need_of((at(block), number), &current, &horizon(seen))
    }

    /// The versions of a record, each with its count and its block. The last one is the current one.
    struct Record(Vec<(u64, u32)>);

    impl Record {
        fn is_needed(&self, block: u32, number: u64, horizon: &Cut) -> bool {
            let labels = (0..).zip(&self.0).map(|(number, &(count, _))| label(number, count));
            let labels: Vec<Label> = labels.collect();
            let (current, before) = labels.split_last().unwrap();
            let data = data_of(self.0.last().unwrap().1);
            let current = FoundVersion { label: *current, data: &data, is_right: true };
            match need_of((at(block), number), &current, horizon) {
                Need::Needed => true,
                Need::Free => false,
                Need::UnlessReplaced => {
                    let mut answers =
                        before.iter().rev().map(|label| is_replaced_for_all(number, label, horizon));
                    answers.find_map(|answer| answer) != Some(true)
                }
            }
        }
    }

    #[test]
    fn a_block_is_needed_for_the_current_version_and_until_all_see_a_later_one_than_its_own() {
        assert_eq!(need(7, 5, 99, true), Need::Needed);
        assert_eq!(need(8, 5, 0, true), Need::Free, "another has its number");
        assert_eq!(need(8, 6, 0, true), Need::Free, "there is none of its number");
        assert_eq!([49, 50].map(|horizon| need(8, 4, horizon, true)), [Need::UnlessReplaced, Need::Free]);
        assert_eq!(need(8, 4, 99, false), Need::Needed, "words of several versions");
    }

    proptest! {
        /// Versions are installed, some are rolled back, and the horizon advances over those that stay.
        #[test]
        fn versions_that_a_snapshot_may_see_keep_their_blocks_and_all_others_become_free(
            steps in prop::collection::vec(0..4_u8, 0..120),
        ) {
            let mut record = Record(vec![(0, 0)]);
            let (mut undone, mut seen, mut count) = (Vec::new(), 0, 0);
            for step in steps {
                match step {
                    0 | 1 => {
                        count += 1;
                        record.0.push((count, count as u32));
                    }
                    2 => seen = count.min(seen + 1),
                    _ => seen = count,
                }
                let horizon = horizon(seen);
                // A commit that is rolled back has not finished yet: the answers for blocks of others must be
                // right all the same.
                let committed = record.0.len() - usize::from(step == 1);
                let first = (0..committed).rfind(|&number| record.0[number].0 <= seen).unwrap_or(0);
                for number in first..committed {
                    prop_assert!(record.is_needed(record.0[number].1, number as u64, &horizon));
                }
                if step == 1 {
                    undone.push((record.0.len() as u64 - 1, record.0.pop().unwrap().1));
                }
                for number in 0..first {
                    prop_assert!(!record.is_needed(record.0[number].1, number as u64, &horizon));
                }
                for &(number, block) in undone.iter().filter(|(number, _)| *number + 1 >= record.0.len() as u64) {
                    prop_assert!(!record.is_needed(block, number, &horizon));
                }
            }
        }
    }
}
