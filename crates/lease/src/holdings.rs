use std::collections::BTreeMap;

use farpool_wire::{AccessKey, Epoch, NodeId, RegionId};

use crate::{Millis, Term};

/// How far a clock may run fast or slow against true time.
pub const CLOCK_DRIFT_PERCENT: u64 = 10;

/// Part of a lease's time that its holder leaves unused. With the node's clock 10 % fast and the holder's
/// 10 % slow, the lease has expired when the holder has seen 0.9 / 1.1 = 81.8 % of it pass. Leaving a fifth
/// unused covers that.
const MARGIN_DIVISOR: u64 = 5;
const _: () = assert!(
    (MARGIN_DIVISOR - 1) * (100 + CLOCK_DRIFT_PERCENT) <= MARGIN_DIVISOR * (100 - CLOCK_DRIFT_PERCENT),
    "a holder with a slow clock would outlive its lease at a node with a fast one"
);

/// A lease is renewed after this part of its time. Then 47 % of it is left before the holder must stop.
const RENEW_DIVISOR: u64 = 3;

/// A renewal without an answer is repeated after this part of the lease's time: five tries before the holder
/// must stop.
const RETRY_DIVISOR: u64 = 10;

/// How long a lease of `ttl` may last at its node, by its holder's clock: the node's clock may be 10 % slow,
/// and the holder's 10 % fast.
pub fn longest(ttl: Millis) -> Millis {
    // 1.1 / 0.9 of `ttl`. Saturating, since `ttl` comes from a node.
    let more = ttl.0.div_ceil(100 - CLOCK_DRIFT_PERCENT).saturating_mul(2 * CLOCK_DRIFT_PERCENT);
    ttl.plus(Millis(more))
}

/// One lease as its holder sees it.
#[derive(Clone, Copy, Debug)]
pub struct Holding {
    /// The lease's epoch.
    pub epoch: Epoch,
    /// Opens the region.
    pub key: AccessKey,
    asked_at: Millis,
    usable_until: Millis,
    ended_by: Millis,
    /// `None`: no renewal would extend it.
    renew_at: Option<Millis>,
    retry_after: Millis,
    revoked: bool,
}

impl Holding {
    fn new(epoch: Epoch, key: AccessKey, asked_at: Millis, ttl: Millis) -> Self {
        let usable_until = asked_at.plus(Millis(ttl.0 - ttl.0.div_ceil(MARGIN_DIVISOR)));
        let renew_at = Some(asked_at.plus(Millis(ttl.0 / RENEW_DIVISOR)));
        let retry_after = Millis((ttl.0 / RETRY_DIVISOR).max(1));
        let ended_by = asked_at.plus(longest(ttl));
        Holding { epoch, key, asked_at, usable_until, ended_by, renew_at, retry_after, revoked: false }
    }

    /// When the holder sent the last request that the node has answered.
    pub fn asked_at(&self) -> Millis {
        self.asked_at
    }

    /// By this time the lease has ended at the node too, however far the clocks drift within their bound.
    /// Until then the node may still renew it.
    pub fn ended_by(&self) -> Millis {
        self.ended_by
    }

    /// From this time on, by the holder's clock, the region must not be used under this lease.
    pub fn usable_until(&self) -> Millis {
        self.usable_until
    }

    /// For how long a client that asks now may use the region; zero when the time has passed.
    ///
    /// A client that counts this from when it asked the holder needs no margin of its own. However the time
    /// is divided between the holder and the client, each part is measured by a clock that runs at most
    /// [`CLOCK_DRIFT_PERCENT`] slow, and the holder's margin assumes that of the whole.
    pub fn usable_for(&self, now: Millis) -> Millis {
        self.usable_until.since(now)
    }

    /// Whether the region is being taken back. If so, its holder must have left it by
    /// [`usable_until`](Self::usable_until).
    pub fn is_revoked(&self) -> bool {
        self.revoked
    }
}

/// The leases that one client holds, with times by its own clock.
///
/// All times count from when the client *asked*. The node answered later, so its lease ends later.
#[derive(Debug, Default)]
pub struct Holdings {
    leases: BTreeMap<RegionId, Holding>,
}

impl Holdings {
    /// Records a lease that was requested at `asked_at` and lasts `ttl`. `false`: it is of no use, since this
    /// or a later lease of its region is held already, or its time has passed.
    pub fn acquired(
        &mut self,
        now: Millis,
        asked_at: Millis,
        ttl: Millis,
        region: RegionId,
        epoch: Epoch,
        key: AccessKey,
    ) -> bool {
        let holding = Holding::new(epoch, key, asked_at, ttl);
        let later = self.leases.get(&region).is_none_or(|held| held.epoch < epoch);
        let of_use = later && now < holding.usable_until;
        if of_use {
            self.leases.insert(region, holding);
        }
        of_use
    }

