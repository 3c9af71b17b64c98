//! `sim members`: compute servers of one database. They take seats, recover each other, fill the roles that
//! one member performs for all, and run transactions (`docs/src/txn.md`, *members*). They die, stop, are cut
//! off, leave, and are declared dead while they live. A recoverer may die as well.

mod auditor;
mod bank;
mod broken;
mod client;
mod indexed;
mod member;
mod nemesis;
mod observer;
mod surroundings;
mod tables;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::{
    Executor, Faults, HostId, Network, Path, ProcessId, Random, Service, Span, Tasks, World, WorldConfig,
};
use farpool_fabric::{Endpoint, EndpointConfig, Scrubbed};
use farpool_namdb::{Ended, TxError};
use farpool_pool::GrantError;
use farpool_txn::judge::judge;
use farpool_txn::{DatabaseLayout, DatabaseShape, Limits};
use farpool_wire::{Epoch, NodeId, RegionId, SessionId};
use rustix_futex_sync::Mutex;

use crate::lending::{LendingHost, LendingNode, key_of};
use crate::mutation;
use crate::runner::{RunReport, Scenario, run_to_end};
use crate::staying::Left;
use crate::transacting::Ledger;
use bank::Bank;
use member::Member;
use nemesis::FaultKinds;
use observer::{Observer, Watched};

/// The scenario of members.
pub const MEMBERS: Scenario = Scenario { name: "members", mutations: broken::MUTATIONS, run };

/// Far longer than any run takes: a task that has not ended by then hangs.
const RUN_NS: u64 = 500_000_000;
/// From the posting of an operation until its outcome counts as *unknown*: no operation here takes so long.
const DEADLINE: Duration = Duration::from_millis(20);
/// The same where connections break: some operations of members take longer.
const SHORT_DEADLINE: Duration = Duration::from_micros(250);
/// Heartbeat timeouts (called *patience* in the code): so short that a slow network alone can exceed some of
/// them.
const PATIENCES: [Duration; 3] =
    [Duration::from_micros(150), Duration::from_micros(300), Duration::from_micros(600)];
/// The heartbeat timeout in runs without faults, in which no heartbeat is that late.
const CALM_PATIENCE: Duration = Duration::from_micros(600);
/// The longest part of a move of a region's memory before its fence, and again after it.
const MOST_MOVE_NS: u64 = 40_000;
/// Fences, in thousandths, that a broker or a node fails to execute.
const FENCES_LOST_PERMILLE: u32 = 40;
/// Pause between two checks whether a grant is fenced.
const FENCE_PAUSE: Duration = Duration::from_micros(2);
/// Small limits. There are names for all tables of a run. Tombstones may run out while old snapshots are
/// open; then tables cannot be dropped.
const LIMITS: Limits = Limits { clients: 6, names: 16, tombstones: 2, later_regions: 3 };
const REGION_BYTES: u64 = 512 << 10;
/// Regions of each node that the database may get later.
const SPARE_EACH: u32 = 2;
/// Thousandths of the runs in which the database soon needs these.
const TIGHT_PERMILLE: u32 = 300;
/// Bytes for the intents of a log: room for some changes of the catalog.
const LOG_BYTES: u64 = 32 << 10;
const ARENA_BYTES: usize = 32 * 4096;
/// The grant of the lessee of the regions. No process of a run has it.
const OWNER: Epoch = Epoch(7);

/// What all parts of one run share.
struct Run {
    ledger: Rc<Ledger>,
    world: World,
    tasks: Tasks,
    /// A process for actions that belong to no process of the run.
    nowhere: ProcessId,
    nodes: Vec<LendingNode>,
    layout: DatabaseLayout,
    /// Regions that the pool can lend to the database.
    spare: RefCell<Vec<RegionId>>,
    /// Those that it has lent, with the epochs of their leases.
    lent: RefCell<BTreeMap<RegionId, Epoch>>,
    /// The database has little memory: tables that grow need more of it.
    is_tight: bool,
    patience: Duration,
    faults: FaultKinds,
    observer: Arc<Mutex<Observer>>,
    /// All members that have had a seat.
    members: RefCell<Vec<Rc<Member>>>,
    /// Drivers and mishaps that have not ended.
    left: Left,
    /// For each host of a member, the number of nodes from which it is cut off now.
    cuts: RefCell<BTreeMap<HostId, u32>>,
    /// What the sessions of the bank did.
    bank: Bank,
    /// No more faults occur.
    is_quiet: Cell<bool>,
    /// The auditor has finished.
    has_ended: Cell<bool>,
}

