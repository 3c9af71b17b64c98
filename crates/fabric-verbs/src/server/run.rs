//! The server's thread: connection requests, messages, and connections that end.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use farpool_fabric::{Host, Sessions, Spinner};
use farpool_wire::{Decoded, Hello, HelloReply, Incarnation, VerbsWelcome};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use super::access::CardAccess;
use super::connection::{CAPACITY, Connection, Ended};
use super::lending::Lending;
use super::{ServeOptions, Stop};
use crate::cm::{CmId, Depths, Event, EventChannel};
use crate::completion::CompletionQueue;
use crate::device::{Capabilities, Device};
use crate::error::VerbsError;
use crate::library::Library;
use crate::{MESSAGES_IN_FLIGHT, ffi};

/// Connections served at once; for the next one, one that is of no use makes room. Each has half a megabyte of
/// registered message buffers, so 128 MiB in all.
const MAX_CONNECTIONS: usize = 256;
/// Connection requests that the kernel holds for us.
const BACKLOG: i32 = 128;
/// Completions that nobody has taken: per connection one for each message in flight and its answer; as many again for
/// connections that have just ended.
const COMPLETIONS: u32 = (2 * MAX_CONNECTIONS * 3 * MESSAGES_IN_FLIGHT) as u32;
/// Completions taken in one call.
const TAKEN_AT_ONCE: usize = 32;
/// A connection that has had nothing attached for so long is closed, whatever it sends: its place may be wanted.
const UNATTACHED_DEADLINE: Duration = Duration::from_secs(60);
/// Looks for messages between two looks for connections that come and go: clients that are never quiet must not keep
/// others out, and to look costs a system call.
const TURNS_WITHOUT_EVENTS: u32 = 256;
/// How often a server looks for connections that were cut or are of no use.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

/// State of the server's thread. Fields drop in this order: connections before what they are made from.
pub(super) struct Server {
    connections: HashMap<u32, Connection>,
    /// Numbers of connections by the identifiers that events name.
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
                    tracing::error!(%error, "the RDMA server cannot serve any more");
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
        // Armed, then polled once more: what came before raises no event.
        let may_sleep = self.completions.arm().is_ok() && matches!(self.serve_completions(), Ok(0));
        let longest = if may_sleep { HOUSEKEEPING } else { Duration::ZERO };
        let timeout = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos() as i64 };
        let mut events = Vec::with_capacity(4);
        // EINTR and the like only mean an earlier look.
        let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout));
        self.attend();
    }

    /// Looks after connections that come and go.
    fn attend(&mut self) {
        self.serve_events();
        if self.last_housekeeping.elapsed() >= HOUSEKEEPING {
            self.keep_house();
        }
    }

    fn serve_completions(&mut self) -> io::Result<usize> {
        let count = self.completions.poll(&mut self.taken)?;
        for place in 0..count {
            let completion = self.taken[place];
            let number = (completion.wr_id >> 32) as u32;
            // Of a connection that has ended: nothing to answer.
            let Some(connection) = self.connections.get_mut(&number) else { continue };
            match connection.completed(&completion, &*self.host, &mut self.lending) {
                Ok(()) => {}
                Err(Ended::Lost) => self.close(number),
                Err(Ended::Malformed) => {
                    tracing::debug!(number, "malformed message; closing the RDMA connection");
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
        let hello = match Hello::decode(&event.private_data) {
            Ok(Decoded::Complete(hello)) => hello,
            _ => {
                tracing::debug!("an RDMA connection request without a greeting");
                self.host.rejected();
                return id.reject(&[]);
            }
        };
        if hello.node != self.host.identity().node {
            return id.reject(&self.reply(hello.incarnation).encode()); // its session has nothing to do with this node
        }
        if self.connections.len() >= MAX_CONNECTIONS && !self.make_room() {
            tracing::warn!(limit = MAX_CONNECTIONS, "too many RDMA connections in use; rejecting the newest");
            return id.reject(&[]);
        }
        let number = self.next_number;
        self.next_number = self.next_number.wrapping_add(1);
        let (incarnation, older) = self.sessions.greet(hello, number.into());
        if let Some(older) = older {
            self.close(older as u32); // before the newer one is answered
        }
        let reply = self.reply(incarnation);
        if hello.incarnation != incarnation {
            id.reject(&reply.encode());
            return self.sessions.closed(number.into());
        }
        let key = id.key();
        match self.accept(number, id, event, reply) {
            Ok(connection) => {
                self.by_id.insert(key, number);
                self.connections.insert(number, connection);
            }
            Err(error) => {
                tracing::warn!(%error, "an RDMA connection could not be accepted");
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
        event: &Event,
        reply: HelloReply,
    ) -> Result<Connection, VerbsError> {
        let domain = self.lending.domain()?;
        // SAFETY: the connection keeps the domain, and closes its queue pair before; so does the server with the
        // completion queue, which it drops after its connections.
        unsafe { id.create_queue_pair(&domain, self.completions.raw(), CAPACITY)? };
        let access = CardAccess::new(id);
        let connection = Connection::new(number, access.clone(), domain, self.atomics_by_message)?;
        let welcome = VerbsWelcome { reply, atomics_by_message: self.atomics_by_message };
        let (_, asked) = event.depths;
        let depths = Depths { responder: asked.min(self.capabilities.responder_depth), initiator: 1 };
        let accepted = access.with_id(|id| Ok(id.accept(&welcome.encode(), depths)?));
        accepted.map_err(|source| VerbsError::Call { what: "accepting an RDMA connection", source })?;
        Ok(connection)
    }

    /// Closes the connection that has longest been of no use to anybody; false when all are in use.
    fn make_room(&mut self) -> bool {
        let useless = self
            .connections
            .iter()
            .filter_map(|(&number, connection)| Some((connection.useless_for()?, number)));
        let Some((_, number)) = useless.max() else { return false };
        self.host.rejected();
        self.close(number);
        true
    }

    fn close(&mut self, number: u32) {
        if let Some(connection) = self.connections.remove(&number) {
            self.by_id.retain(|_, &mut known| known != number);
            drop(connection);
            self.sessions.closed(number.into());
        }
    }

    fn keep_house(&mut self) {
        self.last_housekeeping = Instant::now();
        let over = |connection: &Connection| {
            connection.access.is_cut()
                || connection.useless_for().is_some_and(|time| time > UNATTACHED_DEADLINE)
        };
        let over: Vec<u32> = self
            .connections
            .iter()
            .filter_map(|(&number, connection)| over(connection).then_some(number))
            .collect();
        over.into_iter().for_each(|number| self.close(number));
        self.lending.forget_replaced();
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
