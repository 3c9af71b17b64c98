//! The node's side of calls through rings: which rings are polled, and for how long.
//!
//! A ring is awake from its client's kick until it has been quiet for some turns, or the server sleeps. Awake
//! rings are kept here, apart from their connections, so that polling one takes a single load.

use std::io;
use std::os::fd::OwnedFd;

use farpool_wire::{MAX_CALL_BYTES, Refusal};

use crate::host::Host;
use crate::ring::{Broken, NodeEnd, Peer, RingMemory};
use crate::spin::may_spin;

/// Calls answered in one turn, before other connections have theirs.
const CALLS_PER_TURN: u32 = 16;
/// How often one turn polls all awake rings while they are empty: some microseconds.
const LOOKS_PER_TURN: u32 = 256;
/// Turns without a call after which a ring is put to sleep, even while others are busy.
const QUIET_TURNS: u32 = 256;

/// The node's end of one connection's ring.
pub(super) struct Ring {
    end: NodeEnd<RingMemory>,
    quiet_turns: u32,
}

impl Ring {
    /// A new ring, asleep, and the descriptor of its memory for the client.
    pub(super) fn create() -> io::Result<(Self, OwnedFd)> {
        let (memory, fd) = RingMemory::create()?;
        Ok((Ring { end: NodeEnd::new(memory), quiet_turns: 0 }, fd))
    }
}

/// What has to be done about a ring's connection.
pub(super) enum RingEvent {
    /// The ring sleeps again.
    Quiet(u64, Ring),
    /// An answer is ready, and the client sleeps: wake it.
    Wake(u64),
    /// The client broke the rules of the ring.
    Broken(u64),
}

/// The rings that are polled, with their connections' tokens.
pub(super) struct AwakeRings {
    rings: Vec<(u64, Ring)>,
    events: Vec<RingEvent>,
    /// Scratch, kept for its capacity: at most the longest message each.
    request: Vec<u8>,
    answer: Vec<u8>,
    looks_per_turn: u32,
}

impl AwakeRings {
    pub(super) fn new() -> Self {
        AwakeRings {
            rings: Vec::new(),
            events: Vec::new(),
            request: Vec::new(),
            answer: Vec::new(),
            looks_per_turn: if may_spin() { LOOKS_PER_TURN } else { 1 },
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rings.is_empty()
    }

    /// Polls a ring from now on: its client has kicked.
    pub(super) fn add(&mut self, token: u64, mut ring: Ring) {
        ring.end.wake_up();
        ring.quiet_turns = 0;
        self.rings.push((token, ring));
    }

    /// Forgets the ring of a connection that has ended.
    pub(super) fn remove(&mut self, token: u64) {
        self.rings.retain(|&(known, _)| known != token);
    }

    /// The next event that the last turn left to handle.
    pub(super) fn next_event(&mut self) -> Option<RingEvent> {
        self.events.pop()
    }

    /// Puts a ring to sleep and returns it; `None` when each ring left holds a request.
    pub(super) fn next_asleep(&mut self) -> Option<(u64, Ring)> {
        let place = self.rings.iter().position(|(_, ring)| ring.end.fall_asleep())?;
        Some(self.rings.swap_remove(place))
    }

    /// Answers pending calls and, unless others wait for their turn, polls a little longer for more; true if
    /// it answered any.
    pub(super) fn turn(&mut self, host: &dyn Host, others_wait: bool) -> bool {
        let most_looks = if others_wait { 1 } else { self.looks_per_turn };
        let mut calls = 0;
        let mut looks = 0;
        while looks < most_looks && calls < CALLS_PER_TURN && self.events.is_empty() {
            let before = calls;
            for place in 0..self.rings.len() {
                calls += u32::from(self.serve(place, host));
            }
            if calls > before {
                looks = 0;
            } else {
                looks += 1;
                std::hint::spin_loop();
            }
        }
        self.retire_quiet();
        calls > 0
    }

    /// Answers one call of one ring, if one is pending.
    #[inline]
    fn serve(&mut self, place: usize, host: &dyn Host) -> bool {
        let (token, Ring { end, quiet_turns }) = &mut self.rings[place];
        let request = match end.request() {
            Ok(None) => return false,
            Ok(Some(request)) => request,
            Err(Broken) => {
                self.events.push(RingEvent::Broken(*token));
                return false;
            }
        };
        *quiet_turns = 0;
        self.request.clear();
        end.copy_request(request, &mut self.request);
        self.answer.clear();
        let outcome = match host.call(&self.request, &mut self.answer) {
            Ok(()) if self.answer.len() > MAX_CALL_BYTES => Err(Refusal::TooLong),
            Ok(()) => Ok(&self.answer[..]),
            Err(refusal) => Err(refusal),
        };
        if end.answer(outcome) == Peer::Asleep {
            self.events.push(RingEvent::Wake(*token));
        }
        true
    }

    fn retire_quiet(&mut self) {
        let mut place = 0;
        while let Some((_, ring)) = self.rings.get_mut(place) {
            ring.quiet_turns += 1;
            if ring.quiet_turns > QUIET_TURNS && ring.end.fall_asleep() {
                let (token, ring) = self.rings.swap_remove(place);
                self.events.push(RingEvent::Quiet(token, ring));
            } else {
                place += 1;
            }
        }
    }
}
