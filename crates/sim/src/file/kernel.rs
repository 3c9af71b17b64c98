//! The sizes that the kernel knows of files that direct clients (called *guests* in the code) may make
//! longer. A process that is not a direct client reads no further than this size.
//!
//! The rule is that of the mount (`mount::guests`). While direct clients may make a file longer, and until
//! the kernel has been told the result, the kernel asks before it uses its size. After that the kernel
//! changes the size itself and no longer asks.

use std::collections::BTreeMap;

use farpool_file::FileCore;

use super::Run;
use super::broken::{Chosen, growth_is_told};

/// The sizes of all files, by number.
pub(super) type Sizes = BTreeMap<u64, Size>;

#[derive(Clone, Copy, Default)]
pub(super) struct Size {
    /// In bytes.
    known: u64,
    /// Direct clients may make the file longer, or have done so since the kernel was told.
    is_void: bool,
}

/// An operation through the kernel that may change a file's size. However it ends, the kernel then updates
/// the size that it knows.
pub(super) struct Change<'a> {
    run: &'a Run,
    number: u64,
    file: &'a FileCore<Chosen>,
    /// The file is at least this long if the operation succeeds.
    end: u64,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let mut sizes = self.run.sizes.borrow_mut();
        let size = sizes.entry(self.number).or_default();
        let now = self.file.size();
        size.known = if size.is_void { size.known.max(self.end.min(now)) } else { now };
    }
}

impl Run {
    /// Lets direct clients make the file longer from now on.
    pub(super) fn let_guests_grow(&self, number: u64, file: &FileCore<Chosen>) {
        self.sizes.borrow_mut().entry(number).or_default().is_void = true;
        file.let_guests_grow();
    }

    /// The kernel's size of a file, for a process that wants bytes up to `end`. If direct clients may have
    /// made the file longer and the known size is less than `end`, the kernel asks first. Without direct
    /// clients the size does not matter.
    pub(super) fn size_by_kernel(&self, number: u64, file: &FileCore<Chosen>, end: u64) -> u64 {
        if !self.has_guests {
            return u64::MAX;
        }
        let mut sizes = self.sizes.borrow_mut();
        let size = sizes.entry(number).or_default();
        if size.is_void && end > size.known {
            file.end_growth_by_guests();
            size.is_void = false;
            if growth_is_told() {
                size.known = file.size();
            }
            self.world.note("the kernel is told that file {} has {} bytes", &[number, size.known]);
        }
        size.known
    }

    /// Begins a change that may make the file longer.
    pub(super) fn writes_by_kernel<'a>(
        &'a self,
        number: u64,
        file: &'a FileCore<Chosen>,
        end: u64,
    ) -> Change<'a> {
        Change { run: self, number, file, end }
    }

    /// Begins a change that sets the file's size.
    pub(super) fn cuts_by_kernel<'a>(&'a self, number: u64, file: &'a FileCore<Chosen>) -> Change<'a> {
        self.size_by_kernel(number, file, u64::MAX);
        Change { run: self, number, file, end: 0 }
    }
}
