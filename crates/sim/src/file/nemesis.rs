//! Faults besides those of letters and connections: nodes and brokers die, processes stop, hosts are cut off
//! from each other, clients die in the middle of an operation, and leases are taken back.

use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::Random;
use farpool_fabric::{AccessKind, Mapping};

use farpool_pool::EXTENT_BYTES;
use farpool_wire::control::RevokeRequest;

use super::client::CELLS;
use super::history::CELL;
use super::link::Shaking;
use super::{BUSY_TTLS, Run, client, successor};
use crate::plane::post::{Post, Question};
use crate::plane::{Plane, node};

/// The number of bits that are flipped in each extent: enough that clients read some of them, although they
/// read mostly near borders.
const FLIPS_PER_EXTENT: u64 = 24;
/// The most mishaps of a run.
const MOST: u64 = 6;
/// The longest time until the next owner starts, if it starts at once: while packets of the dead owner are
/// still in transit.
const AT_ONCE_MS: u64 = 20;
/// The longest time for which a node refuses connections: about twice the time after which the owner gives up
/// an unresponsive node.
const LONGEST_REFUSAL_MS: u64 = 10_000;
/// How long an operator waits for an answer when it has leases taken back.
const OPERATOR_PATIENCE: Duration = Duration::from_secs(8);

enum Kind {
    NodeDies(usize),
    /// A client dies in the middle of an operation. Another client takes its place.
    ClientDies,
    BrokerDies,
    /// All processes that work on files die at once, and another owner takes over after a while.
    OwnerDies,
    /// The owner's machine and a node's are cut off from each other.
    Cut(usize),
    /// The process that maintains the leases stops for a while.
    KeeperStops,
    ClientStops,
    /// A node closes all connections and accepts none, as if it had no connection to spare. It still answers
    /// renewals.
    Refuses(usize),
    /// Bits flip in the extents of files on a node.
    Flips(usize),
    TakeBack {
        count: u32,
        grace_ms: u64,
    },
}

pub(super) struct Mishap {
    kind: Kind,
    after: Duration,
    lasting: Duration,
}

/// Draws the mishaps of a run.
pub(super) fn draw(plane: &Plane, random: &mut Random) -> Vec<Mishap> {
    if random.chance(250) {
        return Vec::new();
    }
    let busy_ms = BUSY_TTLS * plane.ttl.0;
    let count = 1 + random.below(MOST);
    let mishap = |_| {
        let node = random.index(plane.nodes.len());
        let kind = match random.below(20) {
            0..3 => Kind::NodeDies(node),
            3..8 => Kind::ClientDies,
            8..10 => Kind::BrokerDies,
            10..13 => Kind::Cut(node),
            13 => Kind::KeeperStops,
            14..16 => Kind::ClientStops,
            _ => {
                Kind::TakeBack { count: 1 + random.below(3) as u32, grace_ms: random.below(2 * plane.ttl.0) }
            }
        };
        let after = Duration::from_micros(random.below(busy_ms * 1_000));
        let lasting = Duration::from_millis(100 + random.below(plane.ttl.0));
        Mishap { kind, after, lasting }
    };
    (0..count).map(mishap).collect()
}

/// Draws the mishaps of a run in which nodes only refuse connections. None of them costs a node.
pub(super) fn draw_refusals(plane: &Plane, random: &mut Random) -> Vec<Mishap> {
    let busy_ms = BUSY_TTLS * plane.ttl.0;
    // One refusal begins after the previous one has ended, so that none ends another too early.
    let mut from_ms = 0;
    let mut refusals = Vec::new();
    while from_ms < busy_ms {
        from_ms += random.below(busy_ms / 2);
        let lasting_ms = 100 + random.below(LONGEST_REFUSAL_MS);
        refusals.push(Mishap {
            kind: Kind::Refuses(random.index(plane.nodes.len())),
            after: Duration::from_millis(from_ms),
            lasting: Duration::from_millis(lasting_ms),
        });
        from_ms += lasting_ms + 1;
    }
    refusals
}

impl Mishap {
    pub(super) fn is_of_the_owner(&self) -> bool {
        matches!(self.kind, Kind::OwnerDies)
    }

    pub(super) fn is_a_flip(&self) -> bool {
        matches!(self.kind, Kind::Flips(_))
    }
}

/// Draws the mishaps of a run in which only one node is hurt, always the same one.
pub(super) fn draw_bearable(plane: &Plane, random: &mut Random) -> Vec<Mishap> {
    let busy_ms = BUSY_TTLS * plane.ttl.0;
    let victim = random.index(plane.nodes.len());
    let count = 1 + random.below(MOST);
    let mishap = |_| {
        let kind = match random.below(12) {
            0..4 => Kind::NodeDies(victim),
            4..6 => Kind::Cut(victim),
            6..8 => Kind::Flips(victim),
            8..10 => Kind::ClientDies,
            _ => Kind::BrokerDies,
        };
        let after = Duration::from_micros(random.below(busy_ms * 1_000));
        let lasting = Duration::from_millis(100 + random.below(2 * plane.ttl.0));
        Mishap { kind, after, lasting }
    };
    (0..count).map(mishap).collect()
}

