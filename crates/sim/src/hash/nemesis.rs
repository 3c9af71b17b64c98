//! Faults besides those of the network: clients stop or die, and hosts are cut off.

use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::Random;
use farpool_txn::hash::IndexRules;

use super::{ClientPlace, Run, client};

/// Mishaps of a run, at most.
const MOST: u64 = 6;

enum Mishap {
    Pause(ClientPlace),
    Death(ClientPlace),
    Cut(ClientPlace, usize),
}

/// Draws the mishaps of this run and starts them.
pub(super) fn start<R: IndexRules>(run: &Rc<Run>, places: &[ClientPlace], random: &mut Random) {
    let nowhere = run.world.add_process(run.world.add_host(1_000_000));
    for _ in 0..random.below(MOST + 1) {
        let after = Duration::from_nanos(10_000 + random.below(700_000));
        let lasting = Duration::from_nanos(10_000 + random.below(400_000));
        let place = places[random.index(places.len())];
        let mishap = match random.below(10) {
            0..=2 => Mishap::Pause(place),
            3..=7 => Mishap::Death(place),
            _ => Mishap::Cut(place, random.index(run.nodes.len())),
        };
        let (here, staying) = (run.clone(), run.left.stay());
        run.tasks.spawn(nowhere, async move {
            happen::<R>(&here, mishap, after, lasting).await;
            drop(staying);
        });
    }
}

async fn happen<R: IndexRules>(run: &Rc<Run>, mishap: Mishap, after: Duration, lasting: Duration) {
    run.world.sleep(after).await;
    match mishap {
        Mishap::Pause(place) => {
            let process = run.clients.borrow()[place.index];
            run.world.pause(process, lasting);
        }
        Mishap::Death(place) => {
            let process = run.clients.borrow()[place.index];
            if !run.world.is_alive(process) {
                return;
            }
            run.tasks.kill(process);
            run.world.sleep(lasting).await;
            run.clients.borrow_mut()[place.index] = run.world.add_process(place.host);
            client::start::<R>(run, place);
        }
        Mishap::Cut(place, node) => {
            let (one, other) = (place.host, run.nodes[node].host);
            if one != other {
                run.world.cut(one, other);
                run.world.sleep(lasting).await;
                run.world.heal(one, other);
            }
        }
    }
}
