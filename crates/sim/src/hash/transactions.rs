//! Transactions by key: sessions insert, read, update and delete while the index splits. A worker may die in
//! the middle of any operation. Then its slot is recovered, and another worker continues in it. The history
//! is judged as snapshot isolation, with keys as records.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::{Path, ProcessId, Random};
use farpool_txn::hash::IndexRules;
use farpool_txn::horizon::forget;
use farpool_txn::judge::{Outcome, Read, Transaction as Judged, Violation, Write, judge};
use farpool_txn::log::{LogAt, LogLayout, Logs};
use farpool_txn::oracle::{Board, publish};
use farpool_txn::recovery::{RecoveryError, recover};
use farpool_txn::{
    BeginError, CommitError, KeyError, KeyedTable, OracleAt, ReadError, RecordId, RecordLayout, Row,
    SessionState, Shipped, Table, Transaction, Worker,
};
use farpool_wire::Slot;

use super::by_value::ByValue;
use super::order::Order;
use super::{ClientPlace, ORACLE, RECORDS, Run};
use crate::indexing::{LAST_DEADLINE, Setting, lay_out, piece};
use crate::staying::Staying;

/// Transactions of each session.
const ROUNDS: u64 = 10;
/// Keys that a transaction touches at most.
const MOST_KEYS: u64 = 5;
/// Scans among the operations on a table with keys in order, per mille.
const SCANS: u32 = 250;
/// Deaths of workers in a run, at most, and the time within which each occurs after the one before.
const MOST_DEATHS: u64 = 3;
const DEATHS_WITHIN_NS: u64 = 400_000;
/// Pause between two checks whether all others have ended.
const PAUSE: Duration = Duration::from_micros(100);
/// Tries to write a key at the end.
const MOST_TRIES: u32 = 100;
/// Longer than any operation of a dead process takes to arrive.
const ALL_HAS_LANDED: Duration = Duration::from_millis(5);
/// Words of a record's data. All are equal.
const DATA_WORDS: usize = 3;
const DATA_BYTES: usize = DATA_WORDS * 8;

/// Where the slots' logs start in the oracle's region, and bytes for the intents of each.
const LOGS_START: u64 = 64 << 10;
const LOG_BYTES: u64 = 4 << 10;

/// What the sessions of a run share.
pub(super) struct Transactions {
    pub(super) run: Rc<Run>,
    pub(super) oracle: OracleAt,
    table: Table,
    /// The order of keys, if the table has one.
    order: Option<Order>,
    /// The secondary index on values, if the table has one.
    pub(super) by_value: Option<ByValue>,
    history: RefCell<Vec<Judged>>,
    values: Cell<u64>,
    /// Workers that have replaced dead ones.
    lives: Cell<u32>,
}

impl Transactions {
    /// Starts workers, one at each place, and the publisher at the first.
    pub(super) fn start<R: IndexRules>(
        run: &Rc<Run>,
        places: &[ClientPlace],
        random: &mut Random,
    ) -> Rc<Self> {
        let board = Board::new(places.len() as u16).expect("a few slots");
        let records = run.growth.numbering(run.layout.shape().records);
        let layout = RecordLayout::new(records.each(), DATA_BYTES).expect("small records");
        assert!(board.bytes() as u64 <= LOGS_START);
        let bytes = (0..run.pieces.len() as u64).map(|piece| layout.bytes() * records.times(piece));
        let pieces = lay_out(&run.setting.nodes, RECORDS, bytes);
        let here = Rc::new(Transactions {
            run: run.clone(),
            oracle: OracleAt { piece: piece(run.setting.nodes[0].peer.node, ORACLE, 0), board },
            table: Table::grown(RecordId(100), layout, records, pieces).expect("of this layout"),
            order: random.chance(500).then(|| Order::draw(run, random)),
            by_value: random.chance(500).then(|| ByValue::draw(run, random)),
            history: RefCell::default(),
            values: Cell::default(),
            lives: Cell::default(),
        });
        here.start_publisher(places[0]);
        here.start_collector(places[0]);
        for (slot, place) in places.iter().enumerate() {
            here.start_worker::<R>(*place, slot as u16, 0);
        }
        here.start_deaths::<R>(places, random);
        here
    }

    /// How many slots the oracle has.
    pub(super) fn slots(&self) -> u16 {
        self.run.setting.clients.borrow().len() as u16
    }

    /// The number of transactions, and the first violation in their history.
    pub(super) fn judge(&self) -> (u64, Result<(), Violation>) {
        let history = self.history.borrow();
        (history.len() as u64, judge(&history))
    }

