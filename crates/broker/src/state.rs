//! The broker's view of the nodes, from their last reports. It takes `now` as an argument and does no I/O.

use std::collections::{BTreeMap, BTreeSet};

use farpool_control::limits::{MAX_ADDRESS_BYTES, MAX_REGIONS_PER_NODE};
use farpool_lease::{LeaseClass, Millis};
use farpool_wire::control::{
    HeartbeatRequest, Lease, NodeAddress, RegisterRequest, RegisterResponse, StatusRequest, StatusResponse,
};
use farpool_wire::{NodeId, OwnerId};

use crate::claims::MAX_OWNERS_PER_IDENTITY;
use crate::placement::{Candidate, place};

mod status;

/// Interval of heartbeats: long enough to cost nothing, short enough to notice a death within seconds.
pub const HEARTBEAT_INTERVAL: Millis = Millis(1_000);

/// Silence after which nothing is placed on a node: one heartbeat may be lost and one late.
pub const DEAD_AFTER: Millis = Millis(3_000);

/// Silence after which the broker forgets a node: long enough that a machine that reboots is still known.
pub const FORGET_AFTER: Millis = Millis(10 * 60 * 1_000);

/// How long the broker places nothing on a node that failed to answer. A node whose heartbeats arrive but
/// that cannot be reached thus delays one request and not every request.
pub const SHUN_AFTER_FAILURE: Millis = Millis(3_000);

/// How long a node may take to answer that it takes leases back: longer than the broker waits for it.
const REVOCATION_ANSWERED_WITHIN: Millis = Millis(10_000);

/// After this time the broker has a report that shows what a node had done before: a heartbeat may be lost,
/// and the node is asked to report by the next one.
const REPORTED_WITHIN: Millis = Millis(3_000);

/// For how long other nodes are asked first to take leases back after one gave no answer.
const LAST_CHOICE_FOR: Millis = Millis(60_000);

/// Most nodes of a pool: a few racks. The state per node is small, but a request may have to ask each node.
pub const MAX_NODES: usize = 1_024;

/// Why a node's report was not accepted.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReportRefusal {
    /// The peer is broken, or hostile.
    #[error("malformed report: {0}")]
    Malformed(&'static str),
    /// Restart the node with the pool's size.
    #[error("this pool's regions have {pool} bytes, the node's {node}: start it with the pool's region size")]
    RegionSize {
        /// Size of the regions of the nodes that live.
        pool: u64,
        /// Size that the new node announced.
        node: u64,
    },
    /// The node was started again and this is its old process, or another process uses the same id.
    #[error("a later incarnation of this node has registered and lives: end one of the two processes")]
    OlderIncarnation,
    /// Split the pool, or stop a hostile peer: one identity names too many owners.
    #[error(
        "the nodes that registered with this certificate, or from this address, name more than \
         {MAX_OWNERS_PER_IDENTITY} owners, the most that one broker stores for them: give these nodes \
         certificates of their own, or run a second pool"
    )]
    TooManyOwners,
    /// Run a second pool.
    #[error("the pool has {MAX_NODES} nodes already, the most that one broker serves: run a second pool")]
    Full,
}

/// What one owner holds on one node.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    /// All regions that it holds.
    regions: u32,
    /// Regions that may be taken back and are not being taken back yet.
    revocable: u32,
    pinned: u32,
    /// Until when leases are being taken back, as far as is known.
    revoked_until: Millis,
    /// Until when it is not known whether more leases are being taken back: a node was asked to, or has said
    /// so after its last report was made.
    unknown_until: Millis,
}

