//! Sessions: they read and write records as the seed says, and write down what they saw.

use std::rc::Rc;

use farpool_fabric::sim::Random;
use farpool_txn::judge::{Outcome, Read, Transaction as Judged, Value, Write};
use farpool_txn::{CommitError, Cut, ReadError, Row, Session, SharedSlot, Table, Transaction, Worker};
use farpool_wire::{Epoch, Slot};

use super::broken::Chosen;
use super::oracle::Server;
use super::{DATA_WORDS, Life, Run, Staying, place};

/// Transactions of each session.
const ROUNDS: u64 = 12;
/// Records that a transaction touches at most.
const MOST_RECORDS: u64 = 5;

/// Starts a client in a slot whose last commit is `last`, with one to three sessions.
pub(super) fn start(run: &Rc<Run>, slot: u16, last: u64, random: &mut Random) {
    let place = place(run, random);
    let process = run.world.add_process(place.0);
    let life = Life { process, grant: run.grant(), is_dead: false };
    run.lives.borrow_mut().insert(slot, life);
    let sessions: Vec<_> = (0..1 + random.below(3)).map(|_| Client::new(run, slot, life.grant)).collect();
    let server = Server::draw(random);
    let here = run.clone();
    run.tasks.spawn(process, async move {
        let slot_of = Slot::new(slot).expect("a few slots");
        let shared = SharedSlot::after(slot_of, here.log(slot, life.grant), last);
        let workers = match server.start(&here, process, place, life.grant, shared).await {
            Ok(workers) => workers,
            Err(error) => return gives_up(&here, slot, life.grant, &error.to_string()),
        };
        for (client, worker) in sessions.into_iter().zip(workers.iter().cycle()) {
            let worker = worker.clone();
            here.tasks.spawn(process, async move { client.live(&worker).await });
        }
    });
}

/// A client cannot go on: that is right only if somebody looks after its slot, or has.
fn gives_up(run: &Run, slot: u16, grant: Epoch, why: &str) {
    let is_dead = run.lives.borrow().get(&slot).is_some_and(|life| life.grant != grant || life.is_dead);
    if !is_dead {
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
    pub(super) fn new(run: &Rc<Run>, slot: u16, grant: Epoch) -> Client {
        let name = run.next_name() as u32;
        let (random, table) = (run.random(), run.table(grant));
        Client { run: run.clone(), slot, grant, table, name, random, _staying: Staying::new(run) }
    }

    async fn live(mut self, worker: &Worker<Chosen>) {
        let mut session = Session::new();
        for _ in 0..ROUNDS {
            let is_only_reading = self.random.chance(400);
            let records: Vec<_> = (0..1 + self.random.below(MOST_RECORDS))
                .map(|_| {
                    let record = self.random.below(self.table.records());
                    (record, !is_only_reading && self.random.chance(600))
                })
                .collect();
            if let Err(why) = self.transact(worker, &mut session, &records).await {
                gives_up(&self.run, self.slot, self.grant, &why);
                break;
            }
        }
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
        for &(record, writes) in records {
            let judged = doing.judged.as_mut().expect("it goes on");
            match self.touch(&mut transaction, &table, record, writes, judged).await {
                Ok(()) => {}
                // What was read before is judged all the same.
                Err(ReadError::Conflict | ReadError::SnapshotTooOld) => return Ok(false),
                Err(error) => return Err(error.to_string()),
            }
        }
        let committing = match transaction.prepare() {
            Ok(Some(committing)) => committing,
            Ok(None) => return Ok(true),
            Err(CommitError::Busy) => return Ok(false),
            Err(error) => return Err(error.to_string()),
        };
        let judged = doing.judged.as_mut().expect("it goes on");
        judged.outcome = Outcome::Unknown(committing.version());
        match committing.commit().await {
            Ok(version) => {
                judged.outcome = Outcome::Committed(version);
                Ok(true)
            }
            Err(CommitError::Conflict) => {
                judged.outcome = Outcome::Aborted;
                Ok(false)
            }
            Err(CommitError::Nothing(error)) => {
                judged.outcome = Outcome::Aborted;
                Err(error.to_string())
            }
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

    async fn touch<'a>(
        &mut self,
        transaction: &mut Transaction<'a, Chosen>,
        table: &'a Table,
        record: u64,
        writes: bool,
        judged: &mut Judged,
    ) -> Result<(), ReadError> {
        let is_first = !judged.writes.iter().any(|write| write.record == record);
        let row = if writes {
            let value = if self.random.chance(150) { None } else { Some(self.run.next_name()) };
            let data = value.map(data_of);
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

    fn value_of(&self, row: &Row, record: u64) -> Value {
        let data = row.data.as_ref()?;
        let (words, _) = data.as_chunks::<8>();
        let value = u64::from_le_bytes(*words.first()?);
        if words.iter().any(|word| u64::from_le_bytes(*word) != value) {
            self.run.complain(format!("record {record} holds words of several versions"));
        }
        Some(value)
    }
}

fn data_of(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(DATA_WORDS)
}
