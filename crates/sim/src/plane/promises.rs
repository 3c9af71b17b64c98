//! What a node has promised in its answers, and whether it keeps to that. The promises of one incarnation, by
//! its own clock, follow from the requests alone (`docs/src/leases.md`).
//!
//! T1. A lease that its owner does not release ends when the node has promised: not earlier, and not later
//!     unless the node's process stood still then.
//! T2. A renewal extends a lease that has not ended by then, shortens none, and revives none.
//! T3. A revocation announces an end: after its grace, which has a bound, but not before the time promised
//!     already. From then on renewals promise that end, no less and no more.
//! T4. A node takes back the newest revocable leases of the owner, as many as it is asked for; if it is
//!     resized or its machine needs memory, the newest of all owners, as many as there are above its limit:
//!     the lesser of its target and of what the pressure allows.
//! T5. The table lists the leases whose end was not noticed yet, each with its class, its revocation and the
//!     number of its grants. A fenced grant is not among them and takes no place.
//! T6. A region is attached only under a grant in force, even if the node has not noticed the lease's end.

use std::collections::{BTreeMap, BTreeSet};

use farpool_lease::{LeaseClass, Lending, MAX_GRACE, Millis};
use farpool_wire::control::{RegionState, RenewOutcome, ResizeResponse, RevokeResponse};
use farpool_wire::{Epoch, MAX_GRANTS_PER_REGION, OwnerId};

/// How late a node that runs may notice the end of a lease: the rounding of its clock.
const LATE: Millis = Millis(5);

struct Promise {
    epoch: Epoch,
    owner: OwnerId,
    class: LeaseClass,
    until: Millis,
    /// The end that a revocation has announced.
    announced: Option<Millis>,
    /// The grants of clients that the owner has let in.
    grants: BTreeSet<Epoch>,
}

/// The promises of one incarnation of a node.
pub(crate) struct Promises {
    ttl: Millis,
    leases: BTreeMap<u32, Promise>,
    /// The number of regions that its operator wants to have memory, and that may have it.
    target: u32,
    allowed: u32,
    complaints: Vec<String>,
}

impl Promises {
    pub(crate) fn new(ttl: Millis) -> Self {
        let (leases, complaints) = (BTreeMap::new(), Vec::new());
        Promises { ttl, leases, target: u32::MAX, allowed: u32::MAX, complaints }
    }

    /// What was found since the last call.
    pub(crate) fn complaints(&mut self) -> Vec<String> {
        std::mem::take(&mut self.complaints)
    }

