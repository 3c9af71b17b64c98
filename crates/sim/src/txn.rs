//! `sim txn`: transactions on records in the memory of several nodes, judged by what snapshot isolation promises
//! (`docs/src/txn.md`). Everything is slow, torn and out of step; clients die, stop and are taken for dead, others undo what they
//! left, and die over it.

mod auditor;
mod broken;
mod client;
mod nemesis;
mod oracle;
mod recovering;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::{
    Executor, Faults, HostId, Network, Path, ProcessId, Random, Service, Span, Tasks, World, WorldConfig,
};
use farpool_fabric::{Endpoint, EndpointConfig, Peer};
use farpool_txn::judge::{Transaction, judge};
use farpool_txn::log::{LogAt, LogLayout};
use farpool_txn::{Memory, MemoryError, Oracle, Piece, RecordId, RecordLayout, Table};
use farpool_wire::{AccessKey, Epoch, GrantMode, NodeId, RegionId, SessionId};

use crate::lending::LendingHost;
use crate::runner::{RunReport, Scenario, run_to_end};

/// The scenario of transactions.
pub const TXN: Scenario = Scenario { name: "txn", mutations: broken::MUTATIONS, run };

/// Far more than any run takes: whoever has not ended by then hangs.
const RUN_NS: u64 = 200_000_000;
/// From posting to *unknown*: nothing here takes so long.
const DEADLINE: Duration = Duration::from_millis(50);
const ARENA_BYTES: usize = 64 * 4096;
const REGION_BYTES: u64 = 128 << 10;
/// Bytes for the intents of a slot: the smaller hold those of one transaction, so that others are put off.
const LOG_BYTES: [u64; 3] = [1_024, 2_048, 8_192];
/// Room for a part of the oracle: a word and two images of a few slots.
const PART_BYTES: u64 = 1_024;
/// Words of a record's data, all alike: a reader sees where they come from two versions.
const DATA_WORDS: usize = 6;

/// What all parts of one run share.
struct Run {
    world: World,
    tasks: Tasks,
    seed: u64,
    nodes: Vec<Node>,
    /// Of the oracle.
    parts: u64,
    /// Slots that have clients; one more is the auditor's.
    slots: u16,
    records: RecordLayout,
    log: LogLayout,
    /// Who has each slot.
    lives: RefCell<BTreeMap<u16, Life>>,
    /// Something goes wrong in this run, so that a client may be told what it would else never hear.
    has_mishaps: Cell<bool>,
    history: RefCell<Vec<Transaction>>,
    complaints: RefCell<Vec<String>>,
    clients_left: Cell<u32>,
    /// All have gone but the auditor: nothing goes wrong any more.
    is_quiet: Cell<bool>,
    /// The auditor has done his work.
    is_over: Cell<bool>,
    /// Names sessions, grants, streams of randomness, and what is written.
    names: Cell<u64>,
}

/// A node, of whose regions one has records, one logs, and another may have the oracle.
struct Node {
    host: HostId,
    peer: Peer,
    memory: Arc<LendingHost>,
}

/// The present client of a slot.
#[derive(Clone, Copy)]
struct Life {
    process: ProcessId,
    grant: Epoch,
    /// Somebody looks after what it has left.
    is_dead: bool,
}

/// A process with its way to all memory, under a grant of its own.
struct Access {
    memory: Memory,
    grant: Epoch,
}

impl Run {
    fn next_name(&self) -> u64 {
        self.names.set(self.names.get() + 1);
        self.names.get()
    }

    fn random(&self) -> Random {
        Random::new(self.seed, 1_000 + self.next_name())
    }

    fn complain(&self, what: String) {
        self.world.note("violation", &[]);
        self.complaints.borrow_mut().push(what);
    }

    /// A grant of all regions, for one process.
    fn grant(&self) -> Epoch {
        let grant = Epoch(100 + self.next_name());
        for node in &self.nodes {
            for region in 0..REGIONS {
                node.memory.regions.open_grant(region, grant, key_of(grant), GrantMode::ReadWrite);
            }
        }
        grant
    }

    /// From when this returns on nothing takes effect that is done under a grant.
    async fn fence(&self, grant: Epoch, random: &mut Random) {
        for node in &self.nodes {
            for region in 0..REGIONS {
                self.world.sleep(Duration::from_nanos(random.below(20_000))).await;
                node.memory.regions.fence_grant(region, grant).expect("a few pages of memory");
            }
        }
    }

    /// A new process on a host, and its way to all memory.
    async fn access(
        self: &Rc<Self>,
        process: ProcessId,
        (host, path): (HostId, Path),
        grant: Epoch,
    ) -> Result<Access, MemoryError> {
        let run = self.clone();
        let endpoint = Endpoint::new(EndpointConfig {
            transport: self.world.transport(process, path),
            clock: Rc::new(self.world.clock(host)),
            session_ids: Box::new(move || SessionId(run.next_name())),
            arena_bytes: ARENA_BYTES,
            deadline: DEADLINE,
        });
        self.tasks.adopt(process, endpoint.clone());
        let mut memory = Memory::new(endpoint);
        for node in &self.nodes {
            for index in 0..REGIONS {
                let region = RegionId { node: node.peer.node, index };
                memory.attach(&node.peer, region, grant, key_of(grant)).await?;
            }
        }
        Ok(Access { memory, grant })
    }

    fn piece(&self, node: usize, index: u32, epoch: Epoch, start: u64) -> Piece {
        let node = &self.nodes[node % self.nodes.len()];
        Piece { region: RegionId { node: node.peer.node, index }, epoch, start }
    }

