//! Tables with a secondary index: where it lies, transactions that scan it, and workers that remove its
//! entries. A scan must find what the same transaction finds key by key.

use std::ops::{Bound, RangeBounds};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::{ProcessId, Random};
use farpool_txn::hash::IndexRules;
use farpool_txn::horizon::{CollectPauses, HorizonAt, HorizonLayout, collect};
use farpool_txn::judge::Transaction as Judged;
use farpool_txn::tree::{LeafLayout, Tree, TreeLayout, TreeSpares};
use farpool_txn::{
    BeginError, Direction, KeyError, KeyedTable, Piece, Scan, Scanned, Secondary, SessionState, Shipped,
    StaleEntries, Transaction, Worker,
};
use farpool_wire::Slot;

use super::transactions::{Client, Transactions};
use super::{BY_VALUE, ClientPlace, ORACLE, Run};
use crate::indexing::{LAST_DEADLINE, Setting, lay_out, piece};

/// Its number.
const NUMBER: u64 = 1;
/// Pairs of leaves in all pieces that follow each other: enough, however many dead workers had reserved.
const PAIRS: u64 = 240;
/// Places of a leaf, from the first number on, below the second one.
const PLACES: std::ops::Range<usize> = 4..10;
/// Rows with a value that is a multiple of this are not in the index.
const LEFT_OUT: u64 = 7;
/// Different keys of all others, and bytes of each.
const KEYS: u64 = 5;
const KEY_BYTES: usize = 1;
/// Where the horizon starts in the oracle's region.
const HORIZON_START: u64 = 32 << 10;
/// Places for workers that announce their snapshots: more than there are.
const WORKERS: u16 = 16;
/// Pauses of the collector, and of workers that remove entries.
const PAUSES: CollectPauses =
    CollectPauses { busy: Duration::from_micros(10), idle: Duration::from_micros(640) };
const REMOVE_PAUSE: Duration = Duration::from_micros(15);
/// Steps until all entries that nobody needs are removed, and between two commits meanwhile.
const MOST_STEPS: u32 = 400;
const STEPS_PER_COMMIT: u32 = 8;

/// A secondary index on the values of rows.
pub(super) struct ByValue {
    layout: TreeLayout,
    pieces: Vec<Piece>,
    is_unique: bool,
}

/// The key of a value. `None`: the row is not in the index.
fn key_of(value: u64) -> Option<Vec<u8>> {
    (!value.is_multiple_of(LEFT_OUT)).then(|| vec![(value % KEYS) as u8])
}

fn key_of_row(data: &[u8]) -> Option<Vec<u8>> {
    key_of(data.first_chunk().map_or(0, |word| u64::from_le_bytes(*word)))
}

impl ByValue {
    pub(super) fn draw(run: &Run, random: &mut Random) -> ByValue {
        let (growth, pieces) = (&run.growth, run.pieces.len());
        let places = PLACES.start + random.index(PLACES.len());
        let leaf = LeafLayout::new(KEY_BYTES).expect("short keys").with_entries(places);
        let times = growth.numbering(1).total(pieces as u64) / growth.layer as u64;
        let layout = TreeLayout::grown(leaf, PAIRS / times, pieces, growth.layer, growth.most_times);
        let layout = layout.expect("a small index");
        let pieces = lay_out(&run.setting.nodes, BY_VALUE, (0..pieces).map(|piece| layout.bytes_of(piece)));
        ByValue { layout, pieces, is_unique: random.chance(300) }
    }

    /// The index as the worker with this slot uses it.
    pub(super) fn secondary(&self, slot: Slot) -> Secondary {
        let spares = Arc::new(TreeSpares::new(&self.layout, slot));
        let tree =
            Tree::sharing(self.layout, self.pieces.clone(), spares).expect("the layout is of these pieces");
        let (key_of, stale) =
            (Rc::new(|data: &[u8]| Ok(key_of_row(data))), Arc::new(StaleEntries::default()));
        let secondary = Secondary::new(NUMBER, tree, key_of, stale);
        if self.is_unique { secondary.unique() } else { secondary }
    }
}

