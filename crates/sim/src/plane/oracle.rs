//! The rules of leases that must hold whatever goes wrong. The oracle sees the whole world and checks them
//! while the run goes on.
//!
//! O1. A region has one lease at a time. An operation that is posted under a grant after the grant's end is
//!     not acknowledged. So no two owners use one region at the same time.
//! O2. A holder trusts a lease only while the lease is in force at its node.
//! O3. Every word that is read was written under the same lease, or is zero: no byte is an earlier owner's.
//! O4. No epoch of a node is used twice, and each is greater than those before it, over all restarts.
//! O5. No lease is lost while its holder and its node are up and can reach each other, whatever the brokers
//!     do, and even if one or two messages are lost on the way.
//! Not here: the broker's view, which is compared with the nodes' tables once faults have ended (`conduct`).

use std::collections::BTreeMap;

use farpool_fabric::sim::HostId;
use farpool_wire::{Epoch, NodeId, RegionId};

/// The number of lost or late letters between a holder and a node that a lease must survive. A holder tries
/// to renew five times, and at least two of these tries remain, whichever of the earlier ones failed.
const LETTERS_FORGIVEN: usize = 2;
/// The most violations that are reported: the first ones are the useful ones.
const TOLD: usize = 8;
/// The low bits of a value, which count the values written; the others name the lease.
const COUNTER_BITS: u32 = 32;

/// A lease of a region; numbered from one over all nodes and restarts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct LeaseNo(pub(crate) u64);

/// A point in the order of events, finer than the world's time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Moment(u64);

struct Lease {
    region: RegionId,
    /// All grants of the lease, including the owner's, each with its end if it has ended.
    grants: BTreeMap<Epoch, Option<Moment>>,
    ended: bool,
    /// Its loss is excused: an entitled process has asked for it back, or its node has died.
    excused: bool,
    /// Its node has died. Processes on its host may still map its memory, which is never lent again.
    orphaned: bool,
}

/// A disturbance that may excuse a lost lease.
struct Disturbance {
    /// The two hosts concerned. The same host twice means between that host and all others.
    hosts: [HostId; 2],
    from_ns: u64,
    until_ns: u64,
    kind: Kind,
}

#[derive(PartialEq, Eq)]
enum Kind {
    /// Nothing came through.
    Silence,
    /// One letter was late or lost.
    Letter,
}

/// A lease that its holder no longer has and did not give back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loss {
    pub(crate) lease: LeaseNo,
    pub(crate) holder: HostId,
    pub(crate) node: HostId,
    /// When the holder sent its last request, for the lease or for a renewal, that was granted.
    pub(crate) since_ns: u64,
    pub(crate) now_ns: u64,
    /// The lease arrived so late that there was too little time to renew it.
    pub(crate) fleeting: bool,
}

#[derive(Default)]
pub(crate) struct Oracle {
    leases: Vec<Lease>,
    present: BTreeMap<RegionId, LeaseNo>,
    greatest: BTreeMap<NodeId, Epoch>,
    disturbances: Vec<Disturbance>,
    complaints: Vec<String>,
    moments: u64,
    values: u64,
    judged: u64,
}

impl Oracle {
    pub(crate) fn complain(&mut self, what: String) {
        self.complaints.push(what);
    }

    /// Returns the first violations, and the number of checks.
    pub(crate) fn verdict(mut self) -> (Vec<String>, u64) {
        self.complaints.truncate(TOLD);
        (self.complaints, self.judged)
    }

    /// The next moment.
    pub(crate) fn moment(&mut self) -> Moment {
        self.moments += 1;
        Moment(self.moments)
    }

    /// A new value, which encodes the lease under which it is written.
    pub(crate) fn value(&mut self, lease: LeaseNo) -> u64 {
        self.values += 1;
        lease.0 << COUNTER_BITS | self.values
    }

    fn lease(&mut self, lease: LeaseNo) -> &mut Lease {
        &mut self.leases[lease.0 as usize - 1]
    }

    fn note_epoch(&mut self, node: NodeId, epoch: Epoch) {
        self.judged += 1;
        let greatest = self.greatest.entry(node).or_insert(Epoch(0));
        if epoch <= *greatest {
            let text = format!("epoch {epoch} of node {node} comes after {greatest}");
            self.complain(text);
        } else {
            *greatest = epoch;
        }
    }

    /// A node lends a region (O1, O4).
    pub(crate) fn lends(&mut self, region: RegionId, epoch: Epoch) -> LeaseNo {
        self.note_epoch(region.node, epoch);
        let lease = LeaseNo(self.leases.len() as u64 + 1);
        if let Some(before) = self.present.insert(region, lease)
            && !self.lease(before).ended
        {
            self.complain(format!("{region} is lent as lease {} while lease {} holds it", lease.0, before.0));
        }
        self.leases.push(Lease {
            region,
            grants: BTreeMap::from([(epoch, None)]),
            ended: false,
            excused: false,
            orphaned: false,
        });
        lease
    }

    /// The lease of a region that is in force; if there is none, the last one.
    pub(crate) fn present(&self, region: RegionId) -> Option<LeaseNo> {
        self.present.get(&region).copied()
    }

