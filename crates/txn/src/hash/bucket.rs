//! Buckets: the word that names a bucket's children, and its entries (`docs/src/wire.md`, *indexes*).

use super::key::KeyHash;
use super::layout::MOST_ENTRIES;

const WORD_BYTES: usize = size_of::<u64>();
/// Bits of the field that names a bucket or a record. It holds the number plus one; zero stands for none.
pub(super) const NUMBER_BITS: u32 = 43;
/// Bits of a key's hash in its entry. The bit between them and the number is zero: it is reserved for
/// removing entries.
pub(super) const HASH_BITS: u32 = 20;
/// Most splits below a home bucket: one for each bit of the hash that an entry has.
pub const MOST_DEPTH: u32 = HASH_BITS;
const NUMBER: u64 = (1 << NUMBER_BITS) - 1;

/// An entry that is not empty: the number of a record, and some bits of its key's hash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry(u64);

impl Entry {
    /// The entry of a key.
    pub fn new(hash: KeyHash, number: u64) -> Entry {
        debug_assert!(number < NUMBER, "a layout has no such number");
        Entry((hash.entry_bits() << (u64::BITS - HASH_BITS)) | (number + 1))
    }

    /// The entry's word in its bucket.
    pub fn word(self) -> u64 {
        self.0
    }

    /// Decodes a word of a bucket. `None`: it is not an entry.
    fn from_word(word: u64) -> Option<Entry> {
        let entry = Entry(word);
        let is_reserved = word >> NUMBER_BITS & 1 == 1;
        (word & NUMBER != 0 && !is_reserved).then_some(entry)
    }

    /// The record's number.
    pub fn number(self) -> u64 {
        (self.0 & NUMBER) - 1
    }

    /// Whether it may be the entry of a key with this hash.
    pub fn fits(self, hash: KeyHash) -> bool {
        self.hash_bits() == hash.entry_bits()
    }

    fn hash_bits(self) -> u64 {
        self.0 >> (u64::BITS - HASH_BITS)
    }
}

/// To which of its two children a bucket of this depth sends an entry with these bits of a hash.
fn side(hash_bits: u64, depth: u32) -> usize {
    (hash_bits >> depth & 1) as usize
}

/// The word that names a bucket's children.
pub(super) fn children_word(first: u64) -> u64 {
    first + 1
}

/// The first of the two children that a bucket's word names. `None`: no bucket has such a word. `Some(None)`:
/// there are no children.
pub(super) fn children(word: u64) -> Option<Option<u64>> {
    (word <= NUMBER).then(|| word.checked_sub(1))
}

/// A bucket as it was read. Its words may be of different times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bucket {
    children: Option<u64>,
    entries: [Option<Entry>; MOST_ENTRIES],
    /// How many entries the bucket has room for.
    places: usize,
}

impl Bucket {
    /// Decodes the bytes of a bucket. `None`: they are not those of a bucket.
    pub fn decode(bytes: &[u8]) -> Option<Bucket> {
        let (words, []) = bytes.as_chunks::<WORD_BYTES>() else { return None };
        let (first, rest) = words.split_first()?;
        let children = children(u64::from_le_bytes(*first))?;
        let mut bucket = Bucket { children, entries: [None; MOST_ENTRIES], places: rest.len() };
        for (place, word) in rest.iter().enumerate() {
            let word = u64::from_le_bytes(*word);
            let entry = if word == 0 { None } else { Some(Entry::from_word(word)?) };
            *bucket.entries.get_mut(place)? = entry;
        }
        Some(bucket)
    }

    /// The first of the two buckets into which it was split, if it was.
    pub fn children(&self) -> Option<u64> {
        self.children
    }

    /// Its entries, without the empty ones.
    pub fn entries(&self) -> impl Iterator<Item = Entry> + '_ {
        self.entries[..self.places].iter().flatten().copied()
    }

    /// The empty places.
    pub fn empty_places(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        (0..self.places).filter(|&place| self.entries[place].is_none())
    }

    /// The bucket with this entry in this place.
    pub(super) fn with(mut self, place: usize, entry: Entry) -> Bucket {
        self.entries[place] = Some(entry);
        self
    }

    /// The two buckets into which a bucket of this depth is split, with its entries in their order.
    pub(super) fn halves(&self, depth: u32) -> Vec<u8> {
        let bytes = (1 + self.places) * WORD_BYTES;
        let mut image = vec![0; 2 * bytes];
        let mut filled = [0; 2];
        for entry in self.entries() {
            let side = side(entry.hash_bits(), depth);
            filled[side] += 1;
            let at = side * bytes + filled[side] * WORD_BYTES;
            image[at..at + WORD_BYTES].copy_from_slice(&entry.word().to_le_bytes());
        }
        image
    }
}

