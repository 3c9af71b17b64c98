//! The client's side of calls through the ring. It waits for an answer first by spinning, for as long as a
//! copy takes, then by polling, then asleep.

use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

use farpool_wire::Refusal;

use crate::op::Uncertain;
use crate::ring::{Broken, ClientEnd, Peer, RingMemory};
use crate::seam::{Done, LinkClosed, LocalSlice, Outcome};
use crate::spin::may_spin;

/// Most checks for an answer right after posting, of some to some tens of nanoseconds each: together as long
/// as a large transfer takes.
const MOST_LOOKS: u32 = 512;
/// Fewest such checks, if they never pay off: still longer than an answer takes when both sides are awake.
const FEWEST_LOOKS: u32 = 128;
/// Polls without an answer after which the socket is checked for the node's end, in a thread that never
/// sleeps.
const POLLS_WITHOUT_SOCKET: u32 = 1024;

const BROKEN: LinkClosed = LinkClosed { cause: Uncertain::Protocol };

/// The calls of one link.
pub(super) struct Calls {
    /// Absent until the node has sent it.
    ring: Option<ClientEnd<RingMemory>>,
    /// Slots and buffers of the calls in the ring, in the order posted.
    waiting: VecDeque<(u32, LocalSlice)>,
    looks: u32,
    must_kick: bool,
    /// The node was told that this side goes to sleep.
    asleep: Cell<bool>,
    polls_in_vain: u32,
}

impl Calls {
    pub(super) fn new() -> Self {
        Calls {
            ring: None,
            waiting: VecDeque::new(),
            looks: MOST_LOOKS,
            must_kick: false,
            asleep: Cell::new(false),
            polls_in_vain: 0,
        }
    }

    /// Takes the memory that the node has sent.
    pub(super) fn open(&mut self, memory: OwnedFd) -> Result<(), LinkClosed> {
        let memory = RingMemory::map(memory.as_fd()).map_err(|error| {
            tracing::warn!(%error, "the ring for calls cannot be mapped");
            BROKEN
        })?;
        self.ring = Some(ClientEnd::new(memory));
        Ok(())
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn has_room(&self) -> bool {
        self.ring.as_ref().is_some_and(ClientEnd::has_room)
    }

    /// Whether the node has to be woken for what was posted. Clears the flag that says so.
    pub(super) fn take_kick(&mut self) -> bool {
        std::mem::take(&mut self.must_kick)
    }

    /// Posts a call, for which there must be room, and waits a little for its answer if it may come at once.
    pub(super) fn post(&mut self, slot: u32, local: LocalSlice, request: usize) -> Option<Outcome> {
        debug_assert!(request <= local.bytes);
        let ring = self.ring.as_mut().expect("there is room");
        // SAFETY: in bounds, initialised and alive: the operation's own buffer, which nothing writes
        // meanwhile.
        let request = unsafe { std::slice::from_raw_parts(local.start, request) };
        let peer = ring.post(request);
        if peer == Peer::Asleep {
            self.must_kick = true;
        } else if self.waiting.is_empty() && may_spin() {
            for _ in 0..self.looks {
                // If the ring is broken, the next poll reports it.
                if let Ok(Some(outcome)) = take_answer(ring, local) {
                    self.looks = MOST_LOOKS;
                    return Some(outcome);
                }
                std::hint::spin_loop();
            }
            self.looks = (self.looks / 2).max(FEWEST_LOOKS);
        }
        self.waiting.push_back((slot, local));
        None
    }

    /// Moves the answers that have come to `done`.
    pub(super) fn take_answers(&mut self, done: &mut Vec<Done>) -> Result<(), LinkClosed> {
        let before = done.len();
        if let Some(ring) = &mut self.ring {
            while let Some(&(slot, local)) = self.waiting.front()
                && let Some(outcome) = take_answer(ring, local)?
            {
                self.waiting.pop_front();
                done.push(Done { slot, outcome });
            }
        }
        if done.len() > before || self.is_idle() {
            self.polls_in_vain = 0;
        } else {
            self.polls_in_vain += 1;
        }
        Ok(())
    }

    /// Announces that this side will wait for the socket: from then on an answer makes it ready. False when
    /// an answer is there.
    pub(super) fn fall_asleep(&self) -> bool {
        if self.is_idle() {
            return true;
        }
        let asleep = self.ring.as_ref().is_none_or(ClientEnd::fall_asleep);
        self.asleep.set(asleep);
        asleep
    }

    /// Notes a poll. Returns whether to receive from the socket although no frame is awaited: something has
    /// woken this side, or the node may have ended.
    pub(super) fn take_due_look(&mut self) -> bool {
        if self.asleep.take() {
            if let Some(ring) = &self.ring {
                ring.wake_up();
            }
            return true;
        }
        let overdue = self.polls_in_vain >= POLLS_WITHOUT_SOCKET;
        if overdue {
            self.polls_in_vain = 0;
        }
        overdue
    }
}

/// Takes the next answer into `local`, if it is there.
#[inline]
fn take_answer(ring: &mut ClientEnd<RingMemory>, local: LocalSlice) -> Result<Option<Outcome>, LinkClosed> {
    let answer = match ring.answer() {
        Ok(None) => return Ok(None),
        Ok(Some(answer)) => answer,
        Err(Broken) => return Err(BROKEN),
    };
    if answer.bytes > local.bytes {
        ring.skip();
        return Ok(Some(Outcome::Refused(Refusal::TooLong)));
    }
    // SAFETY: in bounds: just checked. Exclusive and alive: the operation in flight owns its buffer.
    let taken = unsafe { ring.take(answer, local.start) };
    if !taken.map_err(|Broken| BROKEN)? {
        return Ok(None); // the socket will tell why
    }
    Ok(Some(match answer.outcome {
        Ok(()) => Outcome::Done(answer.bytes as u64),
        Err(refusal) => Outcome::Refused(refusal),
    }))
}
