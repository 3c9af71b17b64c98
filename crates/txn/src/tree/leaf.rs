//! Leaves of an ordered index: their bytes, what these say, and how a full leaf is split. Pure.
//!
//! ```text
//! leaf    state | checksum | next leaf | fences | entries ...
//! fences  which there are | number, key of the low one | number, key of the high one
//! entry   word | checksum | key
//! ```

use std::ops::Range;

use super::entry::{Children, EntryKind, EntryWord};
use crate::checksum::checksum;
use crate::record::WORD_BYTES;

/// Wanted size of a leaf: one READ of it is cheap, and has some dozen entries.
const WANTED_BYTES: usize = 1_024;
/// Bytes of the longest key: one of a hint, which is the rank of another leaf.
const MOST_BYTES: usize = crate::hash::MOST_KEY_BYTES + WORD_BYTES;
/// Fewest entries of a leaf, whatever their keys.
const LEAST_ENTRIES: usize = 8;
/// Odd: scatters the choices of clients.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;
/// Leaves fill whole cache lines.
const ALIGN: usize = 64;

/// Words before the fences: state, checksum, next leaf, and which fences there are.
const HEAD_WORDS: usize = 4;
const FENCES_AT: usize = HEAD_WORDS * WORD_BYTES;
const NEXT_AT: usize = 2 * WORD_BYTES;
const FLAGS_AT: usize = 3 * WORD_BYTES;
const HAS_LOW: u64 = 1;
const HAS_HIGH: u64 = 2;

/// Where an entry stands in an index: by its key, and among equal keys by its record's number.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Rank {
    /// The key.
    pub key: Box<[u8]>,
    /// The record.
    pub number: u64,
}

impl Rank {
    /// The place of this record under this key.
    pub fn new(key: &[u8], number: u64) -> Rank {
        Rank { key: key.into(), number }
    }
}

/// The size of leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeafLayout {
    key_bytes: usize,
    entries: usize,
}

impl LeafLayout {
    /// Leaves for keys of this many bytes. `None`: keys have 1 to 264.
    pub fn new(key_bytes: usize) -> Option<LeafLayout> {
        (1..=MOST_BYTES).contains(&key_bytes).then_some(())?;
        let layout = LeafLayout { key_bytes, entries: 0 };
        let entries = WANTED_BYTES.saturating_sub(layout.head_bytes()) / layout.entry_bytes();
        Some(LeafLayout { entries: entries.max(LEAST_ENTRIES), ..layout })
    }

    /// The same with fewer entries, for tests and simulations.
    pub fn with_entries(self, entries: usize) -> LeafLayout {
        LeafLayout { entries, ..self }
    }

    /// Bytes of a key.
    pub fn key_bytes(&self) -> usize {
        self.key_bytes
    }

    /// Entries of a leaf.
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// Bytes of a leaf.
    pub(super) fn bytes(&self) -> usize {
        (self.head_bytes() + self.entries * self.entry_bytes()).next_multiple_of(ALIGN)
    }

    fn padded_key(&self) -> usize {
        self.key_bytes.next_multiple_of(WORD_BYTES)
    }

    fn fence_bytes(&self) -> usize {
        WORD_BYTES + self.padded_key()
    }

    fn head_bytes(&self) -> usize {
        FENCES_AT + 2 * self.fence_bytes()
    }

    fn entry_bytes(&self) -> usize {
        2 * WORD_BYTES + self.padded_key()
    }

    /// Where the word of an entry lies.
    pub(super) fn word_of(&self, entry: usize) -> u64 {
        (self.head_bytes() + entry * self.entry_bytes()) as u64
    }

    /// Where the rest of an entry lies.
    pub(super) fn body_of(&self, entry: usize) -> Range<u64> {
        let start = self.word_of(entry);
        start + WORD_BYTES as u64..start + self.entry_bytes() as u64
    }

    /// The rest of the entry of a record under a key.
    pub(super) fn encode_body(&self, key: &[u8], number: u64) -> Vec<u8> {
        let mut padded = key.to_vec();
        padded.resize(self.padded_key(), 0);
        let sum = checksum(&[number], &padded);
        [&sum.to_le_bytes()[..], &padded].concat()
    }

