//! The layout of an index in far memory (`docs/src/wire.md`, *indexes*): counters, buckets and keys in each
//! of its pieces.

use std::ops::Range;

use super::bucket::NUMBER_BITS;
use super::key::{KeyHash, MOST_KEY_BYTES, key_area_bytes};
use crate::growth::Growth;

const WORD_BYTES: u64 = size_of::<u64>() as u64;
/// Most entries of a bucket: with the word for its children, they fill two cache lines.
pub const MOST_ENTRIES: usize = 15;
/// Before the buckets: two counters and padding, so that buckets of two cache lines are aligned to cache
/// lines.
const HEAD_BYTES: u64 = 128;
/// The counters: how many record numbers, and how many pairs of buckets, were handed out.
pub(super) const NUMBERS_AT: u64 = 0;
pub(super) const PAIRS_AT: u64 = WORD_BYTES;
/// Most buckets, or records, of a piece: far more than a region holds, and few enough that no sum below
/// overflows.
const MOST_IN_A_PIECE: u64 = 1 << 40;
/// Most buckets, or records, of an index: their numbers plus one fit an entry.
const MOST_IN_ALL: u64 = (1 << NUMBER_BITS) - 1;

/// The number and size of the parts of an index, in each piece of its first layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexShape {
    /// Home buckets, in which the search for a key begins.
    pub homes: u64,
    /// Pairs of buckets for splits.
    pub pairs: u64,
    /// Record numbers.
    pub records: u64,
    /// Length of a key, in bytes.
    pub key_bytes: usize,
    /// Entries of a bucket.
    pub entries: usize,
    /// Seed of the hash function. A client that does not know it cannot choose keys that collide.
    pub seed: u64,
}

/// Entries of a home bucket once all expected keys are there: half full, so that few buckets are split.
const ENTRIES_EXPECTED: u64 = 8;
/// Records for each pair of buckets: a split adds one bucket, and buckets are two thirds full on average.
const RECORDS_PER_PAIR: u64 = 8;
/// Further pairs: the keys of a small table may be distributed unevenly.
const PAIRS_MORE: u64 = 16;

impl IndexShape {
    /// A shape for at most `most` keys in each piece, of which `expected` are expected.
    pub fn for_keys(expected: u64, most: u64, key_bytes: usize, seed: u64) -> IndexShape {
        IndexShape {
            homes: (expected / ENTRIES_EXPECTED).max(1),
            pairs: most / RECORDS_PER_PAIR + PAIRS_MORE,
            records: most,
            key_bytes,
            entries: MOST_ENTRIES,
            seed,
        }
    }
}

/// The layout of an index in its pieces. Homes are in pieces of the first layer only. In other pieces,
/// all buckets are in pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexLayout {
    shape: IndexShape,
    /// How many pieces there are.
    pieces: u64,
    /// How buckets are numbered through the pieces,
    buckets: Growth,
    /// and how records are.
    records: Growth,
}

/// A part of one of the pieces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Spot {
    pub(super) piece: usize,
    pub(super) range: Range<u64>,
}

impl IndexLayout {
    /// A layout over this many pieces, of one layer. `None`: there must be at least one each of pieces,
    /// buckets, entries, records and bytes of a key, and not too many.
    pub fn new(shape: IndexShape, pieces: usize) -> Option<IndexLayout> {
        IndexLayout::grown(shape, pieces, pieces, 1)
    }

    /// A layout over `pieces` pieces, with `layer` of them in each layer. A piece is at most `most_times` as
    /// large as those of the first layer, which have this shape. `None`: as above.
    pub fn grown(shape: IndexShape, pieces: usize, layer: usize, most_times: u64) -> Option<IndexLayout> {
        let (pieces, layer) = (pieces as u64, layer as u64);
        let buckets = shape.pairs.checked_mul(2)?.checked_add(shape.homes)?;
        let keys = (1..=MOST_KEY_BYTES).contains(&shape.key_bytes);
        let entries = (1..=MOST_ENTRIES).contains(&shape.entries);
        let growth = |each: u64| {
            let growth = Growth::new(layer, each, most_times).filter(|_| each <= MOST_IN_A_PIECE)?;
            (pieces >= layer && growth.total(pieces) <= MOST_IN_ALL).then_some(growth)
        };
        let (buckets, records) = (growth(buckets)?, growth(shape.records)?);
        (keys && entries && shape.homes > 0).then_some(IndexLayout { shape, pieces, buckets, records })
    }

    /// What each piece of the first layer has.
    pub fn shape(&self) -> &IndexShape {
        &self.shape
    }

