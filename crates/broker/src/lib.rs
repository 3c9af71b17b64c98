//! The broker: knows who has room and places leases. The nodes are the truth.
//!
//! B1. Only a node lends a region: the broker never answers with a lease that no node granted.
//! B2. What the broker believes is replaced whole whenever a node reports, and a node reports again whenever
//!     its heartbeat disagrees; nothing here is needed for a lease to go on.
//! B3. A node that dies or stalls costs a request one deadline, and the request goes on with the others.
//! B4. What the store holds only saves time after a restart: it says whom to ask, not what is so.
//! B5. Everything that a peer can make the broker keep, send or wait for is bounded by a named constant.
//! B6. Leases are taken back by their nodes, which choose and which keep the grace; pinned ones never.
//! Not here: data (it never passes the broker), renewals and grants (owners go to their nodes), fences.
//!
//! [`place`], [`Pool`], [`Placing`], [`TakingBack`] and `claims` are pure; `store`, `peers`, `acquire` and
//! `service` are their shell.

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
