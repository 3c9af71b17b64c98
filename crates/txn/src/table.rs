//! A table of records that are known by their numbers: what all other structures stand on.

use std::ops::Range;

use crate::memory::Piece;
use crate::record::{RecordId, RecordLayout};

/// Where a table lies: pieces of one layout, filled one after another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Table {
    first: RecordId,
    layout: RecordLayout,
    pieces: Vec<Piece>,
}

/// Where a record lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) record: RecordId,
    pub(crate) layout: RecordLayout,
    pub(crate) piece: Piece,
    /// Within the piece.
    pub(crate) index: u64,
}

impl Table {
    /// A table whose records have the numbers from `first` on, among all of the database. Its memory is zeros, or what
    /// transactions have left there.
    pub fn new(first: RecordId, layout: RecordLayout, pieces: Vec<Piece>) -> Table {
        Table { first, layout, pieces }
    }

    /// How many records it has.
    pub fn records(&self) -> u64 {
        self.pieces.len() as u64 * self.layout.records()
    }

    /// How its records lie in each piece.
    pub fn layout(&self) -> &RecordLayout {
        &self.layout
    }

    /// Its pieces, each with the number of its first record.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (RecordId, Piece)> + '_ {
        let firsts = (self.first.0..).step_by(self.layout.records() as usize);
        firsts.map(RecordId).zip(self.pieces.iter().copied())
    }

    /// The numbers of `numbers` in runs that lie in one piece each, with a current version for each in `bytes` at most.
    pub(crate) fn runs(&self, numbers: Range<u64>, bytes: usize) -> impl Iterator<Item = Range<u64>> {
        let each = self.layout.records();
        let most = (bytes / self.layout.current_bytes()).max(1) as u64;
        let mut next = numbers.start;
        std::iter::from_fn(move || {
            let start = next;
            next = numbers.end.min(start + most).min((start / each + 1) * each);
            (start < numbers.end).then_some(start..next)
        })
    }

    pub(crate) fn place(&self, number: u64) -> Option<Place> {
        let (piece, index) = (number / self.layout.records(), number % self.layout.records());
        let piece = self.pieces.get(usize::try_from(piece).ok()?)?;
        Some(Place { record: RecordId(self.first.0 + number), layout: self.layout, piece: *piece, index })
    }
}

#[cfg(test)]
mod tests {
    use farpool_wire::{Epoch, NodeId, RegionId};

    use super::*;

    #[test]
    fn runs_end_with_pieces_and_where_they_have_enough_bytes() {
        let piece = Piece { region: RegionId { node: NodeId(1), index: 0 }, epoch: Epoch(1), start: 0 };
        let table = Table::new(RecordId(0), RecordLayout::new(10, 8, 1).unwrap(), vec![piece; 3]);
        let runs = |numbers, bytes| table.runs(numbers, bytes).collect::<Vec<_>>();
        assert_eq!(runs(7..22, 200), [7..10, 10..15, 15..20, 20..22]);
        assert_eq!(runs(7..9, 1), [7..8, 8..9], "one at least");
        assert_eq!(runs(5..5, 200), []);
    }
}
