//! `sim file`: files striped over nodes, with everything that can go wrong below them. The judge checks what
//! a file promises (`docs/src/files.md`). A direct client is called a *guest* in the code.

mod bell;
mod broken;
mod client;
mod conduct;
mod guest;
mod history;
mod inspector;
mod judge;
mod keeper;
mod kernel;
mod link;
mod nemesis;
mod overflow;
mod successor;
mod worlds;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use farpool_fabric::sim::{
    Executor, Faults, HostId, Network, ProcessId, Random, RunEnd, Service, Span, World, WorldConfig,
};
use farpool_fabric::{Endpoint, EndpointConfig};
use farpool_file::{FileCore, Redundancy, StoreCore};
use farpool_lease::Millis;
use farpool_pool::{EXTENT_BYTES, LeaseKeeper, LeasedRegion, NODE_DEADLINE, SessionCore, Stock};
use farpool_wire::{MAX_TRANSFER_BYTES, NodeId, OwnerId, SessionId};

use crate::mutation;
use crate::plane::broker::Broker;
use crate::plane::node::Node;
use crate::plane::post::Delivery;
use crate::plane::{Plane, PlaneConfig};
use crate::runner::{RunReport, Scenario};
use bell::Bell;
use broken::{
    Chosen, FREES_UNWRITTEN, GROWTH_GOES_ON, Hasty, LATE_FORGOTTEN, LOCKS_LEFT, LOST_WRITE, REFUSED_IS_DEAD,
    UNLOCKED_EARLY, UNTOLD,
};
use guest::Guest;
use history::History;
use judge::Excuses;
use link::{Lie, Shaking, Shaky};
use overflow::Disk;
use successor::Legacy;

/// The scenario of files.
pub const FILE: Scenario = Scenario { name: "file", mutations: broken::MUTATIONS, run };

/// The duration of a lease, in milliseconds: shorter than in production, so that more leases end in a run.
const TTL_MS: std::ops::Range<u64> = 3_000..8_000;
/// The length of the busy phase, in which most things go wrong, in durations of a lease.
const BUSY_TTLS: u64 = 3;
/// Far longer than any run takes: a run that has not finished by then hangs.
const RUN_NS: u64 = 600_000_000_000;
/// Extents of a region: few, so that a file lies in several regions.
const REGION_EXTENTS: u64 = 2;
/// Staging memory of a process: twice the largest transfer, with its partial blocks completed at both ends,
/// as in production.
const ARENA_BYTES: usize = 2 * MAX_TRANSFER_BYTES + (128 << 10);
/// The number of files at a time. A new file replaces one of them now and then.
const FILES: usize = 2;
/// The share of worlds whose only fault is that nodes refuse connections, in thousandths.
const REFUSING_PERMILLE: u32 = 120;
/// How often a file that is opened to direct clients may also be made longer by them, in thousandths.
const GROWING_PERMILLE: u32 = 700;
/// The share of writes that a lying connection loses, in thousandths.
const LOST_WRITE_PERMILLE: u32 = 60;

/// The phases of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Clients work; faults occur.
    Busy,
    /// Nothing goes wrong any more.
    Quiet,
    /// Clients give everything back.
    Leaving,
}

/// A file and its number.
type Numbered = (u64, Arc<FileCore<Chosen>>);

/// State that all parts of one run share.
struct Run {
    plane: Rc<Plane>,
    /// The machine on which all processes of this owner run.
    host: HostId,
    /// The process that maintains the leases.
    home: Cell<ProcessId>,
    stock: RefCell<Arc<Stock>>,
    store: RefCell<Arc<StoreCore<Chosen>>>,
    /// The state that outlives the owner, in runs in which the owner may die.
    legacy: Option<Legacy>,
    files: RefCell<Vec<Numbered>>,
    files_made: Cell<u64>,
    /// The redundancy of each file.
    redundancies: RefCell<BTreeMap<u64, Redundancy>>,
    drawing: RefCell<Random>,
    history: Rc<History>,
    shaking: Rc<Cell<Shaking>>,
    phase: Cell<Phase>,
    clients: RefCell<Vec<(ProcessId, Option<Rc<Guest>>)>>,
    /// Clients to start once another owner has taken over.
    successors_wanted: Cell<usize>,
    /// Whether some processes work on files directly.
    has_guests: bool,
    /// The kernel's sizes of files, where there are direct clients.
    sizes: RefCell<kernel::Sizes>,
    /// Files that a client is closing or has closed to direct clients for a while.
    closed: RefCell<BTreeSet<u64>>,
    /// Those of the closed files on which no direct client works any more.
    shut: RefCell<BTreeSet<u64>>,
    /// Clients that have not finished.
    at_work: Cell<u32>,
    mishaps: Cell<u32>,
    excuses: Excuses,
    /// The only fault is that nodes refuse connections.
    refuses: bool,
    /// Extents move most of the time.
    moves: bool,
    /// Rings when the owner begins to move an extent.
    moving: Rc<Bell>,
    flipped: RefCell<inspector::Flipped>,
    /// The overflow directory's disk, if there is one.
    disk: Option<Arc<Disk>>,
    /// Every region ever held.
    regions: RefCell<Vec<Arc<LeasedRegion>>>,
    has_left: Cell<bool>,
}