    /// A new leaf: for ranks from `low` on, below `high`, where the leaf `next` begins; with these entries.
    pub(super) fn encode<'a>(
        &self,
        (low, high): (Option<&Rank>, Option<&Rank>),
        next: Option<u64>,
        entries: impl IntoIterator<Item = &'a (Rank, EntryWord)>,
    ) -> Vec<u8> {
        let mut bytes = vec![0; WORD_BYTES];
        let flags = if low.is_some() { HAS_LOW } else { 0 } | if high.is_some() { HAS_HIGH } else { 0 };
        let next = next.map_or(0, |next| next + 1);
        let mut head = [next.to_le_bytes(), flags.to_le_bytes()].concat();
        for fence in [low, high] {
            let end = head.len() + self.fence_bytes();
            if let Some(Rank { key, number }) = fence {
                head.extend(number.to_le_bytes());
                head.extend(key.iter());
            }
            head.resize(end, 0);
        }
        bytes.extend(checksum(&[], &head).to_le_bytes());
        bytes.extend(head);
        for (rank, word) in entries {
            bytes.extend(word.0.to_le_bytes());
            bytes.extend(self.encode_body(&rank.key, rank.number));
        }
        bytes.resize(self.bytes(), 0);
        bytes
    }
}

/// A leaf as it was read. Its words may be of different times.
#[derive(Clone, Copy, Debug)]
pub struct Leaf<'a> {
    layout: LeafLayout,
    bytes: &'a [u8],
    flags: u64,
}

/// A live entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LiveEntry<'a> {
    /// Its place in the leaf.
    pub place: usize,
    /// Its word.
    pub word: EntryWord,
    /// The record.
    pub number: u64,
    /// The key.
    pub key: &'a [u8],
}

/// Bytes that cannot be used as they were read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unusable {
    /// They may be of different times: read them again.
    Torn,
    /// No client writes such bytes.
    Damaged,
}

impl<'a> Leaf<'a> {
    /// Decodes the bytes of a leaf. The first leaf of an index is zeros at first: it has no fences.
    pub fn decode(layout: LeafLayout, bytes: &'a [u8]) -> Result<Leaf<'a>, Unusable> {
        let (Some(head), true) = (bytes.get(..layout.head_bytes()), bytes.len() == layout.bytes()) else {
            return Err(Unusable::Damaged);
        };
        let sealed = &head[NEXT_AT..];
        let (sum, flags) = (word(head, WORD_BYTES), word(head, FLAGS_AT));
        let is_first = || sum == 0 && sealed.iter().all(|&byte| byte == 0);
        if sum != checksum(&[], sealed) && !is_first() {
            return Err(Unusable::Torn);
        }
        Ok(Leaf { layout, bytes, flags })
    }

    /// The leaves that have replaced it.
    pub fn children(&self) -> Result<Option<Children>, Unusable> {
        Children::decode(word(self.bytes, 0)).ok_or(Unusable::Damaged)
    }

    /// The leaf that began at its high fence when this one was made.
    pub fn next(&self) -> Option<u64> {
        word(self.bytes, NEXT_AT).checked_sub(1)
    }

    /// Whether it is for lower ranks than this one.
    pub fn is_below(&self, key: &[u8], number: u64) -> bool {
        self.flags & HAS_HIGH != 0 && !self.is_before_fence(1, key, number)
    }

    /// Its low fence: the least rank for which it is.
    pub fn low(&self) -> Option<Rank> {
        (self.flags & HAS_LOW != 0).then(|| rank_of(self.fence(0)))
    }

    /// Its high fence: the least rank for which a later leaf is.
    pub fn high(&self) -> Option<Rank> {
        (self.flags & HAS_HIGH != 0).then(|| rank_of(self.fence(1)))
    }

    /// The key and the number of the low fence (0) or of the high one (1).
    fn fence(&self, which: usize) -> (&'a [u8], u64) {
        let start = FENCES_AT + which * self.layout.fence_bytes();
        let key = start + WORD_BYTES..start + WORD_BYTES + self.layout.key_bytes;
        (&self.bytes[key], word(self.bytes, start))
    }

    /// Whether it is for the highest ranks below this one; `None`: for the highest of all.
    pub fn covers_below(&self, end: Option<&Rank>) -> bool {
        let Some(end) = end else { return self.flags & HAS_HIGH == 0 };
        let starts_below = self.low().is_none_or(|low| low < *end);
        starts_below && self.high().is_none_or(|high| *end <= high)
    }

    fn is_before_fence(&self, which: usize, key: &[u8], number: u64) -> bool {
        (key, number) < self.fence(which)
    }

    /// Whether it is for this rank.
    pub fn covers(&self, key: &[u8], number: u64) -> bool {
        (self.flags & HAS_LOW == 0 || !self.is_before_fence(0, key, number))
            && (self.flags & HAS_HIGH == 0 || self.is_before_fence(1, key, number))
    }

    /// How many entries it has places for.
    pub fn places(&self) -> usize {
        self.layout.entries
    }

    /// The word of an entry.
    pub fn word(&self, place: usize) -> EntryWord {
        EntryWord(word(self.bytes, self.layout.word_of(place) as usize))
    }

    /// The words of all entries.
    pub fn words(&self) -> impl Iterator<Item = EntryWord> + '_ {
        (0..self.layout.entries).map(|place| self.word(place))
    }