/// One node, as of its last message.
#[derive(Debug)]
struct Known {
    address: NodeAddress,
    region_bytes: u64,
    regions_total: u32,
    free: u32,
    withdrawn: u32,
    holdings: BTreeMap<OwnerId, Held>,
    /// Sum of the marks of all leases held. A heartbeat carries the node's own sum, which must be the same.
    table: u64,
    frames_rejected: u64,
    /// When it last sent a message or, if it is known only from the store, when the store was read.
    last_seen: Millis,
    /// Whether it has reported to this broker; if not, it is known only from the store.
    heard: bool,
    shunned_until: Millis,
    /// Until when other nodes are asked first to take leases back, because this one gave no answer.
    last_choice_until: Millis,
}

impl Held {
    fn add(&mut self, class: LeaseClass, regions: u32) {
        self.regions = self.regions.saturating_add(regions);
        let of_class = match class {
            LeaseClass::Revocable => &mut self.revocable,
            LeaseClass::Pinned => &mut self.pinned,
        };
        *of_class = of_class.saturating_add(regions);
    }
}

impl Known {
    fn is_alive(&self, now: Millis) -> bool {
        self.heard && now.since(self.last_seen) < DEAD_AFTER
    }

    fn held(&self) -> u32 {
        self.holdings.values().fold(0, |sum, held| sum.saturating_add(held.regions))
    }
}

/// Every node that the broker knows.
#[derive(Debug, Default)]
pub struct Pool {
    nodes: BTreeMap<NodeId, Known>,
}

impl Pool {
    /// Adds a node that an earlier broker knew. Nothing is placed on it until it reports.
    pub fn remember(&mut self, now: Millis, report: &RegisterRequest) {
        if let Ok(address) = validate(report) {
            // Its next report says how many regions it has, and which of them are lent.
            let known = Known { heard: false, free: 0, ..known_from(now, address, report) };
            self.nodes.entry(NodeId(address.node)).or_insert(known);
        }
    }

    /// Replaces everything known of a node by its report.
    pub fn report(
        &mut self,
        now: Millis,
        report: &RegisterRequest,
    ) -> Result<RegisterResponse, ReportRefusal> {
        let address = validate(report)?;
        let node = NodeId(address.node);
        let others = self.nodes.iter().filter(|(id, known)| **id != node && known.is_alive(now));
        if let Some((_, other)) =
            others.into_iter().find(|(_, known)| known.region_bytes != report.region_bytes)
        {
            return Err(ReportRefusal::RegionSize { pool: other.region_bytes, node: report.region_bytes });
        }
        match self.nodes.get(&node) {
            // Only while the later incarnation is alive: a process that used a node's id for a moment, with
            // the highest incarnation there is, must not lock the node out for ever. (The lock of the state
            // folder prevents two nodes from using one id by mistake.)
            Some(known) if known.is_alive(now) && known.address.incarnation > address.incarnation => {
                return Err(ReportRefusal::OlderIncarnation);
            }
            None if self.nodes.len() >= MAX_NODES => return Err(ReportRefusal::Full),
            _ => {}
        }
        let same_process = |known: &&Known| known.address.incarnation == address.incarnation;
        let frames_rejected =
            self.nodes.get(&node).filter(same_process).map_or(0, |known| known.frames_rejected);
        let mut known = Known { frames_rejected, ..known_from(now, address, report) };
        // The report may have been made before the node took leases back.
        if let Some(before) = self.nodes.get(&node).filter(same_process) {
            known.last_choice_until = before.last_choice_until;
            for (owner, held) in &mut known.holdings {
                held.unknown_until = before.holdings.get(owner).map_or(Millis(0), |held| held.unknown_until);
            }
        }
        self.nodes.insert(node, known);
        Ok(RegisterResponse { heartbeat_interval_ms: HEARTBEAT_INTERVAL.0 })
    }

