//! What a daemon must find again after it was killed: keys and values in a log, and memory in a file beside
//! it.
//!
//! L1. What [`Journal::append`] has returned for is found again, all of it or nothing of one call, in the
//!     order of the calls.
//! L2. The host may not crash meanwhile: nothing is synced to disk. A killed process leaves what it wrote in
//!     the kernel's cache, and the boot id tells a later boot.
//! L3. What was half written, and so not returned for, is as if it had never been. A log that is shorter than
//!     what was returned for, or damaged there, is refused: an older state would be believed, and other
//!     files' bytes with it.
//! L4. One process at a time has a directory; when its lock is free, no thread of the one before runs any
//!     more.
//! L5. A log that cannot be written to is removed: there is no state rather than an old one.
//!
//! Not here: what keys and values mean. Their first byte says whose they are ([`tables`]).

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

/// First bytes of keys: who writes them, and reads them again.
pub mod tables {
    /// Which pool, and under which owner's name (`pool`).
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
