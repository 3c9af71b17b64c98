//! Sessions: they read and write records as the seed says, and write down what they saw.

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::Random;
use farpool_txn::judge::{Outcome, Read, Transaction as Judged, Value, Write};
use farpool_txn::slab::Slab;
use farpool_txn::{
    BeginError, CommitError, Cut, ReadError, Row, Session, SharedSlot, Table, Transaction, Worker,
};
use farpool_wire::{Epoch, Slot};
use futures_util::future::{Either, select};

use super::broken::{self, Chosen};
use super::oracle::Server;
use super::payloads::{is_short, payload_of};
use super::{Life, Run, Staying, place, recovering};

/// Transactions of each session.
const ROUNDS: u64 = 12;
/// Records that a transaction touches at most.
const MOST_RECORDS: u64 = 5;
/// Rounds before which a session does nothing for a while.
const IDLES_PERMILLE: u32 = 100;
const MOST_IDLE_NS: u64 = 100_000;
/// Of the transactions that only read, so many take their time, up to so long before each record.
const LINGERS_PERMILLE: u32 = 300;
const MOST_LINGERING_NS: u64 = 150_000;
/// How often a writer tries again that finds no room, and how long it waits before.
const TRIES: u32 = 4;
const PAUSE: Duration = Duration::from_micros(20);

/// Transactions that are given up half-way, and after how long at most, where some are.
const GIVEN_UP_PERMILLE: u32 = 60;
const MOST_PATIENCE_NS: u64 = 80_000;

/// Starts a client in a slot whose last commit is `last`, with one to three sessions.
pub(super) fn start(run: &Rc<Run>, slot: u16, last: u64, random: &mut Random) {
    let place = place(run, random);
    let process = run.world.add_process(place.0);
    let life = Life { process, grant: run.grant(), is_dead: false };
    run.lives.borrow_mut().insert(slot, life);
    run.seat(slot, Some(life.grant));
    let slab = run.slab(life.grant);
    let client = |_| Client::new(run, slot, life.grant, slab.clone());
    let sessions: Vec<_> = (0..1 + random.below(3)).map(client).collect();
    let server = Server::draw(random);
    let is_followed = random.chance(300);
    let here = run.clone();
    run.tasks.spawn(process, async move {
        let slot_of = Slot::new(slot).expect("a few slots");
        let shared = SharedSlot::after(slot_of, here.log(slot, life.grant), last);
        let workers = match server.start(&here, process, place, life.grant, shared).await {
            Ok(workers) => workers,
            Err(error) => return gives_up(&here, slot, life.grant, &error.to_string()),
        };
        let server = Rc::new(Shared {
            run: here.clone(),
            slot,
            grant: life.grant,
            is_followed,
            left: Cell::new(sessions.len() + 1),
            worker: RefCell::new(workers.first().cloned()),
            _staying: Staying::new(&here),
        });
        for (client, worker) in sessions.into_iter().zip(workers.iter().cycle()) {
            let (worker, server) = (worker.clone(), server.clone());
            here.tasks.spawn(process, async move {
                client.live(worker).await;
                server.ended().await;
            });
        }
        // Those that have no sessions.
        for worker in workers {
            leave(&here, (slot, life.grant), worker).await;
        }
        server.ended().await;
    });
}

/// What the sessions of a client share.
struct Shared {
    run: Rc<Run>,
    slot: u16,
    grant: Epoch,
    /// Another client takes the slot when this one has left it.
    is_followed: bool,
    /// Sessions that have not ended, and who lets the workers go that have none.
    left: Cell<usize>,
    /// For what the last one does.
    worker: RefCell<Option<Rc<Worker<Chosen>>>>,
    _staying: Staying,
}

