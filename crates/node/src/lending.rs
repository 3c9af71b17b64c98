//! A node's decisions about its leases: the table, and which regions are being returned. The code takes the
//! time and the keys as arguments and does not touch region memory; it returns what the caller is to do
//! there.
//!
//! N1. The table decides which client may use a region, and the caller enforces that. A grant is opened in
//!     the memory after the table has made it and before any client is told of it. A lease is fenced there
//!     before any client is told that it has ended.
//! N2. A region is free in the table again only after its memory was scrubbed or replaced. That begins only
//!     when the caller has stated that the lease is fenced and that no client can reach its memory any more.
//! N3. Leases end on time: the caller calls [`NodeCore::expire`] by [`NodeCore::next_deadline`].
//! N4. A node has a *limit*, the number of regions that it is to have memory for: its *target*, which the
//!     operator sets, or what the pressure on its machine's memory allows, if that is less. It never lends
//!     more. When the limit falls, revocable leases are revoked, newest first, until no more regions are lent
//!     than the limit. While more regions than the limit have memory, those that are free or being returned
//!     are withdrawn; while fewer have it, withdrawn ones are restored.
//! Not here: clocks, threads, random keys, memory, how messages travel.

use farpool_lease::{
    Grant, GrantRefusal, LeaseClass, LeaseRefusal, Lending, Millis, RegionCounts, RegionStatus, RegionTable,
    Released, RevokeRefusal, Term,
};
use farpool_wire::control::{LeaseRef, RegionState, RevokeResponse};
use farpool_wire::{AccessKey, Epoch, GrantMode, OwnerId, Refusal};

/// A node's lease table, and the regions that are being returned.
///
/// The caller carries out what these return, in this order. `grant` and `add_grant`: open the grants, then
/// answer. `release` and `expire`: fence, then call [`fenced`](Self::fenced); then answer a release.
/// `fence_grant`: fence it, then answer.
pub struct NodeCore {
    table: RegionTable,
    returning: Vec<Returning>,
    regions: u32,
    /// Revocations so far, and for each region the number of its last one.
    revocations: u64,
    revoked_as: Vec<u64>,
    /// The operator's limit, in regions.
    target: u32,
    /// The limit that the pressure on memory sets, in regions.
    allowed: u32,
    /// Revoked leases that expired before their owners gave them back.
    expired_revocations: u64,
}

/// A fenced region that is not free yet.
struct Returning {
    lease: Lending,
    /// The table knows that it is being scrubbed.
    scrubbing: bool,
}

impl NodeCore {
    /// A node whose regions are all free and scrubbed. `incarnation` must be greater than at every earlier
    /// start of this node.
    pub fn new(incarnation: u32, regions: u32, ttl: Millis) -> Self {
        let table = RegionTable::new(incarnation, regions, ttl);
        let revoked_as = vec![0; regions as usize];
        NodeCore {
            table,
            returning: Vec::new(),
            regions,
            revocations: 0,
            revoked_as,
            target: regions,
            allowed: regions,
            expired_revocations: 0,
        }
    }

    /// Lends up to `count` free regions, and no more than the limit. The caller opens each grant.
    #[must_use]
    pub fn grant(
        &mut self,
        now: Millis,
        owner: OwnerId,
        class: LeaseClass,
        count: u32,
        keys: &mut dyn FnMut() -> AccessKey,
    ) -> Vec<Grant> {
        let lendable = self.limit().saturating_sub(self.table.counts().held);
        self.table.grant(now, owner, class, count.min(lendable), keys)
    }

    /// Adds a client's grant, under a fresh `key`, to the lease that a message names. The caller opens it.
    pub fn add_grant(
        &mut self,
        now: Millis,
        owner: OwnerId,
        lease: &LeaseRef,
        mode: GrantMode,
        key: AccessKey,
    ) -> Result<Grant, GrantRefusal> {
        let (lease, own_key) = named(lease)?;
        self.table.add_grant(now, owner, lease, &own_key, mode, key)
    }

