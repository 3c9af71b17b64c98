//! The catalog (paper 3, section 5.3): the list of tables is itself a table, and ordinary transactions change
//! it.
//!
//! C1. All changes are commits of one slot. So how far a snapshot sees that slot says which tables it has. A
//!     client that has looked at a table in one snapshot need not look again in another snapshot that sees
//!     the slot just as far.
//! C2. The slot belongs to one compute server at a time: the one that has the role for it. Before each
//!     change, that server recovers the slot as it would after a client's death, since the server that had
//!     the role before may have died.
//! C3. Memory that a table takes is zeros. The transaction that makes the table, or lets it grow, also takes
//!     the memory, so both happen or neither does.
//! C4. A dropped table keeps its memory in a *tombstone* until the horizon has the drop. From then on all
//!     snapshots have the drop, and no transaction reads that table any more. Then the collector, or a member
//!     that needs the memory sooner, overwrites it with zeros, and a transaction gives it back.
//! C5. The pieces of a table only become more, and none changes its place. So a client that knows an older
//!     row of a table knows some of its pieces, and nothing false.

mod changing;
mod indexing;
mod leasing;
mod making;
mod returning;
mod tombstones;

use std::collections::BTreeSet;

use farpool_txn::hash::{Index, IndexLayout, IndexShape};
use farpool_txn::layout::{NAME_BYTES, ROW_BYTES};
use farpool_txn::slab::{Slab, SlabLayout};
use farpool_txn::tree::{LeafLayout, Tree, TreeLayout};
use farpool_txn::{
    Cut, DatabaseAt, DatabaseLayout, Growth, KeyError, KeyedTable, Memory, Piece, ReadError, RecordId,
    RecordLayout, Rules, Table, Transaction,
};
use farpool_wire::Slot;
use prost::Message;

use crate::environment::Environment;
use crate::error::{Stop, TxError, of_key};
use crate::maps::Placed;
use crate::member::MemberCore;
use crate::regions::Regions;
pub(crate) use changing::Turn;
pub(crate) use indexing::{NewIndex, ToDrop, create_index, drop_index, mark_index_ready};
pub(crate) use making::{Outlook, create, drop_table, grow, outlook};
pub(crate) use returning::{Waste, look_for_waste, tidy};

/// Bytes of the longest name of a key type.
const MOST_TYPE_BYTES: usize = 64;
/// Pieces of a table at most: a row of the catalog has room for this many places.
const MOST_PIECES: usize = 180;
/// Secondary indexes of a table at most.
const MOST_INDEXES: usize = 8;
/// Numbers that each table gets for its records: more than fit any memory, so a table that grows needs no
/// others.
const RECORDS_EACH: u64 = 1 << 42;
/// The index and the slab of a piece start at multiples of this, so that no bucket or block straddles cache
/// lines that it need not.
const PART_ALIGN: u64 = 4096;
/// Stands for a table's name in error messages about the catalog: "table of tables".
const TABLES: &str = "of tables";

/// A table, as the catalog has it, or a secondary index of a table.
#[derive(Clone, PartialEq, Message)]
pub struct TableRow {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    /// The number of its first record in the numbering of the whole database. No other table ever has this
    /// number.
    #[prost(fixed64, tag = "2")]
    pub(crate) first_record: u64,
    /// Records of each piece of the first layer.
    #[prost(uint64, tag = "3")]
    rows_each: u64,
    #[prost(uint32, tag = "4")]
    pub(crate) row_bytes: u32,
    #[prost(uint32, tag = "6")]
    pub(crate) key_bytes: u32,
    /// The seed of the function that hashes its keys.
    #[prost(fixed64, tag = "7")]
    seed: u64,
    /// For each piece: its region, by its place in the layout of the database,
    #[prost(uint32, repeated, tag = "8")]
    regions: Vec<u32>,
    /// and the first unit that it has there.
    #[prost(uint32, repeated, tag = "9")]
    first_units: Vec<u32>,
    /// Bytes of the longest row, if the table has a slab; 0: it has none.
    #[prost(uint32, tag = "10")]
    longest: u32,
    /// Chunks of the slab in each piece of the first layer, and their size.
    #[prost(uint64, tag = "11")]
    chunks_each: u64,
    #[prost(uint64, tag = "12")]
    chunk_bytes: u64,
    /// The [type](crate::Key::type_name) of its keys.
    #[prost(string, tag = "13")]
    pub(crate) key_type: String,
    /// Pieces of a layer: the table grows by so many at a time.
    #[prost(uint32, tag = "14")]
    layer: u32,
    /// A piece is at most this many times as large as those of the first layer.
    #[prost(uint64, tag = "15")]
    most_times: u64,
    /// Its keys are kept in order.
    #[prost(bool, tag = "16")]
    is_ordered: bool,
    /// The places of its secondary indexes, which have rows of their own.
    #[prost(uint32, repeated, tag = "17")]
    pub(crate) indexes: Vec<u32>,
    /// If this is the row of an index: the first record of its table. The name is the index's, the first
    /// record is its number, and its keys are those by which it orders the rows. 0: a table.
    #[prost(fixed64, tag = "18")]
    pub(crate) index_of: u64,
    /// The index has all rows that it should have.
    #[prost(bool, tag = "19")]
    pub(crate) is_ready: bool,
    /// No two rows have the same key in the index.
    #[prost(bool, tag = "20")]
    pub(crate) is_unique: bool,
    /// If this is the row of an index: its place, which no other index has meanwhile.
    #[prost(uint32, tag = "21")]
    pub(crate) place: u32,
}

