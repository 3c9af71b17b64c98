//! Memory that several processes read and write at once: region memory, and pages of words.
//!
//! M1. No Rust reference to its bytes ever exists: they go in and out by copies, and single words by atomics.
//! M2. Every access is checked against the mapping's length.
//! M3. An aligned 8-byte word is moved whole by every copy and every atomic; more than a word may tear.
//! Not here: the rights to access memory (leases), and what the bytes mean.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise};

use crate::copy;
use crate::stamp::Word;

/// Why a mapping did not allow an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AccessError {
    /// It reaches past the mapping's end.
    OutOfBounds,
    /// It is an atomic on a word whose offset is not a multiple of eight.
    Misaligned,
    /// It would change a read-only mapping.
    ReadOnly,
}

/// Size of a large page: one TLB entry covers it, instead of 512 for small pages.
const LARGE_PAGE_BYTES: usize = 2 << 20;

/// Anonymous memory with a descriptor that can be handed to other processes; its size is sealed. A process
/// that was handed a read-only descriptor cannot reopen it for writing, unless it runs as the same user or as
/// root.
pub fn create_sealed(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    // A memory file is created accessible to everybody: a read-only descriptor could be reopened through
    // /proc for writing.
    rustix::fs::fchmod(&fd, Mode::RUSR)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Whether memory that came from a peer can never become shorter: an access to a part that was cut off would
/// kill the process.
pub(crate) fn is_sealed_against_shrinking(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

/// The same memory behind a descriptor that allows no writing, and cannot be mapped writable.
pub fn reopen_read_only(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(rustix::fs::open(
        path,
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?)
}

/// Whether memory was put into large pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LargePages {
    /// All of it, except a rest at the end that is shorter than a large page.
    AsFarAsTheyFit,
    /// Not all: the memory is shorter than a large page, or the kernel does not support them or has none
    /// left.
    NotAll,
}

/// How a mapping may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    /// Loads only.
    ReadOnly,
    /// Loads, stores, atomics.
    ReadWrite,
}

/// A shared mapping of a descriptor's first bytes.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    protection: Protection,
}