impl Shared {
    /// One of them has ended.
    async fn ended(&self) {
        self.left.set(self.left.get() - 1);
        if self.left.get() > 0 {
            return;
        }
        let worker = self.worker.borrow_mut().take().expect("the last one ends once");
        let mut last = None;
        if self.is_followed || self.run.faults.stop_clients() {
            last = self.leave_slot(&worker).await.filter(|_| self.is_followed);
        }
        leave(&self.run, (self.slot, self.grant), worker).await;
        // Else somebody looks after the slot, and takes care of the next.
        if let Some(last) = last.filter(|_| !is_given_up(&self.run, self.slot, self.grant)) {
            start(&self.run, self.slot, last, &mut self.run.random());
        }
    }

    /// The client gives its slot up: behind which count does the next one begin?
    async fn leave_slot(&self, worker: &Worker<Chosen>) -> Option<u64> {
        let word = self.run.word(self.slot);
        let left = worker.leave_slot().await;
        if is_given_up(&self.run, self.slot, self.grant) {
            return None;
        }
        match left {
            Ok(last) => {
                if self.run.word(self.slot) != last {
                    self.run.complain(format!("slot {} was left, and its word has less", self.slot));
                }
                self.run.seat(self.slot, None);
                Some(if broken::is(broken::LEFT_BEHIND) { word } else { last })
            }
            Err(error) => {
                gives_up(&self.run, self.slot, self.grant, &error.to_string());
                None
            }
        }
    }
}

/// The last who has used a worker lets it go.
async fn leave(run: &Rc<Run>, (slot, grant): (u16, Epoch), worker: Rc<Worker<Chosen>>) {
    if let Ok(worker) = Rc::try_unwrap(worker)
        && let Err(error) = worker.leave().await
    {
        gives_up(run, slot, grant, &error.to_string());
    }
}

/// Whether somebody looks after the slot of a client, or has.
fn is_given_up(run: &Run, slot: u16, grant: Epoch) -> bool {
    run.lives.borrow().get(&slot).is_some_and(|life| life.grant != grant || life.is_dead)
}

/// A client cannot go on: that is right only if somebody looks after its slot, or has.
fn gives_up(run: &Rc<Run>, slot: u16, grant: Epoch, why: &str) {
    if is_given_up(run, slot, grant) {
        return;
    }
    if run.faults.stop_clients() {
        recovering::look_after(run, slot, grant);
    } else {
        run.complain(format!("the client of slot {slot} cannot go on: {why}"));
    }
}

/// A session.
pub(super) struct Client {
    run: Rc<Run>,
    slot: u16,
    grant: Epoch,
    table: Table,
    name: u32,
    random: Random,
    /// There may be no room for long payloads.
    pub(super) is_frugal: bool,
    _staying: Staying,
}

/// What a transaction has done so far; it is in the history at its end, also where that is the death of its client.
pub(super) struct Doing {
    run: Rc<Run>,
    pub(super) judged: Option<Judged>,
}

impl Drop for Doing {
    fn drop(&mut self) {
        let judged = self.judged.take().expect("it is taken once");
        self.run.world.note("transaction", &[u64::from(judged.session), judged.begun_from.sequence()]);
        self.run.history.borrow_mut().push(judged);
    }
}

impl Client {
    pub(super) fn new(run: &Rc<Run>, slot: u16, grant: Epoch, slab: Option<Arc<Slab>>) -> Client {
        let name = run.next_name() as u32;
        let (random, table) = (run.random(), run.table(grant));
        let table = match slab {
            Some(slab) => table.with_slab(slab).expect("places have room for pointers"),
            None => table,
        };
        let (run, _staying) = (run.clone(), Staying::new(run));
        Client { run, slot, grant, table, name, random, is_frugal: false, _staying }
    }

