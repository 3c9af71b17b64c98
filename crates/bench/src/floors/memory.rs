//! Bare accesses: memcpy, loads, stores, `lock cmpxchg`, `lock xadd`.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::MEMCPY_FROM_BYTES;
use crate::options::{IoOp, IoOptions, WORD_BYTES};
use crate::pages::SharedPages;
use crate::places::{FootprintBlock, Places};
use crate::tally::Tally;

/// One thread's accesses. Only the floors of this process use the memory, each independently of the others.
pub struct MemoryFloor {
    memory: Arc<SharedPages>,
    region_bytes: u64,
    places: Places,
    access: Access,
    block_bytes: usize,
    batch: usize,
    depth: usize,
    together: usize,
    local: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    CopyOut,
    CopyIn,
    Load,
    Store,
    Swap,
    Add,
}

impl MemoryFloor {
    pub(super) fn new(memory: Arc<SharedPages>, options: &IoOptions, places: Places) -> Self {
        let &IoOptions { op, batch, depth, .. } = options;
        let block_bytes = places.block_bytes();
        // Checked once: a check for each access would be measured as well.
        let footprint = places.footprint_bytes();
        assert!(footprint <= memory.bytes() as u64, "a footprint of {footprint} bytes in less memory");
        assert!(
            block_bytes.is_multiple_of(WORD_BYTES),
            "blocks of {block_bytes} bytes are not aligned to words"
        );
        let large = block_bytes >= MEMCPY_FROM_BYTES;
        let access = match op {
            IoOp::Cas => Access::Swap,
            IoOp::Faa => Access::Add,
            IoOp::Write if large => Access::CopyIn,
            IoOp::Write => Access::Store,
            IoOp::Read | IoOp::Call if large => Access::CopyOut,
            IoOp::Read | IoOp::Call => Access::Load,
        };
        let region_bytes = places.region_bytes();
        MemoryFloor {
            memory,
            region_bytes,
            places,
            access,
            block_bytes,
            batch,
            depth,
            together: options.timed_together(),
            local: vec![1; block_bytes],
        }
    }

    pub(super) fn run(&mut self, end: Instant, tally: &mut Tally) -> u64 {
        let mut operations = 0;
        let mut started = Instant::now();
        // Zero, but the compiler cannot know. So each address depends on the word loaded before, without
        // being changed by it.
        let zero = black_box(0u64);
        let mut last = 0u64;
        loop {
            for _ in 0..self.together {
                let depends = last & zero;
                last = 0;
                for _ in 0..self.batch * self.depth {
                    let place = self.places.pick();
                    last ^= self.access(place, depends);
                }
            }
            let doorbells = self.together * self.depth;
            operations += (doorbells * self.batch) as u64;
            let now = Instant::now();
            tally.record(now - started, doorbells);
            if now >= end {
                black_box(last);
                return operations;
            }
            started = now;
        }
    }

    #[inline]
    fn access(&mut self, place: FootprintBlock, depends: u64) -> u64 {
        let offset = place.region as u64 * self.region_bytes + place.offset + depends;
        // SAFETY: in bounds: `pick` gives blocks of the footprint, which is no longer than the memory (`new`
        // checks that), and `depends` is zero; `self` keeps the memory alive. Only the pointer is made here.
        let at = unsafe { self.memory.base().add(offset as usize) };
        match self.access {
            // Other threads may copy from and to the same bytes at the same time, but nothing looks at the
            // result.
            Access::CopyOut => {
                // SAFETY: in bounds as above; `local` holds a block, and only this floor uses it.
                unsafe { bare_copy(self.local.as_mut_ptr(), at, self.block_bytes) };
                0
            }
            Access::CopyIn => {
                // SAFETY: in bounds: a block of the footprint, and all of `local`, which holds a block.
                // Nothing looks at bytes that another floor writes at the same time.
                unsafe { bare_copy(at, self.local.as_ptr(), self.block_bytes) };
                0
            }
            Access::Load => {
                let words = self.block_bytes / WORD_BYTES;
                // Relaxed here and below: nothing is published; the words are only moved.
                (0..words).fold(0, |sum, index| sum ^ word(at, index).load(Ordering::Relaxed))
            }
            Access::Store => {
                let words = self.block_bytes / WORD_BYTES;
                (0..words).for_each(|index| word(at, index).store(offset, Ordering::Relaxed));
                0
            }
            Access::Swap => {
                let swapped = word(at, 0).compare_exchange(0, 0, Ordering::SeqCst, Ordering::SeqCst);
                swapped.unwrap_or_else(|before| before)
            }
            Access::Add => word(at, 0).fetch_add(1, Ordering::SeqCst),
        }
    }
}

/// The `index`-th word of a block. The caller guarantees that it lies within the block, and that the block is
/// aligned to words.
#[inline]
fn word<'a>(at: *mut u8, index: usize) -> &'a AtomicU64 {
    // SAFETY: in bounds by the caller's guarantee; aligned, since blocks begin at multiples of a word; alive
    // as long as the floor; accessed by atomics only.
    unsafe { AtomicU64::from_ptr(at.cast::<u64>().add(index)) }
}

/// libc's memcpy, called so that the compiler can neither omit the copy nor replace it.
///
/// # Safety
/// Both are valid for `length` bytes and do not overlap.
#[inline]
unsafe fn bare_copy(to: *mut u8, from: *const u8, length: usize) {
    // SAFETY: the caller guarantees both ranges.
    unsafe { libc::memcpy(black_box(to).cast(), from.cast(), black_box(length)) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::small;
    use crate::options::{IoOptions, Pattern};
    use crate::pages::Pages;
    use farpool_fabric::TransportChoice;

    /// Runs one group of operations. Returns the memory and the number of operations.
    fn run(op: IoOp, block_bytes: usize, batch: usize) -> (Arc<SharedPages>, u64) {
        let memory = Arc::new(SharedPages::new(64 << 10, Pages::Small).unwrap());
        let options = IoOptions { block_bytes, batch, ..small(TransportChoice::Shm, op) };
        let places = Places::new(Pattern::Random, 2, 32 << 10, block_bytes, 1);
        let mut tally = Tally::new().unwrap();
        let operations = MemoryFloor::new(memory.clone(), &options, places).run(Instant::now(), &mut tally);
        assert!(!tally.is_empty());
        (memory, operations)
    }

    fn words(memory: &SharedPages) -> Vec<u64> {
        (0..memory.bytes() / 8).map(|index| word(memory.base(), index).load(Ordering::Relaxed)).collect()
    }

    #[test]
    fn every_addition_of_the_floor_is_found_in_the_footprint() {
        for batch in [1, 16] {
            let (memory, operations) = run(IoOp::Faa, 8, batch);
            assert_eq!(operations, 256, "one group");
            assert_eq!(words(&memory).iter().sum::<u64>(), operations);
        }
    }

    #[test]
    fn every_floor_ends_and_only_floors_that_write_change_memory() {
        for (op, block_bytes, writes) in [
            (IoOp::Read, 64, false),
            (IoOp::Read, 8192, false),
            (IoOp::Cas, 8, false),
            (IoOp::Write, 64, true),
            (IoOp::Write, 8192, true),
        ] {
            let (memory, operations) = run(op, block_bytes, 1);
            assert!(operations > 0);
            assert_eq!(words(&memory).iter().any(|&word| word != 0), writes, "{op} of {block_bytes}");
        }
    }
}
