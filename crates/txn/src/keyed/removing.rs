//! Removing entries of a secondary index that nobody needs (S4).
//!
//! A client that removes an entry
//! 1. reads its word,
//! 2. then reads which cut was published last,
//! 3. waits until the horizon has a higher number than that cut. All transactions that had begun when the
//!    word was read have ended then: one of them that relied on the entry has committed its version, or never
//!    will;
//! 4. reads the record, which is not locked, and its versions from the current one back to the first that the
//!    horizon sees: no snapshot needs an earlier one, and all of these have other keys;
//! 5. replaces the word that it has read, where it has read it. A transaction that has relied on the entry
//!    meanwhile has changed the word (T4), unless others have relied on it 2^17 times: a client that has waited
//!    for long begins anew.
//!
//! Then it waits for the horizon once more, and lets the place be used again. So an index does not grow while
//! rows get other keys again and again.
//!
//! Any number of clients may do this at the same time, and a compare-and-swap may land late: no word comes
//! twice.

use std::collections::VecDeque;
use std::time::Duration;

use futures_util::future::join_all;

use super::secondary::Secondary;
use super::{KeyError, KeyedTable};
use crate::cut::Cut;
use crate::error::ReadError;
use crate::hash::IndexRules;
use crate::memory::Memory;
use crate::rules::Rules;
use crate::transaction::{Transaction, read_since};
use crate::tree::{Looked, Rank, RemovedEntry, SeenEntry, TreeError};

/// Entries that are looked at together.
const AT_ONCE: usize = 64;
/// A word that was read so long ago is not replaced: within this time, no row gets a key 2^17 times.
const LONGEST_WAIT: Duration = Duration::from_millis(200);
/// Versions of a record that are looked at, from the current one to that which the horizon sees.
const MOST_VERSIONS: usize = 64;
/// Batches of entries, or of places, that wait for the horizon, at most.
const MOST_WAITING: usize = 64;

/// Entries of one index that are to be removed, if nobody needs them.
#[derive(Debug, Default)]
pub(super) struct Removing {
    pub(super) waiting: VecDeque<Waiting>,
    /// Places of entries that were removed before the cut with this number was published, or another one
    /// after it.
    emptying: VecDeque<(u64, Vec<RemovedEntry>)>,
}

impl Removing {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.emptying.is_empty()
    }

    fn append(&mut self, mut other: Removing) {
        self.waiting.append(&mut other.waiting);
        self.emptying.append(&mut other.emptying);
    }
}

/// Entries whose words were read before the cut with this number was published, or another one after it.
#[derive(Debug)]
pub(super) struct Waiting {
    latest: u64,
    read_at_ns: u64,
    pub(super) entries: Vec<SeenEntry>,
}

/// What becomes of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Need {
    /// Nobody needs it.
    None,
    /// Its record has its key.
    Needed,
    /// A snapshot may need it, or a commit is about to change that.
    Later,
}