    fn start_publisher(self: &Rc<Self>, place: ClientPlace) {
        let process = self.run.setting.world.add_process(place.host);
        let here = self.clone();
        self.run.setting.tasks.spawn(process, async move {
            let done = async {
                let memory = Setting::memory(&here.run, process, place, LAST_DEADLINE).await?;
                publish::<Shipped>(&memory, here.oracle, Duration::ZERO, None, || {
                    here.run.setting.left.get() == 0
                })
                .await
            };
            if let Err(error) = done.await {
                here.run.setting.notes.complain(format!("the publisher stopped: {error}"));
            }
        });
    }

    /// Some workers die, one after the other.
    fn start_deaths<R: IndexRules>(self: &Rc<Self>, places: &[ClientPlace], random: &mut Random) {
        let victims: Vec<(u16, Duration)> = (0..random.below(MOST_DEATHS + 1))
            .map(|_| {
                (random.index(places.len()) as u16, Duration::from_nanos(random.below(DEATHS_WITHIN_NS)))
            })
            .collect();
        let recoverer = ClientPlace {
            index: places.len(),
            host: self.run.setting.world.add_host(1_000_000),
            path: Path::Checked,
        };
        let process = self.run.setting.world.add_process(recoverer.host);
        let (here, places, staying) = (self.clone(), places.to_vec(), self.run.setting.left.stay());
        self.run.setting.tasks.spawn(process, async move {
            for (slot, after) in victims {
                here.run.setting.world.sleep(after).await;
                here.run.setting.tasks.kill(here.run.setting.clients.borrow()[usize::from(slot)]);
                // This replaces a fence; other scenarios test fences.
                here.run.setting.world.sleep(ALL_HAS_LANDED).await;
                match here.recover_seat(process, recoverer, slot).await {
                    Ok(last) => here.start_next::<R>(places[usize::from(slot)], slot, last),
                    Err(why) => {
                        return here
                            .run
                            .setting
                            .notes
                            .complain(format!("slot {slot} cannot be recovered: {why}"));
                    }
                }
            }
            while here.run.setting.left.get() > 1 {
                here.run.setting.world.sleep(PAUSE).await;
            }
            if let Err(why) = here.write_all::<R>(process, recoverer).await {
                here.run.setting.notes.complain(why);
            }
            drop(staying);
        });
    }

    /// Checks at the end that no record is locked and that every key has room. Takes over the slot of the
    /// first worker, which has no more work.
    async fn write_all<R: IndexRules>(&self, process: ProcessId, place: ClientPlace) -> Result<(), String> {
        self.run.setting.tasks.kill(self.run.setting.clients.borrow()[0]);
        self.run.setting.world.sleep(ALL_HAS_LANDED).await;
        let last = self.recover_seat(process, place, 0).await.map_err(|error| error.to_string())?;
        let memory = Setting::memory(&self.run, process, place, LAST_DEADLINE)
            .await
            .map_err(|error| error.to_string())?;
        let slot = Slot::new(0).expect("a few slots");
        let worker: Worker =
            Worker::new(memory, self.oracle, self.logs(), slot, last).expect("the oracle has it");
        let worker = self.announced(worker, 0).await.map_err(|error| error.to_string())?;
        let table = self.keyed::<R>(slot);
        let mut session = SessionState::new();
        for key in 0..self.run.keys.count() {
            let written = self.write_at_end(&worker, &table, &mut session, key).await;
            written.map_err(|error| format!("key {key} cannot be written at the end: {error}"))?;
        }
        self.check_removal(&worker, &table, &mut session).await
    }

    pub(super) async fn write_at_end<R: IndexRules>(
        &self,
        worker: &Worker,
        table: &KeyedTable<R>,
        session: &mut SessionState,
        key: usize,
    ) -> Result<(), String> {
        let (bytes, data) = (self.run.keys.get(key), [0; DATA_BYTES]);
        for _ in 0..MOST_TRIES {
            let transaction = worker.begin(session).await.map_err(|error| error.to_string())?;
            table.upsert(&transaction, bytes, &data).await.map_err(|error| error.to_string())?;
            match transaction.commit().await {
                Ok(_) => return Ok(()),
                // Until the horizon has moved on.
                Err(CommitError::LogFull) => self.run.setting.world.sleep(PAUSE).await,
                Err(error) => return Err(error.to_string()),
            }
        }
        Err("the log stays full".to_owned())
    }

    /// The table as the worker with this slot uses it.
    fn keyed<R: IndexRules>(&self, slot: Slot) -> KeyedTable<R> {
        let keyed = KeyedTable::new(self.table.clone(), self.run.index::<R>()).expect("of one shape");
        let keyed = match &self.order {
            Some(order) => keyed.with_order(order.tree(slot)),
            None => keyed,
        };
        keyed.with_secondary(self.by_value.iter().map(|by_value| by_value.secondary(slot)).collect())
    }

