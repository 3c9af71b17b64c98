//! Who makes a file longer, and whether the kernel knows how long it is.
//!
//! The kernel believes that it alone changes a file's size. It drops attributes that another answer for the file overtook, and
//! goes on with the size that it has. So a size that others change must be *told* to it (`Flusher::tell`) before it uses its own.
//!
//! S1. Guests make a file longer only while it has a single opening, which is registered. All other sizes are the kernel's doing.
//! S2. While they may, and until the kernel was told what came of it, attributes of the file have no lifetime: whatever makes the
//!     kernel use its size for that opening (`SEEK_END`, a read at the end) asks first. That question ends the growth,
//!     and is answered when the kernel was told. A question that is answered with the size itself (`stat`) ends nothing.
//! S3. What makes the kernel use its size without a question ends the growth before, and is answered when the kernel was told:
//!     another opening, the end of a registration (maps, `O_APPEND`), a write that failed (the kernel rolls back to its size).
//! S4. Some answers set the kernel's size whatever came meanwhile: those to changes of attributes and to new links. Such a request
//!     ends the growth first, for good. So the size that is answered holds until the kernel itself changes it, and no such
//!     answer is under way when growth begins.

use parking_lot::Mutex;

use farpool_file::FarFile;

/// Of one file.
#[derive(Default)]
pub(crate) struct Growth(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    state: State,
    /// The kernel has asked once: files whose size it wants to know grow by the kernel.
    is_over: bool,
    /// How often growth has ended.
    ends: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum State {
    /// By the kernel alone: it knows the size.
    #[default]
    ByKernel,
    /// By guests, or soon.
    ByGuests,
    /// By the kernel alone, which does not know yet how far guests have come.
    Untold,
}

/// Whether guests may make the file longer again, later.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    Allowed,
    Ever,
}

/// An end of growth, of which the kernel is being told.
#[derive(Clone, Copy)]
pub(crate) struct EndOfGrowth(u64);

impl Growth {
    /// Guests are about to make the file longer: from now on attributes have no lifetime (S2).
    pub(crate) fn begin(&self) {
        let mut inner = self.0.lock();
        if !inner.is_over {
            inner.state = State::ByGuests;
        }
    }

    /// Lets them, unless something has ended it since it began.
    pub(crate) fn allow(&self, file: &FarFile) {
        if self.0.lock().state == State::ByGuests {
            file.core().let_guests_grow();
        }
    }

    /// The kernel alone makes the file longer from now on.
    pub(crate) fn end(&self, file: &FarFile, until: Until) {
        let mut inner = self.0.lock();
        inner.is_over |= until == Until::Ever;
        if inner.state == State::ByGuests {
            file.core().end_growth_by_guests();
            inner.state = State::Untold;
            inner.ends += 1;
        }
    }

    /// Whether the kernel may go by what it knows of the size.
    pub(crate) fn is_known(&self) -> bool {
        self.0.lock().state == State::ByKernel
    }

    /// To be asked before the size is looked at which the kernel is then told.
    pub(crate) fn last_end(&self) -> EndOfGrowth {
        EndOfGrowth(self.0.lock().ends)
    }

    /// The kernel was told.
    pub(crate) fn told(&self, of: EndOfGrowth) {
        let mut inner = self.0.lock();
        if inner.state == State::Untold && inner.ends == of.0 {
            inner.state = State::ByKernel;
        }
    }
}
