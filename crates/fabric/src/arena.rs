//! A thread's staging arena: local memory that transfers go to and come from.
//!
//! Network cards need their local memory registered, which costs more than a transfer. So a thread registers
//! one block and takes its buffers from it (paper 1, sections 4.1.4 and 4.2: 1 MiB for 128 transfers).
//!
//! A1. A granule belongs to at most one [`ArenaBuf`]; a buffer in flight is owned by its operation, so
//!     nothing else reads or writes it meanwhile.
//! A2. The block lives until the arena and its last buffer are gone.

use std::alloc::Layout;
use std::cell::RefCell;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::rc::Rc;

use crate::seam::LocalSlice;

/// Buffers begin and end at multiples of this.
pub const ARENA_GRANULE_BYTES: usize = 4096;

/// All of the arena is in use: finish some operations first, or make the arena larger.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the staging arena has no {bytes} contiguous bytes left")]
pub struct ArenaFull {
    /// What was asked for.
    pub bytes: usize,
}

/// Shared handle of one thread's block.
#[derive(Clone)]
pub struct Arena {
    block: Rc<Block>,
}

struct Block {
    base: NonNull<u8>,
    layout: Layout,
    /// One entry per granule; true while a buffer owns it.
    taken: RefCell<Vec<bool>>,
}

impl Arena {
    /// A zeroed block of `bytes`, rounded up to whole granules. Ends the process when there is no memory.
    pub fn new(bytes: usize) -> Self {
        let layout = Self::layout(bytes);
        Self::of(layout).unwrap_or_else(|| std::alloc::handle_alloc_error(layout))
    }

    /// As [`new`](Self::new), for callers that can do without an arena.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn try_new(bytes: usize) -> io::Result<Self> {
        Self::of(Self::layout(bytes)).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    fn layout(bytes: usize) -> Layout {
        let granules = bytes.div_ceil(ARENA_GRANULE_BYTES).max(1);
        Layout::from_size_align(granules * ARENA_GRANULE_BYTES, ARENA_GRANULE_BYTES)
            .expect("an arena is smaller than the address space")
    }

    /// `None`: there is no memory.
    fn of(layout: Layout) -> Option<Self> {
        let granules = layout.size() / ARENA_GRANULE_BYTES;
        // SAFETY: the layout's size is not zero: it has one granule at least.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        Some(Arena { block: Rc::new(Block { base, layout, taken: RefCell::new(vec![false; granules]) }) })
    }

    /// Bytes of the block.
    pub fn bytes(&self) -> usize {
        self.block.layout.size()
    }

    /// The whole block, as transports see it.
    pub(crate) fn as_local(&self) -> LocalSlice {
        LocalSlice { start: self.block.base.as_ptr(), bytes: self.block.layout.size() }
    }

    /// A buffer of `bytes` bytes, fewer than 4 GiB; its contents are whatever was there before.
    pub fn take(&self, bytes: usize) -> Result<ArenaBuf, ArenaFull> {
        let wanted = bytes.div_ceil(ARENA_GRANULE_BYTES).max(1);
        let mut taken = self.block.taken.borrow_mut();
        let mut run = 0;
        for granule in 0..taken.len() {
            run = if taken[granule] { 0 } else { run + 1 };
            if run == wanted {
                let first = granule + 1 - wanted;
                let place = Place::of(first, bytes).ok_or(ArenaFull { bytes })?;
                taken[first..=granule].fill(true);
                return Ok(ArenaBuf { block: self.block.clone(), place });
            }
        }
        Err(ArenaFull { bytes })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `Arena::of`; the last `Rc` is going, so no buffer is left.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// A piece of an arena, owned like a `Vec`; dropping it gives the piece back.
///
/// It is two words long, which compilers pass in registers: a buffer goes through all futures of its
/// operation, and back.
pub struct ArenaBuf {
    block: Rc<Block>,
    place: Place,
}

/// Where in its block a buffer is: its first granule in the upper half, its bytes in the lower one.
#[derive(Clone, Copy, PartialEq)]
struct Place(u64);

impl Place {
    /// The place of a buffer whose bytes another buffer owns now. No buffer has this granule.
    const NONE: Place = Place(u64::MAX);

    /// `None` if a buffer cannot be that long, or that far from the start of the block.
    fn of(first: usize, bytes: usize) -> Option<Place> {
        let (low, high) = (u32::try_from(bytes).ok()?, u32::try_from(first).ok()?);
        let place = Place(u64::from(high) << 32 | u64::from(low));
        (place.granules().end <= Place::NONE.first()).then_some(place)
    }

    fn first(self) -> usize {
        (self.0 >> 32) as usize
    }

    fn bytes(self) -> usize {
        self.0 as u32 as usize
    }

    fn granules(self) -> Range<usize> {
        self.first()..self.first() + self.bytes().div_ceil(ARENA_GRANULE_BYTES).max(1)
    }
}

impl ArenaBuf {
    /// Cuts the buffer in two at `at`, a multiple of [`ARENA_GRANULE_BYTES`] within it.
    ///
    /// # Panics
    /// When `at` is not such a place: a bug of the caller.
    pub fn split_off(&mut self, at: usize) -> ArenaBuf {
        let Range { start, .. } = self.place.granules();
        let bytes = self.place.bytes();
        assert!(at.is_multiple_of(ARENA_GRANULE_BYTES) && at > 0 && at < bytes, "no place to cut: {at}");
        let within = "a part of a buffer has a place, as the whole has";
        let rest = Place::of(start + at / ARENA_GRANULE_BYTES, bytes - at).expect(within);
        self.place = Place::of(start, at).expect(within);
        ArenaBuf { block: self.block.clone(), place: rest }
    }

    /// Undoes [`ArenaBuf::split_off`].
    ///
    /// # Panics
    /// When `rest` is empty or does not directly follow this buffer, or this buffer does not fill its
    /// granules: a bug of the caller.
    pub fn join(&mut self, rest: ArenaBuf) {
        let granules = self.place.granules();
        let adjacent = Rc::ptr_eq(&self.block, &rest.block) && granules.end == rest.place.first();
        // An empty buffer has a granule, which the sum of the bytes would not cover.
        let is_full = self.place.bytes() == granules.len() * ARENA_GRANULE_BYTES && !rest.is_empty();
        let both = Place::of(granules.start, self.place.bytes() + rest.place.bytes());
        self.place = both.filter(|_| adjacent && is_full).expect("only neighbours join");
        // `rest` must not free what is ours now; dropping it only releases its reference to the block.
        let mut rest = rest;
        rest.place = Place::NONE;
    }

    /// The buffer as transports see it. It may be accessed only while this value is kept, and while nobody
    /// touches the same bytes by way of it. It stays valid when its bytes are borrowed in between: it comes
    /// from the block's base, not from such a borrow.
    pub(crate) fn as_local(&self) -> LocalSlice {
        LocalSlice { start: self.start(), bytes: self.place.bytes() }
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: the place's first granule is one of the block.
        unsafe { self.block.base.as_ptr().add(self.place.first() * ARENA_GRANULE_BYTES) }
    }
}

impl Deref for ArenaBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: in bounds: the bytes fit the place's granules. Exclusive: A1; in flight, the operation owns
        // the buffer. Alive: `block` is counted.
        unsafe { std::slice::from_raw_parts(self.start(), self.place.bytes()) }
    }
}

