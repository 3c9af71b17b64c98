//! The incoming stream: responses in the order of their requests, bodies received straight into their
//! buffers.
//!
//! There are two ways to receive. When a large body comes next, one call receives headers and bodies each
//! into its own place, as predicted from the requests (*scattered*). Otherwise, and after a response that
//! differs from the prediction (a refusal), bytes go through a buffer (*linear*).

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use farpool_wire::{Decoded, RESPONSE_HEADER_BYTES, ResponseHeader, SHM_ATTACHED_BYTES, ShmAttached};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use super::FrameDone;
use crate::op::Uncertain;
use crate::seam::{LinkClosed, LocalSlice, Outcome};

/// Room for received bytes that are not parsed yet: some hundred small responses.
const LINEAR_BYTES: usize = 32 << 10;
/// Bodies of at least this length are received straight into their buffer; shorter ones are cheaper to copy.
const DIRECT_BYTES: usize = 1 << 10;
/// Most responses predicted for one receiving call: two pieces each, and the linear buffer behind them.
const PREDICTED: usize = 16;
/// Most descriptors that come with one message.
const DESCRIPTORS: usize = 2;

const BROKEN: LinkClosed = LinkClosed { cause: Uncertain::Protocol };

/// What the payload of a successful response is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// None at all.
    Empty,
    /// Exactly the operation's buffer.
    Fill,
    /// At most the operation's buffer.
    Message,
    /// A [`ShmAttached`].
    Attachment,
}

/// A request that was posted and not yet answered.
pub(super) struct Awaiting {
    pub(super) slot: u32,
    pub(super) kind: Answer,
    pub(super) local: LocalSlice,
    /// Where the request ends in the outgoing stream: no answer may come before all of it was sent.
    pub(super) ends_at: u64,
}

impl Awaiting {
    /// Length of the body that is received straight into the buffer if the operation succeeds.
    fn body_bytes(&self) -> usize {
        if self.kind == Answer::Fill { self.local.bytes } else { 0 }
    }
}

/// A response whose payload has not wholly arrived.
struct Partial {
    header: ResponseHeader,
    awaiting: Awaiting,
    got: usize,
    attachment: [u8; SHM_ATTACHED_BYTES],
}

/// The incoming side of a connection.
pub(super) struct Incoming {
    /// In the order posted, which is the order of the answers.
    awaiting: VecDeque<Awaiting>,
    linear: Box<[u8]>,
    /// `linear[consumed..filled]` was received and is not parsed yet.
    consumed: usize,
    filled: usize,
    partial: Option<Partial>,
    passes_descriptors: bool,
    descriptors: VecDeque<OwnedFd>,
}

/// The outcome of one receiving call.
pub(super) enum Received {
    /// Nothing more for now.
    Drained,
    /// As much as there was room for: there may be more.
    More,
}

impl Incoming {
    pub(super) fn new(passes_descriptors: bool) -> Self {
        Incoming {
            awaiting: VecDeque::new(),
            linear: vec![0; LINEAR_BYTES].into_boxed_slice(),
            consumed: 0,
            filled: 0,
            partial: None,
            passes_descriptors,
            descriptors: VecDeque::new(),
        }
    }

    pub(super) fn expect(&mut self, awaiting: Awaiting) {
        self.awaiting.push_back(awaiting);
    }

    pub(super) fn awaits(&self) -> bool {
        !self.awaiting.is_empty() || self.partial.is_some()
    }

    /// Bytes received and not parsed yet: at first the node's greeting.
    pub(super) fn unread(&self) -> &[u8] {
        &self.linear[self.consumed..self.filled]
    }

    pub(super) fn consume(&mut self, bytes: usize) {
        self.consumed += bytes;
    }

