//! Which units of a region tables have taken. Pure.

use farpool_txn::layout::{MAP_BYTES, UNITS};
use farpool_wire::NodeId;

const WORD_BITS: u64 = u64::BITS as u64;

/// A region's map: a bit for each unit, which is set if a table has the unit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Map {
    words: [u64; MAP_BYTES / 8],
    /// Units before this one never belong to tables.
    first: u64,
}

impl Map {
    /// Decodes a map as it was read. `None` stands for a map in which no unit was ever taken.
    pub fn decode(bytes: Option<&[u8]>, first: u64) -> Option<Map> {
        let mut words = [0; MAP_BYTES / 8];
        if let Some(bytes) = bytes {
            let (found, []) = bytes.as_chunks::<8>() else { return None };
            if found.len() != words.len() {
                return None;
            }
            words.iter_mut().zip(found).for_each(|(word, found)| *word = u64::from_le_bytes(*found));
        }
        Some(Map { words, first })
    }

    /// The map of a region that the database gets later.
    pub fn empty() -> Map {
        Map { words: [0; MAP_BYTES / 8], first: 0 }
    }

    /// A map in which no unit is free.
    pub fn full() -> Map {
        Map { words: [u64::MAX; MAP_BYTES / 8], first: 0 }
    }

    /// Whether no table has a unit.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// The map's bytes.
    pub fn encode(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn is_taken(&self, unit: u64) -> bool {
        self.words[(unit / WORD_BITS) as usize] >> (unit % WORD_BITS) & 1 != 0
    }

    fn set(&mut self, unit: u64, is_taken: bool) {
        let bit = 1 << (unit % WORD_BITS);
        let word = &mut self.words[(unit / WORD_BITS) as usize];
        *word = if is_taken { *word | bit } else { *word & !bit };
    }

    /// Takes this many consecutive units, the first that are free. Returns the number of the first one.
    pub fn take(&mut self, units: u64) -> Option<u64> {
        let mut start = self.first;
        while units > 0 && start + units <= UNITS {
            match (start..start + units).rev().find(|&unit| self.is_taken(unit)) {
                Some(taken) => start = taken + 1,
                None => {
                    (start..start + units).for_each(|unit| self.set(unit, true));
                    return Some(start);
                }
            }
        }
        None
    }

    /// Gives units back.
    pub fn free(&mut self, start: u64, units: u64) {
        (start..(start + units).min(UNITS)).for_each(|unit| self.set(unit, false));
    }

    /// How many units are free.
    pub fn units_free(&self) -> u64 {
        (self.first..UNITS).filter(|&unit| !self.is_taken(unit)).count() as u64
    }
}

/// The place of a piece of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placed {
    /// The region.
    pub region: usize,
    /// The first unit there.
    pub unit: u64,
}

/// How many regions more are needed for pieces that do not fit. Each new region has the map `empty`. `None`:
/// a piece does not fit a region.
pub fn regions_lacking(
    (maps, nodes): (&[Map], &[Option<NodeId>]),
    empty: &Map,
    pieces: impl Iterator<Item = u64> + Clone,
) -> Option<usize> {
    if !pieces.clone().all(|units| empty.clone().take(units).is_some()) {
        return None;
    }
    let fits = |more: &usize| {
        let (mut maps, mut nodes) = (maps.to_vec(), nodes.to_vec());
        maps.resize(maps.len() + more, empty.clone());
        nodes.resize(nodes.len() + more, None);
        place(&mut maps, &nodes, pieces.clone()).is_some()
    };
    (1..=pieces.clone().count()).find(fits)
}

/// Places pieces on the nodes in turn; `pieces` says how many units each takes. A region without a node is
/// full. `None`: they do not fit, and the maps must not be used any more.
pub fn place(
    maps: &mut [Map],
    nodes: &[Option<NodeId>],
    pieces: impl Iterator<Item = u64>,
) -> Option<Vec<Placed>> {
    let mut distinct: Vec<NodeId> = Vec::new();
    for node in nodes.iter().flatten() {
        if !distinct.contains(node) {
            distinct.push(*node);
        }
    }
    let mut placed = Vec::new();
    for (piece, units) in pieces.enumerate() {
        let wanted = distinct[piece % distinct.len()];
        let near = (0..maps.len()).filter(|&region| nodes[region] == Some(wanted));
        let far = (0..maps.len()).filter(|&region| nodes[region] != Some(wanted));
        let take = |region: usize| Some(Placed { region, unit: maps[region].take(units)? });
        placed.push(near.chain(far).find_map(take)?);
    }
    Some(placed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn empty(first: u64) -> Map {
        Map::decode(None, first).unwrap()
    }

    #[test]
    fn units_are_taken_after_the_reserved_ones_and_reused_when_free() {
        let mut map = empty(4_090);
        assert_eq!((map.take(4), map.take(3), map.take(2)), (Some(4_090), None, Some(4_094)));
        map.free(4_091, 2);
        assert_eq!((map.units_free(), map.take(2), map.units_free()), (2, Some(4_091), 0));
        assert_eq!(Map::decode(Some(&map.encode()), 4_090), Some(map));
        assert_eq!(Map::decode(Some(&[0; 8]), 0), None);
    }

    #[test]
    fn regions_are_lacking_for_pieces_that_are_not_divided() {
        let (maps, nodes) = ([empty(4_000), empty(0)], [1, 2].map(|node| Some(NodeId(node))));
        let lacking = |units: u64, pieces: usize| {
            regions_lacking((&maps, &nodes), &empty(0), std::iter::repeat_n(units, pieces))
        };
        // Three fifths of a region each: one has a place, and each other one needs a region of its own.
        assert_eq!([lacking(2_500, 4), lacking(1_400, 4), lacking(5_000, 1)], [Some(3), Some(1), None]);
    }

    #[test]
    fn pieces_go_to_one_node_after_another_while_these_have_room() {
        let nodes = [1, 1, 2, 0].map(|node| Some(NodeId(node)).filter(|_| node > 0));
        let mut maps = [empty(0), empty(0), empty(4_000), Map::full()];
        let placed = place(&mut maps, &nodes, [70; 4].into_iter()).unwrap();
        let at = |region, unit| Placed { region, unit };
        assert_eq!(
            placed,
            [at(0, 0), at(2, 4_000), at(0, 70), at(0, 140)],
            "the second node has no more room"
        );
        assert_eq!(place(&mut maps, &nodes, [1, UNITS, UNITS].into_iter()), None);
    }

    proptest! {
        #[test]
        fn nothing_is_taken_twice(steps in prop::collection::vec((any::<bool>(), 1..700_u64), 1..60)) {
            let (mut map, mut taken) = (empty(100), Vec::<(u64, u64)>::new());
            for (takes, units) in steps {
                if takes {
                    if let Some(start) = map.take(units) {
                        prop_assert!(start >= 100 && start + units <= UNITS);
                        prop_assert!(taken.iter().all(|&(other, long)| start + units <= other || other + long <= start));
                        taken.push((start, units));
                    }
                } else if let Some((start, units)) = taken.pop() {
                    map.free(start, units);
                }
                let all: u64 = taken.iter().map(|(_, units)| units).sum();
                prop_assert_eq!(map.units_free(), UNITS - 100 - all);
            }
        }
    }
}
