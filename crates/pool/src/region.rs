//! A leased region and the node it lies on, as all sessions of the process see them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use farpool_fabric::{OpError, Peer, Queue};
use farpool_wire::{AccessKey, Epoch, RegionId};

use crate::error::AccessError;
use crate::giving_up::Hearing;
use crate::overflow::OverflowRegion;

// All orderings below are `Relaxed`: the flags and times guard no other memory. The flags change only once,
// towards *stop*, and an operation that misses such a change by a moment is refused by the node.

/// What this process knows of a node, from its first lease until the node is given up.
#[derive(Debug)]
pub struct NodeState {
    /// How to reach the node.
    pub peer: Peer,
    /// Address of its control service.
    pub control: String,
    lost: AtomicBool,
    /// By the clock of the leases, in milliseconds.
    slow_until_ms: AtomicU64,
    pub(crate) hearing: Hearing,
}

impl NodeState {
    /// A node of which this process has just learnt.
    pub fn new(peer: Peer, control: String) -> Self {
        NodeState {
            peer,
            control,
            lost: AtomicBool::new(false),
            slow_until_ms: AtomicU64::new(0),
            hearing: Hearing::default(),
        }
    }

    /// Whether the node was given up. It stays so: a node that comes back gets a new `NodeState` with its
    /// next lease.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Whether the node lends memory of this host.
    pub fn is_near(&self) -> bool {
        self.peer.shm_socket.is_some()
    }

    /// Records that the node is slow. Until `until_ms`, callers that do not need the node avoid it.
    pub fn set_slow_until(&self, until_ms: u64) {
        self.slow_until_ms.fetch_max(until_ms, Ordering::Relaxed);
    }

    /// Whether the node is recorded as slow at `now_ms`.
    pub fn is_slow(&self, now_ms: u64) -> bool {
        now_ms < self.slow_until_ms.load(Ordering::Relaxed)
    }

    /// Gives the node up; `true` for the first caller.
    pub fn give_up(&self) -> bool {
        !self.lost.swap(true, Ordering::Relaxed)
    }
}

/// A region under lease.
#[derive(Debug)]
pub struct LeasedRegion {
    /// Its id.
    pub id: RegionId,
    /// The lease's epoch.
    pub epoch: Epoch,
    /// The node.
    pub node: Arc<NodeState>,
    /// The key with which sessions attach the region.
    pub key: AccessKey,
    /// Until when the region may be used, by the pool's clock, in milliseconds; zero once the lease is lost.
    usable_until_ms: AtomicU64,
    /// The region was given back, and sessions detach it.
    retired: AtomicBool,
    /// The region is being taken back.
    leaving: AtomicBool,
    /// The storage of a region of the overflow directory.
    storage: Option<Arc<dyn OverflowRegion>>,
}

impl LeasedRegion {
    /// A region that may be used until `usable_until_ms`.
    pub fn new(
        id: RegionId,
        epoch: Epoch,
        key: AccessKey,
        node: Arc<NodeState>,
        usable_until_ms: u64,
    ) -> Self {
        LeasedRegion {
            id,
            epoch,
            node,
            key,
            usable_until_ms: AtomicU64::new(usable_until_ms),
            retired: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            storage: None,
        }
    }

    /// A region of the overflow directory. It ends only when nobody holds an extent there and it is freed.
    pub fn overflow(
        id: RegionId,
        epoch: Epoch,
        key: AccessKey,
        node: Arc<NodeState>,
        storage: Arc<dyn OverflowRegion>,
    ) -> Self {
        LeasedRegion { storage: Some(storage), ..LeasedRegion::new(id, epoch, key, node, u64::MAX) }
    }

    /// The storage of a region of the overflow directory; `None` for far memory.
    pub fn storage(&self) -> Option<&Arc<dyn OverflowRegion>> {
        self.storage.as_ref()
    }

    /// Whether direct clients (called *guests* in the code) may use the region.
    pub fn guests_may_use(&self) -> bool {
        self.storage.as_ref().is_none_or(|storage| storage.guests_may_use())
    }

    /// Whether the region lies in the overflow directory and not in far memory.
    pub fn is_overflow(&self) -> bool {
        self.storage.is_some()
    }

    /// Attaches the region on a queue to its node, for callers that work on whole regions and without
    /// sessions.
    pub async fn attach(&self, queue: &Queue) -> Result<(), OpError> {
        queue.attach(self.id, self.epoch, self.key).await
    }

