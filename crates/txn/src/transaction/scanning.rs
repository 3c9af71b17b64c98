//! Reading records whose numbers follow each other: their current versions lie side by side.

use std::ops::Range;

use farpool_wire::Version;

use super::{Transaction, reading};
use crate::error::ReadError;
use crate::rules::Rules;
use crate::table::Table;

/// Bytes of current versions that are read with one READ.
const RUN_BYTES: usize = 128 << 10;

impl<R: Rules> Transaction<'_, R> {
    /// Reads records whose numbers follow each other, many with one READ. Passes to `visit` for each: its
    /// number, which commit wrote it, and its data, as [`read`](Self::read) does.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub async fn scan(
        &self,
        table: &Table,
        numbers: Range<u64>,
        mut visit: impl FnMut(u64, Version, Option<&[u8]>),
    ) -> Result<(), ReadError> {
        if numbers.end > table.records() {
            return Err(ReadError::OutOfRange(numbers.end - 1));
        }
        let (memory, layout) = (&self.worker.memory, table.layout());
        for run in table.runs(numbers, RUN_BYTES) {
            let first = table.place(run.start).ok_or(ReadError::OutOfRange(run.start))?;
            let start = layout.current(first.index).start;
            let end = start + (run.end - run.start) * layout.current_bytes() as u64;
            let bytes = memory.read(&first.piece, start..end).await?;
            for (number, bytes) in run.zip(bytes.chunks_exact(layout.current_bytes())) {
                let place = table.place(number).ok_or(ReadError::OutOfRange(number))?;
                let is_own = self.writes.borrow().get(place.record).is_some();
                match reading::seen_version::<R>(&self.cut, &place, bytes)?.filter(|_| !is_own) {
                    Some(found) if table.slab().is_none() => {
                        let data = (!found.label.is_absent()).then_some(found.data);
                        visit(number, found.label.version(), data);
                    }
                    Some(found) => {
                        let row = reading::row(&found.label, found.data);
                        let row = self.whole(table, number, row).await?;
                        visit(number, row.version, row.data.as_deref());
                    }
                    // Written by this transaction, or not what its cut sees.
                    None => {
                        let row = self.read(table, number).await?;
                        visit(number, row.version, row.data.as_deref());
                    }
                }
            }
        }
        Ok(())
    }
}
