//! The layout of a table's records in far memory (paper 3, section 5.1; `docs/src/txn.md`, *records*).
//!
//! R1. A record's place has its current version alone. Older versions lie in the logs of the commits that
//!     have replaced them, each linked to the one before. So one READ gets the current version of a
//!     record, or of many.
//! R2. Every version has a checksum over the record's number, the label (the commit that wrote it, the
//!     version's number, the link to the version before) and the data. So a READ that has found words of
//!     several versions, or of another record, is detected.
//! R3. The versions of a record are numbered. Number 0 is the initial one.
//! R4. The header is for writers: it names the current version or, if the record is locked, the commit that
//!     is about to replace it.

use std::ops::Range;

use farpool_wire::{RecordHeader, Version};

use crate::checksum::checksum;
use crate::log::Link;

pub(crate) const WORD_BYTES: usize = 8;
/// Words before the data of a body: version, number, link and checksum.
const BODY_WORDS: usize = 4;
/// Most bytes of a record's data. One intent, with the whole body that it saves, fits one transfer many times
/// over.
pub const MOST_RECORD_BYTES: usize = 64 << 10;

/// The number of a record, unique in a database. Checksums cover it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RecordId(pub u64);

/// The layout of a table's records in one piece of far memory: one after another, each a header and a *body*.
/// A body is a label, a checksum, and the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordLayout {
    records: u64,
    data_bytes: usize,
}

/// Which version of a record some data are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Label {
    /// The commit that wrote it, and whether it deletes the record.
    pub header: RecordHeader,
    /// Its number among the versions of its record, counted from 0.
    pub number: u64,
    /// Where the version before it lies.
    pub link: Link,
}

impl Label {
    /// The label of a record that was never written.
    pub const INITIAL: Label =
        Label { header: RecordHeader::of(Version::INITIAL), number: 0, link: Link::NONE };

    /// The commit that wrote the version.
    pub fn version(&self) -> Version {
        self.header.version()
    }

    /// Whether there is no such record: it was deleted or never written.
    pub fn is_absent(&self) -> bool {
        self.header.is_deleted() || self.version() == Version::INITIAL
    }
}

/// Data as they were found, and the version that they claim to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FoundVersion<'a> {
    /// Which version.
    pub label: Label,
    /// The data.
    pub data: &'a [u8],
    /// Whether the checksum proves that they are the data of that version of that record.
    pub is_right: bool,
}

impl RecordLayout {
    /// A layout of this many records, with this many bytes of data each. `None`: there must be at least one
    /// record, and not too many; data must be whole words.
    pub fn new(records: u64, data_bytes: usize) -> Option<RecordLayout> {
        let fits = data_bytes.is_multiple_of(WORD_BYTES) && data_bytes <= MOST_RECORD_BYTES;
        let layout = RecordLayout { records, data_bytes };
        (fits && records > 0 && records.checked_mul(layout.current_bytes() as u64)?.checked_add(1).is_some())
            .then_some(layout)
    }

    /// Bytes of a record's data.
    pub fn data_bytes(&self) -> usize {
        self.data_bytes
    }

    /// How many records it has.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Bytes of a piece.
    pub fn bytes(&self) -> u64 {
        self.records * self.current_bytes() as u64
    }

    /// Bytes of a record's place: its header and its body.
    pub(crate) fn current_bytes(&self) -> usize {
        WORD_BYTES + self.body_bytes()
    }

    /// Bytes of a body.
    pub(crate) fn body_bytes(&self) -> usize {
        body_bytes(self.data_bytes)
    }

    /// The place of record `index` of the piece: header, version, number, link, checksum, data. The first
    /// word is the one that is locked. `index` may be beyond [`records`](Self::records): later pieces of a
    /// table have more.
    pub fn current(&self, index: u64) -> Range<u64> {
        let start = index * self.current_bytes() as u64;
        start..start + self.current_bytes() as u64
    }

    /// Decodes a record's place: its header, and what its body holds.
    pub fn decode_current<'a>(
        &self,
        record: RecordId,
        bytes: &'a [u8],
    ) -> Option<(RecordHeader, FoundVersion<'a>)> {
        let (header, body) = bytes.split_first_chunk::<WORD_BYTES>()?;
        let found = decode_body(record, body)?;
        (found.data.len() == self.data_bytes).then_some((RecordHeader(u64::from_le_bytes(*header)), found))
    }

    /// Completes the place of a record in a table that is filled: `bytes` have its data already.
    pub(crate) fn seal_first(&self, record: RecordId, header: RecordHeader, bytes: &mut [u8]) {
        // There is no earlier version.
        let label = Label { header, ..Label::INITIAL };
        let (place, body) = bytes.split_at_mut(WORD_BYTES);
        place.copy_from_slice(&header.0.to_le_bytes());
        seal_body(record, label, body);
    }

    /// The place of the data in the bytes of a record's place.
    pub(crate) fn data_of_current(&self) -> Range<usize> {
        WORD_BYTES + DATA_OF_BODY..self.current_bytes()
    }
}

