//! A regular file as the mount holds it: its far memory, and how writing changes its attributes.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use farpool_file::FarFile;
use fuser::Errno;
use parking_lot::Mutex;

use crate::guests::{Doors, Growth};

/// The body of a file, shared by the namespace and the open handles, so that reads and writes need no look-up
/// in the namespace.
pub(crate) struct Body {
    pub(crate) far: FarFile,
    /// When the contents were last written, in nanoseconds since 1970, if the namespace does not know yet;
    /// else 0. A write only stores this time, and so does not take the namespace's lock.
    written_ns: AtomicU64,
    /// A handler panicked on this file and may have left it half changed, so every use of the file is an
    /// error.
    poisoned: AtomicBool,
    /// Why data that the kernel had accepted could not be stored, as an error number; 0 if all data was
    /// stored.
    failure: AtomicI32,
    /// How many handles have the file open for writing. Only if there is one can the kernel hold data that
    /// the daemon has not seen. (A mapping keeps its descriptor's handle open, and the kernel writes back
    /// before it closes one.)
    writers: AtomicU32,
    /// The open handles of the file, on a mount with direct clients (called *guests* in the code).
    pub(crate) doors: Doors,
    /// Whether the kernel or direct clients extend the file.
    pub(crate) growth: Growth,
    /// Some direct client has asked for its layout since it was first opened.
    pub(crate) wanted_by_guests: AtomicBool,
    /// Whether the kernel may hold pages that are older than writes of direct clients.
    pub(crate) pages: Pages,
    /// The flusher holds this lock while it tells the kernel the size.
    pub(crate) telling: Mutex<()>,
}

/// Whether the kernel may hold pages of a file that direct clients have written since. That happens if a read
/// by the kernel was in flight while the file was opened to them.
#[derive(Default)]
pub(crate) struct Pages {
    /// How often the file was closed to direct clients.
    closed: AtomicU64,
    /// The value of `closed` when the kernel last forgot its pages.
    forgotten: AtomicU64,
}

impl Pages {
    /// Notes that the file was closed to direct clients.
    pub(crate) fn doubt(&self) {
        // Relaxed: the lock of `doors` orders it before the check by the call for which the file was closed.
        self.closed.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether the kernel may hold such pages.
    pub(crate) fn are_doubtful(&self) -> bool {
        // Acquire pairs with the release in `forget`.
        self.forgotten.load(Ordering::Acquire) != self.closed.load(Ordering::Relaxed)
    }

    /// Calls `forget`, which makes the kernel forget all pages, if it may hold such pages.
    pub(crate) fn forget(&self, forget: impl FnOnce()) {
        let closed = self.closed.load(Ordering::Relaxed);
        if self.forgotten.load(Ordering::Relaxed) != closed {
            forget();
            // Release: the kernel has forgotten its pages before this store. Pages that it may hold since a
            // later close are not covered.
            self.forgotten.store(closed, Ordering::Release);
        }
    }
}

impl Body {
    pub(crate) fn new(far: FarFile) -> Self {
        // The time that an earlier process left counts as a write of this one.
        let written_ns = far.core().kept_written_ns();
        Body {
            far,
            written_ns: AtomicU64::new(written_ns),
            poisoned: AtomicBool::new(false),
            failure: AtomicI32::new(0),
            writers: AtomicU32::new(0),
            doors: Doors::default(),
            growth: Growth::default(),
            wanted_by_guests: AtomicBool::new(false),
            pages: Pages::default(),
            telling: Mutex::default(),
        }
    }

    /// Notes that the contents changed at `now`.
    pub(crate) fn mark_written(&self, now: SystemTime) {
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now_ns = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        // Relaxed, as in the next two functions: a time stamp orders nothing.
        self.written_ns.store(now_ns, Ordering::Relaxed);
        self.far.core().keep_written_ns(now_ns);
    }

    /// When the contents were last written, if the namespace does not know yet.
    pub(crate) fn written(&self) -> Option<SystemTime> {
        if let Some(ns) = self.far.core().take_guests_written_ns() {
            self.written_ns.fetch_max(ns, Ordering::Relaxed);
        }
        from_ns(self.written_ns.load(Ordering::Relaxed))
    }

    /// As [`written`](Self::written), and clears it: the caller tells the namespace.
    pub(crate) fn take_written(&self) -> Option<SystemTime> {
        let _of_guests = self.written();
        let written = from_ns(self.written_ns.swap(0, Ordering::Relaxed));
        self.far.core().keep_written_ns(0);
        written
    }

    /// Notes that data which the kernel had accepted could not be stored. Later writers get this error.
    pub(crate) fn fail(&self, errno: Errno) {
        // Relaxed, as are the loads: the number guards no other memory.
        self.failure.store(errno.code(), Ordering::Relaxed);
    }

    /// Clears the failure: the file was emptied.
    pub(crate) fn recover(&self) {
        self.failure.store(0, Ordering::Relaxed);
    }

    /// Why further writes fail.
    pub(crate) fn failure(&self) -> Option<Errno> {
        let code = self.failure.load(Ordering::Relaxed);
        (code != 0).then(|| Errno::from_i32(code))
    }

    /// Notes that the file was opened for writing.
    pub(crate) fn add_writer(&self) {
        // Relaxed, as in the next two functions: the kernel orders an open, the writes through it, and the
        // requests that need their data.
        self.writers.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that a handle open for writing was closed.
    pub(crate) fn remove_writer(&self) {
        self.writers.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn has_writers(&self) -> bool {
        self.writers.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn poison(&self) {
        // Relaxed, as is the load: the flag guards no other memory.
        self.poisoned.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Relaxed)
    }
}

fn from_ns(ns: u64) -> Option<SystemTime> {
    (ns != 0).then(|| SystemTime::UNIX_EPOCH + Duration::from_nanos(ns))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn pages_stay_doubtful_until_the_kernel_has_forgotten_them_and_if_guests_come_meanwhile_for_longer() {
        let pages = Pages::default();
        assert!(!pages.are_doubtful());
        pages.forget(|| panic!("there are none"));
        pages.doubt();
        assert!(pages.are_doubtful());
        let forgotten = Cell::new(0);
        pages.forget(|| {
            assert!(pages.are_doubtful(), "another `open` has to wait for this, too");
            pages.doubt();
            forgotten.set(forgotten.get() + 1);
        });
        assert!(pages.are_doubtful(), "guests wrote while the kernel forgot its pages");
        pages.forget(|| forgotten.set(forgotten.get() + 1));
        assert_eq!((pages.are_doubtful(), forgotten.get()), (false, 2));
    }
}
