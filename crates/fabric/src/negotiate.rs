//! Which transport carries a queue: shared memory on the same host, else a network card, else TCP
//! (`docs/src/fabric.md`).
//!
//! All incarnations of a session go to the same server of the node, since only that server knows the older
//! ones that it has to supersede. Shared memory and TCP have one server, network cards another. So an
//! endpoint decides once per node.

use std::cell::{OnceCell, RefCell};
use std::io;
use std::rc::Rc;
use std::str::FromStr;
use std::time::Duration;

use farpool_wire::{Hello, NodeId};

use crate::seam::{Link, LocalSlice, Peer, Transport};
use crate::shm::ShmTransport;
use crate::tcp::TcpTransport;

/// What the operator allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TransportChoice {
    /// The best one that reaches the peer.
    #[default]
    Auto,
    /// Shared memory or nothing.
    Shm,
    /// TCP even on one host.
    Tcp,
    /// A network card or nothing.
    Verbs,
}

impl FromStr for TransportChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(TransportChoice::Auto),
            "shm" => Ok(TransportChoice::Shm),
            "tcp" => Ok(TransportChoice::Tcp),
            "verbs" => Ok(TransportChoice::Verbs),
            other => Err(format!("unknown transport '{other}': choose auto, shm, tcp or verbs")),
        }
    }
}

/// Makes the transport of one endpoint over network cards, for operations with this deadline. The transport
/// lives in a crate of its own; the program that uses both crates passes it in.
pub type CardTransport = fn(Duration) -> io::Result<Rc<dyn Transport>>;

/// The transports of a program: what may be used, and what there is besides shared memory and TCP.
#[derive(Clone, Copy, Debug, Default)]
pub struct Transports {
    /// What the operator allows.
    pub choice: TransportChoice,
    /// Network cards, in a program that has them.
    pub card: Option<CardTransport>,
}

impl From<TransportChoice> for Transports {
    fn from(choice: TransportChoice) -> Self {
        Transports { choice, card: None }
    }
}

/// Opens each link by the best transport that is allowed and reaches the peer. One per endpoint.
pub struct Negotiated {
    transports: Transports,
    deadline: Duration,
    arenas: RefCell<Vec<LocalSlice>>,
    /// Made when first needed.
    card: OnceCell<Rc<dyn Transport>>,
    /// For each node to which a network card was tried, whether it reaches the node.
    by_card: RefCell<Vec<(NodeId, bool)>>,
}

impl Negotiated {
    /// For an endpoint whose operations have this deadline.
    pub fn new(transports: impl Into<Transports>, deadline: Duration) -> Self {
        Negotiated {
            transports: transports.into(),
            deadline,
            arenas: RefCell::default(),
            card: OnceCell::new(),
            by_card: RefCell::default(),
        }
    }

    fn make_card(&self) -> io::Result<Rc<dyn Transport>> {
        let make = self.transports.card.ok_or_else(|| {
            io::Error::new(io::ErrorKind::Unsupported, "this program has no transport for network cards")
        })?;
        let card = make(self.deadline)?;
        self.arenas.borrow().iter().for_each(|&arena| card.local_memory(arena));
        Ok(card)
    }

    fn open_by_card(&self, peer: &Peer, hello: Hello) -> io::Result<Box<dyn Link>> {
        if let Some(card) = self.card.get() {
            return card.open(peer, hello);
        }
        let card = self.make_card()?;
        let opened = card.open(peer, hello);
        let _ = self.card.set(card); // empty until here: one thread, and `open` does not call this again
        opened
    }

    /// Opens a link by network card, if the node and this machine have one and this endpoint's first attempt
    /// succeeded.
    fn try_card(&self, peer: &Peer, hello: Hello) -> Option<io::Result<Box<dyn Link>>> {
        if self.transports.card.is_none() || peer.verbs.is_none() {
            return None;
        }
        let known = self.by_card.borrow().iter().find(|(node, _)| *node == peer.node).map(|&(_, by)| by);
        match known {
            Some(true) => Some(self.open_by_card(peer, hello)),
            Some(false) => None,
            None => {
                let opened = self.open_by_card(peer, hello);
                self.by_card.borrow_mut().push((peer.node, opened.is_ok()));
                match opened {
                    Ok(link) => Some(Ok(link)),
                    Err(error) => {
                        tracing::debug!(node = %peer.node, %error, "no network card reaches this node; using TCP");
                        None
                    }
                }
            }
        }
    }
}

