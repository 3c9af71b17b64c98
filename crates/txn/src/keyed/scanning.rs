//! Finding rows in the order of keys.

use std::ops::Bound;

use futures_util::future::join_all;

use super::{KeyError, KeyedTable};
use crate::error::ReadError;
use crate::hash::{IndexError, IndexRules};
use crate::memory::Memory;
use crate::rules::Rules;
use crate::transaction::{Row, Transaction};
use crate::tree::{Rank, Run, Tree, TreeError};

/// Rows that a scan has found, in its direction, and where it goes on.
pub struct Scanned<T = (Box<[u8]>, Row)> {
    /// Keys with their rows.
    pub rows: Vec<T>,
    /// `None`: there are no more.
    pub next: Option<Scan>,
}

/// A row that was found in a secondary index.
pub struct FoundBy {
    /// Its key in that index,
    pub by: Box<[u8]>,
    /// and its own.
    pub key: Vec<u8>,
    /// The row.
    pub row: Row,
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

    /// A scan of one key.
    pub(super) fn of_key(key: &[u8]) -> Scan {
        Scan::new((Bound::Included(key), Bound::Included(key)), Direction::Ascending)
    }

    /// A scan of all keys.
    pub fn all() -> Scan {
        Scan { first: None, end: None, direction: Direction::Ascending }
    }

    fn is_empty(&self) -> bool {
        matches!((&self.first, &self.end), (Some(first), Some(end)) if first >= end)
    }

    fn covers(&self, rank: &Rank) -> bool {
        self.first.as_ref().is_none_or(|first| rank >= first)
            && self.end.as_ref().is_none_or(|end| rank < end)
    }

    /// The entries that it finds next in an index, in its direction: those in one leaf. And the rest of it.
    pub(super) async fn run(
        self,
        memory: &Memory,
        order: &Tree,
    ) -> Result<(Vec<Rank>, Option<Scan>), TreeError> {
        if self.is_empty() {
            return Ok((Vec::new(), None));
        }
        let Run { entries, next } = match self.direction {
            Direction::Ascending => {
                let lowest = || Rank::new(&vec![0; order.layout().leaf().key_bytes()], 0);
                order.run_from(memory, &self.first.clone().unwrap_or_else(lowest)).await?
            }
            Direction::Descending => order.run_below(memory, self.end.as_ref()).await?,
        };
        let mut ranks: Vec<Rank> =
            entries.into_iter().map(|(rank, _)| rank).filter(|rank| self.covers(rank)).collect();
        if self.direction == Direction::Descending {
            ranks.reverse();
        }
        let rest = next.map(|fence| match self.direction {
            Direction::Ascending => Scan { first: Some(fence), ..self },
            Direction::Descending => Scan { end: Some(fence), ..self },
        });
        Ok((ranks, rest.filter(|rest| !rest.is_empty())))
    }
}

/// The key beside a record, if there is one.
type KeyFound = Result<Option<Vec<u8>>, IndexError>;

/// Rows that are read together, if they are read in the order of their numbers, and bytes of all of them.
const ROWS_AT_ONCE: u64 = 512;
const BYTES_AT_ONCE: u64 = 4 << 20;

impl<I: IndexRules> KeyedTable<I> {
    /// Reads some rows in no particular order, each with its key, from the record with the number `first` on.
    /// Returns the number with which to go on, too; `None`: there are no more.
    ///
    /// # Errors
    /// When far memory does not answer, or has bytes that no client writes.
    pub async fn rows_from<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        first: u64,
    ) -> Result<(Vec<(Vec<u8>, Vec<u8>)>, Option<u64>), KeyError> {
        let (rows, next) = self.numbered_rows(transaction, first).await?;
        let keys = rows.iter().map(|(number, _)| self.index.key_of(transaction.memory(), *number));
        let with_key =
            |(key, (_, data)): (KeyFound, _)| Ok::<_, KeyError>((key?.ok_or(ReadError::Damaged)?, data));
        let rows = join_all(keys).await.into_iter().zip(rows).map(with_key).collect::<Result<_, _>>()?;
        Ok((rows, next))
    }

    /// Reads some rows, each with its number, from the record with the number `first` on. Returns the number
    /// with which to go on, too.
    pub(super) async fn numbered_rows<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        first: u64,
    ) -> Result<(Vec<(u64, Vec<u8>)>, Option<u64>), KeyError> {
        let rows = (BYTES_AT_ONCE / self.table.longest() as u64).clamp(1, ROWS_AT_ONCE);
        let end = self.table.records().min(first.saturating_add(rows));
        let numbers: Vec<u64> = (first..end).collect();
        let found = transaction.read_many(&self.table, &numbers).await?;
        let rows = numbers.into_iter().zip(found).filter_map(|(number, row)| Some((number, row.data?)));
        Ok((rows.collect(), (end < self.table.records()).then_some(end)))
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
        let (ranks, next) = scan.run(transaction.memory(), order).await?;
        let rows = self.rows_at(transaction, &ranks).await?;
        let is_row = |(_, row): &(Rank, Row)| row.data.is_some() || !I::scans_visible_rows();
        let rows = ranks.into_iter().zip(rows).filter(is_row);
        let rows = rows.map(|(rank, row)| (rank.key, row)).collect();
        Ok(Scanned { rows, next })
    }

    /// Reads some rows in the order of their keys in a secondary index: those in one leaf of it. There may be
    /// more though there are none here.
    ///
    /// # Errors
    /// [`KeyError::NoSuchIndex`]; [`KeyError::BadRow`]; or when far memory does not answer.
    pub async fn scan_by<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        index: u64,
        scan: Scan,
    ) -> Result<Scanned<FoundBy>, KeyError> {
        let (secondary, memory) = (self.secondary(index)?, transaction.memory());
        let run = scan.run(memory, secondary.tree()).await;
        let (ranks, next) = run.map_err(|error| secondary.error(error))?;
        let found = self.rows_at(transaction, &ranks).await?;
        let mut rows = Vec::with_capacity(ranks.len());
        for (rank, row) in ranks.into_iter().zip(found) {
            let by = row.data.as_deref().map(|data| secondary.key_of(data)).transpose()?.flatten();
            match by {
                Some(by) if *by == *rank.key || !I::compares_keys_of_rows() => rows.push((rank, row)),
                // Perhaps nobody needs this entry.
                _ => secondary.note_stale(rank),
            }
        }
        let keys = rows.iter().map(|(rank, _)| self.index.key_of(memory, rank.number));
        let keys = join_all(keys).await;
        let found = |((rank, row), key): ((Rank, Row), KeyFound)| {
            let key = key?.ok_or(ReadError::Damaged)?;
            Ok::<_, KeyError>(FoundBy { by: rank.key, key, row })
        };
        let rows = rows.into_iter().zip(keys).map(found).collect::<Result<_, _>>()?;
        Ok(Scanned { rows, next })
    }

    /// The records of some entries, as the transaction sees them.
    async fn rows_at<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        ranks: &[Rank],
    ) -> Result<Vec<Row>, KeyError> {
        let numbers: Vec<u64> = ranks.iter().map(|rank| rank.number).collect();
        if numbers.iter().any(|&number| number >= self.table.records()) && I::stops_at_unknown_pieces() {
            return Err(TreeError::BeyondPieces.into());
        }
        Ok(transaction.read_many(&self.table, &numbers).await?)
    }
}