    /// Ends a client's grant. The caller fences it, also when it was fenced before.
    pub fn fence_grant(
        &mut self,
        now: Millis,
        owner: OwnerId,
        lease: &LeaseRef,
        grant: Epoch,
    ) -> Result<Lending, GrantRefusal> {
        let (lease, own_key) = named(lease)?;
        self.table.fence_grant(now, owner, lease, &own_key, grant)
    }

    /// Extends a lease.
    pub fn renew(&mut self, now: Millis, owner: OwnerId, lease: &LeaseRef) -> Result<Term, LeaseRefusal> {
        let (lease, key) = named(lease)?;
        self.table.renew(now, owner, lease, &key)
    }

    /// Ends a lease at its owner's request. The caller fences the lease that is returned, if any, and calls
    /// [`fenced`](Self::fenced).
    pub fn release(&mut self, owner: OwnerId, lease: &LeaseRef) -> Result<Option<Lending>, LeaseRefusal> {
        let (lease, key) = named(lease)?;
        Ok(match self.table.release(owner, lease, &key)? {
            Released::Fence => Some(lease),
            Released::Already => None,
        })
    }

    /// Takes back up to `count` of an owner's revocable leases that are not being taken back yet. It chooses
    /// the newest leases: their data has had the least time to become worth keeping.
    pub fn revoke(&mut self, now: Millis, owner: OwnerId, count: u32, grace: Millis) -> RevokeResponse {
        self.revoke_newest(now, Some(owner), count, grace)
    }

    /// The same for leases of one owner, or of all.
    fn revoke_newest(
        &mut self,
        now: Millis,
        owner: Option<OwnerId>,
        count: u32,
        grace: Millis,
    ) -> RevokeResponse {
        let mut answer = RevokeResponse::default();
        let mut candidates = Vec::new();
        for (region, status) in (0u32..).zip(self.table.statuses()) {
            match status {
                RegionStatus::Held { owner: whose, .. } if owner.is_some_and(|owner| whose != owner) => {}
                RegionStatus::Held { class: LeaseClass::Pinned, .. } => answer.pinned += 1,
                RegionStatus::Held { epoch, revoked: false, .. } => {
                    candidates.push(Lending { region, epoch })
                }
                _ => {}
            }
        }
        candidates.sort_by_key(|lease| std::cmp::Reverse(lease.epoch));
        for lease in candidates {
            if answer.revoked == count {
                break;
            }
            match self.table.revoke(now, lease, grace) {
                Ok(end) => {
                    self.revocations += 1;
                    self.revoked_as[lease.region as usize] = self.revocations;
                    answer.revoked += 1;
                    answer.remaining_ms = answer.remaining_ms.max(end.since(now).0);
                }
                Err(RevokeRefusal::Ended | RevokeRefusal::Pinned | RevokeRefusal::Unknown) => {}
            }
        }
        answer
    }

    /// The number of the last revocation of a lease that this owner holds; 0 if none of its leases is being
    /// taken back.
    pub fn last_revocation(&self, owner: OwnerId) -> u64 {
        let revoked = |(status, number): (RegionStatus, &u64)| match status {
            RegionStatus::Held { owner: whose, revoked: true, .. } if whose == owner => Some(*number),
            _ => None,
        };
        self.table.statuses().zip(&self.revoked_as).filter_map(revoked).max().unwrap_or(0)
    }

    /// Sets the target. If more leases than the limit are in force, the rest are taken back, except those
    /// that are being taken back already. The answer counts the leases that this call takes back.
    pub fn resize(&mut self, now: Millis, regions: u32, grace: Millis) -> RevokeResponse {
        self.target = regions.min(self.regions);
        self.revoke_excess(now, grace)
    }

    /// Sets the limit that the pressure on memory allows, and takes leases back in the same way.
    pub fn allow(&mut self, now: Millis, regions: u32, grace: Millis) -> RevokeResponse {
        self.allowed = regions.min(self.regions);
        self.revoke_excess(now, grace)
    }

    fn revoke_excess(&mut self, now: Millis, grace: Millis) -> RevokeResponse {
        let stays = |status: &RegionStatus| matches!(status, RegionStatus::Held { revoked: false, until, .. } if now < *until);
        let staying = self.table.statuses().filter(stays).count() as u32;
        self.revoke_newest(now, None, staying.saturating_sub(self.limit()), grace)
    }

