//! Leases: who may touch a region, and until when. Pure: callers pass `now` and the keys, and do what is
//! returned.
//!
//! ```text
//! Free -> Held{epoch} -> Fenced{epoch} -> Scrubbing{epoch} -> Free
//! ```
//! A lease holds one or more grants: the owner's own, by whose epoch the lease goes, and those of clients
//! that the owner lets in. Each has its own epoch, key and mode, and can be fenced alone; all end with the
//! lease.
//!
//! L1. A region has at most one lease; a lease at most
//!     [`MAX_GRANTS_PER_REGION`](farpool_wire::MAX_GRANTS_PER_REGION) grants.
//! L2. Epochs never repeat and never decrease, across restarts of the node either; each grant raises one. An
//!     incarnation that has used all its epochs lends nothing.
//! L3. Bytes are reused only after every grant of the old lease is fenced, whoever could still store to them
//!     has let go or been left with other memory, and the region is scrubbed: a one-sided write cannot see
//!     that a lease has ended.
//! L4. A lease that ended stays ended, and a grant that was fenced stays fenced: no renewal brings it back,
//!     whether or not its end was noticed in time.
//! L5. A renewal extends a lease, and never shortens it.
//! L6. The holder stops before the node does, with clocks that disagree by [`CLOCK_DRIFT_PERCENT`].
//! L7. What the table is told out of turn changes nothing.
//! L8. A revocation takes nothing back that was promised: the lease lasts its grace, and at least the term
//!     that was last answered; nothing puts the end off. Pinned leases are not revoked.
//! Not here: the clock, randomness, transport, persistence, and which memory a region is.

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
