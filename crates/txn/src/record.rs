//! The layout of the versions of a table's records in far memory (paper 3, section 5.1; `docs/src/txn.md`,
//! *records*).
//!
//! R1. The current version lies by itself. The older ones lie in a ring, with their headers side by side and
//!     their data elsewhere. So one READ gets the current version, or the headers of all old ones.
//! R2. Every version's data have a checksum over the data, the record, the version and its number. So a READ
//!     that has found words of several versions, or of another record, is detected.
//! R3. The versions of a record are numbered. Number 0 is the initial one. An old version's place in the ring
//!     is its number modulo the ring's size. The ring's counter is the number that comes next.
//! R4. Words before the current version's data, which the checksum covers, say which version it is and which
//!     number it has. The header is for writers: it names the same version or, if the record is locked, the
//!     commit that is about to replace that version.

use std::ops::Range;

use farpool_wire::RecordHeader;

use crate::checksum::checksum;
use crate::cut::Cut;

pub(crate) const WORD_BYTES: usize = 8;
/// Words before the data of the current version: header, version, number and checksum.
const CURRENT_WORDS: usize = 4;
/// Words before the data of an entry in the overflow region: the record's number, the version's number, its
/// header, the entry of the version before, checksum.
const ENTRY_WORDS: usize = 5;
/// Most old versions that a ring holds: as many as one READ of their headers should fetch.
pub const MOST_OLD_VERSIONS: usize = 64;
/// Bytes of the longest data of a record: the old version, the new one and the words around them fit one
/// transfer many times over.
pub const MOST_RECORD_BYTES: usize = 64 << 10;

/// The number of a record, unique in a database. Checksums cover it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RecordId(pub u64);

/// The layout of a table's records in one piece of far memory: first all current versions, then the headers
/// of all rings, then the data of all old versions. So one READ fetches several current versions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordLayout {
    records: u64,
    data_bytes: usize,
    old_versions: usize,
    /// Entries of the overflow region.
    overflow: u64,
}

impl RecordLayout {
    /// A layout of this many records, with this many bytes of data each, and rings for this many old
    /// versions. `None`: there must be at least one record and one old version, and not too many; data must
    /// be whole words.
    pub fn new(records: u64, data_bytes: usize, old_versions: usize) -> Option<RecordLayout> {
        let fits = data_bytes.is_multiple_of(WORD_BYTES) && data_bytes <= MOST_RECORD_BYTES;
        let rings = (1..=MOST_OLD_VERSIONS).contains(&old_versions);
        let layout = RecordLayout { records, data_bytes, old_versions, overflow: 0 };
        (fits && rings && records > 0 && records.checked_mul(layout.bytes_each())?.checked_add(1).is_some())
            .then_some(layout)
    }

    /// The same, with an overflow region for this many versions, of any records. `None`: too many.
    pub fn with_overflow(self, entries: u64) -> Option<RecordLayout> {
        let heads = self.records.checked_mul(WORD_BYTES as u64)?;
        let bytes = entries.checked_mul(self.entry_bytes() as u64)?.checked_add(heads)?;
        self.bytes().checked_add(bytes)?;
        Some(RecordLayout { overflow: entries, ..self })
    }

    /// Bytes of a record's data.
    pub fn data_bytes(&self) -> usize {
        self.data_bytes
    }

    /// How many records it has.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Bytes of a piece: all records, with their rings and the overflow region.
    pub fn bytes(&self) -> u64 {
        let heads = if self.overflow > 0 { self.records * WORD_BYTES as u64 } else { 0 };
        self.records * self.bytes_each() + heads + self.overflow * self.entry_bytes() as u64
    }

    /// How many old versions its overflow region has room for.
    pub fn overflow(&self) -> u64 {
        self.overflow
    }

    fn bytes_each(&self) -> u64 {
        (self.current_bytes() + self.ring_bytes() + self.old_versions * self.old_bytes()) as u64
    }

    /// Bytes of a current version with the words before it.
    pub(crate) fn current_bytes(&self) -> usize {
        CURRENT_WORDS * WORD_BYTES + self.data_bytes
    }

    /// Bytes of a ring's counter and headers.
    pub(crate) fn ring_bytes(&self) -> usize {
        (1 + self.old_versions) * WORD_BYTES
    }

