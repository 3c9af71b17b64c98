//! How a member learns of regions that its database got later, and of those that are given back.
//!
//! R1. The main part of a member reads the list of these regions again and again. It becomes a holder of a
//!     new one, gets a grant of it, and lists this grant at the member's seat. Only then, and if the region
//!     is still in the list, does it show the region to the other parts (L3).
//! R2. Each other part opens such regions for itself, and first waits until the main part knows them. A
//!     client does so when a row of the catalog names a region that it has not opened. A change of the
//!     catalog does so at its beginning, and a recoverer after it has fenced a member that may have used such
//!     regions.
//! R3. A region is given back only once no snapshot has a table there (C4). So no part of a member uses it
//!     any more when the main part finds that, and gives its lease and its grant up.

use std::collections::BTreeSet;
use std::sync::Arc;

use farpool_fabric::Endpoint;
use farpool_pool::{ClientGrant, GrantError, JointError};
use farpool_txn::later::{LaterAt, Place};
use farpool_txn::membership::{LaterGrant, Seat, SeatRules, list_later_grant};
use farpool_txn::{DatabaseAt, Memory, MemoryError};
use farpool_wire::control::Lease;

use super::MemberCore;
use super::joining::{add_grants_or_again, attach, fence_all};
use crate::environment::Environment;
use crate::error::{DatabaseError, Ended};
use crate::regions::{Later, LaterRegion, is_open};

/// A region of the list, which a member holds, but does not use yet.
pub(super) struct Found {
    number: u16,
    place: Place,
    lease: Lease,
    grant: ClientGrant,
}

/// Becomes a holder of all regions in the list, and gets a grant of each. Uses none of them.
pub(super) async fn find_later<E: Environment>(
    environment: &E,
    memory: &Memory,
    at: DatabaseAt<'_>,
) -> Result<Vec<Found>, DatabaseError> {
    let places = at.later_regions().places(memory).await?;
    let mut all = Vec::new();
    for number in Later::default().missing(&places) {
        match find(environment, memory, at.later_regions(), number, places[usize::from(number)]).await {
            Ok(found) => all.extend(found),
            Err(error) => {
                drop_found(environment, all).await;
                return Err(error);
            }
        }
    }
    Ok(all)
}

/// Gives up what was found.
pub(super) async fn drop_found<E: Environment>(environment: &E, all: impl IntoIterator<Item = Found>) {
    for Found { grant, lease, .. } in all {
        fence_all(environment, &[grant]).await;
        environment.forget_regions(&[lease]);
    }
}

/// Becomes a holder of the region of a place, and gets a grant of it. `None`: the region is being given back.
async fn find<E: Environment>(
    environment: &E,
    memory: &Memory,
    list: LaterAt,
    number: u16,
    place: Place,
) -> Result<Option<Found>, DatabaseError> {
    let entry = list.entry(memory, number).await?;
    let held = async {
        let lease = entry.and_then(|entry| LaterRegion::decode_lease(&entry)).ok_or(JointError::Damaged)?;
        let region = lease.region_id().ok_or(JointError::Damaged)?;
        environment.adopt_regions(vec![lease.clone()]).await?;
        let grants = add_grants_or_again(environment, memory.endpoint(), &[region]).await;
        let grant = match grants.as_deref() {
            Ok([grant]) => *grant,
            _ => {
                environment.forget_regions(&[lease]);
                return Err(grants.err().map_or(JointError::Damaged.into(), DatabaseError::from));
            }
        };
        Ok(Found { number, place, lease, grant })
    };
    match held.await {
        Ok(found) => Ok(Some(found)),
        Err(_) if list.place(memory, number).await? != place => Ok(None),
        Err(error) => Err(error),
    }
}

/// Lists the grant of a region that was found, at a seat. If the region is still in the list after that, the
/// member can use it.
pub(super) async fn list_found<E: Environment>(
    environment: &E,
    memory: &Memory,
    at: DatabaseAt<'_>,
    seat: &Seat,
    later: Later,
    found: Found,
) -> Result<Later, MemoryError> {
    let Found { number, place, lease, grant } = found;
    if E::Rules::lists_later_grants() {
        let listed = LaterGrant { round: place.round, epoch: grant.epoch };
        list_later_grant(memory, &at.members(), seat, number, Some(listed)).await?;
    }
    if at.later_regions().place(memory, number).await? == place {
        return Ok(later.with(number, place.round, (grant, lease)));
    }
    give_up(environment, memory, at, seat, number, &lease).await?;
    Ok(later)
}

/// Gives up the lease and the grant of a region that is given back.
async fn give_up<E: Environment>(
    environment: &E,
    memory: &Memory,
    at: DatabaseAt<'_>,
    seat: &Seat,
    number: u16,
    lease: &Lease,
) -> Result<(), MemoryError> {
    // First: after the word is cleared, the lease may end, and this member must not miss it.
    environment.forget_regions(std::slice::from_ref(lease));
    list_later_grant(memory, &at.members(), seat, number, None).await
}

