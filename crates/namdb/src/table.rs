//! Tables with keys and rows of the program's types.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use farpool_txn::slab::{Class, LEAST_DATA_BYTES, SlabLayout};
use farpool_txn::{KeyedTable, Memory};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::catalog::TableRow;
use crate::environment::Environment;
use crate::error::{Ended, TxError};
use crate::key::{Key, KeyBytes};
use crate::member::MemberCore;

/// If rows may be long: bytes for the length before a row that lies in its place.
const LENGTH_BYTES: usize = 8;
/// Wanted number of chunks in each slab: each compute server has at least one chunk for each size of blocks
/// that it needs.
const CHUNKS_WANTED: u64 = 64;
/// Most blocks for the longest rows in a chunk.
const MOST_LONGEST_BLOCKS: u64 = 16;
/// Chunks of the smallest slab: enough for two compute servers that write rows of several sizes.
const LEAST_CHUNKS: u64 = 16;

/// The size of a new table. Its memory is taken when it is made.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use farpool_namdb::TableOptions;
///
/// // A million rows of up to 200 bytes; the few that are longer have up to 64 KiB each, 1 GiB together.
/// let options = TableOptions::rows(1_000_000).row_bytes(200).longest(64 << 10).slab_bytes(1 << 30);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableOptions {
    /// How many keys it has room for before it grows, counting all that were ever inserted.
    pub rows: u64,
    /// Bytes of the largest row, in the format of crate `postcard`.
    pub row_bytes: usize,
    /// Bytes of the longest row, if rows of more than `row_bytes` are to lie in a slab beside the table.
    pub longest: Option<usize>,
    /// Bytes of the longest encoded key, if keys have variable length: a string takes one byte more than its
    /// length, and one more for each byte 0 or 1 in it. At most 256.
    pub key_bytes: usize,
    /// Bytes of that slab at first. `None`: room for as many of the longest rows as the table has keys.
    pub slab_bytes: Option<u64>,
    /// Whether its keys are kept in order, for [scans](crate::Tx::scan).
    pub is_ordered: bool,
}

impl TableOptions {
    /// A table with room for this many keys before it grows, with rows of up to 64 bytes.
    pub fn rows(rows: u64) -> TableOptions {
        TableOptions {
            rows,
            row_bytes: 64,
            longest: None,
            key_bytes: 64,
            slab_bytes: None,
            is_ordered: false,
        }
    }

    /// With keys in order: [`Tx::scan`](crate::Tx::scan) finds the rows of a range of keys. Inserting a new
    /// key then takes three more round trips, and keys take more memory (`docs/src/namdb.md`, *limits*).
    pub fn ordered(self) -> TableOptions {
        TableOptions { is_ordered: true, ..self }
    }

    /// With keys of up to this many bytes, if keys have any length.
    pub fn key_bytes(self, key_bytes: usize) -> TableOptions {
        TableOptions { key_bytes, ..self }
    }

    /// With rows of up to this many bytes.
    pub fn row_bytes(self, row_bytes: usize) -> TableOptions {
        TableOptions { row_bytes, ..self }
    }

    /// With rows of up to this many bytes, 1 MiB at most. Rows of more than `row_bytes` lie in a slab.
    pub fn longest(self, longest: usize) -> TableOptions {
        TableOptions { longest: Some(longest), ..self }
    }

    /// With a slab of about this many bytes. Each version that a snapshot may need takes a block of it, of a
    /// power of two from 128 bytes on. Each compute server takes a piece of it for each size that it writes.
    pub fn slab_bytes(self, slab_bytes: u64) -> TableOptions {
        TableOptions { slab_bytes: Some(slab_bytes), ..self }
    }

    /// Bytes of a row's place.
    pub(crate) fn place_bytes(&self) -> usize {
        let bytes = self.row_bytes.next_multiple_of(8);
        if self.longest.is_some() { (bytes + LENGTH_BYTES).max(LEAST_DATA_BYTES) } else { bytes }
    }

    /// The slab of each of this many pieces, if the table is to have one.
    pub(crate) fn slab_each(&self, pieces: u64) -> Option<SlabLayout> {
        let longest = self.longest?.max(1);
        let block = Class::of(longest)?.bytes();
        let all = self.slab_bytes.unwrap_or(self.rows.saturating_mul(block));
        let each = all.div_ceil(pieces);
        let blocks = (each / block / CHUNKS_WANTED).clamp(1, MOST_LONGEST_BLOCKS);
        SlabLayout::for_payloads(longest, blocks, each.max(LEAST_CHUNKS * block))
    }
}

/// A table, for use by one thread: rows `V`, each with a key `K`. The programs that use a table have to agree
/// on the format of its rows.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use farpool_namdb::{Database, Reach, Table, TableOptions};
/// # let database = Database::open("bank.far".as_ref(), &Reach::default())?;
/// # let client = database.client()?;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct Account {
///     owner: String,
///     cents: i64,
/// }
///
/// let accounts: Table<(u16, u64), Account> = client.create_table("accounts", &TableOptions::rows(1_000))?;
/// # Ok(())
/// # }
/// ```
pub struct Table<K: ?Sized, V> {
    name: String,
    first_record: u64,
    /// Bytes of each key.
    key_bytes: usize,
    /// Bytes of a row, at most.
    row_bytes: usize,
    /// Rows have any length up to that; without a slab, all are padded to it.
    has_slab: bool,
    /// Its records and their index. Replaced when this client learns that the table has grown.
    keyed: RefCell<Rc<KeyedTable>>,
    /// Opens records and index as a row of the catalog describes them, if all regions with them are open.
    open: Box<Open>,
    /// How often the catalog had changed (tables created, grown or dropped) when it was found,
    known_since: u64,
    /// and when it was last seen to exist.
    checked_at: Cell<u64>,
    types: PhantomData<fn(&K) -> V>,
}