impl Run {
    fn node_of(&self, region: RegionId) -> &LendingNode {
        &self.nodes[region.node.0 as usize - 1]
    }

    /// The pool lends up to so many regions to the database.
    fn lend(&self, most: usize) -> Vec<(RegionId, Epoch)> {
        let mut spare = self.spare.borrow_mut();
        let leased = spare.len().min(most);
        let lent: Vec<_> = spare
            .drain(..leased)
            .map(|region| (region, Epoch(100 + self.ledger.notes.next_name())))
            .collect();
        self.lent.borrow_mut().extend(lent.iter().copied());
        lent
    }

    /// Whether the database has this lease.
    fn is_lent(&self, (region, epoch): (RegionId, Epoch)) -> bool {
        self.lent.borrow().get(&region) == Some(&epoch)
    }

    /// The pool takes a region back, if the database has this lease of it: no member may hold that any more.
    /// It is cleared before it is lent again.
    fn take_back(&self, lease: (RegionId, Epoch)) {
        if !self.is_lent(lease) {
            return; // a member that has died was first
        }
        let (region, _) = lease;
        self.lent.borrow_mut().remove(&region);
        for member in self.members.borrow().iter().filter(|member| member.lives()) {
            if member.core.environment().holds(lease) {
                let claim = member.claim();
                self.ledger
                    .notes
                    .complain(format!("region {region} is given back, but member {claim} holds it"));
            }
        }
        let regions = &self.node_of(region).memory.regions;
        regions.fence(region.index);
        let scrubbed = regions.scrub(region.index);
        assert!(matches!(scrubbed, Ok(Scrubbed::Clean)), "{scrubbed:?}: no process has its memory");
        regions.open(region.index, OWNER, key_of(OWNER));
        self.spare.borrow_mut().push(region);
    }

    /// Draws the number of a judged record.
    fn draw_record(&self, random: &mut Random, records: &farpool_txn::Table) -> u64 {
        let numbers: Vec<u64> = tables::numbers(records).collect();
        numbers[random.index(numbers.len())]
    }

    /// Notes that a client of a member ends because of an error. Complains if the error must never happen
    /// here.
    fn cannot_go_on(&self, member: &Member, why: &TxError) {
        self.world.note("a client of member {} ends", &[member.claim().0]);
        let never_happens = matches!(why, TxError::SnapshotTooOld | TxError::Damaged(_));
        if never_happens || !self.faults.are_any() {
            self.ledger.notes.complain(format!("a client of member {} cannot go on: {why}", member.claim()));
        }
    }

    /// Whether a host is cut off from a node.
    fn is_cut_off(&self, host: HostId) -> bool {
        self.cuts.borrow().get(&host).is_some_and(|&nodes| nodes > 0)
    }

    fn are_any_cut_off(&self) -> bool {
        self.cuts.borrow().values().any(|&nodes| nodes > 0)
    }

    /// Fences a grant: once this returns without an error, no operation under the grant takes effect. The
    /// fence is executed even if the process that asked for it dies.
    async fn fence(
        self: &Rc<Self>,
        region: RegionId,
        grant: Epoch,
        random: &mut Random,
    ) -> Result<(), GrantError> {
        let is_done: Rc<Cell<Option<Result<(), GrantError>>>> = Rc::default();
        let (run, done, mut random) = (self.clone(), is_done.clone(), Random::new(random.bits(), 1));
        self.tasks.spawn(self.nowhere, async move {
            done.set(Some(run.carry_out_fence(region, grant, &mut random).await));
        });
        loop {
            if let Some(fenced) = is_done.take() {
                return fenced;
            }
            self.world.sleep(FENCE_PAUSE).await;
        }
    }

