//! The fabric: one-sided operations on memory lent by nodes, whatever carries them.
//!
//! A program opens an [`Endpoint`] per thread, a [`Queue`] per node, attaches the regions it has leased, and
//! posts READ, WRITE, compare-and-swap, fetch-and-add and CALL. What a caller may rely on is stated in
//! `docs/src/fabric.md` and tested by [`conformance`] on every transport.
//!
//! - [`Transport`] and [`Link`] are the seam: a transport opens links, a link carries operations. Both are
//!   poll-based and never block, so that a simulated transport fits as well as a network card.
//! - [`Host`] is the other side of the seam: what a node must answer for a transport to serve it.
//! - [`sim`] is a deterministic world: the fabric on a virtual clock, for simulations.
//! - [`block_on`] is the blocking adapter; it alone knows how to wait for a descriptor.
//!
//! Not here: leases and their rules, who places them, what the bytes mean.

mod arena;
mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod copy;
mod descriptors;
mod drive;
mod endpoint;
mod frames;
mod host;
mod memory;
mod negotiate;
mod op;
mod regions;
mod ring;
mod seam;
mod server;
mod shm;
#[cfg(feature = "sim")]
pub mod sim;
mod spin;
mod stamp;
mod tcp;

pub use arena::{ARENA_GRANULE_BYTES, Arena, ArenaBuf, ArenaFull};
pub use clock::{Clock, MonotonicClock};
pub use descriptors::{Descriptor, leaves_room, raise_limit};
pub use drive::block_on;
pub use endpoint::{
    Batch, ChangingWord, Endpoint, EndpointConfig, MAX_BATCH, MAX_IN_FLIGHT, Queue, Running, Transferring,
    Turns,
};
pub use host::{AccessKind, CutOff, Host, HostIdentity, LentMemory, SharedRegion, access_refusal};
pub use memory::{
    AccessError, LargePages, Mapping, Protection, SharedMemory, create_sealed, reopen_read_only,
};
pub use negotiate::{CardTransport, Negotiated, TransportChoice, Transports};
pub use op::{CallAnswer, OpError, Uncertain};
pub use regions::{Locking, RegionSet, Scrubbed};
pub use seam::{Done, Link, LinkClosed, LocalSlice, Op, Outcome, Peer, Posted, Readiness, Transport};
pub use server::{
    Account, Complaint, Complaints, Listeners, Newcomers, Origin, Places, ServerHandle, Sessions, serve,
};
pub use shm::{MAX_SOCKET_PATH_BYTES, ShmTransport};
pub use spin::Spinner;
pub use tcp::TcpTransport;
