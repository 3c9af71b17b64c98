//! The auditor starts when no more faults occur. It checks that seats of dead members become free, that the
//! roles are filled, that no record stays locked, and that transactions commit.

use std::rc::Rc;
use std::time::Duration;

use farpool_namdb::{DatabaseError, Ended, TxError};
use farpool_txn::SessionState;
use farpool_txn::membership::Role;
use farpool_txn::recovery::RecoveryError;
use farpool_wire::{Epoch, Slot};

use super::bank::Banker;
use super::client::{self, Client};
use super::member::{self, Member, Wanted};
use super::{Run, tables};
use crate::transacting::Transactor;
use crate::transacting::fates::{Asked, Asking};

/// How often a record is written while a snapshot is open.
const WRITTEN_MEANWHILE: u32 = 5;
/// Pause between two checks, and between two attempts.
const PAUSE: Duration = Duration::from_micros(50);
/// Looks whether records of the catalog are locked. A change of the catalog locks them for less time.
const LOOKS_AT_LOCKS: u32 = 20;
/// The number of heartbeat timeouts within which the database must recover. A member is declared dead after
/// one timeout, its recoverer after another, and each may have waited for others.
const PATIENCES: u32 = 20;
/// Additional time for the work of the recovery itself.
const SLACK: Duration = Duration::from_millis(2);
/// Attempts to write a record that others are writing, or while the log has no room; also the most auditors.
const TRIES: u32 = 40;

pub(super) fn start(run: &Rc<Run>) {
    let here = run.clone();
    run.tasks.spawn(run.nowhere, async move {
        while here.left.get() > 0 {
            here.world.sleep(PAUSE).await;
        }
        here.is_quiet.set(true);
        if let Err(why) = audit(&here).await {
            here.ledger.notes.complain(format!("the auditor finds that {why}"));
        }
        here.has_ended.set(true);
        here.members.borrow().iter().for_each(|member| member.core.end(Ended::Closed));
    });
}

async fn audit(run: &Rc<Run>) -> Result<(), String> {
    for _ in 0..TRIES {
        let Some(auditor) = wait_until_recovered(run).await? else {
            run.world.note("no member lives, and no seat is free", &[]);
            // Otherwise their clients would wait for cuts that no member publishes.
            run.members.borrow().iter().for_each(|member| member.kill());
            return Ok(());
        };
        let audited = examine(&auditor).await;
        // Another member may have declared the auditor dead, since heartbeat timeouts are short. Then the
        // next auditor starts.
        if run.observer.lock().is_open(auditor.claim()) {
            return audited;
        }
    }
    Err("every auditor was declared dead".to_owned())
}

/// Waits until the database has recovered, and takes a seat. `None`: the database is lost.
async fn wait_until_recovered(run: &Rc<Run>) -> Result<Option<Rc<Member>>, String> {
    let give_up_at = run.world.now_ns() + (run.patience * PATIENCES + SLACK).as_nanos() as u64;
    let mut auditor = None;
    while !is_lost(run) {
        auditor = auditor.filter(|member: &Rc<Member>| member.lives());
        if auditor.is_none() {
            auditor = start_auditor(run).await;
        }
        let recovered = check_recovered(run);
        if recovered.is_ok() && auditor.is_some() {
            return Ok(auditor);
        }
        if run.world.now_ns() > give_up_at {
            return Err(recovered.err().unwrap_or_else(|| "no process can join any more".to_owned()));
        }
        run.world.sleep(PAUSE).await;
    }
    Ok(None)
}

/// Whether the database is lost: no member lives and no seat is free. A process without a seat cannot recover
/// a member.
fn is_lost(run: &Run) -> bool {
    let seats = run.observer.lock().look().seats(&run.layout);
    !run.members.borrow().iter().any(|member| member.lives()) && seats.iter().all(|seat| seat.claim.is_some())
}

/// Starts another member. If there is no seat for it, closes one of the others.
async fn start_auditor(run: &Rc<Run>) -> Option<Rc<Member>> {
    let living: Vec<Rc<Member>> =
        run.members.borrow().iter().filter(|member| member.lives()).cloned().collect();
    if living.len() >= usize::from(run.layout.shape.slots) {
        living[0].core.end(Ended::Closed);
    }
    let wanted = Wanted { clients: 0, changes_catalog: false };
    let auditor = member::start(run, wanted, &mut run.ledger.notes.random());
    while auditor.member.borrow().is_none() && !auditor.has_ended.get() {
        run.world.sleep(PAUSE).await;
    }
    auditor.member.borrow().clone()
}

