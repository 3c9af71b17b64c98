//! The state of one request, from its first plan to its answer: which nodes to ask next, and what an answer
//! means. This module sends nothing itself.
//!
//! If a node gives less than it was asked for, the others are asked for the rest. A node that fails is not
//! asked again.

use std::collections::BTreeSet;

use farpool_lease::{LeaseClass, Millis};
use farpool_wire::control::{AcquireResponse, Lease, NodeAddress, RevokeResponse};
use farpool_wire::{NodeId, OwnerId};

use crate::state::Pool;

/// What an owner asks for.
#[derive(Clone, Debug)]
pub struct Wish {
    /// The owner that asks.
    pub owner: OwnerId,
    /// Whether the leases may be taken back.
    pub class: LeaseClass,
    /// Number of regions.
    pub count: u32,
    /// Nodes that the owner cannot reach at present.
    pub avoid: BTreeSet<NodeId>,
}

/// A request for leases while it is being placed.
#[derive(Debug)]
pub struct Placing {
    owner: OwnerId,
    class: LeaseClass,
    count: u32,
    passed_over: BTreeSet<NodeId>,
    leases: Vec<Lease>,
}

impl Placing {
    /// A request for which no node has been asked yet.
    pub fn new(wish: Wish) -> Self {
        let Wish { owner, class, count, avoid } = wish;
        Placing { owner, class, count, passed_over: avoid, leases: Vec::new() }
    }

    /// The nodes to ask now, each with the number of regions. If there are none, answer with what has been
    /// granted.
    pub fn next(&self, pool: &mut Pool, now: Millis) -> Vec<(NodeAddress, u32)> {
        let missing = self.count - self.leases.len() as u32;
        if missing == 0 { Vec::new() } else { pool.plan(now, self.owner, &self.passed_over, missing) }
    }

    /// A node lent these of the `asked` regions.
    pub fn granted(&mut self, pool: &mut Pool, node: NodeId, asked: u32, leases: Vec<Lease>) {
        pool.granted(node, self.owner, self.class, asked, &leases);
        self.leases.extend(leases);
    }

    /// A node gave no usable answer. If it lent regions all the same, their leases expire: no owner renews
    /// them.
    pub fn failed(&mut self, pool: &mut Pool, now: Millis, node: NodeId) {
        pool.failed(now, node);
        self.passed_over.insert(node);
    }

    /// The answer to the owner.
    pub fn answer(self, pool: &Pool, now: Millis) -> AcquireResponse {
        let short = self.leases.len() < self.count as usize;
        AcquireResponse {
            leases: self.leases,
            region_bytes: pool.region_bytes(now),
            short_reason: if short { pool.why_short(now) } else { String::new() },
        }
    }
}

/// Whether a node's answer fits the request: leases of its own regions, of this class, `asked` at most.
pub fn are_sound(leases: &[Lease], node: NodeId, class: LeaseClass, asked: u32) -> bool {
    let sound = |lease: &Lease| {
        lease.region_id().is_some_and(|region| region.node == node)
            && lease.access_key().is_some()
            && lease.class == class.to_wire()
    };
    leases.len() <= asked as usize && leases.iter().all(sound)
}

/// A request to take leases back from an owner.
#[derive(Debug)]
pub struct TakingBack {
    owner: OwnerId,
    count: u32,
    answer: RevokeResponse,
}

impl TakingBack {
    /// A request for which no node has been asked yet.
    pub fn new(owner: OwnerId, count: u32) -> Self {
        TakingBack { owner, count, answer: RevokeResponse::default() }
    }

    /// The node to ask now, with the number of leases. `None`: answer with what has been taken back.
    pub fn next(&self, pool: &mut Pool, now: Millis) -> Option<(NodeAddress, u32)> {
        match self.count.saturating_sub(self.answer.revoked) {
            0 => None,
            missing => pool.plan_revocation(now, self.owner, missing),
        }
    }

    /// A node took back some of the `asked` leases.
    pub fn revoked(&mut self, pool: &mut Pool, now: Millis, node: NodeId, asked: u32, said: &RevokeResponse) {
        let revoked = said.revoked.min(asked);
        pool.revoked(now, node, self.owner, (asked, revoked), Millis(said.remaining_ms));
        self.answer.revoked += revoked;
        self.answer.remaining_ms = self.answer.remaining_ms.max(said.remaining_ms);
    }

    /// A node gave no usable answer about `asked` leases: it is not known whether it is taking them back. No
    /// other node is asked until that is known (B7).
    pub fn failed(&mut self, pool: &mut Pool, now: Millis, node: NodeId, asked: u32) {
        pool.revocation_unanswered(now, node, self.owner, asked);
    }

