//! Payloads of any length, in records or in the slab beside them (`docs/src/txn.md`, *payloads of variable
//! length*).

use super::{Row, Transaction, reading};
use crate::error::ReadError;
use crate::rules::Rules;
use crate::slab::Held;
use crate::table::{Place, Table};

impl<R: Rules> Transaction<'_, R> {
    /// The data that a record's place gets for a payload. A payload that does not fit there is written to a
    /// block first (B2).
    pub(super) async fn hold(
        &mut self,
        table: &Table,
        place: &Place,
        payload: &[u8],
    ) -> Result<Vec<u8>, ReadError> {
        let data_bytes = place.layout.data_bytes();
        let Some(slab) = table.slab() else {
            let (wanted, found) = (data_bytes, payload.len());
            return if found == wanted {
                Ok(payload.to_vec())
            } else {
                Err(ReadError::WrongSize { wanted, found })
            };
        };
        if payload.len() <= Held::most_here(data_bytes) {
            return Ok(Held::Here(payload).encode(data_bytes));
        }
        let number = self.next_number(place).await?;
        let (block, pointer) = slab.put(self.worker, table, (place.record, number), payload).await?;
        self.blocks.push(block);
        Ok(Held::There(pointer).encode(data_bytes))
    }

    /// The number of the version that this transaction would write.
    async fn next_number(&mut self, place: &Place) -> Result<u64, ReadError> {
        let before = self.writes.get(&place.record).map(|write| &write.before);
        let before = before.or_else(|| self.taken.get(&place.record)).map(|before| before.label.number);
        if let Some(number) = before {
            return Ok(number + 1);
        }
        let before = reading::read_to_write::<R>(&self.worker.memory, &self.cut, place).await?;
        let number = before.label.number + 1;
        self.taken.insert(place.record, before);
        Ok(number)
    }

    /// A record with its payload, wherever that lies. A block keeps its payload for as long as this snapshot
    /// may need it.
    pub(crate) async fn whole(&self, table: &Table, number: u64, row: Row) -> Result<Row, ReadError> {
        let (Some(slab), Some(data)) = (table.slab(), &row.data) else { return Ok(row) };
        let pointer = match Held::decode(data).ok_or(ReadError::Damaged)? {
            Held::Here(payload) => return Ok(Row { data: Some(payload.to_vec()), ..row }),
            Held::There(pointer) => pointer,
        };
        let place = table.place(number).ok_or(ReadError::OutOfRange(number))?;
        match slab.get::<R>(&self.worker.memory, place.record, pointer).await? {
            Some(payload) => Ok(Row { data: Some(payload), ..row }),
            None if self.worker.announcer.is_none() => Err(ReadError::SnapshotTooOld),
            None => Err(ReadError::Damaged),
        }
    }

    pub(super) async fn all_whole(
        &self,
        table: &Table,
        numbers: &[u64],
        mut rows: Vec<Row>,
    ) -> Result<Vec<Row>, ReadError> {
        if table.slab().is_some() {
            for (row, &number) in rows.iter_mut().zip(numbers) {
                let held = std::mem::replace(row, Row::absent());
                *row = self.whole(table, number, held).await?;
            }
        }
        Ok(rows)
    }
}
