//! One file as its owner and the direct clients (called *guests* in the code) see it: how far it reaches,
//! where its extents lie, whether direct clients may work on it.
//!
//! L1. Only the owner changes where extents lie. When an entry changes, its old extent is not reused before
//!     every operation that may have seen the entry has finished.
//! L2. The size is stored only here. The owner changes it. Direct clients raise it while a bit of the same
//!     word allows that, so they all stop as soon as the owner clears the bit.
//! L3. A direct client touches nothing of the file unless it finds the file open to direct clients within its
//!     operation.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use farpool_fabric::{Mapping, SharedMemory};
use farpool_pool::EXTENT_BYTES;

use super::table::map;
use crate::file_core::MAX_FILE_BYTES;

const WORD_BYTES: u64 = 8;
const MAX_STRIPES: u64 = MAX_FILE_BYTES / EXTENT_BYTES;
/// The first page has the words below; the entries follow.
const ENTRIES: u64 = 4096;
const LAYOUT_BYTES: u64 = ENTRIES + MAX_STRIPES * WORD_BYTES;

/// [`OPEN`], and [`PAUSE`] for each operation that keeps direct clients out for now.
const STATE: u64 = 0;
const SIZE: u64 = 128;
const LOSSES: u64 = 192;
const WRITTEN_NS: u64 = 256;
/// Zero unless direct clients may write.
const WRITABLE: u64 = 320;

/// The bit of the size's word that lets direct clients make the file longer. No size has it.
const MAY_GROW: u64 = 1 << 63;

const OPEN: u64 = 1;
const PAUSE: u64 = 2;

/// The layout of a file, in memory shared with direct clients. Sparse: a page and 8 bytes for each extent are
/// in use.
pub(crate) struct Layout {
    mapping: Arc<Mapping>,
}

impl Layout {
    /// The owner's view: an empty file, closed to direct clients.
    pub(crate) fn create() -> io::Result<(Layout, SharedMemory)> {
        let memory = SharedMemory::create("farpool-file", LAYOUT_BYTES)?;
        Ok((Layout { mapping: memory.mapping().clone() }, memory))
    }

    /// A direct client's view.
    pub(crate) fn open(fd: &OwnedFd) -> io::Result<Layout> {
        Ok(Layout { mapping: Arc::new(map(fd, LAYOUT_BYTES)?) })
    }

    fn load(&self, at: u64) -> u64 {
        self.mapping.load(at).expect("a place of the layout lies within it")
    }

    fn store(&self, at: u64, value: u64) {
        self.mapping.store(at, value).expect("a place of the layout lies within it");
    }

    fn add(&self, at: u64, addend: u64) {
        self.mapping.fetch_and_add(at, addend).expect("a place of the layout lies within it");
    }

    /// Whether direct clients may work on the file now.
    pub(crate) fn is_open(&self) -> bool {
        self.load(STATE) == OPEN
    }

    /// Opens the file to direct clients, or closes it. The caller makes sure that each call changes the
    /// state.
    pub(crate) fn set_open(&self, open: bool) {
        self.add(STATE, if open { OPEN } else { OPEN.wrapping_neg() });
    }

    /// Keeps direct clients out until [`resume`](Self::resume). Any number of operations may do so at the
    /// same time.
    pub(crate) fn pause(&self) {
        self.add(STATE, PAUSE);
    }

    pub(crate) fn resume(&self) {
        self.add(STATE, PAUSE.wrapping_neg());
    }

    pub(crate) fn size(&self) -> u64 {
        self.load(SIZE) & !MAY_GROW
    }

    pub(crate) fn set_size(&self, size: u64) {
        self.change_size(|word| Some(word & MAY_GROW | size));
    }

    /// Lets the file reach at least to `size`.
    pub(crate) fn grow(&self, size: u64) {
        self.change_size(|word| Some(word & MAY_GROW | size.max(word & !MAY_GROW)));
    }

    /// As [`grow`](Self::grow), for a direct client. `false`: the file is shorter, and only the owner may
    /// change that.
    pub(crate) fn grow_as_guest(&self, size: u64) -> bool {
        self.change_size(|word| {
            if word & !MAY_GROW >= size {
                Some(word)
            } else {
                (word & MAY_GROW != 0).then_some(MAY_GROW | size)
            }
        })
    }

    /// Whether direct clients may make the file longer.
    pub(crate) fn may_grow(&self) -> bool {
        self.load(SIZE) & MAY_GROW != 0
    }

    /// Allows direct clients to make the file longer, or forbids it: then the size stays until the owner
    /// changes it.
    pub(crate) fn let_grow(&self, may_grow: bool) {
        self.change_size(|word| Some(word & !MAY_GROW | if may_grow { MAY_GROW } else { 0 }));
    }

