//! The client's side of a framed connection: pipelined requests out, responses in (`docs/src/wire.md`).
//!
//! F1. Requests leave in the order posted; large payloads leave from the caller's buffer without a copy.
//! F2. Responses come in the order of the requests. A response's payload goes only to the buffer of the
//!     operation it answers, and only as many bytes as that operation asked for, while it is in flight;
//!     anything else from the peer closes the connection.
//! F3. After the connection value is dropped, it touches no buffer.

mod incoming;
mod outgoing;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use farpool_wire::{
    Decoded, Epoch, HELLO_BYTES, Hello, HelloReply, MAX_TRANSFER_BYTES, Opcode, RequestHeader, ShmAttached,
};
use rustix::io::Errno;

use crate::descriptors::Descriptor;
use crate::op::Uncertain;
use crate::seam::{LinkClosed, LocalSlice, Op, Outcome, Posted};
use incoming::{Answer, Awaiting, Incoming, Received};
use outgoing::Outgoing;

/// A finished operation of a framed connection.
pub(crate) struct FrameDone {
    pub slot: u32,
    pub outcome: Outcome,
    /// Present for an `Attach` on a connection that passes descriptors.
    pub shared: Option<(ShmAttached, OwnedFd, OwnedFd)>,
}

/// The client's side of a connection that carries frames.
pub(crate) struct FrameClient {
    stream: Descriptor,
    hello: Hello,
    greeted: bool,
    passes_descriptors: bool,
    outgoing: Outgoing,
    incoming: Incoming,
    /// The ring's memory, which came with the node's greeting on a connection that passes descriptors.
    ring: Option<OwnedFd>,
    /// The next poll receives although no answer is awaited: the node may have died or sent a wake-up.
    look: bool,
}

impl FrameClient {
    /// Takes a non-blocking stream that is connected or connecting; queues the greeting.
    pub(crate) fn new(stream: Descriptor, hello: Hello, passes_descriptors: bool) -> Self {
        let mut outgoing = Outgoing::default();
        outgoing.push(&hello.encode());
        let incoming = Incoming::new(passes_descriptors);
        FrameClient {
            stream,
            hello,
            greeted: false,
            passes_descriptors,
            outgoing,
            incoming,
            ring: None,
            look: false,
        }
    }

    /// The ring's memory, once.
    pub(crate) fn take_ring(&mut self) -> Option<OwnedFd> {
        self.ring.take()
    }

    /// Whether an answer is awaited.
    pub(crate) fn awaits(&self) -> bool {
        self.incoming.awaits()
    }

    /// Makes the next poll receive even if no answer is awaited.
    pub(crate) fn look(&mut self) {
        self.look = true;
    }

    /// Asks the node to poll the ring; [`FrameClient::poll`] sends the request.
    pub(crate) fn kick(&mut self) {
        let look = RequestHeader {
            opcode: Opcode::Look,
            fence: false,
            payload: 0,
            token: 0,
            region: 0,
            length: 0,
            epoch: Epoch(0),
            offset: 0,
        };
        self.outgoing.push(&look.encode());
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    pub(crate) fn wants_to_send(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Queues a request; [`FrameClient::poll`] sends it.
    pub(crate) fn post(&mut self, posted: &Posted) {
        let mut operands = [0; 16];
        let mut word = |at: usize, value: u64| operands[at..at + 8].copy_from_slice(&value.to_le_bytes());
        let mut payload = LocalSlice::NONE;
        let (opcode, kind, operand_bytes) = match posted.op {
            Op::Attach(key) => {
                operands = *key.as_bytes();
                let kind = if self.passes_descriptors { Answer::Attachment } else { Answer::Empty };
                (Opcode::Attach, kind, 16)
            }
            Op::Detach => (Opcode::Detach, Answer::Empty, 0),
            Op::Read => (Opcode::Read, Answer::Fill, 0),
            Op::Write => {
                payload = posted.local;
                (Opcode::Write, Answer::Empty, 0)
            }
            Op::CompareAndSwap { expected, new } => {
                word(0, expected);
                word(8, new);
                (Opcode::CompareAndSwap, Answer::Empty, 16)
            }
            Op::FetchAndAdd { addend } => {
                word(0, addend);
                (Opcode::FetchAndAdd, Answer::Empty, 8)
            }
            Op::Call { request } => {
                payload = LocalSlice { start: posted.local.start, bytes: request };
                (Opcode::Call, Answer::Message, 0)
            }
        };
        debug_assert!(posted.local.bytes <= MAX_TRANSFER_BYTES || opcode == Opcode::Call);
        let header = RequestHeader {
            opcode,
            fence: posted.fence,
            payload: (operand_bytes + payload.bytes) as u32,
            token: u64::from(posted.slot),
            region: posted.region,
            length: if matches!(opcode, Opcode::Read | Opcode::Call) { posted.local.bytes as u32 } else { 0 },
            epoch: posted.epoch,
            offset: posted.offset,
        };
        self.outgoing.push(&header.encode());
        self.outgoing.push(&operands[..operand_bytes]);
        self.outgoing.push_payload(payload);
        let ends_at = self.outgoing.queued_bytes();
        self.incoming.expect(Awaiting { slot: posted.slot, kind, local: posted.local, ends_at });
    }

    /// Sends what can be sent, receives what has arrived, and moves finished operations to `done`.
    pub(crate) fn poll(&mut self, done: &mut Vec<FrameDone>) -> Result<(), LinkClosed> {
        self.outgoing.send(&self.stream)?;
        let sent_bytes = self.outgoing.sent_bytes();
        if !self.greeted {
            self.incoming.receive_linear(&self.stream)?;
            if !self.digest_greeting()? {
                return Ok(());
            }
            self.incoming.digest(sent_bytes, done)?;
        }
        let mut look = std::mem::take(&mut self.look);
        while self.incoming.awaits() || std::mem::take(&mut look) {
            if let Received::Drained = self.incoming.receive(&self.stream, sent_bytes, done)? {
                break;
            }
        }
        Ok(())
    }

    /// True once the node has answered the greeting with its id and this incarnation.
    fn digest_greeting(&mut self) -> Result<bool, LinkClosed> {
        match HelloReply::decode(self.incoming.unread()) {
            Ok(Decoded::Incomplete) => Ok(false),
            Ok(Decoded::Complete(reply))
                if reply.node == self.hello.node && reply.incarnation == self.hello.incarnation =>
            {
                self.incoming.consume(HELLO_BYTES);
                self.greeted = true;
                if self.passes_descriptors {
                    let ring = self.incoming.take_descriptor();
                    self.ring = Some(ring.ok_or(LinkClosed { cause: Uncertain::Protocol })?);
                }
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
}

/// Whether an error of `connect` on a non-blocking socket only means *not yet*.
pub(crate) fn connecting(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw_os_error),
        Some(Errno::INPROGRESS | Errno::AGAIN | Errno::INTR)
    )
}
