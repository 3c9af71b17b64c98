//! A member's workers, and what their sessions do.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::ProcessId;
use farpool_txn::membership::Premises;
use farpool_txn::{Session, Worker};
use futures_util::future::{Either, join_all, select};

use super::broken::Engine;
use super::layout::PLACES;
use super::member::Member;
use crate::transacting::Transactor;

/// Transactions of each session.
const ROUNDS: u64 = 6;
/// Records that a transaction touches at most.
const MOST_RECORDS: u64 = 4;
/// Rounds, in thousandths, before which a session idles, and for how long at most.
const IDLES_PERMILLE: u32 = 150;
const MOST_IDLE_NS: u64 = 100_000;
/// Where sessions abandon transactions: how many, in thousandths, and after how long at most.
const GIVEN_UP_PERMILLE: u32 = 40;
const MOST_PATIENCE_NS: u64 = 80_000;

/// Counts down a member's unfinished tasks when it is dropped.
pub(super) struct Busy(pub(super) Rc<Member>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.set(self.0.busy.get() - 1);
    }
}

/// Starts a worker with one or two sessions.
pub(super) fn start(member: &Rc<Member>, number: u16) {
    let (here, busy, part) = (member.clone(), Busy(member.clone()), member.add_client());
    member.run.tasks.spawn(part, async move {
        if let Err(why) = work(&here, part, number).await {
            here.ends(&why);
        }
        drop(busy);
    });
}

/// Registers a worker of a member: until it [leaves], the member does not give its seat back. False: the
/// member has already ended.
pub(super) fn takes_place(member: &Member) -> bool {
    let comes = !member.is_over();
    member.workers.set(member.workers.get() + u32::from(comes));
    comes
}

/// Announces a worker in one of its member's places.
pub(super) async fn announced(
    member: &Member,
    worker: Worker<Engine>,
    number: u16,
) -> Result<Worker<Engine>, String> {
    let place = member.seat.slot.index() as u16 * PLACES + number;
    let announced = worker.announcing(member.horizon(), place).await;
    Ok(announced.map_err(|error| error.to_string())?.expect("there is a place for each"))
}

/// Records that a worker has left. A worker that failed to leave is not recorded: its word may still be
/// there, and the seat is not given back.
pub(super) fn leaves(member: &Member) {
    member.workers.set(member.workers.get() - 1);
}

async fn work(member: &Rc<Member>, part: ProcessId, number: u16) -> Result<(), String> {
    if !takes_place(member) {
        return Ok(());
    }
    let memory = member.memory_of(part).await.map_err(|error| error.to_string())?;
    member.keeps_turning(part, memory.endpoint());
    let worker = Worker::sharing(memory, member.oracle(), member.slot.clone());
    let worker = announced(member, worker.expect("the oracle has the slot"), number).await?;
    let mut random = member.run.ledger.random();
    let sessions = (0..1 + random.below(2)).map(|_| {
        let transactor = Transactor::new(&member.run.ledger, member.at().table());
        live(member, &worker, transactor)
    });
    let sessions: Vec<_> = sessions.collect();
    let done: Result<Vec<()>, String> = join_all(sessions).await.into_iter().collect();
    worker.leave().await.map_err(|error| error.to_string())?;
    leaves(member);
    done.map(drop)
}

async fn live(member: &Member, worker: &Worker<Engine>, mut transactor: Transactor) -> Result<(), String> {
    let (run, mut session) = (&member.run, Session::new());
    for _ in 0..ROUNDS {
        if member.is_over() {
            break;
        }
        if transactor.random.chance(IDLES_PERMILLE) {
            run.world.sleep(Duration::from_nanos(transactor.random.below(MOST_IDLE_NS))).await;
            worker.keep_up().await.map_err(|error| error.to_string())?;
        }
        let is_only_reading = transactor.random.chance(300);
        let records: Vec<_> = (0..1 + transactor.random.below(MOST_RECORDS))
            .map(|_| {
                let record = transactor.random.below(transactor.table.records());
                (record, !is_only_reading && transactor.random.chance(600))
            })
            .collect();
        let gives_up = run.faults.drops && transactor.random.chance(GIVEN_UP_PERMILLE);
        let done = if gives_up {
            let after = Duration::from_nanos(transactor.random.below(MOST_PATIENCE_NS));
            let patience = pin!(run.world.sleep(after));
            let transacting = transactor.transact(worker, &mut session, &records);
            let ended = match select(pin!(transacting), patience).await {
                Either::Left((done, _)) => Some(done),
                Either::Right(_) => None,
            };
            if ended.is_none() {
                // The session does not learn of its own commit, if there was one.
                transactor.name = run.ledger.next_name() as u32;
            }
            ended.unwrap_or(Ok(false))
        } else {
            transactor.transact(worker, &mut session, &records).await
        };
        done.map_err(|stopped| stopped.to_string())?;
    }
    Ok(())
}
