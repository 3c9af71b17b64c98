//! The places of connections with a key, and which owner gives one up for another.
//!
//! R1. Some places are always left to newcomers, so that whoever has a key can come and show it.
//! R2. While there are places, everybody with a key gets one. Then an owner gets one only if another has more than it
//!     would have: that one gives up the connection that was idle longest. So all get the same share in the end, who has
//!     one keeps it whoever comes, and nobody drives out others in turn.
//! R3. Who is refused has a share already, unless there are more owners than places.
//! Not here: connections without a key (`newcomers.rs`), and whose grants are over.

use std::collections::HashMap;

use farpool_wire::{Epoch, OwnerId};

/// Of all places, the part that is left to newcomers.
const NEWCOMERS_PART: usize = 8;
/// Places left to newcomers at the least.
const LEAST_NEWCOMERS: usize = 4;

/// Attachments of each connection that are looked at for whether its grants are over, the first by region: many
/// connections must not make the server look at millions.
pub(super) const LOOKED_AT: usize = 16;

/// To whose account a connection is put.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Account {
    /// Of everything that this owner leases.
    Owner(OwnerId),
    /// Where the host knows no owners: of this grant.
    Grant(u32, Epoch),
}

/// Connections with a key, by account.
pub(super) struct Places {
    most: usize,
    taken: usize,
    accounts: HashMap<Account, usize>,
}

impl Places {
    /// What is left of so many places in all (R1).
    pub(super) fn of(all: usize) -> Self {
        let most = all - (all / NEWCOMERS_PART).max(LEAST_NEWCOMERS);
        Places { most, taken: 0, accounts: HashMap::new() }
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Whether a connection of this account may have a place (R2).
    pub(super) fn admit(&self, account: Account) -> bool {
        self.has_room() || self.count(account) + 1 < self.greediest().map_or(0, |(_, count)| count)
    }

    /// Whether nobody has to give up a place for the next.
    pub(super) fn has_room(&self) -> bool {
        self.taken < self.most
    }

    pub(super) fn enter(&mut self, account: Account) {
        self.taken += 1;
        *self.accounts.entry(account).or_insert(0) += 1;
    }

    pub(super) fn leave(&mut self, account: Account) {
        let Some(count) = self.accounts.get_mut(&account) else { return };
        self.taken -= 1;
        *count -= 1;
        if *count == 0 {
            self.accounts.remove(&account);
        }
    }

    /// Who has to give up a place since more are taken than there are.
    pub(super) fn who_gives_up(&self) -> Option<Account> {
        if self.taken <= self.most {
            return None;
        }
        self.greediest().map(|(account, _)| account)
    }

    fn count(&self, account: Account) -> usize {
        self.accounts.get(&account).copied().unwrap_or(0)
    }

    fn greediest(&self) -> Option<(Account, usize)> {
        self.accounts.iter().map(|(&account, &count)| (account, count)).max_by_key(|&(_, count)| count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACES: usize = 40;

    fn account(owner: u64) -> Account {
        Account::Owner(OwnerId(owner))
    }

    /// Enters a connection if it may, and lets go of one if somebody has to.
    fn comes(places: &mut Places, owner: u64) -> bool {
        let admitted = places.admit(account(owner));
        if admitted {
            places.enter(account(owner));
            if let Some(other) = places.who_gives_up() {
                places.leave(other);
            }
        }
        admitted
    }

    #[test]
    fn an_owner_alone_has_all_places_but_those_of_newcomers() {
        let mut places = Places::of(PLACES);
        let entered = (0..2 * PLACES).filter(|_| comes(&mut places, 1)).count();
        assert_eq!(entered, PLACES - PLACES / NEWCOMERS_PART);
    }

    #[test]
    fn owners_come_to_have_the_same_share_and_nobody_drives_out_others_after() {
        let mut places = Places::of(PLACES);
        for _ in 0..PLACES {
            comes(&mut places, 0);
        }
        for round in 0..4 {
            let moved = (1..5).flat_map(|owner| [owner; PLACES]).filter(|&owner| comes(&mut places, owner));
            assert_eq!(moved.count() > 0, round == 0, "round {round}");
        }
        assert!((0..5).all(|owner| places.count(account(owner)) == places.most() / 5));
    }

    #[test]
    fn who_has_nothing_gets_a_place_until_there_are_as_many_owners_as_places() {
        let mut places = Places::of(PLACES);
        (0..PLACES).for_each(|_| _ = comes(&mut places, 0));
        let most = places.most() as u64;
        assert!((1..most).all(|owner| comes(&mut places, owner)));
        assert!(!comes(&mut places, most));
        assert!((0..most).all(|owner| places.count(account(owner)) == 1));
    }
}
