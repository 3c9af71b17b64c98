//! Places for connections with a key, and which owner gives one up for another.
//!
//! R1. Some places are reserved for newcomers, so that a client with a key can always connect and present it.
//! R2. While places are free, every connection with a key gets one. When none is free, origins (users of this
//!     host, other hosts) share the places, and the owners of an origin share its places. An origin gets a
//!     place only if another origin has more than it would then have. Otherwise an owner gets one only if
//!     another owner of its origin has more than it would then have. The owner with the most places there
//!     gives up the connection that has been idle longest. So shares become equal and stay equal, and owners
//!     do not displace each other in turn.
//! R3. An owner that is refused has its share already, unless there are more origins than places, or its
//!     origin has more owners than places.
//! R4. An owner belongs to the origin of its first connection, for as long as it has any connection. So a
//!     user or host gets no more places by having many owners, and an owner gets no more by connecting from
//!     many origins.
//! Not here: connections without a key (`newcomers.rs`), and which grants have ended.

use std::collections::HashMap;

use farpool_wire::{Epoch, OwnerId};

use super::origin::Origin;

/// The part of all places that is reserved for newcomers.
const NEWCOMERS_PART: usize = 8;
/// The fewest places reserved for newcomers.
const LEAST_NEWCOMERS: usize = 4;

/// How many attachments of a connection are checked for ended grants, in the order of regions: many
/// connections must not make the server check millions.
pub(super) const LOOKED_AT: usize = 16;

/// The account to which a connection's place is charged.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Account {
    /// The owner of the lease.
    Owner(OwnerId),
    /// The grant, where the host knows no owners.
    Grant(u32, Epoch),
}

/// Connections with a key, by origin and account.
#[derive(Debug)]
pub struct Places {
    most: usize,
    taken: usize,
    accounts: HashMap<Account, Held>,
    /// Places of all accounts of an origin (R4).
    origins: HashMap<Origin, usize>,
}

#[derive(Debug)]
struct Held {
    origin: Origin,
    count: usize,
}

impl Places {
    /// Of `all` places, those for connections with a key (R1).
    pub fn of(all: usize) -> Self {
        let most = all - (all / NEWCOMERS_PART).max(LEAST_NEWCOMERS);
        Places { most, taken: 0, accounts: HashMap::new(), origins: HashMap::new() }
    }

    /// How many places there are.
    #[cfg(test)]
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Whether a connection of this account may have a place (R2).
    pub fn admit(&self, account: Account, origin: Origin) -> bool {
        self.has_room() || self.giver(account, origin).is_some()
    }

    /// Whether a place is free, so that no account has to give one up for the next connection.
    pub fn has_room(&self) -> bool {
        self.taken < self.most
    }

    /// A connection that was [admitted](Self::admit) takes a place. Returns the account that gives one up for
    /// it, if one has to.
    pub fn enter(&mut self, account: Account, origin: Origin) -> Option<Account> {
        let giver = if self.has_room() { None } else { self.giver(account, origin) };
        let held = self.accounts.entry(account).or_insert(Held { origin, count: 0 });
        held.count += 1;
        *self.origins.entry(held.origin).or_insert(0) += 1;
        self.taken += 1;
        giver
    }

    /// A connection of this account has ended, or has detached its last region.
    pub fn leave(&mut self, account: Account) {
        let Some(held) = self.accounts.get_mut(&account) else { return };
        let origin = held.origin;
        held.count -= 1;
        if held.count == 0 {
            self.accounts.remove(&account);
        }
        self.taken -= 1;
        let of_origin = self.origins.get_mut(&origin).expect("has this connection");
        *of_origin -= 1;
        if *of_origin == 0 {
            self.origins.remove(&origin);
        }
    }