    /// A place that is free, by preference one that other clients do not choose: `choice` is different for
    /// them.
    pub fn free_place(&self, is_free: fn(EntryWord) -> bool, choice: u64) -> Option<usize> {
        let (places, first) = (self.layout.entries, (choice.wrapping_mul(SPREAD) >> 32) as usize);
        (0..places).map(|place| (first + place) % places).find(|place| is_free(self.word(*place)))
    }

    /// A live entry. `None`: it is not live.
    pub fn live(&self, place: usize) -> Result<Option<LiveEntry<'a>>, Unusable> {
        let word_found = self.word(place);
        if word_found.kind() != EntryKind::Live {
            return Ok(None);
        }
        let number = word_found.number().ok_or(Unusable::Damaged)?;
        let body = self.layout.body_of(place);
        let body = &self.bytes[body.start as usize..body.end as usize];
        if word(body, 0) != checksum(&[number], &body[WORD_BYTES..]) {
            return Err(Unusable::Torn);
        }
        let key = &body[WORD_BYTES..WORD_BYTES + self.layout.key_bytes];
        Ok(Some(LiveEntry { place, word: word_found, number, key }))
    }

    /// All live entries, in the order of their places.
    pub fn all_live(&self) -> Result<Vec<LiveEntry<'a>>, Unusable> {
        (0..self.layout.entries).filter_map(|place| self.live(place).transpose()).collect()
    }

    /// What replaces a leaf that is frozen: the bytes of one leaf, if its live entries fit half of it, or
    /// otherwise of two, of which the first one names `next` as the next leaf. `wanted` is the rank of the
    /// entry for which there was no place: if it is the highest one, the first leaf stays nearly full, since
    /// more such entries may come.
    pub fn replacement(&self, wanted: &Rank, next: Option<u64>) -> Result<Vec<Vec<u8>>, Unusable> {
        let mut entries: Vec<(Rank, EntryWord)> = Vec::new();
        for live in self.all_live()? {
            entries.push((Rank::new(live.key, live.number), live.word.thawed()));
        }
        entries.sort_by(|one, other| one.0.cmp(&other.0));
        // A record may have two entries under a key: two clients have entered it at the same time. What
        // others rely on is neither the one nor the other then, so the word of the one that stays has to
        // differ from both.
        entries.dedup_by(|later, earlier| {
            let are_same = later.0 == earlier.0;
            if are_same {
                earlier.1 = earlier.1.relied_on_as_both(later.1);
            }
            are_same
        });
        let (low, high) = (self.low(), self.high());
        let most = self.layout.entries;
        if entries.len() <= most / 2 {
            return Ok(vec![self.layout.encode((low.as_ref(), high.as_ref()), self.next(), &entries)]);
        }
        let is_highest = entries.last().is_none_or(|(rank, _)| rank < wanted);
        let first = if is_highest { entries.len() - 1 } else { entries.len() / 2 };
        let middle = entries[first].0.clone();
        let [left, right] = [&entries[..first], &entries[first..]];
        Ok(vec![
            self.layout.encode((low.as_ref(), Some(&middle)), next, left),
            self.layout.encode((Some(&middle), high.as_ref()), self.next(), right),
        ])
    }
}

