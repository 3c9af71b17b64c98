//! What the scenarios with transactions share: a run's ledger of what sessions did and what they were
//! answered, and the steps of a session's transaction.

pub(crate) mod fates;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::{Random, World};
use farpool_txn::judge::{Outcome, Read, Transaction as Judged, Value, Write};
use farpool_txn::{
    BeginError, CommitError, Cut, ReadError, Row, Rules, SessionState, Table, Transaction, Worker,
};
use farpool_wire::Version;
use futures_util::future::join_all;

use crate::notebook::Notebook;

/// Words of a record's data, all equal, so that a reader detects a mixture of two versions.
pub(crate) const DATA_WORDS: usize = 6;
/// Read-only transactions, in thousandths, that pause before each record, and the longest pause.
const LINGERS_PERMILLE: u32 = 300;
const MOST_LINGERING_NS: u64 = 150_000;

/// What all parts of a run record for its judge.
pub(crate) struct Ledger {
    pub(crate) notes: Notebook,
    pub(crate) history: RefCell<Vec<Judged>>,
    /// For each commit whose outcome a process has learnt: whether it took effect.
    pub(crate) known: RefCell<BTreeMap<Version, bool>>,
}

impl Ledger {
    pub(crate) fn new(world: World, seed: u64) -> Rc<Ledger> {
        Rc::new(Ledger {
            notes: Notebook::new(world, seed),
            history: RefCell::default(),
            known: RefCell::default(),
        })
    }

    /// Records that a process has learnt the outcome of a commit.
    pub(crate) fn knows(&self, version: Version, outcome: Outcome) {
        let is_committed = matches!(outcome, Outcome::Committed(_));
        let slot = version.slot().index() as u64;
        self.notes.world.note(
            "somebody learns of commit {} of slot {}; committed: {}",
            &[version.count(), slot, is_committed.into()],
        );
        if self.known.borrow_mut().insert(version, is_committed).is_some_and(|before| before != is_committed)
        {
            self.notes
                .complain(format!("commit {version} was reported both as committed and as not committed"));
        }
    }
}

/// Why a transaction did not finish.
#[derive(Debug)]
pub(crate) enum Stopped {
    Begin(BeginError),
    Read(ReadError),
    Commit(CommitError),
}

impl fmt::Display for Stopped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stopped::Begin(error) => error.fmt(formatter),
            Stopped::Read(error) => error.fmt(formatter),
            Stopped::Commit(error) => error.fmt(formatter),
        }
    }
}

/// Runs transactions, and records what they saw.
pub(crate) struct Transactor {
    ledger: Rc<Ledger>,
    world: World,
    pub(crate) table: Table,
    /// The name of its session.
    pub(crate) name: u32,
    pub(crate) random: Random,
    payload_of: Rc<dyn Fn(u64) -> Vec<u8>>,
    /// Whether it may write this value.
    pub(crate) may_write: fn(u64) -> bool,
}

/// What a transaction has done so far. It is added to the history when this is dropped, also if the reason is
/// that its client died.
struct Doing {
    ledger: Rc<Ledger>,
    judged: Option<Judged>,
}

impl Drop for Doing {
    fn drop(&mut self) {
        let judged = self.judged.take().expect("it is taken once");
        let numbers = [u64::from(judged.session), judged.begun_from.sequence()];
        self.ledger.notes.world.note("transaction", &numbers);
        self.ledger.history.borrow_mut().push(judged);
    }
}

impl Transactor {
    pub(crate) fn new(ledger: &Rc<Ledger>, table: Table) -> Transactor {
        let name = ledger.notes.next_name() as u32;
        let (random, world) = (ledger.notes.random(), ledger.notes.world.clone());
        let payload_of = Rc::new(|value: u64| value.to_le_bytes().repeat(DATA_WORDS));
        Transactor { ledger: ledger.clone(), world, table, name, random, payload_of, may_write: |_| true }
    }

    /// Replaces the payloads of [`DATA_WORDS`] words that stand for values. Each payload begins with its
    /// value.
    pub(crate) fn with_payloads(self, payload_of: Rc<dyn Fn(u64) -> Vec<u8>>) -> Transactor {
        Transactor { payload_of, ..self }
    }

    fn next_value(&self) -> u64 {
        let mut values = std::iter::repeat_with(|| self.ledger.notes.next_name());
        values.find(|value| (self.may_write)(*value)).expect("they do not end")
    }

