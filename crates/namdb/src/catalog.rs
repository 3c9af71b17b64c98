//! Which tables there are (paper 3, section 5.3): rows of a table like any other, changed by transactions like any other.
//!
//! C1. All changes are commits of one slot. So how far a snapshot sees that slot says which tables it has: whoever has looked at a table
//!     in such a snapshot need not look again in another that sees it as far.
//! C2. That slot is one compute server's at a time, who has the role for it. Before each change it is looked after like one whose client
//!     has died: whoever had it before may have.
//! C3. Memory that a table takes is zeros, and is taken in the transaction that makes the table: both have happened or neither.
//! C4. A table that is dropped keeps its memory in a *tomb* until the horizon has the drop: then all snapshots have it, and nobody comes upon
//!     that table any more. It is cleared, and then the transaction that makes another table gives it back.

use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::block_on;
use farpool_txn::hash::{Index, IndexLayout, IndexShape};
use farpool_txn::horizon::horizon;
use farpool_txn::membership::{Role, give_up_role, take_role};
use farpool_txn::recovery::recover;
use farpool_txn::slab::{MOST_PAYLOAD_BYTES, SlabLayout};
use farpool_txn::{
    CommitError, Cut, KeyError, KeyedTable, Memory, MemoryError, ReadError, RecordId, RecordLayout, Session,
    SharedSlot, Shipped, Table, Transaction, Worker,
};
use farpool_wire::Slot;
use prost::Message;

use crate::database::Shared;
use crate::error::{DatabaseError, Ended, Stop, TxError, of_key, of_read};
use crate::maps::{Map, Placed, place};
use crate::plan::{FIRST_RECORD, MOST_NAMES, MOST_TOMBS, MOST_WORKERS, NAME_BYTES, Plan, ROW_BYTES};
use crate::table::TableOptions;

/// How long somebody else's change is waited for: longer than it takes until he is taken for dead, usually.
const ROLE_PATIENCE: Duration = Duration::from_secs(20);
const ROLE_PAUSE: Duration = Duration::from_millis(2);
/// Tries of a change. Nobody else writes there; only the log may be full for a moment.
const TRIES: u32 = 100;
/// Pieces of a table at most: so many places a row of the catalog has room for.
const MOST_PIECES: usize = 48;
/// Rows of each piece beyond what is asked for: a thread keeps some numbers at hand, and takes them along when its process dies.
const SPARE_ROWS: u64 = 32;
/// In error messages.
const TABLES: &str = "of tables";

/// A table, as the catalog has it.
#[derive(Clone, PartialEq, Message)]
pub struct TableRow {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    /// The number of its first record, among all of the database. No other table ever has it.
    #[prost(fixed64, tag = "2")]
    pub(crate) first_record: u64,
    /// Records of each piece.
    #[prost(uint64, tag = "3")]
    rows_each: u64,
    #[prost(uint32, tag = "4")]
    pub(crate) row_bytes: u32,
    #[prost(uint32, tag = "5")]
    old_versions: u32,
    #[prost(uint32, tag = "6")]
    pub(crate) key_bytes: u32,
    /// Of the function that hashes its keys.
    #[prost(fixed64, tag = "7")]
    seed: u64,
    #[prost(message, repeated, tag = "8")]
    pieces: Vec<PieceRow>,
    /// Versions that the overflow region of each piece has room for.
    #[prost(uint64, tag = "9")]
    overflow_each: u64,
    /// Longest row, if rows may lie in slabs; 0: none does.
    #[prost(uint32, tag = "10")]
    longest: u32,
    /// Chunks of each piece's slab, and their size.
    #[prost(uint64, tag = "11")]
    chunks_each: u64,
    #[prost(uint64, tag = "12")]
    chunk_bytes: u64,
}

/// Where a piece of a table lies.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct PieceRow {
    #[prost(uint32, tag = "1")]
    region: u32,
    /// Its first unit, of the records...
    #[prost(uint32, tag = "2")]
    records: u32,
    /// ...and of the index.
    #[prost(uint32, tag = "3")]
    index: u32,
    /// ...and of the slab, if the table has any.
    #[prost(uint32, tag = "4")]
    slab: u32,
}

