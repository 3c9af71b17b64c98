//! Tables whose records are known by keys: an [`Index`] on a [`Table`] (`docs/src/txn.md`, *keys*).
//!
//! K1. The index has no versions: that a key has a record says nothing. Whether there is one is what the
//!     snapshot's version of the record says.
//! K2. A key has its record before anything of that is committed. So what a snapshot sees is found.

use farpool_wire::Version;

use crate::error::ReadError;
use crate::hash::{Index, IndexError, IndexRules, Numbered};
use crate::rules::{Rules, Shipped};
use crate::table::Table;
use crate::transaction::{Row, Transaction};

/// Why something cannot be done by key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// For the transaction there is a record of that key already.
    #[error("duplicate key")]
    Duplicate,
    /// For the transaction there is no record of that key.
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
    /// Of a table and its index. `None`: they have not the same records.
    pub fn new(table: Table, index: Index<I>) -> Option<Self> {
        (table.records() == index.layout().records()).then_some(KeyedTable { table, index })
    }

    /// Its records.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Reads the record of a key.
    ///
    /// # Errors
    /// As [`Transaction::read`]; or when the index is not to be had.
    pub async fn get<R: Rules>(&self, transaction: &Transaction<'_, R>, key: &[u8]) -> Result<Row, KeyError> {
        match self.find(transaction, key).await? {
            Some((number, row)) => Ok(transaction.whole(&self.table, number, row).await?),
            None => Ok(Row { version: Version::INITIAL, data: None }),
        }
    }

    /// The number of a key's record, and the record, as it lies in its place: read together.
    async fn find<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &[u8],
    ) -> Result<Option<(u64, Row)>, KeyError> {
        let read = async |number| transaction.read_held(&self.table, number).await;
        let found = self.index.find_with(transaction.memory(), key, read).await?;
        Ok(found.map(|(number, row)| row.map(|row| (number, row))).transpose()?)
    }

    /// Will make a record for a key that has none. Returns how that was for this transaction: absent, or
    /// deleted.
    ///
    /// # Errors
    /// [`KeyError::Duplicate`]; [`IndexError::Full`]; [`ReadError::Conflict`] if somebody was first whom the
    /// transaction does not see.
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

    /// Will put `data` in the place of a key's record. Returns that as it was for this transaction.
    ///
    /// # Errors
    /// [`KeyError::NoSuchKey`]; [`ReadError::Conflict`] if somebody was first.
    pub async fn update<R: Rules>(
        &self,
        transaction: &mut Transaction<'_, R>,
        key: &[u8],
        data: &[u8],
    ) -> Result<Row, KeyError> {
        self.replace(transaction, key, Some(data)).await
    }

    /// Will delete a key's record. Returns that as it was for this transaction.
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
        // Read first: what is only looked at must not be among the writes, where others would conflict with
        // it.
        let found = self.find(transaction, key).await?.filter(|(_, row)| row.data.is_some());
        let (number, _) = found.ok_or(KeyError::NoSuchKey)?;
        Ok(transaction.write(&self.table, number, data).await?)
    }
}
