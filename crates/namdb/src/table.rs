//! Tables with keys and rows of the program's types.

use std::cell::Cell;
use std::marker::PhantomData;

use farpool_txn::{KeyedTable, Shipped};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::catalog::TableRow;
use crate::database::Shared;
use crate::error::TxError;

/// What a key is made of: bytes, as many for each key of the type.
pub trait Key {
    /// How many.
    const BYTES: usize;

    /// The bytes; keys that differ have others.
    fn encode(&self) -> impl AsRef<[u8]>;
}

macro_rules! numbers_are_keys {
    ($($number:ty),*) => {$(
        impl Key for $number {
            const BYTES: usize = size_of::<$number>();

            fn encode(&self) -> impl AsRef<[u8]> {
                self.to_le_bytes()
            }
        }
    )*};
}

numbers_are_keys!(u16, u32, u64, u128, i16, i32, i64, i128);

impl<const BYTES: usize> Key for [u8; BYTES] {
    const BYTES: usize = BYTES;

    fn encode(&self) -> impl AsRef<[u8]> {
        self
    }
}

impl<A: Key, B: Key> Key for (A, B) {
    const BYTES: usize = A::BYTES + B::BYTES;

    fn encode(&self) -> impl AsRef<[u8]> {
        [self.0.encode().as_ref(), self.1.encode().as_ref()].concat()
    }
}

impl<A: Key, B: Key, C: Key> Key for (A, B, C) {
    const BYTES: usize = A::BYTES + B::BYTES + C::BYTES;

    fn encode(&self) -> impl AsRef<[u8]> {
        [self.0.encode().as_ref(), self.1.encode().as_ref(), self.2.encode().as_ref()].concat()
    }
}

/// Room that even a table of a few rows has for old versions of them: these may be written often.
const LEAST_OVERFLOW_BYTES: u64 = 128 << 10;

/// How large a table is to be: its memory is taken when it is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableOptions {
    /// Keys that it can have, all that were ever inserted.
    pub rows: u64,
    /// Bytes of the largest row, in the format of crate `postcard`.
    pub row_bytes: usize,
    /// Versions of each row that are kept for snapshots, beside the current one, from 1 to 64.
    pub old_versions: usize,
    /// Versions of any of its rows that are kept beside these while a snapshot needs them. Where there is no room for another, who writes
    /// that row waits for the snapshot to end. `None`: half as many as rows, and some more.
    pub overflow: Option<u64>,
}

impl TableOptions {
    /// For so many keys, with rows of up to 64 bytes.
    pub fn rows(rows: u64) -> TableOptions {
        TableOptions { rows, row_bytes: 64, old_versions: 8, overflow: None }
    }

    /// With rows of up to so many bytes.
    pub fn row_bytes(self, row_bytes: usize) -> TableOptions {
        TableOptions { row_bytes, ..self }
    }

    /// With so many old versions of each row.
    pub fn old_versions(self, old_versions: usize) -> TableOptions {
        TableOptions { old_versions, ..self }
    }

    /// With room for so many versions more, of whichever rows.
    pub fn overflow(self, overflow: u64) -> TableOptions {
        TableOptions { overflow: Some(overflow), ..self }
    }

    /// How many versions are kept beside those of each row.
    pub(crate) fn overflow_or_usual(&self) -> u64 {
        self.overflow.unwrap_or(self.rows / 2 + LEAST_OVERFLOW_BYTES / self.row_bytes.max(1) as u64)
    }
}

/// A table, as one thread works with it: rows `V`, each known by a key `K`. What a row looks like is the programs' to agree upon.
pub struct Table<K, V> {
    name: String,
    first_record: u64,
    row_bytes: usize,
    keyed: KeyedTable<Shipped>,
    /// How often tables had been made and dropped when it was found...
    known_since: u64,
    /// ...and when it was last seen to be there.
    checked_at: Cell<u64>,
    types: PhantomData<fn(K) -> V>,
}

impl<K: Key, V> Table<K, V> {
    pub(crate) fn new(shared: &Shared, name: &str, row: TableRow, schema: u64) -> Result<Self, TxError> {
        if row.key_bytes as usize != K::BYTES {
            let what = format!("keys of {} bytes, not {}", row.key_bytes, K::BYTES);
            return Err(TxError::OtherShape { table: name.to_owned(), what });
        }
        let damaged = || TxError::Damaged(format!("table {name}: its row in the catalog makes no sense"));
        let keyed = row.keyed(shared).ok_or_else(damaged)?;
        Ok(Table {
            name: name.to_owned(),
            first_record: row.first_record,
            row_bytes: row.row_bytes as usize,
            keyed,
            known_since: schema,
            checked_at: Cell::new(schema),
            types: PhantomData,
        })
    }
}

impl<K, V> Table<K, V> {
    /// By which it is found.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn keyed(&self) -> &KeyedTable<Shipped> {
        &self.keyed
    }

    pub(crate) fn first_record(&self) -> u64 {
        self.first_record
    }

    pub(crate) fn known_since(&self) -> u64 {
        self.known_since
    }

    pub(crate) fn checked_at(&self) -> u64 {
        self.checked_at.get()
    }

    pub(crate) fn is_there(&self, schema: u64) {
        self.checked_at.set(schema);
    }
}

impl<K, V: Serialize> Table<K, V> {
    pub(crate) fn encode(&self, row: &V) -> Result<Vec<u8>, TxError> {
        let wrong = |_| TxError::WrongType(self.name.clone());
        let mut bytes = postcard::to_stdvec(row).map_err(wrong)?;
        if bytes.len() > self.row_bytes {
            let (table, found, most) = (self.name.clone(), bytes.len(), self.row_bytes);
            return Err(TxError::RowTooLarge { table, found, most });
        }
        // The format says itself where a row ends.
        bytes.resize(self.row_bytes, 0);
        Ok(bytes)
    }
}

impl<K, V: DeserializeOwned> Table<K, V> {
    pub(crate) fn decode(&self, bytes: &[u8]) -> Result<V, TxError> {
        let (row, _) = postcard::take_from_bytes(bytes).map_err(|_| TxError::WrongType(self.name.clone()))?;
        Ok(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_several_parts_have_the_bytes_of_all() {
        assert_eq!(<(u16, u32, [u8; 3])>::BYTES, 9);
        let key = (0x0102_u16, 3_u32, *b"abc");
        assert_eq!(key.encode().as_ref(), [2, 1, 3, 0, 0, 0, b'a', b'b', b'c']);
    }
}