/// A description of a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TableInfo {
    /// Its name.
    pub name: String,
    /// How many keys it has room for before it grows.
    pub rows: u64,
    /// Bytes of a row at most.
    pub row_bytes: u32,
    /// The [type](crate::Key::type_name) of its keys.
    pub key_type: String,
    /// Bytes of a key.
    pub key_bytes: u32,
    /// Pieces over which it is spread.
    pub pieces: usize,
    /// Far memory that it takes.
    pub bytes: u64,
    /// Whether its keys are kept in order.
    pub is_ordered: bool,
    /// Its secondary indexes.
    pub indexes: Vec<IndexInfo>,
}

/// A description of a secondary index.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IndexInfo {
    /// Its name.
    pub name: String,
    /// The [type](crate::Key::type_name) of its keys.
    pub key_type: String,
    /// Bytes of a key.
    pub key_bytes: u32,
    /// Whether it has all rows that it should have: it can be searched.
    pub is_ready: bool,
    /// Whether no two rows have the same key in it.
    pub is_unique: bool,
    /// Far memory that it takes.
    pub bytes: u64,
}

/// The layouts of the parts of a table's pieces.
struct Layouts {
    pieces: usize,
    /// How the records, or the entries of an index, are numbered through all pieces.
    numbering: Growth,
    /// The records of a piece of the first layer, and the index in all pieces. `None`: it is an index itself.
    records: Option<(RecordLayout, IndexLayout)>,
    /// The same as for records for the chunks of the slab, if there is one.
    slab: Option<(SlabLayout, Growth)>,
    /// The order of keys in all pieces, if there is one.
    order: Option<TreeLayout>,
}

/// A part of a piece.
#[derive(Clone, Copy)]
enum Part {
    Records,
    Index,
    Order,
    Slab,
}

impl Layouts {
    /// Where the parts of a piece start, by their order in [`Part`], and where the last one ends.
    fn starts(&self, piece: usize) -> [u64; 5] {
        let times = self.numbering.times(piece as u64);
        let order = self.order.map_or(0, |order| order.bytes_of(piece));
        let slab = self.slab.map_or(0, |(slab, _)| slab.with_times(times).bytes());
        let (records, index) =
            self.records.map_or((0, 0), |(records, index)| (records.bytes() * times, index.bytes_of(piece)));
        let sizes = [records, index, order];
        let mut starts = [0; 5];
        for (part, size) in sizes.into_iter().enumerate() {
            starts[part + 1] = (starts[part] + size).next_multiple_of(PART_ALIGN);
        }
        starts[4] = starts[3] + slab;
        starts
    }

    /// Bytes of all pieces.
    fn bytes(&self) -> u64 {
        (0..self.pieces).map(|piece| self.bytes_of(piece)).sum()
    }

    /// Bytes of a piece.
    fn bytes_of(&self, piece: usize) -> u64 {
        self.starts(piece)[4]
    }

    /// Units of a region that a piece takes.
    fn units_of(&self, piece: usize, layout: &DatabaseLayout) -> u64 {
        self.bytes_of(piece).div_ceil(layout.unit_bytes())
    }
}

