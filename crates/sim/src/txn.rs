//! `sim txn`: transactions on records in the memory of several nodes, judged by what snapshot isolation promises
//! (`docs/src/txn.md`). Nothing fails here yet but that everything is slow, torn and out of step.

mod broken;
mod client;
mod oracle;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::{
    Executor, Faults, HostId, Network, Path, ProcessId, Random, Service, Span, Tasks, World, WorldConfig,
};
use farpool_fabric::{Endpoint, EndpointConfig, Peer};
use farpool_txn::judge::{Transaction, judge};
use farpool_txn::{Memory, MemoryError, Oracle, Piece, RecordId, RecordLayout, Rules, Shipped, Table};
use farpool_wire::{AccessKey, Epoch, NodeId, RegionId, SessionId};

use crate::lending::LendingHost;
use crate::runner::{RunReport, Scenario, run_to_end};

/// The scenario of transactions.
pub const TXN: Scenario = Scenario { name: "txn", mutations: MUTATIONS, run };

const OWN_SLOT: &str = "own-slot-patched-into-the-cut";
const UNPUBLISHED: &str = "begin-from-unpublished-scan";
const VALIDATION: &str = "validation-skipped";
const CHECKSUM: &str = "checksum-off";
const SHOWN_FIRST: &str = "visibility-before-install";
const PARTS_ONCE: &str = "partitions-read-one-after-another";
const OUT_OF_ORDER: &str = "publish-out-of-order";
const MUTATIONS: &[&str] =
    &[OWN_SLOT, UNPUBLISHED, VALIDATION, CHECKSUM, SHOWN_FIRST, PARTS_ONCE, OUT_OF_ORDER];

/// Far more than any run takes: whoever has not ended by then hangs.
const RUN_NS: u64 = 10_000_000_000;
/// From posting to *unknown*: nothing here takes so long.
const DEADLINE: Duration = Duration::from_millis(50);
const ARENA_BYTES: usize = 64 * 4096;
const REGION_BYTES: u64 = 16_384;
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
    oracle: Oracle,
    slots: u16,
    table: Rc<Table>,
    history: RefCell<Vec<Transaction>>,
    complaints: RefCell<Vec<String>>,
    clients_left: RefCell<u32>,
    /// Names sessions, streams of randomness, and what is written.
    names: RefCell<u64>,
}

/// A node, of whose regions one has records and another may have the oracle.
struct Node {
    host: HostId,
    peer: Peer,
}

impl Run {
    fn next_name(&self) -> u64 {
        *self.names.borrow_mut() += 1;
        *self.names.borrow()
    }

    fn random(&self) -> Random {
        Random::new(self.seed, 1_000 + self.next_name())
    }

    fn complain(&self, what: String) {
        self.world.note("violation", &[]);
        self.complaints.borrow_mut().push(what);
    }

    /// A new process on a host, and its way to all memory.
    async fn memory(
        self: &Rc<Self>,
        process: ProcessId,
        host: HostId,
        path: Path,
    ) -> Result<Memory, MemoryError> {
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
            for region in [RECORDS, ORACLE] {
                memory
                    .attach(&node.peer, RegionId { node: node.peer.node, index: region }, EPOCH, key())
                    .await?;
            }
        }
        Ok(memory)
    }
}

/// Regions of each node.
const RECORDS: u32 = 0;
const ORACLE: u32 = 1;
const REGIONS: u32 = 2;
const EPOCH: Epoch = Epoch(7);

fn key() -> AccessKey {
    AccessKey::from_bytes([9; 16])
}

fn run(seed: u64, mutation: Option<&'static str>, trace: bool) -> RunReport {
    match mutation {
        Some(OWN_SLOT) => run_by::<broken::OwnSlotPatched>(seed, trace),
        Some(UNPUBLISHED) => run_by::<broken::UnpublishedScan>(seed, trace),
        Some(VALIDATION) => run_by::<broken::ValidationSkipped>(seed, trace),
        Some(CHECKSUM) => run_by::<broken::ChecksumOff>(seed, trace),
        Some(SHOWN_FIRST) => run_by::<broken::ShownFirst>(seed, trace),
        Some(PARTS_ONCE) => run_by::<broken::PartsReadOnce>(seed, trace),
        Some(OUT_OF_ORDER) => run_by::<broken::PublishedOutOfOrder>(seed, trace),
        _ => run_by::<Shipped>(seed, trace),
    }
}

fn run_by<R: Rules>(seed: u64, trace: bool) -> RunReport {
    let mut random = Random::new(seed, 10);
    let world = world_of(seed, trace, &mut random);
    let executor = Executor::new(world.clone());
    let run = Rc::new(setting(world.clone(), executor.tasks(), seed, &mut random));
    oracle::start_publishers::<R>(&run, &mut random);
    for slot in 0..run.slots {
        client::start::<R>(&run, slot, &mut random);
    }
    let (panicked, trouble) = run_to_end(executor, RUN_NS, || *run.clients_left.borrow());
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
            (0..REGIONS).for_each(|region| memory.open(region, EPOCH, key()));
            let service = if random.chance(400) { Service::Whole } else { Service::Torn };
            let peer = world.serve(host, memory, service);
            Node { host, peer }
        })
        .collect();
    let piece = |node: &Node, index, start| Piece {
        region: RegionId { node: node.peer.node, index },
        epoch: EPOCH,
        start,
    };
    let slots = 2 + random.below(3) as u16;
    let old_versions = 2 + random.below(7) as usize;
    let layout = RecordLayout::new(1 + random.below(4), DATA_WORDS * 8, old_versions).expect("small records");
    assert!(layout.bytes() <= REGION_BYTES);
    let table = Table::new(RecordId(100), layout, nodes.iter().map(|node| piece(node, RECORDS, 0)).collect());
    let oracle = oracle::split(slots, random, |part| {
        piece(&nodes[part as usize % nodes.len()], ORACLE, part * PART_BYTES)
    });
    Run {
        oracle,
        world,
        tasks,
        seed,
        nodes,
        slots,
        table: Rc::new(table),
        history: RefCell::default(),
        complaints: RefCell::default(),
        clients_left: RefCell::default(),
        names: RefCell::default(),
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
