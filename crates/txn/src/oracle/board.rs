//! The layout of an oracle in far memory (`docs/src/wire.md`, *the oracle's board*).

use std::ops::Range;

use farpool_wire::Slot;

use super::images::{Image, Images, words};
use crate::cut::Cut;

const WORD_BYTES: usize = 8;

/// The layout of an oracle: a word for each slot, then two images of cuts. The publisher writes cut *n* to
/// image *n mod 2*, so that the image of the cut before stays whole meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Board {
    slots: usize,
}

impl Board {
    /// The board of an oracle with this many slots, from 1 to [`Slot::MOST`].
    pub fn new(slots: u16) -> Option<Board> {
        (1..=Slot::MOST).contains(&slots).then_some(Board { slots: slots.into() })
    }

    /// How many slots it has.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Bytes of the whole board. It starts at a multiple of eight.
    pub fn bytes(&self) -> usize {
        self.images().end
    }

    /// The place of the slots' words, which the publisher reads.
    pub fn words(&self) -> Range<usize> {
        0..self.slots * WORD_BYTES
    }

    /// The place of a slot's word, its watermark. `None`: this oracle has no such slot.
    pub fn word(&self, slot: Slot) -> Option<usize> {
        (slot.index() < self.slots).then_some(slot.index() * WORD_BYTES)
    }

    /// The place of both images, which a transaction reads to begin.
    pub fn images(&self) -> Range<usize> {
        self.both_images().range()
    }

    /// The place of a cut's image.
    pub fn image(&self, sequence: u64) -> Range<usize> {
        self.both_images().image((sequence % 2) as usize)
    }

    fn both_images(&self) -> Images {
        Images::new(self.words().end, self.slots)
    }

    /// Decodes the words in bytes that were read from [`words`](Self::words).
    pub fn decode_words(&self, bytes: &[u8]) -> Option<Vec<u64>> {
        (bytes.len() == self.words().len()).then(|| words(bytes).collect())
    }

    /// Encodes the image of a cut of this oracle.
    pub fn encode(&self, cut: &Cut) -> Vec<u8> {
        self.both_images().encode(cut)
    }

    /// The later of the cuts in bytes that were read from [`images`](Self::images). `None`: nothing was
    /// published yet, or both were being replaced while they were read.
    pub fn decode(&self, bytes: &[u8]) -> Option<Cut> {
        self.find(bytes).map(|found| found.cut)
    }

    /// The same, with whether no later cut was published when the READ began.
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<Image> {
        self.both_images().decode(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn layout_of_the_board_is_fixed() {
        let board = Board::new(3).unwrap();
        assert_eq!((board.words(), board.images(), board.bytes()), (0..24, 24..104, 104));
        assert_eq!((board.image(6), board.image(7)), (24..64, 64..104));
        assert_eq!(board.word(Slot::new(2).unwrap()), Some(16));
        assert_eq!(board.word(Slot::new(3).unwrap()), None);
        let image = board.encode(&Cut::new(7, [1, 2, 3].into()));
        let words: Vec<u64> = words(&image).collect();
        assert_eq!(words, [7, 1, 2, 3, 0xE3D1_562B_7F85_4C15]);
        assert!(Board::new(0).is_none() && Board::new(Slot::MOST + 1).is_none());
    }

    #[test]
    fn memory_that_is_all_zeros_holds_no_cut() {
        let board = Board::new(5).unwrap();
        assert_eq!(board.decode(&vec![0; board.images().len()]), None);
        assert_eq!(board.decode(&[]), None);
    }

    #[test]
    fn a_cut_beside_one_that_is_being_replaced_may_not_be_the_latest() {
        let board = Board::new(1).unwrap();
        let image = |number| board.encode(&Cut::new(number, [number].into()));
        // When the READ began, cuts 2 and 3 were there. It found 2; then 4 was published, and 5 was begun
        // over 3.
        let torn = [&image(5)[..8], &image(3)[8..]].concat();
        let seen = [image(2), torn].concat();
        let found = |bytes: &[u8]| board.find(bytes).map(|found| (found.cut.sequence(), found.is_latest));
        assert_eq!(found(&seen), Some((2, false)));
        assert_eq!(found(&[image(2), image(1)].concat()), Some((2, true)));
        assert_eq!(found(&[image(2), image(3)].concat()), Some((3, true)));
        assert_eq!(found(&[image(2), vec![0; image(1).len()]].concat()), Some((2, true)));
        assert_eq!(found(&[image(4), image(1)].concat()), Some((4, false)), "3 was there before 4");
    }

    proptest! {
        /// Cuts are published one after another into memory that a READ fetches meanwhile: each word as it
        /// was at any time since the READ began, in any order.
        #[test]
        fn a_read_while_cuts_are_published_finds_one_of_them_or_nothing(
            counts in prop::collection::vec(prop::array::uniform3(any::<u64>()), 1..6),
            from in any::<prop::sample::Index>(),
            ages in prop::collection::vec(any::<prop::sample::Index>(), 10),
        ) {
            let board = Board::new(3).unwrap();
            let mut memory = vec![0; board.bytes()];
            let (mut cuts, mut states) = (Vec::new(), vec![memory.clone()]);
            for (number, counts) in counts.iter().enumerate() {
                let cut = Cut::new(number as u64 + 1, Arc::from(*counts));
                memory[board.image(cut.sequence())].copy_from_slice(&board.encode(&cut));
                states.push(memory.clone());
                cuts.push(cut);
            }
            let from = from.index(states.len());
            let seen: Vec<u8> = ages.iter().enumerate().flat_map(|(word, age)| {
                let state = &states[from + age.index(states.len() - from)];
                let start = board.images().start + word * WORD_BYTES;
                state[start..start + WORD_BYTES].to_vec()
            }).collect();
            match board.decode(&seen) {
                None => prop_assert!(from == 0 || states.len() - from > 2, "one image stands still while the other is written"),
                Some(cut) => prop_assert!(cuts.contains(&cut) && cut.sequence() + 1 >= from as u64),
            }
            if let Some(latest) = board.find(&seen).filter(|found| found.is_latest) {
                prop_assert!(latest.cut.sequence() >= from as u64);
            }
            let at_rest = board.find(&memory[board.images()]).filter(|found| found.is_latest);
            prop_assert_eq!(at_rest.as_ref().map(|found| &found.cut), cuts.last());
        }
    }
}
