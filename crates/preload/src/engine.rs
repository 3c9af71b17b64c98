//! The decision behind each hook: serve this call here, or let the kernel do it?

use std::any::Any;
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::backend::{Backend, File, Given, Room};
use crate::cached::Cached;
use crate::entry::within;
use crate::hosts::Hosts;
use crate::identity::same;
use crate::mounts::Mounts;
use crate::process::{Process, Right};
use crate::sys;
use crate::table::{DESCRIPTORS_MAX, Found, Pin, Slot, Table, flag};

/// Most bytes of one call, as in the kernel (`MAX_RW_COUNT`). The kernel cuts longer calls short.
const CALL_BYTES_MAX: usize = 0x7fff_f000;
/// Guards are at most one part in this many of the descriptors that the process may have. The rest is the
/// program's.
const GUARDS_PART: u64 = 4;
/// Guards have numbers from this one up, or from half the limit if that is lower: programs expect low numbers
/// to be theirs.
const GUARDS_FROM: u64 = 1024;
/// A longer file is opened with its host at the first positional call, as it is likely to see many.
const SMALL_FILE_BYTES: u64 = 128 << 10;

static MOUNTS: Mounts = Mounts::new();

/// The interposer of one process.
pub struct Engine {
    pub(crate) process: Process,
    pub(crate) table: Table,
    backend: OnceLock<&'static dyn Backend>,
    hosts: Hosts,
    /// The page cache, for files that are on no mount.
    pub(crate) cached: Cached,
    /// Whether the program ever took a record lock: closing any descriptor of a file drops the process's
    /// record locks on it.
    pub(crate) takes_record_locks: AtomicBool,
    /// Descriptors that are to be copied for a spawned program, see [`Engine::will_copy`].
    pub(crate) copied: [AtomicU64; DESCRIPTORS_MAX / u64::BITS as usize],
}

impl Engine {
    /// An engine that knows nothing yet.
    #[allow(clippy::new_without_default)] // a static needs `const`
    pub const fn new() -> Self {
        Engine {
            process: Process::new(),
            table: Table::new(),
            backend: OnceLock::new(),
            hosts: Hosts::new(),
            cached: Cached::off(),
            takes_record_locks: AtomicBool::new(false),
            copied: [const { AtomicU64::new(0) }; DESCRIPTORS_MAX / u64::BITS as usize],
        }
    }

