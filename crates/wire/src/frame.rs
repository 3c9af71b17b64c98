//! Frames of the data plane, version 3. `docs/src/wire.md` has the tables.
//!
//! A connection starts with a [`Hello`] and its [`HelloReply`]. Then requests flow one way and responses the
//! other. Each is a fixed header and a payload; `token` matches a response to its request. The same frames
//! run over TCP and over the Unix socket of the `shm` transport. On the Unix socket, clients send only
//! `Attach`, `Detach` and [`Opcode::Look`]: they access the regions themselves, and calls go through a ring
//! in shared memory. A client wakes the node by `Look`, and the node a client by [`ResponseHeader::WAKE`].

use crate::{Epoch, GrantMode, Incarnation, NodeId, SessionId};

/// Version of the frame layout; peers of another version are refused in the handshake.
pub const WIRE_VERSION: u8 = 3;
/// Largest READ or WRITE: the largest request of the kernel to a FUSE file system.
pub const MAX_TRANSFER_BYTES: usize = 1 << 20;
/// Largest message of a CALL, in either direction: calls are small, data moves one-sidedly.
pub const MAX_CALL_BYTES: usize = 64 << 10;
/// Largest payload behind any header.
pub const MAX_PAYLOAD_BYTES: usize = MAX_TRANSFER_BYTES;
/// Length of [`Hello`] and of [`HelloReply`].
pub const HELLO_BYTES: usize = 40;
/// Length of a [`RequestHeader`].
pub const REQUEST_HEADER_BYTES: usize = 40;
/// Length of a [`ResponseHeader`].
pub const RESPONSE_HEADER_BYTES: usize = 24;
/// Length of [`ShmAttached`].
pub const SHM_ATTACHED_BYTES: usize = 32;

/// The call that every node answers, with an empty message. The answer shows that the node is alive.
pub const CALL_PING: &[u8] = b"ping";
/// A call that starts with this is answered with its own message; for measuring calls of any size.
pub const CALL_ECHO: &[u8] = b"echo";

const MAGIC: [u8; 7] = *b"FARPOOL";

/// Bytes that are not a frame of this version. The connection is closed, since the start of the next frame
/// cannot be found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FrameError {
    /// Not a Farpool peer.
    #[error("the peer does not speak the Farpool protocol")]
    Magic,
    /// A peer of another version.
    #[error(
        "the peer speaks protocol version {theirs}, this side {WIRE_VERSION}: run the same release on both"
    )]
    Version {
        /// The peer's version.
        theirs: u8,
    },
    /// An operation this version does not know.
    #[error("unknown operation code {0}")]
    Opcode(u8),
    /// A response status this version does not know.
    #[error("unknown response status {0}")]
    Status(u8),
    /// A payload longer than its operation may have.
    #[error("payload of {bytes} bytes where the operation allows {limit}")]
    Length {
        /// What the header claims.
        bytes: u32,
        /// What the operation allows.
        limit: u32,
    },
    /// Fields that must be zero or equal are not.
    #[error("malformed header")]
    Malformed,
}

/// What a request asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Opcode {
    /// Opens a region for this connection; the payload is the key.
    Attach = 1,
    /// Gives up a region on this connection.
    Detach = 2,
    /// Copies `length` bytes of far memory to the client.
    Read = 3,
    /// Copies the payload to far memory.
    Write = 4,
    /// Payload: expected word, new word.
    CompareAndSwap = 5,
    /// Payload: addend.
    FetchAndAdd = 6,
    /// The payload is a message to the node's processor.
    Call = 7,
    /// Wakes the node: the ring has an entry that came after the node went to sleep. Not answered.
    Look = 8,
}

impl Opcode {
    fn from_u8(code: u8) -> Result<Self, FrameError> {
        Ok(match code {
            1 => Opcode::Attach,
            2 => Opcode::Detach,
            3 => Opcode::Read,
            4 => Opcode::Write,
            5 => Opcode::CompareAndSwap,
            6 => Opcode::FetchAndAdd,
            7 => Opcode::Call,
            8 => Opcode::Look,
            other => return Err(FrameError::Opcode(other)),
        })
    }

