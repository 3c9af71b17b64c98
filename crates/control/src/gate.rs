//! The gate decides which connections are admitted.
//!
//! G1. A connection is a newcomer until its peer has greeted: until it has proved by TLS that it belongs to
//!     the pool, if TLS is used, and has sent HTTP/2's preface. That takes an honest peer a few round trips.
//! G2. There are at most [`MAX_NEWCOMERS`] newcomers, each for at most [`GREETING_DEADLINE`]. A further one
//!     is never refused: the gate closes the oldest newcomer of the network that has most of them. So a flood
//!     from elsewhere keeps no peer out. A flood from a peer's own machine keeps the peer out only if its
//!     greeting takes longer than opening that many connections.
//! G3. Newcomers do not take places from connections that have greeted. One network has at most
//!     [`MAX_PLACES_PER_NETWORK`] of these places.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::AbortHandle;
use rustix_futex_sync::Mutex;

use crate::dial::is_loopback_ip;
use crate::fault::Fault;

/// Most connections at a time that have not greeted yet. At 1,400 new connections a second, each has 0.7 s:
/// ten times as long as a handshake with the far side of the world.
pub const MAX_NEWCOMERS: usize = 1_024;

/// A peer must have greeted within this time: several round trips to the far side of the world, and a lost
/// packet.
pub const GREETING_DEADLINE: Duration = Duration::from_secs(3);

/// Most connections at a time that have greeted: enough for the largest pool's nodes and as many clients.
/// Together with the newcomers, they stay well below the usual limit of 4,096 descriptors.
pub const MAX_CONNECTIONS: usize = 2_048;

/// Most of these connections from one machine or one IPv6 network (RFC 6177: a site has at least a /64).
/// Processes on the listener's own machine have no such limit: a whole pool may run on one machine.
pub const MAX_PLACES_PER_NETWORK: usize = MAX_CONNECTIONS / 2;

/// The connections that have not greeted yet.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    newcomers: BTreeMap<u64, (IpAddr, AbortHandle)>,
    by_network: HashMap<IpAddr, BTreeSet<u64>>,
    next: u64,
}

impl Gate {
    /// Adds a newcomer, which can be closed with `handle`. Returns its number and, if another newcomer was
    /// closed to make room, the network of that one.
    pub(crate) fn arrives(&mut self, address: IpAddr, handle: AbortHandle) -> (u64, Option<IpAddr>) {
        let made_room = if self.newcomers.len() >= MAX_NEWCOMERS { self.make_room() } else { None };
        let network = network_of(address);
        let number = self.next;
        self.next += 1;
        self.newcomers.insert(number, (network, handle));
        self.by_network.entry(network).or_default().insert(number);
        (number, made_room)
    }

    /// Removes a newcomer: it has greeted, or its connection has ended.
    pub(crate) fn leaves(&mut self, number: u64) -> Option<AbortHandle> {
        let (network, handle) = self.newcomers.remove(&number)?;
        if let Some(numbers) = self.by_network.get_mut(&network) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_network.remove(&network);
            }
        }
        Some(handle)
    }

    fn make_room(&mut self) -> Option<IpAddr> {
        // A linear search suffices: there are at most as many networks as newcomers.
        let (&network, numbers) = self.by_network.iter().max_by_key(|(_, numbers)| numbers.len())?;
        let oldest = numbers.first().copied()?;
        self.leaves(oldest)?.abort();
        Some(network)
    }
}

/// Places for connections that have greeted.
#[derive(Clone, Default, Debug)]
pub(crate) struct Places(Arc<Mutex<HashMap<IpAddr, usize>>>);

impl Places {
    /// Takes a place for a connection. Dropping it frees the place.
    pub(crate) fn take(&self, address: IpAddr) -> Result<Place, Fault> {
        let network = network_of(address);
        let mut inside = self.0.lock();
        let all: usize = inside.values().sum();
        let of_network = inside.get(&network).copied().unwrap_or(0);
        if all >= MAX_CONNECTIONS || (of_network >= MAX_PLACES_PER_NETWORK && !is_loopback_ip(network)) {
            return Err(Fault::NoPlace);
        }
        *inside.entry(network).or_default() += 1;
        drop(inside);
        Ok(Place { network, places: self.clone() })
    }
}

/// One connection's place.
#[derive(Debug)]
pub(crate) struct Place {
    network: IpAddr,
    places: Places,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inside = self.places.0.lock();
        if let Some(count) = inside.get_mut(&self.network) {
            *count -= 1;
            if *count == 0 {
                inside.remove(&self.network);
            }
        }
    }
}

/// What counts as one machine: an IPv4 address, or an IPv6 network, in which one machine may use any number
/// of addresses.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            IpAddr::V6(Ipv6Addr::from(u128::from(address) & !u128::from(u64::MAX)))
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrive(gate: &mut Gate, address: &str) -> (u64, AbortHandle) {
        let (handle, _) = AbortHandle::new_pair();
        (gate.arrives(address.parse().unwrap(), handle.clone()).0, handle)
    }

    #[test]
    fn the_oldest_newcomer_makes_room_and_the_newest_is_let_in() {
        let mut gate = Gate::default();
        let arrived: Vec<_> = (0..=MAX_NEWCOMERS).map(|_| arrive(&mut gate, "127.0.0.1")).collect();
        let sent_away: Vec<_> = arrived.iter().map(|(_, handle)| handle.is_aborted()).collect();
        assert!(sent_away[0] && !sent_away[1..].contains(&true));
        for (number, _) in arrived {
            gate.leaves(number);
        }
        assert!(gate.newcomers.is_empty() && gate.by_network.is_empty());
    }

    #[test]
    fn a_flood_from_one_network_closes_no_newcomer_of_another() {
        let mut gate = Gate::default();
        let honest: Vec<_> = (1..9).map(|host| arrive(&mut gate, &format!("10.0.0.{host}"))).collect();
        for at in 0..3 * MAX_NEWCOMERS {
            // One machine uses the addresses of a whole IPv6 network.
            arrive(&mut gate, &format!("2001:db8::{:x}", at % 0xFFFF));
        }
        assert!(honest.iter().all(|(_, handle)| !handle.is_aborted()));
        assert_eq!(gate.newcomers.len(), MAX_NEWCOMERS);
    }

    #[test]
    fn one_machine_has_half_of_the_places_and_gives_them_back() {
        let places = Places::default();
        let take = |address: &str| places.take(address.parse().unwrap());
        let held: Vec<_> = (0..MAX_PLACES_PER_NETWORK).map(|_| take("10.0.0.1").unwrap()).collect();
        assert_eq!(take("10.0.0.1").unwrap_err(), Fault::NoPlace);
        let own: Vec<_> = (held.len()..MAX_CONNECTIONS).map(|_| take("127.0.0.1").unwrap()).collect();
        assert_eq!(take("10.0.0.2").unwrap_err(), Fault::NoPlace);
        drop(held);
        take("10.0.0.1").unwrap();
        drop(own);
        assert!(places.0.lock().is_empty());
    }
}
