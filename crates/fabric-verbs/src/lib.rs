//! The fabric over RDMA network cards. The cards alone carry out READ, WRITE and, where they can, CAS and
//! FAA; `call` uses SEND and RECV.
//!
//! rdma-core is loaded at run time (`libibverbs.so.1`, `librdmacm.so.1`): a binary with this crate starts
//! without it, and [`VerbsTransport::new`] then says what to install. `docs/src/verbs.md` has the messages
//! and the reasoning.
//!
//! - [`VerbsTransport`] is the client's side: one completion queue per transport and device, so one per
//!   thread.
//! - [`serve_verbs`] is the node's side: it opens a [`farpool_fabric::Host`]'s memory to clients through the
//!   card, with one queue pair per client.
//! - [`diagnose`] looks for the usual faults of a set-up.
//!
//! Not here: which client may use which region (the host decides), and what the bytes mean.

mod client;
mod cm;
mod completion;
mod device;
mod diagnose;
mod error;
#[allow(missing_docs)] // the names are those of rdma-core's headers, and so is their documentation
mod ffi;
mod library;
mod memory;
mod server;

pub use client::{Counters, VerbsConfig, VerbsTransport};
pub use device::device_addresses;
pub use diagnose::{Finding, Level, diagnose};
pub use error::VerbsError;
pub use server::{ServeOptions, VerbsServer, serve_verbs};

use farpool_wire::{MAX_CALL_BYTES, REQUEST_HEADER_BYTES, RESPONSE_HEADER_BYTES};

/// Most messages of one connection that wait for their answer. The node has a buffer ready for each, so a
/// message never arrives without one. Four are enough to hide a message's latency; bulk data is not sent in
/// messages.
const MESSAGES_IN_FLIGHT: usize = 4;
/// Longest request: a call.
const REQUEST_BYTES: usize = REQUEST_HEADER_BYTES + MAX_CALL_BYTES;
/// Longest answer: that of a call.
const ANSWER_BYTES: usize = RESPONSE_HEADER_BYTES + MAX_CALL_BYTES;
/// Payloads up to this size travel in the work request itself, which saves the card a read. Cards accept 64
/// to 1,024 bytes; a larger limit makes every slot of the send queue larger.
const INLINE_BYTES: u32 = 128;
