//! Whether the rows of a table, and what says where they are, agree.

use std::cell::RefCell;

use farpool_txn::{Fault, Verified};

use crate::client::Client;
use crate::error::TxError;
use crate::table::Table;
use crate::transacting::Tx;

/// What [`Client::verify_table`] has found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VerifiedTable {
    /// Rows of the table.
    pub rows: u64,
    /// Whether its keys are kept in order.
    pub is_ordered: bool,
    /// What is wrong with it first. `None`: nothing.
    pub fault: Option<Fault>,
}

impl Client {
    /// Looks at all rows of a table in one snapshot, while others may use it: whether each row is whole, is
    /// found by its key, and is found in the order of keys, if the table has one. (Secondary indexes are not
    /// looked at: only programs that declare them know the keys of rows there.) `progress` is told how many
    /// of the table's places were looked at, and how many there are.
    ///
    /// # Errors
    /// When no table has that name, or a row cannot be read.
    pub fn verify_table(&self, name: &str, progress: impl FnMut(u64, u64)) -> Result<VerifiedTable, TxError> {
        self.verify(&self.open_any_table(name)?, progress)
    }

    /// The same for a table that is open. If all of its indexes are declared and ready, this looks at whether
    /// each row is found there, too.
    ///
    /// # Errors
    /// As [`verify_table`](Self::verify_table).
    pub fn verify<K: ?Sized, V>(
        &self,
        table: &Table<K, V>,
        progress: impl FnMut(u64, u64),
    ) -> Result<VerifiedTable, TxError> {
        let progress = RefCell::new(progress);
        let told = |done, all| (progress.borrow_mut())(done, all);
        self.transact(async |tx| verify(tx, table, told).await)
    }
}

async fn verify<K: ?Sized, V>(
    tx: &Tx<'_>,
    table: &Table<K, V>,
    progress: impl Fn(u64, u64),
) -> Result<VerifiedTable, TxError> {
    let (mut rows, mut keys, mut next) = (0, 0, Some(0));
    let is_ordered = table.core().keyed().is_ordered();
    while let Some(first) = next {
        progress(first, table.records().records());
        let found: Verified = tx.verify_some(table, first).await?;
        (rows, keys) = (rows + found.rows, keys + found.keys);
        if found.fault.is_some() {
            return Ok(VerifiedTable { rows, is_ordered, fault: found.fault });
        }
        next = found.next;
    }
    Ok(VerifiedTable { rows, is_ordered, fault: tx.verify_count(table, (rows, keys)).await? })
}
