//! What the words of blocks are checked against when they have outlived their writer: which blocks of an extent have contents,
//! and which are lost, on a page of its own.
//!
//! A word that says what a block contains is checked against the contents, by their checksum, whenever these are read. Two words
//! say something without: *empty*, which is all zeros, as memory is that was never written down; and *locked*, whose block is
//! taken for what lies there. These are believed only if the witness says the same.
//!
//! Z1. Each word of a witness carries a check of 31 bits that is bound to its place: zeros are wrong, and so is another's word.
//! Z2. The witness changes under the lock of the block it speaks of, before the block's word does.
//! Z3. So wherever a process is killed, words and witness go together as in [`believed`]; where they do not, one of the two
//!     pages is not what was last stored there, and the block is lost: no bytes are given out for it.

use farpool_pool::Extent;
use farpool_wire::BlockWord;

use super::{BLOCKS_PER_EXTENT, BlockPlace, BlockWords, MAX_EXTENTS, WITNESSES, WORD_BYTES};
use crate::seal::{open, seal};

/// Bytes of an extent's witness: one word for contents, one for losses.
pub(super) const WITNESS_BYTES: u64 = 2 * WORD_BYTES;
/// A bit for each block, and one for [`DOUBT`].
const SAID_BITS: u32 = BLOCKS_PER_EXTENT as u32 + 1;
/// Beside the losses: a dead write may still land on the extent.
const DOUBT: u64 = 1 << BLOCKS_PER_EXTENT;
/// The bits of blocks.
const BLOCKS: u64 = DOUBT - 1;

/// Bits of words that only guests' locks have. No guest works on files that are kept.
const OF_GUESTS: u64 = 0b11 << 60;

/// What a witness says, each a bit for each block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Testimony {
    contents: u64,
    losses: u64,
}

impl Testimony {
    /// Of a block: whether it has contents, and whether it is lost.
    fn of(self, block: u64) -> (bool, bool) {
        (self.contents >> block & 1 == 1, self.losses >> block & 1 == 1)
    }

    /// What words are to be found beside.
    fn beside(words: &[BlockWord]) -> Self {
        let bits = |is_such: fn(BlockWord) -> bool| {
            let such = words.iter().enumerate().filter(|(_, word)| is_such(word.unlocked()));
            such.fold(0, |bits, (block, _)| bits | 1 << block)
        };
        Testimony { contents: bits(|word| !word.is_empty()), losses: bits(BlockWord::is_lost) }
    }
}

