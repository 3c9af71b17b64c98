//! Memory of the program in which a direct client (called *guest* in the code) runs. Other threads of the
//! program may change it at any moment, and the pieces of one call may overlap.
//!
//! P1. There is never a reference to this memory. Bytes are copied by address into memory of our own, and
//!     used there.

use std::marker::PhantomData;
use std::ptr;

const CACHE_LINE_BYTES: usize = 64;
/// How much of a room is prefetched at a time: enough for the processor to go on by itself.
const PREFETCHED_BYTES: usize = 8 * CACHE_LINE_BYTES;

/// Bytes of the program to be written to a file.
#[repr(C)] // as `iovec`
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    start: *const u8,
    bytes: usize,
    alive: PhantomData<&'a [u8]>,
}

/// Room in the program's memory for bytes that are read.
#[repr(C)] // as `iovec`
#[derive(Clone, Copy, Debug)]
pub struct Room<'a> {
    start: *mut u8,
    bytes: usize,
    alive: PhantomData<&'a mut [u8]>,
}

impl<'a> From<&'a [u8]> for Given<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Given { start: bytes.as_ptr(), bytes: bytes.len(), alive: PhantomData }
    }
}

impl<'a> From<&'a mut [u8]> for Room<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Room { start: bytes.as_mut_ptr(), bytes: bytes.len(), alive: PhantomData }
    }
}

impl Given<'_> {
    /// Bytes at an address.
    ///
    /// # Safety
    /// `bytes` bytes from `start` on can be read for as long as the value lives. Other threads may change
    /// them meanwhile.
    pub const unsafe fn new(start: *const u8, bytes: usize) -> Self {
        Given { start, bytes, alive: PhantomData }
    }

    /// How many bytes.
    #[allow(clippy::len_without_is_empty)] // no caller needs it
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// The bytes from `at` on.
    pub(super) fn behind(self, at: usize) -> Self {
        assert!(at <= self.bytes, "bytes from {at} on, of {}", self.bytes);
        Given { start: self.start.wrapping_add(at), bytes: self.bytes - at, ..self }
    }

    /// Copies the first bytes, as many as `to` has room for; there must be as many.
    pub fn copy_to(self, to: &mut [u8]) {
        assert!(to.len() <= self.bytes, "{} bytes, of {}", to.len(), self.bytes);
        // SAFETY: copies `to.len()` bytes.
        // - In bounds: `to.len() <= self.bytes`, asserted above; the caller of `new` promised that
        //   `self.bytes` can be read.
        // - Exclusive: `to` is a unique reference to memory of our own, of which the program has no address,
        //   so the two do not overlap. If another thread changes the program's bytes meanwhile, some copied
        //   bytes are old and some new, as in the kernel's `pwrite`.
        // - Alive: `'a` keeps the program's bytes readable for as long as `self` exists, and `to` is
        //   borrowed.
        unsafe { ptr::copy_nonoverlapping(self.start, to.as_mut_ptr(), to.len()) };
    }

    /// Appends a copy of all bytes.
    pub(super) fn append_to(self, to: &mut Vec<u8>) {
        let before = to.len();
        to.resize(before + self.bytes, 0);
        self.copy_to(&mut to[before..]);
    }
}

impl Room<'_> {
    /// Room at an address.
    ///
    /// # Safety
    /// `bytes` bytes from `start` on can be written to for as long as the value lives. Other threads may read
    /// and write them meanwhile.
    pub const unsafe fn new(start: *mut u8, bytes: usize) -> Self {
        Room { start, bytes, alive: PhantomData }
    }

    /// How many bytes fit.
    #[allow(clippy::len_without_is_empty)] // no caller needs it
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// The room from `at` on.
    fn behind(&self, at: usize) -> Self {
        assert!(at <= self.bytes, "room from {at} on, of {}", self.bytes);
        Room { start: self.start.wrapping_add(at), bytes: self.bytes - at, ..*self }
    }

    /// Has the processor fetch the first cache lines of the room, for writing.
    pub fn prefetch(&self) {
        for at in (0..self.bytes.min(PREFETCHED_BYTES)).step_by(CACHE_LINE_BYTES) {
            prefetch_line(self.start.wrapping_add(at));
        }
    }

    /// Copies `from` to the beginning of the room; it must fit. What follows is filled soon, so it is
    /// [prefetched](Self::prefetch).
    pub(super) fn fill(&self, from: &[u8]) {
        assert!(from.len() <= self.bytes, "{} bytes into room for {}", from.len(), self.bytes);
        // SAFETY: copies `from.len()` bytes.
        // - In bounds: `from.len() <= self.bytes`, asserted above; the caller of `new` promised that
        //   `self.bytes` can be written to.
        // - Exclusive: `from` is memory of our own, of which the program has no address, so the two do not
        //   overlap. If another thread writes to the room meanwhile, its bytes and ours mix, as in the
        //   kernel's `pread`.
        // - Alive: `'a` keeps the room writable for as long as `self` exists, and `from` is borrowed.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.start, from.len()) };
        self.behind(from.len()).prefetch();
    }
}

