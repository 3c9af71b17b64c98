//! Leases: who may touch a region, and until when. Pure: callers pass `now` and the keys, and do what is returned.
//!
//! ```text
//! Free -> Held{epoch} -> Fenced{epoch} -> Scrubbing{epoch} -> Free
//! ```
//! L1. A region has at most one holder.
//! L2. Epochs never repeat and never decrease, across restarts of the node either; each grant raises one.
//! L3. Bytes are reused only after the old epoch is fenced, every holder of the memory has let go, and the region
//!     is scrubbed: a one-sided write cannot see that a lease has ended.
//! L4. A lease that ended stays ended: no renewal brings it back, whether or not its end was noticed in time.
//! L5. A renewal extends a lease, and never shortens it.
//! L6. The holder stops before the node does, with clocks that disagree by [`CLOCK_DRIFT_PERCENT`].
//! L7. What the table is told out of turn changes nothing.
//! Not here: the clock, randomness, transport, persistence, and which memory a region is.

mod class;
mod holdings;
mod millis;
mod table;

pub use class::LeaseClass;
pub use holdings::{CLOCK_DRIFT_PERCENT, Holding, Holdings};
pub use millis::Millis;
pub use table::{
    DEFAULT_TTL, Grant, LeaseRefusal, Lending, RegionCounts, RegionStatus, RegionTable, Released,
};
