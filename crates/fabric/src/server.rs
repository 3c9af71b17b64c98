//! The node's side of framed connections: one thread, all connections, TCP and Unix sockets alike.
//!
//! V1. The operations of a connection take effect one at a time, in the order received, so the fence flag
//!     needs no work of its own.
//! V2. A greeting of a newer incarnation supersedes the session's older connection, which is closed before
//!     the greeting is answered. One thread serves all connections, so none of its operations is being
//!     carried out then (`docs/src/fabric.md`).
//! V3. Malformed bytes close their connection, count as rejected, and change nothing else.
//! V4. Memory is bounded. Between its turns a connection keeps at most [`SMALL_BYTES`] of received bytes and
//!     answers. Up to [`SHARES`] connections may keep two large buffers each instead: they have regions
//!     attached and are in the middle of a larger request or answer. With the buffers of the current turn and
//!     the spare ones, the total is [`MAX_KEPT_BYTES`]. The payload of a WRITE that will be refused is
//!     discarded as it arrives. Not counted: tables of attachments (at most 2 KiB for each attachment, less
//!     where regions are neighbours, and a word for every 64 regions of the node), and rings, of which
//!     clients and calls can touch about a megabyte each.
//! V5. While places are free, every connection gets one. A connection without a key never displaces one that
//!     has presented a key (`newcomers.rs`). The shares of users and hosts become equal, and so do those of
//!     the owners within each (`room.rs`).
//! V6. A connection without a key gets no service beyond the greeting: the server receives from it once a
//!     turn, refuses a few requests, then closes it.

mod accepting;
mod answers;
mod attached;
mod buffers;
mod complaints;
mod connection;
mod newcomers;
mod origin;
mod rings;
mod room;
mod sessions;
mod shares;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_wire::Hello;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::host::Host;
use crate::spin::Spinner;
use buffers::{BUFFER_BYTES, SPARE_BUFFERS, SpareBuffers};
pub use complaints::{Complaint, Complaints};
use connection::{Allowance, Connection, SMALL_BYTES, Standing, Terms, Verdict};
pub use newcomers::Newcomers;
pub use origin::Origin;
use rings::{AwakeRings, Ring, RingEvent};
pub use room::{Account, Places};
pub use sessions::Sessions;
use shares::{SHARES, Shares};

/// Connections served at once: two queues for each of a few hundred threads. To admit another one, the server
/// closes one of them.
const MAX_CONNECTIONS: usize = 1024;
/// Most memory that all connections together can make the server keep: a small part of what a node lends.
const MAX_KEPT_BYTES: usize = 112 << 20;
const _: () = assert!(
    MAX_CONNECTIONS * SMALL_BYTES + (2 * SHARES + 2 + SPARE_BUFFERS) * BUFFER_BYTES <= MAX_KEPT_BYTES,
    "V4"
);
/// Connections served at once even if the limit on descriptors leaves room for fewer.
const LEAST_CONNECTIONS: usize = 16;
/// A connection that has sent no greeting within this time is closed.
const GREETING_DEADLINE: Duration = Duration::from_secs(5);
/// A connection that has greeted but had nothing attached for this long is closed, whatever it sends: another
/// client may need its place.
const UNATTACHED_DEADLINE: Duration = Duration::from_secs(60);
/// Interval of the server's housekeeping: it closes overdue and useless connections, and listens again after
/// a failed accept.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

/// Busy connections that are served without asking epoll. For more of them, one call to epoll costs less than
/// trying each.
const MAX_HOT: usize = 4;
/// Consecutive turns that serve only the hot connections and the rings. This bounds how long others wait: a
/// turn takes some microseconds, or as long as its requests.
const TURNS_WITHOUT_EPOLL: u32 = 16;

/// Events fetched by one call to epoll.
const EVENTS: usize = 64;

/// Descriptors that the node needs for other things than connections and regions: its store, its control
/// plane, logs.
const OTHER_DESCRIPTORS: u64 = 256;
/// Descriptors that a connection usually has: its socket, its ring, and some on their way to the client.
const DESCRIPTORS_PER_CONNECTION: u64 = 4;

const TCP_TOKEN: u64 = 0;
const UNIX_TOKEN: u64 = 1;
const STOP_TOKEN: u64 = 2;
const FIRST_CONNECTION_TOKEN: u64 = 3;

/// Where to listen. At least one must be given.
#[derive(Debug, Default)]
pub struct Listeners {
    /// For the TCP transport.
    pub tcp: Option<TcpListener>,
    /// For the shared-memory transport, with its path, which is removed when the server stops.
    pub unix: Option<(UnixListener, PathBuf)>,
}