fn rank_of((key, number): (&[u8], u64)) -> Rank {
    Rank::new(key, number)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::rules::Shipped;
    use crate::tree::TreeRules;

    fn layout(entries: usize) -> LeafLayout {
        LeafLayout::new(3).unwrap().with_entries(entries)
    }

    fn rank(key: &str, number: u64) -> Rank {
        Rank::new(key.as_bytes(), number)
    }

    #[test]
    fn layout_of_leaves_is_fixed() {
        let layout = LeafLayout::new(8).unwrap();
        assert_eq!(
            (layout.entries(), layout.bytes(), layout.word_of(0), layout.body_of(1)),
            (40, 1_024, 64, 96..112)
        );
        let long = LeafLayout::new(256).unwrap();
        assert_eq!((long.entries(), long.bytes(), long.word_of(1)), (8, 2_752, 832));
        assert!(LeafLayout::new(0).is_none() && LeafLayout::new(265).is_none());
    }

    #[test]
    fn memory_that_was_never_written_is_an_empty_leaf_for_everything() {
        let bytes = vec![0; layout(4).bytes()];
        let leaf = Leaf::decode(layout(4), &bytes).unwrap();
        assert_eq!(
            (leaf.children(), leaf.low(), leaf.high(), leaf.free_place(Shipped::is_free, 0)),
            (Ok(None), None, None, Some(0))
        );
        assert!(
            leaf.covers(b"abc", 0) && leaf.covers_below(None) && leaf.covers_below(Some(&rank("abc", 0)))
        );
        assert_eq!(leaf.all_live(), Ok(Vec::new()));
    }

    #[test]
    fn a_leaf_is_for_what_lies_between_its_fences() {
        let (low, high) = (rank("bbb", 5), rank("ddd", 1));
        let bytes = layout(4).encode((Some(&low), Some(&high)), Some(6), []);
        let leaf = Leaf::decode(layout(4), &bytes).unwrap();
        assert_eq!((leaf.low(), leaf.high(), leaf.next()), (Some(low.clone()), Some(high.clone()), Some(6)));
        assert_eq!(
            [("ddd", 0), ("ddd", 1)].map(|(key, number)| leaf.is_below(key.as_bytes(), number)),
            [false, true]
        );
        let covers = [("bbb", 4), ("bbb", 5), ("ccc", 0), ("ddd", 0), ("ddd", 1)]
            .map(|(key, number)| leaf.covers(key.as_bytes(), number));
        assert_eq!(covers, [false, true, true, true, false]);
        let below = [("bbb", 5), ("bbb", 6), ("ddd", 1), ("ddd", 2)]
            .map(|(key, number)| leaf.covers_below(Some(&rank(key, number))));
        assert_eq!((below, leaf.covers_below(None)), ([false, true, true, false], false));
    }

    #[test]
    fn an_entry_whose_body_is_of_another_time_is_torn() {
        let mut bytes = layout(4).encode((None, None), None, &[(rank("abc", 7), EntryWord(0).live(7))]);
        let leaf = Leaf::decode(layout(4), &bytes).unwrap();
        let live = LiveEntry { place: 0, word: EntryWord(0).live(7), number: 7, key: b"abc" };
        assert_eq!(leaf.all_live(), Ok(vec![live]));
        bytes[layout(4).body_of(0).start as usize + 9] ^= 1;
        assert_eq!(Leaf::decode(layout(4), &bytes).unwrap().all_live(), Err(Unusable::Torn));
        bytes[24] ^= 2;
        assert_eq!(Leaf::decode(layout(4), &bytes).unwrap_err(), Unusable::Torn);
    }

    proptest! {
        #[test]
        fn what_replaces_a_leaf_has_its_live_entries_in_order(
            keys in prop::collection::vec((0u8..6, 0u64..4, any::<bool>()), 8),
            wanted in 0u8..7,
        ) {
            let layout = LeafLayout::new(1).unwrap().with_entries(8);
            let entries: Vec<_> = keys.iter().map(|&(key, number, is_live)| {
                let word = EntryWord(0).live(number);
                (Rank::new(&[key], number), if is_live { word.frozen() } else { word.removed().frozen() })
            }).collect();
            let (low, high) = (Rank::new(&[0], 0), Rank::new(&[9], 0));
            let bytes = layout.encode((Some(&low), Some(&high)), Some(70), &entries);
            let leaf = Leaf::decode(layout, &bytes).unwrap();
            prop_assert!(leaf.words().all(EntryWord::is_frozen));
            let images = leaf.replacement(&Rank::new(&[wanted], 0), Some(31)).unwrap();
            let parts: Vec<_> = images.iter().map(|image| Leaf::decode(layout, image).unwrap()).collect();
            let mut ranks: Vec<Rank> = entries.iter().filter(|(_, word)| word.kind() == EntryKind::Live).map(|(rank, _)| rank.clone()).collect();
            ranks.sort();
            ranks.dedup();
            let mut found = Vec::new();
            for part in &parts {
                prop_assert!(part.free_place(Shipped::is_free, 5).is_some() && part.children() == Ok(None));
                for live in part.all_live().unwrap() {
                    prop_assert!(part.covers(live.key, live.number) && !live.word.is_frozen());
                    found.push(Rank::new(live.key, live.number));
                }
            }
            prop_assert_eq!(found, ranks);
            prop_assert_eq!((parts[0].low(), parts[parts.len() - 1].high()), (Some(low), Some(high)));
            prop_assert_eq!(parts[parts.len() - 1].next(), Some(70));
            if let [left, right] = &parts[..] {
                prop_assert!(left.high().is_some() && left.high() == right.low());
                prop_assert_eq!(left.next(), Some(31));
            }
        }

        #[test]
        fn no_bytes_from_outside_are_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..600), sealed in any::<bool>()) {
            let mut bytes = bytes;
            bytes.resize(layout(4).bytes(), 1);
            if sealed {
                let sum = checksum(&[], &bytes[NEXT_AT..layout(4).head_bytes()]);
                bytes[8..16].copy_from_slice(&sum.to_le_bytes());
            }
            if let Ok(leaf) = Leaf::decode(layout(4), &bytes) {
                let _ = (leaf.children(), leaf.low(), leaf.high(), leaf.all_live(), leaf.covers(b"abc", 1));
            }
        }
    }
}
