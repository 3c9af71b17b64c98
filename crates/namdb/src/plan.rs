//! Where what every database has lies in its regions (`docs/src/namdb.md`, *what lies where*). Pure.
//!
//! ```text
//! root region     seats | horizon | catalog | its index | tombs | maps of regions | counter | parts of the oracle | logs | tables ...
//! other regions                                                                             parts of the oracle | logs | tables ...
//! ```

use std::ops::Range;

use farpool_txn::hash::{IndexLayout, IndexShape};
use farpool_txn::horizon::HorizonLayout;
use farpool_txn::log::LogLayout;
use farpool_txn::membership::MembersLayout;
use farpool_txn::oracle::Board;
use farpool_txn::{RecordId, RecordLayout};
use farpool_wire::{RegionId, Slot};

use crate::error::DatabaseError;

/// Units of a region that tables take: one bit each in its map.
pub const UNITS: u64 = 4096;
/// Bytes of a region's map.
pub const MAP_BYTES: usize = UNITS as usize / 8;
/// Names that tables of a database can have, over all its life: a name stays in the catalog's index.
pub const MOST_NAMES: u64 = 256;
/// Tables that may be dropped before the memory of the first of them is free again.
pub const MOST_TOMBS: u64 = 32;
/// Longest name of a table.
pub const NAME_BYTES: usize = 64;
/// Bytes of a table's row in the catalog: room for its places.
pub const ROW_BYTES: usize = 1_024;
/// Old versions of what the catalog has: it changes rarely.
const OLD_VERSIONS: usize = 4;
/// More of them, of each of its tables, for snapshots that stay open while tables are made and dropped.
const OVERFLOW: u64 = 64;
/// Names are no secret, and no stranger chooses them.
const SEED: u64 = 0x6661_7270_6F6F_6C21;
/// Compute servers at a time: one less than a region can have grants, of which the lease's own is one.
pub const MOST_SLOTS: u16 = 63;
/// Threads of a compute server that run transactions at a time.
pub const MOST_WORKERS: u16 = 64;
/// Parts of the oracle at most.
pub const MOST_PARTITIONS: u16 = 16;
/// No machine has more memory; what lies in a region has sums that are no larger than a word.
const MOST_REGION_BYTES: u64 = 1 << 50;
/// Regions at most: so many grants a compute server has.
pub const MOST_REGIONS: usize = 4_096;

/// Records of the catalog have the numbers before this, those of tables the ones from here on.
pub const FIRST_RECORD: u64 = 1 << 32;
const CATALOG_RECORDS: u64 = 1;
const MAP_RECORDS: u64 = 1 << 20;
const COUNTER_RECORD: u64 = 1 << 21;
const TOMB_RECORDS: u64 = 1 << 22;

/// What a database was made with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Compute servers that it can have at a time.
    pub slots: u16,
    /// Parts of its oracle.
    pub partitions: u16,
    /// For the intents of one compute server's commits under way.
    pub log_bytes: u64,
    /// Size of its regions.
    pub region_bytes: u64,
}

/// Where all this lies.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What it is for.
    pub shape: Shape,
    /// The seats of compute servers, at the root's beginning.
    pub members: MembersLayout,
    /// In which region each of the oracle's parts lies, and where there.
    pub parts: Vec<(usize, u64)>,
    /// What workers announce, and the horizon, and where they lie in the root.
    pub horizon: (u64, HorizonLayout),
    /// Rows of tables, and where they lie in the root.
    pub catalog: (u64, RecordLayout),
    /// The catalog's index, and where it lies in the root.
    pub names: (u64, IndexLayout),
    /// Tables that were dropped and whose memory is still theirs, and where their rows lie in the root.
    pub tombs: (u64, RecordLayout),
    /// Maps of regions, and where they lie in the root.
    pub maps: (u64, RecordLayout),
    /// The counter of record numbers.
    pub counter: (u64, RecordLayout),
    /// A log's layout.
    pub log: LogLayout,
    /// For each slot and each copy of its log: in which region, and where there.
    logs: Vec<[(usize, u64); 2]>,
    /// For each region, where tables begin.
    tables_from: Vec<u64>,
}

