//! New connections: which ones make room for them, and to which account they are charged.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use farpool_wire::Refusal;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, sockopt};

use super::complaints::Complaint;
use super::connection::{Connection, Standing};
use super::origin::Origin;
use super::room::{Account, LOOKED_AT};
use super::{Server, TCP_TOKEN, UNIX_TOKEN};
use crate::host::AccessKind;
use crate::tcp::calm_loopback;

/// Send buffer of a Unix socket: the answers to a few attachments, with their descriptors.
const UNIX_SEND_BYTES: usize = 4 << 10;
/// Connections accepted in one turn, before earlier ones have theirs.
const ACCEPTS_PER_TURN: usize = 64;

impl Server {
    pub(super) fn accept_tcp(&mut self) {
        for _ in 0..ACCEPTS_PER_TURN {
            let Some(listener) = &self.listeners.tcp else { return };
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(stream) => {
                    let _ = sockopt::set_tcp_nodelay(&stream, true); // only slower without
                    let peer = rustix::net::getpeername(&stream).ok().flatten();
                    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                    if let Some(peer) = peer {
                        calm_loopback(&stream, peer);
                    }
                    self.adopt(stream, peer.map_or(Origin::Unknown, Origin::of_address), false);
                }
                Err(error) if self.finds_room_after(error) => {}
                Err(error) => return self.accept_failed(error),
            }
        }
    }

    pub(super) fn accept_unix(&mut self) {
        for _ in 0..ACCEPTS_PER_TURN {
            let Some((listener, _)) = &self.listeners.unix else { return };
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(stream) => {
                    // Most answers carry descriptors, which wait in the buffer until the client receives
                    // them. Descriptors are scarce, so the buffer is small.
                    let _ = sockopt::set_socket_send_buffer_size(&stream, UNIX_SEND_BYTES);
                    let user = sockopt::socket_peercred(&stream).map(|peer| Origin::User(peer.uid.as_raw()));
                    self.adopt(stream, user.unwrap_or(Origin::Unknown), true);
                }
                Err(error) if self.finds_room_after(error) => {}
                Err(error) => return self.accept_failed(error),
            }
        }
    }

    /// Whether accepting failed for lack of a descriptor, and a connection was closed to make room.
    fn finds_room_after(&mut self, error: Errno) -> bool {
        matches!(error, Errno::MFILE | Errno::NFILE) && self.make_room()
    }

    /// Handles a failed accept. If connections are left, the server is out of descriptors or memory, and
    /// trying again at once would not help: it listens again only at its next housekeeping.
    fn accept_failed(&mut self, error: Errno) {
        if error != Errno::AGAIN {
            self.complaints.not_accepted(&error.into(), self.now);
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

    fn adopt(&mut self, stream: OwnedFd, origin: Origin, passes_descriptors: bool) {
        if self.connections.len() >= self.most_connections && !self.make_room() {
            return; // never happens: the places for connections with a key are fewer than all places
        }
        let token = self.next_token;
        self.next_token += 1;
        if let Err(error) = epoll::add(&self.epoll, &stream, EventData::new_u64(token), EventFlags::IN) {
            self.complaints.not_accepted(&error.into(), self.now);
            return;
        }
        self.newcomers.insert(origin, token);
        self.connections.insert(token, Connection::new(stream, origin, passes_descriptors, self.now));
    }

    /// Closes a connection without a key; false when there is none. A candidate is served once more first,
    /// since its key may have arrived: of many clients that connect at once, each gets an answer before it
    /// makes room for others.
    fn make_room(&mut self) -> bool {
        while let Some((origin, token)) = self.newcomers.first_to_go() {
            let before = self.connections.len();
            self.serve_connection(token);
            if self.connections.len() < before {
                return true;
            }
            if self.newcomers.first_to_go() == Some((origin, token)) {
                self.complaints.about(Complaint::Crowded, origin, self.now);
                self.host.rejected();
                self.close(token);
                return true;
            }
        }
        false
    }

    /// Moves a connection that has presented its first key, or detached its last region, to another account.
    pub(super) fn settle_account(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        let (before, now) = connection.change_sides(self.now);
        let origin = connection.origin();
        match before {
            Some(account) => self.places.leave(account),
            None => self.newcomers.remove(origin, token),
        }
        let Some(account) = now else { return self.newcomers.insert(origin, token) };
        if let Some(giver) = self.places.enter(account, origin) {
            self.give_up_one_of(giver, token);
        }
    }

    /// Closes the connection of this account that has been idle longest, except the newest one.
    fn give_up_one_of(&mut self, account: Account, newest: u64) {
        let of_account = self.connections.iter().filter_map(|(&token, connection)| {
            let Standing::Attached(idle) = connection.standing(self.now) else { return None };
            (connection.account() == Some(account) && token != newest).then_some((idle, token))
        });
        let Some((_, token)) = of_account.max() else { return };
        self.complain(Complaint::Shared, token);
        self.host.rejected();
        self.close(token);
    }

    /// Whether the grants of all attachments have ended. False if there are more than [`LOOKED_AT`]
    /// attachments.
    pub(super) fn has_only_ended_grants(&self, connection: &Connection) -> bool {
        let has_ended = |(region, epoch)| {
            let looked = self.host.with_region(region, epoch, AccessKind::Read, &mut |_| Ok(()));
            matches!(looked, Err(Refusal::StaleEpoch | Refusal::NotAttached))
        };
        let mut grants = connection.grants();
        grants.by_ref().take(LOOKED_AT).all(has_ended) && grants.next().is_none()
    }
}