/// A step of the search for a key: a bucket, and how many splits lie above it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Position {
    pub(super) bucket: u64,
    pub(super) depth: u32,
}

impl Position {
    /// The start of a search, in a home bucket.
    pub(super) fn home(bucket: u64) -> Position {
        Position { bucket, depth: 0 }
    }

    /// The child in which the search for a key goes on. `None`: the bucket lies below splits by all the bits
    /// that entries have.
    pub(super) fn child(self, children: u64, hash: KeyHash) -> Option<Position> {
        (self.depth < MOST_DEPTH).then(|| Position {
            bucket: children + side(hash.entry_bits(), self.depth) as u64,
            depth: self.depth + 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes_of(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn layout_of_buckets_is_fixed() {
        let entry = Entry::new(KeyHash(0xFFFF_FFFF_FFF1_2345), 8);
        assert_eq!(entry.word(), 0x1234_5000_0000_0009);
        assert_eq!(Entry::new(KeyHash(u64::MAX), 0).word(), 0xFFFF_F000_0000_0001);
        assert_eq!(
            (entry.number(), entry.fits(KeyHash(0x1_2345)), entry.fits(KeyHash(0x1_2344))),
            (8, true, false)
        );
        let bucket = Bucket::decode(&bytes_of(&[42, entry.word(), 0])).unwrap();
        assert_eq!((bucket.children(), children_word(41)), (Some(41), 42));
        assert_eq!(bucket.entries().collect::<Vec<_>>(), [entry]);
        assert_eq!(bucket.empty_places().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn memory_that_was_never_written_is_an_empty_bucket_without_children() {
        let bucket = Bucket::decode(&[0; 128]).unwrap();
        assert_eq!(
            (bucket.children(), bucket.entries().count(), bucket.empty_places().count()),
            (None, 0, 15)
        );
    }

    #[test]
    fn invalid_bytes_are_not_decoded_as_a_bucket() {
        let taken = |words: &[u64]| Bucket::decode(&bytes_of(words)).is_some();
        assert!(!taken(&[]) && !taken(&[0; 17]) && Bucket::decode(&[0; 12]).is_none());
        assert!(!taken(&[1 << 43, 0]), "children of no number");
        assert!(!taken(&[0, 1 << 50]), "a hash of no number");
        assert!(!taken(&[0, 1 << 43 | 1]), "the bit between them");
    }

    #[test]
    fn buckets_are_split_by_the_hash_bits_of_entries_and_no_others() {
        let hash = KeyHash(0b1);
        let first = Position::home(3).child(10, hash).unwrap();
        assert_eq!(first, Position { bucket: 11, depth: 1 });
        assert_eq!(first.child(20, hash), Some(Position { bucket: 20, depth: 2 }));
        assert_eq!(Position { bucket: 3, depth: 20 }.child(10, hash), None);
    }

    proptest! {
        #[test]
        fn a_split_sends_each_entry_where_its_key_is_looked_for(
            keys in prop::collection::vec((any::<u64>(), 0u64..1_000), 1..15), depth in 0u32..20,
        ) {
            let entries: Vec<Entry> = keys.iter().map(|&(hash, number)| Entry::new(KeyHash(hash), number)).collect();
            let words: Vec<u64> = [0].into_iter().chain(entries.iter().map(|entry| entry.word())).collect();
            let image = Bucket::decode(&bytes_of(&words)).unwrap().halves(depth);
            let (low, high) = image.split_at(image.len() / 2);
            let halves = [low, high].map(|half| Bucket::decode(half).unwrap());
            let mut whole = Vec::new();
            for (side, half) in halves.iter().enumerate() {
                prop_assert_eq!(half.children(), None);
                let filled = half.entries().count();
                prop_assert_eq!(half.empty_places().next().unwrap_or(filled), filled, "no gaps");
                whole.extend(half.entries().map(|entry| entry.word()));
                for entry in half.entries() {
                    let (hash, _) = keys.iter().find(|key| Entry::new(KeyHash(key.0), key.1) == entry).unwrap();
                    let at = Position { bucket: 0, depth }.child(0, KeyHash(*hash)).unwrap();
                    prop_assert_eq!(at.bucket, side as u64);
                }
            }
            whole.sort_unstable();
            let mut wanted: Vec<u64> = words[1..].to_vec();
            wanted.sort_unstable();
            prop_assert_eq!(whole, wanted);
        }

        #[test]
        fn no_bytes_from_outside_are_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(bucket) = Bucket::decode(&bytes) {
                let _ = (bucket.entries().count(), bucket.halves(3));
            }
        }
    }
}
