//! A direct client's (called *guest* in the code) connection to the owner, and its transport to nodes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use farpool_fabric::{Clock, Descriptor, Link, MonotonicClock, Peer, ShmTransport, TcpTransport, Transport};
use farpool_wire::control::{GuestAnswer, GuestConnect, GuestRegionOf, GuestRequest, guest_request::Ask};
use farpool_wire::{Hello, NodeId};
use prost::Message;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, UCred};
use rustix_futex_sync::Mutex;

use super::packets;
use super::regions::GuestRegion;

/// How long the daemon may take to answer. It answers at once, unless it is stopped.
const ANSWER_PATIENCE: Duration = Duration::from_secs(3);
/// How often the connection to the daemon is checked while there is work. A killed daemon is noticed within
/// this time.
const LOOK_EVERY_NS: u64 = 5_000_000;

/// The connection to the owner's daemon.
pub struct Line {
    socket: Mutex<Descriptor>,
    /// How long the daemon may take to answer.
    patience: Duration,
    has_ended: AtomicBool,
    looked_at_ns: AtomicU64,
}

/// How a direct client reaches nodes. A node of this host is reached through shared memory only, never over
/// TCP: direct clients of a mount write to these nodes (rule G5 of `file/src/guest.rs`). The daemon opens
/// these connections, because only its user may have access to the nodes' sockets. Other nodes are reached
/// over TCP.
pub struct GuestTransport {
    line: Arc<Line>,
}

impl GuestTransport {
    /// A transport that asks the daemon for connections.
    pub fn new(line: Arc<Line>) -> Self {
        GuestTransport { line }
    }
}

impl Transport for GuestTransport {
    fn open(&self, peer: &Peer, hello: Hello) -> io::Result<Box<dyn Link>> {
        match &peer.shm_socket {
            Some(socket) => ShmTransport::open_on(self.line.connect(peer.node, socket)?, hello),
            None => TcpTransport.open(peer, hello),
        }
    }
}

impl Line {
    /// Connects to the daemon that listens on this name of the abstract namespace.
    ///
    /// # Errors
    /// When there is none, or it does not accept the connection within 3 s.
    pub fn open(socket: &str) -> io::Result<Arc<Line>> {
        Self::open_within(socket, ANSWER_PATIENCE)
    }

    /// As [`open`](Self::open), with another limit for the connection and for each answer.
    ///
    /// # Errors
    /// The same, within that time.
    pub fn open_within(socket: &str, patience: Duration) -> io::Result<Arc<Line>> {
        let address = SocketAddrUnix::new_abstract_name(socket.as_bytes())?;
        let fd =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let fd = Descriptor::out_of_the_way(fd);
        // The limit for sending also applies to connecting: a daemon that was stopped may have a full queue.
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&fd, direction, Some(patience))?;
        }
        rustix::net::connect(&fd, &address)?;
        Ok(Arc::new(Line {
            socket: Mutex::new(fd),
            patience,
            has_ended: AtomicBool::new(false),
            looked_at_ns: AtomicU64::new(0),
        }))
    }

    /// Asks the daemon. Returns its answer and the descriptors that came with it.
    ///
    /// # Errors
    /// When the daemon refuses, does not answer in time, or has ended.
    pub fn ask(&self, ask: Ask) -> io::Result<(GuestAnswer, Vec<OwnedFd>)> {
        let socket = self.socket.lock();
        if self.has_ended.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::NotConnected.into()); // an earlier holder of the lock noticed the end
        }
        let message = GuestRequest { ask: Some(ask) }.encode_to_vec();
        let answered = packets::send(socket.as_fd(), &message, &[])
            .and_then(|()| receive_answer(socket.as_fd(), self.patience));
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

    /// The region with this number; `None`: the daemon does not answer, or gives none.
    pub fn region(&self, number: u64) -> Option<GuestRegion> {
        let (answer, descriptors) = self.ask(Ask::Region(GuestRegionOf { number })).ok()?;
        GuestRegion::from_wire(&answer.region?, descriptors.into_iter().next())
    }

    /// Ends the connection: from now on no question is asked.
    pub fn end(&self) {
        // Relaxed, as all accesses to this flag: it guards no other memory. Once set it stays set, and
        // another thread may see that a moment later.
        self.has_ended.store(true, Ordering::Relaxed);
    }

    /// The process that listens, and its user.
    ///
    /// # Errors
    /// Those of `getsockopt`.
    pub fn peer(&self) -> io::Result<UCred> {
        Ok(rustix::net::sockopt::socket_peercred(&*self.socket.lock())?)
    }

    /// Whether the daemon is known to have ended.
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed) || self.check(MonotonicClock.now_ns())
    }

    /// Checks the connection, unless it was checked a moment ago. Returns whether the daemon has ended.
    fn check(&self, now_ns: u64) -> bool {
        if now_ns.saturating_sub(self.looked_at_ns.load(Ordering::Relaxed)) < LOOK_EVERY_NS {
            return false;
        }
        self.looked_at_ns.store(now_ns, Ordering::Relaxed);
        // A thread that holds the lock gets its answer, or notices the end itself.
        if self.socket.try_lock().is_some_and(|socket| packets::is_cut(socket.as_fd())) {
            self.end();
        }
        self.has_ended.load(Ordering::Relaxed)
    }
}

