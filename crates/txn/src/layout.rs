//! The layout of a database: where its structures lie in its regions (`docs/src/namdb.md`, *what lies
//! where*), and their addresses for one member. Pure.
//!
//! ```text
//! root region    seats | horizon | catalog | its index | tombstones | maps of regions | later regions | counter |
//!                parts of the oracle | logs | tables ...
//! other regions  parts of the oracle | logs | tables ...
//! ```

use std::ops::Range;

use farpool_wire::{Epoch, RegionId, Slot};

use crate::hash::{Index, IndexLayout, IndexShape};
use crate::horizon::{HorizonAt, HorizonLayout};
use crate::later::{LaterAt, LaterLayout};
use crate::log::{LogAt, LogLayout, Logs};
use crate::membership::{MembersAt, MembersLayout};
use crate::memory::Piece;
use crate::oracle::{Board, Oracle};
use crate::record::{RecordId, RecordLayout};
use crate::table::Table;

/// Units of a region that tables take: one bit each in its map.
pub const UNITS: u64 = 4096;
/// Bytes of a region's map.
pub const MAP_BYTES: usize = UNITS as usize / 8;
/// Longest name of a table.
pub const NAME_BYTES: usize = 64;
/// Bytes of a table's row in the catalog: room for its pieces.
pub const ROW_BYTES: usize = 1_024;
/// The seed of the catalog's index. It is public: the names of tables are no secret, and only members choose
/// them.
const SEED: u64 = 0x6661_7270_6F6F_6C21;
/// Most members at a time: one less than a region can have grants, since the lease has one of them.
pub const MOST_SLOTS: u16 = 63;
/// Most parts of the oracle.
pub const MOST_PARTITIONS: u16 = 16;
/// No machine has more memory. Sums of sizes within a region fit a word.
const MOST_REGION_BYTES: u64 = 1 << 50;
/// Most regions: a member has as many grants.
pub const MOST_REGIONS: usize = 4_096;

/// Records of tables have numbers from here on; smaller numbers are the catalog's own.
pub const FIRST_RECORD: u64 = 1 << 32;
const CATALOG_RECORDS: RecordId = RecordId(1);
const MAP_RECORDS: RecordId = RecordId(1 << 20);
const COUNTER_RECORD: RecordId = RecordId(1 << 21);
const TOMBSTONE_RECORDS: RecordId = RecordId(1 << 22);

/// What a database is created with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DatabaseShape {
    /// Most members at a time.
    pub slots: u16,
    /// Parts of its oracle.
    pub partitions: u16,
    /// Bytes for the versions that one member's commits have replaced, while a snapshot may need them.
    pub log_bytes: u64,
    /// Size of its regions, in bytes.
    pub region_bytes: u64,
}

/// Limits that are the same for all databases, so that their files do not have them. Simulations have small
/// ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Most clients of a member, each with a word for its snapshots.
    pub clients: u16,
    /// Most names that tables have over the life of the database: a name stays in the catalog's index.
    pub names: u64,
    /// Most tombstones: dropped tables that still have their memory.
    pub tombstones: u64,
    /// Most regions that the database gets after it was created.
    pub later_regions: u16,
}

impl Limits {
    /// Those of all databases outside simulations.
    pub const SHIPPED: Limits = Limits { clients: 64, names: 256, tombstones: 32, later_regions: 256 };
}

/// Why no database can have this shape.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutError {
    /// Ask for other numbers.
    #[error(
        "a database has 1 to {MOST_SLOTS} compute servers (--servers); 1 to {MOST_PARTITIONS} parts of the \
         oracle, and at most one more than compute servers (--partitions); logs of whole words; and regions \
         that are a multiple of {UNITS} bytes"
    )]
    BadShape,
    /// Lend larger regions.
    #[error(
        "regions of {region_bytes} bytes are too small: the fixed structures of a database take {needed}; \
         start the nodes with a larger --region-size, or create the database with a smaller --log-size or \
         fewer --servers"
    )]
    RegionsTooSmall {
        /// Their size.
        region_bytes: u64,
        /// What the largest part needs.
        needed: u64,
    },
    /// Lend larger regions.
    #[error("more than {MOST_REGIONS} regions: start the nodes with a larger --region-size")]
    TooManyRegions,
}

