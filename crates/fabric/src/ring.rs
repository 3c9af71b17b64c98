//! The ring by which a client of the same host calls its node: slots in memory that both map
//! (`docs/src/wire.md`).
//!
//! G1. Calls are numbered, and call *n* has request slot and answer slot *n* modulo [`SLOTS`]. A slot's first
//!     word names the lap that filled it, so the two sides share no index: a slot is full when it names the
//!     lap that its reader waits for.
//! G2. At most [`SLOTS`] calls are in flight. So a slot is filled again only after its reader is done with
//!     it.
//! G3. A writer stores the bytes first, then the word that names the lap (release). The reader loads the word
//!     first (acquire), then the bytes.
//! G4. Neither side sleeps while a message waits for it. A side that goes to sleep announces it, passes a
//!     full barrier and checks its slot once more. A side that has filled a slot passes a full barrier and
//!     checks whether the other side sleeps. One of the two sees the other.
//! G5. Neither side trusts the other: each check loads a slot's first word once and tests its length, and the
//!     bytes are copied out before they are parsed. Whatever the other side writes, nothing outside the ring
//!     is touched.
//! Not here: how a sleeper is woken (frames on the socket), and what the messages mean.

mod memory;
#[cfg(test)]
mod models;
#[cfg(test)]
mod tests;

use std::sync::atomic::Ordering;

use farpool_wire::{MAX_CALL_BYTES, Refusal};

pub(crate) use memory::RingMemory;

/// Calls in flight at once; further ones wait at the client. Enough to keep a node busy while answers travel.
pub(crate) const SLOTS: u64 = 8;
/// Size of a cache line, which moves between processors as a whole.
const LINE_BYTES: usize = 64;
/// Distance between words that different processors write: more than the pair of lines that a prefetcher
/// fetches together.
const APART_BYTES: usize = 128;
/// The lap, the length and the status in one word.
const HEADER_BYTES: usize = 8;
/// A slot holds the longest message; parts of it that are never touched take no memory.
const SLOT_BYTES: usize = (HEADER_BYTES + MAX_CALL_BYTES).next_multiple_of(APART_BYTES);

/// Not zero: the node sleeps, or is about to.
const NODE_ASLEEP: usize = 0;
/// Not zero: the client sleeps, or is about to.
const CLIENT_ASLEEP: usize = APART_BYTES;
const REQUESTS: usize = 2 * APART_BYTES;
const ANSWERS: usize = REQUESTS + SLOTS as usize * SLOT_BYTES;
/// Length of the ring's memory, in whole pages.
pub(crate) const RING_BYTES: usize = (ANSWERS + SLOTS as usize * SLOT_BYTES).next_multiple_of(4096);

/// Shared words, addressed in bytes from the start. The code of the ring is generic over them, so that models
/// of all interleavings run the very same code.
pub(crate) trait Words {
    /// Calls in flight at once.
    const SLOTS: u64 = SLOTS;

    fn load(&self, at: usize, order: Ordering) -> u64;
    fn store(&self, at: usize, value: u64, order: Ordering);
    fn barrier(&self);
    /// Orders all loads before it before all loads after it.
    fn loads_in_order(&self);
    /// Prefetches a line; correctness does not depend on it.
    fn prefetch(&self, at: usize);
    /// Copies bytes in; like relaxed stores of words.
    fn copy_in(&self, at: usize, from: &[u8]);
    /// Copies bytes out to `to`; like relaxed loads of words.
    ///
    /// # Safety
    /// `to` is valid for writes of `bytes` bytes, which nothing else accesses during the call.
    unsafe fn copy_out(&self, at: usize, to: *mut u8, bytes: usize);
}

/// The peer broke the rules of the ring: nothing in it can be trusted any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Broken;

/// A message that has come and still lies in its slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Message {
    /// Length, at most that of a call.
    pub bytes: usize,
    /// Of an answer: success, or why the call was refused.
    pub outcome: Result<(), Refusal>,
}

/// The client's end.
pub(crate) struct ClientEnd<W> {
    words: W,
    posted: u64,
    taken: u64,
}

