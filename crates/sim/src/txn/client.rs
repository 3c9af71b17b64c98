//! Sessions: they read and write records as the seed says, and write down what they saw.

use std::rc::Rc;

use farpool_fabric::sim::Random;
use farpool_txn::judge::{Outcome, Read, Transaction as Judged, Value, Write};
use farpool_txn::{BeginError, CommitError, ReadError, Row, Rules, Session, Transaction, Worker};
use farpool_wire::Slot;

use super::{DATA_WORDS, Run, place};

/// Transactions of each session.
const ROUNDS: u64 = 12;
/// Records that a transaction touches at most.
const MOST_RECORDS: u64 = 5;

/// Starts the worker of a slot, with one to three sessions.
pub(super) fn start<R: Rules>(run: &Rc<Run>, slot: u16, random: &mut Random) {
    let (host, path) = place(run, random);
    let process = run.world.add_process(host);
    let sessions = 1 + random.below(3) as u32;
    *run.clients_left.borrow_mut() += sessions;
    let here = run.clone();
    run.tasks.spawn(process, async move {
        let memory = match here.memory(process, host, path).await {
            Ok(memory) => memory,
            Err(error) => return here.complain(format!("a worker has no memory: {error}")),
        };
        let slot_of = Slot::new(slot).expect("a few slots");
        let worker =
            Rc::new(Worker::<R>::new(memory, here.oracle, slot_of, 0).expect("the oracle has the slot"));
        for number in 0..sessions {
            let client =
                Client { run: here.clone(), name: u32::from(slot) * 10 + number, random: here.random() };
            let worker = worker.clone();
            here.tasks.spawn(process, async move { client.live(&worker).await });
        }
    });
}

struct Client {
    run: Rc<Run>,
    name: u32,
    random: Random,
}

impl Client {
    async fn live<R: Rules>(mut self, worker: &Worker<R>) {
        let mut session = Session::new();
        for _ in 0..ROUNDS {
            if !self.transact(worker, &mut session).await {
                break;
            }
        }
        *self.run.clients_left.borrow_mut() -= 1;
    }

    /// Runs one transaction; false: nothing goes on.
    async fn transact<R: Rules>(&mut self, worker: &Worker<R>, session: &mut Session) -> bool {
        let mut transaction = match worker.begin(session).await {
            Ok(transaction) => transaction,
            Err(BeginError::OracleStopped) => return self.give_up("nothing is published"),
            Err(BeginError::Memory(error)) => return self.give_up(&error.to_string()),
        };
        let mut judged = Judged {
            session: self.name,
            begun_from: transaction.cut().clone(),
            reads: Vec::new(),
            writes: Vec::new(),
            outcome: Outcome::Aborted,
        };
        let table = self.run.table.clone();
        let is_only_reading = self.random.chance(400);
        for _ in 0..1 + self.random.below(MOST_RECORDS) {
            let record = self.random.below(table.records());
            let writes = !is_only_reading && self.random.chance(600);
            match self.touch(&mut transaction, &table, record, writes, &mut judged).await {
                Ok(()) => {}
                // What was read before is judged all the same.
                Err(ReadError::Conflict | ReadError::SnapshotTooOld) => {
                    drop(transaction);
                    return self.ended(judged);
                }
                Err(error) => return self.give_up(&error.to_string()),
            }
        }
        judged.outcome = match transaction.commit().await {
            Ok(Some(version)) => Outcome::Committed(version),
            Ok(None) | Err(CommitError::Conflict | CommitError::Busy) => Outcome::Aborted,
            Err(error) => return self.give_up(&error.to_string()),
        };
        self.ended(judged)
    }

    async fn touch<'a, R: Rules>(
        &mut self,
        transaction: &mut Transaction<'a, R>,
        table: &'a farpool_txn::Table,
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

    fn ended(&self, judged: Judged) -> bool {
        self.run.world.note("transaction", &[u64::from(self.name), judged.begun_from.sequence()]);
        self.run.history.borrow_mut().push(judged);
        true
    }

    fn give_up(&self, why: &str) -> bool {
        self.run.complain(format!("session {} cannot go on: {why}", self.name));
        false
    }
}

fn data_of(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(DATA_WORDS)
}
