//! Reading from a snapshot, and committing (paper 3, sections 3.1, 5.1 and 6.1; `docs/src/txn.md`).
//!
//! X1. A transaction sees its cut and its own writes, and nothing else.
//! X2. It commits only if no other transaction has written its records since its cut: one compare-and-swap
//!     per record validates and locks. Before that, its intents are in the slot's log (L1).
//! X3. The old version is whole in the log before anything of the new one is written (L1), and the new one is
//!     whole before its header is written: operations of one queue take effect in their order.
//! X4. The watermark, the slot's word, reaches the commit only after all of it is installed. Until then no
//!     cut has the commit, so no other transaction sees any of it.

mod by_record;
mod commit;
mod long;
mod many;
mod reading;
mod recent;
mod scanning;

use std::cell::RefCell;

use farpool_wire::Version;

use crate::cut::Cut;
use crate::error::ReadError;
use crate::horizon::Open;
use crate::keyed::{Entered, TakenKeys};
use crate::memory::Memory;
use crate::record::RecordId;
use crate::rules::Rules;
use crate::slab::Fresh;
use crate::table::{Place, Table};
use crate::worker::{SessionState, Worker};
use by_record::ByRecord;
pub use commit::Committing;
use reading::ToWrite;
pub(crate) use reading::{EarlierVersions, Followed, read_current, read_since};
use recent::RecentKeys;

const TAKEN: &str = "what was taken is there until the transaction ends";

/// A transaction. Dropping it aborts it: nothing was written yet. Several of its operations may be under way
/// at the same time; those that write the same record then take effect one after the other, in any order.
pub struct Transaction<'a, R> {
    worker: &'a Worker<R>,
    session: &'a mut SessionState,
    cut: Cut,
    writes: RefCell<ByRecord<Write>>,
    /// Records that were taken to be written, and are not among the writes so far.
    taken: RefCell<ByRecord<ToWrite>>,
    /// Blocks with the long payloads of its writes.
    blocks: RefCell<Vec<Fresh>>,
    /// Keys that it has looked up.
    keys: RefCell<RecentKeys>,
    /// Keys that it gives rows in unique indexes.
    taken_keys: TakenKeys,
    /// What it has entered in secondary indexes.
    entered: Entered,
    /// While this is there, the versions that its snapshot needs are kept.
    open: Option<Open<'a>>,
}

/// A record that will be written.
struct Write {
    place: Place,
    before: ToWrite,
    /// `None`: the record is deleted.
    new: Option<Vec<u8>>,
}

/// A record as a snapshot has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Row {
    /// The commit that wrote it.
    pub version: Version,
    /// `None`: there is no such record.
    pub data: Option<Vec<u8>>,
}

impl Row {
    /// A record that was never written.
    pub(crate) fn never_written() -> Row {
        Row { version: Version::INITIAL, data: None }
    }
}

impl<'a, R: Rules> Transaction<'a, R> {
    pub(crate) fn new(
        worker: &'a Worker<R>,
        session: &'a mut SessionState,
        cut: Cut,
        open: Option<Open<'a>>,
    ) -> Self {
        let (writes, taken) = (ByRecord::new().into(), ByRecord::new().into());
        let (blocks, keys) = (RefCell::default(), RefCell::default());
        let (taken_keys, entered) = (TakenKeys::default(), Entered::default());
        Transaction { worker, session, cut, writes, taken, blocks, keys, taken_keys, entered, open }
    }

    /// Its snapshot.
    pub fn cut(&self) -> &Cut {
        &self.cut
    }