/// Draws the deaths of the owner: one or two. The next owner mostly starts within the duration of a lease.
pub(super) fn draw_deaths_of_the_owner(plane: &Plane, bears: bool, random: &mut Random) -> Vec<Mishap> {
    let busy_ms = BUSY_TTLS * plane.ttl.0;
    let longest_ms = match random.below(10) {
        0..4 => AT_ONCE_MS,
        4..8 => plane.ttl.0 / 5,
        _ if bears => plane.ttl.0 / 5,
        _ => 2 * plane.ttl.0,
    };
    let count = 1 + random.below(2);
    let mishap = |_| {
        let after = Duration::from_micros(random.below(busy_ms * 1_000));
        let lasting = Duration::from_millis(1 + random.below(longest_ms));
        Mishap { kind: Kind::OwnerDies, after, lasting }
    };
    (0..count).map(mishap).collect()
}

/// Flips random bits in every extent of a file that a node holds.
fn flip_bits(run: &Run, index: usize) {
    let node = &run.nodes[index];
    let Some(shell) = node.shell() else { return };
    let mut random = run.random(run.next_name());
    for (number, file) in run.files.borrow().iter() {
        for at in 0..CELLS * CELL / EXTENT_BYTES {
            let Some(extent) = file.extent_at(at * EXTENT_BYTES) else { continue };
            let region = extent.region();
            if region.id.node != node.id {
                continue;
            }
            for _ in 0..FLIPS_PER_EXTENT {
                let address = extent.address(random.below(EXTENT_BYTES));
                let bit = 1 << random.below(8);
                let mut flip = |memory: &Mapping| {
                    let mut byte = [0];
                    memory.read(address.offset, &mut byte)?;
                    memory.write(address.offset, &[byte[0] ^ bit])
                };
                if shell
                    .regions
                    .with_region(region.id.index, region.epoch, AccessKind::Write, &mut flip)
                    .is_ok()
                {
                    run.world.note("file {}: a bit of extent {} turns over", &[*number, at]);
                }
            }
        }
    }
}

pub(super) fn start(run: &Rc<Run>, mishaps: Vec<Mishap>) {
    for mishap in mishaps {
        run.mishaps.set(run.mishaps.get() + 1);
        let happening = run.clone();
        run.tasks.spawn(run.nowhere, async move {
            happening.world.sleep(mishap.after).await;
            happen(&happening, mishap.kind, mishap.lasting).await;
            happening.mishaps.set(happening.mishaps.get() - 1);
        });
    }
}

async fn happen(run: &Rc<Run>, kind: Kind, lasting: Duration) {
    let now_ns = run.world.now_ns();
    let until_ns = now_ns + lasting.as_nanos() as u64;
    match kind {
        Kind::NodeDies(index) => {
            let node = &run.nodes[index];
            if node.shell().is_none() {
                return; // already dead
            }
            node::crash(&run.plane, node);
            run.world.sleep(lasting).await;
            run.plane.start_node_again(node);
        }
        Kind::ClientDies => {
            let last = run.clients.borrow_mut().pop();
            if let Some((process, guest)) = last {
                if let Some(guest) = &guest {
                    guest.dies();
                }
                run.tasks.kill(process);
                if let Some(guest) = guest {
                    guest.bury(run);
                }
                client::start(run);
            }
        }
        Kind::OwnerDies => successor::owner_dies(run, lasting).await,
        Kind::BrokerDies => {
            let process = run.broker.process.get();
            if !run.world.is_alive(process) {
                return;
            }
            run.tasks.kill(process);
            run.world.sleep(lasting).await;
            run.plane.start_broker_again();
        }
        Kind::Cut(index) => {
            let hosts = [run.host, run.nodes[index].host];
            if hosts[0] != hosts[1] {
                run.oracle.borrow_mut().silence(hosts, now_ns, until_ns);
                run.world.cut(hosts[0], hosts[1]);
                run.world.sleep(lasting).await;
                run.world.heal(hosts[0], hosts[1]);
            }
        }
        Kind::Refuses(index) => {
            run.world.note("node {} takes no connections", &[run.nodes[index].id.0]);
            let shaking = run.shaking.get();
            run.shaking.set(Shaking { refusing: Some(run.nodes[index].id), ..shaking });
            run.world.sleep(lasting).await;
            run.shaking.set(shaking);
            run.world.note("node {} takes connections again", &[run.nodes[index].id.0]);
        }
        Kind::KeeperStops => {
            run.world.pause(run.home(), lasting);
            run.world.sleep(lasting).await;
        }
        Kind::ClientStops => {
            let first = run.clients.borrow().first().map(|(process, _)| *process);
            if let Some(process) = first {
                run.world.pause(process, lasting);
                run.world.sleep(lasting).await;
            }
        }
        Kind::Flips(index) => flip_bits(run, index),
        Kind::TakeBack { count, grace_ms } => {
            let me = run.world.add_process(run.broker.host);
            let operator = Post::open(&run.plane, me, |_| Box::pin(std::future::ready(None)));
            let request = RevokeRequest { owner: run.stock().owner().0, count, grace_ms };
            let _ = operator
                .ask(run.broker.process.get(), Question::RevokeFrom(request), OPERATOR_PATIENCE)
                .await;
            run.tasks.kill(me);
        }
    }
}
