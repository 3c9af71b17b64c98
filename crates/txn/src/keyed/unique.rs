//! Unique indexes: no two rows that a snapshot has have the same key there (S3).
//!
//! A transaction that gives a row a key enters the row under it (S1), and then looks at the other rows that
//! are entered there. If it sees one of them with this key, the key is a duplicate. When it commits, it looks
//! once more, after it has locked its records and before it installs anything: if another commit has locked
//! or written one of the rows since the transaction's cut, or one of them has the key, there is a conflict.
//!
//! Of two commits that give two rows the same key, both have entered and locked their rows before they look.
//! So the one that looks later finds the other's row entered, and locked or written since its cut.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::scanning::Scan;
use super::secondary::Secondary;
use super::{KeyError, KeyedTable};
use crate::cut::Cut;
use crate::error::ReadError;
use crate::hash::IndexRules;
use crate::memory::Memory;
use crate::record::RecordId;
use crate::rules::Rules;
use crate::table::Table;
use crate::transaction::{Transaction, read_current};
use crate::tree::{Rank, TreeError};
use crate::worker::Worker;

/// A key that a transaction gives a row in a unique index.
pub(crate) struct TakenKey {
    index: Rc<Secondary>,
    table: Table,
    rank: Rank,
}

impl TakenKey {
    fn is_of_row(&self, index: u64, row: u64) -> bool {
        self.index.number() == index && self.rank.number == row
    }

    fn is_of_other_row(&self, other: &TakenKey) -> bool {
        let is_same_key = self.index.number() == other.index.number() && self.rank.key == other.rank.key;
        is_same_key && self.rank.number != other.rank.number
    }

    /// Whether no other row may have the key, once the commit's own records are locked. `own` are these
    /// records, in their order.
    pub(crate) async fn is_free<R: Rules>(
        &self,
        worker: &Worker<R>,
        cut: &Cut,
        own: &[RecordId],
    ) -> Result<bool, KeyError> {
        for number in self.index.others(&worker.memory, &self.rank).await? {
            let place = self.table.place(number).ok_or(TreeError::BeyondPieces);
            let place = place.map_err(|error| self.index.error(error))?;
            // What the transaction itself has written was compared then.
            if own.binary_search(&place.record).is_ok() {
                continue;
            }
            match read_current(worker, cut, &self.table, number).await {
                Ok(row) if self.index.has_key(row.data.as_deref(), &self.rank.key)? => return Ok(false),
                Ok(_) => {}
                Err(ReadError::Conflict) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

/// The keys that a transaction gives rows in unique indexes.
#[derive(Default)]
pub(crate) struct TakenKeys {
    keys: RefCell<Vec<Taken>>,
    operations: Cell<u64>,
}

struct Taken {
    key: TakenKey,
    operation: u64,
    /// The operation has written the row.
    is_settled: bool,
}

impl TakenKeys {
    /// An operation is about to write a row. `changed` are the unique indexes in which the row gets another
    /// key, or none.
    pub(super) fn begin(&self, row: u64, changed: Vec<u64>) -> NewKeys<'_> {
        self.operations.set(self.operations.get() + 1);
        NewKeys { taken: self, operation: self.operations.get(), row, changed }
    }

    pub(crate) fn into_keys(self) -> Vec<TakenKey> {
        self.keys.into_inner().into_iter().map(|taken| taken.key).collect()
    }
}

/// The keys that an operation is about to give a row in unique indexes. If it ends without having written the
/// row, the row keeps those that the transaction has given it before.
pub(super) struct NewKeys<'t> {
    taken: &'t TakenKeys,
    operation: u64,
    row: u64,
    changed: Vec<u64>,
}

impl NewKeys<'_> {
    /// `false`: the transaction gives that key to another row.
    fn take(&self, key: TakenKey) -> bool {
        let mut keys = self.taken.keys.borrow_mut();
        let is_free = !keys.iter().any(|taken| taken.key.is_of_other_row(&key));
        keys.push(Taken { key, operation: self.operation, is_settled: false });
        is_free
    }

    /// The row was written.
    pub(super) fn settle(self) {
        let is_replaced = |taken: &Taken| {
            taken.is_settled && self.changed.iter().any(|&index| taken.key.is_of_row(index, self.row))
        };
        let mut keys = self.taken.keys.borrow_mut();
        keys.retain(|taken| !is_replaced(taken));
        keys.iter_mut()
            .filter(|taken| taken.operation == self.operation)
            .for_each(|taken| taken.is_settled = true);
    }
}

impl Drop for NewKeys<'_> {
    fn drop(&mut self) {
        let mut keys = self.taken.keys.borrow_mut();
        keys.retain(|taken| taken.is_settled || taken.operation != self.operation);
    }
}

impl Secondary {
    /// The other records that are entered under this key.
    async fn others(&self, memory: &Memory, rank: &Rank) -> Result<Vec<u64>, KeyError> {
        let (mut numbers, mut rest) = (Vec::new(), Some(Scan::of_key(&rank.key)));
        while let Some(scan) = rest {
            let (found, next) = scan.run(memory, self.tree()).await.map_err(|error| self.error(error))?;
            numbers
                .extend(found.into_iter().map(|found| found.number).filter(|number| *number != rank.number));
            rest = next;
        }
        Ok(numbers)
    }

    /// Whether a row with these data has this key.
    fn has_key(&self, data: Option<&[u8]>, key: &[u8]) -> Result<bool, KeyError> {
        let found = data.map(|data| self.key_of(data)).transpose()?.flatten();
        Ok(found.as_deref() == Some(key))
    }
}

impl<I: IndexRules> KeyedTable<I> {
    /// A transaction gives a row a key in a unique index, where it is entered.
    ///
    /// # Errors
    /// [`KeyError::DuplicateBy`] if another row has the key.
    pub(super) async fn take_key<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        (keys, index): (&NewKeys<'_>, &Rc<Secondary>),
        rank: Rank,
    ) -> Result<(), KeyError> {
        self.check_unique(transaction, index, &rank).await?;
        let taken = TakenKey { index: index.clone(), table: self.table.clone(), rank };
        match !I::looks_before_it_installs() || keys.take(taken) {
            true => Ok(()),
            // Two operations that are under way at the same time.
            false => Err(KeyError::DuplicateBy(index.number())),
        }
    }

    /// Checks that no other row has the key of an entry that was just made for an old row, also none that
    /// this transaction does not see.
    pub(super) async fn check_filled<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        index: &Rc<Secondary>,
        rank: Rank,
    ) -> Result<(), KeyError> {
        self.check_unique(transaction, index, &rank).await?;
        let key = TakenKey { index: index.clone(), table: self.table.clone(), rank };
        match key.is_free(transaction.worker(), transaction.cut(), &[]).await? {
            true => Ok(()),
            false => Err(ReadError::Conflict.into()),
        }
    }

    /// Checks that no other row that the transaction sees has the key of an entry.
    pub(super) async fn check_unique<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        index: &Secondary,
        rank: &Rank,
    ) -> Result<(), KeyError> {
        let others = index.others(transaction.memory(), rank).await?;
        if others.iter().any(|&number| number >= self.table.records()) {
            return Err(index.error(TreeError::BeyondPieces));
        }
        for row in transaction.read_many(&self.table, &others).await? {
            if index.has_key(row.data.as_deref(), &rank.key)? {
                return Err(KeyError::DuplicateBy(index.number()));
            }
        }
        Ok(())
    }
}
