//! Tables whose records are known by keys: an [`Index`] on a [`Table`] (`docs/src/txn.md`, *keys*).
//!
//! K1. The index has no versions: that a key has an entry does not mean that there is a record. The
//!     snapshot's version of the record says whether there is one.
//! K2. A key has its entry before anything of the record is committed. So what a snapshot sees is found.

use crate::error::ReadError;
use crate::hash::{Index, IndexError, IndexRules, Numbered};
use crate::rules::{Rules, Shipped};
use crate::table::Table;
use crate::transaction::{Row, Transaction};

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
    /// The record cannot be read, or taken for a write.
    #[error(transparent)]
    Record(#[from] ReadError),
}

/// A table with keys, as one thread works with it.
pub struct KeyedTable<I = Shipped> {
    table: Table,
    index: Index<I>,
}

impl<I: IndexRules> KeyedTable<I> {
    /// A table with its index. `None`: they do not have the same number of records.
    pub fn new(table: Table, index: Index<I>) -> Option<Self> {
        (table.records() == index.layout().records()).then_some(KeyedTable { table, index })
    }

    /// Remembers what the same table with fewer pieces remembered of its index.
    pub fn remember_splits_of(&self, before: &KeyedTable<I>) {
        self.index.remember_splits_of(&before.index);
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
        let row = transaction.write_if(&self.table, found.number(), Some(data), |there| there.is_none());
        row.await?.ok_or(KeyError::Duplicate)
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
        let number = self.find_or_insert(transaction, key).await?.number();
        Ok(transaction.write(&self.table, number, Some(data)).await?)
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
        let (number, _) = self.find_to_write(transaction, key).await?.ok_or(KeyError::NoSuchKey)?;
        let replaced = transaction.write_if(&self.table, number, data, |there| there.is_some()).await?;
        Ok(transaction.whole(&self.table, number, replaced.ok_or(KeyError::NoSuchKey)?).await?)
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
            let (data, result) = match change(row.data.as_deref().unwrap_or_default()) {
                Ok(changed) => changed,
                Err(error) => return Ok(Err(error)),
            };
            let is_unchanged = |there: Option<&[u8]>| there == held.data.as_deref();
            if transaction.write_if(&self.table, number, Some(&data), is_unchanged).await?.is_some() {
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
