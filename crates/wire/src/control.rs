//! Messages of the control plane, generated from `proto/farpool.proto`, and conversions between them and our
//! own types.

#![allow(missing_docs)] // generated; the .proto has the comments

tonic::include_proto!("farpool.v1");

use std::fmt;

use crate::{AccessKey, Epoch, NodeId, RegionId};

// The messages that carry a key print everything but the key.

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("address", &self.address)
            .field("region", &self.region)
            .field("epoch", &Epoch(self.epoch))
            .field("ttl_ms", &self.ttl_ms)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for LeaseRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseRef")
            .field("region", &self.region)
            .field("epoch", &Epoch(self.epoch))
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for AddGrantResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddGrantResponse").field("epoch", &Epoch(self.epoch)).finish_non_exhaustive()
    }
}

impl fmt::Debug for GuestRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestRegion")
            .field("node", &NodeId(self.node))
            .field("index", &self.index)
            .field("epoch", &Epoch(self.epoch))
            .finish_non_exhaustive()
    }
}

impl AddGrantResponse {
    /// The key; `None` unless it has the right length.
    pub fn access_key(&self) -> Option<AccessKey> {
        AccessKey::from_slice(&self.key)
    }
}

impl GrantMode {
    /// What a message's field says; `None` for the unspecified mode and for modes this release does not know.
    pub fn from_wire(mode: i32) -> Option<crate::GrantMode> {
        match GrantMode::try_from(mode).ok()? {
            GrantMode::Unspecified => None,
            GrantMode::ReadOnly => Some(crate::GrantMode::ReadOnly),
            GrantMode::ReadWrite => Some(crate::GrantMode::ReadWrite),
        }
    }
}

impl From<crate::GrantMode> for GrantMode {
    fn from(mode: crate::GrantMode) -> Self {
        match mode {
            crate::GrantMode::ReadOnly => GrantMode::ReadOnly,
            crate::GrantMode::ReadWrite => GrantMode::ReadWrite,
        }
    }
}

impl Lease {
    /// The region that is lent; `None` if the message lacks the node's address.
    pub fn region_id(&self) -> Option<RegionId> {
        self.address.as_ref().map(|at| RegionId { node: NodeId(at.node), index: self.region })
    }

    /// The key; `None` unless it has the right length.
    pub fn access_key(&self) -> Option<AccessKey> {
        AccessKey::from_slice(&self.key)
    }
}

impl Lease {
    /// A hash of this lease. A broker and a node compare the sums of these hashes to detect that they
    /// disagree about what is lent.
    pub fn mark(&self) -> u64 {
        mark(self.epoch, false)
    }
}

impl RegionState {
    /// As [`Lease::mark`]; zero for a region that no owner holds.
    pub fn mark(&self) -> u64 {
        if self.held { mark(self.epoch, self.revoked) } else { 0 }
    }
}

/// Epochs are mixed because many are consecutive: sums of the epochs themselves could be equal by accident.
fn mark(epoch: u64, revoked: bool) -> u64 {
    let mixed = (epoch << 1 | u64::from(revoked)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9)
}

impl LeaseRef {
    /// Names the lease of `region` under `epoch`.
    pub fn new(region: u32, epoch: Epoch, key: &AccessKey) -> Self {
        LeaseRef { region, epoch: epoch.0, key: key.as_bytes().to_vec() }
    }

    /// The key; `None` unless it has the right length.
    pub fn access_key(&self) -> Option<AccessKey> {
        AccessKey::from_slice(&self.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grant_modes_survive_encoding_and_unknown_ones_are_none() {
        for mode in [crate::GrantMode::ReadOnly, crate::GrantMode::ReadWrite] {
            assert_eq!(GrantMode::from_wire(GrantMode::from(mode) as i32), Some(mode));
        }
        for unknown in [0, 3, -1] {
            assert_eq!(GrantMode::from_wire(unknown), None);
        }
    }

    #[test]
    fn messages_that_carry_keys_do_not_print_them() {
        let key = AccessKey::from_bytes([0xA7; AccessKey::BYTES]);
        let bytes = key.as_bytes().to_vec();
        let lease = LeaseRef::new(0, Epoch(1), &key);
        let region = GuestRegion { key: bytes.clone(), ..GuestRegion::default() };
        let printed = [
            format!("{:?}", GuestAnswer { region: Some(region), ..GuestAnswer::default() }),
            format!("{:?}", Lease { key: bytes.clone(), ..Lease::default() }),
            format!("{:?}", RenewRequest { owner: 1, leases: vec![lease.clone()] }),
            format!("{:?}", AddGrantRequest { owner: 1, lease: Some(lease.clone()), mode: 1 }),
            format!("{:?}", AddGrantResponse { epoch: 1, key: bytes }),
            format!("{:?}", FenceGrantRequest { owner: 1, lease: Some(lease), grant: 2 }),
        ];
        for text in printed {
            assert!(!text.contains("167") && !text.to_lowercase().contains("a7"), "{text}");
        }
    }
}
