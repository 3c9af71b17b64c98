//! Checks for every access that takes effect whether the member that made it was allowed to
//! (`docs/src/txn.md`, *members*).
//!
//! The observer finds out what changed by comparing what members share before and after the access. It does
//! not see accesses of processes that map the memory, and accepts their changes without a check.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use farpool_fabric::{AccessError, AccessKind, Host, Mapping, RegionSet};
use farpool_txn::later::{Place, Stage};
use farpool_txn::log::Head;
use farpool_txn::membership::{LaterGrant, Role, SeatWords};
use farpool_txn::oracle::Board;
use farpool_txn::{DatabaseAt, DatabaseLayout, Table};
use farpool_wire::{AccessKey, Epoch, NodeId, RecordHeader, Refusal, RegionId, Slot};
use rustix_futex_sync::Mutex;

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
    fn node(&self) -> NodeId {
        self.memory.node()
    }

    fn regions(&self) -> &RegionSet {
        self.memory.regions()
    }

    fn admit(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<(), Refusal> {
        self.memory.admit(region, epoch, key)
    }

    fn with_region(
        &self,
        region: u32,
        epoch: Epoch,
        kind: AccessKind,
        access: &mut dyn FnMut(&Mapping) -> Result<(), AccessError>,
    ) -> Result<(), Refusal> {
        let before = (kind == AccessKind::Write).then(|| self.observer.lock().look_for(epoch));
        self.memory.with_region(region, epoch, kind, access)?;
        self.observer.lock().check_access(epoch, before.as_ref());
        Ok(())
    }

    fn call(&self, request: &[u8], answer: &mut Vec<u8>) -> Result<(), Refusal> {
        self.memory.call(request, answer)
    }
}

/// What the observer knows of grants, and its complaints.
pub(super) struct Observer {
    layout: DatabaseLayout,
    nodes: Vec<Arc<LendingHost>>,
    /// Where headers of records lie: those of the catalog, and those of tables that are never dropped.
    headers: BTreeSet<(RegionId, u64)>,
    /// The member (by its claim) and the region of each grant.
    grants: BTreeMap<Epoch, (Epoch, RegionId)>,
    /// The grants of each member.
    members: BTreeMap<Epoch, Vec<Granted>>,
    /// The member that has made the last write to a region that the database got later.
    pub(super) later_writer: Option<Epoch>,
    pub(super) complaints: Vec<String>,
}

/// A grant of a member.
#[derive(Clone, Copy)]
struct Granted {
    region: RegionId,
    grant: Epoch,
    /// It was used, or listed together with one that was.
    is_used: bool,
    /// It was listed as that of a region that the database got later.
    was_listed: bool,
}

/// What an access may change.
struct Before {
    shared: SharedState,
    /// The whole root region, if the process that makes the access has no seat.
    root: Option<Vec<u8>>,
}

/// What members share, at one point in time.
#[derive(PartialEq)]
pub(super) struct SharedState {
    /// The beginning of the root: seats, words of clients, the horizon.
    root: Vec<u8>,
    /// The words of the list of later regions.
    later: Vec<u8>,
    /// The parts of the oracle.
    parts: Vec<Vec<u8>>,
}

impl SharedState {
    fn epoch(&self, at: u64) -> Option<Epoch> {
        Some(Epoch(word(&self.root, at as usize))).filter(|epoch| epoch.0 != 0)
    }

    pub(super) fn seats(&self, layout: &DatabaseLayout) -> Vec<SeatWords> {
        let seats = layout.members.seats();
        layout.members.decode_seats(&self.root[seats.start as usize..seats.end as usize])
    }

    pub(super) fn role(&self, layout: &DatabaseLayout, role: Role) -> Option<Epoch> {
        self.epoch(layout.members.role(role))
    }

    fn later_places(&self) -> impl Iterator<Item = Place> {
        self.later.as_chunks().0.iter().map(|word| Place::decode(u64::from_le_bytes(*word)))
    }

    /// Whether members are to leave a region that the database got later.
    pub(super) fn is_region_leaving(&self) -> bool {
        self.later_places().any(|place| place.stage == Stage::Leaving)
    }

    /// The grants of later regions that a seat lists, and whether the places of these regions are used.
    fn later_grants(&self, layout: &DatabaseLayout, slot: u16) -> Vec<(Epoch, bool)> {
        let listed = layout.members.later_grants(Slot::new(slot).expect("a few slots"));
        let listed = LaterGrant::decode_all(&self.root[listed.start as usize..listed.end as usize]);
        let places = self.later_places();
        let used = |round| Place { round, stage: Stage::Used };
        listed
            .zip(places)
            .filter_map(|(listed, place)| Some((listed?, place)))
            .map(|(listed, place)| (listed.epoch, place == used(listed.round)))
            .collect()
    }

