//! Faults of clients and of what they store: clients die, stop, are cut off, or are declared dead while they
//! live; bits of records flip.

use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::Random;
use farpool_fabric::{AccessKind, OpError, Uncertain};
use farpool_txn::MemoryError;
use farpool_txn::log::Head;
use farpool_wire::RecordHeader;

use super::{OWNER, RECORDS, Run, recovering};

/// Mishaps of a run, at most.
const MOST: u64 = 6;
/// Moves of records' memory unrelated to the mishaps, at most, where moves take time.
const MOST_MOVES: u64 = 60;
/// Checks of a log, and the pause between two.
const LOOKS: u32 = 1_000;
const LOOK_PAUSE: Duration = Duration::from_nanos(700);

/// How often clients of a run lose connections, at most, where they do.
const MOST_LOSSES: u64 = 40;

/// What may go wrong in a run besides deaths: any combination, so that some runs test one fault alone.
#[derive(Clone, Copy)]
pub(super) struct Kinds {
    /// Accesses are refused while a region's memory moves.
    pub(super) moves_take_time: bool,
    /// Clients are cut off from nodes, for longer than they wait for an answer or for less.
    pub(super) cuts: bool,
    /// Clients abandon transactions half-way.
    pub(super) drops: bool,
    /// Bits of records flip. In such a run no client dies, stops, is cut off or is declared dead.
    pub(super) damage: bool,
}

impl Kinds {
    pub(super) fn draw(random: &mut Random) -> Kinds {
        if random.chance(80) {
            return Kinds { moves_take_time: false, cuts: false, drops: false, damage: true };
        }
        let mut is_drawn = |permille| random.chance(permille);
        Kinds { moves_take_time: is_drawn(400), cuts: is_drawn(300), drops: is_drawn(300), damage: false }
    }

    /// Whether a client may find that it cannot continue, so that its slot has to be recovered.
    pub(super) fn stop_clients(self) -> bool {
        self.cuts || self.drops
    }
}

#[derive(Clone, Copy)]
enum Mishap {
    Death,
    /// The client dies while it is writing to its log.
    DeathHalfLogged,
    Stop(Duration),
    Suspicion,
    /// The client is cut off from a node.
    Cut(usize, Duration),
    /// A bit of a record flips. The number seeds the choice of the bit.
    Damage(u64),
}

/// Draws the mishaps of this run and starts them.
pub(super) fn start(run: &Rc<Run>, random: &mut Random) {
    let nowhere = run.world.add_process(run.world.add_host(1_000_000));
    let mishaps = random.below(MOST + 1);
    if mishaps > 0 || run.faults.stop_clients() {
        run.has_mishaps.set(true);
    }
    if run.faults.moves_take_time {
        for _ in 0..random.below(MOST_MOVES + 1) {
            let after = Duration::from_nanos(random.below(2_000_000));
            run.tasks.spawn(nowhere, move_records(run.clone(), after));
        }
    }
    for _ in 0..mishaps {
        let after = Duration::from_nanos(20_000 + random.below(2_000_000));
        let noticed_after = if random.chance(500) { 0 } else { random.below(200_000) };
        let noticed_after = Duration::from_nanos(noticed_after);
        let slot = random.below(u64::from(run.slots)) as u16;
        let mishap = match random.below(10) {
            _ if run.faults.damage => Mishap::Damage(random.bits()),
            0..=3 if run.faults.cuts => {
                let lasting = Duration::from_nanos(10_000 + random.below(600_000));
                Mishap::Cut(random.index(run.nodes.len()), lasting)
            }
            0..=3 => Mishap::Death,
            4..=5 => Mishap::DeathHalfLogged,
            6..=7 => Mishap::Stop(Duration::from_nanos(10_000 + random.below(2_000_000))),
            _ => Mishap::Suspicion,
        };
        run.tasks.spawn(nowhere, happen(run.clone(), slot, mishap, after, noticed_after));
    }
}

/// In some runs clients lose their connections to all nodes now and then, make them anew, and go on.
pub(super) fn start_losses(run: &Rc<Run>, random: &mut Random) {
    if !run.situations.loses_connections {
        return;
    }
    run.has_mishaps.set(true);
    let nowhere = run.world.add_process(run.world.add_host(1_000_000));
    for _ in 0..1 + random.below(MOST_LOSSES) {
        let after = Duration::from_nanos(random.below(2_000_000));
        let slot = random.below(u64::from(run.slots)) as u16;
        let here = run.clone();
        run.tasks.spawn(nowhere, async move {
            here.world.sleep(after).await;
            let life = here.lives.borrow()[&slot];
            if !here.is_quiet.get() && here.world.is_alive(life.process) {
                here.world.lose_connections(life.process);
            }
        });
    }
}