    async fn live(mut self, worker: Rc<Worker<Chosen>>) {
        let mut session = Session::new();
        for _ in 0..ROUNDS {
            if self.random.chance(IDLES_PERMILLE)
                && let Err(why) = self.idle(&worker).await
            {
                gives_up(&self.run, self.slot, self.grant, &why);
                break;
            }
            let is_only_reading = self.random.chance(400);
            let records: Vec<_> = (0..1 + self.random.below(MOST_RECORDS))
                .map(|_| {
                    let record = self.random.below(self.table.records());
                    (record, !is_only_reading && self.random.chance(600))
                })
                .collect();
            let gives_up_after = (self.run.faults.drops && self.random.chance(GIVEN_UP_PERMILLE))
                .then(|| Duration::from_nanos(self.random.below(MOST_PATIENCE_NS)));
            let run = self.run.clone();
            let done = match gives_up_after {
                None => self.transact(&worker, &mut session, &records).await,
                Some(after) => {
                    let patience = pin!(run.world.sleep(after));
                    let transacting = self.transact(&worker, &mut session, &records);
                    let ended = match select(pin!(transacting), patience).await {
                        Either::Left((done, _)) => Some(done),
                        Either::Right(_) => None,
                    };
                    // The session will not know of its own commit, if it was one.
                    self.name = if ended.is_some() { self.name } else { run.next_name() as u32 };
                    ended.unwrap_or(Ok(false))
                }
            };
            if let Err(why) = done {
                gives_up(&self.run, self.slot, self.grant, &why);
                break;
            }
        }
        leave(&self.run, (self.slot, self.grant), worker).await;
    }

    /// Does nothing for a while, but for telling how far the worker has come, and giving back what nobody needs of the slab.
    async fn idle(&mut self, worker: &Worker<Chosen>) -> Result<(), String> {
        self.run.world.sleep(Duration::from_nanos(self.random.below(MOST_IDLE_NS))).await;
        worker.keep_up().await.map_err(|error: BeginError| error.to_string())?;
        worker.tend(&self.table).await.map_err(|error| error.to_string())
    }

