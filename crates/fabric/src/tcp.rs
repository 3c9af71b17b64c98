//! The TCP transport, which reaches any host: frames over one non-blocking connection per queue.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use farpool_wire::Hello;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};

use crate::descriptors::Descriptor;
use crate::frames::{FrameClient, FrameDone, connecting};
use crate::seam::{Done, Link, LinkClosed, Outcome, Peer, Posted, Readiness, Transport};

/// A congestion control that does not pace, and that every kernel has.
const UNPACED: &str = "reno";

/// Switches pacing off between processes of one host. Their path cannot be congested, but a congestion
/// control that paces by its model of the path (BBR) misjudges one of microseconds and halves the rate of
/// large transfers. Between hosts the operator's choice stays.
pub(crate) fn calm_loopback(stream: impl AsFd, peer: SocketAddr) {
    let local = rustix::net::getsockname(&stream).ok().and_then(|local| SocketAddr::try_from(local).ok());
    if local.is_some_and(|local| local.ip() == peer.ip()) {
        let _ = sockopt::set_tcp_congestion(&stream, UNPACED); // only slower without
    }
}

/// Carries the fabric over TCP.
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpTransport;

impl Transport for TcpTransport {
    fn open(&self, peer: &Peer, hello: Hello) -> io::Result<Box<dyn Link>> {
        let address = peer.tcp.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::AddrNotAvailable,
                format!("node {} offers no TCP data plane", peer.node),
            )
        })?;
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let stream = rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
        let stream = Descriptor::out_of_the_way(stream);
        sockopt::set_tcp_nodelay(&stream, true)?;
        match rustix::net::connect(&stream, &address).map_err(io::Error::from) {
            Err(error) if !connecting(&error) => return Err(error),
            _ => calm_loopback(&stream, address),
        }
        Ok(Box::new(TcpLink { frames: FrameClient::new(stream, hello, false), done: Vec::new() }))
    }
}

struct TcpLink {
    frames: FrameClient,
    /// Scratch, kept for its capacity.
    done: Vec<FrameDone>,
}

impl Link for TcpLink {
    fn post(&mut self, posted: Posted) -> Option<Outcome> {
        self.frames.post(&posted);
        None
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), LinkClosed> {
        let result = self.frames.poll(&mut self.done);
        done.extend(self.done.drain(..).map(|frame| Done { slot: frame.slot, outcome: frame.outcome }));
        result
    }

    fn readiness(&self) -> Option<Readiness<'_>> {
        Some(Readiness { fd: self.frames.fd(), writable: self.frames.wants_to_send() })
    }

    fn transport(&self) -> &'static str {
        "tcp"
    }
}