    async fn carry_out_fence(
        &self,
        region: RegionId,
        grant: Epoch,
        random: &mut Random,
    ) -> Result<(), GrantError> {
        // The fence comes before recently sent operations arrive, or long after.
        let apart_ns = match random.below(10) {
            0..=3 => 100,
            4..=7 => 20_000,
            _ => 150_000,
        };
        self.world.sleep(Duration::from_nanos(random.below(apart_ns))).await;
        if self.faults.are_any() && !self.is_quiet.get() && random.chance(FENCES_LOST_PERMILLE) {
            return Err(GrantError::NoAnswer { node: region.node, reason: "the fence was lost".to_owned() });
        }
        let node = self.node_of(region);
        let takes_time = self.faults.moves_take_time && node.is_whole && random.chance(300);
        if takes_time {
            node.memory.begin_move(region.index);
            self.world.sleep(Duration::from_nanos(random.below(MOST_MOVE_NS))).await;
        }
        node.memory.regions.fence_grant(region.index, grant).expect("a few pages of memory");
        self.world.note("grant {} is fenced", &[grant.0]);
        if takes_time {
            self.world.sleep(Duration::from_nanos(random.below(MOST_MOVE_NS))).await;
            node.memory.end_move(region.index);
        }
        Ok(())
    }

    /// An endpoint of a process.
    fn endpoint(&self, process: ProcessId, (host, path): (HostId, Path)) -> Endpoint {
        let ledger = self.ledger.clone();
        let endpoint = Endpoint::new(EndpointConfig {
            transport: self.world.transport(process, path),
            clock: Rc::new(self.world.clock(host)),
            session_ids: Box::new(move || SessionId(ledger.notes.next_name())),
            arena_bytes: ARENA_BYTES,
            deadline: if self.faults.cuts && !self.is_quiet.get() { SHORT_DEADLINE } else { DEADLINE },
        });
        self.tasks.adopt(process, endpoint.clone());
        endpoint
    }

    /// Draws where a process lives: with the memory of a single node mapped, or across the network.
    fn place(&self, random: &mut Random) -> (HostId, Path) {
        if self.nodes.len() == 1 && self.faults.are_any() && random.chance(300) {
            (self.nodes[0].host, Path::Shared)
        } else {
            (self.world.add_host(950_000 + random.below(100_000)), Path::Checked)
        }
    }
}

fn run(seed: u64, mutation: Option<&'static str>, trace: bool) -> RunReport {
    mutation::set(mutation);
    let mut random = Random::new(seed, 10);
    let faults = FaultKinds::draw(&mut random);
    let world = world_of(seed, trace, faults, &mut random);
    let executor = Executor::new(world.clone());
    let run = Rc::new(setting(world.clone(), executor.tasks(), seed, faults, &mut random));
    member::start_drivers(&run, &mut random);
    nemesis::start(&run, &mut random);
    nemesis::start_disconnects(&run, &mut Random::new(seed, 11));
    auditor::start(&run);
    let (panicked, failure) = run_to_end(executor, RUN_NS, || run.left.get());
    failure.into_iter().for_each(|what| run.ledger.notes.complain(what));
    if !faults.are_any() {
        let ended = run.members.borrow().iter().map(|member| member.core.end_reason()).collect::<Vec<_>>();
        let failed = ended.into_iter().filter(|why| *why != Ended::Closed);
        failed.for_each(|why| {
            run.ledger.notes.complain(format!("a member ended, though nothing fails here: {why}"))
        });
        let seats = run.observer.lock().look().seats(&run.layout);
        let left = seats.iter().filter(|seat| seat.claim.is_some()).count();
        if left > 0 {
            run.ledger
                .notes
                .complain(format!("{left} members keep their seats at the end, though nothing fails here"));
        }
    }
    // Members and the run refer to each other. Without this no member would ever be dropped, and the file
    // descriptors of the world's memory would stay open.
    drop(run.members.take());
    let history = run.ledger.history.take();
    let mut violations = run.ledger.notes.complaints.take();
    violations.append(&mut run.observer.lock().complaints);
    violations.extend(judge(&history).err().map(|violation| violation.to_string()));
    let operations = history.len() as u64;
    RunReport { seed, panicked, violations, operations, ..RunReport::of_world(&world) }
}