    /// Runs one transaction; whether it was committed, or why nothing goes on.
    pub(super) async fn transact(
        &mut self,
        worker: &Worker<Chosen>,
        session: &mut Session,
        records: &[(u64, bool)],
    ) -> Result<bool, String> {
        let table = self.table.clone();
        let mut transaction = worker.begin(session).await.map_err(|error| error.to_string())?;
        let mut doing = self.begins(transaction.cut().clone());
        let judged = doing.judged.as_mut().expect("it goes on");
        if let Err(error) = self.look_ahead(&mut transaction, &table, records, judged).await {
            return self.aborts(error);
        }
        let is_only_reading = records.iter().all(|(_, writes)| !writes);
        let lingers = is_only_reading && self.random.chance(LINGERS_PERMILLE);
        for &(record, writes) in records {
            if lingers {
                let lingering = Duration::from_nanos(self.random.below(MOST_LINGERING_NS));
                self.run.world.sleep(lingering).await;
            }
            let judged = doing.judged.as_mut().expect("it goes on");
            if let Err(error) = self.touch(&mut transaction, &table, record, writes, judged).await {
                return self.aborts(error);
            }
        }
        let committing = match transaction.prepare() {
            Ok(Some(committing)) => committing,
            Ok(None) => return Ok(true),
            Err(CommitError::Busy) => return Ok(false),
            Err(error) => return Err(error.to_string()),
        };
        let judged = doing.judged.as_mut().expect("it goes on");
        let version = committing.version();
        judged.outcome = Outcome::Unknown(version);
        let committed = committing.commit().await;
        judged.outcome = match &committed {
            Ok(version) => Outcome::Committed(*version),
            Err(CommitError::Conflict | CommitError::Nothing(_)) => Outcome::Aborted,
            Err(_) => judged.outcome,
        };
        if matches!(committed, Ok(_) | Err(CommitError::Conflict)) {
            self.run.knows(version, judged.outcome);
        }
        match committed {
            Ok(_) => Ok(true),
            Err(CommitError::Conflict) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }

    fn begins(&self, begun_from: Cut) -> Doing {
        let judged = Judged {
            session: self.name,
            begun_from,
            reads: Vec::new(),
            writes: Vec::new(),
            outcome: Outcome::Aborted,
        };
        Doing { run: self.run.clone(), judged: Some(judged) }
    }

    /// Whether a transaction that has met an error was merely not committed; what was read before is judged all the same.
    fn aborts(&self, error: ReadError) -> Result<bool, String> {
        match error {
            ReadError::Conflict | ReadError::RingFull | ReadError::NoSpace { .. } => Ok(false),
            ReadError::SnapshotTooOld if is_given_up(&self.run, self.slot, self.grant) => Ok(false),
            ReadError::Damaged if self.run.faults.damage => Ok(false),
            error => Err(error.to_string()),
        }
    }

    /// Reads what the transaction is about to touch in one step, in one of several ways, or does not.
    async fn look_ahead(
        &mut self,
        transaction: &mut Transaction<'_, Chosen>,
        table: &Table,
        records: &[(u64, bool)],
        judged: &mut Judged,
    ) -> Result<(), ReadError> {
        let written = records.iter().filter(|(_, writes)| *writes).map(|(record, _)| *record);
        let (numbers, rows) = match self.random.below(6) {
            0 => {
                let numbers: Vec<u64> = records.iter().map(|(record, _)| *record).collect();
                let rows = transaction.read_many(table, &numbers).await?;
                (numbers, rows)
            }
            1 | 2 => {
                let numbers: Vec<u64> = written.collect();
                let rows = transaction.take_many(table, &numbers).await?;
                (numbers, rows)
            }
            3 => {
                let (mut numbers, mut rows) = (Vec::new(), Vec::new());
                let visit = |number, version, data: Option<&[u8]>| {
                    numbers.push(number);
                    rows.push(Row { version, data: data.map(<[u8]>::to_vec) });
                };
                transaction.scan(table, 0..table.records(), visit).await?;
                (numbers, rows)
            }
            _ => return Ok(()),
        };
        for (record, row) in numbers.into_iter().zip(rows) {
            let value = self.value_of(&row, record);
            judged.reads.push(Read { record, version: row.version, value });
        }
        Ok(())
    }

    /// Reads or writes a record; a ring that is full may have room in a moment.
    async fn touch<'a>(
        &mut self,
        transaction: &mut Transaction<'a, Chosen>,
        table: &'a Table,
        record: u64,
        writes: bool,
        judged: &mut Judged,
    ) -> Result<(), ReadError> {
        for _ in 1..TRIES {
            match self.touch_once(transaction, table, record, writes, judged).await {
                Err(ReadError::RingFull) => self.run.world.sleep(PAUSE).await,
                touched => return touched,
            }
        }
        self.touch_once(transaction, table, record, writes, judged).await
    }

    async fn touch_once<'a>(
        &mut self,
        transaction: &mut Transaction<'a, Chosen>,
        table: &'a Table,
        record: u64,
        writes: bool,
        judged: &mut Judged,
    ) -> Result<(), ReadError> {
        let is_first = !judged.writes.iter().any(|write| write.record == record);
        let row = if writes {
            let value = if self.random.chance(150) { None } else { Some(self.next_value()) };
            let data = value.map(|value| payload_of(&self.run, value));
            let row = transaction.write(table, record, data.as_deref()).await?;
            match judged.writes.iter_mut().find(|write| write.record == record) {
                Some(write) => write.value = value,
                None => judged.writes.push(Write { record, replaced: row.version, value }),
            }
            row
        } else {
            transaction.read(table, record).await?
        };
        if is_first {
            let value = self.value_of(&row, record);
            judged.reads.push(Read { record, version: row.version, value });
        }
        Ok(())
    }

    fn next_value(&self) -> u64 {
        let mut values = std::iter::repeat_with(|| self.run.next_name());
        values.find(|value| !self.is_frugal || is_short(*value)).expect("they do not end")
    }

    fn value_of(&self, row: &Row, record: u64) -> Value {
        let data = row.data.as_ref()?;
        let value = data.first_chunk().map(|word| u64::from_le_bytes(*word));
        if value.is_none_or(|value| *data != payload_of(&self.run, value)) {
            self.run.complain(format!("record {record} holds words of several versions"));
        }
        value
    }
}