    fn oracle(&self, grant: Epoch) -> Oracle {
        let piece = |part: u64| self.piece(part as usize, ORACLE, grant, part * PART_BYTES);
        let pieces: Vec<Piece> = (0..self.parts).map(piece).collect();
        Oracle::split(self.slots + 1, &pieces).expect("each part has a slot")
    }

    fn table(&self, grant: Epoch) -> Table {
        let pieces = (0..self.nodes.len()).map(|node| self.piece(node, RECORDS, grant, 0));
        Table::new(RecordId(100), self.records, pieces.collect())
    }

    fn log(&self, slot: u16, grant: Epoch) -> LogAt {
        // One node may have both copies.
        let copies = [0, 1].map(|copy| {
            let start = u64::from(2 * slot + copy) * self.log.bytes();
            self.piece(usize::from(slot + copy), LOGS, grant, start)
        });
        LogAt { copies, layout: self.log }
    }
}

/// Counts a client of the run for as long as it is there.
struct Staying(Rc<Run>);

impl Staying {
    fn new(run: &Rc<Run>) -> Staying {
        run.clients_left.set(run.clients_left.get() + 1);
        Staying(run.clone())
    }
}

impl Drop for Staying {
    fn drop(&mut self) {
        self.0.clients_left.set(self.0.clients_left.get() - 1);
    }
}

/// Regions of each node.
const RECORDS: u32 = 0;
const ORACLE: u32 = 1;
const LOGS: u32 = 2;
const REGIONS: u32 = 3;
/// The grant of who leases the regions; it is nobody's here.
const OWNER: Epoch = Epoch(7);

/// Any key will do, as long as each grant has another.
fn key_of(grant: Epoch) -> AccessKey {
    let mut bytes = [9; AccessKey::BYTES];
    bytes[..8].copy_from_slice(&grant.0.to_le_bytes());
    AccessKey::from_bytes(bytes)
}

fn run(seed: u64, mutation: Option<&'static str>, trace: bool) -> RunReport {
    broken::set(mutation);
    let mut random = Random::new(seed, 10);
    let world = world_of(seed, trace, &mut random);
    let executor = Executor::new(world.clone());
    let run = Rc::new(setting(world.clone(), executor.tasks(), seed, &mut random));
    oracle::start_publishers(&run, &mut random);
    for slot in 0..run.slots {
        client::start(&run, slot, 0, &mut random);
    }
    nemesis::start(&run, &mut random);
    auditor::start(&run);
    let (panicked, trouble) = run_to_end(executor, RUN_NS, || run.clients_left.get());
    trouble.into_iter().for_each(|what| run.complain(what));
    let history = run.history.take();
    let mut violations = run.complaints.take();
    violations.extend(judge(&history).err().map(|violation| violation.to_string()));
    RunReport {
        seed,
        panicked,
        violations,
        trace_hash: world.trace_hash(),
        events: world.trace_events(),
        operations: history.len() as u64,
        virtual_us: world.now_ns() / 1_000,
        trace: world.trace_lines(),
    }
}

fn world_of(seed: u64, trace: bool, random: &mut Random) -> World {
    let mut some = |permille: u32| if random.chance(600) { permille } else { 0 };
    let faults = Faults {
        late_permille: some(35),
        late: Some(Span::new(10_000, 200_000)),
        stall_permille: some(25),
        stall: Some(Span::new(2_000, 100_000)),
        ..Faults::default()
    };
    World::new(WorldConfig { network: Network::default(), faults, trace, ..WorldConfig::new(seed) })
}

/// One to three nodes with some records each, and the oracle on the first, or on several.
fn setting(world: World, tasks: Tasks, seed: u64, random: &mut Random) -> Run {
    let nodes: Vec<Node> = (0..1 + random.below(3))
        .map(|index| {
            let host = world.add_host(1_000_000);
            let memory = Arc::new(LendingHost::new(NodeId(index + 1), REGIONS, REGION_BYTES));
            (0..REGIONS).for_each(|region| memory.open(region, OWNER, key_of(OWNER)));
            let service = if random.chance(400) { Service::Whole } else { Service::Torn };
            let peer = world.serve(host, memory.clone(), service);
            Node { host, peer, memory }
        })
        .collect();
    let slots = 2 + random.below(3) as u16;
    let parts = oracle::parts(random, slots + 1);
    let old_versions = 2 + random.below(7) as usize;
    let records =
        RecordLayout::new(1 + random.below(4), DATA_WORDS * 8, old_versions).expect("small records");
    let log = LogLayout::new(LOG_BYTES[random.index(LOG_BYTES.len())]).expect("whole words");
    let logs = 2 * u64::from(slots + 1) * log.bytes();
    assert!([records.bytes(), parts * PART_BYTES, logs].into_iter().all(|bytes| bytes <= REGION_BYTES));
    Run {
        world,
        tasks,
        seed,
        nodes,
        parts,
        slots,
        records,
        log,
        lives: RefCell::default(),
        has_mishaps: Cell::new(false),
        history: RefCell::default(),
        complaints: RefCell::default(),
        clients_left: Cell::new(0),
        is_quiet: Cell::new(false),
        is_over: Cell::new(false),
        names: Cell::new(0),
    }
}

/// Where somebody lives: with a single node's memory in his hands, or across the network.
fn place(run: &Run, random: &mut Random) -> (HostId, Path) {
    if run.nodes.len() == 1 && random.chance(400) {
        (run.nodes[0].host, Path::Shared)
    } else {
        (run.world.add_host(950_000 + random.below(100_000)), Path::Checked)
    }
}
