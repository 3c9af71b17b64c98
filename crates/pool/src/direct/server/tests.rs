//! The server without its thread: the tests call its functions, and its direct clients are sockets of this
//! process.

use farpool_wire::control::GuestOpen;
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net::socketpair;
use rustix::process::{Pid, PidfdFlags, geteuid, getpid, pidfd_open};
use rustix_futex_sync::Mutex;

use super::*;

/// The direct client whose requests the tests make.
const GUEST: u32 = 1;

/// An owner without memory.
struct FakeOwner {
    /// The user whose processes may join.
    trusted_uid: u32,
    /// What an attempt to connect to a node results in.
    connects: fn() -> io::Result<OwnedFd>,
    /// The nodes that it was warned of.
    warned: Mutex<Vec<NodeId>>,
    /// The server is told to stop once a ticket is redeemed.
    stop: OwnedFd,
}

impl Owner for FakeOwner {
    type Guest = u32;

    fn trusts(&self, uid: u32) -> bool {
        uid == self.trusted_uid
    }

    fn admit(&mut self) -> Option<u32> {
        None
    }

    fn number(guest: u32) -> u32 {
        guest
    }

    fn memory(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn extents_per_region(&self) -> u64 {
        1
    }

    fn redeem(&mut self, _: &[u8]) -> Result<OwnedFd, Errno> {
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).unwrap();
        Err(Errno::STALE)
    }

    fn region(&self, _: u64) -> Option<GuestRegion> {
        None
    }

    fn connect(&self, _: NodeId, _: &Path) -> io::Result<OwnedFd> {
        (self.connects)()
    }

    fn warn_out_of_reach(&self, node: NodeId, _: &str, _: &io::Error) {
        self.warned.lock().push(node);
    }

    fn bury(&mut self, _: u32) {}
}

fn event() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

fn desk() -> Desk<FakeOwner> {
    let owner = FakeOwner {
        trusted_uid: geteuid().as_raw(),
        connects: || Ok(event()),
        warned: Mutex::default(),
        stop: event(),
    };
    Desk { owner, visitors: Vec::new(), out_of_reach: BTreeSet::new(), is_short: false }
}

/// The server's socket, and a direct client's. Neither waits for the other.
fn sockets() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// A server's socket at this name, and that of a process that has connected to it. Neither waits for the
/// other.
fn listener_and_process(name: &str) -> (OwnedFd, OwnedFd) {
    let socket = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    };
    let (listener, process) = (socket(), socket());
    let name = format!("farpool-test-{}-{name}", std::process::id());
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, BACKLOG).unwrap();
    rustix::net::connect(&process, &address).unwrap();
    (listener, process)
}

/// A direct client that lives, and its end of the connection.
fn visitor() -> (Visitor<u32>, OwnedFd) {
    let (socket, client) = sockets();
    let process = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    (Visitor { socket: Some(socket), process, guest: Some(GUEST) }, client)
}

/// The answer to a direct client that asks for a connection to a node: the error, and the number of
/// descriptors; and how often the owner was warned of the node.
fn connect(
    desk: &mut Desk<FakeOwner>,
    node: u64,
    connects: fn() -> io::Result<OwnedFd>,
) -> (Option<Errno>, usize, usize) {
    let (socket, client) = sockets();
    desk.owner.connects = connects;
    desk.connect(GUEST, &socket, &GuestConnect { node, shm_socket: "/run/node".to_owned() }).unwrap();
    let (bytes, descriptors) = packets::receive(client.as_fd()).unwrap();
    let errno = GuestAnswer::decode(&bytes[..]).unwrap().errno as i32;
    let warned = std::mem::take(&mut *desk.owner.warned.lock());
    assert!(warned.iter().all(|&warned| warned == NodeId(node)));
    ((errno != 0).then(|| Errno::from_raw_os_error(errno)), descriptors.len(), warned.len())
}

fn works() -> io::Result<OwnedFd> {
    Ok(event())
}

fn is_refused() -> io::Result<OwnedFd> {
    Err(Errno::ACCESS.into())
}

/// As when the owner holds no region of the node any more.
fn was_given_back() -> io::Result<OwnedFd> {
    Err(io::ErrorKind::NotFound.into())
}