// SAFETY: a mapping is an address range that lives until drop; all access goes through atomics and through
// copies whose races are not data races of the language (see `copy`), so it may be used from any thread.
unsafe impl Send for Mapping {}
// SAFETY: no method relies on being called by one thread at a time: the bytes are shared with other processes
// in any case.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes of `fd`. Memory that is shorter is refused: an access behind its end
    /// would kill the process.
    pub fn new(fd: BorrowedFd<'_>, bytes: u64, protection: Protection) -> io::Result<Self> {
        let length = usize::try_from(bytes).ok().filter(|&length| length > 0);
        let Some(length) = length.filter(|_| i64::try_from(bytes).is_ok()) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "impossible mapping length"));
        };
        if (rustix::fs::fstat(fd)?.st_size as u64) < bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the memory is shorter than its mapping",
            ));
        }
        let access = match protection {
            Protection::ReadOnly => ProtFlags::READ,
            Protection::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        let base = map_shared(fd, length, access)?;
        // A core dump would allocate memory for every hole of a table, and reveal the data that others keep
        // here.
        // SAFETY: the range is the mapping just made; the advice changes none of its contents.
        let advised = unsafe { madvise(base.as_ptr().cast(), length, Advice::LinuxDontDump) };
        if let Err(error) = advised {
            tracing::debug!(%error, "core dumps would hold this memory");
        }
        Ok(Mapping { base, bytes: length, protection })
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.bytes as u64
    }

    /// Never: a mapping has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// First byte, for registering the mapping with a device. Not to be dereferenced: see M1.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Allocates every page now, so that no later access needs memory, unless pages are given back in
    /// between. Uses large pages where the kernel has them (Linux 6.1 or later, and memory that is not
    /// fragmented), small ones elsewhere. Large pages come from no reserve: after a hole was punched into
    /// them, an access finds zeros, and no process is killed.
    pub fn prefault(&self) -> io::Result<LargePages> {
        let large = self.bytes / LARGE_PAGE_BYTES * LARGE_PAGE_BYTES;
        // The kernel builds a large page from the small pages that are there, by copying them: give it one,
        // not 512.
        for start in (0..large).step_by(LARGE_PAGE_BYTES) {
            self.advise(start, 1, libc::MADV_POPULATE_WRITE)?;
        }
        let collapsed = large > 0 && self.advise(0, large, libc::MADV_COLLAPSE).is_ok();
        self.advise(0, self.bytes, libc::MADV_POPULATE_WRITE)?;
        Ok(if collapsed { LargePages::AsFarAsTheyFit } else { LargePages::NotAll })
    }

    /// Gives the kernel advice that changes no contents, on `bytes` bytes at `start`, a multiple of the page
    /// size.
    fn advise(&self, start: usize, bytes: usize, advice: libc::c_int) -> io::Result<()> {
        assert!(start <= self.bytes && bytes <= self.bytes - start, "advice past the mapping's end");
        // SAFETY: the range is within the mapping, which is ours until drop; the callers' advice changes no
        // contents.
        let result = unsafe { libc::madvise(self.base.as_ptr().add(start).cast(), bytes, advice) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Keeps the pages out of swap for as long as the mapping lives.
    pub fn lock(&self) -> io::Result<()> {
        // SAFETY: the range is ours until drop, and mlock changes no contents.
        unsafe { rustix::mm::mlock(self.base.as_ptr().cast(), self.bytes)? };
        Ok(())
    }

    /// Copies `length` bytes at `offset` to `to`.
    ///
    /// # Safety
    /// `to` is valid for writes of `length` bytes, which nothing else accesses during the call.
    pub unsafe fn read_to(&self, offset: u64, to: *mut u8, length: usize) -> Result<(), AccessError> {
        let from = self.place(offset, length)?;
        // SAFETY: in bounds and alive by `place`; `to` is the caller's promise; far bytes may change under
        // the copy.
        unsafe { copy::from_shared(to, from, length) };
        Ok(())
    }

    /// Copies `length` bytes from `from` to `offset`.
    ///
    /// # Safety
    /// `from` is valid for reads of `length` bytes, which nothing writes during the call.
    pub unsafe fn write_from(&self, offset: u64, from: *const u8, length: usize) -> Result<(), AccessError> {
        self.writable()?;
        let to = self.place(offset, length)?;
        // SAFETY: in bounds and alive by `place`; `from` is the caller's promise.
        unsafe { copy::to_shared(to, from, length) };
        Ok(())
    }

    /// Starts to fetch the first bytes at `offset` into the processor's cache, if they are within bounds.
    pub fn prefetch(&self, offset: u64, length: usize) {
        if let Ok(place) = self.place(offset, length.max(1)) {
            copy::prefetch(place, length);
        }
    }

    /// Copies far bytes into `to`.
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), AccessError> {
        // SAFETY: a unique slice is valid and exclusive for its length.
        unsafe { self.read_to(offset, to.as_mut_ptr(), to.len()) }
    }

    /// Copies `from` into the mapping.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        // SAFETY: a shared slice is valid and unwritten for its length.
        unsafe { self.write_from(offset, from.as_ptr(), from.len()) }
    }

    /// Fills the whole mapping with zeros.
    pub fn scrub(&self) -> Result<(), AccessError> {
        self.writable()?;
        // SAFETY: the range is ours until drop; it is written as raw memory, never as a Rust object.
        unsafe { copy::zero_shared(self.base.as_ptr(), self.bytes) };
        // Pairs with the fences of those that learn afterwards that the region is clean.
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// Copies all of `from`, an equally long mapping. A word that others store there meanwhile may or may not
    /// be in the copy.
    pub(crate) fn copy_all(&self, from: &Mapping) -> Result<(), AccessError> {
        self.writable()?;
        if from.bytes != self.bytes {
            return Err(AccessError::OutOfBounds);
        }
        // SAFETY: both ranges are as long, page-aligned and live as long as the borrows; two mappings overlap
        // nowhere. They are touched as raw memory only.
        unsafe { copy::between_shared(self.base.as_ptr(), from.base.as_ptr(), self.bytes) };
        Ok(())
    }

    /// The word at `offset`, loaded whole. Acquires what its writer published before it, and is one of the
    /// sequentially consistent accesses: see `store`.
    pub fn load(&self, offset: u64) -> Result<u64, AccessError> {
        Ok(self.word(offset)?.load(Ordering::SeqCst))
    }

    /// Stores a word whole, after all that this thread wrote before.
    pub fn store(&self, offset: u64, value: u64) -> Result<(), AccessError> {
        self.writable()?;
        // Pairs with `load`; sequentially consistent because epoch words are compared across barriers.
        self.word(offset)?.store(value, Ordering::SeqCst);
        Ok(())
    }

    /// Puts `new` in place of `expected`; returns what was there before.
    pub fn compare_and_swap(&self, offset: u64, expected: u64, new: u64) -> Result<u64, AccessError> {
        self.writable()?;
        let word = self.word(offset)?;
        Ok(match word.compare_exchange(expected, new, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(before) | Err(before) => before,
        })
    }

    /// Adds `addend` (wrapping); returns what was there before.
    pub fn fetch_and_add(&self, offset: u64, addend: u64) -> Result<u64, AccessError> {
        self.writable()?;
        Ok(self.word(offset)?.fetch_add(addend, Ordering::SeqCst))
    }

    fn writable(&self) -> Result<(), AccessError> {
        match self.protection {
            Protection::ReadWrite => Ok(()),
            Protection::ReadOnly => Err(AccessError::ReadOnly),
        }
    }

    fn place(&self, offset: u64, length: usize) -> Result<*mut u8, AccessError> {
        let end = offset.checked_add(length as u64).ok_or(AccessError::OutOfBounds)?;
        if end > self.bytes as u64 {
            return Err(AccessError::OutOfBounds);
        }
        // SAFETY: offset <= bytes, so the result lies within the mapping or one past its end.
        Ok(unsafe { self.base.as_ptr().add(offset as usize) })
    }

    fn word(&self, offset: u64) -> Result<&AtomicU64, AccessError> {
        if !offset.is_multiple_of(8) {
            return Err(AccessError::Misaligned);
        }
        let place = self.place(offset, 8)?;
        // SAFETY: in bounds by `place`, aligned (the base is page-aligned), alive as long as `self`, and an
        // atomic may be shared with any other process.
        Ok(unsafe { AtomicU64::from_ptr(place.cast()) })
    }
}

