//! The regions of a database, as a member knows them.

use std::sync::Arc;

use farpool_pool::ClientGrant;
use farpool_txn::later::{Place, Stage};
use farpool_txn::{DatabaseLayout, Memory, Piece};
use farpool_wire::control::Lease;
use farpool_wire::{NodeId, RegionId};
use prost::Message;

/// An entry in the list of regions that the database got later.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct LaterRegion {
    #[prost(message, optional, tag = "1")]
    lease: Option<Lease>,
}

impl LaterRegion {
    /// The entry for a leased region.
    pub(crate) fn encode_lease(lease: Lease) -> Vec<u8> {
        LaterRegion { lease: Some(lease) }.encode_to_vec()
    }

    /// The lease in an entry. `None`: it was damaged.
    pub(crate) fn decode_lease(entry: &[u8]) -> Option<Lease> {
        LaterRegion::decode(entry).ok()?.lease.filter(|lease| lease.region_id().is_some())
    }
}

/// The regions that a database got later, by their places in the list.
#[derive(Clone, Default)]
pub(crate) struct Later(Vec<Option<Known>>);

/// A region in the list that a member can use.
#[derive(Clone)]
struct Known {
    round: u64,
    grant: ClientGrant,
    lease: Lease,
}

impl Later {
    /// Whether a place has a region that the member can use.
    fn has(&self, number: u16, place: Place) -> bool {
        self.get(usize::from(number))
            .is_some_and(|known| place == Place { round: known.round, stage: Stage::Used })
    }

    fn get(&self, number: usize) -> Option<&Known> {
        self.0.get(number)?.as_ref()
    }

    /// The region of a place in this round, if the member can use it.
    pub(crate) fn region(&self, number: u16, round: u64) -> Option<RegionId> {
        self.get(usize::from(number)).filter(|known| known.round == round).map(|known| known.grant.region)
    }

    /// Whether the member can use a region with this grant.
    pub(crate) fn has_grant(&self, grant: &ClientGrant) -> bool {
        self.grants().any(|known| (known.region, known.epoch) == (grant.region, grant.epoch))
    }

    /// Places with regions that the member cannot use yet.
    pub(crate) fn missing(&self, places: &[Place]) -> Vec<u16> {
        let is_missing =
            |(number, place): &(u16, Place)| place.stage == Stage::Used && !self.has(*number, *place);
        (0..).zip(places.iter().copied()).filter(is_missing).map(|(number, _)| number).collect()
    }

    /// Places whose region the member knows, but must not use any more.
    pub(crate) fn gone(&self, places: &[Place]) -> Vec<u16> {
        let is_gone = |(number, place): &(u16, Place)| {
            self.get(usize::from(*number)).is_some() && !self.has(*number, *place)
        };
        (0..).zip(places.iter().copied()).filter(is_gone).map(|(number, _)| number).collect()
    }

    /// The same with the region of another place, in this round of its use.
    pub(crate) fn with(&self, number: u16, round: u64, (grant, lease): (ClientGrant, Lease)) -> Later {
        let mut known = self.0.clone();
        known.resize(known.len().max(usize::from(number) + 1), None);
        known[usize::from(number)] = Some(Known { round, grant, lease });
        Later(known)
    }

    /// The same without the region of a place, and that region's lease.
    pub(crate) fn without(&self, number: u16) -> (Later, Option<Lease>) {
        let mut known = self.0.clone();
        let gone = known.get_mut(usize::from(number)).and_then(Option::take);
        (Later(known), gone.map(|known| known.lease))
    }

    /// The member's grants.
    pub(crate) fn grants(&self) -> impl Iterator<Item = &ClientGrant> {
        self.0.iter().flatten().map(|known| &known.grant)
    }
}

/// The regions of a database that a member can use, by their numbers: first come those that the database was
/// created with, then the places of those that it got later.
#[derive(Clone)]
pub(crate) struct Regions<'a> {
    layout: &'a DatabaseLayout,
    first: &'a [ClientGrant],
    later: Arc<Later>,
}

impl<'a> Regions<'a> {
    /// The regions of this layout, with the member's grants, and later ones.
    pub(crate) fn new(
        layout: &'a DatabaseLayout,
        first: &'a [ClientGrant],
        later: Arc<Later>,
    ) -> Regions<'a> {
        Regions { layout, first, later }
    }

    pub(crate) fn layout(&self) -> &'a DatabaseLayout {
        self.layout
    }

    /// One more than the highest number.
    pub(crate) fn end(&self) -> usize {
        self.first.len() + self.later.0.len()
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.first.len() + self.later.grants().count()
    }

    /// The member's grant of a region. `None`: it cannot use the region.
    pub(crate) fn grant(&self, region: usize) -> Option<&ClientGrant> {
        match region.checked_sub(self.first.len()) {
            None => self.first.get(region),
            Some(place) => Some(&self.later.get(place)?.grant),
        }
    }

    /// The node of each region, by the region's number.
    pub(crate) fn nodes(&self) -> Vec<Option<NodeId>> {
        (0..self.end()).map(|region| Some(self.grant(region)?.region.node)).collect()
    }

    /// What starts behind the beginning of a unit of a region.
    pub(crate) fn piece(&self, region: usize, unit: u64, offset: u64) -> Option<Piece> {
        let grant = self.grant(region)?;
        let start = self.layout.start_of(unit) + offset;
        Some(Piece { region: grant.region, epoch: grant.epoch, start })
    }

    /// The first unit of a region that tables may have: all of a region that the database got later is
    /// theirs.
    pub(crate) fn first_unit(&self, region: usize) -> u64 {
        if region < self.first.len() { self.layout.first_unit(region) } else { 0 }
    }

    /// Whether the member can use a region, and has opened it for a thread.
    pub(crate) fn is_open(&self, region: usize, memory: &Memory) -> bool {
        self.grant(region).is_some_and(|grant| is_open(grant, memory))
    }
}

/// Whether a region was opened for a thread with this grant. The pool may lend a region twice to a database,
/// one time after the other.
pub(crate) fn is_open(grant: &ClientGrant, memory: &Memory) -> bool {
    memory.whole(grant.region).is_some_and(|whole| whole.epoch == grant.epoch)
}

#[cfg(test)]
mod tests {
    use farpool_wire::{AccessKey, Epoch, GrantMode};

    use super::*;

    #[test]
    fn a_member_knows_which_places_it_lacks_and_which_are_gone() {
        let place = |round, stage| Place { round, stage };
        let region = RegionId { node: NodeId(1), index: 0 };
        let key = AccessKey::from_bytes([0; AccessKey::BYTES]);
        let grant = ClientGrant { region, epoch: Epoch(3), key, mode: GrantMode::ReadWrite };
        let known = Later::default().with(2, 5, (grant, Lease::default()));
        let places = [place(0, Stage::Used), place(4, Stage::Leaving), place(5, Stage::Used)];
        assert_eq!((known.missing(&places), known.gone(&places)), (vec![0], vec![]));
        for later in [place(5, Stage::Leaving), place(6, Stage::Free)] {
            let places = [places[0], places[1], later];
            assert_eq!((known.missing(&places), known.gone(&places)), (vec![0], vec![2]));
        }
        let again = [places[0], places[1], place(6, Stage::Used)];
        assert_eq!((known.missing(&again), known.gone(&again)), (vec![0, 2], vec![2]));
        let (without, lease) = known.without(2);
        assert_eq!(
            (lease, without.missing(&places), without.gone(&again)),
            (Some(Lease::default()), vec![0, 2], vec![])
        );
    }
}
