//! Databases over a real broker and real nodes in this process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use farpool_broker::BrokerConfig;
use farpool_fabric::{TransportChoice, block_on};
use farpool_node::NodeConfig;
use farpool_pool::PoolConfig;
use tokio::runtime::Runtime;

use crate::{Client, CreateOptions, Database, DatabaseError, Ended, Reach, Table, TableOptions, TxError};

const REGION_BYTES: u64 = 4 << 20;
const NODES: u32 = 2;
/// Long enough that nobody is shut out but by a test.
const PATIENCE: Duration = Duration::from_secs(10);

/// A broker and nodes, ended when dropped.
struct Rig {
    _runtime: Runtime,
    broker: SocketAddr,
    directory: tempfile::TempDir,
}

impl Rig {
    fn new() -> Rig {
        let runtime = Runtime::new().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let (ready, is_ready) = mpsc::channel();
        let store = directory.path().join("broker.redb");
        let config = BrokerConfig { listen: any_port(), store, tls: None };
        runtime.spawn(async move {
            let on_ready = |address| ready.send(address).unwrap();
            farpool_broker::run(config, on_ready, std::future::pending()).await.unwrap();
        });
        let broker = is_ready.recv_timeout(Duration::from_secs(20)).unwrap();
        let (ready, are_ready) = mpsc::channel();
        for number in 0..NODES {
            let config = NodeConfig {
                broker: broker.to_string(),
                control_listen: any_port(),
                advertise: None,
                register_within: Duration::from_secs(20),
                data_listen: any_port(),
                shm_socket: Some(directory.path().join(format!("node{number}.sock"))),
                card: None,
                memory_bytes: 4 * REGION_BYTES,
                region_bytes: REGION_BYTES,
                lock_memory: false,
                state_dir: None,
                tls: None,
            };
            let ready = ready.clone();
            runtime.spawn(async move {
                let on_ready = move |_: &farpool_node::Ready| ready.send(()).unwrap();
                farpool_node::run(config, on_ready, std::future::pending()).await.unwrap();
            });
        }
        (0..NODES).for_each(|_| are_ready.recv_timeout(Duration::from_secs(20)).unwrap());
        Rig { _runtime: runtime, broker, directory }
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("bank.far")
    }

    /// Until all nodes have registered there may be too few regions.
    fn create(&self, transport: TransportChoice) -> Database {
        let broker = self.broker.to_string();
        let pool = PoolConfig { broker, tls: None, transport: transport.into(), limit_bytes: None };
        let bytes = u64::from(NODES) * 4 * REGION_BYTES;
        let options = CreateOptions { bytes, servers: 16, patience: PATIENCE, ..CreateOptions::default() };
        for _ in 0..200 {
            match Database::create(&pool, &self.file(), &options) {
                Err(DatabaseError::Leases(_)) => std::thread::sleep(Duration::from_millis(50)),
                made => return made.unwrap(),
            }
        }
        panic!("the nodes do not register");
    }

    fn open(&self, transport: TransportChoice) -> Database {
        let reach = Reach { transport: transport.into(), ..Reach::default() };
        Database::open(&self.file(), &reach).unwrap()
    }
}

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// As one does who has taken it for dead, only that its seat is not looked after: all its grants are fenced.
fn shut_out(by: &Database, of: &Database) {
    let endpoint = by.shared.leases.endpoint(64 << 10);
    for grant in &of.shared.grants {
        block_on(&endpoint, by.shared.leases.fence_grant(grant.region, grant.epoch)).unwrap();
    }
}

type Rows = Table<u64, u64>;
type Operation = (&'static str, fn(&Database, &Client, &Rows) -> Option<String>);

/// What a program can ask of a database, and what it is told if that fails.
const OPERATIONS: [Operation; 9] = [
    ("create a table", |_, client, _| words(client.create_table::<u64, u64>("new", &TableOptions::rows(4)))),
    ("drop a table", |_, client, _| words(client.drop_table("rows"))),
    ("open a table", |_, client, _| words(client.open_table::<u64, u64>("rows"))),
    ("list the tables", |_, client, _| words(client.tables())),
    ("read", |_, client, rows| words(client.transact(async |tx| tx.get(rows, 1).await))),
    ("write", |_, client, rows| words(client.transact(async |tx| tx.update(rows, 1, 2).await))),
    ("another session", |_, client, rows| {
        let mut session = client.session();
        words(client.block_on(session.transact(async |tx| tx.get(rows, 1).await)))
    }),
    ("another client", |database, _, _| words(database.client().map(drop))),
    ("look at the members", |database, _, _| words(database.members())),
];

fn words<T, E: std::error::Error>(done: Result<T, E>) -> Option<String> {
    done.err().map(|error| error.to_string())
}

/// Each operation is the first of a compute server that was shut out.
fn assert_all_say_so(transport: TransportChoice) {
    let rig = Rig::new();
    let by = rig.create(transport);
    let client = by.client().unwrap();
    let rows: Rows = client.create_table("rows", &TableOptions::rows(4)).unwrap();
    client.transact(async |tx| tx.insert(&rows, 1, 1).await).unwrap();
    for (name, operation) in OPERATIONS {
        let of = rig.open(transport);
        let client = of.client().unwrap();
        let rows: Rows = client.open_table("rows").unwrap();
        shut_out(&by, &of);
        let said = operation(&of, &client, &rows);
        assert_eq!(said, Some(Ended::TakenForDead.to_string()), "{name}");
        assert_eq!(of.check(), Err(Ended::TakenForDead), "{name}");
        assert!(matches!(client.tables(), Err(TxError::Ended(Ended::TakenForDead))), "behind: {name}");
    }
}

#[test]
fn whatever_a_compute_server_asks_for_first_that_was_shut_out_it_is_told_so_over_shared_memory() {
    assert_all_say_so(TransportChoice::Shm);
}

#[test]
fn whatever_a_compute_server_asks_for_first_that_was_shut_out_it_is_told_so_over_tcp() {
    assert_all_say_so(TransportChoice::Tcp);
}
