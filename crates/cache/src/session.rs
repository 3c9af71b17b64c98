//! What one thread of a process needs to use the cache, for files that it has open.
//!
//! The memory of a program may change while a call reads it. So a page that is to be cached goes through a
//! copy of the session's own: the kernel and far memory get the same bytes. A page from the cache is copied
//! straight to the program's memory, and its checksum is computed meanwhile. So until the call returns, that
//! memory may hold bytes of another page.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::OFlags;

use crate::ahead::Pattern;
use crate::at_once;
use crate::caller::{Caller, MAX_BLOCKS, Outcome};
use crate::client::CacheClient;
use crate::door::DoorFile;
use crate::far::{FarSlots, PAGE_BYTES};
use crate::files::KnownFile;
use crate::identity::{FdKind, InodeStamp, id_of, stat_fd};
use crate::shared::Shared;

/// Descriptors from this number on are looked up at each call.
const MAX_REMEMBERED: usize = 1 << 16;
/// As many descriptors as most programs have. The library's own have higher numbers, where the limit of
/// descriptors allows it.
const REPLACEMENT_COUNTS: usize = 1024;

const PAGE: u64 = PAGE_BYTES as u64;

/// A page, aligned as direct I/O needs it.
#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

/// Counts what may give descriptors of this process another meaning: a count grows before a descriptor is
/// closed or replaced, as far as the process knows. Descriptors with high numbers share a count.
#[derive(Debug)]
pub struct Replacements {
    by_number: [AtomicU64; REPLACEMENT_COUNTS],
    of_others: AtomicU64,
    of_all: AtomicU64,
}

impl Replacements {
    /// None so far.
    pub const fn new() -> Replacements {
        Replacements {
            by_number: [const { AtomicU64::new(0) }; REPLACEMENT_COUNTS],
            of_others: AtomicU64::new(0),
            of_all: AtomicU64::new(0),
        }
    }

    /// To be called before a descriptor is closed or replaced.
    pub fn note(&self, fd: RawFd) {
        self.of(fd).fetch_add(1, Ordering::SeqCst);
    }

    /// To be called before many descriptors are closed at once.
    pub fn note_all(&self) {
        self.of_all.fetch_add(1, Ordering::SeqCst);
    }

    fn of(&self, fd: RawFd) -> &AtomicU64 {
        self.by_number.get(fd as usize).unwrap_or(&self.of_others)
    }

    /// Another number if this descriptor was closed or replaced meanwhile: both counts only grow.
    fn so_far(&self, fd: BorrowedFd<'_>) -> u64 {
        self.of(fd.as_raw_fd()).load(Ordering::SeqCst).wrapping_add(self.of_all.load(Ordering::SeqCst))
    }
}

impl Default for Replacements {
    fn default() -> Replacements {
        Replacements::new()
    }
}

/// A descriptor before a system call. Another thread may replace the file behind it, and put the first one
/// back.
#[derive(Clone, Copy)]
struct Before {
    stamp: InodeStamp,
    replacements: u64,
}

/// One thread's use of the cache. It has a place until it is dropped, or until the process ends if it keeps
/// the door closed.
pub struct CacheSession {
    client: Arc<CacheClient>,
    caller: Caller<Shared<FarSlots>>,
    replacements: &'static Replacements,
    /// While it is false, no page is found or admitted. Changes are announced all the same.
    is_enabled: &'static AtomicBool,
    /// By descriptor.
    seen: Vec<Option<Seen>>,
    page: Box<Page>,
}

/// What is remembered of a descriptor, for as long as it has the same stamp.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Seen {
    stamp: InodeStamp,
    known: KnownFile,
    /// Whether its pages are to be cached.
    is_cacheable: bool,
    /// [`Replacements`] of the descriptor when it was last found open for reading.
    readable_at: Option<u64>,
    /// How many blocks in order are read through it.
    pattern: Pattern,
}

/// The part of one page that a read asks for, and its offset in the range of the read.
#[derive(Clone, Copy)]
struct Wanted {
    /// Offsets in the page: the first byte, and the one after the last.
    first: usize,
    end: usize,
    /// Offset of the first byte in the range of the read.
    place: usize,
}

impl Wanted {
    /// The part of the page with the byte `at` of a file that begins at this byte.
    fn of(range: &Range<u64>, at: u64) -> Wanted {
        let first = (at % PAGE) as usize;
        let end = (range.end - at).saturating_add(first as u64).min(PAGE) as usize;
        Wanted { first, end, place: (at - range.start) as usize }
    }

