//! What the broker knows, in pages that each fit into one message of gRPC.

use std::collections::BTreeMap;
use std::ops::Bound;

use farpool_lease::Millis;
use farpool_wire::control::{NodeStatus, OwnerStatus, StatusRequest, StatusResponse};
use farpool_wire::{NodeId, OwnerId};

use super::Known;

/// Most nodes of a page: with the longest addresses 1.8 KiB each, half a MiB.
const NODES_PER_PAGE: usize = 256;
/// Most owners of a page: 18 bytes each at most, a bit more than 1 MiB. Together with the nodes, that is less
/// than half of gRPC's limit (4 MiB).
const OWNERS_PER_PAGE: usize = 65_536;

/// The page that follows the nodes and owners named in the request.
pub(super) fn page<'a>(
    nodes: impl Iterator<Item = (NodeId, &'a Known)> + Clone,
    now: Millis,
    asked: &StatusRequest,
) -> StatusResponse {
    let alive = nodes.clone().filter(|(_, known)| known.is_alive(now)).map(|(_, known)| known);
    let sums = StatusResponse {
        region_bytes: alive.clone().next().map_or(0, |known| known.region_bytes),
        nodes_alive: alive.clone().count() as u32,
        regions_free: alive.clone().map(|known| u64::from(known.free)).sum(),
        ..StatusResponse::default()
    };
    if asked.only_sums {
        return sums;
    }
    // One entry more than a page holds shows that there is another page.
    let after = asked.nodes_after.map(NodeId);
    let mut listed: Vec<_> = nodes
        .filter(|(node, _)| after.is_none_or(|after| *node > after))
        .take(NODES_PER_PAGE + 1)
        .map(|(_, known)| node_status(known, now))
        .collect();
    let mut owners = owners_after(alive, asked.owners_after.map(OwnerId));
    let more = listed.len() > NODES_PER_PAGE || owners.len() > OWNERS_PER_PAGE;
    listed.truncate(NODES_PER_PAGE);
    owners.truncate(OWNERS_PER_PAGE);
    StatusResponse { nodes: listed, owners, more, ..sums }
}

/// Owners after `after`, each with all that it holds; up to one entry more than a page holds.
fn owners_after<'a>(alive: impl Iterator<Item = &'a Known>, after: Option<OwnerId>) -> Vec<OwnerStatus> {
    let from = after.map_or(Bound::Unbounded, Bound::Excluded);
    let mut owners: BTreeMap<OwnerId, u32> = BTreeMap::new();
    for known in alive {
        // The first owners of the pool are among the first owners of each node.
        for (owner, held) in known.holdings.range((from, Bound::Unbounded)).take(OWNERS_PER_PAGE + 1) {
            let sum = owners.entry(*owner).or_default();
            *sum = sum.saturating_add(held.regions);
        }
    }
    let first = owners.into_iter().take(OWNERS_PER_PAGE + 1);
    first.map(|(owner, regions)| OwnerStatus { owner: owner.0, regions }).collect()
}

fn node_status(known: &Known, now: Millis) -> NodeStatus {
    NodeStatus {
        address: Some(known.address.clone()),
        alive: known.is_alive(now),
        last_seen_ms: now.since(known.last_seen).0,
        region_bytes: known.region_bytes,
        regions_total: known.regions_total,
        regions_free: known.free,
        regions_lent: known.held(),
        regions_withdrawn: known.withdrawn,
        frames_rejected: known.frames_rejected,
    }
}
