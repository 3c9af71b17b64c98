//! The decisions of a holder of leases: which leases to renew and when, what an answer means, when to stop,
//! whether to ask for more. The code takes the time and the answers as arguments, and sends nothing.
//!
//! H1. A lease is used only while [`Holder::usable`] says so: by the holder's own clock, with a margin for
//!     both clocks.
//! H2. A lease is lost when its time has passed by the holder's clock, its node has refused it, or its node
//!     was given up, and by nothing else: brokers that die, restart or forget cost no lease.
//! H3. No answer makes a holder use a region longer than the node keeps it: times count from when the holder
//!     asked.
//! H4. A lease that cannot be used is given back.
//! H5. A client that is admitted stops no later than the holder would: it learns for how long it may use the
//!     region, and counts that time from when it asked.
//! Not here: memory, extents, how messages travel.

use std::collections::BTreeMap;

use farpool_lease::{Holding, Holdings, LeaseClass, Millis, Term};
use farpool_wire::control::{
    self, AcquireRequest, AcquireResponse, AddGrantRequest, AddGrantResponse, FenceGrantRequest, Lease,
    LeaseRef, ReleaseRequest, RenewRequest, RenewResponse,
};
use farpool_wire::{AccessKey, Epoch, GrantMode, NodeId, OwnerId, RegionId};

/// A node that was given up is not asked for regions again before this time has passed: by then the broker
/// knows.
const AVOID_FOR: Millis = Millis(15_000);

/// The leases of one owner, as one process holds them.
#[derive(Debug)]
pub struct Holder {
    owner: OwnerId,
    region_bytes: u64,
    holdings: Holdings,
    avoid_until: BTreeMap<NodeId, Millis>,
    /// Nodes to leave out of the next request: more regions there would be of no use.
    unwanted: Option<Vec<NodeId>>,
    /// Whether the last request to a broker left nodes out for that reason.
    was_limited: bool,
}

/// A request to a node for more time for these leases.
#[derive(Clone, Debug)]
pub struct Renewal {
    /// The node.
    pub node: NodeId,
    /// When it is asked, by the holder's clock.
    pub asked_at: Millis,
    leases: Vec<(u32, Epoch, AccessKey)>,
}

/// What an answer changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// The lease lasts longer.
    Extended {
        /// The region.
        region: RegionId,
        /// Until when it may be used, by the holder's clock.
        usable_until: Millis,
    },
    /// The region is being taken back: its data must be moved elsewhere before `usable_until`.
    Leave {
        /// The region.
        region: RegionId,
        /// Until when it may be used, by the holder's clock.
        usable_until: Millis,
    },
    /// The lease has ended: the region's data are lost.
    Lost {
        /// The region.
        region: RegionId,
        /// The lease's epoch.
        epoch: Epoch,
    },
}

/// The result of a broker's answer.
#[derive(Debug)]
pub struct Acquired {
    /// Leases that the holder has now.
    pub leases: Vec<HeldLease>,
    /// Leases to give back, and why.
    pub unusable: Vec<(Lease, &'static str)>,
    /// The outcome, by which the next attempt is scheduled.
    pub outcome: GrowthOutcome,
}

/// A lease just acquired. An older lease of its region, if there was one, is replaced.
#[derive(Clone, Debug)]
pub struct HeldLease {
    /// The region.
    pub region: RegionId,
    /// The lease's epoch.
    pub epoch: Epoch,
    /// The key with which sessions attach the region.
    pub key: AccessKey,
    /// Until when it may be used unless renewed, by the holder's clock.
    pub usable_until: Millis,
    /// The lease as it came, with the node's addresses.
    pub lease: Lease,
}

/// Another client's access to one of the holder's regions, to be handed to that client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClientGrant {
    /// The region.
    pub region: RegionId,
    /// The grant's epoch, by which it is fenced.
    pub epoch: Epoch,
    /// The key with which the client attaches the region.
    pub key: AccessKey,
    /// What the client may do.
    pub mode: GrantMode,
}

/// The outcome of an attempt to get more regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GrowthOutcome {
    /// It brought regions.
    #[default]
    Grown,
    /// The pool or this owner's share is used up.
    Full,
    /// No broker answered, or only one that does not know its nodes yet.
    Unreachable,
}