impl Transactions {
    pub(super) fn horizon(&self) -> HorizonAt {
        let layout = HorizonLayout::new(WORKERS, self.slots()).expect("a few workers and slots");
        HorizonAt { piece: piece(self.run.setting.nodes[0].peer.node, ORACLE, HORIZON_START), layout }
    }

    /// Lets a worker announce its snapshots, if entries are removed: what these need is kept.
    pub(super) async fn announced(&self, worker: Worker, place: u16) -> Result<Worker, BeginError> {
        match self.by_value.is_some() {
            true => Ok(worker.announcing(self.horizon(), place).await?.expect("there is such a place")),
            false => Ok(worker),
        }
    }

    pub(super) fn start_collector(self: &Rc<Self>, place: ClientPlace) {
        if self.by_value.is_none() {
            return;
        }
        let process = self.run.setting.world.add_process(place.host);
        let here = self.clone();
        self.run.setting.tasks.spawn(process, async move {
            let done = async {
                let memory = Setting::memory(&here.run, process, place, LAST_DEADLINE).await?;
                let has_ended = || here.run.setting.left.get() == 0;
                collect::<Shipped>(&memory, &here.oracle.into(), &here.horizon(), PAUSES, has_ended).await
            };
            if let Err(error) = done.await {
                here.run.setting.notes.complain(format!("the collector stopped: {error}"));
            }
        });
    }

    /// Removes entries that nobody needs, while the worker has sessions.
    pub(super) fn start_remover<R: IndexRules>(
        self: &Rc<Self>,
        process: ProcessId,
        shared: &Rc<(Worker, KeyedTable<R>)>,
    ) {
        if self.by_value.is_none() {
            return;
        }
        let (here, shared) = (self.clone(), shared.clone());
        self.run.setting.tasks.spawn(process, async move {
            let mut session = SessionState::new();
            while Rc::strong_count(&shared) > 1 {
                if let Err(error) = remove_stale(&shared, &mut session).await {
                    return here.run.setting.notes.complain(format!("no entry can be removed: {error}"));
                }
                here.run.setting.world.sleep(REMOVE_PAUSE).await;
            }
            // Its sessions have ended, so it holds the horizon back no longer.
            if let Err(error) = shared.0.leave().await {
                here.run.setting.notes.complain(format!("a worker cannot leave: {error}"));
            }
        });
    }

    /// Checks at the end that all entries that nobody needs are removed. Each row is in the index, or none.
    pub(super) async fn check_removal<R: IndexRules>(
        &self,
        worker: &Worker,
        table: &KeyedTable<R>,
        session: &mut SessionState,
    ) -> Result<(), String> {
        if self.by_value.is_none() {
            return Ok(());
        }
        let text = |error: KeyError| error.to_string();
        for step in 0..MOST_STEPS {
            let transaction = worker.begin(session).await.map_err(|error| error.to_string())?;
            scan_all(table, &transaction).await.map_err(text)?;
            drop(transaction);
            // A commit lets the horizon move on. That one has to be seen by the horizon, too.
            if step.is_multiple_of(STEPS_PER_COMMIT) {
                self.write_at_end(worker, table, session, 0).await?;
            }
            if !table.has_stale() {
                return Ok(());
            }
            let transaction = worker.begin(session).await.map_err(|error| error.to_string())?;
            table.remove_stale(&transaction).await.map_err(text)?;
            drop(transaction);
            self.run.setting.world.sleep(REMOVE_PAUSE).await;
        }
        Err("entries that nobody needs are not removed".to_owned())
    }
}

async fn remove_stale<R: IndexRules>(
    (worker, table): &(Worker, KeyedTable<R>),
    session: &mut SessionState,
) -> Result<(), KeyError> {
    let transaction = worker.begin(session).await?;
    table.remove_stale(&transaction).await.map(drop)
}