/// A running server; stops when dropped.
#[derive(Debug)]
pub struct ServerHandle {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
    tcp: Option<SocketAddr>,
    unix: Option<PathBuf>,
}

#[derive(Debug)]
struct Stop {
    asked: AtomicBool,
    wake: OwnedFd,
}

impl ServerHandle {
    /// Address of the TCP listener.
    pub fn tcp(&self) -> Option<SocketAddr> {
        self.tcp
    }

    /// Path of the Unix socket.
    pub fn unix(&self) -> Option<&PathBuf> {
        self.unix.as_ref()
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        self.stop.asked.store(true, Ordering::Release); // pairs with the load in `Server::run`
        // Failing to write means the counter is full: the thread is being woken anyway.
        let _ = rustix::io::write(&self.stop.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the data plane's thread panicked");
        }
        if let Some(path) = &self.unix {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Serves `host` on a thread of its own until the handle is dropped.
pub fn serve(host: Arc<dyn Host>, listeners: Listeners) -> io::Result<ServerHandle> {
    let tcp = listeners.tcp.as_ref().map(TcpListener::local_addr).transpose()?;
    let unix = listeners.unix.as_ref().map(|(_, path)| path.clone());
    let server = Server::new(host, listeners)?;
    let stop = server.stop.clone();
    let thread = std::thread::Builder::new().name("fabric-server".into()).spawn(move || server.run())?;
    Ok(ServerHandle { stop, thread: Some(thread), tcp, unix })
}

/// How many connections the limit on descriptors leaves room for.
fn most_connections(regions: u32) -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let left = limit.saturating_sub(OTHER_DESCRIPTORS + u64::from(regions));
    (left / DESCRIPTORS_PER_CONNECTION).clamp(LEAST_CONNECTIONS as u64, MAX_CONNECTIONS as u64) as usize
}

struct Server {
    host: Arc<dyn Host>,
    listeners: Listeners,
    epoll: OwnedFd,
    stop: Arc<Stop>,
    connections: HashMap<u64, Connection>,
    sessions: Sessions,
    newcomers: Newcomers,
    places: Places,
    shares: Shares,
    spare: SpareBuffers,
    complaints: Complaints,
    next_token: u64,
    /// Recently active connections; some may be closed by now.
    hot: Vec<u64>,
    /// Rings that are being polled.
    rings: AwakeRings,
    most_connections: usize,
    /// When the last events arrived: a cheap clock for what need not be exact.
    now: Instant,
    last_housekeeping: Instant,
}

impl Server {
    fn new(host: Arc<dyn Host>, listeners: Listeners) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let stop = Arc::new(Stop { asked: AtomicBool::new(false), wake });
        epoll::add(&epoll, &stop.wake, EventData::new_u64(STOP_TOKEN), EventFlags::IN)?;
        if let Some(listener) = &listeners.tcp {
            listener.set_nonblocking(true)?;
            epoll::add(&epoll, listener, EventData::new_u64(TCP_TOKEN), EventFlags::IN)?;
        }
        if let Some((listener, _)) = &listeners.unix {
            listener.set_nonblocking(true)?;
            epoll::add(&epoll, listener, EventData::new_u64(UNIX_TOKEN), EventFlags::IN)?;
        }
        let most_connections = most_connections(host.identity().regions);
        Ok(Server {
            host,
            listeners,
            epoll,
            stop,
            connections: HashMap::new(),
            sessions: Sessions::new(),
            newcomers: Newcomers::default(),
            places: Places::of(most_connections),
            shares: Shares::default(),
            spare: SpareBuffers::default(),
            complaints: Complaints::default(),
            next_token: FIRST_CONNECTION_TOKEN,
            hot: Vec::with_capacity(MAX_HOT),
            rings: AwakeRings::new(),
            most_connections,
            now: Instant::now(),
            last_housekeeping: Instant::now(),
        })
    }

    fn run(mut self) {
        let mut spinner = Spinner::new();
        let mut events = Vec::with_capacity(EVENTS);
        let mut sleep = Duration::ZERO;
        let mut turns_without_epoll = 0;
        while !self.stop.asked.load(Ordering::Acquire) {
            let some_hot = !self.hot.is_empty() || !self.rings.is_empty();
            if sleep.is_zero() && some_hot && turns_without_epoll < TURNS_WITHOUT_EPOLL {
                turns_without_epoll += 1;
                if self.serve_rings() | self.serve_hot() | self.serve_waiting() {
                    spinner.progressed();
                    continue;
                }
                if spinner.spin_again() {
                    continue;
                }
                sleep = HOUSEKEEPING;
            }
            turns_without_epoll = 0;
            if !sleep.is_zero() && !self.let_rings_sleep() {
                spinner.progressed(); // a request has come: it is served in the next turn
                sleep = Duration::ZERO;
                continue;
            }
            if let Err(error) = self.serve_events(&mut events, sleep) {
                tracing::error!(%error, "cannot wait for events; the data plane stops: restart the node");
                return;
            }
            if !events.is_empty() || self.shares.can_go_on() {
                spinner.progressed();
                sleep = Duration::ZERO;
            } else if self.connections.is_empty() || !spinner.spin_again() {
                sleep = HOUSEKEEPING;
            } else {
                sleep = Duration::ZERO;
            }
        }
    }

    /// Waits for events, at most for `longest` and not at all if there is work to do, then serves the
    /// connections concerned.
    fn serve_events(&mut self, events: &mut Vec<Event>, longest: Duration) -> Result<(), Errno> {
        events.clear();
        let longest = if self.shares.can_go_on() { Duration::ZERO } else { longest };
        let timeout = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos() as i64 };
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        self.now = Instant::now();
        self.hot.clear();
        for event in events.iter() {
            self.handle(event);
            if event.data.u64() >= FIRST_CONNECTION_TOKEN && self.hot.len() < MAX_HOT {
                self.hot.push(event.data.u64());
            }
        }
        if self.now.saturating_duration_since(self.last_housekeeping) >= HOUSEKEEPING {
            self.keep_house(self.now);
        }
        self.serve_waiting();
        Ok(())
    }

