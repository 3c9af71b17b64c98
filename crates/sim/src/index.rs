//! `sim index`: clients enter records under keys in an ordered index, remove some, and read them in order, in
//! the memory of several nodes. Meanwhile leaves are replaced all the time, operations end in doubt, and
//! clients die anywhere. The index may have grown, and some clients do not know that yet (`docs/src/txn.md`,
//! *keys in order*).

mod broken;
mod client;
mod judge;
mod remover;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use farpool_fabric::sim::{Executor, Random, Tasks, World};
use farpool_txn::tree::{LeafLayout, Rank, Tree, TreeLayout, TreeRules, TreeSpares};
use farpool_txn::{Growth, Piece, Shipped};
use farpool_wire::Slot;

use crate::indexing::{RUN_NS, Setting, draw_nodes, lay_out, start_mishaps, world_of};
use crate::notebook::Notebook;
use crate::place::ClientPlace;
use crate::runner::{RunReport, Scenario, run_to_end};
use crate::staying::Left;
use judge::History;

/// The scenario of ordered indexes.
pub const INDEX: Scenario = Scenario { name: "index", mutations: MUTATIONS, run };

const BLIND: &str = "leaf-fences-not-checked";
const RESERVED: &str = "reserved-entry-survives-replacement";
const ENTRY_FIRST: &str = "live-before-its-key";
const UNRESERVED: &str = "entry-written-unreserved";
const RELIED: &str = "entry-removed-under-insert";
const STALE: &str = "replaced-leaf-trusted";
const HALF: &str = "half-split-leaf-without-sibling";
const USED_AGAIN: &str = "place-of-a-removed-entry-used-again";
const MUTATIONS: &[&str] = &[BLIND, RESERVED, ENTRY_FIRST, UNRESERVED, RELIED, STALE, HALF, USED_AGAIN];

/// Pairs of leaves in each piece: enough that an index never gets full, however many dead clients had some.
const ROOMY: u64 = 180;
/// Layers of pieces of an index, at most.
const MOST_LAYERS: usize = 3;
/// Clients that remove entries, at most.
const MOST_REMOVERS: usize = 2;
/// Keys of a run, and records under each, at most.
const KEYS: std::ops::Range<u64> = 1..16;
const RECORDS: std::ops::Range<u64> = 1..5;

/// What all parts of one run share.
struct Run {
    setting: Setting,
    /// The layout of the whole index.
    growth: TreeGrowth,
    pieces: Vec<Piece>,
    /// What clients enter.
    ranks: Vec<Rank>,
    /// There is room for everything: *full* is not a valid answer.
    is_roomy: bool,
    history: RefCell<History>,
    /// The next slot of a process.
    next_slot: Cell<u16>,
    /// The operations that have begun and have not ended.
    operations: RefCell<BTreeSet<u64>>,
    next_operation: Cell<u64>,
}

/// An operation, until this is dropped.
struct Operation {
    run: Rc<Run>,
    number: u64,
}

impl Operation {
    fn begin(run: &Rc<Run>) -> Operation {
        let number = run.next_operation.replace(run.next_operation.get() + 1);
        run.operations.borrow_mut().insert(number);
        Operation { run: run.clone(), number }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        self.run.operations.borrow_mut().remove(&self.number);
    }
}

/// The layers of an index's pieces.
struct TreeGrowth {
    leaf: LeafLayout,
    /// Pairs of leaves in each piece of the first layer.
    pairs: u64,
    /// Pieces of a layer.
    layer: usize,
    /// A piece is at most this many times as large as those of the first layer.
    most_times: u64,
}

impl TreeGrowth {
    /// The layout of an index of which so many pieces are known.
    fn layout(&self, pieces: usize) -> TreeLayout {
        TreeLayout::grown(self.leaf, self.pairs, pieces, self.layer, self.most_times).expect("a small index")
    }
}

impl AsRef<Setting> for Run {
    fn as_ref(&self) -> &Setting {
        &self.setting
    }
}

impl Run {
    /// The place of a rank among those of the run, for notes.
    fn place_of(&self, rank: &Rank) -> u64 {
        self.ranks.iter().position(|known| known == rank).map_or(u64::MAX, |place| place as u64)
    }

    /// The spares of another process.
    fn spares(&self) -> Arc<TreeSpares> {
        let slot = self.next_slot.replace(self.next_slot.get() + 1);
        Arc::new(TreeSpares::new(
            &self.growth.layout(self.growth.layer),
            Slot::new(slot).expect("few processes"),
        ))
    }

