//! Decides whether a snapshot may need a block of a slab, by the record that the block was written for. Pure.
//!
//! Callers see to two things. The transaction that wrote the block has finished. And the horizon was read
//! first, then the record's current version, then the record's ring.

use super::layout::BlockAt;
use super::payload::Held;
use crate::cut::Cut;
use crate::record::{FoundVersion, Ring};
use crate::rules::Rules;

/// Whether a snapshot may need a block that was written for version `number` of a record. The record was read
/// as `current` and then `ring`. If `current` has words of several versions, nothing is known, and the answer
/// is yes.
pub(super) fn is_needed<R: Rules>(
    (at, number): (BlockAt, u64),
    current: &FoundVersion<'_>,
    ring: Option<&Ring>,
    horizon: &Cut,
) -> bool {
    if !current.is_right {
        return true;
    }
    if current.number < number {
        // If that version had been committed, the current version would have its number or a later one.
        return false;
    }
    if current.number == number {
        // If another version has its number, that version was not committed.
        return Held::block_of(current.data) == Some(at);
    }
    // The block is needed unless all snapshots see a later version.
    let is_seen = |version| horizon.sees(version);
    let in_ring = ring.into_iter().flat_map(|ring| ring.behind(number, current.number));
    let is_replaced_for_all =
        is_seen(current.header.version()) || in_ring.map(|it| it.version()).any(is_seen);
    !R::frees_block(is_replaced_for_all)
}

#[cfg(test)]
mod tests {
    use farpool_wire::{RecordHeader, Slot, Version};
    use proptest::prelude::*;

    use super::super::layout::Class;
    use super::super::payload::Pointer;
    use super::*;
    use crate::record::{NumberedHeader, RecordId, RecordLayout};
    use crate::rules::Shipped;

    const RECORD: RecordId = RecordId(5);
    const DATA_BYTES: usize = 24;

    fn at(block: u32) -> BlockAt {
        BlockAt { chunk: 1, class: Class::of(1).unwrap(), block }
    }

    fn header(count: u64) -> RecordHeader {
        RecordHeader::of(Version::new(Slot::new(0).unwrap(), count).unwrap())
    }

    fn horizon(count: u64) -> Cut {
        Cut::new(count, [count].into())
    }

    /// A record in far memory, with the block that each version points to.
    struct Record {
        layout: RecordLayout,
        current: (NumberedHeader, u32),
        ring: Vec<u64>,
    }

    impl Record {
        fn new(places: usize) -> Record {
            let layout = RecordLayout::new(1, DATA_BYTES, places).unwrap();
            let first = NumberedHeader { number: 0, header: header(0) };
            Record { layout, current: (first, 0), ring: vec![0; places + 1] }
        }

        /// Keeps the current version in the ring, and installs this one.
        fn install(&mut self, count: u64, block: u32) {
            let (old, _) = self.current;
            let places = self.ring.len() as u64 - 1;
            self.ring[1 + (old.number % places) as usize] = old.header.0;
            self.ring[0] = old.number + 1;
            self.current = (NumberedHeader { number: old.number + 1, header: header(count) }, block);
        }

        fn is_needed(&self, block: u32, number: u64, horizon: &Cut) -> bool {
            let data = Held::There(Pointer { at: at(self.current.1), length: 1, sum: 0 }).encode(DATA_BYTES);
            let body = self.layout.encode_body(RECORD, self.current.0, &data);
            let current = self.layout.decode_body(RECORD, &body).unwrap();
            let ring: Vec<u8> = self.ring.iter().flat_map(|word| word.to_le_bytes()).collect();
            let ring = self.layout.decode_ring(&ring).unwrap();
            is_needed::<Shipped>((at(block), number), &current, Some(&ring), horizon)
        }
    }

    #[test]
    fn the_block_of_the_current_version_is_needed_and_that_of_a_version_never_committed_is_not() {
        let mut record = Record::new(2);
        record.install(1, 7);
        let all = horizon(9);
        assert!(record.is_needed(7, 1, &all));
        assert!(!record.is_needed(8, 1, &all), "another has its number");
        assert!(!record.is_needed(8, 2, &all), "there is none of its number");
    }

    #[test]
    fn the_block_of_a_version_that_was_replaced_is_needed_until_all_see_a_later_one() {
        let mut record = Record::new(1);
        (1..=4).for_each(|count| record.install(count, count as u32));
        assert!(record.is_needed(1, 1, &horizon(2)), "that all see number 2 is not known any more");
        assert!(!record.is_needed(1, 1, &horizon(3)) && !record.is_needed(2, 2, &horizon(3)));
        assert!(record.is_needed(3, 3, &horizon(3)) && !record.is_needed(3, 3, &horizon(4)));
    }

    #[test]
    fn nothing_is_known_from_words_of_several_versions() {
        let layout = RecordLayout::new(1, DATA_BYTES, 1).unwrap();
        let mut body = layout.encode_body(RECORD, NumberedHeader { number: 9, header: header(1) }, &[0; 24]);
        body[30] ^= 1;
        let found = layout.decode_body(RECORD, &body).unwrap();
        assert!(is_needed::<Shipped>((at(1), 1), &found, None, &horizon(9)));
    }

    proptest! {
        /// Versions are installed, some are rolled back, and the horizon advances over those that stay.
        #[test]
        fn versions_that_a_snapshot_may_see_keep_their_blocks_and_all_others_become_free(
            places in 1..5_usize, steps in prop::collection::vec(0..4_u8, 0..120),
        ) {
            let mut record = Record::new(places);
            // Number, count and block of committed versions; then number and block of those rolled back.
            let (mut committed, mut undone) = (vec![(0, 0, 0)], Vec::new());
            let (mut seen, mut count, mut block) = (0, 0, 0);
            for step in steps {
                match step {
                    0 | 1 => {
                        (count, block) = (count + 1, block + 1);
                        let before = record.current;
                        record.install(count, block);
                        let number = record.current.0.number;
                        if step == 0 {
                            committed.push((number, count, block));
                        } else {
                            // The commit has not finished yet. The answers for blocks of others must be right
                            // all the same.
                            for &(of, _, block) in needed(&committed, seen) {
                                prop_assert!(record.is_needed(block, of, &horizon(seen)));
                            }
                            record.current = before;
                            undone.push((number, block));
                        }
                    }
                    2 => seen = count.min(seen + 1),
                    _ => seen = count,
                }
                let horizon = horizon(seen);
                for &(number, _, block) in needed(&committed, seen) {
                    prop_assert!(record.is_needed(block, number, &horizon), "{} of {:?}", number, committed);
                }
                if seen == count {
                    for &(number, _, block) in &committed[..committed.len() - 1] {
                        prop_assert!(!record.is_needed(block, number, &horizon));
                    }
                }
                for &(number, block) in undone.iter().filter(|(number, _)| *number >= record.current.0.number) {
                    prop_assert!(!record.is_needed(block, number, &horizon));
                }
            }
        }
    }

    /// The last version that the horizon sees, and later ones.
    fn needed(committed: &[(u64, u64, u32)], seen: u64) -> &[(u64, u64, u32)] {
        let last = committed.iter().rposition(|(_, count, _)| *count <= seen).unwrap_or(0);
        &committed[last..]
    }
}
