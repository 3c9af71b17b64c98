//! Guests: other processes of the owner's host that read and write its files without asking it.
//!
//! The owner holds the leases and decides where everything lies; a guest has the same block words, the layouts of the files
//! that it was let into, and the keys of their regions. So both follow one protocol, whoever is at work:
//!
//! G1. A guest works on a file only while the owner has it open to guests, and within an operation that the owner can wait
//!     for ([`table`]). What would need the owner's judgement (a hole to fill, a lost block, any failure) it leaves alone,
//!     and the caller asks the owner.
//! G2. An extent that a file gives up is not used again before every operation that may have seen it has ended.
//! G3. Whatever makes a file shorter keeps guests out meanwhile: a write that has begun ends before, or begins anew after.
//! G4. The locks of a guest that died are taken over: its block then holds what it held before, or what was being written,
//!     or a mixture, as a disk's sectors would.
//! G5. Guests write only where their stores end with their lives: to memory of this host. Elsewhere a dead write could
//!     still land after its lock was taken over.
//! G6. They do not write to files with rows: parities are the owner's to keep.
//! G7. Guests make a file longer only while the owner allows it. The owner takes that back at once, without
//!     waiting for them; from then on it alone changes the size.
//!
//! Guests are trusted with all files of their owner, not only with those they were let into: the regions and the words are
//! whole. Whom to let in is for the owner to decide.

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