/// Receives the daemon's answer. Signals of the program do not end the wait: they interrupt a call on a
/// socket with a time limit even if their handlers ask for calls to be restarted.
fn receive_answer(socket: BorrowedFd<'_>, patience: Duration) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let give_up_at_ns = MonotonicClock.now_ns() + patience.as_nanos() as u64;
    loop {
        match packets::receive(socket) {
            Err(error)
                if error.kind() == io::ErrorKind::Interrupted && MonotonicClock.now_ns() < give_up_at_ns => {}
            received => return received,
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::socketpair;
    use rustix::process::{Uid, geteuid};
    use rustix::thread::set_thread_res_uid;

    use super::*;

    /// A direct client's socket, and the daemon's.
    fn sockets() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    fn line_on(socket: OwnedFd) -> Line {
        Line {
            socket: Mutex::new(Descriptor::out_of_the_way(socket)),
            patience: ANSWER_PATIENCE,
            has_ended: AtomicBool::new(false),
            looked_at_ns: AtomicU64::new(0),
        }
    }

    static INTERRUPTED: AtomicBool = AtomicBool::new(false);

    extern "C" fn note(_: libc::c_int) {
        INTERRUPTED.store(true, Ordering::Release); // pairs with the load in the test
    }

    #[test]
    fn a_signal_of_the_program_does_not_end_the_wait_for_an_answer() {
        // SAFETY: the handler stores to an atomic, which it may do wherever it interrupts.
        unsafe { libc::signal(libc::SIGUSR2, note as *const () as libc::sighandler_t) };
        let (ours, daemons) = sockets();
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
                packets::send(daemons.as_fd(), b"answer", &[]).unwrap();
            });
            let (bytes, _) = receive_answer(ours.as_fd(), ANSWER_PATIENCE).unwrap();
            assert_eq!(bytes, b"answer");
        });
    }

    #[test]
    fn an_answer_that_cannot_be_received_is_an_error_at_once() {
        let (ours, daemons) = sockets();
        packets::send(daemons.as_fd(), &[1; packets::MAX_MESSAGE_BYTES + 1], &[]).unwrap();
        drop(daemons);
        assert_eq!(
            receive_answer(ours.as_fd(), ANSWER_PATIENCE).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }

    #[test]
    fn the_user_of_the_daemon_is_the_one_that_opened_its_socket() {
        let daemon = std::thread::spawn(|| {
            // If this thread is root's, it becomes another user, so that no number is expected by chance. For
            // any other user this fails.
            let nobody = Uid::from_raw(65_534);
            let _ = set_thread_res_uid(nobody, nobody, nobody);
            (geteuid().as_raw(), sockets())
        });
        let (uid, (ours, _daemons)) = daemon.join().unwrap();
        assert_eq!(line_on(ours).peer().unwrap().uid.as_raw(), uid);
    }

    #[test]
    fn the_connection_is_checked_once_per_interval_and_the_end_of_the_daemon_is_noticed_then() {
        const CHECKED_AT_NS: u64 = 1_000_000_000;
        let (ours, daemons) = sockets();
        let line = line_on(ours);
        assert!(!line.check(CHECKED_AT_NS));
        drop(daemons);
        assert!(!line.check(CHECKED_AT_NS + LOOK_EVERY_NS - 1), "each operation would make a system call");
        assert!(line.check(CHECKED_AT_NS + LOOK_EVERY_NS));
    }

    #[test]
    fn a_connection_that_was_ended_stays_ended_whatever_a_check_would_find() {
        let (ours, _daemons) = sockets();
        let line = line_on(ours);
        assert!(!line.has_ended());
        assert!(!line.check(u64::MAX)); // from now on the last check was a moment ago
        line.end();
        assert!(line.has_ended());
    }
}
