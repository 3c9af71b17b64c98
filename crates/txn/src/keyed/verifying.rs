//! Whether the records that a transaction sees, and what says where they are, agree.

use futures_util::future::join_all;

use super::{KeyError, KeyedTable, Scan};
use crate::hash::IndexRules;
use crate::rules::Rules;
use crate::transaction::Transaction;
use crate::tree::Rank;

/// Records that are read together, and keys that are looked up together.
const RECORDS_AT_ONCE: u64 = 512;
const KEYS_AT_ONCE: usize = 16;

/// What a check of some records has found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Verified {
    /// Rows that the transaction sees.
    pub rows: u64,
    /// The first of them that its key does not lead to.
    pub fault: Option<Fault>,
    /// The record with which the check goes on. `None`: it has looked at all of them.
    pub next: Option<u64>,
}

/// A row that is not found as it should be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    /// The key beside a record that was committed is not whole.
    #[error("the row with number {0} has no key")]
    NoKey(u64),
    /// The index leads elsewhere, or nowhere.
    #[error("the index does not lead from its key to the row with number {0}")]
    NotByKey(u64),
    /// The order of keys does not have the record under its key.
    #[error("the row with number {0} is missing in the order of keys")]
    NotInOrder(u64),
    /// The order of keys leads to another number of rows than the table has.
    #[error("the order of keys has {in_order} rows, and the table {rows}")]
    OtherCount {
        /// Rows of the table.
        rows: u64,
        /// Rows that the order leads to.
        in_order: u64,
    },
}

impl<I: IndexRules> KeyedTable<I> {
    /// Looks at some records, from the one with the number `first` on: whether each row that the transaction
    /// sees is found by its key, and in the order of keys, if the table has one.
    ///
    /// # Errors
    /// When a record cannot be read. Far memory that does not answer is no fault.
    pub async fn verify_some<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        first: u64,
    ) -> Result<Verified, KeyError> {
        let end = self.table.records().min(first.saturating_add(RECORDS_AT_ONCE));
        let numbers: Vec<u64> = (first..end).collect();
        let found = transaction.read_many(&self.table, &numbers).await?;
        let rows: Vec<u64> =
            numbers.into_iter().zip(found).filter_map(|(number, row)| row.data.map(|_| number)).collect();
        let mut fault = None;
        for some in rows.chunks(KEYS_AT_ONCE) {
            for looked in join_all(some.iter().map(|&number| self.find_fault(transaction, number))).await {
                fault = fault.or(looked?);
            }
        }
        let next = (end < self.table.records()).then_some(end);
        Ok(Verified { rows: rows.len() as u64, fault, next })
    }

    async fn find_fault<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        number: u64,
    ) -> Result<Option<Fault>, KeyError> {
        let memory = transaction.memory();
        let Some(key) = self.index.key_of(memory, number).await? else {
            return Ok(Some(Fault::NoKey(number)));
        };
        if self.index.find(memory, &key).await? != Some(number) {
            return Ok(Some(Fault::NotByKey(number)));
        }
        let Some(order) = &self.order else { return Ok(None) };
        let rank = Rank::new(&key, number);
        let run = order.run_from(memory, &rank).await?;
        let is_there = run.entries.first().is_some_and(|(first, _)| *first == rank);
        Ok((!is_there).then_some(Fault::NotInOrder(number)))
    }

    /// Compares how many rows a scan of all keys finds with how many the table has. `None`: they are equal,
    /// or the table has no order.
    ///
    /// # Errors
    /// As [`verify_some`](Self::verify_some).
    pub async fn verify_count<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        rows: u64,
    ) -> Result<Option<Fault>, KeyError> {
        if self.order.is_none() {
            return Ok(None);
        }
        let (mut in_order, mut rest) = (0, Some(Scan::all()));
        while let Some(scan) = rest {
            let found = self.scan(transaction, scan).await?;
            in_order += found.rows.len() as u64;
            rest = found.next;
        }
        Ok((in_order != rows).then_some(Fault::OtherCount { rows, in_order }))
    }
}