/// Whether an operation failed because its connection was lost.
pub(super) fn is_loss(error: &MemoryError) -> bool {
    let lost = |error: &OpError| {
        matches!(error, OpError::NotSent { .. } | OpError::Unknown { cause: Uncertain::ConnectionLost, .. })
    };
    matches!(error, MemoryError::Failed(error) if lost(error))
}

async fn happen(run: Rc<Run>, slot: u16, mishap: Mishap, after: Duration, noticed_after: Duration) {
    run.world.sleep(after).await;
    if let Mishap::DeathHalfLogged = mishap {
        half_a_head(&run, slot).await;
    }
    let life = run.lives.borrow()[&slot];
    if run.is_quiet.get() || run.left.get() == 0 || life.is_dead || !run.world.is_alive(life.process) {
        return;
    }
    // Keeps the run going until the recovery of the slot starts.
    let _staying = run.left.stay();
    match mishap {
        Mishap::Death | Mishap::DeathHalfLogged => {
            run.tasks.kill(life.process);
            run.world.sleep(noticed_after).await;
            recovering::recover_seat(&run, slot, life.grant);
        }
        Mishap::Stop(lasting) => {
            run.world.pause(life.process, lasting);
            run.world.sleep(noticed_after).await;
            recovering::recover_seat(&run, slot, life.grant);
        }
        Mishap::Suspicion => recovering::recover_seat(&run, slot, life.grant),
        Mishap::Cut(node, lasting) => {
            let (client, node) = (run.world.host_of(life.process), run.nodes[node].host);
            if client != node {
                run.world.cut(client, node);
                run.world.sleep(lasting).await;
                run.world.heal(client, node);
            }
        }
        Mishap::Damage(where_to) => damage(&run, where_to),
    }
}

/// Moves the memory of the nodes' records, as a node does when it fences a grant that has no part in this
/// run.
async fn move_records(run: Rc<Run>, after: Duration) {
    run.world.sleep(after).await;
    for node in run.nodes.iter().filter(|node| node.is_whole) {
        node.memory.move_until_asked(RECORDS);
    }
}

/// Flips a bit of a checksum, of a link, or of data. Headers and words that name versions stay as they are:
/// nothing would detect damage there.
fn damage(run: &Run, where_to: u64) {
    let mut random = Random::new(where_to, 1);
    let record = random.below(run.records.records());
    let node = random.index(run.nodes.len());
    if let Some((piece, at)) = run.word_of_payload(node, record, &mut random) {
        let damaged = run.look(&piece, at) ^ 1 << random.below(64);
        run.world.note("the word at {} of a payload turns to {}", &[at, damaged]);
        let at = piece.start + at;
        run.touch(piece.region, AccessKind::Write, &mut |memory| memory.store(at, damaged));
        return;
    }
    let current = run.records.current(record);
    let words = current.start + 24..current.end;
    let at = words.start + 8 * random.below((words.end - words.start) / 8);
    let piece = run.piece(node, RECORDS, OWNER, 0);
    let damaged = run.look(&piece, at) ^ 1 << random.below(64);
    run.world.note("the word at {} turns to {}", &[at, damaged]);
    run.touch(piece.region, AccessKind::Write, &mut |memory| memory.store(at, damaged));
}

/// Waits until one copy of a slot's log has a new head in a place where the other copy still has the head of
/// a commit that was rolled back. Gives up after [`LOOKS`] checks.
async fn half_a_head(run: &Run, slot: u16) {
    let is_now = || {
        let log = run.log(slot, OWNER);
        let mut heads = log.layout.heads().step_by(Head::PLACE_BYTES);
        let head = |copy: usize, at: u64| RecordHeader(run.look(&log.copies[copy], at)).version();
        heads.any(|at| {
            let (one, other) = (head(0, at), head(1, at));
            let older = if one.count() < other.count() { one } else { other };
            one != other && run.ledger.known.borrow().get(&older) == Some(&false)
        })
    };
    for _ in 0..LOOKS {
        if run.is_quiet.get() || is_now() {
            return;
        }
        run.world.sleep(LOOK_PAUSE).await;
    }
}
