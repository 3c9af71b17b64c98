//! The layout of a piece of a slab: chunks, the headers of their blocks, and the blocks (`docs/src/wire.md`,
//! *slabs*).

use std::ops::Range;

/// Bytes of a chunk's words: owner and class.
const WORDS_EACH: u64 = 16;
/// Bytes of a block's header: record and number.
pub(super) const HEADER_BYTES: u64 = 16;
/// The size of chunks is a multiple of this, and blocks start at multiples of it: a cache line.
const ALIGN: u64 = 64;
/// The smallest block.
const LEAST_BLOCK_BYTES: u64 = 128;
/// The number of classes: from 128 bytes on, blocks of each are twice as large as those of the one before.
const CLASSES: u8 = 14;
/// Bytes of the longest payload of a record: a block of the largest class. It is transferred in parts, so
/// that it does not take all buffers of a thread.
pub const MOST_PAYLOAD_BYTES: usize = 1 << 20;
/// Bytes of the largest chunk: in it, the numbers of blocks of any class fit a pointer.
const MOST_CHUNK_BYTES: u64 = 1 << 30;
/// Bits of a pointer for the block's number, and for its class.
const BLOCK_BITS: u32 = 24;
const CLASS_BITS: u32 = 8;

/// The size class of a chunk's blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Class(u8);

impl Class {
    /// The smallest class whose blocks have room for a payload of this length. `None`: it is too long.
    pub fn of(payload_bytes: usize) -> Option<Class> {
        let mut classes = (0..CLASSES).map(Class);
        classes.find(|class| class.bytes() >= payload_bytes as u64)
    }

    /// Bytes of a block.
    pub fn bytes(self) -> u64 {
        LEAST_BLOCK_BYTES << self.0
    }

    /// The word that is written beside a chunk's owner. Zero stands for no class.
    pub(super) fn word(self) -> u64 {
        u64::from(self.0) + 1
    }

    pub(super) fn from_word(word: u64) -> Option<Class> {
        let class = u8::try_from(word.checked_sub(1)?).ok()?;
        (class < CLASSES).then_some(Class(class))
    }
}

/// The name of a block of a slab.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct BlockAt {
    /// The chunk's number, counted over all pieces.
    pub chunk: u32,
    /// The size class of the block.
    pub class: Class,
    /// The block's number in its chunk.
    pub block: u32,
}

impl BlockAt {
    /// The word of a pointer that names it.
    pub fn word(self) -> u64 {
        let within = u64::from(self.class.0) << BLOCK_BITS | u64::from(self.block);
        u64::from(self.chunk) << (BLOCK_BITS + CLASS_BITS) | within
    }

    /// The block that a word names. `None`: no block has such a name.
    pub fn from_word(word: u64) -> Option<BlockAt> {
        let class = (word >> BLOCK_BITS & ((1 << CLASS_BITS) - 1)) as u8;
        let block = (word & ((1 << BLOCK_BITS) - 1)) as u32;
        let chunk = (word >> (BLOCK_BITS + CLASS_BITS)) as u32;
        (class < CLASSES).then_some(BlockAt { chunk, class: Class(class), block })
    }
}

/// The layout of a slab in each of its pieces: owner and class of every chunk, then the chunks. In a chunk,
/// the headers of all its blocks lie before the blocks. So one READ tells for which records the blocks were
/// written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlabLayout {
    chunks: u64,
    chunk_bytes: u64,
}

impl SlabLayout {
    /// This many chunks of this many bytes each: a multiple of 64, with room for at least one block.
    pub fn new(chunks: u64, chunk_bytes: u64) -> Option<SlabLayout> {
        let fits = chunk_bytes.is_multiple_of(ALIGN) && chunk_bytes <= MOST_CHUNK_BYTES;
        let layout = SlabLayout { chunks, chunk_bytes };
        let is_countable = (1..=u64::from(u32::MAX)).contains(&chunks);
        (fits && is_countable && layout.blocks(Class(0)) > 0).then_some(layout)
    }

    /// A layout of about `bytes` in all, in which each chunk has room for at least `blocks` blocks with
    /// payloads of up to `longest` bytes. `None`: payloads are too long.
    pub fn for_payloads(longest: usize, blocks: u64, bytes: u64) -> Option<SlabLayout> {
        let class = Class::of(longest)?;
        let chunk_bytes = (blocks.max(1) * (class.bytes() + HEADER_BYTES)).next_multiple_of(ALIGN);
        SlabLayout::new((bytes / chunk_bytes).max(1), chunk_bytes)
    }

    /// The layout of a piece with this many times as many chunks.
    pub fn with_times(self, times: u64) -> SlabLayout {
        SlabLayout { chunks: self.chunks * times, ..self }
    }

    /// Chunks of a piece.
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// Bytes of a chunk.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// Bytes of a piece.
    pub fn bytes(&self) -> u64 {
        self.body(self.chunks)
    }

    /// The longest payload that a block has room for.
    pub fn longest(&self) -> usize {
        let classes = (0..CLASSES).rev().map(Class);
        classes.filter(|class| self.blocks(*class) > 0).map(Class::bytes).next().unwrap_or(0) as usize
    }