impl TableRow {
    fn layouts(&self) -> Option<Layouts> {
        let makes_sense = self.regions.len() <= MOST_PIECES
            && self.first_units.len() == self.regions.len()
            && self.first_record.checked_add(RECORDS_EACH).is_some();
        makes_sense.then_some(())?;
        let (pieces, layer) = (self.regions.len(), self.layer as usize);
        let numbering = |each| Growth::new(layer as u64, each, self.most_times);
        let slab = match self.longest {
            0 => None,
            _ => {
                let slab = SlabLayout::new(self.chunks_each, self.chunk_bytes)?;
                let chunks = numbering(slab.chunks())?;
                Slab::can_count(&chunks, pieces).then_some(Some((slab, chunks)))?
            }
        };
        let order = match self.is_ordered || self.is_index() {
            true => {
                let leaf = LeafLayout::new(self.key_bytes as usize)?;
                let pairs = TreeLayout::pairs_for(&leaf, self.rows_each);
                Some(TreeLayout::grown(leaf, pairs, pieces, layer, self.most_times)?)
            }
            false => None,
        };
        let numbering = numbering(self.rows_each)?;
        let records = if self.is_index() { None } else { Some(self.record_layouts()?) };
        Some(Layouts { pieces, numbering, records, slab, order })
    }

    fn record_layouts(&self) -> Option<(RecordLayout, IndexLayout)> {
        let records = RecordLayout::new(self.rows_each, self.row_bytes as usize)?;
        let shape = IndexShape::for_keys(self.rows_each, self.rows_each, self.key_bytes as usize, self.seed);
        let index = IndexLayout::grown(shape, self.regions.len(), self.layer as usize, self.most_times)?;
        (index.records() <= RECORDS_EACH).then_some((records, index))
    }

    /// Whether it is the row of a secondary index.
    pub(crate) fn is_index(&self) -> bool {
        self.index_of != 0
    }

    /// Bytes of a row at most.
    pub(crate) fn most_bytes(&self) -> u32 {
        if self.has_slab() { self.longest } else { self.row_bytes }
    }

    pub(crate) fn has_slab(&self) -> bool {
        self.longest > 0
    }

    /// The table, for use by one thread. `None`: the row makes no sense; no compute server writes such a row.
    pub(crate) fn keyed<E: Environment>(&self, member: &MemberCore<E>) -> Option<KeyedTable> {
        let regions = member.regions();
        let (layouts, mut table) = (self.layouts()?, self.table(&regions)?);
        if let Some((slab, numbering)) = layouts.slab {
            let pieces = self.parts(&regions, &layouts, Part::Slab)?;
            table = table.with_slab(member.slab(self.first_record, slab, numbering, pieces)?)?;
        }
        let (_, index) = layouts.records?;
        let spares = member.spares(self.first_record, &index);
        let pieces = self.parts(&regions, &layouts, Part::Index)?;
        let keyed = KeyedTable::new(table, Index::sharing(index, pieces, spares)?)?;
        Some(if self.is_ordered { keyed.with_order(self.order(member)?) } else { keyed })
    }

    /// The order of its keys, or the index that it is, for use by one thread. `None`: the row makes no sense.
    pub(crate) fn order<E: Environment>(&self, member: &MemberCore<E>) -> Option<Tree> {
        let (regions, layouts) = (member.regions(), self.layouts()?);
        let order = layouts.order?;
        let pieces = self.parts(&regions, &layouts, Part::Order)?;
        Tree::sharing(order, pieces, member.leaves(self.first_record, &order))
    }

    /// A part of each piece. `None`: a region with one is not known.
    fn parts(&self, regions: &Regions<'_>, layouts: &Layouts, part: Part) -> Option<Vec<Piece>> {
        let start = |(piece, Placed { region, unit }): (usize, Placed)| {
            regions.piece(region, unit, layouts.starts(piece)[part as usize])
        };
        self.places().enumerate().map(start).collect()
    }

    /// The place of each piece.
    fn places(&self) -> impl Iterator<Item = Placed> {
        let placed = |(&region, &unit): (&u32, &u32)| Placed { region: region as usize, unit: unit.into() };
        self.regions.iter().zip(&self.first_units).map(placed)
    }

    /// Its records. `None`: as above.
    fn table(&self, regions: &Regions<'_>) -> Option<Table> {
        let (layouts, layout) = (self.layouts()?, regions.layout());
        let fits = |(piece, Placed { region, unit }): (usize, Placed)| {
            let end = layout.start_of(unit).checked_add(layouts.bytes_of(piece));
            region < regions.end() && end.is_some_and(|end| end <= layout.shape.region_bytes)
        };
        if !self.places().enumerate().all(fits) {
            return None;
        }
        let pieces = self.parts(regions, &layouts, Part::Records)?;
        Table::grown(RecordId(self.first_record), layouts.records?.0, layouts.numbering, pieces)
    }

