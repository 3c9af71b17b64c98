//! What the daemon gives to processes of the database: the index, the table of its far memory, and regions.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use farpool_fabric::SharedMemory;
use farpool_pool::Stock;
use farpool_pool::direct::{GuestRegion, Owner};
use farpool_wire::NodeId;
use rustix::io::Errno;

use crate::handover::HandoverRequests;

/// The name, in the abstract namespace, of the socket of the daemon with this number.
pub(crate) fn socket_name(owner: u64) -> String {
    format!("farpool-cache-{owner:016x}")
}

/// What a daemon gives.
pub(crate) struct CacheOwner {
    pub(crate) index: SharedMemory,
    /// The table of its far memory.
    pub(crate) table: SharedMemory,
    /// Where its far memory comes from.
    pub(crate) stock: Arc<Stock>,
    /// Where `farpool cache handover` asks.
    pub(crate) handing: Arc<HandoverRequests>,
    /// The user whose processes may join, besides root: the owner of the files.
    pub(crate) trusted_uid: u32,
}

/// Processes are known by their places, not by numbers.
#[derive(Clone, Copy)]
pub(crate) struct Process;

impl Owner for CacheOwner {
    type Guest = Process;

    fn trusts(&self, uid: u32) -> bool {
        uid == 0 || uid == self.trusted_uid
    }

    fn admit(&mut self) -> Option<Process> {
        Some(Process)
    }

    fn number(_: Process) -> u32 {
        1
    }

    fn memory(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.index.fd(), self.table.fd()]
    }

    fn extents_per_region(&self) -> u64 {
        self.stock.extents_per_region()
    }

    /// Answers `farpool cache handover`, which sends a fixed word in place of a ticket. Waits for the keeper;
    /// no process can join meanwhile.
    fn redeem(&mut self, ticket: &[u8]) -> Result<OwnedFd, Errno> {
        self.handing.ask(ticket)
    }

    fn region(&self, number: u64) -> Option<GuestRegion> {
        GuestRegion::find(&self.stock.numbered_regions(), number)
    }

    fn connect(&self, node: NodeId, shm_socket: &Path) -> io::Result<OwnedFd> {
        self.stock.connect_guest(node, shm_socket)
    }

    fn warn_out_of_reach(&self, node: NodeId, shm_socket: &str, error: &io::Error) {
        tracing::warn!(
            node = node.0, socket = shm_socket, %error,
            "the cache cannot use the memory of this node, so its pages are read from the disk; run \
             `farpool cache attach` as the user that runs the node, or let it reach the node's socket"
        );
    }

    fn bury(&mut self, _: Process) {
        self.handing.process_ended();
        // The keeper clears the place.
    }
}