impl<I: IndexRules> KeyedTable<I> {
    /// Takes a step for each secondary index: looks at entries that were noted as of no use, and removes
    /// those that were looked at before and that nobody needs. Returns how many it had to do with: 0 means
    /// that there is nothing to do before the horizon has moved on. After an error, nothing has to be done.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn remove_stale<R: Rules>(&self, transaction: &Transaction<'_, R>) -> Result<u64, KeyError> {
        let mut handled = 0;
        for secondary in &self.secondary {
            // Another session of this thread that does the same finds none meanwhile.
            let mut removing = secondary.removing().take();
            let done = self.advance(secondary, &mut removing, transaction).await;
            secondary.removing().borrow_mut().append(removing);
            handled += done?;
        }
        Ok(handled)
    }

    async fn advance<R: Rules>(
        &self,
        secondary: &Secondary,
        removing: &mut Removing,
        transaction: &Transaction<'_, R>,
    ) -> Result<u64, KeyError> {
        let (memory, worker) = (transaction.memory(), transaction.worker());
        let mut handled = 0;
        if removing.waiting.len() < MOST_WAITING {
            let noted = secondary.stale().take(AT_ONCE);
            if !noted.is_empty() {
                handled += noted.len();
                let read_at_ns = memory.endpoint().now_ns();
                let entries = look(secondary, memory, noted).await?;
                let latest = worker.latest_number().await?;
                removing.waiting.push_back(Waiting { latest, read_at_ns, entries });
            }
        }
        if removing.is_empty() {
            return Ok(handled as u64);
        }
        let Some(horizon) = worker.horizon().await? else { return Ok(handled as u64) };
        if let Some((_, places)) = removing.emptying.pop_front_if(|(latest, _)| *latest < horizon.sequence())
        {
            handled += places.len();
            let emptied = places.iter().map(|place| secondary.tree().empty(memory, place));
            let emptied: Result<(), TreeError> = join_all(emptied).await.into_iter().collect();
            emptied.map_err(|error| secondary.error(error))?;
        }
        let is_past = |waiting: &mut Waiting| waiting.latest < horizon.sequence() || !I::waits_to_remove();
        let Some(mut past) = removing.waiting.pop_front_if(is_past) else { return Ok(handled as u64) };
        let all = std::mem::take(&mut past.entries);
        handled += all.len();
        // Only now: a look at the clock that comes late says that more time has passed.
        let is_old = memory.endpoint().now_ns() - past.read_at_ns > LONGEST_WAIT.as_nanos() as u64;
        let done = all.iter().map(|entry| self.remove_one(transaction, secondary, entry, &horizon, is_old));
        let (mut removed, mut failed) = (Vec::new(), Ok(()));
        for (done, entry) in join_all(done).await.into_iter().zip(&all) {
            match done {
                Ok(Done::Removed(place)) => removed.push(place),
                Ok(Done::Later) => past.entries.push(entry.clone()),
                Ok(Done::BeginAnew) => secondary.note_stale(entry.rank.clone()),
                Ok(Done::Needed) => {}
                Err(error) => failed = Err(error),
            }
        }
        handled -= past.entries.len();
        if !past.entries.is_empty() {
            removing.waiting.push_back(past);
        }
        if !removed.is_empty() && removing.emptying.len() < MOST_WAITING {
            removing.emptying.push_back((worker.latest_number().await?, removed));
        }
        failed.map(|()| handled as u64)
    }

    async fn remove_one<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        secondary: &Secondary,
        entry: &SeenEntry,
        horizon: &Cut,
        is_old: bool,
    ) -> Result<Done, KeyError> {
        match self.need_of(transaction, secondary, &entry.rank, horizon).await? {
            Need::Needed => Ok(Done::Needed),
            Need::Later => Ok(Done::Later),
            Need::None if is_old => Ok(Done::BeginAnew),
            Need::None => {
                let removed = secondary.tree().remove(transaction.memory(), entry).await;
                // If it was not removed, perhaps its leaf was replaced.
                Ok(removed.map_err(|error| secondary.error(error))?.map_or(Done::BeginAnew, Done::Removed))
            }
        }
    }
}

/// What was done with an entry.
enum Done {
    Removed(RemovedEntry),
    /// It stays for now.
    Later,
    /// It may be of no use, and its word has to be read once more.
    BeginAnew,
    Needed,
}

/// Those of these entries that are there.
async fn look(secondary: &Secondary, memory: &Memory, ranks: Vec<Rank>) -> Result<Vec<SeenEntry>, KeyError> {
    let mut found = Vec::with_capacity(ranks.len());
    let mut looked = Looked { entries: Vec::new(), next: None };
    for rank in ranks {
        // Ranks are in their order, so several may be in one leaf.
        let is_in_leaf = looked.entries.first().is_some_and(|first| first.rank <= rank)
            && looked.next.as_ref().is_none_or(|next| rank < *next);
        if !is_in_leaf {
            looked = match secondary.tree().look(memory, &rank).await {
                Ok(looked) => looked,
                // A leaf has to be replaced first, and there is none to do so.
                Err(TreeError::Full | TreeError::BeyondPieces) => continue,
                Err(error) => return Err(secondary.error(error)),
            };
        }
        found.extend(looked.entries.iter().filter(|entry| entry.rank == rank).cloned());
    }
    Ok(found)
}

impl<I: IndexRules> KeyedTable<I> {
    async fn need_of<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        secondary: &Secondary,
        rank: &Rank,
        horizon: &Cut,
    ) -> Result<Need, KeyError> {
        // Read now, and from far memory: what the transaction has read before may be of before the horizon.
        let found = match I::removes_behind_the_horizon() {
            true => {
                read_since(transaction.worker(), horizon, (&self.table, rank.number), MOST_VERSIONS).await
            }
            false => read_since(transaction.worker(), transaction.cut(), (&self.table, rank.number), 1).await,
        };
        let rows = match found {
            Ok(Some(rows)) => rows,
            // A commit has locked the record, or a version was given up meanwhile.
            Ok(None) | Err(ReadError::Conflict | ReadError::SnapshotTooOld | ReadError::Damaged) => {
                return Ok(Need::Later);
            }
            Err(ReadError::OutOfRange(_)) => return Ok(Need::Needed), // in a piece that is not known here
            Err(error) => return Err(error.into()),
        };
        for (age, row) in rows.into_iter().enumerate() {
            let key = row.data.as_deref().map(|data| secondary.key_of(data)).transpose()?.flatten();
            match (key.as_deref() == Some(&rank.key), age) {
                (true, 0) => return Ok(Need::Needed),
                (true, _) => return Ok(Need::Later),
                (false, _) => {}
            }
        }
        Ok(Need::None)
    }
}
