//! Sessions: they read and write records as the seed says, and write down what they saw.

use std::rc::Rc;
use std::sync::Arc;

use farpool_fabric::sim::{HostId, Path, ProcessId, Random};
use farpool_txn::judge::{Outcome, Read, Transaction as Judged, Value, Write};
use farpool_txn::{
    BeginError, CommitError, MemoryError, ReadError, Row, Rules, Session, SharedSlot, Transaction, Worker,
};
use farpool_wire::Slot;

use super::oracle::{self, Server};
use super::{DATA_WORDS, Run, place};

/// Transactions of each session.
const ROUNDS: u64 = 12;
/// Records that a transaction touches at most.
const MOST_RECORDS: u64 = 5;

/// Starts the compute server of a slot, with one to three sessions.
pub(super) fn start<R: Rules>(run: &Rc<Run>, slot: u16, random: &mut Random) {
    let (host, path) = place(run, random);
    let process = run.world.add_process(host);
    let sessions = 1 + random.below(3) as u32;
    let server = Server::draw(random);
    *run.clients_left.borrow_mut() += sessions;
    let here = run.clone();
    run.tasks.spawn(process, async move {
        let workers = match start_workers::<R>(&here, slot, process, (host, path), server).await {
            Ok(workers) => workers,
            Err(error) => return here.complain(format!("a worker has no memory: {error}")),
        };
        for number in 0..sessions {
            let client =
                Client { run: here.clone(), name: u32::from(slot) * 10 + number, random: here.random() };
            let worker = workers[number as usize % workers.len()].clone();
            here.tasks.spawn(process, async move { client.live(&worker).await });
        }
    });
}

/// The workers of a compute server, each with a way to far memory of its own; and its fetch thread.
async fn start_workers<R: Rules>(
    run: &Rc<Run>,
    slot: u16,
    process: ProcessId,
    (host, path): (HostId, Path),
    server: Server,
) -> Result<Vec<Rc<Worker<R>>>, MemoryError> {
    let slot = Arc::new(SharedSlot::after(Slot::new(slot).expect("a few slots"), 0));
    let fetched = match server.fetches {
        true => Some(oracle::start_fetching::<R>(run, process, run.memory(process, host, path).await?)),
        false => None,
    };
    let mut workers = Vec::new();
    for _ in 0..server.workers {
        let memory = run.memory(process, host, path).await?;
        let worker = Worker::sharing(memory, run.oracle.clone(), slot.clone());
        let worker = worker.expect("the oracle has the slot");
        workers.push(Rc::new(match &fetched {
            Some(fetched) => worker.with_fetched(fetched.clone()),
            None => worker,
        }));
    }
    Ok(workers)
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
