//! A measurement: it starts nodes, creates a database with its tables, runs threads with their lanes, and
//! checks the tables in the end.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use farpool_fabric::{CardTransport, Transports};
use farpool_namdb::{Client, CreateOptions, Database, PoolConfig, Table, TableOptions, Tx, TxError};
use futures_util::TryStreamExt;
use futures_util::stream::FuturesUnordered;

use super::lane::{INSERTED, Lanes, Tables, inserted_keys, value};
use super::orders::{self, Orders};
use crate::folder::Folder;
use crate::kv::{
    Chooser, Course, KvIndex, KvMix, KvOptions, KvReport, Measured, RECORD_BYTES, Thread, check_sum,
    processor_time,
};
use crate::local_pool::{Lend, LocalPool};
use crate::meeting::{Meeting, Seat};
use crate::slices::SlicePlan;
use crate::stop::check_stop;

/// Far memory for each row, with its share of the index and of unused ends: a little more than it takes.
const BYTES_EACH: u64 = 288;
/// The same for its share of an ordered index.
const ORDER_BYTES_EACH: u64 = 112;
/// Far memory beside the rows: the logs, and what a run of new-orders or inserts adds.
const BYTES_BESIDE: u64 = 768 << 20;
const INSERTED_BYTES: u64 = 2 << 30;
/// Usual size of a region.
const REGION_BYTES: u64 = 64 << 20;
/// Rows that a transaction inserts before the measurement, or reads after it.
const AT_ONCE: u64 = 500;
/// Longest wait until all acknowledged commits are published.
const LAST_PUBLICATION: Duration = Duration::from_secs(5);

/// Measures; over network cards if `card` brings their transport. `farpool` is this program's file, for child
/// processes. Call it on the main thread, since they are tied to the thread that starts them. Once `stop` is
/// set it ends soon, with an error.
///
/// # Errors
/// If something cannot be started, fails, or breaks a promise.
pub fn run_by_key(
    options: &KvOptions,
    card: Option<CardTransport>,
    farpool: &Path,
    stop: &AtomicBool,
) -> Result<KvReport> {
    let transport = Transports { choice: options.transport.0, card };
    let bytes = far_bytes(options);
    let nodes = options.nodes as u32;
    let lend = Lend { nodes, bytes_each: bytes / u64::from(nodes), region_bytes: REGION_BYTES };
    let pool = LocalPool::lending(farpool, lend, transport.choice)?;
    let folder = Folder::make()?;
    let config = PoolConfig { broker: pool.broker.clone(), tls: None, transport, limit_bytes: None };
    let create = CreateOptions { bytes, servers: 1, ..CreateOptions::default() };
    let database = Database::create(&config, &folder.path().join("measured.far"), &create)?;
    let client = database.client()?;
    let is_ordered = options.index == Some(KvIndex::Btree);
    let table = TableOptions { is_ordered, ..TableOptions::rows(options.records).row_bytes(RECORD_BYTES) };
    let rows: Table<u64, [u64; 8]> = client.create_table("rows", &table)?;
    fill(&client, &rows, options.records, stop)?;
    orders::create(&client, options)?;
    let plan = SlicePlan::of(options.duration, options.warm_up);
    let run = Run { options, database: &database, plan, stop };
    let threads = Meeting::new(stop).hold(options.threads, |number, seat| run.thread(number, seat))?;
    check_stop(stop)?;
    run.check(&client, &rows, &threads)?;
    database.check()?;
    KvReport::new(options, bytes, &Measured { threads, plan, service_traffic: None })
}

/// The far memory that a measurement takes: whole regions, as many on each node.
pub fn far_bytes(options: &KvOptions) -> u64 {
    let order = if options.index == Some(KvIndex::Btree) { ORDER_BYTES_EACH } else { 0 };
    let beside = if options.mix == KvMix::Insert { INSERTED_BYTES } else { BYTES_BESIDE };
    (options.records * (BYTES_EACH + order) + beside).next_multiple_of(REGION_BYTES * options.nodes as u64)
}

fn fill(client: &Client, rows: &Table<u64, [u64; 8]>, records: u64, stop: &AtomicBool) -> Result<()> {
    for first in (0..records).step_by(AT_ONCE as usize) {
        let some = first..records.min(first + AT_ONCE);
        let insert = some.map(|key| (key, row(key, 0)));
        client.transact(async |tx| tx.insert_many(rows, insert.clone()).await)?;
        check_stop(stop)?;
    }
    Ok(())
}

