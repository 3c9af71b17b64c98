//! A node lends memory of its machine: it reserves regions, serves them, and keeps the truth about who holds
//! them.
//!
//! - [`NodeCore`] decides about leases and regions, pure; `core` joins it with the memory, `keeper` with the
//!   time.
//! - `memory` tells how much may be lent; `identity` survives restarts.
//! - `control` and `register` are the shells towards owners and the broker; the data plane is the fabric's
//!   server.
//!
//! Not here: lease rules (crate `lease`), how bytes travel (crate `fabric`), which owner gets what (crate
//! `broker`).

mod control;
mod core;
mod identity;
mod keeper;
mod lender;
mod lending;
mod memory;
mod register;
mod run;
mod socket;

pub use control::{ControlService, control_service};
pub use farpool_fabric::Locking;
pub use lender::{FenceError, Lender};
pub use lending::{NodeCore, lease_message, renew_outcome};
pub use memory::{available_memory, lockable_memory, memory_to_lend};
pub use register::{Registered, Registration};
pub use run::{CardService, LEAST_REGION_BYTES, NodeConfig, NodeError, Ready, run};
