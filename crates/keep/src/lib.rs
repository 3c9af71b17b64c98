//! State that a daemon must find again after it was killed: keys and values in a log, and memory in a file
//! beside it.
//!
//! L1. Changes for which [`Journal::append`] has returned are found again. The changes of one call are found
//!     all or none, and the calls in their order.
//! L2. The state survives the death of the process, but not a crash of the host: nothing is synced to disk.
//!     What a killed process wrote stays in the kernel's cache, and the boot id tells a later boot.
//! L3. A half-written record, for which no call has returned, is ignored. A log that is shorter than the part
//!     for which calls have returned, or damaged there, is refused: otherwise an older state would be
//!     believed, and with it the bytes of other files.
//! L4. One process at a time has a directory. When its lock is free, no thread of the process before runs any
//!     more.
//! L5. A log that cannot be written to is removed: having no state is better than having an old one.
//!
//! Not here: what keys and values mean. A key's first byte says whose it is ([`tables`]).

mod change;
mod dir;
mod error;
mod journal;
mod kept;
mod log;

pub use change::Change;
pub use dir::{Found, KeepDir};
pub use error::KeepError;
pub use journal::{Journal, MemoryJournal};
pub use kept::Kept;

/// First bytes of keys, each with the crate that writes and reads these keys.
pub mod tables {
    /// The owner and the size of regions (`pool`).
    pub const POOL: u8 = b'P';
    /// Regions by number (`pool`).
    pub const REGION: u8 = b'R';
    /// Files by number, with their extents and losses (`file`).
    pub const FILE: u8 = b'F';
    /// Inodes (`mount`).
    pub const INODE: u8 = b'I';
    /// Names (`mount`).
    pub const ENTRY: u8 = b'E';
    /// Extended attributes (`mount`).
    pub const XATTR: u8 = b'X';
}
