//! Where the seats lie (`docs/src/wire.md`, *seats*).

use std::ops::Range;

use crc_fast::{CrcAlgorithm, checksum};
use farpool_wire::{Epoch, Slot};

use crate::memory::Piece;

const WORD_BYTES: u64 = 8;
/// Words for roles, some of them spare.
const ROLE_WORDS: u64 = 8;
/// Words of a seat: claim, heartbeat, recoverer, and a spare one.
const SEAT_WORDS: u64 = 4;
/// Words around a list of grants: their number before it, and a checksum after it.
const WORDS_AROUND: u64 = 2;
/// Words of a grant of a region that the database got later.
const LATER_WORDS: u64 = 2;

/// Where the seats of a database lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MembersAt {
    /// The memory, in the root region.
    pub piece: Piece,
    /// Their layout.
    pub layout: MembersLayout,
}

/// The layout of seats: roles, then the words of all seats, then the lists of their members' grants, each
/// followed by the grants of regions that the database got later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MembersLayout {
    slots: u16,
    regions: u16,
    later: u16,
}

/// What one member does for all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Publishes cuts.
    Publisher,
    /// Publishes the horizon.
    Collector,
    /// Changes which tables there are.
    Catalog,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 3] = [Role::Publisher, Role::Collector, Role::Catalog];
}

/// The words of a seat.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SeatWords {
    /// The claim of its member.
    pub claim: Option<Epoch>,
    /// How many heartbeats that member has sent.
    pub beat: u64,
    /// The claim of its recoverer.
    pub recoverer: Option<Epoch>,
}

/// A member's grant of a region that the database got later, as its seat lists it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaterGrant {
    /// The round of the region's place in the list of such regions. In another round it is another region's.
    pub round: u64,
    /// The grant.
    pub epoch: Epoch,
}

impl LaterGrant {
    /// Its words. `None`: no grant is listed.
    pub fn encode(grant: Option<LaterGrant>) -> [u8; (LATER_WORDS * WORD_BYTES) as usize] {
        let words = grant.map_or([0; 2], |grant| [grant.round + 1, grant.epoch.0]);
        let mut bytes = [0; (LATER_WORDS * WORD_BYTES) as usize];
        for (place, word) in bytes.chunks_exact_mut(WORD_BYTES as usize).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The grants in bytes that were read from [`MembersLayout::later_grants`], by the places of their
    /// regions. `None`: none is listed, or its member has never used it, since it was not written whole.
    pub fn decode_all(bytes: &[u8]) -> impl Iterator<Item = Option<LaterGrant>> + '_ {
        let (words, _) = bytes.as_chunks::<{ WORD_BYTES as usize }>();
        words.chunks_exact(LATER_WORDS as usize).map(|words| {
            let [round, epoch] = [words[0], words[1]].map(u64::from_le_bytes);
            let epoch = Some(Epoch(epoch)).filter(|epoch| epoch.0 != 0)?;
            Some(LaterGrant { round: round.checked_sub(1)?, epoch })
        })
    }
}

impl MembersLayout {
    /// The layout for so many slots, and for members with a grant for each of so many regions, and of up to
    /// `later` ones that the database gets later. `None`: there must be at least one slot and one region, and
    /// no more slots than an oracle can have.
    pub fn new(slots: u16, regions: u16, later: u16) -> Option<MembersLayout> {
        let fits = (1..=Slot::MOST).contains(&slots) && regions > 0;
        fits.then_some(MembersLayout { slots, regions, later })
    }

    /// Bytes that it takes; it starts at a multiple of eight.
    pub fn bytes(&self) -> u64 {
        self.list_start(u64::from(self.slots))
    }

    /// Where the claim of the member that has a role lies.
    pub fn role(&self, role: Role) -> u64 {
        role as u64 * WORD_BYTES
    }

    /// Where the words of all seats lie.
    pub fn seats(&self) -> Range<u64> {
        let start = ROLE_WORDS * WORD_BYTES;
        start..start + u64::from(self.slots) * SEAT_WORDS * WORD_BYTES
    }

    fn seat(&self, slot: Slot) -> u64 {
        debug_assert!(slot.index() < usize::from(self.slots));
        self.seats().start + slot.index() as u64 * SEAT_WORDS * WORD_BYTES
    }

    /// Where the claim of a seat's member lies.
    pub fn claim(&self, slot: Slot) -> u64 {
        self.seat(slot)
    }

    /// Where its heartbeat lies.
    pub fn beat(&self, slot: Slot) -> u64 {
        self.seat(slot) + WORD_BYTES
    }

    /// Where the claim of its recoverer lies.
    pub fn recoverer(&self, slot: Slot) -> u64 {
        self.seat(slot) + 2 * WORD_BYTES
    }

    fn list_start(&self, seat: u64) -> u64 {
        let words = u64::from(self.regions) + WORDS_AROUND + LATER_WORDS * u64::from(self.later);
        self.seats().end + seat * words * WORD_BYTES
    }

    /// Where a member lists its grants.
    pub fn grants(&self, slot: Slot) -> Range<u64> {
        let start = self.list_start(slot.index() as u64);
        start..start + (u64::from(self.regions) + WORDS_AROUND) * WORD_BYTES
    }