    /// The first descriptor that was received and not taken yet.
    pub(super) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop_front()
    }

    /// Receives into the linear buffer.
    pub(super) fn receive_linear(&mut self, stream: impl AsFd) -> Result<Received, LinkClosed> {
        self.linear.copy_within(self.consumed..self.filled, 0);
        self.filled -= self.consumed;
        self.consumed = 0;
        let room = &mut self.linear[self.filled..];
        let room_bytes = room.len();
        let result = if self.passes_descriptors {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            rustix::net::recvmsg(&stream, &mut [IoSliceMut::new(room)], &mut ancillary, flags).map(
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
            rustix::net::recv(&stream, room, RecvFlags::DONTWAIT).map(|(_, bytes)| bytes)
        };
        let bytes = received(result)?;
        self.filled += bytes;
        Ok(if bytes == room_bytes { Received::More } else { Received::Drained })
    }

    /// Receives what has arrived and moves finished operations to `done`. `sent_bytes` says how much of the
    /// outgoing stream was sent.
    pub(super) fn receive(
        &mut self,
        stream: impl AsFd,
        sent_bytes: u64,
        done: &mut Vec<FrameDone>,
    ) -> Result<Received, LinkClosed> {
        let next_body = match (&self.partial, self.awaiting.front()) {
            (Some(partial), _) => partial.direct_rest(),
            (None, Some(awaiting)) => awaiting.body_bytes(),
            (None, None) => 0,
        };
        if next_body >= DIRECT_BYTES && self.consumed == self.filled && !self.passes_descriptors {
            return self.receive_scattered(stream, sent_bytes, done);
        }
        let received = self.receive_linear(stream)?;
        self.digest(sent_bytes, done)?;
        Ok(received)
    }

    /// Parses what is in the linear buffer.
    pub(super) fn digest(&mut self, sent_bytes: u64, done: &mut Vec<FrameDone>) -> Result<(), LinkClosed> {
        let linear = std::mem::take(&mut self.linear);
        let result = self.digest_bytes(&linear[self.consumed..self.filled], sent_bytes, done);
        self.linear = linear;
        self.consumed += result?;
        Ok(())
    }

    /// Parses bytes in the order received; returns how many it consumed. What is left is less than a header.
    fn digest_bytes(
        &mut self,
        bytes: &[u8],
        sent_bytes: u64,
        done: &mut Vec<FrameDone>,
    ) -> Result<usize, LinkClosed> {
        let mut used = 0;
        loop {
            let partial = match self.partial.as_mut() {
                Some(partial) => partial,
                None => {
                    let Some(header) = decode(&bytes[used..])? else { return Ok(used) };
                    used += RESPONSE_HEADER_BYTES;
                    if header == ResponseHeader::WAKE && self.passes_descriptors {
                        continue; // no answer: it has only woken this side
                    }
                    self.begin(header, sent_bytes)?
                }
            };
            used += partial.fill(&bytes[used..]);
            if !partial.is_whole() {
                return Ok(used);
            }
            done.push(self.finish()?);
        }
    }

    /// Checks a header against the oldest request, which it must answer.
    fn begin(&mut self, header: ResponseHeader, sent_bytes: u64) -> Result<&mut Partial, LinkClosed> {
        let awaiting = self.awaiting.pop_front().ok_or(BROKEN)?;
        // An answer to a request that is not wholly sent would end an operation whose buffer is still being
        // read.
        if header.token != u64::from(awaiting.slot) || awaiting.ends_at > sent_bytes {
            return Err(BROKEN);
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
            tracing::warn!(payload, "a response of the wrong length");
            return Err(BROKEN);
        }
        let attachment = [0; SHM_ATTACHED_BYTES];
        Ok(self.partial.insert(Partial { header, awaiting, got: 0, attachment }))
    }

    /// Completes the partial response, which is whole.
    fn finish(&mut self) -> Result<FrameDone, LinkClosed> {
        let Partial { header, awaiting, attachment, .. } = self.partial.take().ok_or(BROKEN)?;
        let slot = awaiting.slot;
        if let Err(refusal) = header.outcome {
            return Ok(FrameDone { slot, outcome: Outcome::Refused(refusal), shared: None });
        }
        let (value, shared) = match awaiting.kind {
            Answer::Message => (header.payload as u64, None),
            Answer::Attachment => {
                let attached = ShmAttached::decode(&attachment).map_err(|_| BROKEN)?;
                let memory = self.take_descriptor().ok_or(BROKEN)?;
                let epochs = self.take_descriptor().ok_or(BROKEN)?;
                (0, Some((attached, memory, epochs)))
            }
            Answer::Empty | Answer::Fill => (header.value, None),
        };
        Ok(FrameDone { slot, outcome: Outcome::Done(value), shared })
    }

    /// Receives headers and bodies each into its place, then parses them in order.
    fn receive_scattered(
        &mut self,
        stream: impl AsFd,
        sent_bytes: u64,
        done: &mut Vec<FrameDone>,
    ) -> Result<Received, LinkClosed> {
        debug_assert_eq!(self.consumed, self.filled, "bytes that came earlier would be overtaken");
        (self.consumed, self.filled) = (0, 0);
        let mut headers = [[0; RESPONSE_HEADER_BYTES]; PREDICTED];
        let predicted: usize;
        let room_bytes: usize;
        let bytes = {
            let mut pieces: [IoSliceMut<'_>; 2 * PREDICTED + 2] =
                std::array::from_fn(|_| IoSliceMut::new(&mut []));
            let mut count = 0;
            let mut add = |piece| {
                pieces[count] = piece;
                count += 1;
            };
            if let Some(partial) = &mut self.partial {
                add(IoSliceMut::new(partial.rest()));
            }
            let mut known = 0;
            for (header, awaiting) in headers.iter_mut().zip(&mut self.awaiting) {
                add(IoSliceMut::new(header));
                known += 1;
                if awaiting.body_bytes() > 0 {
                    add(IoSliceMut::new(whole(&mut awaiting.local)));
                } else if awaiting.kind != Answer::Empty {
                    break; // its length is not known before its header
                }
            }
            add(IoSliceMut::new(&mut self.linear));
            predicted = known;
            let pieces = &mut pieces[..count];
            room_bytes = pieces.iter().map(|piece| piece.len()).sum();
            let none = &mut RecvAncillaryBuffer::default();
            received(
                rustix::net::recvmsg(&stream, pieces, none, RecvFlags::DONTWAIT).map(|message| message.bytes),
            )?
        };
        self.digest_scattered(bytes, &headers[..predicted], sent_bytes, done)?;
        Ok(if bytes == room_bytes { Received::More } else { Received::Drained })
    }

    /// Parses `left` bytes that were received into the predicted places.
    fn digest_scattered(
        &mut self,
        mut left: usize,
        headers: &[[u8; RESPONSE_HEADER_BYTES]],
        sent_bytes: u64,
        done: &mut Vec<FrameDone>,
    ) -> Result<(), LinkClosed> {
        if self.partial.is_some() && !self.came(&mut left, done)? {
            return Ok(());
        }
        for (place, header) in headers.iter().enumerate() {
            if left < RESPONSE_HEADER_BYTES {
                self.linear[..left].copy_from_slice(&header[..left]);
                self.filled = left;
                return Ok(());
            }
            left -= RESPONSE_HEADER_BYTES;
            let decoded = decode(header)?.expect("a whole header has come");
            let predicted_body = self.awaiting.front().map_or(0, Awaiting::body_bytes);
            let body = self.awaiting.front().map_or(LocalSlice::NONE, |awaiting| awaiting.local);
            self.begin(decoded, sent_bytes)?;
            if decoded.payload as usize != predicted_body {
                // A refusal, or a message of unpredicted length: the bytes behind its header lie in the wrong
                // places.
                let unpredicted = self.gather(predicted_body, body, &headers[place + 1..], left);
                let used = self.digest_bytes(&unpredicted, sent_bytes, done)?;
                let rest = &unpredicted[used..];
                self.linear[..rest.len()].copy_from_slice(rest);
                self.filled = rest.len();
                return Ok(());
            }
            if !self.came(&mut left, done)? {
                return Ok(());
            }
        }
        self.filled = left;
        self.digest(sent_bytes, done)
    }

    /// Counts the bytes of the partial response that were received straight into place; true if it is whole.
    fn came(&mut self, left: &mut usize, done: &mut Vec<FrameDone>) -> Result<bool, LinkClosed> {
        let partial = self.partial.as_mut().expect("the caller looked");
        let here = partial.direct_rest().min(*left);
        partial.got += here;
        *left -= here;
        let whole = partial.is_whole();
        if whole {
            done.push(self.finish()?);
        }
        Ok(whole)
    }

    /// Copies out, in order, the `left` bytes behind a header that differs from the prediction.
    #[cold]
    fn gather(
        &self,
        body_bytes: usize,
        body: LocalSlice,
        headers: &[[u8; RESPONSE_HEADER_BYTES]],
        left: usize,
    ) -> Vec<u8> {
        let mut gathered = Vec::with_capacity(left);
        let mut take = |from: &[u8]| {
            let wanted = from.len().min(left - gathered.len());
            gathered.extend_from_slice(&from[..wanted]);
        };
        // SAFETY: the buffer of an operation that has not been reported as done; initialised and alive.
        take(unsafe { body_slice(body, body_bytes) });
        for (header, awaiting) in headers.iter().zip(&self.awaiting) {
            take(header);
            // SAFETY: `awaiting` holds operations that have not been reported as done, so each buffer is
            // alive and initialised.
            take(unsafe { body_slice(awaiting.local, awaiting.body_bytes()) });
        }
        take(&self.linear);
        gathered
    }
}

/// # Safety
/// `local` holds at least `bytes` initialised bytes, which nothing writes while the slice is used.
unsafe fn body_slice<'a>(local: LocalSlice, bytes: usize) -> &'a [u8] {
    if bytes == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(local.start, bytes) }
}

