//! Requests to files and their answers, and how a file's contents name their writer.
//!
//! A file is divided into cells of 1 KiB. A write fills each of its cells with one repeated word, which names
//! the write, the file and the cell. So data from the wrong place or the wrong time can be recognised.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use farpool_file::FileError;

/// Bytes of a cell.
pub(super) const CELL: u64 = 1 << 10;
/// Cells of a block.
pub(super) const CELLS_PER_BLOCK: u64 = farpool_wire::BLOCK_BYTES as u64 / CELL;
const WORD: usize = 8;
const CELL_BITS: u32 = 16;
const FILE_BITS: u32 = 12;

/// A request, in cells.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Asked {
    Write(Range<u64>),
    /// Punches a hole.
    Zero(Range<u64>),
    SetSize(u64),
    Reserve(Range<u64>),
    Read(Range<u64>),
}

/// The outcome of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Ended {
    /// None yet.
    No,
    Done,
    /// What a read found: a word for each cell.
    Found(Vec<u64>),
    Failed(FileError),
    /// The process that asked has died, or has abandoned the operation.
    Dropped,
}

/// One operation.
#[derive(Clone, Debug)]
pub(super) struct Record {
    /// Numbers all operations from one.
    pub(super) number: u64,
    pub(super) file: u64,
    pub(super) asked: Asked,
    pub(super) ended: Ended,
    /// Points in the order of all events.
    pub(super) start: u64,
    pub(super) end: u64,
    /// Some of the cells lay in a region that was lost by then.
    pub(super) was_lost: bool,
}

/// All operations of a run. The number of a write is its name.
#[derive(Default)]
pub(super) struct History {
    records: RefCell<Vec<Record>>,
    moments: Cell<u64>,
}

impl History {
    fn moment(&self) -> u64 {
        self.moments.set(self.moments.get() + 1);
        self.moments.get()
    }

    /// Records the beginning of an operation. Its outcome is [`Ended::Dropped`] unless [`Entry::ends`] is
    /// called.
    pub(super) fn begins(self: &Rc<Self>, file: u64, asked: Asked) -> Entry {
        let start = self.moment();
        let mut records = self.records.borrow_mut();
        let number = records.len() as u64 + 1;
        records.push(Record { number, file, asked, ended: Ended::No, start, end: u64::MAX, was_lost: false });
        Entry { history: self.clone(), place: records.len() - 1 }
    }

    pub(super) fn take(&self) -> Vec<Record> {
        self.records.take()
    }

    pub(super) fn len(&self) -> u64 {
        self.records.borrow().len() as u64
    }
}

/// An operation in progress.
pub(super) struct Entry {
    history: Rc<History>,
    place: usize,
}

impl Entry {
    pub(super) fn number(&self) -> u64 {
        self.place as u64 + 1
    }

    pub(super) fn ends(self, ended: Ended, was_lost: bool) {
        self.note(ended, was_lost);
    }

    fn note(&self, ended: Ended, was_lost: bool) {
        let end = self.history.moment();
        let record = &mut self.history.records.borrow_mut()[self.place];
        (record.ended, record.end, record.was_lost) = (ended, end, was_lost);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let open = self.history.records.borrow()[self.place].ended == Ended::No;
        if open {
            self.note(Ended::Dropped, false);
        }
    }
}

/// The word with which a write fills a cell.
pub(super) fn word(write: u64, file: u64, cell: u64) -> u64 {
    (write << FILE_BITS | file) << CELL_BITS | cell
}

/// Which write, file and cell a word names.
pub(super) fn named(word: u64) -> (u64, u64, u64) {
    let cell = word & ((1 << CELL_BITS) - 1);
    let file = word >> CELL_BITS & ((1 << FILE_BITS) - 1);
    (word >> (CELL_BITS + FILE_BITS), file, cell)
}

/// The bytes that a write puts into its cells.
pub(super) fn filled(write: u64, file: u64, cells: Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0; ((cells.end - cells.start) * CELL) as usize];
    for (cell, room) in cells.zip(bytes.chunks_exact_mut(CELL as usize)) {
        let word = word(write, file, cell).to_le_bytes();
        room.chunks_exact_mut(WORD).for_each(|room| room.copy_from_slice(&word));
    }
    bytes
}

/// Returns the word of each cell. The error is the index of a cell that holds more than one word.
pub(super) fn found(bytes: &[u8]) -> Result<Vec<u64>, usize> {
    let whole = bytes.chunks_exact(CELL as usize).enumerate().map(|(place, cell)| {
        let first: [u8; WORD] = cell[..WORD].try_into().map_err(|_| place)?;
        let of_one_piece = cell.chunks_exact(WORD).all(|word| word == first);
        if of_one_piece { Ok(u64::from_le_bytes(first)) } else { Err(place) }
    });
    whole.collect()
}
