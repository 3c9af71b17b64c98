//! Worlds in which rows survive everything that happens, because at most one node is hurt at a time. In these
//! worlds the judge accepts no excuse for a redundant file.

use farpool_fabric::sim::{Faults, Random};
use farpool_file::Redundancy;

use super::link::{Lie, Shaking};
use super::{Ills, LOST_WRITE, LOST_WRITE_PERMILLE, UNLOCKED_EARLY};
use crate::plane::post::Delivery;

/// The share of such worlds, in thousandths.
pub(super) const BEARING_PERMILLE: u32 = 300;
/// The share of files that want more nodes than there are, in thousandths.
const TOO_MANY_PERMILLE: u32 = 20;

/// What may go wrong in such a world besides mishaps: connections to a dead node may give no sign of its
/// death.
pub(super) fn bearable(mutation: Option<&'static str>, random: &mut Random) -> Ills {
    let silent_permille = if random.chance(400) { 300 } else { 0 };
    let lie = match mutation {
        Some(UNLOCKED_EARLY) => Some(Lie::DoneEarly),
        Some(LOST_WRITE) => Some(Lie::DoneNever(LOST_WRITE_PERMILLE)),
        _ => None,
    };
    Ills {
        faults: Faults { silent_permille, ..Faults::default() },
        delivery: Delivery::default(),
        shaking: Shaking { lie, ..Shaking::default() },
        harmless: true,
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
