//! Transactions that change the catalog (C1, C2).

use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::block_on;
use farpool_txn::membership::{Role, give_up_role, take_role};
use farpool_txn::recovery::recover;
use farpool_txn::{CommitError, Memory, MemoryError, Session, SharedSlot, Shipped, Transaction, Worker};

use super::Catalog;
use crate::client::has_left;
use crate::database::Shared;
use crate::error::{Ended, Stop, TxError};
use crate::plan::MOST_WORKERS;
use crate::trouble::{failed, told};
use crate::workers::Place;

/// How long somebody else's change is waited for: longer than it takes until he is taken for dead, usually.
const ROLE_PATIENCE: Duration = Duration::from_secs(20);
const ROLE_PAUSE: Duration = Duration::from_millis(2);
/// Tries of a change. Nobody else writes there; only the log may be full for a moment.
const TRIES: u32 = 100;

/// Who changes the catalog, in the slot that is for that.
pub(super) struct Change {
    worker: Worker<Shipped>,
    catalog: Catalog,
}

/// Changes the catalog, while nobody else does.
pub(super) fn change<T>(
    shared: &Shared,
    task: impl AsyncFnOnce(&Change) -> Result<T, TxError>,
) -> Result<T, TxError> {
    let _one_thread = shared.catalog.lock();
    shared.check().map_err(TxError::Ended)?;
    let memory = shared.memory().map_err(|error| told(shared.explained_here(error)))?;
    let endpoint = memory.endpoint().clone();
    let at = shared.at().members();
    let place = shared.workers.take().ok_or(TxError::TooManyClients(MOST_WORKERS))?;
    // Once more: from here on the seat is not given back, but it may have been.
    shared.check().map_err(TxError::Ended)?;
    let number = shared.plan.workers(shared.seat.slot).start + place.number();
    let place = Taken { shared, place: Some(place) };
    // Others wait for the member that has the role: if its thread stands still, this process's part ends.
    let _held = shared.slot.held_by(&endpoint);
    let done = block_on(&endpoint, async {
        let give_up_at = endpoint.now_ns() + ROLE_PATIENCE.as_nanos() as u64;
        while !take_role(&memory, &at, Role::Catalog, shared.seat.claim).await.map_err(TxError::Memory)? {
            if let Err(ended) = shared.check() {
                return Ok((Err(TxError::Ended(ended)), Ok(())));
            }
            if endpoint.now_ns() > give_up_at {
                return Ok((Err(TxError::CatalogBusy), Ok(())));
            }
            endpoint.sleep(ROLE_PAUSE).await;
        }
        let slot = shared.plan.catalog_slot();
        let (oracle, log) = (shared.at().oracle(), shared.at().log(slot));
        let recovered = recover(&memory, &oracle, &log, slot).await.map_err(|error| told(error.into()))?;
        let slot = Arc::new(SharedSlot::after(slot, log, recovered.last));
        let worker: Worker<Shipped> =
            Worker::sharing(memory, oracle, slot).expect("the oracle has a slot for it");
        let worker =
            worker.announcing(shared.at().horizon(), number).await?.expect("the plan has a place for each");
        let change = Change { worker, catalog: Catalog::new(shared) };
        let changed = task(&change).await;
        let left = change.worker.leave().await;
        // Not only commits: zeros for the memory of a dropped table may be under way as well.
        if let Err(error @ (TxError::Unknown(_) | TxError::Memory(MemoryError::Failed(_)))) = changed {
            return Err(error);
        }
        let given_up = give_up_role(change.memory(), &at, Role::Catalog, shared.seat.claim).await;
        if let Err(error) = given_up {
            // What was changed is changed all the same.
            failed(shared, error.into());
        }
        Ok((changed, left))
    });
    match done {
        Ok((changed, left)) => {
            has_left(shared, place.back(), left);
            changed
        }
        Err(error) => {
            // What was sent may still land: nobody changes anything until this process was shut out.
            place.keep();
            let error = block_on(&endpoint, async {
                if let TxError::Unknown(_) = error {
                    shared.learns_why(&endpoint).await;
                }
                shared.explained_tx(&endpoint, error).await
            });
            shared.end(Ended::Failed(error.to_string()));
            Err(error)
        }
    }
}

/// The place of the client that changes the catalog. If it is dropped without being given [back](Self::back),
/// by a panic for instance, the process's part in the database ends: the role passes to another member only
/// once this process is shut out.
struct Taken<'a> {
    shared: &'a Shared,
    place: Option<Place>,
}

impl Taken<'_> {
    /// Gives the place back: nothing is in flight any more.
    fn back(mut self) -> Place {
        self.place.take().expect("it was not given back")
    }

    /// Keeps the place for good: it is unknown what is in flight.
    fn keep(self) {
        self.back().keep();
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        place.keep();
        self.shared.end(Ended::Failed(
            "a change of tables was interrupted half-way: open the database again".to_owned(),
        ));
    }
}

impl Change {
    /// Its way to far memory.
    pub(super) fn memory(&self) -> &Memory {
        self.worker.memory()
    }

    /// Between two steps of long work, while no transaction is open: it needs no old snapshot, and shows that
    /// its thread runs.
    pub(super) async fn keep_up(&self) -> Result<(), TxError> {
        self.memory().endpoint().yield_now().await;
        Ok(self.worker.keep_up().await?)
    }

    /// Runs a transaction.
    pub(super) async fn transact<T>(
        &self,
        body: impl AsyncFn(&mut Transaction<'_, Shipped>, &Catalog) -> Result<T, Stop>,
    ) -> Result<T, TxError> {
        let (worker, mut session) = (&self.worker, Session::new());
        let mut last = TxError::CatalogBusy;
        for _ in 0..TRIES {
            let mut transaction = worker.begin(&mut session).await?;
            let done = match body(&mut transaction, &self.catalog).await {
                Ok(done) => done,
                Err(Stop::For(error)) => return Err(error),
                Err(Stop::Again(error)) => {
                    last = error;
                    drop(transaction);
                    worker.memory().endpoint().sleep(ROLE_PAUSE).await;
                    continue;
                }
            };
            match transaction.commit().await {
                Ok(_) => {
                    // Until a snapshot has it, so that whoever is told of the table finds it. If none comes,
                    // it is committed all the same.
                    let _ = worker.begin(&mut session).await;
                    return Ok(done);
                }
                Err(CommitError::Conflict | CommitError::Busy) => {}
                Err(CommitError::Nothing(error)) => return Err(TxError::Memory(error)),
                Err(CommitError::Unknown(version)) => return Err(TxError::Unknown(version)),
                Err(error) => return Err(TxError::TooLarge(error)),
            }
        }
        Err(last)
    }
}
