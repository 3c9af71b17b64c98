//! The commits of one slot of the timestamp vector, of which several may be under way, by several threads.

mod hands;
mod ledger;
mod shared;

pub use hands::Held;
pub(crate) use hands::{Hand, Holding};
pub use shared::SharedSlot;
pub(crate) use shared::{Turn, Writer, Writing};

/// Commits of one slot that may be under way at a time: what lies behind the slowest waits for it, and so do
/// the sessions whose commits these are.
pub const MAX_COMMITS_UNDER_WAY: usize = 64;

/// Most counts that a slot gives out beyond its word in far memory. A commit of which nothing is left shows
/// in the word only when a later one does, and often not in the log either; by this bound a recoverer knows
/// which counts may have been used. It is four times what may be under way: a slot whose commits all fail
/// writes its word once for 192 of them.
pub const MAX_COUNTS_UNSHOWN: u64 = 4 * MAX_COMMITS_UNDER_WAY as u64;
