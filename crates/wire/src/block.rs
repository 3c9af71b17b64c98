//! The block word: the metadata of one block of a file, on the owner's host.

/// Bytes of a block, that is, of the data described by one [`BlockWord`]: the page size of PostgreSQL, and a
/// multiple of 4 KiB.
pub const BLOCK_BYTES: usize = 8192;

/// Lock, generation and checksum of a block in one atomic word (`docs/src/files.md`).
///
/// ```text
///  63     62     61    60   59 ........ 48 47 ........................ 0
/// locked  lost    0     0    generation            checksum               unlocked, or locked by the owner
///   1     lost    1   fresh    holder              checksum               locked by a direct client
/// ```
/// - all zero: never written, reads as zeros without touching far memory;
/// - *locked*: a write is in progress; the checksum is still that of the old data. *Holder* is the number of
///   the direct client (guest) that has the lock, so that the lock of a dead client can be recognized.
///   *Fresh*: the block was never written before;
/// - *lost*: the last write could not be stored; reads fail until the block is written whole;
/// - *generation* counts writes and wraps. The checksum decides whether data is right; the generation only
///   distinguishes *changed* from *damaged*;
/// - *checksum*: the low 48 bits of the block's CRC-64/NVME.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockWord(pub u64);

const LOCKED: u64 = 1 << 63;
const LOST: u64 = 1 << 62;
const GUEST: u64 = 1 << 61;
const FRESH: u64 = 1 << 60;
const GENERATION_SHIFT: u32 = 48;
const GENERATION_MASK: u64 = (1 << 12) - 1;
const CHECKSUM_MASK: u64 = (1 << GENERATION_SHIFT) - 1;

impl BlockWord {
    /// A block that was never written.
    pub const EMPTY: BlockWord = BlockWord(0);

    /// A write to the block is in progress, or its writer died.
    pub const fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    /// The data that was last written is lost.
    pub const fn is_lost(self) -> bool {
        self.0 & LOST != 0
    }

    /// Never written: reads as zeros.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Of a locked word: the block was never written before.
    pub const fn was_empty(self) -> bool {
        self.is_locked() && if self.0 & GUEST != 0 { self.0 & FRESH != 0 } else { self.unlocked().is_empty() }
    }

    /// The number of the direct client that has locked the word, if one has.
    pub const fn guest(self) -> Option<u16> {
        let is_guest = self.is_locked() && self.0 & GUEST != 0;
        if is_guest { Some((self.0 >> GENERATION_SHIFT & GENERATION_MASK) as u16) } else { None }
    }

    /// Counts the writes of the block, and wraps from 4,095 to 1.
    pub const fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT & GENERATION_MASK
    }

    /// Whether `crc64` is the checksum of the data that this word describes.
    pub const fn matches(self, crc64: u64) -> bool {
        self.0 & CHECKSUM_MASK == crc64 & CHECKSUM_MASK
    }

    /// The unlocked word, locked by the owner.
    pub const fn locked(self) -> Self {
        BlockWord(self.0 | LOCKED)
    }

    /// The word before it was locked. If a direct client has locked it, the generation is missing.
    pub const fn unlocked(self) -> Self {
        let kept = if self.0 & GUEST != 0 { LOST | CHECKSUM_MASK } else { !LOCKED };
        BlockWord(self.0 & kept)
    }

    /// The unlocked word, locked by a direct client with a number from one to
    /// [`MAX_GUEST`](Self::MAX_GUEST). The client must remember the unlocked word.
    pub const fn locked_by(self, guest: u16) -> Self {
        let fresh = if self.is_empty() { FRESH } else { 0 };
        let kept = self.0 & (LOST | CHECKSUM_MASK);
        BlockWord(LOCKED | GUEST | fresh | kept | (guest as u64 & GENERATION_MASK) << GENERATION_SHIFT)
    }

    /// Highest number of a direct client.
    pub const MAX_GUEST: u16 = GENERATION_MASK as u16;

    /// The unlocked word after data with this checksum was written.
    pub const fn written(self, crc64: u64) -> Self {
        // Generation 0 is skipped, so that a written block never looks empty, whatever its checksum.
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
        assert_eq!(BlockWord::EMPTY.locked_by(1).0, 0xB001_0000_0000_0000);
        assert_eq!(BlockWord::EMPTY.written(5).locked_by(0xFFF).0, 0xAFFF_0000_0000_0005);
    }

    proptest! {
        #[test]
        fn a_written_block_is_never_empty_locked_or_lost(word: u64, crc: u64) {
            let next = BlockWord(word).written(crc);
            prop_assert!(!next.is_empty() && !next.is_locked() && !next.is_lost() && next.matches(crc));
            prop_assert_ne!(next.generation(), BlockWord(word).generation());
        }

        #[test]
        fn a_word_locked_by_the_owner_keeps_all_other_bits(crc: u64) {
            let word = BlockWord::EMPTY.written(crc);
            for before in [word, word.lost(), BlockWord::EMPTY] {
                prop_assert_eq!(before.locked().unlocked(), before);
                prop_assert_eq!((before.locked().guest(), before.guest()), (None, None));
                prop_assert_eq!(before.locked().was_empty(), before.is_empty());
                prop_assert!(!before.was_empty() && !before.locked().is_empty());
            }
        }

        #[test]
        fn a_word_locked_by_a_guest_tells_which_and_what_the_block_was(crc: u64, guest in 1..=BlockWord::MAX_GUEST) {
            let word = BlockWord::EMPTY.written(crc);
            for (before, fresh) in [(word, false), (word.lost(), false), (BlockWord::EMPTY, true)] {
                let locked = before.locked_by(guest);
                prop_assert_eq!(locked.guest(), Some(guest));
                prop_assert_eq!((locked.is_lost(), locked.was_empty()), (before.is_lost(), fresh));
                prop_assert!(!locked.is_empty() && (fresh || locked.matches(crc)));
                prop_assert!(locked.lost().is_lost() && !locked.lost().is_locked());
            }
        }
    }
}
