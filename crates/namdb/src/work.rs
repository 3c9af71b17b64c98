//! Runs random transactions, writes down what they saw, and judges the histories of several processes
//! (`docs/src/namdb.md`, *checking a database*). The judge is that of the simulations: it looks at cuts and
//! versions, and at nothing inside the engine.
//!
//! W1. A transaction's line is written before it commits, with the version that the commit will have. So a
//!     process that is killed has left that line.
//! W2. A line says all that is known. If a transaction has several lines, the last one counts.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::BufRead;
use std::ops::Bound;
use std::rc::Rc;

use farpool_fabric::block_on;
pub use farpool_txn::Step;
use farpool_txn::hash::IndexError;
use farpool_txn::judge::{Outcome, Read, Transaction as Judged, Violation, Write, judge};
use farpool_txn::tree::TreeError;
use farpool_txn::{
    CommitError, Cut, Direction, KeyError, KeyedTable, MemoryError, Row, Rules, Scan, Scanned, SessionState,
    Transaction, Worker,
};
use farpool_wire::{Slot, Version};
pub use rustix::process::Signal;
use rustix::process::{getpid, kill_process};
use serde::{Deserialize, Serialize};

use crate::client::Client;
use crate::error::{DatabaseError, Stop, TxError, of_key};
use crate::key::{KeyBytes, OwnedKey};
use crate::table::{Table, TableOptions};
use crate::workers::ClientPlace;

/// The name of the table that transactions work on.
const TABLE: &str = "farpool-work";
/// Words of a row. All are equal, so a mix of two versions is detected.
const ROW_WORDS: usize = 6;
/// Bytes of the shortest row, if rows have any length.
const SHORTEST: usize = 10;
/// The slab of such a table has room for this many of the longest rows.
const LONGEST_ROWS: u64 = 128;
/// Most rows that a transaction touches.
const MOST_ROWS: u64 = 5;
/// Keys of rows that are inserted once, and not changed, start here.
const INSERTED: u64 = 1 << 63;
/// A scan of such rows ends after so many.
const MOST_SCANNED: usize = 30;
/// There is room for so many of them.
const MOST_INSERTED: u64 = 10_000;
/// Odd: it scatters keys.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;
/// Per thousand: transactions that only read; rows that the other transactions write; rows that are deleted,
/// of those written.
const READ_ONLY: u64 = 300;
const WRITTEN: u64 = 600;
const DELETED: u64 = 100;
/// The same, where rows are scanned: transactions that scan, and transactions that insert a new row.
const SCANNING: u64 = 300;
const INSERTING: u64 = 400;

/// One transaction, as it is written down. Fields are stable; new ones may be added.
#[derive(Serialize, Deserialize)]
struct Line {
    session: u32,
    number: u64,
    /// The number of its cut.
    cut: u64,
    /// For each slot, the count up to which it saw commits.
    counts: Vec<u64>,
    reads: Vec<(u64, (u16, u64), Option<u64>)>,
    writes: Vec<(u64, (u16, u64), Option<u64>)>,
    /// The version of its commit, if it has or had one.
    version: Option<(u16, u64)>,
    /// Whether the commit took effect, if that is known.
    committed: Option<bool>,
}

/// Runs random transactions on a few rows, on one thread.
pub struct Work<'a> {
    client: &'a Client,
    worker: Rc<Worker<Striking>>,
    place: Option<ClientPlace>,
    keyed: Rc<KeyedTable>,
    rows: Rows,
    session: SessionState,
    /// Identifies the session among those of all processes.
    name: u32,
    number: u64,
    random: u64,
    log: &'a mut dyn std::io::Write,
}

/// The rows that transactions work on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    /// How many of them are written again and again.
    pub count: u64,
    /// Bytes of the longest row, if rows have any length.
    pub longest: Option<usize>,
    /// Transactions also insert new rows, and scan rows in the order of their keys.
    pub are_scanned: bool,
}

/// For tests: what a process does to itself at a step of a commit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strike {
    /// The step.
    pub step: Step,
    /// In which of the commits that reach this step, counted from 1.
    pub commit: u32,
    /// What it does.
    pub blow: Blow,
}

