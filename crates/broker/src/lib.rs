//! The broker knows which nodes have room, and places leases. The nodes are the authority on leases.
//!
//! B1. Only a node lends a region: the broker never answers with a lease that no node granted.
//! B2. A node's report replaces everything that the broker has recorded of the node. A node reports again
//!     whenever its heartbeat disagrees with that. No lease depends on the broker's records.
//! B3. A node that dies or stalls costs a request one deadline, and the request goes on with the others.
//! B4. The store only saves time after a restart: it says which nodes to ask, not what they have lent.
//! B5. Everything that a peer can make the broker store, send or wait for is bounded by a named constant.
//! B6. Nodes take leases back: a node chooses which ones, and it observes the grace period. Pinned leases are
//!     never taken back.
//! B7. The broker asks for leases of an owner on one node at a time. It asks no second node while leases of
//!     this owner are being taken back on a first one, on request or because that node's machine needs memory,
//!     or while it is unknown whether they are. Members of a row (mirror, parity) lie on different nodes, so
//!     an owner with room elsewhere loses no two of a row. (Two nodes whose machines need memory do not ask
//!     the broker.)
//! Not here: data (it never passes the broker), renewals and grants (owners go to their nodes), fences.
//!
//! [`place`], [`Pool`], [`Placing`], [`TakingBack`] and `claims` are pure; `store`, `peers`, `acquire` and
//! `service` do the I/O for them.

mod acquire;
mod claims;
mod peers;
mod placement;
mod placing;
mod server;
mod service;
mod state;
mod store;

pub use claims::MAX_OWNERS_PER_IDENTITY;
pub use placement::{Candidate, place};
pub use placing::{Placing, TakingBack, Wish, are_sound};
pub use server::{BrokerConfig, BrokerError, run};
pub use state::{
    DEAD_AFTER, FORGET_AFTER, HEARTBEAT_INTERVAL, MAX_NODES, Pool, ReportRefusal, SHUN_AFTER_FAILURE,
};
pub use store::StoreError;
