//! Every session that begins after a table was made finds it.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::task::Poll;
use std::time::Duration;

use farpool_fabric::{TransportChoice, block_on};
use farpool_txn::oracle::fetch;
use farpool_txn::{Fetched, SessionState, Shipped};

use super::rig::{Rig, SOON};
use crate::{Client, ClientCore, Credentials, Database, Reach, Table, TableOptions, TxError};

/// Polls of a future that waits for a thread that stands still: far more than it would take to end without
/// waiting.
const POLLS: u32 = 10_000;

#[test]
fn a_new_table_is_found_although_the_fetch_thread_has_not_read_its_cut_yet() {
    let rig = Rig::new();
    let (maker, of) = (rig.create(TransportChoice::Shm), rig.open(TransportChoice::Shm));
    let fetched = Arc::new(Fetched::new());
    let (stands_still, goes_on) = (AtomicBool::new(false), AtomicBool::new(false));
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let endpoint = of.core.environment().endpoint();
            let memory = block_on(&endpoint, of.core.memory(endpoint.clone())).unwrap();
            let next_round = || {
                while stands_still.load(Ordering::Acquire) && !goes_on.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                has_ended.load(Ordering::Acquire)
            };
            let oracle = of.core.at().oracle();
            let fetching = fetch::<Shipped>(&memory, &oracle, &fetched, Duration::ZERO, next_round);
            block_on(memory.endpoint(), fetching).unwrap();
        });
        // Ends the thread, whatever fails.
        let _ends = Ends(&goes_on, &has_ended);
        let endpoint = of.core.environment().endpoint();
        let fetched = Some(fetched.clone());
        let beginning = ClientCore::beginning_from(of.core.clone(), endpoint.clone(), fetched);
        let client = Client::new(block_on(&endpoint, beginning).unwrap());
        client.transact(async |_| Ok(())).unwrap();
        stands_still.store(true, Ordering::Release);
        let options = TableOptions::rows(4);
        maker.client().unwrap().create_table::<u64, u64>("new", &options).unwrap();
        let mut session = SessionState::new();
        let mut opening = pin!(client.core().open_table::<u64, u64>(&mut session, "new"));
        let mut polls = 0;
        client.block_on(poll_fn(|context| {
            polls += 1;
            match opening.as_mut().poll(context) {
                Poll::Ready(opened) => panic!("looked at an old snapshot: {:?}", opened.err()),
                Poll::Pending if polls == POLLS => Poll::Ready(()),
                Poll::Pending => {
                    context.waker().wake_by_ref();
                    Poll::Pending
                }
            }
        }));
        goes_on.store(true, Ordering::Release);
        client.block_on(opening).unwrap();
    });
}

/// A client pins all versions when it joins, since it may begin from any snapshot that is published by then.
#[test]
fn a_client_that_never_begins_anything_keeps_no_versions_alive() {
    let rig = Rig::new();
    let database = rig.create_logging(64 << 10);
    let client = database.client().unwrap();
    let options = TableOptions::rows(1);
    let rows: Table<u64, u64> = client.create_table("rows", &options).unwrap();
    client.transact(async |tx| tx.insert(&rows, 1, 0).await).unwrap();
    let _idle = database.client().unwrap();
    // The log has room for 448 versions.
    for value in 1..1_000 {
        client.transact(async |tx| tx.update(&rows, 1, value).await).unwrap();
    }
}

struct Ends<'a>(&'a AtomicBool, &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Release);
        self.0.store(true, Ordering::Release);
    }
}

/// The number of compute servers that make the same tables at the same time, and the number of tables.
const AT_ONCE: usize = 3;
const TABLES: usize = 20;

fn made_or_opened(client: &Client, name: &str) -> Result<Table<u64, u64>, TxError> {
    match client.create_table(name, &TableOptions::rows(4)) {
        Err(TxError::TableExists(_)) => client.open_table(name),
        made => made,
    }
}

fn assert_all_find_each_table(transport: TransportChoice) {
    let rig = Rig::new();
    let _first = rig.create(transport);
    let reach =
        Reach { transport: transport.into(), credentials: Credentials::PlainText, fetch_thread: true };
    let databases: Vec<Database> =
        (0..AT_ONCE).map(|_| Database::open(&rig.file(), &reach).unwrap()).collect();
    let together = Barrier::new(AT_ONCE);
    let (told, hears) = mpsc::channel();
    std::thread::scope(|scope| {
        for database in &databases {
            let (together, told) = (&together, told.clone());
            scope.spawn(move || {
                let client = database.client().unwrap();
                for table in 0..TABLES {
                    together.wait();
                    told.send(made_or_opened(&client, &format!("table{table}")).err()).unwrap();
                }
            });
        }
        for _ in 0..AT_ONCE * TABLES {
            let failed = hears.recv_timeout(SOON).unwrap();
            assert!(failed.is_none(), "{}", failed.unwrap());
        }
    });
}

#[test]
fn a_table_that_several_compute_servers_make_at_once_is_there_for_each_of_them_over_shared_memory() {
    assert_all_find_each_table(TransportChoice::Shm);
}

#[test]
fn a_table_that_several_compute_servers_make_at_once_is_there_for_each_of_them_over_tcp() {
    assert_all_find_each_table(TransportChoice::Tcp);
}
