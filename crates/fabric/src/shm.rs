//! Shared memory: same host. The node hands out a region's memory over a Unix socket after checking the key;
//! then operations are loads and stores of this thread (design, section 3).
//!
//! S1. Nobody can refuse a store. So an operation counts as done only if the grant's word, loaded after the access
//!     and a full barrier, still holds the stamp that came with the memory; else its outcome is *unknown*.
//! S2. The node changes the word and passes a barrier before it copies or reuses the memory; the barriers pair.
//!     Stamps never repeat, so a word that has changed never looks as before.
//! S3. Atomics are the processor's, as those of every other path to the region.
//! S4. Once the word has changed the memory is let go of. Whether the grant is over or its memory another, only the
//!     node knows: operations are refused as *not attached* until the region was attached again.
//! S5. A node that has died refuses nothing. So the connection is looked at now and then, and what finds it ended is
//!     not carried out.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{Ordering, fence};

use farpool_wire::{Epoch, GrantMode, Hello, Refusal, ShmAttached};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::frames::{FrameClient, FrameDone};
use crate::host::access_refusal;
use crate::memory::{AccessError, Mapping, Protection, is_sealed_against_shrinking};
use crate::op::Uncertain;
use crate::seam::{Done, Link, LinkClosed, Op, Outcome, Peer, Posted, Readiness, Transport};

/// Most regions of one node that a link maps: 64 Ki regions of 64 MiB are 4 TiB.
const MAX_REGIONS: u32 = 1 << 16;

/// Operations between two looks at the connection: a look costs as much as a small operation.
const OPERATIONS_PER_LOOK: u32 = 256;

/// Carries the fabric by shared memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShmTransport;

impl Transport for ShmTransport {
    fn open(&self, peer: &Peer, hello: Hello) -> io::Result<Box<dyn Link>> {
        let path = peer.shm_socket.as_ref().ok_or_else(|| {
            io::Error::new(io::ErrorKind::AddrNotAvailable, format!("node {} is not on this host", peer.node))
        })?;
        let address = SocketAddrUnix::new(path.as_os_str().as_bytes())?;
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let stream = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // A Unix socket connects at once or fails (EAGAIN: the node's backlog is full).
        rustix::net::connect(&stream, &address)?;
        Ok(Box::new(ShmLink {
            frames: FrameClient::new(stream, hello, true),
            attached: Vec::new(),
            attaching: Vec::new(),
            done: Vec::new(),
            since_look: 0,
            node_is_gone: false,
        }))
    }
}

struct ShmLink {
    frames: FrameClient,
    /// By region.
    attached: Vec<Option<Attached>>,
    /// Slots, regions and epochs of attachments under way.
    attaching: Vec<(u32, u32, Epoch)>,
    /// Scratch, kept for its capacity.
    done: Vec<FrameDone>,
    /// Operations since the connection was looked at.
    since_look: u32,
    node_is_gone: bool,
}

struct Attached {
    epoch: Epoch,
    memory: Mapping,
    words: Mapping,
    word_offset: u64,
    stamp: u64,
}

/// The grant's word is another: the memory is of no use any more.
struct Moved {
    /// The operation was under way.
    begun: bool,
}

impl Link for ShmLink {
    fn post(&mut self, posted: Posted) -> Option<Outcome> {
        match posted.op {
            Op::Attach(_) if posted.region >= MAX_REGIONS => Some(Outcome::Refused(Refusal::NotAttached)),
            Op::Attach(_) => {
                self.attaching.push((posted.slot, posted.region, posted.epoch));
                self.frames.post(&posted);
                None
            }
            Op::Detach => {
                // Unmapped here first: the node may take the memory for free once it hears of it.
                if let Some(place) = self.attached.get_mut(posted.region as usize) {
                    *place = None;
                }
                self.frames.post(&posted);
                None
            }
            Op::Call { .. } => {
                self.frames.post(&posted);
                None
            }
            // Left undone: the next poll closes the link.
            _ if self.finds_node_gone() => None,
            _ => Some(self.access(&posted)),
        }
    }

    fn post_batch(&mut self, batch: &[Posted], done: &mut Vec<Done>) {
        // Far words first, all at once: the processor fetches them while the first ones are being copied.
        for posted in batch {
            if let Some(Some(attached)) = self.attached.get(posted.region as usize) {
                attached.memory.prefetch(posted.offset, posted.local.bytes);
            }
        }
        for posted in batch {
            if let Some(outcome) = self.post(*posted) {
                done.push(Done { slot: posted.slot, outcome });
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), LinkClosed> {
        let result = match self.node_is_gone {
            true => Err(LinkClosed { cause: Uncertain::ConnectionLost }),
            false => self.frames.poll(&mut self.done),
        };
        let finished = std::mem::take(&mut self.done);
        for frame in finished {
            let slot = frame.slot;
            done.push(Done { slot, outcome: self.finish(frame) });
        }
        result
    }

    fn readiness(&self) -> Option<Readiness<'_>> {
        Some(Readiness { fd: self.frames.fd(), writable: self.frames.wants_to_send() })
    }

    fn transport(&self) -> &'static str {
        "shm"
    }
}