    /// Where it lists its grants of the regions that the database got later: a [`LaterGrant`] each.
    pub fn later_grants(&self, slot: Slot) -> Range<u64> {
        self.grants(slot).end..self.list_start(slot.index() as u64 + 1)
    }

    /// Where it lists its grant of one of these regions.
    pub fn later_grant(&self, slot: Slot, place: u16) -> u64 {
        self.later_grants(slot).start + u64::from(place) * LATER_WORDS * WORD_BYTES
    }

    /// How many such regions there may be.
    pub fn later(&self) -> u16 {
        self.later
    }

    /// The words of seats that were read from [`seats`](Self::seats).
    pub fn decode_seats(&self, bytes: &[u8]) -> Vec<SeatWords> {
        let (words, _) = bytes.as_chunks::<{ WORD_BYTES as usize }>();
        let seats = words.chunks_exact(SEAT_WORDS as usize).map(|words| {
            let word = |place: usize| u64::from_le_bytes(words[place]);
            let epoch = |place| Some(Epoch(word(place))).filter(|epoch| epoch.0 != 0);
            SeatWords { claim: epoch(0), beat: word(1), recoverer: epoch(2) }
        });
        seats.collect()
    }

    /// A list of grants, in the order of regions.
    pub fn encode_grants(&self, grants: &[Epoch]) -> Vec<u8> {
        debug_assert_eq!(grants.len(), usize::from(self.regions));
        let words = std::iter::once(grants.len() as u64).chain(grants.iter().map(|grant| grant.0));
        let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        bytes.extend(checksum(CrcAlgorithm::Crc64Nvme, &bytes).to_le_bytes());
        bytes
    }

    /// The grants in bytes that were read from [`grants`](Self::grants). `None`: there is no list, or it is
    /// not whole.
    pub fn decode_grants(&self, bytes: &[u8]) -> Option<Vec<Epoch>> {
        let (body, sum) = bytes.split_last_chunk::<{ WORD_BYTES as usize }>()?;
        if u64::from_le_bytes(*sum) != checksum(CrcAlgorithm::Crc64Nvme, body) {
            return None;
        }
        let (words, _) = body.as_chunks::<{ WORD_BYTES as usize }>();
        let (count, grants) = words.split_first()?;
        let is_whole =
            u64::from_le_bytes(*count) == grants.len() as u64 && grants.len() == usize::from(self.regions);
        is_whole.then(|| grants.iter().map(|word| Epoch(u64::from_le_bytes(*word))).collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slot(number: u16) -> Slot {
        Slot::new(number).unwrap()
    }

    #[test]
    fn layout_of_seats_is_fixed() {
        let layout = MembersLayout::new(3, 2, 0).unwrap();
        assert_eq!((layout.role(Role::Publisher), layout.role(Role::Collector)), (0, 8));
        assert_eq!((layout.seats(), layout.bytes()), (64..160, 256));
        assert_eq!((layout.claim(slot(1)), layout.beat(slot(1)), layout.recoverer(slot(1))), (96, 104, 112));
        assert_eq!((layout.grants(slot(0)), layout.grants(slot(2))), (160..192, 224..256));
        let list = layout.encode_grants(&[Epoch(9), Epoch(4)]);
        let words: Vec<u64> = list.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        assert_eq!(words[..3], [2, 9, 4]);
        assert_eq!(layout.decode_grants(&list), Some(vec![Epoch(9), Epoch(4)]));
        assert!(MembersLayout::new(0, 1, 0).is_none() && MembersLayout::new(1, 0, 0).is_none());
        let later = MembersLayout::new(3, 2, 5).unwrap();
        assert_eq!((later.grants(slot(1)), later.later_grants(slot(1))), (272..304, 304..384));
        assert_eq!((later.later_grant(slot(1), 2), later.bytes()), (336, 496));
    }

    #[test]
    fn a_later_grant_is_found_again_unless_a_part_of_it_is_missing() {
        let grant = LaterGrant { round: 0, epoch: Epoch(7) };
        let [one, none] = [Some(grant), None].map(LaterGrant::encode);
        let halves = [[0; 8], one[8..].try_into().unwrap(), one[..8].try_into().unwrap(), [0; 8]].concat();
        let found: Vec<_> = LaterGrant::decode_all(&[&one[..], &none, &halves].concat()).collect();
        assert_eq!((found, none), (vec![Some(grant), None, None, None], [0; 16]));
    }

    #[test]
    fn memory_that_is_all_zeros_has_free_seats_and_no_lists() {
        let layout = MembersLayout::new(2, 3, 0).unwrap();
        let seats = layout.decode_seats(&[0; 64]);
        assert_eq!(seats, [SeatWords { claim: None, beat: 0, recoverer: None }; 2]);
        assert_eq!(layout.decode_grants(&[0; 40]), None);
    }

    proptest! {
        #[test]
        fn a_list_that_is_not_whole_is_none(bytes in prop::collection::vec(any::<u8>(), 0..64), cut in 0..32_usize) {
            let layout = MembersLayout::new(1, 2, 0).unwrap();
            prop_assert_eq!(layout.decode_grants(&bytes), None);
            let list = layout.encode_grants(&[Epoch(1), Epoch(2)]);
            prop_assert_eq!(layout.decode_grants(&list[..cut]), None);
        }
    }
}
