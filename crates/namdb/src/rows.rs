//! The rows that a scan finds, one after the other.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

use farpool_txn::{Direction, FoundBy, Scan, Scanned, Shipped};
use serde::de::DeserializeOwned;

use crate::error::TxError;
use crate::key::{KeyBytes, OwnedKey};
use crate::rules::MemberRules;
use crate::table::{Index, Table};
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

/// The rows of a [scan of a secondary index](Tx::scan_by), as those of [`Rows`].
pub struct RowsBy<'t, 'a, K, V, I, R: MemberRules = Shipped> {
    tx: &'t Tx<'a, R>,
    table: &'t Table<K, V>,
    index: &'t Index<V, I>,
    /// Rows that were read.
    read: VecDeque<FoundBy>,
    rest: Rest,
    types: PhantomData<(K, V, I)>,
}

/// What is left of a scan of an index.
enum Rest {
    /// All of it.
    All(Box<(Bound<KeyBytes>, Bound<KeyBytes>)>, Direction),
    /// This, in the index with this number.
    Some(u64, Scan),
    Nothing,
}

impl<'t, 'a, K: OwnedKey, V: DeserializeOwned, I: OwnedKey, R: MemberRules> RowsBy<'t, 'a, K, V, I, R> {
    pub(crate) fn new(
        tx: &'t Tx<'a, R>,
        table: &'t Table<K, V>,
        index: &'t Index<V, I>,
        range: impl RangeBounds<I>,
        direction: Direction,
    ) -> Self {
        let range = (range.start_bound().map(KeyBytes::of), range.end_bound().map(KeyBytes::of));
        RowsBy::of_range(tx, table, index, range, direction)
    }

    /// Those with one key.
    pub(crate) fn of_key(
        tx: &'t Tx<'a, R>,
        table: &'t Table<K, V>,
        index: &'t Index<V, I>,
        key: KeyBytes,
    ) -> Self {
        let range = (Bound::Included(key.clone()), Bound::Included(key));
        RowsBy::of_range(tx, table, index, range, Direction::Ascending)
    }

    fn of_range(
        tx: &'t Tx<'a, R>,
        table: &'t Table<K, V>,
        index: &'t Index<V, I>,
        range: (Bound<KeyBytes>, Bound<KeyBytes>),
        direction: Direction,
    ) -> Self {
        let rest = Rest::All(Box::new(range), direction);
        RowsBy { tx, table, index, read: VecDeque::new(), rest, types: PhantomData }
    }

    /// The next row, with its key in the index and its own. `None`: there are no more.
    ///
    /// # Errors
    /// [`TxError::NoSuchIndex`] or [`TxError::IndexNotReady`]; or when a row cannot be read, or the table was
    /// dropped. The scan has ended then.
    pub async fn next(&mut self) -> Result<Option<(I, K, V)>, TxError> {
        while self.read.is_empty() {
            let (index, scan) = match std::mem::replace(&mut self.rest, Rest::Nothing) {
                Rest::All(range, direction) => self.begin(*range, direction).await?,
                Rest::Some(index, scan) => (index, scan),
                Rest::Nothing => return Ok(None),
            };
            let Scanned { rows, next } = self.tx.scan_some_by(self.table, index, scan).await?;
            self.read.extend(rows);
            self.rest = next.map_or(Rest::Nothing, |next| Rest::Some(index, next));
        }
        let Some(FoundBy { by, key, row }) = self.read.pop_front() else { return Ok(None) };
        let decoded = I::decode(&mut &by[..]).zip(K::decode(&mut &key[..])).zip(row.data);
        let wrong = || TxError::WrongType(self.table.name().to_owned());
        let decoded =
            decoded.ok_or_else(wrong).and_then(|((by, key), row)| Ok((by, key, self.table.decode(&row)?)));
        if decoded.is_err() {
            self.read.clear();
            self.rest = Rest::Nothing;
        }
        decoded.map(Some)
    }

    /// The index and the range, encoded as its keys are.
    async fn begin(
        &self,
        (first, end): (Bound<KeyBytes>, Bound<KeyBytes>),
        direction: Direction,
    ) -> Result<(u64, Scan), TxError> {
        let known = self.tx.index_of(self.table, self.index.declared()).await?;
        let padded = |bound: Bound<KeyBytes>| {
            let too_long = || TxError::IndexKeyTooLong {
                table: self.table.name().to_owned(),
                index: self.index.name().to_owned(),
                most: known.key_bytes,
            };
            let padded = |key: KeyBytes| key.into_padded(known.key_bytes).ok_or_else(too_long);
            Ok::<_, TxError>(match bound {
                Bound::Included(key) => Bound::Included(padded(key)?),
                Bound::Excluded(key) => Bound::Excluded(padded(key)?),
                Bound::Unbounded => Bound::Unbounded,
            })
        };
        let (first, end) = (padded(first)?, padded(end)?);
        let range = (first.as_ref().map(|key| &key[..]), end.as_ref().map(|key| &key[..]));
        Ok((known.number, Scan::new(range, direction)))
    }

    /// All further rows.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub async fn collect(mut self) -> Result<Vec<(I, K, V)>, TxError> {
        let mut all = Vec::new();
        while let Some(row) = self.next().await? {
            all.push(row);
        }
        Ok(all)
    }
}
