//! `sim pool`: brokers, nodes, owners and their clients, with everything that can go wrong between them. The
//! oracle checks what leases promise (`docs/src/leases.md`).

mod client;
mod conduct;
mod nemesis;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::Deref;
use std::rc::Rc;

use farpool_fabric::sim::{Executor, Faults, Network, Random, RunEnd, Service, Span, World, WorldConfig};
use farpool_lease::{LeaseClass, Millis};
use farpool_wire::{Epoch, NodeId, RegionId};

use crate::plane::broker::Broker;
use crate::plane::node::Node;
use crate::plane::post::Delivery;
use crate::plane::{
    EPOCH_REUSED, Ending, FORGETFUL_BROKER, KEPT_GRANT, KEPT_MEMORY, LASTING_PRESSURE, LATE_REVOCATION,
    NOT_PUSHED, Plane, PlaneConfig, TWO_AT_ONCE, UNCLEARED_MEMORY, UNCOUNTED_RENEWAL, UNFENCED_GRANT,
    UNNOTICED_PRESSURE,
};
use crate::runner::{RunReport, Scenario};
use client::{Client, Seat};
use nemesis::Participant;

/// The scenario of leases.
pub const POOL: Scenario = Scenario { name: "pool", mutations: MUTATIONS, run };

const TRUSTING_CLIENT: &str = "client-trusts-its-lease-past-its-own-clock";
const MUTATIONS: &[&str] = &[
    TRUSTING_CLIENT,
    FORGETFUL_BROKER,
    EPOCH_REUSED,
    UNFENCED_GRANT,
    UNCOUNTED_RENEWAL,
    LATE_REVOCATION,
    KEPT_GRANT,
    UNCLEARED_MEMORY,
    KEPT_MEMORY,
    UNNOTICED_PRESSURE,
    LASTING_PRESSURE,
    NOT_PUSHED,
    TWO_AT_ONCE,
];

/// The duration of a lease, in milliseconds: shorter than in production, so that more leases end in a run.
const TTL_MS: std::ops::Range<u64> = 3_000..8_000;
/// The length of the busy phase, in which most things go wrong, in durations of a lease.
const BUSY_TTLS: u64 = 6;
/// Far longer than any run takes: a run that has not finished by then hangs.
const RUN_NS: u64 = 600_000_000_000;
/// The number of words of a region that are used, and the size of a word.
const WORDS: u64 = 48;
const WORD_BYTES: u64 = 8;
/// Size of a region: one page.
const REGION_BYTES: u64 = 4096;
/// Regions of each node.
const REGIONS: std::ops::Range<u64> = 1..4;

/// The phases of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Clients lease regions, give grants and release leases; faults occur.
    Busy,
    /// Clients only renew, read and write.
    Quiet,
    /// Clients give everything back.
    Leaving,
}

/// State that all parts of one run share.
struct Run {
    plane: Rc<Plane>,
    words: Cell<u64>,
    seats: Vec<Rc<Seat>>,
    /// The current client at each seat.
    clients: RefCell<Vec<Option<Rc<Client>>>>,
    phase: Cell<Phase>,
    /// Participants that are about to die, or are dead and about to be restarted.
    dying: RefCell<BTreeSet<Participant>>,
    /// Mishaps in progress. The busy phase ends only when there are none.
    mishaps: Cell<u32>,
}

impl Deref for Run {
    type Target = Plane;

    fn deref(&self) -> &Plane {
        &self.plane
    }
}

impl Run {
    /// The next word, which only one process writes.
    fn next_word(&self) -> u64 {
        let word = self.words.get();
        assert!(word < WORDS, "more processes than words");
        self.words.set(word + 1);
        word
    }

    fn client(&self, seat: usize) -> Option<Rc<Client>> {
        self.clients.borrow()[seat].clone()
    }

    /// The processes that would use a region now under this lease.
    fn trusting_processes(&self, region: RegionId, epoch: Epoch, ending: Ending) -> Vec<u64> {
        let lease = self.oracle.borrow().lease_of(region, epoch);
        let trusts = |client: &&Rc<Client>| {
            client.trusts(region, epoch)
                || ending == Ending::Expired && lease.is_some_and(|lease| client.is_told_to_use(lease))
        };
        let clients = self.clients.borrow();
        let alive = clients.iter().flatten().filter(|client| self.world.is_alive(client.process));
        alive.filter(trusts).map(|client| client.process.number()).collect()
    }
}

