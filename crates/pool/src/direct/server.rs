//! The socket at which direct clients (called *guests* in the code) join their owner and ask for its regions.
//! The server also watches for their deaths.
//!
//! V1. Only processes of users that the owner trusts can join.
//! V2. A direct client counts as dead only according to its process descriptor (pidfd): the end of its
//!     connection proves nothing.
//! V3. The server waits for no direct client. One that does not take its answers loses its connection.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use farpool_wire::control::{GuestAnswer, GuestConnect, GuestRequest, guest_request::Ask};
use farpool_wire::{GUEST_VERSION, NodeId};
use prost::Message;
use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::time::Timespec;

use super::packets;
use super::regions::GuestRegion;

/// Most connected processes at a time, and most that wait to be accepted.
const MAX_PROCESSES: usize = 4096;
const BACKLOG: i32 = 64;
/// Most nodes of which the owner is told that they are out of reach; a pool has fewer.
const MAX_OUT_OF_REACH: usize = 1024;
/// How long no process is accepted after accepting one has failed. Otherwise every poll would find the
/// waiting process again.
const SHORTAGE_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// `SO_PEERPIDFD`, since Linux 6.5; on older kernels the process is found by its number.
const SO_PEERPIDFD: i32 = 77;

/// An owner of regions, as far as the server needs it.
pub trait Owner: Send + 'static {
    /// A direct client that has joined.
    type Guest: Copy + Send;

    /// Whether processes of this user may join.
    fn trusts(&self, uid: u32) -> bool;

    /// Admits a process; `None`: there are too many.
    fn admit(&mut self) -> Option<Self::Guest>;

    /// The number that a direct client is told when it joins: at least 1.
    fn number(guest: Self::Guest) -> u32;

    /// The memory that a direct client gets when it joins, in one or two parts.
    fn memory(&self) -> Vec<BorrowedFd<'_>>;

    /// Extents of a region.
    fn extents_per_region(&self) -> u64;

    /// The memory to which a ticket entitles a direct client, once.
    ///
    /// # Errors
    /// What the direct client is told.
    fn redeem(&mut self, ticket: &[u8]) -> Result<OwnedFd, Errno>;

    /// The region with this number, whose [terms](super::Terms) are published by now.
    fn region(&self, number: u64) -> Option<GuestRegion>;

    /// Connects to a node of this host, which a direct client may not be able to reach itself.
    ///
    /// # Errors
    /// As the operating system reports them; an error of another kind if the owner holds no region of such a
    /// node any more.
    fn connect(&self, node: NodeId, shm_socket: &Path) -> io::Result<OwnedFd>;

    /// Warns that direct clients cannot use the memory of a node. Called once for each node until it can be
    /// reached again.
    fn warn_out_of_reach(&self, node: NodeId, shm_socket: &str, error: &io::Error);

    /// Recovers what a direct client has left behind: it is dead. The other direct clients wait meanwhile.
    fn bury(&mut self, guest: Self::Guest);
}

/// The running server; dropping it ends it.
pub struct Server {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// A process that connected.
struct Visitor<G> {
    /// `None`: the process has hung up, and the server waits for its death.
    socket: Option<OwnedFd>,
    process: OwnedFd,
    guest: Option<G>,
}

impl Server {
    /// Serves direct clients in a thread of its own, at this name of the abstract namespace.
    ///
    /// # Errors
    /// If the name is in use, or there is no descriptor or no thread for the server.
    pub fn start(name: &str, owner: impl Owner) -> io::Result<Self> {
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::bind(&listener, &address)?;
        rustix::net::listen(&listener, BACKLOG)?;
        let stop = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
        let stopped = stop.clone();
        let run = move || {
            let mut desk =
                Desk { owner, visitors: Vec::new(), out_of_reach: BTreeSet::new(), is_short: false };
            if let Err(error) = desk.serve(&listener, &stopped) {
                tracing::error!(%error, "no more direct clients can join, and none is answered");
            }
        };
        let thread = std::thread::Builder::new().name("guests".into()).spawn(run)?;
        Ok(Server { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes()); // cannot fail: the counter is not full
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the server of direct clients panicked");
        }
    }
}

struct Desk<O: Owner> {
    owner: O,
    visitors: Vec<Visitor<O::Guest>>,
    /// Nodes that could not be reached for direct clients, and were logged.
    out_of_reach: BTreeSet<u64>,
    /// The last attempt to accept a process failed: the daemon is short of descriptors or memory.
    is_short: bool,
}

impl<O: Owner> Desk<O> {
    fn serve(&mut self, listener: &OwnedFd, stop: &OwnedFd) -> io::Result<()> {
        loop {
            let (ready, arrived) = {
                let mut wanted = vec![
                    PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
                    PollFd::from_borrowed_fd(
                        listener.as_fd(),
                        if self.is_short { PollFlags::empty() } else { PollFlags::IN },
                    ),
                ];
                for visitor in &self.visitors {
                    wanted.push(PollFd::from_borrowed_fd(visitor.process.as_fd(), PollFlags::IN));
                    // A process that has hung up is represented by its process descriptor, twice.
                    let socket = visitor.socket.as_ref().unwrap_or(&visitor.process);
                    wanted.push(PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN));
                }
                match poll(&mut wanted, self.is_short.then_some(&SHORTAGE_PAUSE)) {
                    Ok(_) => {}
                    Err(Errno::INTR) => continue,
                    Err(errno) => return Err(errno.into()),
                }
                if !wanted[0].revents().is_empty() {
                    return Ok(());
                }
                let arrived = !wanted[1].revents().is_empty();
                let ready = wanted[2..].chunks_exact(2);
                let ready = ready.map(|pair| (!pair[0].revents().is_empty(), !pair[1].revents().is_empty()));
                (ready.collect::<Vec<_>>(), arrived)
            };
            let visitors = std::mem::take(&mut self.visitors);
            for (mut visitor, (dead, asks)) in visitors.into_iter().zip(ready) {
                if dead {
                    visitor.guest.into_iter().for_each(|guest| self.owner.bury(guest));
                    continue;
                }
                if asks {
                    self.attend(&mut visitor);
                }
                // A process that hung up before it was admitted leaves nothing behind.
                if visitor.socket.is_some() || visitor.guest.is_some() {
                    self.visitors.push(visitor);
                }
            }
            self.is_short = arrived && self.receive(listener).is_err();
        }
    }