impl Plan {
    /// For these regions, the first of which is the root.
    ///
    /// # Errors
    /// When the regions are too small, or too many.
    pub fn new(shape: Shape, regions: &[RegionId]) -> Result<Plan, DatabaseError> {
        let slots = shape.slots.min(MOST_SLOTS + 1); // what is more is refused below
        let count = u16::try_from(regions.len()).ok().filter(|&count| usize::from(count) <= MOST_REGIONS);
        let count = count.ok_or(DatabaseError::TooManyRegions { most: MOST_REGIONS })?;
        // One more than there are compute servers: changes of the catalog are commits of a slot of their own.
        let members = MembersLayout::new(slots, count);
        let partitions = shape.partitions.clamp(1, MOST_PARTITIONS.min(slots + 1));
        let board = Board::new((slots + 1).div_ceil(partitions)); // of the largest part
        let horizon = HorizonLayout::new(slots * MOST_WORKERS, slots + 1);
        let records =
            |records, bytes| RecordLayout::new(records, bytes, OLD_VERSIONS)?.with_overflow(OVERFLOW);
        let catalog = records(MOST_NAMES, ROW_BYTES);
        let names = IndexLayout::new(IndexShape::for_keys(MOST_NAMES, MOST_NAMES, NAME_BYTES, SEED), 1);
        let tombs = records(MOST_TOMBS, ROW_BYTES);
        let maps = records(count.into(), MAP_BYTES);
        let counter = records(1, size_of::<u64>());
        let log = LogLayout::new(shape.log_bytes);
        let bad = DatabaseError::BadShape { most_slots: MOST_SLOTS, most_partitions: MOST_PARTITIONS };
        let (Some(members), Some(board), Some(horizon)) = (members, board, horizon) else { return Err(bad) };
        let (Some(catalog), Some(names)) = (catalog, names) else { return Err(bad) };
        let (Some(tombs), Some(maps), Some(counter), Some(log)) = (tombs, maps, counter, log) else {
            return Err(bad);
        };
        let is_possible = (1..=MOST_REGION_BYTES).contains(&shape.region_bytes);
        if slots > MOST_SLOTS
            || partitions != shape.partitions
            || !is_possible
            || !shape.region_bytes.is_multiple_of(UNITS)
        {
            return Err(bad);
        }
        if log.bytes() > shape.region_bytes {
            let (region_bytes, needed) = (shape.region_bytes, log.bytes());
            return Err(DatabaseError::RegionsTooSmall { region_bytes, needed });
        }
        let mut end = members.bytes();
        let mut place = |bytes: u64| {
            let start = end.next_multiple_of(ALIGN);
            end = start + bytes;
            start
        };
        let horizon = (place(horizon.bytes() as u64), horizon);
        let catalog = (place(catalog.bytes()), catalog);
        let names = (place(names.bytes()), names);
        let tombs = (place(tombs.bytes()), tombs);
        let maps = (place(maps.bytes()), maps);
        let counter = (place(counter.bytes()), counter);
        let mut tables_from = vec![0; regions.len()];
        tables_from[0] = end.next_multiple_of(ALIGN);
        let mut nodes = Nodes::of(regions, &mut tables_from);
        let parts = (0..usize::from(partitions))
            .map(|part| nodes.place(part, part / nodes.count(), board.bytes() as u64))
            .collect();
        let logs = (0..=usize::from(slots))
            .map(|slot| [slot, slot + 1].map(|number| nodes.place(number, slot, log.bytes())))
            .collect();
        if let Some(&needed) = tables_from.iter().find(|&&from| from >= shape.region_bytes) {
            return Err(DatabaseError::RegionsTooSmall { region_bytes: shape.region_bytes, needed });
        }
        Ok(Plan {
            shape,
            members,
            parts,
            horizon,
            catalog,
            names,
            tombs,
            maps,
            counter,
            log,
            logs,
            tables_from,
        })
    }

    /// The slot in which the catalog is changed.
    pub fn catalog_slot(&self) -> Slot {
        Slot::new(self.shape.slots).expect("there are far fewer than an oracle can have")
    }

    /// The places in which the workers of a compute server announce their snapshots.
    pub fn workers(&self, slot: Slot) -> Range<u16> {
        let first = slot.index() as u16 * MOST_WORKERS;
        first..first + MOST_WORKERS
    }

    /// In which regions the copies of a slot's log lie, and where there.
    pub fn log(&self, slot: Slot) -> [(usize, u64); 2] {
        self.logs[slot.index()]
    }

    /// Bytes of a unit: tables take whole ones.
    pub fn unit_bytes(&self) -> u64 {
        self.shape.region_bytes / UNITS
    }

    /// The first unit of a region that tables may have.
    pub fn first_unit(&self, region: usize) -> u64 {
        self.tables_from[region].div_ceil(self.unit_bytes())
    }

    /// The number of the catalog's first record.
    pub fn catalog_records() -> RecordId {
        RecordId(CATALOG_RECORDS)
    }

    /// The number of the first map's record.
    pub fn map_records() -> RecordId {
        RecordId(MAP_RECORDS)
    }

    /// The number of the first tomb's record.
    pub fn tomb_records() -> RecordId {
        RecordId(TOMB_RECORDS)
    }

    /// The number of the counter's record.
    pub fn counter_record() -> RecordId {
        RecordId(COUNTER_RECORD)
    }
}

/// What each structure starts at: a page, so that no two share one.
const ALIGN: u64 = 4096;

