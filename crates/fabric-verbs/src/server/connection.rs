//! One client's connection: receives messages and sends answers.

use std::collections::VecDeque;
use std::io;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farpool_fabric::{AccessKind, Account, Complaint, Complaints, CutOff, Host, Origin, Places};
use farpool_wire::{
    AccessKey, Decoded, Opcode, REQUEST_HEADER_BYTES, RESPONSE_HEADER_BYTES, Refusal, RequestHeader,
    ResponseHeader,
};

use super::access::{CardAccess, Granted};
use super::lending::Lending;
use crate::error::VerbsError;
use crate::memory::{Block, Domain};
use crate::{ANSWER_BYTES, MESSAGES_IN_FLIGHT, REQUEST_BYTES, ffi};

/// Most regions attached on one connection: 4 Ki regions of 64 MiB are 256 GiB.
const MAX_ATTACHED: usize = 4 << 10;
/// Marks the ids of work requests that wait for a message.
const REQUEST_BIT: u64 = 1 << 31;

/// Work requests of a connection: it sends one for each answer, and one for the binding of a window before
/// it.
pub(super) const CAPACITY: ffi::QpCap = ffi::QpCap {
    max_send_wr: 2 * MESSAGES_IN_FLIGHT as u32,
    max_recv_wr: MESSAGES_IN_FLIGHT as u32,
    max_send_sge: 1,
    max_recv_sge: 1,
    max_inline_data: 0,
};

/// Why a connection ends.
pub(super) enum Ended {
    /// The connection is lost or was cut.
    Lost,
    /// The peer sent something malformed.
    Malformed,
}

/// What a connection needs from the server.
pub(super) struct Terms<'a> {
    pub(super) host: &'a dyn Host,
    pub(super) lending: &'a mut Lending,
    pub(super) places: &'a Places,
    pub(super) complaints: &'a Complaints,
}

/// One connection.
pub(super) struct Connection {
    number: u32,
    pub(super) access: Arc<CardAccess>,
    pub(super) origin: Origin,
    /// The account under which the server counts the connection, while it has a region attached.
    account: Option<Account>,
    /// The account under which the server will count it next.
    next_account: Option<Account>,
    /// When the connection was made, or last sent a message while it had a region attached. So it has been
    /// without a key for at most the time since then.
    had_key: Instant,
    atomics_by_message: bool,
    requests: Block,
    answers: Block,
    /// Places in `answers` that the card does not use.
    free_answers: Vec<usize>,
    /// Messages that arrived while no place for an answer was free: place and length.
    backlog: VecDeque<(usize, usize)>,
    /// The message being served, copied out. Kept for its capacity.
    request: Vec<u8>,
    /// Its answer. Kept for its capacity.
    answer: Vec<u8>,
    // The last field: it outlives the queue pair, which `access` destroys.
    domain: Arc<Domain>,
}

impl Connection {
    /// Makes room for messages on a queue pair that is not connected yet.
    pub(super) fn new(
        number: u32,
        access: Arc<CardAccess>,
        origin: Origin,
        domain: Arc<Domain>,
        atomics_by_message: bool,
    ) -> Result<Self, VerbsError> {
        let connection = Connection {
            number,
            access,
            origin,
            account: None,
            next_account: None,
            had_key: Instant::now(),
            atomics_by_message,
            requests: Block::new(&domain, MESSAGES_IN_FLIGHT * REQUEST_BYTES)?,
            answers: Block::new(&domain, MESSAGES_IN_FLIGHT * ANSWER_BYTES)?,
            free_answers: (0..MESSAGES_IN_FLIGHT).collect(),
            backlog: VecDeque::new(),
            request: Vec::new(),
            answer: Vec::new(),
            domain,
        };
        for place in 0..MESSAGES_IN_FLIGHT {
            let posted = connection.await_request(place);
            posted.map_err(|source| VerbsError::Call { what: "posting room for messages", source })?;
        }
        Ok(connection)
    }

    /// The account under which the connection is counted.
    pub(super) fn account(&self) -> Option<Account> {
        self.account
    }

    /// Whether the connection has attached its first region, or has none attached any more, and the server
    /// has not changed the account yet.
    pub(super) fn has_changed_sides(&self) -> bool {
        self.account.is_some() == (self.access.regions() == 0)
    }

    /// Changes the account accordingly. Returns the previous account and the new one.
    pub(super) fn change_sides(&mut self) -> (Option<Account>, Option<Account>) {
        let next = if self.account.is_some() { None } else { self.next_account };
        (std::mem::replace(&mut self.account, next), next)
    }

    /// Time since the last message, for a connection with a region attached. (The server does not see
    /// operations that the card carries out by itself.)
    pub(super) fn idle(&self) -> Duration {
        self.had_key.elapsed()
    }

