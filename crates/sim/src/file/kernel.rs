//! The kernel's idea of how long files are, where guests make them longer: whoever is no guest reads no further than that.
//!
//! As the mount does it (`mount::guests`): while guests may make a file longer, and until the kernel was told what came of
//! it, it asks before it goes by what it knows. From then on it changes the size itself, and asks nobody.

use std::collections::BTreeMap;

use farpool_file::FileCore;

use super::Run;
use super::broken::{Chosen, growth_is_told};

/// Of all files, by number.
pub(super) type Sizes = BTreeMap<u64, Size>;

#[derive(Clone, Copy, Default)]
pub(super) struct Size {
    /// In bytes.
    known: u64,
    /// Guests may make the file longer, or have done so since the kernel was told.
    is_void: bool,
}

/// Something that goes by the kernel and may change a file's size; when it ends, however it does, the kernel knows.
pub(super) struct Change<'a> {
    run: &'a Run,
    number: u64,
    file: &'a FileCore<Chosen>,
    /// Where the file ends at least if it was done.
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
    /// Guests may make the file longer from now on.
    pub(super) fn let_guests_grow(&self, number: u64, file: &FileCore<Chosen>) {
        self.sizes.borrow_mut().entry(number).or_default().is_void = true;
        file.let_guests_grow();
    }

    /// How long the kernel takes the file for that somebody wants bytes of, up to `end`. It asks if it does not know of so many. Where
    /// there are no guests it does not matter.
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

    /// Something begins that may make the file longer.
    pub(super) fn writes_by_kernel<'a>(
        &'a self,
        number: u64,
        file: &'a FileCore<Chosen>,
        end: u64,
    ) -> Change<'a> {
        Change { run: self, number, file, end }
    }

    /// Something begins that sets the file's size.
    pub(super) fn cuts_by_kernel<'a>(&'a self, number: u64, file: &'a FileCore<Chosen>) -> Change<'a> {
        self.size_by_kernel(number, file, u64::MAX);
        Change { run: self, number, file, end: 0 }
    }
}