/// What a process does to itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Blow {
    /// Sends itself a signal.
    Signal(Signal),
    /// Its working thread hangs from then on. Its other threads go on.
    Hang,
}

thread_local! {
    static STRIKE: Cell<Option<Strike>> = const { Cell::new(None) };
}

/// The shipped rules, with a process that strikes itself.
enum Striking {}

impl Rules for Striking {
    fn passes(step: Step) {
        STRIKE.with(|strike| match strike.get() {
            Some(Strike { commit: 0 | 1, step: at, blow }) if at == step => {
                strike.set(None);
                blow.falls();
            }
            Some(found) if found.step == step => {
                strike.set(Some(Strike { commit: found.commit - 1, ..found }))
            }
            _ => {}
        });
    }
}

impl Blow {
    fn falls(self) {
        match self {
            // There is nowhere to report an error.
            Blow::Signal(signal) => drop(kill_process(getpid(), signal)),
            Blow::Hang => loop {
                std::thread::park();
            },
        }
    }
}

/// Why work has ended early.
#[derive(Debug, thiserror::Error)]
pub enum WorkError {
    /// This process cannot use the database any more.
    #[error(transparent)]
    Database(#[from] TxError),
    /// The history cannot be written.
    #[error("cannot write the history: {0}")]
    Log(std::io::Error),
    /// A row has words of several versions.
    #[error("row {0} has words of several versions")]
    Torn(u64),
    /// A scan does not find what the same transaction finds by key.
    #[error("a scan from row {first} on finds the rows {found:?} instead of {wanted:?}")]
    Disagree {
        /// Where the scan began.
        first: u64,
        /// The keys that it found.
        found: Vec<u64>,
        /// Those that have rows.
        wanted: Vec<u64>,
    },
}

/// The table that transactions work on. The first process makes it.
///
/// # Errors
/// When the table can be neither made nor opened.
pub fn work_table(client: &Client, rows: Rows) -> Result<Table<u64, ()>, TxError> {
    let inserted = if rows.are_scanned { MOST_INSERTED } else { 0 };
    let options = TableOptions::rows(rows.count + inserted).row_bytes(ROW_WORDS * size_of::<u64>());
    let options = TableOptions { is_ordered: rows.are_scanned, ..options };
    let options = match rows.longest {
        Some(longest) => {
            options.longest(longest).slab_bytes(LONGEST_ROWS * longest.next_power_of_two() as u64)
        }
        None => options,
    };
    match client.create_table::<u64, ()>(TABLE, &options) {
        Err(TxError::TableExists(_)) => client.open_table(TABLE),
        made => made,
    }
}

impl<'a> Work<'a> {
    /// Work of a new session with a random name. `seed` decides what it does.
    ///
    /// # Errors
    /// All places of clients are taken, or the memory cannot be reached.
    pub fn new(
        client: &'a Client,
        table: &'a Table<u64, ()>,
        rows: Rows,
        seed: u64,
        log: &'a mut dyn std::io::Write,
        strike: Option<Strike>,
    ) -> Result<Work<'a>, DatabaseError> {
        let member = client.core().member();
        let random = seed.wrapping_mul(SPREAD) | 1;
        let name = getrandom::u64().unwrap_or(seed) as u32;
        let place = member.take_place()?;
        let endpoint = member.environment().endpoint();
        let worker = block_on(&endpoint, async {
            let memory = match member.memory(endpoint.clone()).await {
                Ok(memory) => memory,
                Err(error) => return Err(member.find_cause(&endpoint, error).await),
            };
            let worker = Worker::sharing(memory, member.at().oracle(), member.slot().clone());
            let worker = worker.expect("the oracle has a slot for each member");
            Ok(member.announce_in_place(worker, place.number()).await)
        })?;
        let worker = match worker {
            Ok(worker) => Rc::new(worker),
            // Its announcement may have landed, or may still land: the place is kept.
            Err(error) => return Err(member.end_after(error.into())),
        };
        STRIKE.set(strike);
        let rows = Rows { longest: table.longest(), ..rows };
        let (place, keyed, session) = (Some(place), table.core().keyed(), SessionState::new());
        Ok(Work { client, worker, place, keyed, rows, session, name, number: 0, random, log })
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % bound
    }