impl Holder {
    /// A holder without leases. All regions have one size.
    pub fn new(owner: OwnerId, region_bytes: u64) -> Self {
        Holder {
            owner,
            region_bytes,
            holdings: Holdings::default(),
            avoid_until: BTreeMap::new(),
            unwanted: None,
            was_limited: false,
        }
    }

    /// The owner of the leases.
    pub fn owner(&self) -> OwnerId {
        self.owner
    }

    /// The lease of a region, if it may be used now (H1).
    pub fn usable(&self, now: Millis, region: RegionId) -> Option<&Holding> {
        self.holdings.usable(now, region)
    }

    /// The lease of a region, usable or not.
    pub fn held(&self, region: RegionId) -> Option<&Holding> {
        self.holdings.get(region)
    }

    /// For how long a client that asks now may use the region. The client counts that from when it asked, by
    /// its own clock, and needs no margin of its own (see [`Holding::usable_for`]).
    pub fn usable_for(&self, now: Millis, region: RegionId) -> Option<Millis> {
        self.usable(now, region).map(|held| held.usable_for(now))
    }

    /// Every lease held, usable or not.
    pub fn leases(&self) -> impl Iterator<Item = (RegionId, &Holding)> {
        self.holdings.iter()
    }

    /// The regions that are being taken back.
    pub fn to_leave(&self) -> impl Iterator<Item = (RegionId, &Holding)> {
        self.holdings.revoked()
    }

    /// When [`lapsed`](Self::lapsed) or [`renewals`](Self::renewals) has something to do next.
    pub fn next_deadline(&self) -> Option<Millis> {
        self.holdings.next_deadline()
    }

    /// Drops the leases whose time has passed by the holder's clock, and returns them.
    #[must_use]
    pub fn lapsed(&mut self, now: Millis) -> Vec<(RegionId, Epoch)> {
        self.holdings.lapsed(now)
    }

    /// The renewals to request now, with at most `most` leases in each. A lease is not requested again before
    /// the last request has had time to be answered.
    #[must_use]
    pub fn renewals(&mut self, now: Millis, most: usize) -> Vec<Renewal> {
        let mut renewals = Vec::new();
        for (node, due) in self.holdings.due(now) {
            let leases = due.iter().map(|(index, held)| (*index, held.epoch, held.key));
            let leases: Vec<_> = leases.collect();
            let chunks = leases.chunks(most).map(<[_]>::to_vec);
            renewals.extend(chunks.map(|leases| Renewal { node, asked_at: now, leases }));
        }
        renewals
    }

    /// A node says that leases of this owner are taken back: the next [renewals](Self::renewals) ask which.
    pub fn revocation_announced(&mut self, now: Millis, node: NodeId) {
        self.holdings.due_at_once(now, node);
    }

    /// Records a node's answer to a renewal. Leases that it does not mention stay as they are.
    #[must_use]
    pub fn renewal_answered(
        &mut self,
        now: Millis,
        renewal: &Renewal,
        answer: &RenewResponse,
    ) -> Vec<Change> {
        let mut changes = Vec::new();
        for (&(index, epoch, _), outcome) in renewal.leases.iter().zip(&answer.outcomes) {
            let region = RegionId { node: renewal.node, index };
            if !outcome.renewed {
                if self.holdings.dropped(region, epoch) {
                    changes.push(Change::Lost { region, epoch });
                }
                continue;
            }
            let term = Term { remaining: Millis(outcome.remaining_ms), revoked: outcome.revoked };
            self.holdings.renewed(renewal.asked_at, term, region, epoch);
            let held = self.holdings.usable(now, region).filter(|held| held.epoch == epoch);
            let usable_until = held.map(Holding::usable_until);
            changes.extend(usable_until.map(|usable_until| match outcome.revoked {
                true => Change::Leave { region, usable_until },
                false => Change::Extended { region, usable_until },
            }));
        }
        changes
    }

    /// Records a node's answer about leases of an earlier process of the same owner. The holder now has those
    /// that still run. Returns for each lease until when it may be used, and whether it is being taken back;
    /// `None`: it cannot be used.
    pub fn adoption_answered(
        &mut self,
        now: Millis,
        question: &Renewal,
        answer: &RenewResponse,
    ) -> Vec<(RegionId, Option<(Millis, bool)>)> {
        let answers = question.leases.iter().zip(&answer.outcomes);
        let adopted = answers.map(|(&(index, epoch, key), outcome)| {
            let region = RegionId { node: question.node, index };
            let remaining = Millis(outcome.remaining_ms);
            let runs = outcome.renewed
                && self.holdings.acquired(now, question.asked_at, remaining, region, epoch, key);
            if runs && outcome.revoked {
                let term = Term { remaining, revoked: true };
                self.holdings.renewed(question.asked_at, term, region, epoch);
            }
            let held = self.holdings.get(region).filter(|held| runs && held.epoch == epoch);
            (region, held.map(|held| (held.usable_until(), outcome.revoked)))
        });
        adopted.collect()
    }

