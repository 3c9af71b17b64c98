//! Mounts that this process has joined, and the sessions that each thread needs to use them.

use std::any::Any;
use std::cell::RefCell;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::backend::{Backend, File, Host, Registration, SOCKET_NAME_MAX};
use crate::process::Right;

/// Most mounts that one process has joined at a time; files of further ones are not accelerated. A machine
/// has few.
const HOSTS_MAX: usize = 8;

/// The number of the next joined mount. Numbers ensure that a session is never used with another host, or in
/// a forked child.
static JOINED: AtomicU64 = AtomicU64::new(1);

/// How often this memory was copied by a fork. Sessions of an earlier generation belong to another process.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// A mount that was joined.
#[derive(Clone)]
pub struct Joined {
    number: u64,
    host: Arc<dyn Host>,
}

/// A file of a mount that was joined.
pub struct Opened {
    joined: Joined,
    file: Box<dyn File>,
}

impl Opened {
    /// Runs one operation with the thread's session; `None` if the thread is ending and has none.
    pub fn operate(&self, operation: impl FnOnce(&dyn File, &dyn Any) -> Option<usize>) -> Option<usize> {
        let with = |sessions: &RefCell<Sessions>| {
            let mut sessions = sessions.try_borrow_mut().ok()?;
            operation(&*self.file, sessions.of(&self.joined)?)
        };
        SESSIONS.try_with(with).ok().flatten()
    }
}

struct Session {
    number: u64,
    generation: u64,
    value: Option<Box<dyn Any>>,
}

impl Drop for Session {
    fn drop(&mut self) {
        // A child does not end its parent's session: that would send messages to the parent's peers.
        if self.generation != GENERATION.load(Ordering::Relaxed) {
            std::mem::forget(self.value.take());
        }
    }
}

/// A thread's sessions: at most one for each mount.
struct Sessions(Vec<Session>);

thread_local! {
    static SESSIONS: RefCell<Sessions> = const { RefCell::new(Sessions(Vec::new())) };
}

impl Sessions {
    fn of(&mut self, joined: &Joined) -> Option<&dyn Any> {
        let at = match self.0.iter().position(|session| session.number == joined.number) {
            Some(at) => at,
            None => self.begin(joined)?,
        };
        self.0[at].value.as_deref()
    }

    fn begin(&mut self, joined: &Joined) -> Option<usize> {
        let generation = GENERATION.load(Ordering::Relaxed);
        self.0.retain(|session| session.generation == generation);
        if self.0.len() >= 2 * HOSTS_MAX {
            self.0.remove(0);
        }
        let value = joined.host.session()?;
        self.0.push(Session { number: joined.number, generation, value: Some(value) });
        Some(self.0.len() - 1)
    }
}

struct Entry {
    socket: [u8; SOCKET_NAME_MAX],
    joined: Joined,
}

/// The mounts that this process has joined.
pub struct Hosts {
    entries: [AtomicPtr<Entry>; HOSTS_MAX],
}

impl Hosts {
    pub const fn new() -> Self {
        Hosts { entries: [const { AtomicPtr::new(null_mut()) }; HOSTS_MAX] }
    }

    /// Opens the file that was registered. Joins its mount if that has not been done yet.
    pub fn open(&self, backend: &dyn Backend, answer: &Registration, right: &Right<'_>) -> Option<Opened> {
        let joined = self.find(&answer.socket, right).or_else(|| self.join(backend, answer, right))?;
        let file = joined.host.open(&answer.ticket)?;
        Some(Opened { joined, file })
    }

    /// Finds a joined mount. Only the holder of the right reads entries, so none is freed meanwhile.
    fn find(&self, socket: &[u8; SOCKET_NAME_MAX], _right: &Right<'_>) -> Option<Joined> {
        self.entries.iter().find_map(|entry| {
            // SAFETY: null or from `Box::into_raw`; freed only under the right, which the caller holds.
            // Acquire pairs with the release in `join`.
            let entry = unsafe { entry.load(Ordering::Acquire).as_ref() }?;
            (entry.socket == *socket && !entry.joined.host.has_ended()).then(|| entry.joined.clone())
        })
    }

    fn join(&self, backend: &dyn Backend, answer: &Registration, right: &Right<'_>) -> Option<Joined> {
        let place = self.entries.iter().find(|entry| self.is_free(entry, right))?;
        let host = backend.join(answer)?;
        let joined = Joined { number: JOINED.fetch_add(1, Ordering::Relaxed), host };
        let entry = Box::new(Entry { socket: answer.socket, joined: joined.clone() });
        // Release publishes the entry; pairs with `find`. Acquire: the replaced entry is freed here.
        let before = place.swap(Box::into_raw(entry), Ordering::AcqRel);
        if !before.is_null() {
            // SAFETY: from `Box::into_raw` in this function; entries are read only under the right, which the
            // caller holds.
            drop(unsafe { Box::from_raw(before) });
        }
        Some(joined)
    }

    fn is_free(&self, entry: &AtomicPtr<Entry>, _right: &Right<'_>) -> bool {
        // SAFETY: null or from `Box::into_raw`; freed only under the right, which the caller holds. Acquire
        // pairs with the release in `join`.
        let entry = unsafe { entry.load(Ordering::Acquire).as_ref() };
        entry.is_none_or(|entry| entry.joined.host.has_ended())
    }

    /// Called in the child of a fork: forgets the parent's mounts without ending their sessions or
    /// connections.
    pub fn forget(&self) {
        GENERATION.fetch_add(1, Ordering::Relaxed);
        for entry in &self.entries {
            let entry = entry.swap(null_mut(), Ordering::Acquire);
            // SAFETY: null or from `Box::into_raw`; the child never frees it.
            if let Some(entry) = unsafe { entry.as_ref() } {
                entry.joined.host.abandon();
            }
        }
    }
}
