//! The client's side of the pool: leases held and renewed, extents handed out, sessions that reach them.
//!
//! P1. An extent belongs to one taker at a time, and is reused only after the taker has dropped it and with
//!     it every operation on it.
//! P2. A lease is used only while it is held by this process's own clock, with a margin (crate `lease`).
//! P3. A node that does not answer within [`NODE_DEADLINE`] is given up once, for all sessions: what lay
//!     there is lost at once and for ever, and costs no second wait. A node that only refuses connections is
//!     not given up while it answers renewals: operations use the connections that exist, or wait.
//! P4. Regions that are empty go back to the pool after a short while.
//! P5. A region that is being taken back gets nothing new, and goes back as soon as it is empty.
//! P6. What is held can be written down as it changes, and taken over by a later process if this one is
//!     killed.
//!
//! The rules are pure ([`Holder`], [`Growth`], `space`, crate `lease`). [`Stock`] joins them to what a
//! process holds, and [`SessionCore`] reaches it, over a clock and endpoints that are given: so both run in
//! simulations as they are. [`Pool`] is the shell of the real thing: `keeper` talks to the broker and the
//! nodes, `sharing` lets other clients in, `watch` looks after the nodes' lives, [`Session`] is the blocking
//! edge. Not here: what extents are used for.

mod adoption;
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
pub use stock::{Capacity, LeaseKeeper, NumberedRegion, Reach, Stock, StockConfig, Trouble};
pub use watch::watch_nodes;

use std::time::Duration;

/// A node that is silent for so long is given up. Above what a busy machine makes a healthy node wait for its
/// processor, below what a user takes for a hang.
pub const NODE_DEADLINE: Duration = Duration::from_secs(5);
