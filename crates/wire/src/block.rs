//! The word that stands for one block of a file, on the owner's host.

/// Bytes of data that one [`BlockWord`] stands for: the page size of PostgreSQL, and a multiple of 4 KiB.
pub const BLOCK_BYTES: usize = 8192;

/// Lock, generation and checksum of a block in one atomic word (design, section 5).
///
/// ```text
///  63     62    61 ......... 48 47 ........................ 0
///   0    lost    generation              checksum
///   1    lost  fresh  holder             checksum
/// ```
/// - all zero: never written, reads as zeros without touching far memory;
/// - *locked* (bit 63): a writer is at work; the checksum is still that of the old data. *Holder* (13 bits) tells which
///   process of the host it is, so that a lock whose holder died can be told from one that is in use; *fresh*: the block
///   was never written before;
/// - *lost*: what was last written could not be stored; reads fail until the block is written whole;
/// - *generation* counts writes (it wraps: the checksum decides, the generation only tells *changed* from *damaged*);
/// - *checksum*: the low 48 bits of the block's CRC-64/NVME.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockWord(pub u64);

const LOCKED: u64 = 1 << 63;
const LOST: u64 = 1 << 62;
const FRESH: u64 = 1 << 61;
const HOLDER_MASK: u64 = (1 << 13) - 1;
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
        self.0 == 0
    }

    /// Of a locked word: the block was never written before.
    pub const fn was_empty(self) -> bool {
        self.is_locked() && self.0 & FRESH != 0
    }

    /// Of a locked word: who has the lock.
    pub const fn holder(self) -> Option<u16> {
        if self.is_locked() { Some((self.0 >> GENERATION_SHIFT & HOLDER_MASK) as u16) } else { None }
    }

    /// How often the block was written, modulo 2^14.
    pub const fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT & GENERATION_MASK
    }

    /// Whether `crc64` is that of the data this word stands for.
    pub const fn matches(self, crc64: u64) -> bool {
        self.0 & CHECKSUM_MASK == crc64 & CHECKSUM_MASK
    }

    /// The unlocked word with its lock taken by `holder`, at most [`MAX_HOLDER`](Self::MAX_HOLDER). Who takes the lock
    /// keeps the word as it was.
    pub const fn locked_by(self, holder: u16) -> Self {
        let fresh = if self.is_empty() { FRESH } else { 0 };
        let kept = self.0 & (LOST | CHECKSUM_MASK);
        BlockWord(LOCKED | fresh | kept | (holder as u64 & HOLDER_MASK) << GENERATION_SHIFT)
    }

    /// Highest number of a holder.
    pub const MAX_HOLDER: u16 = HOLDER_MASK as u16;

    /// The unlocked word after data with this checksum was written.
    pub const fn written(self, crc64: u64) -> Self {
        // Generation 0 is skipped, so that a written block never looks empty whatever its checksum.
        let next = if self.generation() == GENERATION_MASK { 1 } else { self.generation() + 1 };
        BlockWord(next << GENERATION_SHIFT | crc64 & CHECKSUM_MASK)
    }

    /// The unlocked word of a block whose last write could not be stored.
    pub const fn lost(self) -> Self {
        let kept = if self.is_locked() { self.0 & CHECKSUM_MASK } else { self.0 };
        BlockWord(kept | LOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn layout_of_the_block_word_is_fixed() {
        assert_eq!(BlockWord::EMPTY.written(0xABCD_1234_5678_9ABC).0, 0x0001_1234_5678_9ABC);
        assert_eq!(BlockWord::EMPTY.locked_by(0).0, 0xA000_0000_0000_0000);
        assert_eq!(BlockWord::EMPTY.written(5).locked_by(0x1FFF).0, 0x9FFF_0000_0000_0005);
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
        fn a_locked_word_tells_its_holder_and_what_the_block_was(crc: u64, holder in 0..=BlockWord::MAX_HOLDER) {
            let word = BlockWord::EMPTY.written(crc);
            for (before, fresh) in [(word, false), (word.lost(), false), (BlockWord::EMPTY, true)] {
                let locked = before.locked_by(holder);
                prop_assert_eq!(locked.holder(), Some(holder));
                prop_assert_eq!((locked.is_lost(), locked.was_empty()), (before.is_lost(), fresh));
                prop_assert!(!locked.is_empty() && (fresh || locked.matches(crc)));
                prop_assert!(locked.lost().is_lost() && !locked.lost().is_locked());
                prop_assert_eq!((before.holder(), before.was_empty()), (None, false));
            }
        }
    }
}
