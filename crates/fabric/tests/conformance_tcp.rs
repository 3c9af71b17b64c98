//! The conformance suite over TCP.

use std::any::Any;
use std::net::{SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::Arc;

use farpool_fabric::conformance::{self, Carrier, SuiteHost};
use farpool_fabric::{Host, Listeners, Peer, TcpTransport, Transport, conformance_tests, serve};

mod relay;

use relay::Relay;

struct Tcp;

impl Carrier for Tcp {
    fn serve(&self, host: Arc<SuiteHost>, at: Option<&Peer>) -> (Peer, Box<dyn Any>) {
        let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = TcpListener::bind(at.map_or(anywhere, |peer| peer.tcp.unwrap())).unwrap();
        let node = host.identity().node;
        let server = serve(host, Listeners { tcp: Some(listener), unix: None }).unwrap();
        (Peer { node, tcp: server.tcp(), verbs: None, shm_socket: None }, Box::new(server))
    }

    fn transport(&self) -> Rc<dyn Transport> {
        Rc::new(TcpTransport)
    }
}

/// Clients reach the node through a relay that can hold their packets back.
struct SlowNetwork {
    relay: Relay,
}

impl Carrier for SlowNetwork {
    fn serve(&self, host: Arc<SuiteHost>, at: Option<&Peer>) -> (Peer, Box<dyn Any>) {
        let (peer, server) = Tcp.serve(host, at);
        self.relay.lead_to(peer.tcp.unwrap());
        (Peer { tcp: Some(self.relay.address()), ..peer }, server)
    }

    fn transport(&self) -> Rc<dyn Transport> {
        Tcp.transport()
    }

    fn hold_back(&self, held: bool) {
        self.relay.hold_back(held);
    }
}

#[test]
fn operations_held_back_by_the_network_take_no_effect_after_a_new_incarnation() {
    let carrier = SlowNetwork { relay: Relay::new() };
    conformance::what_was_delayed_past_unknown_takes_no_effect_after_a_new_incarnation(&carrier);
}

conformance_tests!(Tcp);
