//! What the interposer needs from a mount. The real backend talks to the daemon; tests bring a stand-in.

use std::any::Any;
use std::os::fd::RawFd;
use std::sync::Arc;

pub use farpool_file::guest::{Given, Room, fill_from};

/// Bytes of a ticket.
pub const TICKET_BYTES: usize = 32;
/// Most bytes in the name of an abstract Unix socket: `sun_path` without its leading zero.
pub const SOCKET_NAME_MAX: usize = 107;

/// What a mount answers when a descriptor's open file description is registered with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Names the file to the mount's host, and proves that this process may use it.
    pub ticket: [u8; TICKET_BYTES],
    /// The abstract Unix socket of the mount's host; zeros follow the name.
    pub socket: [u8; SOCKET_NAME_MAX],
}

/// The kernel's side of a mount: descriptors of its files.
///
/// Several threads may call each method at once. A method must not rely on hooks: while it runs, the thread's
/// hooked calls go straight to the kernel.
pub trait Backend: Sync {
    /// Whether the descriptor may belong to a mount. It is called once for most descriptors of a program, so
    /// it must be cheap, and change nothing.
    fn recognises(&self, fd: RawFd) -> bool;

    /// How many positional calls through the kernel cost as much as opening a file with its host.
    fn calls_worth_opening(&self) -> u32;

    /// Registers the descriptor's open file description. Repeating it gives the same answer. `None`: it is
    /// not on a mount, or its file is not to be accelerated.
    fn register(&self, fd: RawFd) -> Option<Registration>;

    /// Gives up acceleration of the descriptor's open file description for good, whether it was registered or
    /// not. Returns when no operation on the description is in flight. The method takes no lock and allocates
    /// nothing, because a `vfork` child calls it.
    fn unregister(&self, fd: RawFd);

    /// Connects to the host of a mount.
    fn join(&self, registration: &Registration) -> Option<Arc<dyn Host>>;
}

/// A mount that this process has joined. In a forked child it is abandoned, and never dropped.
pub trait Host: Send + Sync {
    /// The file that a ticket names.
    fn open(&self, ticket: &[u8; TICKET_BYTES]) -> Option<Box<dyn File>>;

    /// A session: what one thread needs for its operations.
    fn session(&self) -> Option<Box<dyn Any>>;

    /// Whether the mount has ended. Then no further file is opened here, and its files answer `None`.
    fn has_ended(&self) -> bool;

    /// Called in the child of a fork: touches nothing that the parent still uses. The rest is leaked. Takes
    /// no lock.
    fn abandon(&self);
}

/// A file of a mount. `None` means that the kernel must be asked; once the mount has ended, the answer is
/// always `None`. Sessions must belong to the same host.
pub trait File: Send + Sync {
    /// Reads from `offset` on. Fewer bytes than requested mean the end of the file.
    fn read_at(&self, session: &dyn Any, offset: u64, to: &[Room<'_>]) -> Option<usize>;

    /// Writes from `offset` on.
    fn write_at(&self, session: &dyn Any, offset: u64, from: &[Given<'_>]) -> Option<usize>;
}
