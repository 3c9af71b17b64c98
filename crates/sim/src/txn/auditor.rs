//! The auditor starts when all clients have ended. It checks that every record is unlocked and holds what the
//! judge expects.

use std::rc::Rc;
use std::time::Duration;

use farpool_txn::recovery::RecoveryError;
use farpool_txn::{Oracle, SessionState, Worker};
use farpool_wire::Slot;

use super::broken::Chosen;
use super::client::Client;
use super::recovering::asking;
use super::{Access, Run, oracle, place};
use crate::transacting::fates::Asked;

/// Pause between two checks whether all clients have ended, and between two attempts.
const PAUSE: Duration = Duration::from_micros(50);
/// Attempts to write a record: the last commits may not be published yet.
const TRIES: u32 = 40;

/// Waits for the clients to end, then writes and reads every record.
pub(super) fn start(run: &Rc<Run>) {
    let mut random = run.ledger.notes.random();
    let place = place(run, &mut random);
    let process = run.world.add_process(place.0);
    let here = run.clone();
    run.tasks.spawn(process, async move {
        while here.left.get() > 0 {
            here.world.sleep(PAUSE).await;
        }
        here.is_quiet.set(true);
        let staying = here.left.stay();
        if let Err(why) = audit(&here, process, place).await {
            here.ledger.notes.complain(format!("the auditor finds that {why}"));
        }
        here.has_ended.set(true);
        drop(staying);
    });
}

async fn audit(
    run: &Rc<Run>,
    process: farpool_fabric::sim::ProcessId,
    place: (farpool_fabric::sim::HostId, farpool_fabric::sim::Path),
) -> Result<(), String> {
    let grant = run.grant();
    let access = run.access(process, place, grant).await.map_err(|error| error.to_string())?;
    let of_run = run.oracle(grant);
    ask_all(run, &access, &of_run).await.map_err(|error| error.to_string())?;
    let slot = Slot::new(run.slots).expect("a few slots");
    let worker = Worker::<Chosen>::new(
        access.memory,
        of_run,
        run.logs(grant),
        slot,
        run.firsts[usize::from(run.slots)],
    );
    let worker = worker.expect("the oracle has a slot for the auditor");
    let worker = worker.announcing(run.horizon(grant), oracle::first_place(run.slots)).await;
    let worker = worker.map_err(|error| error.to_string())?.expect("and a place");
    run.seat(run.slots, Some(grant));
    let mut auditor = Client::new(run, run.slots, grant, run.slab(grant));
    let mut session = SessionState::new();
    for record in 0..run.table(grant).records() {
        let mut is_written = false;
        for _ in 0..if run.faults.damage { 1 } else { TRIES } {
            is_written = auditor.transact(&worker, &mut session, &[(record, true)]).await?;
            if is_written {
                break;
            }
            // Clients that ended without leaving their slots keep their chunks, so there may be no free
            // block.
            auditor.be_frugal();
            run.world.sleep(PAUSE).await;
        }
        if !is_written && !run.faults.damage {
            return Err(format!("record {record} cannot be written: it stays locked, or the log stays full"));
        }
    }
    let all: Vec<_> = (0..run.table(grant).records()).map(|record| (record, false)).collect();
    auditor.transact(&worker, &mut session, &all).await.map(drop)
}

/// Asks for the outcomes of all commits.
async fn ask_all(run: &Run, access: &Access, oracle: &Oracle) -> Result<(), RecoveryError> {
    let asking = asking(run, access, oracle);
    asking.learn_fates(|_| true).await?;
    asking.ask_again(Asked::Each, |_| true).await
}
