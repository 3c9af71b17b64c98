//! The blocking edge of a direct client (called *guest* in the code): a process that works on files of a
//! mount's daemon.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use farpool_fabric::{
    Clock, Descriptor, Endpoint, EndpointConfig, Link, MonotonicClock, Peer, ShmTransport, TcpTransport,
    Transport, block_on,
};
use farpool_pool::{NODE_DEADLINE, SessionCore};
use farpool_wire::control::{
    GuestAnswer, GuestConnect, GuestJoin, GuestOpen, GuestRegionOf, GuestRequest, guest_request::Ask,
};
use farpool_wire::{GUEST_VERSION, Hello, MAX_TRANSFER_BYTES, NodeId, TICKET_BYTES};
use prost::Message;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix_futex_sync::Mutex;

use super::file::GuestFileCore;
use super::line;
use super::owner::GuestId;
use super::program::{Given, Room, fill_all};
use super::store::{GuestMemory, GuestPlace, GuestRegion, GuestStore};

/// How long the daemon may take to answer. It answers at once, unless it is stopped.
const ANSWER_PATIENCE: Duration = Duration::from_secs(3);
/// How often the connection to the daemon is checked while there is work. A killed daemon is noticed within
/// this time.
const LOOK_EVERY_NS: u64 = 5_000_000;
/// Room for the largest transfer, extended to whole blocks at both ends, and for the old contents of those
/// blocks.
const ARENA_BYTES: usize = 2 * MAX_TRANSFER_BYTES + (128 << 10);

/// The daemon of a mount, as another process of its host sees it. Not for the child of a fork: see
/// [`Host::abandon`].
pub struct Host {
    line: Arc<Line>,
    store: Arc<GuestStore>,
}

/// The connection to the daemon.
struct Line {
    socket: Mutex<Descriptor>,
    has_ended: AtomicBool,
    looked_at_ns: AtomicU64,
}

/// A file to which the process was admitted.
pub struct GuestFile {
    host: Arc<Host>,
    core: GuestFileCore,
}

/// What one thread needs to work on any number of files of one host.
pub struct GuestSession {
    core: SessionCore,
    place: GuestPlace,
    /// Writes from several pieces of memory are put together here; kept for its capacity.
    gathered: RefCell<Vec<u8>>,
}

/// How a direct client reaches nodes: those of this host through their memory or not at all, because it
/// writes there (G5). The daemon makes these connections: only its user may have access to the nodes'
/// sockets.
struct Reach {
    line: Arc<Line>,
}

impl Transport for Reach {
    fn open(&self, peer: &Peer, hello: Hello) -> io::Result<Box<dyn Link>> {
        match &peer.shm_socket {
            Some(socket) => ShmTransport::open_on(self.line.connect(peer.node, socket)?, hello),
            None => TcpTransport.open(peer, hello),
        }
    }
}

impl Line {
    fn ask(&self, ask: Ask) -> io::Result<(GuestAnswer, Vec<OwnedFd>)> {
        let socket = self.socket.lock();
        if self.has_ended.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::NotConnected.into()); // an earlier holder of the lock noticed the end
        }
        let message = GuestRequest { ask: Some(ask) }.encode_to_vec();
        let answered =
            line::send(socket.as_fd(), &message, &[]).and_then(|()| receive_answer(socket.as_fd()));
        let (bytes, descriptors) = answered.inspect_err(|_| self.end())?;
        let answer = GuestAnswer::decode(&bytes[..]).ok().filter(|_| !bytes.is_empty());
        let Some(answer) = answer else {
            self.end();
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        match answer.errno {
            0 => Ok((answer, descriptors)),
            errno => Err(io::Error::from_raw_os_error(errno as i32)),
        }
    }

    /// A connection to a node of this host.
    fn connect(&self, node: NodeId, socket: &Path) -> io::Result<OwnedFd> {
        let shm_socket = socket.display().to_string();
        let (_, descriptors) = self.ask(Ask::Connect(GuestConnect { node: node.0, shm_socket }))?;
        Ok(descriptors.into_iter().next().ok_or(io::ErrorKind::InvalidData)?)
    }

    fn end(&self) {
        // Relaxed, as all accesses to this flag: it guards no other memory. Once set it stays set, and
        // another thread may see that a moment later.
        self.has_ended.store(true, Ordering::Relaxed);
    }

    fn has_ended(&self) -> bool {
        if self.has_ended.load(Ordering::Relaxed) {
            return true;
        }
        let now_ns = MonotonicClock.now_ns();
        if now_ns.saturating_sub(self.looked_at_ns.load(Ordering::Relaxed)) < LOOK_EVERY_NS {
            return false;
        }
        self.looked_at_ns.store(now_ns, Ordering::Relaxed);
        // A thread that holds the lock gets its answer, or notices the end itself.
        if self.socket.try_lock().is_some_and(|socket| line::is_cut(socket.as_fd())) {
            self.end();
        }
        self.has_ended.load(Ordering::Relaxed)
    }
}

