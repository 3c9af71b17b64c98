//! Payloads of any length, in records or in the slab beside them (`docs/src/txn.md`, *payloads of variable
//! length*).

use super::reading::ToWrite;
use super::{Row, TAKEN, Transaction};
use crate::error::ReadError;
use crate::rules::Rules;
use crate::slab::{Fresh, Held};
use crate::table::{Place, Table};
use crate::worker::Worker;

impl<R: Rules> Transaction<'_, R> {
    /// Encodes a payload as the data of a taken record's place. A payload that does not fit there is written
    /// to a block first (B2). If the data are not used, nothing points to the block, and dropping it frees
    /// it.
    pub(super) async fn encode_payload(
        &self,
        table: &Table,
        place: &Place,
        payload: &[u8],
    ) -> Result<(Vec<u8>, Option<Fresh>), ReadError> {
        let data_bytes = place.layout.data_bytes();
        let Some(slab) = table.slab() else {
            let (wanted, found) = (data_bytes, payload.len());
            return if found == wanted {
                Ok((payload.to_vec(), None))
            } else {
                Err(ReadError::WrongSize { wanted, found })
            };
        };
        if payload.len() <= Held::most_here(data_bytes) {
            return Ok((Held::Here(payload).encode(data_bytes), None));
        }
        let number = self.next_number(place);
        let (block, pointer) = slab.put(self.worker, table, (place.record, number), payload).await?;
        Ok((Held::There(pointer).encode(data_bytes), Some(block)))
    }

    /// The number of the version that this transaction would write of a record that was taken.
    fn next_number(&self, place: &Place) -> u64 {
        let next = |before: &ToWrite| before.label.number + 1;
        let written = self.writes.borrow().get(place.record).map(|write| next(&write.before));
        written.or_else(|| self.taken.borrow().get(place.record).map(next)).expect(TAKEN)
    }

    /// A record with its payload, wherever that lies. A block keeps its payload for as long as this snapshot
    /// may need it.
    pub(crate) async fn whole(&self, table: &Table, number: u64, row: Row) -> Result<Row, ReadError> {
        whole(self.worker, table, number, row).await
    }

    pub(super) async fn all_whole(
        &self,
        table: &Table,
        numbers: &[u64],
        mut rows: Vec<Row>,
    ) -> Result<Vec<Row>, ReadError> {
        if table.slab().is_some() {
            for (row, &number) in rows.iter_mut().zip(numbers) {
                let held = std::mem::replace(row, Row::never_written());
                *row = self.whole(table, number, held).await?;
            }
        }
        Ok(rows)
    }
}

/// A record with its payload, wherever that lies, while a snapshot is open that may need it.
pub(super) async fn whole<R: Rules>(
    worker: &Worker<R>,
    table: &Table,
    number: u64,
    row: Row,
) -> Result<Row, ReadError> {
    let (Some(slab), Some(data)) = (table.slab(), &row.data) else { return Ok(row) };
    let pointer = match Held::decode(data).ok_or(ReadError::Damaged)? {
        Held::Here(payload) => return Ok(Row { data: Some(payload.to_vec()), ..row }),
        Held::There(pointer) => pointer,
    };
    let place = table.place(number).ok_or(ReadError::OutOfRange(number))?;
    match slab.get::<R>(&worker.memory, place.record, pointer).await? {
        Some(payload) => Ok(Row { data: Some(payload), ..row }),
        None if worker.announcer.is_none() => Err(ReadError::SnapshotTooOld),
        None => Err(ReadError::Damaged),
    }
}
