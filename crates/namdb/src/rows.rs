//! The rows that a scan finds, one after the other.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

use farpool_txn::{Direction, Scan, Scanned, Shipped};
use serde::de::DeserializeOwned;

use crate::error::TxError;
use crate::key::OwnedKey;
use crate::rules::MemberRules;
use crate::table::Table;
use crate::transacting::Tx;

/// The rows of a [scan](Tx::scan). They are read some dozens at a time, in the transaction's snapshot, with
/// the transaction's own writes as they are then.
pub struct Rows<'t, 'a, K, V, R: MemberRules = Shipped> {
    tx: &'t Tx<'a, R>,
    table: &'t Table<K, V>,
    /// Rows that were read: encoded keys and rows.
    read: VecDeque<(Box<[u8]>, Vec<u8>)>,
    /// What is to be read. `None`: nothing.
    rest: Option<Scan>,
    /// A bound of the range cannot be a key of this table.
    error: Option<TxError>,
    types: PhantomData<(K, V)>,
}

impl<'t, 'a, K: OwnedKey, V: DeserializeOwned, R: MemberRules> Rows<'t, 'a, K, V, R> {
    pub(crate) fn new(
        tx: &'t Tx<'a, R>,
        table: &'t Table<K, V>,
        range: impl RangeBounds<K>,
        direction: Direction,
    ) -> Self {
        let (rest, error) = match Self::encode(table, &range, direction) {
            Ok(scan) => (Some(scan), None),
            Err(error) => (None, Some(error)),
        };
        Rows { tx, table, read: VecDeque::new(), rest, error, types: PhantomData }
    }

    fn encode(
        table: &Table<K, V>,
        range: &impl RangeBounds<K>,
        direction: Direction,
    ) -> Result<Scan, TxError> {
        let bound = |bound: Bound<&K>| {
            Ok::<_, TxError>(match bound {
                Bound::Included(key) => Bound::Included(table.encode_key(key)?),
                Bound::Excluded(key) => Bound::Excluded(table.encode_key(key)?),
                Bound::Unbounded => Bound::Unbounded,
            })
        };
        let (first, end) = (bound(range.start_bound())?, bound(range.end_bound())?);
        Ok(Scan::new((first.as_ref().map(|key| &key[..]), end.as_ref().map(|key| &key[..])), direction))
    }

    /// The next row, with its key. `None`: there are no more.
    ///
    /// # Errors
    /// When it cannot be read, the table has no order, or it was dropped. The scan has ended then.
    pub async fn next(&mut self) -> Result<Option<(K, V)>, TxError> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        while self.read.is_empty() {
            let Some(scan) = self.rest.take() else { return Ok(None) };
            let Scanned { rows, next } = self.tx.scan_some(self.table, scan).await?;
            self.read.extend(rows.into_iter().filter_map(|(key, row)| Some((key, row.data?))));
            self.rest = next;
        }
        let Some((key, row)) = self.read.pop_front() else { return Ok(None) };
        let wrong = || TxError::WrongType(self.table.name().to_owned());
        let decoded =
            K::decode(&mut &key[..]).ok_or_else(wrong).and_then(|key| Ok((key, self.table.decode(&row)?)));
        if decoded.is_err() {
            self.read.clear();
            self.rest = None;
        }
        decoded.map(Some)
    }

    /// All further rows.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub async fn collect(mut self) -> Result<Vec<(K, V)>, TxError> {
        let mut all = Vec::new();
        while let Some(row) = self.next().await? {
            all.push(row);
        }
        Ok(all)
    }
}
