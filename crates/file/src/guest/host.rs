//! The blocking edge of a direct client (called *guest* in the code): a process that works on files of a
//! mount's daemon.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use farpool_fabric::{Endpoint, EndpointConfig, MonotonicClock, block_on};
use farpool_pool::direct::{GuestTransport, Line};
use farpool_pool::{NODE_DEADLINE, SessionCore};
use farpool_wire::control::{GuestJoin, GuestOpen, guest_request::Ask};
use farpool_wire::{GUEST_VERSION, MAX_TRANSFER_BYTES, TICKET_BYTES};

use super::file::GuestFileCore;
use super::owner::GuestId;
use super::program::{Given, Room, fill_all};
use super::store::{GuestMemory, GuestPlace, GuestStore};

/// Room for the largest transfer, extended to whole blocks at both ends, and for the old contents of those
/// blocks.
const ARENA_BYTES: usize = 2 * MAX_TRANSFER_BYTES + (128 << 10);

/// The daemon of a mount, as another process of its host sees it. Not for the child of a fork: see
/// [`Host::abandon`].
pub struct Host {
    line: Arc<Line>,
    store: Arc<GuestStore>,
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

impl Host {
    /// Joins the daemon that listens on this name of the abstract namespace.
    ///
    /// # Errors
    /// When there is none, it does not admit this process, or it speaks another version.
    pub fn join(socket: &str) -> io::Result<Arc<Host>> {
        let line = Line::open(socket)?;
        let (answer, descriptors) = line.ask(Ask::Join(GuestJoin { version: GUEST_VERSION }))?;
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "the daemon's answer is invalid");
        let [words, table] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| invalid())?;
        let guest = u16::try_from(answer.guest).ok().and_then(GuestId::from_number).ok_or_else(invalid)?;
        let asking = line.clone();
        let ask = Box::new(move |number| asking.region(number));
        let memory = GuestMemory { words, table };
        let clock = Arc::new(MonotonicClock);
        let store = GuestStore::new(guest, &memory, answer.extents_per_region, clock, ask)?;
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
        let transport = Rc::new(GuestTransport::new(self.line.clone()));
        let endpoint = Endpoint::new(EndpointConfig::real(transport, ARENA_BYTES, NODE_DEADLINE));
        let core = SessionCore::new(self.store.regions().clone(), endpoint);
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
