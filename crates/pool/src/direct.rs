//! Direct clients (called *guests* in the code). The *owner* is the process that leases the regions. A direct
//! client is another process on the same host. It uses the owner's regions without asking the owner for each
//! operation.
//!
//! D1. A direct client uses a region only while the owner's table says so ([`Terms`]): the owner holds and
//!     renews the leases.
//! D2. It asks the owner once for each region: for the key, and how to reach the node.
//! D3. It neither leases regions nor gives them back. What it learns about nodes stays in the client.
//!
//! Not here: which processes an owner admits, and what they do with the regions.

mod line;
pub mod packets;
mod regions;
mod server;
mod terms;

pub use line::{GuestTransport, Line};
pub use regions::{GuestRegion, GuestRegions, RequestRegion};
pub use server::{Owner, Server};
pub use terms::Terms;