    pub(crate) fn backend(&self) -> &'static dyn Backend {
        self.backend.get().copied().unwrap_or(&MOUNTS)
    }

    /// Replaces the mounts by another backend, once.
    pub fn use_backend(&self, backend: &'static dyn Backend) -> bool {
        self.backend.set(backend).is_ok()
    }

    /// Serves a positional read, if it can be served here.
    pub fn read(&self, fd: RawFd, to: &[Room<'_>], offset: i64) -> Option<usize> {
        if self.has_nothing_to_do_with(fd) {
            return None;
        }
        let (offset, end) = range(offset, to.iter().map(Room::len))?;
        let read = within(|| {
            let pin = self.usable(fd, flag::READABLE)?;
            self.operate(fd, &pin, end, |file, session| file.read_at(session, offset, to))
        });
        read.or_else(|| self.cached.read(self, fd, to, offset..end))
    }

    /// Whether positional reads of a descriptor are known to be the kernel's alone.
    pub fn has_nothing_to_do_with(&self, fd: RawFd) -> bool {
        self.table.is_plain(fd) && !self.cached.is_on()
    }

    /// Serves a positional write, if it can be served here.
    pub fn write(&self, fd: RawFd, from: &[Given<'_>], offset: i64) -> Option<usize> {
        if self.table.is_plain(fd) {
            return None;
        }
        let (offset, end) = range(offset, from.iter().map(Given::len))?;
        within(|| {
            let pin = self.usable(fd, flag::WRITABLE).filter(|pin| end <= pin.write_limit())?;
            self.operate(fd, &pin, end, |file, session| file.write_at(session, offset, from))
        })
    }

    /// Whether the descriptor belongs to a mount. Asks the mount if that is not known yet. For callers that
    /// may read the program's memory only if it does.
    pub fn is_ours(&self, fd: RawFd) -> bool {
        if self.table.is_plain(fd) {
            return false;
        }
        within(|| self.pinned(fd).map(drop)).is_some()
    }

    fn usable(&self, fd: RawFd, needed: u32) -> Option<Pin<'_>> {
        let mut pin = self.pinned(fd)?;
        if !self.is_still(fd, &pin) {
            self.lost(fd, &pin);
            pin = self.pinned(fd).filter(|pin| self.is_still(fd, pin))?;
        }
        (pin.has(needed) && !pin.has(flag::ENDING)).then_some(pin)
    }

    fn operate(
        &self,
        fd: RawFd,
        pin: &Pin<'_>,
        end: u64,
        operation: impl FnOnce(&dyn File, &dyn Any) -> Option<usize>,
    ) -> Option<usize> {
        if pin.opened().is_none() {
            if !self.is_worth_opening(fd, pin.count_call(), end) {
                return None;
            }
            self.open(fd, pin)?;
        }
        pin.opened()?.operate(operation)
    }

    /// Whether a file is opened with its host after `calls` calls, the last of which ends at the byte `end`.
    /// A small file is opened only after as many calls as the opening costs.
    fn is_worth_opening(&self, fd: RawFd, calls: u32, end: u64) -> bool {
        calls >= self.backend().calls_worth_opening()
            || end > SMALL_FILE_BYTES
            || sys::facts(fd).is_none_or(|file| file.bytes > SMALL_FILE_BYTES)
    }

    /// Whether the descriptor still names the description that is remembered (I1).
    pub(crate) fn is_still(&self, fd: RawFd, pin: &Pin<'_>) -> bool {
        pin.guard().is_some_and(|guard| same(fd, guard))
    }

    /// Notes that the number means something else now: it was closed without the library's knowledge.
    pub(crate) fn lost(&self, fd: RawFd, pin: &Pin<'_>) {
        if self.process.is_owner() {
            if self.takes_record_locks.load(Ordering::Relaxed) {
                pin.set(flag::KEPT);
            }
            self.table.take_if(fd, pin);
        }
    }

    /// Whether the state of this process may be used. In the child of a fork, prepares it.
    pub(crate) fn is_ready(&self) -> bool {
        self.process.is_ready(|| {
            self.table.adopt();
            self.hosts.forget();
            self.cached.forget();
        })
    }

    pub(crate) fn pinned(&self, fd: RawFd) -> Option<Pin<'_>> {
        if self.process.is_started() && !self.is_ready() {
            return None;
        }
        match self.table.look(fd) {
            Slot::Known(pin) => Some(pin),
            Slot::Plain => None,
            Slot::Unknown => self.learn(fd),
        }
    }

    /// Handles the first positional call on a descriptor.
    fn learn(&self, fd: RawFd) -> Option<Pin<'_>> {
        let backend = self.backend();
        if !backend.recognises(fd) || !self.process.start() {
            // A number that is not open may belong to a mount later.
            if sys::ends_at_exec(fd).is_some() {
                self.table.set_plain(fd);
            }
            return None;
        }
        if !self.is_ready() || !self.process.is_owner() {
            return None;
        }
        let right = self.process.right()?;
        match self.shared(fd).or_else(|| self.register(backend, fd, &right)) {
            Some(pin) => {
                self.table.put(fd, pin.clone());
                Some(pin)
            }
            None => {
                self.table.set_plain(fd);
                None
            }
        }
    }

    /// The description of `fd`, if it is known by another number.
    pub(crate) fn shared(&self, fd: RawFd) -> Option<Pin<'_>> {
        if self.table.live() == 0 {
            return None;
        }
        let id = sys::file_id(fd)?;
        self.table.pins().find(|pin| pin.id() == id && self.is_still(fd, pin))
    }

    /// Registers a description with its mount. Its file is [opened](Self::open) later: that costs ten times
    /// as much.
    ///
    /// A description with `O_APPEND` is not registered: the kernel finds the end of a file by the size that
    /// it remembers, which goes stale where a file grows by accelerated writes.
    ///
    /// `O_DIRECT` is set first: from then on nothing that the kernel does for this description leaves pages
    /// in its page cache. The guard is made last, because closing it again would drop the program's record
    /// locks.
    fn register(&self, backend: &dyn Backend, fd: RawFd, right: &Right<'_>) -> Option<Pin<'_>> {
        let (id, status) = (sys::file_id(fd)?, sys::status_flags(fd)?);
        let limit = sys::soft_limit(libc::RLIMIT_NOFILE);
        let room = u64::from(self.table.live()) < limit / GUARDS_PART;
        if status & (libc::O_PATH | libc::O_APPEND) != 0 || !room || !same(fd, fd) {
            return None;
        }
        let wants_direct = status & libc::O_DIRECT != 0;
        if !wants_direct && sys::fcntl(fd, libc::F_SETFL, (status | libc::O_DIRECT) as usize) != 0 {
            return None;
        }
        let is_registered = backend.register(fd).is_some();
        let guard = if is_registered { new_guard(fd, limit) } else { None };
        let Some(guard) = guard else {
            // Unregister with the mount first: while it counts the description as registered, other processes
            // may work on the file directly, and the kernel's pages of the file would not be updated.
            if is_registered {
                backend.unregister(fd);
            }
            if !wants_direct {
                sys::fcntl(fd, libc::F_SETFL, status as usize);
            }
            return None;
        };
        let write_limit = sys::soft_limit(libc::RLIMIT_FSIZE);
        Some(self.table.claim(&Found { guard, id, flags: allowed(status), write_limit }, right))
    }

    /// Opens the file of a registered description with its host. The child of a fork, which has connections
    /// of its own, opens it again.
    fn open(&self, fd: RawFd, pin: &Pin<'_>) -> Option<()> {
        let backend = self.backend();
        if !self.process.is_owner() {
            return None;
        }
        let right = self.process.right()?;
        if pin.opened().is_some() {
            return Some(());
        }
        match backend.register(fd).and_then(|answer| self.hosts.open(backend, &answer, &right)) {
            Some(opened) => {
                pin.set_opened(opened, &right);
                Some(())
            }
            None => {
                self.give_up(fd, pin);
                None
            }
        }
    }
}