/// Receives the daemon's answer. Signals of the program do not end the wait: they interrupt a call on a
/// socket with a time limit even if their handlers ask for calls to be restarted.
fn receive_answer(socket: BorrowedFd<'_>) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let give_up_at_ns = MonotonicClock.now_ns() + ANSWER_PATIENCE.as_nanos() as u64;
    loop {
        match line::receive(socket) {
            Err(error)
                if error.kind() == io::ErrorKind::Interrupted && MonotonicClock.now_ns() < give_up_at_ns => {}
            received => return received,
        }
    }
}

impl Host {
    /// Joins the daemon that listens on this name of the abstract namespace.
    ///
    /// # Errors
    /// When there is none, it does not admit this process, or it speaks another version.
    pub fn join(socket: &str) -> io::Result<Arc<Host>> {
        let address = SocketAddrUnix::new_abstract_name(socket.as_bytes())?;
        let fd =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let fd = Descriptor::out_of_the_way(fd);
        // The limit for sending also applies to connecting: a daemon that was stopped may have a full queue.
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&fd, direction, Some(ANSWER_PATIENCE))?;
        }
        rustix::net::connect(&fd, &address)?;
        let line = Arc::new(Line {
            socket: Mutex::new(fd),
            has_ended: AtomicBool::new(false),
            looked_at_ns: AtomicU64::new(0),
        });
        let (answer, descriptors) = line.ask(Ask::Join(GuestJoin { version: GUEST_VERSION }))?;
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "the daemon's answer is invalid");
        let [words, table] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| invalid())?;
        let guest = u16::try_from(answer.guest).ok().and_then(GuestId::from_number).ok_or_else(invalid)?;
        let asking = line.clone();
        let ask = move |number| {
            let (answer, descriptors) = asking.ask(Ask::Region(GuestRegionOf { number })).ok()?;
            GuestRegion::from_wire(&answer.region?, descriptors.into_iter().next())
        };
        let memory = GuestMemory { words, table };
        let clock = Arc::new(MonotonicClock);
        let store = GuestStore::new(guest, &memory, answer.extents_per_region, clock, Box::new(ask))?;
        Ok(Arc::new(Host { line, store: Arc::new(store) }))
    }

    /// Notices if the daemon has ended. Then it closes the daemon's files, and all operations of this host
    /// fail. Returns whether the daemon has ended.
    pub fn notice_end(&self) -> bool {
        let has_ended = self.line.has_ended();
        if has_ended {
            self.store.close_files();
        }
        has_ended
    }

    /// Opens a file by the ticket that its registration gave.
    ///
    /// # Errors
    /// When the ticket is not valid, or the daemon does not answer.
    pub fn open(self: &Arc<Self>, ticket: &[u8; TICKET_BYTES]) -> io::Result<GuestFile> {
        let (_, descriptors) = self.line.ask(Ask::Open(GuestOpen { ticket: ticket.to_vec() }))?;
        let memory = descriptors.first().ok_or(io::ErrorKind::InvalidData)?;
        Ok(GuestFile { host: self.clone(), core: GuestFileCore::open(self.store.clone(), memory)? })
    }

    /// What a thread needs to work on files.
    ///
    /// # Errors
    /// When there are too many threads.
    pub fn session(&self) -> io::Result<GuestSession> {
        let place = self.store.place().ok_or(io::ErrorKind::QuotaExceeded)?;
        let transport = Rc::new(Reach { line: self.line.clone() });
        let endpoint = Endpoint::new(EndpointConfig::real(transport, ARENA_BYTES, NODE_DEADLINE));
        let core = SessionCore::new(self.store.clone(), endpoint);
        Ok(GuestSession { core, place, gathered: RefCell::default() })
    }

    /// For the child of a fork: from now on this value touches nothing that the parent still uses. The child
    /// may leak the value, or drop it. Dropping closes connections and frees memory, which a child may not be
    /// allowed to do right after the fork.
    pub fn abandon(&self) {
        self.store.abandon();
        self.line.end();
    }
}