    /// The index as a task uses it that knows its first `pieces` pieces.
    fn tree<R: TreeRules>(&self, pieces: usize, spares: &Arc<TreeSpares>) -> Tree<R> {
        let known = self.pieces[..pieces].to_vec();
        Tree::sharing(self.growth.layout(pieces), known, spares.clone())
            .expect("the layout is of these pieces")
    }
}

fn run(seed: u64, mutation: Option<&'static str>, trace: bool) -> RunReport {
    match mutation {
        Some(BLIND) => run_by::<broken::BlindForFences>(seed, trace),
        Some(RESERVED) => run_by::<broken::ReservedSurvives>(seed, trace),
        Some(ENTRY_FIRST) => run_by::<broken::LiveFirst>(seed, trace),
        Some(UNRESERVED) => run_by::<broken::Unreserved>(seed, trace),
        Some(RELIED) => run_by::<broken::RelianceUncounted>(seed, trace),
        Some(STALE) => run_by::<broken::ReplacedTrusted>(seed, trace),
        Some(HALF) => run_by::<broken::HalfSplit>(seed, trace),
        Some(USED_AGAIN) => run_by::<broken::PlaceUsedAgain>(seed, trace),
        _ => run_by::<Shipped>(seed, trace),
    }
}

fn run_by<R: TreeRules>(seed: u64, trace: bool) -> RunReport {
    let mut random = Random::new(seed, 10);
    let world = world_of(seed, trace, &mut random);
    let executor = Executor::new(world.clone());
    let run = Rc::new(draw_run(world.clone(), executor.tasks(), seed, &mut random));
    let setting = &run.setting;
    let places: Vec<ClientPlace> =
        (0..2 + random.index(3)).map(|index| setting.draw_place(index, &mut random)).collect();
    let processes = places.iter().map(|place| setting.world.add_process(place.host));
    setting.clients.replace(processes.collect());
    places.iter().for_each(|place| client::start::<R>(&run, *place));
    for remover in 0..1 + random.index(MOST_REMOVERS) {
        let place = setting.draw_place(places.len() + remover, &mut random);
        remover::start::<R>(&run, place);
    }
    start_mishaps(&run, &places, client::start::<R>, &mut random);
    client::start_last::<R>(&run, places[0]);
    let (panicked, failure) = run_to_end(executor, RUN_NS, || run.setting.left.get());
    failure.into_iter().for_each(|what| run.setting.notes.complain(what));
    let history = run.history.take();
    let mut violations = run.setting.notes.complaints.take();
    violations.extend(history.judge());
    RunReport { seed, panicked, violations, operations: history.operations(), ..RunReport::of_world(&world) }
}

fn draw_run(world: World, tasks: Tasks, seed: u64, random: &mut Random) -> Run {
    let nodes = draw_nodes(&world, 1, random);
    let layer = nodes.len() * (1 + random.index(2));
    let (layers, most_times) = (1 + random.index(MOST_LAYERS), 1 + random.below(2));
    // All layers together have about as much room as an index of one layer.
    let times = Growth::new(1, 1, most_times).expect("one piece with one thing").total(layers as u64);
    let is_roomy = random.chance(900);
    let key_bytes = 1 + random.index(12);
    let leaf = LeafLayout::new(key_bytes).expect("short keys").with_entries(4 + random.index(6));
    let pairs = if is_roomy { ROOMY / times } else { 1 + random.below(20) };
    let growth = TreeGrowth { leaf, pairs, layer, most_times };
    let layout = growth.layout(layer * layers);
    let pieces = lay_out(&nodes, 0, (0..layer * layers).map(|piece| layout.bytes_of(piece)));
    Run {
        ranks: draw_ranks(key_bytes, random),
        setting: Setting {
            notes: Notebook::new(world.clone(), seed),
            world,
            tasks,
            nodes,
            regions: 1,
            clients: RefCell::default(),
            left: Left::default(),
        },
        growth,
        pieces,
        is_roomy,
        history: RefCell::default(),
        next_slot: Cell::new(0),
        operations: RefCell::default(),
        next_operation: Cell::default(),
    }
}

/// Keys that differ in their first byte or in their last one, with one record or several each.
fn draw_ranks(key_bytes: usize, random: &mut Random) -> Vec<Rank> {
    let keys = KEYS.start + random.below(KEYS.end - KEYS.start);
    let place = if random.chance(500) { 0 } else { key_bytes - 1 };
    let mut ranks = Vec::new();
    for key in 0..keys {
        let mut bytes = vec![7; key_bytes];
        bytes[place] = 16 * key as u8;
        let records = RECORDS.start + random.below(RECORDS.end - RECORDS.start);
        ranks.extend((0..records).map(|record| Rank::new(&bytes, 3 * record)));
    }
    ranks
}
