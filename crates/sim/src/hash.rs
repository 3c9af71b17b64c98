//! `sim hash`: clients look up keys in a hash table in the memory of several nodes and give them record
//! numbers. Meanwhile buckets split all the time, operations end in doubt, and clients die anywhere. The
//! table may have grown, and some clients do not know that yet (`docs/src/txn.md`, *keys*).

mod broken;
mod by_value;
mod client;
mod judge;
mod keys;
mod known;
mod order;
#[cfg(test)]
mod tests;
mod transactions;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use farpool_fabric::sim::{Executor, Random, Tasks, World};
use farpool_txn::hash::{Index, IndexLayout, IndexRules, IndexShape, IndexSpares};
use farpool_txn::{Growth, Piece, Shipped};

use crate::indexing::{RUN_NS, Setting, draw_nodes, lay_out, start_mishaps, world_of};
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
const NO_ORDER: &str = "key-committed-without-its-place";
const ENTRY_IS_ROW: &str = "scan-trusts-the-index";
const NO_ENTRY: &str = "row-committed-without-its-entry";
const ENTRY_IS_KEY: &str = "entry-taken-for-the-key-of-its-row";
const KEY_TWICE: &str = "unique-key-twice";
const UNDER_INSERT: &str = "entry-removed-under-insert";
const TOO_EARLY: &str = "entry-removed-too-early";
const MUTATIONS: &[&str] = &[
    UNCLOSED,
    ACROSS_SPLIT,
    LOST_ENTRY,
    ANY_ENTRY,
    ENTRY_FIRST,
    HASH_ALONE,
    IN_DOUBT,
    BEYOND,
    NO_ORDER,
    ENTRY_IS_ROW,
    NO_ENTRY,
    ENTRY_IS_KEY,
    KEY_TWICE,
    UNDER_INSERT,
    TOO_EARLY,
];

/// Indexes of the regions of each node.
const INDEX: u32 = 0;
const RECORDS: u32 = 1;
const ORACLE: u32 = 2;
const ORDER: u32 = 3;
const BY_VALUE: u32 = 4;
const REGIONS: u32 = 5;
/// Records and pairs of buckets in each piece: enough that a table never gets full, however many dead clients
/// had reserved.
const ROOMY: u64 = 2_000;
/// The same for runs with transactions, in which records take more memory and few clients die.
const ROOMY_WITH_VERSIONS: u64 = 500;

/// Layers of pieces of a table, at most.
const MOST_LAYERS: usize = 3;

/// What all parts of one run share.
struct Run {
    setting: Setting,
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
}

impl AsRef<Setting> for Run {
    fn as_ref(&self) -> &Setting {
        &self.setting
    }
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
        Some(NO_ORDER) => run_by::<broken::NotInOrder>(seed, trace),
        Some(ENTRY_IS_ROW) => run_by::<broken::EntryIsRow>(seed, trace),
        Some(NO_ENTRY) => run_by::<broken::NotEntered>(seed, trace),
        Some(ENTRY_IS_KEY) => run_by::<broken::EntryIsKey>(seed, trace),
        Some(KEY_TWICE) => run_by::<broken::KeyTwice>(seed, trace),
        Some(UNDER_INSERT) => run_by::<broken::RemovedUnderInsert>(seed, trace),
        Some(TOO_EARLY) => run_by::<broken::RemovedTooEarly>(seed, trace),
        _ => run_by::<Shipped>(seed, trace),
    }
}

fn run_by<R: IndexRules>(seed: u64, trace: bool) -> RunReport {
    let mut random = Random::new(seed, 10);
    let world = world_of(seed, trace, &mut random);
    let executor = Executor::new(world.clone());
    let run = Rc::new(draw_run(world.clone(), executor.tasks(), seed, &mut random));
    let places: Vec<ClientPlace> =
        (0..2 + random.index(3)).map(|index| run.setting.draw_place(index, &mut random)).collect();
    let processes = places.iter().map(|place| run.setting.world.add_process(place.host));
    run.setting.clients.replace(processes.collect());
    let transactions = run.is_of_transactions.then(|| Transactions::start::<R>(&run, &places, &mut random));
    if transactions.is_none() {
        places.iter().for_each(|place| client::start::<R>(&run, *place));
        start_mishaps(&run, &places, client::start::<R>, &mut random);
        client::start_last::<R>(&run, &places);
    }
    let (panicked, failure) = run_to_end(executor, RUN_NS, || run.setting.left.get());
    failure.into_iter().for_each(|what| run.setting.notes.complain(what));
    let history = run.history.take();
    let mut violations = run.setting.notes.complaints.take();
    violations.extend(history.judge());
    let mut operations = history.operations();
    if let Some(transactions) = transactions {
        let (count, judged) = transactions.judge();
        operations += count;
        violations.extend(judged.err().map(|violation| violation.to_string()));
    }
    RunReport { seed, panicked, violations, operations, ..RunReport::of_world(&world) }
}

/// One to three nodes with one or two pieces of the index each.
fn draw_run(world: World, tasks: Tasks, seed: u64, random: &mut Random) -> Run {
    let nodes = draw_nodes(&world, REGIONS, random);
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
        setting: Setting {
            notes: Notebook::new(world.clone(), seed),
            world,
            tasks,
            nodes,
            regions: if is_of_transactions { REGIONS } else { 1 },
            clients: RefCell::default(),
            left: Left::default(),
        },
        layout,
        growth,
        pieces,
        is_of_transactions,
        is_roomy,
        history: RefCell::default(),
    }
}
