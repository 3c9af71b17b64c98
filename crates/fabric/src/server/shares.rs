//! Shares of the memory: which connections may keep more between their turns than the small amount that every
//! connection may.
//!
//! S1. At most [`SHARES`] connections hold a share. While all shares are taken, a connection that needs one
//!     to begin a request waits for its turn and keeps only the small amount. A free share goes to the grant
//!     that holds the fewest, and among its connections to the one that has waited longest: a crowd of one
//!     grant does not make other grants wait for all of it.
//! S2. A connection that holds a share while others wait finishes its current request or answer and then
//!     gives the share up. If that takes longer than [`SHARE_DEADLINE`], the connection is closed: none waits
//!     for ever.
//! Not here: the clock (callers pass `now`), and what connections keep.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Connections that may be in the middle of a large request or answer at once. One thread serves them all, so
/// more would not be faster.
pub(super) const SHARES: usize = 12;
/// How long a share may be held while others wait: enough for a megabyte over the slowest network.
pub(super) const SHARE_DEADLINE: Duration = Duration::from_secs(5);

/// Holders and waiting connections, by their tokens.
#[derive(Default)]
pub(super) struct Shares {
    /// The holders, and since when each has its share.
    holders: Vec<(u64, Instant)>,
    waiting: VecDeque<u64>,
    /// Since when any connection waits.
    waiting_since: Option<Instant>,
}

impl Shares {
    /// Whether this connection may begin large requests: none waits, and it holds a share or one is free.
    #[inline]
    pub(super) fn is_open_to(&self, token: u64) -> bool {
        self.waiting.is_empty() && (self.holders.len() < SHARES || self.holds(token))
    }

    /// Whether any share is held.
    #[inline]
    pub(super) fn are_held(&self) -> bool {
        !self.holders.is_empty()
    }

    fn holds(&self, token: u64) -> bool {
        self.holders.iter().any(|&(holder, _)| holder == token)
    }

    pub(super) fn is_waiting(&self, token: u64) -> bool {
        self.waiting.contains(&token)
    }

    /// Notes, after a connection's turn, whether it keeps more than the small amount: if so, it holds a
    /// share.
    #[inline]
    pub(super) fn settle(&mut self, token: u64, keeps_much: bool, now: Instant) {
        if !keeps_much {
            self.holders.retain(|&(holder, _)| holder != token);
        } else if !self.holds(token) {
            debug_assert!(self.holders.len() < SHARES, "S1");
            self.holders.push((token, now));
        }
    }

    /// Queues a connection for a share.
    pub(super) fn wait(&mut self, token: u64, now: Instant) {
        self.waiting.push_back(token);
        self.waiting_since.get_or_insert(now);
    }

    /// Whether a connection waits and a share is free for it.
    #[inline]
    pub(super) fn can_go_on(&self) -> bool {
        !self.waiting.is_empty() && self.holders.len() < SHARES
    }

    /// How many connections wait.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Takes the next connection from the queue, if a share is free; `grant_of` names the grant under which a
    /// connection acts.
    pub(super) fn next<G: PartialEq>(&mut self, grant_of: impl Fn(u64) -> G) -> Option<u64> {
        if !self.can_go_on() {
            return None;
        }
        let holding: Vec<G> = self.holders.iter().map(|&(holder, _)| grant_of(holder)).collect();
        let shares_of = |token: u64| {
            let grant = grant_of(token);
            holding.iter().filter(|other| **other == grant).count()
        };
        let places = (0..).zip(&self.waiting);
        let place =
            places.min_by_key(|&(place, &token)| (shares_of(token), place)).map(|(place, _)| place)?;
        let next = self.waiting.remove(place);
        if self.waiting.is_empty() {
            self.waiting_since = None;
        }
        next
    }

    /// Forgets a connection that has ended.
    pub(super) fn closed(&mut self, token: u64) {
        self.holders.retain(|&(holder, _)| holder != token);
        self.waiting.retain(|&waiting| waiting != token);
        if self.waiting.is_empty() {
            self.waiting_since = None;
        }
    }

    /// The holders that have kept others waiting too long.
    pub(super) fn overdue(&self, now: Instant) -> Vec<u64> {
        let Some(waiting_since) = self.waiting_since else { return Vec::new() };
        let is_overdue = |since: Instant| now.duration_since(since.max(waiting_since)) >= SHARE_DEADLINE;
        self.holders.iter().filter(|(_, since)| is_overdue(*since)).map(|&(token, _)| token).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_taken(now: Instant) -> Shares {
        let mut shares = Shares::default();
        for token in 0..SHARES as u64 {
            assert!(shares.is_open_to(token));
            shares.settle(token, true, now);
        }
        shares
    }

    #[test]
    fn the_first_to_wait_is_the_first_to_get_a_share() {
        let now = Instant::now();
        let mut shares = all_taken(now);
        shares.settle(3, true, now);
        assert!(shares.is_open_to(3) && !shares.is_open_to(100));
        shares.wait(100, now);
        shares.wait(101, now);
        assert!(!shares.is_open_to(3), "a holder gives its share up when others wait");
        assert_eq!(shares.next(|_| 0), None);
        shares.settle(3, false, now);
        assert!(!shares.is_open_to(102), "waiting connections are not overtaken");
        assert_eq!(shares.next(|_| 0), Some(100));
        shares.settle(100, true, now);
        assert_eq!(shares.next(|_| 0), None);
        shares.closed(101);
        assert!(shares.is_open_to(100) && !shares.is_open_to(102));
    }

    #[test]
    fn a_free_share_goes_to_the_grant_that_has_fewest() {
        let now = Instant::now();
        let mut shares = all_taken(now);
        (100..900).for_each(|token| shares.wait(token, now));
        let grant_of = |token| if token == 899 { "modest" } else { "greedy" };
        shares.settle(0, false, now);
        assert_eq!(shares.next(grant_of), Some(899));
        shares.settle(899, true, now);
        shares.settle(1, false, now);
        assert_eq!(shares.next(grant_of), Some(100));
    }

    #[test]
    fn a_share_may_be_held_until_others_have_waited_for_the_deadline() {
        let start = Instant::now();
        let mut shares = all_taken(start);
        let later = start + 100 * SHARE_DEADLINE;
        assert!(shares.overdue(later).is_empty());
        shares.wait(100, later);
        assert!(shares.overdue(later + SHARE_DEADLINE / 2).is_empty());
        shares.settle(0, false, later);
        assert_eq!(shares.next(|_| 0), Some(100));
        shares.wait(101, later);
        shares.settle(100, true, later + SHARE_DEADLINE / 2);
        let overdue = shares.overdue(later + SHARE_DEADLINE);
        assert_eq!(overdue, (1..SHARES as u64).collect::<Vec<_>>(), "each has the deadline for itself");
    }
}
