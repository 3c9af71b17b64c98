//! Memory of tables that were dropped (C4).
//!
//! It is cleared (overwritten with zeros) while no transaction is open: clearing may take long, and an open
//! snapshot would hold the horizon back meanwhile. A member that dies while it clears leaves the tombstone
//! behind, and the next member clears the memory again.

use farpool_txn::horizon::horizon;
use farpool_txn::{Cut, Transaction};
use farpool_wire::Version;

use super::changing::Change;
use super::making::{read_maps, write_maps};
use super::{Catalog, Layouts, Outlook, TABLES, TableRow};
use crate::environment::Environment;
use crate::error::{Stop, TxError, of_memory, of_read};
use crate::maps::Placed;
use crate::member::MemberCore;
use crate::regions::Regions;
use crate::rules::MemberRules;

/// Bytes that are cleared between two announcements.
const CLEARED_AT_ONCE: u64 = 4 << 20;

/// A dropped table that still has its memory.
struct Gone {
    /// The number of its tombstone, and the commit that wrote it.
    tombstone: u64,
    since: Version,
    row: TableRow,
    layouts: Layouts,
}

impl Gone {
    /// The places of its pieces, and the bytes that each has.
    fn extents(&self) -> impl Iterator<Item = (Placed, u64)> {
        self.row.places().zip((0..).map(|piece| self.layouts.bytes_of(piece)))
    }
}

/// Whether dropped tables have memory for a table that is full.
pub(super) async fn outlook_after_clearing<E: Environment>(
    member: &MemberCore<E>,
    transaction: &Transaction<'_, E::Rules>,
    catalog: &Catalog,
) -> Result<Outlook, Stop> {
    let dropped = dropped_tables(transaction, catalog).await?;
    if dropped.is_empty() {
        return Ok(Outlook::CannotGrow);
    }
    let horizon = horizon(transaction.memory(), &member.at().horizon()).await.map_err(of_memory)?;
    let is_gone = |table: &Gone| horizon.as_ref().is_some_and(|horizon| horizon.sees(table.since));
    Ok(if dropped.iter().any(is_gone) { Outlook::MayGrow } else { Outlook::Later })
}

/// Gives back the memory of dropped tables that no snapshot has any more.
pub(super) async fn clear_tombstones<E: Environment>(change: &Change<'_, E>) -> Result<(), TxError> {
    let found = horizon(change.memory(), &change.member.at().horizon()).await;
    let Some(horizon) = found.map_err(TxError::Memory)? else { return Ok(()) };
    let look = async |transaction: &Transaction<'_, E::Rules>, catalog: &Catalog| {
        tables_gone(transaction, catalog, &horizon).await
    };
    let gone = change.transact(look).await?;
    if gone.is_empty() {
        return Ok(());
    }
    let regions = change.member.regions();
    // Each by a transaction of its own: a log may not have room for all of them.
    for table in &gone {
        clear(change, &regions, table).await?;
        let give_back = async |transaction: &Transaction<'_, E::Rules>, catalog: &Catalog| {
            give_back(&regions, transaction, catalog, table).await
        };
        change.transact(give_back).await?;
        change.note_freed();
    }
    Ok(())
}

/// Gives back the memory of a dropped table, and empties its tombstone.
async fn give_back<R: MemberRules>(
    regions: &Regions<'_>,
    transaction: &Transaction<'_, R>,
    catalog: &Catalog,
    table: &Gone,
) -> Result<(), Stop> {
    let found = transaction.read(&catalog.tombstones, table.tombstone).await;
    if found.map_err(|error| of_read(error, TABLES))?.version != table.since {
        return Ok(()); // another member emptied it, and died before that was published
    }
    let maps = read_maps(regions, transaction, catalog).await?;
    let mut free = maps.clone();
    for (Placed { region, unit }, bytes) in table.extents() {
        if let Some(map) = free.get_mut(region) {
            map.free(unit, bytes.div_ceil(regions.layout().unit_bytes()));
        }
    }
    let emptied = transaction.write(&catalog.tombstones, table.tombstone, None).await;
    emptied.map_err(|error| of_read(error, TABLES))?;
    write_maps(transaction, catalog, &maps, &free).await
}

/// The tables in tombstones whose drop the horizon has.
async fn tables_gone<R: MemberRules>(
    transaction: &Transaction<'_, R>,
    catalog: &Catalog,
    horizon: &Cut,
) -> Result<Vec<Gone>, Stop> {
    let mut tables = dropped_tables(transaction, catalog).await?;
    tables.retain(|table| horizon.sees(table.since) || !R::keeps_memory_for_snapshots());
    Ok(tables)
}

/// The tables in tombstones.
async fn dropped_tables<R: MemberRules>(
    transaction: &Transaction<'_, R>,
    catalog: &Catalog,
) -> Result<Vec<Gone>, Stop> {
    let mut tables = Vec::new();
    for tombstone in 0..catalog.tombstones.records() {
        let found =
            transaction.read(&catalog.tombstones, tombstone).await.map_err(|error| of_read(error, TABLES))?;
        let row = found.data.and_then(|data| TableRow::decode_row(&data));
        let Some((layouts, row)) = row.and_then(|row| Some((row.layouts()?, row))) else { continue };
        tables.push(Gone { tombstone, since: found.version, row, layouts });
    }
    Ok(tables)
}

async fn clear<E: Environment>(
    change: &Change<'_, E>,
    regions: &Regions<'_>,
    table: &Gone,
) -> Result<(), TxError> {
    if !E::Rules::clears_memory() {
        return Ok(());
    }
    for (Placed { region, unit }, bytes) in table.extents() {
        let Some(at) = regions.piece(region, unit, 0) else { continue };
        for start in (0..bytes).step_by(CLEARED_AT_ONCE as usize) {
            let end = bytes.min(start + CLEARED_AT_ONCE);
            change.member.check().map_err(TxError::Ended)?;
            change.memory().clear(&at, start..end).await.map_err(TxError::Memory)?;
            change.keep_up().await?;
        }
    }
    Ok(())
}