    /// Runs one transaction. Returns whether it was committed.
    ///
    /// # Errors
    /// When the work cannot go on.
    pub fn run_one(&mut self) -> Result<bool, WorkError> {
        let endpoint = self.worker.memory().endpoint().clone();
        block_on(&endpoint, self.transact()).map_err(|error| match error {
            WorkError::Database(error) => self.client.block_on(self.client.core().find_cause(error)).into(),
            other => other,
        })
    }

    async fn transact(&mut self) -> Result<bool, WorkError> {
        self.number += 1;
        let is_only_reading = self.below(1_000) < READ_ONLY;
        let count = 1 + self.below(MOST_ROWS);
        let touches =
            (0..count).map(|_| (self.below(self.rows.count), self.below(1_000), self.below(1_000))).collect();
        let mut plan = Plan { is_only_reading, touches, scans_from: None, inserts: false };
        if self.rows.are_scanned {
            let (first, is_inserted) = (self.below(INSERTED), self.below(2) > 0);
            let first = if is_inserted { INSERTED | first } else { first % self.rows.count };
            plan.scans_from = (self.below(1_000) < SCANNING).then_some(first);
            plan.inserts = !is_only_reading && self.below(1_000) < INSERTING;
        }
        let mut session = std::mem::take(&mut self.session);
        let done = self.transact_as(&mut session, &plan).await;
        self.session = session;
        done
    }

    async fn transact_as(&mut self, session: &mut SessionState, plan: &Plan) -> Result<bool, WorkError> {
        self.client.core().member().check().map_err(TxError::Ended)?;
        let worker = self.worker.clone();
        let transaction = worker.begin(session).await.map_err(TxError::from)?;
        let mut seen = Seen::default();
        let cut = transaction.cut().clone();
        match self.follow(plan, &transaction, &mut seen).await {
            Ok(()) => {}
            Err(Touch::Conflict) => {
                self.write_down(&cut, &seen, None, Some(false))?;
                return Ok(false);
            }
            Err(Touch::Failed(error)) => return Err(error),
        }
        let committing = match transaction.prepare() {
            Ok(Some(committing)) => committing,
            Ok(None) => {
                self.write_down(&cut, &seen, None, Some(false))?;
                return Ok(true);
            }
            Err(CommitError::Busy | CommitError::LogFull) => return Ok(false),
            Err(CommitError::Stuck) => {
                self.client.core().member().check().map_err(TxError::Ended)?;
                let why = "an earlier commit of this compute server is in doubt".to_owned();
                return Err(TxError::Ended(crate::Ended::Failed(why)).into());
            }
            Err(CommitError::Nothing(MemoryError::Short(_))) => return Ok(false),
            Err(CommitError::Nothing(error)) => return Err(TxError::Memory(error).into()),
            Err(error) => return Err(TxError::TooLarge(error).into()),
        };
        let version = committing.version();
        self.write_down(&cut, &seen, Some(version), None)?;
        let outcome = committing.commit().await;
        let is_committed = match &outcome {
            Ok(_) => Some(true),
            Err(CommitError::Unknown(_)) => None,
            Err(_) => Some(false),
        };
        self.write_down(&cut, &seen, Some(version), is_committed)?;
        match outcome {
            Ok(_) => Ok(true),
            Err(CommitError::Conflict) => Ok(false),
            Err(CommitError::Nothing(error)) => Err(TxError::Memory(error).into()),
            Err(_) => Err(TxError::Unknown(version).into()),
        }
    }

    async fn follow(
        &self,
        plan: &Plan,
        transaction: &Transaction<'_, Striking>,
        seen: &mut Seen,
    ) -> Result<(), Touch> {
        for &(row, writes, deletes) in &plan.touches {
            let writes = !plan.is_only_reading && writes < WRITTEN;
            let value = (deletes >= DELETED).then(|| self.new_value(seen));
            self.touch(transaction, seen, row, writes, value).await?;
        }
        if let Some(first) = plan.scans_from {
            self.scan(transaction, seen, first).await?;
        }
        if plan.inserts {
            self.insert(transaction, seen).await?;
        }
        Ok(())
    }

