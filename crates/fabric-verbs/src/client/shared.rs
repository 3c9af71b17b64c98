//! State that the links of one transport share: events, completions, registered arenas.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::{LocalSlice, MAX_IN_FLIGHT};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::client::{Counters, VerbsConfig};
use crate::cm::{Event, EventChannel};
use crate::completion::CompletionQueue;
use crate::device::{Capabilities, Device};
use crate::error::VerbsError;
use crate::ffi;
use crate::library::Library;
use crate::memory::{Domain, Registration};

/// Capacity of the completion queue. An operation in flight has at most two completions (a message has one
/// for its request and one for its answer). Four leave room for those that a closing link leaves behind.
const COMPLETIONS: u32 = 4 * MAX_IN_FLIGHT as u32;
/// Most completions taken in one call.
const TAKEN_AT_ONCE: usize = 32;
/// Polls between two checks for connection events. Such a check costs a system call.
const POLLS_PER_EVENT_CHECK: u32 = 64;

/// Shared by the links of one transport, on one thread.
pub(super) struct Shared {
    pub(super) library: &'static Library,
    pub(super) deadline: Duration,
    pub(super) channel: Arc<EventChannel>,
    /// Watches the event channel and every device's completion channel.
    epoll: OwnedFd,
    counters: Cell<Counters>,
    arenas: RefCell<Vec<LocalSlice>>,
    devices: RefCell<Vec<Rc<ClientDevice>>>,
    inboxes: RefCell<Vec<Inbox>>,
    next_serial: Cell<u32>,
    polls_since_events: Cell<u32>,
}

/// Events and completions that have arrived for one link and that it has not taken yet.
struct Inbox {
    serial: u32,
    id: usize,
    events: VecDeque<Event>,
    completions: Vec<ffi::Wc>,
}

/// A device as one transport uses it.
pub(super) struct ClientDevice {
    device: Device,
    pub(super) capabilities: Capabilities,
    pub(super) completions: CompletionQueue,
    pub(super) domain: Arc<Domain>,
    arenas: RefCell<Vec<(LocalSlice, Registration)>>,
    /// An event was requested and has not been taken yet.
    armed: Cell<bool>,
}

impl Shared {
    pub(super) fn new(config: VerbsConfig) -> Result<Self, VerbsError> {
        let library = Library::get()?;
        Device::all(library)?;
        let channel = EventChannel::new(library)?;
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(watching)?;
        epoll::add(&epoll, channel.fd(), EventData::new_u64(0), EventFlags::IN).map_err(watching)?;
        Ok(Shared {
            library,
            deadline: config.deadline,
            channel,
            epoll,
            counters: Cell::default(),
            arenas: RefCell::default(),
            devices: RefCell::default(),
            inboxes: RefCell::default(),
            next_serial: Cell::new(1),
            polls_since_events: Cell::new(0),
        })
    }

    pub(super) fn counters(&self) -> Counters {
        self.counters.get()
    }

    pub(super) fn count_doorbell(&self, work_requests: usize) {
        let mut counters = self.counters.get();
        counters.doorbells += 1;
        counters.work_requests += work_requests as u64;
        self.counters.set(counters);
    }

    pub(super) fn add_arena(&self, arena: LocalSlice) {
        self.arenas.borrow_mut().push(arena);
    }

    /// The transport's side of a device, with every arena registered.
    pub(super) fn device(&self, device: Device) -> Result<Rc<ClientDevice>, VerbsError> {
        let known = self.devices.borrow().iter().find(|known| known.device == device).cloned();
        let found = match known {
            Some(known) => known,
            None => {
                let opened = Rc::new(ClientDevice::new(self.library, device)?);
                let data = EventData::new_u64(0);
                epoll::add(&self.epoll, opened.completions.fd(), data, EventFlags::IN).map_err(watching)?;
                self.devices.borrow_mut().push(opened.clone());
                opened
            }
        };
        found.register(&self.arenas.borrow())?;
        Ok(found)
    }

    /// Adds a link. Returns the serial number of its work requests and its inbox.
    pub(super) fn enter(&self, id: usize) -> u32 {
        let serial = self.next_serial.get();
        // It wraps after four billion links. By then the first ones are gone, and their completions taken.
        self.next_serial.set(serial.wrapping_add(1));
        let inbox = Inbox { serial, id, events: VecDeque::new(), completions: Vec::new() };
        self.inboxes.borrow_mut().push(inbox);
        serial
    }

    /// Removes a link whose queue pair is destroyed, and takes its remaining completions from the queue.
    pub(super) fn leave(&self, serial: u32, device: &ClientDevice) {
        self.inboxes.borrow_mut().retain(|inbox| inbox.serial != serial);
        let _ = self.take_completions(device); // a broken queue shows at the next poll of another link
    }