    /// The answer.
    pub fn answer(self, pool: &Pool, now: Millis) -> RevokeResponse {
        let (pinned, revocable) = (pool.pinned(now, self.owner), pool.revocable(now, self.owner));
        let short_reason = match self.answer.revoked {
            revoked if revoked >= self.count => String::new(),
            _ if revocable > 0 => {
                "leases of one owner are taken back on one node at a time, so that files with \
                 redundancy lose nothing: ask again in a few seconds"
                    .to_owned()
            }
            _ if pinned > 0 => {
                format!("{pinned} leases of this owner are pinned: only the owner can give them back")
            }
            _ => {
                "this owner has no more leases on nodes that answer, or they are being taken back".to_owned()
            }
        };
        RevokeResponse { pinned, revocable, short_reason, ..self.answer }
    }
}

#[cfg(test)]
mod tests {
    use farpool_wire::control::{RegionState, RegisterRequest};

    use super::*;

    const OWNER: OwnerId = OwnerId(7);

    fn report(node: u64, classes: &[LeaseClass]) -> RegisterRequest {
        let control = "127.0.0.1:1".to_owned();
        let address = NodeAddress { node, incarnation: 1, control, ..Default::default() };
        let state = |(region, class): (u32, &LeaseClass)| RegionState {
            region,
            owner: OWNER.0,
            class: class.to_wire(),
            held: true,
            ..Default::default()
        };
        let lent = (0..).zip(classes.iter()).map(state).collect();
        RegisterRequest { address: Some(address), region_bytes: 64, regions_total: 8, lent }
    }

    fn pool(classes: &[(u64, &[LeaseClass])]) -> Pool {
        let mut pool = Pool::default();
        for (node, classes) in classes {
            pool.report(Millis(0), &report(*node, classes)).unwrap();
        }
        pool
    }

    fn lease(node: u64) -> Lease {
        let address = NodeAddress { node, ..Default::default() };
        let class = LeaseClass::Pinned.to_wire();
        Lease { address: Some(address), key: vec![0; 16], class, ..Default::default() }
    }

    fn shares(plan: Vec<(NodeAddress, u32)>) -> Vec<(u64, u32)> {
        plan.into_iter().map(|(address, share)| (address.node, share)).collect()
    }

    #[test]
    fn regions_that_a_failing_node_did_not_give_are_requested_from_the_others() {
        let mut pool = pool(&[(1, &[]), (2, &[])]);
        let wish = Wish { owner: OWNER, class: LeaseClass::Pinned, count: 4, avoid: BTreeSet::new() };
        let mut placing = Placing::new(wish);
        assert_eq!(shares(placing.next(&mut pool, Millis(0))), [(1, 2), (2, 2)]);
        placing.granted(&mut pool, NodeId(1), 2, vec![lease(1), lease(1)]);
        placing.failed(&mut pool, Millis(0), NodeId(2));
        assert_eq!(shares(placing.next(&mut pool, Millis(0))), [(1, 2)]);
        placing.granted(&mut pool, NodeId(1), 2, vec![lease(1)]);
        assert_eq!(shares(placing.next(&mut pool, Millis(0))), []);
        let answer = placing.answer(&pool, Millis(0));
        assert_eq!(answer.leases.len(), 3);
        assert!(!answer.short_reason.is_empty());
    }

    #[test]
    fn leases_that_were_not_asked_for_are_unsound() {
        let sound = |lease, asked| are_sound(&[lease], NodeId(1), LeaseClass::Pinned, asked);
        assert!(sound(lease(1), 1));
        assert!(!sound(lease(1), 0));
        assert!(!sound(lease(2), 1));
        assert!(!sound(Lease { key: vec![0; 15], ..lease(1) }, 1));
        assert!(!sound(Lease { class: LeaseClass::Revocable.to_wire(), ..lease(1) }, 1));
    }

    fn share(plan: Option<(NodeAddress, u32)>) -> Option<(u64, u32)> {
        plan.map(|(address, share)| (address.node, share))
    }

    fn said(revoked: u32, remaining_ms: u64) -> RevokeResponse {
        RevokeResponse { revoked, remaining_ms, ..Default::default() }
    }

    #[test]
    fn leases_are_taken_back_where_the_owner_has_most_and_pinned_ones_stay() {
        use LeaseClass::{Pinned, Revocable};
        let mut pool = pool(&[(1, &[Revocable, Pinned]), (2, &[Revocable, Revocable, Revocable])]);
        let mut back = TakingBack::new(OWNER, 2);
        assert_eq!(share(back.next(&mut pool, Millis(0))), Some((2, 2)));
        back.revoked(&mut pool, Millis(0), NodeId(2), 2, &said(2, 30_000));
        assert_eq!(share(back.next(&mut pool, Millis(0))), None, "as many as were asked for");
        let answer = back.answer(&pool, Millis(0));
        assert_eq!((answer.revoked, answer.pinned, answer.remaining_ms), (2, 1, 30_000));
        assert_eq!((answer.revocable, answer.short_reason.as_str()), (2, ""));
    }