    /// Requests that renew every lease, due or not: this process is ending and a later one takes over, or
    /// leases must last as long as possible in case their node stops.
    pub fn last_renewals(&self, now: Millis, most: usize) -> Vec<Renewal> {
        let mut by_node: BTreeMap<NodeId, Vec<_>> = BTreeMap::new();
        for (region, held) in self.holdings.iter() {
            by_node.entry(region.node).or_default().push((region.index, held.epoch, held.key));
        }
        let renewals = by_node.iter().flat_map(|(node, leases)| {
            leases.chunks(most).map(|leases| Renewal::of(*node, now, leases.iter().copied()))
        });
        renewals.collect()
    }

    /// The request for regions to a broker.
    pub fn acquisition(&mut self, now: Millis, class: LeaseClass, count: u32) -> AcquireRequest {
        self.avoid_until.retain(|_, until| *until > now);
        let mut avoid: Vec<u64> = self.avoid_until.keys().map(|node| node.0).collect();
        let unwanted = self.unwanted.take().unwrap_or_default();
        self.was_limited = !unwanted.is_empty();
        avoid.extend(unwanted.iter().filter(|node| !self.avoid_until.contains_key(node)).map(|node| node.0));
        AcquireRequest { owner: self.owner.0, count, class: class.to_wire(), avoid }
    }

    /// Leaves these nodes out of the next request for regions: a caller needs regions on other nodes.
    pub fn want_elsewhere(&mut self, unwanted: Vec<NodeId>) {
        self.unwanted = Some(unwanted);
    }

    /// Whether the next request leaves nodes out because a caller needs regions on other nodes.
    pub fn wants_elsewhere(&self) -> bool {
        self.unwanted.is_some()
    }

    /// Whether the last request left out nodes that may have room. If so, the answer *full* says nothing
    /// about these nodes.
    pub fn was_limited(&self) -> bool {
        self.was_limited
    }

    /// Records the answer to a request that was sent to a broker at `asked_at`; `None`: there was none.
    pub fn acquisition_answered(
        &mut self,
        now: Millis,
        asked_at: Millis,
        answer: Option<AcquireResponse>,
    ) -> Acquired {
        let nothing = |outcome| Acquired { leases: Vec::new(), unusable: Vec::new(), outcome };
        let Some(answer) = answer else { return nothing(GrowthOutcome::Unreachable) };
        if answer.leases.is_empty() {
            // A broker that has just restarted and does not know its nodes yet counts as unreachable.
            let unknown = answer.region_bytes == 0;
            return nothing(if unknown { GrowthOutcome::Unreachable } else { GrowthOutcome::Full });
        }
        let mut acquired = nothing(GrowthOutcome::Full);
        for lease in answer.leases {
            if self.holds(&lease) {
                continue; // an answer that came twice
            }
            match self.accept(now, asked_at, answer.region_bytes, &lease) {
                Ok((region, key, usable_until)) => {
                    let epoch = Epoch(lease.epoch);
                    acquired.leases.push(HeldLease { region, epoch, key, usable_until, lease });
                }
                Err(reason) => acquired.unusable.push((lease, reason)),
            }
        }
        if !acquired.leases.is_empty() {
            acquired.outcome = GrowthOutcome::Grown;
        }
        acquired
    }

    fn holds(&self, lease: &Lease) -> bool {
        let held = lease.region_id().and_then(|region| self.holdings.get(region));
        held.is_some_and(|held| held.epoch.0 == lease.epoch)
    }