    /// Moves completions to the inboxes of their links. Returns how many there were.
    pub(super) fn take_completions(&self, device: &ClientDevice) -> io::Result<usize> {
        let mut all = 0;
        let mut taken = [ffi::Wc::default(); TAKEN_AT_ONCE];
        loop {
            let count = device.completions.poll(&mut taken)?;
            if count > 0 {
                self.deliver(&taken[..count]);
                all += count;
            }
            if count < taken.len() {
                break;
            }
        }
        if all > 0 && device.armed.get() && device.completions.take_event() {
            device.armed.set(false);
        }
        Ok(all)
    }

    fn deliver(&self, completions: &[ffi::Wc]) {
        let mut counters = self.counters.get();
        let mut inboxes = self.inboxes.borrow_mut();
        for completion in completions {
            if super::link::is_answer(completion.wr_id) {
                counters.answers += 1;
            } else {
                counters.completions += 1;
            }
            let serial = (completion.wr_id >> 32) as u32;
            // The link is gone, so its completion is dropped.
            let Some(inbox) = inboxes.iter_mut().find(|inbox| inbox.serial == serial) else { continue };
            inbox.completions.push(*completion);
        }
        self.counters.set(counters);
    }

    /// Checks for connection events: always if `eager`, else every [`POLLS_PER_EVENT_CHECK`] polls.
    pub(super) fn take_events(&self, eager: bool) -> io::Result<()> {
        let polls = self.polls_since_events.get() + 1;
        if !eager && polls < POLLS_PER_EVENT_CHECK {
            self.polls_since_events.set(polls);
            return Ok(());
        }
        self.polls_since_events.set(0);
        while let Some(event) = self.channel.next()? {
            let mut inboxes = self.inboxes.borrow_mut();
            if let Some(inbox) = inboxes.iter_mut().find(|inbox| inbox.id == event.id) {
                inbox.events.push_back(event);
            }
        }
        Ok(())
    }

    pub(super) fn next_event(&self, serial: u32) -> Option<Event> {
        let mut inboxes = self.inboxes.borrow_mut();
        inboxes.iter_mut().find(|inbox| inbox.serial == serial)?.events.pop_front()
    }

    /// Exchanges a link's completions for an empty vector that keeps its capacity.
    pub(super) fn swap_completions(&self, serial: u32, empty: &mut Vec<ffi::Wc>) {
        let mut inboxes = self.inboxes.borrow_mut();
        if let Some(inbox) = inboxes.iter_mut().find(|inbox| inbox.serial == serial) {
            std::mem::swap(&mut inbox.completions, empty);
        }
    }

    /// The descriptor to sleep on; `None` if something has arrived meanwhile, so that the caller must poll.
    pub(super) fn sleep_on(&self, device: &ClientDevice) -> Option<BorrowedFd<'_>> {
        self.polls_since_events.set(POLLS_PER_EVENT_CHECK); // an event may end the sleep
        if device.armed.get() {
            device.completions.take_event();
        }
        device.completions.arm().ok()?;
        device.armed.set(true);
        // A completion from before the arming raises no event.
        self.take_completions(device).ok()?;
        let waiting = self.inboxes.borrow().iter().any(|inbox| !inbox.completions.is_empty());
        (!waiting).then(|| self.epoll.as_fd())
    }
}

impl ClientDevice {
    fn new(library: &'static Library, device: Device) -> Result<Self, VerbsError> {
        let capabilities = device.capabilities(library)?;
        Ok(ClientDevice {
            device,
            capabilities,
            completions: CompletionQueue::new(library, device, COMPLETIONS.min(capabilities.completions))?,
            domain: Domain::new(library, device)?,
            arenas: RefCell::default(),
            armed: Cell::new(false),
        })
    }

    fn register(&self, arenas: &[LocalSlice]) -> Result<(), VerbsError> {
        let mut registered = self.arenas.borrow_mut();
        for arena in &arenas[registered.len()..] {
            // SAFETY: the arena outlives every link of this transport (the seam's promise). The card accesses
            // it only for operations in flight, and nothing else uses their buffers meanwhile.
            let registration = unsafe {
                Registration::new(&self.domain, arena.start, arena.bytes, ffi::ACCESS_LOCAL_WRITE)?
            };
            registered.push((*arena, registration));
        }
        Ok(())
    }

    /// Describes an operation's buffer for the card.
    ///
    /// # Panics
    /// If the buffer is not within the memory named by `local_memory`: a bug of the caller.
    pub(super) fn piece(&self, local: LocalSlice) -> ffi::Sge {
        let arenas = self.arenas.borrow();
        let start = local.start as usize;
        let home = arenas.iter().find(|(arena, _)| {
            let first = arena.start as usize;
            start >= first && start - first <= arena.bytes && arena.bytes - (start - first) >= local.bytes
        });
        let (_, registration) = home.expect("an operation's buffer lies in the transport's local memory");
        ffi::Sge { addr: start as u64, length: local.bytes as u32, lkey: registration.local_key() }
    }
}

fn watching(error: rustix::io::Errno) -> VerbsError {
    VerbsError::Call { what: "watching for completions", source: error.into() }
}
