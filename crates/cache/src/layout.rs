//! Where the words lie in shared memory.
//!
//! The door and the places come first: processes need them before there is an index.
//!
//! ```text
//! common   door, epoch, next content id, next incarnation, index, shape, version, outsiders,
//!          namespace, wanted slots, 6 words unused  128 B
//! places   each: holder, epoch, what, file, first block, blocks, hits, misses  64 B
//! files    each: word, incarnation, device, inode, generation, used, set is full, pinned  64 B
//! buckets  each: header, 7 × (key, entry), 1 word unused              128 B
//! slots    one word each
//! checksums  one word each: that of the page that was last written to the slot
//! hints    one word each: numbers of slots that may be free
//! signatures  one word for each file: what it was when the database ended, or 0
//! samples  how many reads were sampled, 8 words of what the keeper has made of them (`advice`), and a ring
//!          of the samples
//! ```
//!
//! A block has two buckets, and its entry may lie in either. The header of its *home bucket* counts the
//! block's writers; for this block, the header of the other one means nothing.

use std::ops::Range;

use crate::curve::{is_sampled, sampling_shift};
use crate::files::FileId;
use crate::words::Key;

pub(crate) const WORD_BYTES: u64 = 8;
/// Entries of a bucket.
pub(crate) const ENTRIES: usize = 7;
const COMMON_WORDS: usize = 16;
const PLACE_WORDS: usize = 8;
const FILE_WORDS: usize = 8;
const BUCKET_WORDS: usize = 16;
/// Numbers that are looked at for a file: as many as a search should take, if the file is not known.
pub(crate) const FILE_WAYS: u32 = 16;
/// Slots for each hint: there are more hints than slots that the keeper keeps free.
const HINT_DIVISOR: u32 = 32;
/// Fewest hints, if there are that many slots.
const HINTS_MIN: u32 = 1024;
/// Most hints: each sweep loads all of them.
pub(crate) const HINTS_MAX: u32 = 8192;
/// Words of a line of the processor's cache. The number of samples, which many processes change, has a line
/// for itself.
pub(crate) const LINE_WORDS: usize = 8;
/// Words of what the keeper makes of the samples.
pub(crate) const ADVICE_WORDS: usize = 8;
/// Most samples that the ring has room for: those of some rounds of the keeper.
const SAMPLES_MAX: u32 = 4096;

/// Most places: it bounds the counts in headers and in the words of files.
pub const MAX_PLACES: u32 = 4_096;

/// Most slots: it keeps the numbers of entries within 32 bits.
pub const MAX_SLOTS: u32 = 1 << 31;

/// How large a cache is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Processes, or threads of them, that use it at a time.
    pub places: u32,
    /// Files that are known at a time.
    pub files: u32,
    /// Pages that fit.
    pub slots: u32,
}

/// The offsets of all words, in words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    shape: Shape,
    buckets: u32,
    hints: u32,
    samples: u32,
    /// Of the hash of a sampled block, so many low bits are 0.
    sampling_shift: u32,
}

pub(crate) const DOOR: usize = 0;
/// Counts grace periods.
pub(crate) const EPOCH: usize = 1;
pub(crate) const NEXT_CONTENT_ID: usize = 2;
pub(crate) const NEXT_INCARNATION: usize = 3;
/// The number of the index behind the door: part of the name of its daemon's socket. It changes only while
/// the door is closed.
pub(crate) const INDEX: usize = 4;
/// The shape of that index: files in the upper half, slots in the lower one.
pub(crate) const SHAPE: usize = 5;
/// The version of the layout, and the number of places.
pub(crate) const VERSION: usize = 6;
/// Processes that are changing a file without a place (C9).
pub(crate) const OUTSIDERS: usize = 7;
/// A number for the namespaces of the process that has made the door.
pub(crate) const NAMESPACE: usize = 8;

/// How many slots are to have memory.
pub(crate) const WANTED_SLOTS: usize = 9;

