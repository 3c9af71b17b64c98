//! Tables whose records are known by keys: an [`Index`] on a [`Table`] (`docs/src/txn.md`, *keys*).
//!
//! K1. The index has no versions: that a key has an entry does not mean that there is a record. The
//!     snapshot's version of the record says whether there is one.
//! K2. A key has its entry before anything of the record is committed. So what a snapshot sees is found.
//! K3. If the table has an order, a [`Tree`] on its keys, the same holds for the entries there.

mod verifying;

use std::ops::Bound;

use crate::error::ReadError;
use crate::hash::{Index, IndexError, IndexRules, Numbered};
use crate::rules::{Rules, Shipped};
use crate::table::Table;
use crate::transaction::{Row, Transaction};
use crate::tree::{Rank, Tree, TreeError};

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
    /// The record cannot be read, or taken for a write.
    #[error(transparent)]
    Record(#[from] ReadError),
}

/// A table with keys, as one thread works with it.
pub struct KeyedTable<I = Shipped> {
    table: Table,
    index: Index<I>,
    order: Option<Tree>,
}

/// Rows that a scan has found, in its direction, and where it goes on.
pub struct Scanned {
    /// Keys with their rows.
    pub rows: Vec<(Box<[u8]>, Row)>,
    /// `None`: there are no more.
    pub next: Option<Scan>,
}

/// A scan of a table, and how far it has come.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Scan {
    /// The lowest rank that is left to find. `None`: the lowest of all.
    first: Option<Rank>,
    /// The scan finds only ranks below this one. `None`: it finds the highest of all, too.
    end: Option<Rank>,
    direction: Direction,
}

/// The order in which a scan finds keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From low keys to high ones.
    Ascending,
    /// From high keys to low ones.
    Descending,
}

impl Scan {
    /// A scan of the keys in this range.
    pub fn new(range: (Bound<&[u8]>, Bound<&[u8]>), direction: Direction) -> Scan {
        let at = |key: &[u8]| Rank::new(key, 0);
        // No record has so high a number.
        let behind = |key: &[u8]| Rank::new(key, u64::MAX);
        let first = match range.0 {
            Bound::Included(key) => Some(at(key)),
            Bound::Excluded(key) => Some(behind(key)),
            Bound::Unbounded => None,
        };
        let end = match range.1 {
            Bound::Included(key) => Some(behind(key)),
            Bound::Excluded(key) => Some(at(key)),
            Bound::Unbounded => None,
        };
        Scan { first, end, direction }
    }

    /// A scan of all keys.
    pub fn all() -> Scan {
        Scan { first: None, end: None, direction: Direction::Ascending }
    }

    fn is_empty(&self) -> bool {
        matches!((&self.first, &self.end), (Some(first), Some(end)) if first >= end)
    }
}

impl<I: IndexRules> KeyedTable<I> {
    /// A table with its index. `None`: they do not have the same number of records.
    pub fn new(table: Table, index: Index<I>) -> Option<Self> {
        (table.records() == index.layout().records()).then_some(KeyedTable { table, index, order: None })
    }

    /// The same, with an index in the order of its keys.
    pub fn with_order(self, order: Tree) -> Self {
        KeyedTable { order: Some(order), ..self }
    }

    /// Whether it has an index in the order of its keys.
    pub fn is_ordered(&self) -> bool {
        self.order.is_some()
    }

    /// Remembers what the same table with fewer pieces remembered of its index.
    pub fn remember_splits_of(&self, before: &KeyedTable<I>) {
        self.index.remember_splits_of(&before.index);
        if let (Some(order), Some(before)) = (&self.order, &before.order) {
            order.remember_leaves_of(before);
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
        let found = self.find_or_insert(transaction, key).await?;
        let number = found.number();
        if self.order.is_some() && transaction.read_held(&self.table, number).await?.data.is_none() {
            self.enter(transaction, key, number).await?;
        }
        Ok(transaction.write(&self.table, number, Some(data)).await?)
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

    /// Reads some rows in the order of their keys: those in one leaf of the order. There may be more though
    /// there are none here.
    ///
    /// # Errors
    /// [`KeyError::Unordered`]; or when far memory does not answer.
    pub async fn scan<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        scan: Scan,
    ) -> Result<Scanned, KeyError> {
        let order = self.order.as_ref().ok_or(KeyError::Unordered)?;
        if scan.is_empty() {
            return Ok(Scanned { rows: Vec::new(), next: None });
        }
        let Scan { first, end, direction } = scan;
        let (mut ranks, next) = match direction {
            Direction::Ascending => {
                let lowest = || Rank::new(&vec![0; order.layout().leaf().key_bytes()], 0);
                let from = first.clone().unwrap_or_else(lowest);
                let run = order.run_from(transaction.memory(), &from).await?;
                (run.ranks(), run.next.map(|high| Scan { first: Some(high), end: end.clone(), direction }))
            }
            Direction::Descending => {
                let run = order.run_below(transaction.memory(), end.as_ref()).await?;
                (run.ranks(), run.next.map(|low| Scan { first: first.clone(), end: Some(low), direction }))
            }
        };
        let is_within = |rank: &Rank| {
            first.as_ref().is_none_or(|first| rank >= first) && end.as_ref().is_none_or(|end| rank < end)
        };
        ranks.retain(is_within);
        if direction == Direction::Descending {
            ranks.reverse();
        }
        let numbers: Vec<u64> = ranks.iter().map(|rank| rank.number).collect();
        if numbers.iter().any(|&number| number >= self.table.records()) && I::stops_at_unknown_pieces() {
            return Err(TreeError::BeyondPieces.into());
        }
        let rows = transaction.read_many(&self.table, &numbers).await?;
        let is_row = |(_, row): &(Rank, Row)| row.data.is_some() || !I::scans_visible_rows();
        let rows = ranks.into_iter().zip(rows).filter(is_row);
        let rows = rows.map(|(rank, row)| (rank.key, row)).collect();
        Ok(Scanned { rows, next: next.filter(|next| !next.is_empty()) })
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
