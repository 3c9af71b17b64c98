//! One queue pair to one node.
//!
//! L1. Operations go to the card in the order posted. The node's processor carries out a message (attach,
//!     detach, call) after the card has delivered it. So operations posted behind a message wait for its
//!     answer.
//! L2. A work request that was not signalled has completed once a later one of its queue pair has.
//! L3. A receive buffer for the answer is posted before each message is sent, so every answer finds one.
//! L4. Dropping the link destroys the queue pair first. After that, the card accesses no memory for the link.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use farpool_fabric::{
    Done, Link, LinkClosed, LocalSlice, MAX_IN_FLIGHT, Op, Outcome, Posted, Readiness, Uncertain,
};
use farpool_wire::{
    AccessKey, Decoded, Epoch, Hello, HelloReply, Opcode, REQUEST_HEADER_BYTES, RESPONSE_HEADER_BYTES,
    Refusal, RequestHeader, ResponseHeader, VERBS_ATTACHED_BYTES, VerbsAttached, VerbsWelcome,
};

use crate::client::attached::{AttachedRegions, Target};
use crate::client::chain::Chain;
use crate::client::shared::{ClientDevice, Shared};
use crate::cm::{CmId, Depths, Event, local_address_towards};
use crate::error::VerbsError;
use crate::memory::Block;
use crate::{INLINE_BYTES, MESSAGES_IN_FLIGHT, ffi};

/// Most work requests in flight on one link: as many as an endpoint may have.
const SEND_DEPTH: usize = MAX_IN_FLIGHT;
/// Room for one work request in the link's own memory: the head of its message, and the head of the answer or
/// the word before an atomic.
const SLOT_BYTES: usize = 128;
/// Offset of the second of the two.
const ANSWER_AT: usize = 64;
/// Marks the id of a work request that waits for an answer.
const ANSWER_BIT: u64 = 1 << 31;
/// The bits below, which count work requests.
const SEQUENCE_MASK: u32 = (1 << 31) - 1;
/// Smallest path MTU: a longer WRITE may have arrived in part when the node's card refuses the rest.
const ONE_PACKET_BYTES: usize = 256;

const _: () = assert!(REQUEST_HEADER_BYTES + AccessKey::BYTES <= ANSWER_AT);
const _: () = assert!(RESPONSE_HEADER_BYTES + VERBS_ATTACHED_BYTES <= SLOT_BYTES - ANSWER_AT);
const _: () = assert!((SEQUENCE_MASK as usize + 1).is_multiple_of(SEND_DEPTH));

/// Whether a completion is that of an answer and not of a request.
pub(super) fn is_answer(wr_id: u64) -> bool {
    wr_id & ANSWER_BIT != 0
}

/// One queue pair to one node.
pub(super) struct VerbsLink {
    shared: Rc<Shared>,
    device: Rc<ClientDevice>,
    serial: u32,
    hello: Hello,
    stage: Stage,
    /// `None` only during drop.
    id: Option<CmId>,
    slots: Block,
    inline_bytes: usize,
    atomics_by_message: bool,
    attached: AttachedRegions,
    /// Operations that were posted, but not handed to the card yet.
    waiting: VecDeque<Posted>,
    /// How many of `waiting` attach or detach.
    waiting_changes: usize,
    /// Operations that were handed to the card and are not reported as done yet, in order.
    flight: VecDeque<InFlight>,
    /// Sequence number of the first of `flight`.
    oldest: u32,
    /// How many of `flight`, from the first, the card has reported as sent.
    sent: usize,
    /// How many of `flight` are messages.
    messages: usize,
    closed: Option<LinkClosed>,
    chain: Chain,
    /// Scratch, kept for its capacity.
    completions: Vec<ffi::Wc>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    ResolvingAddress,
    ResolvingRoute,
    Connecting,
    Open,
}

struct InFlight {
    slot: u32,
    kind: Kind,
    /// The answer to a message, once it has arrived.
    answer: Option<Outcome>,
}

#[derive(Clone, Copy)]
enum Kind {
    Read,
    Write { bytes: usize },
    Atomic,
    Message(Message),
}

