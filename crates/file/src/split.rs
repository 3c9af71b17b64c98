//! Which blocks of which extents a range of a file falls on. Pure.

use farpool_pool::EXTENT_BYTES;
use farpool_wire::BLOCK_BYTES;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Part of a range that lies in one extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    /// Which extent of the file.
    pub(crate) stripe: u64,
    /// The range's first byte, within the extent.
    pub(crate) start: u64,
    /// One past its last.
    pub(crate) end: u64,
}

impl Piece {
    /// First block touched.
    pub(crate) fn first_block(&self) -> u64 {
        self.start / BLOCK
    }

    /// One past the last block touched.
    pub(crate) fn end_block(&self) -> u64 {
        self.end.div_ceil(BLOCK)
    }

    /// The range's start, rounded down to a block.
    pub(crate) fn aligned_start(&self) -> u64 {
        self.first_block() * BLOCK
    }

    /// Bytes of all blocks touched.
    pub(crate) fn aligned_bytes(&self) -> u64 {
        (self.end_block() - self.first_block()) * BLOCK
    }

    /// Offset in the file of the extent's byte `within`.
    pub(crate) fn file_offset(&self, within: u64) -> u64 {
        self.stripe * EXTENT_BYTES + within
    }

    /// Whether the piece covers `block` from its start to its end.
    pub(crate) fn covers(&self, block: u64) -> bool {
        self.start <= block * BLOCK && (block + 1) * BLOCK <= self.end
    }

    /// The blocks at its ends that the piece covers only in part.
    pub(crate) fn partial_blocks(self) -> impl Iterator<Item = u64> {
        let (first, last) = (self.first_block(), self.end_block() - 1);
        let ends = [Some(first), Some(last).filter(|&last| last != first)];
        ends.into_iter().flatten().filter(move |&block| !self.covers(block))
    }

    /// Where a block's bytes lie among those of all blocks touched.
    pub(crate) fn place_of(&self, block: u64) -> std::ops::Range<usize> {
        let at = (block - self.first_block()) as usize * BLOCK_BYTES;
        at..at + BLOCK_BYTES
    }

    /// Whether the piece covers its whole extent.
    pub(crate) fn is_whole_extent(&self) -> bool {
        self.start == 0 && self.end == EXTENT_BYTES
    }
}

/// Cuts `offset..offset + bytes` at extent boundaries.
pub(crate) fn pieces(offset: u64, bytes: u64) -> impl Iterator<Item = Piece> {
    let end = offset + bytes;
    let first = offset / EXTENT_BYTES;
    let stripes = if bytes == 0 { 0..0 } else { first..end.div_ceil(EXTENT_BYTES) };
    stripes.map(move |stripe| {
        let base = stripe * EXTENT_BYTES;
        Piece { stripe, start: offset.max(base) - base, end: (end - base).min(EXTENT_BYTES) }
    })
}

/// Cuts data that are to be written at `offset`, as [`pieces`] does.
pub(crate) fn pieces_of(offset: u64, data: &[u8]) -> impl Iterator<Item = (Piece, &[u8])> {
    let mut rest = data;
    pieces(offset, data.len() as u64).map(move |piece| {
        let (own, behind) = rest.split_at((piece.end - piece.start) as usize);
        rest = behind;
        (piece, own)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_range_over_an_extent_boundary_has_two_pieces() {
        let found: Vec<_> = pieces(EXTENT_BYTES - 10, 30).collect();
        assert_eq!(
            found,
            [
                Piece { stripe: 0, start: EXTENT_BYTES - 10, end: EXTENT_BYTES },
                Piece { stripe: 1, start: 0, end: 20 },
            ]
        );
        assert_eq!(pieces(7, 0).count(), 0);
    }

    #[test]
    fn only_ends_within_a_block_are_covered_in_part() {
        let partial = |start, end| -> Vec<u64> { Piece { stripe: 0, start, end }.partial_blocks().collect() };
        assert_eq!(partial(0, 2 * BLOCK), [0u64; 0]);
        assert_eq!(partial(BLOCK + 1, BLOCK + 2), [1]);
        assert_eq!(partial(1, 3 * BLOCK), [0]);
        assert_eq!(partial(0, 3 * BLOCK - 1), [2]);
        assert_eq!(partial(1, 3 * BLOCK - 1), [0, 2]);
    }

    #[test]
    fn each_piece_has_its_own_of_the_data() {
        let data: Vec<u8> = (0..30).collect();
        let found: Vec<_> =
            pieces_of(EXTENT_BYTES - 10, &data).map(|(piece, own)| (piece.stripe, own)).collect();
        assert_eq!(found, [(0, &data[..10]), (1, &data[10..])]);
    }

    proptest! {
        #[test]
        fn pieces_cover_the_range_once_and_in_order(offset in 0u64..1 << 40, bytes in 0u64..5 << 20) {
            let mut at = offset;
            for piece in pieces(offset, bytes) {
                prop_assert_eq!(piece.file_offset(piece.start), at);
                prop_assert!(piece.start < piece.end && piece.end <= EXTENT_BYTES);
                prop_assert!(piece.aligned_start() <= piece.start);
                prop_assert!(piece.aligned_start() + piece.aligned_bytes() >= piece.end);
                at += piece.end - piece.start;
            }
            prop_assert_eq!(at, offset + bytes);
        }
    }
}
