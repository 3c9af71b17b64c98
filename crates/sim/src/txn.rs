//! `sim txn`: transactions on records in the memory of several nodes, judged by the guarantees of snapshot
//! isolation (`docs/src/txn.md`). Operations are slow, torn and out of step. Clients die, stop, and are
//! declared dead while they live. Recoverers roll back their commits, and may die themselves.

#[cfg(test)]
mod anomalies;
mod auditor;
pub(crate) mod broken;
mod client;
mod collector;
#[cfg(test)]
mod counts;
mod crowd;
mod curious;
mod elle;
#[cfg(test)]
mod in_flight;
mod inspector;
mod nemesis;
#[cfg(test)]
mod old_images;
mod oracle;
mod payloads;
mod publishers;
mod recovering;
mod situations;
#[cfg(test)]
mod tests;
mod wasting;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::{
    Executor, Faults, HostId, Network, Path, ProcessId, Random, Service, Span, Tasks, World, WorldConfig,
};
use farpool_fabric::{AccessError, AccessKind, Endpoint, EndpointConfig, Mapping, OpError};
use farpool_txn::horizon::{HorizonAt, HorizonLayout};
use farpool_txn::judge::judge;
use farpool_txn::log::{LogAt, LogLayout, Logs};
use farpool_txn::slab::SlabLayout;
use farpool_txn::{Memory, MemoryError, Oracle, Piece, RecordId, RecordLayout, Table};
use farpool_wire::{Epoch, GrantMode, NodeId, Refusal, RegionId, SessionId};

use crate::lending::{LendingHost, LendingNode, key_of};
use crate::mutation;
use crate::runner::{RunReport, Scenario, run_to_end};
use crate::staying::Left;
use crate::transacting::{DATA_WORDS, Ledger};
use situations::Situations;

/// The scenario of transactions.
pub const TXN: Scenario = Scenario { name: "txn", mutations: broken::MUTATIONS, run };

/// Far longer than any run takes: a task that has not ended by then hangs.
const RUN_NS: u64 = 200_000_000;
/// From the posting of an operation until its outcome counts as *unknown*: no operation here takes so long.
const DEADLINE: Duration = Duration::from_millis(50);
/// The same for clients where connections break: some of their operations take longer.
const SHORT_DEADLINE: Duration = Duration::from_micros(300);
/// The longest part of a move of a region's memory before its fence, and again after it.
const MOST_MOVE_NS: u64 = 60_000;
/// Pause before an operation refused as busy is tried again.
const BUSY_PAUSE: Duration = Duration::from_micros(20);
const ARENA_BYTES: usize = 64 * 4096;
const REGION_BYTES: u64 = 128 << 10;
/// Bytes for the intents of a log. The smallest logs hold the intents of only one transaction, so others have
/// to wait until all snapshots see it.
const LOG_BYTES: [u64; 6] = [600, 840, 1_800, 3_600, 8_192, 8_192];
/// Room for a part of the oracle: the words of a few slots and two images.
const PART_BYTES: u64 = 1_024;
/// Bits of a count that are the timestamp; the others are the slot's generation.
const TIMESTAMP_BITS: u32 = 32;
/// Generations in which a slot may start: fewer than the 2^17 that exist, since recoveries use up some more.
const MOST_GENERATIONS: u64 = 1 << 16;
/// The most commits left in the generation of a slot that starts near its end: fewer than clients make.
const MOST_TO_THE_EDGE: u64 = 12;
/// Most counts left in the generation of a slot whose sessions use them up by preparing transactions and
/// abandoning them: more counts than a slot gives out beyond its watermark.
const FAR_TO_THE_EDGE: u64 = 300;
/// Where the horizon lies, behind the parts of the oracle.
const HORIZON_START: u64 = 64 << 10;

/// What all parts of one run share.
struct Run {
    world: World,
    tasks: Tasks,
    seed: u64,
    /// One region of each has records, one has logs, and another may have a part of the oracle.
    nodes: Vec<LendingNode>,
    /// Parts of the oracle.
    parts: u64,
    /// Slots that have clients; one more is the auditor's.
    slots: u16,
    records: RecordLayout,
    /// Where payloads lie that do not fit their records, if records have variable length.
    slab: Option<SlabLayout>,
    log: LogLayout,
    /// The words of the slots before their first clients.
    firsts: Vec<u64>,
    /// Copies of logs that a recoverer could not reach. A spare copy has replaced each.
    replaced: RefCell<BTreeSet<(u16, usize)>>,
    /// The current client of each slot.
    lives: RefCell<BTreeMap<u16, Life>>,
    /// What may go wrong besides deaths.
    faults: nemesis::Kinds,
    /// What this run is arranged for.
    situations: Situations,
    /// Crowds that may still gather.
    crowds_left: Cell<u32>,
    /// Faults occur in this run, so a client may get errors that it would otherwise never get.
    has_mishaps: Cell<bool>,
    ledger: Rc<Ledger>,
    left: Left,
    /// All clients except the auditor have ended, and no more faults occur.
    is_quiet: Cell<bool>,
    /// The auditor has finished.
    has_ended: Cell<bool>,
}

