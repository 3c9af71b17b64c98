//! The collector of a run, which publishes the horizon. It dies now and then, or is declared dead, and
//! another collector takes over.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::{HostId, Path, ProcessId, Random};
use farpool_txn::MemoryError;
use farpool_txn::horizon::{CollectPauses, collect};
use farpool_wire::Epoch;

use super::broken::Chosen;
use super::{Access, Run, place};

/// Pauses between two rounds.
const PAUSES: CollectPauses =
    CollectPauses { busy: Duration::from_micros(10), idle: Duration::from_micros(2_560) };
/// Deaths of a run's collectors, at most.
const MOST_DEATHS: u64 = 3;

/// Starts the collector, and draws its death and those of its successors.
pub(super) fn start(run: &Rc<Run>, random: &mut Random) {
    let deaths = random.below(MOST_DEATHS + 1);
    if deaths > 0 {
        run.has_mishaps.set(true);
    }
    let nowhere = run.world.add_process(run.world.add_host(1_000_000));
    let (here, mut random) = (run.clone(), run.ledger.notes.random());
    run.tasks.spawn(nowhere, async move {
        for _ in 0..deaths {
            let collector = start_one(&here, &mut random);
            here.world.sleep(Duration::from_nanos(10_000 + random.below(1_500_000))).await;
            collector.is_given_up.set(true);
            if random.chance(700) {
                here.tasks.kill(collector.process);
                here.world.sleep(Duration::from_nanos(random.below(100_000))).await;
            }
            here.fence(collector.grant, &mut random).await;
        }
        if !here.has_ended.get() {
            start_one(&here, &mut random);
        }
    });
}

/// One collector.
pub(super) struct Collecting {
    process: ProcessId,
    grant: Epoch,
    /// It may be fenced from now on.
    is_given_up: Rc<Cell<bool>>,
}

pub(super) fn start_one(run: &Rc<Run>, random: &mut Random) -> Collecting {
    let place = place(run, random);
    let process = run.world.add_process(place.0);
    let collecting = Collecting { process, grant: run.grant(), is_given_up: Rc::default() };
    let (here, grant, is_given_up) = (run.clone(), collecting.grant, collecting.is_given_up.clone());
    run.tasks.spawn(process, async move {
        if let Err(error) = collects(&here, process, place, grant).await
            && !is_given_up.get()
        {
            here.ledger.notes.complain(format!("the collector stopped: {error}"));
        }
    });
    collecting
}

async fn collects(
    run: &Rc<Run>,
    process: ProcessId,
    place: (HostId, Path),
    grant: Epoch,
) -> Result<(), MemoryError> {
    let Access { memory, grant } = run.access(process, place, grant).await?;
    let (oracle, horizon) = (run.oracle(grant), run.horizon(grant));
    collect::<Chosen>(&memory, &oracle, &horizon, PAUSES, || run.has_ended.get()).await
}
