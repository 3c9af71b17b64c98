//! Creating and dropping secondary indexes.
//!
//! An index gets its memory and its row in the catalog first. From then on every transaction that writes to
//! the table enters its rows there. Rows that were written before are entered later, by a client that waits
//! until no transaction is open that does not have the index (`client/indexing.rs`). Then the index is
//! *ready*: it can be searched.

use farpool_fabric::Endpoint;
use farpool_txn::Transaction;

use super::changing::{Turn, change};
use super::leasing::Lacking;
use super::making::{
    check_keys, drop_by, move_to_tombstone, next_record, read_maps, shape_and_place, write_maps,
};
use super::tombstones::clear_tombstones;
use super::{Catalog, CatalogKey, MOST_INDEXES, NAME_BYTES, TABLES, TableRow, key_of, key_of_index};
use crate::environment::Environment;
use crate::error::{Stop, TxError, of_key};
use crate::member::MemberCore;
use crate::table::TableOptions;

/// A secondary index to be created.
pub(crate) struct NewIndex<'a> {
    /// The table, and its first record.
    pub(crate) table: (&'a str, u64),
    pub(crate) name: &'a str,
    pub(crate) key_type: &'a str,
    pub(crate) key_bytes: usize,
    pub(crate) is_unique: bool,
}

/// A table, its key in the catalog, and its indexes.
struct WithIndexes {
    key: CatalogKey,
    row: TableRow,
    indexes: Vec<TableRow>,
}

async fn find_with_indexes<E: Environment>(
    transaction: &Transaction<'_, E::Rules>,
    catalog: &Catalog,
    (table, first_record): (&str, u64),
) -> Result<WithIndexes, Stop> {
    let stop = |error| of_key(error, TABLES);
    let key = key_of(table).ok_or_else(|| TxError::BadName(table.to_owned()))?;
    let found = catalog.find_at(transaction, &key).await.map_err(stop)?;
    let row = found.filter(|row| row.first_record == first_record);
    let row = row.ok_or_else(|| TxError::Dropped(table.to_owned()))?;
    let indexes = catalog.indexes_of(transaction, &row).await.map_err(stop)?;
    Ok(WithIndexes { key, row, indexes })
}

/// Creates an index, or finds one that was created and is not ready.
///
/// # Errors
/// [`TxError::IndexExists`] if it is ready; [`TxError::NoSpace`].
pub(crate) async fn create_index<E: Environment>(
    member: &MemberCore<E>,
    endpoint: &Endpoint,
    new: &NewIndex<'_>,
) -> Result<(), TxError> {
    check_keys(new.key_type, new.key_bytes)?;
    if !(1..=NAME_BYTES).contains(&new.name.len()) || new.name.contains('\0') {
        return Err(TxError::BadName(new.name.to_owned()));
    }
    let lacking = Lacking::default();
    let make = async |transaction: &Transaction<'_, E::Rules>, catalog: &Catalog| {
        let WithIndexes { key, row: mut table, indexes } =
            find_with_indexes::<E>(transaction, catalog, new.table).await?;
        match indexes.iter().find(|index| index.name == new.name) {
            Some(index) if index.key_type != new.key_type => {
                let what =
                    format!("keys of type {} in index {}, not {}", index.key_type, new.name, new.key_type);
                return Err(TxError::OtherShape { table: table.name, what }.into());
            }
            Some(index) if index.is_unique != new.is_unique => {
                let unique = if index.is_unique { "unique" } else { "not unique" };
                let what = format!("an index {} that is {unique}", new.name);
                return Err(TxError::OtherShape { table: table.name, what }.into());
            }
            Some(index) if (index.key_bytes as usize) < new.key_bytes => {
                let what = format!(
                    "keys of up to {} bytes in index {}, not {}",
                    index.key_bytes, new.name, new.key_bytes
                );
                return Err(TxError::OtherShape { table: table.name, what }.into());
            }
            Some(index) if index.is_ready => return Err(TxError::IndexExists(new.name.to_owned()).into()),
            Some(_) => return Ok(()),
            None if indexes.len() == MOST_INDEXES => {
                let what =
                    format!("a table has at most {MOST_INDEXES} indexes: drop one of table {}", table.name);
                return Err(TxError::BadOptions(what).into());
            }
            None => {}
        }
        let (regions, maps) = (member.regions(), read_maps(&member.regions(), transaction, catalog).await?);
        let mut index = TableRow {
            name: new.name.to_owned(),
            first_record: next_record(transaction, catalog).await?,
            key_type: new.key_type.to_owned(),
            key_bytes: new.key_bytes as u32,
            index_of: table.first_record,
            is_unique: new.is_unique,
            place: catalog.place_of_new_index(transaction).await.map_err(|error| of_key(error, TABLES))?,
            ..TableRow::default()
        };
        let options = TableOptions::rows(table.rows().unwrap_or(1));
        let taken = lacking.note(shape_and_place(&regions, &maps, &mut index, &options))?;
        write_maps(transaction, catalog, &maps, &taken).await?;
        table.indexes.push(index.place);
        catalog.insert_row(transaction, &key_of_index(index.place), &index).await?;
        catalog.update_row(transaction, &key, &table).await
    };
    let turn = Turn::wait_for(member, endpoint).await?;
    change(turn, member, endpoint, async |change| {
        clear_tombstones(change).await?;
        let made = change.transact(&make).await;
        lacking.lease_and_try_again(made, change, &make).await
    })
    .await
}