/// What the answer to a message carries.
#[derive(Clone, Copy)]
enum Message {
    Attachment {
        region: u32,
        epoch: Epoch,
    },
    /// At most this many bytes.
    Bytes(usize),
    Value,
}

const LOST: LinkClosed = LinkClosed { cause: Uncertain::ConnectionLost };
const BROKEN: LinkClosed = LinkClosed { cause: Uncertain::Protocol };

impl VerbsLink {
    /// Starts to connect. Faults of this machine's set-up are errors here.
    pub(super) fn open(shared: Rc<Shared>, node: SocketAddr, hello: Hello) -> io::Result<Self> {
        let id = CmId::new(&shared.channel)?;
        let device = shared.device(id.bind(local_address_towards(node)?)?)?;
        let slots = Block::new(&device.domain, SEND_DEPTH * SLOT_BYTES)?;
        id.resolve_address(node, shared.deadline)?;
        let serial = shared.enter(id.key());
        Ok(VerbsLink {
            shared,
            device,
            serial,
            hello,
            stage: Stage::ResolvingAddress,
            id: Some(id),
            slots,
            inline_bytes: 0,
            atomics_by_message: false,
            attached: AttachedRegions::default(),
            waiting: VecDeque::new(),
            waiting_changes: 0,
            flight: VecDeque::with_capacity(SEND_DEPTH),
            oldest: 0,
            sent: 0,
            messages: 0,
            closed: None,
            chain: Chain::with_capacity(SEND_DEPTH),
            completions: Vec::new(),
        })
    }

    fn id(&self) -> &CmId {
        self.id.as_ref().expect("present until drop")
    }

    fn is_message(&self, op: &Op) -> bool {
        match op {
            Op::Attach(_) | Op::Detach | Op::Call { .. } => true,
            Op::CompareAndSwap { .. } | Op::FetchAndAdd { .. } => self.atomics_by_message,
            Op::Read | Op::Write => false,
        }
    }

    fn poll_once(&mut self, done: &mut Vec<Done>) -> Result<(), LinkClosed> {
        self.shared.take_events(self.stage != Stage::Open).map_err(|error| self.failed("events", &error))?;
        while let Some(event) = self.shared.next_event(self.serial) {
            self.handle(event)?;
        }
        if self.stage != Stage::Open {
            return Ok(());
        }
        self.submit(done)?;
        let before = done.len();
        self.collect(done)?;
        if done.len() > before && !self.waiting.is_empty() {
            self.submit(done)?; // operations may have waited for an answer
        }
        Ok(())
    }

    fn failed(&self, what: &str, error: &dyn std::fmt::Display) -> LinkClosed {
        tracing::warn!(node = %self.hello.node, %error, "RDMA: {what}");
        LOST
    }

    /// Handles an event: takes the next step of connecting, or ends the link.
    fn handle(&mut self, event: Event) -> Result<(), LinkClosed> {
        match (self.stage, event.kind) {
            (Stage::ResolvingAddress, ffi::EVENT_ADDR_RESOLVED) => {
                let routed = self.id().resolve_route(self.shared.deadline);
                routed.map_err(|error| self.failed("no route to the node", &error))?;
                self.stage = Stage::ResolvingRoute;
            }
            (Stage::ResolvingRoute, ffi::EVENT_ROUTE_RESOLVED) => {
                self.connect().map_err(|error| self.failed("connecting", &error))?;
                self.stage = Stage::Connecting;
            }
            (Stage::Connecting, ffi::EVENT_ESTABLISHED) => {
                self.greeted(&event.private_data)?;
                self.stage = Stage::Open;
            }
            (_, ffi::EVENT_TIMEWAIT_EXIT) => {}
            (Stage::Connecting, ffi::EVENT_REJECTED) => return Err(self.rejected(&event)),
            (stage, kind) => {
                tracing::debug!(node = %self.hello.node, ?stage, kind, status = event.status, "RDMA connection ended");
                return Err(LOST);
            }
        }
        Ok(())
    }