    /// All pieces, in the order in which they are searched for something that should lie beside `piece`.
    /// Those with the same place in their layers come first, since they are on the same node as far as
    /// possible. Of these the newest comes first: older ones are probably used up.
    pub(super) fn search_order(&self, piece: usize) -> impl Iterator<Item = usize> + use<> {
        let (pieces, first) = (self.pieces as usize, self.pieces_per_layer() as usize);
        (0..first).flat_map(move |step| ((piece + step) % first..pieces).step_by(first).rev())
    }

    /// How many record numbers a piece has.
    pub(super) fn numbers_of(&self, piece: usize) -> u64 {
        self.records.size(piece as u64)
    }

    /// How many pairs of buckets a piece has.
    pub(super) fn pairs_of(&self, piece: usize) -> u64 {
        (self.buckets.size(piece as u64) - self.homes_of(piece)) / 2
    }

    fn homes_of(&self, piece: usize) -> u64 {
        if (piece as u64) < self.pieces_per_layer() { self.shape.homes } else { 0 }
    }

    /// How many pieces a layer has.
    pub(super) fn pieces_per_layer(&self) -> u64 {
        self.records.pieces_per_layer()
    }

    /// How many pieces it has.
    pub fn pieces(&self) -> u64 {
        self.pieces
    }

    /// How many record numbers it has. The numbers of each piece follow those of the piece before.
    pub fn records(&self) -> u64 {
        self.records.total(self.pieces)
    }

    /// Bytes of a piece of the first layer.
    pub fn bytes(&self) -> u64 {
        self.bytes_of(0)
    }

    /// Bytes of a piece.
    pub fn bytes_of(&self, piece: usize) -> u64 {
        self.keys_at(piece) + self.numbers_of(piece) * self.key_area_bytes()
    }

    /// The bucket in which the search for a key with this hash begins.
    pub fn home(&self, hash: KeyHash) -> u64 {
        let home = hash.home(self.pieces_per_layer() * self.shape.homes);
        home / self.shape.homes * self.buckets.each() + home % self.shape.homes
    }

    /// The first bucket of a piece's pair.
    pub(super) fn pair(&self, piece: usize, pair: u64) -> u64 {
        self.buckets.numbers(piece as u64).start + self.homes_of(piece) + 2 * pair
    }

    /// Whether a bucket is the first of a pair.
    pub(super) fn is_pair(&self, bucket: u64) -> bool {
        let (piece, within) = self.buckets.find(bucket);
        let within = within.checked_sub(self.homes_of(piece as usize));
        piece < self.pieces
            && within
                .is_some_and(|within| within.is_multiple_of(2) && within / 2 < self.pairs_of(piece as usize))
    }

    /// The place of some consecutive buckets.
    pub(super) fn buckets_from(&self, first: u64, count: u64) -> Option<Spot> {
        let (piece, within) = self.buckets.find(first);
        let start = HEAD_BYTES + within * self.bucket_bytes();
        (piece < self.pieces && within + count <= self.buckets.size(piece))
            .then(|| Spot { piece: piece as usize, range: start..start + count * self.bucket_bytes() })
    }

    /// The place of a record's key.
    pub(super) fn key(&self, number: u64) -> Option<Spot> {
        let (piece, within) = self.records.find(number);
        let start = self.keys_at(piece as usize) + within * self.key_area_bytes();
        (piece < self.pieces)
            .then(|| Spot { piece: piece as usize, range: start..start + self.key_area_bytes() })
    }

    fn bucket_bytes(&self) -> u64 {
        (1 + self.shape.entries as u64) * WORD_BYTES
    }

    fn key_area_bytes(&self) -> u64 {
        key_area_bytes(self.shape.key_bytes)
    }

    fn keys_at(&self, piece: usize) -> u64 {
        HEAD_BYTES + self.buckets.size(piece as u64) * self.bucket_bytes()
    }

