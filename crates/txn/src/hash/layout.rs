//! The layout of an index in far memory (`docs/src/wire.md`, *indexes*): counters, buckets and keys in each
//! of its pieces.

use std::ops::Range;

use super::bucket::NUMBER_BITS;
use super::key::{KeyHash, MOST_KEY_BYTES, key_area_bytes};

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

/// The number and size of the parts of an index, in each of its pieces.
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

/// The layout of an index in its pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexLayout {
    shape: IndexShape,
    pieces: u64,
}

/// A part of one of the pieces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Spot {
    pub(super) piece: usize,
    pub(super) range: Range<u64>,
}

impl IndexLayout {
    /// A layout over this many pieces. `None`: there must be at least one each of pieces, buckets, entries,
    /// records and bytes of a key, and not too many.
    pub fn new(shape: IndexShape, pieces: usize) -> Option<IndexLayout> {
        let pieces = pieces as u64;
        let buckets = shape.pairs.checked_mul(2)?.checked_add(shape.homes)?;
        let keys = (1..=MOST_KEY_BYTES).contains(&shape.key_bytes);
        let entries = (1..=MOST_ENTRIES).contains(&shape.entries);
        let fits = |each: u64| {
            each <= MOST_IN_A_PIECE
                && each.checked_mul(pieces).is_some_and(|all| (1..=MOST_IN_ALL).contains(&all))
        };
        (keys && entries && shape.homes > 0 && fits(buckets) && fits(shape.records))
            .then_some(IndexLayout { shape, pieces })
    }

    /// What each piece has.
    pub fn shape(&self) -> &IndexShape {
        &self.shape
    }

    /// How many pieces it has.
    pub fn pieces(&self) -> u64 {
        self.pieces
    }

    /// How many record numbers it has. The numbers of each piece follow those of the piece before.
    pub fn records(&self) -> u64 {
        self.pieces * self.shape.records
    }

    /// Bytes of each piece.
    pub fn bytes(&self) -> u64 {
        self.keys_at() + self.shape.records * self.key_area_bytes()
    }

    /// The bucket in which the search for a key with this hash begins.
    pub fn home(&self, hash: KeyHash) -> u64 {
        let home = hash.home(self.pieces * self.shape.homes);
        home / self.shape.homes * self.buckets() + home % self.shape.homes
    }

    /// The first bucket of a piece's pair.
    pub(super) fn pair(&self, piece: usize, pair: u64) -> u64 {
        piece as u64 * self.buckets() + self.shape.homes + 2 * pair
    }

    /// Whether a bucket is the first of a pair.
    pub(super) fn is_pair(&self, bucket: u64) -> bool {
        let within = (bucket % self.buckets()).checked_sub(self.shape.homes);
        bucket < self.pieces * self.buckets() && within.is_some_and(|within| within.is_multiple_of(2))
    }

    /// The place of some consecutive buckets.
    pub(super) fn buckets_from(&self, first: u64, count: u64) -> Option<Spot> {
        let (piece, within) = (first / self.buckets(), first % self.buckets());
        let start = HEAD_BYTES + within * self.bucket_bytes();
        (piece < self.pieces && within + count <= self.buckets())
            .then(|| Spot { piece: piece as usize, range: start..start + count * self.bucket_bytes() })
    }

    /// The place of a record's key.
    pub(super) fn key(&self, number: u64) -> Option<Spot> {
        let (piece, within) = (number / self.shape.records, number % self.shape.records);
        let start = self.keys_at() + within * self.key_area_bytes();
        (piece < self.pieces)
            .then(|| Spot { piece: piece as usize, range: start..start + self.key_area_bytes() })
    }

    fn buckets(&self) -> u64 {
        self.shape.homes + 2 * self.shape.pairs
    }

    fn bucket_bytes(&self) -> u64 {
        (1 + self.shape.entries as u64) * WORD_BYTES
    }

    fn key_area_bytes(&self) -> u64 {
        key_area_bytes(self.shape.key_bytes)
    }

    fn keys_at(&self) -> u64 {
        HEAD_BYTES + self.buckets() * self.bucket_bytes()
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
            entries in 1usize..16, pieces in 1usize..4, hash: u64,
        ) {
            let shape = IndexShape { homes, pairs, records, key_bytes, entries, seed: 0 };
            let layout = IndexLayout::new(shape, pieces).unwrap();
            let home = layout.home(KeyHash(hash));
            prop_assert!(home % (homes + 2 * pairs) < homes && layout.buckets_from(home, 1).is_some());
            let buckets = (0..).map_while(|bucket| layout.buckets_from(bucket, 1));
            let keys = (0..).map_while(|number| layout.key(number));
            let mut spots: Vec<_> = buckets.chain(keys).map(|spot| (spot.piece, spot.range.start, spot.range.end)).collect();
            prop_assert_eq!(spots.len() as u64, pieces as u64 * (homes + 2 * pairs + records));
            spots.sort_unstable();
            for pair in spots.windows(2) {
                prop_assert!(pair[0].0 < pair[1].0 || pair[0].2 <= pair[1].1);
            }
            prop_assert!(spots.iter().all(|spot| spot.1 >= HEAD_BYTES && spot.2 <= layout.bytes()));
        }
    }
}
