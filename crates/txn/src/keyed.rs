//! Tables whose records are known by keys: an [`Index`] on a [`Table`] (`docs/src/txn.md`, *keys*).
//!
//! K1. The index has no versions: that a key has an entry does not mean that there is a record. The
//!     snapshot's version of the record says whether there is one.
//! K2. A key has its entry before anything of the record is committed. So what a snapshot sees is found.
//! K3. If the table has an order, a [`Tree`] on its keys, the same holds for the entries there.
//! K4. The same holds for its secondary indexes (`secondary.rs`), each a [`Tree`] on keys that the rows have
//!     there. A row may have entries that it does not need: a row that is found has the key of its entry.

mod removing;
mod scanning;
mod secondary;
mod unique;
mod verifying;

use std::rc::Rc;

use crate::error::{BeginError, ReadError};
use crate::hash::{Index, IndexError, IndexRules, Numbered};
use crate::rules::{Rules, Shipped};
use crate::table::Table;
use crate::transaction::{Row, Transaction};
use crate::tree::{Tree, TreeError};

pub use scanning::{Direction, FoundBy, Scan, Scanned};
pub(crate) use secondary::Entered;
pub use secondary::{BadRow, KeyOfRow, Secondary, StaleEntries};
pub(crate) use unique::{TakenKey, TakenKeys};
pub use verifying::{Fault, Verified};