/// The word that is believed of a block, given what was found and what the witness says of contents and loss.
fn believed(found: BlockWord, said: Option<(bool, bool)>) -> BlockWord {
    let plain = BlockWord(found.0 & !OF_GUESTS);
    if plain != found && !found.is_locked() {
        return plain.lost();
    }
    let found = plain;
    match said {
        // Nothing is known but what contents can prove.
        None if found.is_empty() || found.is_locked() => found.lost(),
        None => found,
        Some((_, true)) if found.is_lost() => found,
        Some((_, true)) => found.lost(),
        // Empty, or about to become so.
        Some((false, false)) if found.is_locked() => BlockWord::EMPTY.locked(),
        Some((false, false)) if found.is_empty() => found,
        Some((false, false)) => found.lost(),
        Some((true, false)) if found.is_empty() => found.lost(),
        // Its first contents are stored, as whole as any.
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
    /// Has the witness know of the word that a block is about to get (Z2). Costs two loads unless it is of another kind.
    pub(super) fn bear_witness(&self, place: BlockPlace, next: BlockWord) {
        if self.memory.is_none() {
            return;
        }
        let index = place.0 / WORD_BYTES;
        let (number, bit) = (index / BLOCKS_PER_EXTENT, 1 << (index % BLOCKS_PER_EXTENT));
        let next = next.unlocked();
        let mut said = [(contents_at(number), !next.is_empty()), (losses_at(number), next.is_lost())];
        if next.is_lost() {
            said.reverse(); // between the two it must not look as if it had contents
        }
        for (at, holds) in said {
            self.say(at, |said| if holds { said | bit } else { said & !bit });
        }
    }

    /// Changes a word of a witness; other blocks of the extent have other writers.
    fn say(&self, at: u64, change: impl Fn(u64) -> u64) {
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

    /// All blocks of an extent are empty.
    pub(super) fn begin_witness(&self, extent: &Extent) {
        self.swear(extent.number(), Testimony { contents: 0, losses: 0 }, false);
    }

    fn swear(&self, number: u64, said: Testimony, is_doubted: bool) {
        if self.memory.is_none() || self.is_abandoned() {
            return;
        }
        let losses = said.losses | if is_doubted { DOUBT } else { 0 };
        for (at, said) in [(contents_at(number), said.contents), (losses_at(number), losses)] {
            self.table.store(at, seal(at, said, SAID_BITS)).expect("an extent of the table has a witness");
        }
    }

    /// Notes beside the mark of an extent that a write may still land there.
    pub(super) fn witness_doubt(&self, extent: &Extent) {
        if self.memory.is_some() && !self.is_abandoned() {
            self.say(losses_at(extent.number()), |said| said | DOUBT);
        }
    }

    /// What the witness says, and whether a write may still land; `None`: it is not what was stored there.
    fn testimony(&self, number: u64) -> Option<(Testimony, bool)> {
        let said = |at: u64| open(at, self.table.load(at).ok()?, SAID_BITS);
        let (contents, losses) = (said(contents_at(number))?, said(losses_at(number))?);
        let testimony = Testimony { contents: contents & BLOCKS, losses: losses & BLOCKS };
        Some((testimony, losses & DOUBT != 0))
    }

    /// Whether the witness of an extent that some file had, or may have had, says that a write may still land there, or cannot
    /// be believed. Of one that nobody ever had it says nothing.
    pub(super) fn is_witness_in_doubt(&self, number: u64) -> bool {
        if number >= MAX_EXTENTS {
            return false;
        }
        let is_new = [contents_at(number), losses_at(number)].iter().all(|at| self.table.load(*at) == Ok(0));
        !is_new && self.testimony(number).is_none_or(|(_, is_doubted)| is_doubted)
    }

    /// Compares the words of an extent that an earlier process has left with their witness, and makes those lost that cannot be
    /// believed; says how many that were. Before anybody works on the extent.
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
            self.swear(number, right, is_doubted); // last: till then another look comes to the same
        }
        disbelieved
    }
}

const _: () = assert!(SAID_BITS < u64::BITS - 16, "enough of a word is left for its check");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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
            // Locked, and stored, or not, and the witness knows, or not yet, or by half.
            let ((had, was_lost), (has, is_lost)) = (said_of(before), said_of(after));
            let between = if is_lost { (had, is_lost) } else { (has, was_lost) };
            for said in [(had, was_lost), between, (has, is_lost)] {
                let word = believed(before.locked(), Some(said));
                // Nothing is lost that was not, or was about to be.
                prop_assert!(!word.is_lost() || before.is_lost() || after.is_lost());
                // What may be in part another's is not taken for contents.
                let is_stored = |word: BlockWord| !word.is_empty() && !word.is_lost();
                let is_taken = word.is_locked() && !word.was_empty() && !word.is_lost();
                prop_assert!(!is_taken || is_stored(before) || is_stored(after), "{:?}", said);
            }
        }

        #[test]
        fn whatever_takes_the_place_of_a_word_gives_no_other_bytes(truth in word(), found: u64) {
            let found = BlockWord(found);
            for found in [found, BlockWord::EMPTY, BlockWord::EMPTY.locked(), found.unlocked(), found.locked()] {
                let word = believed(found, Some(said_of(truth)));
                if word.is_empty() || word.was_empty() {
                    prop_assert!(truth.is_empty(), "{:?} reads as zeros", truth);
                } else if word.is_locked() && !word.is_lost() {
                    prop_assert!(!truth.is_empty() && !truth.is_lost(), "{:?} reads as what lies there", truth);
                }
                // All others are errors, or compared with the contents.
                prop_assert!(word.0 & OF_GUESTS == 0);
            }
        }

        #[test]
        fn without_a_witness_only_contents_are_believed(found: u64) {
            let word = believed(BlockWord(found), None);
            prop_assert!(word.is_lost() || (!word.is_empty() && !word.is_locked()));
        }
    }
}