/// The shape in a word of the door; it has no places.
pub(crate) fn shape_of(word: u64) -> Shape {
    Shape { places: 0, files: (word >> 32) as u32, slots: (word as u32).min(MAX_SLOTS) }
}

/// The word of a shape, without its places.
pub(crate) fn shape_word(shape: Shape) -> u64 {
    u64::from(shape.files) << 32 | u64::from(shape.slots)
}

impl Layout {
    /// The layout of a cache. There are at least 1.75 entries for each slot: with fewer, pages would find
    /// both their buckets full while slots are free.
    ///
    /// # Panics
    /// If there are more than [`MAX_PLACES`] places or [`MAX_SLOTS`] slots.
    pub fn new(shape: Shape) -> Layout {
        assert!(shape.places <= MAX_PLACES, "{} places: at most {MAX_PLACES}", shape.places);
        assert!(shape.slots <= MAX_SLOTS, "{} slots: at most {MAX_SLOTS}", shape.slots);
        let buckets = shape.slots.div_ceil(4).max(1);
        let hints = (shape.slots / HINT_DIVISOR).clamp(HINTS_MIN.min(shape.slots), HINTS_MAX).max(1);
        let (samples, sampling_shift) = (shape.slots.clamp(1, SAMPLES_MAX), sampling_shift(shape.slots));
        Layout { shape, buckets, hints, samples, sampling_shift }
    }

    /// How large it is.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Bytes of shared memory for the door and so many places, all 0 at the beginning.
    pub fn door_bytes(places: u32) -> u64 {
        Self::place(places) as u64 * WORD_BYTES
    }

    /// Bytes of shared memory for the rest, all 0 at the beginning.
    pub fn index_bytes(&self) -> u64 {
        self.index_words() as u64 * WORD_BYTES
    }

    pub(crate) fn index_words(&self) -> usize {
        self.words() - Self::place(self.shape.places)
    }

    /// How many words there are.
    pub fn words(&self) -> usize {
        self.sample(0) + self.samples as usize
    }

    pub(crate) fn hints(&self) -> u32 {
        self.hints
    }

    /// Where a place lies. It does not depend on the index: processes enter their places before they know
    /// whether there is one.
    pub(crate) fn place(place: u32) -> usize {
        COMMON_WORDS + place as usize * PLACE_WORDS
    }

    pub(crate) fn file(&self, file: u32) -> usize {
        Self::place(self.shape.places) + file as usize * FILE_WORDS
    }

    /// A file's incarnation: no other file that was ever known has the same.
    pub(crate) fn incarnation(&self, file: u32) -> usize {
        self.file(file) + 1
    }

    /// Where the parts of a file's id lie.
    pub(crate) fn file_id(&self, file: u32) -> [usize; 3] {
        [2, 3, 4].map(|word| self.file(file) + word)
    }

    /// Whether the file was used for a read lately: not 0.
    pub(crate) fn file_used(&self, file: u32) -> usize {
        self.file(file) + 5
    }

    /// Whether a process has found a set full that begins at this number: not 0.
    pub(crate) fn set_full(&self, first: u32) -> usize {
        self.file(first) + 6
    }

    /// Whether the file is pinned: not 0.
    pub(crate) fn file_pinned(&self, file: u32) -> usize {
        self.file(file) + 7
    }

    /// The numbers under which a file may be known.
    pub(crate) fn file_set(&self, id: FileId) -> Range<u32> {
        let ways = FILE_WAYS.min(self.shape.files);
        let sets = self.shape.files.checked_div(ways).unwrap_or(0);
        let mixed = mix(mix(id.device) ^ id.inode) ^ id.generation;
        let set = scale(mix(mixed), sets);
        set * ways..(set + 1) * ways
    }

    pub(crate) fn header(&self, bucket: u32) -> usize {
        self.file(self.shape.files) + bucket as usize * BUCKET_WORDS
    }