    /// Takes a lease from an answer, if it can be used. Returns its region, its key, and until when it may be
    /// used.
    fn accept(
        &mut self,
        now: Millis,
        asked_at: Millis,
        region_bytes: u64,
        lease: &Lease,
    ) -> Result<(RegionId, AccessKey, Millis), &'static str> {
        if region_bytes != self.region_bytes {
            return Err("its region has another size than those before; reconnect to the pool");
        }
        let region = lease.region_id().ok_or("it names no node")?;
        let key = lease.access_key().ok_or("its key has not 16 bytes")?;
        let epoch = Epoch(lease.epoch);
        let _of_use = self.holdings.acquired(now, asked_at, Millis(lease.ttl_ms), region, epoch, key);
        let held = self.holdings.get(region).filter(|held| held.epoch == epoch);
        let held = held.ok_or("it had expired when it arrived, or a later lease of its region is held")?;
        Ok((region, key, held.usable_until()))
    }

    /// Forgets a lease that the holder lets go of, or that its node has refused. `false`: it was not held any
    /// more.
    pub fn dropped(&mut self, region: RegionId, epoch: Epoch) -> bool {
        self.holdings.dropped(region, epoch)
    }

    /// The request that gives leases back to a node.
    pub fn release<'a>(&self, leases: impl Iterator<Item = (u32, Epoch, &'a AccessKey)>) -> ReleaseRequest {
        let leases = leases.map(|(region, epoch, key)| LeaseRef::new(region, epoch, key)).collect();
        ReleaseRequest { owner: self.owner.0, leases }
    }

    /// The request to a region's node to admit another client. `None`: the region may not be used any more.
    pub fn add_grant(&self, now: Millis, region: RegionId, mode: GrantMode) -> Option<AddGrantRequest> {
        let held = self.usable(now, region)?;
        let lease = Some(LeaseRef::new(region.index, held.epoch, &held.key));
        Some(AddGrantRequest { owner: self.owner.0, lease, mode: control::GrantMode::from(mode) as i32 })
    }

    /// The client's grant, from the node's answer. `None`: the lease under which it was requested has ended,
    /// or the answer is of no use. A grant whose answer is lost belongs to no client; it ends with the lease.
    pub fn grant_added(
        &self,
        now: Millis,
        region: RegionId,
        asked: &AddGrantRequest,
        answer: &AddGrantResponse,
    ) -> Option<ClientGrant> {
        let held = self.usable(now, region)?;
        let (lease, epoch) = (asked.lease.as_ref()?, Epoch(answer.epoch));
        if lease.epoch != held.epoch.0 || epoch <= held.epoch {
            return None;
        }
        let mode = control::GrantMode::from_wire(asked.mode)?;
        Some(ClientGrant { region, epoch, key: answer.access_key()?, mode })
    }

    /// The request to a region's node to fence a client's grant. `None`: the lease is not held any more. A
    /// lease that the holder may not use any more may still be in force at the node, and its grants with it,
    /// so it counts as held. Until the node has answered, the client may still use the region: ask again.
    pub fn fence_grant(&self, region: RegionId, grant: Epoch) -> Option<FenceGrantRequest> {
        let held = self.held(region)?;
        let lease = Some(LeaseRef::new(region.index, held.epoch, &held.key));
        Some(FenceGrantRequest { owner: self.owner.0, lease, grant: grant.0 })
    }

    /// Gives up the leases of a node that does not answer, and requests no regions there for a while. Returns
    /// the leases.
    pub fn node_lost(&mut self, now: Millis, node: NodeId) -> Vec<(RegionId, Epoch)> {
        self.avoid(now, node);
        let there = self.holdings.iter().filter(|(region, _)| region.node == node);
        let gone: Vec<_> = there.map(|(region, held)| (region, held.epoch)).collect();
        for (region, epoch) in &gone {
            self.holdings.dropped(*region, *epoch);
        }
        gone
    }

    /// Requests no regions on a node for a while.
    pub fn avoid(&mut self, now: Millis, node: NodeId) {
        self.avoid_until.insert(node, now.plus(AVOID_FOR));
    }
}

impl Renewal {
    /// A request to a node for more time for these leases.
    pub(crate) fn of(
        node: NodeId,
        asked_at: Millis,
        leases: impl Iterator<Item = (u32, Epoch, AccessKey)>,
    ) -> Self {
        Renewal { node, asked_at, leases: leases.collect() }
    }

    /// The request as it is sent.
    pub fn request(&self, owner: OwnerId) -> RenewRequest {
        let leases = self.leases.iter();
        let leases = leases.map(|(region, epoch, key)| LeaseRef::new(*region, *epoch, key)).collect();
        RenewRequest { owner: owner.0, leases }
    }
}

#[cfg(test)]
mod tests {
    use farpool_wire::control::{NodeAddress, RenewOutcome};