    /// The account that gives up a place for another connection of this account; `None` if this one has its
    /// share.
    fn giver(&self, account: Account, origin: Origin) -> Option<Account> {
        let (origin, count) =
            self.accounts.get(&account).map_or((origin, 0), |held| (held.origin, held.count));
        let of_origin = self.origins.get(&origin).copied().unwrap_or(0);
        let (&greediest, &of_greediest) = self.origins.iter().max_by_key(|&(_, &count)| count)?;
        let is_other = of_greediest > of_origin + 1;
        let giving = if is_other { greediest } else { origin };
        let accounts = self.accounts.iter().filter(|(_, held)| held.origin == giving);
        let (&giver, held) = accounts.max_by_key(|(_, held)| held.count)?;
        (is_other || held.count > count + 1).then_some(giver)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACES: usize = 40;

    fn account(owner: u64) -> Account {
        Account::Owner(OwnerId(owner))
    }

    fn user(user: u32) -> Origin {
        Origin::User(user)
    }

    impl Places {
        /// Enters a connection if there is a place for it, and takes one away from the account that has to
        /// give it up.
        fn comes(&mut self, owner: u64, origin: Origin) -> bool {
            let admitted = self.admit(account(owner), origin);
            if admitted && let Some(giver) = self.enter(account(owner), origin) {
                self.leave(giver);
            }
            assert!(self.taken <= self.most);
            assert_eq!(self.origins.values().sum::<usize>(), self.taken);
            assert_eq!(self.accounts.values().map(|held| held.count).sum::<usize>(), self.taken);
            admitted
        }

        fn count(&self, owner: u64) -> usize {
            self.accounts.get(&account(owner)).map_or(0, |held| held.count)
        }

        fn count_of(&self, origin: Origin) -> usize {
            self.origins.get(&origin).copied().unwrap_or(0)
        }
    }

    #[test]
    fn an_owner_alone_has_all_places_but_those_of_newcomers() {
        let mut places = Places::of(PLACES);
        let entered = (0..2 * PLACES).filter(|_| places.comes(1, user(1))).count();
        assert_eq!(entered, PLACES - PLACES / NEWCOMERS_PART);
    }

    #[test]
    fn owners_of_one_origin_reach_equal_shares_and_then_displace_each_other_no_more() {
        let mut places = Places::of(PLACES);
        for _ in 0..PLACES {
            places.comes(0, user(1));
        }
        for round in 0..4 {
            let moved = (1..5).flat_map(|owner| [owner; PLACES]);
            let moved = moved.filter(|&owner| places.comes(owner, user(1))).count();
            assert_eq!(moved > 0, round == 0, "round {round}");
        }
        assert!((0..5).all(|owner| places.count(owner) == places.most() / 5));
    }

    #[test]
    fn an_owner_that_has_nothing_gets_a_place_until_there_are_as_many_owners_as_places() {
        let mut places = Places::of(PLACES);
        (0..PLACES).for_each(|_| _ = places.comes(0, user(1)));
        let most = places.most() as u64;
        assert!((1..most).all(|owner| places.comes(owner, user(1))));
        assert!(!places.comes(most, user(1)));
        assert!((0..most).all(|owner| places.count(owner) == 1));
    }

    #[test]
    fn a_user_with_many_owners_has_the_share_of_one_user() {
        let mut places = Places::of(PLACES);
        let (many, one) = (user(1), user(2));
        let most = places.most() as u64;
        assert!((0..most).all(|owner| places.comes(owner, many)));
        assert_eq!((0..PLACES).filter(|_| places.comes(most, one)).count(), places.most() / 2);
        assert_eq!(places.count_of(many), places.most().div_ceil(2));
        let moved = (0..most).flat_map(|owner| [(owner, many), (most, one)]);
        assert_eq!(moved.filter(|&(owner, origin)| places.comes(owner, origin)).count(), 0);
        assert_eq!(places.count(most), places.most() / 2);
    }

    #[test]
    fn an_owner_that_connects_from_many_origins_has_the_share_of_one() {
        let mut places = Places::of(PLACES);
        (0..PLACES).for_each(|number| _ = places.comes(1, user(number as u32)));
        assert_eq!(places.origins.len(), 1);
        (0..PLACES).for_each(|_| _ = places.comes(2, user(1_000)));
        assert_eq!((places.count(1), places.count(2)), (places.most().div_ceil(2), places.most() / 2));
        assert!(!places.comes(1, user(2_000)));
    }

    #[test]
    fn places_that_were_left_are_not_counted() {
        let mut places = Places::of(PLACES);
        (0..PLACES).for_each(|number| _ = places.comes(number as u64 % 7, user(number as u32 % 3)));
        for owner in 0..7 {
            (0..places.count(owner)).for_each(|_| places.leave(account(owner)));
            places.leave(account(owner));
        }
        assert!(places.taken == 0 && places.accounts.is_empty() && places.origins.is_empty());
    }

    #[test]
    fn every_entry_makes_shares_more_equal_and_owners_do_not_displace_each_other_in_turn() {
        let mut places = Places::of(PLACES);
        // Five origins; an owner's number determines its origin. Every owner always wants more places.
        let all_owners = || (0..25u64).map(|owner| (owner, user((owner % 5) as u32)));
        let mut moved = (0..PLACES).filter(|_| places.comes(0, user(0))).count();
        for _ in 0..PLACES {
            moved += all_owners().filter(|&(owner, origin)| places.comes(owner, origin)).count();
        }
        assert!(moved < 4 * PLACES, "{moved} entries");
        assert!((0..5).all(|origin| places.count_of(user(origin)) == places.most() / 5));
        assert!(all_owners().all(|(owner, origin)| !places.comes(owner, origin)), "all have their share");
        assert!((0..25).all(|owner| (1..=2).contains(&places.count(owner))));
    }
}