    /// Whether all regions with its pieces are open for a thread.
    pub(crate) fn is_open(&self, regions: &Regions<'_>, memory: &Memory) -> bool {
        self.places().all(|placed| regions.is_open(placed.region, memory))
    }

    /// How many keys it has room for before it grows. `None`: the row makes no sense, or is an index's.
    fn rows(&self) -> Option<u64> {
        Some(self.layouts()?.records?.1.records())
    }

    /// How many pieces it has.
    pub(crate) fn pieces(&self) -> usize {
        self.regions.len()
    }

    /// The description of a table; `all` has the rows of its indexes.
    fn info(&self, all: &[TableRow]) -> Option<TableInfo> {
        let layouts = self.layouts()?;
        let is_of_it = |row: &&TableRow| row.index_of == self.first_record;
        Some(TableInfo {
            name: self.name.clone(),
            rows: self.rows()?,
            row_bytes: self.most_bytes(),
            key_type: self.key_type.clone(),
            key_bytes: self.key_bytes,
            pieces: self.regions.len(),
            bytes: layouts.bytes(),
            is_ordered: self.is_ordered,
            indexes: all.iter().filter(is_of_it).filter_map(TableRow::index_info).collect(),
        })
    }

    fn index_info(&self) -> Option<IndexInfo> {
        Some(IndexInfo {
            name: self.name.clone(),
            key_type: self.key_type.clone(),
            key_bytes: self.key_bytes,
            is_ready: self.is_ready,
            is_unique: self.is_unique,
            bytes: self.layouts()?.bytes(),
        })
    }

    fn encode_row(&self) -> Option<Vec<u8>> {
        let mut bytes = self.encode_length_delimited_to_vec();
        (bytes.len() <= ROW_BYTES).then(|| bytes.resize(ROW_BYTES, 0))?;
        Some(bytes)
    }

    fn decode_row(bytes: &[u8]) -> Option<TableRow> {
        TableRow::decode_length_delimited(bytes).ok()
    }
}

/// The catalog, as one client works with it.
pub(crate) struct Catalog {
    names: KeyedTable,
    rows: Table,
    tombstones: Table,
    maps: Table,
    counter: Table,
    /// The slot of its changes (C1).
    slot: Slot,
}

impl Catalog {
    pub(crate) fn new(at: DatabaseAt<'_>) -> Catalog {
        let names = KeyedTable::new(at.catalog(), at.names());
        Catalog {
            names: names.expect("as many records as the index has numbers"),
            rows: at.catalog(),
            tombstones: at.tombstones(),
            maps: at.maps(),
            counter: at.counter(),
            slot: at.layout.catalog_slot(),
        }
    }

