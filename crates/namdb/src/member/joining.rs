//! How a process becomes a member: it gets grants, takes a seat, and recovers the slot of the seat.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use farpool_fabric::{Endpoint, OpError};
use farpool_pool::{ClientGrant, GrantError};
use farpool_txn::membership::{Duties, Seat, wait_for_seat};
use farpool_txn::oracle::Fetched;
use farpool_txn::recovery::recover;
use farpool_txn::{DatabaseAt, DatabaseLayout, Memory, MemoryError, SharedSlot};
use farpool_wire::{Epoch, Refusal, RegionId};
use futures_util::future::join_all;
use rustix_futex_sync::{Mutex, RwLock};

use super::MemberCore;
use super::learning::{drop_found, find_later, list_found};
use crate::environment::Environment;
use crate::error::DatabaseError;
use crate::regions::Later;
use crate::workers::Places;

/// Tries to get grants of all regions. Each may leave an unused grant behind.
const GRANT_TRIES: u32 = 3;

impl<E: Environment> MemberCore<E> {
    /// Takes a seat in a database. With `fetched`, the member's [fetcher](super::DutyKind::Fetcher) reads
    /// cuts for all clients.
    ///
    /// # Errors
    /// When the memory cannot be reached, or no seat becomes free.
    pub async fn join(
        environment: E,
        layout: DatabaseLayout,
        patience: Duration,
        fetched: Option<Arc<Fetched>>,
        endpoint: Endpoint,
    ) -> Result<MemberCore<E>, DatabaseError> {
        let grants = add_grants_or_again(&environment, &endpoint, &layout.regions).await?;
        let epochs: Vec<Epoch> = grants.iter().map(|grant| grant.epoch).collect();
        let at = DatabaseAt { layout: &layout, grants: &epochs };
        let seated = take_seat(&environment, endpoint, &grants, at, patience).await;
        let (seat, memory, later) = match seated {
            Ok(Some(seated)) => seated,
            no_seat => {
                fence_all(&environment, &grants).await;
                return Err(no_seat.err().unwrap_or(DatabaseError::NoSeat(layout.shape.slots)));
            }
        };
        // If anything fails from here on, the other members recover the seat.
        let recovered = recover(&memory, &at.oracle(), &at.log(seat.slot), seat.slot).await?;
        let slot = SharedSlot::recovered(seat.slot, at.logs(), &recovered).expect("each slot has a log");
        Ok(MemberCore {
            slot: Arc::new(slot),
            places: Arc::new(Places::new(layout.limits.clients)),
            environment,
            layout,
            grants,
            epochs,
            later: RwLock::new(Arc::new(later)),
            seat,
            patience,
            duties: Duties::default(),
            fetched,
            slabs: Mutex::default(),
            spares: Mutex::default(),
            leaves: Mutex::default(),
            stale: Mutex::default(),
            changes_catalog: AtomicBool::new(false),
            frees_memory: AtomicBool::new(false),
            refused: Mutex::default(),
            ended: Mutex::new(None),
            has_ended: AtomicBool::new(false),
            has_left: AtomicBool::new(false),
        })
    }
}

/// Takes a seat, if one is free or becomes free. Returns also what the member can use of the regions that the
/// database got later.
async fn take_seat<E: Environment>(
    environment: &E,
    endpoint: Endpoint,
    grants: &[ClientGrant],
    at: DatabaseAt<'_>,
    patience: Duration,
) -> Result<Option<(Seat, Memory, Later)>, DatabaseError> {
    let memory = attach_all(environment, endpoint, grants).await?;
    let waits = (patience, environment.timing().seat_pause);
    // Before it has a seat: that may take long, and from then on the others expect heartbeats.
    let found = find_later(environment, &memory, at).await?;
    let seat = match wait_for_seat::<E::Rules>(&memory, &at.members(), at.grants, waits).await {
        Ok(Some(seat)) => seat,
        no_seat => {
            drop_found(environment, found).await;
            return no_seat.map(|_| None).map_err(DatabaseError::from);
        }
    };
    let (mut later, mut found) = (Later::default(), found.into_iter());
    while let Some(next) = found.next() {
        // If this fails, a member that recovers the seat fences the grants that are listed by then.
        later = match list_found(environment, &memory, at, &seat, later, next).await {
            Ok(later) => later,
            Err(error) => {
                drop_found(environment, found).await;
                return Err(error.into());
            }
        };
    }
    // These stay: a region is not given back while a seat has a grant there.
    for grant in later.grants() {
        attach(environment, &memory, grant).await?;
    }
    Ok(Some((seat, memory, later)))
}

/// Attaches all regions to an endpoint.
pub(crate) async fn attach_all<E: Environment>(
    environment: &E,
    endpoint: Endpoint,
    grants: &[ClientGrant],
) -> Result<Memory, DatabaseError> {
    let memory = Memory::new(endpoint);
    for grant in grants {
        attach(environment, &memory, grant).await?;
    }
    Ok(memory)
}

/// Attaches a region to an endpoint.
pub(super) async fn attach<E: Environment>(
    environment: &E,
    memory: &Memory,
    grant: &ClientGrant,
) -> Result<(), DatabaseError> {
    let (timing, endpoint) = (environment.timing(), memory.endpoint());
    let give_up_at = endpoint.now_ns() + timing.attach_timeout.as_nanos() as u64;
    let no_lease = GrantError::LeaseLost { region: grant.region };
    let peer = environment.peer(grant.region).ok_or(no_lease)?;
    loop {
        match memory.attach(&peer, grant.region, grant.epoch, grant.key).await {
            Ok(()) => return Ok(()),
            Err(MemoryError::Failed(OpError::Refused(Refusal::Busy))) if endpoint.now_ns() < give_up_at => {
                endpoint.sleep(timing.attach_pause).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// A grant of each region. A node that is too busy to answer is asked again.
pub(super) async fn add_grants_or_again<E: Environment>(
    environment: &E,
    endpoint: &Endpoint,
    regions: &[RegionId],
) -> Result<Vec<ClientGrant>, GrantError> {
    for _ in 1..GRANT_TRIES {
        match add_grants(environment, regions).await {
            Err(GrantError::NoAnswer { node, reason }) => {
                tracing::debug!(%node, reason, "no answer about a grant; trying again");
                endpoint.sleep(environment.timing().seat_pause).await;
            }
            done => return done,
        }
    }
    add_grants(environment, regions).await
}

/// A grant of each region, or of none.
pub(crate) async fn add_grants<E: Environment>(
    environment: &E,
    regions: &[RegionId],
) -> Result<Vec<ClientGrant>, GrantError> {
    let asked = join_all(regions.iter().map(|&region| environment.add_grant(region))).await;
    let (mut added, mut failure) = (Vec::new(), None);
    for answer in asked {
        match answer {
            Ok(grant) => added.push(grant),
            Err(error) => failure = Some(error),
        }
    }
    let Some(error) = failure else { return Ok(added) };
    fence_all(environment, &added).await;
    Err(error)
}

/// Fences grants that will not be used. Grants that cannot be fenced end with the leases.
pub(super) async fn fence_all<E: Environment>(environment: &E, grants: &[ClientGrant]) {
    for grant in grants {
        if let Err(error) = environment.fence_grant(grant.region, grant.epoch).await {
            tracing::debug!(%error, "cannot fence an unused grant; it ends with its lease");
        }
    }
}