    /// A value that no other write of any process has.
    fn new_value(&self, seen: &Seen) -> u64 {
        u64::from(self.name) << 32 | (self.number << 8 | seen.touched) & u64::from(u32::MAX)
    }

    /// The row for a value: the value, repeated over the row's whole length.
    fn row_of(&self, value: u64) -> Vec<u8> {
        let length =
            self.rows.longest.map_or(ROW_WORDS * size_of::<u64>(), |longest| length_of(value, longest));
        value.to_le_bytes().into_iter().cycle().take(length).collect()
    }

    /// The value of a row. `None`: it has words of several versions.
    fn value_of(&self, row: &Row) -> Option<Option<u64>> {
        let Some(data) = &row.data else { return Some(None) };
        let value = u64::from_le_bytes(*data.first_chunk()?);
        (*data == self.row_of(value)).then_some(Some(value))
    }

    async fn touch(
        &self,
        transaction: &Transaction<'_, Striking>,
        seen: &mut Seen,
        row: u64,
        writes: bool,
        value: Option<u64>,
    ) -> Result<(), Touch> {
        let key = KeyBytes::of(&row);
        seen.touched += 1;
        let found = self.get(transaction, seen, row).await?;
        if !writes {
            return Ok(());
        }
        let data = value.map(|value| self.row_of(value));
        let replaced = match (&found.data, &data) {
            (None, None) => return Ok(()), // nothing to delete
            (None, Some(data)) => self.keyed.insert(transaction, &key, data).await,
            (Some(_), Some(data)) => self.keyed.update(transaction, &key, data).await,
            (Some(_), None) => self.keyed.delete(transaction, &key).await,
        };
        let replaced = replaced.map_err(Touch::of)?;
        match seen.writes.iter_mut().find(|write| write.record == row) {
            Some(write) => write.value = value,
            None => seen.writes.push(Write { record: row, replaced: replaced.version, value }),
        }
        Ok(())
    }

    async fn get(
        &self,
        transaction: &Transaction<'_, Striking>,
        seen: &mut Seen,
        row: u64,
    ) -> Result<Row, Touch> {
        let found = self.keyed.get(transaction, &KeyBytes::of(&row)).await.map_err(Touch::of)?;
        if !seen.writes.iter().any(|write| write.record == row) {
            let value = self.value_of(&found).ok_or(Touch::Failed(WorkError::Torn(row)))?;
            seen.reads.push(Read { record: row, version: found.version, value });
        }
        Ok(found)
    }

    /// Scans the rows from a key on, and compares them with those that the transaction finds by key.
    async fn scan(
        &self,
        transaction: &Transaction<'_, Striking>,
        seen: &mut Seen,
        first: u64,
    ) -> Result<(), Touch> {
        let (is_inserted, bounds) =
            (first >= INSERTED, [first, self.rows.count].map(|key| KeyBytes::of(&key)));
        let end = if is_inserted { Bound::Unbounded } else { Bound::Excluded(&bounds[1][..]) };
        let (mut found, mut rest) =
            (Vec::new(), Some(Scan::new((Bound::Included(&bounds[0][..]), end), Direction::Ascending)));
        while let Some(scan) = rest.filter(|_| !is_inserted || found.len() < MOST_SCANNED) {
            let Scanned { rows, next } = self.keyed.scan(transaction, scan).await.map_err(Touch::of)?;
            found.extend(
                rows.iter().filter_map(|(key, row)| Some((u64::decode(&mut &key[..])?, row.version))),
            );
            rest = next;
        }
        let keys: Vec<u64> = match is_inserted {
            true => found.iter().map(|(key, _)| *key).collect(),
            false => (first..self.rows.count).collect(),
        };
        let mut wanted = Vec::new();
        for key in keys {
            let row = self.get(transaction, seen, key).await?;
            wanted.extend(row.data.map(|_| (key, row.version)));
        }
        if found == wanted {
            return Ok(());
        }
        let [found, wanted] = [found, wanted].map(|rows| rows.into_iter().map(|(key, _)| key).collect());
        Err(Touch::Failed(WorkError::Disagree { first, found, wanted }))
    }

