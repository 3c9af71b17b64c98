//! Where the versions of a table's records lie in far memory (paper 3, section 5.1; `docs/src/txn.md`, *records*).
//!
//! R1. The current version lies by itself, the older ones in a ring: headers together, data behind them; so one READ gets the
//!     current version, or the headers of all old ones.
//! R2. Every version's data carry a checksum over them, the record and the version: a READ that found words of several versions is
//!     found out, and so is one that found another record's.
//! R3. The ring's counter says how many versions were ever put there; the *n*-th has place *n* modulo its size.
//! R4. The current version's data say themselves which version they are. The header before them is for writers: it says the same,
//!     or, locked, whose commit is about to replace them.

use std::ops::Range;

use crc_fast::{CrcAlgorithm, Digest};
use farpool_wire::RecordHeader;

use crate::cut::Cut;

const WORD_BYTES: usize = 8;
/// Header, version and checksum before the data of the current version.
const CURRENT_WORDS: usize = 3;
/// Most old versions of a record that its ring holds: what one READ for their headers should fetch.
pub const MOST_OLD_VERSIONS: usize = 64;
/// Longest data of a record: the old version, the new one and what is around them fit one transfer many times over.
pub const MOST_RECORD_BYTES: usize = 64 << 10;

/// A record of a table, by its number among all of a database. Bound into checksums.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RecordId(pub u64);

/// How the records of a table lie in one piece of far memory: the current versions of all, the rings' headers of all, and the old
/// versions' data of all. So several current versions are fetched by one READ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordLayout {
    records: u64,
    data_bytes: usize,
    old_versions: usize,
}

impl RecordLayout {
    /// Of so many records with so many bytes of data each, and rings for so many old versions. `None`: there must be one at least,
    /// and not too many; data are whole words.
    pub fn new(records: u64, data_bytes: usize, old_versions: usize) -> Option<RecordLayout> {
        let fits = data_bytes.is_multiple_of(WORD_BYTES) && data_bytes <= MOST_RECORD_BYTES;
        let rings = (1..=MOST_OLD_VERSIONS).contains(&old_versions);
        let layout = RecordLayout { records, data_bytes, old_versions };
        (fits && rings && records > 0 && records.checked_mul(layout.bytes_each())?.checked_add(1).is_some())
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

    /// Bytes that all records take with all that belongs to them.
    pub fn bytes(&self) -> u64 {
        self.records * self.bytes_each()
    }

    fn bytes_each(&self) -> u64 {
        (self.current_bytes() + self.ring_bytes() + self.old_versions * self.old_bytes()) as u64
    }

    fn current_bytes(&self) -> usize {
        CURRENT_WORDS * WORD_BYTES + self.data_bytes
    }

    fn ring_bytes(&self) -> usize {
        (1 + self.old_versions) * WORD_BYTES
    }

    fn old_bytes(&self) -> usize {
        WORD_BYTES + self.data_bytes
    }

    /// The `index`-th record's current version: header, version, checksum, data. Its first word is what is locked.
    pub fn current(&self, index: u64) -> Range<u64> {
        debug_assert!(index < self.records);
        sized(index * self.current_bytes() as u64, self.current_bytes())
    }

    /// Its ring's counter and the headers of old versions.
    pub fn ring(&self, index: u64) -> Range<u64> {
        let start = self.records * self.current_bytes() as u64;
        sized(start + index * self.ring_bytes() as u64, self.ring_bytes())
    }

    /// The header of its `number`-th old version.
    pub fn old_header(&self, index: u64, number: u64) -> Range<u64> {
        sized(self.ring(index).start + WORD_BYTES as u64 * (1 + self.place(number)), WORD_BYTES)
    }

    /// Checksum and data of its `number`-th old version.
    pub fn old(&self, index: u64, number: u64) -> Range<u64> {
        let start = self.ring(self.records - 1).end;
        let place = index * self.old_versions as u64 + self.place(number);
        sized(start + place * self.old_bytes() as u64, self.old_bytes())
    }

    fn place(&self, number: u64) -> u64 {
        number % self.old_versions as u64
    }

    /// What is found in the current version's place: its header, and what lies behind it.
    pub fn decode_current<'a>(
        &self,
        record: RecordId,
        bytes: &'a [u8],
    ) -> Option<(RecordHeader, FoundVersion<'a>)> {
        let (header, body) = bytes.split_first_chunk::<WORD_BYTES>()?;
        Some((RecordHeader(u64::from_le_bytes(*header)), self.decode_body(record, body)?))
    }