impl Deref for Run {
    type Target = Plane;

    fn deref(&self) -> &Plane {
        &self.plane
    }
}

impl Run {
    /// The regions that are held now.
    fn stock(&self) -> Arc<Stock> {
        self.stock.borrow().clone()
    }

    /// The store of this owner's files.
    fn store(&self) -> Arc<StoreCore<Chosen>> {
        self.store.borrow().clone()
    }

    fn home(&self) -> ProcessId {
        self.home.get()
    }

    /// A new fabric endpoint for a process.
    fn endpoint(&self, process: ProcessId) -> Endpoint {
        let here = self.nodes.iter().find(|node| node.host == self.host).map(|node| node.id);
        let shaking = self.shaking.clone();
        let random = self.random(self.next_name());
        let names = self.plane.clone();
        let moving = (process == self.home()).then(|| self.moving.clone());
        let endpoint = Endpoint::new(EndpointConfig {
            transport: Rc::new(Shaky::new(
                &self.world,
                process,
                here,
                random,
                Rc::new(move || shaking.get()),
                moving,
            )),
            clock: Rc::new(self.world.clock(self.host)),
            session_ids: Box::new(move || SessionId(names.next_name())),
            arena_bytes: ARENA_BYTES,
            deadline: NODE_DEADLINE,
        });
        self.tasks.adopt(process, endpoint.clone());
        endpoint
    }

    fn session(&self, process: ProcessId) -> SessionCore {
        let keeper: Arc<dyn LeaseKeeper> = match self.plane.is_broken(REFUSED_IS_DEAD) {
            true => Arc::new(Hasty(self.stock())),
            false => self.stock(),
        };
        SessionCore::new(keeper, self.endpoint(process))
    }

    fn fresh_file(&self) -> Numbered {
        let number = self.files_made.get() + 1;
        self.files_made.set(number);
        let redundancy = worlds::redundancy(self.nodes.len() as u64, &mut self.drawing.borrow_mut());
        self.redundancies.borrow_mut().insert(number, redundancy);
        self.world.note("file {} begins; data extents of its rows: {}", &[number, redundancy.nodes() - 1]);
        let file = self.store().create_as(redundancy);
        if self.has_guests && file.open_to_guests().is_err() {
            self.complain("no memory to share a file with direct clients".to_owned());
        }
        if self.has_guests && self.drawing.borrow_mut().chance(GROWING_PERMILLE) {
            self.let_guests_grow(number, &file);
        }
        (number, file)
    }

    /// Remembers the regions that are held now.
    fn note_regions(&self) {
        let mut known = self.regions.borrow_mut();
        for region in self.stock().regions() {
            if !known.iter().any(|other| Arc::ptr_eq(other, &region)) {
                known.push(region);
            }
        }
    }
}

/// What goes wrong in a world, apart from mishaps.
struct Ills {
    faults: Faults,
    delivery: Delivery,
    shaking: Shaking,
    /// Whether none of this can cost a lease or a node.
    harmless: bool,
}

impl Ills {
    /// Nothing goes wrong except mishaps.
    fn none() -> Self {
        let (faults, delivery) = (Faults::default(), Delivery::default());
        Ills { faults, delivery, shaking: Shaking::default(), harmless: true }
    }
}