/// Why an operation by key failed.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The transaction sees a record with that key.
    #[error("duplicate key")]
    Duplicate,
    /// The transaction sees no record with that key.
    #[error("no such key")]
    NoSuchKey,
    /// The key's record cannot be found.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The key has no place in the order of keys.
    #[error(transparent)]
    Order(#[from] TreeError),
    /// The table has no order.
    #[error("the table's keys are not kept in order")]
    Unordered,
    /// The key of a row has no place in the secondary index with this number.
    #[error("index {0}: {1}")]
    By(u64, TreeError),
    /// Another row that the transaction sees has the same key in the unique index with this number.
    #[error("duplicate key in index {0}")]
    DuplicateBy(u64),
    /// The table has no secondary index with this number.
    #[error("the table has no index with number {0}")]
    NoSuchIndex(u64),
    /// A row has no proper key in a secondary index.
    #[error(transparent)]
    BadRow(#[from] BadRow),
    /// The record cannot be read, or taken for a write.
    #[error(transparent)]
    Record(#[from] ReadError),
    /// No transaction can begin.
    #[error(transparent)]
    Begin(#[from] BeginError),
}

/// A table with keys, as one thread works with it.
pub struct KeyedTable<I = Shipped> {
    table: Table,
    index: Index<I>,
    order: Option<Tree>,
    secondary: Vec<Rc<Secondary>>,
}

impl<I: IndexRules> KeyedTable<I> {
    /// A table with its index. `None`: they do not have the same number of records.
    pub fn new(table: Table, index: Index<I>) -> Option<Self> {
        let fits = table.records() == index.layout().records();
        fits.then_some(KeyedTable { table, index, order: None, secondary: Vec::new() })
    }

    /// The same, with an index in the order of its keys.
    pub fn with_order(self, order: Tree) -> Self {
        KeyedTable { order: Some(order), ..self }
    }

    /// The same, with secondary indexes.
    pub fn with_secondary(self, secondary: Vec<Secondary>) -> Self {
        KeyedTable { secondary: secondary.into_iter().map(Rc::new).collect(), ..self }
    }

    /// Whether it has secondary indexes.
    pub fn has_secondary(&self) -> bool {
        !self.secondary.is_empty()
    }

    /// The numbers of its secondary indexes.
    pub fn secondary_numbers(&self) -> impl Iterator<Item = u64> {
        self.secondary.iter().map(|index| index.number())
    }

    /// The secondary index with this number.
    pub(crate) fn secondary(&self, number: u64) -> Result<&Rc<Secondary>, KeyError> {
        let found = self.secondary.iter().find(|secondary| secondary.number() == number);
        found.ok_or(KeyError::NoSuchIndex(number))
    }

    /// Whether it has an index in the order of its keys.
    pub fn is_ordered(&self) -> bool {
        self.order.is_some()
    }

    /// Remembers what the same table remembered of its indexes. It had no more pieces, and perhaps other
    /// indexes.
    pub fn remember_what_is_known_of(&self, before: &KeyedTable<I>) {
        self.index.remember_splits_of(&before.index);
        if let (Some(order), Some(before)) = (&self.order, &before.order) {
            order.remember_leaves_of(before);
        }
        for secondary in &self.secondary {
            if let Ok(before) = before.secondary(secondary.number()) {
                secondary.continue_from(before);
            }
        }
    }

    /// The table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Reads the record of a key.
    ///
    /// # Errors
    /// As [`Transaction::read`]; or when the index cannot be read.
    pub async fn get<R: Rules>(&self, transaction: &Transaction<'_, R>, key: &[u8]) -> Result<Row, KeyError> {
        // A row that is read is often written later.
        let read = async |number| transaction.read_held_to_write(&self.table, number).await;
        match self.find(transaction, key, read).await? {
            Some((number, row)) => Ok(transaction.whole(&self.table, number, row).await?),
            None => Ok(Row::never_written()),
        }
    }

    /// The number of a key's record, and the record as `read` finds it; both are read together. The
    /// transaction remembers the number.
    async fn find<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &[u8],
        read: impl AsyncFn(u64) -> Result<Row, ReadError>,
    ) -> Result<Option<(u64, Row)>, KeyError> {
        if let Some(number) = transaction.number_of(&self.table, key) {
            return Ok(Some((number, read(number).await?)));
        }
        let Some((number, row)) = self.index.find_with(transaction.memory(), key, read).await? else {
            return Ok(None);
        };
        transaction.note_number(&self.table, key, number);
        Ok(Some((number, row?)))
    }

    async fn find_or_insert<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &[u8],
    ) -> Result<Numbered, KeyError> {
        match transaction.number_of(&self.table, key) {
            Some(number) => Ok(Numbered::Found(number)),
            None => Ok(self.index.find_or_insert(transaction.memory(), key).await?),
        }
    }

    /// Makes a record for a key that has none, once the transaction commits. Returns what this transaction
    /// saw there before: a record that was deleted or never written.
    ///
    /// # Errors
    /// [`KeyError::Duplicate`]; [`IndexError::Full`]; [`ReadError::Conflict`] if another transaction, which
    /// this one does not see, was first.
    pub async fn insert<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &[u8],
        data: &[u8],
    ) -> Result<Row, KeyError> {
        let found = self.find_or_insert(transaction, key).await?;
        // A record that others replace all the time is a duplicate, and no conflict.
        if let Numbered::Found(number) = found
            && transaction.read_held(&self.table, number).await?.data.is_some()
        {
            return Err(KeyError::Duplicate);
        }
        self.enter(transaction, key, found.number()).await?;
        let keys = self.enter_by(transaction, found.number(), (None, Some(data))).await?;
        let row = transaction.write_if(&self.table, found.number(), Some(data), |there| there.is_none());
        let row = row.await?.ok_or(KeyError::Duplicate)?;
        keys.settle();
        Ok(row)
    }

    /// Replaces the data of a key's record, or makes a record if the key has none. Returns the record as this
    /// transaction saw it before.
    ///
    /// # Errors
    /// As [`insert`](Self::insert), but for [`KeyError::Duplicate`].
    pub async fn upsert<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &[u8],
        data: &[u8],
    ) -> Result<Row, KeyError> {
        let found = self.find_or_insert(transaction, key).await?;
        let number = found.number();
        if self.order.is_none() && self.secondary.is_empty() {
            return Ok(transaction.write(&self.table, number, Some(data)).await?);
        }
        loop {
            let held = transaction.read_held(&self.table, number).await?;
            if held.data.is_none() {
                self.enter(transaction, key, number).await?;
            }
            if let Some(replaced) = self.write_instead(transaction, number, held, Some(data)).await? {
                return Ok(replaced);
            }
        }
    }

    /// Enters a record that the transaction does not see in the order of keys (K3).
    async fn enter<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &[u8],
        number: u64,
    ) -> Result<(), KeyError> {
        match self.order.as_ref().filter(|_| I::enters_in_order()) {
            Some(order) => Ok(order.enter(transaction.memory(), key, number).await?),
            None => Ok(()),
        }
    }

    /// Reads the record of a key, and writes it as it is: other transactions that write it conflict with this
    /// one. A key without a record is not protected.
    ///
    /// # Errors
    /// As [`get`](Self::get); [`ReadError::Conflict`] if another transaction was first.
    pub async fn get_for_update<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &[u8],
    ) -> Result<Row, KeyError> {
        let take = async |number| transaction.take_if_there(&self.table, number).await;
        let Some((number, row)) = self.find(transaction, key, take).await? else {
            return Ok(Row::never_written());
        };
        let row = transaction.whole(&self.table, number, row).await?;
        if let Some(data) = &row.data {
            transaction.write_unchanged(&self.table, number, data).await?;
        }
        Ok(row)
    }

    /// Replaces the data of a key's record, once the transaction commits. Returns the record as this
    /// transaction saw it before.
    ///
    /// # Errors
    /// [`KeyError::NoSuchKey`]; [`ReadError::Conflict`] if another transaction was first.
    pub async fn update<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &[u8],
        data: &[u8],
    ) -> Result<Row, KeyError> {
        self.replace(transaction, key, Some(data)).await
    }

    /// Deletes a key's record, once the transaction commits. Returns the record as this transaction saw it
    /// before.
    ///
    /// # Errors
    /// As [`update`](Self::update).
    pub async fn delete<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &[u8],
    ) -> Result<Row, KeyError> {
        self.replace(transaction, key, None).await
    }

    async fn replace<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &[u8],
        data: Option<&[u8]>,
    ) -> Result<Row, KeyError> {
        while let Some((number, held)) = self.find_to_write(transaction, key).await? {
            if let Some(replaced) = self.write_instead(transaction, number, held, data).await? {
                return Ok(replaced);
            }
        }
        Err(KeyError::NoSuchKey)
    }

    /// Writes a record instead of `held`, as that lies in its place, and enters it in secondary indexes
    /// before. Returns what it has replaced. `None`: another operation of this transaction has written the
    /// record meanwhile, so this one did not.
    async fn write_instead<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        number: u64,
        held: Row,
        data: Option<&[u8]>,
    ) -> Result<Option<Row>, KeyError> {
        let row = transaction.whole(&self.table, number, held.clone()).await?;
        let keys = self.enter_by(transaction, number, (row.data.as_deref(), data)).await?;
        let is_unchanged = |there: Option<&[u8]>| there == held.data.as_deref();
        if transaction.write_if(&self.table, number, data, is_unchanged).await?.is_none() {
            return Ok(None);
        }
        keys.settle();
        Ok(Some(row))
    }

    /// Replaces the data of a key's record by what `change` makes of them, once the transaction commits.
    /// `None`: the key has no record. `change` is called again if another operation of this transaction has
    /// written the record meanwhile.
    ///
    /// # Errors
    /// [`ReadError::Conflict`] if another transaction was first; inside, those of `change`.
    pub async fn read_modify_write<R: Rules, T, E>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &[u8],
        mut change: impl FnMut(&[u8]) -> Result<(Vec<u8>, T), E>,
    ) -> Result<Result<Option<T>, E>, KeyError> {
        while let Some((number, held)) = self.find_to_write(transaction, key).await? {
            let row = transaction.whole(&self.table, number, held.clone()).await?;
            let before = row.data.as_deref().unwrap_or_default();
            let (data, result) = match change(before) {
                Ok(changed) => changed,
                Err(error) => return Ok(Err(error)),
            };
            let keys = self.enter_by(transaction, number, (Some(before), Some(&data))).await?;
            let is_unchanged = |there: Option<&[u8]>| there == held.data.as_deref();
            if transaction.write_if(&self.table, number, Some(&data), is_unchanged).await?.is_some() {
                keys.settle();
                return Ok(Ok(Some(result)));
            }
        }
        Ok(Ok(None))
    }

    /// The number of a key's record, and the record, taken to be written. `None`: there is none.
    async fn find_to_write<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &[u8],
    ) -> Result<Option<(u64, Row)>, KeyError> {
        let take = async |number| transaction.take_if_there(&self.table, number).await;
        Ok(self.find(transaction, key, take).await?.filter(|(_, row)| row.data.is_some()))
    }
}