    /// The number of regions that the node is to have memory for.
    pub fn limit(&self) -> u32 {
        self.target.min(self.allowed)
    }

    /// The operator's limit.
    pub fn target(&self) -> u32 {
        self.target
    }

    /// The limit that the pressure on memory sets.
    pub fn allowed(&self) -> u32 {
        self.allowed
    }

    /// How many regions the node was started with.
    pub fn regions(&self) -> u32 {
        self.regions
    }

    /// How many regions have memory.
    pub fn with_memory(&self) -> u32 {
        self.regions - self.table.counts().withdrawn
    }

    /// By how many regions the node has more than its limit.
    pub fn excess(&self) -> u32 {
        self.with_memory().saturating_sub(self.limit())
    }

    /// A free region, if the node has more than its limit. The caller gives its memory back to the machine,
    /// and then calls [`withdrawn`](Self::withdrawn) or [`not_scrubbed`](Self::not_scrubbed).
    pub fn begin_withdrawal(&mut self) -> Option<Lending> {
        if self.excess() > 0 { self.table.begin_withdrawal() } else { None }
    }

    /// A withdrawn region, if the node has fewer than its limit. The caller gets memory for it, and then
    /// calls [`restored`](Self::restored).
    pub fn next_to_restore(&self) -> Option<u32> {
        let mut regions = (0u32..).zip(self.table.statuses());
        let withdrawn = regions.find(|(_, status)| *status == RegionStatus::Withdrawn);
        let has_fewer = self.with_memory() < self.limit();
        withdrawn.filter(|_| has_fewer).map(|(region, _)| region)
    }

    /// The caller has got memory for a withdrawn region, all zeros: it is free.
    pub fn restored(&mut self, region: u32) {
        let _in_turn = self.table.restored(region);
    }

    /// Whether a client with `key` may use the region now.
    pub fn check(&self, now: Millis, lending: Lending, key: &AccessKey) -> Result<(), Refusal> {
        self.table.check(now, lending, key)
    }

    /// The owner of the lease that a grant belongs to, if the grant is in force.
    pub fn owner(&self, grant: Lending) -> Option<OwnerId> {
        self.table.owner(grant)
    }

    /// Ends the leases whose time has passed. The caller fences each and calls [`fenced`](Self::fenced).
    #[must_use]
    pub fn expire(&mut self, now: Millis) -> Vec<Lending> {
        let expires = |status: &RegionStatus| matches!(status, RegionStatus::Held { revoked: true, until, .. } if now >= *until);
        self.expired_revocations += self.table.statuses().filter(expires).count() as u64;
        self.table.expire(now)
    }

    /// How many revoked leases have expired before their owners gave them back, since the node started. Data
    /// that were still there are lost to the owner.
    pub fn expired_revocations(&self) -> u64 {
        self.expired_revocations
    }

    /// When [`expire`](Self::expire) has something to do next.
    pub fn next_deadline(&self) -> Option<Millis> {
        self.table.next_deadline()
    }

    /// The caller has fenced a lease: from now on nothing done under it takes effect.
    pub fn fenced(&mut self, lease: Lending) {
        self.returning.push(Returning { lease, scrubbing: false });
    }

    /// Returns a fenced region whose memory is not in use any more, that is, for which `is_held` is false.
    /// The caller scrubs or replaces the memory, and then calls [`scrubbed`](Self::scrubbed) or
    /// [`not_scrubbed`](Self::not_scrubbed). If there is an [excess](Self::excess), the caller instead gives
    /// the memory back to the machine, and then calls [`withdrawn`](Self::withdrawn) or
    /// [`not_scrubbed`](Self::not_scrubbed).
    pub fn begin_scrub(&mut self, mut is_held: impl FnMut(u32) -> bool) -> Option<Lending> {
        loop {
            let next = self.returning.iter().position(|returning| !is_held(returning.lease.region))?;
            let Returning { lease, scrubbing } = self.returning.swap_remove(next);
            if scrubbing || self.table.begin_scrub(lease) {
                return Some(lease);
            }
            // The table refuses this lease: its region was scrubbed before.
        }
    }

