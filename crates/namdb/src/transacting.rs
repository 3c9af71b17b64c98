//! The operations of a transaction's body.

mod scanning;

use std::borrow::Borrow;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

use farpool_txn::hash::IndexError;
use farpool_txn::tree::TreeError;
use farpool_txn::{Cut, KeyError, KeyedTable, ReadError, Shipped, Transaction};
use futures_util::future::join_all;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::catalog::{Catalog, CatalogKey, TableInfo, TableRow, key_of, key_of_index};
use crate::error::{Stop, TxError, of_key};
use crate::key::{Key, KeyBytes};
use crate::rules::MemberRules;
use crate::table::{Noted, Table, TableCore};

/// Most operations of one call that are under way at the same time: over a network they hide each other's
/// waiting.
const AT_ONCE: usize = 16;

/// An open transaction. It reads one snapshot and its own writes. Its writes take effect when its body
/// returns.
///
/// Several operations may be under way at the same time, for example by `futures::join!`; their messages to
/// the nodes then travel together. [`get_many`](Self::get_many) and the like do that for one table. Writes of
/// the same row that are under way together take effect one after the other, in any order. Poll operations
/// that have begun until they end: one that is dropped half-way, as `futures::try_join!` does after an error,
/// may leave a place of the table unused for ever, and may keep the client from connecting again after a
/// failure.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use farpool_namdb::{Table, Tx, TxError};
///
/// type Accounts = Table<u64, i64>;
///
/// async fn move_all(tx: &Tx<'_>, accounts: &Accounts, from: u64, to: u64) -> Result<(), TxError> {
///     let rows = tx.get_many(accounts, [from, to]).await?;
///     let [Some(there), Some(here)] = rows[..] else { return Err(TxError::roll_back("no such account")) };
///     tx.update_many(accounts, [(from, 0), (to, here + there)]).await
/// }
/// # Ok(())
/// # }
/// ```
pub struct Tx<'a, R: MemberRules = Shipped> {
    transaction: Transaction<'a, R>,
    catalog: &'a Catalog,
    /// The first records of tables that cannot grow: for them, *full* is an error like others.
    vain: Vec<u64>,
    /// There was a conflict: the body is run again, whatever it does with the error.
    is_again: Cell<bool>,
    /// A table that was full. It has to grow before the body is run again.
    full: RefCell<Option<FullTable>>,
    /// Tables with secondary indexes to which it has written.
    indexed: RefCell<Vec<Rc<TableCore>>>,
    /// A table lies in regions that are not open. They have to be opened before the body is run again.
    lacks_regions: Cell<bool>,
}

/// A table that had no room for a row.
pub(crate) struct FullTable {
    /// Its name, and its key in the catalog.
    pub(crate) name: String,
    pub(crate) key: CatalogKey,
    pub(crate) first_record: u64,
    /// It is an index of a table.
    pub(crate) is_index: bool,
    /// The pieces that it had.
    pub(crate) pieces: usize,
    /// The slab was full, not the index. Room for long rows becomes free once no snapshot needs older ones.
    pub(crate) is_slab: bool,
    /// So many tries look at all blocks of the slab that the member has.
    pub(crate) tries: u64,
}

impl FullTable {
    /// The error for this, if the table cannot grow.
    pub(crate) fn error(&self) -> TxError {
        if self.is_slab {
            return TxError::NoSpace(format!(
                "table {} has no room for another long row: end long transactions, drop tables, or add a node to the \
                 pool",
                self.name
            ));
        }
        TxError::Full(self.name.clone())
    }
}

impl<'a, R: MemberRules> Tx<'a, R> {
    /// Tables with these first records cannot grow.
    pub(crate) fn new(transaction: Transaction<'a, R>, catalog: &'a Catalog, vain: Vec<u64>) -> Self {
        let (is_again, lacks_regions) = (Cell::new(false), Cell::new(false));
        let (full, indexed) = (RefCell::default(), RefCell::default());
        Tx { transaction, catalog, vain, is_again, full, indexed, lacks_regions }
    }

    /// The table that has to grow before this transaction is tried again, if there is one.
    pub(crate) fn take_full(&self) -> Option<FullTable> {
        self.full.take()
    }

    /// Whether regions have to be opened before this transaction is tried again.
    pub(crate) fn lacks_regions(&self) -> bool {
        self.lacks_regions.get()
    }

    /// The tables with secondary indexes to which it has written.
    pub(crate) fn take_indexed(&self) -> Vec<Rc<TableCore>> {
        self.indexed.take()
    }

