//! The memory of a ring, as one process maps it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::FallocateFlags;

use super::{RING_BYTES, Words};
use crate::copy;
use crate::memory::{Mapping, Protection, create_sealed, is_sealed_against_shrinking};

/// A mapping as long as a ring.
pub(crate) struct RingMemory {
    mapping: Mapping,
    /// The descriptor, at the side that made the memory.
    made: Option<OwnedFd>,
}

impl Drop for RingMemory {
    /// Gives the pages back even if the peer still maps the memory. Otherwise a peer that connects again and
    /// again, and unmaps nothing, would fill the memory of the side that makes the rings. Pages that it
    /// touches later are charged to it.
    fn drop(&mut self) {
        if let Some(fd) = &self.made {
            let all = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            if let Err(error) = rustix::fs::fallocate(fd, all, 0, RING_BYTES as u64) {
                tracing::warn!(%error, "a ring's memory could not be given back");
            }
        }
    }
}

impl RingMemory {
    /// New memory, zeroed, and the descriptor to hand to the other side.
    pub(crate) fn create() -> io::Result<(Self, OwnedFd)> {
        let fd = create_sealed("farpool-ring", RING_BYTES as u64)?;
        let mapping = Mapping::new(fd.as_fd(), RING_BYTES as u64, Protection::ReadWrite)?;
        let made = Some(fd.try_clone()?);
        Ok((RingMemory { mapping, made }, fd))
    }

    /// Maps what the node has sent.
    pub(crate) fn map(fd: BorrowedFd<'_>) -> io::Result<Self> {
        if !is_sealed_against_shrinking(fd) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the ring's size is not sealed"));
        }
        let mapping = Mapping::new(fd, RING_BYTES as u64, Protection::ReadWrite)?;
        Ok(RingMemory { mapping, made: None })
    }
}

impl RingMemory {
    /// The address of `bytes` bytes at `at`; panics outside the ring. The check costs nothing where callers
    /// pass constants.
    #[inline]
    fn place(&self, at: usize, bytes: usize) -> *mut u8 {
        assert!(at <= RING_BYTES && bytes <= RING_BYTES - at, "no place of a ring");
        // SAFETY: within the mapping, which is RING_BYTES long.
        unsafe { self.mapping.base().add(at) }
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        let place = self.place(at, 8);
        assert!(at.is_multiple_of(8), "no word of a ring");
        // SAFETY: in bounds by `place`; aligned, since the mapping starts on a page; alive as long as `self`;
        // and an atomic may be shared with any other process.
        unsafe { AtomicU64::from_ptr(place.cast()) }
    }
}

impl Words for RingMemory {
    #[inline]
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.word(at).load(order)
    }

    #[inline]
    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.word(at).store(value, order);
    }

    #[inline]
    fn barrier(&self) {
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn loads_in_order(&self) {
        fence(Ordering::Acquire);
    }

    #[inline]
    fn prefetch(&self, at: usize) {
        copy::prefetch(self.place(at, 8), 8);
    }

    #[inline]
    fn copy_in(&self, at: usize, from: &[u8]) {
        let to = self.place(at, from.len());
        // SAFETY: `to` is in bounds by `place`, alive as long as `self`, and writable; `from` is a slice.
        unsafe { copy::to_shared(to, from.as_ptr(), from.len()) };
    }

    #[inline]
    unsafe fn copy_out(&self, at: usize, to: *mut u8, bytes: usize) {
        // SAFETY: `from` is in bounds by `place` and alive as long as `self`; `to` is the caller's promise.
        unsafe { copy::from_shared(to, self.place(at, bytes), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_ring_keeps_no_memory_even_if_the_peer_maps_it() {
        let (ring, fd) = RingMemory::create().unwrap();
        let kept = RingMemory::map(fd.as_fd()).unwrap();
        ring.copy_in(4096, &[1; 8192]);
        let occupied = || rustix::fs::fstat(&fd).unwrap().st_blocks;
        assert!(occupied() > 0);
        drop(ring);
        assert_eq!(occupied(), 0);
        assert_eq!(kept.load(4096, Ordering::Relaxed), 0);
    }
}