    /// Serves the recently active connections without asking epoll first; true if any of them had sent
    /// something.
    fn serve_hot(&mut self) -> bool {
        let mut progressed = false;
        for place in 0..self.hot.len() {
            let token = self.hot[place];
            self.serve_connection(token);
            progressed |= self.connections.get_mut(&token).is_some_and(Connection::take_activity);
        }
        progressed
    }

    /// Answers calls that came through rings; true if there were any.
    fn serve_rings(&mut self) -> bool {
        let progressed = self.rings.turn(&*self.host, !self.hot.is_empty());
        while let Some(event) = self.rings.next_event() {
            match event {
                RingEvent::Quiet(token, ring) => self.keep_ring(token, ring),
                RingEvent::Wake(token) => self.wake_peer(token),
                RingEvent::Broken(token) => {
                    tracing::debug!("a broken ring; closing the connection");
                    self.complain(Complaint::Malformed, token);
                    self.host.rejected();
                    self.close(token);
                }
            }
        }
        progressed
    }

    /// Puts the rings to sleep before the server sleeps: from then on clients kick. False if a request has
    /// come meanwhile.
    fn let_rings_sleep(&mut self) -> bool {
        while let Some((token, ring)) = self.rings.next_asleep() {
            self.keep_ring(token, ring);
        }
        self.rings.is_empty()
    }

    fn keep_ring(&mut self, token: u64, ring: Ring) {
        if let Some(connection) = self.connections.get_mut(&token) {
            connection.keep_ring(ring, self.now);
        }
    }

    fn wake_peer(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        match connection.wake_peer() {
            true => self.watch(token),
            false => self.close(token),
        }
    }

    fn handle(&mut self, event: &Event) {
        match event.data.u64() {
            TCP_TOKEN => self.accept_tcp(),
            UNIX_TOKEN => self.accept_unix(),
            STOP_TOKEN => {}
            // A connection that waits for a share watches for no events, but epoll reports its end all the
            // same.
            token if { event.flags }.contains(EventFlags::HUP) && self.shares.is_waiting(token) => {
                self.close(token);
            }
            token => self.serve_connection(token),
        }
    }

    fn serve_connection(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        if self.shares.is_waiting(token) && !connection.is_blocked() {
            return;
        }
        let allowance = match connection.has_attached() && self.shares.is_open_to(token) {
            true => Allowance::Large,
            false => Allowance::Small,
        };
        self.serve_within(allowance, token);
    }

    /// Serves connections that wait for a share of the memory, while shares are free; true if it served any.
    /// Serves at most [`SHARES`], so that others have their turn in between.
    fn serve_waiting(&mut self) -> bool {
        let mut served = 0;
        while served < SHARES {
            let connections = &self.connections;
            let grant_of = |token| connections.get(&token).and_then(|connection| connection.grants().next());
            let Some(token) = self.shares.next(grant_of) else { break };
            self.serve_within(Allowance::Large, token);
            served += 1;
        }
        served > 0
    }

