//! Tables with keys and rows of the program's types.

mod index;
mod options;

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use farpool_txn::{KeyOfRow, KeyedTable, Memory, Secondary};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::catalog::TableRow;
use crate::environment::Environment;
use crate::error::{Ended, TxError};
use crate::key::{Key, KeyBytes, OwnedKey};
use crate::member::MemberCore;
pub use index::Index;
pub(crate) use index::{Declared, Known};
pub use options::TableOptions;

/// Of a table that has to be looked up in the catalog before it is used.
const NEVER: u64 = u64::MAX;

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
    core: Rc<TableCore>,
    types: PhantomData<fn(&K) -> V>,
}

/// A table, whatever its keys and rows are.
pub(crate) struct TableCore {
    name: String,
    first_record: u64,
    key_type: String,
    /// Bytes of each key.
    key_bytes: usize,
    /// Bytes of a row, at most.
    row_bytes: usize,
    /// Rows have any length up to that; without a slab, all are padded to it.
    has_slab: bool,
    /// Its records and their indexes. Replaced when this client learns that the table has grown, or has other
    /// indexes.
    keyed: RefCell<Rc<KeyedTable>>,
    /// Opens records and indexes as the catalog describes them, if all regions with them are open.
    open: Box<Open>,
    /// How often the catalog had changed (tables created, grown or dropped) when it was found,
    known_since: u64,
    /// and when it was last seen to exist.
    checked_at: Cell<u64>,
    /// The indexes that the program has declared.
    declared: RefCell<Vec<Rc<Declared>>>,
    /// The indexes that it had when it was last seen to exist. `None`: that is not known.
    indexes: RefCell<Option<Vec<TableRow>>>,
}

/// Opens a table as rows of the catalog describe it and those of its indexes whose keys are known. `None`: a
/// region with a part of it is not open.
type Open = dyn Fn(&TableRow, Vec<(&TableRow, Rc<KeyOfRow>)>, &Memory) -> Result<Option<KeyedTable>, TxError>;

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
        self.core.pad_key(KeyBytes::of(key))
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
        let core = Rc::new(TableCore::new(member, name, row, schema)?);
        Ok(Table { core, types: PhantomData })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// Bytes of the longest row, if rows have any length.
    pub(crate) fn longest(&self) -> Option<usize> {
        self.core.has_slab.then_some(self.core.row_bytes)
    }

    /// Its records, as far as this client knows.
    pub fn records(&self) -> farpool_txn::Table {
        self.core.keyed().table().clone()
    }

    /// The number of its first record, which no other table of the database ever has.
    pub fn first_record(&self) -> u64 {
        self.core.first_record
    }

    pub(crate) fn core(&self) -> &Rc<TableCore> {
        &self.core
    }
}

impl<K: Key + ?Sized, V: DeserializeOwned + 'static> Table<K, V> {
    /// Declares a secondary index: the rows in the order of the keys that `key` makes of them, which several
    /// rows may share. Rows for which it returns `None` are not in the index.
    ///
    /// Every program that writes to a table declares all indexes that the table has, with the same function,
    /// each time it opens the table. The catalog does not have these functions. [`Client::create_index`]
    /// makes the index; until then, to declare it changes nothing. If programs disagree on the function, they
    /// remove entries that others need, and rows are missing in the index: to change the function, create an
    /// index with another name. A declaration replaces an earlier one of the same name, whose [`Index`] is
    /// not to be used any more.
    ///
    /// [`Client::create_index`]: crate::Client::create_index
    pub fn declare<I: OwnedKey>(&self, index: &str, key: impl Fn(&V) -> Option<I> + 'static) -> Index<V, I> {
        let declared = Rc::new(Declared::new::<V, I>(index, key));
        let mut all = self.core.declared.borrow_mut();
        all.retain(|other| other.name() != index);
        all.push(declared.clone());
        // The next use of the table finds out whether it has the index.
        self.core.checked_at.set(NEVER);
        self.core.indexes.replace(None);
        Index::new(declared)
    }
}

