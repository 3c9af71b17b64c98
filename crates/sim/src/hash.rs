//! `sim hash`: clients look up keys in a hash table in the memory of several nodes and give them record
//! numbers. Meanwhile buckets split all the time, operations end in doubt, and clients die anywhere. The
//! table may have grown, and some clients do not know that yet (`docs/src/txn.md`, *keys*).

mod broken;
mod client;
mod judge;
mod keys;
mod known;
mod nemesis;
#[cfg(test)]
mod tests;
mod transactions;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::{
    Executor, Faults, HostId, Network, Path, ProcessId, Random, Service, Span, Tasks, World, WorldConfig,
};
use farpool_fabric::{Endpoint, EndpointConfig, Peer};
use farpool_txn::hash::{Index, IndexLayout, IndexRules, IndexShape, IndexSpares};
use farpool_txn::{Growth, Memory, MemoryError, Piece, Shipped};
use farpool_wire::{AccessKey, Epoch, NodeId, RegionId, SessionId};

use crate::lending::LendingHost;
use crate::notebook::Notebook;
use crate::place::ClientPlace;
use crate::runner::{RunReport, Scenario, run_to_end};
use crate::staying::Left;
use judge::History;
use keys::Keys;
use transactions::Transactions;

/// The scenario of hash tables.
pub const HASH: Scenario = Scenario { name: "hash", mutations: MUTATIONS, run };

const UNCLOSED: &str = "bucket-split-without-closing";
const ACROSS_SPLIT: &str = "duplicate-insert-across-a-split";
const LOST_ENTRY: &str = "lost-entry-not-read-again";
const ANY_ENTRY: &str = "any-empty-entry-taken";
const ENTRY_FIRST: &str = "entry-before-its-key";
const HASH_ALONE: &str = "hash-taken-for-the-key";
const IN_DOUBT: &str = "number-in-doubt-used-again";
const BEYOND: &str = "unknown-piece-passed-over";
const MUTATIONS: &[&str] =
    &[UNCLOSED, ACROSS_SPLIT, LOST_ENTRY, ANY_ENTRY, ENTRY_FIRST, HASH_ALONE, IN_DOUBT, BEYOND];

/// Far longer than any run takes: a task that has not ended by then hangs.
const RUN_NS: u64 = 10_000_000_000;
/// From the posting of an operation until its outcome counts as *unknown*, while faults occur: some packets
/// arrive later.
const DEADLINE: Duration = Duration::from_micros(150);
/// The same once no more faults occur: no operation takes so long then.
const LAST_DEADLINE: Duration = Duration::from_millis(50);
const ARENA_BYTES: usize = 64 * 4096;
const REGION_BYTES: u64 = 512 << 10;
/// Indexes of the regions of each node.
const INDEX: u32 = 0;
const RECORDS: u32 = 1;
const ORACLE: u32 = 2;
const REGIONS: u32 = 3;
const EPOCH: Epoch = Epoch(7);
/// Records and pairs of buckets in each piece: enough that a table never gets full, however many dead clients
/// had reserved.
const ROOMY: u64 = 2_000;
/// The same for runs with transactions, in which records take more memory and few clients die.
const ROOMY_WITH_VERSIONS: u64 = 500;

/// Layers of pieces of a table, at most.
const MOST_LAYERS: usize = 3;

/// What all parts of one run share.
struct Run {
    world: World,
    tasks: Tasks,
    notes: Notebook,
    nodes: Vec<HashNode>,
    /// The layout of the whole index, and how it has grown.
    layout: IndexLayout,
    growth: IndexGrowth,
    pieces: Vec<Piece>,
    /// Clients run transactions on a table with keys.
    is_of_transactions: bool,
    keys: Keys,
    /// There is room for every key: *full* is not a valid answer.
    is_roomy: bool,
    history: RefCell<History>,
    /// The current process of each client.
    clients: RefCell<Vec<ProcessId>>,
    /// Tasks of clients and of mishaps that have not ended.
    left: Left,
}

/// The layers of an index's pieces.
struct IndexGrowth {
    /// What each piece of the first layer has.
    shape: IndexShape,
    /// Pieces of a layer.
    layer: usize,
    /// A piece is at most this many times as large as those of the first layer.
    most_times: u64,
}

