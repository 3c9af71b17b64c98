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
//!
//! Other processes of the host may work on files directly, too: [`guest`].
//!
//! [`FileCore`] and [`StoreCore`] are `async` over a session's core, and run in simulations as they are; [`FarFile`] and
//! [`FileStore`] are the blocking edge of them.
//! Not here: names, permissions, times (crate `mount`); redundancy (a later change).

mod blocks;
mod error;
mod file;
mod file_core;
pub mod guest;
mod map;
mod moving;
mod read;
mod rules;
mod seek;
mod split;
mod store;
#[cfg(test)]
mod tests;
mod write;

pub use error::FileError;
pub use file::{FarFile, FileBytes};
pub use file_core::{FileCore, MAX_FILE_BYTES};
pub use rules::{Rules, Shipped};
pub use store::{FileStore, StoreCore};

pub use farpool_pool::{Capacity, Session};
