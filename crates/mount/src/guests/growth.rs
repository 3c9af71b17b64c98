//! Growth of a file: whether the kernel or direct clients (called *guests* in the code) extend it, and
//! whether the kernel knows its size.
//!
//! The kernel assumes that it alone changes a file's size. It drops attributes that it has asked for if
//! anything else about the file was answered meanwhile, and keeps its own size. So it must be *told* of sizes
//! that others change (`Flusher::tell`) before it uses its own.
//!
//! S1. Direct clients extend a file only while it has a single handle, which is registered. The kernel makes
//!     all other changes of a size.
//! S2. While direct clients may extend a file, and until the kernel was told the result, attributes of the
//!     file have no lifetime. So any call that makes the kernel use its size for that handle (`SEEK_END`, a
//!     read at the end) makes it ask first. That request ends the growth, and is answered after the kernel
//!     was told. A request that is answered with the size itself (`stat`) ends nothing.
//! S3. Any request that makes the kernel use its size without asking ends the growth first, and is answered
//!     after the kernel was told: another `open`, the end of a registration (maps, `O_APPEND`), a write that
//!     failed (the kernel rolls back to its size).
//! S4. Some answers set the kernel's size whatever else was answered meanwhile: those to changes of
//!     attributes and to new links. Such a request first ends the growth for good. So the size in the answer
//!     holds until the kernel itself changes it, and no such answer is in flight when growth begins.

use parking_lot::Mutex;

use farpool_file::FarFile;

/// The growth of one file.
#[derive(Default)]
pub(crate) struct Growth(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    state: State,
    /// Growth by direct clients has ended for good: the kernel has used its size once, and may do so again.
    has_ended: bool,
    /// How often growth has ended.
    ends: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum State {
    /// Only the kernel extends the file, and it knows the size.
    #[default]
    ByKernel,
    /// Direct clients may extend the file, or soon may.
    ByGuests,
    /// Only the kernel extends the file, and it does not know the size yet that direct clients have set.
    Untold,
}

/// For how long growth by direct clients ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    /// Until direct clients may work on the file again.
    Allowed,
    /// For good.
    Ever,
}

/// Identifies an end of growth of which the kernel is being told.
#[derive(Clone, Copy)]
pub(crate) struct EndOfGrowth(u64);

impl Growth {
    /// Direct clients are about to be allowed to extend the file: from now on attributes have no lifetime
    /// (S2).
    pub(crate) fn begin(&self) {
        let mut inner = self.0.lock();
        if !inner.has_ended {
            inner.state = State::ByGuests;
        }
    }

    /// Allows direct clients to extend the file, unless growth has ended since it began.
    pub(crate) fn allow(&self, file: &FarFile) {
        if self.0.lock().state == State::ByGuests {
            file.core().let_guests_grow();
        }
    }

    /// Ends growth by direct clients: from now on only the kernel extends the file.
    pub(crate) fn end(&self, file: &FarFile, until: Until) {
        let mut inner = self.0.lock();
        inner.has_ended |= until == Until::Ever;
        if inner.state == State::ByGuests {
            file.core().end_growth_by_guests();
            inner.state = State::Untold;
            inner.ends += 1;
        }
    }

    /// Whether the kernel knows the size.
    pub(crate) fn is_known(&self) -> bool {
        self.0.lock().state == State::ByKernel
    }

    /// The latest end of growth. Call it before reading the size that the kernel is then told.
    pub(crate) fn last_end(&self) -> EndOfGrowth {
        EndOfGrowth(self.0.lock().ends)
    }

    /// Notes that the kernel was told the size that was read after this end.
    pub(crate) fn told(&self, of: EndOfGrowth) {
        let mut inner = self.0.lock();
        if inner.state == State::Untold && inner.ends == of.0 {
            inner.state = State::ByKernel;
        }
    }
}