#[test]
fn the_owner_is_warned_once_of_a_node_until_it_can_be_reached_again() {
    let desk = &mut desk();
    assert_eq!(connect(desk, 3, is_refused), (Some(Errno::ACCESS), 0, 1));
    assert_eq!(connect(desk, 3, is_refused), (Some(Errno::ACCESS), 0, 0));
    assert_eq!(connect(desk, 4, is_refused), (Some(Errno::ACCESS), 0, 1));
    assert_eq!(connect(desk, 3, works), (None, 1, 0));
    assert_eq!(connect(desk, 3, is_refused), (Some(Errno::ACCESS), 0, 1));
}

#[test]
fn the_owner_is_not_warned_of_a_node_whose_regions_it_gave_back() {
    assert_eq!(connect(&mut desk(), 3, was_given_back), (Some(Errno::NOENT), 0, 0));
}

#[test]
fn the_owner_is_warned_of_a_limited_number_of_nodes() {
    let desk = &mut desk();
    for node in 1..=MAX_OUT_OF_REACH as u64 {
        assert_eq!(connect(desk, node, is_refused).2, 1);
    }
    assert_eq!(connect(desk, 1 + MAX_OUT_OF_REACH as u64, is_refused), (Some(Errno::ACCESS), 0, 0));
}

#[test]
fn a_direct_client_that_has_sent_nothing_keeps_its_connection() {
    let (mut visitor, client) = visitor();
    desk().attend(&mut visitor);
    assert!(visitor.socket.is_some() && !packets::is_cut(client.as_fd()));
}

#[test]
fn a_direct_client_whose_message_is_too_long_loses_its_connection() {
    let (mut visitor, client) = visitor();
    packets::send(client.as_fd(), &[1; packets::MAX_MESSAGE_BYTES + 1], &[]).unwrap();
    desk().attend(&mut visitor);
    assert!(visitor.socket.is_none() && packets::is_cut(client.as_fd()));
    assert_eq!(visitor.guest, Some(GUEST), "the server still waits for its death");
}

#[test]
fn a_process_that_connects_is_accepted_in_the_round_in_which_another_is_answered() {
    let mut desk = desk();
    let (answered, client) = visitor();
    let ask = GuestRequest { ask: Some(Ask::Open(GuestOpen { ticket: Vec::new() })) };
    packets::send(client.as_fd(), &ask.encode_to_vec(), &[]).unwrap();
    desk.visitors.push(answered);

    let (listener, _process) = listener_and_process("round");
    // The request makes the owner stop the server, so there is one round.
    let stop = desk.owner.stop.try_clone().unwrap();
    desk.serve(&listener, &stop).unwrap();
    let (bytes, _) = packets::receive(client.as_fd()).unwrap();
    assert_eq!(GuestAnswer::decode(&bytes[..]).unwrap(), packets::refusal(Errno::STALE));
    assert_eq!(desk.visitors.len(), 2);
}

#[test]
fn the_connection_of_an_accepted_process_never_waits_and_is_closed_in_programs_that_the_daemon_starts() {
    let mut desk = desk();
    let (listener, _process) = listener_and_process("accepted");
    desk.receive(&listener).unwrap();
    let socket = desk.visitors[0].socket.as_ref().unwrap();
    assert!(fcntl_getfl(socket).unwrap().contains(OFlags::NONBLOCK));
    assert!(fcntl_getfd(socket).unwrap().contains(FdFlags::CLOEXEC));
}

#[test]
fn a_process_of_a_user_that_the_owner_does_not_trust_loses_its_connection() {
    let mut desk = desk();
    desk.owner.trusted_uid += 1;
    let (listener, process) = listener_and_process("distrusted");
    desk.receive(&listener).unwrap();
    assert!(desk.visitors.is_empty() && packets::is_cut(process.as_fd()));
}

/// Whether the kernel knows the process of a connection.
fn kernel_has_peer_pidfd() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let version: Vec<u32> = release.split('.').map_while(|part| part.parse().ok()).take(2).collect();
    version >= vec![6, 5]
}

#[test]
fn a_process_is_found_by_its_connection_and_not_by_its_number() {
    if !kernel_has_peer_pidfd() {
        return;
    }
    let (socket, _client) = sockets();
    let of_no_process = Pid::from_raw(i32::MAX).unwrap();
    let process = process_of(&socket, of_no_process).unwrap();
    let facts = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", process.as_raw_fd())).unwrap();
    let pid = facts.lines().find_map(|line| line.strip_prefix("Pid:")).unwrap();
    assert_eq!(pid.trim(), std::process::id().to_string());
}
