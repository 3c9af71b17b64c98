//! Remote files: `create → read/write(offset, length) → delete` on memory of other machines (paper 1, table 2).
//!
//! A file is a sparse list of extents, striped over the nodes; each 8 KiB block of it has a word on this host.
//!
//! B1. Every block read is checked against its word: a torn, stale, swapped or replayed block does not pass. What
//!     is read is what was last written, or an error.
//! B2. A block never written reads as zeros without touching far memory, whatever its extent held before.
//! B3. A word changes from one write's to the next's under its lock, and only after the data is in far memory.
//! B4. What could not be stored stays lost: reading it is an error until it is written anew, block by whole block;
//!     on a node or lease that is gone, by whole extents.
//! B5. Extents are given back when nothing of the file refers to them and no operation is on them.
//! B6. What lies in a region that is being taken back moves elsewhere while there is room and time.
//! B7. A file with rows (parity, mirror) bears the loss of one member of each row: reads and writes go on, and what was lost is
//!     made anew elsewhere. One more: an error at once, never a wrong byte.
//!
//! B8. What a kept store has acknowledged its successor finds, as far as leases run; what was under way when it was killed is
//!     found as a disk leaves it, block by block: old, new, or both.
//!
//! Other processes of the host may work on files directly, too: [`guest`].
//!
//! [`FileCore`] and [`StoreCore`] are `async` over a session's core, and run in simulations as they are; [`FarFile`] and
//! [`FileStore`] are the blocking edge of them.
//! Not here: names, permissions, times (crate `mount`).

mod adopting;
mod blocks;
mod census;
mod error;
mod file;
mod file_core;
pub mod guest;
mod held;
mod keeping;
mod map;
mod moving;
mod parity;
mod read;
mod rebuild;
mod reconstruct;
mod redundancy;
mod retry;
mod row_columns;
mod row_read;
mod row_write;
mod row_zero;
mod rows;
mod rules;
mod scrub;
mod seal;
mod seek;
mod split;
mod staging;
mod store;
#[cfg(test)]
mod tests;
mod volume;
mod write;

pub use adopting::Adopted;
pub use blocks::KEPT_WORDS_BYTES;
pub use error::FileError;
pub use file::{FarFile, FileBytes};
pub use file_core::{FileCore, MAX_FILE_BYTES};
pub use redundancy::{DEFAULT_PARITY_DATA, MAX_PARITY_DATA, NotARedundancy, Redundancy};
pub use rules::{Rules, Shipped};
pub use store::{FileStore, StoreCore};
pub use volume::{DEFAULT_REBUILD_BYTES_PER_S, Progress, VolumeStatus};

pub use farpool_pool::{Capacity, Session};