/// The current client of a slot.
#[derive(Clone, Copy)]
struct Life {
    process: ProcessId,
    grant: Epoch,
    /// Its slot is being recovered.
    is_dead: bool,
}

/// The access of a process to all memory, under a grant of its own.
struct Access {
    memory: Memory,
    grant: Epoch,
}

impl Run {
    /// Gives the run these situations, before anything of it starts.
    fn arrange_for(&mut self, situations: Situations) {
        self.situations = situations;
        if situations.has_crowds {
            self.log = LogLayout::new(crowd::LOG_BYTES).expect("whole words");
            self.crowds_left.set(crowd::MOST);
        }
    }

    fn node(&self, node: NodeId) -> &LendingNode {
        self.nodes.iter().find(|found| found.peer.node == node).expect("a node of this run")
    }

    /// Opens a grant of all regions, for one process.
    fn grant(&self) -> Epoch {
        let grant = Epoch(100 + self.ledger.notes.next_name());
        for node in &self.nodes {
            for region in 0..REGIONS {
                node.memory.regions.open_grant(region, grant, key_of(grant), GrantMode::ReadWrite);
            }
        }
        grant
    }

    /// Fences a grant: once this returns, no operation under the grant takes effect.
    async fn fence(&self, grant: Epoch, random: &mut Random) {
        // The fence comes before recently sent operations arrive, or long after.
        let apart_ns = if random.chance(400) { 100 } else { 20_000 };
        for node in &self.nodes {
            for region in 0..REGIONS {
                let takes_time = self.faults.moves_take_time && node.is_whole && random.chance(200);
                self.world.sleep(Duration::from_nanos(random.below(apart_ns))).await;
                if takes_time {
                    node.memory.begin_move(region);
                    self.world.sleep(Duration::from_nanos(random.below(MOST_MOVE_NS))).await;
                }
                node.memory.regions.fence_grant(region, grant).expect("a few pages of memory");
                if takes_time {
                    self.world.sleep(Duration::from_nanos(random.below(MOST_MOVE_NS))).await;
                    node.memory.end_move(region);
                }
            }
        }
    }

    /// Connects a new process on a host to all memory.
    async fn access(
        self: &Rc<Self>,
        process: ProcessId,
        place: (HostId, Path),
        grant: Epoch,
    ) -> Result<Access, MemoryError> {
        self.access_within(process, place, grant, DEADLINE).await
    }

    async fn client_access(
        self: &Rc<Self>,
        process: ProcessId,
        place: (HostId, Path),
        grant: Epoch,
    ) -> Result<Access, MemoryError> {
        let deadline = if self.faults.cuts { SHORT_DEADLINE } else { DEADLINE };
        loop {
            match self.access_within(process, place, grant, deadline).await {
                // No data in far memory has been accessed yet, so the client can connect again.
                Err(error) if self.situations.loses_connections && nemesis::is_loss(&error) => {}
                done => return done,
            }
        }
    }

    async fn access_within(
        self: &Rc<Self>,
        process: ProcessId,
        (host, path): (HostId, Path),
        grant: Epoch,
        deadline: Duration,
    ) -> Result<Access, MemoryError> {
        let run = self.clone();
        let endpoint = Endpoint::new(EndpointConfig {
            transport: self.world.transport(process, path),
            clock: Rc::new(self.world.clock(host)),
            session_ids: Box::new(move || SessionId(run.ledger.notes.next_name())),
            arena_bytes: if self.situations.has_crowds { crowd::ARENA_BYTES } else { ARENA_BYTES },
            deadline,
        });
        self.tasks.adopt(process, endpoint.clone());
        let memory = Memory::new(endpoint);
        for node in &self.nodes {
            for index in 0..REGIONS {
                let region = RegionId { node: node.peer.node, index };
                while let Err(error) = memory.attach(&node.peer, region, grant, key_of(grant)).await {
                    if !matches!(error, MemoryError::Failed(OpError::Refused(Refusal::Busy))) {
                        return Err(error);
                    }
                    self.world.sleep(BUSY_PAUSE).await;
                }
            }
        }
        Ok(Access { memory, grant })
    }