/// The regions of each node, for what is spread over nodes: parts of the oracle, and the two copies of each
/// log.
struct Nodes<'a> {
    regions: Vec<Vec<usize>>,
    /// How far each region is taken.
    ends: &'a mut [u64],
}

impl<'a> Nodes<'a> {
    fn of(regions: &[RegionId], ends: &'a mut [u64]) -> Nodes<'a> {
        let mut nodes: Vec<Vec<usize>> = Vec::new();
        for (place, region) in regions.iter().enumerate() {
            match nodes.iter_mut().find(|node| regions[node[0]].node == region.node) {
                Some(node) => node.push(place),
                None => nodes.push(vec![place]),
            }
        }
        Nodes { regions: nodes, ends }
    }

    fn count(&self) -> usize {
        self.regions.len()
    }

    /// Takes bytes on the node that comes with that number, in the one of its regions that has this turn.
    fn place(&mut self, number: usize, turn: usize, bytes: u64) -> (usize, u64) {
        let node = &self.regions[number % self.regions.len()];
        let region = node[turn % node.len()];
        let start = self.ends[region];
        self.ends[region] = (start + bytes).next_multiple_of(ALIGN);
        (region, start)
    }
}

#[cfg(test)]
mod tests {
    use farpool_wire::NodeId;

    use super::*;

    const SHAPE: Shape = Shape { slots: 4, partitions: 3, log_bytes: 4_096, region_bytes: 4 << 20 };

    fn regions(nodes: &[u64]) -> Vec<RegionId> {
        (0..).zip(nodes).map(|(index, &node)| RegionId { node: NodeId(node), index }).collect()
    }

    #[test]
    fn nothing_lies_upon_anything_else_and_the_copies_of_a_log_lie_on_two_nodes() {
        let regions = regions(&[1, 2, 1, 2]);
        let plan = Plan::new(SHAPE, &regions).unwrap();
        let root = [
            (0, plan.members.bytes()),
            (plan.horizon.0, plan.horizon.1.bytes() as u64),
            (plan.catalog.0, plan.catalog.1.bytes()),
            (plan.names.0, plan.names.1.bytes()),
            (plan.tombs.0, plan.tombs.1.bytes()),
            (plan.maps.0, plan.maps.1.bytes()),
            (plan.counter.0, plan.counter.1.bytes()),
        ];
        let mut taken: Vec<(usize, u64, u64)> = root.map(|(start, bytes)| (0, start, start + bytes)).into();
        let part_bytes = Board::new(2).unwrap().bytes() as u64;
        taken.extend(plan.parts.iter().map(|&(region, start)| (region, start, start + part_bytes)));
        let nodes_of_parts: Vec<u64> = plan.parts.iter().map(|part| regions[part.0].node.0).collect();
        let regions_of_parts: Vec<usize> = plan.parts.iter().map(|part| part.0).collect();
        assert_eq!((nodes_of_parts, regions_of_parts), (vec![1, 2, 1], vec![0, 1, 2]));
        for slot in 0..=4 {
            let copies = plan.log(Slot::new(slot).unwrap());
            assert_ne!(regions[copies[0].0].node, regions[copies[1].0].node);
            taken.extend(copies.map(|(region, start)| (region, start, start + plan.log.bytes())));
        }
        for region in 0..4 {
            taken.push((region, plan.first_unit(region) * plan.unit_bytes(), SHAPE.region_bytes));
        }
        taken.sort_unstable();
        for pair in taken.windows(2) {
            assert!(pair[0].0 < pair[1].0 || pair[0].2 <= pair[1].1, "{pair:?}");
        }
    }

    #[test]
    fn one_node_has_both_copies_of_a_log() {
        let plan = Plan::new(SHAPE, &regions(&[1])).unwrap();
        let [one, other] = plan.log(Slot::new(0).unwrap());
        assert!(one.0 == other.0 && one.1 != other.1);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_what_it_needs() {
        let small = Shape { region_bytes: 1 << 20, ..SHAPE };
        let refused = Plan::new(small, &regions(&[1])).unwrap_err().to_string();
        assert!(refused.contains("1048576") && refused.contains("--region-size"), "{refused}");
        let logs = Shape { log_bytes: 1 << 59, ..SHAPE };
        assert!(Plan::new(logs, &regions(&[1])).is_err());
        let endless = Shape { region_bytes: u64::MAX - 4_095, ..SHAPE };
        assert!(Plan::new(endless, &regions(&[1])).is_err());
        for partitions in [0, 6, MOST_PARTITIONS + 1] {
            let refused = Plan::new(Shape { partitions, ..SHAPE }, &regions(&[1])).unwrap_err();
            assert!(refused.to_string().contains("parts of the oracle"), "{refused}");
        }
        let many = Shape { slots: 64, ..SHAPE };
        assert!(Plan::new(many, &regions(&[1])).unwrap_err().to_string().contains("63"));
    }
}