    fn expect<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, lease: Lending, found: T, promised: T) {
        if found != promised {
            let Lending { region, epoch } = lease;
            self.complaints
                .push(format!("{what} of region {region}, epoch {epoch}: {found:?} instead of {promised:?}"));
        }
    }

    /// The promise of a lease whose time has not passed.
    fn in_force(&mut self, now: Millis, lease: Lending) -> Option<&mut Promise> {
        let promise = self.leases.get_mut(&lease.region)?;
        (promise.epoch == lease.epoch && now < promise.until).then_some(promise)
    }

    /// The node lends a region and tells its owner that the lease lasts `told`.
    pub(crate) fn lent(
        &mut self,
        now: Millis,
        lease: Lending,
        owner: OwnerId,
        class: LeaseClass,
        told: Millis,
    ) {
        self.expect("duration", lease, told, self.ttl);
        let may = (self.leases.len() as u32) < self.limit();
        self.expect("lending within the limit", lease, true, may);
        let (epoch, until, grants) = (lease.epoch, now.plus(told), BTreeSet::new());
        self.leases.insert(lease.region, Promise { epoch, owner, class, until, announced: None, grants });
    }

    /// The node answers a renewal by the owner of the lease (T2, T3).
    pub(crate) fn renewed(&mut self, now: Millis, lease: Lending, told: &RenewOutcome) {
        let ttl = self.ttl;
        let promised = self.in_force(now, lease).map(|promise| {
            promise.until = promise.until.max(promise.announced.unwrap_or(now.plus(ttl)));
            (promise.until.since(now).0, promise.announced.is_some())
        });
        let told = told.renewed.then_some((told.remaining_ms, told.revoked));
        self.expect("renewal", lease, told, promised);
    }

    /// The node takes back up to `count` leases of an owner (T3, T4).
    pub(crate) fn revoked(
        &mut self,
        now: Millis,
        owner: OwnerId,
        (count, grace): (u32, Millis),
        told: &RevokeResponse,
    ) {
        let told = (told.revoked, told.pinned, told.remaining_ms);
        self.taken_back(now, Some(owner), (count, grace), told);
    }

    /// The operator wants the node to have memory for `target` regions (T3, T4).
    pub(crate) fn resized(&mut self, now: Millis, (target, grace): (u32, Millis), told: &ResizeResponse) {
        self.target = target;
        self.limited(now, grace, (told.revoked, told.pinned, told.remaining_ms));
    }

    /// The pressure on memory allows the node `allowed` regions (T3, T4).
    pub(crate) fn allowed(&mut self, now: Millis, (allowed, grace): (u32, Millis), told: &RevokeResponse) {
        self.allowed = allowed;
        self.limited(now, grace, (told.revoked, told.pinned, told.remaining_ms));
    }

    fn limit(&self) -> u32 {
        self.target.min(self.allowed)
    }

    /// The node takes back the leases above its limit.
    fn limited(&mut self, now: Millis, grace: Millis, told: (u32, u32, u64)) {
        let stays = |promise: &&Promise| promise.announced.is_none() && now < promise.until;
        let staying = self.leases.values().filter(stays).count() as u32;
        self.taken_back(now, None, (staying.saturating_sub(self.limit()), grace), told);
    }

    /// The node takes back up to `count` leases of an owner, or of all.
    fn taken_back(
        &mut self,
        now: Millis,
        owner: Option<OwnerId>,
        (count, grace): (u32, Millis),
        told: (u32, u32, u64),
    ) {
        let end = now.plus(grace.min(MAX_GRACE));
        let is_of_owner = |promise: &&mut Promise| owner.is_none_or(|owner| promise.owner == owner);
        let mut leases: Vec<_> = self.leases.values_mut().filter(is_of_owner).collect();
        let pinned = leases.iter().filter(|promise| promise.class == LeaseClass::Pinned).count() as u32;
        leases.sort_by_key(|promise| std::cmp::Reverse(promise.epoch));
        let (mut revoked, mut last) = (0, Millis(0));
        for promise in leases {
            let may = promise.class == LeaseClass::Revocable && promise.announced.is_none();
            if may && now < promise.until && revoked < count {
                let end = end.max(promise.until);
                promise.announced = Some(end);
                (revoked, last) = (revoked + 1, last.max(end.since(now)));
            }
        }
        let promised = (revoked, pinned, last.0);
        if told != promised {
            self.complaints.push(format!("leases of {owner:?} taken back: {told:?} instead of {promised:?}"));
        }
    }

    /// The node answers the owner's request to let a client in; `None`: it refuses (T5).
    pub(crate) fn granted(&mut self, now: Millis, lease: Lending, grant: Option<Epoch>) {
        let may =
            self.in_force(now, lease).is_some_and(|promise| promise.grants.len() + 1 < MAX_GRANTS_PER_REGION);
        self.expect("a grant", lease, grant.is_some(), may);
        if let (Some(promise), Some(grant)) = (self.leases.get_mut(&lease.region), grant) {
            promise.grants.insert(grant);
        }
    }

    /// The node answers the owner's request to fence a client's grant, which it gave earlier (T5).
    pub(crate) fn fenced(&mut self, now: Millis, lease: Lending, grant: Epoch, fences: bool) {
        let may = self.in_force(now, lease).map(|promise| promise.grants.remove(&grant)).is_some();
        self.expect("a fence", lease, fences, may);
    }

    /// The node's data plane attaches a region under a grant, or refuses (T6).
    pub(crate) fn admitted(&mut self, now: Millis, grant: Lending, admits: bool) {
        let of_lease =
            |promise: &Promise| promise.epoch == grant.epoch || promise.grants.contains(&grant.epoch);
        let may =
            self.leases.get(&grant.region).is_some_and(|promise| now < promise.until && of_lease(promise));
        self.expect("an attachment", grant, admits, may);
    }

    /// The owner gives a lease back; `ends`: the node ends it now.
    pub(crate) fn released(&mut self, lease: Lending, ends: bool) {
        let is_held = self.leases.get(&lease.region).is_some_and(|promise| promise.epoch == lease.epoch);
        self.expect("a release", lease, ends, is_held);
        if is_held {
            self.leases.remove(&lease.region);
        }
    }

    /// The node has ended leases whose time has passed; `awake` is how long its process has run since it last
    /// stood still (T1).
    pub(crate) fn expired(&mut self, now: Millis, ended: &[Lending], awake: Millis) {
        for lease in ended {
            let until = self.leases.remove(&lease.region).map_or(Millis(0), |promise| promise.until);
            if now < until {
                self.complaints.push(format!("{lease:?} ends at {now}, but was promised until {until}"));
            }
            self.look_for_delay(now, lease.region, until, awake);
        }
        let left: Vec<_> = self.leases.iter().map(|(region, promise)| (*region, promise.until)).collect();
        left.into_iter().for_each(|(region, until)| self.look_for_delay(now, region, until, awake));
    }

    fn look_for_delay(&mut self, now: Millis, region: u32, until: Millis, awake: Millis) {
        if now.since(until).min(awake) > LATE {
            self.complaints.push(format!("region {region} was promised until {until}, but is held at {now}"));
        }
    }

    /// The node shows its table (T5).
    pub(crate) fn listed(&mut self, now: Millis, table: &[RegionState]) {
        let listed = table.iter().filter(|state| state.held).map(|state| {
            let times = (state.remaining_ms, state.revoked, state.grants);
            (state.region, (state.epoch, state.owner, state.class, times))
        });
        let listed: BTreeMap<_, _> = listed.collect();
        let promised = self.leases.iter().map(|(region, promise)| {
            let grants = promise.grants.len() as u32 + 1; // with the owner's own
            let times = (promise.until.since(now).0, promise.announced.is_some(), grants);
            (*region, (promise.epoch.0, promise.owner.0, promise.class.to_wire(), times))
        });
        let promised: BTreeMap<_, _> = promised.collect();
        if listed != promised {
            self.complaints.push(format!("the node lists {listed:?} instead of {promised:?}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Millis = Millis(1_000);
    const OWNER: OwnerId = OwnerId(7);
    const LEASE: Lending = Lending { region: 0, epoch: Epoch::new(1, 1) };
    const AWAKE: Millis = Millis(10_000);

    /// What is found when one revocable lease is lent at zero and this happens to it.
    fn found(scene: impl FnOnce(&mut Promises)) -> usize {
        let mut promises = Promises::new(TTL);
        promises.lent(Millis(0), LEASE, OWNER, LeaseClass::Revocable, TTL);
        scene(&mut promises);
        promises.complaints().len()
    }

    fn told(remaining_ms: u64, revoked: bool) -> RenewOutcome {
        RenewOutcome { renewed: true, remaining_ms, revoked, ..RenewOutcome::default() }
    }

    fn revoke(promises: &mut Promises, at: u64, grace: u64, remaining_ms: u64) {
        let told = RevokeResponse { revoked: 1, remaining_ms, ..RevokeResponse::default() };
        promises.revoked(Millis(at), OWNER, (1, Millis(grace)), &told);
    }

    #[test]
    fn a_lease_that_ends_early_or_late_is_noticed_unless_its_node_stood_still() {
        let ends = |at, awake| found(|promises| promises.expired(Millis(at), &[LEASE], Millis(awake)));
        assert_eq!([ends(999, 10_000), ends(1_000, 10_000), ends(1_100, 10_000)], [1, 0, 1]);
        assert_eq!(ends(9_000, 0), 0, "the node's process stood still until now");
        let stays = |at| found(|promises| promises.expired(Millis(at), &[], AWAKE));
        assert_eq!([stays(999), stays(1_100)], [0, 1]);
    }

    #[test]
    fn a_renewal_that_revives_or_shortens_a_lease_is_noticed() {
        let renew =
            |at, remaining| found(|promises| promises.renewed(Millis(at), LEASE, &told(remaining, false)));
        assert_eq!([renew(500, 1_000), renew(500, 900), renew(1_000, 1_000)], [0, 1, 1]);
    }

    #[test]
    fn a_revoked_lease_must_last_for_its_grace_and_no_longer() {
        let renew = |remaining, revoked| {
            found(|promises| {
                revoke(promises, 100, 3_000, 3_000);
                promises.renewed(Millis(600), LEASE, &told(remaining, revoked));
            })
        };
        assert_eq!([renew(2_500, true), renew(2_400, true), renew(2_600, true)], [0, 1, 1]);
        assert_eq!(renew(2_500, false), 1, "the owner is not told of it");
        assert_eq!(found(|promises| revoke(promises, 100, 0, 900)), 0, "the promise comes first");
        assert_eq!(found(|promises| revoke(promises, 100, 0, 0)), 1);
        let long = MAX_GRACE.plus(Millis(1));
        assert_eq!(found(|promises| revoke(promises, 0, long.0, long.0)), 1);
    }

    #[test]
    fn a_fenced_grant_that_stays_in_the_table_is_noticed() {
        let list = |grants| {
            found(|promises| {
                let client = Epoch::new(1, 2);
                promises.granted(Millis(1), LEASE, Some(client));
                promises.fenced(Millis(2), LEASE, client, true);
                promises.admitted(Millis(3), Lending { epoch: client, ..LEASE }, false);
                let (epoch, owner, class) = (LEASE.epoch.0, OWNER.0, LeaseClass::Revocable.to_wire());
                let state = RegionState {
                    epoch,
                    owner,
                    class,
                    grants,
                    held: true,
                    remaining_ms: 997,
                    ..Default::default()
                };
                promises.listed(Millis(3), &[state]);
            })
        };
        assert_eq!([list(1), list(2)], [0, 1]);
    }
}
