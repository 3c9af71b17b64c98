//! How the control plane's processes listen, dial and prove who they are: what broker, node and pool share of gRPC.
//!
//! C1. Without TLS nothing leaves the machine: only loopback addresses are listened on or dialled.
//! C2. With TLS both sides prove themselves by a certificate of the pool's own authority.
//! C3. Every connection, request and shutdown is bounded in number and time; what a peer sends before it has
//!     proved to speak HTTP/2 costs one slot for [`PREFACE_DEADLINE`] at most.
//! Not here: the messages, and what they mean.

mod dial;
mod error;
mod guarded;
mod host;
pub mod limits;
mod listener;
pub mod own;
mod tls;

pub use dial::{CONNECT_TIMEOUT, check_address, dial};
pub use error::ControlError;
pub use guarded::PREFACE_DEADLINE;
pub use host::this_host;
pub use listener::{Listener, MAX_CONNECTIONS, REQUEST_TIMEOUT, SHUTDOWN_GRACE};
pub use tls::{SERVER_NAME, Tls};
