//! The control plane of a simulated world: nodes and a broker (the real cores in simulated shells), messages
//! between processes (called *letters* in the code), and an oracle that sees what nodes lend. Each scenario
//! adds its own clients.

pub(crate) mod broker;
pub(crate) mod node;
pub(crate) mod oracle;
pub(crate) mod post;
mod promises;
pub(crate) mod shell;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use farpool_fabric::Peer;
use farpool_fabric::sim::{ProcessId, Random, Tasks, World};
use farpool_lease::Millis;
use farpool_wire::{AccessKey, Epoch, NodeId, RegionId};

use broker::Broker;
use node::Node;
use oracle::Oracle;
use post::{Delivery, Doom};

pub(crate) const FORGETFUL_BROKER: &str = "new-broker-forgets-what-a-node-holds";
pub(crate) const EPOCH_REUSED: &str = "epoch-reused-after-restart";
pub(crate) const UNFENCED_GRANT: &str = "region-lent-before-the-last-grant-is-gone";
pub(crate) const UNCOUNTED_RENEWAL: &str = "node-answers-a-renewal-it-does-not-count";
pub(crate) const LATE_REVOCATION: &str = "revoked-lease-outlives-its-grace";
pub(crate) const UNCLEARED_MEMORY: &str = "withdrawn-memory-lent-again-uncleared";
pub(crate) const KEPT_MEMORY: &str = "resized-node-keeps-its-memory";
pub(crate) const UNNOTICED_PRESSURE: &str = "node-under-pressure-keeps-its-memory";
pub(crate) const LASTING_PRESSURE: &str = "node-lends-no-more-after-pressure";
pub(crate) const NOT_PUSHED: &str = "revocation-not-announced";
pub(crate) const TWO_AT_ONCE: &str = "leases-taken-back-on-two-nodes-at-once";
pub(crate) const KEPT_GRANT: &str = "fenced-grant-stays-in-the-table";

/// How a lease ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ending {
    /// Its owner gives it back, and need not ask the clients that it has let in.
    Released,
    /// Its time has passed. All clients have stopped by then.
    Expired,
}

/// Lists the processes that would use a region now under a lease that ends in this way.
type TrustingProcesses = Box<dyn Fn(RegionId, Epoch, Ending) -> Vec<u64>>;

/// State that all parts of the control plane share.
pub(crate) struct Plane {
    pub(crate) world: World,
    pub(crate) tasks: Tasks,
    pub(crate) seed: u64,
    pub(crate) mutation: Option<&'static str>,
    pub(crate) ttl: Millis,
    pub(crate) region_bytes: u64,
    pub(crate) delivery: Cell<Delivery>,
    pub(crate) oracle: RefCell<Oracle>,
    pub(crate) nodes: Vec<Rc<Node>>,
    pub(crate) broker: Broker,
    /// A counter that names questions, owners, sessions and streams of randomness.
    pub(crate) names: Cell<u64>,
    pub(crate) faults_random: RefCell<Random>,
    pub(crate) doomed: RefCell<BTreeMap<ProcessId, Doom>>,
    /// Letters that are being delayed.
    pub(crate) late_letters: Cell<u32>,
    /// A process on a host of its own, for tasks that belong to no participant.
    pub(crate) nowhere: ProcessId,
    /// Called when a lease ends. Without it, no process counts as trusting a lease.
    pub(crate) trusting: RefCell<Option<TrustingProcesses>>,
}

/// What a scenario decides about its control plane.
pub(crate) struct PlaneConfig {
    pub(crate) seed: u64,
    pub(crate) mutation: Option<&'static str>,
    pub(crate) ttl: Millis,
    pub(crate) region_bytes: u64,
    pub(crate) delivery: Delivery,
    pub(crate) nodes: Vec<Rc<Node>>,
    pub(crate) broker: Broker,
    pub(crate) nowhere: ProcessId,
    /// The stream of randomness that decides about letters.
    pub(crate) faults_stream: u64,
}

impl Plane {
    pub(crate) fn new(world: World, tasks: Tasks, config: PlaneConfig) -> Rc<Self> {
        Rc::new(Plane {
            world,
            tasks,
            seed: config.seed,
            mutation: config.mutation,
            ttl: config.ttl,
            region_bytes: config.region_bytes,
            delivery: Cell::new(config.delivery),
            oracle: RefCell::default(),
            nodes: config.nodes,
            broker: config.broker,
            names: Cell::new(1_000),
            faults_random: RefCell::new(Random::new(config.seed, config.faults_stream)),
            doomed: RefCell::default(),
            late_letters: Cell::new(0),
            nowhere: config.nowhere,
            trusting: RefCell::default(),
        })
    }

    /// Starts the broker and the nodes.
    pub(crate) fn start(self: &Rc<Self>) {
        broker::start(self);
        self.nodes.iter().for_each(|node| node::start(self, node));
    }

    pub(crate) fn random(&self, stream: u64) -> Random {
        Random::new(self.seed, stream)
    }

    pub(crate) fn next_name(&self) -> u64 {
        self.names.set(self.names.get() + 1);
        self.names.get()
    }

    /// Any key will do, as long as each grant has a different one.
    pub(crate) fn fresh_key(&self) -> AccessKey {
        let mut bytes = [0x44; AccessKey::BYTES];
        bytes[..8].copy_from_slice(&self.next_name().to_le_bytes());
        AccessKey::from_bytes(bytes)
    }

    pub(crate) fn is_broken(&self, mutation: &str) -> bool {
        self.mutation == Some(mutation)
    }

    /// Draws whether a fault with this probability happens to a letter.
    pub(crate) fn draw(&self, permille: u32) -> bool {
        self.faults_random.borrow_mut().chance(permille)
    }

    pub(crate) fn node(&self, id: NodeId) -> Rc<Node> {
        self.nodes.iter().find(|node| node.id == id).expect("letters name nodes of this world").clone()
    }

    /// The processes that would use a region now under this lease, and should not, since it ends.
    pub(crate) fn trusting_processes(&self, region: RegionId, epoch: Epoch, ending: Ending) -> Vec<u64> {
        self.trusting.borrow().as_ref().map_or(Vec::new(), |trusting| trusting(region, epoch, ending))
    }

    pub(crate) fn complain(&self, what: String) {
        self.world.note("violation", &[]);
        self.oracle.borrow_mut().complain(what);
    }

    /// Kills a doomed process at its last letter.
    fn meet_doom(&self, process: ProcessId) {
        if self.doomed.borrow_mut().remove(&process).is_none() {
            return;
        }
        match self.nodes.iter().find(|node| node.process.get() == process) {
            Some(node) => node::crash(self, node),
            None => self.tasks.kill(process),
        }
    }

    /// Restarts a node that has died.
    pub(crate) fn start_node_again(self: &Rc<Self>, node: &Rc<Node>) {
        node.process.set(self.world.add_process(node.host));
        node::start(self, node);
    }

    /// Starts the broker's next process, whether or not the current one still runs.
    pub(crate) fn start_broker_again(self: &Rc<Self>) {
        self.broker.process.set(self.world.add_process(self.broker.host));
        broker::start(self);
    }
}

/// The simulated fabric reaches nodes by their ids alone.
impl Node {
    pub(crate) fn peer(&self) -> Peer {
        Peer { node: self.id, tcp: None, shm_socket: None, verbs: None }
    }
}