    /// Runs one transaction, which reads or writes these records. Returns whether it committed; it does not
    /// after a conflict, or without room.
    pub(crate) async fn transact<R: Rules>(
        &mut self,
        worker: &Worker<R>,
        session: &mut SessionState,
        records: &[(u64, bool)],
    ) -> Result<bool, Stopped> {
        match self.try_once(worker, session, records).await {
            Err(Stopped::Read(ReadError::Conflict | ReadError::NoSpace { .. })) => Ok(false),
            done => done,
        }
    }

    async fn try_once<R: Rules>(
        &mut self,
        worker: &Worker<R>,
        session: &mut SessionState,
        records: &[(u64, bool)],
    ) -> Result<bool, Stopped> {
        let table = self.table.clone();
        let transaction = worker.begin(session).await.map_err(Stopped::Begin)?;
        let mut doing = self.begins(transaction.cut().clone());
        let judged = doing.judged.as_mut().expect("it goes on");
        self.look_ahead(&transaction, &table, records, judged).await.map_err(Stopped::Read)?;
        let is_only_reading = records.iter().all(|(_, writes)| !writes);
        let lingers = is_only_reading && self.random.chance(LINGERS_PERMILLE);
        for &(record, writes) in records {
            if lingers {
                let lingering = Duration::from_nanos(self.random.below(MOST_LINGERING_NS));
                self.world.sleep(lingering).await;
            }
            let judged = doing.judged.as_mut().expect("it goes on");
            self.touch(&transaction, &table, record, writes, judged).await.map_err(Stopped::Read)?;
        }
        let committing = match transaction.prepare() {
            Ok(Some(committing)) => committing,
            Ok(None) => return Ok(true),
            Err(CommitError::Busy | CommitError::LogFull) => return Ok(false),
            Err(error) => return Err(Stopped::Commit(error)),
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
            self.ledger.knows(version, judged.outcome);
        }
        match committed {
            Ok(_) => Ok(true),
            Err(CommitError::Conflict) => Ok(false),
            Err(error) => Err(Stopped::Commit(error)),
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
        Doing { ledger: self.ledger.clone(), judged: Some(judged) }
    }

    /// In some transactions, reads or writes several records in advance in one step, in one of several ways.
    async fn look_ahead<R: Rules>(
        &mut self,
        transaction: &Transaction<'_, R>,
        table: &Table,
        records: &[(u64, bool)],
        judged: &mut Judged,
    ) -> Result<(), ReadError> {
        let written = records.iter().filter(|(_, writes)| *writes).map(|(record, _)| *record);
        let (numbers, rows) = match self.random.below(7) {
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
            4 => return self.write_together(transaction, table, written.collect(), judged).await,
            _ => return Ok(()),
        };
        for (record, row) in numbers.into_iter().zip(rows) {
            let value = self.value_of(&row, record);
            judged.reads.push(Read { record, version: row.version, value });
        }
        Ok(())
    }

    /// Writes records by operations that are under way at the same time.
    async fn write_together<R: Rules>(
        &mut self,
        transaction: &Transaction<'_, R>,
        table: &Table,
        mut records: Vec<u64>,
        judged: &mut Judged,
    ) -> Result<(), ReadError> {
        records.sort_unstable();
        records.dedup();
        let values: Vec<u64> = records.iter().map(|_| self.next_value()).collect();
        let payloads: Vec<Vec<u8>> = values.iter().map(|value| (self.payload_of)(*value)).collect();
        let writes = records.iter().zip(&payloads);
        let writes = writes.map(|(record, payload)| transaction.write(table, *record, Some(payload)));
        // All of them end before the transaction does: a WRITE of a payload that is dropped is in doubt.
        let rows = join_all(writes).await;
        for ((record, value), row) in records.into_iter().zip(values).zip(rows) {
            let row = row?;
            let found = self.value_of(&row, record);
            judged.reads.push(Read { record, version: row.version, value: found });
            judged.writes.push(Write { record, replaced: row.version, value: Some(value) });
        }
        Ok(())
    }

    /// Reads or writes a record.
    async fn touch<'a, R: Rules>(
        &mut self,
        transaction: &Transaction<'a, R>,
        table: &'a Table,
        record: u64,
        writes: bool,
        judged: &mut Judged,
    ) -> Result<(), ReadError> {
        let is_first = !judged.writes.iter().any(|write| write.record == record);
        let row = if writes {
            let value = if self.random.chance(150) { None } else { Some(self.next_value()) };
            let data = value.map(|value| (self.payload_of)(value));
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
        let value = data.first_chunk().map(|word| u64::from_le_bytes(*word));
        if value.is_none_or(|value| *data != (self.payload_of)(value)) {
            self.ledger.notes.complain(format!("record {record} holds words of several versions"));
        }
        value
    }
}
