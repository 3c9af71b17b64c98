use farpool_lease::{LeaseClass, LeaseRefusal, RegionCounts};
use farpool_wire::OwnerId;
use farpool_wire::control::{Lease, LeaseRef, NodeAddress, RegionState};

/// What the control plane may ask of the node: implemented by the node's core, and by a fake in the tests.
///
/// Every method answers at once, without waiting for the network or for a scrub.
pub trait Lender: Send + Sync + 'static {
    /// Where the node is reached. Does not change while it runs.
    fn address(&self) -> NodeAddress;

    /// Size of each region.
    fn region_bytes(&self) -> u64;

    /// How many regions the node has.
    fn regions_total(&self) -> u32;

    /// How long a lease lasts unless renewed.
    fn lease_ttl_ms(&self) -> u64;

    /// Lends up to `count` free regions; fewer when there are fewer.
    fn grant(&self, owner: OwnerId, class: LeaseClass, count: u32) -> Vec<Lease>;

    /// Extends a lease by [`lease_ttl_ms`](Self::lease_ttl_ms) from now.
    fn renew(&self, owner: OwnerId, lease: &LeaseRef) -> Result<(), LeaseRefusal>;

    /// Ends a lease; when this returns, nothing of it takes effect any more. Asking twice is no error.
    fn release(&self, owner: OwnerId, lease: &LeaseRef) -> Result<(), LeaseRefusal>;

    /// The regions that are not free.
    fn states(&self) -> Vec<RegionState>;

    /// How many regions are where.
    fn counts(&self) -> RegionCounts;

    /// Connections cut off for malformed input, on any port, since the node started.
    fn frames_rejected(&self) -> u64;
}

#[cfg(test)]
pub(crate) mod fake {
    use farpool_lease::{Lending, Millis, RegionStatus, RegionTable};
    use farpool_wire::{AccessKey, Epoch};
    use parking_lot::Mutex;

    use super::*;

    pub const TTL_MS: u64 = 10_000;
    pub const FRAMES_REJECTED: u64 = 5;

    /// Lends by the real rules at a time that stands still, and owns no memory.
    pub struct FakeLender {
        table: Mutex<RegionTable>,
        regions: u32,
    }

    impl FakeLender {
        pub fn new(regions: u32) -> Self {
            FakeLender { table: Mutex::new(RegionTable::new(1, regions, Millis(TTL_MS))), regions }
        }
    }

    fn named(lease: &LeaseRef) -> Result<(Lending, AccessKey), LeaseRefusal> {
        let key = lease.access_key().ok_or(LeaseRefusal::WrongKey)?;
        Ok((Lending { region: lease.region, epoch: Epoch(lease.epoch) }, key))
    }

    impl Lender for FakeLender {
        fn address(&self) -> NodeAddress {
            NodeAddress { node: 1, incarnation: 1, ..Default::default() }
        }

        fn region_bytes(&self) -> u64 {
            64 << 20
        }

        fn regions_total(&self) -> u32 {
            self.regions
        }

        fn lease_ttl_ms(&self) -> u64 {
            TTL_MS
        }

        fn grant(&self, owner: OwnerId, class: LeaseClass, count: u32) -> Vec<Lease> {
            let mut keys = || AccessKey::from_bytes([7; 16]);
            let grants = self.table.lock().grant(Millis(0), owner, class, count, &mut keys);
            let leases = grants.into_iter().map(|grant| Lease {
                address: Some(self.address()),
                region: grant.lending.region,
                epoch: grant.lending.epoch.0,
                key: grant.key.as_bytes().to_vec(),
                ttl_ms: TTL_MS,
                class: class.to_wire(),
            });
            leases.collect()
        }

        fn renew(&self, owner: OwnerId, lease: &LeaseRef) -> Result<(), LeaseRefusal> {
            let (lending, key) = named(lease)?;
            self.table.lock().renew(Millis(1), owner, lending, &key).map(drop)
        }

        fn release(&self, owner: OwnerId, lease: &LeaseRef) -> Result<(), LeaseRefusal> {
            let (lending, key) = named(lease)?;
            self.table.lock().release(owner, lending, &key).map(|_| ())
        }

        fn states(&self) -> Vec<RegionState> {
            let table = self.table.lock();
            let states = (0..).zip(table.statuses()).filter_map(|(region, status)| match status {
                RegionStatus::Held { epoch, owner, class, .. } => Some(RegionState {
                    region,
                    owner: owner.0,
                    epoch: epoch.0,
                    class: class.to_wire(),
                    remaining_ms: TTL_MS,
                    held: true,
                }),
                _ => None,
            });
            states.collect()
        }

        fn counts(&self) -> RegionCounts {
            self.table.lock().counts()
        }

        fn frames_rejected(&self) -> u64 {
            FRAMES_REJECTED
        }
    }
}
