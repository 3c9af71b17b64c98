//! Which transport carries a queue: shared memory on the same host, else TCP (design, section 3).

use std::io;
use std::str::FromStr;

use farpool_wire::Hello;

use crate::seam::{Link, Peer, Transport};
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
}

impl FromStr for TransportChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(TransportChoice::Auto),
            "shm" => Ok(TransportChoice::Shm),
            "tcp" => Ok(TransportChoice::Tcp),
            other => Err(format!("unknown transport '{other}': choose auto, shm or tcp")),
        }
    }
}

/// Opens each link by the best transport that is allowed and reaches the peer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Negotiated(pub TransportChoice);

impl Transport for Negotiated {
    fn open(&self, peer: &Peer, hello: Hello) -> io::Result<Box<dyn Link>> {
        match self.0 {
            TransportChoice::Shm => ShmTransport.open(peer, hello),
            TransportChoice::Tcp => TcpTransport.open(peer, hello),
            TransportChoice::Auto if peer.shm_socket.is_none() => TcpTransport.open(peer, hello),
            TransportChoice::Auto => ShmTransport.open(peer, hello).or_else(|error| {
                tracing::debug!(node = %peer.node, %error, "no shared memory with this node; using TCP");
                TcpTransport.open(peer, hello)
            }),
        }
    }
}
