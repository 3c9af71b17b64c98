//! The server's thread: connection requests, messages, and connections that end.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use farpool_fabric::{Account, Complaint, Complaints, Host, Newcomers, Origin, Places, Sessions, Spinner};
use farpool_throttle::Throttle;
use farpool_wire::{Decoded, Hello, HelloReply, Incarnation, VerbsWelcome};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use super::access::CardAccess;
use super::connection::{CAPACITY, Connection, Ended, Terms};
use super::lending::Lending;
use super::{ServeOptions, Stop};
use crate::cm::{CmId, Depths, Event, EventChannel};
use crate::completion::CompletionQueue;
use crate::device::{Capabilities, Device};
use crate::error::VerbsError;
use crate::library::Library;
use crate::{MESSAGES_IN_FLIGHT, ffi};

/// Most connections at a time. To make room for a further one, one without a key is closed. Each has half a
/// megabyte of registered message buffers, so 128 MiB in all.
const MAX_CONNECTIONS: usize = 256;
/// Connection requests that the kernel holds for us.
const BACKLOG: i32 = 128;
/// Capacity of the completion queue. Each connection has at most three completions per message in flight: the
/// message, the binding of a window, the answer. Twice that leaves room for connections that have just ended.
const COMPLETIONS: u32 = (2 * MAX_CONNECTIONS * 3 * MESSAGES_IN_FLIGHT) as u32;
/// Most completions taken in one call.
const TAKEN_AT_ONCE: usize = 32;
/// A connection that has had no region attached for this long is closed, whatever it sends: another
/// connection may need its place.
const UNATTACHED_DEADLINE: Duration = Duration::from_secs(60);
/// Checks for messages between two checks for connection events. The latter cost a system call, but must not
/// be left out: clients that always send messages must not keep others from connecting.
const TURNS_WITHOUT_EVENTS: u32 = 256;
/// How often a server looks for connections that were cut or have long had no region attached.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

/// State of the server's thread. Fields drop in this order: connections before the objects that they use.
pub(super) struct Server {
    connections: HashMap<u32, Connection>,
    /// From the identifiers in events to the numbers of connections.
    by_id: HashMap<usize, u32>,
    _listener: CmId,
    lending: Lending,
    completions: CompletionQueue,
    channel: Arc<EventChannel>,
    epoll: OwnedFd,
    stop: Arc<Stop>,
    host: Arc<dyn Host>,
    capabilities: Capabilities,
    atomics_by_message: bool,
    sessions: Sessions,
    /// Connections without a key.
    newcomers: Newcomers,
    /// Connections with a key.
    places: Places,
    complaints: Complaints,
    /// Limits the warnings about connections that could not be accepted for lack of resources.
    not_accepted: Throttle,
    next_number: u32,
    last_housekeeping: Instant,
    /// Scratch.
    taken: [ffi::Wc; TAKEN_AT_ONCE],
}

impl Server {
    pub(super) fn new(
        host: Arc<dyn Host>,
        listen: SocketAddr,
        options: ServeOptions,
        stop: Arc<Stop>,
    ) -> Result<(Self, SocketAddr), VerbsError> {
        if listen.ip().is_unspecified() {
            return Err(VerbsError::Wildcard { address: listen.ip() });
        }
        let library = Library::get()?;
        Device::all(library)?;
        let channel = EventChannel::new(library)?;
        let listener = CmId::new(&channel)?;
        listener.reuse_address()?;
        let device = listener.bind(listen)?;
        let capabilities = device.capabilities(library)?;
        let lending = Lending::new(library, device, options.windows && capabilities.windows)?;
        let entries = COMPLETIONS.min(capabilities.completions);
        let completions = CompletionQueue::new(library, device, entries)?;
        let epoll = watch(&[channel.fd(), completions.fd(), stop.wake.as_fd()])?;
        listener.listen(BACKLOG)?;
        let address = SocketAddr::new(listen.ip(), listener.local_port());
        let server = Server {
            connections: HashMap::new(),
            by_id: HashMap::new(),
            _listener: listener,
            lending,
            completions,
            channel,
            epoll,
            stop,
            host,
            capabilities,
            atomics_by_message: !(options.card_atomics && capabilities.atomics),
            sessions: Sessions::new(),
            newcomers: Newcomers::default(),
            places: Places::of(MAX_CONNECTIONS),
            complaints: Complaints::default(),
            not_accepted: Throttle::new(),
            next_number: 0,
            last_housekeeping: Instant::now(),
            taken: [ffi::Wc::default(); TAKEN_AT_ONCE],
        };
        Ok((server, address))
    }

