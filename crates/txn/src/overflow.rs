//! The overflow region: old versions that a snapshot may need, and for which rings have no room any more
//! (paper 3, section 5.1).
//!
//! W1. A record's versions there form a chain, from the one moved last to earlier ones. Their numbers have no
//!     gap as far as any snapshot needs them.
//! W2. An entry is written once, whole, before the chain has it. It does not change for as long as any
//!     snapshot may need it. A checksum binds it to its record, its version and its link to the next entry.
//! W3. Only the mover writes there (`mover.rs`).

use crc_fast::{CrcAlgorithm, Digest};
use farpool_wire::RecordHeader;

use crate::record::{NumberedHeader, RecordId, RecordLayout, WORD_BYTES};

/// A version in the overflow region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry<'a> {
    /// The record.
    pub record: RecordId,
    /// The version.
    pub named: NumberedHeader,
    /// The entry of the version before it. `None`: no snapshot needs that one.
    pub before: Option<u64>,
    /// The data.
    pub data: &'a [u8],
}

impl<'a> Entry<'a> {
    /// The bytes of the entry.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend(self.sum().to_le_bytes());
        bytes.extend(self.data);
        bytes
    }

    /// Decodes an entry, and tells whether its checksum is right. `None`: entries do not have this length.
    pub fn decode(layout: &RecordLayout, bytes: &'a [u8]) -> Option<(Entry<'a>, bool)> {
        let (words, data) = bytes.split_first_chunk::<{ 5 * WORD_BYTES }>()?;
        let (words, _) = words.as_chunks::<WORD_BYTES>();
        let word = |place: usize| u64::from_le_bytes(words[place]);
        let named = NumberedHeader { number: word(1), header: RecordHeader(word(2)).lasting() };
        let entry = Entry { record: RecordId(word(0)), named, before: entry_of(word(3)), data };
        (data.len() == layout.data_bytes()).then_some((entry, entry.sum() == word(4)))
    }

    fn words(&self) -> [u64; 4] {
        [self.record.0, self.named.number, self.named.header.lasting().0, link_to(self.before)]
    }

    fn sum(&self) -> u64 {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        self.words().iter().for_each(|word| digest.update(&word.to_le_bytes()));
        digest.update(self.data);
        digest.finalize()
    }
}

/// The word that names an entry or none.
pub(crate) fn link_to(entry: Option<u64>) -> u64 {
    entry.map_or(0, |entry| entry + 1)
}

/// The entry that a word names, if any.
pub(crate) fn entry_of(link: u64) -> Option<u64> {
    link.checked_sub(1)
}

#[cfg(test)]
mod tests {
    use farpool_wire::{Slot, Version};

    use super::*;

    #[test]
    fn layout_of_an_entry_is_fixed() {
        let layout = RecordLayout::new(1, 8, 1).unwrap().with_overflow(1).unwrap();
        let header = RecordHeader::of(Version::new(Slot::new(0).unwrap(), 4).unwrap());
        let named = NumberedHeader { number: 7, header };
        let entry = Entry { record: RecordId(5), named, before: Some(2), data: &[1; 8] };
        let bytes = entry.encode();
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        assert_eq!(words[..4], [5, 7, 32, 3]);
        assert_eq!(words[4..], [0x1A6E_978D_82E0_DFEC, 0x0101_0101_0101_0101]);
        assert_eq!(bytes.len() as u64, layout.entry(0).map(|place| place.end - place.start).unwrap());
        assert_eq!(Entry::decode(&layout, &bytes), Some((entry, true)));
        assert_eq!(Entry::decode(&layout, &bytes[..40]), None);
    }

    #[test]
    fn an_entry_with_a_changed_word_is_detected() {
        let layout = RecordLayout::new(1, 8, 1).unwrap().with_overflow(1).unwrap();
        let named = NumberedHeader { number: 7, header: RecordHeader::of(Version::INITIAL) };
        let bytes = Entry { record: RecordId(5), named, before: None, data: &[1; 8] }.encode();
        for word in 0..bytes.len() / WORD_BYTES {
            let mut bytes = bytes.clone();
            bytes[word * WORD_BYTES + 1] ^= 1;
            assert!(!Entry::decode(&layout, &bytes).unwrap().1, "word {word}");
        }
        assert!(
            !Entry::decode(&layout, &[0; 48]).unwrap().1,
            "nor is there one in memory that was never written"
        );
    }
}