    /// The watermark of a slot. Slots are distributed round robin over the parts of the oracle.
    fn watermark(&self, layout: &DatabaseLayout, slot: u16) -> u64 {
        let (part, index) = (usize::from(slot) % self.parts.len(), slot / self.parts.len() as u16);
        let slot = Slot::new(index).expect("a few slots");
        word(&self.parts[part], boards(layout)[part].word(slot).expect("a slot of this part"))
    }

    /// The images of cuts, in all parts.
    fn images<'a>(&'a self, layout: &DatabaseLayout) -> Vec<&'a [u8]> {
        let boards = boards(layout);
        self.parts.iter().zip(boards).map(|(part, board)| &part[board.images()]).collect()
    }

    /// The words in which the clients of a slot announce their snapshots.
    fn announced(&self, layout: &DatabaseLayout, slot: Slot) -> &[u8] {
        let (start, horizon) = layout.horizon;
        let at = |client| start as usize + horizon.word(client).expect("a client of this layout");
        let clients = layout.client_words(slot);
        &self.root[at(clients.start)..at(clients.end - 1) + size_of::<u64>()]
    }

    /// The images of the horizon.
    fn horizons(&self, layout: &DatabaseLayout) -> &[u8] {
        let (start, horizon) = layout.horizon;
        &self.root[start as usize + horizon.words().end..]
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("a whole word"))
}

/// The boards of the oracle's parts.
fn boards(layout: &DatabaseLayout) -> Vec<Board> {
    let owner = vec![OWNER; layout.regions.len()];
    let oracle = DatabaseAt { layout, grants: &owner }.oracle();
    oracle.parts().iter().map(|part| part.board).collect()
}

/// An access that has changed what members share.
struct Change<'a> {
    layout: &'a DatabaseLayout,
    by: Epoch,
    before: &'a SharedState,
    after: &'a SharedState,
    seats: Vec<SeatWords>,
    /// The members that have a seat and a grant that is not fenced.
    open: Vec<Epoch>,
}

