//! The client's side of the pool: it holds and renews leases, hands out extents, and reaches them through
//! sessions.
//!
//! P1. An extent belongs to one taker at a time. It is reused only after the taker has dropped it, and with
//!     it every operation on it.
//! P2. A lease is used only while it runs by this process's own clock, with a margin (crate `lease`).
//! P3. A node that does not answer within [`NODE_DEADLINE`] is given up once, for all sessions. What lay
//!     there is lost at once and for ever, and costs no second wait. A node that only refuses connections is
//!     not given up while it answers renewals: operations use the connections that exist, or wait.
//! P4. Regions that are empty go back to the pool after a short while.
//! P5. A region that is being taken back gets nothing new, and goes back as soon as it is empty.
//! P6. A process can write down what it holds as that changes. If it is killed, a later process can take all
//!     of that over.
//!
//! The rules are pure ([`Holder`], [`Growth`], `space`, crate `lease`). [`Stock`] applies them to what a
//! process holds, and [`SessionCore`] reaches that. Both are given their clock and endpoints, so simulations
//! run them unchanged. [`Pool`] is the shell that does real I/O: `keeper` talks to the broker and the nodes,
//! `sharing` lets other clients in, `watch` checks that the nodes live, and [`Session`] is the blocking
//! interface.
//! Not here: what extents are used for.

mod adoption;
mod blocking;
mod borrowing;
mod error;
mod giving_up;
mod growth;
mod holder;
mod joint;
mod keeper;
mod keeping;
mod pool;
mod region;
mod session;
mod sharing;
mod space;
mod stock;
mod watch;

pub use adoption::Adoption;
pub use error::{AccessError, GrantError, JointError, NoSpace, PoolError};
pub use giving_up::{Heard, Sign, is_given_up};
pub use growth::Growth;
pub use holder::{Acquired, Change, ClientGrant, GrowthOutcome, HeldLease, Holder, Renewal};
pub use joint::{JointKeys, JointLeases};
pub use pool::{Pool, PoolConfig};
pub use region::{LeasedRegion, NodeState};
pub use session::{Session, SessionCore, SessionGuard};
pub use sharing::FENCE_DEADLINE;
pub use space::{EXTENT_BYTES, Extent, Where};
pub use stock::{Capacity, LeaseKeeper, NumberedRegion, Reach, RetryPolicy, Stock, StockConfig};
pub use watch::watch_nodes;

use std::time::Duration;

/// A node that does not answer for this long is given up. This is longer than a healthy node on a busy
/// machine waits for its processor, and shorter than what a user takes for a hang.
pub const NODE_DEADLINE: Duration = Duration::from_secs(5);
