//! Creating, growing and dropping tables.

use std::collections::BTreeSet;

use farpool_fabric::Endpoint;
use farpool_txn::hash::MOST_KEY_BYTES;
use farpool_txn::layout::{FIRST_RECORD, MAP_BYTES, ROW_BYTES};
use farpool_txn::log::Intent;
use farpool_txn::slab::MOST_PAYLOAD_BYTES;
use farpool_txn::{DatabaseLayout, ReadError, Rules, Transaction};

use super::changing::{Turn, change};
use super::leasing::{Lacking, Unplaced};
use super::tombstones::{clear_tombstones, outlook_after_clearing};
use super::{
    Catalog, CatalogKey, MOST_PIECES, MOST_TYPE_BYTES, RECORDS_EACH, TABLES, TableRow, key_of, key_of_index,
};
use crate::environment::Environment;
use crate::error::{Stop, TxError, of_key, of_read};
use crate::maps::{Map, Placed, place, regions_lacking};
use crate::member::MemberCore;
use crate::regions::Regions;
use crate::rules::MemberRules;
use crate::table::TableOptions;
use crate::transacting::FullTable;

/// Rows of each piece beyond those asked for: a process keeps some record numbers at hand, and these are lost
/// when it dies.
const SPARE_ROWS: u64 = 32;
/// Pieces double until they take one in this many parts of a region: a larger piece would rarely find room.
const MOST_PIECE_DIVISOR: u64 = 2;

/// Why a table cannot be dropped for now.
const NO_TOMBSTONE: &str = "too many dropped tables are still in open snapshots: end long transactions";

/// Creates a table. Returns its first record, which no other table ever has.
pub(crate) async fn create<E: Environment>(
    member: &MemberCore<E>,
    endpoint: &Endpoint,
    name: &str,
    (key_type, key_bytes): (String, usize),
    options: &TableOptions,
) -> Result<u64, TxError> {
    let key = key_of(name).ok_or_else(|| TxError::BadName(name.to_owned()))?;
    let row_bytes = options.place_bytes();
    check_keys(&key_type, key_bytes)?;
    let longest = options.longest.map_or(0, |longest| longest.max(1));
    if longest > MOST_PAYLOAD_BYTES {
        return Err(TxError::BadOptions(format!(
            "a row cannot have {longest} bytes: at most {MOST_PAYLOAD_BYTES}"
        )));
    }
    let (logged, most) = (Intent::bytes_for(row_bytes) as u64, member.at().layout.log.most_bytes());
    if logged > most {
        return Err(TxError::BadOptions(format!(
            "to replace a row of {row_bytes} bytes takes {logged} bytes of a log, and a transaction may take \
             {most}: make the database with larger logs (--log-size), or the table with shorter rows and \
             their long parts beside them (TableOptions::longest)"
        )));
    }
    let empty = TableRow {
        name: name.to_owned(),
        row_bytes: u32::try_from(row_bytes)
            .map_err(|_| TxError::BadOptions("rows are too large".to_owned()))?,
        longest: longest as u32,
        is_ordered: options.is_ordered,
        key_type,
        key_bytes: key_bytes as u32,
        seed: member.environment().random(),
        ..TableRow::default()
    };
    let turn = Turn::wait_for(member, endpoint).await?;
    change(turn, member, endpoint, async |change| {
        let is_there = async |transaction: &Transaction<'_, E::Rules>, catalog: &Catalog| {
            Ok(catalog.find(transaction, name).await.map_err(|error| of_key(error, TABLES))?.is_some())
        };
        // This comes first, since getting memory may take long.
        if change.transact(is_there).await? {
            return Err(TxError::TableExists(name.to_owned()));
        }
        clear_tombstones(change).await?;
        let lacking = Lacking::default();
        let make = async |transaction: &Transaction<'_, E::Rules>, catalog: &Catalog| {
            let (regions, mut row) = (member.regions(), empty.clone());
            row.first_record = next_record(transaction, catalog).await?;
            let maps = read_maps(&regions, transaction, catalog).await?;
            let taken = lacking.note(shape_and_place(&regions, &maps, &mut row, options))?;
            write_maps(transaction, catalog, &maps, &taken).await?;
            match catalog.insert_row(transaction, &key, &row).await {
                Ok(()) => Ok(row.first_record),
                // Another member made it, and died before that was published.
                Err(Stop::For(TxError::Duplicate(_))) => Err(TxError::TableExists(name.to_owned()).into()),
                Err(other) => Err(other),
            }
        };
        let made = change.transact(&make).await;
        lacking.lease_and_try_again(made, change, &make).await
    })
    .await
}

