//! New connections, and who makes room for them.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use farpool_wire::{Epoch, Refusal};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, sockopt};

use super::connection::{Connection, Idle};
use super::room::{Occupant, who_makes_room};
use super::{Server, TCP_TOKEN, UNIX_TOKEN};
use crate::host::AccessKind;
use crate::tcp::calm_loopback;

/// What the kernel holds of a Unix socket's answers: some attachments' with their descriptors.
const UNIX_SEND_BYTES: usize = 4 << 10;
/// How long a connection that is of no use does not have to make room: who greets and attaches at once has done it by
/// then, so that newcomers do not drive each other out.
pub(super) const NEWCOMER_TIME: Duration = Duration::from_millis(100);

impl Server {
    pub(super) fn accept_tcp(&mut self) {
        while let Some(listener) = &self.listeners.tcp {
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(stream) => {
                    let _ = sockopt::set_tcp_nodelay(&stream, true); // only slower without
                    let peer = rustix::net::getpeername(&stream).ok().flatten();
                    if let Some(peer) = peer.and_then(|peer| SocketAddr::try_from(peer).ok()) {
                        calm_loopback(&stream, peer);
                    }
                    self.adopt(stream, false);
                }
                Err(error) if self.finds_room_after(error) => {}
                Err(error) => return self.accept_failed(error),
            }
        }
    }

    pub(super) fn accept_unix(&mut self) {
        while let Some((listener, _)) = &self.listeners.unix {
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(stream) => {
                    // Only answers to attachments go there: their descriptors, too, would wait in the socket.
                    let _ = sockopt::set_socket_send_buffer_size(&stream, UNIX_SEND_BYTES);
                    self.adopt(stream, true);
                }
                Err(error) if self.finds_room_after(error) => {}
                Err(error) => return self.accept_failed(error),
            }
        }
    }

    /// Whether what kept a connection out was the lack of a descriptor, and somebody has made room.
    fn finds_room_after(&mut self, error: Errno) -> bool {
        matches!(error, Errno::MFILE | Errno::NFILE) && self.make_room()
    }

    /// Out of descriptors or memory: what caused it does not pass by trying at once, so the listeners have a rest.
    fn accept_failed(&mut self, error: Errno) {
        if error != Errno::AGAIN {
            tracing::warn!(%error, "a connection could not be accepted; raise the limit on open files");
            self.listen_for(EventFlags::empty());
        }
    }

    pub(super) fn listen_for(&self, interest: EventFlags) {
        let tcp = self.listeners.tcp.as_ref().map(|listener| (listener.as_fd(), TCP_TOKEN));
        let unix = self.listeners.unix.as_ref().map(|(listener, _)| (listener.as_fd(), UNIX_TOKEN));
        for (listener, token) in tcp.into_iter().chain(unix) {
            if let Err(error) = epoll::modify(&self.epoll, listener, EventData::new_u64(token), interest) {
                tracing::error!(%error, "a listener cannot be watched");
            }
        }
    }

    fn adopt(&mut self, stream: OwnedFd, passes_descriptors: bool) {
        if self.connections.len() >= self.most_connections && !self.make_room() {
            tracing::warn!(limit = self.most_connections, "too many connections in use; closing the newest");
            return;
        }
        let token = self.next_token;
        self.next_token += 1;
        if let Err(error) = epoll::add(&self.epoll, &stream, EventData::new_u64(token), EventFlags::IN) {
            tracing::warn!(%error, "a connection could not be watched");
            return;
        }
        self.connections.insert(token, Connection::new(stream, passes_descriptors, self.now));
    }

    /// Closes the connection that has longest been of no use to anybody, or one of whoever has more than his share;
    /// false when there is none.
    fn make_room(&mut self) -> bool {
        let useless =
            self.connections.iter().filter_map(|(&token, connection)| match connection.idle(self.now) {
                Idle::Ungreeted(time) | Idle::Unattached(time) => Some((time, token)),
                Idle::No | Idle::Attached(_) => None,
            });
        let useless = useless.filter(|&(time, _)| time >= NEWCOMER_TIME);
        let longest = useless.max().map(|(_, token)| token);
        let Some(token) = longest.or_else(|| self.who_makes_room()) else { return false };
        self.host.rejected();
        self.close(token);
        true
    }

    fn who_makes_room(&self) -> Option<u64> {
        let occupants =
            self.connections.iter().filter_map(|(&token, connection)| match connection.idle(self.now) {
                Idle::Attached(idle) => Some(Occupant { token, idle, grants: connection.grants() }),
                _ => None,
            });
        let is_over = |region: u32, epoch: Epoch| {
            let looked = self.host.with_region(region, epoch, AccessKind::Read, &mut |_| Ok(()));
            matches!(looked, Err(Refusal::StaleEpoch | Refusal::NotAttached))
        };
        who_makes_room(occupants, is_over)
    }
}
