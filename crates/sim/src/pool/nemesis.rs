//! Faults besides those of letters: processes that crash, pause or are restarted, hosts that are cut off from
//! each other.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::{HostId, ProcessId, Random};
use farpool_wire::control::{ResizeRequest, RevokeRequest};

use super::{BUSY_TTLS, Run, client};
use crate::plane::node;
use crate::plane::post::{Doom, Post, Question};

/// The most mishaps of a run.
const MOST: u64 = 9;
/// The most letters that a doomed process sends before it dies.
const LAST_LETTER: u64 = 30;
/// The interval between two checks of a doomed process.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long an operator waits for an answer when it has leases taken back.
const OPERATOR_PATIENCE: Duration = Duration::from_secs(8);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Participant {
    Node(usize),
    Client(usize),
    Broker,
}

enum Mishap {
    /// A process dies now.
    Crash(Participant),
    /// A process dies when it sends one of its next letters.
    Doom(Participant, Doom),
    Pause(Participant),
    /// A node's process stops for longer than a lease lasts. Requests wait for it, among them one to take
    /// leases back.
    StopNode {
        node: usize,
        client: usize,
    },
    Cut(Participant, Participant),
    /// A new broker takes over while the old one still runs.
    Takeover,
    /// An operator has leases of an owner taken back.
    TakeBack {
        client: usize,
        count: u32,
        grace_ms: u64,
    },
    /// An operator has a node give memory back to its machine, and perhaps lend it again later.
    Resize {
        node: usize,
        regions: u32,
        grace_ms: u64,
        grows_again: bool,
    },
    /// Other processes of a node's machine take the memory of `regions` regions, for a while or until the
    /// end.
    MemoryDemand {
        node: usize,
        regions: u32,
        passes: bool,
    },
}

/// Draws the mishaps of this run and starts them.
pub(super) fn start(run: &Rc<Run>, random: &mut Random) {
    let busy_ms = BUSY_TTLS * run.ttl.0;
    for _ in 0..random.below(MOST + 1) {
        let after = Duration::from_micros(random.below(busy_ms * 1_000));
        let lasting = Duration::from_millis(100 + random.below(2 * run.ttl.0));
        let mishap = match random.below(28) {
            0..4 => Mishap::Crash(draw_participant(run, random)),
            4..8 => {
                let letters_left = 1 + random.below(LAST_LETTER);
                Mishap::Doom(
                    draw_participant(run, random),
                    Doom { letters_left, says_it: random.chance(500) },
                )
            }
            8..10 => Mishap::Pause(draw_participant(run, random)),
            10..15 => Mishap::Cut(draw_participant(run, random), draw_participant(run, random)),
            15..17 => Mishap::Takeover,
            17..20 => Mishap::TakeBack {
                client: random.index(run.seats.len()),
                count: 1 + random.below(3) as u32,
                grace_ms: random.below(2 * run.ttl.0),
            },
            20..23 => Mishap::Resize {
                node: random.index(run.nodes.len()),
                regions: random.below(4) as u32,
                grace_ms: random.below(2 * run.ttl.0),
                grows_again: random.chance(700),
            },
            23..26 => Mishap::MemoryDemand {
                node: random.index(run.nodes.len()),
                regions: 2 + random.below(5) as u32,
                passes: random.chance(700),
            },
            _ => Mishap::StopNode {
                node: random.index(run.nodes.len()),
                client: random.index(run.seats.len()),
            },
        };
        let disk_is_lost = random.chance(400);
        run.tasks.spawn(run.nowhere, happen(run.clone(), mishap, after, lasting, disk_is_lost));
    }
}

fn draw_participant(run: &Run, random: &mut Random) -> Participant {
    match random.below(10) {
        0..4 => Participant::Node(random.index(run.nodes.len())),
        4..8 => Participant::Client(random.index(run.seats.len())),
        _ => Participant::Broker,
    }
}

impl Run {
    fn host_of(&self, participant: Participant) -> HostId {
        match participant {
            Participant::Node(index) => self.nodes[index].host,
            Participant::Client(seat) => self.seats[seat].host,
            Participant::Broker => self.broker.host,
        }
    }

    fn process_of(&self, participant: Participant) -> Option<ProcessId> {
        let process = match participant {
            Participant::Node(index) => self.nodes[index].process.get(),
            Participant::Client(seat) => self.client(seat)?.process,
            Participant::Broker => self.broker.process.get(),
        };
        self.world.is_alive(process).then_some(process)
    }

    fn crash(&self, participant: Participant) {
        match participant {
            Participant::Node(index) => node::crash(self, &self.nodes[index]),
            Participant::Client(_) | Participant::Broker => {
                if let Some(process) = self.process_of(participant) {
                    self.tasks.kill(process);
                }
            }
        }
    }
}

/// Restarts a participant that has died.
fn start_again(run: &Rc<Run>, participant: Participant) {
    match participant {
        Participant::Node(index) => {
            run.plane.start_node_again(&run.nodes[index]);
        }
        Participant::Client(seat) => drop(client::start(run, &run.seats[seat])),
        Participant::Broker => {
            run.plane.start_broker_again();
        }
    }
}

/// Counts a mishap that is in progress.
struct InProgress<'a>(&'a Cell<u32>);

impl<'a> InProgress<'a> {
    fn new(count: &'a Cell<u32>) -> Self {
        count.set(count.get() + 1);
        InProgress(count)
    }
}