    /// The lease of a region, usable or not.
    pub fn get(&self, region: RegionId) -> Option<&Holding> {
        self.leases.get(&region)
    }

    /// The lease of a region, if it may be used now.
    pub fn usable(&self, now: Millis, region: RegionId) -> Option<&Holding> {
        self.leases.get(&region).filter(|held| now < held.usable_until)
    }

    /// The leases to renew now, by node. A lease is returned again only after an answer has had its time.
    pub fn due(&mut self, now: Millis) -> BTreeMap<NodeId, Vec<(u32, Holding)>> {
        let mut due: BTreeMap<NodeId, Vec<_>> = BTreeMap::new();
        for (region, held) in &mut self.leases {
            if held.renew_at.is_some_and(|at| now >= at) {
                held.renew_at = Some(now.plus(held.retry_after));
                due.entry(region.node).or_default().push((region.index, *held));
            }
        }
        due
    }

    /// Makes all leases on a node [due](Self::due) that may still be renewed.
    pub fn due_at_once(&mut self, now: Millis, node: NodeId) {
        let on_node = self.leases.iter_mut().filter(|(region, _)| region.node == node);
        on_node.for_each(|(_, held)| held.renew_at = held.renew_at.map(|_| now));
    }

    /// Records that the node renewed a lease when asked at `asked_at`. Answers about leases that were
    /// dropped, and answers that come out of order, change nothing. Only a revocation counts in any order: a
    /// holder that was once told that a lease is revoked does not ask to renew it any more.
    pub fn renewed(&mut self, asked_at: Millis, term: Term, region: RegionId, epoch: Epoch) {
        let Some(held) = self.leases.get_mut(&region).filter(|held| held.epoch == epoch) else { return };
        let revoked = held.revoked || term.revoked;
        let renewed = Holding::new(epoch, held.key, asked_at, term.remaining);
        if renewed.usable_until > held.usable_until {
            *held = renewed;
        }
        if revoked {
            (held.revoked, held.renew_at) = (true, None);
        }
    }

    /// The regions that are being taken back, and until when their holder may use them.
    pub fn revoked(&self) -> impl Iterator<Item = (RegionId, &Holding)> {
        self.iter().filter(|(_, held)| held.revoked)
    }

    /// Forgets a lease that was released, or that its node refused. `false`: it was not held any more.
    pub fn dropped(&mut self, region: RegionId, epoch: Epoch) -> bool {
        let held = self.leases.get(&region).is_some_and(|held| held.epoch == epoch);
        if held {
            self.leases.remove(&region);
        }
        held
    }

    /// Drops the leases whose time has passed by the holder's clock, and returns them. What was stored there
    /// is lost to the holder, though the node may keep it a little longer.
    #[must_use]
    pub fn lapsed(&mut self, now: Millis) -> Vec<(RegionId, Epoch)> {
        let over = self.leases.extract_if(.., |_, held| now >= held.usable_until);
        over.map(|(region, held)| (region, held.epoch)).collect()
    }

    /// When [`due`](Self::due) or [`lapsed`](Self::lapsed) has something to do next.
    pub fn next_deadline(&self) -> Option<Millis> {
        let next = |held: &Holding| held.renew_at.map_or(held.usable_until, |at| at.min(held.usable_until));
        self.leases.values().map(next).min()
    }

    /// Every lease held, usable or not.
    pub fn iter(&self) -> impl Iterator<Item = (RegionId, &Holding)> {
        self.leases.iter().map(|(region, held)| (*region, held))
    }
}

#[cfg(test)]
mod tests {
    use farpool_wire::OwnerId;
    use proptest::prelude::*;

    use super::*;
    use crate::{LeaseClass, Lending, RegionTable};

    const KEY: AccessKey = AccessKey::from_bytes([1; 16]);
    const TTL: Millis = Millis(10_000);
    const FULL: Term = Term { remaining: TTL, revoked: false };
    const REGION: RegionId = RegionId { node: NodeId(1), index: 0 };
    const EPOCH: Epoch = Epoch::new(1, 1);

    fn one_lease() -> Holdings {
        let mut holdings = Holdings::default();
        holdings.acquired(Millis(0), Millis(0), TTL, REGION, EPOCH, KEY);
        holdings
    }