    /// Shortest and longest payload of a request.
    const fn payload_bounds(self) -> (u32, u32) {
        match self {
            Opcode::Attach => (16, 16),
            Opcode::Detach | Opcode::Read | Opcode::Look => (0, 0),
            Opcode::Write => (0, MAX_TRANSFER_BYTES as u32),
            Opcode::CompareAndSwap => (16, 16),
            Opcode::FetchAndAdd => (8, 8),
            Opcode::Call => (0, MAX_CALL_BYTES as u32),
        }
    }
}

/// Why a node did not carry out an operation. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[repr(u8)]
pub enum Refusal {
    /// The operation reaches past the region's end.
    #[error("out of the region's bounds")]
    OutOfBounds = 1,
    /// An atomic that is not on an aligned 8-byte word.
    #[error("atomics need an offset that is a multiple of 8")]
    Misaligned = 2,
    /// The node has no such region, this queue never attached it, or the region's memory has moved since:
    /// attach it (again).
    #[error("the region is not attached on this queue")]
    NotAttached = 3,
    /// The key is not that of the grant.
    #[error("wrong access key")]
    WrongKey = 4,
    /// The grant was fenced, its lease ended, or the region was lent again.
    #[error("the lease has ended: acquire a new one")]
    StaleEpoch = 5,
    /// A write through a read-only grant.
    #[error("the grant is read-only")]
    ReadOnly = 6,
    /// Longer than a transfer or a call may be.
    #[error("longer than one operation may be")]
    TooLong = 7,
    /// The node does not know this call.
    #[error("the node does not know this call")]
    UnknownCall = 8,
    /// The node has no descriptor or attachment left, or the client cannot map the region's memory.
    #[error("the node, or this process, has no room for another attachment")]
    Exhausted = 9,
    /// The region's memory is being moved: attach again in a moment.
    #[error("the region's memory is being moved: try again")]
    Busy = 10,
}

impl Refusal {
    /// Its code on the wire, never zero.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The refusal with this code.
    pub fn from_code(code: u8) -> Result<Self, FrameError> {
        Ok(match code {
            1 => Refusal::OutOfBounds,
            2 => Refusal::Misaligned,
            3 => Refusal::NotAttached,
            4 => Refusal::WrongKey,
            5 => Refusal::StaleEpoch,
            6 => Refusal::ReadOnly,
            7 => Refusal::TooLong,
            8 => Refusal::UnknownCall,
            9 => Refusal::Exhausted,
            10 => Refusal::Busy,
            other => return Err(FrameError::Status(other)),
        })
    }
}

/// A value read from bytes that may not all have arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decoded<T> {
    /// The value; it took the type's fixed length.
    Complete(T),
    /// More bytes are needed.
    Incomplete,
}

/// First message of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The same for every connection of one queue.
    pub session: SessionId,
    /// Grows with each connection. Before the node answers, this incarnation supersedes the older ones:
    /// nothing sent on them takes effect any more.
    pub incarnation: Incarnation,
    /// The node that the client wants: another node at a reused address must not answer.
    pub node: NodeId,
}

impl Hello {
    /// The message as sent.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        hello_bytes(self.session.0, self.incarnation.0, self.node.0, 0)
    }

    /// Reads a client's greeting.
    pub fn decode(bytes: &[u8]) -> Result<Decoded<Self>, FrameError> {
        let Some([session, incarnation, node, reserved]) = hello_words(bytes)? else {
            return Ok(Decoded::Incomplete);
        };
        // The highest incarnation is never used, so that a node can always name a later one.
        if reserved != 0 || incarnation == u64::MAX {
            return Err(FrameError::Malformed);
        }
        Ok(Decoded::Complete(Hello {
            session: SessionId(session),
            incarnation: Incarnation(incarnation),
            node: NodeId(node),
        }))
    }
}

/// The node's answer. A client that sees another `node` than it asked for closes the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HelloReply {
    /// The node that answers.
    pub node: NodeId,
    /// The incarnation now in force. If it is not the one asked for, this connection itself is superseded.
    pub incarnation: Incarnation,
    /// Size of each of the node's regions.
    pub region_bytes: u64,
    /// Number of the node's regions.
    pub regions: u64,
}

