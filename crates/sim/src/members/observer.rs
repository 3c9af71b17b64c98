//! Checks every access that takes effect: which member made it, and whether that member was allowed to
//! (`docs/src/txn.md`, *members*).
//!
//! The observer compares the root before and after the access to find out what changed. It does not see
//! accesses of processes that map the memory, and takes their changes as given.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use farpool_fabric::{AccessError, AccessKind, Cut, Host, HostIdentity, LentMemory, Mapping, SharedRegion};
use farpool_txn::log::Head;
use farpool_txn::membership::{Role, SeatWords};
use farpool_wire::{AccessKey, Epoch, RecordHeader, Refusal, Slot};
use parking_lot::Mutex;

use super::layout::{At, Plan, ROOT_BYTES};
use super::{OWNER, key_of};
use crate::lending::LendingHost;

/// Complaints that are kept. Later ones are usually consequences of the first few.
const MOST_COMPLAINTS: usize = 8;

/// A node whose accesses are observed.
pub(super) struct Watched {
    pub(super) memory: Arc<LendingHost>,
    pub(super) observer: Arc<Mutex<Observer>>,
}

impl Host for Watched {
    fn identity(&self) -> HostIdentity {
        self.memory.identity()
    }

    fn attach(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<(), Refusal> {
        self.memory.attach(region, epoch, key)
    }

    fn with_region(
        &self,
        region: u32,
        epoch: Epoch,
        kind: AccessKind,
        access: &mut dyn FnMut(&Mapping) -> Result<(), AccessError>,
    ) -> Result<(), Refusal> {
        let before = (kind == AccessKind::Write).then(|| self.observer.lock().look());
        self.memory.with_region(region, epoch, kind, access)?;
        self.observer.lock().sees(epoch, before.as_ref());
        Ok(())
    }

    fn share(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<SharedRegion, Refusal> {
        self.memory.share(region, epoch, key)
    }

    fn lend(
        &self,
        region: u32,
        epoch: Epoch,
        key: &AccessKey,
        cut: Arc<dyn Cut>,
    ) -> Result<LentMemory, Refusal> {
        self.memory.lend(region, epoch, key, cut)
    }

    fn call(&self, request: &[u8], answer: &mut Vec<u8>) -> Result<(), Refusal> {
        self.memory.call(request, answer)
    }

    fn rejected(&self) {
        self.memory.rejected();
    }
}

/// What the observer knows of grants, and its complaints.
pub(super) struct Observer {
    plan: Plan,
    nodes: Vec<Arc<LendingHost>>,
    /// The member (by its claim) and the region of each grant.
    grants: BTreeMap<Epoch, (Epoch, usize)>,
    /// The grants of each member, and whether it has used any but the root's.
    members: BTreeMap<Epoch, (Vec<Epoch>, bool)>,
    pub(super) complaints: Vec<String>,
}

/// The root at one point in time.
#[derive(PartialEq)]
pub(super) struct Root {
    bytes: Vec<u8>,
}

impl Root {
    fn word(&self, at: u64) -> u64 {
        u64::from_le_bytes(*self.bytes[at as usize..].first_chunk().expect("a word of the root"))
    }

    fn epoch(&self, at: u64) -> Option<Epoch> {
        Some(Epoch(self.word(at))).filter(|epoch| epoch.0 != 0)
    }

    pub(super) fn seats(&self, plan: &Plan) -> Vec<SeatWords> {
        let seats = plan.members.seats();
        plan.members.decode_seats(&self.bytes[seats.start as usize..seats.end as usize])
    }

    pub(super) fn role(&self, plan: &Plan, role: Role) -> Option<Epoch> {
        self.epoch(plan.members.role(role))
    }
}

/// An access that has changed the root.
struct Change<'a> {
    plan: &'a Plan,
    by: Epoch,
    before: &'a Root,
    after: &'a Root,
    seats: Vec<SeatWords>,
    /// The members that have a seat and a grant that is not fenced.
    open: Vec<Epoch>,
}

impl Change<'_> {
    fn is_in(&self, range: Range<usize>) -> bool {
        self.before.bytes[range.clone()] != self.after.bytes[range]
    }

    /// Whether the slot belongs to the member that made the access: through its seat, or as the recoverer
    /// (called *carer* in the code) of a seat whose member is evicted. The catalog's slot belongs to the
    /// holder of that role.
    fn owns(&self, slot: u16) -> bool {
        let Some(seat) = self.seats.get(usize::from(slot)) else {
            return self.before.role(self.plan, Role::Catalog) == Some(self.by);
        };
        let is_out = seat.claim.is_some_and(|claim| !self.open.contains(&claim));
        seat.claim == Some(self.by) || (seat.carer == Some(self.by) && is_out)
    }