    /// Removes entries of a table's secondary indexes that nobody needs. Returns how many were looked at.
    pub(crate) async fn remove_stale(&self, table: &TableCore) -> Result<u64, TxError> {
        let keyed = self.check(table).await?;
        let removed = keyed.remove_stale(&self.transaction).await;
        self.told(table.name(), removed)
    }

    /// The transaction, to be committed. `None`: begin again.
    pub(crate) fn into_inner(self) -> Option<Transaction<'a, R>> {
        (!self.is_again.get()).then_some(self.transaction)
    }

    /// Its snapshot.
    pub fn cut(&self) -> &Cut {
        self.transaction.cut()
    }

    /// How often the catalog had changed (tables created, grown or dropped), as of its snapshot.
    pub(crate) fn schema(&self) -> u64 {
        self.catalog.changes(self.cut())
    }

    /// The row of a key, if there is one.
    ///
    /// # Errors
    /// When it cannot be read, or the table was dropped.
    pub async fn get<K: Key + ?Sized, V: DeserializeOwned>(
        &self,
        table: &Table<K, V>,
        key: impl Borrow<K>,
    ) -> Result<Option<V>, TxError> {
        let key = table.encode_key(key.borrow())?;
        let row = self.get_bytes(table, &key).await?;
        row.map(|data| table.decode(&data)).transpose()
    }

    /// The encoded row of an encoded key.
    pub(crate) async fn get_bytes<K: ?Sized, V>(
        &self,
        table: &Table<K, V>,
        key: &KeyBytes,
    ) -> Result<Option<Vec<u8>>, TxError> {
        let keyed = self.check(table.core()).await?;
        let found = keyed.get(&self.transaction, key).await;
        Ok(self.told_of(table, &keyed, found)?.data)
    }

    /// The rows of several keys, in the order of the keys. They are read together: over a network, up to 16
    /// of them take about as long as [`get`](Self::get) does for one.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub async fn get_many<K: Key + ?Sized, V: DeserializeOwned>(
        &self,
        table: &Table<K, V>,
        keys: impl IntoIterator<Item = impl Borrow<K>>,
    ) -> Result<Vec<Option<V>>, TxError> {
        together(keys, async |key| self.get(table, key).await).await
    }

    /// The row of a key, which this transaction then counts as having written: if another transaction
    /// replaces or deletes it before this one commits, one of the two is run again. A snapshot alone does not
    /// ensure that. Say that two doctors are on call, and that each of two transactions checks this and takes
    /// another one of them off call: both would commit, and nobody would be on call (*write skew*). It does
    /// not happen if each transaction reads both rows by this. A key that has no row is not protected.
    ///
    /// # Errors
    /// As [`get`](Self::get); or because of a conflict.
    pub async fn get_for_update<K: Key + ?Sized, V: DeserializeOwned>(
        &self,
        table: &Table<K, V>,
        key: impl Borrow<K>,
    ) -> Result<Option<V>, TxError> {
        let keyed = self.check(table.core()).await?;
        let key = table.encode_key(key.borrow())?;
        let found = keyed.get_for_update(&self.transaction, &key).await;
        let row = self.told_of(table, &keyed, found)?;
        row.data.map(|data| table.decode(&data)).transpose()
    }

    /// Inserts a row for a key that has none.
    ///
    /// # Errors
    /// [`TxError::Duplicate`] if the key has a row; [`TxError::Full`] or [`TxError::Crowded`]; or when the
    /// table was dropped.
    pub async fn insert<K: Key + ?Sized, V: Serialize>(
        &self,
        table: &Table<K, V>,
        key: impl Borrow<K>,
        row: impl Borrow<V>,
    ) -> Result<(), TxError> {
        let keyed = self.check_to_write(table.core()).await?;
        let (key, data) = (table.encode_key(key.borrow())?, table.encode(row.borrow())?);
        let done = keyed.insert(&self.transaction, &key, &data).await;
        self.told_of(table, &keyed, done).map(drop)
    }

    /// Inserts rows for several keys, together.
    ///
    /// # Errors
    /// As [`insert`](Self::insert). Some of the rows may be among this transaction's writes then.
    pub async fn insert_many<K: Key + ?Sized, V: Serialize>(
        &self,
        table: &Table<K, V>,
        rows: impl IntoIterator<Item = (impl Borrow<K>, impl Borrow<V>)>,
    ) -> Result<(), TxError> {
        together(rows, async |(key, row)| self.insert(table, key, row).await).await.map(drop)
    }

    /// Replaces the row of a key.
    ///
    /// # Errors
    /// [`TxError::NoSuchKey`] if the key has no row; or when the table was dropped.
    pub async fn update<K: Key + ?Sized, V: Serialize>(
        &self,
        table: &Table<K, V>,
        key: impl Borrow<K>,
        row: impl Borrow<V>,
    ) -> Result<(), TxError> {
        let keyed = self.check_to_write(table.core()).await?;
        let (key, data) = (table.encode_key(key.borrow())?, table.encode(row.borrow())?);
        let done = keyed.update(&self.transaction, &key, &data).await;
        self.told_of(table, &keyed, done).map(drop)
    }

    /// Replaces the rows of several keys, together.
    ///
    /// # Errors
    /// As [`update`](Self::update). Some of the rows may be among this transaction's writes then.
    pub async fn update_many<K: Key + ?Sized, V: Serialize>(
        &self,
        table: &Table<K, V>,
        rows: impl IntoIterator<Item = (impl Borrow<K>, impl Borrow<V>)>,
    ) -> Result<(), TxError> {
        together(rows, async |(key, row)| self.update(table, key, row).await).await.map(drop)
    }

    /// Replaces the row of a key by what `change` makes of it; returns the new row. `None`: the key has no
    /// row. `change` is called again if another operation of this transaction that is under way has written
    /// the row meanwhile.
    ///
    /// # Errors
    /// As [`update`](Self::update), but for [`TxError::NoSuchKey`]; or when the row cannot be decoded.
    pub async fn read_modify_write<K: Key + ?Sized, V: Serialize + DeserializeOwned>(
        &self,
        table: &Table<K, V>,
        key: impl Borrow<K>,
        mut change: impl FnMut(V) -> V,
    ) -> Result<Option<V>, TxError> {
        let keyed = self.check_to_write(table.core()).await?;
        let key = table.encode_key(key.borrow())?;
        let change = |before: &[u8]| {
            let after = change(table.decode(before)?);
            Ok((table.encode(&after)?, after))
        };
        let done = keyed.read_modify_write(&self.transaction, &key, change).await;
        self.told_of(table, &keyed, done)?
    }

    /// Replaces the row of a key, or inserts it if there is none.
    ///
    /// # Errors
    /// As [`insert`](Self::insert), but for [`TxError::Duplicate`].
    pub async fn upsert<K: Key + ?Sized, V: Serialize>(
        &self,
        table: &Table<K, V>,
        key: impl Borrow<K>,
        row: impl Borrow<V>,
    ) -> Result<(), TxError> {
        let (key, data) = (table.encode_key(key.borrow())?, table.encode(row.borrow())?);
        self.put_bytes(table, &key, &data).await
    }

    /// Replaces the row of an encoded key by an encoded row, or inserts it.
    pub(crate) async fn put_bytes<K: ?Sized, V>(
        &self,
        table: &Table<K, V>,
        key: &KeyBytes,
        row: &[u8],
    ) -> Result<(), TxError> {
        let keyed = self.check_to_write(table.core()).await?;
        let done = keyed.upsert(&self.transaction, key, row).await;
        self.told_of(table, &keyed, done).map(drop)
    }

    /// Deletes a key's row.
    ///
    /// # Errors
    /// As [`update`](Self::update).
    pub async fn delete<K: Key + ?Sized, V>(
        &self,
        table: &Table<K, V>,
        key: impl Borrow<K>,
    ) -> Result<(), TxError> {
        let key = table.encode_key(key.borrow())?;
        self.delete_bytes(table, &key).await
    }

    /// Deletes the row of an encoded key.
    pub(crate) async fn delete_bytes<K: ?Sized, V>(
        &self,
        table: &Table<K, V>,
        key: &KeyBytes,
    ) -> Result<(), TxError> {
        let keyed = self.check_to_write(table.core()).await?;
        let done = keyed.delete(&self.transaction, key).await;
        self.told_of(table, &keyed, done).map(drop)
    }

    /// Checks that this transaction's snapshot has the table, and returns its records with their indexes.
    /// Reads the catalog only if it has changed since the last check.
    pub(crate) async fn check(&self, table: &TableCore) -> Result<Rc<KeyedTable>, TxError> {
        let schema = self.schema();
        if table.checked_at() == schema || !R::looks_at_the_catalog() {
            return Ok(table.keyed());
        }
        if schema < table.known_since() {
            // This snapshot is older than the one in which the table was found. Another try gets a later one.
            return Err(self.again());
        }
        let row = self.find_table(table.name()).await?;
        let row = row.filter(|row| row.first_record == table.first_record());
        let row = row.ok_or_else(|| TxError::Dropped(table.name().to_owned()))?;
        let indexes = self.catalog.indexes_of(&self.transaction, &row).await;
        let indexes = self.told("of tables", indexes)?;
        match table.note_existing(&row, indexes, schema, self.transaction.memory())? {
            Noted::Opened => Ok(table.keyed()),
            Noted::TooOld => Err(self.again()),
            Noted::LacksRegions => {
                self.lacks_regions.set(true);
                Err(self.again())
            }
        }
    }

    /// The same for a table to which the transaction will write.
    async fn check_to_write(&self, table: &Rc<TableCore>) -> Result<Rc<KeyedTable>, TxError> {
        let keyed = self.check(table).await?;
        table.check_declared()?;
        if keyed.has_secondary() {
            let mut indexed = self.indexed.borrow_mut();
            if !indexed.iter().any(|other| Rc::ptr_eq(other, table)) {
                indexed.push(table.clone());
            }
        }
        Ok(keyed)
    }

    /// The body is to be run again.
    fn again(&self) -> TxError {
        self.is_again.set(true);
        TxError::Conflict
    }

    /// The row of a table, if this snapshot has that table.
    pub(crate) async fn find_table(&self, name: &str) -> Result<Option<TableRow>, TxError> {
        let found = self.catalog.find(&self.transaction, name).await;
        self.told("of tables", found)
    }

    /// All tables of this snapshot, in the order of their names.
    pub(crate) async fn tables(&self) -> Result<Vec<TableInfo>, TxError> {
        let found = self.catalog.all(&self.transaction).await;
        self.told("of tables", found)
    }

    /// Converts an error of an operation on a table. Notes a table that was full: the body is run again once
    /// it has grown.
    fn told_of<K: ?Sized, V, T>(
        &self,
        table: &Table<K, V>,
        keyed: &KeyedTable,
        found: Result<T, KeyError>,
    ) -> Result<T, TxError> {
        if let Some(full) = found.as_ref().err().and_then(|error| full_table(table.core(), keyed, error))
            && !self.vain.contains(&full.first_record)
        {
            self.full.replace(Some(full));
            self.is_again.set(true);
        }
        if let Err(KeyError::DuplicateBy(number)) = found {
            let index = table.core().index(number).map_or_else(|| number.to_string(), |index| index.name);
            return Err(TxError::DuplicateIn { table: table.name().to_owned(), index });
        }
        self.told(table.name(), found)
    }

    /// Converts an error. After a conflict, the body is run again, whatever it does with the error.
    pub(crate) fn told<T>(&self, table: &str, found: Result<T, KeyError>) -> Result<T, TxError> {
        found.map_err(|error| match of_key(error, table) {
            Stop::For(error) => error,
            Stop::Again(error) => {
                self.is_again.set(true);
                error
            }
        })
    }
}