/// Where the structures of a database lie.
#[derive(Clone, Debug)]
pub struct DatabaseLayout {
    /// What it is for.
    pub shape: DatabaseShape,
    /// Its limits.
    pub limits: Limits,
    /// The regions, the first of which is the root.
    pub regions: Vec<RegionId>,
    /// The seats of members, at the root's beginning.
    pub members: MembersLayout,
    /// For each part of the oracle, its region and where it starts there.
    pub parts: Vec<(usize, u64)>,
    /// Where the horizon starts in the root, and its layout, with the words for snapshots.
    pub horizon: (u64, HorizonLayout),
    /// A log's layout.
    pub log: LogLayout,
    /// Rows of tables, and where they start in the root.
    catalog: (u64, RecordLayout),
    /// The catalog's index.
    names: (u64, IndexLayout),
    /// Rows of dropped tables that still have their memory.
    tombstones: (u64, RecordLayout),
    /// Maps of regions.
    maps: (u64, RecordLayout),
    /// The list of regions that the database got later.
    later: (u64, LaterLayout),
    /// The counter of record numbers.
    counter: (u64, RecordLayout),
    /// For each slot and each copy of its log: its region, and where it starts there.
    logs: Vec<[(usize, u64); 2]>,
    /// For each region, where tables begin.
    tables_from: Vec<u64>,
}

impl DatabaseLayout {
    /// The layout for these regions, the first of which is the root.
    ///
    /// # Errors
    /// When the regions are too small, or too many.
    pub fn new(
        shape: DatabaseShape,
        limits: Limits,
        regions: Vec<RegionId>,
    ) -> Result<DatabaseLayout, LayoutError> {
        let slots = shape.slots.min(MOST_SLOTS + 1); // more are refused below
        let count = u16::try_from(regions.len()).ok().filter(|&count| usize::from(count) <= MOST_REGIONS);
        let count = count.ok_or(LayoutError::TooManyRegions)?;
        // One slot more than members: changes of the catalog are commits in a slot of their own.
        let members = MembersLayout::new(slots, count, limits.later_regions);
        let partitions = shape.partitions.clamp(1, MOST_PARTITIONS.min(slots + 1));
        let board = Board::new((slots + 1).div_ceil(partitions)); // of the largest part
        let horizon = HorizonLayout::new(slots * limits.clients, slots + 1);
        let catalog = RecordLayout::new(limits.names, ROW_BYTES);
        let names = IndexLayout::new(IndexShape::for_keys(limits.names, limits.names, NAME_BYTES, SEED), 1);
        let tombstones = RecordLayout::new(limits.tombstones, ROW_BYTES);
        let maps = RecordLayout::new(u64::from(count) + u64::from(limits.later_regions), MAP_BYTES);
        let later = LaterLayout::new(limits.later_regions);
        let counter = RecordLayout::new(1, size_of::<u64>());
        let log = LogLayout::new(shape.log_bytes);
        let bad = LayoutError::BadShape;
        let (Some(members), Some(board), Some(horizon)) = (members, board, horizon) else { return Err(bad) };
        let (Some(catalog), Some(names)) = (catalog, names) else { return Err(bad) };
        let (Some(tombstones), Some(maps), Some(counter), Some(log)) = (tombstones, maps, counter, log)
        else {
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
            return Err(LayoutError::RegionsTooSmall { region_bytes, needed });
        }
        let mut end = members.bytes();
        let mut place_in_root = |bytes: u64| {
            let start = end.next_multiple_of(ALIGN);
            end = start + bytes;
            start
        };
        let horizon = (place_in_root(horizon.bytes() as u64), horizon);
        let catalog = (place_in_root(catalog.bytes()), catalog);
        let names = (place_in_root(names.bytes()), names);
        let tombstones = (place_in_root(tombstones.bytes()), tombstones);
        let maps = (place_in_root(maps.bytes()), maps);
        let later = (place_in_root(later.bytes()), later);
        let counter = (place_in_root(counter.bytes()), counter);
        let mut tables_from = vec![0; regions.len()];
        tables_from[0] = end.next_multiple_of(ALIGN);
        let mut nodes = Nodes::of(&regions, &mut tables_from);
        let parts = (0..usize::from(partitions))
            .map(|part| nodes.place_on_node(part, part / nodes.count(), board.bytes() as u64))
            .collect();
        let logs = (0..=usize::from(slots))
            .map(|slot| [slot, slot + 1].map(|number| nodes.place_on_node(number, slot, log.bytes())))
            .collect();
        if let Some(&needed) = tables_from.iter().find(|&&from| from >= shape.region_bytes) {
            return Err(LayoutError::RegionsTooSmall { region_bytes: shape.region_bytes, needed });
        }
        Ok(DatabaseLayout {
            shape,
            limits,
            regions,
            members,
            parts,
            horizon,
            log,
            catalog,
            names,
            tombstones,
            maps,
            later,
            counter,
            logs,
            tables_from,
        })
    }

