//! Ids, epochs and keys.

use std::fmt;

use subtle::ConstantTimeEq;

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:016x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    };
}

random_id! {
    /// A process that lends memory of its machine. Random, 64 bits.
    NodeId
}
random_id! {
    /// The holder of leases, such as a database or a mount: an identity, not a process. Random, 64 bits.
    OwnerId
}
random_id! {
    /// The session of one queue, that is, of one client's connection to one node. A reconnection keeps the
    /// session and raises the [`Incarnation`].
    SessionId
}

/// A region of a node: a fixed-size piece of its memory, leased whole.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId {
    /// The node that owns the memory.
    pub node: NodeId,
    /// The region's number on the node, from zero.
    pub index: u32,
}

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.node, self.index)
    }
}

impl fmt::Debug for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegionId({self})")
    }
}

/// A place in far memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RemoteAddr {
    /// The region.
    pub region: RegionId,
    /// Bytes from the region's start.
    pub offset: u64,
}

impl fmt::Display for RemoteAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{:#x}", self.region, self.offset)
    }
}

/// The number of one grant of one region. Epochs of a region only grow, so that none is used twice. The epoch
/// of a lease is that of its first grant, the owner's.
///
/// The upper half is the node's incarnation, the lower half a counter. So no epoch is repeated when a node
/// restarts under its old id (`docs/src/leases.md`). Zero is never granted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The `counter`-th epoch of a node's `incarnation`.
    pub const fn new(incarnation: u32, counter: u32) -> Self {
        Epoch((incarnation as u64) << 32 | counter as u64)
    }

    /// The node incarnation that granted this epoch.
    pub const fn incarnation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.incarnation(), self.0 as u32)
    }
}

/// Counts the connections of one [`SessionId`]. When a node answers a newer one, all older ones are
/// superseded: nothing sent on them takes effect any more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Incarnation(pub u64);

/// 128 random bits that open one region for one grant.
///
/// Equality takes the same time wherever the bytes differ; `Debug` does not show them.
#[derive(Clone, Copy)]
pub struct AccessKey([u8; AccessKey::BYTES]);

impl AccessKey {
    /// Length of a key.
    pub const BYTES: usize = 16;

    /// Wraps bytes that came from a random source or from a peer.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        AccessKey(bytes)
    }

    /// Wraps a peer's bytes; `None` unless there are sixteen.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(AccessKey)
    }

    /// The bytes, for sending.
    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl PartialEq for AccessKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for AccessKey {}

impl fmt::Debug for AccessKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AccessKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_of_a_later_incarnation_are_greater_than_all_of_an_earlier_one() {
        assert!(Epoch::new(2, 0) > Epoch::new(1, u32::MAX));
        assert_eq!(Epoch::new(7, 9).incarnation(), 7);
        assert_eq!(Epoch::new(7, 9).to_string(), "7.9");
    }

    #[test]
    fn keys_are_not_printed() {
        assert_eq!(format!("{:?}", AccessKey::from_bytes([0xAB; 16])), "AccessKey(..)");
    }

    #[test]
    fn keys_differ_when_any_byte_differs() {
        let key = AccessKey::from_bytes([1; 16]);
        for place in 0..AccessKey::BYTES {
            let mut bytes = [1; 16];
            bytes[place] ^= 0x80;
            assert_ne!(key, AccessKey::from_bytes(bytes));
        }
        assert_eq!(AccessKey::from_slice(&[0; 15]), None);
    }
}
