//! Witnesses of the words of blocks: which blocks of an extent have contents, and which are lost, stored on a
//! page of their own. Words that have outlived their writer are checked against them.
//!
//! A word with a checksum is checked against the block's contents whenever these are read. Two kinds of words
//! have no checksum: *empty*, which is all zeros like memory that was never written; and *locked*, after
//! which the bytes in the block's place count as its contents. These two are believed only if the witness
//! agrees.
//!
//! Z1. Each word of a witness carries a check of 31 bits that is bound to its place: zeros fail it, and so
//!     does the word of another extent.
//! Z2. The witness changes under the block's lock, before the block's word does.
//! Z3. So wherever a process is killed, [`believed`] finds word and witness consistent. If they are not, one
//!     of the two pages is not what was last stored there, and the block is lost: no bytes of it are
//!     returned.

use farpool_pool::Extent;
use farpool_wire::BlockWord;

use super::{BLOCKS_PER_EXTENT, BlockPlace, BlockWords, MAX_EXTENTS, WITNESSES, WORD_BYTES};
use crate::seal::{open, seal};

/// Bytes of an extent's witness: one word for contents, one for losses.
pub(super) const WITNESS_BYTES: u64 = 2 * WORD_BYTES;
/// A bit for each block, and one for [`DOUBT`].
const SAID_BITS: u32 = BLOCKS_PER_EXTENT as u32 + 1;
/// Beside the losses: a late write may still land on the extent.
const DOUBT: u64 = 1 << BLOCKS_PER_EXTENT;
/// The bits of blocks.
const BLOCKS: u64 = DOUBT - 1;

/// Bits that only words locked by direct clients (called *guests* in the code) have. Direct clients never
/// work on kept files.
const OF_GUESTS: u64 = 0b11 << 60;

/// The contents of a witness: two sets of blocks, a bit for each block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Testimony {
    contents: u64,
    losses: u64,
}

impl Testimony {
    /// Whether a block has contents, and whether it is lost.
    fn of(self, block: u64) -> (bool, bool) {
        (self.contents >> block & 1 == 1, self.losses >> block & 1 == 1)
    }

    /// The testimony that agrees with these words.
    fn beside(words: &[BlockWord]) -> Self {
        let bits = |is_such: fn(BlockWord) -> bool| {
            let such = words.iter().enumerate().filter(|(_, word)| is_such(word.unlocked()));
            such.fold(0, |bits, (block, _)| bits | 1 << block)
        };
        Testimony { contents: bits(|word| !word.is_empty()), losses: bits(BlockWord::is_lost) }
    }
}

/// The word to believe, given the word found and what the witness says of the block: (has contents, is lost).
fn believed(found: BlockWord, said: Option<(bool, bool)>) -> BlockWord {
    let plain = BlockWord(found.0 & !OF_GUESTS);
    if plain != found && !found.is_locked() {
        return plain.lost();
    }
    let found = plain;
    match said {
        // Without a witness only a checksum proves anything.
        None if found.is_empty() || found.is_locked() => found.lost(),
        None => found,
        Some((_, true)) if found.is_lost() => found,
        Some((_, true)) => found.lost(),
        // The block was empty, or was being emptied.
        Some((false, false)) if found.is_locked() => BlockWord::EMPTY.locked(),
        Some((false, false)) if found.is_empty() => found,
        Some((false, false)) => found.lost(),
        Some((true, false)) if found.is_empty() => found.lost(),
        // A first write was in progress: the block may have its contents.
        Some((true, false)) if found.was_empty() => BlockWord::EMPTY.written(0).locked(),
        Some((true, false)) => found,
    }
}

fn contents_at(number: u64) -> u64 {
    WITNESSES + number * WITNESS_BYTES
}

fn losses_at(number: u64) -> u64 {
    contents_at(number) + WORD_BYTES
}

