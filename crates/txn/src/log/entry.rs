//! The entries of a log: heads of commits, and their intents.

use farpool_wire::{NodeId, RecordHeader, RegionId, Version};

use super::room::IntentPlace;
use crate::checksum::checksum;
use crate::record::{FoundVersion, Label, MOST_RECORD_BYTES, RecordId, body_bytes, decode_body};

const WORD_BYTES: usize = 8;
/// Words of an intent before the body.
const INTENT_WORDS: usize = 5;
/// In an intent: the record was never written before.
const NEVER_WRITTEN: u64 = 1 << 32;

/// One commit of a log, and where its intents lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// Which commit.
    pub version: Version,
    /// Where its intents start, and which segments were in use.
    pub place: IntentPlace,
    /// How long its intents are, in bytes.
    pub length: u64,
    /// Their checksum.
    pub sum: u64,
}

impl Head {
    /// Bytes of a head.
    pub const BYTES: usize = 6 * WORD_BYTES;
    /// Bytes of its place: the head, the verdict on it, and a word that is spare.
    pub const PLACE_BYTES: usize = Head::BYTES + 2 * WORD_BYTES;

    /// The head of intents that will lie at `place`.
    pub fn new(version: Version, place: IntentPlace, intents: &[u8]) -> Head {
        Head { version, place, length: intents.len() as u64, sum: checksum(&[], intents) }
    }

    /// As it lies in the log.
    pub fn encode(&self) -> [u8; Head::BYTES] {
        let IntentPlace { start, segments } = self.place;
        let words = [RecordHeader::of(self.version).0, start, segments, self.length, self.sum];
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
        let &[version, start, segments, length, sum, own_sum, verdict, ..] = words.as_slice() else {
            return None;
        };
        let is_whole = own_sum == checksum(&[], &place[..Head::BYTES - WORD_BYTES]);
        let version = RecordHeader(version).version();
        let head = Head { version, place: IntentPlace { start, segments }, length, sum };
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

/// The version of one record that a commit replaces. If the commit is undone, this version is put back; if it
/// takes effect, older snapshots find the version here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Intent<'a> {
    /// Which record.
    pub record: RecordId,
    /// The region that it lies in.
    pub region: RegionId,
    /// Where in that region its header lies.
    pub header_at: u64,
    /// The length of the record's data.
    pub data_bytes: usize,
    /// The [body](crate::RecordLayout) that the commit replaces; `None`: the record was never written.
    pub replaced: Option<&'a [u8]>,
}

impl<'a> Intent<'a> {
    /// Bytes that the intent for a record with so many bytes of data takes in a log, if it has a version.
    pub const fn bytes_for(data_bytes: usize) -> usize {
        INTENT_WORDS * WORD_BYTES + body_bytes(data_bytes)
    }

    /// Bytes that it takes in a log.
    pub fn bytes(&self) -> usize {
        INTENT_WORDS * WORD_BYTES + self.replaced.map_or(0, <[u8]>::len)
    }

    /// The version that the commit replaces. `None`: the record was never written.
    pub fn version_before(&self) -> Option<FoundVersion<'a>> {
        decode_body(self.record, self.replaced?)
    }

    /// Which version the commit replaces. `None`: the intent was damaged.
    pub fn label_before(&self) -> Option<Label> {
        match self.version_before() {
            Some(found) => found.is_right.then_some(found.label),
            None => self.replaced.is_none().then_some(Label::INITIAL),
        }
    }

    /// Appends it to other intents of its commit.
    pub fn encode(&self, into: &mut Vec<u8>) {
        debug_assert!(self.replaced.is_none_or(|replaced| replaced.len() == body_bytes(self.data_bytes)));
        let never_written = if self.replaced.is_none() { NEVER_WRITTEN } else { 0 };
        let words = [
            self.record.0,
            self.region.node.0,
            u64::from(self.region.index),
            self.header_at,
            self.data_bytes as u64 | never_written,
        ];
        into.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        into.extend(self.replaced.unwrap_or_default());
    }

