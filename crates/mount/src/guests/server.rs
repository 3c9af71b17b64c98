//! What direct clients (called *guests* in the code) get from a mount: its words and tables, the layouts of
//! files for tickets, and its regions.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use farpool_file::FileStore;
use farpool_file::guest::GuestId;
use farpool_pool::direct::{GuestRegion, Owner, Server};
use farpool_wire::NodeId;
use rustix::io::Errno;

use super::reaper::Reaper;
use super::registry::Registry;

struct Mount {
    registry: Arc<Registry>,
    store: FileStore,
    reaper: Reaper,
}

/// Starts the server of a mount's direct clients.
pub(crate) fn serve_guests(registry: Arc<Registry>, store: FileStore) -> io::Result<Server> {
    let (files, session) = (store.clone(), store.session());
    let reaper = Reaper::start(move |guest| files.recover_guest(&session, guest))?;
    let name = registry.name().to_owned();
    Server::start(&name, Mount { registry, store, reaper })
}

impl Owner for Mount {
    type Guest = GuestId;

    fn trusts(&self, uid: u32) -> bool {
        self.registry.trusts(uid)
    }

    fn admit(&mut self) -> Option<GuestId> {
        self.store.core().add_guest().ok()
    }

    fn number(guest: GuestId) -> u32 {
        guest.number().into()
    }

    fn memory(&self) -> Vec<BorrowedFd<'_>> {
        let memory = self.store.core().guest_memory();
        vec![memory.words, memory.table]
    }

    fn extents_per_region(&self) -> u64 {
        self.store.core().extents_per_region()
    }

    fn redeem(&mut self, ticket: &[u8]) -> Result<OwnedFd, Errno> {
        let body = self.registry.redeem(ticket).ok_or(Errno::STALE)?;
        body.far.core().guest_memory().map_err(|_| Errno::NOMEM)
    }

    fn region(&self, number: u64) -> Option<GuestRegion> {
        self.store.core().region_of(number)
    }

    fn connect(&self, node: NodeId, shm_socket: &Path) -> io::Result<OwnedFd> {
        self.store.connect_guest(node, shm_socket)
    }

    fn warn_out_of_reach(&self, node: NodeId, shm_socket: &str, error: &io::Error) {
        tracing::warn!(
            node = node.0, socket = shm_socket, %error,
            "processes that work on files directly cannot use the memory of this node, so the kernel serves them; \
             run `farpool mount` as the user that runs the node, or let it reach the node's socket"
        );
    }

    fn bury(&mut self, guest: GuestId) {
        self.reaper.takes(guest);
    }
}
