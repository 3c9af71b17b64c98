//! The operations of a transaction's body.

use std::borrow::Borrow;

use farpool_txn::{Cut, KeyError, Shipped, Transaction};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::catalog::{Catalog, TableInfo, TableRow};
use crate::error::{Stop, TxError, of_key};
use crate::key::Key;
use crate::rules::MemberRules;
use crate::table::Table;

/// An open transaction. It reads one snapshot and its own writes. Its writes take effect when its body
/// returns.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use farpool_namdb::{Table, Tx, TxError};
///
/// type Accounts = Table<u64, i64>;
///
/// async fn withdraw(tx: &mut Tx<'_>, accounts: &Accounts, from: u64, cents: i64) -> Result<(), TxError> {
///     let there = tx.get(accounts, from).await?.ok_or_else(|| TxError::roll_back("no such account"))?;
///     tx.update(accounts, from, there - cents).await
/// }
/// # Ok(())
/// # }
/// ```
pub struct Tx<'a, R: MemberRules = Shipped> {
    transaction: Transaction<'a, R>,
    catalog: &'a Catalog,
    /// There was a conflict: the body is run again, whatever it does with the error.
    is_again: bool,
}

impl<'a, R: MemberRules> Tx<'a, R> {
    pub(crate) fn new(transaction: Transaction<'a, R>, catalog: &'a Catalog) -> Self {
        Tx { transaction, catalog, is_again: false }
    }

    /// The transaction, to be committed. `None`: begin again.
    pub(crate) fn into_inner(self) -> Option<Transaction<'a, R>> {
        (!self.is_again).then_some(self.transaction)
    }

    /// Its snapshot.
    pub fn cut(&self) -> &Cut {
        self.transaction.cut()
    }

    /// How often tables had been made and dropped, as of its snapshot.
    pub(crate) fn schema(&self) -> u64 {
        self.catalog.changes(self.cut())
    }

    /// The row of a key, if there is one.
    ///
    /// # Errors
    /// When it cannot be read, or the table was dropped.
    pub async fn get<K: Key + ?Sized, V: DeserializeOwned>(
        &mut self,
        table: &Table<K, V>,
        key: impl Borrow<K>,
    ) -> Result<Option<V>, TxError> {
        self.check(table).await?;
        let key = table.encode_key(key.borrow())?;
        let found = table.keyed().get(&self.transaction, &key).await;
        let row = self.told(table.name(), found)?;
        row.data.map(|data| table.decode(&data)).transpose()
    }

    /// Inserts a row for a key that has none.
    ///
    /// # Errors
    /// [`TxError::Duplicate`] if the key has a row; [`TxError::Full`]; or when the table was dropped.
    pub async fn insert<K: Key + ?Sized, V: Serialize>(
        &mut self,
        table: &Table<K, V>,
        key: impl Borrow<K>,
        row: impl Borrow<V>,
    ) -> Result<(), TxError> {
        self.check(table).await?;
        let (key, data) = (table.encode_key(key.borrow())?, table.encode(row.borrow())?);
        let done = table.keyed().insert(&mut self.transaction, &key, &data).await;
        self.told(table.name(), done).map(drop)
    }

    /// Replaces the row of a key.
    ///
    /// # Errors
    /// [`TxError::NoSuchKey`] if the key has no row; or when the table was dropped.
    pub async fn update<K: Key + ?Sized, V: Serialize>(
        &mut self,
        table: &Table<K, V>,
        key: impl Borrow<K>,
        row: impl Borrow<V>,
    ) -> Result<(), TxError> {
        self.check(table).await?;
        let (key, data) = (table.encode_key(key.borrow())?, table.encode(row.borrow())?);
        let done = table.keyed().update(&mut self.transaction, &key, &data).await;
        self.told(table.name(), done).map(drop)
    }

    /// Deletes a key's row.
    ///
    /// # Errors
    /// As [`update`](Self::update).
    pub async fn delete<K: Key + ?Sized, V>(
        &mut self,
        table: &Table<K, V>,
        key: impl Borrow<K>,
    ) -> Result<(), TxError> {
        self.check(table).await?;
        let key = table.encode_key(key.borrow())?;
        let done = table.keyed().delete(&mut self.transaction, &key).await;
        self.told(table.name(), done).map(drop)
    }

    /// Checks that this transaction's snapshot has the table. Reads the catalog only if tables were made or
    /// dropped since the last check.
    async fn check<K: Key + ?Sized, V>(&mut self, table: &Table<K, V>) -> Result<(), TxError> {
        let schema = self.schema();
        if table.checked_at() == schema || !R::looks_at_the_catalog() {
            return Ok(());
        }
        if schema < table.known_since() {
            // This snapshot is older than the one in which the table was found. Another try gets a later one.
            self.is_again = true;
            return Err(TxError::Conflict);
        }
        match self.find_table(table.name()).await? {
            Some(row) if row.first_record == table.first_record() => {
                table.note_existing(schema);
                Ok(())
            }
            _ => Err(TxError::Dropped(table.name().to_owned())),
        }
    }

    /// The row of a table, if this snapshot has that table.
    pub(crate) async fn find_table(&mut self, name: &str) -> Result<Option<TableRow>, TxError> {
        let found = self.catalog.find(&self.transaction, name).await;
        self.told("of tables", found)
    }

    /// All tables of this snapshot, in the order of their names.
    pub(crate) async fn tables(&mut self) -> Result<Vec<TableInfo>, TxError> {
        let found = self.catalog.all(&self.transaction).await;
        self.told("of tables", found)
    }

    /// Converts an error. After a conflict, the body is run again, whatever it does with the error.
    pub(crate) fn told<T>(&mut self, table: &str, found: Result<T, KeyError>) -> Result<T, TxError> {
        found.map_err(|error| match of_key(error, table) {
            Stop::For(error) => error,
            Stop::Again(error) => {
                self.is_again = true;
                error
            }
        })
    }
}