/// Has the processor fetch a cache line for writing, where there is an instruction for it here.
fn prefetch_line(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        // SAFETY: a prefetch accesses no memory as far as the language is concerned, and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Fills rooms in order; returns how many bytes `from` has. Where rooms overlap, the later one wins.
pub(super) fn fill_all(rooms: &[Room<'_>], from: &[u8]) -> usize {
    fill_from(rooms, 0, from);
    from.len()
}

/// Fills rooms in order, from the byte `at` of all their room on.
pub fn fill_from(rooms: &[Room<'_>], mut at: usize, mut from: &[u8]) {
    for room in rooms {
        if at >= room.len() {
            at -= room.len();
            continue;
        }
        let (own, behind) = from.split_at((room.len() - at).min(from.len()));
        room.behind(at).fill(own);
        (from, at) = (behind, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};
    use std::os::fd::AsRawFd;

    use proptest::prelude::*;

    use super::*;

    const BYTES: usize = 64;

    /// Pieces of a buffer as a list of `iovec`. They may overlap.
    fn pieces(buffer: &mut [u8], places: &[(usize, usize)]) -> Vec<libc::iovec> {
        let start = buffer.as_mut_ptr();
        let piece = |&(at, bytes): &(usize, usize)| {
            let (at, bytes) = (at % BYTES, bytes % BYTES);
            libc::iovec { iov_base: start.wrapping_add(at).cast(), iov_len: bytes.min(BYTES - at) }
        };
        places.iter().map(piece).collect()
    }

    proptest! {
        #[test]
        fn overlapping_pieces_are_read_into_and_gathered_as_the_kernel_does(
            places in prop::collection::vec(any::<(usize, usize)>(), 1..8),
            contents in prop::collection::vec(any::<u8>(), 0..3 * BYTES),
        ) {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&contents).unwrap();
            let (mut by_kernel, mut by_us) = ([0_u8; BYTES], [0_u8; BYTES]);
            let list = pieces(&mut by_kernel, &places);
            // SAFETY: `list` has `list.len()` entries, each within `by_kernel`, which this thread alone uses
            // and which outlives the call.
            let read = unsafe { libc::preadv(file.as_raw_fd(), list.as_ptr(), list.len() as i32, 0) };
            let ours = pieces(&mut by_us, &places);
            // SAFETY: each piece lies within `by_us`, which outlives `rooms`; this thread alone uses it, and
            // not by reference until `rooms` are filled.
            let room = |piece: &libc::iovec| unsafe { Room::new(piece.iov_base.cast(), piece.iov_len) };
            let rooms: Vec<Room<'_>> = ours.iter().map(room).collect();
            let wanted: usize = rooms.iter().map(Room::len).sum();
            let filled = fill_all(&rooms, &contents[..wanted.min(contents.len())]);
            prop_assert_eq!((by_us, filled as isize), (by_kernel, read));

            file.set_len(0).unwrap();
            file.rewind().unwrap();
            // SAFETY: `list` has `list.len()` entries, each within `by_kernel`, which this thread alone uses
            // and which outlives the call.
            let written = unsafe { libc::pwritev(file.as_raw_fd(), list.as_ptr(), list.len() as i32, 0) };
            let mut gathered = Vec::new();
            for piece in &ours {
                // SAFETY: each piece lies within `by_us`, which outlives the value; no thread writes to it.
                unsafe { Given::new(piece.iov_base.cast(), piece.iov_len) }.append_to(&mut gathered);
            }
            let mut kept = vec![0; gathered.len()];
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut kept, 0).unwrap();
            prop_assert_eq!((kept, written), (gathered.clone(), gathered.len() as isize));
        }
    }
}
