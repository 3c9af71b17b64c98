//! The commits of one slot of the timestamp vector, of which several may be under way, by several threads.

mod hands;
mod ledger;
mod shared;

pub use hands::Held;
pub(crate) use hands::{Hand, Holding};
pub use shared::SharedSlot;
pub(crate) use shared::{Turn, Writer, Writing};

/// Commits of one slot that may be under way at a time: what lies behind the slowest waits for it, and so do the sessions whose
/// commits these are.
pub const MAX_COMMITS_UNDER_WAY: usize = 64;