impl Transport for Negotiated {
    fn open(&self, peer: &Peer, hello: Hello) -> io::Result<Box<dyn Link>> {
        match self.transports.choice {
            TransportChoice::Shm => ShmTransport.open(peer, hello),
            TransportChoice::Tcp => TcpTransport.open(peer, hello),
            TransportChoice::Verbs => self.open_by_card(peer, hello),
            TransportChoice::Auto if peer.shm_socket.is_none() => {
                self.try_card(peer, hello).unwrap_or_else(|| TcpTransport.open(peer, hello))
            }
            TransportChoice::Auto => ShmTransport.open(peer, hello).or_else(|error| {
                tracing::debug!(node = %peer.node, %error, "no shared memory with this node; using TCP");
                TcpTransport.open(peer, hello)
            }),
        }
    }

    fn local_memory(&self, arena: LocalSlice) {
        self.arenas.borrow_mut().push(arena);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::SocketAddr;

    use farpool_wire::{Incarnation, SessionId};

    use super::*;
    use crate::seam::{Done, LinkClosed, Outcome, Posted, Readiness};

    thread_local! {
        /// Whether the cards of this thread's test work.
        static WORKING: Cell<bool> = const { Cell::new(true) };
    }

    struct Card;
    struct CardLink;

    impl Transport for Card {
        fn open(&self, _: &Peer, _: Hello) -> io::Result<Box<dyn Link>> {
            if WORKING.get() { Ok(Box::new(CardLink)) } else { Err(io::ErrorKind::NetworkDown.into()) }
        }
    }

    impl Link for CardLink {
        fn post(&mut self, _: Posted) -> Option<Outcome> {
            None
        }

        fn poll(&mut self, _: &mut Vec<Done>) -> Result<(), LinkClosed> {
            Ok(())
        }

        fn readiness(&self) -> Option<Readiness<'_>> {
            None
        }

        fn transport(&self) -> &'static str {
            "card"
        }
    }

    fn node() -> (std::net::TcpListener, Peer) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp: Option<SocketAddr> = listener.local_addr().ok();
        (listener, Peer { node: NodeId(1), tcp, verbs: tcp, shm_socket: None })
    }

    fn carrier(transport: &Negotiated, peer: &Peer, incarnation: u64) -> io::Result<&'static str> {
        let hello = Hello { session: SessionId(1), incarnation: Incarnation(incarnation), node: peer.node };
        transport.open(peer, hello).map(|link| link.transport())
    }

    fn negotiated(choice: TransportChoice) -> Negotiated {
        let transports = Transports { choice, card: Some(|_| Ok(Rc::new(Card))) };
        Negotiated::new(transports, Duration::from_secs(1))
    }

    #[test]
    fn a_card_is_preferred_to_tcp_where_both_ends_have_one() {
        let (_listener, peer) = node();
        assert_eq!(carrier(&negotiated(TransportChoice::Auto), &peer, 1).unwrap(), "card");
        assert_eq!(carrier(&negotiated(TransportChoice::Tcp), &peer, 1).unwrap(), "tcp");
        let without = Peer { verbs: None, ..peer };
        assert_eq!(carrier(&negotiated(TransportChoice::Auto), &without, 1).unwrap(), "tcp");
    }

    #[test]
    fn a_session_keeps_its_transport_to_a_node_when_cards_fail_or_recover_later() {
        let (_listener, peer) = node();
        let transport = negotiated(TransportChoice::Auto);
        assert_eq!(carrier(&transport, &peer, 1).unwrap(), "card");
        WORKING.set(false);
        assert!(
            carrier(&transport, &peer, 2).is_err(),
            "its older incarnation is known to the card's server alone"
        );
        let other = negotiated(TransportChoice::Auto);
        assert_eq!(carrier(&other, &peer, 1).unwrap(), "tcp");
        WORKING.set(true);
        assert_eq!(carrier(&other, &peer, 2).unwrap(), "tcp");
    }

    #[test]
    fn a_program_without_cards_says_so_when_they_are_asked_for() {
        let (_listener, peer) = node();
        let transport = Negotiated::new(TransportChoice::Verbs, Duration::from_secs(1));
        assert_eq!(carrier(&transport, &peer, 1).unwrap_err().kind(), io::ErrorKind::Unsupported);
    }
}