/// Checks the type of the keys of a new table or index.
pub(super) fn check_keys(key_type: &str, key_bytes: usize) -> Result<(), TxError> {
    if !(1..=MOST_KEY_BYTES).contains(&key_bytes) {
        let what = format!("a key cannot have {key_bytes} bytes: 1 to {MOST_KEY_BYTES} are possible");
        return Err(TxError::BadOptions(what));
    }
    if key_type.len() > MOST_TYPE_BYTES {
        return Err(TxError::BadOptions(format!(
            "the name of the key type {key_type} is too long: at most {MOST_TYPE_BYTES} bytes"
        )));
    }
    Ok(())
}

/// Drops a table. Its memory is not given to another table while a snapshot may still read it (C4).
pub(crate) async fn drop_table<E: Environment>(
    member: &MemberCore<E>,
    endpoint: &Endpoint,
    name: &str,
) -> Result<(), TxError> {
    let key = key_of(name).ok_or_else(|| TxError::BadName(name.to_owned()))?;
    let drop_all = async |transaction: &Transaction<'_, E::Rules>, catalog: &Catalog| {
        let row = match move_to_tombstone(transaction, catalog, &key).await {
            Err(Stop::For(TxError::NoSuchKey(_))) => return Err(TxError::NoSuchTable(name.to_owned()).into()),
            moved => moved?,
        };
        for index in row.indexes {
            move_to_tombstone(transaction, catalog, &key_of_index(index)).await?;
        }
        Ok(())
    };
    drop_by(member, endpoint, &drop_all).await
}

