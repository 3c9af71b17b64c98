//! How the processes of the control plane listen, connect and authenticate: the use of gRPC that broker, node
//! and pool share.
//!
//! C1. Without TLS, nothing leaves the machine: processes listen on and dial loopback addresses only.
//! C2. With TLS, both sides prove by a certificate of the pool's own authority that they belong to the pool.
//! C3. Connections, requests and shutdowns are bounded in number and time. A peer that has not greeted yet
//!     takes no place from those that have, and may be closed to make room for others (`gate`).
//! C4. If two sides cannot talk to each other, both report the reason in the same words ([`Fault`]).
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