    fn old_bytes(&self) -> usize {
        WORD_BYTES + self.data_bytes
    }

    pub(crate) fn entry_bytes(&self) -> usize {
        ENTRY_WORDS * WORD_BYTES + self.data_bytes
    }

    /// The current version of record `index` of the piece: header, version, number, checksum, data. The first
    /// word is the one that is locked.
    pub fn current(&self, index: u64) -> Range<u64> {
        debug_assert!(index < self.records);
        sized(index * self.current_bytes() as u64, self.current_bytes())
    }

    /// The counter of its ring, and the headers of old versions.
    pub fn ring(&self, index: u64) -> Range<u64> {
        let start = self.records * self.current_bytes() as u64;
        sized(start + index * self.ring_bytes() as u64, self.ring_bytes())
    }

    /// The header of its old version `number`.
    pub fn old_header(&self, index: u64, number: u64) -> Range<u64> {
        sized(self.ring(index).start + WORD_BYTES as u64 * (1 + self.place(number)), WORD_BYTES)
    }

    /// Checksum and data of its old version `number`.
    pub fn old(&self, index: u64, number: u64) -> Range<u64> {
        let start = self.ring(self.records - 1).end;
        let place = index * self.old_versions as u64 + self.place(number);
        sized(start + place * self.old_bytes() as u64, self.old_bytes())
    }

    /// The head of its chain: the word that names the entry with the version that was moved last, if the
    /// table has an overflow region.
    pub fn chain(&self, index: u64) -> Range<u64> {
        sized(self.records * self.bytes_each() + index * WORD_BYTES as u64, WORD_BYTES)
    }

    /// An entry of the overflow region. `None`: there is no such entry.
    pub fn entry(&self, entry: u64) -> Option<Range<u64>> {
        let start = self.chain(self.records).start + entry.checked_mul(self.entry_bytes() as u64)?;
        (entry < self.overflow).then(|| sized(start, self.entry_bytes()))
    }

    fn place(&self, number: u64) -> u64 {
        number % self.old_versions as u64
    }

    /// Decodes the current version's place: its header, and the words after it.
    pub fn decode_current<'a>(
        &self,
        record: RecordId,
        bytes: &'a [u8],
    ) -> Option<(RecordHeader, FoundVersion<'a>)> {
        let (header, body) = bytes.split_first_chunk::<WORD_BYTES>()?;
        Some((RecordHeader(u64::from_le_bytes(*header)), self.decode_body(record, body)?))
    }

    /// Decodes the words after the header in the current version's place.
    pub fn decode_body<'a>(&self, record: RecordId, body: &'a [u8]) -> Option<FoundVersion<'a>> {
        let (version, rest) = body.split_first_chunk::<WORD_BYTES>()?;
        let (number, rest) = rest.split_first_chunk::<WORD_BYTES>()?;
        let header = RecordHeader(u64::from_le_bytes(*version));
        let named = NumberedHeader { number: u64::from_le_bytes(*number), header };
        let found = self.found(rest, record, named)?;
        // Nothing was written there yet.
        let is_untouched = body.iter().all(|&byte| byte == 0);
        Some(FoundVersion { is_right: found.is_right || is_untouched, ..found })
    }

    /// Decodes the place of an old version.
    pub fn decode_old<'a>(
        &self,
        record: RecordId,
        old: NumberedHeader,
        bytes: &'a [u8],
    ) -> Option<FoundVersion<'a>> {
        self.found(bytes, record, old)
    }

    fn found<'a>(
        &self,
        bytes: &'a [u8],
        record: RecordId,
        named: NumberedHeader,
    ) -> Option<FoundVersion<'a>> {
        let (sum, data) = bytes.split_first_chunk::<WORD_BYTES>()?;
        // The last number has no successor, so it is not valid.
        let is_right = named.number < u64::MAX && u64::from_le_bytes(*sum) == seal(record, named, data);
        let (header, number) = (named.header.lasting(), named.number);
        (data.len() == self.data_bytes).then_some(FoundVersion { header, number, data, is_right })
    }

    /// Encodes version, number, checksum and data, the words after the header in the current version's place.
    pub fn encode_body(&self, record: RecordId, named: NumberedHeader, data: &[u8]) -> Vec<u8> {
        let words = [named.header.lasting().0.to_le_bytes(), named.number.to_le_bytes()];
        [words.as_flattened(), &self.encode_old(record, named, data)].concat()
    }

    /// Completes the current version of a record: `bytes` have its data already, after room for the words
    /// before them.
    pub(crate) fn seal_current(&self, record: RecordId, header: RecordHeader, bytes: &mut [u8]) {
        let (before, data) = bytes.split_at_mut(CURRENT_WORDS * WORD_BYTES);
        // There is no earlier version.
        let named = NumberedHeader { number: 0, header };
        let words = [header.0, header.lasting().0, named.number, seal(record, named, data)];
        for (place, word) in before.chunks_exact_mut(WORD_BYTES).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// The place of the data in the bytes of a current version.
    pub(crate) fn data_of_current(&self) -> Range<usize> {
        CURRENT_WORDS * WORD_BYTES..self.current_bytes()
    }

    /// Encodes checksum and data, the bytes of an old version's place.
    pub fn encode_old(&self, record: RecordId, old: NumberedHeader, data: &[u8]) -> Vec<u8> {
        debug_assert_eq!(data.len(), self.data_bytes);
        [&seal(record, old, data).to_le_bytes(), data].concat()
    }

    /// Decodes a ring that was read from [`ring`](Self::ring).
    pub fn decode_ring(&self, bytes: &[u8]) -> Option<Ring> {
        let (words, []) = bytes.as_chunks::<WORD_BYTES>() else { return None };
        let (counter, headers) = words.split_first()?;
        let headers: Vec<_> = headers.iter().map(|word| RecordHeader(u64::from_le_bytes(*word))).collect();
        let counter = Some(u64::from_le_bytes(*counter)).filter(|&counter| counter < u64::MAX)?;
        (headers.len() == self.old_versions).then_some(Ring { counter, headers })
    }
}

