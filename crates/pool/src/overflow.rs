//! Overflow: a local directory as one more source of regions, for what the pool has no room for.
//!
//! O1. A region's storage is allocated before one of its extents is handed out. So on a full file system,
//!     taking an extent fails, but writing to an extent never does.
//! O2. Regions of the directory are never lost. A failed transfer concerns only the blocks that it names.
//! O3. A write that was abandoned may still be carried out, and a write that failed may mean a bad disk. In
//!     both cases the extent is in doubt, as after any write whose outcome is unknown: no other holder gets
//!     it.
//! O4. Far memory comes first. An extent is taken from the directory only if none is free where it is wanted
//!     and the last request to the broker brought no region. (That answer counts for half a second, or for
//!     ten seconds if no broker has answered. It no longer counts once the directory is full.) The extent
//!     moves to far memory once there is room.
//! O5. If the process keeps what it holds for a later one, the directory's regions are files with names.
//!     They are recorded and adopted like leased regions.
//! O6. Direct clients (called *guests* in the code) read and write the files of regions themselves, unless
//!     the files have names: a later process could not stop a direct client of an earlier one.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use farpool_fabric::Peer;
use farpool_wire::control::{Lease, NodeAddress};
use farpool_wire::{AccessKey, Epoch, NodeId, RegionId};
use futures_util::future::{BoxFuture, LocalBoxFuture};

use crate::region::{LeasedRegion, NodeState};

pub(crate) mod directory;
#[cfg(test)]
pub(crate) mod scripted;
mod shared;

pub use shared::SharedFile;

/// The id under which a directory appears among the nodes. No node has it: nodes draw theirs at random, below
/// it.
pub const OVERFLOW_NODE: NodeId = NodeId(u64::MAX);

/// Gives regions of local storage.
pub trait Overflow: Send + Sync {
    /// Allocates the storage of one more region. If regions are kept, a later process finds it under `index`.
    /// `None`: there is no room, or the storage did not answer in time.
    fn allocate(&self, index: u32, bytes: u64) -> BoxFuture<'_, Option<Arc<dyn OverflowRegion>>>;

    /// Takes the region that an earlier process has kept under `index`, without waiting for the storage.
    /// `None`: it is not there any more, has less than `bytes`, or was taken already.
    ///
    /// # Errors
    /// When it may be there, but could not be opened.
    fn find(&self, index: u32, bytes: u64) -> io::Result<Option<Arc<dyn OverflowRegion>>>;

    /// How many bytes could still be allocated, as of some moments ago.
    fn room_bytes(&self) -> u64;
}

/// The storage of one region. Dropping the last reference frees it, unless it is kept for a later process.
pub trait OverflowRegion: Send + Sync + fmt::Debug {
    /// Reads all of `to` at `offset`.
    fn read<'a>(&'a self, offset: u64, to: &'a mut [u8]) -> LocalBoxFuture<'a, io::Result<()>>;

    /// Writes all of `data` at `offset`. If this is dropped before it has ended, the write may still be
    /// carried out. After an error the contents there are indeterminate, unless it is
    /// [`NotConnected`](io::ErrorKind::NotConnected): this process no longer has the file.
    fn write<'a>(&'a self, offset: u64, data: &'a [u8]) -> LocalBoxFuture<'a, io::Result<()>>;

    /// Gives the region up: no later process finds it.
    fn discard(&self);

    /// Whether direct clients (called *guests* in the code) may use the storage. In a direct client: whether
    /// it still has the file.
    fn guests_may_use(&self) -> bool;

    /// For the child of a fork: closes its copy of the file, without freeing memory.
    fn abandon(&self) {}

    /// The file, if the storage is one and direct clients [may use](Self::guests_may_use) it.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Logs that a transfer has failed or took too long, at a limited rate.
    fn log_failure(&self, reason: &str);
}

/// A giver of regions, and what makes leased regions of them.
pub(crate) struct Overflowing {
    pub(crate) giver: Arc<dyn Overflow>,
    node: Arc<NodeState>,
    next_index: AtomicU32,
    /// The last allocation has failed.
    pub(crate) is_full: AtomicBool,
    /// A task waits for an extent that may lie in the directory.
    pub(crate) wanted: AtomicBool,
}

impl Overflowing {
    pub(crate) fn new(giver: Arc<dyn Overflow>) -> Self {
        let peer = Peer { node: OVERFLOW_NODE, tcp: None, verbs: None, shm_socket: None };
        let node = Arc::new(NodeState::new(peer, String::new()));
        let (is_full, wanted) = (AtomicBool::new(false), AtomicBool::new(false));
        Overflowing { giver, node, next_index: AtomicU32::new(0), is_full, wanted }
    }

    /// A region with its storage.
    pub(crate) async fn allocate(&self, bytes: u64) -> Option<Arc<LeasedRegion>> {
        // Relaxed: only distinct numbers matter.
        let index = self.next_index.fetch_add(1, Ordering::Relaxed);
        Some(self.region(index, self.giver.allocate(index, bytes).await?))
    }

    /// The region that an earlier process has kept under this index, if it is there. No other region gets the
    /// index.
    pub(crate) fn find(&self, index: u32, bytes: u64) -> io::Result<Option<Arc<LeasedRegion>>> {
        self.next_index.fetch_max(index.saturating_add(1), Ordering::Relaxed);
        let storage = self.giver.find(index, bytes)?;
        Ok(storage.map(|storage| self.region(index, storage)))
    }

    fn region(&self, index: u32, storage: Arc<dyn OverflowRegion>) -> Arc<LeasedRegion> {
        let id = RegionId { node: OVERFLOW_NODE, index };
        Arc::new(LeasedRegion::overflow(id, epoch(index), KEY, self.node.clone(), storage))
    }
}

/// The epoch of a region of the directory. Direct clients tell regions apart by it when a region's number is
/// used again.
fn epoch(index: u32) -> Epoch {
    Epoch(u64::from(index) + 1)
}

/// The key of the directory's regions, which nobody checks.
const KEY: AccessKey = AccessKey::from_bytes([0; AccessKey::BYTES]);

/// How a region of the directory is recorded for a later process: as a lease from [`OVERFLOW_NODE`].
pub(crate) fn as_lease(index: u32) -> Lease {
    let address = NodeAddress { node: OVERFLOW_NODE.0, ..NodeAddress::default() };
    let key = KEY.as_bytes().to_vec();
    Lease { address: Some(address), region: index, epoch: epoch(index).0, key, ..Lease::default() }
}
