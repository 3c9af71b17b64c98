//! The word that stands for one block of a file, on the owner's host.

/// Bytes of data that one [`BlockWord`] stands for: the page size of PostgreSQL, and a multiple of 4 KiB.
pub const BLOCK_BYTES: usize = 8192;

/// Lock, generation and checksum of a block in one atomic word (design, section 5).
///
/// ```text
///  63     62    61 ......... 48 47 ........................ 0
/// locked  lost    generation              checksum
/// ```
/// - all zero: never written, reads as zeros without touching far memory;
/// - *locked*: a writer is at work; the checksum is still that of the old data;
/// - *lost*: what was last written could not be stored; reads fail until the block is written whole;
/// - *generation* counts writes (it wraps: the checksum decides, the generation only tells *changed* from *damaged*);
/// - *checksum*: the low 48 bits of the block's CRC-64/NVME.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockWord(pub u64);

const LOCKED: u64 = 1 << 63;
const LOST: u64 = 1 << 62;
const GENERATION_SHIFT: u32 = 48;
const GENERATION_MASK: u64 = (1 << 14) - 1;
const CHECKSUM_MASK: u64 = (1 << GENERATION_SHIFT) - 1;

impl BlockWord {
    /// A block that was never written.
    pub const EMPTY: BlockWord = BlockWord(0);

    /// A writer is at work on the block, or died there.
    pub const fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    /// What was last written is gone.
    pub const fn is_lost(self) -> bool {
        self.0 & LOST != 0
    }

    /// Never written: reads as zeros.
    pub const fn is_empty(self) -> bool {
        self.0 & !LOCKED == 0
    }

    /// How often the block was written, modulo 2^14.
    pub const fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT & GENERATION_MASK
    }

    /// Whether `crc64` is that of the data this word stands for.
    pub const fn matches(self, crc64: u64) -> bool {
        self.0 & CHECKSUM_MASK == crc64 & CHECKSUM_MASK
    }

    /// The same word with its lock taken.
    pub const fn locked(self) -> Self {
        BlockWord(self.0 | LOCKED)
    }

    /// The same word with its lock given back.
    pub const fn unlocked(self) -> Self {
        BlockWord(self.0 & !LOCKED)
    }

    /// The unlocked word after data with this checksum was written.
    pub const fn written(self, crc64: u64) -> Self {
        // Generation 0 is skipped, so that a written block never looks empty whatever its checksum.
        let next = if self.generation() == GENERATION_MASK { 1 } else { self.generation() + 1 };
        BlockWord(next << GENERATION_SHIFT | crc64 & CHECKSUM_MASK)
    }

    /// The unlocked word of a block whose last write could not be stored.
    pub const fn lost(self) -> Self {
        BlockWord(self.unlocked().0 | LOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn layout_of_the_block_word_is_fixed() {
        assert_eq!(BlockWord::EMPTY.written(0xABCD_1234_5678_9ABC).0, 0x0001_1234_5678_9ABC);
        assert_eq!(BlockWord::EMPTY.locked().0, 0x8000_0000_0000_0000);
        assert_eq!(BlockWord::EMPTY.lost().0, 0x4000_0000_0000_0000);
    }

    proptest! {
        #[test]
        fn a_written_block_is_never_empty_locked_or_lost(word: u64, crc: u64) {
            let next = BlockWord(word).written(crc);
            prop_assert!(!next.is_empty() && !next.is_locked() && !next.is_lost() && next.matches(crc));
            prop_assert_ne!(next.generation(), BlockWord(word).generation());
        }

        #[test]
        fn locking_keeps_all_else(word: u64) {
            let word = BlockWord(word).unlocked();
            prop_assert_eq!(word.locked().unlocked(), word);
            prop_assert_eq!(word.locked().generation(), word.generation());
        }
    }
}