    fn is_carer_of(&self, claim: Epoch) -> bool {
        self.seats.iter().any(|seat| seat.claim == Some(claim) && seat.carer == Some(self.by))
    }

    /// The changes that the member was not allowed to make.
    fn faults(&self) -> Vec<String> {
        let (plan, by) = (self.plan, self.by);
        let mut faults = Vec::new();
        let mut fault = |what: String| faults.push(format!("member {by} {what}"));
        for role in Role::ALL {
            match (self.before.role(plan, role), self.after.role(plan, role)) {
                (before, after) if before == after => {}
                (None, Some(taken)) if taken == by => {}
                (Some(freed), None) if freed == by || self.is_carer_of(freed) => {}
                (before, after) => fault(format!("changes {role:?} from {before:?} to {after:?}")),
            }
        }
        for (slot, (before, after)) in (0..).zip(self.seats.iter().zip(self.after.seats(plan))) {
            match (before.carer, after.carer) {
                (before, after) if before == after => {}
                (Some(gone), None) if gone == by => {}
                (Some(there), Some(taken)) if taken == by && self.open.contains(&there) => {
                    fault(format!("looks after seat {slot}, though member {there} does"));
                }
                (_, Some(taken)) if taken == by => {}
                (before, after) => fault(format!("changes seat {slot}'s carer {before:?} to {after:?}")),
            }
            match (before.claim, after.claim) {
                (before, after) if before == after => {}
                (None, Some(taken)) if taken == by => {}
                (Some(left), None) if left == by || before.carer == Some(by) => {}
                (before, after) => fault(format!("changes seat {slot} from {before:?} to {after:?}")),
            }
            let list = plan.members.grants(Slot::new(slot).expect("a few slots"));
            let lists = self.is_in(list.start as usize..list.end as usize);
            if (before.beat != after.beat || lists) && before.claim != Some(by) {
                fault(format!("beats or lists its grants in seat {slot}"));
            }
        }
        for slot in 0..=plan.slots {
            let word = plan.word(slot) as u64;
            let (before, after) = (self.before.word(word), self.after.word(word));
            if after < before {
                fault(format!("sets slot {slot} back from {before} to {after}"));
            }
            if after != before && !self.owns(slot) {
                fault(format!("moves slot {slot} on"));
            }
            if self.is_in(plan.announced(slot)) && !self.owns(slot) {
                fault(format!("announces snapshots in slot {slot}"));
            }
        }
        for (images, role) in [(plan.images(), Role::Publisher), (plan.horizons(), Role::Collector)] {
            if self.is_in(images) && self.before.role(plan, role) != Some(by) {
                fault(format!("is not the {role:?} and acts as such"));
            }
        }
        faults
    }
}

impl Observer {
    pub(super) fn new(plan: Plan, nodes: Vec<Arc<LendingHost>>) -> Observer {
        let (grants, members) = (BTreeMap::new(), BTreeMap::new());
        Observer { plan, nodes, grants, members, complaints: Vec::new() }
    }

    /// Records the grants that a member was given.
    pub(super) fn is_given(&mut self, grants: &[Epoch]) {
        let claim = grants[0];
        self.grants.extend(grants.iter().enumerate().map(|(region, grant)| (*grant, (claim, region))));
        self.members.insert(claim, (grants.to_vec(), false));
    }

    pub(super) fn complain(&mut self, what: String) {
        if self.complaints.len() < MOST_COMPLAINTS {
            self.complaints.push(what);
        }
    }

    /// The root as it is now.
    pub(super) fn look(&self) -> Root {
        Root { bytes: self.bytes(0, 0..ROOT_BYTES as u64) }
    }

    fn bytes(&self, region: usize, range: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let region = self.plan.regions[region];
        let regions = &self.nodes[region.node.0 as usize - 1].regions;
        let read = regions.with_region(region.index, OWNER, AccessKind::Read, &mut |memory| {
            memory.read(range.start, &mut bytes)
        });
        assert_eq!(read, Ok(()), "the owner's grant is open");
        bytes
    }

