//! Shared memory: same host. The node hands out a region's memory over a Unix socket after checking the key;
//! then operations are loads and stores of this thread (`docs/src/fabric.md`).
//!
//! S1. A store cannot be refused. So each grant has a word in shared memory, and the memory comes with the
//!     word's present value, the stamp. An operation loads the word before its access: if the word no longer
//!     holds the stamp, the operation touches nothing and is refused (S4). It loads the word again after the
//!     access and a barrier (P1 in `stamp.rs`): only if the word still holds the stamp does the operation
//!     count as done, else its outcome is *unknown*.
//! S2. The node changes the word and passes a barrier before it copies or reuses the memory; the barriers
//!     pair. Stamps never repeat, so a word that has changed never looks as before.
//! S3. Atomics are the processor's, as on every other path to the region.
//! S4. Once the word has changed, the memory is unmapped. Only the node knows whether the grant has ended or
//!     its memory has moved, so operations are refused as *not attached* until the region is attached again.
//! S5. Requests go to the node in two ways: calls through the ring, attachments as frames. Only one way is in
//!     use at any time, and requests for the other are held back, so that the node carries out all of them in
//!     the order posted.
//! S6. A dead node cannot refuse an access. So the connection is checked now and then, and an operation that
//!     finds it ended is not carried out.

mod attached;
mod calls;

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;

use farpool_wire::{Epoch, Hello, Refusal};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::descriptors::Descriptor;
use crate::frames::{FrameClient, FrameDone};
use crate::op::Uncertain;
use crate::seam::{Done, Link, LinkClosed, Op, Outcome, Peer, Posted, Readiness, Transport};
use crate::stamp::Moved;
use attached::Attached;
use calls::Calls;

/// The longest path of a Unix socket: `sun_path` holds 108 bytes with the final zero (unix(7)).
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Most regions of one node that a link maps: 64 Ki regions of 64 MiB are 4 TiB.
const MAX_REGIONS: u32 = 1 << 16;

/// Operations between two checks of the connection, a millisecond or a few apart; a check costs as much as
/// several small operations.
const OPERATIONS_PER_LOOK: u32 = 4096;

/// Carries the fabric by shared memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShmTransport;

impl ShmTransport {
    /// Connects to a node's socket, for a process that cannot go there itself. Never waits.
    ///
    /// # Errors
    /// When the node is not on this host, the socket is out of reach, or its backlog is full (`EAGAIN`).
    pub fn connect(peer: &Peer) -> io::Result<OwnedFd> {
        let path = peer.shm_socket.as_ref().ok_or_else(|| {
            io::Error::new(io::ErrorKind::AddrNotAvailable, format!("node {} is not on this host", peer.node))
        })?;
        let address = SocketAddrUnix::new(path.as_os_str().as_bytes())?;
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let stream = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // A Unix socket connects at once or fails.
        rustix::net::connect(&stream, &address)?;
        Ok(stream)
    }

    /// A link over a connection that another process has made with [`connect`](Self::connect).
    ///
    /// # Errors
    /// When `stream` cannot be made non-blocking.
    pub fn open_on(stream: OwnedFd, hello: Hello) -> io::Result<Box<dyn Link>> {
        rustix::io::ioctl_fionbio(&stream, true)?;
        Ok(Self::link(stream, hello))
    }

    fn link(stream: OwnedFd, hello: Hello) -> Box<dyn Link> {
        Box::new(ShmLink {
            frames: FrameClient::new(Descriptor::out_of_the_way(stream), hello, true),
            attached: Vec::new(),
            open: BTreeSet::new(),
            attaching: Vec::new(),
            calls: Calls::new(),
            held: VecDeque::new(),
            done: Vec::new(),
            since_look: 0,
            node_is_gone: false,
        })
    }
}

impl Transport for ShmTransport {
    fn open(&self, peer: &Peer, hello: Hello) -> io::Result<Box<dyn Link>> {
        Ok(Self::link(Self::connect(peer)?, hello))
    }
}

struct ShmLink {
    frames: FrameClient,
    /// By region.
    attached: Vec<Option<Attached>>,
    /// The regions that the node considers attached, according to its answers.
    open: BTreeSet<u32>,
    attaching: Vec<Attaching>,
    calls: Calls,
    /// Posted, and waiting for their turn (S5). At most as many as an endpoint may have in flight.
    held: VecDeque<Posted>,
    /// Scratch, kept for its capacity.
    done: Vec<FrameDone>,
    /// Operations since the connection was last checked.
    since_look: u32,
    node_is_gone: bool,
}

/// An attachment in progress.
struct Attaching {
    slot: u32,
    region: u32,
    epoch: Epoch,
    /// The region was detached meanwhile.
    detached: bool,
}

