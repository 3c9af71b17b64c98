//! One framed connection, seen from the node.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use farpool_wire::{
    AccessKey, Decoded, FrameError, HELLO_BYTES, Hello, HelloReply, Incarnation, MAX_PAYLOAD_BYTES,
    MAX_TRANSFER_BYTES, Opcode, REQUEST_HEADER_BYTES, Refusal, RequestHeader, ResponseHeader,
};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::attached::{Attached, Attachment};
use super::rings::Ring;
use crate::host::{AccessKind, Host, HostIdentity};

/// Answers are sent once there is this much of them, and requests are not looked at while it waits: a system call
/// costs as much as copying some KiB, but the answers should still be in the cache when the kernel copies them, and a
/// client that does not read cannot fill us up.
const SEND_AT_BYTES: usize = 256 << 10;
/// Longest run of bytes kept unparsed: one request.
const MAX_RECEIVED_BYTES: usize = REQUEST_HEADER_BYTES + MAX_PAYLOAD_BYTES;
/// Received in one call at the least.
const RECEIVE_BYTES: usize = 64 << 10;
/// Receives in one turn: then others have theirs, and what is left raises another event.
const RECEIVES_PER_TURN: usize = 16;
/// Buffers above this are given back when they are empty.
const KEPT_BUFFER_BYTES: usize = 2 * SEND_AT_BYTES;
/// Regions attached on one connection: 4 Ki regions of 64 MiB are 256 GiB.
const MAX_ATTACHED: usize = 4 << 10;

/// Most descriptors that go with one byte.
const MAX_DESCRIPTORS: usize = 2;

/// What became of a connection after it was served.
pub(super) enum Verdict {
    /// It goes on.
    Keep,
    /// Its greeting has come and awaits an answer.
    Greeted(Hello),
    /// The peer is gone.
    Close,
    /// The peer sent something malformed.
    Reject(FrameError),
}

/// Whether and for how long a connection only occupies its place.
pub(super) enum Idle {
    /// It has not greeted.
    Ungreeted(Duration),
    /// It has nothing attached and asks for nothing.
    Unattached(Duration),
    /// It may hold memory of somebody.
    No,
}

/// One connection.
pub(super) struct Connection {
    stream: OwnedFd,
    passes_descriptors: bool,
    last_active: Instant,
    stage: Stage,
    received: Vec<u8>,
    /// How much of `received` has been served.
    served: usize,
    /// Up to where the places that requests name are being fetched into the cache.
    fetched: usize,
    unsent: Vec<u8>,
    sent: usize,
    /// Descriptors to go out with the byte at this place of `unsent`.
    descriptors: VecDeque<(usize, Vec<OwnedFd>)>,
    attached: Attached,
    /// Something came in the last turn.
    active: bool,
    /// For calls, while nobody looks at it.
    ring: Option<Ring>,
    /// The client asks for somebody to look.
    kicked: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Silent,
    Greeted,
    Open,
    /// An old incarnation: it gets its answer and nothing else.
    Buried,
}

/// Whether a receiving call was offered more room than it used.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Room {
    Left,
    Full,
}

impl Connection {
    pub(super) fn new(stream: OwnedFd, passes_descriptors: bool) -> Self {
        Connection {
            stream,
            passes_descriptors,
            last_active: Instant::now(),
            stage: Stage::Silent,
            received: Vec::new(),
            served: 0,
            fetched: 0,
            unsent: Vec::new(),
            sent: 0,
            descriptors: VecDeque::new(),
            attached: Attached::default(),
            active: false,
            ring: None,
            kicked: false,
        }
    }

