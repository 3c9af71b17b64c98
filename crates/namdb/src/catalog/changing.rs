//! Transactions that change the catalog (C1, C2).

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use farpool_fabric::Endpoint;
use farpool_txn::membership::{Role, give_up_role, take_role};
use farpool_txn::recovery::recover;
use farpool_txn::{
    CommitError, LeaveError, Memory, MemoryError, SessionState, SharedSlot, Transaction, Worker,
};
use farpool_wire::Epoch;

use super::Catalog;
use super::returning::leave_empty_regions;
use crate::environment::Environment;
use crate::error::{DatabaseError, Ended, Stop, TxError};
use crate::member::MemberCore;
use crate::workers::ClientPlace;

/// The part of [`Timing::catalog_timeout`](crate::environment::Timing::catalog_timeout) for which a change is
/// tried; others wait for all of it. No other client writes there, but the log may be full
/// until the horizon has moved, which takes long on a busy machine.
const TRYING_PART: u32 = 2;

/// A client that changes the catalog, in the slot for that.
pub(super) struct Change<'a, E: Environment> {
    pub(super) member: &'a MemberCore<E>,
    worker: Worker<E::Rules>,
    catalog: Catalog,
    /// Memory has become free.
    has_freed: Cell<bool>,
}

/// The result of a change, and of its client's leaving.
type Changed<T> = (Result<T, TxError>, Result<(), LeaveError>);

/// Changes the catalog. No other client changes it meanwhile.
pub(super) async fn change<T, E: Environment>(
    _turn: Turn<'_>,
    member: &MemberCore<E>,
    endpoint: &Endpoint,
    task: impl AsyncFnOnce(&Change<'_, E>) -> Result<T, TxError>,
) -> Result<T, TxError> {
    let place = Taken { member, place: Some(member.take_place()?), is_idle: Cell::new(true) };
    let memory = match member.memory(endpoint.clone()).await {
        Ok(memory) => memory,
        Err(error) => return Err(member.find_cause(endpoint, error).await.into()),
    };
    // If this thread stands still while others wait for the role, the member's heartbeats stop.
    let _held = member.slot().held_by(endpoint);
    match change_in_role(member, memory, &place, task).await {
        Ok((changed, left)) => {
            member.return_place(place.back(), left);
            changed
        }
        Err(error) => {
            // Writes in flight may still land: no client may change anything until this member is evicted. So
            // the place is kept until it has ended, also if this future is dropped meanwhile.
            if let TxError::Unknown(_) = error {
                member.wait_for_cause(endpoint).await;
            }
            let error = member.find_cause_tx(endpoint, error).await;
            member.end(Ended::Failed(error.to_string()));
            drop(place);
            Err(error)
        }
    }
}

/// Takes the catalog's role, recovers the catalog's slot, and runs the task. An outer error means that it is
/// unknown what is in flight; what the task returned is inside.
async fn change_in_role<T, E: Environment>(
    member: &MemberCore<E>,
    memory: Memory,
    place: &Taken<'_, E>,
    task: impl AsyncFnOnce(&Change<'_, E>) -> Result<T, TxError>,
) -> Result<Changed<T>, TxError> {
    let (at, claim, timing) = (member.at(), member.seat().claim, member.timing());
    let endpoint = memory.endpoint().clone();
    let give_up_at = endpoint.now_ns() + timing.catalog_timeout.as_nanos() as u64;
    while !place.try_to_take_role(&memory, claim).await? {
        if let Err(ended) = member.check() {
            return Ok((Err(TxError::Ended(ended)), Ok(())));
        }
        if endpoint.now_ns() > give_up_at {
            return Ok((Err(TxError::CatalogBusy), Ok(())));
        }
        endpoint.sleep(timing.catalog_pause).await;
    }
    let slot = at.layout.catalog_slot();
    let oracle = at.oracle();
    let recovered = recover(&memory, &oracle, &at.log(slot), slot).await.map_err(DatabaseError::from)?;
    let slot = SharedSlot::recovered(slot, at.logs(), &recovered).expect("each slot has a log");
    let worker = Worker::sharing(memory, oracle, Arc::new(slot)).expect("the oracle has a slot for it");
    let worker = member.announce_in_place(worker, place.number()).await?;
    let change = Change { member, worker, catalog: Catalog::new(at), has_freed: Cell::new(false) };
    let opened = member.open_later_regions(change.memory()).await;
    let has_begun = opened.is_ok();
    let changed = match opened {
        Ok(()) => task(&change).await,
        Err(error) => Err(error.into()),
    };
    let emptied = if change.has_freed.get() { leave_empty_regions(&change).await } else { Ok(()) };
    let left = change.worker.leave().await;
    // Not only commits: zeros for the memory of a dropped table may be in flight as well.
    if has_begun && changed.as_ref().is_err_and(is_in_doubt) {
        return changed.map(|done| (Ok(done), left));
    }
    // From here on, the change has taken effect all the same: only the member ends.
    match emptied {
        Err(error) if is_in_doubt(&error) => member.end(Ended::Failed(error.to_string())),
        _ => {
            if let Err(error) = give_up_role(change.memory(), &at.members(), Role::Catalog, claim).await {
                member.end_after(error.into());
            }
        }
    }
    Ok((changed, left))
}

/// Whether something may be in flight.
fn is_in_doubt(error: &TxError) -> bool {
    matches!(error, TxError::Unknown(_) | TxError::Memory(MemoryError::Failed(_)))
}

/// The right to change the catalog, which one client of a member has at a time.
pub(crate) struct Turn<'a>(&'a AtomicBool);

impl<'a> Turn<'a> {
    /// Waits for it.
    pub(crate) async fn wait_for<E: Environment>(
        member: &'a MemberCore<E>,
        endpoint: &Endpoint,
    ) -> Result<Turn<'a>, TxError> {
        // Acquire: pairs with the release of the client that has changed the catalog before.
        while member.changes_catalog.swap(true, Ordering::Acquire) {
            member.check().map_err(TxError::Ended)?;
            endpoint.sleep(member.timing().catalog_pause).await;
        }
        let turn = Turn(&member.changes_catalog);
        member.check().map_err(TxError::Ended)?;
        Ok(turn)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The place of the client that changes the catalog. If it is dropped without being given [back](Self::back),
/// by a panic for instance, the member ends: the role passes to another member only once this one is
/// evicted.
struct Taken<'a, E: Environment> {
    member: &'a MemberCore<E>,
    place: Option<ClientPlace>,
    /// It does not have the role, and nothing is in flight: it may be dropped.
    is_idle: Cell<bool>,
}

impl<E: Environment> Taken<'_, E> {
    fn number(&self) -> u16 {
        self.place.as_ref().expect("it was not given back").number()
    }

    /// Tries to take the role. False: another member has it, or this thread's buffers are all in use.
    async fn try_to_take_role(&self, memory: &Memory, claim: Epoch) -> Result<bool, TxError> {
        self.is_idle.set(false);
        match take_role(memory, &self.member.at().members(), Role::Catalog, claim).await {
            Ok(true) => return Ok(true),
            Ok(false) | Err(MemoryError::Short(_)) => {}
            Err(error) => return Err(TxError::Memory(error)),
        }
        self.is_idle.set(true);
        Ok(false)
    }

    /// Gives the place back: nothing is in flight any more.
    fn back(mut self) -> ClientPlace {
        self.place.take().expect("it was not given back")
    }
}

