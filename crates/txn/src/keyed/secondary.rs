//! Secondary indexes: the rows of a table in the order of other keys than their own, which several rows may
//! share.
//!
//! S1. Entries have no versions. A version of a row has its entry before it is committed.
//! S2. A row is found under a key only if the version that the transaction sees has this key.
//! S3. In a unique index, a commit whose records are locked looks whether another row may have one of its new
//!     keys (`unique.rs`).
//! S4. An entry is removed only when no version that a snapshot may see needs it, and no commit that was
//!     begun relies on it (`removing.rs`).

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Bound;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::future::join_all;
use rustix_futex_sync::Mutex;

use super::removing::Removing;
use super::unique::NewKeys;
use super::{KeyError, KeyedTable};
use crate::hash::IndexRules;
use crate::memory::Memory;
use crate::rules::Rules;
use crate::transaction::Transaction;
use crate::tree::{Rank, Tree, TreeError};

/// Most entries of an index that are noted as perhaps of no use. Others are found by a scan again.
const MOST_STALE: usize = 1 << 16;
/// Rows that are entered at the same time when an index is filled.
const ENTERED_AT_ONCE: usize = 16;

/// The key of a row in a secondary index, padded to the length of the index's keys. `None`: the row is not in
/// that index.
pub type KeyOfRow = dyn Fn(&[u8]) -> Result<Option<Vec<u8>>, BadRow>;

/// Why a row has no proper key in a secondary index.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadRow {
    /// The row has another type.
    #[error("a row cannot be decoded")]
    OtherType,
    /// The key is longer than the index's keys.
    #[error("a row's key in index {index} is longer than {most} bytes")]
    KeyTooLong {
        /// The name of the index.
        index: String,
        /// Bytes of its keys.
        most: usize,
    },
}

/// Entries of an index that nobody may need any more. All threads of a process share them.
#[derive(Debug, Default)]
pub struct StaleEntries(Mutex<Stale>);

#[derive(Debug, Default)]
struct Stale {
    ranks: BTreeSet<Rank>,
    /// The last one that was taken: those that are noted again and again do not keep others from their turn.
    last: Option<Rank>,
}

impl StaleEntries {
    fn note(&self, rank: Rank) {
        let mut stale = self.0.lock();
        if stale.ranks.len() < MOST_STALE {
            stale.ranks.insert(rank);
        }
    }

    /// Takes some of them, in their order, and those first that follow the ones that were taken before.
    pub(super) fn take(&self, most: usize) -> Vec<Rank> {
        let Stale { ranks, last } = &mut *self.0.lock();
        let after = (last.as_ref().map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let mut taken: Vec<Rank> = ranks.range(after).take(most).cloned().collect();
        if taken.is_empty() {
            taken = ranks.iter().take(most).cloned().collect();
        }
        for rank in &taken {
            ranks.remove(rank);
        }
        *last = taken.last().cloned();
        taken
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.lock().ranks.len()
    }
}

/// Entries that a transaction has made. Unless it commits, perhaps nobody needs them.
#[derive(Default)]
pub(crate) struct Entered(RefCell<Vec<(Rc<Secondary>, Rank)>>);

impl Entered {
    fn note(&self, index: &Rc<Secondary>, rank: Rank) {
        self.0.borrow_mut().push((index.clone(), rank));
    }

    /// The transaction has committed.
    pub(crate) fn forget(&self) {
        self.0.borrow_mut().clear();
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.get_mut().drain(..).for_each(|(index, rank)| index.note_stale(rank));
    }
}

/// A secondary index of a table, as one thread works with it.
pub struct Secondary {
    number: u64,
    tree: Tree,
    key_of: Rc<KeyOfRow>,
    stale: Arc<StaleEntries>,
    removing: RefCell<Removing>,
    is_unique: bool,
}

impl Secondary {
    /// An index with a number of its own, and the entries of it that are noted as stale.
    pub fn new(number: u64, tree: Tree, key_of: Rc<KeyOfRow>, stale: Arc<StaleEntries>) -> Secondary {
        Secondary { number, tree, key_of, stale, removing: RefCell::default(), is_unique: false }
    }

