//! Where a run's database lies: the root region holds what members share, the others hold logs and records.

use std::ops::Range;

use farpool_fabric::sim::Random;
use farpool_txn::horizon::{HorizonAt, HorizonLayout};
use farpool_txn::log::{LogAt, LogLayout};
use farpool_txn::membership::{MembersAt, MembersLayout};
use farpool_txn::oracle::Board;
use farpool_txn::{OracleAt, Piece, RecordId, RecordLayout, Table};
use farpool_wire::{Epoch, NodeId, RegionId, Slot};

use crate::transacting::DATA_WORDS;

/// Places of a seat's workers: two for those that run transactions, and one for changes of the catalog.
pub(super) const PLACES: u16 = 3;
/// The place for changes of the catalog.
pub(super) const CATALOG_PLACE: u16 = PLACES - 1;
/// Records of each region: so few that transactions conflict.
const RECORDS: u64 = 3;
/// Bytes for the intents of a slot.
const LOG_BYTES: u64 = 1_024;
const OLD_VERSIONS: [usize; 3] = [2, 4, 8];

pub(super) const REGION_BYTES: u64 = 128 << 10;
const BOARD_START: u64 = 1 << 10;
const HORIZON_START: u64 = 2 << 10;
/// The end of all that members share in the root.
pub(super) const ROOT_BYTES: usize = 3 << 10;
/// Layout of the other regions.
const RECORDS_START: u64 = 0;
const LOGS_START: u64 = 64 << 10;

/// Regions, and what lies in them.
#[derive(Clone)]
pub(super) struct Plan {
    /// The first is the root.
    pub(super) regions: Vec<RegionId>,
    /// The number of seats. One more slot is for changes of the catalog.
    pub(super) slots: u16,
    pub(super) members: MembersLayout,
    pub(super) board: Board,
    pub(super) horizon: HorizonLayout,
    log: LogLayout,
    pub(super) records: RecordLayout,
}

impl Plan {
    /// The root on the first node, and one to three other regions on all of them.
    pub(super) fn draw(nodes: u64, random: &mut Random) -> Plan {
        let others = 1 + random.below(3);
        let region =
            |number: u64| RegionId { node: NodeId(1 + number % nodes), index: (number / nodes) as u32 };
        let regions: Vec<RegionId> = (0..=others).map(region).collect();
        let slots = 2 + random.below(3) as u16;
        let old_versions = OLD_VERSIONS[random.index(OLD_VERSIONS.len())];
        let plan = Plan {
            members: MembersLayout::new(slots, regions.len() as u16).expect("some seats"),
            board: Board::new(slots + 1).expect("some slots"),
            horizon: HorizonLayout::new((slots + 1) * PLACES, slots + 1).expect("some workers"),
            log: LogLayout::new(LOG_BYTES).expect("whole words"),
            records: RecordLayout::new(RECORDS, DATA_WORDS * 8, old_versions).expect("small records"),
            regions,
            slots,
        };
        assert!(plan.members.bytes() <= BOARD_START);
        assert!(BOARD_START + plan.board.bytes() as u64 <= HORIZON_START);
        assert!(HORIZON_START as usize + plan.horizon.bytes() <= ROOT_BYTES);
        assert!(plan.records.bytes() <= LOGS_START);
        assert!(LOGS_START + 2 * u64::from(slots + 1) * plan.log.bytes() <= REGION_BYTES);
        plan
    }

    /// Regions of each node.
    pub(super) fn regions_each(&self) -> u32 {
        self.regions.iter().map(|region| region.index + 1).max().expect("there is a root")
    }

    /// The slot in which the catalog is changed.
    pub(super) fn catalog_slot(&self) -> Slot {
        Slot::new(self.slots).expect("a few slots")
    }

    /// Where the words of slots lie in the root.
    pub(super) fn word(&self, slot: u16) -> usize {
        let word = self.board.word(Slot::new(slot).expect("a few slots"));
        BOARD_START as usize + word.expect("a slot of this oracle")
    }

    /// Where the images of cuts lie in the root.
    pub(super) fn images(&self) -> Range<usize> {
        let images = self.board.images();
        BOARD_START as usize + images.start..BOARD_START as usize + images.end
    }

    /// Where in the root the workers of a slot announce their snapshots.
    pub(super) fn announced(&self, slot: u16) -> Range<usize> {
        let word = |place| HORIZON_START as usize + self.horizon.word(place).expect("a place of this plan");
        word(slot * PLACES)..word(slot * PLACES + PLACES - 1) + size_of::<u64>()
    }

    /// Where the images of the horizon lie in the root.
    pub(super) fn horizons(&self) -> Range<usize> {
        let start = HORIZON_START as usize;
        start + self.horizon.words().end..start + self.horizon.bytes()
    }

    /// Where records' headers lie in each of the regions behind the root.
    pub(super) fn headers(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.records.records()).map(|record| RECORDS_START + self.records.current(record).start)
    }
}

/// Where things lie for the holder of these grants, one for each region.
pub(super) struct At<'a> {
    pub(super) plan: &'a Plan,
    pub(super) grants: &'a [Epoch],
}

impl At<'_> {
    fn piece(&self, region: usize, start: u64) -> Piece {
        Piece { region: self.plan.regions[region], epoch: self.grants[region], start }
    }

    pub(super) fn members(&self) -> MembersAt {
        MembersAt { piece: self.piece(0, 0), layout: self.plan.members }
    }

    pub(super) fn oracle(&self) -> OracleAt {
        OracleAt { piece: self.piece(0, BOARD_START), board: self.plan.board }
    }

    pub(super) fn horizon(&self) -> HorizonAt {
        HorizonAt { piece: self.piece(0, HORIZON_START), layout: self.plan.horizon }
    }

    /// Where a slot's log lies. The copies lie in two regions, if there are two beside the root.
    pub(super) fn log(&self, slot: u16) -> LogAt {
        let others = self.plan.regions.len() - 1;
        let copies = [0, 1].map(|copy| {
            let start = LOGS_START + (2 * u64::from(slot) + copy) * self.plan.log.bytes();
            self.piece(1 + (usize::from(slot) + copy as usize) % others, start)
        });
        LogAt { copies, layout: self.plan.log }
    }

    pub(super) fn table(&self) -> Table {
        let pieces = (1..self.plan.regions.len()).map(|region| self.piece(region, RECORDS_START));
        Table::new(RecordId(100), self.plan.records, pieces.collect())
    }
}