    /// Inserts a row that is not changed later, unless there is no room any more.
    async fn insert(&self, transaction: &Transaction<'_, Striking>, seen: &mut Seen) -> Result<(), Touch> {
        let value = self.new_value(seen);
        seen.touched += 1;
        let row = INSERTED | value.wrapping_mul(SPREAD);
        match self.keyed.insert(transaction, &KeyBytes::of(&row), &self.row_of(value)).await {
            Ok(found) => {
                seen.writes.push(Write { record: row, replaced: found.version, value: Some(value) });
                Ok(())
            }
            Err(
                KeyError::Duplicate | KeyError::Index(IndexError::Full) | KeyError::Order(TreeError::Full),
            ) => Ok(()),
            Err(error) => Err(Touch::of(error)),
        }
    }

    fn write_down(
        &mut self,
        cut: &Cut,
        seen: &Seen,
        version: Option<Version>,
        committed: Option<bool>,
    ) -> Result<(), WorkError> {
        let line = Line {
            session: self.name,
            number: self.number,
            cut: cut.sequence(),
            counts: cut.counts().to_vec(),
            reads: seen.reads.iter().map(|read| (read.record, parts(read.version), read.value)).collect(),
            writes: seen
                .writes
                .iter()
                .map(|write| (write.record, parts(write.replaced), write.value))
                .collect(),
            version: version.map(parts),
            committed,
        };
        let mut text = serde_json::to_vec(&line).map_err(|error| WorkError::Log(error.into()))?;
        text.push(b'\n');
        // In one write to the operating system: a process that is killed after this has left the line.
        self.log.write_all(&text).and_then(|()| self.log.flush()).map_err(WorkError::Log)
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        let endpoint = self.worker.memory().endpoint().clone();
        let left = block_on(&endpoint, self.worker.leave());
        self.client.core().member().return_place(place, left);
    }
}

/// What a transaction does.
struct Plan {
    is_only_reading: bool,
    /// Rows, with random numbers that decide whether they are written and deleted.
    touches: Vec<(u64, u64, u64)>,
    /// The first key of a scan.
    scans_from: Option<u64>,
    inserts: bool,
}

#[derive(Default)]
struct Seen {
    reads: Vec<Read>,
    writes: Vec<Write>,
    touched: u64,
}

enum Touch {
    Conflict,
    Failed(WorkError),
}

impl Touch {
    fn of(error: KeyError) -> Touch {
        match of_key(error, TABLE) {
            // Earlier reads of this transaction are judged all the same.
            Stop::Again(_) => Touch::Conflict,
            Stop::For(error) => Touch::Failed(error.into()),
        }
    }
}

/// The length of a row, with short lengths as often as long ones.
fn length_of(value: u64, longest: usize) -> usize {
    let drawn = value.wrapping_mul(SPREAD);
    let most = (longest >> ((drawn >> 60) % 12)).max(SHORTEST);
    SHORTEST + (drawn >> 20) as usize % (most - SHORTEST + 1)
}

fn parts(version: Version) -> (u16, u64) {
    (version.slot().index() as u16, version.count())
}

fn whole((slot, count): (u16, u64)) -> Option<Version> {
    Version::new(Slot::new(slot)?, count)
}

/// The histories of all processes of a database, merged.
#[derive(Default)]
pub struct History {
    lines: BTreeMap<(u32, u64), Line>,
}

/// The numbers of transactions in a history.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counted {
    /// Transactions that are known to be committed.
    pub committed: usize,
    /// Transactions that were aborted, or wrote nothing: no other transaction may see anything of them.
    pub aborted: usize,
    /// Transactions in doubt: their process was killed, or was not told the outcome.
    pub unknown: usize,
}

/// Why a history cannot be judged.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// Name other files.
    #[error("cannot read the history: {0}")]
    Read(std::io::Error),
    /// Another program wrote the file.
    #[error("line {line} is not one of `farpool db work`: {reason}")]
    Malformed {
        /// The number of the line.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
}