/// Draws any subset of what can go wrong.
fn ills(mutation: Option<&'static str>, random: &mut Random) -> Ills {
    let mut some = |permille: u32| if random.chance(400) { permille } else { 0 };
    // With fewer late packets, this mutation would matter in too few worlds.
    let late_permille = if mutation == Some(LATE_FORGOTTEN) { 200 } else { some(40) };
    let faults = Faults {
        late_permille,
        late: Some(Span::new(1_000_000, 1_500_000_000)),
        stall_permille: some(10),
        stall: Some(Span::new(1_000_000, 300_000_000)),
        silent_permille: some(300),
        ..Faults::default()
    };
    let delivery = Delivery {
        lost_permille: some(80),
        doubled_permille: some(80),
        late_permille: some(60),
        late_ms: 12_000,
    };
    let lie = match mutation {
        Some(UNLOCKED_EARLY) => Some(Lie::DoneEarly),
        Some(LOST_WRITE) => Some(Lie::DoneNever(LOST_WRITE_PERMILLE)),
        _ => None,
    };
    let shaking = Shaking { break_permille: some(60), short_permille: some(100), lie, refusing: None };
    let harmless = delivery.lost_permille + delivery.late_permille == 0
        && faults.late_permille + faults.stall_permille + shaking.short_permille + shaking.break_permille
            == 0;
    Ills { faults, delivery, shaking, harmless }
}

fn world_of(seed: u64, trace: bool, faults: Faults) -> World {
    let network = Network {
        latency: Span::new(20_000, 4_000_000),
        local: Span::new(5_000, 500_000),
        parts: 4,
        gap: Span::new(200, 2_000_000),
        ..Network::default()
    };
    World::new(WorldConfig { network, faults, trace, ..WorldConfig::new(seed).with_operations_at_once() })
}

/// The rate of a clock that is up to 10 % off.
fn clock_rate(random: &mut Random) -> u64 {
    900_000 + random.below(200_001)
}

fn nodes_of(
    world: &World,
    own_host: HostId,
    is_redundant: bool,
    mutation: Option<&'static str>,
    random: &mut Random,
) -> Vec<Rc<Node>> {
    let count = if is_redundant { 3 + random.below(3) } else { 1 + random.below(4) };
    // Direct clients write only to nodes of this machine. Without such a node, few worlds would have direct
    // clients that make a file longer.
    let is_about_growth = matches!(mutation, Some(GROWTH_GOES_ON | UNTOLD));
    let node = |index| {
        let shares_host = index == 0 && (random.chance(500) || is_about_growth);
        let host = if shares_host { own_host } else { world.add_host(clock_rate(random)) };
        let service = if random.chance(500) { Service::Whole } else { Service::Torn };
        let regions = if is_redundant { 8 } else { 2 + random.below(3) as u32 };
        Rc::new(Node::new(NodeId(0xA0 + index), host, world.add_process(host), regions, service))
    };
    (0..count).map(node).collect()
}