/// Where the data of a body start.
pub(crate) const DATA_OF_BODY: usize = BODY_WORDS * WORD_BYTES;

/// Bytes of a body with so many bytes of data.
pub(crate) const fn body_bytes(data_bytes: usize) -> usize {
    DATA_OF_BODY + data_bytes
}

/// Decodes a body. `None`: it is too short for one.
pub(crate) fn decode_body(record: RecordId, body: &[u8]) -> Option<FoundVersion<'_>> {
    let (words, data) = body.split_at_checked(DATA_OF_BODY)?;
    let (words, _) = words.as_chunks::<WORD_BYTES>();
    let [version, number, link, sum] = *<&[_; BODY_WORDS]>::try_from(words).ok()?;
    let [version, number, link, sum] = [version, number, link, sum].map(u64::from_le_bytes);
    let label = Label { header: RecordHeader(version).unlocked(), number, link: Link::from_word(link) };
    // The last number has no successor, so it is not valid.
    let is_sealed = number < u64::MAX && sum == seal(record, label, data);
    // Nothing was written there yet.
    let is_never_written = || label == Label::INITIAL && sum == 0 && data.iter().all(|&byte| byte == 0);
    Some(FoundVersion { label, data, is_right: is_sealed || is_never_written() })
}

/// Completes a body that has its data already.
pub(crate) fn seal_body(record: RecordId, label: Label, body: &mut [u8]) {
    let (words, data) = body.split_at_mut(DATA_OF_BODY);
    let sealed = [label.header.unlocked().0, label.number, label.link.word(), seal(record, label, data)];
    for (place, word) in words.chunks_exact_mut(WORD_BYTES).zip(sealed) {
        place.copy_from_slice(&word.to_le_bytes());
    }
}

/// The checksum of a body. It covers the record and the label, but not whether the version's record is
/// locked.
fn seal(record: RecordId, label: Label, data: &[u8]) -> u64 {
    checksum(&[record.0, label.header.unlocked().0, label.number, label.link.word()], data)
}

#[cfg(test)]
mod tests {
    use farpool_wire::Slot;

    use super::*;

    fn header(slot: u16, count: u64) -> RecordHeader {
        RecordHeader::of(Version::new(Slot::new(slot).unwrap(), count).unwrap())
    }

    fn label(header: RecordHeader, number: u64) -> Label {
        Label { header, number, link: Link::to(Slot::new(2).unwrap(), 24).unwrap() }
    }

    fn body(record: RecordId, label: Label, data: &[u8]) -> Vec<u8> {
        let mut body = [&[0; DATA_OF_BODY], data].concat();
        seal_body(record, label, &mut body);
        body
    }

    #[test]
    fn layout_of_records_is_fixed() {
        let layout = RecordLayout::new(10, 16).unwrap();
        assert_eq!((layout.current(0), layout.current(9), layout.bytes()), (0..56, 504..560, 560));
        let body = body(RecordId(5), label(header(1, 2).locked(), 9), &[7; 16]);
        assert_eq!(body[..16], [16, 0, 0, 0, 0, 0, 16, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(body[16..24], label(header(1, 2), 9).link.word().to_le_bytes());
        assert_eq!(body[24..32], [101, 38, 189, 162, 234, 177, 34, 92]);
        assert!(RecordLayout::new(1, 12).is_none() && RecordLayout::new(0, 16).is_none());
        assert!(RecordLayout::new(u64::MAX / 50, 16).is_none());
    }

    #[test]
    fn data_of_another_record_or_label_are_not_taken() {
        let layout = RecordLayout::new(1, 8).unwrap();
        let (record, mine) = (RecordId(3), label(header(1, 9), 4));
        let body = body(record, mine, &[1; 8]);
        let found = |is_right| FoundVersion { label: mine, data: &[1; 8], is_right };
        let bytes = [header(2, 1).locked().0.to_le_bytes().to_vec(), body.clone()].concat();
        assert_eq!(layout.decode_current(record, &bytes), Some((header(2, 1).locked(), found(true))));
        assert_eq!(decode_body(RecordId(4), &body), Some(found(false)));
        for word in 0..BODY_WORDS + 1 {
            let mut changed = body.clone();
            changed[word * WORD_BYTES + 3] ^= 1;
            assert!(!decode_body(record, &changed).unwrap().is_right, "word {word}");
        }
        assert_eq!(layout.decode_current(record, &bytes[..7]), None);
        assert_eq!(layout.decode_current(record, &bytes[..40]), None);
        assert_eq!(decode_body(record, &body[..28]), None);
    }

    #[test]
    fn memory_that_was_never_written_holds_the_initial_version() {
        let nothing = FoundVersion { label: Label::INITIAL, data: &[0; 8], is_right: true };
        assert_eq!(decode_body(RecordId(3), &[0; 40]), Some(nothing));
        assert!(nothing.label.is_absent() && !label(header(0, 1), 0).is_absent());
        for scribbled in 0..40 {
            let mut bytes = [0; 40];
            bytes[scribbled] = 8;
            assert!(!decode_body(RecordId(3), &bytes).unwrap().is_right, "byte {scribbled}");
        }
    }
}