impl ShmLink {
    /// Looks at the connection when it is time to (S5).
    fn finds_node_gone(&mut self) -> bool {
        self.since_look += 1;
        if self.since_look >= OPERATIONS_PER_LOOK {
            self.since_look = 0;
            self.node_is_gone |= self.frames.has_ended();
        }
        self.node_is_gone
    }

    fn access(&mut self, posted: &Posted) -> Outcome {
        let Some(place) = self.attached.get_mut(posted.region as usize) else {
            return Outcome::Refused(Refusal::NotAttached);
        };
        let Some(attached) = place else { return Outcome::Refused(Refusal::NotAttached) };
        match attached.access(posted) {
            Ok(outcome) => outcome,
            Err(Moved { begun }) => {
                *place = None;
                if begun {
                    Outcome::Unknown(Uncertain::EpochMoved)
                } else {
                    Outcome::Refused(Refusal::NotAttached)
                }
            }
        }
    }

    fn finish(&mut self, frame: FrameDone) -> Outcome {
        let Some(place) = self.attaching.iter().position(|&(slot, ..)| slot == frame.slot) else {
            return frame.outcome;
        };
        let (_, region, epoch) = self.attaching.swap_remove(place);
        let Some((layout, memory, words)) = frame.shared else { return frame.outcome };
        match Attached::map(epoch, layout, memory, words) {
            Ok(attached) => {
                let region = region as usize;
                if region >= self.attached.len() {
                    self.attached.resize_with(region + 1, || None);
                }
                self.attached[region] = Some(attached);
                frame.outcome
            }
            Err(error) => {
                tracing::warn!(region, %error, "the region's memory cannot be mapped");
                Outcome::Refused(Refusal::Exhausted)
            }
        }
    }
}

impl Attached {
    fn map(epoch: Epoch, layout: ShmAttached, memory: OwnedFd, words: OwnedFd) -> io::Result<Self> {
        if !is_sealed_against_shrinking(memory.as_fd()) || !is_sealed_against_shrinking(words.as_fd()) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the memory's size is not sealed"));
        }
        let protection = match layout.mode {
            GrantMode::ReadOnly => Protection::ReadOnly,
            GrantMode::ReadWrite => Protection::ReadWrite,
        };
        let memory = Mapping::new(memory.as_fd(), layout.region_bytes, protection)?;
        let words_bytes = layout.word_offset.checked_add(8);
        let words_bytes = words_bytes.filter(|_| layout.word_offset.is_multiple_of(8));
        let words_bytes = words_bytes.ok_or(io::Error::from(io::ErrorKind::InvalidData))?;
        let words = Mapping::new(words.as_fd(), words_bytes, Protection::ReadOnly)?;
        Ok(Attached { epoch, memory, words, word_offset: layout.word_offset, stamp: layout.stamp })
    }

    fn access(&self, posted: &Posted) -> Result<Outcome, Moved> {
        if posted.epoch != self.epoch {
            return Ok(Outcome::Refused(Refusal::StaleEpoch));
        }
        if !self.is_valid() {
            return Err(Moved { begun: false });
        }
        let value = match self.touch(posted) {
            Ok(value) => value,
            Err(error) => return Ok(Outcome::Refused(access_refusal(error))),
        };
        // S1; pairs with the barrier between changing the word and copying or reusing the memory (S2). Loads before
        // a load need no more than an acquire; a store before a load needs the full barrier; atomics are
        // sequentially consistent, as is the load of the word behind them.
        match posted.op {
            Op::Write => fence(Ordering::SeqCst),
            _ => fence(Ordering::Acquire),
        }
        if self.is_valid() { Ok(Outcome::Done(value)) } else { Err(Moved { begun: true }) }
    }

    fn touch(&self, posted: &Posted) -> Result<u64, AccessError> {
        let local = posted.local;
        match posted.op {
            Op::Read => {
                // SAFETY: `local` is the operation's own buffer, valid and exclusive while it is in flight.
                unsafe { self.memory.read_to(posted.offset, local.start, local.bytes) }.map(|()| 0)
            }
            Op::Write => {
                // SAFETY: as above.
                unsafe { self.memory.write_from(posted.offset, local.start, local.bytes) }.map(|()| 0)
            }
            Op::CompareAndSwap { expected, new } => {
                self.memory.compare_and_swap(posted.offset, expected, new)
            }
            Op::FetchAndAdd { addend } => self.memory.fetch_and_add(posted.offset, addend),
            Op::Attach(_) | Op::Detach | Op::Call { .. } => unreachable!("posted as frames"),
        }
    }

    fn is_valid(&self) -> bool {
        // The place was checked when it was mapped.
        self.words.load(self.word_offset) == Ok(self.stamp)
    }
}