impl Change<'_> {
    /// Whether the member that made the access may change this slot: it has the slot's seat, or it is the
    /// recoverer of the seat and the seat's member is evicted. The catalog's slot belongs to the member with
    /// the catalog role.
    fn owns(&self, slot: u16) -> bool {
        let Some(seat) = self.seats.get(usize::from(slot)) else {
            return self.before.role(self.layout, Role::Catalog) == Some(self.by);
        };
        let is_out = seat.claim.is_some_and(|claim| !self.open.contains(&claim));
        seat.claim == Some(self.by) || (seat.recoverer == Some(self.by) && is_out)
    }

    fn is_recoverer_of(&self, claim: Epoch) -> bool {
        self.seats.iter().any(|seat| seat.claim == Some(claim) && seat.recoverer == Some(self.by))
    }

    /// The changes that the member was not allowed to make.
    fn faults(&self) -> Vec<String> {
        let faults = [
            self.role_faults(),
            self.seat_faults(),
            self.watermark_faults(),
            self.announcement_faults(),
            self.image_faults(),
            self.list_faults(),
        ];
        faults.iter().flatten().map(|what| format!("member {} {what}", self.by)).collect()
    }

    /// A member may take a free role. It may free its own role, and that of a member that it recovers.
    fn role_faults(&self) -> Vec<String> {
        let (layout, by) = (self.layout, self.by);
        let mut faults = Vec::new();
        for role in Role::ALL {
            match (self.before.role(layout, role), self.after.role(layout, role)) {
                (before, after) if before == after => {}
                (None, Some(taken)) if taken == by => {}
                (Some(freed), None) if freed == by || self.is_recoverer_of(freed) => {}
                (before, after) => faults.push(format!("changes {role:?} from {before:?} to {after:?}")),
            }
        }
        faults
    }

    /// A seat has one recoverer at a time. Only its member or its recoverer frees it. Only its member writes
    /// its heartbeat and its list of grants.
    fn seat_faults(&self) -> Vec<String> {
        let (layout, by) = (self.layout, self.by);
        let mut faults = Vec::new();
        for (slot, (before, after)) in (0..).zip(self.seats.iter().zip(self.after.seats(layout))) {
            match (before.recoverer, after.recoverer) {
                (before, after) if before == after => {}
                (Some(gone), None) if gone == by => {}
                (Some(there), Some(taken)) if taken == by && self.open.contains(&there) => {
                    faults.push(format!("recovers seat {slot}, which member {there} is recovering"));
                }
                (_, Some(taken)) if taken == by => {}
                (before, after) => {
                    faults.push(format!("changes the recoverer of seat {slot} from {before:?} to {after:?}"));
                }
            }
            match (before.claim, after.claim) {
                (before, after) if before == after => {}
                (None, Some(taken)) if taken == by => {}
                (Some(left), None) if left == by || before.recoverer == Some(by) => {}
                (before, after) => faults.push(format!("changes seat {slot} from {before:?} to {after:?}")),
            }
            let own = Slot::new(slot).expect("a few slots");
            let [list, later] = [layout.members.grants(own), layout.members.later_grants(own)];
            let list = list.start as usize..later.end as usize;
            let lists = self.before.root[list.clone()] != self.after.root[list];
            if (before.beat != after.beat || lists) && before.claim != Some(by) {
                faults.push(format!("writes the heartbeat or the list of grants of seat {slot}"));
            }
        }
        faults
    }

    /// A slot's watermark never goes back, and only the slot's owner moves it.
    fn watermark_faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for slot in 0..=self.layout.shape.slots {
            let [from, to] = [self.before, self.after].map(|shared| shared.watermark(self.layout, slot));
            if to < from {
                faults.push(format!("sets slot {slot} back from {from} to {to}"));
            }
            if to != from && !self.owns(slot) {
                faults.push(format!("advances slot {slot}"));
            }
        }
        faults
    }

    /// Only a slot's owner changes its announcements.
    fn announcement_faults(&self) -> Vec<String> {
        let slots = (0..self.layout.shape.slots).filter_map(Slot::new);
        let is_fault = |slot: &Slot| {
            let [before, after] =
                [self.before, self.after].map(|shared| shared.announced(self.layout, *slot));
            before != after && !self.owns(slot.index() as u16)
        };
        slots.filter(is_fault).map(|slot| format!("announces snapshots in slot {}", slot.index())).collect()
    }

    /// Only the member that changes the catalog changes the list of later regions.
    fn list_faults(&self) -> Vec<String> {
        let is_changed = self.before.later != self.after.later;
        let is_fault = is_changed && self.before.role(self.layout, Role::Catalog) != Some(self.by);
        Vec::from_iter(is_fault.then(|| "changes the list of later regions".to_owned()))
    }

    /// Only the members that have the roles write cuts and horizons.
    fn image_faults(&self) -> Vec<String> {
        let (layout, before, after) = (self.layout, self.before, self.after);
        let mut faults = Vec::new();
        for (is_changed, role) in [
            (before.images(layout) != after.images(layout), Role::Publisher),
            (before.horizons(layout) != after.horizons(layout), Role::Collector),
        ] {
            if is_changed && before.role(layout, role) != Some(self.by) {
                faults.push(format!("acts as the {role:?} without having this role"));
            }
        }
        faults
    }
}

impl Observer {
    pub(super) fn new(layout: DatabaseLayout, nodes: Vec<Arc<LendingHost>>) -> Observer {
        let (grants, members, headers) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        let (later_writer, complaints) = (None, Vec::new());
        let mut observer = Observer { layout, nodes, headers, grants, members, later_writer, complaints };
        let (layout, owner) = (observer.layout.clone(), vec![OWNER; observer.layout.regions.len()]);
        let at = DatabaseAt { layout: &layout, grants: &owner };
        [at.catalog(), at.tombstones(), at.maps(), at.counter()]
            .iter()
            .for_each(|table| observer.watch_table(table));
        observer
    }

    /// Adds a table, which is never dropped, to those whose record headers are checked.
    pub(super) fn watch_table(&mut self, table: &Table) {
        self.headers.extend(table.headers());
    }

    /// Records a grant of the member with this claim.
    pub(super) fn record_grant(&mut self, claim: Epoch, region: RegionId, grant: Epoch) {
        self.grants.insert(grant, (claim, region));
        self.members.entry(claim).or_default().push(Granted {
            region,
            grant,
            is_used: false,
            was_listed: false,
        });
    }

    pub(super) fn complain(&mut self, what: String) {
        if self.complaints.len() < MOST_COMPLAINTS {
            self.complaints.push(what);
        }
    }