/// The table that an operation has found full, or the index of it.
fn full_table(table: &TableCore, keyed: &KeyedTable, error: &KeyError) -> Option<FullTable> {
    let is_slab = matches!(error, KeyError::Record(ReadError::NoSpace { .. }));
    let (name, first_record) = (table.name().to_owned(), table.first_record());
    match error {
        KeyError::Record(ReadError::NoSpace { .. })
        | KeyError::Index(IndexError::Full)
        | KeyError::Order(TreeError::Full) => {
            let (key, pieces) = (key_of(&name)?, keyed.table().pieces());
            let tries = keyed.table().tries_of_slab();
            Some(FullTable { name, key, first_record, is_index: false, pieces, is_slab, tries })
        }
        KeyError::By(number, TreeError::Full) => {
            let index = table.index(*number)?;
            let (name, key) = (format!("{name}, index {}", index.name), key_of_index(index.place));
            let pieces = index.pieces();
            Some(FullTable { name, key, first_record: *number, is_index: true, pieces, is_slab, tries: 0 })
        }
        _ => None,
    }
}

/// Runs an operation for each of some items, several at the same time; the results are in the items' order.
/// After an error, those that have begun are finished: a WRITE that is dropped half-way may land at any time,
/// and may keep the client from connecting again.
async fn together<I, T>(
    items: impl IntoIterator<Item = I>,
    run: impl AsyncFn(I) -> Result<T, TxError>,
) -> Result<Vec<T>, TxError> {
    let mut items = items.into_iter().peekable();
    let mut done = Vec::with_capacity(items.size_hint().0);
    while items.peek().is_some() {
        for ended in join_all(items.by_ref().take(AT_ONCE).map(|item| run(item))).await {
            done.push(ended?);
        }
    }
    Ok(done)
}