    fn logs(&self) -> Logs {
        let slots = 0..self.run.setting.clients.borrow().len() as u16;
        Logs::new(slots.map(|slot| log_at(&self.run, slot)))
    }

    /// Rolls back what a dead worker has left. Returns the count after which the next worker begins.
    async fn recover_seat(
        &self,
        process: ProcessId,
        place: ClientPlace,
        slot: u16,
    ) -> Result<u64, RecoveryError> {
        let memory = Setting::memory(&self.run, process, place, LAST_DEADLINE).await?;
        let slot_of = Slot::new(slot).expect("a few slots");
        let recovered = recover(&memory, &self.oracle.into(), &log_at(&self.run, slot), slot_of).await?;
        if self.by_value.is_some() {
            forget(&memory, &self.horizon(), slot..slot + 1).await?;
        }
        Ok(recovered.last)
    }

    fn start_next<R: IndexRules>(self: &Rc<Self>, place: ClientPlace, slot: u16, last: u64) {
        self.run.setting.clients.borrow_mut()[usize::from(slot)] =
            self.run.setting.world.add_process(place.host);
        self.lives.set(self.lives.get() + 1);
        self.start_worker::<R>(place, slot, last);
    }

    fn start_worker<R: IndexRules>(self: &Rc<Self>, place: ClientPlace, slot: u16, last: u64) {
        let life = self.lives.get();
        let process = self.run.setting.clients.borrow()[place.index];
        let sessions = 1 + self.run.setting.notes.random().below(3) as u32;
        let staying: Vec<Staying> = (0..sessions).map(|_| self.run.setting.left.stay()).collect();
        let here = self.clone();
        self.run.setting.tasks.spawn(process, async move {
            let memory = match Setting::memory(&here.run, process, place, LAST_DEADLINE).await {
                Ok(memory) => memory,
                Err(error) => {
                    return here
                        .run
                        .setting
                        .notes
                        .complain(format!("a worker cannot attach its memory: {error}"));
                }
            };
            let slot_of = Slot::new(slot).expect("a few slots");
            let worker = Worker::new(memory, here.oracle, here.logs(), slot_of, last);
            let worker = match here.announced(worker.expect("the oracle has it"), slot).await {
                Ok(worker) => worker,
                Err(error) => {
                    return here.run.setting.notes.complain(format!("a worker cannot begin: {error}"));
                }
            };
            let table = here.keyed::<R>(slot_of);
            let shared = Rc::new((worker, table));
            here.start_remover(process, &shared);
            for (number, staying) in (0..).zip(staying) {
                let name = life * 100 + u32::from(slot) * 10 + number;
                let mut client = Client { here: here.clone(), name, random: here.run.setting.notes.random() };
                let shared = shared.clone();
                here.run.setting.tasks.spawn(process, async move {
                    client.live(&shared.0, &shared.1).await;
                    drop(staying);
                });
            }
        });
    }
}

/// Where a slot's log lies: behind the oracle, on two nodes if there are two.
pub(super) fn log_at(run: &Run, slot: u16) -> LogAt {
    let layout = LogLayout::new(LOG_BYTES).expect("whole words");
    let copies = [0, 1].map(|copy| {
        let node = &run.setting.nodes[usize::from(slot + copy) % run.setting.nodes.len()];
        piece(node.peer.node, ORACLE, LOGS_START + u64::from(2 * slot + copy) * layout.bytes())
    });
    LogAt { copies, layout }
}

pub(super) struct Client {
    pub(super) here: Rc<Transactions>,
    name: u32,
    pub(super) random: Random,
}

/// What a transaction does with a key.
#[derive(Clone, Copy)]
enum Deed {
    Get,
    Insert,
    Update,
    Delete,
}

impl Client {
    async fn live<R: IndexRules>(&mut self, worker: &Worker, table: &KeyedTable<R>) {
        let mut session = SessionState::new();
        for _ in 0..ROUNDS {
            if let Err(why) = self.transact(worker, table, &mut session).await {
                return self
                    .here
                    .run
                    .setting
                    .notes
                    .complain(format!("session {} cannot go on: {why}", self.name));
            }
        }
    }