/// The whole buffer of an operation that awaits its answer.
fn whole(local: &mut LocalSlice) -> &mut [u8] {
    // SAFETY: in bounds and exclusive: the operation in flight owns the buffer. Alive: until it completes or
    // the connection is dropped. Only initialised bytes are ever seen: the arena is zeroed at first.
    unsafe { std::slice::from_raw_parts_mut(local.start, local.bytes) }
}

fn decode(bytes: &[u8]) -> Result<Option<ResponseHeader>, LinkClosed> {
    match ResponseHeader::decode(bytes) {
        Ok(Decoded::Incomplete) => Ok(None),
        Ok(Decoded::Complete(header)) => Ok(Some(header)),
        Err(error) => {
            tracing::warn!(%error, "malformed response");
            Err(BROKEN)
        }
    }
}

/// The outcome of a receiving call: zero bytes when nothing has come yet.
fn received(result: Result<usize, Errno>) -> Result<usize, LinkClosed> {
    match result {
        Ok(0) => Err(LinkClosed { cause: Uncertain::ConnectionLost }),
        Ok(bytes) => Ok(bytes),
        Err(Errno::AGAIN | Errno::INTR | Errno::NOTCONN) => Ok(0),
        Err(errno) => Err(LinkClosed { cause: Uncertain::of(errno) }),
    }
}

