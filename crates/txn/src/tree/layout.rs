//! Where the leaves of an ordered index lie, in each of its pieces. Pure.
//!
//! ```text
//! piece   lowest level | level with hints for it | ...
//! level   counter of pairs, padding | the first leaf (in the first piece) | pairs of leaves ...
//! ```

use std::ops::Range;

use super::leaf::LeafLayout;
use crate::growth::Growth;
use crate::hash::MOST_KEY_BYTES;

/// Before the leaves: the counter, and padding, so that leaves are aligned to cache lines.
const HEAD_BYTES: u64 = 64;
/// Levels of an index. Each has at least seven times fewer leaves than the one below, when keys come in
/// ascending order, too. So the highest one has few leaves, even with the longest keys.
pub(super) const LEVELS: usize = 6;
/// Most pairs of a piece: far more than a region holds.
const MOST_IN_A_PIECE: u64 = 1 << 40;
/// Most leaves: their numbers plus one fit the word that names them.
const MOST_IN_ALL: u64 = (1 << 43) - 1;
/// Pairs for each leaf's worth of records: a split takes a pair, leaves are two thirds full on average, and
/// those that were split are kept.
const PAIRS_PER_FULL_LEAF: u64 = 2;
/// Further pairs, of the lowest level and of each other one: small tables split leaves unevenly.
const PAIRS_MORE: u64 = 8;
const PAIRS_MORE_ABOVE: u64 = 2;

/// The layout of an ordered index in its pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TreeLayout {
    levels: [LevelLayout; LEVELS],
}

/// The layout of a level.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LevelLayout {
    leaf: LeafLayout,
    pieces: u64,
    /// How pairs of leaves are numbered through the pieces.
    pairs: Growth,
}

/// A part of one of the pieces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Spot {
    pub(super) piece: usize,
    pub(super) range: Range<u64>,
}

impl TreeLayout {
    /// A layout over `pieces` pieces, with `layer` of them in each layer; each piece of the first layer has
    /// `pairs` pairs of leaves, and others at most `most_times` as many. `None`: there must be at least one
    /// of each, and not too many; and keys have 1 to 256 bytes.
    pub fn grown(
        leaf: LeafLayout,
        pairs: u64,
        pieces: usize,
        layer: usize,
        most_times: u64,
    ) -> Option<TreeLayout> {
        (leaf.key_bytes() <= MOST_KEY_BYTES).then_some(())?;
        let mut level = LevelLayout::new(leaf, pairs, pieces, layer, most_times)?;
        let mut levels = [level; LEVELS];
        for above in &mut levels[1..] {
            // A hint has the rank of a leaf for a key.
            let hints = LeafLayout::new(leaf.key_bytes() + size_of::<u64>())?;
            // Leaves that simulations make small have small leaves of hints, too.
            let hints =
                if leaf.entries() < hints.entries() { hints.with_entries(leaf.entries()) } else { hints };
            let pairs = pairs_for(&hints, level.pairs.each()).saturating_add(PAIRS_MORE_ABOVE);
            level = LevelLayout::new(hints, pairs, pieces, layer, most_times)?;
            *above = level;
        }
        Some(TreeLayout { levels })
    }

    /// Pairs that a piece needs for so many records.
    pub fn pairs_for(leaf: &LeafLayout, records: u64) -> u64 {
        pairs_for(leaf, records).saturating_add(PAIRS_MORE)
    }

    /// The layout of a leaf of the lowest level.
    pub fn leaf(&self) -> LeafLayout {
        self.levels[0].leaf
    }

    /// How many pieces it has.
    pub fn pieces(&self) -> u64 {
        self.levels[0].pieces
    }

    /// How many pieces a layer has.
    pub(super) fn pieces_per_layer(&self) -> u64 {
        self.levels[0].pairs.pieces_per_layer()
    }

    /// A level, the lowest one first.
    pub(super) fn level(&self, level: usize) -> &LevelLayout {
        &self.levels[level]
    }

    /// Where a level starts in a piece.
    pub(super) fn level_at(&self, level: usize, piece: usize) -> u64 {
        self.levels[..level].iter().map(|level| level.bytes_of(piece)).sum()
    }

    /// Bytes of a piece.
    pub fn bytes_of(&self, piece: usize) -> u64 {
        self.level_at(LEVELS, piece)
    }
}

fn pairs_for(leaf: &LeafLayout, entries: u64) -> u64 {
    (entries / leaf.entries() as u64).saturating_mul(PAIRS_PER_FULL_LEAF)
}

impl LevelLayout {
    fn new(
        leaf: LeafLayout,
        pairs: u64,
        pieces: usize,
        layer: usize,
        most_times: u64,
    ) -> Option<LevelLayout> {
        let pieces = pieces as u64;
        let pairs = Growth::new(layer as u64, pairs, most_times).filter(|_| pairs <= MOST_IN_A_PIECE)?;
        (pieces >= layer as u64 && 2 * pairs.total(pieces) < MOST_IN_ALL).then_some(LevelLayout {
            leaf,
            pieces,
            pairs,
        })
    }

    /// The layout of a leaf.
    pub(super) fn leaf(&self) -> LeafLayout {
        self.leaf
    }

