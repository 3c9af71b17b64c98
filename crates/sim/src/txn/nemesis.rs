//! What goes wrong with clients: they die, stop, or are taken for dead while they live.

use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::Random;

use super::{Run, Staying, recovering};

/// Mishaps of a run, at most.
const MOST: u64 = 4;

#[derive(Clone, Copy)]
enum Mishap {
    Death,
    Stop(Duration),
    Suspicion,
}

/// Draws the mishaps of this run and starts them.
pub(super) fn start(run: &Rc<Run>, random: &mut Random) {
    let nowhere = run.world.add_process(run.world.add_host(1_000_000));
    let mishaps = random.below(MOST + 1);
    run.has_mishaps.set(mishaps > 0);
    for _ in 0..mishaps {
        let after = Duration::from_nanos(20_000 + random.below(2_000_000));
        let noticed_after = Duration::from_nanos(random.below(200_000));
        let slot = random.below(u64::from(run.slots)) as u16;
        let mishap = match random.below(10) {
            0..=5 => Mishap::Death,
            6..=7 => Mishap::Stop(Duration::from_nanos(10_000 + random.below(2_000_000))),
            _ => Mishap::Suspicion,
        };
        run.tasks.spawn(nowhere, happen(run.clone(), slot, mishap, after, noticed_after));
    }
}

async fn happen(run: Rc<Run>, slot: u16, mishap: Mishap, after: Duration, noticed_after: Duration) {
    run.world.sleep(after).await;
    let life = run.lives.borrow()[&slot];
    if run.is_quiet.get() || run.clients_left.get() == 0 || life.is_dead || !run.world.is_alive(life.process)
    {
        return;
    }
    // Until somebody looks after the slot, so that the run is not over in between.
    let _staying = Staying::new(&run);
    match mishap {
        Mishap::Death => {
            run.tasks.kill(life.process);
            run.world.sleep(noticed_after).await;
            recovering::look_after(&run, slot, life.grant);
        }
        Mishap::Stop(lasting) => {
            run.world.pause(life.process, lasting);
            run.world.sleep(noticed_after).await;
            recovering::look_after(&run, slot, life.grant);
        }
        Mishap::Suspicion => recovering::look_after(&run, slot, life.grant),
    }
}