impl<E: Environment> MemberCore<E> {
    /// Learns of changes of the list, until the member has ended.
    pub(super) async fn follow_regions(&self, memory: &Memory) -> Result<(), DatabaseError> {
        let endpoint = memory.endpoint();
        let mut give_up_at_ns = None;
        while !self.has_ended() {
            match self.learn_regions(memory).await {
                Ok(()) => give_up_at_ns = None,
                // A node that is silent for long is lost, and with it the lease.
                Err(error) if may_pass(&error) && !self.is_past(endpoint, &mut give_up_at_ns) => {
                    tracing::debug!(%error, "cannot use a region that the database has got; trying again");
                }
                Err(DatabaseError::Leases(JointError::Ended { region })) => {
                    self.end(Ended::LeaseEnded(region));
                }
                Err(error) => return Err(error),
            }
            self.pause(endpoint, self.timing().role_pause).await;
        }
        Ok(())
    }

    /// Whether this time has come; at first, sets it to that until which a node may be silent.
    fn is_past(&self, endpoint: &Endpoint, give_up_at_ns: &mut Option<u64>) -> bool {
        let silence_ns = self.timing().node_silence.as_nanos() as u64;
        endpoint.now_ns() > *give_up_at_ns.get_or_insert_with(|| endpoint.now_ns() + silence_ns)
    }

    async fn learn_regions(&self, memory: &Memory) -> Result<(), DatabaseError> {
        let (at, environment) = (self.at(), &self.environment);
        let places = at.later_regions().places(memory).await?;
        let mut known = Later::clone(&self.later.read());
        for number in known.gone(&places) {
            let (without, lease) = known.without(number);
            known = without;
            *self.later.write() = Arc::new(known.clone());
            if let Some(lease) = lease {
                give_up(environment, memory, at, &self.seat, number, &lease).await?;
            }
        }
        let mut failed = None;
        for number in known.missing(&places) {
            match find(environment, memory, at.later_regions(), number, places[usize::from(number)]).await {
                Ok(None) => {}
                Ok(Some(found)) => {
                    known = list_found(environment, memory, at, &self.seat, known, found).await?;
                    *self.later.write() = Arc::new(known.clone());
                }
                Err(error) => failed = failed.or(Some(error)), // the others may be usable
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Waits until the member can use all regions that the database has by now, and opens them for one of its
    /// parts (R2).
    ///
    /// # Errors
    /// When far memory does not answer, or the member has ended.
    pub(crate) async fn open_later_regions(&self, memory: &Memory) -> Result<(), DatabaseError> {
        let (list, endpoint) = (self.at().later_regions(), memory.endpoint());
        let give_up_at = endpoint.now_ns() + self.timing().catalog_timeout.as_nanos() as u64;
        let mut places = list.places(memory).await?;
        loop {
            let known = self.later.read().clone();
            if known.missing(&places).is_empty() && known.gone(&places).is_empty() {
                for grant in known.grants().filter(|grant| !is_open(grant, memory)) {
                    self.open_unless_gone(memory, grant).await?;
                }
                self.close_regions_gone(memory);
                return Ok(());
            }
            if endpoint.now_ns() > give_up_at {
                // Longer than the main part tries to.
                self.end(Ended::Failed(
                    "the main thread of this compute server stands still: open the database again".to_owned(),
                ));
            }
            self.check()?;
            endpoint.sleep(self.timing().catalog_pause).await;
            places = list.places(memory).await?;
        }
    }

    /// Opens a region for one of the member's parts, unless the member has found meanwhile that it is to
    /// leave it.
    pub(super) async fn open_unless_gone(
        &self,
        memory: &Memory,
        grant: &ClientGrant,
    ) -> Result<(), DatabaseError> {
        match attach(&self.environment, memory, grant).await {
            Err(_) if !self.uses(grant) => Ok(()),
            opened => opened,
        }
    }

    fn uses(&self, grant: &ClientGrant) -> bool {
        self.grants.contains(grant) || self.later.read().has_grant(grant)
    }

    /// Closes regions that the member has left.
    fn close_regions_gone(&self, memory: &Memory) {
        let used: BTreeSet<_> = self.grants().iter().map(|grant| (grant.region, grant.epoch)).collect();
        for (region, epoch) in memory.attached().into_iter().filter(|attached| !used.contains(attached)) {
            memory.detach(region, epoch);
        }
    }
}

/// Whether an error may pass, if its node answers again.
fn may_pass(error: &DatabaseError) -> bool {
    matches!(
        error,
        DatabaseError::Grant(GrantError::NoAnswer { .. } | GrantError::Refused { .. })
            | DatabaseError::Leases(JointError::Node(GrantError::NoAnswer { .. }))
    )
}
