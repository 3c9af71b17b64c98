//! One framed connection, seen from the node.

mod requests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use farpool_wire::{
    Decoded, Epoch, FrameError, HELLO_BYTES, Hello, HelloReply, Incarnation, MAX_CALL_BYTES,
    MAX_PAYLOAD_BYTES, Opcode, REQUEST_HEADER_BYTES, Refusal, RequestHeader, ResponseHeader,
};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::answers::Answers;
use super::attached::Attached;
use super::buffers::{BUFFER_BYTES, SpareBuffers};
use super::complaints::Complaints;
use super::origin::Origin;
use super::rings::Ring;
use super::room::{Account, Places};
use crate::host::{Host, HostIdentity};

/// Answers are sent once they reach this length, and no request is served while they wait. A system call
/// costs as much as copying some KiB, but the answers should still be in the cache when the kernel copies
/// them, and a client that does not read must not fill the server's memory.
pub(super) const SEND_AT_BYTES: usize = 256 << 10;
/// Longest run of bytes kept unparsed: one request.
const MAX_RECEIVED_BYTES: usize = REQUEST_HEADER_BYTES + MAX_PAYLOAD_BYTES;
/// Room that a receiving call offers, unless the request at the front needs more.
const RECEIVE_BYTES: usize = 64 << 10;
/// How long descriptors may wait until the client receives them: they are scarce.
pub(super) const DESCRIPTORS_DEADLINE: Duration = Duration::from_secs(5);
/// Receiving calls in one turn, before other connections have theirs. What is left raises another event.
const RECEIVES_PER_TURN: usize = 16;
/// How many requests of a connection without a key are refused before it is closed: a client may try keys of
/// leases that have ended before a valid one.
pub(super) const REFUSALS_WITHOUT_KEY: u32 = 64;
/// How often one turn may fill the buffer of answers, with 256 KiB or more each time. Otherwise a client that
/// reads its answers as fast as they come would make others wait for all that it has asked for.
pub(super) const FILLINGS_PER_TURN: usize = 4;
/// The same as [`RECEIVE_BYTES`] under [`Allowance::Small`].
const SMALL_RECEIVE_BYTES: usize = 4 << 10;
/// Longest request or answer of which every connection may keep a part: a call with its header. A request's
/// header is the longer one.
const SMALL_FRAME_BYTES: usize = REQUEST_HEADER_BYTES + MAX_CALL_BYTES;
/// What every connection may keep between its turns: such a frame, and the beginnings of the next ones.
pub(super) const SMALL_BYTES: usize = SMALL_FRAME_BYTES + 2 * SMALL_RECEIVE_BYTES;
/// Regions attached on one connection: 4 Ki regions of 64 MiB are 256 GiB.
const MAX_ATTACHED: usize = 4 << 10;
const _: () = assert!(MAX_RECEIVED_BYTES + RECEIVE_BYTES <= BUFFER_BYTES, "received into a large buffer");

/// What became of a connection after it was served.
pub(super) enum Verdict {
    /// It goes on.
    Keep,
    /// Its greeting has arrived and awaits an answer.
    Greeted(Hello),
    /// The peer is gone.
    Close,
    /// The peer sent something malformed.
    Reject(FrameError),
    /// The peer has sent too many requests without a key.
    Useless,
}

/// The host that serves connections, and the places for them.
pub(super) struct Terms<'a> {
    pub(super) host: &'a dyn Host,
    pub(super) places: &'a Places,
    pub(super) complaints: &'a Complaints,
    pub(super) now: Instant,
}

/// What a connection may keep when its turn ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Allowance {
    /// [`SMALL_BYTES`], and the rest of a large request that was begun.
    Small,
    /// Two large buffers.
    Large,
}

/// A refused WRITE whose payload is being received and discarded.
struct Discarding {
    token: u64,
    refusal: Refusal,
    left: usize,
}

