//! The entries of a log: heads of commits, and their intents.

use farpool_wire::{NodeId, RecordHeader, RegionId, Version};

use crate::checksum::checksum;
use crate::record::{MOST_RECORD_BYTES, NumberedHeader, RecordId};

const WORD_BYTES: usize = 8;
/// Words of an intent before its data.
const INTENT_WORDS: usize = 8;
/// In an intent: the record is deleted.
const DELETED: u64 = 1 << 32;

/// One commit of a log, and where its intents lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// Which commit.
    pub version: Version,
    /// The number of the cut from which its transaction began. Nothing reads it yet, nor the new data of
    /// intents: both are for the recovery of a lost node, which will replay the logs of several slots in this
    /// order.
    pub begun_from: u64,
    /// Where in the ring its intents start.
    pub start: u64,
    /// How long they are.
    pub length: u64,
    /// Their checksum.
    pub sum: u64,
}

impl Head {
    /// Bytes of a head.
    pub const BYTES: usize = 6 * WORD_BYTES;
    /// Bytes of its place: the head, the verdict on it, and a word that is spare.
    pub const PLACE_BYTES: usize = Head::BYTES + 2 * WORD_BYTES;

    /// The head of intents that will lie at `start`.
    pub fn new(version: Version, begun_from: u64, start: u64, intents: &[u8]) -> Head {
        let sum = checksum(&[], intents);
        Head { version, begun_from, start, length: intents.len() as u64, sum }
    }

    /// As it lies in the log.
    pub fn encode(&self) -> [u8; Head::BYTES] {
        let words = [RecordHeader::of(self.version).0, self.begun_from, self.start, self.length, self.sum];
        let mut bytes = [0; Head::BYTES];
        for (place, word) in bytes.chunks_exact_mut(WORD_BYTES).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let (body, sum) = bytes.split_at_mut(Head::BYTES - WORD_BYTES);
        sum.copy_from_slice(&checksum(&[], body).to_le_bytes());
        bytes
    }

    /// The head in a place's bytes, and whether its commit was rolled back. `None`: there is no head, or it
    /// was never written whole.
    pub fn decode(place: &[u8]) -> Option<(Head, bool)> {
        let (words, _) = place.as_chunks::<WORD_BYTES>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let &[version, begun_from, start, length, sum, own_sum, verdict, ..] = words.as_slice() else {
            return None;
        };
        let is_whole = own_sum == checksum(&[], &place[..Head::BYTES - WORD_BYTES]);
        let version = RecordHeader(version).version();
        let head = Head { version, begun_from, start, length, sum };
        (is_whole && version != Version::INITIAL).then_some((head, verdict == Head::verdict_on(version)))
    }

    /// The word that says that this commit was rolled back. It says nothing of any other commit.
    pub fn verdict_on(version: Version) -> u64 {
        RecordHeader::of(version).0
    }

    /// The intents in the bytes of their place, if the bytes are those of this commit.
    pub fn intents<'a>(&self, bytes: &'a [u8]) -> Option<Vec<Intent<'a>>> {
        if self.sum != checksum(&[], bytes) {
            return None;
        }
        let (mut intents, mut rest) = (Vec::new(), bytes);
        while !rest.is_empty() {
            let (intent, after) = Intent::decode(rest)?;
            intents.push(intent);
            rest = after;
        }
        Some(intents)
    }
}

/// What a commit does to one record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Intent<'a> {
    /// Which record.
    pub record: RecordId,
    /// The region that it lies in.
    pub region: RegionId,
    /// Where its header lies there.
    pub current: u64,
    /// Its header before the commit.
    pub seen: RecordHeader,
    /// Where the version before is kept: its checksum and data.
    pub old: u64,
    /// The number of that version, which determines its place in the record's ring.
    pub number: u64,
    /// The length of the record's data.
    pub data_bytes: usize,
    /// The record's new data; `None`: it is deleted.
    pub new: Option<&'a [u8]>,
}

impl<'a> Intent<'a> {
    /// Bytes that it takes in a log.
    pub fn bytes(&self) -> usize {
        INTENT_WORDS * WORD_BYTES + self.new.map_or(0, <[u8]>::len)
    }

    /// Which version was there before.
    pub fn old_version(&self) -> NumberedHeader {
        NumberedHeader { number: self.number, header: self.seen.lasting() }
    }

    /// Appends it to other intents of its commit.
    pub fn encode(&self, into: &mut Vec<u8>) {
        debug_assert!(self.new.is_none_or(|new| new.len() == self.data_bytes));
        let deleted = if self.new.is_none() { DELETED } else { 0 };
        let words = [
            self.record.0,
            self.region.node.0,
            u64::from(self.region.index),
            self.current,
            self.seen.0,
            self.old,
            self.number,
            self.data_bytes as u64 | deleted,
        ];
        into.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        into.extend(self.new.unwrap_or_default());
    }

