//! What simulations of indexes have in common: nodes with one region or several, clients of any number of
//! processes, and what happens to these (`sim hash`, `sim index`).

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::{
    Faults, HostId, Network, Path, ProcessId, Random, Service, Span, Tasks, World, WorldConfig,
};
use farpool_fabric::{Endpoint, EndpointConfig, Peer};
use farpool_txn::{Memory, MemoryError, Piece};
use farpool_wire::{AccessKey, Epoch, NodeId, RegionId, SessionId};

use crate::lending::LendingHost;
use crate::notebook::Notebook;
use crate::place::ClientPlace;
use crate::staying::Left;

/// From the posting of an operation until its outcome counts as *unknown*, while faults occur: some packets
/// arrive later.
pub(crate) const DEADLINE: Duration = Duration::from_micros(150);
/// The same once no more faults occur: no operation takes so long then.
pub(crate) const LAST_DEADLINE: Duration = Duration::from_millis(50);
/// Far longer than any run takes: a task that has not ended by then hangs.
pub(crate) const RUN_NS: u64 = 10_000_000_000;
pub(crate) const REGION_BYTES: u64 = 512 << 10;
const ARENA_BYTES: usize = 64 * 4096;
pub(crate) const EPOCH: Epoch = Epoch(7);

/// Mishaps of a run, at most.
const MOST_MISHAPS: u64 = 6;
/// Attempts to connect to all nodes. Together they take longer than any network cut.
const MOST_TRIES: u32 = 1_000;

/// What all parts of one run share.
pub(crate) struct Setting {
    pub(crate) world: World,
    pub(crate) tasks: Tasks,
    pub(crate) notes: Notebook,
    pub(crate) nodes: Vec<IndexNode>,
    /// The regions of each node that clients use.
    pub(crate) regions: u32,
    /// The current process of each client.
    pub(crate) clients: RefCell<Vec<ProcessId>>,
    /// Tasks of clients and of mishaps that have not ended.
    pub(crate) left: Left,
}

/// A node that has parts of an index.
pub(crate) struct IndexNode {
    pub(crate) host: HostId,
    pub(crate) peer: Peer,
}

/// A world with any subset of faults, so that some seeds test one fault alone.
pub(crate) fn world_of(seed: u64, trace: bool, random: &mut Random) -> World {
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

/// One to three nodes with this many regions each.
pub(crate) fn draw_nodes(world: &World, regions: u32, random: &mut Random) -> Vec<IndexNode> {
    let count = 1 + random.below(3);
    let node = |index| {
        let host = world.add_host(1_000_000);
        let memory = Arc::new(LendingHost::new(NodeId(index + 1), regions, REGION_BYTES));
        (0..regions).for_each(|region| memory.open(region, EPOCH, key()));
        let service = if random.chance(400) { Service::Whole } else { Service::Torn };
        IndexNode { host, peer: world.serve(host, memory, service) }
    };
    (0..count).map(node).collect()
}

pub(crate) fn piece(node: NodeId, index: u32, start: u64) -> Piece {
    Piece { region: RegionId { node, index }, epoch: EPOCH, start }
}

pub(crate) fn key() -> AccessKey {
    AccessKey::from_bytes([9; 16])
}

/// Places pieces of so many bytes one after the other in the same region of each node, on the nodes in turn.
pub(crate) fn lay_out(nodes: &[IndexNode], region: u32, bytes: impl Iterator<Item = u64>) -> Vec<Piece> {
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

impl Setting {
    /// Draws where a client lives: with the memory of a single node mapped, or across the network.
    pub(crate) fn draw_place(&self, index: usize, random: &mut Random) -> ClientPlace {
        if self.nodes.len() == 1 && random.chance(400) {
            ClientPlace { index, host: self.nodes[0].host, path: Path::Shared }
        } else {
            ClientPlace {
                index,
                host: self.world.add_host(950_000 + random.below(100_000)),
                path: Path::Checked,
            }
        }
    }

    /// New connections of a process to all nodes.
    pub(crate) async fn memory<S: AsRef<Setting> + 'static>(
        run: &Rc<S>,
        process: ProcessId,
        place: ClientPlace,
        deadline: Duration,
    ) -> Result<Memory, MemoryError> {
        let (here, setting) = (run.clone(), S::as_ref(run));
        let endpoint = Endpoint::new(EndpointConfig {
            transport: setting.world.transport(process, place.path),
            clock: Rc::new(setting.world.clock(place.host)),
            session_ids: Box::new(move || SessionId(S::as_ref(&here).notes.next_name())),
            arena_bytes: ARENA_BYTES,
            deadline,
        });
        setting.tasks.adopt(process, endpoint.clone());
        let memory = Memory::new(endpoint);
        for node in &setting.nodes {
            for index in 0..setting.regions {
                let region = RegionId { node: node.peer.node, index };
                memory.attach(&node.peer, region, EPOCH, key()).await?;
            }
        }
        Ok(memory)
    }

    /// The same, tried again and again.
    pub(crate) async fn connect<S: AsRef<Setting> + 'static>(
        run: &Rc<S>,
        process: ProcessId,
        place: ClientPlace,
        deadline: Duration,
        random: &mut Random,
    ) -> Option<Memory> {
        let setting = S::as_ref(run);
        for _ in 0..MOST_TRIES {
            match Self::memory(run, process, place, deadline).await {
                Ok(memory) => return Some(memory),
                Err(_) => setting.world.sleep(Duration::from_nanos(1_000 + random.below(50_000))).await,
            }
        }
        setting.notes.complain(format!("client {} cannot connect", place.index));
        None
    }
}

