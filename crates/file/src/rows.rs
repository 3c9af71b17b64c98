//! The members of rows: which extents a row has now, and how it gets and loses them.
//!
//! R1. No two members of a row whose regions are still held lie on one node. The overflow directory is not a
//!     node: it may hold several.
//! R2. A row with data has its parity extent. A row without data has none, except while its first member is
//!     being taken and after that has failed.
//! R3. The lock of the file's list protects R1 and R2.

use std::sync::Arc;

use farpool_pool::{EXTENT_BYTES, Extent, OVERFLOW_NODE, Where};
use farpool_wire::NodeId;

use crate::error::FileError;
use crate::file_core::{FileCore, must_be_far};
use crate::map::Map;
use crate::redundancy::{Rows, is_parity};
use crate::rules::Rules;

/// How often a member's extent is taken again because another member took one on the same node meanwhile.
const MAX_COLLISIONS: u32 = 16;

/// The members of a row at one moment.
pub(crate) struct Row {
    /// With data, ascending.
    pub(crate) data: Vec<(u64, Arc<Extent>)>,
    pub(crate) parity: (u64, Arc<Extent>),
}

impl Row {
    pub(crate) fn member(&self, stripe: u64) -> Option<&Arc<Extent>> {
        self.members().find(|(member, _)| *member == stripe).map(|(_, extent)| extent)
    }

    /// All of them, the parity last.
    pub(crate) fn members(&self) -> impl Iterator<Item = &(u64, Arc<Extent>)> {
        self.data.iter().chain([&self.parity])
    }
}

/// Members of a row other than `stripe` whose regions are neither lost nor given back.
fn others_of(map: &Map, rows: Rows, stripe: u64) -> Vec<Arc<Extent>> {
    let row = rows.row_of(stripe);
    let members = rows.data_of(row).chain([rows.parity_of(row)]).filter(|member| *member != stripe);
    members.filter_map(|member| map.extent(member)).filter(|extent| !extent.region().has_ended()).collect()
}

fn node_of(extent: &Extent) -> NodeId {
    extent.region().id.node
}

/// Whether an extent may become this member: no other member lies on its node (R1).
fn fits(map: &Map, rows: Rows, stripe: u64, extent: &Extent) -> bool {
    extent.region().is_overflow()
        || others_of(map, rows, stripe).iter().all(|other| node_of(other) != node_of(extent))
}

/// Replaces an extent by another, unless the old one is no longer in place or the new one does not fit.
pub(crate) fn replace_member(
    map: &mut Map,
    rows: Rows,
    stripe: u64,
    old: &Arc<Extent>,
    fresh: Extent,
) -> bool {
    fits(map, rows, stripe, &fresh) && map.replace(stripe, old, fresh)
}

/// Removes a member with data, and the parity with the last one of its row.
pub(crate) fn remove_member(map: &mut Map, rows: Rows, stripe: u64) {
    map.remove(stripe);
    remove_bare_parity(map, rows, stripe);
}

/// Removes the parity of a member's row if the row has no data.
pub(crate) fn remove_bare_parity(map: &mut Map, rows: Rows, stripe: u64) {
    let row = rows.row_of(stripe);
    if rows.data_of(row).all(|member| map.extent(member).is_none()) {
        map.remove(rows.parity_of(row));
    }
}

impl<R: Rules> FileCore<R> {
    /// The row as it is now; `None`: it has no parity.
    pub(crate) fn row(&self, rows: Rows, row: u64) -> Option<Row> {
        let map = self.map.read();
        let parity = rows.parity_of(row);
        let parity = (parity, map.extent(parity)?);
        let data = rows.data_of(row).filter_map(|stripe| Some((stripe, map.extent(stripe)?)));
        Some(Row { data: data.collect(), parity })
    }

    /// Makes sure that a row has this member with data, and its parity. Returns whether the member is new.
    pub(crate) async fn ensure_member(&self, rows: Rows, stripe: u64) -> Result<bool, FileError> {
        let row = rows.row_of(stripe);
        let parity = rows.parity_of(row);
        let missing = || {
            let map = self.map.read();
            [parity, stripe].into_iter().find(|member| map.extent(*member).is_none())
        };
        if missing().is_none() {
            return Ok(false);
        }
        let _turn = self.turn_to_take(row).await;
        // A rebuild does not wait for its turn, so it may still take a member first.
        for _ in 0..MAX_COLLISIONS {
            let Some(member) = missing() else { return Ok(false) };
            let fresh = self.take_member(rows, member, None).await?;
            let mut map = self.map.write();
            let belongs = is_parity(member) || map.extent(parity).is_some();
            if belongs && fits(&map, rows, member, &fresh) {
                let (_, is_fresh) = map.put(member, fresh);
                if member == stripe {
                    return Ok(is_fresh);
                }
            }
        }
        Err(FileError::Unavailable { offset: stripe * EXTENT_BYTES })
    }

    /// A fresh extent for a member, on a node of its own or in the overflow directory. It replaces `old`, if
    /// there is one: an extent that moves back gets one in far memory.
    pub(crate) async fn take_member(
        &self,
        rows: Rows,
        stripe: u64,
        old: Option<&Extent>,
    ) -> Result<Extent, FileError> {
        let (mut all, mut present) = {
            let map = self.map.read();
            let row = rows.row_of(stripe);
            let others = rows.data_of(row).chain([rows.parity_of(row)]).filter(|member| *member != stripe);
            let all: Vec<NodeId> =
                others.filter_map(|member| map.extent(member)).map(|other| node_of(&other)).collect();
            let present = others_of(&map, rows, stripe);
            (all, present.iter().map(|other| node_of(other)).collect::<Vec<_>>())
        };
        let place = self.start.wrapping_add(rows.place(stripe));
        // Avoid the node of a lost member while there is a choice: its other regions may be lost, too.
        let is_wider = present.len() < all.len();
        // Several members may lie in the overflow directory (R1). It is left out if the member is to move
        // back, and in the first of two tries: the node of a lost member, which the second try allows, is
        // preferred.
        for nodes in [&mut all, &mut present] {
            nodes.retain(|node| *node != OVERFLOW_NODE);
        }
        if must_be_far(old) {
            present.push(OVERFLOW_NODE);
        }
        if is_wider || must_be_far(old) {
            all.push(OVERFLOW_NODE);
        }
        match self.store.take_extent(place, &Where::NotOn(all)).await {
            Err(FileError::NoSpace) if is_wider => {}
            Err(FileError::NoSpace) => return Err(self.store.why_no_space(rows.data + 1)),
            taken => return taken,
        }
        self.store.take_extent(place, &Where::NotOn(present)).await.map_err(|error| match error {
            FileError::NoSpace => self.store.why_no_space(rows.data + 1),
            other => other,
        })
    }
}