    /// The slot in which the catalog is changed.
    pub fn catalog_slot(&self) -> Slot {
        Slot::new(self.shape.slots).expect("there are far fewer than an oracle can have")
    }

    /// The words in which the clients of a member announce their snapshots.
    pub fn client_words(&self, slot: Slot) -> Range<u16> {
        let first = slot.index() as u16 * self.limits.clients;
        first..first + self.limits.clients
    }

    /// Bytes of a unit: tables take whole ones.
    pub fn unit_bytes(&self) -> u64 {
        self.shape.region_bytes / UNITS
    }

    /// Where a unit starts in its region.
    pub fn start_of(&self, unit: u64) -> u64 {
        unit * self.unit_bytes()
    }

    /// The first unit of a region that tables may have.
    pub fn first_unit(&self, region: usize) -> u64 {
        self.tables_from[region].div_ceil(self.unit_bytes())
    }
}

/// The addresses of a database for the holder of these grants, one of each region.
#[derive(Clone, Copy, Debug)]
pub struct DatabaseAt<'a> {
    /// Where things lie.
    pub layout: &'a DatabaseLayout,
    /// The grants, in the order of the layout's regions.
    pub grants: &'a [Epoch],
}

impl<'a> DatabaseAt<'a> {
    /// What starts there in a region, known by its place among the layout's regions.
    pub fn piece(&self, region: usize, start: u64) -> Piece {
        Piece { region: self.layout.regions[region], epoch: self.grants[region], start }
    }

    /// The seats.
    pub fn members(&self) -> MembersAt {
        MembersAt { piece: self.piece(0, 0), layout: self.layout.members }
    }

    /// The oracle.
    pub fn oracle(&self) -> Oracle {
        let parts = self.layout.parts.iter().map(|&(region, start)| self.piece(region, start));
        let oracle = Oracle::split(self.layout.shape.slots + 1, &parts.collect::<Vec<_>>());
        oracle.expect("a layout has no more parts than slots")
    }

    /// Where clients announce their snapshots, and the horizon.
    pub fn horizon(&self) -> HorizonAt {
        HorizonAt { piece: self.piece(0, self.layout.horizon.0), layout: self.layout.horizon.1 }
    }

    /// The log of a slot.
    pub fn log(&self, slot: Slot) -> LogAt {
        let copies = self.layout.logs[slot.index()].map(|(region, start)| self.piece(region, start));
        LogAt { copies, layout: self.layout.log }
    }

    /// The logs of all slots.
    pub fn logs(&self) -> Logs {
        let slots = 0..=self.layout.shape.slots;
        Logs::new(slots.filter_map(Slot::new).map(|slot| self.log(slot)))
    }

    /// The rows of tables.
    pub fn catalog(&self) -> Table {
        self.table(CATALOG_RECORDS, self.layout.catalog)
    }

    /// The catalog's index.
    pub fn names(&self) -> Index {
        let (start, layout) = self.layout.names;
        Index::new(layout, vec![self.piece(0, start)]).expect("it has one piece")
    }

    /// Rows of dropped tables that still have their memory.
    pub fn tombstones(&self) -> Table {
        self.table(TOMBSTONE_RECORDS, self.layout.tombstones)
    }

    /// A map of each region, also of those that the database got later.
    pub fn maps(&self) -> Table {
        self.table(MAP_RECORDS, self.layout.maps)
    }

    /// The list of regions that the database got later.
    pub fn later_regions(&self) -> LaterAt {
        LaterAt { piece: self.piece(0, self.layout.later.0), layout: self.layout.later.1 }
    }