/// Whether a connection is in use, and since when.
pub(super) enum Standing {
    /// It has sent no greeting for this long.
    Ungreeted(Duration),
    /// It has greeted, and has had nothing attached for this long.
    Unattached(Duration),
    /// It has something attached, and has sent nothing for this long. (Loads and stores of shared memory are
    /// not seen here.)
    Attached(Duration),
}

/// One connection.
pub(super) struct Connection {
    stream: OwnedFd,
    origin: Origin,
    passes_descriptors: bool,
    last_active: Instant,
    /// When it was accepted, or last changed between having something attached and having nothing.
    without_key_since: Instant,
    /// Requests refused since then.
    refused_without_key: u32,
    /// The account to which the server charges it, while something is attached.
    account: Option<Account>,
    /// The account to charge it to once the first attachment is done.
    next_account: Option<Account>,
    stage: Stage,
    received: Vec<u8>,
    /// How much of `received` has been served.
    served: usize,
    /// Up to where requests were scanned to prefetch the memory that they name.
    fetched: usize,
    discarding: Option<Discarding>,
    /// The request at the front is a large one of which a part has arrived: the rest may be received.
    begun: bool,
    front: Awaits,
    answers: Answers,
    /// What the server's poll waits for.
    pub(super) watched: EventFlags,
    attached: Attached,
    /// Something has arrived since this was last taken.
    active: bool,
    /// The ring for calls, while it is not polled.
    ring: Option<Ring>,
    /// The client has asked the server to poll the ring.
    kicked: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Silent,
    Greeted,
    Open,
    /// The greeting named another node or an incarnation that is not in force: it gets its answer and nothing
    /// else.
    Declined,
}

/// What the request at the front waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Awaits {
    /// Its own arrival: it is not here, or not all of it, and the rest may be received.
    Bytes,
    /// Answers to earlier requests have to be sent first.
    Sending,
    /// A larger allowance. No more of it may be received before.
    Share,
    /// The next turn.
    Turn,
}

/// Whether a receiving call was offered more room than it used.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Room {
    Left,
    Full,
}

impl Connection {
    pub(super) fn new(stream: OwnedFd, origin: Origin, passes_descriptors: bool, now: Instant) -> Self {
        Connection {
            stream,
            origin,
            passes_descriptors,
            last_active: now,
            without_key_since: now,
            refused_without_key: 0,
            account: None,
            next_account: None,
            stage: Stage::Silent,
            received: Vec::new(),
            served: 0,
            fetched: 0,
            discarding: None,
            begun: false,
            front: Awaits::Bytes,
            answers: Answers::default(),
            watched: EventFlags::IN,
            attached: Attached::default(),
            active: false,
            ring: None,
            kicked: false,
        }
    }