/// Maps the first `length` bytes of a descriptor, at an address where large pages stay large if one is found.
fn map_shared(fd: BorrowedFd<'_>, length: usize, access: ProtFlags) -> io::Result<NonNull<u8>> {
    let place = if length < LARGE_PAGE_BYTES { None } else { aligned_place(length) };
    let at_place = place.and_then(|place| {
        let flags = MapFlags::SHARED | MapFlags::FIXED_NOREPLACE;
        // SAFETY: it replaces no mapping: if another thread has taken the address meanwhile, it fails.
        unsafe { rustix::mm::mmap(place, length, access, flags, fd, 0).ok() }
    });
    let base = match at_place {
        Some(base) => base,
        // SAFETY: a new mapping at an address the kernel chooses aliases nothing of ours.
        None => unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, access, MapFlags::SHARED, fd, 0)? },
    };
    Ok(NonNull::new(base.cast()).expect("mmap never returns null"))
}

/// An address, at a multiple of a large page, with `length` free bytes. Another thread may take it before it
/// is used.
fn aligned_place(length: usize) -> Option<*mut std::ffi::c_void> {
    let room = length.checked_add(LARGE_PAGE_BYTES)?;
    let unused = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address the kernel chooses aliases nothing of ours, and it is unmapped
    // before its address is used.
    unsafe {
        let start =
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), room, ProtFlags::empty(), unused).ok()?;
        rustix::mm::munmap(start, room).ok()?;
        Some(start.wrapping_byte_add(start.addr().next_multiple_of(LARGE_PAGE_BYTES) - start.addr()))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and nothing can refer to it any more: accessors borrow
        // `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping: {unmapped:?}");
    }
}

/// One word of a mapping, for the rule of `stamp`.
#[derive(Clone, Copy)]
pub(crate) struct MappedWord<'a> {
    pub(crate) words: &'a Mapping,
    /// Checked when the word was chosen: a multiple of eight, within the mapping.
    pub(crate) offset: u64,
}

impl Word for MappedWord<'_> {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.words.word(self.offset).expect("checked when it was chosen").load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        assert_eq!(self.words.protection, Protection::ReadWrite, "only the node changes words");
        self.words.word(self.offset).expect("checked when it was chosen").store(value, order);
    }

    #[inline]
    fn barrier(order: Ordering) {
        fence(order);
    }
}