    /// What lies behind the header in the current version's place.
    pub fn decode_body<'a>(&self, record: RecordId, body: &'a [u8]) -> Option<FoundVersion<'a>> {
        let (version, rest) = body.split_first_chunk::<WORD_BYTES>()?;
        let version = RecordHeader(u64::from_le_bytes(*version));
        let found = self.found(rest, CURRENT, record, version)?;
        // Nobody has written there yet.
        let is_untouched = body.iter().all(|&byte| byte == 0);
        Some(FoundVersion { is_right: found.is_right || is_untouched, ..found })
    }

    /// What is found in the place of an old version.
    pub fn decode_old<'a>(
        &self,
        record: RecordId,
        old: OldVersion,
        bytes: &'a [u8],
    ) -> Option<FoundVersion<'a>> {
        self.found(bytes, old.number, record, old.header)
    }

    fn found<'a>(
        &self,
        bytes: &'a [u8],
        number: u64,
        record: RecordId,
        header: RecordHeader,
    ) -> Option<FoundVersion<'a>> {
        let (sum, data) = bytes.split_first_chunk::<WORD_BYTES>()?;
        let is_right =
            data.len() == self.data_bytes && u64::from_le_bytes(*sum) == seal(record, header, number, data);
        (data.len() == self.data_bytes).then_some(FoundVersion { header: header.lasting(), data, is_right })
    }

    /// Version, checksum and data, as they lie behind the header in the current version's place.
    pub fn encode_body(&self, record: RecordId, header: RecordHeader, data: &[u8]) -> Vec<u8> {
        [&header.lasting().0.to_le_bytes()[..], &self.sealed(CURRENT, record, header, data)].concat()
    }

    /// Checksum and data, as they lie in an old version's place.
    pub fn encode_old(&self, record: RecordId, old: OldVersion, data: &[u8]) -> Vec<u8> {
        self.sealed(old.number, record, old.header, data)
    }

    fn sealed(&self, number: u64, record: RecordId, header: RecordHeader, data: &[u8]) -> Vec<u8> {
        debug_assert_eq!(data.len(), self.data_bytes);
        [&seal(record, header, number, data).to_le_bytes(), data].concat()
    }

    /// What a ring says that was read from [`ring`](Self::ring).
    pub fn decode_ring(&self, bytes: &[u8]) -> Option<Ring> {
        let (words, []) = bytes.as_chunks::<WORD_BYTES>() else { return None };
        let (counter, headers) = words.split_first()?;
        let headers: Vec<_> = headers.iter().map(|word| RecordHeader(u64::from_le_bytes(*word))).collect();
        // The last number stands for the current version.
        let counter = Some(u64::from_le_bytes(*counter)).filter(|&counter| counter < CURRENT)?;
        (headers.len() == self.old_versions).then_some(Ring { counter, headers })
    }
}

fn sized(start: u64, bytes: usize) -> Range<u64> {
    start..start + bytes as u64
}

/// In checksums, instead of the number of an old version.
const CURRENT: u64 = u64::MAX;

/// Binds data to the record, to the version, and to where they lie; not to whether the version is locked or moved.
fn seal(record: RecordId, header: RecordHeader, number: u64, data: &[u8]) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    for word in [record.0, header.lasting().0, number] {
        digest.update(&word.to_le_bytes());
    }
    digest.update(data);
    digest.finalize()
}

/// Data as they were found, and of which version they say to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FoundVersion<'a> {
    /// Which version, and whether the record ends with it.
    pub header: RecordHeader,
    /// The data.
    pub data: &'a [u8],
    /// Whether the checksum says that they are that version's, of that record, in that place.
    pub is_right: bool,
}

/// One version in a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OldVersion {
    /// The how-manieth that was put there.
    pub number: u64,
    /// Its header.
    pub header: RecordHeader,
}

/// The headers of a record's old versions, as they were read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ring {
    counter: u64,
    headers: Vec<RecordHeader>,
}

impl Ring {
    /// The number that the next old version gets.
    pub fn next_number(&self) -> u64 {
        self.counter
    }

    /// What lies in the ring, the newest first.
    fn versions(&self) -> impl Iterator<Item = OldVersion> + '_ {
        let places = self.headers.len() as u64;
        let kept = self.counter.min(places);
        (1..=kept).map(move |back| {
            let number = self.counter - back;
            OldVersion { number, header: self.headers[(number % places) as usize] }
        })
    }

    /// The last version that a cut sees, of those in the ring. The caller knows of a later one that the cut does not see; so a
    /// header that is just being replaced by that of a later version is not seen either.
    pub fn last_seen(&self, cut: &Cut) -> Option<OldVersion> {
        self.versions().find(|old| cut.sees(old.header.version()))
    }
}

