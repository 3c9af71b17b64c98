//! How the control plane's processes listen, dial and prove who they are: what broker, node and pool share of
//! gRPC.
//!
//! C1. Without TLS nothing leaves the machine: only loopback addresses are listened on or dialled.
//! C2. With TLS both sides prove themselves by a certificate of the pool's own authority.
//! C3. Connections, requests and shutdowns are bounded in number and time. A peer that has not greeted yet
//!     takes no place of those that have, and makes room for others (`gate`).
//! C4. If two sides cannot talk to each other, both say why in the same words ([`Fault`]).
//! Not here: the messages, and what they mean.

mod ask;
mod dial;
mod error;
mod fault;
mod gate;
mod greeting;
mod host;
pub mod limits;
mod listener;
pub mod own;
mod peer;
mod quiet;
mod refusals;
mod tls;
mod version;
pub mod whereabouts;

pub use ask::ask;
pub use dial::{CONNECT_TIMEOUT, check_address, dial, is_loopback};
pub use error::ControlError;
pub use fault::{CertificateFault, Fault, explain, fault_of};
pub use gate::{GREETING_DEADLINE, MAX_CONNECTIONS, MAX_NEWCOMERS, MAX_PLACES_PER_NETWORK};
pub use host::{host_name, this_host};
pub use listener::{Listener, REQUEST_TIMEOUT, SHUTDOWN_GRACE};
pub use peer::{Identity, Peer};
pub use tls::{SERVER_NAME, Tls};
pub use version::CONTROL_VERSION;
pub use whereabouts::{Located, locate};