/// A memory file and this process's mapping of it.
#[derive(Debug)]
pub struct SharedMemory {
    fd: OwnedFd,
    mapping: Arc<Mapping>,
}

impl SharedMemory {
    /// New zeroed memory; `name` shows in `/proc/PID/maps`.
    pub fn create(name: &str, bytes: u64) -> io::Result<Self> {
        let fd = create_sealed(name, bytes)?;
        let mapping = Arc::new(Mapping::new(fd.as_fd(), bytes, Protection::ReadWrite)?);
        Ok(SharedMemory { fd, mapping })
    }

    /// Maps a file of this process's user. The caller ensures that it is not truncated while it is mapped.
    pub fn of_file(fd: OwnedFd, bytes: u64) -> io::Result<Self> {
        let mapping = Arc::new(Mapping::new(fd.as_fd(), bytes, Protection::ReadWrite)?);
        Ok(SharedMemory { fd, mapping })
    }

    /// Allocates a range of it now, so that no later access has to.
    pub fn reserve(&self, offset: u64, bytes: u64) -> io::Result<()> {
        Ok(rustix::fs::fallocate(&self.fd, FallocateFlags::empty(), offset, bytes)?)
    }

    /// The descriptor, to hand out.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The mapping.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Gives the pages back to the system at once, even if processes still map the memory. Such a process
    /// then finds zeros, and pages that it touches are charged to it.
    pub(crate) fn discard(&self) {
        let all = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(&self.fd, all, 0, self.mapping.len()) {
            // The pages are then freed when the last process unmaps them.
            tracing::warn!(%error, "unused memory could not be given back to the system at once");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_past_the_end_is_refused_and_changes_nothing() {
        let memory = SharedMemory::create("test", 4096).unwrap();
        let mapping = memory.mapping();
        assert_eq!(mapping.write(4090, &[1; 7]), Err(AccessError::OutOfBounds));
        assert_eq!(mapping.write(u64::MAX, &[1; 7]), Err(AccessError::OutOfBounds));
        assert_eq!(mapping.compare_and_swap(4096, 0, 1), Err(AccessError::OutOfBounds));
        assert_eq!(mapping.compare_and_swap(4, 0, 1), Err(AccessError::Misaligned));
        let mut all = [9; 4096];
        mapping.read(0, &mut all).unwrap();
        assert_eq!(all, [0; 4096]);
    }

    #[test]
    fn allocated_memory_of_any_length_is_zeroed_usable_and_survives_its_pages_being_taken() {
        for bytes in [4096, LARGE_PAGE_BYTES as u64, 2 * LARGE_PAGE_BYTES as u64 + 12288] {
            let memory = SharedMemory::create("test", bytes).unwrap();
            let mapping = memory.mapping();
            mapping.prefault().unwrap();
            assert_eq!(rustix::fs::fstat(memory.fd()).unwrap().st_blocks as u64 * 512, bytes);
            assert_eq!(mapping.load(bytes - 8), Ok(0));
            mapping.store(bytes - 8, 5).unwrap();
            let other = Mapping::new(memory.fd(), bytes, Protection::ReadWrite).unwrap();
            assert_eq!(other.load(bytes - 8), Ok(5));
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(memory.fd(), hole, 0, bytes).unwrap();
            assert_eq!(mapping.load(bytes - 8), Ok(0));
            mapping.store(0, 7).unwrap();
            assert_eq!(other.load(0), Ok(7));
        }
    }

    #[test]
    fn a_long_mapping_that_fails_leaves_nothing_behind() {
        let fd = create_sealed("test", 4 * LARGE_PAGE_BYTES as u64).unwrap();
        let read_only = reopen_read_only(fd.as_fd()).unwrap();
        let mapped =
            || std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').next().map(str::to_owned);
        let before = mapped();
        for _ in 0..100 {
            let bytes = 4 * LARGE_PAGE_BYTES as u64;
            assert!(Mapping::new(read_only.as_fd(), bytes, Protection::ReadWrite).is_err());
        }
        let pages = |statm: Option<String>| statm.unwrap().parse::<u64>().unwrap();
        assert!(pages(mapped()) < pages(before) + 50 * 4 * LARGE_PAGE_BYTES as u64 / 4096);
    }

    #[test]
    fn long_mappings_begin_where_a_large_page_does() {
        for bytes in [LARGE_PAGE_BYTES as u64, LARGE_PAGE_BYTES as u64 + 100] {
            let fd = create_sealed("test", bytes).unwrap();
            let one = Mapping::new(fd.as_fd(), bytes, Protection::ReadWrite).unwrap();
            let other = Mapping::new(fd.as_fd(), bytes, Protection::ReadOnly).unwrap();
            for mapping in [&one, &other] {
                assert_eq!(mapping.base().addr() % LARGE_PAGE_BYTES, 0);
            }
            one.write(bytes - 1, &[3]).unwrap();
            let mut last = [0];
            other.read(bytes - 1, &mut last).unwrap();
            assert_eq!(last, [3]);
        }
    }

    /// Bytes of a mapping that are mapped by large pages, according to `smaps`.
    fn in_large_pages(mapping: &Mapping) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begins = format!("{:x}-", mapping.base().addr());
        let of_it = smaps.lines().skip_while(|line| !line.starts_with(&begins));
        let line = of_it.filter_map(|line| line.strip_prefix("ShmemPmdMapped:")).next().unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    #[test]
    fn large_pages_are_large_in_every_mapping() {
        let bytes = 4 * LARGE_PAGE_BYTES as u64;
        let memory = SharedMemory::create("test", bytes).unwrap();
        if memory.mapping().prefault().unwrap() == LargePages::NotAll {
            return; // the kernel cannot, or has none
        }
        for protection in [Protection::ReadOnly, Protection::ReadWrite] {
            let other = Mapping::new(memory.fd(), bytes, protection).unwrap();
            for at in (0..bytes).step_by(4096) {
                other.load(at).unwrap();
            }
            assert_eq!(in_large_pages(&other), bytes, "{protection:?}");
        }
    }

    #[test]
    fn a_read_only_descriptor_cannot_be_mapped_writable() {
        let memory = SharedMemory::create("test", 4096).unwrap();
        let read_only = reopen_read_only(memory.fd()).unwrap();
        assert!(Mapping::new(read_only.as_fd(), 4096, Protection::ReadWrite).is_err());
        let view = Mapping::new(read_only.as_fd(), 4096, Protection::ReadOnly).unwrap();
        memory.mapping().store(8, 77).unwrap();
        assert_eq!(view.load(8), Ok(77));
        assert_eq!(view.store(8, 1), Err(AccessError::ReadOnly));
    }

    #[test]
    fn other_users_cannot_reopen_memory() {
        let fd = create_sealed("test", 4096).unwrap();
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_mode & 0o777, Mode::RUSR.bits());
        assert!(reopen_read_only(fd.as_fd()).is_ok());
    }

    #[test]
    fn a_mapping_longer_than_its_memory_is_refused() {
        let fd = create_sealed("test", 4096).unwrap();
        assert!(Mapping::new(fd.as_fd(), 8192, Protection::ReadWrite).is_err());
        assert!(rustix::fs::ftruncate(&fd, 0).is_err(), "the size is sealed");
    }

    #[test]
    fn bytes_are_copied_unchanged_at_every_alignment() {
        let memory = SharedMemory::create("test", 4096).unwrap();
        for offset in 0..17 {
            for length in [0, 1, 7, 8, 9, 63, 64, 100, 1000] {
                let data: Vec<u8> = (0..length).map(|i| (i * 7 + offset) as u8).collect();
                let around = vec![0xEE; length + 16];
                memory.mapping().write(offset as u64, &around).unwrap();
                memory.mapping().write(offset as u64 + 8, &data).unwrap();
                let mut back = vec![0; length];
                memory.mapping().read(offset as u64 + 8, &mut back).unwrap();
                assert_eq!(back, data, "offset {offset}, length {length}");
                let mut all = around.clone();
                memory.mapping().read(offset as u64, &mut all).unwrap();
                let edges = [&all[..8], &all[length + 8..]].concat();
                assert_eq!(edges, [0xEE; 16], "beside offset {offset}, length {length}");
            }
        }
        memory.mapping().scrub().unwrap();
        let mut all = [9; 4096];
        memory.mapping().read(0, &mut all).unwrap();
        assert_eq!(all, [0; 4096]);
    }
}