    /// The same index, as one in which no two rows have the same key.
    pub fn unique(self) -> Secondary {
        Secondary { is_unique: true, ..self }
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn tree(&self) -> &Tree {
        &self.tree
    }

    pub(super) fn key_of(&self, data: &[u8]) -> Result<Option<Vec<u8>>, BadRow> {
        (self.key_of)(data)
    }

    pub(super) fn stale(&self) -> &StaleEntries {
        &self.stale
    }

    pub(super) fn removing(&self) -> &RefCell<Removing> {
        &self.removing
    }

    /// Remembers what the same index with fewer pieces remembered.
    pub(super) fn continue_from(&self, before: &Secondary) {
        self.tree.remember_leaves_of(&before.tree);
        self.removing.swap(&before.removing);
    }

    /// Notes an entry that perhaps nobody needs.
    pub(super) fn note_stale(&self, rank: Rank) {
        self.stale.note(rank);
    }
}

impl<I: IndexRules> KeyedTable<I> {
    /// How many entries of secondary indexes are known that are perhaps of no use.
    pub fn stale_entries(&self) -> usize {
        let waiting = |index: &Secondary| {
            index.removing.borrow().waiting.iter().map(|waiting| waiting.entries.len()).sum::<usize>()
        };
        self.secondary.iter().map(|index| index.stale.count() + waiting(index)).sum()
    }

    /// Whether [`remove_stale`](Self::remove_stale) may have something to do, now or once the horizon has
    /// moved on.
    pub fn has_stale(&self) -> bool {
        self.secondary.iter().any(|index| index.stale.count() > 0 || !index.removing.borrow().is_empty())
    }

    /// Enters a record in all secondary indexes, before the transaction writes these data to it instead of
    /// those `before` (S1). Where both have the same key, there is an entry. `None`: there is no row. The
    /// keys are to be settled once the record was written.
    pub(super) async fn enter_by<'t, R: Rules>(
        &self,
        transaction: &'t Transaction<'_, R>,
        number: u64,
        (before, data): (Option<&[u8]>, Option<&[u8]>),
    ) -> Result<NewKeys<'t>, KeyError> {
        let mut changes = Vec::new();
        for secondary in &self.secondary {
            let key_of = |data: Option<&[u8]>| {
                let key = data.map(|data| secondary.key_of(data)).transpose();
                key.map(Option::flatten)
            };
            let (old, new) = (key_of(before)?, key_of(data)?);
            if old != new {
                changes.push((secondary, old, new));
            }
        }
        let unique = changes.iter().filter(|(index, ..)| index.is_unique).map(|(index, ..)| index.number());
        let keys = transaction.taken_keys().begin(number, unique.collect());
        let enter = async |(secondary, old, new): (&Rc<Secondary>, Option<Vec<u8>>, Option<Vec<u8>>)| {
            let rank = new.as_deref().map(|new| Rank::new(new, number));
            if let Some(new) = new.filter(|_| I::enters_by()) {
                secondary.enter(transaction.memory(), number, &new).await?;
                transaction.entered().note(secondary, Rank::new(&new, number));
            }
            // If the transaction commits, the old key is of no use one day.
            if let Some(old) = old {
                secondary.note_stale(Rank::new(&old, number));
            }
            match rank.filter(|_| secondary.is_unique) {
                Some(rank) => self.take_key(transaction, (&keys, secondary), rank).await,
                None => Ok(()),
            }
        };
        // All that have begun are finished, also after an error.
        join_all(changes.into_iter().map(enter)).await.into_iter().collect::<Result<(), KeyError>>()?;
        Ok(keys)
    }

    /// Enters some rows that the transaction sees in an index that they may not be in, from the record with
    /// the number `first` on. Returns the record with which to go on; `None`: these were all.
    ///
    /// # Errors
    /// [`KeyError::NoSuchIndex`], [`KeyError::BadRow`], [`KeyError::By`], or [`KeyError::DuplicateBy`];
    /// [`ReadError::Conflict`](crate::ReadError::Conflict) if another transaction may be about to give a row
    /// the key of one of these; or when far memory does not answer.
    pub async fn fill<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        index: u64,
        first: u64,
    ) -> Result<Option<u64>, KeyError> {
        let secondary = self.secondary(index)?;
        let (rows, next) = self.numbered_rows(transaction, first).await?;
        let enter = async |(number, data): (u64, Vec<u8>)| {
            let Some(key) = secondary.key_of(&data)? else { return Ok(()) };
            secondary.enter(transaction.memory(), number, &key).await?;
            match secondary.is_unique {
                true => self.check_filled(transaction, secondary, Rank::new(&key, number)).await,
                false => Ok(()),
            }
        };
        let mut rows = rows.into_iter().peekable();
        while rows.peek().is_some() {
            let some = rows.by_ref().take(ENTERED_AT_ONCE).map(enter);
            join_all(some).await.into_iter().collect::<Result<(), KeyError>>()?;
        }
        Ok(next)
    }
}

impl Secondary {
    pub(super) fn error(&self, error: TreeError) -> KeyError {
        KeyError::By(self.number, error)
    }

    async fn enter(&self, memory: &Memory, number: u64, key: &[u8]) -> Result<(), KeyError> {
        self.tree.enter(memory, key, number).await.map_err(|error| self.error(error))
    }
}