    #[test]
    fn leases_are_taken_back_on_one_node_until_those_have_ended() {
        use LeaseClass::Revocable;
        let mut pool = pool(&[(1, &[Revocable, Revocable]), (2, &[Revocable, Revocable, Revocable])]);
        let mut back = TakingBack::new(OWNER, 4);
        assert_eq!(share(back.next(&mut pool, Millis(0))), Some((2, 3)));
        let other = TakingBack::new(OWNER, 1);
        assert_eq!(share(other.next(&mut pool, Millis(0))), None, "the node has not answered yet");
        back.revoked(&mut pool, Millis(0), NodeId(2), 3, &said(2, 30_000));
        assert_eq!(share(back.next(&mut pool, Millis(0))), None, "it had two, which have not ended");
        let answer = back.answer(&pool, Millis(0));
        assert_eq!((answer.revoked, answer.revocable), (2, 2));
        assert!(answer.short_reason.contains("one node at a time"), "{answer:?}");
        let back = TakingBack::new(OWNER, 2);
        pool.report(Millis(1), &report(2, &[Revocable])).unwrap();
        assert_eq!(share(back.next(&mut pool, Millis(1))), None, "this report may be an old one");
        pool.report(Millis(3_000), &report(1, &[Revocable, Revocable])).unwrap();
        pool.report(Millis(3_000), &report(2, &[Revocable])).unwrap();
        assert_eq!(share(back.next(&mut pool, Millis(3_000))), Some((1, 2)));
    }

    fn under_pressure(node: u64, classes: &[LeaseClass], remaining_ms: u64) -> RegisterRequest {
        let mut report = report(node, classes);
        (report.lent[0].revoked, report.lent[0].remaining_ms) = (true, remaining_ms);
        report
    }

    #[test]
    fn leases_that_a_node_takes_back_by_itself_keep_other_nodes_from_being_asked_until_they_end() {
        use LeaseClass::Revocable;
        let mut pool = pool(&[(1, &[Revocable]), (2, &[Revocable, Revocable]), (3, &[Revocable])]);
        pool.report(Millis(1), &under_pressure(1, &[Revocable, Revocable], 9_000)).unwrap();
        pool.report(Millis(1), &under_pressure(2, &[Revocable, Revocable], 4_000)).unwrap();
        let back = TakingBack::new(OWNER, 2);
        assert_eq!(share(back.next(&mut pool, Millis(1))), None, "two nodes take leases back");
        // Both are silent, which does not mean that the leases have ended.
        for at in [4_001, 9_000] {
            pool.report(Millis(at), &report(3, &[Revocable])).unwrap();
            assert_eq!(share(back.next(&mut pool, Millis(at))), None);
        }
        assert_eq!(share(back.next(&mut pool, Millis(9_001))), Some((3, 1)));
    }

    #[test]
    fn the_node_that_takes_leases_back_already_is_asked_for_more() {
        use LeaseClass::Revocable;
        let mut pool = pool(&[(1, &[Revocable]), (2, &[Revocable, Revocable])]);
        pool.report(Millis(1), &under_pressure(1, &[Revocable, Revocable], 9_000)).unwrap();
        let back = TakingBack::new(OWNER, 2);
        assert_eq!(share(back.next(&mut pool, Millis(1))), Some((1, 1)));
    }

    #[test]
    fn a_node_that_gives_no_answer_holds_the_others_up_until_it_must_have_reported_and_is_asked_last_then() {
        use LeaseClass::Revocable;
        let classes: &[LeaseClass] = &[Revocable, Revocable];
        let mut pool = pool(&[(1, &[Revocable]), (2, classes)]);
        let mut back = TakingBack::new(OWNER, 1);
        assert_eq!(share(back.next(&mut pool, Millis(0))), Some((2, 1)));
        back.failed(&mut pool, Millis(0), NodeId(2), 1);
        pool.report(Millis(2_999), &report(1, &[Revocable])).unwrap();
        pool.report(Millis(2_999), &report(2, classes)).unwrap();
        assert_eq!(share(back.next(&mut pool, Millis(2_999))), None);
        assert_eq!(share(back.next(&mut pool, Millis(3_000))), Some((1, 1)));
        back.failed(&mut pool, Millis(3_000), NodeId(1), 1);
        pool.report(Millis(6_000), &report(2, classes)).unwrap();
        assert_eq!(share(back.next(&mut pool, Millis(6_000))), Some((2, 1)), "all gave no answer");
    }

    #[test]
    fn a_new_broker_has_no_leases_taken_back_before_the_nodes_have_had_time_to_report() {
        use LeaseClass::Revocable;
        let mut pool = Pool::default();
        pool.remember(Millis(0), &report(1, &[]));
        pool.report(Millis(0), &report(2, &[Revocable])).unwrap();
        let back = TakingBack::new(OWNER, 1);
        assert_eq!(share(back.next(&mut pool, Millis(0))), None);
        pool.report(Millis(3_000), &report(2, &[Revocable])).unwrap();
        assert_eq!(share(back.next(&mut pool, Millis(3_000))), Some((2, 1)));
    }

    #[test]
    fn pinned_leases_are_named_when_nothing_else_is_left_to_take_back() {
        let mut pool = pool(&[(1, &[LeaseClass::Pinned])]);
        let more = TakingBack::new(OWNER, 1);
        assert_eq!(share(more.next(&mut pool, Millis(0))), None);
        assert!(more.answer(&pool, Millis(0)).short_reason.contains("pinned"));
    }
}