    pub(crate) fn key(&self, entry: u32) -> usize {
        let (bucket, number) = (entry / ENTRIES as u32, entry as usize % ENTRIES);
        self.header(bucket) + 1 + 2 * number
    }

    pub(crate) fn entry(&self, entry: u32) -> usize {
        self.key(entry) + 1
    }

    /// How many entries all buckets have.
    pub(crate) fn all_entries(&self) -> u32 {
        self.buckets * ENTRIES as u32
    }

    /// The entries of a bucket.
    pub(crate) fn entries_of(&self, bucket: u32) -> Range<u32> {
        bucket * ENTRIES as u32..(bucket + 1) * ENTRIES as u32
    }

    /// The entries of two buckets, those of the first one first. If both are the same bucket, each entry
    /// occurs once.
    pub(crate) fn entries(&self, [first, second]: [u32; 2]) -> impl Iterator<Item = u32> + use<> {
        let others = if second == first { 0..0 } else { self.entries_of(second) };
        self.entries_of(first).chain(others)
    }

    pub(crate) fn slot(&self, slot: u32) -> usize {
        self.header(self.buckets) + slot as usize
    }

    /// Where a slot's checksum lies.
    pub(crate) fn checksum(&self, slot: u32) -> usize {
        self.slot(self.shape.slots) + slot as usize
    }

    pub(crate) fn hint(&self, hint: u32) -> usize {
        self.checksum(self.shape.slots) + hint as usize
    }

    /// Where a file's signature lies (R1).
    pub(crate) fn signature(&self, file: u32) -> usize {
        self.hint(self.hints) + file as usize
    }

    /// Where it is counted how many reads were sampled.
    pub(crate) fn sampled(&self) -> usize {
        self.signature(self.shape.files).next_multiple_of(LINE_WORDS)
    }

    /// Where a word of the keeper's advice lies.
    pub(crate) fn advice(&self, number: usize) -> usize {
        self.sampled() + LINE_WORDS + number
    }

    /// Where the sample with this number lies, until a later one takes its place.
    pub(crate) fn sample(&self, number: u64) -> usize {
        self.advice(ADVICE_WORDS) + (number % u64::from(self.samples)) as usize
    }

    /// How many samples there is room for.
    pub(crate) fn samples(&self) -> u32 {
        self.samples
    }

    /// How many of so many blocks are sampled, about.
    pub(crate) fn sampled_of(&self, blocks: u64) -> u64 {
        blocks >> self.sampling_shift
    }

    /// The hash by which blocks are chosen.
    pub(crate) fn hash_of(&self, key: Key) -> u64 {
        mix(key.0)
    }

    /// The hash of a block's key, if reads of the block are sampled.
    pub(crate) fn sample_of(&self, key: Key) -> Option<u64> {
        Some(self.hash_of(key)).filter(|hash| is_sampled(*hash, self.sampling_shift))
    }

    /// The slot that the word of a hint names.
    pub(crate) fn hinted(&self, word: u64) -> Option<u32> {
        let slot = u32::try_from(word.checked_sub(1)?).ok()?;
        (slot < self.shape.slots).then_some(slot)
    }

    /// The home bucket of a file's block, and its other bucket. They are the same if there is only one. They
    /// do not depend on the file's id, so that a writer finds them whatever happens to the id meanwhile.
    pub(crate) fn buckets(&self, file: u32, block: u32) -> [u32; 2] {
        // Consecutive blocks are scattered.
        let mixed = mix(u64::from(file) << 32 | u64::from(block));
        let home = scale(mixed, self.buckets);
        let other = home + 1 + scale(mix(mixed), self.buckets - 1);
        // Without a division: this is done for each read.
        [home, if other < self.buckets { other } else { other - self.buckets }]
    }

    /// The home bucket of a file's block: its header counts the block's writers.
    pub(crate) fn home(&self, file: u32, block: u32) -> u32 {
        self.buckets(file, block)[0]
    }
}