    /// Takes a heartbeat. `false`: the node must report again, since it is not known, or its leases are not
    /// those that the broker has recorded.
    #[must_use]
    pub fn heartbeat(&mut self, now: Millis, beat: &HeartbeatRequest) -> bool {
        let known = self.nodes.get_mut(&NodeId(beat.node));
        let Some(known) = known.filter(|known| known.heard && known.address.incarnation == beat.incarnation)
        else {
            return false;
        };
        known.last_seen = now;
        known.free = beat.regions_free.min(known.regions_total);
        known.withdrawn = beat.regions_withdrawn.min(known.regions_total);
        known.frames_rejected = beat.frames_rejected;
        // Comparing only the counts is not enough. They may agree by accident: one lease has ended and the
        // answer that granted another was lost, or an old report has arrived late.
        known.held() == beat.regions_lent && known.table == beat.table
    }

    /// Chooses the nodes to ask for `count` regions, and counts these regions as no longer free.
    pub fn plan(
        &mut self,
        now: Millis,
        owner: OwnerId,
        avoid: &BTreeSet<NodeId>,
        count: u32,
    ) -> Vec<(NodeAddress, u32)> {
        let usable = self.nodes.iter().filter(|(node, known)| {
            known.is_alive(now) && now >= known.shunned_until && !avoid.contains(node)
        });
        let candidates: Vec<_> = usable
            .map(|(node, known)| Candidate {
                node: *node,
                free: known.free,
                held: known.holdings.get(&owner).map_or(0, |held| held.regions),
            })
            .collect();
        let placed = place(&candidates, count).into_iter();
        placed
            .filter_map(|(node, share)| {
                let known = self.nodes.get_mut(&node)?;
                known.free -= share;
                Some((known.address.clone(), share))
            })
            .collect()
    }

    /// A node lent these of the `asked` regions.
    pub fn granted(&mut self, node: NodeId, owner: OwnerId, class: LeaseClass, asked: u32, leases: &[Lease]) {
        let granted = leases.len() as u32;
        if let Some(known) = self.nodes.get_mut(&node) {
            known.table = leases.iter().fold(known.table, |sum, lease| sum.wrapping_add(lease.mark()));
            if granted > 0 {
                known.holdings.entry(owner).or_default().add(class, granted);
            }
            if granted < asked {
                known.free = 0; // it had fewer than recorded; its next heartbeat says how many
            }
        }
    }

    /// Chooses the node that shall take back revocable leases of an owner (B7), and how many of `count`.
    /// Counts these as being taken back. The node is the one that takes leases of this owner back already, or
    /// else the one on which the owner holds most. `None`: that node has no more, or several nodes take some
    /// back, or it is unknown what another node does.
    pub fn plan_revocation(&mut self, now: Millis, owner: OwnerId, count: u32) -> Option<(NodeAddress, u32)> {
        // Nodes that an earlier broker knew, and that have had no time to report yet.
        if self.nodes.values().any(|known| !known.heard && now.since(known.last_seen) < DEAD_AFTER) {
            return None;
        }
        let holding = self.nodes.iter().filter_map(|(node, known)| {
            let held = known.holdings.get(&owner)?;
            Some((*node, known, held))
        });
        let busy: Vec<NodeId> = holding
            .clone()
            .filter(|(_, _, held)| now < held.revoked_until.max(held.unknown_until))
            .map(|(node, ..)| node)
            .collect();
        let usable = holding.filter(|(node, known, held)| {
            let is_its_turn = busy.is_empty() || busy == [*node] && now < held.revoked_until;
            is_its_turn && known.is_alive(now) && held.revocable > 0
        });
        let (node, ..) =
            usable.max_by_key(|(_, known, held)| (now >= known.last_choice_until, held.regions))?;
        let known = self.nodes.get_mut(&node)?;
        let held = known.holdings.get_mut(&owner)?;
        let share = held.revocable.min(count);
        held.revocable -= share;
        held.unknown_until = now.plus(REVOCATION_ANSWERED_WITHIN);
        (share > 0).then(|| (known.address.clone(), share))
    }