    /// The region holds nothing of its last lease any more: it is free again.
    pub fn scrubbed(&mut self, lease: Lending) {
        let _in_turn = self.table.scrubbed(lease);
    }

    /// The region has no memory any more.
    pub fn withdrawn(&mut self, lease: Lending) {
        let _in_turn = self.table.withdrawn(lease);
    }

    /// The region could not be cleaned: [`begin_scrub`](Self::begin_scrub) will return it again.
    pub fn not_scrubbed(&mut self, lease: Lending) {
        self.returning.push(Returning { lease, scrubbing: true });
    }

    /// How long a lease lasts unless renewed.
    pub fn ttl(&self) -> Millis {
        self.table.ttl()
    }

    /// Number of regions in each state.
    pub fn counts(&self) -> RegionCounts {
        self.table.counts()
    }

    /// The sum of the marks of all leases held, as heartbeats carry it: equal tables have equal sums.
    pub fn table_sum(&self, now: Millis) -> u64 {
        self.states(now).iter().fold(0, |sum, state| sum.wrapping_add(state.mark()))
    }

    /// The regions that are not free, as they are reported to the broker.
    pub fn states(&self, now: Millis) -> Vec<RegionState> {
        let state = |(region, status): (u32, RegionStatus)| match status {
            RegionStatus::Free => None,
            RegionStatus::Held { epoch, owner, class, until, grants, revoked } => Some(RegionState {
                region,
                owner: owner.0,
                epoch: epoch.0,
                class: class.to_wire(),
                remaining_ms: until.since(now).0,
                held: true,
                revoked,
                grants,
                withdrawn: false,
            }),
            RegionStatus::Fenced { epoch } | RegionStatus::Scrubbing { epoch } => {
                Some(RegionState { region, epoch: epoch.0, held: false, ..RegionState::default() })
            }
            RegionStatus::Withdrawn => {
                Some(RegionState { region, withdrawn: true, ..RegionState::default() })
            }
        };
        (0u32..).zip(self.table.statuses()).filter_map(state).collect()
    }
}