impl TableCore {
    fn new<E: Environment + 'static>(
        member: &Arc<MemberCore<E>>,
        name: &str,
        row: TableRow,
        schema: u64,
    ) -> Result<Self, TxError> {
        let keyed = row.keyed(member).ok_or_else(|| damaged(name))?;
        // A table that outlives its database does not hold the leases.
        let member = Arc::downgrade(member);
        let open = move |row: &TableRow, indexes: Vec<(&TableRow, Rc<KeyOfRow>)>, memory: &Memory| {
            let member = member.upgrade().ok_or(TxError::Ended(Ended::Closed))?;
            let rows = || indexes.iter().map(|(index, _)| *index).chain([row]);
            if !rows().all(|row| row.is_open(&member.regions(), memory)) {
                return Ok(None);
            }
            let damaged = || damaged(&row.name);
            let keyed = row.keyed(&member).ok_or_else(damaged)?;
            let secondary = indexes.into_iter().map(|(index, key_of)| {
                let tree = index.order(&member).ok_or_else(damaged)?;
                let stale = member.stale_entries(index.first_record);
                let secondary = Secondary::new(index.first_record, tree, key_of, stale);
                Ok::<_, TxError>(if index.is_unique { secondary.unique() } else { secondary })
            });
            Ok(Some(keyed.with_secondary(secondary.collect::<Result<_, _>>()?)))
        };
        let has_indexes = !row.indexes.is_empty();
        let (row_bytes, has_slab) = (row.most_bytes() as usize, row.has_slab());
        Ok(TableCore {
            name: name.to_owned(),
            first_record: row.first_record,
            key_type: row.key_type,
            key_bytes: row.key_bytes as usize,
            row_bytes,
            has_slab,
            keyed: RefCell::new(Rc::new(keyed)),
            open: Box::new(open),
            known_since: schema,
            checked_at: Cell::new(if has_indexes { NEVER } else { schema }),
            declared: RefCell::default(),
            indexes: RefCell::new((!has_indexes).then(Vec::new)),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The [type](Key::type_name) of its keys.
    pub(crate) fn key_type(&self) -> &str {
        &self.key_type
    }

    /// A key, padded to the key length of this table.
    pub(crate) fn pad_key(&self, key: KeyBytes) -> Result<KeyBytes, TxError> {
        let too_long = || TxError::KeyTooLong { table: self.name.clone(), most: self.key_bytes };
        key.into_padded(self.key_bytes).ok_or_else(too_long)
    }

    /// A row, padded to the length of the table's rows, unless these have any length.
    pub(crate) fn pad_row(&self, mut row: Vec<u8>) -> Result<Vec<u8>, TxError> {
        if row.len() > self.row_bytes {
            let (table, found, most) = (self.name.clone(), row.len(), self.row_bytes);
            return Err(TxError::RowTooLarge { table, found, most });
        }
        if !self.has_slab {
            // The format itself says where a row ends.
            row.resize(self.row_bytes, 0);
        }
        Ok(row)
    }

    pub(crate) fn first_record(&self) -> u64 {
        self.first_record
    }

    pub(crate) fn keyed(&self) -> Rc<KeyedTable> {
        self.keyed.borrow().clone()
    }

    pub(crate) fn known_since(&self) -> u64 {
        self.known_since
    }

    pub(crate) fn checked_at(&self) -> u64 {
        self.checked_at.get()
    }

    /// The row of one of its indexes.
    pub(crate) fn index(&self, number: u64) -> Option<TableRow> {
        self.indexes.borrow().as_ref()?.iter().find(|index| index.first_record == number).cloned()
    }

    /// Checks that the program has declared all indexes of the table.
    pub(crate) fn check_declared(&self) -> Result<(), TxError> {
        let (indexes, declared) = (self.indexes.borrow(), self.declared.borrow());
        let is_declared = |index: &&TableRow| declared.iter().any(|other| other.name() == index.name);
        match indexes.iter().flatten().find(|index| !is_declared(index)) {
            None => Ok(()),
            Some(index) => Err(TxError::Undeclared { table: self.name.clone(), index: index.name.clone() }),
        }
    }

    /// Checks that all indexes that are declared, and exist, can be searched.
    pub(crate) fn check_ready(&self) -> Result<(), TxError> {
        let declared = self.declared.borrow();
        match declared.iter().find(|index| index.known().is_some_and(|known| !known.is_ready)) {
            None => Ok(()),
            Some(index) => Err(TxError::IndexNotReady(index.name().to_owned())),
        }
    }

    /// The table exists in a snapshot, with this row and these indexes.
    pub(crate) fn note_existing(
        &self,
        row: &TableRow,
        indexes: Vec<TableRow>,
        schema: u64,
        memory: &Memory,
    ) -> Result<Noted, TxError> {
        let before = self.keyed();
        if !self.covers(row, &indexes) {
            let has_shrunk = |index: &TableRow| {
                self.index(index.first_record).is_some_and(|known| index.pieces() < known.pieces())
            };
            if row.pieces() < before.table().pieces() || indexes.iter().any(has_shrunk) {
                return Ok(Noted::TooOld);
            }
            let mut known = Vec::new();
            for declared in self.declared.borrow().iter() {
                if let Some(index) = indexes.iter().find(|index| index.name == declared.name()) {
                    known.push((index, declared.key_of(&self.name, index)?));
                }
            }
            let Some(opened) = (self.open)(row, known, memory)? else { return Ok(Noted::LacksRegions) };
            opened.remember_what_is_known_of(&before);
            self.keyed.replace(Rc::new(opened));
            self.note_known(&indexes);
            self.indexes.replace(Some(indexes));
        } else {
            self.note_known(&indexes);
        }
        self.checked_at.set(schema);
        Ok(Noted::Opened)
    }

    fn note_known(&self, indexes: &[TableRow]) {
        for declared in self.declared.borrow().iter() {
            declared.note(indexes.iter().find(|index| index.name == declared.name()));
        }
    }

    /// Whether all pieces of these are open, and no other index is.
    fn covers(&self, row: &TableRow, indexes: &[TableRow]) -> bool {
        let is_covered = |(known, index): (&TableRow, &TableRow)| {
            known.first_record == index.first_record && index.pieces() <= known.pieces()
        };
        let are_covered =
            |known: &Vec<TableRow>| known.len() == indexes.len() && known.iter().zip(indexes).all(is_covered);
        row.pieces() <= self.keyed().table().pieces()
            && self.indexes.borrow().as_ref().is_some_and(are_covered)
    }
}

/// What becomes of a table that was looked up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Noted {
    /// It can be used.
    Opened,
    /// A part of it lies in a region that is not open.
    LacksRegions,
    /// Another session of this client has found later that it has grown, and that it has other indexes.
    TooOld,
}

fn damaged(table: &str) -> TxError {
    TxError::Damaged(format!("table {table}: its row in the catalog is damaged"))
}

impl<K: ?Sized, V: Serialize> Table<K, V> {
    pub(crate) fn encode(&self, row: &V) -> Result<Vec<u8>, TxError> {
        let wrong = |_| TxError::WrongType(self.core.name.clone());
        self.core.pad_row(postcard::to_stdvec(row).map_err(wrong)?)
    }
}

impl<K: ?Sized, V: DeserializeOwned> Table<K, V> {
    pub(crate) fn decode(&self, bytes: &[u8]) -> Result<V, TxError> {
        let (row, _) =
            postcard::take_from_bytes(bytes).map_err(|_| TxError::WrongType(self.core.name.clone()))?;
        Ok(row)
    }
}
