use farpool_lease::{Grant, GrantRefusal, LeaseClass, LeaseRefusal, Millis, RegionCounts, Term};
use farpool_wire::control::{Lease, LeaseRef, NodeAddress, RegionState, ResizeResponse, RevokeResponse};
use farpool_wire::{Epoch, GrantMode, OwnerId};
use tokio::sync::watch;

/// Why a grant was not fenced.
#[derive(Debug, thiserror::Error)]
pub enum FenceError {
    /// The caller may not fence it, or there is nothing to fence.
    #[error(transparent)]
    Refused(#[from] GrantRefusal),
    /// All operations under the grant are refused, but its process may still store to the memory: ask again.
    #[error("no memory to move the region to: {0}; the grant is not fenced yet, ask again")]
    NoMemory(#[source] std::io::Error),
}

/// What the control plane may ask of the node: implemented by the node's core, and by a fake in the tests.
///
/// Methods answer at once, without waiting for the network or for a scrub, unless they say otherwise.
pub trait Lender: Send + Sync + 'static {
    /// The node's address. It does not change while the node runs.
    fn address(&self) -> NodeAddress;

    /// Size of each region.
    fn region_bytes(&self) -> u64;

    /// How many regions the node has.
    fn regions_total(&self) -> u32;

    /// Lends up to `count` free regions; fewer when fewer are free.
    fn grant(&self, owner: OwnerId, class: LeaseClass, count: u32) -> Vec<Lease>;

    /// Adds a client's grant to a lease.
    fn add_grant(&self, owner: OwnerId, lease: &LeaseRef, mode: GrantMode) -> Result<Grant, GrantRefusal>;

    /// Ends a client's grant. Once this has returned without an error, no operation under the grant takes
    /// effect any more. Asking twice is no error. It may take as long as moving a region's contents to new
    /// memory.
    fn fence_grant(&self, owner: OwnerId, lease: &LeaseRef, grant: Epoch) -> Result<(), FenceError>;

    /// Extends a lease.
    fn renew(&self, owner: OwnerId, lease: &LeaseRef) -> Result<Term, LeaseRefusal>;

    /// Takes back up to `count` of an owner's revocable leases.
    fn revoke(&self, owner: OwnerId, count: u32, grace: Millis) -> RevokeResponse;

    /// The number of the last revocation of a lease that an owner holds, 0 for none. It grows with each.
    fn last_revocation(&self, owner: OwnerId) -> u64;

    /// Changes with each revocation of any lease. True once the node ends: then nobody should wait any more.
    fn revocations(&self) -> watch::Receiver<bool>;

    /// Sets how many regions the node has memory for at most; takes back leases if that is necessary.
    fn resize(&self, regions: u32, grace: Millis) -> ResizeResponse;

    /// The number of regions that the node is to have memory for.
    fn regions_target(&self) -> u32;

    /// How many revoked leases have expired before their owners gave them back.
    fn expired_revocations(&self) -> u64;

    /// Ends a lease. When this returns, nothing done under it takes effect any more. Asking twice is no
    /// error. It may wait for network cards to be cut off.
    fn release(&self, owner: OwnerId, lease: &LeaseRef) -> Result<(), LeaseRefusal>;

    /// The regions that are not free.
    fn states(&self) -> Vec<RegionState>;

    /// Number of regions in each state, and the sum of the marks of all leases held.
    fn counts(&self) -> (RegionCounts, u64);

    /// Returns once the number of free or of withdrawn regions has changed since the last return. Supports
    /// one waiter only.
    fn counts_changed(&self) -> impl Future<Output = ()> + Send;

    /// Connections cut off for malformed input, on any port, since the node started.
    fn frames_rejected(&self) -> u64;
}

#[cfg(test)]
pub(crate) mod fake {
    use std::sync::atomic::{AtomicU32, Ordering};

    use farpool_wire::AccessKey;
    use rustix_futex_sync::Mutex;
    use tokio::sync::Notify;

    use super::*;
    use crate::answers::{lease_message, resize};
    use crate::lending::NodeCore;