#[cfg(test)]
mod tests {
    use farpool_wire::{Slot, Version};

    use super::*;

    fn header(slot: u16, count: u64) -> RecordHeader {
        RecordHeader::of(Version::new(Slot::new(slot).unwrap(), count).unwrap())
    }

    #[test]
    fn layout_of_records_is_fixed() {
        let layout = RecordLayout::new(10, 16, 3).unwrap();
        assert_eq!((layout.current(0), layout.current(9)), (0..40, 360..400));
        assert_eq!((layout.ring(0), layout.ring(9), layout.old_header(1, 4)), (400..432, 688..720, 448..456));
        assert_eq!((layout.old(0, 0), layout.old(1, 5), layout.old(9, 2)), (720..744, 840..864, 1416..1440));
        assert_eq!(layout.bytes(), 1440);
        let body = layout.encode_body(RecordId(5), header(1, 2), &[7; 16]);
        assert_eq!(body[..16], [16, 0, 0, 0, 0, 0, 16, 0, 84, 71, 25, 207, 229, 28, 184, 191]);
        assert!(RecordLayout::new(1, 12, 3).is_none() && RecordLayout::new(1, 16, 0).is_none());
        assert!(RecordLayout::new(u64::MAX / 100, 16, 3).is_none() && RecordLayout::new(0, 16, 3).is_none());
    }

    #[test]
    fn data_of_another_record_version_or_place_are_not_taken() {
        let layout = RecordLayout::new(1, 8, 2).unwrap();
        let (record, mine) = (RecordId(3), header(1, 9));
        let found = |is_right| FoundVersion { header: mine, data: &[1; 8], is_right };
        let body = layout.encode_body(record, mine, &[1; 8]);
        let bytes = [header(2, 1).locked().0.to_le_bytes().to_vec(), body.clone()].concat();
        assert_eq!(layout.decode_current(record, &bytes), Some((header(2, 1).locked(), found(true))));
        assert_eq!(layout.decode_body(RecordId(4), &body), Some(found(false)));
        let renamed = [&header(1, 10).0.to_le_bytes()[..], &body[8..]].concat();
        assert!(!layout.decode_body(record, &renamed).unwrap().is_right);
        let old = OldVersion { number: 4, header: mine };
        assert_eq!(layout.decode_old(record, old, &body[8..]), Some(found(false)), "it is the current one's");
        let kept = layout.encode_old(record, old, &[1; 8]);
        assert_eq!(layout.decode_old(record, old, &kept), Some(found(true)));
        assert_eq!(layout.decode_old(record, OldVersion { number: 6, ..old }, &kept), Some(found(false)));
        assert_eq!(layout.decode_current(record, &bytes[..7]), None);
        assert_eq!(layout.decode_body(record, &body[..20]), None);
    }

    #[test]
    fn memory_that_was_never_written_holds_the_initial_version() {
        let layout = RecordLayout::new(1, 8, 2).unwrap();
        let nothing =
            FoundVersion { header: RecordHeader::of(Version::INITIAL), data: &[0; 8], is_right: true };
        assert_eq!(layout.decode_body(RecordId(3), &[0; 24]), Some(nothing));
        let scribbled = [&[0; 23][..], &[1]].concat();
        assert!(!layout.decode_body(RecordId(3), &scribbled).unwrap().is_right);
    }

    #[test]
    fn the_last_old_version_that_a_cut_sees_is_found_in_the_order_of_the_ring() {
        // Numbers 0 to 4 of versions 0.0, 0.1, 1.1, 0.2, 1.2; the ring has three places.
        let ring = Ring { counter: 5, headers: vec![header(0, 2), header(1, 2), header(1, 1)] };
        let seen = |counts: [u64; 2]| ring.last_seen(&Cut::new(1, counts.into()));
        assert_eq!(seen([2, 2]), Some(OldVersion { number: 4, header: header(1, 2) }));
        assert_eq!(seen([2, 1]), Some(OldVersion { number: 3, header: header(0, 2) }));
        assert_eq!(seen([1, 1]), Some(OldVersion { number: 2, header: header(1, 1) }));
        assert_eq!(seen([1, 0]), None, "it is not in the ring any more");
        assert_eq!(ring.next_number(), 5);
    }

    #[test]
    fn places_of_a_ring_that_were_never_used_hold_no_version() {
        let ring = Ring { counter: 1, headers: vec![header(0, 0); 4] };
        assert_eq!(ring.last_seen(&Cut::first(1)), Some(OldVersion { number: 0, header: header(0, 0) }));
        assert_eq!(Ring { counter: 0, ..ring }.last_seen(&Cut::first(1)), None);
    }
}