    fn connect(&mut self) -> Result<(), VerbsError> {
        let capabilities = self.device.capabilities;
        self.id().follow_deadline(self.shared.deadline);
        let cap = ffi::QpCap {
            max_send_wr: SEND_DEPTH as u32,
            max_recv_wr: MESSAGES_IN_FLIGHT as u32,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: INLINE_BYTES,
        };
        let (domain, completions) = (&self.device.domain, self.device.completions.raw());
        // SAFETY: `device` holds both, and `drop` destroys the queue pair before it lets go of it.
        let inline = unsafe { self.id().create_queue_pair(domain, completions, cap)? };
        self.inline_bytes = inline as usize;
        let depths = Depths {
            responder: 1,
            initiator: capabilities.initiator_depth.min(capabilities.responder_depth),
        };
        self.id().connect(&self.hello.encode(), depths)
    }

    fn greeted(&mut self, private_data: &[u8]) -> Result<(), LinkClosed> {
        let welcome = VerbsWelcome::decode(private_data).map_err(|error| {
            self.failed("the node's greeting is malformed", &error);
            BROKEN
        })?;
        self.check_reply(&welcome.reply)?;
        self.atomics_by_message = welcome.atomics_by_message || !self.device.capabilities.atomics;
        Ok(())
    }

    fn check_reply(&self, reply: &HelloReply) -> Result<(), LinkClosed> {
        if reply.node == self.hello.node && reply.incarnation == self.hello.incarnation {
            return Ok(());
        }
        tracing::warn!(wanted = %self.hello.node, found = %reply.node, "another node or a newer incarnation answered");
        Err(BROKEN)
    }

    fn rejected(&self, event: &Event) -> LinkClosed {
        match HelloReply::decode(&event.private_data) {
            Ok(Decoded::Complete(reply)) => self.check_reply(&reply).err().unwrap_or(LOST),
            _ => {
                tracing::debug!(node = %self.hello.node, status = event.status, "the RDMA connection was rejected");
                LOST
            }
        }
    }

    /// Hands to the card all operations that may go, with one doorbell.
    fn submit(&mut self, done: &mut Vec<Done>) -> Result<(), LinkClosed> {
        self.chain.clear();
        while self.flight.len() < SEND_DEPTH
            && let Some(posted) = self.waiting.front().copied()
        {
            let message = self.is_message(&posted.op);
            if (message && self.messages == MESSAGES_IN_FLIGHT) || (!message && self.messages > 0) {
                break; // L1, L3
            }
            self.waiting.pop_front();
            self.waiting_changes -= changes_attachments(&posted.op) as usize;
            if message {
                self.submit_message(&posted)?;
            } else {
                match self.attached.target(&posted) {
                    Ok(target) => self.submit_one_sided(&posted, target),
                    Err(refusal) => done.push(Done { slot: posted.slot, outcome: Outcome::Refused(refusal) }),
                }
            }
        }
        if self.chain.len() == 0 {
            return Ok(());
        }
        let count = self.chain.len();
        let first = self.chain.link();
        // SAFETY: the pieces lie in the arena and in `slots`. They belong to the operations in flight until
        // these complete or `drop` has destroyed the queue pair.
        unsafe { self.id().post_send(first) }.map_err(|error| self.failed("posting to the card", &error))?;
        self.shared.count_doorbell(count);
        Ok(())
    }

    /// The id of the next work request, and its place in `slots`.
    fn next_work_request(&self) -> (u64, usize) {
        let sequence = self.oldest.wrapping_add(self.flight.len() as u32) & SEQUENCE_MASK;
        ((self.serial as u64) << 32 | sequence as u64, sequence as usize % SEND_DEPTH * SLOT_BYTES)
    }

