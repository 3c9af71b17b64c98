//! Draws what goes wrong in a run.

use std::time::Duration;

use farpool_fabric::sim::Random;

use super::{Kind, Mishap};
use crate::file::BUSY_TTLS;
use crate::plane::Plane;

/// The most mishaps of a run.
const MOST: u64 = 6;
/// How long regions may be used that are taken back in a world about moves: far longer than the moves take.
const LONG_GRACE_MS: u64 = 40_000;
/// The share of mishaps that wait until an extent is being moved, in thousandths.
const IN_A_MOVE_PERMILLE: u32 = 250;
/// The longest time from the beginning of a step of a move to a mishap that waited for it: most such steps
/// take less.
const MOVE_US: u64 = 12_000;
/// The longest time until the next owner starts, if it starts at once: while packets of the dead owner are
/// still in transit.
const AT_ONCE_MS: u64 = 20;
/// The longest time for which a node refuses connections: about twice the time after which the owner gives up
/// an unresponsive node.
const LONGEST_REFUSAL_MS: u64 = 10_000;

/// Draws the mishaps of a run.
pub(in crate::file) fn draw(plane: &Plane, random: &mut Random) -> Vec<Mishap> {
    if random.chance(250) {
        return Vec::new();
    }
    let busy_ms = BUSY_TTLS * plane.ttl.0;
    let count = 1 + random.below(MOST);
    let mishap = |_| {
        let node = random.index(plane.nodes.len());
        let kind = match random.below(20) {
            0..3 => Kind::NodeDies(node),
            3..8 => Kind::ClientDies,
            8..10 => Kind::BrokerDies,
            10..13 => Kind::Cut(node),
            13 => Kind::KeeperStops,
            14..16 => Kind::ClientStops,
            _ => {
                Kind::TakeBack { count: 1 + random.below(3) as u32, grace_ms: random.below(2 * plane.ttl.0) }
            }
        };
        let after = Duration::from_micros(random.below(busy_ms * 1_000));
        let lasting = Duration::from_millis(100 + random.below(plane.ttl.0));
        Mishap::new(kind, after, lasting)
    };
    (0..count).map(mishap).collect()
}

/// Draws the mishaps of a run in which nodes only refuse connections. None of them costs a node.
pub(in crate::file) fn draw_refusals(plane: &Plane, random: &mut Random) -> Vec<Mishap> {
    let busy_ms = BUSY_TTLS * plane.ttl.0;
    // One refusal begins after the previous one has ended, so that none ends another too early.
    let mut from_ms = 0;
    let mut refusals = Vec::new();
    while from_ms < busy_ms {
        from_ms += random.below(busy_ms / 2);
        let lasting_ms = 100 + random.below(LONGEST_REFUSAL_MS);
        let kind = Kind::Refuses(random.index(plane.nodes.len()));
        let after = Duration::from_millis(from_ms);
        refusals.push(Mishap::new(kind, after, Duration::from_millis(lasting_ms)));
        from_ms += lasting_ms + 1;
    }
    refusals
}

/// Draws the mishaps of a run in which only one node is hurt, always the same one.
pub(in crate::file) fn draw_survivable(plane: &Plane, random: &mut Random) -> Vec<Mishap> {
    let busy_ms = BUSY_TTLS * plane.ttl.0;
    let victim = random.index(plane.nodes.len());
    let count = 1 + random.below(MOST);
    let mishap = |_| {
        let kind = match random.below(12) {
            0..4 => Kind::NodeDies(victim),
            4..6 => Kind::Cut(victim),
            6..8 => Kind::Flips(victim),
            8..10 => Kind::ClientDies,
            _ => Kind::BrokerDies,
        };
        let after = Duration::from_micros(random.below(busy_ms * 1_000));
        let lasting = Duration::from_millis(100 + random.below(2 * plane.ttl.0));
        Mishap::new(kind, after, lasting)
    };
    (0..count).map(mishap).collect()
}

/// Draws the deaths of the owner: one or two. The next owner mostly starts within the duration of a lease.
pub(in crate::file) fn draw_deaths_of_the_owner(
    plane: &Plane,
    is_redundant: bool,
    random: &mut Random,
) -> Vec<Mishap> {
    let busy_ms = BUSY_TTLS * plane.ttl.0;
    let longest_ms = match random.below(10) {
        0..4 => AT_ONCE_MS,
        4..8 => plane.ttl.0 / 5,
        _ if is_redundant => plane.ttl.0 / 5,
        _ => 2 * plane.ttl.0,
    };
    let count = 1 + random.below(2);
    let mishap = |_| {
        let after = Duration::from_micros(random.below(busy_ms * 1_000));
        let lasting = Duration::from_millis(1 + random.below(longest_ms));
        Mishap::new(Kind::OwnerDies, after, lasting)
    };
    (0..count).map(mishap).collect()
}

/// Lets some mishaps wait until an extent is being moved, but not the first one, which may cause the moves.
pub(in crate::file) fn delay_to_moves(mishaps: &mut [Mishap], random: &mut Random) {
    for mishap in mishaps.iter_mut().skip(1) {
        let can_wait = !matches!(mishap.kind, Kind::TakeBack { .. } | Kind::Refuses(_));
        if can_wait && random.chance(IN_A_MOVE_PERMILLE) {
            mishap.in_a_move = Some(Duration::from_micros(random.below(MOVE_US)));
        }
    }
}

/// Draws the mishaps of a run in which regions are taken back all the time, bits flip on one node, and
/// clients die.
pub(in crate::file) fn draw_moves(plane: &Plane, random: &mut Random) -> Vec<Mishap> {
    let busy_ms = BUSY_TTLS * plane.ttl.0;
    let victim = random.index(plane.nodes.len());
    let has_flips = random.chance(700);
    let count = 3 + random.below(2 * MOST);
    let mishap = |index| {
        let kind = match random.below(10) {
            6..8 if has_flips && index > 0 => Kind::Flips(victim),
            8..10 if index > 0 => Kind::ClientDies,
            _ => Kind::TakeBack { count: 1 + random.below(3) as u32, grace_ms: LONG_GRACE_MS },
        };
        let after = Duration::from_micros(random.below(busy_ms * 1_000));
        Mishap::new(kind, after, Duration::ZERO)
    };
    (0..count).map(mishap).collect()
}