    /// The first of several intents, and the remaining bytes. `None`: no client writes such bytes.
    pub fn decode(bytes: &'a [u8]) -> Option<(Intent<'a>, &'a [u8])> {
        let (words, rest) = bytes.split_at_checked(INTENT_WORDS * WORD_BYTES)?;
        let (words, _) = words.as_chunks::<WORD_BYTES>();
        let words = *<&[_; INTENT_WORDS]>::try_from(words).ok()?;
        let [record, node, index, header_at, length] = words.map(u64::from_le_bytes);
        let data_bytes =
            usize::try_from(length & !NEVER_WRITTEN).ok().filter(|bytes| *bytes <= MOST_RECORD_BYTES)?;
        let (replaced, rest) = if length & NEVER_WRITTEN == 0 {
            let (replaced, rest) = rest.split_at_checked(body_bytes(data_bytes))?;
            (Some(replaced), rest)
        } else {
            (None, rest)
        };
        let region = RegionId { node: NodeId(node), index: u32::try_from(index).ok()? };
        Some((Intent { record: RecordId(record), region, header_at, data_bytes, replaced }, rest))
    }
}

#[cfg(test)]
mod tests {
    use farpool_wire::Slot;
    use proptest::prelude::*;

    use super::*;

    const PLACE: IntentPlace = IntentPlace { start: 64, segments: 24 };

    fn version(count: u64) -> Version {
        Version::new(Slot::new(5).unwrap(), count).unwrap()
    }

    fn intent(replaced: Option<&[u8]>) -> Intent<'_> {
        let region = RegionId { node: NodeId(3), index: 2 };
        Intent { record: RecordId(7), region, header_at: 400, data_bytes: 16, replaced }
    }

    #[test]
    fn layout_of_a_log_s_head_is_fixed() {
        let head = Head::new(version(9), PLACE, &[1; 24]);
        let bytes = head.encode();
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        assert_eq!(words[..4], [(5 << 49 | 9) << 3, 64, 24, 24]);
        assert_eq!(words[4..], [0xED221D4653E2A937, 0x370F02232438FCBD], "the checksums");
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
        intent(Some(&[1; 48])).encode(&mut bytes);
        intent(None).encode(&mut bytes);
        assert_eq!(bytes.len(), intent(Some(&[1; 48])).bytes() + intent(None).bytes());
        assert_eq!(intent(Some(&[1; 48])).bytes(), Intent::bytes_for(16));
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        assert_eq!(words[..5], [7, 3, 2, 400, 16]);
        assert_eq!(words[5..11], [0x0101_0101_0101_0101; 6]);
        assert_eq!(words[11..], [7, 3, 2, 400, 16 | 1 << 32]);
        let head = Head::new(version(9), PLACE, &bytes);
        assert_eq!(head.intents(&bytes), Some(vec![intent(Some(&[1; 48])), intent(None)]));
        assert_eq!(head.intents(&bytes[..8]), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_make_decoding_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Head::decode(&bytes);
            let _ = Head::new(version(1), PLACE, &bytes).intents(&bytes);
        }

        #[test]
        fn a_head_with_words_of_another_is_one_of_both_or_none(from in 0..6_usize, to in 0..=6_usize) {
            let other = IntentPlace { start: 0, segments: 8 };
            let (one, other) = (Head::new(version(9), PLACE, &[1; 24]), Head::new(version(73), other, &[2; 32]));
            let (from, to) = (8 * from.min(to), 8 * to);
            let mut mixed = [one.encode().to_vec(), vec![0; 16]].concat();
            mixed[from..to].copy_from_slice(&other.encode()[from..to]);
            let found = Head::decode(&mixed).map(|(head, _)| head);
            prop_assert!(found.is_none() || found == Some(one) || found == Some(other));
        }
    }
}