    fn submit_one_sided(&mut self, posted: &Posted, target: Target) {
        let (wr_id, place) = self.next_work_request();
        let rdma = ffi::RemotePlace { remote_addr: target.address, rkey: target.remote_key };
        let atomic = |compare_add, swap| ffi::Remote {
            atomic: ffi::RemoteAtomic {
                remote_addr: target.address,
                compare_add,
                swap,
                rkey: target.remote_key,
            },
        };
        let local = posted.local;
        let (opcode, remote, kind) = match posted.op {
            Op::Read => (ffi::WR_RDMA_READ, ffi::Remote { rdma }, Kind::Read),
            Op::Write => (ffi::WR_RDMA_WRITE, ffi::Remote { rdma }, Kind::Write { bytes: local.bytes }),
            Op::CompareAndSwap { expected, new } => {
                (ffi::WR_ATOMIC_CMP_AND_SWP, atomic(expected, new), Kind::Atomic)
            }
            Op::FetchAndAdd { addend } => (ffi::WR_ATOMIC_FETCH_AND_ADD, atomic(addend, 0), Kind::Atomic),
            Op::Attach(_) | Op::Detach | Op::Call { .. } => unreachable!("sent as messages"),
        };
        let piece = match kind {
            Kind::Atomic => self.slots.piece(place + ANSWER_AT, 8),
            _ if local.bytes == 0 => self.slots.piece(place, 0),
            _ => self.device.piece(local),
        };
        let mut flags = if posted.fence { ffi::SEND_FENCE } else { 0 };
        if matches!(kind, Kind::Write { bytes } if bytes <= self.inline_bytes) {
            flags |= ffi::SEND_INLINE;
        }
        self.chain.push(wr_id, opcode, flags, remote, &[piece]);
        self.flight.push_back(InFlight { slot: posted.slot, kind, answer: None });
    }

    fn submit_message(&mut self, posted: &Posted) -> Result<(), LinkClosed> {
        let (wr_id, place) = self.next_work_request();
        let (opcode, operands, request, message) = message_of(posted);
        let header = RequestHeader {
            opcode,
            fence: posted.fence,
            payload: (operands.len() + request.bytes) as u32,
            token: posted.slot as u64,
            region: posted.region,
            length: match message {
                Message::Bytes(room) => room as u32,
                Message::Attachment { .. } | Message::Value => 0,
            },
            epoch: posted.epoch,
            offset: posted.offset,
        };
        if opcode == Opcode::Detach {
            self.attached.remove(posted.region);
        }
        self.slots.write(place, &header.encode());
        self.slots.write(place + REQUEST_HEADER_BYTES, operands.as_slice());
        let room = match message {
            Message::Attachment { .. } => VERBS_ATTACHED_BYTES,
            Message::Bytes(_) | Message::Value => 0,
        };
        let mut rooms =
            [self.slots.piece(place + ANSWER_AT, RESPONSE_HEADER_BYTES + room), self.slots.piece(0, 0)];
        if matches!(message, Message::Bytes(1..)) {
            rooms[1] = self.device.piece(posted.local);
        }
        let mut receive = ffi::RecvWr {
            wr_id: wr_id | ANSWER_BIT,
            next: std::ptr::null_mut(),
            sg_list: rooms.as_mut_ptr(),
            num_sge: if rooms[1].length > 0 { 2 } else { 1 },
        };
        // SAFETY: the memory that the pieces name lies in the arena and in `slots`, and belongs to the
        // operation until it has ended; the list of pieces is read during the call.
        unsafe { self.id().post_receive(&mut receive) }
            .map_err(|error| self.failed("posting room for an answer", &error))?;
        let head = self.slots.piece(place, REQUEST_HEADER_BYTES + operands.len());
        let body = if request.bytes > 0 { self.device.piece(request) } else { self.slots.piece(0, 0) };
        let mut flags = if posted.fence { ffi::SEND_FENCE } else { 0 };
        if (head.length + body.length) as usize <= self.inline_bytes {
            flags |= ffi::SEND_INLINE;
        }
        let remote = ffi::Remote { rdma: ffi::RemotePlace { remote_addr: 0, rkey: 0 } };
        self.chain.push(wr_id, ffi::WR_SEND, flags, remote, &[head, body]);
        self.flight.push_back(InFlight { slot: posted.slot, kind: Kind::Message(message), answer: None });
        self.messages += 1;
        Ok(())
    }

