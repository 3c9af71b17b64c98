//! A transport to nodes that do as a test tells them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use farpool_wire::{Hello, NodeId, RegionId, RemoteAddr, SessionId};

use super::{Endpoint, EndpointConfig, Queue};
use crate::clock::Clock;
use crate::seam::{Done, Link, LinkClosed, Outcome, Peer, Posted, Readiness, Transport};

/// A node. The outcome of each operation is its offset.
#[derive(Default)]
pub struct Fake {
    /// So many operations from now on are completed at once.
    pub at_once: Cell<u32>,
    /// Whether polls complete what was posted.
    pub completes: Cell<bool>,
    /// Polls so far.
    pub polls: Cell<u32>,
    /// The lengths of the operations that it has got so far.
    pub lengths: RefCell<Vec<usize>>,
}

/// The nodes, by their ids from 1 on.
struct Fakes(Vec<Rc<Fake>>);

struct FakeLink {
    node: Rc<Fake>,
    posted: Vec<Posted>,
}

/// Queues of one endpoint to new nodes.
pub fn queues<const N: usize>() -> [(Rc<Fake>, Queue); N] {
    let nodes: [Rc<Fake>; N] = std::array::from_fn(|_| Rc::default());
    let endpoint = Endpoint::new(EndpointConfig {
        transport: Rc::new(Fakes(nodes.to_vec())),
        clock: Rc::new(Ticking(Cell::new(0))),
        session_ids: Box::new(|| SessionId(1)),
        arena_bytes: 4 << 20,
        deadline: Duration::from_millis(5),
    });
    let mut id = 0;
    nodes.map(|node| {
        id += 1;
        let peer = Peer { node: NodeId(id), tcp: None, verbs: None, shm_socket: None };
        (node, endpoint.open(peer).unwrap())
    })
}

/// An address on the node of this id.
pub fn at(node: u64, offset: u64) -> RemoteAddr {
    RemoteAddr { region: RegionId { node: NodeId(node), index: 0 }, offset }
}

impl Transport for Fakes {
    fn open(&self, peer: &Peer, _hello: Hello) -> std::io::Result<Box<dyn Link>> {
        let node = self.0[peer.node.0 as usize - 1].clone();
        Ok(Box::new(FakeLink { node, posted: Vec::new() }))
    }
}

impl Link for FakeLink {
    fn post(&mut self, posted: Posted) -> Option<Outcome> {
        let outcome = self.run_now(&posted);
        if outcome.is_none() {
            self.node.lengths.borrow_mut().push(posted.local.bytes);
            self.posted.push(posted);
        }
        outcome
    }

    fn run_now(&mut self, posted: &Posted) -> Option<Outcome> {
        self.node.at_once.set(self.node.at_once.get().checked_sub(1)?);
        self.node.lengths.borrow_mut().push(posted.local.bytes);
        Some(Outcome::Done(posted.offset))
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), LinkClosed> {
        self.node.polls.set(self.node.polls.get() + 1);
        if self.node.completes.get() {
            let finished = |posted: Posted| Done { slot: posted.slot, outcome: Outcome::Done(posted.offset) };
            done.extend(self.posted.drain(..).map(finished));
        }
        Ok(())
    }

    fn readiness(&self) -> Option<Readiness<'_>> {
        None
    }

    fn transport(&self) -> &'static str {
        "fake"
    }
}

/// Advances by a millisecond each time it is read.
struct Ticking(Cell<u64>);

impl Clock for Ticking {
    fn now_ns(&self) -> u64 {
        self.0.set(self.0.get() + 1_000_000);
        self.0.get()
    }
}
