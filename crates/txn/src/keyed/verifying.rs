//! Whether the records that a transaction sees, and what says where they are, agree.

use futures_util::future::join_all;

use super::{KeyError, KeyedTable, Scan};
use crate::hash::IndexRules;
use crate::rules::Rules;
use crate::transaction::Transaction;
use crate::tree::{Rank, Run};

/// Keys that are looked up together.
const KEYS_AT_ONCE: usize = 16;

/// What a check of some records has found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Verified {
    /// Rows that the transaction sees.
    pub rows: u64,
    /// Their keys in all secondary indexes together.
    pub keys: u64,
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
    /// A secondary index does not have the record under the key that the row has there.
    #[error("the row with number {row} is missing in the index with number {index}")]
    NotByIndex {
        /// The number of the row.
        row: u64,
        /// That of the index.
        index: u64,
    },
    /// The secondary indexes lead to another number of rows than have keys there.
    #[error("the indexes have {found} rows, and the rows of the table {keys} keys there")]
    OtherKeys {
        /// The keys of all rows.
        keys: u64,
        /// Rows that the indexes lead to.
        found: u64,
    },
}

impl<I: IndexRules> KeyedTable<I> {
    /// Looks at some records, from the one with the number `first` on: whether each row that the transaction
    /// sees is found by its key, in the order of keys, if the table has one, and in its secondary indexes.
    ///
    /// # Errors
    /// When a record cannot be read. Far memory that does not answer is no fault.
    pub async fn verify_some<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        first: u64,
    ) -> Result<Verified, KeyError> {
        let (rows, next) = self.numbered_rows(transaction, first).await?;
        let (mut fault, mut keys) = (None, 0);
        for some in rows.chunks(KEYS_AT_ONCE) {
            let looks = some.iter().map(|(number, _)| self.find_fault(transaction, *number));
            for looked in join_all(looks).await {
                fault = fault.or(looked?);
            }
            for (secondary, (number, data)) in
                self.secondary.iter().flat_map(|index| some.iter().map(move |row| (index, row)))
            {
                let Some(key) = secondary.key_of(data)? else { continue };
                keys += 1;
                let rank = Rank::new(&key, *number);
                let run = secondary.tree().run_from(transaction.memory(), &rank).await;
                if !is_first_in(&run.map_err(|error| secondary.error(error))?, &rank) {
                    fault = fault.or(Some(Fault::NotByIndex { row: *number, index: secondary.number() }));
                }
            }
        }
        Ok(Verified { rows: rows.len() as u64, keys, fault, next })
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
        Ok((!is_first_in(&run, &rank)).then_some(Fault::NotInOrder(number)))
    }

    /// Compares how many rows scans of all keys find with how many the table has, and how many keys its rows
    /// have in secondary indexes. `None`: they are equal.
    ///
    /// # Errors
    /// As [`verify_some`](Self::verify_some).
    pub async fn verify_count<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        (rows, keys): (u64, u64),
    ) -> Result<Option<Fault>, KeyError> {
        let (mut in_order, mut rest) = (0, self.order.as_ref().map(|_| Scan::all()));
        while let Some(scan) = rest {
            let found = self.scan(transaction, scan).await?;
            in_order += found.rows.len() as u64;
            rest = found.next;
        }
        if self.is_ordered() && in_order != rows {
            return Ok(Some(Fault::OtherCount { rows, in_order }));
        }
        let mut found = 0;
        for secondary in &self.secondary {
            let mut rest = Some(Scan::all());
            while let Some(scan) = rest {
                let some = self.scan_by(transaction, secondary.number(), scan).await?;
                found += some.rows.len() as u64;
                rest = some.next;
            }
        }
        Ok((found != keys).then_some(Fault::OtherKeys { keys, found }))
    }
}

/// Whether the first entry of a run has this rank.
fn is_first_in(run: &Run, rank: &Rank) -> bool {
    run.entries.first().is_some_and(|(first, _)| first == rank)
}
