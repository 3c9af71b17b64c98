//! Direct clients (called *guests* in the code): other processes of the owner's host that read and write its
//! files without asking it.
//!
//! The owner holds the leases and decides where everything lies. A direct client has the same block words,
//! the layouts of the files to which it was admitted, and the keys of their regions. So both follow one
//! protocol:
//!
//! G1. A direct client works on a file only while the owner has it open to direct clients, and within an
//!     operation that the owner can wait for ([`table`]). It leaves alone what would need the owner's
//!     judgement (a hole to fill, a lost block, any failure), and its caller asks the owner.
//! G2. An extent that a file gives up is not used again before every operation that may have seen it has
//!     finished.
//! G3. Whatever makes a file shorter keeps direct clients out meanwhile: a write that has begun finishes
//!     before, or begins again after.
//! G4. The locks of a direct client that died are taken over: its block then holds what it held before, or
//!     what was being written, or a mixture, as a disk's sectors would.
//! G5. Direct clients write only where their stores end with their lives: to memory of this host. Elsewhere a
//!     late write could still land after its lock was taken over.
//! G6. They do not write to files with rows, because only the owner maintains parities.
//! G7. Direct clients make a file longer only while the owner allows it. The owner takes that back at once,
//!     without waiting for them; from then on it alone changes the size.
//!
//! Direct clients are trusted with all files of their owner, not only with those to which they were admitted:
//! neither the regions nor the words are divided by file. The owner decides which processes to admit.

pub(crate) mod file;
mod host;
pub(crate) mod layout;
pub mod line;
pub(crate) mod owner;
mod program;
mod recovery;
pub(crate) mod store;
pub(crate) mod table;

pub use file::{AskOwner, GuestFileCore};
pub use host::{GuestFile, GuestSession, Host};
pub use owner::{GuestId, TooManyGuests};
pub(crate) use owner::{Guests, PATIENCE, Shared};
pub use program::{Given, Room};
pub use store::{GuestMemory, GuestPlace, GuestRegion, GuestStore};
pub use table::DirectBytes;
