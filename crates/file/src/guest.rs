//! Direct clients (called *guests* in the code): other processes of the owner's host that read and write its
//! files without asking it.
//!
//! The owner holds the leases and decides where everything lies. A direct client has the same block words,
//! the layouts of the files to which it was admitted, and the keys of their regions. So both follow one
//! protocol:
//!
//! G1. A direct client works on a file only while the owner has it open to direct clients, and within an
//!     operation that the owner can wait for ([`table`]). It does not handle what only the owner can decide
//!     (a hole to fill, a lost block, any failure). Its caller asks the owner instead.
//! G2. An extent that a file drops is not reused before every operation that may have seen it has finished.
//! G3. An operation that makes a file shorter keeps direct clients out meanwhile: a write that has begun
//!     finishes before it, or starts again after it.
//! G4. The locks of a dead direct client are taken over: a block that it was writing then holds the old data,
//!     the new data, or a mixture, as a disk's sectors would.
//! G5. Direct clients write only to memory and disks of this host, where the stores of a process end with its
//!     life. Elsewhere, a write of a dead direct client could still land after the owner has taken its lock
//!     over.
//! G6. They do not write to files with rows, because only the owner maintains parities.
//! G7. Direct clients make a file longer only while the owner allows it. The owner can revoke that at any
//!     time, without waiting for them; from then on it alone changes the size.
//!
//! How direct clients learn of regions and reach them is the subject of `farpool_pool::direct`.
//!
//! Direct clients are trusted with all files of their owner, not only with those to which they were admitted:
//! neither the regions nor the words are divided by file. The owner decides which processes to admit.

pub(crate) mod file;
mod host;
pub(crate) mod layout;
pub(crate) mod owner;
mod program;
mod recovery;
pub(crate) mod store;
pub(crate) mod table;

pub use file::{AskOwner, GuestFileCore};
pub use host::{GuestFile, GuestSession, Host};
pub use owner::{GuestId, TooManyGuests};
pub(crate) use owner::{Guests, PATIENCE, Shared};
pub use program::{Given, Room, fill_from};
pub use store::{GuestMemory, GuestPlace, GuestStore};
pub use table::DirectBytes;