    pub(super) fn stream(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Where it comes from.
    pub(super) fn origin(&self) -> Origin {
        self.origin
    }

    /// The account to which it is charged.
    pub(super) fn account(&self) -> Option<Account> {
        self.account
    }

    /// Whether it has presented its first key, or detached its last region, and the server has not noted that
    /// yet.
    #[inline]
    pub(super) fn has_changed_sides(&self) -> bool {
        self.account.is_some() == self.attached.is_empty()
    }

    /// Notes such a change; returns the accounts before and after it.
    pub(super) fn change_sides(&mut self, now: Instant) -> (Option<Account>, Option<Account>) {
        let next = if self.attached.is_empty() { None } else { self.next_account };
        self.without_key_since = now;
        self.refused_without_key = 0;
        (std::mem::replace(&mut self.account, next), next)
    }

    /// Whether the connection is in use. It is of no use before its greeting, or while nothing is attached on
    /// it.
    pub(super) fn standing(&self, now: Instant) -> Standing {
        let age = now.saturating_duration_since(self.without_key_since);
        let calls = self.stage == Stage::Open && self.passes_descriptors && self.ring.is_none();
        match self.stage {
            Stage::Silent => Standing::Ungreeted(age),
            _ if self.attached.is_empty() => Standing::Unattached(age),
            _ if calls => Standing::Attached(Duration::ZERO),
            _ => Standing::Attached(now.saturating_duration_since(self.last_active)),
        }
    }

    /// Regions and epochs of all that is attached.
    pub(super) fn grants(&self) -> impl Iterator<Item = (u32, Epoch)> {
        self.attached.grants()
    }

    /// Whether something has arrived since this was last called.
    pub(super) fn take_activity(&mut self) -> bool {
        std::mem::take(&mut self.active)
    }

    /// Whether answers wait for the peer to read.
    pub(super) fn is_blocked(&self) -> bool {
        self.answers.waiting_bytes() > 0
    }

    /// The events after which the connection is worth serving again.
    pub(super) fn interest(&self) -> EventFlags {
        match () {
            () if self.is_blocked() || self.front == Awaits::Turn => EventFlags::OUT,
            () if self.front == Awaits::Share => EventFlags::empty(),
            () => EventFlags::IN,
        }
    }

    /// Whether the request at the front waits for a larger allowance.
    pub(super) fn is_starved(&self) -> bool {
        self.front == Awaits::Share
    }

    /// Whether any region is attached. A connection without a key never gets more than the small allowance.
    pub(super) fn has_attached(&self) -> bool {
        !self.attached.is_empty()
    }

    /// Whether more than [`SMALL_BYTES`] is kept, or will be.
    pub(super) fn keeps_much(&self) -> bool {
        self.begun || self.kept_bytes() > SMALL_BYTES
    }

    /// Memory of its buffers.
    #[cfg(test)]
    pub(super) fn allocated_bytes(&self) -> usize {
        self.received.capacity() + self.answers.bytes.capacity()
    }

    /// Bytes received and not served yet.
    #[cfg(test)]
    pub(super) fn unserved_bytes(&self) -> usize {
        self.received.len() - self.served
    }

    /// Descriptors to be sent.
    pub(super) fn waiting_descriptors(&self) -> usize {
        self.answers.waiting_descriptors()
    }

    /// Whether the peer has left descriptors waiting for too long instead of reading the answers that carry
    /// them. Nothing is received from it meanwhile, so `last_active` stands still.
    pub(super) fn withholds_descriptors(&self, now: Instant) -> bool {
        self.waiting_descriptors() > 0
            && now.saturating_duration_since(self.last_active) > DESCRIPTORS_DEADLINE
    }

    fn kept_bytes(&self) -> usize {
        self.received.len() - self.served + self.answers.waiting_bytes()
    }

    /// The ring, to be polled, if the client has asked for that.
    pub(super) fn take_kicked_ring(&mut self) -> Option<Ring> {
        self.ring.take_if(|_| std::mem::take(&mut self.kicked))
    }

    /// Takes the ring back: it is not polled for now.
    pub(super) fn keep_ring(&mut self, ring: Ring, now: Instant) {
        self.last_active = now;
        self.ring = Some(ring);
    }

    /// Tells a sleeping client that there is something in the ring; false when the peer is gone.
    pub(super) fn wake_peer(&mut self) -> bool {
        if self.is_blocked() {
            return true; // the answers that it has not read yet wake it as well
        }
        self.answers.bytes.extend_from_slice(&ResponseHeader::WAKE.encode());
        self.answers.send(&self.stream)
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
            _ => Stage::Declined,
        };
        self.served += HELLO_BYTES;
        self.answers.bytes.extend_from_slice(&reply.encode());
        if self.passes_descriptors && self.stage == Stage::Open {
            let (ring, memory) = Ring::create()?;
            self.answers.attach_descriptors(vec![memory]);
            self.ring = Some(ring);
        }
        Ok(())
    }

    /// Serves received requests, as far as answers can be sent and the allowance permits.
    pub(super) fn serve(
        &mut self,
        terms: &Terms<'_>,
        spare: &mut SpareBuffers,
        allowance: Allowance,
    ) -> Verdict {
        spare.widen(&mut self.received);
        self.answers.widen(spare);
        let verdict = self.turn(terms, allowance);
        self.answers.narrow(spare);
        let served = spare.narrow(&mut self.received, self.served);
        self.fetched = self.fetched.saturating_sub(self.served - served);
        self.served = served;
        verdict
    }

