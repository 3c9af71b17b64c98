//! The node's side of framed connections: one thread, all connections, TCP and Unix sockets alike.
//!
//! V1. Operations of a connection take effect in the order received, one at a time: the fence flag needs
//!     nothing.
//! V2. A greeting of a newer incarnation buries older connections of its session before it is answered; since
//!     one thread serves all, nothing of them is under way then (`docs/src/fabric.md`).
//! V3. Malformed bytes close their connection, count as rejected, and change nothing else.
//! V4. Memory is bounded. Between its turns each connection keeps at most [`SMALL_BYTES`] of what it has
//!     received and of answers, but for [`SHARES`] of them, which have regions attached and are in the middle
//!     of something larger: two large buffers each. With those of the turn under way and the spare ones that
//!     is [`MAX_KEPT_BYTES`] in all. The payload of a WRITE that is refused in any case is thrown away as it
//!     comes. Not counted: tables of attachments (2 KiB for each of them at the most, less where regions are
//!     neighbours, and a word for every 64 regions of the node), and rings, of which clients and calls touch
//!     a megabyte each at the most.
//! V5. While there are places, every connection gets one. Connections without a key never displace one that
//!     has shown a key (`newcomers.rs`). Users and hosts come to have equal shares, and so do the owners of
//!     each (`room.rs`).
//! V6. Without a key there is no service beyond the greeting: the server refuses a few requests, at one
//!     receive a turn, then closes the connection.

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

/// Connections served at once; for the next one, another makes room. Two queues of a few hundred threads.
const MAX_CONNECTIONS: usize = 1024;
/// What all connections can make the server keep: a small part of what a node lends.
const MAX_KEPT_BYTES: usize = 112 << 20;
const _: () = assert!(
    MAX_CONNECTIONS * SMALL_BYTES + (2 * SHARES + 2 + SPARE_BUFFERS) * BUFFER_BYTES <= MAX_KEPT_BYTES,
    "V4"
);
/// Connections served at once whatever the limit on descriptors.
const LEAST_CONNECTIONS: usize = 16;
/// A connection that has not greeted by then is closed.
const GREETING_DEADLINE: Duration = Duration::from_secs(5);
/// A greeted connection that has had nothing attached for so long is closed, whatever it sends: its place may
/// be wanted.
const UNATTACHED_DEADLINE: Duration = Duration::from_secs(60);
/// How often an idle server looks for overdue greetings.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

/// Connections asked directly while they are busy: beyond, one call to epoll costs less than asking each.
const MAX_HOT: usize = 4;
/// Turns in which only the hot connections and rings are asked: how long, in turns of some microseconds or
/// requests, others may wait.
const TURNS_WITHOUT_EPOLL: u32 = 16;

/// Events taken in one call.
const EVENTS: usize = 64;

/// Descriptors that the node needs for other things than connections and regions: its store, its control
/// plane, logs.
const OTHER_DESCRIPTORS: u64 = 256;
/// Descriptors of a connection, most of the time: its socket, its ring, and some on their way to the client.
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
    /// For the shared-memory transport, and its path, removed when the server ends.
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

/// As many connections as the limit on descriptors has room for.
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
    /// Connections that were active of late; some may be closed by now.
    hot: Vec<u64>,
    /// Rings that are looked at.
    rings: AwakeRings,
    most_connections: usize,
    /// When the last events came: for what need not be exact.
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
                tracing::error!(%error, "the data plane cannot wait for its connections any more");
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

    /// Waits for events, for so long at most and not at all if there is something to do, and serves whom they
    /// are about.
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

    /// Asks the connections that were active of late, without asking epoll first; true if something had come.
    fn serve_hot(&mut self) -> bool {
        let mut progressed = false;
        for place in 0..self.hot.len() {
            let token = self.hot[place];
            self.serve_connection(token);
            progressed |= self.connections.get_mut(&token).is_some_and(Connection::take_activity);
        }
        progressed
    }

    /// Answers calls that came by the rings; true if some had come.
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

    /// Before the server sleeps: from then on clients kick. False when some request came meanwhile.
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
            // Nothing is asked for while it waits; that it has ended is told all the same.
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

    /// Goes on with some of those that wait for a share of the memory, as long as there is one; true if there
    /// was one. Others have their turn between these.
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
        // A greeting meant for another node is answered, so that the client learns who is here, and enters no
        // table.
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
        // What was sent right behind the greeting is here already and raises no further event.
        self.serve_connection(token);
    }

    fn complain(&self, complaint: Complaint, token: u64) {
        if let Some(connection) = self.connections.get(&token) {
            self.complaints.about(complaint, connection.origin(), self.now);
        }
    }

    /// Asks for room to send while answers wait, for nothing while it waits for others, and for input
    /// otherwise.
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
            tracing::debug!("closing a connection in the middle of a request that others wait for");
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