    #[test]
    fn a_holder_stops_a_fifth_before_the_end() {
        let mut holdings = one_lease();
        assert!(holdings.usable(Millis(7_999), REGION).is_some());
        assert!(holdings.usable(Millis(8_000), REGION).is_none());
        assert!(holdings.lapsed(Millis(7_999)).is_empty());
        assert_eq!(holdings.lapsed(Millis(8_000)), [(REGION, EPOCH)]);
        assert_eq!(holdings.next_deadline(), None);
    }

    #[test]
    fn a_lease_may_last_longer_at_its_node_than_its_holder_may_use_it() {
        let mut holdings = one_lease();
        let held = *holdings.get(REGION).unwrap();
        assert_eq!((held.usable_until(), held.ended_by()), (Millis(8_000), Millis(12_240)));
        holdings.renewed(Millis(9_000), FULL, REGION, EPOCH);
        let held = holdings.get(REGION).unwrap();
        assert_eq!((held.asked_at(), held.ended_by()), (Millis(9_000), Millis(21_240)));
    }

    #[test]
    fn an_unanswered_renewal_is_asked_again_five_times_before_the_holder_stops() {
        let mut holdings = one_lease();
        let mut asked = Vec::new();
        while let Some(now) = holdings.next_deadline() {
            asked.extend(holdings.due(now).into_values().map(|_| now.0));
            let _ = holdings.lapsed(now);
        }
        assert_eq!(asked, [3_333, 4_333, 5_333, 6_333, 7_333]);
    }

    #[test]
    fn an_answer_counts_from_the_question_and_late_ones_never_shorten() {
        let mut holdings = one_lease();
        holdings.renewed(Millis(4_000), FULL, REGION, EPOCH);
        holdings.renewed(Millis(3_333), FULL, REGION, EPOCH);
        assert_eq!(holdings.usable(Millis(11_999), REGION).map(Holding::usable_until), Some(Millis(12_000)));
    }

    #[test]
    fn answers_about_another_epoch_change_nothing() {
        let mut holdings = one_lease();
        holdings.renewed(Millis(4_000), FULL, REGION, Epoch::new(1, 2));
        assert!(!holdings.dropped(REGION, Epoch::new(1, 2)));
        assert!(holdings.usable(Millis(8_000), REGION).is_none());
        holdings.acquired(Millis(0), Millis(0), TTL, REGION, Epoch::new(1, 0), KEY);
        assert_eq!(holdings.usable(Millis(0), REGION).map(|held| held.epoch), Some(EPOCH));
        assert!(holdings.dropped(REGION, EPOCH));
    }

    #[test]
    fn an_owner_that_is_told_to_leave_asks_no_more_and_stops_a_fifth_before_the_end() {
        let mut holdings = one_lease();
        assert_eq!(holdings.revoked().count(), 0);
        holdings.renewed(Millis(3_333), Term { remaining: Millis(20_000), revoked: true }, REGION, EPOCH);
        let (region, held) = holdings.revoked().next().unwrap();
        assert_eq!((region, held.usable_until()), (REGION, Millis(19_333)));
        assert!(holdings.due(Millis(19_000)).is_empty());
        assert_eq!(holdings.next_deadline(), Some(Millis(19_333)));
        holdings.renewed(Millis(3_000), FULL, REGION, EPOCH);
        assert_eq!(holdings.revoked().count(), 1, "an older answer that comes late");
        assert_eq!(holdings.lapsed(Millis(19_333)), [(REGION, EPOCH)]);
    }

    #[test]
    fn a_client_is_told_the_time_that_is_left_and_whether_the_region_is_being_taken_back() {
        let mut holdings = one_lease();
        let of = |holdings: &Holdings, now| {
            let held = *holdings.get(REGION).unwrap();
            (held.usable_for(Millis(now)).0, held.is_revoked())
        };
        assert_eq!((of(&holdings, 1_000), of(&holdings, 8_001)), ((7_000, false), (0, false)));
        holdings.renewed(Millis(0), Term { remaining: TTL, revoked: true }, REGION, EPOCH);
        assert_eq!(of(&holdings, 1_000), (7_000, true));
    }

    #[test]
    fn an_answer_that_makes_no_lease_longer_does_not_put_renewals_off() {
        let mut holdings = one_lease();
        assert_eq!(holdings.due(Millis(3_333)).len(), 1);
        let next = holdings.next_deadline();
        holdings.renewed(Millis(0), FULL, REGION, EPOCH);
        assert_eq!(holdings.next_deadline(), next);
    }