    /// A node took back `revoked` of the `asked` leases; the last of them ends after `remaining`.
    pub fn revoked(
        &mut self,
        now: Millis,
        node: NodeId,
        owner: OwnerId,
        (asked, revoked): (u32, u32),
        remaining: Millis,
    ) {
        let known = self.nodes.get_mut(&node);
        if let Some(held) = known.and_then(|known| known.holdings.get_mut(&owner)) {
            // Reports that were made before may arrive until then.
            held.unknown_until = now.plus(REPORTED_WITHIN);
            if revoked > 0 {
                held.revoked_until = held.revoked_until.max(now.plus(remaining));
            }
            if revoked < asked {
                held.revocable = 0; // it had fewer than recorded; its next report says how many
            }
        }
    }

    /// A node did not say whether it took `asked` leases back. They count as not taken back, so that they
    /// can be asked for again. Until its reports must show what it has done, no other node is asked; then
    /// others are asked first for a while.
    pub fn revocation_unanswered(&mut self, now: Millis, node: NodeId, owner: OwnerId, asked: u32) {
        self.failed(now, node);
        let Some(known) = self.nodes.get_mut(&node) else { return };
        known.last_choice_until = now.plus(LAST_CHOICE_FOR);
        if let Some(held) = known.holdings.get_mut(&owner) {
            held.unknown_until = now.plus(REPORTED_WITHIN);
            held.revocable = held.revocable.saturating_add(asked).min(held.regions);
        }
    }

    /// Revocable leases of an owner that are not being taken back, on nodes that are alive.
    pub fn revocable(&self, now: Millis, owner: OwnerId) -> u32 {
        self.sum_of(now, owner, |held| held.revocable)
    }

    /// Leases of an owner that only the owner can give back, on nodes that are alive.
    pub fn pinned(&self, now: Millis, owner: OwnerId) -> u32 {
        self.sum_of(now, owner, |held| held.pinned)
    }

    fn sum_of(&self, now: Millis, owner: OwnerId, count: impl Fn(&Held) -> u32) -> u32 {
        let alive = self.nodes.values().filter(|known| known.is_alive(now));
        let held = alive.filter_map(|known| known.holdings.get(&owner));
        held.fold(0, |sum, held| sum.saturating_add(count(held)))
    }

    /// A node did not answer, so it is not known whether it lent anything. If it did, its next report shows
    /// the leases, or they expire.
    pub fn failed(&mut self, now: Millis, node: NodeId) {
        if let Some(known) = self.nodes.get_mut(&node) {
            known.shunned_until = now.plus(SHUN_AFTER_FAILURE);
        }
    }

    /// Drops the nodes that have been silent for [`FORGET_AFTER`]. Returns their ids.
    #[must_use]
    pub fn forget(&mut self, now: Millis) -> Vec<NodeId> {
        let silent = self.nodes.extract_if(.., |_, known| now.since(known.last_seen) >= FORGET_AFTER);
        silent.map(|(node, _)| node).collect()
    }

    /// Addresses of the nodes that are alive, and of those known only from the store.
    pub fn reachable(&self, now: Millis) -> Vec<NodeAddress> {
        let hopeful = self.nodes.values().filter(|known| known.is_alive(now) || !known.heard);
        hopeful.map(|known| known.address.clone()).collect()
    }

    /// Why there is no room, as text for the owner that asked.
    pub fn why_short(&self, now: Millis) -> String {
        let alive = self.nodes.values().filter(|known| known.is_alive(now));
        let count = |of: fn(&Known) -> u32| alive.clone().map(|known| u64::from(of(known))).sum::<u64>();
        let nodes = alive.clone().count();
        let [free, withdrawn, total] =
            [count(|known| known.free), count(|known| known.withdrawn), count(|known| known.regions_total)];
        match (self.nodes.len(), nodes) {
            (0, _) => "no node has registered: start one with `farpool node`".to_owned(),
            (known, 0) => format!("none of the pool's {known} nodes answers"),
            _ if free == 0 && withdrawn > 0 => format!(
                "no region is free: {withdrawn} of {total} have gone back to their machines; \
                 lend them again with `farpool node grow`, or add a node"
            ),
            _ if free == 0 => format!("all {total} regions of {nodes} nodes are lent: add a node"),
            _ => format!("{free} of {total} regions are free, but their nodes cannot be asked at present"),
        }
    }

