//! The list of regions that a database got after it was created, and has not given back (`docs/src/namdb.md`,
//! *memory that is leased later*). What an entry says is the caller's: here it is bytes.
//!
//! L1. Only the member with the catalog's role changes the list.
//! L2. A place of the list goes from *free* to *used*, then to *leaving*, and then to *free* again, which
//!     begins its next round. Its entry is written while it is free. A place that is used or leaving keeps its
//!     entry.
//! L3. A member uses the region of a place only while the place is used, and only once its seat has its grant
//!     there, in the word for that place, and the place was still in the same round of use behind that
//!     (M2). It clears the word when it finds that the place is leaving. A place becomes free only once no seat
//!     has a grant there.
//! L4. So a member that reads the list after another one was evicted finds every region that this one may
//!     have used, under the same number, unless no table has anything there any more.

use std::ops::Range;

use crate::checksum::checksum;
use crate::memory::{Memory, MemoryError, Piece};
use crate::record::WORD_BYTES;

/// Bytes of an entry: more than a lease takes.
const ENTRY_BYTES: usize = 1_024;
/// Most bytes that an entry says: a word before them says how many, and a checksum is behind them.
const MOST_ENTRY_BYTES: usize = ENTRY_BYTES - 2 * WORD_BYTES;
/// Bits of a place's word for its stage; the others count its rounds.
const STAGE_BITS: u32 = 2;

/// Where the list lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaterAt {
    /// The memory, in the root region.
    pub piece: Piece,
    /// Its layout.
    pub layout: LaterLayout,
}

/// The layout of the list: a word for each place, then their entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaterLayout {
    most: u16,
}

impl LaterLayout {
    /// A list with this many places.
    pub fn new(most: u16) -> LaterLayout {
        LaterLayout { most }
    }

    /// How many places it has.
    pub fn most(&self) -> u16 {
        self.most
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        self.entry(self.most).start
    }

    /// Where the words of all places lie.
    pub fn words(&self) -> Range<u64> {
        self.word(0)..self.word(self.most)
    }

    fn word(&self, place: u16) -> u64 {
        u64::from(place) * WORD_BYTES as u64
    }

    fn entry(&self, place: u16) -> Range<u64> {
        let start = self.word(self.most) + u64::from(place) * ENTRY_BYTES as u64;
        start..start + ENTRY_BYTES as u64
    }
}

/// The stage of a place (L2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// It has no region.
    Free,
    /// Its region is memory of the database.
    Used,
    /// Its region is being given back.
    Leaving,
}

/// A place, as its word says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// How often it has become free.
    pub round: u64,
    /// Its stage.
    pub stage: Stage,
}

impl Place {
    /// A word as it was read. One that no member writes stands for a place that is never used.
    pub fn decode(word: u64) -> Place {
        let stage = match word & ((1 << STAGE_BITS) - 1) {
            0 => Stage::Free,
            1 => Stage::Used,
            _ => Stage::Leaving,
        };
        Place { round: word >> STAGE_BITS, stage }
    }

    fn encode(self) -> u64 {
        self.round << STAGE_BITS | self.stage as u64
    }

    /// The place in its next stage.
    fn next(self) -> Place {
        match self.stage {
            Stage::Free => Place { stage: Stage::Used, ..self },
            Stage::Used => Place { stage: Stage::Leaving, ..self },
            Stage::Leaving => Place { round: self.round.wrapping_add(1), stage: Stage::Free },
        }
    }
}

/// An entry as it lies in far memory. `None`: it is too long.
fn encode(entry: &[u8]) -> Option<Vec<u8>> {
    (entry.len() <= MOST_ENTRY_BYTES).then_some(())?;
    let mut bytes = (entry.len() as u64).to_le_bytes().to_vec();
    bytes.extend(entry);
    bytes.resize(ENTRY_BYTES - WORD_BYTES, 0);
    bytes.extend(checksum(&[], &bytes).to_le_bytes());
    Some(bytes)
}

/// What an entry says. `None`: it was damaged.
fn decode(bytes: &[u8]) -> Option<Vec<u8>> {
    let (body, sum) = bytes.split_last_chunk::<WORD_BYTES>()?;
    if u64::from_le_bytes(*sum) != checksum(&[], body) {
        return None;
    }
    let (length, rest) = body.split_first_chunk::<WORD_BYTES>()?;
    rest.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?).map(<[u8]>::to_vec)
}