    /// For how long, at most, the connection has had no region attached, whatever it sends. `None`: it has
    /// one attached.
    pub(super) fn useless_for(&self) -> Option<Duration> {
        (self.access.regions() == 0).then(|| self.had_key.elapsed())
    }

    fn await_request(&self, place: usize) -> io::Result<()> {
        let mut piece = self.requests.piece(place * REQUEST_BYTES, REQUEST_BYTES);
        let mut request = ffi::RecvWr {
            wr_id: (self.number as u64) << 32 | REQUEST_BIT | place as u64,
            next: null_mut(),
            sg_list: &mut piece,
            num_sge: 1,
        };
        // SAFETY: the block lives as long as the connection, whose drop closes the queue pair before the
        // block is freed.
        self.access.with_id(|id| unsafe { id.post_receive(&mut request) })
    }

    /// Takes one completion of this connection.
    pub(super) fn completed(&mut self, completion: &ffi::Wc, terms: &mut Terms<'_>) -> Result<(), Ended> {
        if completion.status != ffi::WC_SUCCESS {
            let (status, connection) = (completion.status, self.number);
            tracing::debug!(connection, status, "an RDMA connection broke");
            return Err(Ended::Lost);
        }
        let place = (completion.wr_id & (REQUEST_BIT - 1)) as usize;
        if completion.wr_id & REQUEST_BIT != 0 {
            if self.access.regions() > 0 {
                self.had_key = Instant::now();
            }
            self.backlog.push_back((place, completion.byte_len as usize));
        } else {
            self.free_answers.push(place);
        }
        while !self.free_answers.is_empty()
            && let Some((place, bytes)) = self.backlog.pop_front()
        {
            self.serve(place, bytes, terms)?;
        }
        Ok(())
    }

    fn serve(&mut self, place: usize, bytes: usize, terms: &mut Terms<'_>) -> Result<(), Ended> {
        let mut request = std::mem::take(&mut self.request);
        request.resize(bytes.min(REQUEST_BYTES), 0);
        self.requests.read(place * REQUEST_BYTES, &mut request);
        // Posted before the answer: the client sends its next message as soon as it has the answer.
        self.await_request(place).map_err(|_| Ended::Lost)?;
        let Ok(Decoded::Complete(header)) = RequestHeader::decode(&request) else {
            return Err(Ended::Malformed);
        };
        let payload = &request[REQUEST_HEADER_BYTES..];
        if payload.len() != header.payload as usize {
            return Err(Ended::Malformed);
        }
        let mut answer = std::mem::take(&mut self.answer);
        answer.clear();
        answer.resize(RESPONSE_HEADER_BYTES, 0);
        let (mut outcome, bind) = match self.carry_out(terms, &header, payload, &mut answer)? {
            Ok((value, bind)) => (Ok(value), bind),
            Err(refusal) => (Err(refusal), None),
        };
        let room = if header.opcode == Opcode::Call { header.length as usize } else { ANSWER_BYTES };
        if answer.len() > ANSWER_BYTES || answer.len() - RESPONSE_HEADER_BYTES > room {
            outcome = Err(Refusal::TooLong);
        }
        if outcome.is_err() {
            answer.truncate(RESPONSE_HEADER_BYTES);
        }
        let head = ResponseHeader {
            outcome: outcome.map(drop),
            payload: (answer.len() - RESPONSE_HEADER_BYTES) as u32,
            token: header.token,
            value: outcome.unwrap_or(0),
        };
        answer[..RESPONSE_HEADER_BYTES].copy_from_slice(&head.encode());
        let sent = self.send(&answer, bind);
        (self.request, self.answer) = (request, answer);
        sent.map_err(|_| Ended::Lost)
    }