    /// The number of a piece's record.
    pub(super) fn number(&self, piece: usize, within: u64) -> u64 {
        self.records.numbers(piece as u64).start + within
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHAPE: IndexShape =
        IndexShape { homes: 5, pairs: 3, records: 10, key_bytes: 9, entries: 7, seed: 1 };

    #[test]
    fn layout_of_indexes_is_fixed() {
        let layout = IndexLayout::new(SHAPE, 2).unwrap();
        let buckets = |first, count| layout.buckets_from(first, count).unwrap();
        assert_eq!((NUMBERS_AT, PAIRS_AT), (0, 8));
        assert_eq!(buckets(0, 1), Spot { piece: 0, range: 128..192 });
        assert_eq!(buckets(12, 1), Spot { piece: 1, range: 192..256 });
        assert_eq!(buckets(layout.pair(1, 2), 2), Spot { piece: 1, range: 704..832 });
        assert_eq!(layout.key(0), Some(Spot { piece: 0, range: 832..856 }));
        assert_eq!(layout.key(19), Some(Spot { piece: 1, range: 1048..1072 }));
        assert_eq!((layout.bytes(), layout.records()), (1072, 20));
        assert!(layout.key(20).is_none() && layout.buckets_from(22, 1).is_none());
        assert!(layout.buckets_from(10, 2).is_none(), "they lie in two pieces");
    }

    #[test]
    fn only_first_buckets_of_pairs_are_recognised() {
        let layout = IndexLayout::new(SHAPE, 2).unwrap();
        let pairs: Vec<u64> = (0..40).filter(|&bucket| layout.is_pair(bucket)).collect();
        assert_eq!(pairs, [5, 7, 9, 16, 18, 20]);
        let named = [0, 1].map(|piece| [0, 1, 2].map(|pair| layout.pair(piece, pair)));
        assert_eq!(pairs, named.concat());
    }

    #[test]
    fn shapes_that_fit_no_memory_make_no_layout() {
        let refused = |change: fn(&mut IndexShape)| {
            let mut shape = SHAPE;
            change(&mut shape);
            IndexLayout::new(shape, 2).is_none()
        };
        assert!(refused(|shape| shape.homes = 0) && refused(|shape| shape.records = 0));
        assert!(refused(|shape| shape.entries = 0) && refused(|shape| shape.entries = 16));
        assert!(refused(|shape| shape.key_bytes = 0) && refused(|shape| shape.key_bytes = 257));
        assert!(refused(|shape| shape.pairs = u64::MAX / 2) && refused(|shape| shape.records = u64::MAX));
        assert!(refused(|shape| shape.records = (1 << 42) + 1) && IndexLayout::new(SHAPE, 0).is_none());
        assert!(!refused(|shape| shape.pairs = 0), "such a table does not grow");
        let roomy = IndexShape::for_keys(1_000, 3_000, 8, 0);
        assert_eq!((roomy.homes, roomy.pairs, roomy.records), (125, 391, 3_000));
        assert!(IndexLayout::new(roomy, 3).is_some());
        assert!(IndexLayout::new(IndexShape::for_keys(0, 1, 8, 0), 1).is_some());
    }

    proptest! {
        #[test]
        fn every_hash_has_a_home_and_no_two_parts_share_bytes(
            homes in 1u64..9, pairs in 0u64..5, records in 1u64..9, key_bytes in 1usize..40,
            entries in 1usize..16, first in 1usize..4, more in 0usize..9, most_times in 1u64..9, hash: u64,
        ) {
            let shape = IndexShape { homes, pairs, records, key_bytes, entries, seed: 0 };
            let pieces = first + more;
            let layout = IndexLayout::grown(shape, pieces, first, most_times).unwrap();
            let home = layout.home(KeyHash(hash));
            prop_assert!(home % (homes + 2 * pairs) < homes && layout.buckets_from(home, 1).is_some());
            prop_assert_eq!(home, IndexLayout::new(shape, first).unwrap().home(KeyHash(hash)), "homes stay");
            let buckets = (0..).map_while(|bucket| layout.buckets_from(bucket, 1));
            let keys = (0..).map_while(|number| layout.key(number));
            let mut spots: Vec<_> = buckets.chain(keys).map(|spot| (spot.piece, spot.range.start, spot.range.end)).collect();
            let all = |piece| layout.buckets.size(piece as u64) + layout.numbers_of(piece);
            prop_assert_eq!(spots.len() as u64, (0..pieces).map(all).sum::<u64>());
            for piece in 0..pieces {
                let named: Vec<u64> = (0..layout.pairs_of(piece)).map(|pair| layout.pair(piece, pair)).collect();
                let is_there = |pair| layout.is_pair(pair) && layout.buckets_from(pair, 2).unwrap().piece == piece;
                prop_assert!(named.into_iter().all(is_there));
                prop_assert_eq!(layout.key(layout.number(piece, 0)).unwrap().piece, piece);
            }
            let mut in_order: Vec<usize> = layout.search_order(0).collect();
            in_order.sort_unstable();
            prop_assert!(in_order.into_iter().eq(0..pieces), "each once");
            spots.sort_unstable();
            for pair in spots.windows(2) {
                prop_assert!(pair[0].0 < pair[1].0 || pair[0].2 <= pair[1].1);
            }
            prop_assert!(spots.iter().all(|spot| spot.1 >= HEAD_BYTES && spot.2 <= layout.bytes_of(spot.0)));
        }
    }
}
