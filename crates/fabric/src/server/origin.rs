//! Where connections come from.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// Where a connection comes from, as far as the kernel vouches for it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Origin {
    /// A user of this host.
    User(u32),
    /// A host. For IPv6 its /64 network, in which a host can take any address.
    Address(IpAddr),
    /// The kernel does not say.
    Unknown,
}

impl Origin {
    /// The origin of a TCP connection.
    pub fn of_address(peer: SocketAddr) -> Self {
        Origin::Address(match peer.ip().to_canonical() {
            IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
            address => address,
        })
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::User(user) => write!(f, "user {user}"),
            Origin::Address(address @ IpAddr::V4(_)) => write!(f, "{address}"),
            Origin::Address(network @ IpAddr::V6(_)) => write!(f, "{network}/64"),
            Origin::Unknown => write!(f, "unknown"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_with_many_addresses_is_one_origin() {
        let origin = |text: &str| Origin::of_address(text.parse().unwrap());
        assert_eq!(origin("[2001:db8::1]:1"), origin("[2001:db8::ffff:2]:9"));
        assert_ne!(origin("[2001:db8::1]:1"), origin("[2001:db8:0:1::1]:1"));
        assert_eq!(origin("10.0.0.1:5"), origin("[::ffff:10.0.0.1]:6"));
        assert_ne!(origin("10.0.0.1:5"), origin("10.0.0.2:5"));
    }
}
