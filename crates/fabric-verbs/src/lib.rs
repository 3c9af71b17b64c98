//! The fabric over RDMA network cards: READ, WRITE, CAS and FAA done by the cards alone, `call` by SEND and
//! RECV.
//!
//! rdma-core is loaded at run time (`libibverbs.so.1`, `librdmacm.so.1`): a binary with this crate starts
//! without it, and [`VerbsTransport::new`] then says what to install. `docs/src/verbs.md` has the messages
//! and the reasoning.
//!
//! - [`VerbsTransport`] is the client's side: one completion queue per transport, so per endpoint and thread.
//! - [`serve_verbs`] is the node's: it lends a [`farpool_fabric::Host`]'s memory to its card, one queue pair
//!   per client.
//! - [`diagnose`] looks for the usual faults of a set-up.
//!
//! Not here: who may have which region (the host), and what the bytes mean.

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

/// Messages of one connection that may await their answer: the node keeps a buffer ready for each, so none is
/// ever turned away for want of one. Four hide a message's way; bulk data does not go by message.
const MESSAGES_IN_FLIGHT: usize = 4;
/// Longest request: a call.
const REQUEST_BYTES: usize = REQUEST_HEADER_BYTES + MAX_CALL_BYTES;
/// Longest answer: that of a call.
const ANSWER_BYTES: usize = RESPONSE_HEADER_BYTES + MAX_CALL_BYTES;
/// Smaller payloads travel in the work request itself, which saves the card a read. Cards take 64 to 1,024
/// bytes; longer inline requests make every slot of the send queue longer.
const INLINE_BYTES: u32 = 128;