    /// The wanted part of a piece at the offset `at` of the page, and its offset in the range.
    fn of_piece(self, at: usize, piece: &[u8]) -> Option<(usize, &[u8])> {
        let (first, end) = (self.first.max(at), self.end.min(at + piece.len()));
        (first < end).then(|| (self.place + first - self.first, &piece[first - at..end - at]))
    }

    /// How many of the wanted bytes exist if the page has only `bytes`.
    fn there(self, bytes: usize) -> usize {
        self.end.min(bytes).saturating_sub(self.first)
    }
}

/// What to copy to the program after the disk gave `bytes` bytes of a page. If bytes of another page were
/// copied before, perhaps of another file, the whole page: zeros overwrite what lies behind the end of the
/// file.
fn what_replaces(page: &mut [u8], bytes: usize, has_got_others: bool) -> &[u8] {
    if !has_got_others {
        return &page[..bytes];
    }
    page[bytes..].fill(0);
    page
}

/// Whether the program is to read the block itself, straight into its memory: its call wants no other block,
/// which would have to be counted and might be in the cache, nothing has been passed on, and the block is not
/// going to be admitted.
fn is_left_to_program(is_only: bool, is_chosen: bool, has_landed: bool) -> bool {
    is_only && !is_chosen && !has_landed
}

/// What a call is to do about the cache.
enum FileUse {
    /// Nothing: no other process uses this file by the cache.
    None,
    /// The file is known, or will be.
    File { seen: Seen, has_name: bool },
    /// It is not known which file it is.
    Unknown,
}

impl CacheSession {
    /// A session for this thread. While `is_enabled` is false, it finds and admits no page, and announces
    /// changes as always. `None`: there is no place, or the door cannot be used.
    pub fn new(
        client: &Arc<CacheClient>,
        replacements: &'static Replacements,
        is_enabled: &'static AtomicBool,
    ) -> Option<CacheSession> {
        if !client.door().shares_process_ids() {
            return None; // the keeper would take this process for a dead one
        }
        let caller = client.take_place()?;
        let page = Box::new(Page([0; PAGE_BYTES]));
        let (client, seen) = (client.clone(), Vec::new());
        Some(CacheSession { client, caller, replacements, is_enabled, seen, page })
    }

    /// From now on, its reads do not count as those of the database, neither in the status of the cache nor
    /// in what it advises.
    pub fn count_no_reads(&mut self) {
        self.caller.count_no_reads();
    }

    /// Whether pages of a file are found and admitted now.
    fn uses_pages_of(&self, seen: &Seen) -> bool {
        // Relaxed: the switch guards nothing. A call that began before it was turned may end as it began.
        seen.is_cacheable && self.is_enabled.load(Ordering::Relaxed)
    }

    /// Whether a descriptor meant this file all the time since then.
    fn is_unchanged(before: Before, replacements: &Replacements, fd: BorrowedFd<'_>) -> bool {
        matches!(stat_fd(fd), FdKind::File { stamp, .. } if stamp == before.stamp)
            && replacements.so_far(fd) == before.replacements
    }

    fn file_use(&mut self, fd: BorrowedFd<'_>) -> FileUse {
        let replacements = self.replacements.so_far(fd);
        let (stamp, names) = match stat_fd(fd) {
            FdKind::File { stamp, names } => (stamp, names),
            FdKind::NotCached => return FileUse::None,
            FdKind::Unknown => return FileUse::Unknown,
        };
        let number = fd.as_raw_fd() as usize;
        let remembered = self.seen.get(number).copied().flatten();
        if let Some(seen) = remembered.filter(|seen| seen.stamp == stamp) {
            return FileUse::File { seen, has_name: names > 0 };
        }
        let Some(id) = id_of(fd, stamp) else { return FileUse::Unknown };
        let is_cacheable = self.client.door().is_cacheable(fd);
        let (known, pattern) = (KnownFile::new(id), Pattern::default());
        let seen = Seen { stamp, known, is_cacheable, readable_at: None, pattern };
        if !Self::is_unchanged(Before { stamp, replacements }, self.replacements, fd) {
            return FileUse::Unknown; // the id may be that of another file
        }
        self.remember(fd, seen);
        FileUse::File { seen, has_name: names > 0 }
    }

    /// Remembers a file, unless it is so new that another one may get its stamp.
    fn remember(&mut self, fd: BorrowedFd<'_>, seen: Seen) {
        let number = fd.as_raw_fd() as usize;
        let is_known = self.seen.get(number).is_some_and(|known| *known == Some(seen));
        if !is_known && number < MAX_REMEMBERED && seen.stamp.is_unique() {
            let end = self.seen.len().max(number + 1);
            self.seen.resize(end, None);
            self.seen[number] = Some(seen);
        }
    }