    /// Accepts a process, unless it has hung up already. Fails for lack of descriptors or memory.
    fn receive(&mut self, listener: &OwnedFd) -> rustix::io::Result<()> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match rustix::net::accept_with(listener, flags) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(()),
            Err(errno) => return Err(errno),
        };
        let known = rustix::net::sockopt::socket_peercred(&socket).ok();
        let trusted = known.is_some_and(|peer| self.owner.trusts(peer.uid.as_raw()));
        if !trusted || self.visitors.len() >= MAX_PROCESSES {
            return Ok(());
        }
        if let Some(peer) = known
            && let Ok(process) = process_of(&socket, peer.pid)
        {
            self.visitors.push(Visitor { socket: Some(socket), process, guest: None });
        }
        Ok(())
    }

    fn attend(&mut self, visitor: &mut Visitor<O::Guest>) {
        let Some(socket) = visitor.socket.take() else { return };
        match packets::receive(socket.as_fd()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => visitor.socket = Some(socket),
            Ok((bytes, _)) if !bytes.is_empty() => {
                let sent = match GuestRequest::decode(&bytes[..]).ok().and_then(|request| request.ask) {
                    Some(ask) => self.answer(visitor, &socket, ask),
                    None => send(&socket, &packets::refusal(Errno::INVAL), &[]),
                };
                // A process that does not take its answers loses its connection.
                if sent.is_ok() {
                    visitor.socket = Some(socket);
                }
            }
            _ => {} // it has hung up
        }
    }

    fn answer(&mut self, visitor: &mut Visitor<O::Guest>, socket: &OwnedFd, ask: Ask) -> io::Result<()> {
        match (ask, visitor.guest) {
            (Ask::Join(join), _) => self.join(visitor, socket, join.version),
            (_, None) => send(socket, &packets::refusal(Errno::PERM), &[]),
            (Ask::Open(open), Some(guest)) => match self.owner.redeem(&open.ticket) {
                Ok(memory) => send(socket, &done::<O>(guest), &[memory.as_fd()]),
                Err(errno) => send(socket, &packets::refusal(errno), &[]),
            },
            (Ask::Region(region), Some(_)) => match self.owner.region(region.number) {
                Some(region) => {
                    let file = region.file();
                    let answer = GuestAnswer { region: Some(region.to_wire()), ..GuestAnswer::default() };
                    send(socket, &answer, file.as_slice())
                }
                None => send(socket, &packets::refusal(Errno::NOENT), &[]),
            },
            (Ask::Connect(to), Some(guest)) => self.connect(guest, socket, &to),
        }
    }

    fn join(&mut self, visitor: &mut Visitor<O::Guest>, socket: &OwnedFd, version: u32) -> io::Result<()> {
        if version != GUEST_VERSION {
            return send(socket, &packets::refusal(Errno::PROTO), &[]);
        }
        if visitor.guest.is_none() {
            visitor.guest = self.owner.admit();
        }
        let Some(guest) = visitor.guest else {
            return send(socket, &packets::refusal(Errno::USERS), &[]);
        };
        let extents_per_region = self.owner.extents_per_region();
        send(socket, &GuestAnswer { extents_per_region, ..done::<O>(guest) }, &self.owner.memory())
    }

    /// Makes a connection to a node for a direct client, and passes it to the client.
    fn connect(&mut self, guest: O::Guest, socket: &OwnedFd, to: &GuestConnect) -> io::Result<()> {
        let node = NodeId(to.node);
        match self.owner.connect(node, Path::new(&to.shm_socket)) {
            Ok(connection) => {
                self.out_of_reach.remove(&to.node);
                send(socket, &done::<O>(guest), &[connection.as_fd()])
            }
            Err(error) => {
                // An error without a number is harmless: the node's regions were given back meanwhile.
                let errno = Errno::from_io_error(&error);
                if errno.is_some()
                    && self.out_of_reach.len() < MAX_OUT_OF_REACH
                    && self.out_of_reach.insert(to.node)
                {
                    self.owner.warn_out_of_reach(node, &to.shm_socket, &error);
                }
                send(socket, &packets::refusal(errno.unwrap_or(Errno::NOENT)), &[])
            }
        }
    }
}

/// The answer to a request that succeeded. It is never empty: a packet without bytes looks like the end of
/// the connection.
fn done<O: Owner>(guest: O::Guest) -> GuestAnswer {
    GuestAnswer { guest: O::number(guest), ..GuestAnswer::default() }
}

fn send(socket: &OwnedFd, answer: &GuestAnswer, beside: &[BorrowedFd<'_>]) -> io::Result<()> {
    packets::send(socket.as_fd(), &answer.encode_to_vec(), beside)
}

/// A descriptor of the process at the other end.
fn process_of(socket: &OwnedFd, pid: rustix::process::Pid) -> io::Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into `fd`, which has that size, lives until the call
    // returns, and is borrowed by nothing else.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    };
    if got == 0 && fd >= 0 {
        // SAFETY: the kernel has just made this descriptor for this call; nothing else owns it.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    Ok(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?)
}

#[cfg(test)]
mod tests;
