//! Leases: which client may use a region, and until when. Pure: callers pass `now` and the keys, and carry
//! out what is returned.
//!
//! ```text
//! Free -> Held{epoch} -> Fenced{epoch} -> Scrubbing{epoch} -> Free
//! Free, Scrubbing{epoch} -> Withdrawn -> Free
//! ```
//! A lease has one or more grants: the owner's own, whose epoch identifies the lease, and those of the
//! clients that the owner lets in. Each grant has its own epoch, key and mode. A client's grant can be fenced
//! alone; all grants end with the lease.
//!
//! L1. A region has at most one lease, and a lease at most
//!     [`MAX_GRANTS_PER_REGION`](farpool_wire::MAX_GRANTS_PER_REGION) grants.
//! L2. Epochs never repeat and never decrease, not even across restarts of the node. Each grant takes a new,
//!     higher one. An incarnation that has used all its epochs lends nothing.
//! L3. Bytes are reused only after every grant of the old lease is fenced, every client that could still
//!     store to them has let go of them or keeps only memory that the region no longer uses, and the region
//!     is scrubbed: a one-sided write cannot see that a lease has ended.
//! L4. A lease that ended stays ended, and a grant that was fenced stays fenced: no renewal brings it back,
//!     whether or not its end was noticed in time.
//! L5. A renewal extends a lease, and never shortens it.
//! L6. The holder stops before the node does, even if each of their clocks is off by [`CLOCK_DRIFT_PERCENT`].
//! L7. A call that comes out of turn changes nothing.
//! L8. A revocation breaks no promise: the lease lasts for its grace, and at least as long as the last answer
//!     promised. No renewal and no later revocation postpones the end. Pinned leases are not revoked.
//! L9. A region is withdrawn only when it is not lent, and its memory went back to the machine. It is lent
//!     again only after the caller has stated that it has new memory, all zeros.
//! Not here: the clock, randomness, transport, persistence, and the memory behind a region.

mod class;
mod holdings;
mod millis;
mod table;
mod terms;

pub use class::LeaseClass;
pub use holdings::{CLOCK_DRIFT_PERCENT, Holding, Holdings, longest};
pub use millis::Millis;
pub use table::{DEFAULT_TTL, MAX_GRACE, RegionTable};
pub use terms::{
    Grant, GrantRefusal, LeaseRefusal, Lending, RegionCounts, RegionStatus, Released, RevokeRefusal, Term,
};
