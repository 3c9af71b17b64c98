//! Carries out one request, and says how much room its answer takes.

use farpool_wire::{
    AccessKey, MAX_CALL_BYTES, MAX_TRANSFER_BYTES, Opcode, REQUEST_HEADER_BYTES, RESPONSE_HEADER_BYTES,
    Refusal, RequestHeader, ResponseHeader, SHM_ATTACHED_BYTES,
};

use super::{Connection, MAX_ATTACHED, SMALL_BYTES, SMALL_FRAME_BYTES, Terms};
use crate::host::{AccessKind, Host};
use crate::server::attached::Attachment;
use crate::server::complaints::Complaint;
use crate::server::room::Account;

impl Connection {
    /// Whether the request at the front may be begun, or carried out once it is whole, without keeping more
    /// than [`SMALL_BYTES`].
    pub(super) fn fits_small(&self, header: &RequestHeader, is_whole: bool) -> bool {
        let frame_bytes = REQUEST_HEADER_BYTES + header.payload as usize;
        if !is_whole {
            return self.begun || frame_bytes <= SMALL_FRAME_BYTES;
        }
        let answer = match header.opcode {
            Opcode::Read if self.attached.check(header.region, header.epoch).is_err() => 0,
            Opcode::Read if header.length as usize > MAX_TRANSFER_BYTES => 0,
            Opcode::Read => header.length as usize,
            Opcode::Call if self.attached.is_empty() => 0,
            Opcode::Call => MAX_CALL_BYTES.min(header.length as usize),
            Opcode::Attach => SHM_ATTACHED_BYTES,
            _ => 0,
        };
        self.kept_bytes() - frame_bytes + RESPONSE_HEADER_BYTES + answer <= SMALL_BYTES
    }

    pub(super) fn serve_request(&mut self, terms: &Terms<'_>, header: &RequestHeader, payload: &[u8]) {
        let start = self.answers.bytes.len();
        let blank = ResponseHeader { outcome: Ok(()), payload: 0, token: header.token, value: 0 };
        self.answers.bytes.extend_from_slice(&blank.encode());
        let body = self.answers.bytes.len();
        let outcome = self.carry_out(terms, header, payload);
        // A client that is told to try again in a moment has presented a valid key.
        if self.attached.is_empty() && outcome != Err(Refusal::Busy) {
            self.refused_without_key += 1;
        }
        if outcome.is_err() {
            self.answers.bytes.truncate(body);
        }
        let response = ResponseHeader {
            outcome: outcome.map(drop),
            payload: (self.answers.bytes.len() - body) as u32,
            value: outcome.unwrap_or(0),
            ..blank
        };
        self.answers.bytes[start..body].copy_from_slice(&response.encode());
    }

    /// Carries out one request, appends the answer's payload, and returns the answer's value.
    fn carry_out(
        &mut self,
        terms: &Terms<'_>,
        header: &RequestHeader,
        payload: &[u8],
    ) -> Result<u64, Refusal> {
        let host = terms.host;
        match header.opcode {
            Opcode::Attach => self.attach(terms, header, payload).map(|()| 0),
            Opcode::Detach => {
                self.attached.remove(header.region);
                Ok(0)
            }
            Opcode::Call if self.attached.is_empty() => Err(Refusal::NotAttached),
            Opcode::Call => {
                let start = self.answers.bytes.len();
                host.call(payload, &mut self.answers.bytes)?;
                let fits = self.answers.bytes.len() - start <= header.length as usize;
                if fits { Ok(0) } else { Err(Refusal::TooLong) }
            }
            Opcode::Read | Opcode::Write | Opcode::CompareAndSwap | Opcode::FetchAndAdd => {
                self.attached.check(header.region, header.epoch)?;
                self.access(host, header, payload)
            }
            Opcode::Look => unreachable!("not answered"),
        }
    }

    fn attach(&mut self, terms: &Terms<'_>, header: &RequestHeader, payload: &[u8]) -> Result<(), Refusal> {
        let host = terms.host;
        let key = AccessKey::from_slice(payload).ok_or(Refusal::WrongKey)?;
        if self.attached.len() >= MAX_ATTACHED && !self.attached.contains(header.region) {
            return Err(Refusal::Exhausted);
        }
        if self.passes_descriptors {
            let shared = host.share(header.region, header.epoch, &key)?;
            self.take_place(terms, header)?;
            self.answers.bytes.extend_from_slice(&shared.attached.encode());
            self.answers.attach_descriptors(vec![shared.memory, shared.words]);
        } else {
            host.attach(header.region, header.epoch, &key)?;
            self.take_place(terms, header)?;
        }
        self.attached.insert(header.region, Attachment::new(header.epoch));
        Ok(())
    }

    /// The first attachment takes one of the places for connections with a key, if its owner and origin may
    /// have one.
    fn take_place(&mut self, terms: &Terms<'_>, header: &RequestHeader) -> Result<(), Refusal> {
        if !self.attached.is_empty() || self.account.is_some() {
            return Ok(());
        }
        let owner = terms.host.owner(header.region, header.epoch);
        let account = owner.map_or(Account::Grant(header.region, header.epoch), Account::Owner);
        if !terms.places.admit(account, self.origin) {
            terms.complaints.about(Complaint::Shared, self.origin, terms.now);
            return Err(Refusal::Exhausted);
        }
        self.next_account = Some(account);
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
        let (unsent, attached) = (&mut self.answers.bytes, &mut self.attached);
        let mut value = 0;
        let accessed = host.with_region(header.region, header.epoch, kind, &mut |memory| {
            attached.remember(header.region, memory);
            value = match header.opcode {
                Opcode::Read => {
                    let start = unsent.len();
                    unsent.reserve(length);
                    let room = unsent.spare_capacity_mut().as_mut_ptr().cast();
                    // SAFETY: `length` bytes were reserved in a vector that is borrowed exclusively; on
                    // success all of them are written.
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
        });
        if accessed == Err(Refusal::Busy) {
            // Requests behind this one may find that the memory has moved. They must not take effect when
            // this one did not.
            self.attached.shut(header.region);
        }
        accessed.map(|()| value)
    }
}
