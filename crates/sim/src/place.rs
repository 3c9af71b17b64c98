//! Where a simulated client lives, and how it reaches the nodes.

use std::rc::Rc;

use farpool_fabric::sim::{HostId, Path, ProcessId, World};
use farpool_fabric::{Link, Peer, Transport};
use farpool_wire::{Hello, NodeId};

/// Where a client lives, and how it reaches the nodes.
#[derive(Clone, Copy)]
pub(crate) struct ClientPlace {
    pub(crate) index: usize,
    pub(crate) host: HostId,
    pub(crate) path: Path,
}

/// Reaches nodes of this host through shared memory, the others through the network.
pub(crate) struct Routed {
    shared: Rc<dyn Transport>,
    checked: Rc<dyn Transport>,
    here: Option<NodeId>,
}

impl Routed {
    /// The transport of a process; `here` is the node on its host whose memory it has mapped, if there is
    /// one.
    pub(crate) fn of(world: &World, process: ProcessId, here: Option<NodeId>) -> Rc<Self> {
        let shared = world.transport(process, Path::Shared);
        let checked = world.transport(process, Path::Checked);
        Rc::new(Routed { shared, checked, here })
    }
}

impl Transport for Routed {
    fn open(&self, peer: &Peer, hello: Hello) -> std::io::Result<Box<dyn Link>> {
        let transport = if self.here == Some(peer.node) { &self.shared } else { &self.checked };
        transport.open(peer, hello)
    }
}