/// What there is to say of a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TableInfo {
    /// Its name.
    pub name: String,
    /// Keys that it can have.
    pub rows: u64,
    /// Bytes of a row at most.
    pub row_bytes: u32,
    /// Bytes of a key.
    pub key_bytes: u32,
    /// Pieces over which it is spread.
    pub pieces: usize,
    /// Far memory that it has.
    pub bytes: u64,
}

/// The layouts of a table's pieces.
struct Layouts {
    records: RecordLayout,
    index: IndexLayout,
    slab: Option<SlabLayout>,
}

impl Layouts {
    /// Bytes of the parts of a piece.
    fn bytes(&self) -> [u64; 3] {
        let slab = self.slab.map_or(0, |slab| slab.bytes());
        [self.records.bytes(), self.index.bytes(), slab]
    }
}

impl TableRow {
    fn layouts(&self) -> Option<Layouts> {
        let (row_bytes, old_versions) = (self.row_bytes as usize, self.old_versions as usize);
        let records = RecordLayout::new(self.rows_each, row_bytes, old_versions)?;
        let records = records.with_overflow(self.overflow_each)?;
        let shape = IndexShape::for_keys(self.rows_each, self.rows_each, self.key_bytes as usize, self.seed);
        let slab = match self.longest {
            0 => None,
            _ => Some(SlabLayout::new(self.chunks_each, self.chunk_bytes)?),
        };
        Some(Layouts { records, index: IndexLayout::new(shape, self.pieces.len())?, slab })
    }

    /// Bytes of a row at most.
    pub(crate) fn most_bytes(&self) -> u32 {
        if self.has_slab() { self.longest } else { self.row_bytes }
    }

    pub(crate) fn has_slab(&self) -> bool {
        self.longest > 0
    }

    /// The table, as a thread works with it. `None`: no compute server has written such a row.
    pub(crate) fn keyed(&self, shared: &Shared) -> Option<KeyedTable<Shipped>> {
        let mut table = self.table(shared)?;
        if let Some(slab) = self.layouts()?.slab {
            let unit = shared.plan.unit_bytes();
            let piece = |row: &PieceRow| shared.at().piece(row.region as usize, u64::from(row.slab) * unit);
            let pieces = self.pieces.iter().map(piece).collect();
            table = table.with_slab(shared.slab(self.first_record, slab, pieces)?)?;
        }
        let (index, unit) = (self.layouts()?.index, shared.plan.unit_bytes());
        let piece = |row: &PieceRow| shared.at().piece(row.region as usize, u64::from(row.index) * unit);
        KeyedTable::new(table, Index::new(index, self.pieces.iter().map(piece).collect())?)
    }

    /// Its records. `None`: as above.
    pub(crate) fn table(&self, shared: &Shared) -> Option<Table> {
        let layouts = self.layouts()?;
        let (records, unit) = (layouts.records, shared.plan.unit_bytes());
        let fits = |piece: &PieceRow| {
            let firsts = [piece.records, piece.index, piece.slab];
            let ends =
                firsts.into_iter().zip(layouts.bytes()).map(|(first, bytes)| u64::from(first) * unit + bytes);
            (piece.region as usize) < shared.grants.len()
                && ends.max() <= Some(shared.plan.shape.region_bytes)
        };
        if !self.pieces.iter().all(fits) {
            return None;
        }
        let piece = |row: &PieceRow| shared.at().piece(row.region as usize, u64::from(row.records) * unit);
        let pieces = self.pieces.iter().map(piece).collect();
        Some(Table::new(RecordId(self.first_record), records, pieces))
    }