impl IndexGrowth {
    /// The layout of an index of which so many pieces are known.
    fn layout(&self, pieces: usize) -> IndexLayout {
        IndexLayout::grown(self.shape, pieces, self.layer, self.most_times).expect("a small index")
    }

    /// The numbering of things of which each piece of the first layer has `each`.
    fn numbering(&self, each: u64) -> Growth {
        Growth::new(self.layer as u64, each, self.most_times).expect("a small table")
    }
}

struct HashNode {
    host: HostId,
    peer: Peer,
}

impl Run {
    fn index<R: IndexRules>(&self) -> Index<R> {
        Index::new(self.layout, self.pieces.clone()).expect("the layout is of these pieces")
    }

    /// The index as a process uses it that knows its first `pieces` pieces.
    fn index_knowing<R: IndexRules>(&self, pieces: usize, spares: &Arc<IndexSpares>) -> Index<R> {
        let known = self.pieces[..pieces].to_vec();
        Index::sharing(self.growth.layout(pieces), known, spares.clone())
            .expect("the layout is of these pieces")
    }

    /// Whether there are pieces that this index does not have.
    fn has_pieces_beyond<R: IndexRules>(&self, index: &Index<R>) -> bool {
        index.layout().pieces() < self.layout.pieces()
    }

    /// New connections of a process to all nodes.
    async fn memory(
        self: &Rc<Self>,
        process: ProcessId,
        place: ClientPlace,
        deadline: Duration,
    ) -> Result<Memory, MemoryError> {
        let run = self.clone();
        let endpoint = Endpoint::new(EndpointConfig {
            transport: self.world.transport(process, place.path),
            clock: Rc::new(self.world.clock(place.host)),
            session_ids: Box::new(move || SessionId(run.notes.next_name())),
            arena_bytes: ARENA_BYTES,
            deadline,
        });
        self.tasks.adopt(process, endpoint.clone());
        let mut memory = Memory::new(endpoint);
        for node in &self.nodes {
            for index in if self.is_of_transactions { 0..REGIONS } else { INDEX..INDEX + 1 } {
                let region = RegionId { node: node.peer.node, index };
                memory.attach(&node.peer, region, EPOCH, key()).await?;
            }
        }
        Ok(memory)
    }
}

fn piece(node: NodeId, index: u32, start: u64) -> Piece {
    Piece { region: RegionId { node, index }, epoch: EPOCH, start }
}

fn key() -> AccessKey {
    AccessKey::from_bytes([9; 16])
}

fn run(seed: u64, mutation: Option<&'static str>, trace: bool) -> RunReport {
    match mutation {
        Some(UNCLOSED) => run_by::<broken::SplitUnclosed>(seed, trace),
        Some(ACROSS_SPLIT) => run_by::<broken::BlindAcrossSplits>(seed, trace),
        Some(LOST_ENTRY) => run_by::<broken::BlindAfterLosing>(seed, trace),
        Some(ANY_ENTRY) => run_by::<broken::AnyEntry>(seed, trace),
        Some(ENTRY_FIRST) => run_by::<broken::EntryFirst>(seed, trace),
        Some(HASH_ALONE) => run_by::<broken::HashAlone>(seed, trace),
        Some(IN_DOUBT) => run_by::<broken::DoubtIgnored>(seed, trace),
        Some(BEYOND) => run_by::<broken::UnknownPassedOver>(seed, trace),
        _ => run_by::<Shipped>(seed, trace),
    }
}

fn run_by<R: IndexRules>(seed: u64, trace: bool) -> RunReport {
    let mut random = Random::new(seed, 10);
    let world = world_of(seed, trace, &mut random);
    let executor = Executor::new(world.clone());
    let run = Rc::new(setting(world.clone(), executor.tasks(), seed, &mut random));
    let places: Vec<ClientPlace> =
        (0..2 + random.index(3)).map(|index| place(&run, index, &mut random)).collect();
    run.clients.replace(places.iter().map(|place| run.world.add_process(place.host)).collect());
    let transactions = run.is_of_transactions.then(|| Transactions::start::<R>(&run, &places, &mut random));
    if transactions.is_none() {
        places.iter().for_each(|place| client::start::<R>(&run, *place));
        nemesis::start::<R>(&run, &places, &mut random);
        client::start_last::<R>(&run, &places);
    }
    let (panicked, failure) = run_to_end(executor, RUN_NS, || run.left.get());
    failure.into_iter().for_each(|what| run.notes.complain(what));
    let history = run.history.take();
    let mut violations = run.notes.complaints.take();
    violations.extend(history.judge());
    let mut operations = history.operations();
    if let Some(transactions) = transactions {
        let (count, judged) = transactions.judge();
        operations += count;
        violations.extend(judged.err().map(|violation| violation.to_string()));
    }
    RunReport { seed, panicked, violations, operations, ..RunReport::of_world(&world) }
}