/// Whether a new page goes to its other bucket. `empty`: how many empty entries its home bucket and its other
/// bucket have. `enough`: with so many in the home bucket, the page goes there.
pub(crate) fn is_other_better([home, other]: [usize; 2], enough: usize) -> bool {
    home < enough && other > home
}

/// The finaliser of SplitMix64.
fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// A random word as a number below `limit`; 0 if that is 0.
fn scale(random: u64, limit: u32) -> u32 {
    ((u128::from(random) * u128::from(limit)) >> 64) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{Rules, Shipped};

    #[test]
    fn nothing_overlaps() {
        let layout = Layout::new(Shape { places: 3, files: 2, slots: 9 });
        let mut used = vec![0; layout.words()];
        let mut mark =
            |at: usize, words: usize| used[at..at + words].iter_mut().for_each(|count| *count += 1);
        mark(0, COMMON_WORDS);
        (0..3).for_each(|place| mark(Layout::place(place), PLACE_WORDS));
        (0..2).for_each(|file| mark(layout.file(file), FILE_WORDS));
        for bucket in 0..layout.buckets {
            mark(layout.header(bucket), 1);
            layout.entries_of(bucket).for_each(|entry| mark(layout.key(entry), 2));
            mark(layout.header(bucket) + BUCKET_WORDS - 1, 1);
        }
        (0..9).for_each(|slot| mark(layout.slot(slot), 1));
        (0..9).for_each(|slot| mark(layout.checksum(slot), 1));
        (0..layout.hints()).for_each(|hint| mark(layout.hint(hint), 1));
        (0..2).for_each(|file| mark(layout.signature(file), 1));
        // The number of samples has a cache line for itself.
        let unused = layout.signature(2)..layout.advice(0);
        unused.for_each(|word| mark(word, 1));
        (0..ADVICE_WORDS).for_each(|number| mark(layout.advice(number), 1));
        (0..layout.samples().into()).for_each(|number| mark(layout.sample(number), 1));
        assert!(used.iter().all(|count| *count == 1), "{used:?}");
    }

    #[test]
    fn a_block_has_two_buckets_if_there_are_two() {
        for (slots, entries) in [(4, ENTRIES), (5, 2 * ENTRIES), (4_000, 2 * ENTRIES)] {
            let layout = Layout::new(Shape { places: 1, files: 1, slots });
            for block in 0..200 {
                let buckets = layout.buckets(0, block);
                assert!(buckets.iter().all(|bucket| *bucket < layout.buckets), "{buckets:?}");
                let found: BTreeSet<u32> = layout.entries(buckets).collect();
                assert_eq!((found.len(), layout.entries(buckets).count()), (entries, entries), "{buckets:?}");
                assert!(found.contains(&(layout.home(0, block) * ENTRIES as u32)), "{buckets:?}");
            }
        }
    }

    #[test]
    fn as_many_pages_as_there_are_slots_find_empty_entries() {
        const SLOTS: u32 = 40_000;
        for files in [1, 3, 40] {
            let layout = Layout::new(Shape { places: 1, files, slots: SLOTS });
            assert!(layout.all_entries() >= SLOTS * 7 / 4);
            let mut empty = vec![ENTRIES; layout.buckets as usize];
            let mut away = 0;
            for page in 0..SLOTS {
                let [home, other] = layout.buckets(page % files, page / files).map(|bucket| bucket as usize);
                let is_away = is_other_better([empty[home], empty[other]], Shipped::ENOUGH_EMPTY);
                let chosen = &mut empty[if is_away { other } else { home }];
                assert!(*chosen > 0, "{files} files: page {page} finds no empty entry");
                *chosen -= 1;
                away += u32::from(is_away);
            }
            assert!(away < SLOTS / 10, "{files} files: {away} pages are not in their home buckets");
        }
    }
}