    fn piece(&self, node: usize, index: u32, epoch: Epoch, start: u64) -> Piece {
        let node = &self.nodes[node % self.nodes.len()];
        Piece { region: RegionId { node: node.peer.node, index }, epoch, start }
    }

    fn oracle(&self, grant: Epoch) -> Oracle {
        let piece = |part: u64| self.piece(part as usize, ORACLE, grant, part * PART_BYTES);
        let pieces: Vec<Piece> = (0..self.parts).map(piece).collect();
        Oracle::split(self.slots + 1, &pieces).expect("each part has a slot")
    }

    fn table(&self, grant: Epoch) -> Table {
        let pieces = (0..self.nodes.len()).map(|node| self.piece(node, RECORDS, grant, 0));
        Table::new(RecordId(100), self.records, pieces.collect())
    }

    /// The horizon has a place for each worker that a compute server can have, for each slot.
    fn horizon(&self, grant: Epoch) -> HorizonAt {
        let slots = self.slots + 1;
        let layout = HorizonLayout::new(slots * oracle::MOST_WORKERS, slots).expect("a few workers");
        HorizonAt { piece: self.piece(self.nodes.len() - 1, ORACLE, grant, HORIZON_START), layout }
    }

    fn log(&self, slot: u16, grant: Epoch) -> LogAt {
        let replaced = self.replaced.borrow();
        let copies = [0, 1].map(|copy| {
            let region = if replaced.contains(&(slot, copy)) { SPARE_LOGS } else { LOGS };
            self.log_copy(slot, copy, region, grant)
        });
        LogAt { copies, layout: self.log }
    }

    fn logs(&self, grant: Epoch) -> Logs {
        Logs::new((0..=self.slots).map(|slot| self.log(slot, grant)))
    }

    /// Where a copy of a slot's log lies in the given region. One node may have both copies.
    fn log_copy(&self, slot: u16, copy: usize, region: u32, grant: Epoch) -> Piece {
        let slot = usize::from(slot);
        self.piece(slot + copy, region, grant, (2 * slot + copy) as u64 * self.log.bytes())
    }

    /// Writes the words of the slots, before the first client commits.
    fn write_first_words(&self) {
        for (slot, &first) in (0..).zip(&self.firsts) {
            let word = self.word_at(slot);
            self.touch(word.region, AccessKind::Write, &mut |memory| memory.store(word.start, first));
        }
    }

    /// The current word of a slot.
    fn word(&self, slot: u16) -> u64 {
        self.look(&self.word_at(slot), 0)
    }

    fn word_at(&self, slot: u16) -> Piece {
        let (slot, parts) = (usize::from(slot), self.parts as usize);
        let start = (slot % parts) as u64 * PART_BYTES + 8 * (slot / parts) as u64;
        self.piece(slot % parts, ORACLE, OWNER, start)
    }

    /// Reads a word of far memory from outside, to decide which fault comes next.
    fn look(&self, piece: &Piece, at: u64) -> u64 {
        let mut word = 0;
        self.touch(piece.region, AccessKind::Read, &mut |memory| {
            memory.load(piece.start + at).map(|found| word = found)
        });
        word
    }

    fn touch(
        &self,
        region: RegionId,
        kind: AccessKind,
        touch: &mut dyn FnMut(&Mapping) -> Result<(), AccessError>,
    ) {
        let regions = &self.node(region.node).memory.regions;
        let touched = regions.with_region(region.index, OWNER, kind, touch);
        assert_eq!(touched, Ok(()), "the owner's grant is open");
    }
}

/// Regions of each node.
const RECORDS: u32 = 0;
const ORACLE: u32 = 1;
const LOGS: u32 = 2;
/// For copies of logs that replace others.
const SPARE_LOGS: u32 = 3;
const REGIONS: u32 = 4;
/// The grant of the lessee of the regions. No process of a run has it.
const OWNER: Epoch = Epoch(7);