    use super::*;

    const REGION_BYTES: u64 = 64 << 20;
    const TTL: u64 = 10_000;

    fn region(index: u32) -> RegionId {
        RegionId { node: NodeId(1), index }
    }

    fn lease(index: u32, counter: u32) -> Lease {
        let address = NodeAddress { node: 1, ..Default::default() };
        let epoch = Epoch::new(1, counter).0;
        Lease {
            address: Some(address),
            region: index,
            epoch,
            key: vec![1; 16],
            ttl_ms: TTL,
            ..Default::default()
        }
    }

    fn answer(leases: Vec<Lease>) -> Option<AcquireResponse> {
        Some(AcquireResponse { leases, region_bytes: REGION_BYTES, short_reason: String::new() })
    }

    fn holder_of(leases: Vec<Lease>) -> Holder {
        let mut holder = Holder::new(OwnerId(7), REGION_BYTES);
        let acquired = holder.acquisition_answered(Millis(10), Millis(0), answer(leases));
        assert!(acquired.unusable.is_empty());
        holder
    }

    fn renewed(remaining_ms: u64, revoked: bool) -> RenewOutcome {
        RenewOutcome { renewed: true, remaining_ms, revoked, ..Default::default() }
    }

    fn ask(holder: &mut Holder, now: u64) -> Renewal {
        holder.renewals(Millis(now), 100).pop().expect("something is due")
    }

    #[test]
    fn an_answer_extends_what_it_renews_and_ends_what_it_refuses() {
        let mut holder = holder_of(vec![lease(0, 1), lease(1, 2), lease(2, 3)]);
        let renewal = ask(&mut holder, 4_000);
        assert_eq!(renewal.request(holder.owner()).leases.len(), 3);
        let outcomes = vec![renewed(TTL, false), RenewOutcome::default(), renewed(30_000, true)];
        let changes = holder.renewal_answered(Millis(4_100), &renewal, &RenewResponse { outcomes });
        assert_eq!(
            changes,
            [
                Change::Extended { region: region(0), usable_until: Millis(12_000) },
                Change::Lost { region: region(1), epoch: Epoch::new(1, 2) },
                Change::Leave { region: region(2), usable_until: Millis(28_000) },
            ]
        );
        assert_eq!(holder.to_leave().map(|(region, _)| region).collect::<Vec<_>>(), [region(2)]);
        assert!(holder.usable(Millis(5_000), region(1)).is_none());
    }

    #[test]
    fn an_answer_that_lacks_outcomes_changes_only_what_it_names() {
        let mut holder = holder_of(vec![lease(0, 1), lease(1, 2)]);
        let renewal = ask(&mut holder, 4_000);
        let outcomes = vec![renewed(TTL, false)];
        assert_eq!(holder.renewal_answered(Millis(4_100), &renewal, &RenewResponse { outcomes }).len(), 1);
        assert_eq!(holder.leases().count(), 2);
    }

    #[test]
    fn a_late_refusal_of_an_older_lease_does_not_end_the_present_one() {
        let mut holder = holder_of(vec![lease(0, 1)]);
        let renewal = ask(&mut holder, 4_000);
        let _ = holder.acquisition_answered(Millis(4_001), Millis(4_000), answer(vec![lease(0, 9)]));
        let outcomes = vec![RenewOutcome::default()];
        assert!(holder.renewal_answered(Millis(4_100), &renewal, &RenewResponse { outcomes }).is_empty());
        assert_eq!(holder.usable(Millis(4_100), region(0)).map(|held| held.epoch), Some(Epoch::new(1, 9)));
    }

    #[test]
    fn leases_of_no_use_are_given_back() {
        let mut holder = holder_of(vec![lease(0, 5)]);
        let keyless = Lease { key: vec![1; 15], ..lease(1, 6) };
        let nowhere = Lease { address: None, ..lease(2, 7) };
        let bad = vec![keyless, nowhere, lease(0, 4)];
        let acquired = holder.acquisition_answered(Millis(10), Millis(0), answer(bad));
        assert_eq!((acquired.leases.len(), acquired.unusable.len()), (0, 3));
        assert_eq!(acquired.outcome, GrowthOutcome::Full);
        let late = holder.acquisition_answered(Millis(8_000), Millis(0), answer(vec![lease(3, 8)]));
        assert_eq!((late.leases.len(), late.unusable.len()), (0, 1));
        let odd = AcquireResponse { region_bytes: 1, leases: vec![lease(4, 9)], ..Default::default() };
        assert_eq!(holder.acquisition_answered(Millis(10), Millis(0), Some(odd)).unusable.len(), 1);
        assert_eq!(holder.leases().count(), 1);
    }