/// Changes the catalog by a transaction that needs tombstones.
pub(super) async fn drop_by<E: Environment>(
    member: &MemberCore<E>,
    endpoint: &Endpoint,
    body: &impl AsyncFn(&Transaction<'_, E::Rules>, &Catalog) -> Result<(), Stop>,
) -> Result<(), TxError> {
    let turn = Turn::wait_for(member, endpoint).await?;
    change(turn, member, endpoint, async |change| match change.transact(body).await {
        Err(TxError::NoSpace(_)) => {
            clear_tombstones(change).await?;
            change.transact(body).await
        }
        done => done,
    })
    .await
}

/// Deletes the row of a table or an index from the catalog. It keeps its memory in a tombstone.
pub(super) async fn move_to_tombstone<R: Rules>(
    transaction: &Transaction<'_, R>,
    catalog: &Catalog,
    key: &CatalogKey,
) -> Result<TableRow, Stop> {
    let gone = catalog.names.delete(transaction, key).await;
    let bytes = gone.map_err(|error| of_key(error, TABLES))?.data.unwrap_or_default();
    let stop = |error| of_read(error, TABLES);
    for tombstone in 0..catalog.tombstones.records() {
        if transaction.read(&catalog.tombstones, tombstone).await.map_err(stop)?.data.is_none() {
            transaction.write(&catalog.tombstones, tombstone, Some(&bytes)).await.map_err(stop)?;
            return TableRow::decode_row(&bytes).ok_or_else(|| stop(ReadError::Damaged));
        }
    }
    Err(TxError::NoSpace(NO_TOMBSTONE.to_owned()).into())
}

/// Numbers for the records of a new table. No other table ever has them, so bytes left in its memory are
/// never taken for another table's records.
pub(super) async fn next_record<R: Rules>(
    transaction: &Transaction<'_, R>,
    catalog: &Catalog,
) -> Result<u64, Stop> {
    let stop = |error| of_read(error, TABLES);
    let row = transaction.read(&catalog.counter, 0).await.map_err(stop)?;
    let word =
        row.data.as_deref().and_then(|data| data.first_chunk()).map_or(0, |word| u64::from_le_bytes(*word));
    let first = word.max(FIRST_RECORD);
    let end = first.checked_add(RECORDS_EACH);
    let end =
        end.ok_or_else(|| TxError::NoSpace("no record numbers are left for another table".to_owned()))?;
    transaction.write(&catalog.counter, 0, Some(&end.to_le_bytes())).await.map_err(stop)?;
    Ok(first)
}

/// The maps of all regions: which units are taken.
pub(super) async fn read_maps<R: Rules>(
    regions: &Regions<'_>,
    transaction: &Transaction<'_, R>,
    catalog: &Catalog,
) -> Result<Vec<Map>, Stop> {
    let mut maps = Vec::new();
    for region in 0..regions.end() {
        if regions.grant(region).is_none() {
            maps.push(Map::full()); // a place in the list that is free, or a region that is given back
            continue;
        }
        let found = transaction.read(&catalog.maps, region as u64).await;
        let found = found.map_err(|error| of_read(error, TABLES))?;
        let map = Map::decode(found.data.as_deref(), regions.first_unit(region));
        maps.push(map.ok_or_else(|| TxError::Damaged("the map of a region is damaged".to_owned()))?);
    }
    Ok(maps)
}

/// Writes the maps that have changed.
pub(super) async fn write_maps<R: Rules>(
    transaction: &Transaction<'_, R>,
    catalog: &Catalog,
    before: &[Map],
    after: &[Map],
) -> Result<(), Stop> {
    for (region, (before, after)) in (0..).zip(before.iter().zip(after)) {
        if before != after {
            let written = transaction.write(&catalog.maps, region, Some(&after.encode())).await;
            written.map_err(|error| of_read(error, TABLES))?;
        }
    }
    Ok(())
}

/// Decides into how many pieces a table is split at first, and where they lie: enters that in its row, and
/// returns the maps with its memory. Tries one piece for each node first, then twice as many, and so on.
pub(super) fn shape_and_place(
    regions: &Regions<'_>,
    maps: &[Map],
    row: &mut TableRow,
    options: &TableOptions,
) -> Result<Vec<Map>, Unplaced> {
    let mut nodes: Vec<_> = regions.nodes().into_iter().flatten().collect();
    nodes.sort_unstable();
    nodes.dedup();
    let (mut pieces, mut reason) = (nodes.len().min(MOST_PIECES), None);
    loop {
        row.rows_each = options.rows.max(1).div_ceil(pieces as u64) + SPARE_ROWS;
        if let Some(slab) = options.slab_each(pieces as u64) {
            (row.chunks_each, row.chunk_bytes) = (slab.chunks(), slab.chunk_bytes());
        }
        (row.layer, row.most_times) = (pieces as u32, 1);
        (row.regions, row.first_units) = (vec![0; pieces], vec![0; pieces]);
        let bad_shape = || {
            let (rows, bytes) = (options.rows, row.row_bytes);
            TxError::BadOptions(format!("a table cannot have {rows} rows of {bytes} bytes"))
        };
        let bytes = row.layouts().ok_or_else(bad_shape)?.bytes_of(0);
        row.most_times = (regions.layout().shape.region_bytes / MOST_PIECE_DIVISOR / bytes).max(1);
        (row.regions, row.first_units) = (Vec::new(), Vec::new());
        let unplaced = match place_layer(regions, maps, row) {
            Ok(taken) => return Ok(taken),
            Err(unplaced) => unplaced,
        };
        let why = match reason.take() {
            // More memory would help, if not with as many pieces as now.
            Some(earlier @ Unplaced { regions: Some(_), .. }) if unplaced.regions.is_none() => earlier,
            _ => unplaced,
        };
        if pieces == MOST_PIECES {
            return Err(why);
        }
        reason = Some(why);
        pieces = (pieces * 2).min(MOST_PIECES);
    }
}

/// Places another layer of a table's pieces: enters their places in its row, and returns the maps with them.
///
/// # Errors
/// [`TxError::NoSpace`] when they do not fit. The row must not be used then.
fn place_layer(regions: &Regions<'_>, maps: &[Map], row: &mut TableRow) -> Result<Vec<Map>, Unplaced> {
    let (new, layout) = (row.pieces()..row.pieces() + row.layer as usize, regions.layout());
    if new.end > MOST_PIECES {
        return Err(TxError::NoSpace(format!("a table has at most {MOST_PIECES} pieces")).into());
    }
    row.regions.resize(new.end, 0);
    row.first_units.resize(new.end, 0);
    let layouts = row.layouts().ok_or_else(|| TxError::NoSpace("the table would be too large".to_owned()))?;
    let (mut taken, nodes) = (maps.to_vec(), regions.nodes());
    let units = new.clone().map(|piece| layouts.units_of(piece, layout));
    let Some(placed) = place(&mut taken, &nodes, units.clone()) else {
        let bytes = new.map(|piece| layouts.bytes_of(piece)).sum();
        let lacking = regions_lacking((maps, &nodes), &Map::empty(), units);
        return Err(Unplaced { error: no_space(layout, maps, bytes), regions: lacking });
    };
    for (piece, Placed { region, unit }) in new.zip(placed) {
        (row.regions[piece], row.first_units[piece]) = (region as u32, unit as u32);
    }
    // One transaction gives all the memory back one day.
    let spread: BTreeSet<_> = row.regions.iter().collect();
    let others = Intent::bytes_for(ROW_BYTES) + Intent::bytes_for(size_of::<u64>());
    let logged = spread.len() * Intent::bytes_for(MAP_BYTES) + others;
    if logged as u64 > layout.log.most_bytes() {
        let error = TxError::NoSpace(format!(
            "the table would lie in {} regions, and a log has no room for a change of so many maps: make the \
             database with larger logs (--log-size)",
            spread.len()
        ));
        return Err(error.into());
    }
    Ok(taken)
}

fn no_space(layout: &DatabaseLayout, maps: &[Map], needed: u64) -> TxError {
    let free = maps.iter().map(Map::units_free).sum::<u64>() * layout.unit_bytes();
    TxError::NoSpace(format!(
        "the table needs {needed} bytes in large pieces; {free} bytes are free in parts"
    ))
}

/// What can be done for a table that was full.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outlook {
    /// Nothing: it has grown, or is another table now.
    Changed,
    /// It may grow.
    MayGrow,
    /// It may grow once no snapshot has a table any more that was dropped.
    Later,
    /// There is no memory for it.
    CannotGrow,
}