impl LaterAt {
    /// All places.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn places(&self, memory: &Memory) -> Result<Vec<Place>, MemoryError> {
        if self.layout.most == 0 {
            return Ok(Vec::new());
        }
        let bytes = memory.read(&self.piece, self.layout.words()).await?;
        Ok(bytes.as_chunks().0.iter().map(|word| Place::decode(u64::from_le_bytes(*word))).collect())
    }

    /// A place.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn place(&self, memory: &Memory, place: u16) -> Result<Place, MemoryError> {
        Ok(Place::decode(memory.read_word(&self.piece, self.layout.word(place)).await?))
    }

    /// What the entry of a place says. `None`: it was damaged, or is being written.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn entry(&self, memory: &Memory, place: u16) -> Result<Option<Vec<u8>>, MemoryError> {
        Ok(decode(&memory.read(&self.piece, self.layout.entry(place)).await?))
    }

    /// Gives free places to these entries, for a member with the catalog's role (L1). `false`: an entry is
    /// too long, or too few places are free. Then nothing has changed.
    ///
    /// # Errors
    /// When far memory does not answer; with how many entries have their places for certain.
    pub async fn add(&self, memory: &Memory, entries: &[Vec<u8>]) -> Result<bool, (usize, MemoryError)> {
        let before_all = |error| (0, error);
        let places = self.places(memory).await.map_err(before_all)?;
        let free: Vec<_> = (0..).zip(places).filter(|(_, place)| place.stage == Stage::Free).collect();
        let bytes: Option<Vec<_>> = entries.iter().map(|entry| encode(entry)).collect();
        let Some(bytes) = bytes.filter(|bytes| bytes.len() <= free.len()) else { return Ok(false) };
        for ((place, _), bytes) in free.iter().zip(&bytes) {
            let written = memory.write(&self.piece, self.layout.entry(*place).start, bytes).await;
            written.map_err(before_all)?;
        }
        for (added, &(number, place)) in free[..bytes.len()].iter().enumerate() {
            self.set(memory, number, place.next()).await.map_err(|error| (added, error))?;
        }
        Ok(true)
    }

    /// Moves a place that is in this stage to the next one, for a member with the catalog's role (L1, L3).
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn advance(&self, memory: &Memory, number: u16, from: Stage) -> Result<(), MemoryError> {
        match self.place(memory, number).await? {
            place if place.stage == from => self.set(memory, number, place.next()).await,
            _ => Ok(()),
        }
    }

    async fn set(&self, memory: &Memory, number: u16, place: Place) -> Result<(), MemoryError> {
        memory.write_word(&self.piece, self.layout.word(number), place.encode()).await
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn layout_of_the_list_is_fixed() {
        let layout = LaterLayout::new(3);
        assert_eq!((layout.words(), layout.entry(0), layout.entry(2)), (0..24, 24..1_048, 2_072..3_096));
        assert_eq!((layout.bytes(), LaterLayout::new(0).bytes()), (3_096, 0));
        let entry = encode(b"lease").unwrap();
        assert_eq!((entry.len(), &entry[..14]), (ENTRY_BYTES, &b"\x05\0\0\0\0\0\0\0lease\0"[..]));
    }

    #[test]
    fn a_place_goes_round() {
        let mut place = Place::decode(0);
        for round in 0..3 {
            for (stage, word) in [(Stage::Free, 0), (Stage::Used, 1), (Stage::Leaving, 2)] {
                assert_eq!(place, Place { round, stage });
                assert_eq!((place.encode(), Place::decode(place.encode())), (4 * round + word, place));
                place = place.next();
            }
        }
    }

    #[test]
    fn an_entry_fits_or_is_refused() {
        let longest = vec![7; MOST_ENTRY_BYTES];
        assert_eq!(encode(&longest).and_then(|bytes| decode(&bytes)), Some(longest));
        assert_eq!(encode(&[]).and_then(|bytes| decode(&bytes)), Some(Vec::new()));
        assert_eq!(encode(&[7; MOST_ENTRY_BYTES + 1]), None);
        assert_eq!(decode(&[0; ENTRY_BYTES]), None, "memory that is all zeros has no entries");
    }

    proptest! {
        #[test]
        fn an_entry_that_was_changed_is_none(
            entry in prop::collection::vec(any::<u8>(), 0..MOST_ENTRY_BYTES),
            at in 0..ENTRY_BYTES,
            by in 1..=u8::MAX,
        ) {
            let mut bytes = encode(&entry).unwrap();
            bytes[at] ^= by;
            prop_assert_eq!(decode(&bytes), None);
            prop_assert_eq!(decode(&bytes[..at]), None);
        }
    }
}
