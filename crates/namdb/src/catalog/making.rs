//! Creating and dropping tables.

use farpool_fabric::Endpoint;
use farpool_txn::hash::MOST_KEY_BYTES;
use farpool_txn::layout::FIRST_RECORD;
use farpool_txn::log::Intent;
use farpool_txn::slab::MOST_PAYLOAD_BYTES;
use farpool_txn::{DatabaseAt, Rules, Transaction};

use super::changing::change;
use super::tombstones::clear_tombstones;
use super::{Catalog, MOST_PIECES, MOST_TYPE_BYTES, PieceRow, TABLES, TableRow, key_of};
use crate::environment::Environment;
use crate::error::{Stop, TxError, of_key, of_read};
use crate::maps::{Map, Placed, place};
use crate::member::MemberCore;
use crate::table::TableOptions;

/// Rows of each piece beyond those asked for: a process keeps some record numbers at hand, and these are lost
/// when it dies.
const SPARE_ROWS: u64 = 32;

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
    if !(1..=MOST_KEY_BYTES).contains(&key_bytes) {
        let what = format!("a key cannot have {key_bytes} bytes: 1 to {MOST_KEY_BYTES} are possible");
        return Err(TxError::BadOptions(what));
    }
    if key_type.len() > MOST_TYPE_BYTES {
        return Err(TxError::BadOptions(format!(
            "the name of the key type {key_type} is too long: at most {MOST_TYPE_BYTES} bytes"
        )));
    }
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
        key_type,
        key_bytes: key_bytes as u32,
        seed: member.environment().random(),
        ..TableRow::default()
    };
    change(member, endpoint, async |change| {
        let is_there = async |transaction: &Transaction<'_, E::Rules>, catalog: &Catalog| {
            Ok(catalog.find(transaction, name).await.map_err(|error| of_key(error, TABLES))?.is_some())
        };
        // This comes first, since getting memory may take long.
        if change.transact(is_there).await? {
            return Err(TxError::TableExists(name.to_owned()));
        }
        clear_tombstones(change).await?;
        let make = async |transaction: &Transaction<'_, E::Rules>, catalog: &Catalog| {
            let mut row = empty.clone();
            row.first_record = next_record(transaction, catalog, options.rows).await?;
            take_memory(member.at(), transaction, catalog, &mut row, options).await?;
            let first = row.first_record;
            let row = row.encode_row().ok_or_else(|| TxError::NoSpace("too many pieces".to_owned()))?;
            let made = catalog.names.insert(transaction, &key, &row).await;
            match made.map_err(|error| of_key(error, TABLES)) {
                Ok(_) => Ok(first),
                // Another member made it, and died before that was published.
                Err(Stop::For(TxError::Duplicate(_))) => Err(TxError::TableExists(name.to_owned()).into()),
                Err(other) => Err(other),
            }
        };
        change.transact(make).await
    })
    .await
}

/// Drops a table. Its memory is not given to another table while a snapshot may still read it (C4).
pub(crate) async fn drop_table<E: Environment>(
    member: &MemberCore<E>,
    endpoint: &Endpoint,
    name: &str,
) -> Result<(), TxError> {
    let key = key_of(name).ok_or_else(|| TxError::BadName(name.to_owned()))?;
    let move_to_tombstone = async |transaction: &Transaction<'_, E::Rules>, catalog: &Catalog| {
        let gone = catalog.names.delete(transaction, &key).await;
        let row = match gone.map_err(|error| of_key(error, TABLES)) {
            Ok(row) => row.data.unwrap_or_default(),
            Err(Stop::For(TxError::NoSuchKey(_))) => return Err(TxError::NoSuchTable(name.to_owned()).into()),
            Err(other) => return Err(other),
        };
        let stop = |error| of_read(error, TABLES);
        for tombstone in 0..catalog.tombstones.records() {
            if transaction.read(&catalog.tombstones, tombstone).await.map_err(stop)?.data.is_none() {
                transaction.write(&catalog.tombstones, tombstone, Some(&row)).await.map_err(stop)?;
                return Ok(());
            }
        }
        Err(TxError::NoSpace(NO_TOMBSTONE.to_owned()).into())
    };
    change(member, endpoint, async |change| match change.transact(move_to_tombstone).await {
        Err(TxError::NoSpace(_)) => {
            clear_tombstones(change).await?;
            change.transact(move_to_tombstone).await
        }
        done => done,
    })
    .await
}