impl Link for ShmLink {
    fn post(&mut self, posted: Posted) -> Option<Outcome> {
        match posted.op {
            Op::Attach(_) if posted.region >= MAX_REGIONS => Some(Outcome::Refused(Refusal::NotAttached)),
            Op::Attach(_) => {
                let Posted { slot, region, epoch, .. } = posted;
                self.attaching.push(Attaching { slot, region, epoch, detached: false });
                self.post_to_node(posted)
            }
            Op::Detach => {
                // Unmapped here first: once the node learns of it, it may take the memory for free.
                if let Some(place) = self.attached.get_mut(posted.region as usize) {
                    *place = None;
                }
                let in_flight =
                    self.attaching.iter_mut().filter(|attaching| attaching.region == posted.region);
                in_flight.for_each(|attaching| attaching.detached = true);
                self.post_to_node(posted)
            }
            Op::Call { .. } => self.post_to_node(posted),
            // `None`: not carried out; the next poll closes the link.
            _ => self.run_now(&posted),
        }
    }

    fn run_now(&mut self, posted: &Posted) -> Option<Outcome> {
        (!posted.op.is_for_node() && !self.finds_node_gone()).then(|| self.access(posted))
    }

    fn run_all_now(&mut self, batch: &[Posted], outcomes: &mut Vec<Outcome>) {
        // All far words are prefetched first: the processor fetches them while the first ones are being
        // copied.
        batch.iter().for_each(|posted| self.prefetch(posted.region, posted.offset, posted.local.bytes));
        outcomes.extend(batch.iter().map_while(|posted| self.run_now(posted)));
    }

    fn prefetch(&self, region: u32, offset: u64, bytes: usize) {
        if let Some(Some(attached)) = self.attached.get(region as usize) {
            attached.prefetch(offset, bytes);
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), LinkClosed> {
        if self.calls.take_due_look() {
            self.frames.look();
        }
        loop {
            self.calls.take_answers(done)?;
            let result = match self.node_is_gone {
                true => Err(LinkClosed { cause: Uncertain::ConnectionLost }),
                false => self.frames.poll(&mut self.done),
            };
            for frame in std::mem::take(&mut self.done) {
                let slot = frame.slot;
                done.push(Done { slot, outcome: self.finish(frame) });
            }
            result?;
            if let Some(memory) = self.frames.take_ring() {
                self.calls.open(memory)?;
            }
            if !self.release(done) {
                return Ok(());
            }
        }
    }

    fn readiness(&self) -> Option<Readiness<'_>> {
        if !self.calls.fall_asleep() {
            return None;
        }
        Some(Readiness { fd: self.frames.fd(), writable: self.frames.wants_to_send() })
    }

    fn transport(&self) -> &'static str {
        "shm"
    }
}

impl ShmLink {
    fn post_to_node(&mut self, posted: Posted) -> Option<Outcome> {
        if self.held.is_empty() && self.may_go(&posted) {
            return self.go(&posted);
        }
        self.held.push_back(posted);
        None
    }

    /// Whether nothing is in flight on the other way (S5), and there is room.
    fn may_go(&self, posted: &Posted) -> bool {
        match posted.op {
            Op::Call { .. } => self.calls.has_room() && !self.frames.awaits(),
            _ => self.calls.is_idle(),
        }
    }

    fn go(&mut self, posted: &Posted) -> Option<Outcome> {
        let Op::Call { request } = posted.op else {
            if matches!(posted.op, Op::Detach) {
                self.open.remove(&posted.region);
            }
            self.frames.post(posted);
            return None;
        };
        if self.open.is_empty() {
            return Some(Outcome::Refused(Refusal::NotAttached)); // the node would not poll the ring
        }
        let outcome = self.calls.post(posted.slot, posted.local, request);
        if self.calls.take_kick() {
            self.frames.kick();
        }
        outcome
    }

    /// Posts what was held back and may go now; true if something was.
    fn release(&mut self, done: &mut Vec<Done>) -> bool {
        let held = self.held.len();
        while let Some(posted) = self.held.front().copied().filter(|posted| self.may_go(posted)) {
            self.held.pop_front();
            if let Some(outcome) = self.go(&posted) {
                done.push(Done { slot: posted.slot, outcome });
            }
        }
        self.held.len() < held
    }

    /// Checks the connection when it is time to (S6); true if the node is gone.
    fn finds_node_gone(&mut self) -> bool {
        self.since_look += 1;
        if self.since_look >= OPERATIONS_PER_LOOK {
            self.since_look = 0;
            self.frames.look();
            // What completes is reported by the next poll.
            self.node_is_gone |= self.frames.poll(&mut self.done).is_err();
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
        let Some(place) = self.attaching.iter().position(|attaching| attaching.slot == frame.slot) else {
            return frame.outcome;
        };
        let Attaching { region, epoch, detached, .. } = self.attaching.swap_remove(place);
        if let Outcome::Done(_) = frame.outcome {
            self.open.insert(region);
        }
        let Some((layout, memory, words)) = frame.shared.filter(|_| !detached) else { return frame.outcome };
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
