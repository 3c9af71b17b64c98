//! Direct clients (called *guests* in the code): other processes of the owner's host that use its regions
//! without asking it for each operation.
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
mod terms;

pub use line::{GuestTransport, Line};
pub use regions::{GuestRegion, GuestRegions, RequestRegion};
pub use terms::Terms;
