//! The client's side of the pool: it holds and renews leases, hands out extents, and reaches them through
//! sessions.
//!
//! P1. An extent has one holder at a time. It is reused only after its holder has dropped it, and after every
//!     operation on it has dropped it.
//! P2. A lease is used only while it runs by this process's own clock, with a margin (crate `lease`).
//! P3. A node that does not answer within [`NODE_DEADLINE`] is given up once, for all sessions. Its data are
//!     lost at once and for ever, and no later operation waits for it again. A node that only refuses
//!     connections is not given up while it answers renewals: operations use existing connections, or wait.
//! P4. Regions that are empty go back to the pool after a short while.
//! P5. No extents are taken in a region that is being taken back, and it goes back as soon as it is empty.
//! P6. What the pool has no room for can lie in a local directory (`overflow`), until there is room.
//! P7. A process can record in a journal what it holds. If the process is killed, a later one can take all of
//!     that over.
//!
//! The rules are pure ([`Holder`], [`Growth`], `space`, crate `lease`). [`Stock`] applies them to what a
//! process holds, and [`SessionCore`] reads and writes the extents. Callers pass both their clock and
//! endpoints, so simulations run them unchanged. [`Pool`] is the shell that does real I/O: `keeper` talks to
//! the broker and the nodes, `sharing` admits other clients, `watch` checks that the nodes live, and
//! [`Session`] is the blocking interface. [`direct`] is for other processes of the host that use the regions.
//! Not here: what extents are used for.

mod adoption;
mod blocking;
mod borrowing;
pub mod direct;
mod error;
mod giving_up;
mod growth;
mod holder;
mod joint;
mod keeper;
mod keeping;
mod overflow;
mod pool;
mod region;
mod session;
mod sharing;
mod space;
mod stock;
mod timed_mutex;
mod watch;

pub use adoption::Adoption;
pub use error::{AccessError, GrantError, JointError, NoSpace, OverflowError, PoolError};
pub use giving_up::{Heard, Sign, is_given_up};
pub use growth::Growth;
pub use holder::{Acquired, Change, ClientGrant, GrowthOutcome, HeldLease, Holder, Renewal};
pub use joint::{JointKeys, JointLeases};
pub use keeping::kept_regions;
pub use overflow::{OVERFLOW_NODE, Overflow, OverflowRegion, SharedFile};
pub use pool::{KeptState, OverflowConfig, Pool, PoolConfig};
pub use region::{LeasedRegion, NodeState};
pub use session::{Session, SessionCore, SessionGuard};
pub use sharing::FENCE_DEADLINE;
pub use space::{EXTENT_BYTES, Extent, Where};
pub use stock::{Capacity, LeaseKeeper, NumberedRegion, Reach, RetryPolicy, Stock, StockConfig};
pub use watch::watch_nodes;

use std::time::Duration;

/// A node that does not answer for this long is given up. The time is longer than a healthy node on a busy
/// machine waits for a processor, and shorter than a user waits before taking a program for hung.
pub const NODE_DEADLINE: Duration = Duration::from_secs(5);
