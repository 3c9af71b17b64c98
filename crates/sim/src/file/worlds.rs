//! Worlds in which rows survive everything that happens, because at most one node is hurt at a time. In these
//! worlds the judge accepts no excuse for a redundant file. In some of them no node dies, and extents move
//! most of the time.

use farpool_fabric::sim::{Faults, Random};
use farpool_file::Redundancy;

use super::broken::{
    MOVED_OVER_NEWER, OVERFLOW_EMPTY, OVERFLOW_NOT_FOUND, OVERFLOW_UNRESERVED, OVERFLOW_UNWRITTEN,
};
use super::link::{Lie, Shaking};
use super::{Ills, LATE_FORGOTTEN, LOST_WRITE, LOST_WRITE_PERMILLE, UNLOCKED_EARLY};
use crate::plane::post::Delivery;

/// The share of such worlds, in thousandths.
pub(super) const REDUNDANT_PERMILLE: u32 = 300;
/// The share of worlds in which extents move most of the time, in thousandths.
const MOVING_PERMILLE: u32 = 120;
/// The share of worlds with an overflow directory, in thousandths.
const OVERFLOW_PERMILLE: u32 = 400;
/// The share of files that want more nodes than there are, in thousandths.
const TOO_MANY_PERMILLE: u32 = 20;

/// What may go wrong in such a world besides mishaps: connections to a dead node may give no sign of its
/// death.
pub(super) fn survivable(mutation: Option<&'static str>, random: &mut Random) -> Ills {
    let silent_permille = if random.chance(400) { 300 } else { 0 };
    Ills {
        faults: Faults { silent_permille, ..Faults::default() },
        delivery: Delivery::default(),
        shaking: Shaking { lie: lie(mutation), ..Shaking::default() },
        harmless: true,
    }
}

/// The disk of an overflow directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiskKind {
    /// Regions for which it has storage; `None`: more than any run needs.
    pub(super) regions: Option<u64>,
    /// The share of writes that hang, in thousandths.
    pub(super) hang_permille: u32,
}

/// Draws the disk of a world that has an overflow directory. In calm worlds its writes do not hang.
pub(super) fn disk(seed: u64, mutation: Option<&'static str>, is_calm: bool) -> Option<DiskKind> {
    // A separate stream of randomness, so that the worlds of other seeds stay the same.
    let mut random = Random::new(seed, 37);
    let is_about_disks = is_about_disks(mutation);
    let needs_disk = is_about_disks || is_about_kept_overflow(mutation) || mutation == Some(MOVED_OVER_NEWER);
    let has_disk = random.chance(OVERFLOW_PERMILLE) || needs_disk;
    let is_small = mutation.map_or(random.chance(300), |broken| broken == OVERFLOW_UNRESERVED);
    let hang_permille = if random.chance(300) && !is_calm { 20 } else { 0 };
    has_disk.then(|| DiskKind { regions: is_small.then(|| random.below(4)), hang_permille })
}

/// Whether a mutation is one of the overflow directory itself. Its worlds have no other faults.
pub(super) fn is_about_disks(mutation: Option<&'static str>) -> bool {
    matches!(mutation, Some(OVERFLOW_UNRESERVED | OVERFLOW_UNWRITTEN))
}

/// Whether a mutation is about what a successor finds in the overflow directory.
pub(super) fn is_about_kept_overflow(mutation: Option<&'static str>) -> bool {
    matches!(mutation, Some(OVERFLOW_NOT_FOUND | OVERFLOW_EMPTY))
}

/// Whether extents move most of the time in the world of this seed, while no node is lost.
pub(super) fn is_about_moves(seed: u64, mutation: Option<&'static str>) -> bool {
    mutation.is_none_or(|broken| broken != LATE_FORGOTTEN)
        // A separate stream of randomness, so that the worlds of other seeds stay the same.
        && Random::new(seed, 35).chance(MOVING_PERMILLE)
}

/// What goes wrong in such a world besides mishaps: nothing, unless connections lie.
pub(super) fn moving(mutation: Option<&'static str>) -> Ills {
    Ills { shaking: Shaking { lie: lie(mutation), ..Shaking::default() }, ..Ills::none() }
}

fn lie(mutation: Option<&'static str>) -> Option<Lie> {
    match mutation {
        Some(UNLOCKED_EARLY) => Some(Lie::DoneEarly),
        Some(LOST_WRITE) => Some(Lie::DoneNever(LOST_WRITE_PERMILLE)),
        _ => None,
    }
}

/// Draws the redundancy of a new file in a world with this number of nodes.
pub(super) fn redundancy(nodes: u64, random: &mut Random) -> Redundancy {
    let any = [
        Redundancy::None,
        Redundancy::Stripe,
        Redundancy::Mirror,
        Redundancy::Mirror,
        Redundancy::Parity { data: 2 },
        Redundancy::Parity { data: 2 },
        Redundancy::Parity { data: 3 },
        Redundancy::Parity { data: 4 },
    ];
    let drawn = any[random.index(any.len())];
    if drawn.nodes() <= nodes || random.chance(TOO_MANY_PERMILLE) { drawn } else { Redundancy::Stripe }
}