    /// How many pieces it has.
    pub(super) fn pieces(&self) -> u64 {
        self.pieces
    }

    /// How many pairs a piece has.
    pub(super) fn pairs_of(&self, piece: usize) -> u64 {
        self.pairs.size(piece as u64)
    }

    /// Bytes of a piece.
    fn bytes_of(&self, piece: usize) -> u64 {
        HEAD_BYTES + (1 + 2 * self.pairs_of(piece)) * self.leaf.bytes() as u64
    }

    /// The first leaf of a piece's pair.
    pub(super) fn pair(&self, piece: usize, pair: u64) -> u64 {
        1 + 2 * (self.pairs.numbers(piece as u64).start + pair)
    }

    /// The place of some consecutive leaves: one, or the two of a pair. `None`: they lie in a piece beyond
    /// those of this layout, or are no pair.
    pub(super) fn leaves_from(&self, first: u64, count: u64) -> Option<Spot> {
        let bytes = self.leaf.bytes() as u64;
        let Some(number) = first.checked_sub(1) else {
            return (count == 1).then_some(Spot { piece: 0, range: HEAD_BYTES..HEAD_BYTES + bytes });
        };
        let (piece, within) = self.pairs.find(number / 2);
        let fits = piece < self.pieces && number % 2 + count <= 2;
        let start = HEAD_BYTES + (1 + 2 * within + number % 2) * bytes;
        fits.then_some(Spot { piece: piece as usize, range: start..start + count * bytes })
    }

    /// All pieces, in the order in which they are searched for a pair that should lie in `piece` or beside
    /// it. The newest layer comes first: older ones are probably used up.
    pub(super) fn search_order(&self, piece: usize) -> impl Iterator<Item = usize> + use<> {
        let (pieces, first) = (self.pieces as usize, self.pairs.pieces_per_layer() as usize);
        (0..first).flat_map(move |step| ((piece + step) % first..pieces).step_by(first).rev())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(pieces: usize) -> LevelLayout {
        LevelLayout::new(LeafLayout::new(8).unwrap(), 3, pieces, 2, 8).unwrap()
    }

    fn leaves(level: &LevelLayout) -> u64 {
        1 + 2 * level.pairs.total(level.pieces)
    }

    #[test]
    fn each_leaf_has_a_place_of_its_own() {
        let level = level(6);
        let mut ends = [HEAD_BYTES; 6];
        let mut all: Vec<Spot> =
            (0..leaves(&level)).map(|leaf| level.leaves_from(leaf, 1).unwrap()).collect();
        all.sort_by_key(|spot| (spot.piece, spot.range.start));
        // Only the first piece has a first leaf.
        ends[1..].iter_mut().for_each(|end| *end += 1_024);
        for Spot { piece, range } in all {
            assert_eq!((range.start, range.end), (ends[piece], ends[piece] + 1_024));
            ends[piece] = range.end;
        }
        assert_eq!(ends.to_vec(), (0..6).map(|piece| level.bytes_of(piece)).collect::<Vec<_>>());
        assert_eq!(level.leaves_from(leaves(&level), 1), None);
    }

    #[test]
    fn pairs_lie_together_and_keep_their_places_when_the_index_grows() {
        let (two, four) = (level(2), level(4));
        let pair = two.pair(1, 2);
        let spot = two.leaves_from(pair, 2).unwrap();
        assert_eq!((spot.piece, spot.range.end - spot.range.start, pair % 2), (1, 2_048, 1));
        assert_eq!((four.pair(1, 2), four.leaves_from(pair, 2)), (pair, Some(spot)));
        assert_eq!((two.leaves_from(pair + 1, 2), two.leaves_from(0, 2)), (None, None));
        assert_eq!((two.leaves_from(four.pair(2, 0), 1), four.pairs_of(2)), (None, 3));
        assert_eq!(four.search_order(1).collect::<Vec<_>>(), [3, 1, 2, 0]);
    }

    #[test]
    fn levels_lie_one_behind_the_other_and_get_smaller() {
        let leaf = LeafLayout::new(8).unwrap();
        let layout = TreeLayout::grown(leaf, TreeLayout::pairs_for(&leaf, 1_000_000), 2, 2, 4).unwrap();
        assert_eq!((layout.pieces(), layout.pieces_per_layer(), layout.leaf()), (2, 2, leaf));
        for level in 1..LEVELS {
            let [below, above] = [layout.level(level - 1), layout.level(level)];
            assert_eq!(layout.level_at(level, 0), layout.level_at(level - 1, 0) + below.bytes_of(0));
            assert_eq!(above.leaf().key_bytes(), 16);
            // A hint for each leaf of the level below, in leaves that are half full.
            let hints = above.pairs_of(0) * above.leaf().entries() as u64 / 2;
            assert!(hints >= below.pairs_of(0) && above.bytes_of(0) < below.bytes_of(0) / 8 + 10_000);
        }
        assert_eq!(layout.level_at(0, 1), 0);
        let longest = LeafLayout::new(MOST_KEY_BYTES).unwrap();
        assert!(TreeLayout::grown(longest, 9, 1, 1, 1).is_some());
        assert!(TreeLayout::grown(LeafLayout::new(MOST_KEY_BYTES + 1).unwrap(), 9, 1, 1, 1).is_none());
    }
}