/// What can be done for a table that was full, as of a snapshot. The caller does not need the catalog's role:
/// taking that role uses up a generation of the catalog's slot.
pub(crate) async fn outlook<E: Environment>(
    member: &MemberCore<E>,
    transaction: &Transaction<'_, E::Rules>,
    catalog: &Catalog,
    full: &FullTable,
) -> Result<Outlook, Stop> {
    let found = catalog.find_at(transaction, &full.key).await.map_err(|error| of_key(error, TABLES))?;
    let is_as_it_was = |row: &TableRow| row.first_record == full.first_record && row.pieces() <= full.pieces;
    let Some(mut row) = found.filter(is_as_it_was) else { return Ok(Outlook::Changed) };
    let regions = member.regions();
    let maps = read_maps(&regions, transaction, catalog).await?;
    let needed = match place_layer(&regions, &maps, &mut row) {
        Ok(_) => return Ok(Outlook::MayGrow),
        Err(unplaced) => unplaced.regions,
    };
    match outlook_after_clearing(member, transaction, catalog).await? {
        Outlook::MayGrow => Ok(Outlook::MayGrow),
        _ if needed.is_some() && member.may_lease(transaction.memory().endpoint()) => Ok(Outlook::MayGrow),
        outlook => Ok(outlook),
    }
}

/// Adds a layer of pieces to a table that has no more than it had when it was full. If it has more, another
/// client has added them, and nothing is done.
///
/// # Errors
/// [`TxError::NoSpace`] when they do not fit; [`TxError::Dropped`] when it is another table, or none.
pub(crate) async fn grow<E: Environment>(
    turn: Turn<'_>,
    member: &MemberCore<E>,
    endpoint: &Endpoint,
    full: &FullTable,
) -> Result<(), TxError> {
    let lacking = Lacking::default();
    let add = async |transaction: &Transaction<'_, E::Rules>, catalog: &Catalog| {
        let found = catalog.find_at(transaction, &full.key).await.map_err(|error| of_key(error, TABLES))?;
        let row = found.filter(|row| row.first_record == full.first_record);
        let mut row = match row {
            Some(row) => row,
            None if full.is_index => return Ok(()), // nobody needs it any more
            None => return Err(TxError::Dropped(full.name.clone()).into()),
        };
        if row.pieces() > full.pieces {
            return Ok(()); // another client was first
        }
        let regions = member.regions();
        let maps = read_maps(&regions, transaction, catalog).await?;
        let taken = lacking.note(place_layer(&regions, &maps, &mut row))?;
        if E::Rules::enters_growth_in_maps() {
            write_maps(transaction, catalog, &maps, &taken).await?;
        }
        catalog.update_row(transaction, &full.key, &row).await
    };
    change(turn, member, endpoint, async |change| match change.transact(&add).await {
        Err(TxError::NoSpace(_)) => {
            clear_tombstones(change).await?;
            let added = change.transact(&add).await;
            lacking.lease_and_try_again(added, change, &add).await
        }
        done => done,
    })
    .await
}