impl GuestFile {
    /// Reads into these pieces of memory, in order; fewer bytes at the end of the file. `None`: ask the
    /// kernel.
    pub fn read_at(&self, session: &GuestSession, offset: u64, to: &[Room<'_>]) -> Option<usize> {
        let length: usize = to.iter().map(Room::len).sum();
        if length > MAX_TRANSFER_BYTES || !self.core.is_open() || self.host.notice_end() {
            return None;
        }
        let read = self.core.read(&session.core, &session.place, offset, length);
        let (buffer, within) = block_on(session.core.endpoint(), read).ok()?;
        Some(fill_all(to, buffer.as_deref().map_or(&[][..], |bytes| &bytes[within])))
    }

    /// Writes these pieces of memory, in order. `None`: ask the kernel, for all of it.
    pub fn write_at(&self, session: &GuestSession, offset: u64, from: &[Given<'_>]) -> Option<usize> {
        let length: usize = from.iter().map(Given::len).sum();
        if length == 0 || length > MAX_TRANSFER_BYTES || !self.core.is_open() || self.host.notice_end() {
            return None;
        }
        let mut gathered = session.gathered.try_borrow_mut().ok()?;
        let data = match from {
            [one] => *one,
            several => {
                gathered.clear();
                several.iter().for_each(|piece| piece.append_to(&mut gathered));
                Given::from(&gathered[..])
            }
        };
        let write = self.core.write(&session.core, &session.place, offset, data);
        block_on(session.core.endpoint(), write).ok()?;
        let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        self.core.mark_written(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64);
        Some(length)
    }
}

impl GuestSession {
    /// Detaches regions that are lost or given back. Long-lived threads call this now and then.
    pub fn let_go(&self) {
        block_on(self.core.endpoint(), self.core.let_go());
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{SocketFlags, socketpair};

    use super::*;

    static INTERRUPTED: AtomicBool = AtomicBool::new(false);

    extern "C" fn note(_: libc::c_int) {
        INTERRUPTED.store(true, Ordering::Release); // pairs with the load in the test
    }

    #[test]
    fn a_signal_of_the_program_does_not_end_the_wait_for_an_answer() {
        // SAFETY: the handler stores to an atomic, which it may do wherever it interrupts.
        unsafe { libc::signal(libc::SIGUSR2, note as *const () as libc::sighandler_t) };
        let (ours, daemons) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        set_socket_timeout(&ours, Timeout::Recv, Some(ANSWER_PATIENCE)).unwrap();
        // SAFETY: `pthread_self` has no preconditions.
        let waiter = unsafe { libc::pthread_self() };
        let state = format!("/proc/self/task/{}/stat", rustix::thread::gettid().as_raw_nonzero());
        let is_asleep = || std::fs::read_to_string(&state).unwrap().contains(") S ");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_asleep() {
                    std::thread::yield_now();
                }
                // SAFETY: `waiter` waits for this scope, so it is alive.
                assert_eq!(unsafe { libc::pthread_kill(waiter, libc::SIGUSR2) }, 0);
                // The handler runs once the interrupted call has ended.
                while !INTERRUPTED.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                line::send(daemons.as_fd(), b"answer", &[]).unwrap();
            });
            let (bytes, _) = receive_answer(ours.as_fd()).unwrap();
            assert_eq!(bytes, b"answer");
        });
    }

    #[test]
    fn an_answer_that_cannot_be_received_is_an_error_at_once() {
        let (ours, daemons) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        line::send(daemons.as_fd(), &[1; line::MAX_MESSAGE_BYTES + 1], &[]).unwrap();
        drop(daemons);
        assert_eq!(receive_answer(ours.as_fd()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