/// Numbers for the records of a new table. No other table ever has them, so bytes left in its memory are
/// never taken for another table's records.
async fn next_record<R: Rules>(
    transaction: &Transaction<'_, R>,
    catalog: &Catalog,
    rows: u64,
) -> Result<u64, Stop> {
    let stop = |error| of_read(error, TABLES);
    let row = transaction.read(&catalog.counter, 0).await.map_err(stop)?;
    let word =
        row.data.as_deref().and_then(|data| data.first_chunk()).map_or(0, |word| u64::from_le_bytes(*word));
    let first = word.max(FIRST_RECORD);
    // More for each piece: as many as rounding and spares may take.
    let more = MOST_PIECES as u64 * (SPARE_ROWS + 1);
    let end = first.checked_add(rows).and_then(|end| end.checked_add(more));
    let end =
        end.ok_or_else(|| TxError::NoSpace("too few record numbers are left for this table".to_owned()))?;
    transaction.write(&catalog.counter, 0, Some(&end.to_le_bytes())).await.map_err(stop)?;
    Ok(first)
}

/// Takes memory for a table, spread over all nodes, in as few pieces as fit.
async fn take_memory<R: Rules>(
    at: DatabaseAt<'_>,
    transaction: &Transaction<'_, R>,
    catalog: &Catalog,
    row: &mut TableRow,
    options: &TableOptions,
) -> Result<(), Stop> {
    let maps = read_maps(at, transaction, catalog).await?;
    let (placed, taken) = choose(at, &maps, row, options)?;
    write_maps(transaction, catalog, &maps, &taken).await?;
    row.pieces = placed
        .into_iter()
        .map(|piece| PieceRow {
            region: piece.region as u32,
            records: piece.records as u32,
            index: piece.index as u32,
            slab: piece.slab as u32,
        })
        .collect();
    Ok(())
}

/// The maps of all regions: which units are taken.
pub(super) async fn read_maps<R: Rules>(
    at: DatabaseAt<'_>,
    transaction: &Transaction<'_, R>,
    catalog: &Catalog,
) -> Result<Vec<Map>, Stop> {
    let mut maps = Vec::new();
    for region in 0..at.grants.len() {
        let found = transaction.read(&catalog.maps, region as u64).await;
        let found = found.map_err(|error| of_read(error, TABLES))?;
        let map = Map::decode(found.data.as_deref(), at.layout.first_unit(region));
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

/// Decides into how many pieces a table is split, and where they lie. Tries one piece for each node first,
/// then twice as many, and so on.
fn choose(
    at: DatabaseAt<'_>,
    maps: &[Map],
    row: &mut TableRow,
    options: &TableOptions,
) -> Result<(Vec<Placed>, Vec<Map>), TxError> {
    let nodes: Vec<_> = at.layout.regions.iter().map(|region| region.node).collect();
    let mut distinct = nodes.clone();
    distinct.sort_unstable();
    distinct.dedup();
    let mut pieces = distinct.len().min(MOST_PIECES);
    loop {
        row.rows_each = options.rows.max(1).div_ceil(pieces as u64) + SPARE_ROWS;
        row.pieces = vec![PieceRow::default(); pieces];
        if let Some(slab) = options.slab_each(pieces as u64) {
            (row.chunks_each, row.chunk_bytes) = (slab.chunks(), slab.chunk_bytes());
        }
        let shape = || {
            let (rows, bytes) = (options.rows, row.row_bytes);
            TxError::BadOptions(format!("a table cannot have {rows} rows of {bytes} bytes"))
        };
        let layouts = row.layouts().ok_or_else(shape)?;
        let units = |bytes: u64| bytes.div_ceil(at.layout.unit_bytes());
        let mut taken = maps.to_vec();
        if let Some(placed) = place(&mut taken, &nodes, pieces, layouts.bytes().map(units)) {
            return Ok((placed, taken));
        }
        if pieces == MOST_PIECES {
            let free: u64 = maps.iter().map(Map::units_free).sum();
            let needed = layouts.bytes().iter().sum::<u64>() * pieces as u64;
            let free = free * at.layout.unit_bytes();
            return Err(TxError::NoSpace(format!(
                "the table needs {needed} bytes in large pieces; {free} bytes are free in parts"
            )));
        }
        pieces = (pieces * 2).min(MOST_PIECES);
    }
}