    /// Reads a range of a file, block by block: from the cache, or else by `pread`, which gets room for a
    /// block and its position in bytes. `sink` gets pieces of the range, with their offsets in it. A piece
    /// may hold bytes of another page; a later piece then overwrites it. Returns how many bytes of the file
    /// there are: fewer than asked for at its end, or where `pread` failed. 0 as well if there is only one
    /// block, which is not in the cache and not to be admitted: the program then reads it straight into its
    /// own memory. `None`: the cache has nothing to do with this file.
    pub fn read(
        &mut self,
        fd: BorrowedFd<'_>,
        range: Range<u64>,
        mut pread: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
        mut sink: impl FnMut(usize, &[u8]),
    ) -> Option<u64> {
        let first = u32::try_from(range.start / PAGE).ok();
        // While the kernel says which file it is.
        if let (Some(Some(seen)), Some(block)) = (self.seen.get(fd.as_raw_fd() as usize), first) {
            self.caller.prefetch(&seen.known, block);
        }
        let replacements = self.replacements.so_far(fd);
        let FileUse::File { mut seen, has_name } = self.file_use(fd) else { return None };
        if !self.uses_pages_of(&seen) || (seen.readable_at != Some(replacements) && !may_read(fd)) {
            return None;
        }
        seen.readable_at = Some(replacements);
        if let Some(block) = first {
            self.caller.prefetch_checksum(&seen.known, block);
        }
        let before = Before { stamp: seen.stamp, replacements };
        let replacements = self.replacements;
        // Looked at again after the file was asked for, see `ask_for`.
        let exists = async || has_name && matches!(stat_fd(fd), FdKind::File { names: 1.., .. });
        let (page, caller) = (&mut self.page.0, &mut self.caller);
        let end = u32::try_from(range.end.div_ceil(PAGE)).unwrap_or(u32::MAX);
        let mut at = range.start;
        while at < range.end {
            let Ok(block) = u32::try_from(at / PAGE) else { break };
            if caller.gains_by_fetching() {
                let blocks = seen.pattern.blocks_to_fetch(block, end);
                if blocks.len() > 1 {
                    at_once(caller.fetch(&mut seen.known, blocks, end - block));
                }
            }
            // Set if the descriptor meant another file meanwhile. Such a page is not admitted, like a short
            // one.
            let mut of_unknown_file = None;
            let is_only = at == range.start && block.saturating_add(1) == end;
            let has_landed = Cell::new(false);
            let from_disk = async |to: &mut [u8], is_chosen: bool| {
                if is_left_to_program(is_only, is_chosen, has_landed.get()) {
                    return Ok(0);
                }
                let bytes = pread(to, u64::from(block) * PAGE)?;
                if Self::is_unchanged(before, replacements, fd) {
                    return Ok(bytes);
                }
                of_unknown_file = Some(bytes);
                Ok(0)
            };
            let wanted = Wanted::of(&range, at);
            let mut pass_on = |at: usize, piece: &[u8]| {
                if let Some((place, wanted)) = wanted.of_piece(at, piece) {
                    sink(place, wanted);
                    has_landed.set(true);
                }
            };
            let known = &mut seen.known;
            let read = at_once(caller.read_into(known, block, &mut pass_on, page, exists, from_disk));
            let from_disk = match read {
                Ok(Outcome::Hit(())) => None,
                Ok(Outcome::Disk(bytes)) => Some(of_unknown_file.unwrap_or(bytes)),
                Err(_) => Some(0),
            };
            if let Some(bytes) = from_disk {
                pass_on(0, what_replaces(page, bytes, has_landed.get()));
            }
            let there = wanted.there(from_disk.unwrap_or(PAGE_BYTES)) as u64;
            at += there;
            if there == 0 || !at.is_multiple_of(PAGE) {
                break; // the end of the file, or of the range, or an error
            }
        }
        self.remember(fd, seen);
        Some(at - range.start)
    }

