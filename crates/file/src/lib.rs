//! Remote files: `create → read/write(offset, length) → delete` on memory of other machines (paper 1, table
//! 2).
//!
//! A file is a sparse list of extents, striped over the nodes. Each of its 8 KiB blocks has a word on this
//! host.
//!
//! B1. Every block read is checked against its word: a torn, stale, swapped or replayed block does not pass.
//!     A read returns what was last written, or an error.
//! B2. A block that was never written reads as zeros without touching far memory, whatever its extent held
//!     before.
//! B3. A block's word changes from that of one write to that of the next under the block's lock, and only
//!     after the data are in far memory.
//! B4. Contents that could not be stored stay lost. Reading a lost block is an error until the whole block is
//!     written again; on a lost node or lease, until the whole extent is written again.
//! B5. An extent is freed when nothing of the file refers to it and no operation uses it.
//! B6. Data in a region that is being taken back are moved elsewhere while there is room and time.
//! B7. A file with rows (parity, mirror) survives the loss of one member of each row: reads and writes
//!     continue, and the lost member is rebuilt elsewhere. A second loss is an error at once, never a wrong
//!     byte.
//!
//! B8. A successor finds everything that a kept store has acknowledged, in regions whose leases still run. An
//!     operation that was in flight when the process was killed leaves each block as a disk would: old, new,
//!     or a mixture.
//!
//! Other processes of the host may also work on files directly: direct clients, in [`guest`].
//!
//! [`FileCore`] and [`StoreCore`] are `async` over a session's core, and run in simulations as they are.
//! [`FarFile`] and [`FileStore`] are their blocking edge.
//! Not here: names, permissions, times (crate `mount`).

mod adopting;
mod blocks;
mod census;
mod claims;
mod error;
mod file;
mod file_core;
pub mod guest;
mod held;
mod keeping;
mod map;
mod map_lock;
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
pub use claims::{Claim, ColumnClaim};
pub use error::FileError;
pub use file::{FarFile, FileBytes};
pub use file_core::{FileCore, MAX_FILE_BYTES};
pub use redundancy::{DEFAULT_PARITY_DATA, MAX_PARITY_DATA, NotARedundancy, Redundancy};
pub use rules::{Rules, Shipped};
pub use store::{FileStore, StoreCore};
pub use volume::{DEFAULT_REBUILD_BYTES_PER_S, Progress, VolumeStatus};

pub use farpool_pool::{Capacity, Session};