    #[test]
    fn clients_are_admitted_only_to_leases_in_force() {
        let holder = holder_of(vec![lease(0, 5)]);
        let asked = holder.add_grant(Millis(100), region(0), GrantMode::ReadOnly).unwrap();
        let sound = AddGrantResponse { epoch: Epoch::new(1, 6).0, key: vec![2; 16] };
        let added =
            |answer: &AddGrantResponse, now| holder.grant_added(Millis(now), region(0), &asked, answer);
        let grant = added(&sound, 200).unwrap();
        assert_eq!((grant.epoch, grant.mode), (Epoch::new(1, 6), GrantMode::ReadOnly));
        assert_eq!(added(&sound, 8_000), None, "the lease has ended by the holder's clock");
        assert_eq!(added(&AddGrantResponse { key: vec![2; 15], ..sound.clone() }, 200), None);
        assert_eq!(added(&AddGrantResponse { epoch: Epoch::new(1, 5).0, ..sound.clone() }, 200), None);
        assert_eq!(holder.usable_for(Millis(200), region(0)), Some(Millis(7_800)));
        assert!(holder.add_grant(Millis(8_000), region(0), GrantMode::ReadOnly).is_none());
        assert!(holder.fence_grant(region(0), grant.epoch).is_some());
        assert!(holder.fence_grant(region(1), grant.epoch).is_none());
    }

    #[test]
    fn grants_of_a_lease_that_the_holder_may_not_use_any_more_can_still_be_fenced() {
        let holder = holder_of(vec![lease(0, 5)]);
        let (before, stops) = (Millis(TTL * 4 / 5 - 1), Millis(TTL * 4 / 5));
        assert!(holder.usable(before, region(0)).is_some());
        assert!(holder.usable(stops, region(0)).is_none() && holder.usable_for(stops, region(0)).is_none());
        assert!(holder.add_grant(stops, region(0), GrantMode::ReadWrite).is_none());
        let request = holder.fence_grant(region(0), Epoch::new(1, 6)).expect("the lease is held");
        assert_eq!((request.owner, request.grant), (7, Epoch::new(1, 6).0));
        assert_eq!(request.lease.map(|lease| (lease.region, lease.epoch)), Some((0, Epoch::new(1, 5).0)));
    }

    #[test]
    fn a_grant_asked_for_under_an_older_lease_is_not_taken_for_one_of_the_present() {
        let mut holder = holder_of(vec![lease(0, 5)]);
        let asked = holder.add_grant(Millis(100), region(0), GrantMode::ReadWrite).unwrap();
        let _ = holder.acquisition_answered(Millis(200), Millis(150), answer(vec![lease(0, 9)]));
        let late = AddGrantResponse { epoch: Epoch::new(1, 10).0, key: vec![2; 16] };
        assert_eq!(holder.grant_added(Millis(300), region(0), &asked, &late), None);
    }

    #[test]
    fn a_region_to_leave_is_not_renewed_and_lapses_at_its_end() {
        let mut holder = holder_of(vec![lease(0, 1)]);
        let renewal = ask(&mut holder, 4_000);
        let outcomes = vec![renewed(20_000, true)];
        let changes = holder.renewal_answered(Millis(4_100), &renewal, &RenewResponse { outcomes });
        assert_eq!(changes, [Change::Leave { region: region(0), usable_until: Millis(20_000) }]);
        assert!(holder.renewals(Millis(19_999), 100).is_empty());
        assert!(holder.usable(Millis(19_999), region(0)).is_some());
        assert_eq!(holder.lapsed(Millis(20_000)), [(region(0), Epoch::new(1, 1))]);
    }

    #[test]
    fn an_answer_that_comes_twice_gives_nothing_back_that_is_held() {
        let mut holder = holder_of(vec![lease(0, 5)]);
        let twice = holder.acquisition_answered(Millis(20), Millis(0), answer(vec![lease(0, 5)]));
        assert_eq!((twice.leases.len(), twice.unusable.len()), (0, 0));
        let renewal = ask(&mut holder, 4_000);
        let said = RenewResponse { outcomes: vec![renewed(TTL, false)] };
        let extended = [Change::Extended { region: region(0), usable_until: Millis(12_000) }];
        for _ in 0..2 {
            assert_eq!(holder.renewal_answered(Millis(4_100), &renewal, &said), extended);
        }
    }