    fn info(&self) -> Option<TableInfo> {
        let layouts = self.layouts()?;
        Some(TableInfo {
            name: self.name.clone(),
            rows: layouts.index.records(),
            row_bytes: self.most_bytes(),
            key_bytes: self.key_bytes,
            pieces: self.pieces.len(),
            bytes: layouts.bytes().iter().sum::<u64>() * self.pieces.len() as u64,
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

/// The catalog, as one thread works with it.
pub(crate) struct Catalog {
    names: KeyedTable<Shipped>,
    rows: Table,
    tombs: Table,
    maps: Table,
    counter: Table,
    /// In which it is changed.
    slot: Slot,
}

impl Catalog {
    pub(crate) fn new(shared: &Shared) -> Catalog {
        let (plan, at) = (&shared.plan, shared.at());
        let table = |first, (start, layout)| Table::new(first, layout, vec![at.piece(0, start)]);
        let rows = table(Plan::catalog_records(), plan.catalog);
        let index = Index::new(plan.names.1, vec![at.piece(0, plan.names.0)]).expect("it has one piece");
        let names = KeyedTable::new(rows.clone(), index).expect("as many records as the index has numbers");
        let tombs = table(Plan::tomb_records(), plan.tombs);
        let maps = table(Plan::map_records(), plan.maps);
        let counter = table(Plan::counter_record(), plan.counter);
        Catalog { names, rows, tombs, maps, counter, slot: plan.catalog_slot() }
    }

    /// A table's row, if the snapshot has that table.
    pub(crate) async fn find(
        &self,
        transaction: &Transaction<'_, Shipped>,
        name: &str,
    ) -> Result<Option<TableRow>, KeyError> {
        let Some(key) = key_of(name) else { return Ok(None) };
        let row = self.names.get(transaction, &key).await?;
        let decode = |data: Vec<u8>| TableRow::decode_row(&data).ok_or(ReadError::Damaged);
        Ok(row.data.map(decode).transpose()?)
    }

    /// All tables that a snapshot has, in the order of their names.
    pub(crate) async fn all(
        &self,
        transaction: &Transaction<'_, Shipped>,
    ) -> Result<Vec<TableInfo>, KeyError> {
        let rows = self.rows(transaction).await?;
        let mut found: Vec<_> = rows.iter().filter_map(TableRow::info).collect();
        found.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(found)
    }

    /// The rows of all tables that a snapshot has.
    pub(crate) async fn rows(
        &self,
        transaction: &Transaction<'_, Shipped>,
    ) -> Result<Vec<TableRow>, ReadError> {
        let mut found = Vec::new();
        for number in 0..MOST_NAMES {
            let row = transaction.read(&self.rows, number).await?;
            found.extend(row.data.and_then(|data| TableRow::decode_row(&data)));
        }
        Ok(found)
    }

    /// How often tables were made and dropped, as a cut has it.
    pub(crate) fn changes(&self, cut: &Cut) -> u64 {
        cut.counts().get(self.slot.index()).copied().unwrap_or(0)
    }

    /// The tables of which the catalog is made.
    pub(crate) fn own_tables(&self) -> [Table; 4] {
        [&self.rows, &self.tombs, &self.maps, &self.counter].map(Table::clone)
    }
}

/// A name as the index has it. `None`: no table can have it.
fn key_of(name: &str) -> Option<[u8; NAME_BYTES]> {
    let mut key = [0; NAME_BYTES];
    // A zero at the end of a name would be the padding of another's.
    let fits = (1..=NAME_BYTES).contains(&name.len()) && !name.contains('\0');
    fits.then(|| key[..name.len()].copy_from_slice(name.as_bytes()))?;
    Some(key)
}

/// Makes a table.
pub(crate) fn create(
    shared: &Shared,
    name: &str,
    key_bytes: usize,
    options: &TableOptions,
) -> Result<(), TxError> {
    let key = key_of(name).ok_or_else(|| TxError::BadName(name.to_owned()))?;
    let row_bytes = options.place_bytes();
    let longest = options.longest.map_or(0, |longest| longest.max(1));
    if longest > MOST_PAYLOAD_BYTES {
        return Err(TxError::NoSpace(format!("no table has rows of {longest} bytes")));
    }
    let empty = TableRow {
        name: name.to_owned(),
        row_bytes: u32::try_from(row_bytes).map_err(|_| TxError::NoSpace("rows are too large".to_owned()))?,
        old_versions: u32::try_from(options.old_versions).unwrap_or(u32::MAX), // refused as too many
        longest: longest as u32,
        key_bytes: key_bytes as u32,
        seed: getrandom::u64().map_err(|error| TxError::Damaged(error.to_string()))?,
        ..TableRow::default()
    };
    change(shared, async |transaction, memory, catalog| {
        let mut row = empty.clone();
        row.first_record = next_record(transaction, catalog, options.rows).await?;
        take_memory(shared, transaction, memory, catalog, &mut row, options).await?;
        let row = row.encode_row().ok_or_else(|| TxError::NoSpace("too many pieces".to_owned()))?;
        let made = catalog.names.insert(transaction, &key, &row).await;
        match made.map_err(|error| of_key(error, TABLES)) {
            Ok(_) => Ok(()),
            Err(Stop::For(TxError::Duplicate(_))) => Err(TxError::TableExists(name.to_owned()).into()),
            Err(other) => Err(other),
        }
    })
}

/// Drops a table. Its memory is not given to another while it may be that somebody still reads it (C4).
pub(crate) fn drop_table(shared: &Shared, name: &str) -> Result<(), TxError> {
    let key = key_of(name).ok_or_else(|| TxError::BadName(name.to_owned()))?;
    change(shared, async |transaction, _, catalog| {
        let gone = catalog.names.delete(transaction, &key).await;
        let row = match gone.map_err(|error| of_key(error, TABLES)) {
            Ok(row) => row.data.unwrap_or_default(),
            Err(Stop::For(TxError::NoSuchKey(_))) => return Err(TxError::NoSuchTable(name.to_owned()).into()),
            Err(other) => return Err(other),
        };
        let stop = |error| of_read(error, TABLES);
        for tomb in 0..MOST_TOMBS {
            if transaction.read(&catalog.tombs, tomb).await.map_err(stop)?.data.is_none() {
                transaction.write(&catalog.tombs, tomb, Some(&row)).await.map_err(stop)?;
                return Ok(());
            }
        }
        Err(TxError::NoSpace("too many tables were dropped; make one, and their memory is free again".into())
            .into())
    })
}

/// Gives the memory of tables back that were dropped, and that no snapshot has any more.
async fn open_tombs(
    shared: &Shared,
    transaction: &mut Transaction<'_, Shipped>,
    memory: &Memory,
    catalog: &Catalog,
    maps: &mut [Map],
) -> Result<(), Stop> {
    let stop = |error| of_read(error, TABLES);
    let Some(horizon) = horizon(memory, &shared.at().horizon()).await.map_err(TxError::Memory)? else {
        return Ok(());
    };
    for tomb in 0..MOST_TOMBS {
        let found = transaction.read(&catalog.tombs, tomb).await.map_err(stop)?;
        let row = found.data.and_then(|data| TableRow::decode_row(&data));
        let Some((layouts, row)) = row.and_then(|row| Some((row.layouts()?, row))) else { continue };
        if !horizon.sees(found.version) {
            continue;
        }
        let unit_bytes = shared.plan.unit_bytes();
        for piece in &row.pieces {
            let firsts = [piece.records, piece.index, piece.slab];
            for (first, bytes) in firsts.into_iter().zip(layouts.bytes()) {
                let region = piece.region as usize;
                let Some(map) = maps.get_mut(region) else { continue };
                let at = shared.at().piece(region, u64::from(first) * unit_bytes);
                memory.clear(&at, 0..bytes).await.map_err(TxError::Memory)?;
                map.free(first.into(), bytes.div_ceil(unit_bytes));
            }
        }
        transaction.write(&catalog.tombs, tomb, None).await.map_err(stop)?;
    }
    Ok(())
}

/// Numbers for the records of a new table: no other ever has them, so that what is found in its memory is never taken for another's.
async fn next_record(
    transaction: &mut Transaction<'_, Shipped>,
    catalog: &Catalog,
    rows: u64,
) -> Result<u64, Stop> {
    let stop = |error| of_read(error, TABLES);
    let row = transaction.read(&catalog.counter, 0).await.map_err(stop)?;
    let word =
        row.data.as_deref().and_then(|data| data.first_chunk()).map_or(0, |word| u64::from_le_bytes(*word));
    let first = word.max(FIRST_RECORD);
    // As many for each piece more as rounding and spares may take.
    let more = MOST_PIECES as u64 * (SPARE_ROWS + 1);
    let end = first.checked_add(rows).and_then(|end| end.checked_add(more));
    let end = end.ok_or_else(|| TxError::NoSpace("no numbers for so many records".to_owned()))?;
    transaction.write(&catalog.counter, 0, Some(&end.to_le_bytes())).await.map_err(stop)?;
    Ok(first)
}

/// Takes memory for a table, spread over all nodes, in as few pieces as fit.
async fn take_memory(
    shared: &Shared,
    transaction: &mut Transaction<'_, Shipped>,
    memory: &Memory,
    catalog: &Catalog,
    row: &mut TableRow,
    options: &TableOptions,
) -> Result<(), Stop> {
    let stop = |error| of_read(error, TABLES);
    let mut maps = Vec::new();
    for region in 0..shared.grants.len() {
        let found = transaction.read(&catalog.maps, region as u64).await.map_err(stop)?;
        let map = Map::decode(found.data.as_deref(), shared.plan.first_unit(region));
        maps.push(map.ok_or_else(|| TxError::Damaged("a region's map makes no sense".to_owned()))?);
    }
    let before = maps.clone();
    open_tombs(shared, transaction, memory, catalog, &mut maps).await?;
    let (placed, taken) = choose(shared, &maps, row, options)?;
    for (region, _) in taken.iter().enumerate().filter(|(region, map)| **map != before[*region]) {
        let map = taken[region].encode();
        transaction.write(&catalog.maps, region as u64, Some(&map)).await.map_err(stop)?;
    }
    row.pieces = placed
        .into_iter()
        .map(|piece| PieceRow {
            region: piece.region as u32,
            records: piece.records as u32,
            index: piece.index as u32,
            slab: piece.slab as u32,
        })
        .collect();
    Ok(())
}

/// In how many pieces a table fits, and where: at first one for each node, then twice as many, and so on.
fn choose(
    shared: &Shared,
    maps: &[Map],
    row: &mut TableRow,
    options: &TableOptions,
) -> Result<(Vec<Placed>, Vec<Map>), TxError> {
    let nodes: Vec<_> = shared.grants.iter().map(|grant| grant.region.node).collect();
    let mut distinct = nodes.clone();
    distinct.sort_unstable();
    distinct.dedup();
    let mut pieces = distinct.len().min(MOST_PIECES);
    let overflow = options.overflow_or_usual();
    loop {
        row.rows_each = options.rows.max(1).div_ceil(pieces as u64) + SPARE_ROWS;
        row.overflow_each = overflow.div_ceil(pieces as u64);
        row.pieces = vec![PieceRow::default(); pieces];
        if let Some(slab) = options.slab_each(pieces as u64) {
            (row.chunks_each, row.chunk_bytes) = (slab.chunks(), slab.chunk_bytes());
        }
        let shape = || {
            let (rows, bytes, old) = (options.rows, row.row_bytes, row.old_versions);
            TxError::NoSpace(format!(
                "no table has {rows} rows of {bytes} bytes with {old} old versions, and {overflow} beside"
            ))
        };
        let layouts = row.layouts().ok_or_else(shape)?;
        let units = |bytes: u64| bytes.div_ceil(shared.plan.unit_bytes());
        let mut taken = maps.to_vec();
        if let Some(placed) = place(&mut taken, &nodes, pieces, layouts.bytes().map(units)) {
            return Ok((placed, taken));
        }
        if pieces == MOST_PIECES {
            let free: u64 = maps.iter().map(Map::units_free).sum();
            let needed = layouts.bytes().iter().sum::<u64>() * pieces as u64;
            let free = free * shared.plan.unit_bytes();
            return Err(TxError::NoSpace(format!(
                "the table needs {needed} bytes, and {free} are free, in parts"
            )));
        }
        pieces = (pieces * 2).min(MOST_PIECES);
    }
}

/// Runs a transaction that changes the catalog.
fn change<T>(
    shared: &Shared,
    body: impl AsyncFn(&mut Transaction<'_, Shipped>, &Memory, &Catalog) -> Result<T, Stop>,
) -> Result<T, TxError> {
    let _one_thread = shared.catalog.lock();
    shared.check().map_err(TxError::Ended)?;
    let memory = shared.memory().map_err(told)?;
    let endpoint = memory.endpoint().clone();
    let at = shared.at().members();
    let place = shared.workers.take().ok_or(TxError::TooManyClients(MOST_WORKERS))?;
    // Once more: from here on the seat is not given back, but it may have been.
    shared.check().map_err(TxError::Ended)?;
    let done = block_on(&endpoint, async {
        let give_up_at = endpoint.now_ns() + ROLE_PATIENCE.as_nanos() as u64;
        while !take_role(&memory, &at, Role::Catalog, shared.seat.claim).await.map_err(TxError::Memory)? {
            if let Err(ended) = shared.check() {
                return Ok((Err(TxError::Ended(ended)), true));
            }
            if endpoint.now_ns() > give_up_at {
                return Ok((Err(TxError::CatalogBusy), true));
            }
            endpoint.sleep(ROLE_PAUSE).await;
        }
        let slot = shared.plan.catalog_slot();
        let (oracle, log) = (shared.at().oracle(), shared.at().log(slot));
        let recovered = recover(&memory, &oracle, &log, slot).await.map_err(|error| told(error.into()))?;
        let slot = Arc::new(SharedSlot::after(slot, log, recovered.last));
        let worker: Worker<Shipped> =
            Worker::sharing(memory, oracle, slot).expect("the oracle has a slot for it");
        let number = shared.plan.workers(shared.seat.slot).start + place.number();
        let worker =
            worker.announcing(shared.at().horizon(), number).await?.expect("the plan has a place for each");
        let changed = change_by(&worker, &Catalog::new(shared), body).await;
        let has_left = worker.leave().await.is_ok();
        // Not only commits: zeros for the memory of a dropped table may be under way as well.
        if let Err(error @ (TxError::Unknown(_) | TxError::Memory(MemoryError::Failed(_)))) = changed {
            return Err(error);
        }
        let given_up = give_up_role(worker.memory(), &at, Role::Catalog, shared.seat.claim).await;
        if let Err(error) = given_up {
            // What was changed is changed all the same.
            shared.end(Ended::Failed(error.to_string()));
        }
        Ok((changed, has_left))
    });
    match done {
        Ok((changed, true)) => changed,
        Ok((changed, false)) => {
            place.keep();
            changed
        }
        Err(error) => {
            // What was sent may still land: nobody changes anything until this process was shut out.
            place.keep();
            shared.end(Ended::Failed(error.to_string()));
            Err(error)
        }
    }
}

async fn change_by<T>(
    worker: &Worker<Shipped>,
    catalog: &Catalog,
    body: impl AsyncFn(&mut Transaction<'_, Shipped>, &Memory, &Catalog) -> Result<T, Stop>,
) -> Result<T, TxError> {
    let mut session = Session::new();
    let mut last = TxError::CatalogBusy;
    for _ in 0..TRIES {
        let mut transaction = worker.begin(&mut session).await?;
        let done = match body(&mut transaction, worker.memory(), catalog).await {
            Ok(done) => done,
            Err(Stop::For(error)) => return Err(error),
            Err(Stop::Again(error)) => {
                last = error;
                worker.memory().endpoint().sleep(ROLE_PAUSE).await;
                continue;
            }
        };
        match transaction.commit().await {
            Ok(_) => {
                // Until a snapshot has it, so that whoever is told of the table finds it. If none comes, it is committed all the same.
                let _ = worker.begin(&mut session).await;
                return Ok(done);
            }
            Err(CommitError::Conflict | CommitError::Busy) => {}
            Err(CommitError::Nothing(error)) => return Err(TxError::Memory(error)),
            Err(CommitError::Unknown(version)) => return Err(TxError::Unknown(version)),
            Err(error) => return Err(TxError::TooLarge(error)),
        }
    }
    Err(last)
}

fn told(error: DatabaseError) -> TxError {
    match error {
        DatabaseError::Memory(error) => TxError::Memory(error),
        DatabaseError::Ended(ended) => TxError::Ended(ended),
        error => TxError::Ended(Ended::Failed(error.to_string())),
    }
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
            old_versions: 64,
            key_bytes: 256,
            seed: u64::MAX,
            pieces: vec![PieceRow { region: 4_095, records: 4_095, index: 4_095, slab: 4_095 }; MOST_PIECES],
            overflow_each: u64::MAX,
            longest: u32::MAX,
            chunks_each: u64::MAX,
            chunk_bytes: u64::MAX,
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
