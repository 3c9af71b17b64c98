//! Filling a table before any transaction uses it.

use farpool_wire::{RecordHeader, Version};

use super::{SessionState, Worker};
use crate::error::CommitError;
use crate::memory::MemoryError;
use crate::rules::Rules;
use crate::slab::Held;
use crate::table::Table;

/// Bytes of current versions that are written with one WRITE: a thread's arena has no room for many more.
const RUN_BYTES: usize = 128 << 10;

impl<R: Rules> Worker<R> {
    /// Fills a table that no transaction has used yet, as one commit: `fill` gets each record's number, and
    /// the place for its data. Nothing is locked, no old version is kept, and nothing is logged. In a table
    /// with a slab, every payload is the longest that fits its record.
    ///
    /// # Errors
    /// The table's memory is of no use then, until it is zeros again.
    pub async fn load(
        &self,
        session: &mut SessionState,
        table: &Table,
        mut fill: impl FnMut(u64, &mut [u8]),
    ) -> Result<Version, CommitError> {
        let mut commit = self.begin_commit(0)?;
        let version = commit.version();
        commit.mark_touched();
        let layout = table.layout();
        for run in table.runs(0..table.records(), RUN_BYTES) {
            let unknown = |_: MemoryError| CommitError::Unknown(version);
            let first = table.place(run.start).expect("it is one of the table's");
            let bytes = (run.end - run.start) as usize * layout.current_bytes();
            let buffer = self.memory.take(bytes);
            let mut buffer = buffer.map_err(|full| unknown(full.into()))?;
            let records = buffer.chunks_exact_mut(layout.current_bytes());
            for (number, bytes) in run.zip(records) {
                let place = table.place(number).expect("it is one of the table's");
                let data = &mut bytes[layout.data_of_current()];
                data.fill(0);
                fill(number, if table.slab().is_some() { Held::here_in(data) } else { data });
                layout.seal_first(place.record, RecordHeader::of(version), bytes);
            }
            let at = layout.current(first.index).start;
            self.memory.write_from(buffer, &first.piece, at).await.map_err(unknown)?;
        }
        if !commit.finish().await {
            return Err(CommitError::Unknown(version));
        }
        session.committed(version);
        Ok(version)
    }
}
