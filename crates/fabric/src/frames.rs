//! The client's side of a framed connection: pipelined requests out, responses in (`docs/wire.md`).
//!
//! F1. Requests leave in the order posted; payloads leave from the caller's buffer without a copy.
//! F2. A response's payload goes only to the buffer of the operation it answers, and only as many bytes as
//!     that operation asked for; anything else from the peer closes the connection.
//! F3. Nothing touches a buffer after the connection value is dropped.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use farpool_wire::{
    AccessKey, Decoded, HELLO_BYTES, Hello, HelloReply, Opcode, REQUEST_HEADER_BYTES, RESPONSE_HEADER_BYTES,
    RequestHeader, ResponseHeader, SHM_ATTACHED_BYTES, ShmAttached,
};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags};

use crate::op::Uncertain;
use crate::seam::{LinkClosed, LocalSlice, Op, Outcome, Posted};

/// Received bytes not yet looked at: several small responses, or the head of a large one.
const RECEIVE_BUFFER_BYTES: usize = 32 << 10;
/// Payload remainders of at least this length are received straight into their buffer.
const DIRECT_RECEIVE_BYTES: usize = 4 << 10;
/// Pieces handed to the kernel in one call.
const SEND_PIECES: usize = 64;
/// Longest inline part of a request: its header and the operands of a compare-and-swap or a key.
const INLINE_BYTES: usize = REQUEST_HEADER_BYTES + AccessKey::BYTES;
/// Most descriptors that come with one message.
const DESCRIPTORS: usize = 2;

/// A finished operation of a framed connection.
pub(crate) struct FrameDone {
    pub slot: u32,
    pub outcome: Outcome,
    /// Present for an `Attach` on a connection that passes descriptors.
    pub shared: Option<(ShmAttached, OwnedFd, OwnedFd)>,
}

/// The client's side of a connection that carries frames.
pub(crate) struct FrameClient {
    stream: OwnedFd,
    hello: Hello,
    greeted: bool,
    passes_descriptors: bool,
    sending: VecDeque<Segment>,
    /// Operations that await a response, by slot; slots are few and dense.
    awaiting: Vec<Option<Awaiting>>,
    unanswered: usize,
    received: Box<[u8]>,
    /// `received[consumed..filled]` has come and was not yet looked at.
    consumed: usize,
    filled: usize,
    /// A response whose payload has not all come.
    incoming: Option<Incoming>,
    descriptors: VecDeque<OwnedFd>,
}

/// Part of the outgoing stream: a header with what fits inline, then a payload in the caller's buffer.
struct Segment {
    /// The operation; none for the greeting.
    slot: Option<u32>,
    inline: [u8; INLINE_BYTES],
    inline_bytes: usize,
    payload: LocalSlice,
    sent: usize,
}

struct Awaiting {
    kind: Answer,
    local: LocalSlice,
}

/// What the payload of a successful response is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// None at all.
    Empty,
    /// Exactly the operation's buffer.
    Fill,
    /// At most the operation's buffer.
    Message,
    /// A [`ShmAttached`].
    Attachment,
}

struct Incoming {
    header: ResponseHeader,
    slot: u32,
    awaiting: Awaiting,
    got: usize,
    attachment: [u8; SHM_ATTACHED_BYTES],
}

