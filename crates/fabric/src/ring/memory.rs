//! The memory of a ring, as one process maps it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use super::{RING_BYTES, Words};
use crate::memory::{Mapping, Protection, create_sealed, is_sealed_against_shrinking};

/// A mapping as long as a ring.
pub(crate) struct RingMemory(Mapping);

impl RingMemory {
    /// New memory, zeroed, and the descriptor to hand to the other side.
    pub(crate) fn create() -> io::Result<(Self, OwnedFd)> {
        let fd = create_sealed("farpool-ring", RING_BYTES as u64)?;
        Ok((RingMemory(Mapping::new(fd.as_fd(), RING_BYTES as u64, Protection::ReadWrite)?), fd))
    }

    /// Maps what the node has sent.
    pub(crate) fn map(fd: BorrowedFd<'_>) -> io::Result<Self> {
        if !is_sealed_against_shrinking(fd) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the ring's size is not sealed"));
        }
        Ok(RingMemory(Mapping::new(fd, RING_BYTES as u64, Protection::ReadWrite)?))
    }
}

/// Why no place of a ring is out of bounds.
const WITHIN: &str = "the ring's places lie within RING_BYTES, which are mapped";

impl Words for RingMemory {
    #[inline]
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.0.word(at as u64).expect(WITHIN).load(order)
    }

    #[inline]
    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.0.word(at as u64).expect(WITHIN).store(value, order);
    }

    #[inline]
    fn swap(&self, at: usize, value: u64, order: Ordering) -> u64 {
        self.0.word(at as u64).expect(WITHIN).swap(value, order)
    }

    #[inline]
    fn barrier(&self) {
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn copy_in(&self, at: usize, from: &[u8]) {
        self.0.write(at as u64, from).expect(WITHIN);
    }

    #[inline]
    unsafe fn copy_out(&self, at: usize, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.0.read_to(at as u64, to, bytes) }.expect(WITHIN);
    }
}