/// Notes that an index has all rows that it should have.
///
/// # Errors
/// [`TxError::NoSuchIndex`] if it was dropped.
pub(crate) async fn mark_index_ready<E: Environment>(
    member: &MemberCore<E>,
    endpoint: &Endpoint,
    table: (&str, u64),
    (number, name): (u64, &str),
) -> Result<(), TxError> {
    let mark = async |transaction: &Transaction<'_, E::Rules>, catalog: &Catalog| {
        let WithIndexes { indexes, .. } = find_with_indexes::<E>(transaction, catalog, table).await?;
        let index = indexes.into_iter().find(|index| index.first_record == number);
        let index = index.ok_or_else(|| TxError::NoSuchIndex(name.to_owned()))?;
        let key = key_of_index(index.place);
        catalog.update_row(transaction, &key, &TableRow { is_ready: true, ..index }).await
    };
    let turn = Turn::wait_for(member, endpoint).await?;
    change(turn, member, endpoint, async |change| change.transact(&mark).await).await
}

/// An index that is to be dropped.
#[derive(Clone, Copy)]
pub(crate) enum ToDrop<'a> {
    /// The one with this name.
    Named(&'a str),
    /// The one with this number and name, unless it is ready: another client has filled it then.
    Unready(u64, &'a str),
}

impl ToDrop<'_> {
    fn is(self, index: &TableRow) -> bool {
        match self {
            ToDrop::Named(name) => index.name == name,
            ToDrop::Unready(number, _) => index.first_record == number && !index.is_ready,
        }
    }
}

/// Drops an index. Its memory is not used for anything else while a snapshot may have it (C4).
///
/// # Errors
/// [`TxError::NoSuchIndex`].
pub(crate) async fn drop_index<E: Environment>(
    member: &MemberCore<E>,
    endpoint: &Endpoint,
    table: (&str, u64),
    dropped: ToDrop<'_>,
) -> Result<(), TxError> {
    let remove = async |transaction: &Transaction<'_, E::Rules>, catalog: &Catalog| {
        let WithIndexes { key, mut row, indexes } =
            find_with_indexes::<E>(transaction, catalog, table).await?;
        let (ToDrop::Named(name) | ToDrop::Unready(_, name)) = dropped;
        let index = indexes.iter().find(|index| dropped.is(index));
        let place = index.ok_or_else(|| TxError::NoSuchIndex(name.to_owned()))?.place;
        move_to_tombstone(transaction, catalog, &key_of_index(place)).await?;
        row.indexes.retain(|&other| other != place);
        catalog.update_row(transaction, &key, &row).await
    };
    drop_by(member, endpoint, &remove).await
}
