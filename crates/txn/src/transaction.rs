//! Reading from a snapshot, and committing (paper 3, sections 3.1, 5.1 and 6.1; `docs/src/txn.md`).
//!
//! X1. A transaction sees its cut and its own writes, and nothing else.
//! X2. It commits only if no other transaction has written its records since its cut: one compare-and-swap
//!     per record validates and locks. Before that, its intents are in the slot's log (L1).
//! X3. The old version is whole in the log before anything of the new one is written (L1), and the new one is
//!     whole before its header is written: operations of one queue take effect in their order.
//! X4. The watermark, the slot's word, reaches the commit only after all of it is installed. Until then no
//!     cut has the commit, so no other transaction sees any of it.

mod commit;
mod long;
mod many;
mod reading;
mod scanning;

use std::collections::BTreeMap;

use farpool_wire::Version;

use crate::cut::Cut;
use crate::error::ReadError;
use crate::horizon::Open;
use crate::memory::Memory;
use crate::record::RecordId;
use crate::rules::Rules;
use crate::slab::Fresh;
use crate::table::{Place, Table};
use crate::worker::{SessionState, Worker};
pub use commit::Committing;
use reading::ToWrite;
pub(crate) use reading::{Before, Older};

/// A transaction. Dropping it aborts it: nothing was written yet.
pub struct Transaction<'a, R> {
    worker: &'a Worker<R>,
    session: &'a mut SessionState,
    cut: Cut,
    writes: BTreeMap<RecordId, Write>,
    /// Records that were taken to be written, and are not among the writes so far.
    taken: BTreeMap<RecordId, ToWrite>,
    /// Blocks with the long payloads of its writes.
    blocks: Vec<Fresh>,
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
    fn absent() -> Row {
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
        let (writes, taken, blocks) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        Transaction { worker, session, cut, writes, taken, blocks, open }
    }

    /// Its snapshot.
    pub fn cut(&self) -> &Cut {
        &self.cut
    }

    /// Far memory, for indexes.
    pub(crate) fn memory(&self) -> &'a Memory {
        &self.worker.memory
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

    /// A record as the transaction has written it, or read it to be written.
    fn own(&self, record: RecordId) -> Option<Row> {
        let written = self.writes.get(&record);
        let written =
            written.map(|write| Row { version: write.before.label.version(), data: write.new.clone() });
        written.or_else(|| self.taken.get(&record).map(ToWrite::row))
    }

    /// Writes `data` to a record when the transaction commits; `None` deletes the record. Returns the record
    /// as this transaction saw it before.
    ///
    /// # Errors
    /// [`ReadError::Conflict`] if another transaction was first; [`ReadError::NoSpace`] if there is no room
    /// for a long payload.
    pub async fn write(&mut self, table: &Table, number: u64, data: Option<&[u8]>) -> Result<Row, ReadError> {
        let place = table.place(number).ok_or(ReadError::OutOfRange(number))?;
        let new = match data {
            Some(data) => Some(self.hold(table, &place, data).await?),
            None => None,
        };
        let row = self.write_held(place, new).await?;
        self.whole(table, number, row).await
    }

    /// Writes data of a record, as they will lie in its place, when the transaction commits.
    async fn write_held(&mut self, place: Place, new: Option<Vec<u8>>) -> Result<Row, ReadError> {
        if let Some(write) = self.writes.get_mut(&place.record) {
            let before = std::mem::replace(&mut write.new, new);
            return Ok(Row { version: write.before.label.version(), data: before });
        }
        let before = match self.taken.remove(&place.record) {
            Some(before) => before,
            None => reading::read_to_write::<R>(&self.worker.memory, &self.cut, &place).await?,
        };
        let row = before.row();
        self.writes.insert(place.record, Write { place, before, new });
        Ok(row)
    }
}