/// Offset and end of a call that can be served at all. Other calls are refused, cut short, or answered by the
/// kernel.
fn range(offset: i64, mut pieces: impl Iterator<Item = usize>) -> Option<(u64, u64)> {
    let bytes = pieces.try_fold(0_usize, |sum, piece| sum.checked_add(piece))?;
    if bytes == 0 || bytes > CALL_BYTES_MAX {
        return None;
    }
    let end = offset.checked_add(i64::try_from(bytes).ok()?)?;
    Some((u64::try_from(offset).ok()?, u64::try_from(end).ok()?))
}

/// The library's own descriptor for the same description.
fn new_guard(fd: RawFd, limit: u64) -> Option<RawFd> {
    let from = GUARDS_FROM.min(limit / 2) as usize;
    let guard = sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, from);
    (guard >= 0).then_some(guard)
}

fn allowed(status: i32) -> u32 {
    let access = match status & libc::O_ACCMODE {
        libc::O_RDONLY => flag::READABLE,
        libc::O_WRONLY => flag::WRITABLE,
        libc::O_RDWR => flag::READABLE | flag::WRITABLE,
        _ => 0,
    };
    let direct = if status & libc::O_DIRECT == 0 { 0 } else { flag::WANTS_DIRECT };
    access | direct
}
