//! The commits of one slot of the timestamp vector. Several may be in flight, by several threads.

mod hands;
mod ledger;
mod shared;

pub use hands::Held;
pub(crate) use hands::{Hand, Holding};
pub use shared::SharedSlot;
pub(crate) use shared::{Turn, Writer, Writing};

/// Most commits of one slot that may be in flight. Those after the slowest one wait for it, and so do their
/// sessions.
pub const MAX_COMMITS_IN_FLIGHT: usize = 64;

/// Most counts that a slot gives out beyond its word in far memory, the watermark. Usually only a later
/// commit moves the watermark over a commit that left nothing, and often the log has no trace of that one
/// either. By this bound a recoverer knows which counts may have been used. It is four times the commits that
/// may be in flight: a slot whose commits all fail writes its word once for 192 of them.
pub const MAX_COUNTS_AHEAD: u64 = 4 * MAX_COMMITS_IN_FLIGHT as u64;
