//! The outgoing stream: headers gathered in one buffer, payloads in the buffers of the callers.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};

use crate::op::Uncertain;
use crate::seam::{LinkClosed, LocalSlice};

/// Pieces handed to the kernel in one call.
const SEND_PIECES: usize = 64;
/// Payloads up to this length are copied behind their header: cheaper than a piece of their own.
const COPIED_PAYLOAD_BYTES: usize = 512;
/// Headers already sent are dropped once they take this much room.
const COMPACT_BYTES: usize = 16 << 10;

/// What waits to be sent, in order.
#[derive(Default)]
pub(super) struct Outgoing {
    /// Headers and small payloads; the first byte is number `inline_base` of all that ever went in.
    inline: Vec<u8>,
    inline_base: u64,
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that have been sent.
    front_sent: usize,
    /// Counted since the stream began.
    queued_bytes: u64,
    sent_bytes: u64,
}

enum Piece {
    Inline { start: u64, bytes: usize },
    Payload(LocalSlice),
}

impl Piece {
    fn bytes(&self) -> usize {
        match self {
            Piece::Inline { bytes, .. } => *bytes,
            Piece::Payload(payload) => payload.bytes,
        }
    }
}

impl Outgoing {
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Bytes queued so far; a message queued now ends there.
    pub(super) fn queued_bytes(&self) -> u64 {
        self.queued_bytes
    }

    /// Bytes that the kernel has taken so far.
    pub(super) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Appends bytes by copying them.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let start = self.inline_base + self.inline.len() as u64;
        self.inline.extend_from_slice(bytes);
        self.queued_bytes += bytes.len() as u64;
        match self.pieces.back_mut() {
            Some(Piece::Inline { bytes: known, .. }) => *known += bytes.len(),
            _ => self.pieces.push_back(Piece::Inline { start, bytes: bytes.len() }),
        }
    }

    /// Appends a payload, which its operation owns until it is answered.
    pub(super) fn push_payload(&mut self, payload: LocalSlice) {
        if payload.bytes <= COPIED_PAYLOAD_BYTES {
            if payload.bytes > 0 {
                // SAFETY: in bounds, initialised and alive: the operation's own part of the arena. Nothing
                // writes it while the operation is in flight.
                self.push(unsafe { std::slice::from_raw_parts(payload.start, payload.bytes) });
            }
            return;
        }
        self.queued_bytes += payload.bytes as u64;
        self.pieces.push_back(Piece::Payload(payload));
    }

    /// Sends what the kernel takes now.
    pub(super) fn send(&mut self, stream: impl AsFd) -> Result<(), LinkClosed> {
        while !self.pieces.is_empty() {
            let mut slices = [IoSlice::new(&[]); SEND_PIECES];
            let count = self.gather(&mut slices);
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let none = &mut SendAncillaryBuffer::default();
            match rustix::net::sendmsg(&stream, &slices[..count], none, flags) {
                Ok(bytes) => self.advance(bytes),
                // ENOTCONN: the connection is still being made.
                Err(Errno::AGAIN | Errno::INTR | Errno::NOTCONN | Errno::INPROGRESS) => return Ok(()),
                Err(errno) => return Err(LinkClosed { cause: Uncertain::of(errno) }),
            }
        }
        Ok(())
    }

    fn gather<'a>(&'a self, slices: &mut [IoSlice<'a>; SEND_PIECES]) -> usize {
        let mut skip = self.front_sent;
        let mut count = 0;
        for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
            let bytes = match *piece {
                Piece::Inline { start, bytes } => {
                    let start = (start - self.inline_base) as usize;
                    &self.inline[start + skip..start + bytes]
                }
                Piece::Payload(LocalSlice { start, bytes }) => {
                    // SAFETY: in bounds: `skip` is less than the piece. Exclusive: the operation in flight
                    // owns the buffer and nothing writes it meanwhile. Alive: until the operation completes
                    // or this connection is dropped.
                    unsafe { std::slice::from_raw_parts(start.add(skip), bytes - skip) }
                }
            };
            *slice = IoSlice::new(bytes);
            skip = 0;
            count += 1;
        }
        count
    }

    fn advance(&mut self, mut bytes: usize) {
        self.sent_bytes += bytes as u64;
        while bytes > 0 {
            let front = self.pieces.front().expect("no more was sent than was queued");
            let rest = front.bytes() - self.front_sent;
            if bytes < rest {
                self.front_sent += bytes;
                break;
            }
            bytes -= rest;
            self.front_sent = 0;
            self.pieces.pop_front();
        }
        self.compact();
    }

    fn compact(&mut self) {
        let next = self.pieces.iter().find_map(|piece| match piece {
            Piece::Inline { start, .. } => Some((start - self.inline_base) as usize),
            Piece::Payload(_) => None,
        });
        let sent = next.unwrap_or(self.inline.len());
        if sent == self.inline.len() || sent >= COMPACT_BYTES {
            self.inline.drain(..sent);
            self.inline_base += sent as u64;
        }
    }
}
