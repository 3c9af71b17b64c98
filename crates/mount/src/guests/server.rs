//! The socket at which direct clients (called *guests* in the code) join and ask for files and regions; it
//! also watches for their deaths (H4).

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use farpool_file::FileStore;
use farpool_file::guest::GuestId;
use farpool_pool::direct::packets;
use farpool_wire::control::{GuestAnswer, GuestConnect, GuestRequest, guest_request::Ask};
use farpool_wire::{GUEST_VERSION, NodeId};
use prost::Message;
use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::time::Timespec;

use super::reaper::Reaper;
use super::registry::Registry;

/// Most connected processes at a time, and most that wait to be accepted.
const MAX_PROCESSES: usize = 4096;
const BACKLOG: i32 = 64;
/// Most nodes that the log reports as out of reach; a pool has fewer.
const MAX_OUT_OF_REACH: usize = 1024;
/// How long no process is accepted after accepting one has failed. Otherwise every poll would find the
/// waiting process again.
const SHORTAGE_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// `SO_PEERPIDFD`, since Linux 6.5; on older kernels the process is found by its number.
const SO_PEERPIDFD: i32 = 77;

/// The running server; dropping it ends it.
pub(crate) struct Server {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// A process that connected.
struct Visitor {
    /// `None`: the process has hung up, and the server waits for its death.
    socket: Option<OwnedFd>,
    process: OwnedFd,
    guest: Option<GuestId>,
}

impl Server {
    pub(crate) fn start(registry: Arc<Registry>, store: FileStore) -> io::Result<Self> {
        let address = SocketAddrUnix::new_abstract_name(registry.name().as_bytes())?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::bind(&listener, &address)?;
        rustix::net::listen(&listener, BACKLOG)?;
        let stop = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
        let stopped = stop.clone();
        let (files, session) = (store.clone(), store.session());
        let reaper = Reaper::start(move |guest| files.recover_guest(&session, guest))?;
        let run = move || {
            let (visitors, out_of_reach) = (Vec::new(), BTreeSet::new());
            let mut desk = Desk { registry, store, reaper, visitors, out_of_reach, is_short: false };
            if let Err(error) = desk.serve(&listener, &stopped) {
                tracing::error!(%error, "no more processes can work on files directly");
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
            tracing::error!("the server of processes that work on files directly panicked");
        }
    }
}

struct Desk {
    registry: Arc<Registry>,
    store: FileStore,
    reaper: Reaper,
    visitors: Vec<Visitor>,
    /// Nodes that could not be reached for direct clients, and were logged.
    out_of_reach: BTreeSet<u64>,
    /// The last attempt to accept a process failed: the daemon is short of descriptors or memory.
    is_short: bool,
}

impl Desk {
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
                    visitor.guest.into_iter().for_each(|guest| self.reaper.takes(guest));
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
        let trusted = known.is_some_and(|peer| self.registry.trusts(peer.uid.as_raw()));
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

    fn attend(&mut self, visitor: &mut Visitor) {
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

    fn answer(&mut self, visitor: &mut Visitor, socket: &OwnedFd, ask: Ask) -> io::Result<()> {
        match (ask, visitor.guest) {
            (Ask::Join(join), _) => self.join(visitor, socket, join.version),
            (_, None) => send(socket, &packets::refusal(Errno::PERM), &[]),
            (Ask::Open(open), Some(guest)) => self.open(guest, socket, &open.ticket),
            (Ask::Region(region), Some(_)) => match self.store.core().region_of(region.number) {
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

    fn join(&self, visitor: &mut Visitor, socket: &OwnedFd, version: u32) -> io::Result<()> {
        if version != GUEST_VERSION {
            return send(socket, &packets::refusal(Errno::PROTO), &[]);
        }
        let core = self.store.core();
        if visitor.guest.is_none() {
            visitor.guest = core.add_guest().ok();
        }
        let Some(guest) = visitor.guest else {
            return send(socket, &packets::refusal(Errno::USERS), &[]);
        };
        let memory = core.guest_memory();
        let answer = GuestAnswer { extents_per_region: core.extents_per_region(), ..done(guest) };
        send(socket, &answer, &[memory.words, memory.table])
    }

    fn open(&self, guest: GuestId, socket: &OwnedFd, ticket: &[u8]) -> io::Result<()> {
        match self.registry.redeem(ticket).map(|body| body.far.core().guest_memory()) {
            Some(Ok(memory)) => send(socket, &done(guest), &[memory.as_fd()]),
            Some(Err(_)) => send(socket, &packets::refusal(Errno::NOMEM), &[]),
            None => send(socket, &packets::refusal(Errno::STALE), &[]),
        }
    }

    /// Makes a connection to a node for a direct client, and passes it to the client.
    fn connect(&mut self, guest: GuestId, socket: &OwnedFd, to: &GuestConnect) -> io::Result<()> {
        match self.store.connect_guest(NodeId(to.node), Path::new(&to.shm_socket)) {
            Ok(connection) => {
                self.out_of_reach.remove(&to.node);
                send(socket, &done(guest), &[connection.as_fd()])
            }
            Err(error) => {
                // An error without a number is harmless: the node's regions were given back meanwhile.
                let errno = Errno::from_io_error(&error);
                if errno.is_some() {
                    self.complain(to, &error);
                }
                send(socket, &packets::refusal(errno.unwrap_or(Errno::NOENT)), &[])
            }
        }
    }

    /// Warns once for each node, until it is reached again.
    fn complain(&mut self, to: &GuestConnect, error: &io::Error) {
        if self.out_of_reach.len() < MAX_OUT_OF_REACH && self.out_of_reach.insert(to.node) {
            tracing::warn!(
                node = to.node, socket = to.shm_socket, %error,
                "processes that work on files directly cannot use the memory of this node, so the kernel serves them; \
                 run `farpool mount` as the user that runs the node, or let it reach the node's socket"
            );
        }
    }
}

/// The answer to a request that succeeded. It is never empty: a packet without bytes looks like the end of
/// the connection.
fn done(guest: GuestId) -> GuestAnswer {
    GuestAnswer { guest: guest.number().into(), ..GuestAnswer::default() }
}

fn send(socket: &OwnedFd, answer: &GuestAnswer, beside: &[std::os::fd::BorrowedFd<'_>]) -> io::Result<()> {
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