enum Mishap {
    Pause(ClientPlace),
    Death(ClientPlace),
    Cut(ClientPlace, usize),
}

/// Draws the mishaps of a run and starts them: clients stop or die, and hosts are cut off. `start` starts
/// another process of a client that has died.
pub(crate) fn start_mishaps<S: AsRef<Setting> + 'static>(
    run: &Rc<S>,
    places: &[ClientPlace],
    start: fn(&Rc<S>, ClientPlace),
    random: &mut Random,
) {
    let setting = S::as_ref(run);
    let nowhere = setting.world.add_process(setting.world.add_host(1_000_000));
    for _ in 0..random.below(MOST_MISHAPS + 1) {
        let after = Duration::from_nanos(10_000 + random.below(700_000));
        let lasting = Duration::from_nanos(10_000 + random.below(400_000));
        let place = places[random.index(places.len())];
        let mishap = match random.below(10) {
            0..=2 => Mishap::Pause(place),
            3..=7 => Mishap::Death(place),
            _ => Mishap::Cut(place, random.index(setting.nodes.len())),
        };
        let (here, staying) = (run.clone(), setting.left.stay());
        setting.tasks.spawn(nowhere, async move {
            happen(&here, mishap, start, after, lasting).await;
            drop(staying);
        });
    }
}

async fn happen<S: AsRef<Setting>>(
    run: &Rc<S>,
    mishap: Mishap,
    start: fn(&Rc<S>, ClientPlace),
    after: Duration,
    lasting: Duration,
) {
    let setting = S::as_ref(run);
    setting.world.sleep(after).await;
    match mishap {
        Mishap::Pause(place) => {
            let process = setting.clients.borrow()[place.index];
            setting.world.pause(process, lasting);
        }
        Mishap::Death(place) => {
            let process = setting.clients.borrow()[place.index];
            if !setting.world.is_alive(process) {
                return;
            }
            setting.tasks.kill(process);
            setting.world.sleep(lasting).await;
            setting.clients.borrow_mut()[place.index] = setting.world.add_process(place.host);
            start(run, place);
        }
        Mishap::Cut(place, node) => {
            let (one, other) = (place.host, setting.nodes[node].host);
            if one != other {
                setting.world.cut(one, other);
                setting.world.sleep(lasting).await;
                setting.world.heal(one, other);
            }
        }
    }
}
