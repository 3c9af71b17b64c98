//! The auditor starts when no more faults occur. It checks that seats of dead members become free, that the
//! roles are filled, that no record stays locked, and that transactions commit.

use std::rc::Rc;
use std::time::Duration;

use farpool_txn::membership::{Premises, Role};
use farpool_txn::recovery::RecoveryError;
use farpool_txn::{Session, Worker};
use farpool_wire::Epoch;

use super::broken::Engine;
use super::client::{announced, leaves, takes_place};
use super::member::{Member, Wanted};
use super::{Run, catalog, member};
use crate::transacting::Transactor;
use crate::transacting::fates::{Asked, Asking};

/// Pause between two checks, and between two attempts.
const PAUSE: Duration = Duration::from_micros(50);
/// Heartbeat timeouts within which the database recovers. A member is declared dead after one, its recoverer
/// after another, and each may have waited for others.
const PATIENCES: u32 = 20;
/// Additional time for the work of the recovery itself.
const SLACK: Duration = Duration::from_millis(2);
/// Attempts to write a record that others are writing, or that has no room.
const TRIES: u32 = 40;

pub(super) fn start(run: &Rc<Run>) {
    let here = run.clone();
    run.tasks.spawn(run.nowhere, async move {
        while here.left.get() > 0 {
            here.world.sleep(PAUSE).await;
        }
        here.is_quiet.set(true);
        if let Err(why) = audit(&here).await {
            here.ledger.complain(format!("the auditor finds that {why}"));
        }
        here.is_over.set(true);
    });
}

async fn audit(run: &Rc<Run>) -> Result<(), String> {
    for _ in 0..TRIES {
        let Some(auditor) = comes_right(run).await? else {
            run.world.note("no member lives, and no seat is free", &[]);
            // Their clients would wait for cuts that no member publishes.
            run.members.borrow().iter().for_each(|member| member.kill());
            return Ok(());
        };
        let audited = examine(&auditor).await;
        // Even now a member with a heartbeat timeout that is too short may have declared it dead.
        if auditor.lives() {
            return audited;
        }
    }
    Ok(())
}

/// Waits until the database has recovered, and takes a seat. `None`: the database is lost.
async fn comes_right(run: &Rc<Run>) -> Result<Option<Rc<Member>>, String> {
    let give_up_at = run.world.now_ns() + (run.patience * PATIENCES + SLACK).as_nanos() as u64;
    let mut auditor = None;
    while !is_lost(run) {
        auditor = auditor.filter(|member: &Rc<Member>| member.lives());
        if auditor.is_none() {
            auditor = join_in(run).await;
        }
        let right = is_right(run);
        if right.is_ok() && auditor.is_some() {
            return Ok(auditor);
        }
        if run.world.now_ns() > give_up_at {
            return Err(right.err().unwrap_or_else(|| "nobody can join any more".to_owned()));
        }
        run.world.sleep(PAUSE).await;
    }
    Ok(None)
}

/// Whether the database is lost: it lasts as long as one member lives, since a process without a seat
/// recovers no member.
fn is_lost(run: &Run) -> bool {
    let seats = run.observer.lock().look().seats(&run.plan);
    !run.members.borrow().iter().any(|member| member.lives()) && seats.iter().all(|seat| seat.claim.is_some())
}

/// Starts another member. If there is no seat for it, one of the others leaves.
async fn join_in(run: &Rc<Run>) -> Option<Rc<Member>> {
    let living: Vec<Rc<Member>> =
        run.members.borrow().iter().filter(|member| member.lives()).cloned().collect();
    if living.len() >= usize::from(run.plan.slots) {
        living[0].is_over.set(true);
    }
    let wanted = Wanted { workers: 0, changes_catalog: false };
    let auditor = member::start(run, wanted, &mut run.ledger.random());
    while auditor.member.borrow().is_none() && !auditor.has_ended.get() {
        run.world.sleep(PAUSE).await;
    }
    auditor.member.borrow().clone()
}

/// Whether all seats and roles belong to living members, or are free where that is allowed.
fn is_right(run: &Run) -> Result<(), String> {
    let root = run.observer.lock().look();
    let lives =
        |claim: Epoch| run.members.borrow().iter().any(|member| member.seat.claim == claim && member.lives());
    for (slot, seat) in root.seats(&run.plan).iter().enumerate() {
        if let Some(claim) = seat.claim.filter(|claim| !lives(*claim)) {
            return Err(format!("seat {slot} is still that of member {claim}, who does not live"));
        }
    }
    for role in [Role::Publisher, Role::Collector] {
        if !root.role(&run.plan, role).is_some_and(lives) {
            return Err(format!("nobody is {role:?}"));
        }
    }
    match root.role(&run.plan, Role::Catalog).filter(|claim| !lives(*claim)) {
        Some(claim) => Err(format!("the catalog is still member {claim}'s, who does not live")),
        None => Ok(()),
    }
}

/// Asks for the outcomes of all commits, writes all records, and reads them.
async fn examine(auditor: &Rc<Member>) -> Result<(), String> {
    // The member that changed the catalog last may have died.
    catalog::change(auditor).await?;
    ask(auditor).await.map_err(|error| error.to_string())?;
    let (run, memory) = (&auditor.run, auditor.memory().await.map_err(|error| error.to_string())?);
    if !takes_place(auditor) {
        return Ok(());
    }
    let worker = Worker::<Engine>::sharing(memory, auditor.oracle(), auditor.slot.clone());
    let worker = announced(auditor, worker.expect("the oracle has the slot"), 0).await?;
    let mut transactor = Transactor::new(&run.ledger, auditor.at().table());
    let mut session = Session::new();
    for record in 0..transactor.table.records() {
        let mut is_written = false;
        for _ in 0..TRIES {
            let tried = transactor.transact(&worker, &mut session, &[(record, true)]).await;
            is_written = tried.map_err(|stopped| stopped.to_string())?;
            if is_written {
                break;
            }
            run.world.sleep(PAUSE).await;
        }
        if !is_written {
            return Err(format!("record {record} stays locked"));
        }
    }
    let all: Vec<_> = (0..transactor.table.records()).map(|record| (record, false)).collect();
    let read = transactor.transact(&worker, &mut session, &all).await;
    read.map_err(|stopped| stopped.to_string())?;
    worker.leave().await.map_err(|error| error.to_string())?;
    leaves(auditor);
    Ok(())
}

async fn ask(auditor: &Rc<Member>) -> Result<(), RecoveryError> {
    let memory = auditor.memory().await?;
    let oracle = auditor.oracle();
    let log_of = |slot| auditor.at().log(slot);
    let asking = Asking { ledger: &auditor.run.ledger, memory: &memory, oracle: &oracle, log_of };
    asking.learn_fates(|_| true).await?;
    asking.ask_again(Asked::Each, |_| true).await
}