    /// Takes what the card has reported.
    fn collect(&mut self, done: &mut Vec<Done>) -> Result<(), LinkClosed> {
        self.shared.take_completions(&self.device).map_err(|error| self.failed("completions", &error))?;
        let mut completions = std::mem::take(&mut self.completions);
        self.shared.swap_completions(self.serial, &mut completions);
        let mut result = Ok(());
        for completion in &completions {
            result = self.completed(completion, done);
            if result.is_err() {
                break;
            }
        }
        completions.clear();
        self.completions = completions;
        self.release(done);
        result
    }

    fn completed(&mut self, completion: &ffi::Wc, done: &mut Vec<Done>) -> Result<(), LinkClosed> {
        let sequence = completion.wr_id as u32 & SEQUENCE_MASK;
        let place = (sequence.wrapping_sub(self.oldest) & SEQUENCE_MASK) as usize;
        if place >= self.flight.len() {
            return Err(BROKEN); // the card reports a work request that it was not given
        }
        if completion.status != ffi::WC_SUCCESS {
            return Err(self.work_failed(completion, place, done));
        }
        if is_answer(completion.wr_id) {
            let answer = self.read_answer(sequence, place, completion.byte_len as usize)?;
            self.flight[place].answer = Some(answer);
        } else {
            self.sent = self.sent.max(place + 1); // L2
        }
        Ok(())
    }

    /// The queue pair is broken. Distinguishes a refusal by the node's card from an unknown outcome.
    fn work_failed(&mut self, completion: &ffi::Wc, place: usize, done: &mut Vec<Done>) -> LinkClosed {
        let failed = &self.flight[place];
        let slot = failed.slot;
        let (status, node) = (completion.status, self.hello.node);
        tracing::debug!(%node, status, vendor = completion.vendor_err, "an RDMA work request failed");
        match status {
            ffi::WC_REM_ACCESS_ERR if !is_answer(completion.wr_id) => {
                let outcome = match failed.kind {
                    Kind::Write { bytes } if bytes > ONE_PACKET_BYTES => {
                        Outcome::Unknown(Uncertain::EpochMoved)
                    }
                    _ => Outcome::Refused(Refusal::StaleEpoch),
                };
                // What was sent before it has completed, but an error confirms nothing else: it stays
                // unknown.
                self.release(done);
                done.push(Done { slot, outcome });
                LinkClosed { cause: Uncertain::EpochMoved }
            }
            ffi::WC_LOC_LEN_ERR => BROKEN,
            _ => LOST,
        }
    }

    fn read_answer(&mut self, sequence: u32, place: usize, bytes: usize) -> Result<Outcome, LinkClosed> {
        let at = sequence as usize % SEND_DEPTH * SLOT_BYTES + ANSWER_AT;
        let mut head = [0; RESPONSE_HEADER_BYTES];
        self.slots.read(at, &mut head);
        let Ok(Decoded::Complete(header)) = ResponseHeader::decode(&head) else { return Err(BROKEN) };
        let flying = &self.flight[place];
        let payload = header.payload as usize;
        let Kind::Message(message) = flying.kind else { return Err(BROKEN) };
        if header.token != flying.slot as u64 || bytes != RESPONSE_HEADER_BYTES + payload {
            return Err(BROKEN);
        }
        if let Err(refusal) = header.outcome {
            return Ok(Outcome::Refused(refusal));
        }
        match message {
            Message::Attachment { region, epoch } if payload == VERBS_ATTACHED_BYTES => {
                let mut body = [0; VERBS_ATTACHED_BYTES];
                self.slots.read(at + RESPONSE_HEADER_BYTES, &mut body);
                let attached = VerbsAttached::decode(&body).map_err(|_| BROKEN)?;
                let inserted = self.attached.insert(region, epoch, attached);
                Ok(inserted.map_or_else(Outcome::Refused, |()| Outcome::Done(0)))
            }
            Message::Bytes(room) if payload <= room => Ok(Outcome::Done(payload as u64)),
            Message::Value if payload == 0 => Ok(Outcome::Done(header.value)),
            _ => Err(BROKEN),
        }
    }