    /// Writes bytes at this range of a file. If they are one whole block and there is a `fill`, that copies
    /// them, and `pwrite` gets the copy.
    ///
    /// # Errors
    /// Those of `pwrite`.
    pub fn write(
        &mut self,
        fd: BorrowedFd<'_>,
        range: Range<u64>,
        fill: Option<impl FnOnce(&mut [u8])>,
        pwrite: impl FnOnce(Option<&[u8]>) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let Some(blocks) = blocks_of(&range) else { return self.change(fd, || pwrite(None)) };
        let replacements = self.replacements.so_far(fd);
        match self.file_use(fd) {
            FileUse::None => pwrite(None),
            FileUse::Unknown => at_once(self.caller.change_unknown(async || pwrite(None))),
            FileUse::File { mut seen, .. } => {
                let before = Before { stamp: seen.stamp, replacements };
                let is_page = range.start.is_multiple_of(PAGE) && range.end - range.start == PAGE;
                let is_page = is_page && self.uses_pages_of(&seen);
                let page = fill.filter(|_| is_page && !appends(fd)).map(|fill| {
                    fill(&mut self.page.0);
                    &self.page.0[..]
                });
                let mut to_unknown_file = None;
                let pwrite = async || {
                    let written = pwrite(page);
                    if Self::is_unchanged(before, self.replacements, fd) {
                        return written;
                    }
                    to_unknown_file = Some(written);
                    Ok(0) // so that the page is not admitted
                };
                let written = at_once(self.caller.write(&mut seen.known, blocks, page, pwrite));
                self.remember(fd, seen);
                match to_unknown_file {
                    None => written,
                    Some(written) => {
                        self.change_unknown(|| ());
                        written
                    }
                }
            }
        }
    }

    /// Changes a file as a whole.
    ///
    /// # Errors
    /// Those of `change`.
    pub fn change<T>(&mut self, fd: BorrowedFd<'_>, change: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let replacements = self.replacements.so_far(fd);
        match self.file_use(fd) {
            FileUse::None => change(),
            FileUse::Unknown => at_once(self.caller.change_unknown(async || change())),
            FileUse::File { mut seen, .. } => {
                let before = Before { stamp: seen.stamp, replacements };
                let changed = at_once(self.caller.change(&mut seen.known, async || change()));
                self.remember(fd, seen);
                if !Self::is_unchanged(before, self.replacements, fd) {
                    self.change_unknown(|| ());
                }
                changed
            }
        }
    }

    /// Runs a change of which it is not known which files it changes, or finds out afterwards that there was
    /// one. The cache loses all pages.
    pub fn change_unknown<T>(&mut self, change: impl FnOnce() -> T) -> T {
        at_once(self.caller.change_unknown(async || change()))
    }

    /// Switches the cache off until this process has ended, if this file may be in it: the process will
    /// change the file in ways that it does not announce, such as by a mapping. Returns whether it did so.
    pub fn close_door_for(&mut self, fd: BorrowedFd<'_>) -> bool {
        let is_concerned = may_be_cached(self.client.door(), fd);
        if is_concerned {
            self.keep_door_closed();
        }
        is_concerned
    }

    /// Whether pages of an open file are to be cached, by what it is and where it lies. `None`: the kernel
    /// does not say which file it is.
    pub fn is_cacheable(&mut self, fd: BorrowedFd<'_>) -> Option<bool> {
        match self.file_use(fd) {
            FileUse::File { seen, .. } => Some(seen.is_cacheable),
            FileUse::None => Some(false),
            FileUse::Unknown => None,
        }
    }

    /// Pins a file, or unpins it. `false`: the cache does not know the file or does not cache it, or the door
    /// is closed, which ends all pins.
    pub fn set_pinned(&mut self, fd: BorrowedFd<'_>, is_pinned: bool) -> bool {
        match self.file_use(fd) {
            FileUse::File { mut seen, .. } => at_once(self.caller.set_pinned(&mut seen.known, is_pinned)),
            FileUse::None | FileUse::Unknown => false,
        }
    }

    /// Drops the pages of an open file from the cache. `false`: there are none, because the cache does not
    /// know the file or does not cache it, or the door is closed.
    pub fn drop_pages(&mut self, fd: BorrowedFd<'_>) -> bool {
        let is_known = match self.file_use(fd) {
            FileUse::File { mut seen, .. } => at_once(self.caller.knows(&mut seen.known)),
            FileUse::None | FileUse::Unknown => false,
        };
        let _unchanged = self.change(fd, || Ok(()));
        is_known
    }

    /// Switches the cache off until this process has ended.
    pub fn keep_door_closed(&mut self) {
        at_once(self.caller.keep_door_closed());
    }
}

impl Drop for CacheSession {
    fn drop(&mut self) {
        at_once(self.caller.free_place());
    }
}