impl BlockWords {
    /// Brings the witness up to date with the word that a block is about to get (Z2). Costs two loads, and
    /// stores only if the kind of word changes.
    pub(super) fn update_witness(&self, place: BlockPlace, next: BlockWord) {
        if self.memory.is_none() {
            return;
        }
        let index = place.0 / WORD_BYTES;
        let (number, bit) = (index / BLOCKS_PER_EXTENT, 1 << (index % BLOCKS_PER_EXTENT));
        let next = next.unlocked();
        let mut said = [(contents_at(number), !next.is_empty()), (losses_at(number), next.is_lost())];
        if next.is_lost() {
            said.reverse(); // a kill between the two stores must not leave the block with contents
        }
        for (at, holds) in said {
            self.update(at, |said| if holds { said | bit } else { said & !bit });
        }
    }

    /// Changes a word of a witness by compare-and-swap, because writers of other blocks of the extent change
    /// it, too.
    fn update(&self, at: u64, change: impl Fn(u64) -> u64) {
        let covered = "an extent of the table has a witness";
        let mut found = self.table.load(at).expect(covered);
        loop {
            let said = found & (BLOCKS | DOUBT);
            if change(said) == said {
                return;
            }
            let next = seal(at, change(said), SAID_BITS);
            let before = self.table.compare_and_swap(at, found, next).expect(covered);
            if before == found {
                return;
            }
            found = before;
        }
    }

    /// Stores the witness of an extent whose blocks are all empty.
    pub(super) fn begin_witness(&self, extent: &Extent) {
        self.store_testimony(extent.number(), Testimony { contents: 0, losses: 0 }, false);
    }

    fn store_testimony(&self, number: u64, said: Testimony, is_doubted: bool) {
        if self.memory.is_none() || self.is_abandoned() {
            return;
        }
        let losses = said.losses | if is_doubted { DOUBT } else { 0 };
        for (at, said) in [(contents_at(number), said.contents), (losses_at(number), losses)] {
            self.table.store(at, seal(at, said, SAID_BITS)).expect("an extent of the table has a witness");
        }
    }

    /// Records in the witness, too, that a write may still land on an extent.
    pub(super) fn witness_doubt(&self, extent: &Extent) {
        if self.memory.is_some() && !self.is_abandoned() {
            self.update(losses_at(extent.number()), |said| said | DOUBT);
        }
    }

    /// What the witness says, and whether a write may still land; `None`: the witness is damaged.
    fn testimony(&self, number: u64) -> Option<(Testimony, bool)> {
        let said = |at: u64| open(at, self.table.load(at).ok()?, SAID_BITS);
        let (contents, losses) = (said(contents_at(number))?, said(losses_at(number))?);
        let testimony = Testimony { contents: contents & BLOCKS, losses: losses & BLOCKS };
        Some((testimony, losses & DOUBT != 0))
    }

    /// Whether a dead owner's write may still land on the extent, as far as its witness tells. A damaged
    /// witness says yes. The witness of an extent that no file has ever had is all zeros, and says no.
    pub(super) fn is_witness_in_doubt(&self, number: u64) -> bool {
        if number >= MAX_EXTENTS {
            return false;
        }
        let is_new = [contents_at(number), losses_at(number)].iter().all(|at| self.table.load(*at) == Ok(0));
        !is_new && self.testimony(number).is_none_or(|(_, is_doubted)| is_doubted)
    }

    /// Compares the words that an earlier process has left of an extent with their witness, and marks those
    /// lost that cannot be believed. Returns how many. Call it before any other access to the extent.
    pub(crate) fn examine(&self, extent: &Extent) -> u64 {
        let number = extent.number();
        let testimony = self.testimony(number);
        let mut words = [BlockWord::EMPTY; BLOCKS_PER_EXTENT as usize];
        let mut disbelieved = 0;
        for (block, word) in (0..).zip(&mut words) {
            let place = self.place(extent, block);
            let found = self.load(place);
            *word = believed(found, testimony.map(|(said, _)| said.of(block)));
            if *word != found {
                disbelieved += u64::from(word.is_lost() && !found.is_lost());
                self.put(place, *word);
            }
        }
        let right = Testimony::beside(&words);
        if testimony.is_none_or(|(said, _)| said != right) {
            let is_doubted = testimony.is_none_or(|(_, is_doubted)| is_doubted);
            // Stored last: after a kill before this store, the next examination gives the same result.
            self.store_testimony(number, right, is_doubted);
        }
        disbelieved
    }
}