    /// Reports the operations that have finished, in order.
    fn release(&mut self, done: &mut Vec<Done>) {
        while self.sent > 0
            && let Some(flying) = self.flight.front()
        {
            let outcome = match flying.kind {
                Kind::Read | Kind::Write { .. } => Outcome::Done(0),
                Kind::Atomic => {
                    let mut word = [0; 8];
                    self.slots.read(self.oldest as usize % SEND_DEPTH * SLOT_BYTES + ANSWER_AT, &mut word);
                    Outcome::Done(u64::from_ne_bytes(word))
                }
                Kind::Message(_) => match flying.answer {
                    Some(outcome) => outcome,
                    None => return,
                },
            };
            self.messages -= matches!(flying.kind, Kind::Message(_)) as usize;
            done.push(Done { slot: flying.slot, outcome });
            self.flight.pop_front();
            self.oldest = self.oldest.wrapping_add(1) & SEQUENCE_MASK;
            self.sent -= 1;
        }
    }
}

fn changes_attachments(op: &Op) -> bool {
    matches!(op, Op::Attach(_) | Op::Detach)
}

/// Operands of a message: at most a key or two words.
struct Operands {
    bytes: [u8; AccessKey::BYTES],
    length: usize,
}

impl Operands {
    const NONE: Operands = Operands { bytes: [0; AccessKey::BYTES], length: 0 };

    fn words(words: &[u64]) -> Self {
        let mut operands = Operands { length: 8 * words.len(), ..Operands::NONE };
        for (place, word) in words.iter().enumerate() {
            operands.bytes[8 * place..8 * place + 8].copy_from_slice(&word.to_le_bytes());
        }
        operands
    }

    fn len(&self) -> usize {
        self.length
    }

    fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

fn message_of(posted: &Posted) -> (Opcode, Operands, LocalSlice, Message) {
    match posted.op {
        Op::Attach(key) => {
            let operands = Operands { bytes: *key.as_bytes(), length: AccessKey::BYTES };
            let message = Message::Attachment { region: posted.region, epoch: posted.epoch };
            (Opcode::Attach, operands, LocalSlice::NONE, message)
        }
        Op::Detach => (Opcode::Detach, Operands::NONE, LocalSlice::NONE, Message::Value),
        Op::CompareAndSwap { expected, new } => {
            let operands = Operands::words(&[expected, new]);
            (Opcode::CompareAndSwap, operands, LocalSlice::NONE, Message::Value)
        }
        Op::FetchAndAdd { addend } => {
            (Opcode::FetchAndAdd, Operands::words(&[addend]), LocalSlice::NONE, Message::Value)
        }
        Op::Call { request } => {
            let bytes = LocalSlice { start: posted.local.start, bytes: request };
            (Opcode::Call, Operands::NONE, bytes, Message::Bytes(posted.local.bytes))
        }
        Op::Read | Op::Write => unreachable!("the cards do these"),
    }
}

impl Link for VerbsLink {
    fn post(&mut self, posted: Posted) -> Option<Outcome> {
        // It can be checked now only if no operation ahead of it changes which regions are attached.
        let known = self.stage == Stage::Open && self.messages + self.waiting_changes == 0;
        if known
            && !self.is_message(&posted.op)
            && let Err(refusal) = self.attached.target(&posted)
        {
            return Some(Outcome::Refused(refusal));
        }
        self.waiting_changes += changes_attachments(&posted.op) as usize;
        self.waiting.push_back(posted);
        None
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), LinkClosed> {
        if let Some(closed) = self.closed {
            return Err(closed);
        }
        let result = self.poll_once(done);
        self.closed = result.err();
        result
    }

    fn readiness(&self) -> Option<Readiness<'_>> {
        let fd = self.shared.sleep_on(&self.device)?;
        Some(Readiness { fd, writable: false })
    }

    fn transport(&self) -> &'static str {
        "verbs"
    }
}

impl Drop for VerbsLink {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            if matches!(self.stage, Stage::Connecting | Stage::Open) {
                id.disconnect();
            }
            drop(id); // L4: with its queue pair
        }
        self.shared.leave(self.serial, &self.device);
    }
}