/// Finds all rows that are in the index: their keys in it, their own keys, and their data.
async fn scan_all<R: IndexRules>(
    table: &KeyedTable<R>,
    transaction: &Transaction<'_, Shipped>,
) -> Result<Vec<Found>, KeyError> {
    let (mut found, mut rest) = (Vec::new(), Some(Scan::all()));
    while let Some(scan) = rest {
        let Scanned { rows, next } = table.scan_by(transaction, NUMBER, scan).await?;
        found.extend(rows.into_iter().map(|found| (found.by.into(), found.key, found.row.data)));
        rest = next;
    }
    Ok(found)
}

/// A row that was found: its key in the index, its own, and its data.
type Found = (Vec<u8>, Vec<u8>, Option<Vec<u8>>);

impl Client {
    /// A write of this value was refused since another row has the same key in the unique index: there is
    /// one.
    pub(super) async fn check_refusal<'a, R: IndexRules>(
        &self,
        transaction: &Transaction<'a, Shipped>,
        table: &'a KeyedTable<R>,
        (key, value): (usize, u64),
        judged: &mut Judged,
    ) -> Result<(), KeyError> {
        let run = self.here.run.clone();
        let mut has_other = false;
        for other in (0..run.keys.count()).filter(|other| *other != key) {
            let row = table.get(transaction, run.keys.get(other)).await?;
            self.saw(other, &row, judged);
            has_other |= row.data.as_deref().and_then(key_of_row) == key_of(value);
        }
        if !has_other {
            run.setting
                .notes
                .complain(format!("key {key}: value {value} was refused, and no row has its key"));
        }
        Ok(())
    }

    /// Scans a range of the index, and compares the rows with those that the transaction finds key by key.
    pub(super) async fn scan_by_value<'a, R: IndexRules>(
        &mut self,
        transaction: &Transaction<'a, Shipped>,
        table: &'a KeyedTable<R>,
        judged: &mut Judged,
    ) -> Result<(), KeyError> {
        let run = self.here.run.clone();
        let mut bound = || {
            let key = vec![self.random.below(KEYS) as u8];
            match self.random.below(3) {
                0 => Bound::Included(key),
                1 => Bound::Excluded(key),
                _ => Bound::Unbounded,
            }
        };
        let range: (Bound<Vec<u8>>, Bound<Vec<u8>>) = (bound(), bound());
        let direction = if self.random.chance(500) { Direction::Ascending } else { Direction::Descending };
        let bounds = (range.0.as_ref().map(Vec::as_slice), range.1.as_ref().map(Vec::as_slice));
        let (mut found, mut rest) = (Vec::<Found>::new(), Some(Scan::new(bounds, direction)));
        while let Some(scan) = rest {
            let Scanned { rows, next } = table.scan_by(transaction, NUMBER, scan).await?;
            found.extend(rows.into_iter().map(|found| (found.by.into(), found.key, found.row.data)));
            rest = next;
        }
        if direction == Direction::Descending {
            found.reverse();
        }
        if !found.is_sorted_by_key(|(by, ..)| by) {
            run.setting.notes.complain(format!("a scan by value found {found:?}, which is in another order"));
        }
        let mut wanted = Vec::<Found>::new();
        for key in 0..run.keys.count() {
            let bytes = run.keys.get(key);
            let row = table.get(transaction, bytes).await?;
            self.saw(key, &row, judged);
            let by = row.data.as_deref().and_then(key_of_row);
            wanted.extend(by.filter(|by| range.contains(by)).map(|by| (by, bytes.to_vec(), row.data)));
        }
        found.sort();
        wanted.sort();
        let is_unique = self.here.by_value.as_ref().is_some_and(|by_value| by_value.is_unique);
        if is_unique && let Some(two) = found.windows(2).find(|two| two[0].0 == two[1].0) {
            run.setting.notes.complain(format!("two rows have the same key in a unique index: {two:?}"));
        }
        if found != wanted {
            run.setting.notes.complain(format!("a scan by value found {found:?} instead of {wanted:?}"));
        }
        Ok(())
    }
}
