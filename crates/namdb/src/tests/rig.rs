//! A broker and nodes in this process, and an onlooker that reads a database's seats.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use farpool_fabric::{Endpoint, TransportChoice, block_on};
use farpool_pool::{JointLeases, PoolConfig};
use farpool_txn::membership::{MembersAt, Seat, SeatWords, read_seats, wait_for_seat};
use farpool_txn::{DatabaseAt, DatabaseLayout, Limits, Memory, Shipped};
use farpool_wire::control::NodeAddress;
use farpool_wire::{Epoch, NodeId};

use crate::database::Process;
use crate::file::DatabaseFile;
use crate::member::{add_grants, attach_all};
use crate::{CreateOptions, Credentials, Database, DatabaseError, Reach};

/// Size of the regions that the nodes of [`Rig::new`] lend.
pub const REGION_BYTES: u64 = 4 << 20;
/// How many regions all nodes of [`Rig::new`] lend.
pub const REGIONS: u32 = 8;
const NODES: u32 = 2;
/// The heartbeat timeout: so long that members are evicted only by tests.
const PATIENCE: Duration = Duration::from_secs(10);
/// A timeout for events that take milliseconds, on a busy machine, too.
pub const SOON: Duration = Duration::from_secs(20);

/// A broker and nodes, which end when this is dropped, and a place for files.
pub struct Rig {
    pool: farpool_testpool::Rig,
    directory: tempfile::TempDir,
}

impl Rig {
    pub fn new() -> Rig {
        Rig::lending(REGIONS, REGION_BYTES)
    }

    /// A rig whose nodes lend this many regions, the same number each.
    pub fn lending(regions: u32, region_bytes: u64) -> Rig {
        let pool = farpool_testpool::Rig::with_regions_of(region_bytes, NODES, u64::from(regions / NODES));
        Rig { pool, directory: tempfile::tempdir().unwrap() }
    }

    /// How a process reaches the broker.
    pub fn pool(&self, transport: TransportChoice) -> PoolConfig {
        self.pool.config(transport)
    }

    pub fn file(&self) -> PathBuf {
        self.directory.path().join("bank.far")
    }

    pub fn create(&self, transport: TransportChoice) -> Database {
        self.create_with(transport, PATIENCE)
    }

    pub fn create_with(&self, transport: TransportChoice, patience: Duration) -> Database {
        Database::create(&self.pool(transport), &self.file(), &options(patience)).unwrap()
    }

    /// Makes a database, over shared memory, whose logs have so many bytes.
    pub fn create_logging(&self, log_bytes: u64) -> Database {
        self.try_create_logging(log_bytes).unwrap()
    }

    pub fn try_create_logging(&self, log_bytes: u64) -> Result<Database, DatabaseError> {
        let options = CreateOptions { log_bytes: Some(log_bytes), ..options(PATIENCE) };
        Database::create(&self.pool(TransportChoice::Shm), &self.file(), &options)
    }

    pub fn open(&self, transport: TransportChoice) -> Database {
        open(&self.file(), transport)
    }

    /// A file of the same database in which nodes have other addresses.
    pub fn file_with(&self, readdressed: impl Fn(&mut NodeAddress)) -> PathBuf {
        let found = DatabaseFile::load(&self.file()).unwrap();
        let mut keys = found.keys().unwrap().clone();
        keys.addresses_mut().for_each(readdressed);
        let file = self.directory.path().join("elsewhere.far");
        let broker = found.broker().to_owned();
        DatabaseFile::new(found.shape().unwrap(), found.patience(), keys, broker).save(&file).unwrap();
        file
    }
}

fn options(patience: Duration) -> CreateOptions {
    let bytes = u64::from(REGIONS) * REGION_BYTES;
    CreateOptions { bytes, servers: 16, patience, ..CreateOptions::default() }
}

pub fn open(file: &Path, transport: TransportChoice) -> Database {
    let reach =
        Reach { transport: transport.into(), credentials: Credentials::PlainText, fetch_thread: false };
    Database::open(file, &reach).unwrap()
}

/// Waits until the condition holds.
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up_at = Instant::now() + SOON;
    while !is_so() {
        assert!(Instant::now() < give_up_at, "{what}: not within {SOON:?}");
        std::thread::yield_now();
    }
}

/// Reads a database's memory without being one of its members.
pub struct Onlooker {
    process: Process,
    layout: DatabaseLayout,
    grants: Vec<Epoch>,
    memory: Memory,
}

impl Onlooker {
    pub fn of(file: &Path, transport: TransportChoice) -> Onlooker {
        let found = DatabaseFile::load(file).unwrap();
        let leases = JointLeases::join(found.keys().unwrap().clone(), transport.into(), None).unwrap();
        let regions = leases.keys().regions().unwrap();
        let layout = DatabaseLayout::new(found.shape().unwrap(), Limits::SHIPPED, regions).unwrap();
        let broker = found.broker().to_owned();
        let pool = PoolConfig { broker, tls: None, transport: transport.into(), limit_bytes: None };
        let process = Process { leases, pool };
        let endpoint = process.endpoint();
        let grants = block_on(&endpoint, add_grants(&process, &layout.regions)).unwrap();
        let memory = block_on(&endpoint, attach_all(&process, endpoint.clone(), &grants)).unwrap();
        let grants = grants.iter().map(|grant| grant.epoch).collect();
        Onlooker { process, layout, grants, memory }
    }

    fn at(&self) -> DatabaseAt<'_> {
        DatabaseAt { layout: &self.layout, grants: &self.grants }
    }

    fn endpoint(&self) -> &Endpoint {
        self.memory.endpoint()
    }

    fn members(&self) -> MembersAt {
        self.at().members()
    }

    fn seats(&self) -> Vec<SeatWords> {
        block_on(self.endpoint(), read_seats(&self.memory, &self.members())).unwrap()
    }

    /// The seat that has this claim, if there is one.
    pub fn seat_of(&self, claim: Epoch) -> Option<SeatWords> {
        self.seats().into_iter().find(|seat| seat.claim == Some(claim))
    }

    /// Takes a seat, and never sends a heartbeat.
    pub fn takes_seat(&self) -> Seat {
        let waits = (Duration::ZERO, Duration::ZERO);
        let members = self.members();
        let taken = wait_for_seat::<Shipped>(&self.memory, &members, &self.grants, waits);
        block_on(self.endpoint(), taken).unwrap().expect("there is one")
    }

    /// The node that has the seats, and another node.
    pub fn nodes(&self) -> [NodeId; 2] {
        let root = self.layout.regions[0].node;
        let other = self.layout.regions.iter().map(|region| region.node).find(|&node| node != root);
        [root, other.expect("regions of two nodes")]
    }

    /// The addresses of a node.
    pub fn address(&self, node: NodeId) -> NodeAddress {
        let mut addresses = self.process.leases.keys().addresses();
        addresses.find(|address| address.node == node.0).expect("one of the database's").clone()
    }
}