    /// The lease to which a grant of a region belongs.
    pub(crate) fn lease_of(&self, region: RegionId, grant: Epoch) -> Option<LeaseNo> {
        let of = |lease: &Lease| lease.region == region && lease.grants.contains_key(&grant);
        self.leases.iter().rposition(of).map(|place| LeaseNo(place as u64 + 1))
    }

    /// A node gives a grant to another client (O4).
    pub(crate) fn grants(&mut self, region: RegionId, epoch: Epoch) {
        self.note_epoch(region.node, epoch);
        if let Some(lease) = self.present(region) {
            self.lease(lease).grants.insert(epoch, None);
        }
    }

    /// A node has fenced one grant.
    pub(crate) fn fences(&mut self, region: RegionId, grant: Epoch) {
        let now = self.moment();
        if let Some(lease) = self.lease_of(region, grant) {
            self.lease(lease).grants.entry(grant).and_modify(|end| *end = end.or(Some(now)));
        }
    }

    /// A node has fenced a lease. `trusting` lists the processes that would still use it now (O2).
    pub(crate) fn ends(&mut self, region: RegionId, trusting: &[u64]) {
        self.judged += 1;
        let Some(lease) = self.present(region) else { return };
        self.finish(lease);
        if let Some(holder) = trusting.first() {
            self.complain(format!("lease {} of {region} has ended, but process {holder} trusts it", lease.0));
        }
    }

    /// A node's process has died, and its memory is gone.
    pub(crate) fn dies(&mut self, node: NodeId) {
        let there: Vec<LeaseNo> =
            self.present.iter().filter(|(region, _)| region.node == node).map(|(_, lease)| *lease).collect();
        for lease in there.into_iter().map(|lease| lease.0 as usize - 1) {
            let lease = &mut self.leases[lease];
            (lease.ended, lease.excused, lease.orphaned) = (true, true, true);
        }
    }

    fn finish(&mut self, lease: LeaseNo) {
        let now = self.moment();
        let lease = self.lease(lease);
        lease.ended = true;
        lease.grants.values_mut().for_each(|end| *end = end.or(Some(now)));
    }

    /// An entitled process has the lease taken back.
    pub(crate) fn revoked(&mut self, region: RegionId) {
        if let Some(lease) = self.present(region) {
            self.lease(lease).excused = true;
        }
    }

    /// Whether a grant may still be used.
    pub(crate) fn is_in_force(&self, lease: LeaseNo, grant: Epoch) -> bool {
        let lease = &self.leases[lease.0 as usize - 1];
        !lease.orphaned && lease.grants.get(&grant).is_some_and(Option::is_none)
    }

    /// An operation posted at `posted` was acknowledged (O1).
    pub(crate) fn acknowledged(&mut self, lease: LeaseNo, grant: Epoch, posted: Moment) {
        self.judged += 1;
        let end = self.lease(lease).grants.get(&grant).copied().flatten();
        if end.is_some_and(|end| end < posted) {
            let region = self.lease(lease).region;
            let now = self.present(region).filter(|present| *present != lease);
            let other = now.map_or(String::new(), |other| format!(", now lent as lease {}", other.0));
            self.complain(format!(
                "lease {}: an operation under grant {grant} was acknowledged after its end{other}",
                lease.0
            ));
        }
    }

    /// These words were read under a lease (O3).
    pub(crate) fn read(&mut self, lease: LeaseNo, words: &[u64]) {
        self.judged += 1;
        if let Some(word) = words.iter().find(|&&word| word != 0 && word >> COUNTER_BITS != lease.0) {
            self.complain(format!("lease {} reads {word:#x} of lease {}", lease.0, word >> COUNTER_BITS));
        }
    }

    /// From `from_ns` to `until_ns` nothing comes through between two hosts. The same host twice means
    /// between it and all others.
    pub(crate) fn silence(&mut self, hosts: [HostId; 2], from_ns: u64, until_ns: u64) {
        self.disturbances.push(Disturbance { hosts, from_ns, until_ns, kind: Kind::Silence });
    }

    /// A letter between two hosts is lost or late.
    pub(crate) fn letter(&mut self, hosts: [HostId; 2], at_ns: u64) {
        self.disturbances.push(Disturbance { hosts, from_ns: at_ns, until_ns: at_ns, kind: Kind::Letter });
    }

    /// A holder has lost a lease (O5).
    pub(crate) fn lost(&mut self, loss: Loss) {
        self.judged += 1;
        if loss.fleeting || self.lease(loss.lease).excused || self.is_excused(&loss) {
            return;
        }
        let text = format!(
            "lease {} was lost at {} us, last renewed at {} us, though holder and node were in touch",
            loss.lease.0,
            loss.now_ns / 1_000,
            loss.since_ns / 1_000
        );
        self.complain(text);
    }