    pub(super) fn run(mut self) {
        let mut spinner = Spinner::new();
        let mut turns_without_events = 0;
        while !self.stop.asked.load(Ordering::Acquire) {
            turns_without_events += 1;
            if turns_without_events == TURNS_WITHOUT_EVENTS {
                turns_without_events = 0;
                self.attend();
            }
            match self.serve_completions() {
                Ok(0) => {}
                Ok(_) => {
                    spinner.progressed();
                    continue;
                }
                Err(error) => {
                    tracing::error!(%error, "the RDMA server stops: its completion queue is broken");
                    return;
                }
            }
            if self.connections.is_empty() || !spinner.spin_again() {
                self.sleep_and_serve_events();
            }
        }
    }

    fn sleep_and_serve_events(&mut self) {
        self.completions.take_event();
        // Poll once more after arming: completions from before the arming raise no event.
        let may_sleep = self.completions.arm().is_ok() && matches!(self.serve_completions(), Ok(0));
        let longest = if may_sleep { HOUSEKEEPING } else { Duration::ZERO };
        let timeout = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos() as i64 };
        let mut events = Vec::with_capacity(4);
        // An error such as EINTR only makes the thread check earlier.
        let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout));
        self.attend();
    }

    /// Serves connection events and, when it is time, closes connections that are cut or unused.
    fn attend(&mut self) {
        self.serve_events();
        if self.last_housekeeping.elapsed() >= HOUSEKEEPING {
            self.close_unused();
        }
    }

    fn serve_completions(&mut self) -> io::Result<usize> {
        let count = self.completions.poll(&mut self.taken)?;
        for place in 0..count {
            let completion = self.taken[place];
            let number = (completion.wr_id >> 32) as u32;
            // The connection has ended: there is nothing to answer.
            let Some(connection) = self.connections.get_mut(&number) else { continue };
            let mut terms = Terms {
                host: &*self.host,
                lending: &mut self.lending,
                places: &self.places,
                complaints: &self.complaints,
            };
            let served = connection.completed(&completion, &mut terms);
            let origin = connection.origin;
            self.settle_account(number);
            match served {
                Ok(()) => {}
                Err(Ended::Lost) => self.close(number),
                Err(Ended::Malformed) => {
                    tracing::debug!(number, "malformed message; closing the RDMA connection");
                    self.complaints.about(Complaint::Malformed, origin, Instant::now());
                    self.host.rejected();
                    self.close(number);
                }
            }
        }
        Ok(count)
    }

    fn serve_events(&mut self) {
        loop {
            match self.channel.next() {
                Ok(Some(event)) => self.serve_event(event),
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "an RDMA event could not be taken");
                    return;
                }
            }
        }
    }

    fn serve_event(&mut self, mut event: Event) {
        match event.kind {
            ffi::EVENT_CONNECT_REQUEST => {
                if let Some(id) = event.request.take() {
                    self.requested(id, &event);
                }
            }
            ffi::EVENT_ESTABLISHED | ffi::EVENT_TIMEWAIT_EXIT => {}
            kind => {
                if kind == ffi::EVENT_DEVICE_REMOVAL {
                    tracing::error!("the RDMA device was removed");
                }
                if let Some(&number) = self.by_id.get(&event.id) {
                    tracing::debug!(number, kind, status = event.status, "an RDMA connection ended");
                    self.close(number);
                }
            }
        }
    }

    /// Answers a connection request.
    fn requested(&mut self, id: CmId, event: &Event) {
        let origin = id.peer().map_or(Origin::Unknown, Origin::of_address);
        let hello = match Hello::decode(&event.private_data) {
            Ok(Decoded::Complete(hello)) => hello,
            _ => {
                tracing::debug!("an RDMA connection request without a greeting");
                self.complaints.about(Complaint::Malformed, origin, Instant::now());
                self.host.rejected();
                return id.reject(&[]);
            }
        };
        if hello.node != self.host.identity().node {
            // The client wants another node, so its session is not recorded here.
            return id.reject(&self.reply(hello.incarnation).encode());
        }
        if self.connections.len() >= MAX_CONNECTIONS && !self.make_room() {
            return id.reject(&[]); // cannot happen: connections with a key never take all places
        }
        let number = self.next_number;
        self.next_number = self.next_number.wrapping_add(1);
        let (incarnation, older) = self.sessions.greet(hello, number.into());
        if let Some(older) = older {
            self.close(older as u32); // before the newer connection is answered
        }
        let reply = self.reply(incarnation);
        if hello.incarnation != incarnation {
            id.reject(&reply.encode());
            return self.sessions.closed(number.into());
        }
        let key = id.key();
        match self.accept(number, id, origin, event, reply) {
            Ok(connection) => {
                self.by_id.insert(key, number);
                self.newcomers.insert(origin, number.into());
                self.connections.insert(number, connection);
            }
            Err(error) => {
                if let Some(left_out) = self.not_accepted.occurs(Instant::now()) {
                    tracing::warn!(%error, left_out, "an RDMA connection could not be accepted");
                }
                self.sessions.closed(number.into());
            }
        }
    }

    fn reply(&self, incarnation: Incarnation) -> HelloReply {
        let identity = self.host.identity();
        HelloReply {
            node: identity.node,
            incarnation,
            region_bytes: identity.region_bytes,
            regions: identity.regions.into(),
        }
    }

    fn accept(
        &mut self,
        number: u32,
        id: CmId,
        origin: Origin,
        event: &Event,
        reply: HelloReply,
    ) -> Result<Connection, VerbsError> {
        let domain = self.lending.domain()?;
        // SAFETY: the connection holds the domain, and destroys its queue pair before it drops the domain.
        // The server drops the completion queue after its connections.
        unsafe { id.create_queue_pair(&domain, self.completions.raw(), CAPACITY)? };
        let access = CardAccess::new(id);
        let connection = Connection::new(number, access.clone(), origin, domain, self.atomics_by_message)?;
        let welcome = VerbsWelcome { reply, atomics_by_message: self.atomics_by_message };
        let (_, asked) = event.depths;
        let depths = Depths { responder: asked.min(self.capabilities.responder_depth), initiator: 1 };
        let accepted = access.with_id(|id| Ok(id.accept(&welcome.encode(), depths)?));
        accepted.map_err(|source| VerbsError::Call { what: "accepting an RDMA connection", source })?;
        Ok(connection)
    }

    /// Closes a connection without a key; `false` if there is none.
    fn make_room(&mut self) -> bool {
        let Some((origin, number)) = self.newcomers.first_to_go() else { return false };
        self.complaints.about(Complaint::Crowded, origin, Instant::now());
        self.host.rejected();
        self.close(number as u32);
        true
    }

    /// Counts a connection under another account if it has attached its first region, or has none attached
    /// any more.
    fn settle_account(&mut self, number: u32) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if !connection.has_changed_sides() {
            return;
        }
        let origin = connection.origin;
        let (before, now) = connection.change_sides();
        match before {
            Some(account) => self.places.leave(account),
            None => self.newcomers.remove(origin, number.into()),
        }
        let Some(account) = now else { return self.newcomers.insert(origin, number.into()) };
        if let Some(giver) = self.places.enter(account, origin) {
            self.give_up_one_of(giver, number);
        }
    }

    /// Closes the connection of this account that has been idle longest, except for `newest`.
    fn give_up_one_of(&mut self, account: Account, newest: u32) {
        let of_account = self
            .connections
            .iter()
            .filter(|&(&number, connection)| connection.account() == Some(account) && number != newest);
        let longest_idle = of_account.max_by_key(|(_, connection)| connection.idle());
        let Some((&number, connection)) = longest_idle else { return };
        self.complaints.about(Complaint::Shared, connection.origin, Instant::now());
        self.host.rejected();
        self.close(number);
    }

    fn close(&mut self, number: u32) {
        if let Some(connection) = self.connections.remove(&number) {
            self.by_id.retain(|_, &mut known| known != number);
            match connection.account() {
                Some(account) => self.places.leave(account),
                None => self.newcomers.remove(connection.origin, number.into()),
            }
            drop(connection);
            self.sessions.closed(number.into());
        }
    }

    /// Closes connections that were cut or have long had no region attached, and updates the accounts.
    fn close_unused(&mut self) {
        self.last_housekeeping = Instant::now();
        let is_unused = |connection: &Connection| {
            connection.access.is_cut()
                || connection.useless_for().is_some_and(|time| time > UNATTACHED_DEADLINE)
        };
        let unused: Vec<u32> = self
            .connections
            .iter()
            .filter_map(|(&number, connection)| is_unused(connection).then_some(number))
            .collect();
        unused.into_iter().for_each(|number| self.close(number));
        // Fences end attachments without a message, so the accounts are checked here.
        let numbers: Vec<u32> = self.connections.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.settle_account(number));
        self.lending.forget_replaced();
        self.complaints.tell_overdue(self.last_housekeeping);
    }
}

fn watch(descriptors: &[std::os::fd::BorrowedFd<'_>]) -> Result<OwnedFd, VerbsError> {
    let what = "watching for RDMA events";
    let failed = |error: rustix::io::Errno| VerbsError::Call { what, source: error.into() };
    let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(failed)?;
    for descriptor in descriptors {
        epoll::add(&epoll, descriptor, EventData::new_u64(0), EventFlags::IN).map_err(failed)?;
    }
    Ok(epoll)
}
