//! State that a daemon must find again after it was killed: keys and values in a log, and memory in a file
//! beside the log.
//!
//! L1. Changes for which [`Journal::append`] has returned are found again. Of the changes of one call, all or
//!     none are found. If those of a call are found, so are those of all earlier calls.
//! L2. The state survives the death of the process, but not a crash of the host: nothing is synced to disk.
//!     What a killed process wrote stays in the kernel's cache. State of an earlier boot is recognized by its
//!     boot id.
//! L3. A half-written record, for which no call has returned, is ignored. A log that is shorter than the part
//!     for which calls have returned, or damaged there, is refused. Otherwise the daemon would accept an
//!     older state, and with it the bytes of other files.
//! L4. One process at a time uses a directory. When its lock is free, no thread of the previous process runs
//!     any more.
//! L5. A log that cannot be written to is removed: having no state is better than having an old one.
//!
//! Not here: what keys and values mean. A key's first byte says which crate it belongs to ([`tables`]).

mod change;
mod dir;
mod error;
mod journal;
mod kept;
mod log;

pub use change::Change;
pub use dir::{Found, KeepDir, LOCK_PATIENCE, boot_id, lock_exclusive};
pub use error::KeepError;
pub use journal::{Journal, MemoryJournal};
pub use kept::Kept;

/// First bytes of keys, each with the crate that writes and reads the keys.
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