impl History {
    /// Adds the history of one process. Its last line may be cut off, if the process was killed.
    ///
    /// # Errors
    /// When a line is not one of such a history.
    pub fn add(&mut self, from: impl BufRead) -> Result<(), HistoryError> {
        let lines: Vec<String> = from.lines().collect::<Result<_, _>>().map_err(HistoryError::Read)?;
        for (number, text) in lines.iter().enumerate() {
            match serde_json::from_str::<Line>(text) {
                Ok(line) => drop(self.lines.insert((line.session, line.number), line)),
                Err(_) if number + 1 == lines.len() => {} // it was cut off
                Err(error) => {
                    return Err(HistoryError::Malformed { line: number + 1, reason: error.to_string() });
                }
            }
        }
        Ok(())
    }

    /// Counts the transactions by their outcome.
    pub fn counted(&self) -> Counted {
        let mut counted = Counted::default();
        for line in self.lines.values() {
            match line.committed {
                Some(true) => counted.committed += 1,
                Some(false) => counted.aborted += 1,
                None => counted.unknown += 1,
            }
        }
        counted
    }

    /// Checks the history for snapshot isolation.
    ///
    /// # Errors
    /// The first violation.
    pub fn judge(&self) -> Result<(), Violation> {
        let transactions: Vec<Judged> = self.lines.values().filter_map(judged).collect();
        judge(&transactions)
    }
}

fn judged(line: &Line) -> Option<Judged> {
    let version = line.version.and_then(whole);
    let outcome = match (line.committed, version) {
        (Some(true), Some(version)) => Outcome::Committed(version),
        (None, Some(version)) => Outcome::Unknown(version),
        _ => Outcome::Aborted,
    };
    let read = |&(record, version, value): &(u64, (u16, u64), Option<u64>)| {
        Some(Read { record, version: whole(version)?, value })
    };
    let write = |&(record, version, value): &(u64, (u16, u64), Option<u64>)| {
        Some(Write { record, replaced: whole(version)?, value })
    };
    Some(Judged {
        session: line.session,
        begun_from: Cut::new(line.cut, line.counts.clone().into()),
        reads: line.reads.iter().map(read).collect::<Option<_>>()?,
        writes: line.writes.iter().map(write).collect::<Option<_>>()?,
        outcome,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(session: u32, number: u64, writes: &str, version: &str, committed: &str) -> String {
        format!(
            r#"{{"session":{session},"number":{number},"cut":1,"counts":[0,0],"reads":[[1,[0,0],null]],"writes":[{writes}],"version":{version},"committed":{committed}}}"#
        )
    }

    fn history(lines: &[String]) -> History {
        let mut history = History::default();
        history.add(lines.join("\n").as_bytes()).unwrap();
        history
    }

    #[test]
    fn the_last_line_of_a_transaction_counts_and_a_line_cut_off_is_ignored() {
        let one = line(1, 1, "[1,[0,0],7]", "[0,1]", "null");
        let other = line(1, 1, "[1,[0,0],7]", "[0,1]", "true");
        let history = history(&[one, other, r#"{"session":2,"#.to_owned()]);
        assert_eq!(history.counted(), Counted { committed: 1, aborted: 0, unknown: 0 });
        history.judge().unwrap();
    }

    #[test]
    fn two_commits_that_replace_the_same_version_are_found_in_the_histories_of_two_processes() {
        let lines = [line(1, 1, "[1,[0,0],7]", "[0,1]", "true"), line(2, 1, "[1,[0,0],8]", "[1,1]", "true")];
        assert!(history(&lines).judge().is_err());
        let lines = [line(1, 1, "[1,[0,0],7]", "[0,1]", "true"), line(2, 1, "[1,[0,0],8]", "[1,1]", "false")];
        history(&lines).judge().unwrap();
    }

    #[test]
    fn a_line_of_another_format_is_refused_with_its_number() {
        let mut history = History::default();
        let refused = history.add("{}\n{}\n".as_bytes()).unwrap_err();
        assert!(refused.to_string().contains("line 1"), "{refused}");
    }
}
