//! The seam between everything above and the transports below.
//!
//! A transport implements [`Transport`] and [`Link`]. The endpoint above owns the table of operations in
//! flight, the deadlines and the buffers; a link only moves bytes.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use farpool_wire::{AccessKey, Epoch, Hello, NodeId, Refusal};

use crate::op::Uncertain;

/// Where a node can be reached from here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The node that is wanted; another node at the same address is refused.
    pub node: NodeId,
    /// Its data plane over TCP.
    pub tcp: Option<SocketAddr>,
    /// Where its network card listens.
    pub verbs: Option<SocketAddr>,
    /// The socket that hands out its memory, when it runs on this host.
    pub shm_socket: Option<PathBuf>,
}

/// One way to carry the fabric.
pub trait Transport {
    /// Starts a connection; it may still be incomplete when this returns, and operations may be posted at
    /// once.
    ///
    /// # Errors
    /// When this transport cannot reach the peer at all (no address for it, no such socket, refused at once).
    fn open(&self, peer: &Peer, hello: Hello) -> std::io::Result<Box<dyn Link>>;

    /// Names the memory in which the buffers of all operations will lie, once, before the first link is
    /// opened. It outlives every link of this transport. Network cards register it; other transports ignore
    /// it.
    fn local_memory(&self, _arena: LocalSlice) {}
}

/// One incarnation of a queue.
///
/// After a link is dropped it touches no local memory. That makes an operation's buffer reusable when its
/// outcome is unknown.
pub trait Link {
    /// Hands over an operation. It may complete at once; else it completes in a later [`Link::poll`].
    ///
    /// Operations take effect in the order posted, as far as the contract promises it. `posted.local` stays
    /// valid and untouched by others until the operation completes or the link is dropped.
    fn post(&mut self, posted: Posted) -> Option<Outcome>;

    /// Hands over several operations, with the effect of [`Link::post`] for one after the other; those that
    /// complete at once go to `done`, in their order. For transports that handle many operations together
    /// faster than one by one.
    fn post_batch(&mut self, batch: &[Posted], done: &mut Vec<Done>) {
        for posted in batch {
            if let Some(outcome) = self.post(*posted) {
                done.push(Done { slot: posted.slot, outcome });
            }
        }
    }

    /// Carries out an operation before it returns, as if posted after all earlier operations; `posted.slot`
    /// is ignored. `posted.local` need not lie in the arena, and must not be touched after this call has
    /// returned. `None`: the link cannot do that now, and has done nothing.
    fn run_now(&mut self, _posted: &Posted) -> Option<Outcome> {
        None
    }

    /// Carries out several operations before it returns, one after the other, up to the first that it cannot
    /// carry out now; see [`Link::run_now`]. Their outcomes go to `outcomes`, in their order.
    fn run_all_now(&mut self, batch: &[Posted], outcomes: &mut Vec<Outcome>) {
        outcomes.extend(batch.iter().map_while(|posted| self.run_now(posted)));
    }

    /// Has the processor fetch the first bytes of a range that may be accessed soon, if the link accesses far
    /// memory itself. Accesses nothing, so any range may be named.
    fn prefetch(&self, _region: u32, _offset: u64, _bytes: usize) {}

    /// Sends what is waiting (one doorbell, one write for all that was posted since the last poll), and moves
    /// finished operations to `done`. Never blocks.
    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), LinkClosed>;

    /// The descriptor to wait for when a poll brought nothing; `None` when the link can only be polled.
    fn readiness(&self) -> Option<Readiness<'_>>;

    /// Name of the transport, for people to read.
    fn transport(&self) -> &'static str;
}

/// A descriptor that becomes ready when polling the link may help.
#[derive(Clone, Copy, Debug)]
pub struct Readiness<'a> {
    /// Always of interest for reading.
    pub fd: BorrowedFd<'a>,
    /// Also of interest for writing.
    pub writable: bool,
}

/// The link can no longer be used; the outcome of operations that did not complete is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkClosed {
    /// Why.
    pub cause: Uncertain,
}

/// Local memory of an operation.
#[derive(Clone, Copy, Debug)]
pub struct LocalSlice {
    /// First byte.
    pub start: *mut u8,
    /// Length.
    pub bytes: usize,
}

impl LocalSlice {
    /// For operations that have no buffer.
    pub const NONE: LocalSlice = LocalSlice { start: std::ptr::null_mut(), bytes: 0 };
}

/// An operation that is handed to a link.
#[derive(Clone, Copy, Debug)]
pub struct Posted {
    /// Comes back in [`Done`]; unique among the operations in flight on this link.
    pub slot: u32,
    /// What to do.
    pub op: Op,
    /// The node's region.
    pub region: u32,
    /// The epoch of the grant under which to act.
    pub epoch: Epoch,
    /// Bytes from the region's start.
    pub offset: u64,
    /// READ: destination. WRITE: source. CALL: `request` bytes, then room for the answer. Else unused.
    pub local: LocalSlice,
    /// Whether the operation waits for every READ and atomic posted earlier.
    pub fence: bool,
}

/// The operations of the fabric.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    /// Opens a region for this queue.
    Attach(AccessKey),
    /// Closes a region for this queue.
    Detach,
    /// Far to local.
    Read,
    /// Local to far.
    Write,
    /// 8-byte compare-and-swap; the outcome's value is the word before.
    CompareAndSwap {
        /// What must be there.
        expected: u64,
        /// What to put there.
        new: u64,
    },
    /// 8-byte wrapping add; the outcome's value is the word before.
    FetchAndAdd {
        /// What to add.
        addend: u64,
    },
    /// A message for the node's processor.
    Call {
        /// Bytes of the request at the start of the local buffer.
        request: usize,
    },
}

impl Op {
    /// Whether the node's process has to carry it out. All others access memory, and nothing else.
    pub(crate) fn is_for_node(&self) -> bool {
        matches!(self, Op::Attach(_) | Op::Detach | Op::Call { .. })
    }
}

/// How an operation ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Done. Atomics: the word before. Calls: length of the answer. Else zero.
    Done(u64),
    /// Nothing happened.
    Refused(Refusal),
    /// It may have taken effect or not.
    Unknown(Uncertain),
}

/// A finished operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Done {
    /// The slot of its [`Posted`].
    pub slot: u32,
    /// How it ended.
    pub outcome: Outcome,
}