/// The node's end.
pub(crate) struct NodeEnd<W> {
    words: W,
    served: u64,
}

/// Whether the other side has to be woken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "a sleeping peer that is not woken does not see its message"]
pub(crate) enum Peer {
    Awake,
    Asleep,
}

impl<W: Words> ClientEnd<W> {
    pub(crate) fn new(words: W) -> Self {
        ClientEnd { words, posted: 0, taken: 0 }
    }

    /// Whether another call may be posted (G2).
    pub(crate) fn has_room(&self) -> bool {
        self.posted - self.taken < W::SLOTS
    }

    /// Fills the next request slot.
    ///
    /// # Panics
    /// Without room, or when the request is longer than a call may be: bugs of the caller.
    #[inline]
    pub(crate) fn post(&mut self, request: &[u8]) -> Peer {
        assert!(self.has_room(), "more calls than slots");
        fill(&self.words, REQUESTS, self.posted, 0, request);
        self.posted += 1;
        peer(&self.words, NODE_ASLEEP)
    }

    /// The next answer, if it is there.
    #[inline]
    pub(crate) fn answer(&self) -> Result<Option<Message>, Broken> {
        if self.posted == self.taken { Ok(None) } else { look(&self.words, ANSWERS, self.taken) }
    }

    /// Takes the answer that [`ClientEnd::answer`] returned. False if the node has released the ring
    /// meanwhile: what was copied may then be zeros.
    ///
    /// # Safety
    /// `to` is valid for writes of the answer's length, which nothing else accesses during the call.
    #[inline]
    pub(crate) unsafe fn take(&mut self, answer: Message, to: *mut u8) -> Result<bool, Broken> {
        // SAFETY: the caller's promise.
        unsafe { self.words.copy_out(payload::<W>(ANSWERS, self.taken), to, answer.bytes) };
        // Pairs with the kernel, which unmaps all pages from every process before any process can see the
        // first one empty.
        self.words.loads_in_order();
        match look(&self.words, ANSWERS, self.taken)? {
            Some(same) if same == answer => {
                self.taken += 1;
                Ok(true)
            }
            Some(_) => Err(Broken),
            None => Ok(false),
        }
    }

    /// Drops the answer that [`ClientEnd::answer`] returned.
    pub(crate) fn skip(&mut self) {
        self.taken += 1;
    }

    /// Announces that this side goes to sleep. False if an answer is there: then it must not sleep.
    pub(crate) fn fall_asleep(&self) -> bool {
        fall_asleep(&self.words, CLIENT_ASLEEP, ANSWERS, self.taken)
    }

    /// Announces that this side is awake and polls by itself.
    pub(crate) fn wake_up(&self) {
        self.words.store(CLIENT_ASLEEP, 0, Ordering::Relaxed); // at worst the node wakes us once too often
    }
}

impl<W: Words> NodeEnd<W> {
    /// A new ring is not polled: its first call comes with a kick.
    pub(crate) fn new(words: W) -> Self {
        words.store(NODE_ASLEEP, 1, Ordering::Relaxed); // the client gets the ring by a later system call
        NodeEnd { words, served: 0 }
    }

    /// The next request, if it is there.
    #[inline]
    pub(crate) fn request(&self) -> Result<Option<Message>, Broken> {
        match look(&self.words, REQUESTS, self.served)? {
            Some(Message { outcome: Err(_), .. }) => Err(Broken), // requests have no status
            request => Ok(request),
        }
    }

    /// Copies the request that [`NodeEnd::request`] returned to the end of `to`.
    #[inline]
    pub(crate) fn copy_request(&self, request: Message, to: &mut Vec<u8>) {
        let start = to.len();
        to.reserve(request.bytes);
        // SAFETY: `request.bytes` bytes were reserved behind the vector's end; the vector is borrowed
        // exclusively; and all of them are written.
        unsafe {
            let room = to.as_mut_ptr().add(start);
            self.words.copy_out(payload::<W>(REQUESTS, self.served), room, request.bytes);
            to.set_len(start + request.bytes);
        }
    }