    fn turn(&mut self, terms: &Terms<'_>, allowance: Allowance) -> Verdict {
        let mut receives = 0;
        let mut fillings = 0;
        let mut drained = false;
        self.front = Awaits::Sending;
        // Unsent answers first: the buffer has room for one turn's answers.
        if !self.answers.send(&self.stream) {
            return Verdict::Close;
        }
        if self.is_blocked() {
            return Verdict::Keep;
        }
        loop {
            match self.serve_received(terms, allowance) {
                Ok(None) => {}
                Ok(Some(verdict)) => return verdict,
                Err(error) => return Verdict::Reject(error),
            }
            if !self.answers.send(&self.stream) {
                return Verdict::Close;
            }
            if self.is_blocked() {
                return Verdict::Keep;
            }
            if self.stage == Stage::Declined {
                return Verdict::Close;
            }
            if self.asks_in_vain() {
                return Verdict::Useless;
            }
            match self.front {
                Awaits::Bytes => {}
                // The answers have been sent, and no event would come for the requests behind them.
                Awaits::Sending => {
                    fillings += 1;
                    if fillings < FILLINGS_PER_TURN {
                        continue;
                    }
                    self.front = Awaits::Turn;
                    return Verdict::Keep;
                }
                Awaits::Share | Awaits::Turn => return Verdict::Keep,
            }
            if drained || receives == RECEIVES_PER_TURN || receives > 0 && self.attached.is_empty() {
                return Verdict::Keep;
            }
            receives += 1;
            match self.receive(allowance) {
                Ok((0, _)) => return Verdict::Close,
                Ok((_, room)) => {
                    self.active = true;
                    if self.stage != Stage::Silent {
                        self.last_active = terms.now;
                    }
                    // Less arrived than there was room for: another call would find nothing more.
                    drained = room == Room::Left;
                }
                Err(Errno::AGAIN | Errno::INTR) => return Verdict::Keep,
                Err(_) => return Verdict::Close,
            }
        }
    }

    /// Serves whole requests until the next one has to wait for something.
    fn serve_received(
        &mut self,
        terms: &Terms<'_>,
        allowance: Allowance,
    ) -> Result<Option<Verdict>, FrameError> {
        if self.stage == Stage::Silent {
            self.front = Awaits::Bytes;
            return Ok(match Hello::decode(&self.received)? {
                Decoded::Incomplete => None,
                Decoded::Complete(hello) => {
                    self.stage = Stage::Greeted;
                    Some(Verdict::Greeted(hello))
                }
            });
        }
        self.fetch_ahead();
        self.front = self.serve_requests(terms, allowance)?;
        Ok(None)
    }

    /// Whether too many requests were refused while the connection had no key.
    fn asks_in_vain(&self) -> bool {
        self.refused_without_key > REFUSALS_WITHOUT_KEY && self.attached.is_empty()
    }

