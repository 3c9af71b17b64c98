//! A node lends memory of its machine: it reserves regions, serves them, and keeps the truth about who holds them.
//!
//! - `core` joins the lease table with the memory; `memory` tells how much may be lent; `identity` survives restarts.
//! - `control` and `register` are the shells towards owners and the broker; the data plane is the fabric's server.
//!
//! Not here: lease rules (crate `lease`), how bytes travel (crate `fabric`), which owner gets what (crate `broker`).

mod control;
mod core;
mod identity;
mod lender;
mod memory;
mod register;
mod run;

pub use control::{ControlService, control_service};
pub use lender::Lender;
pub use memory::{available_memory, lockable_memory, memory_to_lend};
pub use register::Registration;
pub use run::{CardService, LEAST_REGION_BYTES, NodeConfig, NodeError, Ready, run};
