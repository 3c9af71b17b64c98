//! Faults besides those of the network: processes that pause or crash, nodes that crash, hosts that are cut
//! off.

use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::Random;

use super::Run;
use super::client;
use super::director::{self, FabricNode};
use crate::place::ClientPlace;

/// The most mishaps of a run.
const MOST: u64 = 4;

enum Mishap {
    Pause(usize),
    Crash(usize),
    Cut(usize, usize),
    NodeCrash(usize),
}

/// Draws the mishaps of this run and starts them.
pub(super) fn start(run: &Rc<Run>, places: &[ClientPlace], random: &mut Random) {
    let nowhere = run.world.add_process(run.world.add_host(1_000_000));
    for _ in 0..random.below(MOST + 1) {
        let after = Duration::from_nanos(20_000 + random.below(700_000));
        let lasting = Duration::from_nanos(10_000 + random.below(500_000));
        let client = random.index(places.len());
        let node = random.index(run.nodes.len());
        let mishap = match random.below(10) {
            0..=3 => Mishap::Pause(client),
            4..=5 => Mishap::Crash(client),
            6..=8 => Mishap::Cut(client, node),
            _ => Mishap::NodeCrash(node),
        };
        run.tasks.spawn(nowhere, happen(run.clone(), places.to_vec(), mishap, after, lasting));
    }
}

async fn happen(run: Rc<Run>, places: Vec<ClientPlace>, mishap: Mishap, after: Duration, lasting: Duration) {
    run.world.sleep(after).await;
    match mishap {
        Mishap::Pause(client) => {
            let process = run.clients.borrow()[client];
            run.world.pause(process, lasting);
        }
        Mishap::Crash(client) => {
            let process = run.clients.borrow()[client];
            if run.has_ended() || !run.world.is_alive(process) {
                return;
            }
            // Keeps the run from ending between the death of the old tasks and the start of the new ones.
            let _staying = run.left.stay();
            run.tasks.kill(process);
            run.world.sleep(lasting).await;
            client::start(&run, places[client], true);
        }
        Mishap::Cut(client, node) => {
            let (one, other) = (places[client].host, run.nodes[node].host);
            if one != other {
                run.world.cut(one, other);
                run.world.sleep(lasting).await;
                run.world.heal(one, other);
            }
        }
        Mishap::NodeCrash(node) => crash_node(&run, &run.nodes[node].clone(), lasting).await,
    }
}

async fn crash_node(run: &Rc<Run>, node: &Rc<FabricNode>, lasting: Duration) {
    if run.has_ended() || !run.world.is_alive(node.process.get()) {
        return;
    }
    director::crash(run, node);
    run.world.sleep(lasting).await;
    node.process.set(run.world.add_process(node.host));
    director::start(run, node);
}
