//! Tables whose records are known by keys: an [`Index`] on a [`Table`] (`docs/src/txn.md`, *keys*).
//!
//! K1. The index has no versions: that a key has an entry does not mean that there is a record. The
//!     snapshot's version of the record says whether there is one.
//! K2. A key has its entry before anything of the record is committed. So what a snapshot sees is found.

use farpool_wire::Version;

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

    /// The table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Reads the record of a key.
    ///
    /// # Errors
    /// As [`Transaction::read`]; or when the index cannot be read.
    pub async fn get<R: Rules>(&self, transaction: &Transaction<'_, R>, key: &[u8]) -> Result<Row, KeyError> {
        match self.find(transaction, key).await? {
            Some((number, row)) => Ok(transaction.whole(&self.table, number, row).await?),
            None => Ok(Row { version: Version::INITIAL, data: None }),
        }
    }

    /// The number of a key's record, and the record as it lies in its place; both are read together.
    async fn find<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &[u8],
    ) -> Result<Option<(u64, Row)>, KeyError> {
        let read = async |number| transaction.read_held(&self.table, number).await;
        let found = self.index.find_with(transaction.memory(), key, read).await?;
        Ok(found.map(|(number, row)| row.map(|row| (number, row))).transpose()?)
    }

    /// Makes a record for a key that has none, once the transaction commits. Returns what this transaction
    /// saw there before: a record that is absent or deleted.
    ///
    /// # Errors
    /// [`KeyError::Duplicate`]; [`IndexError::Full`]; [`ReadError::Conflict`] if another transaction, which
    /// this one does not see, was first.
    pub async fn insert<R: Rules>(
        &self,
        transaction: &mut Transaction<'_, R>,
        key: &[u8],
        data: &[u8],
    ) -> Result<Row, KeyError> {
        let found = self.index.find_or_insert(transaction.memory(), key).await?;
        if let Numbered::Found(number) = found
            && transaction.read_held(&self.table, number).await?.data.is_some()
        {
            return Err(KeyError::Duplicate);
        }
        Ok(transaction.write(&self.table, found.number(), Some(data)).await?)
    }

    /// Replaces the data of a key's record, once the transaction commits. Returns the record as this
    /// transaction saw it before.
    ///
    /// # Errors
    /// [`KeyError::NoSuchKey`]; [`ReadError::Conflict`] if another transaction was first.
    pub async fn update<R: Rules>(
        &self,
        transaction: &mut Transaction<'_, R>,
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
        transaction: &mut Transaction<'_, R>,
        key: &[u8],
    ) -> Result<Row, KeyError> {
        self.replace(transaction, key, None).await
    }

    async fn replace<R: Rules>(
        &self,
        transaction: &mut Transaction<'_, R>,
        key: &[u8],
        data: Option<&[u8]>,
    ) -> Result<Row, KeyError> {
        // Read first: a record that is only looked at must not be among the writes, where other transactions
        // would conflict with it.
        let found = self.find(transaction, key).await?.filter(|(_, row)| row.data.is_some());
        let (number, _) = found.ok_or(KeyError::NoSuchKey)?;
        Ok(transaction.write(&self.table, number, data).await?)
    }
}