    /// Checks an access that has taken effect. `before` is the root before it, if the access may have changed
    /// something.
    fn sees(&mut self, epoch: Epoch, before: Option<&Root>) {
        let Some(&(by, region)) = self.grants.get(&epoch) else { return };
        if region > 0 {
            self.members.get_mut(&by).expect("it has grants").1 = true;
        }
        let Some(before) = before else { return };
        let seats = before.seats(&self.plan);
        let had_seat = seats.iter().any(|seat| seat.claim == Some(by));
        if region > 0 && !had_seat {
            self.complain(format!("member {by} works on region {region}, and has no seat"));
        }
        let after = self.look();
        if *before == after {
            return;
        }
        let has_seat = after.seats(&self.plan).iter().any(|seat| seat.claim == Some(by));
        if !had_seat && !has_seat {
            self.complain(format!("member {by} changes the root, and has no seat"));
        }
        let claims = seats.iter().filter_map(|seat| seat.claim);
        let open = claims.filter(|claim| self.open_grants(*claim).next().is_some()).collect();
        let change = Change { plan: &self.plan, by, before, after: &after, seats, open };
        let faults = change.faults();
        let freed = (0..).zip(change.seats.iter().zip(after.seats(&self.plan)));
        let freed: Vec<(u16, Epoch)> = freed
            .filter(|(_, (before, after))| after.claim != before.claim)
            .filter_map(|(slot, (before, _))| Some((slot, before.claim?)))
            .collect();
        faults.into_iter().for_each(|fault| self.complain(fault));
        for (slot, claim) in freed {
            self.check_freed(slot, claim, claim != by, &after);
        }
    }

    /// Checks a seat that was freed: nothing of its member may be left.
    fn check_freed(&mut self, slot: u16, claim: Epoch, is_shut_out: bool, root: &Root) {
        let mut left = Vec::new();
        for role in Role::ALL {
            if root.role(&self.plan, role) == Some(claim) {
                left.push(format!("its role {role:?}"));
            }
        }
        if root.bytes[self.plan.announced(slot)].iter().any(|&byte| byte != 0) {
            left.push("snapshots that it announced".to_owned());
        }
        let word = root.word(self.plan.word(slot) as u64);
        if self.has_locks(slot, word) {
            left.push("records that it locked".to_owned());
        }
        if is_shut_out {
            left.extend(self.has_logged(slot, word).then(|| "commits in its log".to_owned()));
            left.extend(self.open_grants(claim).map(|region| format!("its grant of region {region}")));
        }
        for what in left {
            self.complain(format!("seat {slot} of member {claim} is free, and there is still {what}"));
        }
    }

    /// Whether a record's header names a commit that the slot's watermark has not reached.
    fn has_locks(&self, slot: u16, word: u64) -> bool {
        (1..self.plan.regions.len()).any(|region| {
            self.plan.headers().any(|at| {
                let bytes = self.bytes(region, at..at + 8);
                let header = u64::from_le_bytes(*bytes.first_chunk().expect("a word"));
                let version = RecordHeader(header).version();
                version.slot().index() == usize::from(slot) && version.count() > word
            })
        })
    }

    /// Whether a slot's log has commits that the slot's watermark has not reached.
    fn has_logged(&self, slot: u16, word: u64) -> bool {
        let owner = vec![OWNER; self.plan.regions.len()];
        let log = At { plan: &self.plan, grants: &owner }.log(slot);
        log.copies.iter().any(|copy| {
            let region = self.plan.regions.iter().position(|region| *region == copy.region);
            let heads = log.layout.heads();
            let heads = copy.start + heads.start..copy.start + heads.end;
            let bytes = self.bytes(region.expect("a region of this database"), heads);
            let heads = bytes.chunks_exact(Head::PLACE_BYTES).filter_map(Head::decode);
            heads.into_iter().any(|(head, _)| {
                head.version.slot().index() == usize::from(slot) && head.version.count() > word
            })
        })
    }

    /// Whether a member has not been evicted: its grant of the root is not fenced.
    pub(super) fn is_open(&self, claim: Epoch) -> bool {
        self.check(0, claim)
    }

    fn check(&self, place: usize, grant: Epoch) -> bool {
        let region = self.plan.regions[place];
        let regions = &self.nodes[region.node.0 as usize - 1].regions;
        regions.check(region.index, grant, &key_of(grant)).is_ok()
    }

    /// Regions where a member's grant is not fenced: among all of them if it has used any but the root, else
    /// only the root.
    fn open_grants(&self, claim: Epoch) -> impl Iterator<Item = usize> {
        let (grants, uses_others) = &self.members[&claim];
        let regions = if *uses_others { 0..grants.len() } else { 0..1 };
        regions.filter(|place| self.check(*place, grants[*place]))
    }
}