impl Drop for InProgress<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

async fn happen(run: Rc<Run>, mishap: Mishap, after: Duration, lasting: Duration, disk_is_lost: bool) {
    run.world.sleep(after).await;
    let _in_progress = InProgress::new(&run.mishaps);
    let dying = match &mishap {
        Mishap::Crash(participant) | Mishap::Doom(participant, _) => Some(*participant),
        Mishap::Takeover => Some(Participant::Broker),
        _ => None,
    };
    // A participant does not die twice before it is restarted.
    if dying.is_some_and(|participant| !run.dying.borrow_mut().insert(participant)) {
        return;
    }
    carry_out(&run, mishap, lasting, disk_is_lost).await;
    if let Some(participant) = dying {
        run.dying.borrow_mut().remove(&participant);
    }
}

async fn carry_out(run: &Rc<Run>, mishap: Mishap, lasting: Duration, disk_is_lost: bool) {
    match mishap {
        Mishap::Crash(participant) => {
            run.crash(participant);
            come_back(run, participant, lasting, disk_is_lost).await;
        }
        Mishap::Doom(participant, doom) => meet(run, participant, doom, lasting, disk_is_lost).await,
        Mishap::Pause(participant) => pause(run, participant, lasting).await,
        Mishap::StopNode { node, client } => {
            let whole = lasting + Duration::from_millis(run.ttl.0);
            let take_back = async {
                run.world.sleep(lasting).await;
                take_back(run, client, u32::MAX, run.ttl.0).await;
            };
            futures_util::future::join(pause(run, Participant::Node(node), whole), take_back).await;
        }
        Mishap::Cut(one, other) => {
            let hosts = [run.host_of(one), run.host_of(other)];
            if hosts[0] != hosts[1] {
                let now_ns = run.world.now_ns();
                run.oracle.borrow_mut().silence(hosts, now_ns, now_ns + lasting.as_nanos() as u64);
                run.world.cut(hosts[0], hosts[1]);
                run.world.sleep(lasting).await;
                run.world.heal(hosts[0], hosts[1]);
            }
        }
        Mishap::Takeover => {
            let old = run.broker.process.get();
            start_again(run, Participant::Broker);
            run.world.sleep(lasting).await;
            run.tasks.kill(old);
        }
        Mishap::TakeBack { client, count, grace_ms } => take_back(run, client, count, grace_ms).await,
        Mishap::Resize { node, regions, grace_ms, grows_again } => {
            resize(run, node, regions, grace_ms).await;
            if grows_again {
                run.world.sleep(lasting).await;
                resize(run, node, u32::MAX, 0).await;
            }
        }
        Mishap::MemoryDemand { node, regions, passes } => {
            run.nodes[node].demand.set(regions);
            if passes {
                run.world.sleep(lasting).await;
                run.nodes[node].demand.set(0);
            }
        }
    }
}

async fn pause(run: &Rc<Run>, participant: Participant, lasting: Duration) {
    let Some(process) = run.process_of(participant) else { return };
    let (host, now_ns) = (run.host_of(participant), run.world.now_ns());
    if participant != Participant::Broker {
        run.oracle.borrow_mut().silence([host, host], now_ns, now_ns + lasting.as_nanos() as u64);
    }
    run.world.pause(process, lasting);
    run.world.sleep(lasting).await;
}

/// An operator says how many regions a node is to have memory for.
async fn resize(run: &Rc<Run>, node: usize, regions: u32, grace_ms: u64) {
    let memory_bytes = u64::from(regions) * run.plane.region_bytes;
    let question = Question::Resize(ResizeRequest { memory_bytes, grace_ms });
    ask_as_operator(run, run.nodes[node].process.get(), question).await;
}

async fn ask_as_operator(run: &Rc<Run>, whom: ProcessId, question: Question) {
    let me = run.world.add_process(run.broker.host);
    let operator = Post::open(&run.plane, me, |_| Box::pin(std::future::ready(None)));
    let _ = operator.ask(whom, question, OPERATOR_PATIENCE).await;
    run.tasks.kill(me);
}

/// An operator asks the broker to have an owner's leases taken back.
async fn take_back(run: &Rc<Run>, client: usize, count: u32, grace_ms: u64) {
    let Some(client) = run.client(client) else { return };
    let request = RevokeRequest { owner: client.owner.0, count, grace_ms };
    ask_as_operator(run, run.broker.process.get(), Question::RevokeFrom(request)).await;
}

/// Waits until a doomed process has died, and restarts it.
async fn meet(run: &Rc<Run>, participant: Participant, doom: Doom, lasting: Duration, disk_is_lost: bool) {
    let Some(process) = run.process_of(participant) else { return };
    run.doomed.borrow_mut().insert(process, doom);
    let until_ns = BUSY_TTLS * run.ttl.0 * 1_000_000;
    while run.world.now_ns() < until_ns && run.world.is_alive(process) {
        run.world.sleep(LOOK_EVERY).await;
    }
    let met = run.doomed.borrow_mut().remove(&process).is_none();
    if met {
        come_back(run, participant, lasting, disk_is_lost).await;
    }
}

async fn come_back(run: &Rc<Run>, participant: Participant, lasting: Duration, disk_is_lost: bool) {
    run.world.sleep(lasting).await;
    if let (Participant::Broker, true) = (participant, disk_is_lost) {
        run.broker.lose_disk();
    }
    start_again(run, participant);
}