impl HelloReply {
    /// The message as sent.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        hello_bytes(self.node.0, self.incarnation.0, self.region_bytes, self.regions)
    }

    /// Reads a node's answer.
    pub fn decode(bytes: &[u8]) -> Result<Decoded<Self>, FrameError> {
        Ok(match hello_words(bytes)? {
            None => Decoded::Incomplete,
            Some([node, incarnation, region_bytes, regions]) => Decoded::Complete(HelloReply {
                node: NodeId(node),
                incarnation: Incarnation(incarnation),
                region_bytes,
                regions,
            }),
        })
    }
}

fn hello_bytes(a: u64, b: u64, c: u64, d: u64) -> [u8; HELLO_BYTES] {
    let mut bytes = [0; HELLO_BYTES];
    bytes[..7].copy_from_slice(&MAGIC);
    bytes[7] = WIRE_VERSION;
    for (place, word) in [a, b, c, d].into_iter().enumerate() {
        bytes[8 + 8 * place..16 + 8 * place].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// The four words after magic and version. A wrong magic is detected from the first bytes, before all have
/// arrived.
fn hello_words(bytes: &[u8]) -> Result<Option<[u64; 4]>, FrameError> {
    let magic = bytes.len().min(MAGIC.len());
    if bytes[..magic] != MAGIC[..magic] {
        return Err(FrameError::Magic);
    }
    if let Some(&theirs) = bytes.get(7)
        && theirs != WIRE_VERSION
    {
        return Err(FrameError::Version { theirs });
    }
    if bytes.len() < HELLO_BYTES {
        return Ok(None);
    }
    Ok(Some([8, 16, 24, 32].map(|at| u64_at(bytes, at))))
}

/// The header in front of every request's payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestHeader {
    /// The operation.
    pub opcode: Opcode,
    /// The operation waits until every READ and atomic posted earlier on this queue is done.
    pub fence: bool,
    /// Bytes behind this header.
    pub payload: u32,
    /// The response carries the same token.
    pub token: u64,
    /// The node's region.
    pub region: u32,
    /// READ: bytes to read. CALL: room for the answer. Otherwise zero.
    pub length: u32,
    /// The grant under which the client acts.
    pub epoch: Epoch,
    /// Bytes from the region's start.
    pub offset: u64,
}

impl RequestHeader {
    /// The header as sent.
    pub fn encode(&self) -> [u8; REQUEST_HEADER_BYTES] {
        let mut bytes = [0; REQUEST_HEADER_BYTES];
        bytes[0] = self.opcode as u8;
        bytes[1] = self.fence as u8;
        bytes[4..8].copy_from_slice(&self.payload.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.token.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.region.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.length.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.epoch.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }

    /// Reads a request's header; its payload length is within the operation's bounds.
    pub fn decode(bytes: &[u8]) -> Result<Decoded<Self>, FrameError> {
        if bytes.len() < REQUEST_HEADER_BYTES {
            return Ok(Decoded::Incomplete);
        }
        let opcode = Opcode::from_u8(bytes[0])?;
        if bytes[1] > 1 || bytes[2] != 0 || bytes[3] != 0 {
            return Err(FrameError::Malformed);
        }
        let payload = u32_at(bytes, 4);
        let (least, limit) = opcode.payload_bounds();
        if payload < least || payload > limit {
            return Err(FrameError::Length { bytes: payload, limit });
        }
        Ok(Decoded::Complete(RequestHeader {
            opcode,
            fence: bytes[1] == 1,
            payload,
            token: u64_at(bytes, 8),
            region: u32_at(bytes, 16),
            length: u32_at(bytes, 20),
            epoch: Epoch(u64_at(bytes, 24)),
            offset: u64_at(bytes, 32),
        }))
    }
}

/// The header in front of every response's payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResponseHeader {
    /// Done, or why not.
    pub outcome: Result<(), Refusal>,
    /// Bytes behind this header.
    pub payload: u32,
    /// The request's token.
    pub token: u64,
    /// The word's value before an atomic; zero otherwise.
    pub value: u64,
}

impl ResponseHeader {
    /// Not an answer: it wakes the client, since the ring has an entry that came after it went to sleep.
    pub const WAKE: ResponseHeader =
        ResponseHeader { outcome: Ok(()), payload: 0, token: u64::MAX, value: 0 };

    /// The header as sent.
    pub fn encode(&self) -> [u8; RESPONSE_HEADER_BYTES] {
        let mut bytes = [0; RESPONSE_HEADER_BYTES];
        bytes[0] = self.outcome.err().map_or(0, |refusal| refusal as u8);
        bytes[4..8].copy_from_slice(&self.payload.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.token.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.value.to_le_bytes());
        bytes
    }

    /// Reads a response's header.
    pub fn decode(bytes: &[u8]) -> Result<Decoded<Self>, FrameError> {
        if bytes.len() < RESPONSE_HEADER_BYTES {
            return Ok(Decoded::Incomplete);
        }
        if bytes[1..4] != [0; 3] {
            return Err(FrameError::Malformed);
        }
        let outcome = match bytes[0] {
            0 => Ok(()),
            code => Err(Refusal::from_code(code)?),
        };
        let payload = u32_at(bytes, 4);
        let limit = if outcome.is_ok() { MAX_PAYLOAD_BYTES as u32 } else { 0 };
        if payload > limit {
            return Err(FrameError::Length { bytes: payload, limit });
        }
        Ok(Decoded::Complete(ResponseHeader {
            outcome,
            payload,
            token: u64_at(bytes, 8),
            value: u64_at(bytes, 16),
        }))
    }
}

/// Payload of the answer to `Attach` on the `shm` transport's socket. Two descriptors come with it:
/// the region's memory, and the page of words (read-only).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShmAttached {
    /// Size of the region's memory.
    pub region_bytes: u64,
    /// Offset of the grant's word in the page of words, in bytes.
    pub word_offset: u64,
    /// The value of the word for as long as this memory belongs to the grant.
    pub stamp: u64,
    /// Whether the memory's descriptor allows writing.
    pub mode: GrantMode,
}