    /// The first of several intents, and the remaining bytes. `None`: no client writes such bytes.
    fn decode(bytes: &'a [u8]) -> Option<(Intent<'a>, &'a [u8])> {
        let (words, rest) = bytes.split_at_checked(INTENT_WORDS * WORD_BYTES)?;
        let (words, _) = words.as_chunks::<WORD_BYTES>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let &[record, node, index, current, seen, old, number, length] = words.as_slice() else {
            return None;
        };
        let data_bytes =
            usize::try_from(length & !DELETED).ok().filter(|bytes| *bytes <= MOST_RECORD_BYTES)?;
        let (new, rest) = if length & DELETED == 0 {
            let (new, rest) = rest.split_at_checked(data_bytes)?;
            (Some(new), rest)
        } else {
            (None, rest)
        };
        let region = RegionId { node: NodeId(node), index: u32::try_from(index).ok()? };
        let record = RecordId(record);
        let seen = RecordHeader(seen);
        Some((Intent { record, region, current, seen, old, number, data_bytes, new }, rest))
    }
}

#[cfg(test)]
mod tests {
    use farpool_wire::Slot;
    use proptest::prelude::*;

    use super::*;

    fn version(count: u64) -> Version {
        Version::new(Slot::new(5).unwrap(), count).unwrap()
    }

    fn intent(new: Option<&[u8]>) -> Intent<'_> {
        Intent {
            record: RecordId(7),
            region: RegionId { node: NodeId(3), index: 2 },
            current: 400,
            seen: RecordHeader::of(version(4)),
            old: 960,
            number: 11,
            data_bytes: 16,
            new,
        }
    }

    #[test]
    fn layout_of_a_log_s_head_is_fixed() {
        let head = Head::new(version(9), 2, 64, &[1; 24]);
        let bytes = head.encode();
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        assert_eq!(words[..4], [(5 << 49 | 9) << 3, 2, 64, 24]);
        assert_eq!(words[4..], [0xED221D4653E2A937, 0x41D1C89D1996E58F], "the checksums");
        let place = |verdict: u64| [&bytes[..], &verdict.to_le_bytes(), &[0; 8]].concat();
        assert_eq!(Head::decode(&place(0)), Some((head, false)));
        assert_eq!(Head::decode(&place(Head::verdict_on(version(9)))), Some((head, true)));
        assert_eq!(
            Head::decode(&place(Head::verdict_on(version(8)))),
            Some((head, false)),
            "of another commit"
        );
    }

    #[test]
    fn memory_that_is_all_zeros_holds_no_head() {
        assert_eq!(Head::decode(&[0; Head::PLACE_BYTES]), None);
        assert_eq!(Head::decode(&[]), None);
    }

    #[test]
    fn layout_of_an_intent_is_fixed() {
        let mut bytes = Vec::new();
        intent(Some(&[1; 16])).encode(&mut bytes);
        intent(None).encode(&mut bytes);
        assert_eq!(bytes.len(), intent(Some(&[1; 16])).bytes() + intent(None).bytes());
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let seen = (5 << 49 | 4) << 3;
        assert_eq!(words[..8], [7, 3, 2, 400, seen, 960, 11, 16]);
        assert_eq!(words[8..10], [0x0101_0101_0101_0101; 2]);
        assert_eq!(words[10..], [7, 3, 2, 400, seen, 960, 11, 16 | 1 << 32]);
        let head = Head::new(version(9), 0, 0, &bytes);
        assert_eq!(head.intents(&bytes), Some(vec![intent(Some(&[1; 16])), intent(None)]));
        assert_eq!(head.intents(&bytes[..8]), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_make_decoding_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Head::decode(&bytes);
            let _ = Head::new(version(1), 0, 0, &bytes).intents(&bytes);
        }

        #[test]
        fn a_head_with_words_of_another_is_one_of_both_or_none(from in 0..6_usize, to in 0..=6_usize) {
            let (one, other) = (Head::new(version(9), 2, 64, &[1; 24]), Head::new(version(73), 5, 0, &[2; 32]));
            let (from, to) = (8 * from.min(to), 8 * to);
            let mut mixed = [one.encode().to_vec(), vec![0; 16]].concat();
            mixed[from..to].copy_from_slice(&other.encode()[from..to]);
            let found = Head::decode(&mixed).map(|(head, _)| head);
            prop_assert!(found.is_none() || found == Some(one) || found == Some(other));
        }
    }
}