impl DerefMut for ArenaBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: in bounds: the bytes fit the place's granules. Exclusive: A1, and `self` is borrowed
        // mutably. Alive: `block` is counted.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.place.bytes()) }
    }
}

impl Drop for ArenaBuf {
    fn drop(&mut self) {
        if self.place != Place::NONE {
            self.block.taken.borrow_mut()[self.place.granules()].fill(false);
        }
    }
}

impl fmt::Debug for ArenaBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ArenaBuf({} bytes at {})", self.place.bytes(), self.place.first() * ARENA_GRANULE_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_arena_returns_an_error_and_takes_buffers_back() {
        let arena = Arena::new(4 * ARENA_GRANULE_BYTES);
        let first = arena.take(2 * ARENA_GRANULE_BYTES).unwrap();
        let _second = arena.take(ARENA_GRANULE_BYTES + 1).unwrap();
        assert!(arena.take(1).is_err());
        drop(first);
        assert!(arena.take(3 * ARENA_GRANULE_BYTES).is_err());
        assert!(arena.take(2 * ARENA_GRANULE_BYTES).is_ok());
    }

    #[test]
    fn try_new_returns_an_error_for_an_arena_larger_than_any_address_space() {
        assert_eq!(Arena::try_new(1 << 47).err().unwrap().kind(), io::ErrorKind::OutOfMemory);
    }

    #[test]
    fn a_buffer_too_long_or_too_far_from_the_start_has_no_place() {
        let place = Place::of(3, ARENA_GRANULE_BYTES + 1).unwrap();
        assert_eq!((place.first(), place.bytes(), place.granules()), (3, ARENA_GRANULE_BYTES + 1, 3..5));
        let last = u32::MAX as usize;
        assert!(Place::of(0, last).is_some() && Place::of(last - 1, 0).is_some());
        assert!(Place::of(0, last + 1).is_none() && Place::of(last - 1, ARENA_GRANULE_BYTES + 1).is_none());
        assert!(Place::of(last, 0).is_none() && Place::of(last + 1, 0).is_none(), "one would be `NONE`");
    }

    #[test]
    fn parts_of_a_split_buffer_are_freed_once_each() {
        let arena = Arena::new(4 * ARENA_GRANULE_BYTES);
        let mut whole = arena.take(4 * ARENA_GRANULE_BYTES).unwrap();
        whole.fill(1);
        let mut rest = whole.split_off(ARENA_GRANULE_BYTES);
        rest.fill(2);
        let tail = rest.split_off(2 * ARENA_GRANULE_BYTES);
        drop(tail);
        whole.join(rest);
        assert_eq!(whole.len(), 3 * ARENA_GRANULE_BYTES);
        assert!(whole[..ARENA_GRANULE_BYTES].iter().all(|&byte| byte == 1));
        assert!(whole[ARENA_GRANULE_BYTES..].iter().all(|&byte| byte == 2));
        assert!(arena.take(1).is_ok());
        drop(whole);
        assert!(arena.take(4 * ARENA_GRANULE_BYTES).is_ok());
    }

    #[test]
    #[should_panic(expected = "only neighbours join")]
    fn an_empty_buffer_is_no_part_of_another() {
        let arena = Arena::new(2 * ARENA_GRANULE_BYTES);
        let mut first = arena.take(ARENA_GRANULE_BYTES).unwrap();
        first.join(arena.take(0).unwrap());
    }

    #[test]
    fn buffers_outlive_their_arena_handle() {
        let arena = Arena::new(1);
        let mut buffer = arena.take(10).unwrap();
        drop(arena);
        buffer.fill(7);
        assert_eq!(&buffer[..], [7; 10]);
    }
}