    fn is_excused(&self, loss: &Loss) -> bool {
        let pair = [loss.holder, loss.node];
        let concerns = |disturbance: &&Disturbance| {
            let [one, other] = disturbance.hosts;
            let of_pair = [one, other] == pair || [other, one] == pair;
            let of_one = disturbance.kind == Kind::Silence && one == other && pair.contains(&one);
            (of_pair || of_one) && disturbance.from_ns <= loss.now_ns && disturbance.until_ns >= loss.since_ns
        };
        let mut letters = 0;
        for disturbance in self.disturbances.iter().filter(concerns) {
            match disturbance.kind {
                Kind::Silence => return true,
                Kind::Letter => letters += 1,
            }
        }
        letters > LETTERS_FORGIVEN
    }
}

#[cfg(test)]
mod tests {
    use farpool_fabric::sim::{World, WorldConfig};

    use super::*;

    const REGION: RegionId = RegionId { node: NodeId(1), index: 0 };

    fn verdict(scene: impl FnOnce(&mut Oracle)) -> Vec<String> {
        let mut oracle = Oracle::default();
        scene(&mut oracle);
        oracle.verdict().0
    }

    fn hosts() -> [HostId; 3] {
        let world = World::new(WorldConfig::new(1));
        [(); 3].map(|()| world.add_host(1_000_000))
    }

    #[test]
    fn a_region_may_be_lent_again_only_after_its_lease_has_ended() {
        let lend_twice = |ends: bool| {
            verdict(|oracle| {
                oracle.lends(REGION, Epoch::new(1, 1));
                if ends {
                    oracle.ends(REGION, &[]);
                }
                oracle.lends(REGION, Epoch::new(1, 2));
            })
        };
        assert!(lend_twice(true).is_empty());
        assert_eq!(lend_twice(false).len(), 1);
    }

    #[test]
    fn operations_posted_after_their_grant_ended_must_not_be_acknowledged() {
        let write = |fenced_first: bool| {
            verdict(|oracle| {
                let lease = oracle.lends(REGION, Epoch::new(1, 1));
                oracle.grants(REGION, Epoch::new(1, 2));
                let before = oracle.moment();
                oracle.fences(REGION, Epoch::new(1, 2));
                let posted = if fenced_first { oracle.moment() } else { before };
                oracle.acknowledged(lease, Epoch::new(1, 2), posted);
                let posted = oracle.moment();
                oracle.acknowledged(lease, Epoch::new(1, 1), posted);
            })
        };
        assert!(write(false).is_empty());
        assert_eq!(write(true).len(), 1);
    }

    #[test]
    fn a_holder_that_trusts_an_ended_lease_is_noticed() {
        let scene = |trusting: &'static [u64]| {
            verdict(|oracle| {
                oracle.lends(REGION, Epoch::new(1, 1));
                oracle.ends(REGION, trusting);
            })
        };
        assert!(scene(&[]).is_empty());
        assert_eq!(scene(&[7]).len(), 1);
    }

    #[test]
    fn a_byte_of_an_earlier_lease_is_noticed() {
        let read = |late: bool| {
            verdict(|oracle| {
                let first = oracle.lends(REGION, Epoch::new(1, 1));
                let value = oracle.value(first);
                oracle.read(first, &[0, value]);
                oracle.ends(REGION, &[]);
                let second = oracle.lends(REGION, Epoch::new(1, 2));
                oracle.read(second, &[0, if late { value } else { 0 }]);
            })
        };
        assert!(read(false).is_empty());
        assert_eq!(read(true).len(), 1);
    }

    #[test]
    fn an_epoch_that_is_used_again_after_a_restart_is_noticed() {
        let restart = |incarnation| {
            verdict(|oracle| {
                oracle.lends(REGION, Epoch::new(1, 1));
                oracle.dies(REGION.node);
                oracle.lends(REGION, Epoch::new(incarnation, 1));
            })
        };
        assert!(restart(2).is_empty());
        assert_eq!(restart(1).len(), 1);
    }

    #[test]
    fn a_lease_may_be_lost_only_if_holder_and_node_were_out_of_touch() {
        let [holder, node, third] = hosts();
        let lose = |scene: &dyn Fn(&mut Oracle)| {
            let told = verdict(|oracle| {
                let lease = oracle.lends(REGION, Epoch::new(1, 1));
                scene(oracle);
                oracle.lost(Loss { lease, holder, node, since_ns: 100, now_ns: 200, fleeting: false });
            });
            !told.is_empty()
        };
        assert!(lose(&|_| {}));
        assert!(lose(&|oracle| oracle.silence([holder, third], 120, 190)), "the broker's host");
        assert!(lose(&|oracle| oracle.silence([holder, node], 10, 90)), "before");
        assert!(!lose(&|oracle| oracle.silence([node, holder], 10, 110)));
        assert!(!lose(&|oracle| oracle.silence([node, node], 150, 160)));
        let letters =
            |count| move |oracle: &mut Oracle| (0..count).for_each(|_| oracle.letter([holder, node], 150));
        assert!(lose(&letters(2)));
        let elsewhere = |oracle: &mut Oracle| (0..9).for_each(|_| oracle.letter([node, third], 150));
        assert!(lose(&elsewhere), "the broker's letters");
        assert!(!lose(&letters(3)));
        assert!(!lose(&|oracle| oracle.revoked(REGION)));
        assert!(!lose(&|oracle| oracle.dies(REGION.node)));
    }
}