/// The world of a seed, with any subset of faults.
fn world_of(seed: u64, trace: bool, random: &mut Random) -> (World, Delivery) {
    let mut some = |permille: u32| if random.chance(500) { permille } else { 0 };
    let faults = Faults {
        late_permille: some(20),
        late: Some(Span::new(1_000_000, 4_000_000_000)),
        stall_permille: some(20),
        stall: Some(Span::new(1_000_000, 500_000_000)),
        silent_permille: some(300),
        ..Faults::default()
    };
    let delivery = Delivery {
        lost_permille: some(80),
        doubled_permille: some(80),
        late_permille: some(60),
        late_ms: 12_000,
    };
    // Slow enough that something can happen while a message is in transit.
    let network = Network {
        latency: Span::new(100_000, 20_000_000),
        local: Span::new(10_000, 2_000_000),
        parts: 3,
        ..Network::default()
    };
    (
        World::new(WorldConfig {
            network,
            faults,
            trace,
            ..WorldConfig::new(seed).with_operations_at_once()
        }),
        delivery,
    )
}

/// The rate of a clock that is up to 10 % off.
fn clock_rate(random: &mut Random) -> u64 {
    900_000 + random.below(200_001)
}

fn nodes_of(world: &World, random: &mut Random) -> Vec<Rc<Node>> {
    let count = 1 + random.below(3);
    let node = |index| {
        let host = world.add_host(clock_rate(random));
        let service = if random.chance(700) { Service::Whole } else { Service::Torn };
        let regions = REGIONS.start + random.below(REGIONS.end - REGIONS.start);
        let process = world.add_process(host);
        Rc::new(Node::new(NodeId(0xA0 + index), host, process, regions as u32, service))
    };
    (0..count).map(node).collect()
}

/// Owners with one or two clients each: the first client leases, the second uses the grants that it is given.
fn seats_of(world: &World, nodes: &[Rc<Node>], random: &mut Random) -> Vec<Rc<Seat>> {
    let mut seats = Vec::new();
    for _ in 0..2 + random.below(2) {
        let mut host = || match random.chance(350) {
            true => nodes[random.index(nodes.len())].host,
            false => world.add_host(clock_rate(random)),
        };
        let (own, other) = (host(), host());
        let index = seats.len();
        let wants = 1 + random.below(3) as usize;
        let class = if random.chance(300) { LeaseClass::Pinned } else { LeaseClass::Revocable };
        let guests: Vec<usize> = if random.chance(600) { vec![index + 1] } else { Vec::new() };
        let has_guest = !guests.is_empty();
        let stays = random.chance(500);
        seats.push(Rc::new(Seat { index, host: own, wants, class, guests, stays, asks: false }));
        if has_guest {
            let (guests, asks) = (Vec::new(), random.chance(700));
            seats.push(Rc::new(Seat { index: index + 1, host: other, wants: 0, class, guests, stays, asks }));
        }
    }
    seats
}

fn run(seed: u64, mutation: Option<&'static str>, trace: bool) -> RunReport {
    let mut random = Random::new(seed, 20);
    let (world, delivery) = world_of(seed, trace, &mut random);
    let mut executor = Executor::new(world.clone());
    let nodes = nodes_of(&world, &mut random);
    let seats = seats_of(&world, &nodes, &mut random);
    let broker_host =
        if random.chance(300) { nodes[0].host } else { world.add_host(clock_rate(&mut random)) };
    let nowhere = world.add_process(world.add_host(1_000_000));
    let config = PlaneConfig {
        seed,
        mutation,
        ttl: Millis(TTL_MS.start + random.below(TTL_MS.end - TTL_MS.start)),
        region_bytes: REGION_BYTES,
        delivery,
        nodes,
        broker: Broker::new(broker_host, world.add_process(broker_host)),
        nowhere,
        faults_stream: 21,
    };
    let run = Rc::new(Run {
        plane: Plane::new(world.clone(), executor.tasks(), config),
        clients: RefCell::new(seats.iter().map(|_| None).collect()),
        seats,
        phase: Cell::new(Phase::Busy),
        words: Cell::new(0),
        dying: RefCell::default(),
        mishaps: Cell::new(0),
    });
    let asked = Rc::downgrade(&run);
    let trusting_processes = move |region, epoch, ending| {
        asked.upgrade().map_or(Vec::new(), |run| run.trusting_processes(region, epoch, ending))
    };
    *run.trusting.borrow_mut() = Some(Box::new(trusting_processes));
    run.plane.start();
    for seat in &run.seats {
        client::start(&run, seat);
    }
    nemesis::start(&run, &mut random);
    run.tasks.spawn(nowhere, conduct::conduct(run.clone()));
    let end = executor.run(RUN_NS);
    if end != RunEnd::Finished {
        run.complain(format!("a task hangs: {end:?}"));
    }
    drop(executor);
    run.clients.borrow_mut().clear(); // breaks the cycle of references between run and clients
    let (violations, operations) = run.oracle.take().verdict();
    RunReport { seed, violations, operations, ..RunReport::of_world(&world) }
}
