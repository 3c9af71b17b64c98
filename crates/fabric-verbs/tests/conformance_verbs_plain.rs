//! The conformance suite over RDMA: a device with neither memory windows nor atomics.

mod support;

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::conformance::{Carrier, SuiteHost};
use farpool_fabric::{Host, Peer, Transport, conformance_tests};
use farpool_fabric_verbs::{ServeOptions, VerbsConfig, VerbsTransport, serve_verbs};

struct Verbs;

impl Carrier for Verbs {
    fn serve(&self, host: Arc<SuiteHost>, at: Option<&Peer>) -> (Peer, Box<dyn Any>) {
        let node = host.identity().node;
        let options = ServeOptions { windows: false, card_atomics: false };
        let server = serve_verbs(host, support::listen_at(at), options).unwrap();
        (Peer { node, tcp: None, verbs: Some(server.address()), shm_socket: None }, Box::new(server))
    }

    /// Soft devices on emulated machines take a third of a second for each queue.
    fn queues_to_open(&self) -> usize {
        100
    }

    fn transport(&self) -> Rc<dyn Transport> {
        Rc::new(VerbsTransport::new(VerbsConfig { deadline: Duration::from_secs(20) }).unwrap())
    }
}

conformance_tests!(Verbs);
