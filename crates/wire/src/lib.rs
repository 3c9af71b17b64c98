//! Layouts of everything that processes send to each other or share in memory: ids, epochs and keys; frames
//! of the data plane; messages of the control plane; the words of file blocks and of records.
//!
//! W1. Decoding never panics: malformed bytes give a [`FrameError`].
//! W2. Every layout is little-endian, versioned and pinned by a golden test; `docs/src/wire.md` describes it.
//! W3. Keys are compared in constant time and never printed.
//! Not here: sockets, files, clocks, randomness.

mod block;
pub mod control;
mod frame;
mod grant;
mod ids;
mod record;
mod register;
mod verbs;

pub use block::{BLOCK_BYTES, BlockWord};

pub use frame::{
    CALL_ECHO, CALL_PING, Decoded, FrameError, HELLO_BYTES, Hello, HelloReply, MAX_CALL_BYTES,
    MAX_PAYLOAD_BYTES, MAX_TRANSFER_BYTES, Opcode, REQUEST_HEADER_BYTES, RESPONSE_HEADER_BYTES, Refusal,
    RequestHeader, ResponseHeader, SHM_ATTACHED_BYTES, ShmAttached, WIRE_VERSION,
};
pub use grant::{GrantMode, MAX_GRANTS_PER_REGION};
pub use ids::{AccessKey, Epoch, Incarnation, NodeId, OwnerId, RegionId, RemoteAddr, SessionId};
pub use record::{RecordHeader, Slot, Version, next_generation};
pub use register::{GUEST_VERSION, REGISTER, Registered, TICKET_BYTES, UNREGISTER};
pub use verbs::{VERBS_ATTACHED_BYTES, VERBS_WELCOME_BYTES, VerbsAttached, VerbsWelcome};