    /// What members share now.
    pub(super) fn look(&self) -> SharedState {
        let (start, horizon) = self.layout.horizon;
        let part = |(&(region, start), board): (&(usize, u64), Board)| {
            self.bytes(self.layout.regions[region], start..start + board.bytes() as u64)
        };
        let parts = self.layout.parts.iter().zip(boards(&self.layout)).map(part).collect();
        let root = self.bytes(self.root_region(), 0..start + horizon.bytes() as u64);
        SharedState { root, later: self.later_words(), parts }
    }

    fn root_region(&self) -> RegionId {
        self.layout.regions[0]
    }

    fn later_words(&self) -> Vec<u8> {
        let owner = vec![OWNER; self.layout.regions.len()];
        let list = DatabaseAt { layout: &self.layout, grants: &owner }.later_regions();
        let (start, words) = (list.piece.start, list.layout.words());
        self.bytes(list.piece.region, start + words.start..start + words.end)
    }

    /// What an access under this grant may change.
    fn look_for(&self, grant: Epoch) -> Before {
        let shared = self.look();
        let by = self.grants.get(&grant).map(|&(by, _)| by);
        let is_seated = shared.seats(&self.layout).iter().any(|seat| seat.claim == by);
        let root = (by.is_some() && !is_seated).then(|| self.root());
        Before { shared, root }
    }

    fn root(&self) -> Vec<u8> {
        self.bytes(self.root_region(), 0..self.layout.shape.region_bytes)
    }

    /// Whether a record has a lock that a change of the catalog has left. Call this only while no change is
    /// in flight.
    pub(super) fn has_catalog_locks(&self) -> bool {
        let slot = self.layout.shape.slots;
        self.has_locks(slot, self.look().watermark(&self.layout, slot))
    }

    fn bytes(&self, region: RegionId, range: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let regions = &self.nodes[region.node.0 as usize - 1].regions;
        let read = regions.with_region(region.index, OWNER, AccessKind::Read, &mut |memory| {
            memory.read(range.start, &mut bytes)
        });
        assert_eq!(read, Ok(()), "the owner's grant is open");
        bytes
    }

    /// Checks an access that has taken effect. `before` is what members shared before it, if the access may
    /// have changed something.
    fn check_access(&mut self, epoch: Epoch, before: Option<&Before>) {
        let Some(&(by, region)) = self.grants.get(&epoch) else { return };
        self.note_use(by, epoch);
        let Some(Before { shared: before, root }) = before else { return };
        if !self.layout.regions.contains(&region) {
            self.later_writer = Some(by);
        }
        let seats = before.seats(&self.layout);
        let had_seat = seats.iter().any(|seat| seat.claim == Some(by));
        if region != self.root_region() && !had_seat {
            self.complain(format!("member {by} writes to region {region}, but has no seat"));
        }
        let after = self.look();
        [before, &after].into_iter().for_each(|shared| self.note_lists(shared));
        let has_seat = after.seats(&self.layout).iter().any(|seat| seat.claim == Some(by));
        if !has_seat && root.as_ref().is_some_and(|root| *root != self.root()) {
            self.complain(format!("member {by} changes the root, but has no seat"));
        }
        if *before == after {
            return;
        }
        let claims = (0..).zip(&seats).filter_map(|(slot, seat)| Some((slot, seat.claim?)));
        let is_open = |(slot, claim): &(u16, Epoch)| !self.open_grants(*slot, *claim, before).is_empty();
        let open = claims.filter(is_open).map(|(_, claim)| claim).collect();
        let change = Change { layout: &self.layout, by, before, after: &after, seats, open };
        let faults = change.faults();
        let freed = (0..).zip(change.seats.iter().zip(after.seats(&self.layout)));
        let freed: Vec<(u16, Epoch)> = freed
            .filter(|(_, (before, after))| after.claim != before.claim)
            .filter_map(|(slot, (before, _))| Some((slot, before.claim?)))
            .collect();
        faults.into_iter().for_each(|fault| self.complain(fault));
        for (slot, claim) in freed {
            self.check_freed(slot, claim, claim != by, &after);
        }
    }