    pub(super) fn stream(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// How long a connection has been of no use to anybody: from its start until it greets, and while it is greeted
    /// but silent and nothing is attached on it.
    pub(super) fn idle(&self) -> Idle {
        match self.stage {
            Stage::Silent => Idle::Ungreeted(self.last_active.elapsed()),
            Stage::Open if self.passes_descriptors && self.ring.is_none() => Idle::No, // it calls
            _ if self.attached.is_empty() => Idle::Unattached(self.last_active.elapsed()),
            _ => Idle::No,
        }
    }

    /// Whether something has come since this was last asked.
    pub(super) fn was_active(&mut self) -> bool {
        std::mem::take(&mut self.active)
    }

    /// Answers wait for the peer to read.
    pub(super) fn is_blocked(&self) -> bool {
        self.sent < self.unsent.len()
    }

    /// The ring, to be looked at, if the client has asked for that.
    pub(super) fn take_kicked_ring(&mut self) -> Option<Ring> {
        self.ring.take_if(|_| std::mem::take(&mut self.kicked))
    }

    /// Nobody looks at the ring for now.
    pub(super) fn keep_ring(&mut self, ring: Ring) {
        self.last_active = Instant::now();
        self.ring = Some(ring);
    }

    /// Tells a sleeping client that there is something in the ring; false when the peer is gone.
    pub(super) fn wake_peer(&mut self) -> bool {
        if self.is_blocked() {
            return true; // what it has not read yet wakes it as well
        }
        self.unsent.extend_from_slice(&ResponseHeader::WAKE.encode());
        self.send()
    }

    /// Answers the greeting; `incarnation` is the one in force.
    ///
    /// # Errors
    /// When there is no memory or no descriptor for a ring.
    pub(super) fn answer_greeting(
        &mut self,
        identity: &HostIdentity,
        incarnation: Incarnation,
    ) -> io::Result<()> {
        let Stage::Greeted = self.stage else { return Ok(()) };
        let reply = HelloReply {
            node: identity.node,
            incarnation,
            region_bytes: identity.region_bytes,
            regions: identity.regions as u64,
        };
        let asked = Hello::decode(&self.received[self.served..]);
        self.stage = match asked {
            Ok(Decoded::Complete(hello))
                if hello.incarnation == incarnation && hello.node == identity.node =>
            {
                Stage::Open
            }
            _ => Stage::Buried,
        };
        self.served += HELLO_BYTES;
        self.unsent.extend_from_slice(&reply.encode());
        if self.passes_descriptors && self.stage == Stage::Open {
            let (ring, memory) = Ring::create()?;
            self.descriptors.push_back((self.unsent.len() - 1, vec![memory]));
            self.ring = Some(ring);
        }
        Ok(())
    }

    /// Serves what has come, as far as answers can be sent.
    pub(super) fn serve(&mut self, host: &dyn Host) -> Verdict {
        let mut receives = 0;
        let mut drained = false;
        loop {
            match self.serve_received(host) {
                Ok(None) => {}
                Ok(Some(verdict)) => return verdict,
                Err(error) => return Verdict::Reject(error),
            }
            if !self.send() {
                return Verdict::Close;
            }
            if self.is_blocked() {
                return Verdict::Keep;
            }
            if self.stage == Stage::Buried {
                return Verdict::Close;
            }
            if self.has_whole_request() {
                continue; // held back while answers waited; nothing else would call us for it
            }
            if drained || receives == RECEIVES_PER_TURN {
                return Verdict::Keep;
            }
            receives += 1;
            match self.receive() {
                Ok((0, _)) => return Verdict::Close,
                Ok((_, room)) => {
                    self.active = true;
                    // Only asked for where nothing is attached; looking at the clock for every request would cost.
                    if self.stage != Stage::Silent && self.attached.is_empty() {
                        self.last_active = Instant::now();
                    }
                    // Less than there was room for: asking again would only say that there is no more.
                    drained = room == Room::Left;
                }
                Err(Errno::AGAIN | Errno::INTR) => {
                    self.shrink();
                    return Verdict::Keep;
                }
                Err(_) => return Verdict::Close,
            }
        }
    }

    /// Serves whole requests until the input is used up or too much waits to be sent.
    fn serve_received(&mut self, host: &dyn Host) -> Result<Option<Verdict>, FrameError> {
        if self.stage == Stage::Silent {
            return Ok(match Hello::decode(&self.received)? {
                Decoded::Incomplete => None,
                Decoded::Complete(hello) => {
                    self.stage = Stage::Greeted;
                    Some(Verdict::Greeted(hello))
                }
            });
        }
        self.fetch_ahead();
        while self.stage == Stage::Open && self.unsent.len() - self.sent < SEND_AT_BYTES {
            let Decoded::Complete(header) = RequestHeader::decode(&self.received[self.served..])? else {
                break;
            };
            let frame_bytes = REQUEST_HEADER_BYTES + header.payload as usize;
            if self.received.len() - self.served < frame_bytes {
                break;
            }
            if header.opcode == Opcode::Look {
                if !self.passes_descriptors {
                    return Err(FrameError::Malformed); // there is no ring
                }
                self.kicked = true;
                self.served += frame_bytes;
                continue;
            }
            // The payload is lent out of `self` so that answers can be appended meanwhile.
            let received = std::mem::take(&mut self.received);
            let payload = &received[self.served + REQUEST_HEADER_BYTES..self.served + frame_bytes];
            self.serve_request(host, &header, payload);
            self.received = received;
            self.served += frame_bytes;
        }
        Ok(None)
    }

    /// Starts to fetch what requests behind the next one ask for: serving takes locks, which wait for all loads
    /// before them, so that misses of different requests would not overlap by themselves.
    fn fetch_ahead(&mut self) {
        if self.stage != Stage::Open {
            return;
        }
        let mut at = self.fetched.max(self.served);
        while let Ok(Decoded::Complete(header)) = RequestHeader::decode(&self.received[at..]) {
            let first = at == self.served;
            at += REQUEST_HEADER_BYTES + header.payload as usize;
            if at > self.received.len() {
                break;
            }
            self.fetched = at;
            let length = match header.opcode {
                Opcode::Read => header.length,
                Opcode::Write => header.payload,
                Opcode::CompareAndSwap | Opcode::FetchAndAdd => 8,
                Opcode::Attach | Opcode::Detach | Opcode::Call | Opcode::Look => continue,
            };
            if !first {
                self.attached.prefetch(header.region, header.offset, length as usize);
            }
        }
    }

    fn serve_request(&mut self, host: &dyn Host, header: &RequestHeader, payload: &[u8]) {
        let start = self.unsent.len();
        let blank = ResponseHeader { outcome: Ok(()), payload: 0, token: header.token, value: 0 };
        self.unsent.extend_from_slice(&blank.encode());
        let body = self.unsent.len();
        let outcome = self.carry_out(host, header, payload);
        if outcome.is_err() {
            self.unsent.truncate(body);
        }
        let response = ResponseHeader {
            outcome: outcome.map(drop),
            payload: (self.unsent.len() - body) as u32,
            value: outcome.unwrap_or(0),
            ..blank
        };
        self.unsent[start..body].copy_from_slice(&response.encode());
    }

    /// Carries out one request, appends the answer's payload, and returns the answer's value.
    fn carry_out(&mut self, host: &dyn Host, header: &RequestHeader, payload: &[u8]) -> Result<u64, Refusal> {
        match header.opcode {
            Opcode::Attach => self.attach(host, header, payload).map(|()| 0),
            Opcode::Detach => {
                self.attached.remove(header.region);
                self.last_active = Instant::now();
                Ok(0)
            }
            Opcode::Call => {
                let start = self.unsent.len();
                host.call(payload, &mut self.unsent)?;
                let fits = self.unsent.len() - start <= header.length as usize;
                if fits { Ok(0) } else { Err(Refusal::TooLong) }
            }
            Opcode::Read | Opcode::Write | Opcode::CompareAndSwap | Opcode::FetchAndAdd => {
                self.attached.check(header.region, header.epoch)?;
                self.access(host, header, payload)
            }
            Opcode::Look => unreachable!("not answered"),
        }
    }

    fn attach(&mut self, host: &dyn Host, header: &RequestHeader, payload: &[u8]) -> Result<(), Refusal> {
        let key = AccessKey::from_slice(payload).ok_or(Refusal::WrongKey)?;
        if self.attached.len() >= MAX_ATTACHED && !self.attached.contains(header.region) {
            return Err(Refusal::Exhausted);
        }
        if self.passes_descriptors {
            let shared = host.share(header.region, header.epoch, &key)?;
            self.unsent.extend_from_slice(&shared.attached.encode());
            self.descriptors.push_back((self.unsent.len() - 1, vec![shared.memory, shared.words]));
        } else {
            host.attach(header.region, header.epoch, &key)?;
        }
        self.attached.insert(header.region, Attachment::new(header.epoch));
        Ok(())
    }

    fn access(&mut self, host: &dyn Host, header: &RequestHeader, payload: &[u8]) -> Result<u64, Refusal> {
        let length = header.length as usize;
        if header.opcode == Opcode::Read && length > MAX_TRANSFER_BYTES {
            return Err(Refusal::TooLong);
        }
        let word =
            |at: usize| u64::from_le_bytes(payload[at..at + 8].try_into().expect("length checked in decode"));
        let kind = if header.opcode == Opcode::Read { AccessKind::Read } else { AccessKind::Write };
        let (unsent, attached) = (&mut self.unsent, &mut self.attached);
        let mut value = 0;
        host.with_region(header.region, header.epoch, kind, &mut |memory| {
            attached.remember(header.region, memory);
            value = match header.opcode {
                Opcode::Read => {
                    let start = unsent.len();
                    unsent.reserve(length);
                    let room = unsent.spare_capacity_mut().as_mut_ptr().cast();
                    // SAFETY: `length` bytes were reserved, and are nobody else's; all of them are written.
                    unsafe {
                        memory.read_to(header.offset, room, length)?;
                        unsent.set_len(start + length);
                    }
                    0
                }
                Opcode::Write => {
                    memory.write(header.offset, payload)?;
                    0
                }
                Opcode::CompareAndSwap => memory.compare_and_swap(header.offset, word(0), word(8))?,
                Opcode::FetchAndAdd => memory.fetch_and_add(header.offset, word(0))?,
                _ => unreachable!("served elsewhere"),
            };
            Ok(())
        })?;
        Ok(value)
    }

    /// Sends what can be sent; false when the peer is gone.
    fn send(&mut self) -> bool {
        while self.is_blocked() {
            let stop = self.descriptors.front().map_or(self.unsent.len(), |&(place, _)| place);
            let result = if self.sent < stop {
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                rustix::net::send(&self.stream, &self.unsent[self.sent..stop], flags)
            } else {
                self.send_with_descriptors()
            };
            match result {
                Ok(bytes) => self.sent += bytes,
                Err(Errno::AGAIN) => return true,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        self.unsent.clear();
        self.sent = 0;
        true
    }

    /// Sends the one byte that the next descriptors go with.
    fn send_with_descriptors(&mut self) -> Result<usize, Errno> {
        let (place, descriptors) = self.descriptors.front().expect("the caller looked");
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        let byte = [IoSlice::new(&self.unsent[*place..place + 1])];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = rustix::net::sendmsg(&self.stream, &byte, &mut ancillary, flags)?;
        self.descriptors.pop_front();
        Ok(sent)
    }

    /// How many bytes came, and whether there was room for more.
    fn receive(&mut self) -> Result<(usize, Room), Errno> {
        self.received.drain(..self.served);
        self.fetched = self.fetched.saturating_sub(self.served);
        self.served = 0;
        let old = self.received.len();
        let most = (MAX_RECEIVED_BYTES + RECEIVE_BYTES).saturating_sub(old);
        let wanted = self.missing_bytes().max(RECEIVE_BYTES).min(most);
        self.received.reserve(wanted);
        let room = &mut self.received.spare_capacity_mut()[..wanted];
        let (_, bytes) = rustix::net::recv(&self.stream, room, RecvFlags::DONTWAIT)?;
        // SAFETY: the kernel has filled the first `bytes` bytes of the room behind `old`, which is within the capacity.
        unsafe { self.received.set_len(old + bytes) };
        Ok((bytes, if bytes < wanted { Room::Left } else { Room::Full }))
    }

    fn has_whole_request(&self) -> bool {
        let unserved = &self.received[self.served..];
        self.stage == Stage::Open
            && matches!(RequestHeader::decode(unserved), Ok(Decoded::Complete(header))
                if unserved.len() >= REQUEST_HEADER_BYTES + header.payload as usize)
    }

    /// How much of the request at the front has not come yet.
    fn missing_bytes(&self) -> usize {
        match RequestHeader::decode(&self.received) {
            Ok(Decoded::Complete(header)) if self.stage == Stage::Open => {
                (REQUEST_HEADER_BYTES + header.payload as usize).saturating_sub(self.received.len())
            }
            _ => 0,
        }
    }

    fn shrink(&mut self) {
        if self.received.len() == self.served && self.received.capacity() > KEPT_BUFFER_BYTES {
            self.received = Vec::new();
            self.served = 0;
            self.fetched = 0;
        }
        if self.unsent.capacity() > KEPT_BUFFER_BYTES {
            self.unsent.shrink_to(KEPT_BUFFER_BYTES);
        }
    }
}