/// Whether pages of an open file may be in the cache behind a door.
pub fn may_be_cached(door: &DoorFile, fd: BorrowedFd<'_>) -> bool {
    match stat_fd(fd) {
        FdKind::File { names, .. } => names > 1 || door.is_cacheable(fd),
        FdKind::NotCached => false,
        FdKind::Unknown => true,
    }
}

/// Whether the descriptor is open for reading.
fn may_read(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| {
        let access = flags & (OFlags::RWMODE | OFlags::PATH);
        access == OFlags::RDONLY || access == OFlags::RDWR
    })
}

/// Whether writes go to the end of the file, wherever they are to go.
fn appends(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::APPEND))
}

/// The first block of a range of bytes, and how many there are. `None`: too many, or beyond what has numbers.
fn blocks_of(range: &Range<u64>) -> Option<(u32, u32)> {
    let first = range.start / PAGE;
    let blocks = range.end.div_ceil(PAGE).checked_sub(first)?;
    let blocks = u32::try_from(blocks).ok().filter(|blocks| *blocks <= MAX_BLOCKS)?;
    let first = u32::try_from(first).ok().filter(|first| first.checked_add(blocks).is_some())?;
    Some((first, blocks))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_replaced_descriptor_is_told_from_others() {
        let (input, counts) = (std::io::stdin(), Replacements::new());
        let so_far = || counts.so_far(input.as_fd());
        // The library's own descriptors begin at half of the limit, which is a power of two as a rule.
        [1, 512, 1024, 1 << 18, 1 << 19, -1].into_iter().for_each(|other| counts.note(other));
        assert_eq!(so_far(), 0);
        counts.note(0);
        assert_eq!(so_far(), 1);
        counts.note_all();
        assert_eq!(so_far(), 2);
    }

    #[test]
    fn pieces_of_pages_land_where_the_read_wants_them() {
        let piece: Vec<u8> = (0..100).collect();
        let range = PAGE - 50..2 * PAGE + 30;
        let wanted = Wanted::of(&range, range.start);
        assert_eq!(wanted.of_piece(0, &piece), None);
        assert_eq!(wanted.of_piece(PAGE_BYTES - 100, &piece), Some((0, &piece[50..])));
        assert_eq!((wanted.there(PAGE_BYTES), wanted.there(PAGE_BYTES - 50), wanted.there(0)), (50, 0, 0));
        let whole = Wanted::of(&range, PAGE);
        assert_eq!(whole.of_piece(200, &piece), Some((250, &piece[..])));
        assert_eq!((whole.there(PAGE_BYTES), whole.there(10)), (PAGE_BYTES, 10));
        let last = Wanted::of(&range, 2 * PAGE);
        assert_eq!(last.of_piece(0, &piece), Some((PAGE_BYTES + 50, &piece[..30])));
        assert_eq!(last.of_piece(30, &piece), None);
        let within = Wanted::of(&(10..20), 10);
        assert_eq!(within.of_piece(5, &piece), Some((0, &piece[5..15])));
        assert_eq!((within.there(15), within.there(PAGE_BYTES)), (5, 10));
    }

    #[test]
    fn a_block_is_left_to_the_program_only_if_nothing_was_passed_on() {
        assert!(is_left_to_program(true, false, false));
        let others = [(false, false, false), (true, true, false), (true, false, true)];
        assert!(others.iter().all(|&(only, chosen, landed)| !is_left_to_program(only, chosen, landed)));
    }

    #[test]
    fn bytes_of_another_page_are_replaced_even_behind_the_end_of_the_file() {
        let mut page = [7; 8];
        assert_eq!(what_replaces(&mut page, 3, false), [7; 3]);
        assert_eq!(what_replaces(&mut page, 3, true), [7, 7, 7, 0, 0, 0, 0, 0]);
        assert_eq!(what_replaces(&mut page, 0, true), [0; 8]);
    }

    #[test]
    fn ranges_are_rounded_to_blocks() {
        assert_eq!(blocks_of(&(0..PAGE)), Some((0, 1)));
        assert_eq!(blocks_of(&(PAGE - 1..PAGE + 1)), Some((0, 2)));
        assert_eq!(blocks_of(&(3 * PAGE..3 * PAGE)), Some((3, 0)));
        assert_eq!(blocks_of(&(0..PAGE * 64)), Some((0, 64)));
        assert_eq!(blocks_of(&(1..PAGE * 64 + 1)), None);
        assert_eq!(blocks_of(&(u64::from(u32::MAX) * PAGE..u64::from(u32::MAX) * PAGE + 1)), None);
    }
}