    /// Changes the size's word by compare-and-swap to what `change` returns. `false`: `change` returned
    /// `None`.
    fn change_size(&self, change: impl Fn(u64) -> Option<u64>) -> bool {
        let mut known = self.load(SIZE);
        loop {
            let Some(new) = change(known) else { return false };
            if new == known {
                return true;
            }
            let found = self.mapping.compare_and_swap(SIZE, known, new);
            let found = found.expect("a place of the layout lies within it");
            if found == known {
                return true;
            }
            known = found;
        }
    }

    /// Whether some block of the file is known to be lost. Then direct clients do not work on the file.
    pub(crate) fn has_losses(&self) -> bool {
        self.load(LOSSES) != 0
    }

    pub(crate) fn set_losses(&self, losses: bool) {
        self.store(LOSSES, losses.into());
    }

    /// Whether direct clients may write. If not, the file has parities, which only the owner maintains.
    pub(crate) fn is_writable(&self) -> bool {
        self.load(WRITABLE) != 0
    }

    pub(crate) fn set_writable(&self, writable: bool) {
        self.store(WRITABLE, writable.into());
    }

    /// Notes that a direct client has written.
    pub(crate) fn mark_written(&self, now_ns: u64) {
        self.store(WRITTEN_NS, now_ns);
    }

    /// When a direct client last wrote, by the wall clock; 0: not since the last call.
    pub(crate) fn take_written(&self) -> u64 {
        let written = self.load(WRITTEN_NS);
        if written != 0 {
            // If a direct client wrote just now, the next call finds it.
            let _ = self.mapping.compare_and_swap(WRITTEN_NS, written, 0);
        }
        written
    }

    /// The number of the extent in which a stripe lies.
    pub(crate) fn extent(&self, stripe: u64) -> Option<u64> {
        if stripe >= MAX_STRIPES {
            return None;
        }
        self.load(ENTRIES + stripe * WORD_BYTES).checked_sub(1)
    }

    /// Stores in which extent a stripe lies. Members of rows after the last stripe hold parities; direct
    /// clients do not need them.
    pub(crate) fn set_extent(&self, stripe: u64, number: Option<u64>) {
        if stripe >= MAX_STRIPES {
            return;
        }
        self.store(ENTRIES + stripe * WORD_BYTES, number.map_or(0, |number| number + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_open_only_while_no_operation_keeps_guests_out() {
        let (layout, _memory) = Layout::create().unwrap();
        assert!(!layout.is_open());
        layout.set_open(true);
        assert!(layout.is_open());
        layout.pause();
        layout.pause();
        layout.resume();
        assert!(!layout.is_open());
        layout.set_open(false);
        layout.resume();
        assert!(!layout.is_open());
        layout.set_open(true);
        assert!(layout.is_open());
    }

    #[test]
    fn growing_never_makes_a_file_shorter() {
        let (layout, _memory) = Layout::create().unwrap();
        layout.grow(10);
        layout.grow(5);
        assert_eq!(layout.size(), 10);
        layout.set_size(3);
        assert_eq!(layout.size(), 3);
    }

    #[test]
    fn guests_make_a_file_longer_only_while_they_may() {
        let (layout, _memory) = Layout::create().unwrap();
        layout.grow(10);
        assert!(
            layout.grow_as_guest(10) && !layout.grow_as_guest(11),
            "the file reaches 10 already, and may not grow to 11"
        );
        layout.let_grow(true);
        assert!(layout.may_grow() && layout.grow_as_guest(20));
        layout.grow(30);
        layout.set_size(25);
        assert!(layout.grow_as_guest(27), "changes by the owner do not end growth by guests");
        layout.let_grow(false);
        assert_eq!((layout.may_grow(), layout.grow_as_guest(28), layout.size()), (false, false, 27));
    }

    #[test]
    fn stripes_have_extents_once_they_are_set() {
        let (layout, _memory) = Layout::create().unwrap();
        assert_eq!(layout.extent(MAX_STRIPES - 1), None);
        layout.set_extent(MAX_STRIPES - 1, Some(0));
        assert_eq!((layout.extent(MAX_STRIPES - 1), layout.extent(MAX_STRIPES)), (Some(0), None));
        layout.set_extent(MAX_STRIPES - 1, None);
        assert_eq!(layout.extent(MAX_STRIPES - 1), None);
    }

    #[test]
    fn the_time_of_a_write_is_told_once() {
        let (layout, _memory) = Layout::create().unwrap();
        assert_eq!(layout.take_written(), 0);
        layout.mark_written(77);
        assert_eq!((layout.take_written(), layout.take_written()), (77, 0));
    }

    #[test]
    fn a_change_of_the_size_s_word_that_another_one_overtakes_keeps_both() {
        let (layout, _memory) = Layout::create().unwrap();
        let is_overtaken = std::cell::Cell::new(false);
        let is_changed = layout.change_size(|word| {
            if !is_overtaken.replace(true) {
                layout.grow(10);
            }
            Some(word | MAY_GROW)
        });
        assert!(is_changed);
        assert_eq!((layout.size(), layout.may_grow()), (10, true));
    }
}
