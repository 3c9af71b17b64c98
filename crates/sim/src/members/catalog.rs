//! Changes of the catalog. They are commits in a slot of their own, which belongs to the holder of the
//! catalog role, one member at a time (`docs/src/namdb.md`, *the catalog*). Here the catalog is the same
//! records that all members work on.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_txn::membership::{Premises, Role, give_up_role, take_role};
use farpool_txn::recovery::recover;
use farpool_txn::{Session, SharedSlot, Worker};

use super::broken::Engine;
use super::client::{Busy, announced, leaves, takes_place};
use super::layout::CATALOG_PLACE;
use super::member::Member;
use crate::transacting::Transactor;

/// Pause between two checks whether the role is free.
const PAUSE: Duration = Duration::from_micros(30);
/// Changes that a member makes.
const CHANGES: u64 = 2;
const MOST_PAUSE_NS: u64 = 300_000;

/// Starts a member's changes.
pub(super) fn start(member: &Rc<Member>) {
    let (here, busy) = (member.clone(), Busy(member.clone()));
    member.run.tasks.spawn(member.process, async move {
        let mut random = here.run.ledger.random();
        for _ in 0..CHANGES {
            here.run.world.sleep(Duration::from_nanos(random.below(MOST_PAUSE_NS))).await;
            // In-flight writes may still land: no member changes the catalog until this one was evicted.
            if let Err(why) = change(&here).await {
                here.ends(&why);
                break;
            }
        }
        drop(busy);
    });
}

/// Recovers the slot like one whose client has died, and commits a change in it.
pub(super) async fn change(member: &Rc<Member>) -> Result<(), String> {
    let (run, at, claim) = (&member.run, member.members(), member.seat.claim);
    let told = |error: &dyn std::error::Error| error.to_string();
    if !takes_place(member) {
        return Ok(());
    }
    let memory = member.memory().await.map_err(|error| told(&error))?;
    member.keeps_turning(member.process, memory.endpoint());
    let _held = member.slot.held_by(memory.endpoint());
    while !take_role(&memory, &at, Role::Catalog, claim).await.map_err(|error| told(&error))? {
        if member.is_over() {
            leaves(member);
            return Ok(());
        }
        run.world.sleep(PAUSE).await;
    }
    let (oracle, slot) = (member.oracle(), run.plan.catalog_slot());
    let log = member.log(slot);
    let recovered = recover(&memory, &oracle, &log, slot).await.map_err(|error| told(&error))?;
    let shared = Arc::new(SharedSlot::after(slot, log, recovered.last));
    let worker = Worker::<Engine>::sharing(memory, oracle, shared);
    let worker = announced(member, worker.expect("the oracle has the slot"), CATALOG_PLACE).await?;
    let mut transactor = Transactor::new(&run.ledger, member.at().table());
    let record = transactor.random.below(transactor.table.records());
    let changed = transactor.transact(&worker, &mut Session::new(), &[(record, true)]).await;
    worker.leave().await.map_err(|error| told(&error))?;
    changed.map_err(|stopped| stopped.to_string())?;
    let given_up = give_up_role(worker.memory(), &at, Role::Catalog, claim).await;
    given_up.map_err(|error| told(&error))?;
    leaves(member);
    Ok(())
}
