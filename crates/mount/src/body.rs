//! A regular file as the mount holds it: its far memory, and what writing does to its attributes.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use farpool_file::FarFile;
use fuser::Errno;
use parking_lot::Mutex;

use crate::guests::{Doors, Growth};

/// Shared by the namespace and the open handles of one file, so that reads and writes need no look-up there.
pub(crate) struct Body {
    pub(crate) far: FarFile,
    /// When the contents were last written, in nanoseconds since 1970, if the namespace does not know yet; else 0.
    /// A write only leaves this mark: the namespace's lock is not for every write.
    written_ns: AtomicU64,
    /// A handler panicked on this file: what it left half done is unknown, so every use of the file is an error.
    poisoned: AtomicBool,
    /// Why data that the kernel had accepted could not be stored, as an error number; 0 while all could.
    failure: AtomicI32,
    /// How often the file is open for writing: only then can the kernel hold data that we have not seen. (A mapping
    /// keeps its descriptor's opening alive, and the kernel writes back before it gives one up.)
    writers: AtomicU32,
    /// Who has it open, where processes work on files directly.
    pub(crate) doors: Doors,
    /// Whether the kernel or guests make it longer.
    pub(crate) growth: Growth,
    /// What the kernel may have of it from before guests worked on it.
    pub(crate) pages: Pages,
    /// Locked while the kernel is told the size.
    pub(crate) telling: Mutex<()>,
}

/// Whether the kernel may have pages of a file that guests have written since: a read by the kernel may have been under way
/// while the file was opened to them.
#[derive(Default)]
pub(crate) struct Pages {
    /// How often the file was closed to guests.
    closed: AtomicU64,
    /// After how many of these times the kernel has forgotten its pages.
    forgotten: AtomicU64,
}

impl Pages {
    /// The file was closed to guests.
    pub(crate) fn doubt(&self) {
        // Relaxed: the lock of the doors orders it before the look of the call for which the file was closed.
        self.closed.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether the kernel may have such pages.
    pub(crate) fn are_doubtful(&self) -> bool {
        // Acquire pairs with the release in `forget`.
        self.forgotten.load(Ordering::Acquire) != self.closed.load(Ordering::Relaxed)
    }

    /// Calls `forget`, which has the kernel forget all pages, if there may be such ones.
    pub(crate) fn forget(&self, forget: impl FnOnce()) {
        let closed = self.closed.load(Ordering::Relaxed);
        if self.forgotten.load(Ordering::Relaxed) != closed {
            forget();
            // Release: the kernel has forgotten them by then. After later times it has not.
            self.forgotten.store(closed, Ordering::Release);
        }
    }
}

impl Body {
    pub(crate) fn new(far: FarFile) -> Self {
        // What an earlier process has left, as if it had been written just now.
        let written_ns = far.core().kept_written_ns();
        Body {
            far,
            written_ns: AtomicU64::new(written_ns),
            poisoned: AtomicBool::new(false),
            failure: AtomicI32::new(0),
            writers: AtomicU32::new(0),
            doors: Doors::default(),
            growth: Growth::default(),
            pages: Pages::default(),
            telling: Mutex::default(),
        }
    }

    /// The contents have changed.
    pub(crate) fn mark_written(&self, now: SystemTime) {
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now_ns = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        // Relaxed, as in the next two: a time stamp orders nothing.
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

    /// As [`written`](Self::written); from now on it is for the namespace to know.
    pub(crate) fn take_written(&self) -> Option<SystemTime> {
        let _of_guests = self.written();
        let written = from_ns(self.written_ns.swap(0, Ordering::Relaxed));
        self.far.core().keep_written_ns(0);
        written
    }

    /// Data that the kernel had accepted could not be stored: whoever writes on is told so.
    pub(crate) fn fail(&self, errno: Errno) {
        // Relaxed, as the loads: the number guards no other memory.
        self.failure.store(errno.code(), Ordering::Relaxed);
    }

    /// The file was emptied: a new beginning.
    pub(crate) fn recover(&self) {
        self.failure.store(0, Ordering::Relaxed);
    }

    /// Why writing on is of no use.
    pub(crate) fn failure(&self) -> Option<Errno> {
        let code = self.failure.load(Ordering::Relaxed);
        (code != 0).then(|| Errno::from_i32(code))
    }

    /// The file is opened for writing.
    pub(crate) fn add_writer(&self) {
        // Relaxed, as the next two: the kernel orders an opening, the writes under it, and what asks for their data.
        self.writers.fetch_add(1, Ordering::Relaxed);
    }

    /// An opening for writing is over.
    pub(crate) fn remove_writer(&self) {
        self.writers.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn has_writers(&self) -> bool {
        self.writers.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn poison(&self) {
        // Relaxed, as the load: the flag guards no other memory.
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
            assert!(pages.are_doubtful(), "another opening has to wait for this, too");
            pages.doubt();
            forgotten.set(forgotten.get() + 1);
        });
        assert!(pages.are_doubtful(), "guests were at work while the kernel forgot");
        pages.forget(|| forgotten.set(forgotten.get() + 1));
        assert_eq!((pages.are_doubtful(), forgotten.get()), (false, 2));
    }
}
