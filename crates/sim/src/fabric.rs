//! `sim fabric`: clients, queues, regions and grants on the simulated fabric, with faults. The judge checks
//! what the fabric's contract promises (`docs/src/fabric.md`).

mod client;
mod director;
mod history;
mod judge;
mod layout;
mod nemesis;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::{
    Executor, Faults, Mutation, Network, Path, ProcessId, Random, Service, Span, Tasks, World, WorldConfig,
};

use crate::place::ClientPlace;
use crate::runner::{RunReport, Scenario, run_to_end};
use crate::staying::Left;
use director::{Board, FabricNode};
use history::History;

/// The scenario of the fabric.
pub const FABRIC: Scenario = Scenario { name: "fabric", mutations: MUTATIONS, run };

const NO_FENCE: &str = "no-fence";
const NO_SCRUB: &str = "no-scrub";
const EPOCH_WORD: &str = "epoch-word-not-checked-after-copy";
const OLD_INCARNATION: &str = "old-incarnation-still-applied";
const DUPLICATE: &str = "duplicate-completion";
const FENCE_FLAG: &str = "fence-flag-ignored";
const TORN_COPY: &str = "reader-trusts-torn-copy";
const MUTATIONS: &[&str] =
    &[NO_FENCE, NO_SCRUB, EPOCH_WORD, OLD_INCARNATION, DUPLICATE, FENCE_FLAG, TORN_COPY];

/// Far longer than any run takes: a run that has not finished by then hangs.
const RUN_NS: u64 = 1_000_000_000;
/// The time from the posting of an operation until its outcome counts as *unknown*, by the client's clock.
const DEADLINE: Duration = Duration::from_micros(100);
/// Operations or batches of each client task.
const ROUNDS: u64 = 22;

/// State that all parts of one run share.
struct Run {
    world: World,
    tasks: Tasks,
    seed: u64,
    mutation: Option<&'static str>,
    history: RefCell<History>,
    board: RefCell<Board>,
    nodes: Vec<Rc<FabricNode>>,
    /// The current process of each client.
    clients: RefCell<Vec<ProcessId>>,
    /// Client tasks that have not finished. When there are none left, the nodes stop lending.
    left: Left,
    /// A counter that names clients' streams of randomness, and sessions.
    names: RefCell<u64>,
}

impl Run {
    fn random(&self, stream: u64) -> Random {
        Random::new(self.seed, stream)
    }

    fn next_name(&self) -> u64 {
        *self.names.borrow_mut() += 1;
        *self.names.borrow()
    }

    fn is_broken(&self, mutation: &str) -> bool {
        self.mutation == Some(mutation)
    }

    fn has_ended(&self) -> bool {
        self.left.get() == 0
    }

    fn complain(&self, what: String) {
        self.world.note("violation", &[]);
        self.history.borrow_mut().complain(what);
    }
}

/// The world of a seed. Each seed has a random subset of faults, so that some seeds test each fault alone.
fn world_of(seed: u64, mutation: Option<&'static str>, trace: bool, random: &mut Random) -> World {
    let mut some = |permille: u32| if random.chance(600) { permille } else { 0 };
    let faults = Faults {
        late_permille: some(35),
        late: Some(Span::new(60_000, 400_000)),
        stall_permille: some(25),
        stall: Some(Span::new(2_000, 300_000)),
        lost_permille: 0,
        duplicated_permille: 0,
        silent_permille: some(300),
    };
    let mutation = match mutation {
        Some(EPOCH_WORD) => Some(Mutation::EpochWordNotCheckedAfterCopy),
        Some(OLD_INCARNATION) => Some(Mutation::OldIncarnationStillApplied),
        Some(DUPLICATE) => Some(Mutation::DuplicateCompletion),
        Some(FENCE_FLAG) => Some(Mutation::FenceFlagIgnored),
        _ => None,
    };
    World::new(WorldConfig {
        network: Network::default(),
        faults,
        mutation,
        trace,
        ..WorldConfig::new(seed).with_operations_at_once()
    })
}

/// The rate of a clock that is up to 10 % off.
fn clock_rate(random: &mut Random) -> u64 {
    900_000 + random.below(200_001)
}

fn run(seed: u64, mutation: Option<&'static str>, trace: bool) -> RunReport {
    let mut random = Random::new(seed, 10);
    let world = world_of(seed, mutation, trace, &mut random);
    let executor = Executor::new(world.clone());
    let tasks = executor.tasks();
    let nodes: Vec<Rc<FabricNode>> = (0..1 + random.below(2))
        .map(|index| {
            let host = world.add_host(clock_rate(&mut random));
            let service = if random.chance(500) { Service::Whole } else { Service::Torn };
            Rc::new(FabricNode::new(index, host, service, world.add_process(host)))
        })
        .collect();
    let places = places(&world, &nodes, &mut random);
    let nowhere = world.add_process(world.add_host(1_000_000));
    let run = Rc::new(Run {
        world: world.clone(),
        tasks,
        seed,
        mutation,
        history: RefCell::new(History::new(places.len())),
        board: RefCell::new(Board::new(places.len())),
        nodes,
        clients: RefCell::new(vec![nowhere; places.len()]),
        left: Left::default(),
        names: RefCell::new(1_000),
    });
    for node in &run.nodes {
        director::start(&run, node);
    }
    for &place in &places {
        client::start(&run, place, false);
    }
    nemesis::start(&run, &places, &mut random);
    let (panicked, failure) = run_to_end(executor, RUN_NS, || run.left.get());
    failure.into_iter().for_each(|what| run.complain(what));
    let history = run.history.take();
    let operations = history.operations();
    let violations = judge::judge(history);
    RunReport { seed, panicked, violations, operations, ..RunReport::of_world(&world) }
}

/// Two to four clients. Some are on a node's host and access its memory directly; the others use the network.
fn places(world: &World, nodes: &[Rc<FabricNode>], random: &mut Random) -> Vec<ClientPlace> {
    let count = 2 + random.below(3) as usize;
    (0..count)
        .map(|index| {
            if random.chance(450) {
                ClientPlace { index, host: nodes[random.index(nodes.len())].host, path: Path::Shared }
            } else {
                ClientPlace { index, host: world.add_host(clock_rate(random)), path: Path::Checked }
            }
        })
        .collect()
}

/// A new process for a client, at its start and after each crash.
fn new_process(run: &Run, place: ClientPlace) -> ProcessId {
    run.world.add_process(place.host)
}
