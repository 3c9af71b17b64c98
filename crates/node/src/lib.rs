//! A node lends memory of its machine. It reserves regions, serves them, and is the authority on which owner
//! holds them.
//!
//! - [`NodeCore`] decides about leases and regions, and is pure; `core` connects it to the memory, `keeper`
//!   to the clock.
//! - `memory` finds out how much may be lent; `pressure` decides how much of it is given back while the
//!   machine needs it; `identity` keeps the node's id across restarts.
//! - `control` serves owners and the broker, and `register` reports to the broker; the data plane is the
//!   fabric's server.
//!
//! Not here: lease rules (crate `lease`), how bytes travel (crate `fabric`), which owner gets what (crate
//! `broker`).

mod answers;
mod control;
mod core;
mod identity;
mod keeper;
mod lender;
mod lending;
#[cfg(test)]
mod logged;
mod memory;
mod pressure;
mod register;
mod run;
mod socket;

pub use answers::{lease_message, renew_outcome, resize};
pub use control::{ControlService, control_service};
pub use farpool_fabric::Locking;
pub use lender::{FenceError, Lender};
pub use lending::NodeCore;
pub use memory::{available_memory, default_reserve, lockable_memory, memory_to_lend};
pub use pressure::{CALM, LimitChange, Measured, PRESSURE_GRACE, Pressure, STEP_PAUSE};
pub use register::{Registered, Registration};
pub use run::{CardService, LEAST_REGION_BYTES, NodeConfig, NodeError, Ready, run};