impl FrameClient {
    /// Takes a non-blocking stream that is connected or connecting; queues the greeting.
    pub(crate) fn new(stream: OwnedFd, hello: Hello, passes_descriptors: bool) -> Self {
        let mut greeting = Segment {
            slot: None,
            inline: [0; INLINE_BYTES],
            inline_bytes: HELLO_BYTES,
            payload: LocalSlice::NONE,
            sent: 0,
        };
        greeting.inline[..HELLO_BYTES].copy_from_slice(&hello.encode());
        FrameClient {
            stream,
            hello,
            greeted: false,
            passes_descriptors,
            sending: VecDeque::from([greeting]),
            awaiting: Vec::new(),
            unanswered: 0,
            received: vec![0; RECEIVE_BUFFER_BYTES].into_boxed_slice(),
            consumed: 0,
            filled: 0,
            incoming: None,
            descriptors: VecDeque::new(),
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    pub(crate) fn wants_to_send(&self) -> bool {
        !self.sending.is_empty()
    }

    /// Queues a request; [`FrameClient::poll`] sends it.
    pub(crate) fn post(&mut self, posted: &Posted) {
        let (opcode, kind, operands, payload) = match posted.op {
            Op::Attach(key) => {
                let kind = if self.passes_descriptors { Answer::Attachment } else { Answer::Empty };
                (Opcode::Attach, kind, Some(*key.as_bytes()), LocalSlice::NONE)
            }
            Op::Detach => (Opcode::Detach, Answer::Empty, None, LocalSlice::NONE),
            Op::Read => (Opcode::Read, Answer::Fill, None, LocalSlice::NONE),
            Op::Write => (Opcode::Write, Answer::Empty, None, posted.local),
            Op::CompareAndSwap { expected, new } => {
                let mut words = [0; 16];
                words[..8].copy_from_slice(&expected.to_le_bytes());
                words[8..].copy_from_slice(&new.to_le_bytes());
                (Opcode::CompareAndSwap, Answer::Empty, Some(words), LocalSlice::NONE)
            }
            Op::FetchAndAdd { addend } => {
                let mut words = [0; 16];
                words[..8].copy_from_slice(&addend.to_le_bytes());
                (Opcode::FetchAndAdd, Answer::Empty, Some(words), LocalSlice::NONE)
            }
            Op::Call { request } => {
                let message = LocalSlice { start: posted.local.start, bytes: request };
                (Opcode::Call, Answer::Message, None, message)
            }
        };
        let operand_bytes = match opcode {
            Opcode::FetchAndAdd => 8,
            _ if operands.is_some() => 16,
            _ => 0,
        };
        let header = RequestHeader {
            opcode,
            fence: posted.fence,
            payload: (operand_bytes + payload.bytes) as u32,
            token: posted.slot as u64,
            region: posted.region,
            length: if opcode == Opcode::Read { posted.local.bytes as u32 } else { 0 },
            epoch: posted.epoch,
            offset: posted.offset,
        };
        let mut inline = [0; INLINE_BYTES];
        inline[..REQUEST_HEADER_BYTES].copy_from_slice(&header.encode());
        let words = operands.unwrap_or_default();
        inline[REQUEST_HEADER_BYTES..REQUEST_HEADER_BYTES + operand_bytes]
            .copy_from_slice(&words[..operand_bytes]);
        let inline_bytes = REQUEST_HEADER_BYTES + operand_bytes;
        self.sending.push_back(Segment { slot: Some(posted.slot), inline, inline_bytes, payload, sent: 0 });
        let slot = posted.slot as usize;
        if slot >= self.awaiting.len() {
            self.awaiting.resize_with(slot + 1, || None);
        }
        self.awaiting[slot] = Some(Awaiting { kind, local: posted.local });
        self.unanswered += 1;
    }

    /// Sends what can be sent, receives what has come, and moves finished operations to `done`.
    pub(crate) fn poll(&mut self, done: &mut Vec<FrameDone>) -> Result<(), LinkClosed> {
        self.send()?;
        while self.unanswered > 0 && self.receive()? {
            self.digest(done)?;
        }
        Ok(())
    }

    fn send(&mut self) -> Result<(), LinkClosed> {
        while !self.sending.is_empty() {
            let mut pieces = [IoSlice::new(&[]); SEND_PIECES];
            let mut count = 0;
            for segment in &self.sending {
                if count + 2 > SEND_PIECES {
                    break;
                }
                for piece in segment.rest() {
                    if !piece.is_empty() {
                        pieces[count] = IoSlice::new(piece);
                        count += 1;
                    }
                }
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let sent = rustix::net::sendmsg(
                &self.stream,
                &pieces[..count],
                &mut SendAncillaryBuffer::default(),
                flags,
            );
            match sent {
                Ok(bytes) => self.sent(bytes),
                // ENOTCONN: the connection is still being made.
                Err(Errno::AGAIN | Errno::INTR | Errno::NOTCONN | Errno::INPROGRESS) => return Ok(()),
                Err(_) => return Err(LinkClosed { cause: Uncertain::ConnectionLost }),
            }
        }
        Ok(())
    }

    fn sent(&mut self, mut bytes: usize) {
        while bytes > 0 {
            let segment = self.sending.front_mut().expect("no more was sent than was queued");
            let rest = segment.inline_bytes + segment.payload.bytes - segment.sent;
            if bytes < rest {
                segment.sent += bytes;
                return;
            }
            bytes -= rest;
            self.sending.pop_front();
        }
    }

    /// Receives once; true when something came.
    fn receive(&mut self) -> Result<bool, LinkClosed> {
        self.received.copy_within(self.consumed..self.filled, 0);
        self.filled -= self.consumed;
        self.consumed = 0;
        let result = match self.incoming.as_mut() {
            Some(incoming) if self.filled == 0 && incoming.direct_rest() >= DIRECT_RECEIVE_BYTES => {
                let rest = incoming.direct_rest();
                // SAFETY: in bounds: `got + rest` is at most the buffer's length, checked when the header came.
                // Exclusive and alive: the operation in flight owns the buffer until it completes or this
                // connection is dropped. Only initialised bytes are ever seen: the arena is zeroed at first.
                let target = unsafe {
                    std::slice::from_raw_parts_mut(incoming.awaiting.local.start.add(incoming.got), rest)
                };
                rustix::net::recv(&self.stream, target, RecvFlags::DONTWAIT).map(|(_, bytes)| {
                    incoming.got += bytes;
                    bytes
                })
            }
            _ => self.receive_buffered(),
        };
        match result {
            Ok(0) => Err(LinkClosed { cause: Uncertain::ConnectionLost }),
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR | Errno::NOTCONN) => Ok(false),
            Err(_) => Err(LinkClosed { cause: Uncertain::ConnectionLost }),
        }
    }

    fn receive_buffered(&mut self) -> Result<usize, Errno> {
        let room = &mut self.received[self.filled..];
        let result = if self.passes_descriptors {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            rustix::net::recvmsg(&self.stream, &mut [IoSliceMut::new(room)], &mut ancillary, flags).map(
                |message| {
                    for control in ancillary.drain() {
                        if let RecvAncillaryMessage::ScmRights(descriptors) = control {
                            self.descriptors.extend(descriptors);
                        }
                    }
                    message.bytes
                },
            )
        } else {
            rustix::net::recv(&self.stream, room, RecvFlags::DONTWAIT).map(|(_, bytes)| bytes)
        };
        self.filled += *result.as_ref().unwrap_or(&0);
        result
    }

    /// Looks at what has come.
    fn digest(&mut self, done: &mut Vec<FrameDone>) -> Result<(), LinkClosed> {
        if !self.greeted && !self.digest_greeting()? {
            return Ok(());
        }
        loop {
            if self.incoming.is_none() && !self.digest_header()? {
                return Ok(());
            }
            let unread = &self.received[self.consumed..self.filled];
            let incoming = self.incoming.as_mut().expect("set above");
            self.consumed += incoming.fill(unread);
            if incoming.got < incoming.header.payload as usize {
                return Ok(());
            }
            let incoming = self.incoming.take().expect("set above");
            done.push(self.finish(incoming)?);
        }
    }

    /// True once the node has answered the greeting as it should.
    fn digest_greeting(&mut self) -> Result<bool, LinkClosed> {
        match HelloReply::decode(&self.received[self.consumed..self.filled]) {
            Ok(Decoded::Incomplete) => Ok(false),
            Ok(Decoded::Complete(reply))
                if reply.node == self.hello.node && reply.incarnation == self.hello.incarnation =>
            {
                self.consumed += HELLO_BYTES;
                self.greeted = true;
                Ok(true)
            }
            Ok(Decoded::Complete(reply)) => {
                tracing::warn!(wanted = %self.hello.node, found = %reply.node, "another node or a newer incarnation answered");
                Err(LinkClosed { cause: Uncertain::Protocol })
            }
            Err(error) => {
                tracing::warn!(node = %self.hello.node, %error, "malformed greeting");
                Err(LinkClosed { cause: Uncertain::Protocol })
            }
        }
    }

    /// True once a whole header is there; it is then checked against the operation it answers.
    fn digest_header(&mut self) -> Result<bool, LinkClosed> {
        let broken = LinkClosed { cause: Uncertain::Protocol };
        let header = match ResponseHeader::decode(&self.received[self.consumed..self.filled]) {
            Ok(Decoded::Incomplete) => return Ok(false),
            Ok(Decoded::Complete(header)) => header,
            Err(error) => {
                tracing::warn!(node = %self.hello.node, %error, "malformed response");
                return Err(broken);
            }
        };
        self.consumed += RESPONSE_HEADER_BYTES;
        let slot = u32::try_from(header.token).map_err(|_| broken)?;
        let awaiting = self.awaiting.get_mut(slot as usize).and_then(Option::take).ok_or(broken)?;
        if self.sending.iter().any(|segment| segment.slot == Some(slot)) {
            // An answer to what has not all been sent: the buffer is still being read.
            return Err(broken);
        }
        let payload = header.payload as usize;
        let fits = match awaiting.kind {
            _ if header.outcome.is_err() => payload == 0,
            Answer::Empty => payload == 0,
            Answer::Fill => payload == awaiting.local.bytes,
            Answer::Message => payload <= awaiting.local.bytes,
            Answer::Attachment => payload == SHM_ATTACHED_BYTES,
        };
        if !fits {
            tracing::warn!(node = %self.hello.node, payload, "a response of the wrong length");
            return Err(broken);
        }
        self.incoming =
            Some(Incoming { header, slot, awaiting, got: 0, attachment: [0; SHM_ATTACHED_BYTES] });
        Ok(true)
    }

    fn finish(&mut self, incoming: Incoming) -> Result<FrameDone, LinkClosed> {
        self.unanswered -= 1;
        let slot = incoming.slot;
        let header = incoming.header;
        if let Err(refusal) = header.outcome {
            return Ok(FrameDone { slot, outcome: Outcome::Refused(refusal), shared: None });
        }
        let broken = LinkClosed { cause: Uncertain::Protocol };
        let (value, shared) = match incoming.awaiting.kind {
            Answer::Message => (header.payload as u64, None),
            Answer::Attachment => {
                let attached = ShmAttached::decode(&incoming.attachment).map_err(|_| broken)?;
                let memory = self.descriptors.pop_front().ok_or(broken)?;
                let epochs = self.descriptors.pop_front().ok_or(broken)?;
                (0, Some((attached, memory, epochs)))
            }
            Answer::Empty | Answer::Fill => (header.value, None),
        };
        Ok(FrameDone { slot, outcome: Outcome::Done(value), shared })
    }
}

impl Segment {
    /// What has not been sent of the inline part and of the payload.
    fn rest(&self) -> [&[u8]; 2] {
        let inline = &self.inline[self.sent.min(self.inline_bytes)..self.inline_bytes];
        if self.payload.bytes == 0 {
            return [inline, &[]];
        }
        let skip = self.sent.saturating_sub(self.inline_bytes);
        // SAFETY: in bounds: `sent` never passes inline + payload. Exclusive: the operation in flight owns
        // the buffer and nobody writes it meanwhile. Alive: until the operation completes or we are dropped.
        let payload =
            unsafe { std::slice::from_raw_parts(self.payload.start.add(skip), self.payload.bytes - skip) };
        [inline, payload]
    }
}

impl Incoming {
    /// Bytes of the payload that still have to come, where they may go straight to the buffer.
    fn direct_rest(&self) -> usize {
        match self.awaiting.kind {
            Answer::Fill | Answer::Message => self.header.payload as usize - self.got,
            Answer::Empty | Answer::Attachment => 0,
        }
    }

    /// Takes as much of `bytes` as belongs to this response; returns how much that was.
    fn fill(&mut self, bytes: &[u8]) -> usize {
        let take = bytes.len().min(self.header.payload as usize - self.got);
        match self.awaiting.kind {
            Answer::Fill | Answer::Message => {
                // SAFETY: in bounds: the payload was checked to fit the buffer. Exclusive and alive: the
                // operation in flight owns it. The source is our own receive buffer, another allocation.
                unsafe {
                    let target = self.awaiting.local.start.add(self.got);
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, take);
                }
            }
            Answer::Attachment => self.attachment[self.got..self.got + take].copy_from_slice(&bytes[..take]),
            Answer::Empty => {}
        }
        self.got += take;
        take
    }
}

/// Whether an error of `connect` on a non-blocking socket only means *not yet*.
pub(crate) fn connecting(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw_os_error),
        Some(Errno::INPROGRESS | Errno::AGAIN | Errno::INTR)
    )
}