    /// Blocks of a chunk of this class.
    pub fn blocks(&self, class: Class) -> u32 {
        (self.chunk_bytes / (HEADER_BYTES + class.bytes())) as u32
    }

    /// Owner and class of all chunks.
    pub(super) fn words(&self) -> Range<u64> {
        0..self.chunks * WORDS_EACH
    }

    /// The place of a chunk's owner word.
    pub fn owner(&self, chunk: u64) -> u64 {
        chunk * WORDS_EACH
    }

    /// The place of a chunk's class word.
    pub fn class(&self, chunk: u64) -> u64 {
        self.owner(chunk) + WORDS_EACH / 2
    }

    fn body(&self, chunk: u64) -> u64 {
        self.words().end.next_multiple_of(ALIGN) + chunk * self.chunk_bytes
    }

    /// The headers of a chunk's blocks.
    pub(super) fn headers(&self, chunk: u64, class: Class) -> Range<u64> {
        let start = self.body(chunk);
        start..start + u64::from(self.blocks(class)) * HEADER_BYTES
    }

    /// The header of one block.
    pub fn header(&self, chunk: u64, block: u32) -> Range<u64> {
        let start = self.body(chunk) + u64::from(block) * HEADER_BYTES;
        start..start + HEADER_BYTES
    }

    /// The place of a block, by its chunk's number in the piece. `None`: there is no such block.
    pub fn block(&self, chunk: u64, class: Class, block: u32) -> Option<Range<u64>> {
        let first = self.headers(chunk, class).end.next_multiple_of(ALIGN);
        let start = first + u64::from(block) * class.bytes();
        (chunk < self.chunks && block < self.blocks(class)).then_some(start..start + class.bytes())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn class(bytes: usize) -> Class {
        Class::of(bytes).unwrap()
    }

    #[test]
    fn layout_of_slabs_is_fixed() {
        let layout = SlabLayout::new(5, 4_096).unwrap();
        assert_eq!((layout.words(), layout.owner(2), layout.class(2)), (0..80, 32, 40));
        assert_eq!((layout.bytes(), layout.longest()), (128 + 5 * 4_096, 2_048));
        assert_eq!(layout.blocks(class(128)), 28);
        assert_eq!((layout.headers(1, class(128)), layout.header(1, 2)), (4_224..4_672, 4_256..4_272));
        assert_eq!(layout.block(1, class(128), 27), Some(8_128..8_256));
        assert_eq!(layout.block(0, class(1_024), 0), Some(192..1_216));
        assert!(layout.block(1, class(128), 28).is_none() && layout.block(5, class(128), 0).is_none());
        assert!(SlabLayout::new(5, 4_095).is_none() && SlabLayout::new(0, 4_096).is_none());
        assert!(SlabLayout::new(5, 128).is_none() && SlabLayout::new(1 << 32, 4_096).is_none());
        let roomy = SlabLayout::for_payloads(40_000, 8, 10 << 20).unwrap();
        assert_eq!((roomy.longest() >= 40_000, roomy.blocks(class(40_000)), roomy.chunks()), (true, 8, 19));
        assert!(SlabLayout::for_payloads(MOST_PAYLOAD_BYTES + 1, 1, 1 << 30).is_none());
    }

    #[test]
    fn a_block_s_name_is_fixed() {
        let at = BlockAt { chunk: 7, class: class(300), block: 9 };
        assert_eq!((class(300).bytes(), class(300).word()), (512, 3));
        assert_eq!(at.word(), 7 << 32 | 2 << 24 | 9);
        assert_eq!(BlockAt::from_word(at.word()), Some(at));
        assert_eq!(BlockAt::from_word(u64::MAX), None);
        let classes = [0, 1, 14, 15].map(Class::from_word);
        assert_eq!(classes, [None, Some(class(0)), Some(class(MOST_PAYLOAD_BYTES)), None]);
        assert_eq!(Class::of(MOST_PAYLOAD_BYTES + 1), None);
    }

    proptest! {
        #[test]
        fn no_two_parts_share_bytes(chunks in 1..4_u64, lines in 3..200_u64, payload in 0..6_000_usize) {
            let layout = SlabLayout::new(chunks, lines * ALIGN).unwrap();
            let class = class(payload);
            let mut spots = vec![(layout.words().start, layout.words().end)];
            for chunk in 0..chunks {
                let headers = (0..layout.blocks(class)).map(|block| layout.header(chunk, block));
                let blocks = (0..).map_while(|block| layout.block(chunk, class, block));
                spots.extend(headers.chain(blocks).map(|range| (range.start, range.end)));
                if layout.blocks(class) > 0 {
                    prop_assert_eq!(layout.headers(chunk, class).end, layout.header(chunk, layout.blocks(class)).start);
                }
            }
            spots.sort_unstable();
            prop_assert!(spots.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            prop_assert!(spots.iter().all(|spot| spot.1 <= layout.bytes()));
            prop_assert_eq!(payload <= layout.longest(), layout.blocks(class) > 0);
        }
    }
}
