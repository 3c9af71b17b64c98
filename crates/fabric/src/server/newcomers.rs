//! Connections that have shown no key, by where they come from.
//!
//! N1. They have the places that connections with a key leave, and never drive one of those out.
//! N2. When all places are taken, the next one takes the place of another without a key: of the origin that has most of
//!     them, the one that came first. What it sends does not matter, so nobody stays by sending little.
//! Not here: when they end by themselves (`server.rs`), and what they may ask for (`connection/requests.rs`).

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};

/// Where a connection comes from, as far as the kernel vouches for it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Origin {
    /// A user of this host.
    User(u32),
    /// A host; of IPv6 the network, in which a host takes addresses as it likes.
    Address(IpAddr),
    /// The kernel does not say.
    Unknown,
}

impl Origin {
    /// That of a TCP connection.
    pub(super) fn of_address(peer: SocketAddr) -> Self {
        Origin::Address(match peer.ip().to_canonical() {
            IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
            address => address,
        })
    }
}

/// Connections without a key, by their tokens, which grow with time.
#[derive(Default)]
pub(super) struct Newcomers {
    by_origin: HashMap<Origin, BTreeSet<u64>>,
}

impl Newcomers {
    pub(super) fn insert(&mut self, origin: Origin, token: u64) {
        self.by_origin.entry(origin).or_default().insert(token);
    }

    pub(super) fn remove(&mut self, origin: Origin, token: u64) {
        if let Some(tokens) = self.by_origin.get_mut(&origin) {
            tokens.remove(&token);
            if tokens.is_empty() {
                self.by_origin.remove(&origin);
            }
        }
    }

    /// The connection that gives its place to the next one (N2).
    pub(super) fn first_to_go(&self) -> Option<u64> {
        let oldest = |tokens: &BTreeSet<u64>| tokens.first().copied();
        let most =
            self.by_origin.values().max_by_key(|tokens| (tokens.len(), std::cmp::Reverse(oldest(tokens))));
        most.and_then(oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_connection_of_the_origin_that_has_most_goes_first() {
        let mut newcomers = Newcomers::default();
        let (few, many) = (Origin::User(1), Origin::Address([127, 0, 0, 1].into()));
        newcomers.insert(few, 1);
        (2..5).for_each(|token| newcomers.insert(many, token));
        assert_eq!(newcomers.first_to_go(), Some(2));
        newcomers.remove(many, 2);
        assert_eq!(newcomers.first_to_go(), Some(3));
        newcomers.remove(many, 3);
        assert_eq!(newcomers.first_to_go(), Some(1), "of two that have as many, the one that came first");
        newcomers.remove(few, 1);
        newcomers.remove(many, 4);
        assert_eq!(newcomers.first_to_go(), None);
    }

    #[test]
    fn a_host_with_many_addresses_is_one_origin() {
        let origin = |text: &str| Origin::of_address(text.parse().unwrap());
        assert_eq!(origin("[2001:db8::1]:1"), origin("[2001:db8::ffff:2]:9"));
        assert_ne!(origin("[2001:db8::1]:1"), origin("[2001:db8:0:1::1]:1"));
        assert_eq!(origin("10.0.0.1:5"), origin("[::ffff:10.0.0.1]:6"));
        assert_ne!(origin("10.0.0.1:5"), origin("10.0.0.2:5"));
    }
}