    /// The access to far memory.
    pub fn memory(&self) -> &'a Memory {
        &self.worker.memory
    }

    pub(crate) fn worker(&self) -> &'a Worker<R> {
        self.worker
    }

    /// The number of a key's record, if the transaction has found it lately.
    pub(crate) fn number_of(&self, table: &Table, key: &[u8]) -> Option<u64> {
        self.keys.borrow().get(table.first(), key)
    }

    /// Remembers the number of a key's record.
    pub(crate) fn note_number(&self, table: &Table, key: &[u8], number: u64) {
        self.keys.borrow_mut().note(table.first(), key, number);
    }

    /// The keys that it gives rows in unique indexes: when it commits, no other row may have one of them (S3
    /// in `keyed/secondary.rs`).
    pub(crate) fn taken_keys(&self) -> &TakenKeys {
        &self.taken_keys
    }

    pub(crate) fn entered(&self) -> &Entered {
        &self.entered
    }

    /// Reads a record: as the transaction has written it, or else as its snapshot has it.
    ///
    /// # Errors
    /// When the snapshot's version is not kept any more, or cannot be read.
    pub async fn read(&self, table: &Table, number: u64) -> Result<Row, ReadError> {
        let row = self.read_held(table, number).await?;
        self.whole(table, number, row).await
    }

    /// Reads a record without following a pointer to a long payload.
    pub(crate) async fn read_held(&self, table: &Table, number: u64) -> Result<Row, ReadError> {
        let place = table.place(number).ok_or(ReadError::OutOfRange(number))?;
        match self.own(place.record) {
            Some(row) => Ok(row),
            None => reading::read(self.worker, &self.cut, &place).await,
        }
    }

    /// As [`read_held`](Self::read_held) for a record that may be written later. The record counts as taken
    /// afterwards, unless another transaction has locked or replaced it, or many records are taken already.
    pub(crate) async fn read_held_to_write(&self, table: &Table, number: u64) -> Result<Row, ReadError> {
        if !self.taken.borrow().has_room_for_few() {
            return self.read_held(table, number).await;
        }
        match self.take(table, number).await {
            // It is another transaction's now, but this one's snapshot still has a version of it.
            Err(ReadError::Conflict) => self.read_held(table, number).await,
            taken => taken,
        }
    }

    /// A record that this transaction has written or taken, as this transaction sees it.
    fn own(&self, record: RecordId) -> Option<Row> {
        self.with_own(record, |version, data| Row { version, data: data.map(<[u8]>::to_vec) })
    }

    /// Passes such a record to `look`: the version that was found, and the data as this transaction has them.
    fn with_own<T>(&self, record: RecordId, look: impl FnOnce(Version, Option<&[u8]>) -> T) -> Option<T> {
        if let Some(write) = self.writes.borrow().get(record) {
            return Some(look(write.before.label.version(), write.new.as_deref()));
        }
        self.taken.borrow().get(record).map(|taken| look(taken.label.version(), taken.data()))
    }

    /// Reads a record that will be written, without following a pointer to a long payload. If it is not
    /// written afterwards, it counts as one that was only read.
    ///
    /// # Errors
    /// [`ReadError::Conflict`] if another transaction was first to write it.
    pub(crate) async fn take(&self, table: &Table, number: u64) -> Result<Row, ReadError> {
        let place = table.place(number).ok_or(ReadError::OutOfRange(number))?;
        self.take_place(&place).await?;
        Ok(self.own(place.record).expect(TAKEN))
    }

    /// As [`take`](Self::take) for a record that may not be there. One that this snapshot does not have is
    /// not taken, and is no conflict, even if another transaction was first to write it.
    pub(crate) async fn take_if_there(&self, table: &Table, number: u64) -> Result<Row, ReadError> {
        let place = table.place(number).ok_or(ReadError::OutOfRange(number))?;
        if let Some(row) = self.own(place.record) {
            return Ok(row);
        }
        match reading::read_to_write::<R>(&self.worker.memory, &self.cut, &place).await {
            Ok(found) => {
                let row = found.row();
                if row.data.is_some() {
                    self.note_taken(place.record, found);
                }
                Ok(row)
            }
            Err(ReadError::Conflict) => {
                let row = self.read_held(table, number).await?;
                if row.data.is_none() { Ok(row) } else { Err(ReadError::Conflict) }
            }
            Err(error) => Err(error),
        }
    }

    async fn take_place(&self, place: &Place) -> Result<(), ReadError> {
        let record = place.record;
        if self.writes.borrow().get(record).is_none() && self.taken.borrow().get(record).is_none() {
            let found = reading::read_to_write::<R>(&self.worker.memory, &self.cut, place).await?;
            self.note_taken(record, found);
        }
        Ok(())
    }

    /// Keeps a record that was found to be written, unless another operation was first to take or write it.
    fn note_taken(&self, record: RecordId, found: ToWrite) {
        if self.writes.borrow().get(record).is_none() && self.taken.borrow().get(record).is_none() {
            self.taken.borrow_mut().insert(record, found);
        }
    }

    /// Writes `data` to a record when the transaction commits; `None` deletes the record. Returns the record
    /// as this transaction saw it before.
    ///
    /// # Errors
    /// [`ReadError::Conflict`] if another transaction was first; [`ReadError::NoSpace`] if there is no room
    /// for a long payload.
    pub async fn write(&self, table: &Table, number: u64, data: Option<&[u8]>) -> Result<Row, ReadError> {
        let row = self.write_if(table, number, data, |_| true).await?.expect("any data are accepted");
        self.whole(table, number, row).await
    }

    /// As [`write`](Self::write), if the record is what the caller expects: `is_expected` gets its data as
    /// they lie in its place. `None`: it is not, and nothing was written. No other operation of this
    /// transaction writes the record between the last look and the write.
    pub(crate) async fn write_if(
        &self,
        table: &Table,
        number: u64,
        data: Option<&[u8]>,
        is_expected: impl Fn(Option<&[u8]>) -> bool,
    ) -> Result<Option<Row>, ReadError> {
        let place = table.place(number).ok_or(ReadError::OutOfRange(number))?;
        self.take_place(&place).await?;
        let looks_right = || self.with_own(place.record, |_, data| is_expected(data)).expect(TAKEN);
        let (new, block) = match data {
            // A long payload is not written for nothing.
            Some(_) if !looks_right() => return Ok(None),
            Some(data) => {
                let (new, block) = self.encode_payload(table, &place, data).await?;
                (Some(new), block)
            }
            None => (None, None),
        };
        Ok(looks_right().then(|| self.write_taken(place, new, block)))
    }

    /// Writes a record that was taken, with the payload that it had then. A record that the transaction has
    /// written meanwhile stays as it was written.
    pub(crate) async fn write_unchanged(
        &self,
        table: &Table,
        number: u64,
        payload: &[u8],
    ) -> Result<(), ReadError> {
        let place = table.place(number).ok_or(ReadError::OutOfRange(number))?;
        let is_written = || self.writes.borrow().get(place.record).is_some();
        if is_written() {
            return Ok(());
        }
        let (new, block) = self.encode_payload(table, &place, payload).await?;
        if !is_written() {
            self.write_taken(place, Some(new), block);
        }
        Ok(())
    }

    /// Writes data of a record that was taken, as they will lie in its place, when the transaction commits.
    /// They may point to a block.
    fn write_taken(&self, place: Place, new: Option<Vec<u8>>, block: Option<Fresh>) -> Row {
        self.blocks.borrow_mut().extend(block);
        let mut writes = self.writes.borrow_mut();
        if let Some(write) = writes.get_mut(place.record) {
            let before = std::mem::replace(&mut write.new, new);
            return Row { version: write.before.label.version(), data: before };
        }
        let before = self.taken.borrow_mut().remove(place.record).expect(TAKEN);
        let row = before.row();
        writes.insert(place.record, Write { place, before, new });
        row
    }
}
