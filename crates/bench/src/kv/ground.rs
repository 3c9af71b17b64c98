//! The layout of the far memory: the oracle, the horizon and the logs at the beginning of each node's memory,
//! the table behind them.

use anyhow::{Context, Result};
use farpool_txn::horizon::{HorizonAt, HorizonLayout};
use farpool_txn::log::{LogAt, LogLayout, Logs};
use farpool_txn::{Oracle, OracleAt, Piece, RecordId, RecordLayout, Table, oracle};
use farpool_wire::Slot;

use super::content::RECORD_BYTES;
use super::options::KvOptions;
use crate::local_pool::Lend;

/// Region size of a large table, as pools usually have it, and the smallest region that a node lends.
const REGION_BYTES: u64 = 64 << 20;
const SMALLEST_REGION_BYTES: u64 = 1 << 20;
/// Bytes of a log. It keeps the versions that commits have replaced until all snapshots see the new ones;
/// that takes some milliseconds.
const LOG_BYTES: u64 = 2 << 20;

/// How much the nodes lend, and how it is divided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ground {
    /// What the nodes lend.
    pub lend: Lend,
    log: LogLayout,
    slots: u16,
    horizon: HorizonLayout,
    /// The layout of the records in each piece of the table.
    layout: RecordLayout,
    pieces: u64,
}

/// Where everything was placed.
pub struct Laid {
    /// The oracle, undivided, on the first node.
    pub oracle: Oracle,
    /// The horizon, on the first node: a place for each thread, and one for the final check.
    pub horizon: HorizonAt,
    /// The logs, each on two nodes if there are two.
    pub logs: Logs,
    /// The table of records.
    pub table: Table,
}

impl Ground {
    /// Computes the layout of a measurement.
    pub fn of(options: &KvOptions) -> Result<Ground> {
        let nodes = options.nodes as u64;
        let slots = u16::try_from(options.threads).ok().filter(|&slots| slots <= Slot::MOST);
        let slots = slots.context("there are more threads than slots")?;
        let log = LogLayout::new(LOG_BYTES).context("the bytes of a log are not a multiple of a word")?;
        let horizon = HorizonLayout::new(slots + 1, slots).context("there are more threads than places")?;
        let own_bytes =
            board(slots)?.bytes() as u64 + horizon.bytes() as u64 + 2 * u64::from(slots) * log.bytes();
        let layout = |records| RecordLayout::new(records, RECORD_BYTES);
        let each = layout(1).context("records are too large")?.bytes();
        let of_node = (options.records * each).div_ceil(nodes).next_power_of_two();
        let region_bytes = of_node.clamp(SMALLEST_REGION_BYTES, REGION_BYTES);
        let region_bytes = region_bytes.max(own_bytes.next_power_of_two());
        let pieces = options.records.div_ceil(region_bytes / each);
        // Each node gets as many pieces, so that all nodes have the same load.
        let pieces = pieces.next_multiple_of(nodes);
        let layout = layout(options.records.div_ceil(pieces)).context("the table is too large")?;
        let bytes_each = (1 + pieces / nodes) * region_bytes;
        let lend = Lend { nodes: nodes as u32, bytes_each, region_bytes };
        Ok(Ground { lend, log, slots, horizon, layout, pieces })
    }

    /// Far memory of all nodes together.
    pub fn bytes(&self) -> u64 {
        u64::from(self.lend.nodes) * self.lend.bytes_each
    }

    /// Places everything in the regions, which are sorted by node.
    pub fn lay(&self, regions: &[Piece]) -> Result<Laid> {
        let nodes: Vec<&[Piece]> = regions.chunks(regions.len() / self.lend.nodes as usize).collect();
        let board = board(self.slots)?;
        let mut taken: Vec<u64> = vec![0; nodes.len()];
        let mut take = |node: usize, bytes: u64| {
            let first = nodes[node][0];
            let piece = Piece { start: first.start + taken[node], ..first };
            taken[node] += bytes;
            piece
        };
        let oracle = OracleAt { piece: take(0, board.bytes() as u64), board }.into();
        let horizon = HorizonAt { piece: take(0, self.horizon.bytes() as u64), layout: self.horizon };
        let mut log = |slot: usize| {
            let copies = [slot, slot + 1].map(|node| take(node % nodes.len(), self.log.bytes()));
            LogAt { copies, layout: self.log }
        };
        let logs = Logs::new((0..usize::from(self.slots)).map(&mut log));
        let piece = |number: usize| nodes[number % nodes.len()][1 + number / nodes.len()];
        let pieces = (0..self.pieces as usize).map(piece).collect();
        Ok(Laid { oracle, horizon, logs, table: Table::new(RecordId(0), self.layout, pieces) })
    }
}

fn board(slots: u16) -> Result<oracle::Board> {
    oracle::Board::new(slots).context("the oracle would have no slot")
}

#[cfg(test)]
mod tests {
    use farpool_wire::{Epoch, NodeId, RegionId};

    use super::super::options::tests::small;
    use super::*;

    fn regions(ground: &Ground) -> Vec<Piece> {
        let each = ground.lend.bytes_each / ground.lend.region_bytes;
        let piece = |node, index| Piece {
            region: RegionId { node: NodeId(node), index: index as u32 },
            epoch: Epoch(1),
            start: 0,
        };
        (1..=u64::from(ground.lend.nodes))
            .flat_map(|node| (0..each).map(move |index| piece(node, index)))
            .collect()
    }

    #[test]
    fn everything_has_a_place_of_its_own() {
        for (records, threads, nodes) in [(4, 1, 1), (1000, 3, 2), (1_000_000, 256, 3)] {
            let options = KvOptions { records, threads, nodes, in_flight: 64, ..small() };
            let ground = Ground::of(&options).unwrap();
            let laid = ground.lay(&regions(&ground)).unwrap();
            assert!(laid.table.records() >= records && laid.table.records() < records + 100);
            assert!(laid.table.layout().bytes() <= ground.lend.region_bytes);
            let part = laid.oracle.parts()[0];
            let mut taken = vec![(part.piece, part.board.bytes() as u64)];
            taken.push((laid.horizon.piece, laid.horizon.layout.bytes() as u64));
            taken.extend(laid.logs.iter().flat_map(|log| log.copies.map(|copy| (copy, log.layout.bytes()))));
            for (index, (piece, bytes)) in taken.iter().enumerate() {
                assert!(piece.start + bytes <= ground.lend.region_bytes && piece.region.index == 0);
                let is_apart = |(other, long): &(Piece, u64)| {
                    other.region != piece.region
                        || other.start >= piece.start + bytes
                        || piece.start >= other.start + long
                };
                assert!(taken[..index].iter().all(is_apart));
            }
            assert!(laid.logs.iter().all(|log| nodes == 1 || log.copies[0].region != log.copies[1].region));
        }
    }

    #[test]
    fn ten_million_records_take_less_than_two_gibibytes() {
        let ground = Ground::of(&KvOptions { records: 10_000_000, ..small() }).unwrap();
        assert!((1 << 30..2 << 30).contains(&ground.bytes()), "{}", ground.bytes());
    }
}