    /// Checks a seat that was freed: its member must have left nothing behind.
    fn check_freed(&mut self, slot: u16, claim: Epoch, is_evicted: bool, shared: &SharedState) {
        let mut left = Vec::new();
        for role in Role::ALL {
            if shared.role(&self.layout, role) == Some(claim) {
                left.push(format!("its role {role:?}"));
            }
        }
        let words = shared.announced(&self.layout, Slot::new(slot).expect("a few slots"));
        if words.iter().any(|&byte| byte != 0) {
            left.push("snapshots that it announced".to_owned());
        }
        let watermark = shared.watermark(&self.layout, slot);
        if self.has_locks(slot, watermark) {
            left.push("records that it locked".to_owned());
        }
        if is_evicted {
            left.extend(self.has_logged(slot, watermark).then(|| "commits in its log".to_owned()));
            let open = self.open_grants(slot, claim, shared);
            left.extend(open.into_iter().map(|region| format!("its grant of region {region}")));
        }
        for what in left {
            self.complain(format!("seat {slot} of member {claim} was freed, but there is still {what}"));
        }
    }

    /// Whether a record's header names a commit that the slot's watermark has not reached.
    fn has_locks(&self, slot: u16, watermark: u64) -> bool {
        self.headers.iter().any(|&(region, at)| {
            let version = RecordHeader(word(&self.bytes(region, at..at + 8), 0)).version();
            version.slot().index() == usize::from(slot) && version.count() > watermark
        })
    }

    /// Whether commits of a slot are in flight.
    pub(super) fn has_commits(&self, slot: Slot) -> bool {
        let slot = slot.index() as u16;
        self.has_logged(slot, self.look().watermark(&self.layout, slot))
    }

    /// Whether a slot's log has commits that the slot's watermark has not reached.
    fn has_logged(&self, slot: u16, watermark: u64) -> bool {
        let owner = vec![OWNER; self.layout.regions.len()];
        let log = DatabaseAt { layout: &self.layout, grants: &owner };
        let log = log.log(Slot::new(slot).expect("a few slots"));
        log.copies.iter().any(|copy| {
            let heads = log.layout.heads();
            let heads = copy.start + heads.start..copy.start + heads.end;
            let bytes = self.bytes(copy.region, heads);
            let heads = bytes.chunks_exact(Head::PLACE_BYTES).filter_map(Head::decode);
            heads.into_iter().any(|(head, _)| {
                head.version.slot().index() == usize::from(slot) && head.version.count() > watermark
            })
        })
    }

    /// Whether a member has not been evicted: its grant of the root is not fenced.
    pub(super) fn is_open(&self, claim: Epoch) -> bool {
        self.has_open(self.root_region(), claim)
    }

    /// Whether a grant of a region is not fenced.
    pub(super) fn has_open(&self, region: RegionId, grant: Epoch) -> bool {
        let regions = &self.nodes[region.node.0 as usize - 1].regions;
        regions.check(region.index, grant, &key_of(grant)).is_ok()
    }

    /// Notes that a member has used a grant. All grants of the regions that the database was created with
    /// count as used once one is, but for that of the root: they are listed together.
    fn note_use(&mut self, by: Epoch, used: Epoch) {
        let first = self.layout.regions.len();
        let grants = self.members.get_mut(&by).expect("it has grants");
        let is_first = grants[1..].iter().take(first - 1).any(|granted| granted.grant == used);
        for (place, granted) in grants.iter_mut().enumerate() {
            granted.is_used |= granted.grant == used || (is_first && place < first);
        }
    }

    /// The regions in which a member's grant is not fenced, although it counts as used. That of the root
    /// always does.
    fn open_grants(&self, slot: u16, claim: Epoch, shared: &SharedState) -> Vec<RegionId> {
        let counts = |(place, granted): &(usize, &Granted)| *place == 0 || granted.is_used;
        let grants = self.members[&claim].iter().enumerate().filter(counts).map(|(_, granted)| granted);
        let open = grants.filter(|granted| self.has_open(granted.region, granted.grant));
        let later = shared.later_grants(&self.layout, slot);
        // A member that leaves a region clears its words. A member that is to leave a region need not be
        // fenced there, because no table has anything in the region.
        let is_left = |granted: &&Granted| {
            let listed = later.iter().find(|(listed, _)| *listed == granted.grant);
            listed.map_or(granted.was_listed, |(_, is_used)| !is_used)
        };
        open.filter(|granted| !is_left(granted)).map(|granted| granted.region).collect()
    }

    /// Notes which grants of later regions are listed.
    fn note_lists(&mut self, shared: &SharedState) {
        for (slot, seat) in (0..).zip(shared.seats(&self.layout)) {
            let Some(grants) = seat.claim.and_then(|claim| self.members.get_mut(&claim)) else { continue };
            for (listed, _) in shared.later_grants(&self.layout, slot) {
                grants
                    .iter_mut()
                    .filter(|granted| granted.grant == listed)
                    .for_each(|granted| granted.was_listed = true);
            }
        }
    }
}