fn run(seed: u64, mutation: Option<&'static str>, trace: bool) -> RunReport {
    mutation::set(mutation);
    let mut random = Random::new(seed, 10);
    let situations = Situations::draw(seed);
    let world = world_of(seed, trace, &mut random);
    let executor = Executor::new(world.clone());
    let mut run = setting(world.clone(), executor.tasks(), seed, &mut random);
    run.slab = payloads::draw(seed);
    run.arrange_for(situations);
    let run = Rc::new(run);
    run.write_first_words();
    publishers::start(&run, &mut random);
    collector::start(&run, &mut random);
    for slot in 0..run.slots {
        client::start(&run, slot, client::After::Count(run.firsts[usize::from(slot)]), &mut random);
    }
    nemesis::start(&run, &mut random);
    nemesis::start_losses(&run, &mut Random::new(seed, 13));
    curious::start(&run);
    inspector::start(&run, &mut random);
    auditor::start(&run);
    let (panicked, failure) = run_to_end(executor, RUN_NS, || run.left.get());
    failure.into_iter().for_each(|what| run.ledger.notes.complain(what));
    let history = run.ledger.history.take();
    let mut violations = run.ledger.notes.complaints.take();
    violations.extend(judge(&history).err().map(|violation| violation.to_string()));
    let operations = history.len() as u64;
    let history = if trace { elle::lines(&history) } else { Vec::new() };
    RunReport { seed, panicked, violations, operations, history, ..RunReport::of_world(&world) }
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
    World::new(WorldConfig {
        network: Network::default(),
        faults,
        trace,
        ..WorldConfig::new(seed).with_operations_at_once()
    })
}

/// One to three nodes with some records each, and the oracle on the first or on several.
fn setting(world: World, tasks: Tasks, seed: u64, random: &mut Random) -> Run {
    let nodes: Vec<LendingNode> = (0..1 + random.below(3))
        .map(|index| {
            let host = world.add_host(1_000_000);
            let memory = Arc::new(LendingHost::new(NodeId(index + 1), REGIONS, REGION_BYTES));
            (0..REGIONS).for_each(|region| memory.open(region, OWNER, key_of(OWNER)));
            let is_whole = random.chance(400);
            let service = if is_whole { Service::Whole } else { Service::Torn };
            let peer = world.serve(host, memory.clone(), service);
            LendingNode { host, peer, memory, is_whole }
        })
        .collect();
    let slots = 2 + random.below(3) as u16;
    let parts = oracle::parts(random, slots + 1);
    let records = RecordLayout::new(1 + random.below(4), DATA_WORDS * 8).expect("small records");
    let log = LogLayout::new(LOG_BYTES[random.index(LOG_BYTES.len())]).expect("whole words");
    let most_log_bytes = LogLayout::new(crowd::LOG_BYTES).expect("whole words").bytes().max(log.bytes());
    let logs = 2 * u64::from(slots + 1) * most_log_bytes;
    assert!(
        [parts * PART_BYTES + HORIZON_START, logs].into_iter().all(|bytes| bytes <= REGION_BYTES)
            && records.bytes() <= payloads::SLAB_START
    );
    Run {
        ledger: Ledger::new(world.clone(), seed),
        world,
        tasks,
        seed,
        nodes,
        parts,
        slots,
        records,
        slab: None,
        log,
        firsts: (0..=slots).map(|_| first_word(random)).collect(),
        replaced: RefCell::default(),
        lives: RefCell::default(),
        faults: nemesis::Kinds::draw(random),
        situations: Situations::NONE,
        crowds_left: Cell::new(0),
        has_mishaps: Cell::new(false),
        left: Left::default(),
        is_quiet: Cell::new(false),
        has_ended: Cell::new(false),
    }
}

/// Draws the first word of a slot: new, used by clients before, or about to enter its next generation.
fn first_word(random: &mut Random) -> u64 {
    let before = random.below(MOST_GENERATIONS) << TIMESTAMP_BITS;
    match random.below(10) {
        0..=3 => 0,
        4..=5 => before,
        6..=7 => before + (1 << TIMESTAMP_BITS) - 1 - random.below(MOST_TO_THE_EDGE),
        _ => before + (1 << TIMESTAMP_BITS) - 1 - random.below(FAR_TO_THE_EDGE),
    }
}

/// Draws where a process lives: with the memory of a single node mapped, or across the network.
fn place(run: &Run, random: &mut Random) -> (HostId, Path) {
    if run.nodes.len() == 1 && random.chance(400) {
        (run.nodes[0].host, Path::Shared)
    } else {
        (run.world.add_host(950_000 + random.below(100_000)), Path::Checked)
    }
}