    #[test]
    fn a_broker_that_knows_no_node_counts_as_unreachable() {
        let mut holder = holder_of(Vec::new());
        let mut outcome = |answer| holder.acquisition_answered(Millis(0), Millis(0), answer).outcome;
        assert_eq!(outcome(None), GrowthOutcome::Unreachable);
        assert_eq!(outcome(Some(AcquireResponse::default())), GrowthOutcome::Unreachable);
        assert_eq!(outcome(answer(Vec::new())), GrowthOutcome::Full);
    }

    #[test]
    fn a_lost_node_is_avoided_for_a_while_and_its_leases_are_gone() {
        let mut holder = holder_of(vec![lease(0, 1), lease(1, 2)]);
        assert_eq!(holder.node_lost(Millis(100), NodeId(1)).len(), 2);
        assert_eq!(holder.leases().count(), 0);
        let avoided =
            |holder: &mut Holder, now| holder.acquisition(Millis(now), LeaseClass::Revocable, 1).avoid;
        assert_eq!(avoided(&mut holder, 15_099), [1]);
        assert!(avoided(&mut holder, 15_100).is_empty());
    }

    #[test]
    fn the_next_deadline_is_when_a_renewal_is_due() {
        let mut holder = holder_of(vec![lease(0, 1)]);
        let due = holder.next_deadline().unwrap();
        assert!(holder.renewals(Millis(due.0 - 1), 100).is_empty());
        assert_eq!(holder.renewals(due, 100).len(), 1);
        assert_eq!(Holder::new(OwnerId(7), REGION_BYTES).next_deadline(), None);
    }

    #[test]
    fn leases_of_an_earlier_process_that_still_run_are_held() {
        let mut holder = Holder::new(OwnerId(7), REGION_BYTES);
        let key = AccessKey::from_bytes([1; 16]);
        let leases = (0..3).map(|index| (index, Epoch::new(1, index + 1), key));
        let question = Renewal::of(NodeId(1), Millis(1_000), leases);
        let refused = RenewOutcome { renewed: false, ..renewed(TTL, false) };
        let outcomes = vec![renewed(TTL, false), refused, renewed(5_000, true)];
        let answers = holder.adoption_answered(Millis(1_100), &question, &RenewResponse { outcomes });
        let usable = |holder: &Holder, index| holder.held(region(index)).map(Holding::usable_until);
        assert_eq!(usable(&holder, 1), None);
        assert_eq!(
            answers,
            [
                (region(0), Some((Millis(9_000), false))),
                (region(1), None),
                (region(2), Some((usable(&holder, 2).unwrap(), true))),
            ]
        );
        assert_eq!(holder.to_leave().map(|(region, _)| region).collect::<Vec<_>>(), [region(2)]);
    }

    #[test]
    fn last_renewals_ask_for_every_lease_due_or_not() {
        let holder = holder_of(vec![lease(0, 1), lease(1, 2), lease(2, 3)]);
        let renewals = holder.last_renewals(Millis(50), 2);
        assert_eq!(renewals.iter().map(|renewal| renewal.leases.len()).collect::<Vec<_>>(), [2, 1]);
        assert!(renewals.iter().all(|renewal| (renewal.node, renewal.asked_at) == (NodeId(1), Millis(50))));
    }

    #[test]
    fn one_request_leaves_out_the_nodes_that_a_caller_does_not_want() {
        let mut holder = holder_of(vec![lease(0, 1)]);
        holder.node_lost(Millis(100), NodeId(1));
        assert!(!holder.wants_elsewhere() && !holder.was_limited());
        holder.want_elsewhere(vec![NodeId(1), NodeId(2)]);
        assert!(holder.wants_elsewhere());
        let avoided = |holder: &mut Holder| holder.acquisition(Millis(200), LeaseClass::Revocable, 1).avoid;
        assert_eq!(avoided(&mut holder), [1, 2]);
        assert!(!holder.wants_elsewhere() && holder.was_limited());
        assert_eq!(avoided(&mut holder), [1], "the next one leaves out the lost node only");
        assert!(!holder.was_limited());
    }
}