/// Opens a table as a row of the catalog describes it. `None`: a region with a part of it is not open.
type Open = dyn Fn(&TableRow, &Memory) -> Result<Option<KeyedTable>, TxError>;

impl<K: Key + ?Sized, V> Table<K, V> {
    pub(crate) fn new<E: Environment + 'static>(
        member: &Arc<MemberCore<E>>,
        name: &str,
        row: TableRow,
        schema: u64,
    ) -> Result<Self, TxError> {
        if row.key_type != K::type_name() {
            let what = format!("keys of type {}, not {}", row.key_type, K::type_name());
            return Err(TxError::OtherShape { table: name.to_owned(), what });
        }
        Table::of_any_type(member, name, row, schema)
    }

    /// The bytes of a key, padded to the key length of this table.
    pub(crate) fn encode_key(&self, key: &K) -> Result<KeyBytes, TxError> {
        let too_long = || TxError::KeyTooLong { table: self.name.clone(), most: self.key_bytes };
        KeyBytes::of(key).into_padded(self.key_bytes).ok_or_else(too_long)
    }
}

impl<K: ?Sized, V> Table<K, V> {
    /// The table of a row, whatever its keys are.
    pub(crate) fn of_any_type<E: Environment + 'static>(
        member: &Arc<MemberCore<E>>,
        name: &str,
        row: TableRow,
        schema: u64,
    ) -> Result<Self, TxError> {
        let keyed = row.keyed(member).ok_or_else(|| damaged(name))?;
        // A table that outlives its database does not hold the leases.
        let member = Arc::downgrade(member);
        let open = Box::new(move |row: &TableRow, memory: &Memory| {
            let member = member.upgrade().ok_or(TxError::Ended(Ended::Closed))?;
            let is_open = row.is_open(&member.regions(), memory);
            is_open.then(|| row.keyed(&member).ok_or_else(|| damaged(&row.name))).transpose()
        });
        Ok(Table {
            name: name.to_owned(),
            first_record: row.first_record,
            key_bytes: row.key_bytes as usize,
            row_bytes: row.most_bytes() as usize,
            has_slab: row.has_slab(),
            keyed: RefCell::new(Rc::new(keyed)),
            open,
            known_since: schema,
            checked_at: Cell::new(schema),
            types: PhantomData,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of the longest row, if rows have any length.
    pub(crate) fn longest(&self) -> Option<usize> {
        self.has_slab.then_some(self.row_bytes)
    }

    /// Its records, as far as this client knows.
    pub fn records(&self) -> farpool_txn::Table {
        self.keyed().table().clone()
    }

    pub(crate) fn keyed(&self) -> Rc<KeyedTable> {
        self.keyed.borrow().clone()
    }

    /// The number of its first record, which no other table of the database ever has.
    pub fn first_record(&self) -> u64 {
        self.first_record
    }

    pub(crate) fn known_since(&self) -> u64 {
        self.known_since
    }

    pub(crate) fn checked_at(&self) -> u64 {
        self.checked_at.get()
    }

    /// The table exists in a snapshot, with this row. It may have grown. `false`: into a region that is not
    /// open.
    pub(crate) fn note_existing(
        &self,
        row: &TableRow,
        schema: u64,
        memory: &Memory,
    ) -> Result<bool, TxError> {
        if row.pieces() > self.keyed().table().pieces() {
            let Some(grown) = (self.open)(row, memory)? else { return Ok(false) };
            grown.remember_splits_of(&self.keyed());
            self.keyed.replace(Rc::new(grown));
        }
        self.checked_at.set(schema);
        Ok(true)
    }
}

fn damaged(table: &str) -> TxError {
    TxError::Damaged(format!("table {table}: its row in the catalog is damaged"))
}

impl<K: ?Sized, V: Serialize> Table<K, V> {
    pub(crate) fn encode(&self, row: &V) -> Result<Vec<u8>, TxError> {
        let wrong = |_| TxError::WrongType(self.name.clone());
        let mut bytes = postcard::to_stdvec(row).map_err(wrong)?;
        if bytes.len() > self.row_bytes {
            let (table, found, most) = (self.name.clone(), bytes.len(), self.row_bytes);
            return Err(TxError::RowTooLarge { table, found, most });
        }
        if !self.has_slab {
            // The format itself says where a row ends.
            bytes.resize(self.row_bytes, 0);
        }
        Ok(bytes)
    }
}

impl<K: ?Sized, V: DeserializeOwned> Table<K, V> {
    pub(crate) fn decode(&self, bytes: &[u8]) -> Result<V, TxError> {
        let (row, _) = postcard::take_from_bytes(bytes).map_err(|_| TxError::WrongType(self.name.clone()))?;
        Ok(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slab_has_room_for_what_was_asked_and_chunks_for_several_compute_servers() {
        assert_eq!((TableOptions::rows(10).slab_each(1), TableOptions::rows(10).place_bytes()), (None, 64));
        let long = TableOptions::rows(1_000).longest(40_000).row_bytes(100);
        assert_eq!((long.place_bytes(), long.row_bytes(1).place_bytes()), (112, 24));
        let slab = long.slab_each(2).unwrap();
        assert!(slab.longest() >= 40_000 && slab.bytes() * 2 >= 1_000 * 40_000 && slab.chunks() >= 32);
        let small = long.slab_bytes(1).slab_each(3).unwrap();
        assert!(small.longest() >= 40_000 && small.chunks() >= LEAST_CHUNKS - 1, "{small:?}");
        assert!(long.longest(2 << 20).slab_each(1).is_none());
    }
}