/// Any subset of faults, so that some seeds test one fault alone.
fn world_of(seed: u64, trace: bool, random: &mut Random) -> World {
    let mut some = |permille: u32| if random.chance(600) { permille } else { 0 };
    let faults = Faults {
        late_permille: some(35),
        late: Some(Span::new(10_000, 400_000)),
        stall_permille: some(25),
        stall: Some(Span::new(2_000, 100_000)),
        silent_permille: some(300),
        ..Faults::default()
    };
    World::new(WorldConfig {
        network: Network::default(),
        faults,
        trace,
        ..WorldConfig::new(seed).with_operations_at_once()
    })
}

/// One to three nodes with one or two pieces of the index each.
fn setting(world: World, tasks: Tasks, seed: u64, random: &mut Random) -> Run {
    let nodes: Vec<HashNode> = (0..1 + random.below(3))
        .map(|index| {
            let host = world.add_host(1_000_000);
            let memory = Arc::new(LendingHost::new(NodeId(index + 1), REGIONS, REGION_BYTES));
            (0..REGIONS).for_each(|region| memory.open(region, EPOCH, key()));
            let service = if random.chance(400) { Service::Whole } else { Service::Torn };
            HashNode { host, peer: world.serve(host, memory, service) }
        })
        .collect();
    let pieces_each = 1 + random.below(2);
    let is_of_transactions = random.chance(300);
    let is_roomy = is_of_transactions || random.chance(900);
    let layer = nodes.len() * pieces_each as usize;
    let (layers, most_times) = (1 + random.index(MOST_LAYERS), 1 + random.below(2));
    // All layers together have about as much room as a table of one layer.
    let times = Growth::new(1, 1, most_times).expect("one piece with one thing").total(layers as u64);
    let room = if is_of_transactions { ROOMY_WITH_VERSIONS } else { ROOMY } / times;
    let shape = IndexShape {
        homes: 1 + random.below(2),
        pairs: if is_roomy { room } else { random.below(30) },
        records: if is_roomy { room } else { 1 + random.below(120) },
        key_bytes: 4 + random.index(14),
        entries: 1 + random.index(4),
        seed: random.bits(),
    };
    let growth = IndexGrowth { shape, layer, most_times };
    let layout = growth.layout(layer * layers);
    let pieces = lay_out(&nodes, INDEX, (0..layer * layers).map(|piece| layout.bytes_of(piece)));
    Run {
        keys: Keys::choose(&layout, random),
        notes: Notebook::new(world.clone(), seed),
        world,
        tasks,
        nodes,
        layout,
        growth,
        pieces,
        is_of_transactions,
        is_roomy,
        history: RefCell::default(),
        clients: RefCell::default(),
        left: Left::default(),
    }
}

/// Places pieces of so many bytes one after the other in the same region of each node, on the nodes in turn.
fn lay_out(nodes: &[HashNode], region: u32, bytes: impl Iterator<Item = u64>) -> Vec<Piece> {
    let mut ends = vec![0; nodes.len()];
    let mut next = |(number, bytes): (usize, u64)| {
        let node = number % nodes.len();
        let start = ends[node];
        ends[node] += bytes;
        assert!(ends[node] <= REGION_BYTES, "the pieces of a node fit its region");
        piece(nodes[node].peer.node, region, start)
    };
    bytes.enumerate().map(&mut next).collect()
}

/// Draws where a client lives: with the memory of a single node mapped, or across the network.
fn place(run: &Run, index: usize, random: &mut Random) -> ClientPlace {
    if run.nodes.len() == 1 && random.chance(400) {
        ClientPlace { index, host: run.nodes[0].host, path: Path::Shared }
    } else {
        ClientPlace { index, host: run.world.add_host(950_000 + random.below(100_000)), path: Path::Checked }
    }
}
