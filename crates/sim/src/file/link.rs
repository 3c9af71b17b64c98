//! Connections of this scenario: through shared memory to the node on the same host, through the network to
//! the others. Connections break, and processes run short of file descriptors. Under a mutation, a connection
//! lies in one of two ways.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use farpool_fabric::sim::{Path, ProcessId, Random, World};
use farpool_fabric::{Done, Link, LinkClosed, Op, Outcome, Peer, Posted, Readiness, Transport, Uncertain};
use farpool_pool::EXTENT_BYTES;
use farpool_wire::{Hello, NodeId};

use super::bell::Bell;

/// How connections misbehave.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Shaking {
    /// The share of operations at which the connection breaks, in thousandths.
    pub(super) break_permille: u32,
    /// The share of attempts to connect for which there is no file descriptor, in thousandths.
    pub(super) short_permille: u32,
    pub(super) lie: Option<Lie>,
    /// A node that closes all connections and accepts none.
    pub(super) refusing: Option<NodeId>,
}

/// How a connection lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lie {
    /// It acknowledges a write as soon as the write is posted.
    DoneEarly,
    /// It acknowledges a write and sends nothing. The number is the share of such writes, in thousandths.
    DoneNever(u32),
}

/// `EMFILE`: this process has no descriptor left.
const NO_DESCRIPTOR: i32 = 24;
/// The first slot for operations whose completions are discarded. An endpoint uses only lower slots.
const FIRST_SPARE_SLOT: u32 = 4_096;

pub(super) struct Shaky {
    shared: Rc<dyn Transport>,
    checked: Rc<dyn Transport>,
    /// The node of this host.
    here: Option<NodeId>,
    shaking: Rc<dyn Fn() -> Shaking>,
    random: Rc<RefCell<Random>>,
    moving: Option<Rc<Bell>>,
}

impl Shaky {
    pub(super) fn new(
        world: &World,
        process: ProcessId,
        here: Option<NodeId>,
        random: Random,
        shaking: Rc<dyn Fn() -> Shaking>,
        moving: Option<Rc<Bell>>,
    ) -> Self {
        let (shared, checked) =
            (world.transport(process, Path::Shared), world.transport(process, Path::Checked));
        Shaky { shared, checked, here, shaking, random: Rc::new(RefCell::new(random)), moving }
    }
}

impl Transport for Shaky {
    fn open(&self, peer: &Peer, hello: Hello) -> io::Result<Box<dyn Link>> {
        if self.random.borrow_mut().chance((self.shaking)().short_permille) {
            return Err(io::Error::from_raw_os_error(NO_DESCRIPTOR));
        }
        let refused = (self.shaking)().refusing == Some(peer.node);
        let transport = if self.here == Some(peer.node) { &self.shared } else { &self.checked };
        Ok(Box::new(ShakyLink {
            link: transport.open(peer, hello)?,
            shaking: self.shaking.clone(),
            random: self.random.clone(),
            moving: self.moving.clone(),
            node: peer.node,
            refused,
            broken: false,
            spare: FIRST_SPARE_SLOT,
        }))
    }
}

struct ShakyLink {
    link: Box<dyn Link>,
    shaking: Rc<dyn Fn() -> Shaking>,
    random: Rc<RefCell<Random>>,
    /// Rung when a whole extent is read or written: this process does so only to move it.
    moving: Option<Rc<Bell>>,
    node: NodeId,
    /// The node closed the connection before it had read anything.
    refused: bool,
    broken: bool,
    spare: u32,
}

impl Link for ShakyLink {
    fn post(&mut self, posted: Posted) -> Option<Outcome> {
        if self.refused {
            return None; // never completes: the next poll closes the link
        }
        if posted.local.bytes as u64 == EXTENT_BYTES
            && let Some(moving) = &self.moving
        {
            moving.ring();
        }
        let shaking = (self.shaking)();
        let mut random = self.random.borrow_mut();
        self.broken |= random.chance(shaking.break_permille);
        match shaking.lie {
            Some(Lie::DoneEarly) if matches!(posted.op, Op::Write) => {
                self.spare += 1;
                let refused = self.link.post(Posted { slot: self.spare, ..posted });
                refused.or(Some(Outcome::Done(0)))
            }
            Some(Lie::DoneNever(permille)) if matches!(posted.op, Op::Write) && random.chance(permille) => {
                Some(Outcome::Done(0))
            }
            _ => self.link.post(posted),
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), LinkClosed> {
        self.broken |= self.refused || (self.shaking)().refusing == Some(self.node);
        if self.broken {
            return Err(LinkClosed { cause: Uncertain::ConnectionLost });
        }
        let before = done.len();
        let result = self.link.poll(done);
        let mut place = 0;
        done.retain(|done| {
            place += 1;
            place <= before || done.slot < FIRST_SPARE_SLOT
        });
        result
    }

    fn readiness(&self) -> Option<Readiness<'_>> {
        None
    }

    fn transport(&self) -> &'static str {
        self.link.transport()
    }
}
