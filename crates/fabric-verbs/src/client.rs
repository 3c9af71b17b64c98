//! The client's side: one transport per endpoint, with one completion queue per device for all its links.

mod attached;
mod chain;
mod link;
mod shared;

use std::io;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::{Link, LocalSlice, Peer, Transport};
use farpool_wire::Hello;

use link::VerbsLink;
use shared::Shared;

/// How a transport behaves.
#[derive(Clone, Copy, Debug)]
pub struct VerbsConfig {
    /// The deadline of the endpoint's operations. A card gives up its own retransmissions earlier.
    pub deadline: Duration,
}

/// What a transport has done so far.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counters {
    /// Chains of work requests handed to a card.
    pub doorbells: u64,
    /// Work requests in them.
    pub work_requests: u64,
    /// Completions of work requests that a card reported. With selective signalling they are fewer.
    pub completions: u64,
    /// Answers received.
    pub answers: u64,
}

/// Carries the fabric over RDMA cards, for one thread. Clones share everything.
#[derive(Clone)]
pub struct VerbsTransport {
    shared: Rc<Shared>,
}

impl VerbsTransport {
    /// Loads rdma-core and opens the connection manager.
    ///
    /// # Errors
    /// Without rdma-core or any device; [`crate::VerbsError`] says what to do.
    pub fn new(config: VerbsConfig) -> io::Result<Self> {
        Ok(VerbsTransport { shared: Rc::new(Shared::new(config)?) })
    }

    /// The counters of the transport so far.
    pub fn counters(&self) -> Counters {
        self.shared.counters()
    }
}

impl Transport for VerbsTransport {
    fn open(&self, peer: &Peer, hello: Hello) -> io::Result<Box<dyn Link>> {
        let address = peer.verbs.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::AddrNotAvailable,
                format!(
                    "node {} does not listen for RDMA connections: start it with --listen-rdma",
                    peer.node
                ),
            )
        })?;
        Ok(Box::new(VerbsLink::open(self.shared.clone(), address, hello)?))
    }

    fn local_memory(&self, arena: LocalSlice) {
        self.shared.add_arena(arena);
    }
}
