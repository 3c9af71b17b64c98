//! Secondary indexes, as programs declare them.

use std::cell::Cell;
use std::marker::PhantomData;
use std::rc::Rc;

use farpool_txn::{BadRow, KeyOfRow};
use serde::de::DeserializeOwned;

use crate::catalog::TableRow;
use crate::error::TxError;
use crate::key::{KeyBytes, OwnedKey};

/// Bytes of the longest key, unless the program says otherwise.
const KEY_BYTES: usize = 64;

/// A secondary index of a table with rows `V`: the rows in the order of keys `I`, which several rows may
/// share. [`Table::declare`](crate::Table::declare) makes it.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use farpool_namdb::{Database, Reach, Table, TableOptions};
/// # let database = Database::open("shop.far".as_ref(), &Reach::default())?;
/// # let client = database.client()?;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct Customer {
///     last_name: String,
/// }
///
/// let options = TableOptions::rows(1_000);
/// let customers: Table<u64, Customer> = client.open_or_create_table("customers", &options)?;
/// let by_name = customers.declare("by_name", |row| Some(row.last_name.clone()));
/// client.open_or_create_index(&customers, &by_name)?;
/// let lovelaces = client.transact(async |tx| {
///     tx.scan_by(&customers, &by_name, "Lovelace".to_owned()..="Lovelace".to_owned()).collect().await
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct Index<V, I> {
    declared: Rc<Declared>,
    types: PhantomData<fn(&V) -> I>,
}

impl<V, I> Index<V, I> {
    pub(super) fn new(declared: Rc<Declared>) -> Self {
        Index { declared, types: PhantomData }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.declared.name
    }

    /// If it is created: its keys have up to this many bytes, if they have any length. A string takes one
    /// byte more than its length, and one more for each byte 0 or 1 in it. At most 256; 64 unless this is
    /// called.
    pub fn key_bytes(self, key_bytes: usize) -> Self {
        self.declared.longest.set(key_bytes);
        self
    }

    /// If it is created: no two rows may have the same key in it. A write that would give two rows of its
    /// snapshot the same key fails with [`TxError::DuplicateIn`].
    pub fn unique(self) -> Self {
        self.declared.is_unique.set(true);
        self
    }

    pub(crate) fn declared(&self) -> &Declared {
        &self.declared
    }
}

/// What a program has said of an index, and what is known of it.
pub(crate) struct Declared {
    name: String,
    key_type: String,
    /// Bytes of each key. `None`: any length, up to what the index was created for.
    fixed_bytes: Option<usize>,
    /// That length.
    longest: Cell<usize>,
    /// It is to be unique, if it is created.
    is_unique: Cell<bool>,
    /// Makes a row's key, padded to this many bytes.
    key_of: Rc<PaddedKeyOfRow>,
    /// In the snapshot in which the table was checked last.
    known: Cell<Option<Known>>,
}

type PaddedKeyOfRow = dyn Fn(&[u8], usize) -> Result<Option<Vec<u8>>, BadRow>;

/// An index that the catalog has.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    pub(crate) number: u64,
    /// Bytes of its keys.
    pub(crate) key_bytes: usize,
    /// All rows are in it that should be.
    pub(crate) is_ready: bool,
}

impl Declared {
    pub(super) fn new<V: DeserializeOwned + 'static, I: OwnedKey>(
        name: &str,
        key: impl Fn(&V) -> Option<I> + 'static,
    ) -> Declared {
        let index = name.to_owned();
        let key_of = move |data: &[u8], bytes: usize| {
            let (row, _) = postcard::take_from_bytes(data).map_err(|_| BadRow::OtherType)?;
            let Some(key) = key(&row) else { return Ok(None) };
            match KeyBytes::of(&key).padded(bytes) {
                Some(key) => Ok(Some(key.to_vec())),
                None => Err(BadRow::KeyTooLong { index: index.clone(), most: bytes }),
            }
        };
        let (name, key_type) = (name.to_owned(), I::type_name());
        let (longest, is_unique, known) = (Cell::new(KEY_BYTES), Cell::default(), Cell::default());
        Declared { name, key_type, fixed_bytes: I::BYTES, longest, is_unique, key_of: Rc::new(key_of), known }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn key_type(&self) -> &str {
        &self.key_type
    }

    /// Bytes of each key, if it is created.
    pub(crate) fn wanted_bytes(&self) -> usize {
        self.fixed_bytes.unwrap_or(self.longest.get())
    }

    /// Whether it is to be unique, if it is created.
    pub(crate) fn is_unique(&self) -> bool {
        self.is_unique.get()
    }

    /// The index in the snapshot in which the table was checked last. `None`: the table has no such index.
    pub(crate) fn known(&self) -> Option<Known> {
        self.known.get()
    }

    pub(super) fn note(&self, row: Option<&TableRow>) {
        self.known.set(row.map(|row| Known {
            number: row.first_record,
            key_bytes: row.key_bytes as usize,
            is_ready: row.is_ready,
        }));
    }

    /// Makes the keys of rows in the index that the catalog has.
    pub(super) fn key_of(&self, table: &str, row: &TableRow) -> Result<Rc<KeyOfRow>, TxError> {
        if row.key_type != self.key_type {
            let (name, there, here) = (&self.name, &row.key_type, &self.key_type);
            let what = format!("keys of type {there} in index {name}, not {here}");
            return Err(TxError::OtherShape { table: table.to_owned(), what });
        }
        let (key_of, bytes) = (self.key_of.clone(), row.key_bytes as usize);
        Ok(Rc::new(move |data: &[u8]| key_of(data, bytes)))
    }
}
