//! Faults besides those of letters and connections: nodes and brokers die, processes stop, hosts are cut off
//! from each other, clients die in the middle of an operation, and leases are taken back.

mod drawing;

use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::{AccessKind, Mapping};
use farpool_pool::EXTENT_BYTES;
use farpool_wire::BLOCK_BYTES;
use farpool_wire::control::RevokeRequest;

use super::client::CELLS;
use super::history::CELL;
use super::link::Shaking;
use super::{Phase, Run, client, successor};
use crate::plane::node;
use crate::plane::post::{Post, Question};

pub(super) use drawing::{
    delay_to_moves, draw, draw_deaths_of_the_owner, draw_moves, draw_refusals, draw_survivable,
};

/// The number of bits that are flipped in each extent: enough that clients read some of them, although they
/// read mostly near borders.
const FLIPS_PER_EXTENT: u64 = 24;
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
    /// It happens when an extent is being moved, if one is.
    in_a_move: Option<Duration>,
}

impl Mishap {
    fn new(kind: Kind, after: Duration, lasting: Duration) -> Self {
        Mishap { kind, after, lasting, in_a_move: None }
    }

    pub(super) fn is_of_the_owner(&self) -> bool {
        matches!(self.kind, Kind::OwnerDies)
    }

    pub(super) fn is_a_flip(&self) -> bool {
        matches!(self.kind, Kind::Flips(_))
    }
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
                    let block = address.offset / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
                    run.flipped.borrow_mut().insert((region.id, region.epoch, block));
                    run.world.note("file {}: a bit of extent {} turns over", &[*number, at]);
                }
            }
        }
    }
}

pub(super) fn start(run: &Rc<Run>, mishaps: Vec<Mishap>) {
    for mishap in mishaps {
        let happening = run.clone();
        if let Some(within) = mishap.in_a_move {
            run.tasks.spawn(run.nowhere, happen_in_a_move(happening, mishap, within));
            continue;
        }
        run.mishaps.set(run.mishaps.get() + 1);
        run.tasks.spawn(run.nowhere, async move {
            happening.world.sleep(mishap.after).await;
            happen(&happening, mishap.kind, mishap.lasting).await;
            happening.mishaps.set(happening.mishaps.get() - 1);
        });
    }
}

/// Waits for a move of an extent. Without one in the busy phase, the mishap does not happen.
async fn happen_in_a_move(run: Rc<Run>, mishap: Mishap, within: Duration) {
    run.world.sleep(mishap.after).await;
    if run.phase.get() == Phase::Busy {
        run.moving.next().await;
    }
    if run.phase.get() != Phase::Busy {
        return;
    }
    run.mishaps.set(run.mishaps.get() + 1);
    run.world.sleep(within).await;
    happen(&run, mishap.kind, mishap.lasting).await;
    run.mishaps.set(run.mishaps.get() - 1);
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
                    guest.recover(run);
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
            let lasting = 2 * lasting; // long enough that leases may end meanwhile
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
