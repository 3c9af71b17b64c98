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

/// Attachments of each connection that are looked at, the first by region: one newcomer must not make the server look at
/// millions.
pub(super) const LOOKED_AT: usize = 16;

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
/// grant that has most, or else of those that have only ended grants as far as they are looked at, the one that has been
/// idle longest.
pub(super) fn who_makes_room<G: Iterator<Item = (u32, Epoch)>>(
    occupants: impl Iterator<Item = Occupant<G>>,
    is_over: impl Fn(u32, Epoch) -> bool,
) -> Option<u64> {
    let mut grants: HashMap<(u32, Epoch), Grant> = HashMap::new();
    let (mut unused, mut seems_unused) = (None, None);
    for Occupant { token, idle, grants: mut attached } in occupants {
        let mut in_use = false;
        for (region, epoch) in attached.by_ref().take(LOOKED_AT) {
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
            let candidate = if attached.next().is_none() { &mut unused } else { &mut seems_unused };
            *candidate = (*candidate).max(Some((idle, token)));
        }
    }
    let greedy = || {
        let live = grants.into_values().filter(|grant| !grant.is_over);
        let most = live.max_by_key(|grant| (grant.connections, grant.longest_idle))?;
        (most.connections > FAIR_SHARE).then_some(most.longest_idle)
    };
    unused.or_else(greedy).or(seems_unused).map(|(_, token)| token)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALIVE: Epoch = Epoch(1);
    const OVER: Epoch = Epoch(2);

    fn made_room(occupants: &[&[(u32, Epoch)]]) -> Option<u64> {
        let occupants = (0..).zip(occupants).map(|(token, grants)| Occupant {
            token,
            idle: Duration::from_secs(token),
            grants: grants.iter().copied(),
        });
        who_makes_room(occupants, |_, epoch| epoch == OVER)
    }

    #[test]
    fn a_long_row_of_attachments_is_not_looked_through_for_one_newcomer() {
        let looked = std::cell::Cell::new(0);
        let grants = (0..).map(|region| (region, OVER)).inspect(|_| looked.set(looked.get() + 1));
        let occupant = Occupant { token: 1, idle: Duration::ZERO, grants: grants.take(4096) };
        assert_eq!(who_makes_room([occupant].into_iter(), |_, epoch| epoch == OVER), Some(1));
        assert_eq!(looked.get(), LOOKED_AT + 1);
    }

    #[test]
    fn who_may_have_live_grants_behind_ended_ones_goes_last() {
        let over: Vec<_> = (0..=LOOKED_AT as u32).map(|region| (region, OVER)).collect();
        let perhaps_alive = &over[..];
        let certainly_over = &over[..LOOKED_AT];
        let greedy = vec![&[(99, ALIVE)][..]; FAIR_SHARE + 1];
        let fair = &greedy[1..];
        assert_eq!(made_room(&[&[perhaps_alive, certainly_over], fair].concat()), Some(1));
        assert_eq!(made_room(&[&[perhaps_alive], &greedy[..]].concat()), Some(FAIR_SHARE as u64 + 1));
        assert_eq!(made_room(&[&[perhaps_alive], fair].concat()), Some(0));
        assert_eq!(made_room(fair), None);
    }
}