    /// The counter of record numbers.
    pub fn counter(&self) -> Table {
        self.table(COUNTER_RECORD, self.layout.counter)
    }

    fn table(&self, first: RecordId, (start, layout): (u64, RecordLayout)) -> Table {
        Table::new(first, layout, vec![self.piece(0, start)])
    }
}

/// Each structure starts at a multiple of this: a page, so that no two share one.
const ALIGN: u64 = 4096;

/// The regions of each node, for what is spread over nodes: parts of the oracle, and the two copies of each
/// log.
struct Nodes<'a> {
    regions: Vec<Vec<usize>>,
    /// Where the free part of each region starts.
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

    /// Takes bytes on a node, chosen round-robin by `number`, in one of its regions, chosen likewise by
    /// `turn`.
    fn place_on_node(&mut self, number: usize, turn: usize, bytes: u64) -> (usize, u64) {
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

    const SHAPE: DatabaseShape =
        DatabaseShape { slots: 4, partitions: 3, log_bytes: 8_192, region_bytes: 4 << 20 };

    fn regions(nodes: &[u64]) -> Vec<RegionId> {
        (0..).zip(nodes).map(|(index, &node)| RegionId { node: NodeId(node), index }).collect()
    }

    fn layout(shape: DatabaseShape, regions: &[RegionId]) -> Result<DatabaseLayout, LayoutError> {
        DatabaseLayout::new(shape, Limits::SHIPPED, regions.to_vec())
    }

    #[test]
    fn structures_do_not_overlap_and_the_copies_of_a_log_lie_on_two_nodes() {
        let regions = regions(&[1, 2, 1, 2]);
        let plan = layout(SHAPE, &regions).unwrap();
        let root = [
            (0, plan.members.bytes()),
            (plan.horizon.0, plan.horizon.1.bytes() as u64),
            (plan.catalog.0, plan.catalog.1.bytes()),
            (plan.names.0, plan.names.1.bytes()),
            (plan.tombstones.0, plan.tombstones.1.bytes()),
            (plan.maps.0, plan.maps.1.bytes()),
            (plan.later.0, plan.later.1.bytes()),
            (plan.counter.0, plan.counter.1.bytes()),
        ];
        let mut taken: Vec<(usize, u64, u64)> = root.map(|(start, bytes)| (0, start, start + bytes)).into();
        let part_bytes = Board::new(2).unwrap().bytes() as u64;
        taken.extend(plan.parts.iter().map(|&(region, start)| (region, start, start + part_bytes)));
        let nodes_of_parts: Vec<u64> = plan.parts.iter().map(|part| regions[part.0].node.0).collect();
        let regions_of_parts: Vec<usize> = plan.parts.iter().map(|part| part.0).collect();
        assert_eq!((nodes_of_parts, regions_of_parts), (vec![1, 2, 1], vec![0, 1, 2]));
        for slot in 0..=4_usize {
            let copies = plan.logs[slot];
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
        let plan = layout(SHAPE, &regions(&[1])).unwrap();
        let [one, other] = plan.logs[0];
        assert!(one.0 == other.0 && one.1 != other.1);
    }

    #[test]
    fn a_shape_that_does_not_fit_is_refused_with_what_it_needs() {
        let small = DatabaseShape { region_bytes: 256 << 10, ..SHAPE };
        let refused = layout(small, &regions(&[1])).unwrap_err().to_string();
        assert!(refused.contains("262144") && refused.contains("--region-size"), "{refused}");
        let logs = DatabaseShape { log_bytes: 1 << 59, ..SHAPE };
        assert!(layout(logs, &regions(&[1])).is_err());
        let endless = DatabaseShape { region_bytes: u64::MAX - 4_095, ..SHAPE };
        assert!(layout(endless, &regions(&[1])).is_err());
        for partitions in [0, 6, MOST_PARTITIONS + 1] {
            let refused = layout(DatabaseShape { partitions, ..SHAPE }, &regions(&[1])).unwrap_err();
            assert!(refused.to_string().contains("parts of the oracle"), "{refused}");
        }
        let many = DatabaseShape { slots: 64, ..SHAPE };
        assert!(layout(many, &regions(&[1])).unwrap_err().to_string().contains("63"));
    }
}
