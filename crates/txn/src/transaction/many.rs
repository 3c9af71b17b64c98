//! Reading several records in one step: at once, or with one doorbell for each node on which they lie.

use farpool_fabric::MAX_BATCH;
use farpool_wire::NodeId;

use super::{Row, Transaction, reading};
use crate::error::ReadError;
use crate::memory::{Memory, run_all};
use crate::rules::Rules;
use crate::table::{Place, Table};

/// Bytes that are read in one step at most: a small part of a thread's arena.
const STEP_BYTES: usize = 64 << 10;

/// A record that has to be read, and its index among those that were asked for.
struct Wanted {
    index: usize,
    place: Place,
}

impl<R: Rules> Transaction<'_, R> {
    /// Reads records, as [`read`](Self::read) does each, with one round trip for many.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub async fn read_many(&self, table: &Table, numbers: &[u64]) -> Result<Vec<Row>, ReadError> {
        let mut rows = Vec::with_capacity(numbers.len());
        for numbers in steps(table, numbers) {
            let wanted = self.wanted(table, numbers, &mut rows)?;
            let seen = |place: &Place, bytes: &[u8]| reading::seen_row::<R>(&self.cut, place, bytes);
            let found = read_places(&self.worker.memory, &wanted, seen).await?;
            for (wanted, found) in wanted.iter().zip(found) {
                rows[wanted.index] = match found {
                    Some(row) => row,
                    None => reading::read(self.worker, &self.cut, &wanted.place).await?,
                };
            }
        }
        self.all_whole(table, numbers, rows).await
    }

    /// Reads records that will be written: what [`write`](Self::write) does first, with one round trip for
    /// many. A record that is not written afterwards counts as one that was only read: no other transaction
    /// conflicts with it.
    ///
    /// # Errors
    /// [`ReadError::Conflict`] if another transaction was first to write one of them.
    pub async fn take_many(&self, table: &Table, numbers: &[u64]) -> Result<Vec<Row>, ReadError> {
        let memory = &self.worker.memory;
        let mut rows = Vec::with_capacity(numbers.len());
        for numbers in steps(table, numbers) {
            let wanted = self.wanted(table, numbers, &mut rows)?;
            let to_write = |place: &Place, bytes: &[u8]| reading::to_write::<R>(&self.cut, place, bytes);
            let found = read_places(memory, &wanted, to_write).await?;
            for (Wanted { index, place }, found) in wanted.into_iter().zip(found) {
                let before = match found {
                    Some(before) => before,
                    None => reading::read_to_write::<R>(memory, &self.cut, &place).await?,
                };
                rows[index] = before.row();
                self.note_taken(place.record, before);
            }
        }
        self.all_whole(table, numbers, rows).await
    }

    /// The records that have to be read. Appends a row for each of `numbers`: for these records, one that is
    /// to be replaced.
    fn wanted(&self, table: &Table, numbers: &[u64], rows: &mut Vec<Row>) -> Result<Vec<Wanted>, ReadError> {
        let mut wanted = Vec::with_capacity(numbers.len());
        for &number in numbers {
            let place = table.place(number).ok_or(ReadError::OutOfRange(number))?;
            let own = self.own(place.record);
            if own.is_none() {
                wanted.push(Wanted { index: rows.len(), place });
            }
            rows.push(own.unwrap_or(Row::never_written()));
        }
        Ok(wanted)
    }
}

/// As many records at a time as are read in one step.
fn steps<'a>(table: &Table, numbers: &'a [u64]) -> impl Iterator<Item = &'a [u64]> + use<'a> {
    numbers.chunks((STEP_BYTES / table.layout().current_bytes()).clamp(1, MAX_BATCH))
}

/// Reads the places of records once, and decodes each. `None`: what was found there is not enough.
async fn read_places<T>(
    memory: &Memory,
    wanted: &[Wanted],
    decode: impl Fn(&Place, &[u8]) -> Result<Option<T>, ReadError>,
) -> Result<Vec<Option<T>>, ReadError> {
    // The processor fetches all of them while the first ones are decoded.
    wanted.iter().for_each(|Wanted { place, .. }| memory.prefetch(&place.piece, place.range()));
    let mut found = Vec::with_capacity(wanted.len());
    let mut far: Vec<(NodeId, Vec<usize>)> = Vec::new();
    for (index, Wanted { place, .. }) in wanted.iter().enumerate() {
        if let Some(decoded) = memory.read_now(&place.piece, place.range(), |bytes| decode(place, bytes)) {
            found.push(decoded?);
            continue;
        }
        found.push(None);
        let here = place.piece.region.node;
        match far.iter_mut().find(|(node, _)| *node == here) {
            Some((_, indices)) => indices.push(index),
            None => far.push((here, vec![index])),
        }
    }
    let (mut plans, mut ranges) = (Vec::with_capacity(far.len()), Vec::with_capacity(far.len()));
    for (node, indices) in &far {
        let places = || indices.iter().map(|index| &wanted[*index].place);
        let bytes = places().map(|place| place.layout.current_bytes()).sum();
        let mut plan = memory.plan_soon(*node, bytes).await?;
        ranges.push(places().map(|place| plan.read(&place.piece, place.range())).collect::<Vec<_>>());
        plans.push(plan);
    }
    run_all(&mut plans).await;
    for (((_, indices), plan), ranges) in far.iter().zip(&plans).zip(ranges) {
        plan.check()?;
        for (&index, range) in indices.iter().zip(ranges) {
            found[index] = decode(&wanted[index].place, plan.bytes(range))?;
        }
    }
    Ok(found)
}