fn named(lease: &LeaseRef) -> Result<(Lending, AccessKey), LeaseRefusal> {
    let key = lease.access_key().ok_or(LeaseRefusal::WrongKey)?;
    Ok((Lending { region: lease.region, epoch: Epoch(lease.epoch) }, key))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: OwnerId = OwnerId(5);
    const TTL: Millis = Millis(1_000);
    const KEY: AccessKey = AccessKey::from_bytes([1; 16]);

    fn lend(core: &mut NodeCore, class: LeaseClass, count: u32) -> Vec<Lending> {
        let grants = core.grant(Millis(0), OWNER, class, count, &mut || KEY);
        grants.into_iter().map(|grant| grant.lending).collect()
    }

    fn reference(lease: Lending) -> LeaseRef {
        LeaseRef::new(lease.region, lease.epoch, &KEY)
    }

    #[test]
    fn a_region_is_free_again_only_when_fenced_unused_and_scrubbed() {
        let mut core = NodeCore::new(1, 1, TTL);
        let lease = lend(&mut core, LeaseClass::Revocable, 1)[0];
        assert_eq!(core.release(OWNER, &reference(lease)), Ok(Some(lease)));
        assert_eq!(core.begin_scrub(|_| false), None, "it is not fenced yet");
        core.fenced(lease);
        assert_eq!(core.begin_scrub(|_| true), None, "its memory is still in use");
        assert_eq!(core.begin_scrub(|_| false), Some(lease));
        assert_eq!(core.begin_scrub(|_| false), None, "it is being scrubbed");
        core.not_scrubbed(lease);
        assert!(lend(&mut core, LeaseClass::Revocable, 1).is_empty());
        assert_eq!(core.begin_scrub(|_| false), Some(lease));
        core.scrubbed(lease);
        assert_eq!(core.counts().free, 1);
        assert_eq!(core.release(OWNER, &reference(lease)), Ok(None));
    }

    #[test]
    fn the_newest_leases_are_taken_back_first_and_pinned_ones_never() {
        let mut core = NodeCore::new(1, 5, TTL);
        lend(&mut core, LeaseClass::Pinned, 1);
        let leases = lend(&mut core, LeaseClass::Revocable, 3);
        let grace = Millis(5_000);
        let answer = core.revoke(Millis(1), OWNER, 1, grace);
        assert_eq!((answer.revoked, answer.pinned, answer.remaining_ms), (1, 1, 5_000));
        let renewed = core.renew(Millis(1), OWNER, &reference(leases[2]));
        assert_eq!(renewed, Ok(Term { remaining: grace, revoked: true }));
        assert_eq!(core.revoke(Millis(1), OWNER, 9, grace).revoked, 2, "each is taken back once");
        assert_eq!(core.revoke(Millis(1), OWNER, 9, grace).revoked, 0);
        assert_eq!(core.revoke(Millis(1), OwnerId(6), 9, grace), RevokeResponse::default());
        assert_eq!(core.states(Millis(1)).iter().filter(|state| state.revoked).count(), 3);
        core.release(OWNER, &reference(leases[0])).unwrap();
        assert_eq!(
            (core.expire(Millis(600_000)).len(), core.expired_revocations()),
            (3, 2),
            "one was given back, one pinned"
        );
    }

    #[test]
    fn no_more_leases_are_taken_back_than_asked_for_and_the_owner_learns_when_the_last_one_ends() {
        let mut core = NodeCore::new(1, 2, TTL);
        lend(&mut core, LeaseClass::Revocable, 1);
        let later = core.grant(Millis(500), OWNER, LeaseClass::Revocable, 1, &mut || KEY);
        assert_eq!(core.revoke(Millis(600), OWNER, 0, Millis(0)), RevokeResponse::default());
        let answer = core.revoke(Millis(600), OWNER, 2, Millis(0));
        assert_eq!((answer.revoked, answer.remaining_ms), (2, later[0].until.since(Millis(600)).0));
    }

    #[test]
    fn the_sum_of_the_table_tells_the_broker_of_each_change_of_the_leases() {
        let mut core = NodeCore::new(1, 3, TTL);
        assert_eq!(core.table_sum(Millis(0)), 0);
        let leases = lend(&mut core, LeaseClass::Revocable, 2);
        let states = core.states(Millis(0));
        let all = core.table_sum(Millis(0));
        assert_eq!(all, states[0].mark().wrapping_add(states[1].mark()));
        core.revoke(Millis(0), OWNER, 1, Millis(0));
        let one_revoked = core.table_sum(Millis(0));
        assert_ne!(one_revoked, all);
        core.release(OWNER, &reference(leases[1])).unwrap();
        assert_eq!(core.table_sum(Millis(0)), states[0].mark());
    }

    #[test]
    fn the_broker_is_told_of_a_region_until_it_is_free() {
        let mut core = NodeCore::new(1, 2, TTL);
        let lease = lend(&mut core, LeaseClass::Pinned, 2)[1];
        add(&mut core, lease);
        let held = RegionState {
            region: 1,
            owner: OWNER.0,
            epoch: lease.epoch.0,
            class: LeaseClass::Pinned.to_wire(),
            remaining_ms: 900,
            held: true,
            revoked: false,
            grants: 2,
            withdrawn: false,
        };
        assert_eq!(core.states(Millis(100))[1], held);
        core.release(OWNER, &reference(lease)).unwrap();
        let returning = RegionState { region: 1, epoch: lease.epoch.0, ..RegionState::default() };
        assert_eq!(core.states(Millis(100))[1], returning);
        core.fenced(lease);
        assert_eq!(core.begin_scrub(|_| false), Some(lease));
        assert_eq!(core.states(Millis(100))[1], returning);
        core.scrubbed(lease);
        assert_eq!(core.states(Millis(100)).len(), 1);
    }

    #[test]
    fn each_revocation_of_an_owner_s_lease_has_a_higher_number_than_the_one_before() {
        let mut core = NodeCore::new(1, 3, TTL);
        lend(&mut core, LeaseClass::Revocable, 2);
        let other = core.grant(Millis(0), OwnerId(6), LeaseClass::Revocable, 1, &mut || KEY)[0].lending;
        assert_eq!(core.last_revocation(OWNER), 0);
        core.revoke(Millis(1), OWNER, 1, Millis(0));
        let first = core.last_revocation(OWNER);
        core.resize(Millis(1), 1, Millis(0));
        assert_eq!(core.last_revocation(OwnerId(6)), first + 1);
        core.resize(Millis(1), 0, Millis(0));
        assert_eq!(core.last_revocation(OWNER), first + 2);
        assert_eq!(core.release(OwnerId(6), &reference(other)), Ok(Some(other)));
        assert_eq!(core.last_revocation(OwnerId(6)), 0);
    }

    /// Withdraws and returns what there is to do. Returns the regions that lost their memory.
    fn settle(core: &mut NodeCore) -> Vec<u32> {
        let mut withdrawn = Vec::new();
        while let Some(lease) = core.begin_scrub(|_| false) {
            match core.excess() > 0 {
                true => {
                    core.withdrawn(lease);
                    withdrawn.push(lease.region);
                }
                false => core.scrubbed(lease),
            }
        }
        while let Some(lease) = core.begin_withdrawal() {
            core.withdrawn(lease);
            withdrawn.push(lease.region);
        }
        withdrawn
    }

    #[test]
    fn a_node_lends_no_more_than_its_limit_even_before_its_free_regions_are_withdrawn() {
        let mut core = NodeCore::new(1, 5, TTL);
        lend(&mut core, LeaseClass::Pinned, 1);
        core.resize(Millis(0), 3, Millis(0));
        assert_eq!(lend(&mut core, LeaseClass::Revocable, 4).len(), 2);
        assert_eq!(settle(&mut core), [4, 3]);
        core.resize(Millis(0), 0, Millis(0));
        core.resize(Millis(0), 3, Millis(0));
        assert!(lend(&mut core, LeaseClass::Revocable, 1).is_empty(), "its leases are still in force");
    }

    #[test]
    fn a_node_has_no_more_regions_than_both_its_operator_and_the_pressure_on_memory_allow() {
        let mut core = NodeCore::new(1, 4, TTL);
        lend(&mut core, LeaseClass::Revocable, 3);
        assert_eq!(core.allow(Millis(0), 2, Millis(0)).revoked, 1);
        assert_eq!(core.resize(Millis(0), 4, Millis(0)).revoked, 0, "the pressure has not passed");
        assert_eq!((core.target(), core.allowed(), core.excess()), (4, 2, 2));
        assert_eq!(core.resize(Millis(0), 1, Millis(0)).revoked, 1);
        assert_eq!(core.allow(Millis(0), 9, Millis(0)).revoked, 0);
        assert_eq!((core.target(), core.allowed(), core.excess()), (1, 4, 3));
    }

    #[test]
    fn a_lease_whose_time_has_passed_keeps_no_other_lease_from_staying() {
        let mut core = NodeCore::new(1, 2, TTL);
        lend(&mut core, LeaseClass::Revocable, 1);
        let _ = core.grant(Millis(500), OWNER, LeaseClass::Revocable, 1, &mut || KEY);
        assert_eq!(core.resize(Millis(1_200), 1, Millis(0)).revoked, 0);
    }

    #[test]
    fn a_node_that_shrinks_gives_up_free_regions_then_the_newest_leases_of_any_owner_but_no_pinned_one() {
        let mut core = NodeCore::new(1, 6, TTL);
        let pinned = lend(&mut core, LeaseClass::Pinned, 1)[0];
        let older = lend(&mut core, LeaseClass::Revocable, 2);
        let newer = core.grant(Millis(0), OwnerId(6), LeaseClass::Revocable, 1, &mut || KEY)[0].lending;
        let grace = Millis(3_000);
        let answer = core.resize(Millis(1), 4, grace);
        assert_eq!((answer.revoked, settle(&mut core)), (0, vec![5, 4]));
        let answer = core.resize(Millis(1), 2, grace);
        assert_eq!((answer.revoked, answer.pinned, answer.remaining_ms), (2, 1, 3_000));
        assert_eq!(core.resize(Millis(2), 2, grace).revoked, 0, "both are being taken back already");
        for lease in [older[1], newer] {
            let owner = core.owner(lease).unwrap();
            assert!(core.renew(Millis(3), owner, &reference(lease)).unwrap().revoked);
            assert_eq!(core.release(owner, &reference(lease)), Ok(Some(lease)));
            core.fenced(lease);
        }
        assert!(!core.renew(Millis(3), OWNER, &reference(older[0])).unwrap().revoked);
        assert_eq!((settle(&mut core), core.counts().withdrawn), (vec![older[1].region, newer.region], 4));
        assert_eq!(core.resize(Millis(4), 0, grace).revoked, 1);
        assert_eq!(core.release(OWNER, &reference(older[0])), Ok(Some(older[0])));
        core.fenced(older[0]);
        assert_eq!(
            (settle(&mut core), core.excess()),
            (vec![older[0].region], 1),
            "only the pinned one is left"
        );
        assert_eq!(core.check(Millis(5), pinned, &KEY), Ok(()));
    }

    #[test]
    fn a_node_that_grows_again_lends_a_region_once_it_has_memory_and_never_more_than_it_was_started_with() {
        let mut core = NodeCore::new(1, 3, TTL);
        core.resize(Millis(0), 1, Millis(0));
        assert_eq!(settle(&mut core), [2, 1]);
        assert_eq!(core.next_to_restore(), None);
        assert_eq!(lend(&mut core, LeaseClass::Revocable, 3).len(), 1);
        let states = core.states(Millis(0));
        assert_eq!(states.iter().map(|state| state.withdrawn).collect::<Vec<_>>(), [false, true, true]);
        core.resize(Millis(0), 9, Millis(0));
        assert_eq!(core.target(), 3);
        for region in [1, 2] {
            assert_eq!(core.next_to_restore(), Some(region));
            assert!(lend(&mut core, LeaseClass::Revocable, 3).is_empty(), "it has no memory yet");
            core.restored(region);
            assert_eq!(lend(&mut core, LeaseClass::Revocable, 3).len(), 1);
        }
        assert_eq!(core.next_to_restore(), None);
    }

    #[test]
    fn a_region_that_returns_after_the_node_has_grown_again_is_scrubbed() {
        let mut core = NodeCore::new(1, 1, TTL);
        let lease = lend(&mut core, LeaseClass::Revocable, 1)[0];
        assert_eq!(core.resize(Millis(0), 0, Millis(0)).revoked, 1);
        core.resize(Millis(0), 1, Millis(0));
        assert_eq!(core.release(OWNER, &reference(lease)), Ok(Some(lease)));
        core.fenced(lease);
        assert_eq!((settle(&mut core), core.counts().free), (vec![], 1));
    }

    #[test]
    fn grants_have_an_owner_while_they_are_in_force() {
        let mut core = NodeCore::new(1, 1, TTL);
        let lease = lend(&mut core, LeaseClass::Pinned, 1)[0];
        let client = add(&mut core, lease);
        assert_eq!([lease, client].map(|grant| core.owner(grant)), [Some(OWNER); 2]);
        core.fence_grant(Millis(1), OWNER, &reference(lease), client.epoch).unwrap();
        assert_eq!([lease, client].map(|grant| core.owner(grant)), [Some(OWNER), None]);
    }

    #[test]
    fn a_message_with_a_damaged_key_names_no_lease() {
        let mut core = NodeCore::new(1, 1, TTL);
        let lease = lend(&mut core, LeaseClass::Revocable, 1)[0];
        let damaged = LeaseRef { key: vec![1; 15], ..reference(lease) };
        assert_eq!(core.renew(Millis(1), OWNER, &damaged), Err(LeaseRefusal::WrongKey));
        assert_eq!(core.release(OWNER, &damaged), Err(LeaseRefusal::WrongKey));
        let added = core.add_grant(Millis(1), OWNER, &damaged, GrantMode::ReadOnly, KEY);
        assert_eq!(added, Err(GrantRefusal::Lease(LeaseRefusal::WrongKey)));
    }

    fn add(core: &mut NodeCore, lease: Lending) -> Lending {
        let grant = core.add_grant(Millis(1), OWNER, &reference(lease), GrantMode::ReadWrite, KEY);
        grant.unwrap().lending
    }

    #[test]
    fn one_of_three_grants_is_fenced_and_the_others_go_on_to_the_lease_s_end() {
        let mut core = NodeCore::new(1, 1, TTL);
        let lease = lend(&mut core, LeaseClass::Pinned, 1)[0];
        let (one, other) = (add(&mut core, lease), add(&mut core, lease));
        assert!(lease.epoch < one.epoch && one.epoch < other.epoch);
        for _ in 0..2 {
            assert_eq!(core.fence_grant(Millis(2), OWNER, &reference(lease), one.epoch), Ok(one));
        }
        let check = |core: &NodeCore, grant| core.check(Millis(2), grant, &KEY);
        assert_eq!(check(&core, one), Err(Refusal::StaleEpoch));
        assert_eq!((check(&core, other), check(&core, lease)), (Ok(()), Ok(())));
        let own = core.fence_grant(Millis(2), OWNER, &reference(lease), lease.epoch);
        assert_eq!(own, Err(GrantRefusal::OwnersOwn));
        assert_eq!(core.renew(Millis(2), OWNER, &reference(other)), Err(LeaseRefusal::WrongKey));
        assert_eq!(core.release(OWNER, &reference(lease)), Ok(Some(lease)));
        assert_eq!(check(&core, other), Err(Refusal::StaleEpoch));
        let late = core.add_grant(Millis(2), OWNER, &reference(lease), GrantMode::ReadOnly, KEY);
        assert_eq!(late, Err(GrantRefusal::Lease(LeaseRefusal::Ended)));
    }

    #[test]
    fn a_lease_that_is_taken_back_lasts_its_grace_however_often_it_is_renewed() {
        let mut core = NodeCore::new(1, 1, TTL);
        let lease = lend(&mut core, LeaseClass::Revocable, 1)[0];
        assert_eq!(core.revoke(Millis(500), OWNER, 1, Millis(2_000)).remaining_ms, 2_000);
        for at in [600, 1_400, 2_499] {
            let term = core.renew(Millis(at), OWNER, &reference(lease)).unwrap();
            assert_eq!((term.remaining, term.revoked), (Millis(2_500 - at), true));
            assert!(core.expire(Millis(at)).is_empty());
        }
        assert_eq!(core.next_deadline(), Some(Millis(2_500)));
        assert_eq!(core.renew(Millis(2_500), OWNER, &reference(lease)), Err(LeaseRefusal::Ended));
        assert_eq!(core.expire(Millis(2_500)), [lease]);
    }

    #[test]
    fn a_short_grace_period_does_not_shorten_the_promised_time() {
        let mut core = NodeCore::new(1, 1, TTL);
        let lease = lend(&mut core, LeaseClass::Revocable, 1)[0];
        assert_eq!(core.revoke(Millis(400), OWNER, 1, Millis(0)).remaining_ms, 600);
        assert_eq!(core.renew(Millis(999), OWNER, &reference(lease)).unwrap().remaining, Millis(1));
    }

    #[test]
    fn a_node_that_was_restarted_knows_no_old_lease_and_repeats_no_epoch() {
        let mut core = NodeCore::new(1, 2, TTL);
        let old = lend(&mut core, LeaseClass::Pinned, 2);
        let client = add(&mut core, old[0]);
        let mut core = NodeCore::new(2, 2, TTL);
        assert!(core.states(Millis(0)).is_empty(), "its memory is new, and all of it is free");
        let new = lend(&mut core, LeaseClass::Pinned, 2);
        for old in old.into_iter().chain([client]) {
            assert!(new.iter().all(|new| new.epoch > old.epoch));
            assert_eq!(core.check(Millis(1), old, &KEY), Err(Refusal::StaleEpoch));
            assert_eq!(core.renew(Millis(1), OWNER, &reference(old)), Err(LeaseRefusal::Ended));
            assert_eq!(core.release(OWNER, &reference(old)), Ok(None));
        }
        assert_eq!(core.counts().held, 2);
    }
}