const _: () = assert!(SAID_BITS < u64::BITS - 16, "enough of a word is left for its check");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{extent, kept};
    use super::*;

    fn word() -> impl Strategy<Value = BlockWord> {
        let written = any::<(u64, u64)>().prop_map(|(before, crc)| BlockWord(before).unlocked().written(crc));
        prop_oneof![Just(BlockWord::EMPTY), written.clone(), written.prop_map(BlockWord::lost)]
    }

    /// What the witness says beside an unlocked word.
    fn said_of(word: BlockWord) -> (bool, bool) {
        (!word.is_empty(), word.is_lost())
    }

    proptest! {
        #[test]
        fn a_word_beside_its_witness_is_believed_wherever_its_writer_was_killed(before in word(), after in word()) {
            prop_assert_eq!(believed(before, Some(said_of(before))), before);
            // The block is locked. The witness has no part of the change yet, or half of it, or all.
            let ((had, was_lost), (has, is_lost)) = (said_of(before), said_of(after));
            let between = if is_lost { (had, is_lost) } else { (has, was_lost) };
            for said in [(had, was_lost), between, (has, is_lost)] {
                let word = believed(before.locked(), Some(said));
                // A block is lost only if it was lost, or was becoming lost.
                prop_assert!(!word.is_lost() || before.is_lost() || after.is_lost());
                // The bytes in a block's place count as its contents only if it had contents, or was getting
                // them.
                let is_stored = |word: BlockWord| !word.is_empty() && !word.is_lost();
                let is_taken = word.is_locked() && !word.was_empty() && !word.is_lost();
                prop_assert!(!is_taken || is_stored(before) || is_stored(after), "{:?}", said);
            }
        }

        #[test]
        fn an_arbitrary_word_yields_no_wrong_bytes(truth in word(), found: u64) {
            let found = BlockWord(found);
            for found in [found, BlockWord::EMPTY, BlockWord::EMPTY.locked(), found.unlocked(), found.locked()] {
                let word = believed(found, Some(said_of(truth)));
                if word.is_empty() || word.was_empty() {
                    prop_assert!(truth.is_empty(), "{:?} reads as zeros", truth);
                } else if word.is_locked() && !word.is_lost() {
                    prop_assert!(!truth.is_empty() && !truth.is_lost(), "{:?} reads as the bytes in its place", truth);
                }
                // All other words are errors, or carry a checksum that is compared with the contents.
                prop_assert!(word.0 & OF_GUESTS == 0);
            }
        }

        #[test]
        fn without_a_witness_only_contents_are_believed(found: u64) {
            let word = believed(BlockWord(found), None);
            prop_assert!(word.is_lost() || (!word.is_empty() && !word.is_locked()));
        }
    }

    #[test]
    fn bits_of_direct_clients_in_a_word_without_a_lock_are_damage() {
        let word = BlockWord::EMPTY.written(5);
        for bit in [60, 61] {
            assert!(believed(BlockWord(word.0 | 1 << bit), Some((true, false))).is_lost());
        }
    }

    #[test]
    fn the_lock_of_a_lost_block_stays_until_it_is_settled() {
        let left = BlockWord::EMPTY.written(5).lost().locked();
        assert_eq!(believed(left, Some((true, true))), left);
    }

    /// Blocks that an earlier process has left: with contents, lost, and locked.
    fn left() -> [(u64, BlockWord); 6] {
        let written = BlockWord::EMPTY.written(5);
        [
            (1, written),
            (2, written.lost()),
            (3, written),
            (4, written.locked()),
            (6, BlockWord::EMPTY.locked()),
            (BLOCKS_PER_EXTENT - 1, written.lost()),
        ]
    }

    /// Kept words with these blocks of an extent.
    fn with_left(extent: &Extent) -> BlockWords {
        let (words, _memory) = kept();
        words.clear(extent);
        left().into_iter().for_each(|(block, word)| words.store(words.place(extent, block), word));
        words
    }

    fn words_of(words: &BlockWords, extent: &Extent) -> Vec<BlockWord> {
        (0..BLOCKS_PER_EXTENT).map(|block| words.load(words.place(extent, block))).collect()
    }

    #[test]
    fn words_that_agree_with_their_witness_are_all_believed() {
        let extent = extent(3);
        for is_doubted in [false, true] {
            let words = with_left(&extent);
            if is_doubted {
                words.doubt(&extent);
            }
            let before = words_of(&words, &extent);
            assert_eq!((words.examine(&extent), words_of(&words, &extent)), (0, before));
            assert_eq!(words.is_witness_in_doubt(3), is_doubted);
        }
    }

    #[test]
    fn words_that_their_witness_contradicts_are_lost_and_counted_once() {
        let extent = extent(3);
        for is_doubted in [false, true] {
            let words = with_left(&extent);
            if is_doubted {
                words.doubt(&extent);
            }
            let mut right = words_of(&words, &extent);
            let written = BlockWord::EMPTY.written(5);
            // Found: contents where they are lost, none where there are some, and contents where there are
            // none. In the last block, a first write was in progress, which is no contradiction.
            for (block, found, believed) in [
                (2, written, written.lost()),
                (BLOCKS_PER_EXTENT - 1, written, written.lost()),
                (1, BlockWord::EMPTY, BlockWord::EMPTY.lost()),
                (9, written, written.lost()),
                (3, BlockWord::EMPTY.locked(), BlockWord::EMPTY.written(0).locked()),
            ] {
                words.put(words.place(&extent, block), found);
                right[block as usize] = believed;
            }
            assert_eq!((words.examine(&extent), words_of(&words, &extent)), (4, right.clone()));
            assert_eq!(words.testimony(3), Some((Testimony::beside(&right), is_doubted)));
            assert_eq!((words.examine(&extent), words_of(&words, &extent)), (0, right));
        }
    }

    #[test]
    fn a_damaged_witness_is_stored_anew_with_a_doubt() {
        let extent = extent(3);
        let words = with_left(&extent);
        words.table.store(contents_at(3), 0).unwrap();
        assert!(words.is_witness_in_doubt(3));
        // Nothing proves what a block holds, except for the two words with checksums and the two lost ones.
        assert_eq!(words.examine(&extent), BLOCKS_PER_EXTENT - 4);
        assert_eq!(words.testimony(3), Some((Testimony::beside(&words_of(&words, &extent)), true)));
    }

    #[test]
    fn a_doubt_stays_with_the_losses_whatever_is_noted_later() {
        let (words, _memory) = kept();
        let extent = extent(3);
        let lost = |block| BlockWord::EMPTY.written(block).lost();
        let losses = || words.testimony(3).map(|(said, is_doubted)| (said.losses, is_doubted));
        assert!(!words.is_witness_in_doubt(3), "no file has ever had it");
        words.clear(&extent);
        words.store(words.place(&extent, 1), lost(1));
        assert_eq!((words.is_witness_in_doubt(3), losses()), (false, Some((0b10, false))));
        for _ in 0..2 {
            words.doubt(&extent);
            assert_eq!((words.is_witness_in_doubt(3), losses()), (true, Some((0b10, true))));
        }
        words.store(words.place(&extent, 1), BlockWord::EMPTY.written(1));
        words.store(words.place(&extent, 2), lost(2));
        assert_eq!((words.is_witness_in_doubt(3), losses()), (true, Some((0b100, true))));
        words.clear(&extent);
        assert_eq!((words.is_witness_in_doubt(3), losses()), (false, Some((0, false))));
        words.abandon();
        words.doubt(&extent);
        assert!(!words.is_witness_in_doubt(3), "the process is dead");
    }

    #[test]
    fn a_change_of_a_witness_that_another_writer_overtakes_keeps_both() {
        let (words, _memory) = kept();
        let extent = extent(3);
        words.clear(&extent);
        let is_overtaken = std::cell::Cell::new(false);
        words.update(losses_at(3), |said| {
            if !is_overtaken.replace(true) {
                words.store(words.place(&extent, 1), BlockWord::EMPTY.written(5).lost());
            }
            said | 0b100
        });
        assert_eq!(words.testimony(3), Some((Testimony { contents: 0b10, losses: 0b110 }, false)));
    }
}