    async fn transact<R: IndexRules>(
        &mut self,
        worker: &Worker,
        table: &KeyedTable<R>,
        session: &mut SessionState,
    ) -> Result<(), String> {
        let transaction = worker.begin(session).await.map_err(|error: BeginError| error.to_string())?;
        let mut judged = Judged {
            session: self.name,
            begun_from: transaction.cut().clone(),
            reads: Vec::new(),
            writes: Vec::new(),
            outcome: Outcome::Aborted,
        };
        for _ in 0..1 + self.random.below(MOST_KEYS) {
            let key = self.random.index(self.here.run.keys.count());
            let deed = match self.random.below(10) {
                0..4 => Deed::Get,
                4..7 => Deed::Insert,
                7..9 => Deed::Update,
                _ => Deed::Delete,
            };
            let done = if self.here.order.is_some() && self.random.chance(SCANS) {
                self.scan(&transaction, table, &mut judged).await
            } else if self.here.by_value.is_some() && self.random.chance(SCANS) {
                self.scan_by_value(&transaction, table, &mut judged).await
            } else {
                self.touch(&transaction, table, key, deed, &mut judged).await
            };
            match done {
                Ok(()) => {}
                // The transaction does not commit, but its earlier reads are judged all the same.
                Err(KeyError::Record(ReadError::Conflict | ReadError::SnapshotTooOld)) => {
                    self.ended(judged);
                    return Ok(());
                }
                Err(error) => return Err(format!("key {key}: {error}")),
            }
        }
        let committing = match transaction.prepare() {
            Ok(Some(committing)) => committing,
            Ok(None) | Err(CommitError::Busy | CommitError::LogFull) => {
                self.ended(judged);
                return Ok(());
            }
            Err(error) => return Err(error.to_string()),
        };
        // This outcome stays in the history if the worker dies.
        let place = self.ended(Judged { outcome: Outcome::Unknown(committing.version()), ..judged });
        let outcome = match committing.commit().await {
            Ok(version) => Outcome::Committed(version),
            Err(CommitError::Conflict) => Outcome::Aborted,
            Err(error) => return Err(error.to_string()),
        };
        self.here.history.borrow_mut()[place].outcome = outcome;
        Ok(())
    }

    async fn touch<'a, R: IndexRules>(
        &mut self,
        transaction: &Transaction<'a, Shipped>,
        table: &'a KeyedTable<R>,
        key: usize,
        deed: Deed,
        judged: &mut Judged,
    ) -> Result<(), KeyError> {
        let run = self.here.run.clone();
        let bytes = run.keys.get(key);
        let value = self.here.values.get() + 1;
        self.here.values.set(value);
        let data = value.to_le_bytes().repeat(DATA_WORDS);
        let (done, written) = match deed {
            Deed::Get => (table.get(transaction, bytes).await, None),
            Deed::Insert => (table.insert(transaction, bytes, &data).await, Some(Some(value))),
            Deed::Update => (table.update(transaction, bytes, &data).await, Some(Some(value))),
            Deed::Delete => (table.delete(transaction, bytes).await, Some(None)),
        };
        let row = match done {
            Ok(row) => row,
            Err(KeyError::DuplicateBy(_)) => {
                return self.check_refusal(transaction, table, (key, value), judged).await;
            }
            // The errors for a duplicate key and for a missing key are observations, too: they must be true
            // in the transaction's snapshot.
            Err(error @ (KeyError::Duplicate | KeyError::NoSuchKey)) => {
                let row = table.get(transaction, bytes).await?;
                if row.data.is_some() != matches!(error, KeyError::Duplicate) {
                    run.setting.notes.complain(format!("key {key}: wrong answer: {error}"));
                }
                self.saw(key, &row, judged);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if row.data.is_some() && matches!(deed, Deed::Insert) {
            run.setting.notes.complain(format!("key {key} was inserted, though it existed"));
        }
        self.saw(key, &row, judged);
        if let Some(value) = written {
            let key = key as u64;
            match judged.writes.iter_mut().find(|write| write.record == key) {
                Some(write) => write.value = value,
                None => judged.writes.push(Write { record: key, replaced: row.version, value }),
            }
        }
        Ok(())
    }

    /// Records a read, unless the transaction has written the record itself.
    pub(super) fn saw(&self, key: usize, row: &Row, judged: &mut Judged) {
        let record = key as u64;
        if judged.writes.iter().any(|write| write.record == record) {
            return;
        }
        let value = row.data.as_ref().map(|data| {
            let (words, _) = data.as_chunks::<8>();
            if words.iter().any(|word| *word != words[0]) {
                self.here.run.setting.notes.complain(format!("key {key} has words of several versions"));
            }
            u64::from_le_bytes(words[0])
        });
        judged.reads.push(Read { record, version: row.version, value });
    }

    /// Adds a transaction to the history and returns its place there.
    fn ended(&self, judged: Judged) -> usize {
        self.here
            .run
            .setting
            .world
            .note("transaction", &[u64::from(self.name), judged.begun_from.sequence()]);
        let mut history = self.here.history.borrow_mut();
        history.push(judged);
        history.len() - 1
    }
}