/// Checks that all seats and roles belong to live members, or are free where that is allowed.
fn check_recovered(run: &Run) -> Result<(), String> {
    let root = run.observer.lock().look();
    let lives =
        |claim: Epoch| run.members.borrow().iter().any(|member| member.claim() == claim && member.lives());
    for (slot, seat) in root.seats(&run.layout).iter().enumerate() {
        if let Some(claim) = seat.claim.filter(|claim| !lives(*claim)) {
            return Err(format!("seat {slot} still belongs to member {claim}, which is dead"));
        }
    }
    for role in [Role::Publisher, Role::Collector] {
        if !root.role(&run.layout, role).is_some_and(lives) {
            return Err(format!("no live member is the {role:?}"));
        }
    }
    match root.role(&run.layout, Role::Catalog).filter(|claim| !lives(*claim)) {
        Some(claim) => Err(format!("the catalog role still belongs to member {claim}, which is dead")),
        None => Ok(()),
    }
}

/// Asks for the outcomes of all commits, and does everything that clients do.
async fn examine(auditor: &Rc<Member>) -> Result<(), String> {
    let part = auditor.add_client();
    let mut client = client::join(auditor, part).await.map_err(|error| error.to_string())?;
    let examined = examine_as(auditor, &client).await;
    client.leave().await;
    examined
}

async fn examine_as(auditor: &Rc<Member>, client: &Client) -> Result<(), String> {
    let (run, told) = (&auditor.run, |error: TxError| error.to_string());
    ask(auditor).await.map_err(|error| error.to_string())?;
    // The member that changed the catalog last may have died.
    tables::audit(run, client).await.map_err(told)?;
    let rows = tables::open_rows(run, client).await.map_err(told)?;
    let mut transactor = Transactor::new(&run.ledger, rows.records());
    let numbers: Vec<u64> = tables::numbers(&rows.records()).collect();
    let mut session = SessionState::new();
    for &record in &numbers {
        write(run, client, &mut transactor, &mut session, record).await?;
    }
    let all: Vec<_> = numbers.iter().map(|&record| (record, false)).collect();
    client::transact(client, &mut transactor, &mut session, &all).await.map_err(told)?;
    Banker::open(run, client).await.map_err(told)?.audit().await.map_err(told)?;
    hold_a_snapshot(run, client, &mut transactor, numbers[0]).await?;
    // The collector may be about to free memory.
    for _ in 0..LOOKS_AT_LOCKS {
        if !run.observer.lock().has_catalog_locks() {
            return Ok(());
        }
        run.world.sleep(PAUSE).await;
    }
    Err("the catalog has records that stay locked".to_owned())
}

async fn write(
    run: &Run,
    client: &Client,
    transactor: &mut Transactor,
    session: &mut SessionState,
    record: u64,
) -> Result<(), String> {
    for _ in 0..TRIES {
        let tried = client::transact(client, transactor, session, &[(record, true)]).await;
        if tried.map_err(|error| error.to_string())? {
            return Ok(());
        }
        run.world.sleep(PAUSE).await;
    }
    Err(format!("record {record} cannot be written: it stays locked, or the log stays full"))
}

/// Writes a record several times while a snapshot is open, which must not change.
async fn hold_a_snapshot(
    run: &Run,
    client: &Client,
    transactor: &mut Transactor,
    record: u64,
) -> Result<(), String> {
    let _busy = client.mark_busy().await.map_err(|error| error.to_string())?;
    let table = transactor.table.clone();
    let (mut holding, mut writing) = (SessionState::new(), SessionState::new());
    let snapshot = client.worker().begin(&mut holding).await.map_err(|error| error.to_string())?;
    let read = async || snapshot.read(&table, record).await.map_err(|error| error.to_string());
    let before = read().await?;
    for _ in 0..WRITTEN_MEANWHILE {
        let written = write(run, client, transactor, &mut writing, record).await;
        written.map_err(|why| format!("while a snapshot is open, {why}"))?;
    }
    let after = read().await?;
    if (before.version, &before.data) != (after.version, &after.data) {
        return Err(format!("record {record} changes in an open snapshot"));
    }
    Ok(())
}

async fn ask(auditor: &Rc<Member>) -> Result<(), RecoveryError> {
    let (core, endpoint) = (&auditor.core, auditor.endpoint(auditor.process));
    let memory = match core.memory(endpoint).await {
        Ok(memory) => memory,
        Err(DatabaseError::Memory(error)) => return Err(error.into()),
        Err(_) => return Ok(()), // the auditor was declared dead: the next one asks
    };
    let oracle = core.at().oracle();
    let log_of = |slot| core.at().log(Slot::new(slot).expect("a few slots"));
    let asking = Asking { ledger: &auditor.run.ledger, memory: &memory, oracle: &oracle, log_of };
    asking.learn_fates(|_| true).await?;
    asking.ask_again(Asked::Each, |_| true).await
}