impl Partial {
    fn is_whole(&self) -> bool {
        self.got == self.header.payload as usize
    }

    /// How many bytes of the payload are missing, if they may be received straight into the buffer; else
    /// zero.
    fn direct_rest(&self) -> usize {
        match self.awaiting.kind {
            Answer::Fill | Answer::Message => self.header.payload as usize - self.got,
            Answer::Empty | Answer::Attachment => 0,
        }
    }

    /// Where these bytes go.
    fn rest(&mut self) -> &mut [u8] {
        let (got, rest) = (self.got, self.direct_rest());
        // In bounds: the payload was checked to fit the buffer when its header came.
        if rest == 0 { &mut [] } else { &mut whole(&mut self.awaiting.local)[got..got + rest] }
    }

    /// Takes as much of `bytes` as belongs to this response; returns how much that was.
    fn fill(&mut self, bytes: &[u8]) -> usize {
        let take = bytes.len().min(self.header.payload as usize - self.got);
        match self.awaiting.kind {
            Answer::Fill | Answer::Message if take > 0 => {
                whole(&mut self.awaiting.local)[self.got..self.got + take].copy_from_slice(&bytes[..take]);
            }
            Answer::Attachment => self.attachment[self.got..self.got + take].copy_from_slice(&bytes[..take]),
            Answer::Empty | Answer::Fill | Answer::Message => {}
        }
        self.got += take;
        take
    }
}