fn sized(start: u64, bytes: usize) -> Range<u64> {
    start..start + bytes as u64
}

/// The checksum of data. It covers the record, the version and its number, but not whether the version is
/// locked or moved.
fn seal(record: RecordId, named: NumberedHeader, data: &[u8]) -> u64 {
    checksum(&[record.0, named.header.lasting().0, named.number], data)
}

/// Data as they were found, and the version that they claim to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FoundVersion<'a> {
    /// The version, and whether it deletes the record.
    pub header: RecordHeader,
    /// Its number among the versions of its record.
    pub number: u64,
    /// The data.
    pub data: &'a [u8],
    /// Whether the checksum proves that they are the data of that version of that record.
    pub is_right: bool,
}

/// A version of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NumberedHeader {
    /// Its number, counted from 0.
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

    /// Whether a version may be put into its place. It may if nothing lies there yet; if this very version
    /// lies there, because a commit that had kept it was rolled back; or if an older version lies there that
    /// was moved, or whose successor all snapshots see. The ring was read when `kept` was the current
    /// version.
    pub fn has_room_for(&self, kept: NumberedHeader, horizon: &Cut) -> bool {
        let places = self.headers.len() as u64;
        let at = |number: u64| self.headers[(number % places) as usize];
        let successor = if places == 1 { kept.header } else { at(kept.number + 1) };
        let there = at(kept.number);
        let is_free = there.is_moved() || there.version() == kept.header.version();
        kept.number < places || is_free || horizon.sees(successor.version())
    }

    /// The versions in the half of the ring whose places are written next, the oldest first. Each comes with
    /// the header of the version after it, unless that is the current one.
    pub(crate) fn oldest(&self) -> impl Iterator<Item = (NumberedHeader, Option<RecordHeader>)> + '_ {
        let places = self.headers.len() as u64;
        let next = self.counter..self.counter.saturating_add(places.div_ceil(2));
        next.filter_map(move |next| next.checked_sub(places)).filter(|&number| number < self.counter).map(
            move |number| {
                let at = |number: u64| self.headers[(number % places) as usize];
                let successor = (number + 1 < self.counter).then(|| at(number + 1));
                (NumberedHeader { number, header: at(number) }, successor)
            },
        )
    }

    /// The headers of versions after `number`, as far as the ring has them. `current` is the number of a
    /// current version that was read before the ring was. Each header is that of such a version or of a later
    /// one: earlier versions in its place were replaced before that current version was installed.
    pub(crate) fn behind(&self, number: u64, current: u64) -> impl Iterator<Item = RecordHeader> + '_ {
        let places = self.headers.len() as u64;
        let first = current.saturating_sub(places).max(number + 1);
        (first..current).map(move |number| self.headers[(number % places) as usize])
    }

    /// The versions in the ring, the newest first.
    fn versions(&self) -> impl Iterator<Item = NumberedHeader> + '_ {
        let places = self.headers.len() as u64;
        let kept = self.counter.min(places);
        (1..=kept).map(move |back| {
            let number = self.counter - back;
            NumberedHeader { number, header: self.headers[(number % places) as usize] }
        })
    }

    /// The last version in the ring that a cut sees. The caller knows of a later version that the cut does
    /// not see. So if a header is just being replaced by that of a later version, the cut does not see that
    /// either.
    pub fn last_seen(&self, cut: &Cut) -> Option<NumberedHeader> {
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
        assert_eq!((layout.current(0), layout.current(9)), (0..48, 432..480));
        assert_eq!((layout.ring(0), layout.ring(9), layout.old_header(1, 4)), (480..512, 768..800, 528..536));
        assert_eq!((layout.old(0, 0), layout.old(1, 5), layout.old(9, 2)), (800..824, 920..944, 1496..1520));
        assert_eq!(layout.bytes(), 1520);
        let named = NumberedHeader { number: 9, header: header(1, 2).locked() };
        let body = layout.encode_body(RecordId(5), named, &[7; 16]);
        assert_eq!(body[..16], [16, 0, 0, 0, 0, 0, 16, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(body[16..24], [148, 103, 52, 194, 196, 195, 241, 53]);
        assert_eq!(body[16..], layout.encode_old(RecordId(5), named, &[7; 16]));
        let more = layout.with_overflow(2).unwrap();
        assert_eq!((more.chain(0), more.chain(9)), (1520..1528, 1592..1600));
        assert_eq!((more.entry(0), more.entry(1), more.entry(2)), (Some(1600..1656), Some(1656..1712), None));
        assert_eq!((more.bytes(), more.old(9, 2)), (1712, layout.old(9, 2)));
        assert!(layout.with_overflow(u64::MAX / 50).is_none());
        assert!(RecordLayout::new(1, 12, 3).is_none() && RecordLayout::new(1, 16, 0).is_none());
        assert!(RecordLayout::new(u64::MAX / 100, 16, 3).is_none() && RecordLayout::new(0, 16, 3).is_none());
    }

    #[test]
    fn data_of_another_record_version_or_number_are_not_taken() {
        let layout = RecordLayout::new(1, 8, 2).unwrap();
        let (record, mine) = (RecordId(3), NumberedHeader { number: 4, header: header(1, 9) });
        let found = |is_right| FoundVersion { header: mine.header, number: 4, data: &[1; 8], is_right };
        let body = layout.encode_body(record, mine, &[1; 8]);
        let bytes = [header(2, 1).locked().0.to_le_bytes().to_vec(), body.clone()].concat();
        assert_eq!(layout.decode_current(record, &bytes), Some((header(2, 1).locked(), found(true))));
        assert_eq!(layout.decode_body(RecordId(4), &body), Some(found(false)));
        let renamed = [&header(1, 10).0.to_le_bytes()[..], &body[8..]].concat();
        assert!(!layout.decode_body(record, &renamed).unwrap().is_right);
        let renumbered = [&body[..8], &5_u64.to_le_bytes(), &body[16..]].concat();
        assert!(!layout.decode_body(record, &renumbered).unwrap().is_right);
        let kept = layout.encode_old(record, mine, &[1; 8]);
        assert_eq!(layout.decode_old(record, mine, &kept), Some(found(true)));
        let other = NumberedHeader { number: 6, ..mine };
        assert_eq!(layout.decode_old(record, other, &kept), Some(FoundVersion { number: 6, ..found(false) }));
        assert_eq!(layout.decode_current(record, &bytes[..7]), None);
        assert_eq!(layout.decode_body(record, &body[..28]), None);
    }

    #[test]
    fn memory_that_was_never_written_holds_the_initial_version() {
        let layout = RecordLayout::new(1, 8, 2).unwrap();
        let header = RecordHeader::of(Version::INITIAL);
        let nothing = FoundVersion { header, number: 0, data: &[0; 8], is_right: true };
        assert_eq!(layout.decode_body(RecordId(3), &[0; 32]), Some(nothing));
        let scribbled = [&[0; 31][..], &[1]].concat();
        assert!(!layout.decode_body(RecordId(3), &scribbled).unwrap().is_right);
    }

    #[test]
    fn the_last_old_version_that_a_cut_sees_is_found_in_the_order_of_the_ring() {
        // Numbers 0 to 4 of versions 0.0, 0.1, 1.1, 0.2, 1.2; the ring has three places.
        let ring = Ring { counter: 5, headers: vec![header(0, 2), header(1, 2), header(1, 1)] };
        let seen = |counts: [u64; 2]| ring.last_seen(&Cut::new(1, counts.into()));
        assert_eq!(seen([2, 2]), Some(NumberedHeader { number: 4, header: header(1, 2) }));
        assert_eq!(seen([2, 1]), Some(NumberedHeader { number: 3, header: header(0, 2) }));
        assert_eq!(seen([1, 1]), Some(NumberedHeader { number: 2, header: header(1, 1) }));
        assert_eq!(seen([1, 0]), None, "it is not in the ring any more");
        assert_eq!(ring.next_number(), 5);
    }

    #[test]
    fn a_place_is_written_again_once_the_horizon_sees_what_came_after_the_version_there() {
        // Numbers 2 to 4; the next, number 5, would lie where 2 does.
        let ring = Ring { counter: 5, headers: vec![header(0, 2), header(1, 2), header(1, 1)] };
        let current = NumberedHeader { number: 5, header: header(1, 3) };
        let room = |counts: [u64; 2]| ring.has_room_for(current, &Cut::new(1, counts.into()));
        assert!(!room([1, 1]), "it sees what lies there");
        assert!(room([2, 1]), "it sees what came next");
        let undone = NumberedHeader { number: 4, header: header(1, 2) };
        assert!(ring.has_room_for(undone, &Cut::first(2)), "that very version lies there");
        assert!(ring.has_room_for(NumberedHeader { number: 2, ..current }, &Cut::first(2)), "nothing does");
        let moved = Ring { headers: vec![header(0, 2), header(1, 2), header(1, 1).moved()], ..ring };
        assert!(moved.has_room_for(current, &Cut::first(2)), "what lies there lies elsewhere, too");
        let single = Ring { counter: 5, headers: vec![header(1, 2)] };
        assert!(!single.has_room_for(current, &Cut::new(1, [9, 2].into())));
        assert!(
            single.has_room_for(current, &Cut::new(1, [0, 3].into())),
            "its successor is to be put there"
        );
    }

    #[test]
    fn the_oldest_of_a_ring_are_those_whose_places_are_written_next() {
        let headers = vec![header(0, 2), header(1, 2), header(1, 1)];
        let oldest = |counter, headers: &[RecordHeader]| {
            let ring = Ring { counter, headers: headers.to_vec() };
            ring.oldest().map(|(old, next)| (old.number, old.header, next)).collect::<Vec<_>>()
        };
        let third = (3, header(0, 2), Some(header(1, 2)));
        assert_eq!(oldest(5, &headers), [(2, header(1, 1), Some(header(0, 2))), third]);
        assert_eq!(oldest(2, &headers), [(0, header(0, 2), Some(header(1, 2)))]);
        assert_eq!(oldest(1, &headers), []);
        assert_eq!(oldest(1, &headers[..1]), [(0, header(0, 2), None)]);
        assert_eq!(oldest(0, &headers[..1]), []);
    }

    #[test]
    fn places_of_a_ring_that_were_never_used_hold_no_version() {
        let ring = Ring { counter: 1, headers: vec![header(0, 0); 4] };
        assert_eq!(ring.last_seen(&Cut::first(1)), Some(NumberedHeader { number: 0, header: header(0, 0) }));
        assert_eq!(Ring { counter: 0, ..ring }.last_seen(&Cut::first(1)), None);
    }
}