impl<E: Environment> Drop for Taken<'_, E> {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        if self.is_idle.get() {
            return place.free();
        }
        self.member.end(Ended::Failed(
            "a change of tables was interrupted half-way: open the database again".to_owned(),
        ));
    }
}

impl<E: Environment> Change<'_, E> {
    /// Its access to far memory.
    pub(super) fn memory(&self) -> &Memory {
        self.worker.memory()
    }

    /// Memory has become free: at the end of the change, regions without tables are left.
    pub(super) fn note_freed(&self) {
        self.has_freed.set(true);
    }

    /// Called between two steps of long work, while no transaction is open: takes a newer snapshot and
    /// announces it, so that old versions can be freed, and shows others that this thread runs.
    pub(super) async fn keep_up(&self) -> Result<(), TxError> {
        self.memory().endpoint().yield_now().await;
        Ok(self.worker.keep_up().await?)
    }

    /// Runs a transaction.
    pub(super) async fn transact<T>(
        &self,
        body: impl AsyncFn(&Transaction<'_, E::Rules>, &Catalog) -> Result<T, Stop>,
    ) -> Result<T, TxError> {
        let (worker, mut session) = (&self.worker, SessionState::new());
        let (endpoint, timing) = (self.memory().endpoint(), self.member.timing());
        let give_up_at = endpoint.now_ns() + (timing.catalog_timeout / TRYING_PART).as_nanos() as u64;
        loop {
            let transaction = worker.begin(&mut session).await?;
            let failed = match body(&transaction, &self.catalog).await {
                Ok(done) => match transaction.commit().await {
                    Ok(_) => {
                        // Waits until a published cut has the commit, so that clients that are told of the
                        // table find it. A failure to wait changes nothing: it is committed.
                        let _ = worker.begin(&mut session).await;
                        return Ok(done);
                    }
                    Err(CommitError::Conflict | CommitError::Busy) => TxError::CatalogBusy,
                    Err(CommitError::LogFull) => TxError::NoRoomForVersions,
                    Err(CommitError::Nothing(error)) => return Err(TxError::Memory(error)),
                    Err(CommitError::Unknown(version)) => return Err(TxError::Unknown(version)),
                    Err(error) => return Err(TxError::TooLarge(error)),
                },
                Err(Stop::For(error)) => return Err(error),
                Err(Stop::Again(error)) => {
                    drop(transaction);
                    error
                }
            };
            if endpoint.now_ns() > give_up_at {
                return Err(failed);
            }
            endpoint.sleep(timing.catalog_pause).await;
        }
    }
}