impl ShmAttached {
    /// The payload as sent.
    pub fn encode(&self) -> [u8; SHM_ATTACHED_BYTES] {
        let mut bytes = [0; SHM_ATTACHED_BYTES];
        let writable = (self.mode == GrantMode::ReadWrite) as u64;
        for (place, word) in
            [self.region_bytes, self.word_offset, self.stamp, writable].into_iter().enumerate()
        {
            bytes[8 * place..8 * place + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads the payload.
    pub fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        if bytes.len() != SHM_ATTACHED_BYTES {
            return Err(FrameError::Malformed);
        }
        let mode = match u64_at(bytes, 24) {
            0 => GrantMode::ReadOnly,
            1 => GrantMode::ReadWrite,
            _ => return Err(FrameError::Malformed),
        };
        Ok(ShmAttached {
            region_bytes: u64_at(bytes, 0),
            word_offset: u64_at(bytes, 8),
            stamp: u64_at(bytes, 16),
            mode,
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn a_request() -> RequestHeader {
        RequestHeader {
            opcode: Opcode::Write,
            fence: true,
            payload: 8192,
            token: 0x0102_0304_0506_0708,
            region: 9,
            length: 0,
            epoch: Epoch::new(2, 3),
            offset: 0x10_0000,
        }
    }

    #[test]
    fn layout_of_the_request_header_is_fixed() {
        #[rustfmt::skip]
        let golden = [
            4, 1, 0, 0,              0x00, 0x20, 0, 0,
            8, 7, 6, 5, 4, 3, 2, 1,
            9, 0, 0, 0,              0, 0, 0, 0,
            3, 0, 0, 0, 2, 0, 0, 0,
            0, 0, 0x10, 0, 0, 0, 0, 0,
        ];
        assert_eq!(a_request().encode(), golden);
        assert_eq!(RequestHeader::decode(&golden), Ok(Decoded::Complete(a_request())));
    }

    #[test]
    fn layout_of_the_response_header_is_fixed() {
        let response =
            ResponseHeader { outcome: Err(Refusal::StaleEpoch), payload: 0, token: 0x11, value: 0x22 };
        let golden = [5, 0, 0, 0, 0, 0, 0, 0, 0x11, 0, 0, 0, 0, 0, 0, 0, 0x22, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(response.encode(), golden);
        assert_eq!(ResponseHeader::decode(&golden), Ok(Decoded::Complete(response)));
    }

    #[test]
    fn layout_of_the_greeting_is_fixed() {
        let hello = Hello { session: SessionId(1), incarnation: Incarnation(2), node: NodeId(3) };
        let mut golden = *b"FARPOOL\x03........................\0\0\0\0\0\0\0\0";
        for (place, word) in [1u64, 2, 3].into_iter().enumerate() {
            golden[8 + 8 * place..16 + 8 * place].copy_from_slice(&word.to_le_bytes());
        }
        assert_eq!(hello.encode(), golden);
        assert_eq!(Hello::decode(&golden), Ok(Decoded::Complete(hello)));
    }

    #[test]
    fn layout_of_the_shm_attachment_is_fixed() {
        let attached = ShmAttached {
            region_bytes: 64 << 20,
            word_offset: 24,
            stamp: 0x0102,
            mode: GrantMode::ReadWrite,
        };
        #[rustfmt::skip]
        let mut golden = [
            0, 0, 0, 4, 0, 0, 0, 0,  24, 0, 0, 0, 0, 0, 0, 0,
            2, 1, 0, 0, 0, 0, 0, 0,  1, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(attached.encode(), golden);
        assert_eq!(ShmAttached::decode(&golden), Ok(attached));
        assert_eq!(ShmAttached::decode(&golden[1..]), Err(FrameError::Malformed));
        golden[24] = 0;
        assert_eq!(ShmAttached::decode(&golden).map(|attached| attached.mode), Ok(GrantMode::ReadOnly));
        golden[24] = 2;
        assert_eq!(ShmAttached::decode(&golden), Err(FrameError::Malformed));
    }

    #[test]
    fn another_version_is_distinguished_from_another_protocol() {
        let mut bytes =
            Hello { session: SessionId(1), incarnation: Incarnation(1), node: NodeId(1) }.encode();
        bytes[7] = 9;
        assert_eq!(Hello::decode(&bytes), Err(FrameError::Version { theirs: 9 }));
        assert_eq!(Hello::decode(b"GET / HTTP/1.1"), Err(FrameError::Magic));
        assert_eq!(Hello::decode(b"G"), Err(FrameError::Magic));
        assert_eq!(Hello::decode(b"FARP"), Ok(Decoded::Incomplete));
    }

    #[test]
    fn the_last_incarnation_is_refused_since_none_could_follow() {
        let hello = Hello { session: SessionId(1), incarnation: Incarnation(u64::MAX), node: NodeId(1) };
        assert_eq!(Hello::decode(&hello.encode()), Err(FrameError::Malformed));
    }

    #[test]
    fn payloads_past_the_limit_are_errors() {
        let mut header = a_request();
        header.payload = MAX_TRANSFER_BYTES as u32 + 1;
        assert!(matches!(RequestHeader::decode(&header.encode()), Err(FrameError::Length { .. })));
        header.opcode = Opcode::Attach;
        header.payload = 15;
        assert!(matches!(RequestHeader::decode(&header.encode()), Err(FrameError::Length { .. })));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Hello::decode(&bytes);
            let _ = HelloReply::decode(&bytes);
            let _ = RequestHeader::decode(&bytes);
            let _ = ResponseHeader::decode(&bytes);
            let _ = ShmAttached::decode(&bytes);
        }

        #[test]
        fn decoded_frames_encode_to_the_same_bytes(mut bytes: [u8; REQUEST_HEADER_BYTES], code in 0u8..10) {
            bytes[0] = code;
            bytes[1..4].fill(0);
            bytes[6..8].fill(0);
            if let Ok(Decoded::Complete(header)) = RequestHeader::decode(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }

        #[test]
        fn responses_survive_encoding(status in 0u8..11, payload in 0u32..1 << 20, token: u64, value: u64) {
            let outcome = if status == 0 { Ok(()) } else { Err(Refusal::from_code(status).unwrap()) };
            let payload = if status == 0 { payload } else { 0 };
            let header = ResponseHeader { outcome, payload, token, value };
            prop_assert_eq!(ResponseHeader::decode(&header.encode()), Ok(Decoded::Complete(header)));
        }
    }
}