    #[test]
    fn only_a_later_lease_whose_time_has_not_passed_is_taken() {
        let mut holdings = one_lease();
        let mut take = |now, counter| {
            let (asked_at, epoch) = (Millis(1_000), Epoch::new(1, counter));
            holdings.acquired(Millis(now), asked_at, TTL, REGION, epoch, KEY)
        };
        assert!(!take(1_000, 1), "the lease that is held, again");
        assert!(!take(9_000, 2) && take(8_999, 2));
    }

    #[test]
    fn short_leases_are_never_usable_to_their_end() {
        for ttl in 0..50 {
            let held = Holding::new(EPOCH, KEY, Millis(0), Millis(ttl));
            assert!(held.usable_until.0 * 110 <= ttl * 90);
        }
    }

    proptest! {
        /// L6: times are in true milliseconds; each side sees them through its own clock.
        #[test]
        fn a_holder_stops_before_the_node_lends_the_region_again(
            node_rate in 90u64..=110,
            holder_rate in 90u64..=110,
            flight_out in 0u64..3_000,
            flight_back in 0u64..3_000,
            renewals in 0usize..5,
            revoked_in in prop::option::of(0usize..5),
            grace in 0u64..30_000,
        ) {
            let node_clock = |at: u64| Millis(at * node_rate / 100);
            let holder_clock = |at: u64| Millis(at * holder_rate / 100);
            let mut table = RegionTable::new(1, 1, TTL);
            let mut holdings = Holdings::default();
            let owner = OwnerId(1);
            let granted = table.grant(node_clock(flight_out), owner, LeaseClass::Revocable, 1, &mut || KEY);
            let lending: Lending = granted[0].lending;
            let mut at = flight_out + flight_back;
            holdings.acquired(holder_clock(at), holder_clock(0), TTL, REGION, lending.epoch, KEY);
            for round in 0..renewals {
                if revoked_in == Some(round) {
                    // Refused only if the lease has ended, which is fine here.
                    let _ = table.revoke(node_clock(at), lending, Millis(grace));
                }
                let asked = holder_clock(at);
                if let Ok(term) = table.renew(node_clock(at + flight_out), owner, lending, &KEY) {
                    holdings.renewed(asked, term, REGION, lending.epoch);
                }
                at += flight_out + flight_back;
            }
            // When the node fences the lease, the holder has already stopped.
            let end = (at..).step_by(10).find(|&at| !table.expire(node_clock(at)).is_empty()).unwrap();
            prop_assert!(holdings.usable(holder_clock(end), REGION).is_none());
        }

        /// The same for a client that the owner lets in, with a third clock.
        #[test]
        fn a_client_that_counts_from_its_question_stops_before_the_node(
            node_rate in 90u64..=110,
            holder_rate in 90u64..=110,
            client_rate in 90u64..=110,
            asked_at in 0u64..12_000,
            flight in 0u64..1_000,
        ) {
            let clock = |rate: u64, at: u64| Millis(at * rate / 100);
            let holdings = one_lease();
            let Some(held) = holdings.usable(clock(holder_rate, asked_at + flight), REGION) else {
                return Ok(()); // the client is told that it may not use the region
            };
            let usable_for = held.usable_for(clock(holder_rate, asked_at + flight));
            let stops = clock(client_rate, asked_at).plus(usable_for);
            let end = (0u64..).find(|&at| clock(node_rate, at) >= TTL).unwrap();
            prop_assert!(clock(client_rate, end) >= stops);
        }
    }

    #[test]
    fn leases_that_are_to_be_renewed_at_once_are_due_unless_they_are_being_taken_back() {
        let mut holdings = Holdings::default();
        let region = |node, index| RegionId { node: NodeId(node), index };
        for region in [region(1, 0), region(1, 1), region(2, 0)] {
            assert!(holdings.acquired(Millis(0), Millis(0), TTL, region, Epoch(1), KEY));
        }
        let revoked = Term { remaining: TTL, revoked: true };
        holdings.renewed(Millis(0), revoked, region(1, 1), Epoch(1));
        assert!(holdings.due(Millis(1)).is_empty());
        holdings.due_at_once(Millis(1), NodeId(1));
        let due = holdings.due(Millis(1));
        let regions: Vec<_> = due.iter().map(|(node, held)| (*node, held.len(), held[0].0)).collect();
        assert_eq!(regions, [(NodeId(1), 1, 0)]);
        assert!(holdings.due(Millis(1)).is_empty(), "an answer has its time");
    }
}