fn world_of(seed: u64, trace: bool, kinds: FaultKinds, random: &mut Random) -> World {
    let mut some = |permille: u32| if kinds.are_any() && random.chance(600) { permille } else { 0 };
    let faults = Faults {
        late_permille: some(25),
        late: Some(Span::new(10_000, 200_000)),
        stall_permille: some(15),
        stall: Some(Span::new(2_000, 200_000)),
        ..Faults::default()
    };
    World::new(WorldConfig {
        network: Network::default(),
        faults,
        trace,
        ..WorldConfig::new(seed).with_operations_at_once()
    })
}

/// One or two nodes with a database that no process has opened yet.
fn setting(world: World, tasks: Tasks, seed: u64, faults: FaultKinds, random: &mut Random) -> Run {
    let count = 1 + random.below(2);
    let layout = draw_layout(count, random);
    let own = layout.regions.iter().map(|region| region.index + 1).max().expect("there is a root");
    let regions = own + SPARE_EACH;
    let spare = (own..regions).flat_map(|index| (1..=count).map(move |node| (NodeId(node), index)));
    let spare: Vec<_> = spare.map(|(node, index)| RegionId { node, index }).collect();
    let memories: Vec<Arc<LendingHost>> = (1..=count)
        .map(|node| {
            let memory = Arc::new(LendingHost::new(NodeId(node), regions, REGION_BYTES));
            (0..regions).for_each(|region| memory.open(region, OWNER, key_of(OWNER)));
            memory
        })
        .collect();
    let observer = Arc::new(Mutex::new(Observer::new(layout.clone(), memories.clone())));
    let nodes = memories.into_iter().map(|memory| {
        let host = world.add_host(1_000_000);
        let is_whole = random.chance(400);
        let service = if is_whole { Service::Whole } else { Service::Torn };
        let watched = Watched { memory: memory.clone(), observer: observer.clone() };
        let peer = world.serve(host, Arc::new(watched), service);
        LendingNode { host, peer, memory, is_whole }
    });
    let nodes = nodes.collect();
    let patience = if faults.are_any() { PATIENCES[random.index(PATIENCES.len())] } else { CALM_PATIENCE };
    Run {
        ledger: Ledger::new(world.clone(), seed),
        nowhere: world.add_process(world.add_host(1_000_000)),
        world,
        tasks,
        nodes,
        layout,
        spare: RefCell::new(spare),
        lent: RefCell::default(),
        is_tight: Random::new(seed, 12).chance(TIGHT_PERMILLE),
        patience,
        faults,
        observer,
        members: RefCell::default(),
        left: Left::default(),
        cuts: RefCell::default(),
        bank: Bank::default(),
        is_quiet: Cell::new(false),
        has_ended: Cell::new(false),
    }
}

/// The root on the first node, and one to three other regions on all of them.
fn draw_layout(nodes: u64, random: &mut Random) -> DatabaseLayout {
    let others = 1 + random.below(3);
    let region = |number: u64| RegionId { node: NodeId(1 + number % nodes), index: (number / nodes) as u32 };
    let regions = (0..=others).map(region).collect();
    let (slots, partitions) = (2 + random.below(3) as u16, 1 + random.below(2) as u16);
    let shape = DatabaseShape { slots, partitions, log_bytes: LOG_BYTES, region_bytes: REGION_BYTES };
    DatabaseLayout::new(shape, LIMITS, regions).expect("regions that are large enough")
}