    /// Size of the pool's regions; zero while no node is alive.
    pub fn region_bytes(&self, now: Millis) -> u64 {
        self.nodes.values().find(|known| known.is_alive(now)).map_or(0, |known| known.region_bytes)
    }

    /// One page of what `farpool status` prints.
    pub fn status(&self, now: Millis, asked: &StatusRequest) -> StatusResponse {
        status::page(self.nodes.iter().map(|(node, known)| (*node, known)), now, asked)
    }

    /// Owners that hold something on a node.
    pub fn owners_on(&self, node: NodeId) -> usize {
        self.nodes.get(&node).map_or(0, |known| known.holdings.len())
    }

    /// Every owner that holds something anywhere.
    pub fn owners(&self) -> BTreeSet<OwnerId> {
        self.nodes.values().flat_map(|known| known.holdings.keys().copied()).collect()
    }
}

fn known_from(now: Millis, address: &NodeAddress, report: &RegisterRequest) -> Known {
    let mut holdings: BTreeMap<OwnerId, Held> = BTreeMap::new();
    for region in report.lent.iter().filter(|region| region.held) {
        let held = holdings.entry(OwnerId(region.owner)).or_default();
        match LeaseClass::from_wire(region.class) {
            Some(class) if !region.revoked => held.add(class, 1),
            _ => held.regions += 1, // it is being taken back, or this release does not know its class
        }
        if region.revoked {
            held.revoked_until = held.revoked_until.max(now.plus(Millis(region.remaining_ms)));
        }
    }
    Known {
        address: address.clone(),
        region_bytes: report.region_bytes,
        regions_total: report.regions_total,
        free: report.regions_total - report.lent.len() as u32, // `validate`: not more than the total
        withdrawn: report.lent.iter().filter(|region| region.withdrawn).count() as u32,
        holdings,
        table: report.lent.iter().fold(0, |sum, region| sum.wrapping_add(region.mark())),
        frames_rejected: 0,
        last_seen: now,
        heard: true,
        shunned_until: Millis(0),
        last_choice_until: Millis(0),
    }
}

/// Characters that move a terminal's cursor or reverse the direction of text.
fn is_deceptive(character: char) -> bool {
    let turns_around =
        matches!(character, '\u{200E}' | '\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}');
    turns_around || character.is_control()
}

/// Checks a node's report before any of it is stored.
fn validate(report: &RegisterRequest) -> Result<&NodeAddress, ReportRefusal> {
    let malformed = |what| Err(ReportRefusal::Malformed(what));
    let Some(address) = &report.address else {
        return malformed("no address");
    };
    let NodeAddress { control, tcp, shm_socket, host, rdma, host_name, .. } = address;
    let texts = [control, tcp, shm_socket, host, rdma, host_name];
    if address.control.is_empty() || texts.iter().any(|text| text.len() > MAX_ADDRESS_BYTES) {
        return malformed("an address is missing or too long");
    }
    if texts.iter().any(|text| text.chars().any(is_deceptive)) {
        return malformed("an address contains control characters, or characters that reverse text");
    }
    if report.region_bytes == 0 || report.regions_total > MAX_REGIONS_PER_NODE {
        return malformed("the number or the size of the regions is out of range");
    }
    let indices: BTreeSet<u32> = report.lent.iter().map(|region| region.region).collect();
    if indices.len() != report.lent.len() || indices.last().is_some_and(|last| *last >= report.regions_total)
    {
        return malformed("a region is named twice or does not exist");
    }
    Ok(address)
}

#[cfg(test)]
mod tests;
