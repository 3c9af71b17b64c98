//! A table of records that are identified by their numbers: the base of all other structures.

use std::ops::Range;
use std::sync::Arc;

use farpool_wire::{RecordHeader, RegionId};

use crate::growth::Growth;
use crate::memory::{Memory, MemoryError, Piece};
use crate::record::{RecordId, RecordLayout};
use crate::slab::{Held, LEAST_DATA_BYTES, Slab};

/// A table in far memory: pieces that have consecutive ranges of its records.
#[derive(Clone, Debug)]
pub struct Table {
    first: RecordId,
    /// The layout of a piece of the first layer.
    layout: RecordLayout,
    growth: Growth,
    pieces: Vec<Piece>,
    /// For payloads that do not fit their records.
    slab: Option<Arc<Slab>>,
}

/// The place of a record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) record: RecordId,
    pub(crate) layout: RecordLayout,
    pub(crate) piece: Piece,
    /// Its number within the piece.
    pub(crate) index: u64,
}

impl Place {
    /// Where it lies in the piece.
    pub(crate) fn range(&self) -> Range<u64> {
        self.layout.current(self.index)
    }
}

impl Table {
    /// A table whose records have the numbers from `first` on, in the numbering of the database. Its memory
    /// is zeros, or has been used as this table.
    pub fn new(first: RecordId, layout: RecordLayout, pieces: Vec<Piece>) -> Table {
        let growth = Growth::one_layer(pieces.len(), layout.records());
        Table { first, layout, growth, pieces, slab: None }
    }

    /// The same for a table that has grown. `None`: the pieces of the first layer have another layout.
    pub fn grown(first: RecordId, layout: RecordLayout, growth: Growth, pieces: Vec<Piece>) -> Option<Table> {
        (growth.each() == layout.records()).then_some(Table { first, layout, growth, pieces, slab: None })
    }

    /// This table with payloads of different lengths, up to [`longest`](Self::longest). A payload that fits
    /// lies in the place of its record, and a longer one in the slab, which belongs to this table alone.
    /// `None`: the places are too small to hold a pointer into the slab.
    pub fn with_slab(self, slab: Arc<Slab>) -> Option<Table> {
        (self.layout.data_bytes() >= LEAST_DATA_BYTES).then_some(Table { slab: Some(slab), ..self })
    }

    /// The longest payload that a record can have, in bytes. Without a slab, all payloads have this length.
    pub fn longest(&self) -> usize {
        let data_bytes = self.layout.data_bytes();
        self.slab().map_or(data_bytes, |slab| slab.layout().longest().max(Held::most_here(data_bytes)))
    }

    /// The slab for payloads that do not fit their records.
    pub(crate) fn slab(&self) -> Option<&Arc<Slab>> {
        self.slab.as_ref()
    }

    /// Its first record.
    pub(crate) fn first(&self) -> RecordId {
        self.first
    }

    /// How many records it has.
    pub fn records(&self) -> u64 {
        self.growth.total(self.pieces.len() as u64)
    }

    /// The layout of its records in a piece of the first layer. Larger pieces have more of them.
    pub fn layout(&self) -> &RecordLayout {
        &self.layout
    }

    /// The places of its records' headers, for checkers: a region, and an offset in it.
    pub fn headers(&self) -> impl Iterator<Item = (RegionId, u64)> + '_ {
        let of_piece = move |(number, piece): (u64, &Piece)| {
            let Piece { region, start, .. } = *piece;
            (0..self.growth.size(number)).map(move |index| (region, start + self.layout.current(index).start))
        };
        (0..).zip(&self.pieces).flat_map(of_piece)
    }

    /// The headers of all its records, each as it is when it is read: for a look without a snapshot.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn read_headers(&self, memory: &Memory) -> Result<Vec<RecordHeader>, MemoryError> {
        let mut headers = Vec::new();
        for (number, piece) in (0..).zip(&self.pieces) {
            for index in 0..self.growth.size(number) {
                headers.push(RecordHeader(memory.read_word(piece, self.layout.current(index).start).await?));
            }
        }
        Ok(headers)
    }

    /// The data of a record, as they are when they are read, and empty if it has none: for a look without a
    /// snapshot. `None`: it is being written.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn look_at(&self, memory: &Memory, number: u64) -> Result<Option<Vec<u8>>, MemoryError> {
        let Some(Place { record, piece, index, .. }) = self.place(number) else { return Ok(None) };
        let bytes = memory.read(&piece, self.layout.current(index)).await?;
        let Some((header, found)) = self.layout.decode_current(record, &bytes) else { return Ok(None) };
        let is_whole = found.is_right && header == found.label.header;
        Ok(is_whole.then(|| if header.is_deleted() { Vec::new() } else { found.data.to_vec() }))
    }

    /// Splits `numbers` into runs. Each run lies in one piece, and its current versions have at most `bytes`
    /// (but one record at least).
    pub(crate) fn runs(&self, numbers: Range<u64>, bytes: usize) -> impl Iterator<Item = Range<u64>> {
        let growth = self.growth;
        let most = (bytes / self.layout.current_bytes()).max(1) as u64;
        let mut next = numbers.start;
        std::iter::from_fn(move || {
            let start = next;
            next = numbers.end.min(start + most).min(growth.numbers(growth.find(start).0).end);
            (start < numbers.end).then_some(start..next)
        })
    }

    /// The place of a record. `None`: it does not belong to this table.
    pub(crate) fn place_of(&self, record: RecordId) -> Option<Place> {
        self.place(record.0.checked_sub(self.first.0)?)
    }

    /// How many writes of long rows that fail for lack of room look at all blocks that the member has.
    pub fn tries_of_slab(&self) -> u64 {
        self.slab().map_or(1, |slab| slab.tries())
    }

    /// How many pieces it has.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Whether it does not belong to the pieces that are known, and may belong to another one once the table
    /// has grown.
    pub(crate) fn is_beyond(&self, record: RecordId) -> bool {
        record.0.checked_sub(self.first.0).is_some_and(|number| number >= self.records())
    }

    pub(crate) fn place(&self, number: u64) -> Option<Place> {
        let (piece, index) = self.growth.find(number);
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
        let table = Table::new(RecordId(0), RecordLayout::new(10, 8).unwrap(), vec![piece; 3]);
        let runs = |numbers, bytes| table.runs(numbers, bytes).collect::<Vec<_>>();
        assert_eq!(runs(7..22, 240), [7..10, 10..15, 15..20, 20..22]);
        assert_eq!(runs(7..9, 1), [7..8, 8..9], "one at least");
        assert_eq!(runs(5..5, 200), []);
    }
}
