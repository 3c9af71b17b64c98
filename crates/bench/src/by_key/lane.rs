//! One lane of a thread: a transaction after the other. A thread has as many lanes as transactions in flight.

use std::cell::{Cell, RefCell};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use farpool_namdb::{Client, Session, Table, Tx};
use futures_util::future::join;

use super::orders::Orders;
use super::run::row;
use crate::kv::{Chooser, Course, KvMix};
use crate::slices::SlicePlan;
use crate::stop::check_stop;

/// Rows of a transaction that reads, and of a scan.
const READ: usize = 4;
const SCANNED: u64 = 100;
/// Keys of inserted rows start here. No measurement has so many other rows.
pub const INSERTED: u64 = 1 << 63;
/// Odd: it scatters the keys of inserted rows.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// The tables, as a thread has opened them.
pub struct Tables {
    pub rows: Table<u64, [u64; 8]>,
    pub orders: Orders,
}

/// What the lanes of a thread share.
pub struct Lanes<'a> {
    /// The thread's client.
    pub client: &'a Client,
    pub tables: &'a Tables,
    /// What each transaction does.
    pub mix: KvMix,
    /// The division of time.
    pub plan: SlicePlan,
    /// When the first slice begins.
    pub began: Instant,
    /// Whether the thread has other lanes that wait for their turn.
    pub takes_turns: bool,
    /// The number of the thread's next transaction that inserts, among those of all threads.
    pub next_insert: &'a Cell<u64>,
    pub threads: u64,
    /// Ends the lanes early once set.
    pub stop: &'a AtomicBool,
    /// Where all lanes count.
    pub course: &'a RefCell<Course>,
}

impl Lanes<'_> {
    /// Runs transactions until the last slice has ended.
    pub async fn run(&self, mut chooser: Chooser) -> Result<()> {
        let mut session = self.client.session();
        let mut last = Instant::now();
        loop {
            let tries = Cell::new(0);
            match self.mix {
                KvMix::Read => self.read(&mut session, chooser.choose(), &tries).await?,
                KvMix::Update => {
                    let value = chooser.random().bits() >> 8;
                    self.update(&mut session, chooser.choose(), value, &tries).await?;
                }
                KvMix::Rmw => self.increment(&mut session, chooser.choose(), &tries).await?,
                KvMix::NewOrder => self.tables.orders.place(&mut session, &mut chooser, &tries).await?,
                KvMix::Insert => self.insert(&mut session, &tries).await?,
                KvMix::Scan => {
                    let [first] = chooser.choose();
                    self.scan(&mut session, first, chooser.records(), &tries).await?;
                }
            }
            let now = Instant::now();
            let slice = self.plan.slice_at(self.began, now);
            if !self.course.borrow_mut().note(None, tries.get() - 1, slice, now - last) {
                return Ok(());
            }
            check_stop(self.stop)?;
            last = now;
            if self.takes_turns {
                self.client.yield_now().await;
                last = Instant::now();
            }
        }
    }

    async fn read(&self, session: &mut Session<'_>, keys: [u64; READ], tries: &Cell<u64>) -> Result<()> {
        let read = async |tx: &mut Tx<'_>| {
            tries.set(tries.get() + 1);
            tx.get_many(&self.tables.rows, keys).await
        };
        for (key, found) in keys.into_iter().zip(session.transact(read).await?) {
            value(key, found).with_context(|| wrong(key))?;
        }
        Ok(())
    }

    async fn update(
        &self,
        session: &mut Session<'_>,
        keys: [u64; 2],
        value: u64,
        tries: &Cell<u64>,
    ) -> Result<()> {
        let update = async |tx: &mut Tx<'_>| {
            tries.set(tries.get() + 1);
            tx.update_many(&self.tables.rows, keys.map(|key| (key, row(key, value)))).await
        };
        Ok(session.transact(update).await?)
    }

    async fn insert(&self, session: &mut Session<'_>, tries: &Cell<u64>) -> Result<()> {
        let number = self.next_insert.replace(self.next_insert.get() + self.threads);
        let keys = inserted_keys(number);
        let insert = async |tx: &mut Tx<'_>| {
            tries.set(tries.get() + 1);
            tx.insert_many(&self.tables.rows, keys.map(|key| (key, row(key, 0)))).await
        };
        Ok(session.transact(insert).await?)
    }

    async fn scan(
        &self,
        session: &mut Session<'_>,
        first: u64,
        records: u64,
        tries: &Cell<u64>,
    ) -> Result<()> {
        let keys = first..records.min(first + SCANNED);
        let scan = async |tx: &mut Tx<'_>| {
            tries.set(tries.get() + 1);
            tx.scan(&self.tables.rows, keys.clone()).collect().await
        };
        let found = session.transact(scan).await?;
        ensure!(found.len() as u64 == keys.end - keys.start, wrong(first));
        for (key, (found, row)) in keys.zip(found) {
            ensure!(found == key && value(key, Some(row)).is_some(), wrong(key));
        }
        Ok(())
    }

    async fn increment(&self, session: &mut Session<'_>, keys: [u64; 2], tries: &Cell<u64>) -> Result<()> {
        let is_whole = Cell::new(true);
        let increment = async |tx: &mut Tx<'_>| {
            tries.set(tries.get() + 1);
            let one = async |key| {
                let next = |before| {
                    is_whole.set(is_whole.get() && value(key, Some(before)).is_some());
                    row(key, before[1] + 1)
                };
                tx.read_modify_write(&self.tables.rows, key, next).await
            };
            let (one, other) = join(one(keys[0]), one(keys[1])).await;
            Ok((one?, other?))
        };
        let (one, other) = session.transact(increment).await?;
        ensure!(is_whole.get() && one.is_some() && other.is_some(), wrong(keys[0]));
        Ok(())
    }
}

/// The keys of the rows that a transaction inserts.
pub fn inserted_keys(transaction: u64) -> [u64; 2] {
    [2 * transaction, 2 * transaction + 1].map(|number| INSERTED | number.wrapping_mul(SPREAD))
}

fn wrong(key: u64) -> String {
    format!("row {key} or one beside it is missing, or holds what was never written there")
}

/// The value of a row. `None`: the row is missing, another key's, or mixes several writes.
pub fn value(key: u64, row: Option<[u64; 8]>) -> Option<u64> {
    let [first, value, others @ ..] = row?;
    (first == key && others.iter().all(|&other| other == value)).then_some(value)
}
