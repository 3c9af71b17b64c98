//! Tables whose types of keys and rows are known at run time alone.

use std::ops::Bound;

use farpool_txn::{Direction, Scan, Scanned};
use serde_json::Value;

use super::{KeyShape, ShapeError};
use crate::client::Client;
use crate::error::TxError;
use crate::key::KeyBytes;
use crate::rules::MemberRules;
use crate::table::Table;
use crate::transacting::Tx;

/// A table with keys as JSON, and rows as bytes.
pub struct AnyTable {
    table: Table<(), ()>,
    keys: KeyShape,
}

/// A range of keys, as JSON.
#[derive(Clone, PartialEq, Debug)]
pub struct KeyRange {
    /// Where it begins.
    pub first: Bound<Value>,
    /// Where it ends.
    pub end: Bound<Value>,
}

impl KeyRange {
    /// All keys.
    pub fn all() -> KeyRange {
        KeyRange { first: Bound::Unbounded, end: Bound::Unbounded }
    }
}

/// A scan of a table of any type, and how far it has come.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AnyScan(At);

#[derive(Clone, PartialEq, Eq, Debug)]
enum At {
    /// Of a table that has an order.
    InOrder(Scan),
    /// Of any other: the number of the next record.
    Numbered(u64),
}

/// Some rows of a scan, each with its key, and the rest of it.
pub struct SomeRows {
    /// Keys and rows.
    pub rows: Vec<(Value, Vec<u8>)>,
    /// `None`: there are no more.
    pub next: Option<AnyScan>,
}

impl Client {
    /// Opens a table, whatever the types of its keys and rows are.
    ///
    /// # Errors
    /// As [`open_table`](Self::open_table); [`TxError::BadShape`] if its keys are of a program's own type.
    pub fn open_any(&self, name: &str) -> Result<AnyTable, TxError> {
        let table = self.open_any_table(name)?;
        let keys = KeyShape::named(table.core().key_type())?;
        Ok(AnyTable { table, keys })
    }
}

impl AnyTable {
    /// The type of its keys.
    pub fn keys(&self) -> &KeyShape {
        &self.keys
    }

    fn key(&self, key: &Value) -> Result<KeyBytes, TxError> {
        self.table.core().pad_key(self.keys.encode(key)?)
    }

    /// Whether its keys are kept in order.
    pub fn is_ordered(&self) -> bool {
        self.table.core().keyed().is_ordered()
    }

    /// A scan of a range of its keys, from low keys to high ones. If its keys are not kept in order: of all
    /// rows, in no particular order.
    ///
    /// # Errors
    /// When a bound is not a key of this table; or there is a bound, and its keys are not kept in order.
    pub fn scan(&self, range: &KeyRange) -> Result<AnyScan, TxError> {
        let encode = |bound: &Bound<Value>| {
            Ok::<_, TxError>(match bound {
                Bound::Included(key) => Bound::Included(self.key(key)?),
                Bound::Excluded(key) => Bound::Excluded(self.key(key)?),
                Bound::Unbounded => Bound::Unbounded,
            })
        };
        let (first, end) = (encode(&range.first)?, encode(&range.end)?);
        match (self.is_ordered(), (&range.first, &range.end)) {
            (true, _) => {
                let range = (first.as_ref().map(|key| &key[..]), end.as_ref().map(|key| &key[..]));
                Ok(AnyScan(At::InOrder(Scan::new(range, Direction::Ascending))))
            }
            (false, (Bound::Unbounded, Bound::Unbounded)) => Ok(AnyScan(At::Numbered(0))),
            (false, _) => Err(TxError::Unordered(self.table.name().to_owned())),
        }
    }
}

impl<R: MemberRules> Tx<'_, R> {
    /// The row of a key, if there is one. If rows have no slab, it ends with zeros.
    ///
    /// # Errors
    /// As [`get`](Self::get); or when the JSON is not a key of this table.
    pub async fn get_any(&self, table: &AnyTable, key: &Value) -> Result<Option<Vec<u8>>, TxError> {
        self.get_bytes(&table.table, &table.key(key)?).await
    }

    /// Replaces the row of a key, or inserts it.
    ///
    /// # Errors
    /// As [`upsert`](Self::upsert); or when the JSON is not a key of this table.
    pub async fn put_any(&self, table: &AnyTable, key: &Value, row: Vec<u8>) -> Result<(), TxError> {
        let row = table.table.core().pad_row(row)?;
        self.put_bytes(&table.table, &table.key(key)?, &row).await
    }

    /// Deletes the row of a key.
    ///
    /// # Errors
    /// As [`delete`](Self::delete); or when the JSON is not a key of this table.
    pub async fn delete_any(&self, table: &AnyTable, key: &Value) -> Result<(), TxError> {
        self.delete_bytes(&table.table, &table.key(key)?).await
    }

    /// Some rows of a scan. There may be more though there are none here.
    ///
    /// # Errors
    /// As [`Rows::next`](crate::Rows::next).
    pub async fn scan_any(&self, table: &AnyTable, scan: AnyScan) -> Result<SomeRows, TxError> {
        let with_key = |(key, row): (&[u8], Vec<u8>)| {
            let key = table.keys.decode(key);
            Ok((key.ok_or_else(|| TxError::WrongType(table.table.name().to_owned()))?, row))
        };
        match scan.0 {
            At::InOrder(scan) => {
                let Scanned { rows, next } = self.scan_some(&table.table, scan).await?;
                let rows = rows.iter().filter_map(|(key, row)| Some((&key[..], row.data.clone()?)));
                let rows = rows.map(with_key).collect::<Result<_, TxError>>()?;
                Ok(SomeRows { rows, next: next.map(|scan| AnyScan(At::InOrder(scan))) })
            }
            At::Numbered(first) => {
                let (rows, next) = self.rows_from(&table.table, first).await?;
                let rows =
                    rows.iter().map(|(key, row)| with_key((key, row.clone()))).collect::<Result<_, _>>()?;
                Ok(SomeRows { rows, next: next.map(|number| AnyScan(At::Numbered(number))) })
            }
        }
    }
}

impl From<ShapeError> for TxError {
    fn from(error: ShapeError) -> TxError {
        TxError::BadShape(error)
    }
}
