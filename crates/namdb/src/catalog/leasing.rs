//! More memory for the database: regions that the pool lends later (`docs/src/namdb.md`, *memory that is
//! leased later*).

use std::cell::Cell;

use farpool_pool::JointError;
use farpool_txn::later::Stage;
use farpool_txn::{MemoryError, Transaction};
use farpool_wire::control::Lease;

use super::Catalog;
use super::changing::Change;
use crate::environment::Environment;
use crate::error::{Stop, TxError};
use crate::regions::LaterRegion;

/// A database asks for this part of the regions that it has at least, so that it rarely has to ask the pool.
const LEASED_PART: usize = 4;

const LONG_ADDRESSES: &str = "the addresses of the pool's nodes are too long for the database's list of regions: \
                              give the nodes shorter names";

/// Why pieces of a table have no place.
pub(super) struct Unplaced {
    pub(super) error: TxError,
    /// With so many more regions they would have one. `None`: more regions would not help.
    pub(super) regions: Option<usize>,
}

impl From<TxError> for Unplaced {
    fn from(error: TxError) -> Unplaced {
        Unplaced { error, regions: None }
    }
}

/// The regions that a transaction lacked.
#[derive(Default)]
pub(super) struct Lacking {
    regions: Cell<Option<usize>>,
}

impl Lacking {
    /// Notes what a transaction lacks.
    pub(super) fn note<T>(&self, placed: Result<T, Unplaced>) -> Result<T, TxError> {
        self.regions.set(placed.as_ref().err().and_then(|unplaced| unplaced.regions));
        placed.map_err(|unplaced| unplaced.error)
    }

    /// If a transaction lacked regions, leases more, and tries again.
    pub(super) async fn lease_and_try_again<T, E: Environment>(
        &self,
        done: Result<T, TxError>,
        change: &Change<'_, E>,
        body: &impl AsyncFn(&Transaction<'_, E::Rules>, &Catalog) -> Result<T, Stop>,
    ) -> Result<T, TxError> {
        let (Err(TxError::NoSpace(why)), Some(regions)) = (&done, self.regions.get()) else { return done };
        let leased = lease_more(change, regions).await.map_err(|error| match error {
            TxError::NoSpace(refusal) => TxError::NoSpace(format!("{why}; {refusal}")),
            error => error,
        });
        let done = match leased {
            Ok(()) => change.transact(body).await,
            Err(error) => Err(error),
        };
        match done {
            Ok(done) => Ok(done),
            Err(error) => {
                change.note_freed(); // regions that were leased are of no use
                match error {
                    TxError::NoSpace(why) => {
                        Err(change.member.refused_to_lease(change.memory().endpoint(), why))
                    }
                    error => Err(error),
                }
            }
        }
    }
}

/// Leases so many regions, or more, enters them in the list, and waits until this member can use them.
///
/// # Errors
/// [`TxError::NoSpace`] if the pool does not lend as many, or did not a moment ago.
async fn lease_more<E: Environment>(change: &Change<'_, E>, needed: usize) -> Result<(), TxError> {
    let (member, memory) = (change.member, change.memory());
    member.check_may_lease(memory.endpoint())?;
    let list = member.at().later_regions();
    let places = list.places(memory).await.map_err(TxError::Memory)?;
    let room = places.iter().filter(|place| place.stage == Stage::Free).count();
    if needed > room {
        let most = places.len();
        return Err(TxError::NoSpace(format!(
            "the database has no place for {needed} more regions (it has {most} places): drop tables, or make a \
             database with more memory"
        )));
    }
    let wanted = needed.max(member.regions().count() / LEASED_PART).min(room);
    let leases = acquire(change, needed, wanted).await?;
    let entries: Vec<_> = leases.iter().cloned().map(LaterRegion::encode_lease).collect();
    match list.add(memory, &entries).await {
        Ok(true) => {}
        Ok(false) => {
            member.environment().give_back_regions(leases).await;
            return Err(TxError::NoSpace(LONG_ADDRESSES.to_owned()));
        }
        // What follows the one whose word was not written is not in the list, and never will be.
        Err((added, error)) => {
            let unlisted =
                leases.into_iter().skip(added + usize::from(!matches!(error, MemoryError::Short(_))));
            member.environment().give_back_regions(unlisted.collect()).await;
            return Err(TxError::Memory(error));
        }
    }
    match member.open_later_regions(memory).await {
        Err(error) if member.check().is_ok() => {
            Err(TxError::NoSpace(format!("a region that the pool lends cannot be used now: {error}")))
        }
        opened => Ok(opened?),
    }
}

/// Leases up to `wanted` regions, but `needed` at least.
async fn acquire<E: Environment>(
    change: &Change<'_, E>,
    needed: usize,
    wanted: usize,
) -> Result<Vec<Lease>, TxError> {
    let environment = change.member.environment();
    match environment.acquire_regions(wanted as u32).await {
        Ok(leases) if leases.len() >= needed => Ok(leases),
        Ok(leases) => {
            let refusal = format!(
                "the pool lends {} of the {needed} regions that the table needs: add a node to the pool, or drop \
                 tables",
                leases.len()
            );
            environment.give_back_regions(leases).await;
            Err(TxError::NoSpace(refusal))
        }
        Err(JointError::NoSpace { reason, .. }) => {
            Err(TxError::NoSpace(format!("the pool lends no more: {reason}")))
        }
        Err(error) => Err(TxError::NoSpace(error.to_string())),
    }
}