    pub const TTL_MS: u64 = 10_000;
    pub const FRAMES_REJECTED: u64 = 5;

    /// Lends by the real rules, without memory and with a clock that does not advance.
    pub struct FakeLender {
        leases: Mutex<NodeCore>,
        regions: u32,
        freed: Notify,
        pub revocations: watch::Sender<bool>,
        reports: AtomicU32,
    }

    impl FakeLender {
        pub fn new(regions: u32) -> Self {
            let leases = Mutex::new(NodeCore::new(1, regions, Millis(TTL_MS)));
            FakeLender {
                leases,
                regions,
                freed: Notify::new(),
                revocations: watch::Sender::new(false),
                reports: AtomicU32::new(0),
            }
        }

        /// How often the whole table was asked for.
        pub fn reports(&self) -> u32 {
            self.reports.load(Ordering::Relaxed)
        }
    }

    fn a_key() -> AccessKey {
        AccessKey::from_bytes([7; 16])
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

        fn grant(&self, owner: OwnerId, class: LeaseClass, count: u32) -> Vec<Lease> {
            let mut leases = self.leases.lock();
            let grants = leases.grant(Millis(0), owner, class, count, &mut a_key);
            grants.iter().map(|grant| lease_message(grant, class, leases.ttl(), self.address())).collect()
        }

        fn add_grant(
            &self,
            owner: OwnerId,
            lease: &LeaseRef,
            mode: GrantMode,
        ) -> Result<Grant, GrantRefusal> {
            self.leases.lock().add_grant(Millis(1), owner, lease, mode, a_key())
        }

        fn fence_grant(&self, owner: OwnerId, lease: &LeaseRef, grant: Epoch) -> Result<(), FenceError> {
            Ok(self.leases.lock().fence_grant(Millis(1), owner, lease, grant).map(drop)?)
        }

        fn renew(&self, owner: OwnerId, lease: &LeaseRef) -> Result<Term, LeaseRefusal> {
            self.leases.lock().renew(Millis(0), owner, lease)
        }

        fn revoke(&self, owner: OwnerId, count: u32, grace: Millis) -> RevokeResponse {
            let answer = self.leases.lock().revoke(Millis(0), owner, count, grace);
            self.revocations.send_modify(|_| {});
            answer
        }

        fn last_revocation(&self, owner: OwnerId) -> u64 {
            self.leases.lock().last_revocation(owner)
        }

        fn revocations(&self) -> watch::Receiver<bool> {
            self.revocations.subscribe()
        }

        fn resize(&self, regions: u32, grace: Millis) -> ResizeResponse {
            let mut leases = self.leases.lock();
            let answer = resize(&mut leases, Millis(0), regions, grace);
            while let Some(lease) = leases.begin_withdrawal() {
                leases.withdrawn(lease);
            }
            answer
        }

        fn regions_target(&self) -> u32 {
            self.leases.lock().target()
        }

        fn expired_revocations(&self) -> u64 {
            self.leases.lock().expired_revocations()
        }

        fn release(&self, owner: OwnerId, lease: &LeaseRef) -> Result<(), LeaseRefusal> {
            let mut leases = self.leases.lock();
            if let Some(ended) = leases.release(owner, lease)? {
                leases.fenced(ended);
                while let Some(lease) = leases.begin_scrub(|_| false) {
                    leases.scrubbed(lease);
                }
                self.freed.notify_one();
            }
            Ok(())
        }

        fn counts_changed(&self) -> impl Future<Output = ()> + Send {
            self.freed.notified()
        }

        fn states(&self) -> Vec<RegionState> {
            self.reports.fetch_add(1, Ordering::Relaxed); // a count: pairs with nothing
            self.leases.lock().states(Millis(0))
        }

        fn counts(&self) -> (RegionCounts, u64) {
            let leases = self.leases.lock();
            (leases.counts(), leases.table_sum(Millis(0)))
        }

        fn frames_rejected(&self) -> u64 {
            FRAMES_REJECTED
        }
    }
}
