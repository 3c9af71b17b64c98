//! Tables with keys in order: where the order lies, and transactions that scan it. A scan must find what the
//! same transaction finds key by key.

use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use farpool_fabric::sim::Random;
use farpool_txn::hash::IndexRules;
use farpool_txn::judge::Transaction as Judged;
use farpool_txn::tree::{LeafLayout, Tree, TreeLayout, TreeSpares};
use farpool_txn::{Direction, KeyError, KeyedTable, Piece, Scan, Scanned, Shipped, Transaction};
use farpool_wire::Slot;

use super::transactions::Client;
use super::{ORDER, Run};
use crate::indexing::lay_out;

/// Pairs of leaves in all pieces that follow each other: enough, however many dead workers had reserved.
const PAIRS: u64 = 80;
/// Places of a leaf, from the first number on, below the second one.
const PLACES: std::ops::Range<usize> = 4..10;

/// The order of a table's keys.
pub(super) struct Order {
    layout: TreeLayout,
    pieces: Vec<Piece>,
}

impl Order {
    pub(super) fn draw(run: &Run, random: &mut Random) -> Order {
        let (growth, pieces) = (&run.growth, run.pieces.len());
        let places = PLACES.start + random.index(PLACES.len());
        let leaf = LeafLayout::new(growth.shape.key_bytes).expect("short keys").with_entries(places);
        let times = growth.numbering(1).total(pieces as u64) / growth.layer as u64;
        let layout = TreeLayout::grown(leaf, PAIRS / times, pieces, growth.layer, growth.most_times);
        let layout = layout.expect("a small index");
        let pieces = lay_out(&run.setting.nodes, ORDER, (0..pieces).map(|piece| layout.bytes_of(piece)));
        Order { layout, pieces }
    }

    /// The order as the worker with this slot uses it.
    pub(super) fn tree(&self, slot: Slot) -> Tree {
        let spares = Arc::new(TreeSpares::new(&self.layout, slot));
        Tree::sharing(self.layout, self.pieces.clone(), spares).expect("the layout is of these pieces")
    }
}

impl Client {
    /// Scans a range of keys, and compares the rows with those that the transaction finds key by key.
    pub(super) async fn scan<'a, R: IndexRules>(
        &mut self,
        transaction: &Transaction<'a, Shipped>,
        table: &'a KeyedTable<R>,
        judged: &mut Judged,
    ) -> Result<(), KeyError> {
        let run = self.here.run.clone();
        let mut keys: Vec<usize> = (0..run.keys.count()).collect();
        keys.sort_by_key(|&key| run.keys.get(key));
        let mut bound = || {
            let key = run.keys.get(self.random.index(run.keys.count()));
            match self.random.below(3) {
                0 => Bound::Included(key),
                1 => Bound::Excluded(key),
                _ => Bound::Unbounded,
            }
        };
        let range = (bound(), bound());
        let direction = if self.random.chance(500) { Direction::Ascending } else { Direction::Descending };
        let (mut found, mut rest) = (Vec::new(), Some(Scan::new(range, direction)));
        while let Some(scan) = rest {
            let Scanned { rows, next } = table.scan(transaction, scan).await?;
            found.extend(rows.into_iter().map(|(key, row)| (key, row.data)));
            rest = next;
        }
        if direction == Direction::Descending {
            found.reverse();
        }
        let mut wanted = Vec::new();
        for key in keys {
            let bytes = run.keys.get(key);
            if !RangeBounds::<[u8]>::contains(&range, bytes) {
                continue;
            }
            let row = table.get(transaction, bytes).await?;
            self.saw(key, &row, judged);
            if row.data.is_some() {
                wanted.push((bytes.into(), row.data));
            }
        }
        if found != wanted {
            run.setting.notes.complain(format!("a scan found {found:?} instead of {wanted:?}"));
        }
        Ok(())
    }
}