fn run(seed: u64, mutation: Option<&'static str>, trace: bool) -> RunReport {
    mutation::set(mutation);
    let mut random = Random::new(seed, 30);
    let is_redundant = random.chance(worlds::REDUNDANT_PERMILLE) && mutation != Some(LATE_FORGOTTEN);
    // A separate stream of randomness, so that the worlds of existing seeds stay the same.
    let mut refusals = Random::new(seed, 33);
    let refuses = mutation.map_or(refusals.chance(REFUSING_PERMILLE), |broken| broken == REFUSED_IS_DEAD);
    let moves = worlds::is_about_moves(seed, mutation) && !refuses;
    let is_redundant = (is_redundant || moves) && !refuses;
    let Ills { faults, delivery, shaking, harmless } = match () {
        () if refuses || worlds::is_about_disks(mutation) => Ills::none(),
        () if moves => worlds::moving(mutation),
        () if is_redundant => worlds::survivable(mutation, &mut random),
        () => ills(mutation, &mut random),
    };
    let world = world_of(seed, trace, faults);
    let mut executor = Executor::new(world.clone());
    let host = world.add_host(clock_rate(&mut random));
    let home = world.add_process(host);
    let nodes = nodes_of(&world, host, is_redundant, mutation, &mut random);
    let broker_host = world.add_host(clock_rate(&mut random));
    let nowhere = world.add_process(world.add_host(1_000_000));
    let region_bytes = REGION_EXTENTS * EXTENT_BYTES;
    let config = PlaneConfig {
        seed,
        mutation,
        ttl: Millis(TTL_MS.start + random.below(TTL_MS.end - TTL_MS.start)),
        region_bytes,
        delivery,
        nodes,
        broker: Broker::new(broker_host, world.add_process(broker_host)),
        nowhere,
        faults_stream: 31,
    };
    let plane = Plane::new(world.clone(), executor.tasks(), config);
    let has_guests = random.chance(600);
    let is_about_owners = matches!(mutation, Some(FREES_UNWRITTEN | LOCKS_LEFT | LATE_FORGOTTEN))
        || worlds::is_about_kept_overflow(mutation);
    let limit_regions = (!is_redundant && random.chance(300)).then(|| 2 + random.below(5));
    let owner = OwnerId(plane.next_name());
    let legacy =
        (!has_guests && random.chance(700) || is_about_owners).then(|| Legacy::new(owner, limit_regions));
    let legacy = legacy.filter(|_| !worlds::is_about_disks(mutation));
    let has_guests = has_guests && legacy.is_none();
    let stock = successor::stock_of(&plane, host, owner, limit_regions, legacy.as_ref());
    let is_calm = harmless || is_redundant;
    let disk_kind = worlds::disk(seed, mutation, is_calm);
    let disk = disk_kind
        .map(|kind| Disk::new((&world, host), kind, mutation, Random::new(seed, 38), legacy.is_some()));
    let stock = Arc::new(successor::with_disk(stock, disk.as_ref()));
    let store = match &legacy {
        Some(legacy) => StoreCore::keeping(stock.clone(), legacy.words()),
        None => StoreCore::new(stock.clone()),
    };
    let mut mishaps = match () {
        () if worlds::is_about_disks(mutation) => Vec::new(),
        () if refuses => nemesis::draw_refusals(&plane, &mut refusals),
        () if moves => nemesis::draw_moves(&plane, &mut random),
        () if is_redundant => nemesis::draw_survivable(&plane, &mut random),
        () => nemesis::draw(&plane, &mut random),
    };
    if legacy.is_some() && !refuses {
        mishaps.extend(nemesis::draw_deaths_of_the_owner(&plane, is_redundant, &mut random));
    }
    nemesis::delay_to_moves(&mut mishaps, &mut Random::new(seed, 36));
    let owner_dies = mishaps.iter().any(nemesis::Mishap::is_of_the_owner);
    let flips = mishaps.iter().any(nemesis::Mishap::is_a_flip);
    let run = Rc::new(Run {
        store: RefCell::new(Arc::new(store.expect("a table of words"))),
        stock: RefCell::new(stock),
        legacy,
        plane,
        host,
        home: Cell::new(home),
        files: RefCell::default(),
        files_made: Cell::new(0),
        redundancies: RefCell::default(),
        drawing: RefCell::new(Random::new(seed, 32)),
        history: Rc::default(),
        shaking: Rc::new(Cell::new(shaking)),
        phase: Cell::new(Phase::Busy),
        clients: RefCell::default(),
        successors_wanted: Cell::new(0),
        has_guests,
        sizes: RefCell::default(),
        closed: RefCell::default(),
        shut: RefCell::default(),
        at_work: Cell::new(0),
        mishaps: Cell::new(0),
        excuses: Excuses {
            calm: harmless && mishaps.is_empty(),
            short: shaking.short_permille > 0,
            survivable: is_redundant,
            flips,
            owner_dies,
            stores_succeed: moves && !owner_dies,
            never_full: disk_kind.is_some_and(|kind| kind.regions.is_none()),
        },
        refuses,
        moves,
        moving: Rc::default(),
        flipped: RefCell::default(),
        disk,
        regions: RefCell::default(),
        has_left: Cell::new(false),
    });
    for _ in 0..FILES {
        let file = run.fresh_file();
        run.files.borrow_mut().push(file);
    }
    let asked = Rc::downgrade(&run);
    *run.trusting.borrow_mut() = Some(Box::new(move |region, epoch, _| {
        let Some(run) = asked.upgrade() else { return Vec::new() };
        let trusts = |held: &Arc<LeasedRegion>| {
            held.id == region && held.epoch == epoch && held.check(run.stock().now().0).is_ok()
        };
        if run.stock().regions().iter().any(trusts) { vec![run.home().number()] } else { Vec::new() }
    }));
    run.plane.start();
    keeper::start(&run);
    (0..1 + random.below(3)).for_each(|_| client::start(&run));
    nemesis::start(&run, mishaps);
    inspector::start(&run);
    run.tasks.spawn(nowhere, conduct::conduct(run.clone()));
    let end = executor.run(RUN_NS);
    if end != RunEnd::Finished {
        run.complain(format!("a task hangs: {end:?} with {} clients at work", run.at_work.get()));
    }
    drop(executor);
    run.disk.iter().for_each(|disk| disk.clear());
    report(&run)
}

fn report(run: &Run) -> RunReport {
    let operations = run.history.len();
    let (mut violations, judged) = run.oracle.take().verdict();
    violations.extend(judge::judge(&run.history.take(), run.excuses, &run.redundancies.borrow()));
    let operations = operations + judged;
    RunReport { seed: run.seed, violations, operations, ..RunReport::of_world(&run.world) }
}