    fn serve_within(&mut self, allowance: Allowance, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        let (host, now) = (&*self.host, self.now);
        let terms = Terms { host, places: &self.places, complaints: &self.complaints, now };
        let verdict = connection.serve(&terms, &mut self.spare, allowance);
        if connection.has_changed_sides() {
            self.settle_account(token);
        }
        let Some(connection) = self.connections.get_mut(&token) else { return };
        match verdict {
            Verdict::Keep => {
                if let Some(ring) = connection.take_kicked_ring() {
                    self.rings.add(token, ring);
                }
                let keeps_much = connection.keeps_much();
                if keeps_much || self.shares.are_held() {
                    self.shares.settle(token, keeps_much, self.now);
                }
                if connection.is_starved() && !self.shares.is_waiting(token) {
                    self.shares.wait(token, self.now);
                }
                self.watch(token);
            }
            Verdict::Greeted(hello) => self.greeted(token, hello),
            Verdict::Close => self.close(token),
            Verdict::Useless => {
                self.complain(Complaint::Useless, token);
                self.host.rejected();
                self.close(token);
            }
            Verdict::Reject(error) => {
                tracing::debug!(%error, "malformed input; closing the connection");
                self.complain(Complaint::Malformed, token);
                self.host.rejected();
                self.close(token);
            }
        }
    }

    fn greeted(&mut self, token: u64, hello: Hello) {
        let identity = self.host.identity();
        let mut in_force = hello.incarnation;
        // A greeting meant for another node is answered, so that the client learns which node this is, but is
        // not entered into the table of sessions.
        if hello.node == identity.node {
            let (incarnation, older) = self.sessions.greet(hello, token);
            in_force = incarnation;
            if let Some(older) = older {
                self.close(older);
            }
        }
        let Some(connection) = self.connections.get_mut(&token) else { return };
        if let Err(error) = connection.answer_greeting(&identity, in_force) {
            self.complaints.no_memory(&error, self.now);
            return self.close(token);
        }
        // Bytes sent right behind the greeting are here already and raise no further event.
        self.serve_connection(token);
    }

    fn complain(&self, complaint: Complaint, token: u64) {
        if let Some(connection) = self.connections.get(&token) {
            self.complaints.about(complaint, connection.origin(), self.now);
        }
    }

    /// Watches for room to send while answers wait, for nothing while the connection waits for a share, and
    /// for input otherwise.
    fn watch(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        let interest = connection.interest();
        if connection.watched == interest {
            return;
        }
        connection.watched = interest;
        if epoll::modify(&self.epoll, connection.stream(), EventData::new_u64(token), interest).is_err() {
            self.close(token);
        }
    }

    fn close(&mut self, token: u64) {
        if let Some(connection) = self.connections.remove(&token) {
            let _ = epoll::delete(&self.epoll, connection.stream().as_fd()); // dropping closes it in any case
            self.rings.remove(token);
            self.sessions.closed(token);
            self.shares.closed(token);
            match connection.account() {
                Some(account) => self.places.leave(account),
                None => self.newcomers.remove(connection.origin(), token),
            }
        }
    }

    fn keep_house(&mut self, now: Instant) {
        self.last_housekeeping = now;
        self.listen_for(EventFlags::IN);
        for token in self.shares.overdue(now) {
            tracing::debug!("closing a connection that held its share too long while others waited");
            self.close(token);
        }
        self.close_useless();
        self.complaints.tell_overdue(now);
    }

    fn close_useless(&mut self) {
        let mut useless = Vec::new();
        for (&token, connection) in &self.connections {
            if connection.withholds_descriptors(self.now) {
                useless.push((token, true));
                continue;
            }
            match connection.standing(self.now) {
                Standing::Ungreeted(age) if age > GREETING_DEADLINE => useless.push((token, true)),
                Standing::Unattached(age) if age > UNATTACHED_DEADLINE => useless.push((token, false)),
                Standing::Attached(_)
                    if !self.places.has_room() && self.has_only_ended_grants(connection) =>
                {
                    useless.push((token, true));
                }
                _ => {}
            }
        }
        for (token, rejected) in useless {
            tracing::debug!(rejected, "closing a connection that only occupies its place");
            if rejected {
                self.host.rejected();
            }
            self.close(token);
        }
    }
}
