//! A table of records that are known by their numbers: what all other structures stand on.

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
pub(crate) struct Place<'a> {
    pub(crate) record: RecordId,
    pub(crate) layout: &'a RecordLayout,
    pub(crate) piece: &'a Piece,
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

    pub(crate) fn place(&self, number: u64) -> Option<Place<'_>> {
        let (piece, index) = (number / self.layout.records(), number % self.layout.records());
        let piece = self.pieces.get(usize::try_from(piece).ok()?)?;
        Some(Place { record: RecordId(self.first.0 + number), layout: &self.layout, piece, index })
    }
}