    /// Whether the region may be used at `now_ms`.
    pub fn check(&self, now_ms: u64) -> Result<(), AccessError> {
        if self.node.is_lost() {
            Err(AccessError::NodeLost { node: self.id.node })
        } else if now_ms >= self.usable_until_ms.load(Ordering::Relaxed) {
            Err(AccessError::LeaseLost { region: self.id })
        } else {
            Ok(())
        }
    }

    /// Extends the lease.
    pub fn extend(&self, usable_until_ms: u64) {
        // Zero stays zero: a lost lease does not come back.
        let _ = self.usable_until_ms.try_update(Ordering::Relaxed, Ordering::Relaxed, |current| {
            (current != 0).then_some(current.max(usable_until_ms))
        });
    }

    /// Until when the region may be used, by the clock of the leases; zero: it may not be used.
    pub fn usable_until_ms(&self) -> u64 {
        if self.node.is_lost() { 0 } else { self.usable_until_ms.load(Ordering::Relaxed) }
    }

    pub(crate) fn leave(&self) {
        self.leaving.store(true, Ordering::Relaxed);
    }

    /// Whether the region is being taken back. Its data are lost unless they are soon moved elsewhere.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    pub(crate) fn lose(&self) {
        self.usable_until_ms.store(0, Ordering::Relaxed);
    }

    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Relaxed);
        self.lose();
    }

    /// Whether the region is lost or given back: sessions detach it, and its contents cannot be read any
    /// more.
    pub fn has_ended(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
            || self.node.is_lost()
            || self.usable_until_ms.load(Ordering::Relaxed) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overflow::SharedFile;
    use farpool_wire::NodeId;

    fn region() -> LeasedRegion {
        let peer = Peer { node: NodeId(1), tcp: None, verbs: None, shm_socket: None };
        let node = Arc::new(NodeState::new(peer, String::new()));
        let id = RegionId { node: NodeId(1), index: 0 };
        LeasedRegion::new(id, Epoch(1), AccessKey::from_bytes([0; 16]), node, 100)
    }

    #[test]
    fn a_lost_lease_is_not_brought_back_by_a_late_renewal() {
        let region = region();
        assert!(region.check(99).is_ok() && region.check(100).is_err());
        region.extend(200);
        assert!(region.check(199).is_ok());
        region.extend(150);
        assert!(region.check(199).is_ok(), "an older answer does not shorten");
        region.lose();
        region.extend(300);
        assert_eq!(region.check(0), Err(AccessError::LeaseLost { region: region.id }));
    }

    #[test]
    fn a_lost_node_takes_all_its_regions_along() {
        let region = region();
        assert!(region.node.give_up() && !region.node.give_up());
        assert_eq!(region.check(0), Err(AccessError::NodeLost { node: NodeId(1) }));
    }

    #[test]
    fn a_node_counts_as_slow_until_the_latest_time_that_was_recorded() {
        let node = region().node.clone();
        assert!(!node.is_slow(0) && !node.is_near());
        node.set_slow_until(100);
        node.set_slow_until(50);
        assert!(node.is_slow(99) && !node.is_slow(100));
        let peer = Peer { shm_socket: Some("/run/node".into()), ..node.peer.clone() };
        assert!(NodeState::new(peer, String::new()).is_near());
    }

    #[test]
    fn a_region_that_is_taken_back_can_be_used_until_it_is_given_back() {
        let region = region();
        assert_eq!((region.is_leaving(), region.has_ended(), region.usable_until_ms()), (false, false, 100));
        region.leave();
        assert!(region.is_leaving() && region.check(99).is_ok());
        region.retire();
        assert_eq!((region.has_ended(), region.usable_until_ms()), (true, 0));
    }

    #[test]
    fn direct_clients_use_far_memory_and_of_the_overflow_directory_what_its_storage_permits() {
        let far = region();
        assert!(far.guests_may_use());
        let file = tempfile::tempfile().unwrap(); // kept, so that no other test's file gets its inode
        let storage = Arc::new(SharedFile::new(file.try_clone().unwrap().into()));
        let overflow = LeasedRegion::overflow(far.id, far.epoch, far.key, far.node, storage.clone());
        assert!(overflow.guests_may_use());
        storage.abandon();
        assert!(!overflow.guests_may_use());
    }
}
