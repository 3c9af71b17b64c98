//! Operations on many rows of a table: scans, and those that fill and verify indexes.

use std::ops::RangeBounds;

use farpool_txn::{Direction, Fault, FoundBy, Scan, Scanned, Verified};
use serde::de::DeserializeOwned;

use super::Tx;
use crate::error::TxError;
use crate::key::{Key, KeyBytes, OwnedKey};
use crate::rows::{Rows, RowsBy};
use crate::rules::MemberRules;
use crate::table::{Declared, Index, Known, Table};

impl<'a, R: MemberRules> Tx<'a, R> {
    /// The rows of the keys in a range, in the order of the keys. The table must be
    /// [ordered](crate::TableOptions::ordered). Another transaction may insert rows into the range meanwhile:
    /// this one's snapshot does not have them.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use farpool_namdb::{Table, Tx, TxError};
    ///
    /// async fn total(tx: &Tx<'_>, orders: &Table<(u32, u64), i64>, customer: u32) -> Result<i64, TxError> {
    ///     let (mut total, mut rows) = (0, tx.scan(orders, (customer, 0)..=(customer, u64::MAX)));
    ///     while let Some((_, cents)) = rows.next().await? {
    ///         total += cents;
    ///     }
    ///     Ok(total)
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn scan<'t, K: OwnedKey, V: DeserializeOwned>(
        &'t self,
        table: &'t Table<K, V>,
        range: impl RangeBounds<K>,
    ) -> Rows<'t, 'a, K, V, R> {
        Rows::new(self, table, range, Direction::Ascending)
    }

    /// As [`scan`](Self::scan), from the highest key to the lowest.
    pub fn scan_rev<'t, K: OwnedKey, V: DeserializeOwned>(
        &'t self,
        table: &'t Table<K, V>,
        range: impl RangeBounds<K>,
    ) -> Rows<'t, 'a, K, V, R> {
        Rows::new(self, table, range, Direction::Descending)
    }

    /// The rows in a range of keys of a secondary index, in the order of these keys. Several rows may have
    /// the same key; these come in no particular order. Each comes with its key there, and with its own. A
    /// row whose key this transaction changes meanwhile, to one that lies ahead, is found again.
    pub fn scan_by<'t, K: OwnedKey, V: DeserializeOwned, I: OwnedKey>(
        &'t self,
        table: &'t Table<K, V>,
        index: &'t Index<V, I>,
        range: impl RangeBounds<I>,
    ) -> RowsBy<'t, 'a, K, V, I, R> {
        RowsBy::new(self, table, index, range, Direction::Ascending)
    }

    /// As [`scan_by`](Self::scan_by), from the highest key to the lowest.
    pub fn scan_by_rev<'t, K: OwnedKey, V: DeserializeOwned, I: OwnedKey>(
        &'t self,
        table: &'t Table<K, V>,
        index: &'t Index<V, I>,
        range: impl RangeBounds<I>,
    ) -> RowsBy<'t, 'a, K, V, I, R> {
        RowsBy::new(self, table, index, range, Direction::Descending)
    }

    /// The rows that have this key in a secondary index, each with its own key, in no particular order.
    ///
    /// # Errors
    /// As [`RowsBy::next`]; [`TxError::OtherShape`] if the keys of the index are of another type.
    pub async fn get_by<K: OwnedKey, V: DeserializeOwned, I: OwnedKey, Q: Key + ?Sized>(
        &self,
        table: &Table<K, V>,
        index: &Index<V, I>,
        key: &Q,
    ) -> Result<Vec<(K, V)>, TxError> {
        if Q::type_name() != I::type_name() {
            let what = format!("keys of type {} in index {}", I::type_name(), index.name());
            return Err(TxError::OtherShape { table: table.name().to_owned(), what });
        }
        let rows = RowsBy::of_key(self, table, index, KeyBytes::of(key)).collect().await?;
        Ok(rows.into_iter().map(|(_, key, row)| (key, row)).collect())
    }

    /// The index that a program has declared for a table, as this snapshot has it.
    pub(crate) async fn index_of<K: ?Sized, V>(
        &self,
        table: &Table<K, V>,
        declared: &Declared,
    ) -> Result<Known, TxError> {
        match self.known_index(table, declared).await? {
            known if known.is_ready || !R::searches_ready_indexes_alone() => Ok(known),
            _ => Err(TxError::IndexNotReady(declared.name().to_owned())),
        }
    }

    /// The same, whether it can be searched or not.
    pub(crate) async fn known_index<K: ?Sized, V>(
        &self,
        table: &Table<K, V>,
        declared: &Declared,
    ) -> Result<Known, TxError> {
        let keyed = self.check(table.core()).await?;
        let is_there = |known: &Known| keyed.secondary_numbers().any(|number| number == known.number);
        let known = declared.known().filter(is_there);
        known.ok_or_else(|| TxError::NoSuchIndex(declared.name().to_owned()))
    }

    /// Enters some rows of a table in an index, from the record with this number on. Returns the next one.
    pub(crate) async fn fill_index<K: ?Sized, V>(
        &self,
        table: &Table<K, V>,
        (index, name): (u64, &str),
        first: u64,
    ) -> Result<Option<u64>, TxError> {
        let keyed = self.check(table.core()).await?;
        if !keyed.secondary_numbers().any(|number| number == index) {
            return Err(TxError::NoSuchIndex(name.to_owned()));
        }
        let filled = keyed.fill(&self.transaction, index, first).await;
        self.told_of(table, &keyed, filled)
    }

    /// Some encoded rows with their encoded keys, from the record with this number on. Returns the next one.
    pub(crate) async fn rows_from<K: ?Sized, V>(
        &self,
        table: &Table<K, V>,
        first: u64,
    ) -> Result<(Vec<(Vec<u8>, Vec<u8>)>, Option<u64>), TxError> {
        let keyed = self.check(table.core()).await?;
        let found = keyed.rows_from(&self.transaction, first).await;
        self.told_of(table, &keyed, found)
    }

    /// Some rows of a scan of a secondary index, and the rest of it.
    pub(crate) async fn scan_some_by<K: ?Sized, V>(
        &self,
        table: &Table<K, V>,
        index: u64,
        scan: Scan,
    ) -> Result<Scanned<FoundBy>, TxError> {
        let keyed = self.check(table.core()).await?;
        let found = keyed.scan_by(&self.transaction, index, scan).await;
        self.told_of(table, &keyed, found)
    }

    /// Some rows of a scan, and the rest of it.
    pub(crate) async fn scan_some<K: ?Sized, V>(
        &self,
        table: &Table<K, V>,
        scan: Scan,
    ) -> Result<Scanned, TxError> {
        let keyed = self.check(table.core()).await?;
        let found = keyed.scan(&self.transaction, scan).await;
        self.told_of(table, &keyed, found)
    }

    /// Whether some records of a table, from this one on, are found where they should be.
    pub(crate) async fn verify_some<K: ?Sized, V>(
        &self,
        table: &Table<K, V>,
        first: u64,
    ) -> Result<Verified, TxError> {
        let keyed = self.check(table.core()).await?;
        table.core().check_ready()?;
        let found = keyed.verify_some(&self.transaction, first).await;
        self.told_of(table, &keyed, found)
    }

    /// Whether the order of a table's keys leads to so many rows, and its indexes to so many.
    pub(crate) async fn verify_count<K: ?Sized, V>(
        &self,
        table: &Table<K, V>,
        counts: (u64, u64),
    ) -> Result<Option<Fault>, TxError> {
        let keyed = self.check(table.core()).await?;
        let found = keyed.verify_count(&self.transaction, counts).await;
        self.told_of(table, &keyed, found)
    }
}