/// A row: its key, then one value in all other words. So a row that belongs elsewhere, or that mixes two
/// writes, is detected.
pub(super) fn row(key: u64, value: u64) -> [u64; 8] {
    let mut row = [value; 8];
    row[0] = key;
    row
}

struct Run<'a> {
    options: &'a KvOptions,
    database: &'a Database,
    plan: SlicePlan,
    stop: &'a AtomicBool,
}

impl Run<'_> {
    fn thread(&self, number: usize, seat: &Seat<'_>) -> Result<Thread> {
        let ready = seat.note(self.database.client().context("there is no place for another client"));
        seat.work(ready, |client| self.measure(client, number))
    }

    fn measure(&self, client: &Client, number: usize) -> Result<Thread> {
        let course = RefCell::new(Course::new(&self.plan)?);
        let tables = Tables { rows: client.open_table("rows")?, orders: Orders::open(client)? };
        let next_insert = Cell::new(number as u64);
        let before = (client.traffic(), processor_time());
        let lanes = Lanes {
            client,
            tables: &tables,
            mix: self.options.mix,
            plan: self.plan,
            began: Instant::now() + self.plan.warm_up,
            takes_turns: self.options.in_flight > 1,
            next_insert: &next_insert,
            threads: self.options.threads as u64,
            stop: self.stop,
            course: &course,
        };
        let lane = |lane: usize| {
            let seed = (number * self.options.in_flight + lane) as u64;
            lanes.run(Chooser::new(self.options.records, self.options.skew, seed))
        };
        // Polls only the lanes that were woken.
        let lanes: FuturesUnordered<_> = (0..self.options.in_flight).map(lane).collect();
        client.block_on(lanes.try_collect::<()>())?;
        let traffic = client.traffic() - before.0;
        let processor = processor_time().saturating_sub(before.1);
        Ok(Thread { course: course.into_inner(), traffic, processor })
    }

    /// Reads all that was written, once it is published.
    fn check(&self, client: &Client, rows: &Table<u64, [u64; 8]>, threads: &[Thread]) -> Result<()> {
        let committed: u64 = threads.iter().map(|thread| thread.course.committed).sum();
        let started = Instant::now();
        loop {
            let checked = match self.options.mix {
                KvMix::NewOrder => orders::check(client, committed),
                KvMix::Insert => self.check_inserted(client, rows, threads),
                mix => self.sum(client, rows).and_then(|sum| check_sum(mix, committed, sum)),
            };
            if checked.is_ok() || started.elapsed() > LAST_PUBLICATION {
                return checked;
            }
        }
    }

    /// Looks for all rows that were inserted, by their keys and, if there is an order of keys, in that.
    fn check_inserted(&self, client: &Client, rows: &Table<u64, [u64; 8]>, threads: &[Thread]) -> Result<()> {
        let step = threads.len();
        let numbers = |(thread, done): (usize, &Thread)| {
            (thread as u64..).step_by(step).take(done.course.committed as usize)
        };
        let mut keys: Vec<u64> =
            threads.iter().enumerate().flat_map(numbers).flat_map(inserted_keys).collect();
        keys.sort_unstable();
        for some in keys.chunks(AT_ONCE as usize) {
            let found = client.transact(async |tx| tx.get_many(rows, some).await)?;
            let wrong = some.iter().zip(found).find(|(key, row)| value(**key, *row).is_none());
            ensure!(wrong.is_none(), "row {wrong:?} was inserted, and is missing or another one");
        }
        if self.options.index == Some(KvIndex::Btree) {
            let scan = async |tx: &mut Tx<'_>| tx.scan(rows, INSERTED..).collect().await;
            let in_order = client.transact(scan)?.into_iter().map(|(key, _)| key);
            ensure!(in_order.eq(keys), "a scan does not find the rows that were inserted");
        }
        Ok(())
    }

    fn sum(&self, client: &Client, rows: &Table<u64, [u64; 8]>) -> Result<u64> {
        let records = self.options.records;
        let (sum, wrong) = client.transact(async |tx| {
            let (mut sum, mut wrong) = (0_u64, None);
            for first in (0..records).step_by(AT_ONCE as usize) {
                let keys = first..records.min(first + AT_ONCE);
                for (key, found) in keys.clone().zip(tx.get_many(rows, keys).await?) {
                    match value(key, found) {
                        Some(value) => sum = sum.wrapping_add(value),
                        None => wrong = wrong.or(Some(key)),
                    }
                }
            }
            Ok::<_, TxError>((sum, wrong))
        })?;
        ensure!(wrong.is_none(), "row {wrong:?} is missing, or holds what was never written there");
        Ok(sum)
    }
}