    /// Answers the next request.
    ///
    /// # Panics
    /// When the answer is longer than a call may be: a bug of the caller.
    #[inline]
    pub(crate) fn answer(&mut self, outcome: Result<&[u8], Refusal>) -> Peer {
        let (status, bytes) = match outcome {
            Ok(bytes) => (0, bytes),
            Err(refusal) => (refusal.code(), &[][..]),
        };
        fill(&self.words, ANSWERS, self.served, status, bytes);
        self.served += 1;
        peer(&self.words, CLIENT_ASLEEP)
    }

    /// Announces that this side goes to sleep. False if a request is there: then it must not sleep.
    pub(crate) fn fall_asleep(&self) -> bool {
        fall_asleep(&self.words, NODE_ASLEEP, REQUESTS, self.served)
    }

    /// Announces that this side is awake and polls by itself.
    pub(crate) fn wake_up(&self) {
        self.words.store(NODE_ASLEEP, 0, Ordering::Relaxed); // at worst the client kicks us once too often
    }
}

/// Where the slot of a call lies among `slots`.
#[inline]
fn slot<W: Words>(slots: usize, number: u64) -> usize {
    slots + (number % W::SLOTS) as usize * SLOT_BYTES
}

#[inline]
fn payload<W: Words>(slots: usize, number: u64) -> usize {
    slot::<W>(slots, number) + HEADER_BYTES
}

/// The mark of call `number` in its slots. It repeats after 2^32 laps, in which every slot is filled with
/// other marks.
#[inline]
fn lap<W: Words>(number: u64) -> u32 {
    (number / W::SLOTS + 1) as u32
}

#[inline]
fn fill<W: Words>(words: &W, slots: usize, number: u64, status: u8, bytes: &[u8]) {
    assert!(bytes.len() <= MAX_CALL_BYTES, "a message of {} bytes", bytes.len());
    let header = u64::from(lap::<W>(number)) | (bytes.len() as u64) << 32 | u64::from(status) << 56;
    words.copy_in(payload::<W>(slots, number), bytes);
    words.store(slot::<W>(slots, number), header, Ordering::Release); // G3; pairs with the load in `look`
}

#[inline]
fn look<W: Words>(words: &W, slots: usize, number: u64) -> Result<Option<Message>, Broken> {
    words.prefetch(slot::<W>(slots, number) + LINE_BYTES);
    // G3; pairs with the store in `fill`.
    let header = words.load(slot::<W>(slots, number), Ordering::Acquire);
    let awaited = lap::<W>(number);
    if header as u32 != awaited {
        // Until it is filled, a slot holds the mark of the lap before, or zero: before the first lap, and
        // after the node has released the ring.
        let is_empty = header == 0 || header as u32 == awaited.wrapping_sub(1);
        return if is_empty { Ok(None) } else { Err(Broken) };
    }
    let bytes = (header >> 32 & 0xFF_FFFF) as usize;
    if bytes > MAX_CALL_BYTES {
        return Err(Broken);
    }
    let outcome = match (header >> 56) as u8 {
        0 => Ok(()),
        code => Err(Refusal::from_code(code).map_err(|_| Broken)?),
    };
    Ok(Some(Message { bytes, outcome }))
}

/// Whether the reader of a slot just filled sleeps, so that this side has to wake it.
#[inline]
fn peer<W: Words>(words: &W, asleep: usize) -> Peer {
    words.barrier(); // G4; pairs with the barrier in `fall_asleep`
    // Relaxed: the barriers order it. Only the sleeper changes its word, so it may be woken more often than
    // once.
    match words.load(asleep, Ordering::Relaxed) {
        0 => Peer::Awake,
        _ => Peer::Asleep,
    }
}

fn fall_asleep<W: Words>(words: &W, asleep: usize, slots: usize, number: u64) -> bool {
    words.store(asleep, 1, Ordering::Relaxed);
    words.barrier(); // G4; pairs with the barrier in `peer`
    if look(words, slots, number) == Ok(None) {
        return true;
    }
    words.store(asleep, 0, Ordering::Relaxed); // at worst the other side wakes us once too often
    false
}