    /// The row of a table, if the snapshot has that table.
    pub(crate) async fn find<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        name: &str,
    ) -> Result<Option<TableRow>, KeyError> {
        match key_of(name) {
            Some(key) => self.find_at(transaction, &key).await,
            None => Ok(None),
        }
    }

    /// The row with this key.
    pub(crate) async fn find_at<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &CatalogKey,
    ) -> Result<Option<TableRow>, KeyError> {
        let row = self.names.get(transaction, key).await?;
        let decode = |data: Vec<u8>| TableRow::decode_row(&data).ok_or(ReadError::Damaged);
        Ok(row.data.map(decode).transpose()?)
    }

    /// The rows of a table's indexes.
    pub(crate) async fn indexes_of<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        table: &TableRow,
    ) -> Result<Vec<TableRow>, KeyError> {
        let mut indexes = Vec::with_capacity(table.indexes.len());
        for &place in &table.indexes {
            let found = self.find_at(transaction, &key_of_index(place)).await?;
            indexes.push(found.ok_or(ReadError::Damaged)?);
        }
        Ok(indexes)
    }

    /// Enters a row.
    async fn insert_row<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &CatalogKey,
        row: &TableRow,
    ) -> Result<(), Stop> {
        let row = row.encode_row().ok_or_else(too_many_pieces)?;
        let made = self.names.insert(transaction, key, &row).await;
        made.map(drop).map_err(|error| match of_key(error, TABLES) {
            Stop::For(TxError::Full(_)) => TxError::NoSpace(format!(
                "a database has room for {} names of tables in its life and indexes at the same time, and this one has \
                 no more: use the names of dropped tables again, or drop indexes",
                self.rows.records()
            ))
            .into(),
            other => other,
        })
    }

    /// Replaces a row.
    async fn update_row<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
        key: &CatalogKey,
        row: &TableRow,
    ) -> Result<(), Stop> {
        let row = row.encode_row().ok_or_else(too_many_pieces)?;
        let updated = self.names.update(transaction, key, &row).await;
        updated.map(drop).map_err(|error| of_key(error, TABLES))
    }

    /// All tables that a snapshot has, in the order of their names.
    pub(crate) async fn all<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
    ) -> Result<Vec<TableInfo>, KeyError> {
        let rows = self.rows(transaction).await?;
        let tables = rows.iter().filter(|row| !row.is_index());
        let mut found: Vec<_> = tables.filter_map(|row| row.info(&rows)).collect();
        found.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(found)
    }

    /// The lowest place that no index has.
    async fn place_of_new_index<R: Rules>(&self, transaction: &Transaction<'_, R>) -> Result<u32, KeyError> {
        let rows = self.rows(transaction).await?;
        let taken: BTreeSet<u32> = rows.iter().filter(|row| row.is_index()).map(|row| row.place).collect();
        Ok((0..).find(|place| !taken.contains(place)).expect("there are fewer indexes than numbers"))
    }

    /// The rows of all tables and indexes that a snapshot has.
    pub(crate) async fn rows<R: Rules>(
        &self,
        transaction: &Transaction<'_, R>,
    ) -> Result<Vec<TableRow>, ReadError> {
        let mut found = Vec::new();
        for number in 0..self.rows.records() {
            let row = transaction.read(&self.rows, number).await?;
            found.extend(row.data.and_then(|data| TableRow::decode_row(&data)));
        }
        Ok(found)
    }

    /// How often the catalog had changed (tables created, grown or dropped), as of a cut.
    pub(crate) fn changes(&self, cut: &Cut) -> u64 {
        cut.counts().get(self.slot.index()).copied().unwrap_or(0)
    }
}

fn too_many_pieces() -> TxError {
    TxError::NoSpace("too many pieces".to_owned())
}

/// The key of a row of the catalog.
pub(crate) type CatalogKey = [u8; NAME_BYTES];

/// The key of the row of the index with this place: no table has a name that begins with a zero.
pub(crate) fn key_of_index(place: u32) -> CatalogKey {
    let mut key = [0; NAME_BYTES];
    key[1..1 + size_of::<u32>()].copy_from_slice(&place.to_be_bytes());
    key
}

/// A name as a key of the index. `None`: no table can have this name.
pub(crate) fn key_of(name: &str) -> Option<CatalogKey> {
    let mut key = [0; NAME_BYTES];
    // A name that ends with a zero would have the same key as the name without it, which is padded with
    // zeros.
    let fits = (1..=NAME_BYTES).contains(&name.len()) && !name.contains('\0');
    fits.then(|| key[..name.len()].copy_from_slice(name.as_bytes()))?;
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_row_fits_its_place_and_is_found_again() {
        let row = TableRow {
            name: "n".repeat(NAME_BYTES),
            first_record: u64::MAX,
            rows_each: u64::MAX,
            row_bytes: 65_536,
            key_bytes: 256,
            seed: u64::MAX,
            regions: vec![4_095; MOST_PIECES],
            first_units: vec![4_095; MOST_PIECES],
            layer: u32::MAX,
            most_times: u64::MAX,
            longest: u32::MAX,
            chunks_each: u64::MAX,
            chunk_bytes: u64::MAX,
            key_type: "k".repeat(MOST_TYPE_BYTES),
            is_ordered: true,
            indexes: vec![4_095; MOST_INDEXES],
            index_of: u64::MAX,
            is_ready: true,
            is_unique: true,
            place: 4_095,
        };
        let bytes = row.encode_row().unwrap();
        assert_eq!(bytes.len(), ROW_BYTES);
        assert_eq!(TableRow::decode_row(&bytes), Some(row));
        assert_eq!(TableRow::decode_row(&[]), None);
    }

    #[test]
    fn names_that_would_be_the_same_key_are_refused() {
        assert!(key_of("").is_none() && key_of(&"n".repeat(65)).is_none() && key_of("a\0").is_none());
        assert_ne!(key_of("a"), key_of("b"));
    }
}
