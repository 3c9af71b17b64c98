//! Memory of the program that a guest works for. Others of its threads may change it at any moment, and pieces of one call may
//! overlap.
//!
//! P1. No reference to it is made. It is copied by address, into memory of our own before anything is made of it.

use std::marker::PhantomData;
use std::ptr;

/// Bytes of the program that are to be written.
#[repr(C)] // as `iovec`
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    start: *const u8,
    bytes: usize,
    alive: PhantomData<&'a [u8]>,
}

/// Room of the program for what is read.
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
    /// They can be read for as long as the value lives. Anybody may change them.
    pub const unsafe fn new(start: *const u8, bytes: usize) -> Self {
        Given { start, bytes, alive: PhantomData }
    }

    /// How many.
    #[allow(clippy::len_without_is_empty)] // nobody asks
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// The bytes from one on.
    pub(super) fn behind(self, at: usize) -> Self {
        assert!(at <= self.bytes, "bytes from {at} on, of {}", self.bytes);
        Given { start: self.start.wrapping_add(at), bytes: self.bytes - at, ..self }
    }

    /// Copies the first ones, as many as there is room for.
    pub(super) fn copy_to(self, to: &mut [u8]) {
        assert!(to.len() <= self.bytes, "{} bytes, of {}", to.len(), self.bytes);
        // SAFETY:
        // - In bounds: compared above; that so many can be read was promised to `new`.
        // - Exclusive: `to` is ours alone, so it is not among what is read. Should the program change that meanwhile, some of
        //   the bytes are new and some old, as with the kernel.
        // - Alive: both are borrowed.
        unsafe { ptr::copy_nonoverlapping(self.start, to.as_mut_ptr(), to.len()) };
    }

    /// Copies all behind what is there.
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
    /// It can be written to for as long as the value lives. Anybody may do so meanwhile.
    pub const unsafe fn new(start: *mut u8, bytes: usize) -> Self {
        Room { start, bytes, alive: PhantomData }
    }

    /// For how many bytes.
    #[allow(clippy::len_without_is_empty)] // nobody asks
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// Fills it from its start.
    pub(super) fn fill(&self, from: &[u8]) {
        assert!(from.len() <= self.bytes, "{} bytes into room for {}", from.len(), self.bytes);
        // SAFETY:
        // - In bounds: compared above; that there is so much room was promised to `new`.
        // - Exclusive: `from` is memory of ours that the program does not know of, so no byte of it is written to. Who else
        //   writes to the room meanwhile writes between these bytes, as with the kernel.
        // - Alive: both are borrowed.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.start, from.len()) };
    }
}

/// Fills several, in order; says how many bytes there were. Where they overlap, the later one wins.
pub(super) fn fill_all(rooms: &[Room<'_>], mut from: &[u8]) -> usize {
    let bytes = from.len();
    for room in rooms {
        let (own, behind) = from.split_at(room.len().min(from.len()));
        room.fill(own);
        from = behind;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};
    use std::os::fd::AsRawFd;

    use proptest::prelude::*;

    use super::*;

    const BYTES: usize = 64;

    /// Pieces of a buffer, which may overlap, as the kernel wants them.
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
            // SAFETY: the pieces lie in a buffer that is alive.
            let read = unsafe { libc::preadv(file.as_raw_fd(), list.as_ptr(), list.len() as i32, 0) };
            let ours = pieces(&mut by_us, &places);
            // SAFETY: as above.
            let room = |piece: &libc::iovec| unsafe { Room::new(piece.iov_base.cast(), piece.iov_len) };
            let rooms: Vec<Room<'_>> = ours.iter().map(room).collect();
            let wanted: usize = rooms.iter().map(Room::len).sum();
            let filled = fill_all(&rooms, &contents[..wanted.min(contents.len())]);
            prop_assert_eq!((by_us, filled as isize), (by_kernel, read));

            file.set_len(0).unwrap();
            file.rewind().unwrap();
            // SAFETY: as above.
            let written = unsafe { libc::pwritev(file.as_raw_fd(), list.as_ptr(), list.len() as i32, 0) };
            let mut gathered = Vec::new();
            for piece in &ours {
                // SAFETY: as above.
                unsafe { Given::new(piece.iov_base.cast(), piece.iov_len) }.append_to(&mut gathered);
            }
            let mut kept = vec![0; gathered.len()];
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut kept, 0).unwrap();
            prop_assert_eq!((kept, written), (gathered.clone(), gathered.len() as isize));
        }
    }
}