    fn serve_requests(&mut self, terms: &Terms<'_>, allowance: Allowance) -> Result<Awaits, FrameError> {
        while self.stage == Stage::Open && !self.asks_in_vain() {
            if !self.answers.have_room() {
                return Ok(Awaits::Sending);
            }
            if self.discarding.is_some() && !self.discard() {
                break;
            }
            let Decoded::Complete(header) = RequestHeader::decode(&self.received[self.served..])? else {
                break;
            };
            if header.opcode == Opcode::Write
                && let Err(refusal) = self.attached.check(header.region, header.epoch)
            {
                self.served += REQUEST_HEADER_BYTES;
                let left = header.payload as usize;
                self.discarding = Some(Discarding { token: header.token, refusal, left });
                continue;
            }
            let frame_bytes = REQUEST_HEADER_BYTES + header.payload as usize;
            let is_whole = self.received.len() - self.served >= frame_bytes;
            if allowance == Allowance::Small && !self.fits_small(&header, is_whole) {
                // Once the connection's own answers are sent, the request may fit.
                return Ok(if self.is_blocked() { Awaits::Sending } else { Awaits::Share });
            }
            if !is_whole {
                self.begun = frame_bytes > SMALL_FRAME_BYTES;
                break;
            }
            self.begun = false;
            if header.opcode == Opcode::Look {
                if !self.passes_descriptors || self.attached.is_empty() {
                    return Err(FrameError::Malformed); // there is no ring, or it is not polled
                }
                self.kicked = true;
                self.served += frame_bytes;
                continue;
            }
            // The payload is lent out of `self` so that answers can be appended meanwhile.
            let received = std::mem::take(&mut self.received);
            let payload = &received[self.served + REQUEST_HEADER_BYTES..self.served + frame_bytes];
            self.serve_request(terms, &header, payload);
            self.received = received;
            self.served += frame_bytes;
        }
        Ok(Awaits::Bytes)
    }

    /// Discards what was received of a refused WRITE's payload; true once that was all of it, and the WRITE
    /// is answered.
    fn discard(&mut self) -> bool {
        let Some(discarding) = &mut self.discarding else { return true };
        let come = discarding.left.min(self.received.len() - self.served);
        discarding.left -= come;
        self.served += come;
        if discarding.left > 0 {
            return false;
        }
        let (token, refusal) = (discarding.token, discarding.refusal);
        let response = ResponseHeader { outcome: Err(refusal), payload: 0, token, value: 0 };
        self.answers.bytes.extend_from_slice(&response.encode());
        self.discarding = None;
        self.refused_without_key += u32::from(self.attached.is_empty());
        true
    }

    /// Prefetches the memory that requests behind the next one name. Serving takes locks, which wait for all
    /// earlier loads, so that cache misses of different requests would not overlap by themselves.
    fn fetch_ahead(&mut self) {
        if self.stage != Stage::Open {
            return;
        }
        let discarded = self.discarding.as_ref().map_or(0, |discarding| discarding.left);
        let mut at = self.fetched.max(self.served + discarded);
        if at > self.received.len() {
            return;
        }
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

    /// Receives once; returns how many bytes arrived, and whether there was room for more.
    fn receive(&mut self, allowance: Allowance) -> Result<(usize, Room), Errno> {
        self.received.drain(..self.served);
        self.fetched = self.fetched.saturating_sub(self.served);
        self.served = 0;
        let old = self.received.len();
        debug_assert!(old < MAX_RECEIVED_BYTES, "what is whole is served before more comes");
        let is_small = allowance == Allowance::Small && !self.begun;
        let most = if is_small { SMALL_BYTES } else { MAX_RECEIVED_BYTES + RECEIVE_BYTES };
        let least = if allowance == Allowance::Small { SMALL_RECEIVE_BYTES } else { RECEIVE_BYTES };
        let wanted = self.missing_bytes().max(least).min(most.saturating_sub(old));
        self.received.reserve(wanted);
        let room = &mut self.received.spare_capacity_mut()[..wanted];
        let (_, bytes) = rustix::net::recv(&self.stream, room, RecvFlags::DONTWAIT)?;
        // SAFETY: the kernel has filled the first `bytes` bytes of the room behind `old`, which is within the
        // capacity.
        unsafe { self.received.set_len(old + bytes) };
        Ok((bytes, if bytes < wanted { Room::Left } else { Room::Full }))
    }

    /// How much of the request at the front has not arrived yet.
    fn missing_bytes(&self) -> usize {
        if let Some(discarding) = &self.discarding {
            return discarding.left.min(RECEIVE_BYTES);
        }
        match RequestHeader::decode(&self.received) {
            Ok(Decoded::Complete(header)) if self.stage == Stage::Open => {
                (REQUEST_HEADER_BYTES + header.payload as usize).saturating_sub(self.received.len())
            }
            _ => 0,
        }
    }
}