    /// Carries out one message and appends the answer's payload. The inner result is the answer; the outer
    /// one says whether the connection ends.
    #[allow(clippy::type_complexity)] // an outcome within an end
    fn carry_out(
        &mut self,
        terms: &mut Terms<'_>,
        header: &RequestHeader,
        payload: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<Result<(u64, Option<ffi::BindMw>), Refusal>, Ended> {
        let host = terms.host;
        Ok(match header.opcode {
            Opcode::Attach => match self.attach(terms, header, payload, answer) {
                Ok(bind) => Ok((0, bind)),
                Err(AttachError::Refused(refusal)) => Err(refusal),
                Err(AttachError::WasCut) => return Err(Ended::Lost),
            },
            Opcode::Detach => {
                self.access.revoke(header.region);
                Ok((0, None))
            }
            Opcode::Call if self.access.regions() == 0 => Err(Refusal::NotAttached),
            Opcode::Call => host.call(payload, answer).map(|()| (0, None)),
            Opcode::CompareAndSwap | Opcode::FetchAndAdd if self.atomics_by_message => {
                self.atomic(host, header, payload).map(|value| (value, None))
            }
            Opcode::Read | Opcode::Write | Opcode::CompareAndSwap | Opcode::FetchAndAdd | Opcode::Look => {
                return Err(Ended::Malformed);
            }
        })
    }

    fn attach(
        &mut self,
        terms: &mut Terms<'_>,
        header: &RequestHeader,
        payload: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<Option<ffi::BindMw>, AttachError> {
        let key = AccessKey::from_slice(payload).ok_or(Refusal::WrongKey)?;
        if self.access.regions() >= MAX_ATTACHED && self.access.epoch(header.region).is_none() {
            return Err(Refusal::Exhausted.into());
        }
        let cut: Arc<dyn CutOff> = self.access.clone();
        let lent = terms.host.lend(header.region, header.epoch, &key, cut)?;
        self.take_place(terms, header)?;
        let opening = terms.lending.open(header.region, &lent, &self.domain).map_err(|error| {
            tracing::warn!(region = header.region, %error, "a region cannot be opened to a client's card");
            Refusal::Exhausted
        })?;
        let granted = Granted { epoch: header.epoch, opening, lent };
        let (attached, bind) = self.access.grant(header.region, granted).map_err(|_| AttachError::WasCut)?;
        answer.extend_from_slice(&attached.encode());
        Ok(bind)
    }

    /// The first attachment takes one of the places for connections with a key, if its owner and origin may
    /// have another one.
    fn take_place(&mut self, terms: &Terms<'_>, header: &RequestHeader) -> Result<(), Refusal> {
        if self.account.is_some() {
            return Ok(());
        }
        let owner = terms.host.owner(header.region, header.epoch);
        let account = owner.map_or(Account::Grant(header.region, header.epoch), Account::Owner);
        if !terms.places.admit(account, self.origin) {
            terms.complaints.about(Complaint::Shared, self.origin, Instant::now());
            return Err(Refusal::Exhausted);
        }
        self.next_account = Some(account);
        Ok(())
    }

    fn atomic(&self, host: &dyn Host, header: &RequestHeader, payload: &[u8]) -> Result<u64, Refusal> {
        match self.access.epoch(header.region) {
            None => return Err(Refusal::NotAttached),
            Some(epoch) if epoch != header.epoch => return Err(Refusal::StaleEpoch),
            Some(_) => {}
        }
        let word = |at: usize| u64::from_le_bytes(payload[at..at + 8].try_into().expect("checked in decode"));
        let mut value = 0;
        host.with_region(header.region, header.epoch, AccessKind::Write, &mut |memory| {
            value = match header.opcode {
                Opcode::CompareAndSwap => memory.compare_and_swap(header.offset, word(0), word(8))?,
                _ => memory.fetch_and_add(header.offset, word(0))?,
            };
            Ok(())
        })?;
        Ok(value)
    }

    /// Sends an answer, after the binding of the window that it announces, if any: one doorbell for both.
    fn send(&mut self, answer: &[u8], bind: Option<ffi::BindMw>) -> io::Result<()> {
        let place = self.free_answers.pop().expect("the caller has checked that a place is free");
        self.answers.write(place * ANSWER_BYTES, answer);
        let mut piece = self.answers.piece(place * ANSWER_BYTES, answer.len());
        let mut send = work_request((self.number as u64) << 32 | place as u64, ffi::WR_SEND);
        (send.sg_list, send.num_sge, send.send_flags) = (&mut piece, 1, ffi::SEND_SIGNALED);
        let mut first = &mut send as *mut ffi::SendWr;
        let mut binding = work_request(send.wr_id, ffi::WR_BIND_MW);
        if let Some(bind) = bind {
            (binding.bind_mw, binding.next) = (bind, first);
            first = &mut binding;
        }
        // SAFETY: the requests are linked above; the piece lies in a place of `answers` that nothing else
        // uses until its completion; window and registration are in `access`, which destroys the queue pair
        // before it drops them.
        self.access.with_id(|id| unsafe { id.post_send(first) })
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.access.close(); // before the blocks are freed
    }
}

enum AttachError {
    Refused(Refusal),
    WasCut,
}

impl From<Refusal> for AttachError {
    fn from(refusal: Refusal) -> Self {
        AttachError::Refused(refusal)
    }
}

fn work_request(wr_id: u64, opcode: u32) -> ffi::SendWr {
    ffi::SendWr {
        wr_id,
        next: null_mut(),
        sg_list: null_mut(),
        num_sge: 0,
        opcode,
        send_flags: 0,
        imm_data: 0,
        wr: ffi::Remote { rdma: ffi::RemotePlace { remote_addr: 0, rkey: 0 } },
        qp_type: 0,
        bind_mw: ffi::BindMw {
            mw: null_mut(),
            rkey: 0,
            bind_info: ffi::MwBindInfo { mr: null_mut(), addr: 0, length: 0, mw_access_flags: 0 },
        },
    }
}
