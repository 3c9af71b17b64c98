//! Whose connection ends when all places are taken and each has something attached.
//!
//! Places are counted by grant, which is all that this side knows of owners. A grant that is over counts for nothing; of
//! the others, one that takes more than its fair share gives way.
//! Not here: connections without attachments, which go first.

use std::collections::HashMap;
use std::time::Duration;

use farpool_wire::Epoch;

/// Connections of one grant that stay whoever else comes. A program with more threads than this goes on undisturbed as
/// long as there are places left.
pub(super) const FAIR_SHARE: usize = 64;

/// A connection that has something attached.
pub(super) struct Occupant<G> {
    pub(super) token: u64,
    /// How long nothing has come from it.
    pub(super) idle: Duration,
    /// Region and epoch of each attachment.
    pub(super) grants: G,
}

struct Grant {
    is_over: bool,
    connections: usize,
    longest_idle: (Duration, u64),
}

/// The connection to close for a newcomer, if there is one: of those whose grants are all over, or else of those of the
/// grant that has most, the one that has been idle longest.
pub(super) fn who_makes_room<G: Iterator<Item = (u32, Epoch)>>(
    occupants: impl Iterator<Item = Occupant<G>>,
    is_over: impl Fn(u32, Epoch) -> bool,
) -> Option<u64> {
    let mut grants: HashMap<(u32, Epoch), Grant> = HashMap::new();
    let mut unused = None;
    for Occupant { token, idle, grants: attached } in occupants {
        let mut in_use = false;
        for (region, epoch) in attached {
            let grant = grants.entry((region, epoch)).or_insert_with(|| Grant {
                is_over: is_over(region, epoch),
                connections: 0,
                longest_idle: (idle, token),
            });
            grant.connections += 1;
            grant.longest_idle = grant.longest_idle.max((idle, token));
            in_use |= !grant.is_over;
        }
        if !in_use {
            unused = unused.max(Some((idle, token)));
        }
    }
    let greedy = || {
        let live = grants.into_values().filter(|grant| !grant.is_over);
        let most = live.max_by_key(|grant| (grant.connections, grant.longest_idle))?;
        (most.connections > FAIR_SHARE).then_some(most.longest_idle)
    };
    unused.or_else(greedy).map(|(_, token)| token)
}
