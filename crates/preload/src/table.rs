//! What is remembered of descriptors. For each number: nothing, that it does not belong to a mount, or its
//! description.
//!
//! T1. The memory of a [`Description`] is never freed, only reused: a stale pointer to it can be read.
//! T2. It is reused only when neither a slot nor a [`Pin`] refers to it. A reference is taken only from a
//!     count above zero, and the slot is read again after that.
//! T3. Each description has a *guard*, a descriptor of the library's own for the same open file description.
//!     By it [`crate::identity`] tells whether a number still names the description. The guard is closed with
//!     the description.
//! T4. Nothing here waits, so a fork may happen at any point; the child counts references anew
//!     ([`Table::adopt`]).

use std::os::fd::RawFd;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::hosts::Opened;
use crate::process::Right;
use crate::sys::{self, FileId};

/// Descriptors from this number on are not accelerated. The table takes 512 KiB of address space; only used
/// parts take memory.
pub const DESCRIPTORS_MAX: usize = 1 << 16;

/// The number does not belong to a mount. No description lies at so low an address.
const PLAIN: *mut Description = without_provenance_mut(1);
/// The number is a guard.
const GUARD: *mut Description = without_provenance_mut(2);

const NO_GUARD: RawFd = -1;

/// What an open file description allows, and its state, as bits of one word.
pub mod flag {
    /// Opened for reading.
    pub const READABLE: u32 = 1;
    /// Opened for writing.
    pub const WRITABLE: u32 = 2;
    /// The program itself asked for `O_DIRECT`.
    pub const WANTS_DIRECT: u32 = 4;
    /// From now on nothing is accelerated.
    pub const ENDING: u32 = 8;
    /// Acceleration was given up, for good, and the mount knows.
    pub const GIVEN_UP: u32 = 16;
    /// The description was lost while the program may hold record locks, which closing the guard would drop.
    pub const KEPT: u32 = 32;
}

/// An open file description that is registered with its mount.
pub struct Description {
    next: *mut Description,
    taken: AtomicBool,
    references: AtomicU32,
    guard: AtomicI32,
    flags: AtomicU32,
    device: AtomicU64,
    inode: AtomicU64,
    write_limit: AtomicU64,
    /// Positional calls that the kernel has answered because the file was not opened with its host yet.
    calls: AtomicU32,
    opened: AtomicPtr<Opened>,
}

// All numbers below are stored before the first reference is (release, in `Table::claim`) and read by holders
// of a reference (acquire, in `Pin::take`). What changes later is a single word on its own. Hence `Relaxed`.
impl Description {
    /// The library's own descriptor for the description, unless that was lost.
    pub fn guard(&self) -> Option<RawFd> {
        let guard = self.guard.load(Ordering::Relaxed);
        (guard != NO_GUARD).then_some(guard)
    }

    pub fn id(&self) -> FileId {
        FileId { device: self.device.load(Ordering::Relaxed), inode: self.inode.load(Ordering::Relaxed) }
    }

    pub fn has(&self, flags: u32) -> bool {
        self.flags.load(Ordering::Relaxed) & flags == flags
    }

    pub fn set(&self, flags: u32) {
        self.flags.fetch_or(flags, Ordering::Relaxed);
    }

    pub fn clear(&self, flags: u32) {
        self.flags.fetch_and(!flags, Ordering::Relaxed);
    }

    /// The end up to which writes are served here. Writes beyond it go to the kernel, which refuses them.
    pub fn write_limit(&self) -> u64 {
        self.write_limit.load(Ordering::Relaxed)
    }

    /// Counts a positional call that the kernel answers; returns how many there were, this one included.
    pub fn count_call(&self) -> u32 {
        self.calls.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    /// The file as its host serves it, once it was opened. The child of a fork has to open it again.
    pub fn opened(&self) -> Option<&Opened> {
        // SAFETY: null or from `Box::into_raw`; freed only when the last reference is gone, and `self` is
        // borrowed from a holder of a reference. Acquire pairs with `set_opened`.
        unsafe { self.opened.load(Ordering::Acquire).as_ref() }
    }

    /// Stores the opened file. The right makes callers take turns, so none replaces another's file.
    pub fn set_opened(&self, opened: Opened, _right: &Right<'_>) {
        if self.opened().is_none() {
            // Release publishes the contents; pairs with `opened`.
            self.opened.store(Box::into_raw(Box::new(opened)), Ordering::Release);
        }
    }
}

/// The initial values of a new description.
pub struct Found {
    pub guard: RawFd,
    pub id: FileId,
    pub flags: u32,
    pub write_limit: u64,
}

/// A reference to a description.
pub struct Pin<'a> {
    table: &'a Table,
    description: &'a Description,
}

impl<'a> Pin<'a> {
    fn take(table: &'a Table, description: &'a Description) -> Option<Self> {
        let more = |count: u32| (count > 0).then(|| count + 1);
        // Acquire pairs with the release of the thread that stored the count: the contents are those of the
        // present use.
        let taken = description.references.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).is_ok();
        taken.then_some(Pin { table, description })
    }

    fn into_pointer(self) -> *mut Description {
        let pointer = std::ptr::from_ref(self.description).cast_mut();
        std::mem::forget(self);
        pointer
    }
}

impl Clone for Pin<'_> {
    fn clone(&self) -> Self {
        // Relaxed: the caller holds a reference, so it sees the contents already.
        self.description.references.fetch_add(1, Ordering::Relaxed);
        Pin { table: self.table, description: self.description }
    }
}

impl std::ops::Deref for Pin<'_> {
    type Target = Description;

    fn deref(&self) -> &Description {
        self.description
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.table.release(self.description);
    }
}

/// What is remembered of one number.
pub enum Slot<'a> {
    Unknown,
    /// It does not belong to a mount, or it is changing at the moment.
    Plain,
    Known(Pin<'a>),
}

/// The table of one process.
pub struct Table {
    slots: [AtomicPtr<Description>; DESCRIPTORS_MAX],
    /// All descriptions ever made, newest first.
    first: AtomicPtr<Description>,
    /// How many descriptions are in use.
    live: AtomicU32,
    /// All numbers from this one on are unknown.
    end: AtomicUsize,
}

impl Table {
    pub const fn new() -> Self {
        Table {
            slots: [const { AtomicPtr::new(null_mut()) }; DESCRIPTORS_MAX],
            first: AtomicPtr::new(null_mut()),
            live: AtomicU32::new(0),
            end: AtomicUsize::new(0),
        }
    }

    fn slot(&self, fd: RawFd) -> Option<&AtomicPtr<Description>> {
        usize::try_from(fd).ok().and_then(|number| self.slots.get(number))
    }

    /// Whether the number is known not to belong to a mount. For most programs this is the common case: one
    /// load, which orders nothing.
    pub fn is_plain(&self, fd: RawFd) -> bool {
        self.slot(fd).is_none_or(|slot| slot.load(Ordering::Relaxed) == PLAIN)
    }

    /// Whether the number is known to name a description or a guard.
    pub fn is_known(&self, fd: RawFd) -> bool {
        self.slot(fd).is_some_and(|slot| {
            let at = slot.load(Ordering::Relaxed);
            !at.is_null() && at != PLAIN
        })
    }

    fn is_description(at: *mut Description) -> bool {
        !at.is_null() && at != PLAIN && at != GUARD
    }

    fn borrow(&self, at: *mut Description) -> Option<&Description> {
        // SAFETY: a pointer that is neither null nor one of the two marks came from `claim`, and what it
        // points to is never freed (T1).
        Self::is_description(at).then(|| unsafe { &*at })
    }

    /// What is remembered of a number.
    pub fn look(&self, fd: RawFd) -> Slot<'_> {
        let Some(slot) = self.slot(fd) else { return Slot::Plain };
        // Acquire pairs with `put`.
        let at = slot.load(Ordering::Acquire);
        if at.is_null() {
            return Slot::Unknown;
        }
        let pin = self.borrow(at).and_then(|description| Pin::take(self, description));
        match pin {
            // T2: the description may have been reused in between; while the pin is held it cannot be.
            Some(pin) if slot.load(Ordering::Acquire) == at => Slot::Known(pin),
            _ => Slot::Plain,
        }
    }

    /// Remembers that an unknown number does not belong to a mount.
    pub fn set_plain(&self, fd: RawFd) {
        if let Some(slot) = self.slot(fd) {
            self.end.fetch_max(fd as usize + 1, Ordering::Relaxed);
            let _ = slot.compare_exchange(null_mut(), PLAIN, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Forgets the numbers of a range, whose descriptors were closed, that do not belong to a mount.
    pub fn forget_plain(&self, first: RawFd, last: RawFd) {
        for fd in self.numbers(first, last) {
            if let Some(slot) = self.slot(fd) {
                let _ = slot.compare_exchange(PLAIN, null_mut(), Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    /// The part of a range of numbers, both ends included, for which the table may remember anything.
    pub fn numbers(&self, first: RawFd, last: RawFd) -> std::ops::Range<RawFd> {
        let end = self.end.load(Ordering::Relaxed).min(DESCRIPTORS_MAX) as RawFd;
        first.max(0)..last.saturating_add(1).min(end)
    }

    /// Notes that the guards within a range were closed with it.
    pub fn lose_guards(&self, first: RawFd, last: RawFd) {
        for description in self.all() {
            let guard = description.guard.load(Ordering::Relaxed);
            if (first..=last).contains(&guard) {
                self.lose_guard(guard);
            }
        }
    }

    /// Remembers a number's description.
    pub fn put(&self, fd: RawFd, pin: Pin<'_>) {
        let Some(slot) = self.slot(fd) else { return };
        self.end.fetch_max(fd as usize + 1, Ordering::Relaxed);
        // Release pairs with `look`. Acquire: what the slot held is released here.
        let before = slot.swap(pin.into_pointer(), Ordering::AcqRel);
        self.gone(fd, before);
    }

    /// Forgets what is remembered of a number; returns the reference to its description if it had one.
    pub fn take(&self, fd: RawFd) -> Option<Pin<'_>> {
        let slot = self.slot(fd)?;
        let at = slot.load(Ordering::Acquire);
        if at.is_null() {
            return None;
        }
        if at == GUARD {
            self.lose_guard(fd);
            return None;
        }
        slot.compare_exchange(at, null_mut(), Ordering::AcqRel, Ordering::Relaxed).ok()?;
        // The slot's reference becomes the pin's.
        self.borrow(at).map(|description| Pin { table: self, description })
    }

    /// Forgets a number, but only if it still names this description.
    pub fn take_if(&self, fd: RawFd, pin: &Pin<'_>) {
        let Some(slot) = self.slot(fd) else { return };
        let at = std::ptr::from_ref(pin.description).cast_mut();
        if slot.compare_exchange(at, null_mut(), Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.release(pin.description);
        }
    }

    /// Releases what a slot held before.
    fn gone(&self, fd: RawFd, before: *mut Description) {
        if before == GUARD {
            self.forget_guard(fd);
        } else if let Some(description) = self.borrow(before) {
            self.release(description);
        }
    }

    /// Notes that the descriptor of that number is, or is about to be, the program's: it is no longer a
    /// guard.
    fn lose_guard(&self, fd: RawFd) {
        if let Some(slot) = self.slot(fd) {
            let _ = slot.compare_exchange(GUARD, null_mut(), Ordering::Relaxed, Ordering::Relaxed);
        }
        self.forget_guard(fd);
    }

    fn forget_guard(&self, fd: RawFd) {
        for description in self.all() {
            let _ = description.guard.compare_exchange(fd, NO_GUARD, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    fn all(&self) -> impl Iterator<Item = &Description> {
        // Acquire pairs with the release in `claim`.
        let mut at = self.first.load(Ordering::Acquire);
        std::iter::from_fn(move || {
            let description = self.borrow(at)?;
            at = description.next;
            Some(description)
        })
    }

    /// All descriptions that are in use.
    pub fn pins(&self) -> impl Iterator<Item = Pin<'_>> {
        self.all().filter_map(|description| Pin::take(self, description))
    }

    /// How many descriptions, and so guards, are in use.
    pub fn live(&self) -> u32 {
        self.live.load(Ordering::Relaxed)
    }

    /// Sets up a description, with its first reference.
    pub fn claim(&self, found: &Found, _right: &Right<'_>) -> Pin<'_> {
        let description = self.free().unwrap_or_else(|| self.grow());
        self.live.fetch_add(1, Ordering::Relaxed);
        description.guard.store(found.guard, Ordering::Relaxed);
        description.flags.store(found.flags, Ordering::Relaxed);
        description.device.store(found.id.device, Ordering::Relaxed);
        description.inode.store(found.id.inode, Ordering::Relaxed);
        description.write_limit.store(found.write_limit, Ordering::Relaxed);
        description.calls.store(0, Ordering::Relaxed);
        if let Some(slot) = self.slot(found.guard) {
            self.end.fetch_max(found.guard as usize + 1, Ordering::Relaxed);
            self.gone(found.guard, slot.swap(GUARD, Ordering::AcqRel));
            // Stored again: if the slot was marked as the guard of a description that had lost it, `gone` has
            // just taken the number from this description as well.
            description.guard.store(found.guard, Ordering::Relaxed);
        }
        // Release publishes all of the above; pairs with `Pin::take`.
        description.references.store(1, Ordering::Release);
        Pin { table: self, description }
    }

    fn free(&self) -> Option<&Description> {
        self.all().find(|description| {
            // Acquire pairs with the release of `taken` in `retire`.
            description.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })
    }

    /// Adds a description to the list. Only the holder of the right may call it.
    fn grow(&self) -> &Description {
        let description = Box::leak(Box::new(Description {
            next: self.first.load(Ordering::Acquire),
            taken: AtomicBool::new(true),
            references: AtomicU32::new(0),
            guard: AtomicI32::new(NO_GUARD),
            flags: AtomicU32::new(0),
            device: AtomicU64::new(0),
            inode: AtomicU64::new(0),
            write_limit: AtomicU64::new(0),
            calls: AtomicU32::new(0),
            opened: AtomicPtr::new(null_mut()),
        }));
        self.first.store(description, Ordering::Release);
        description
    }

    fn release(&self, description: &Description) {
        // Release: what was done under the reference comes first. Acquire: the last holder sees all of it.
        // The count never goes below zero: a signal handler that forked has left its parent's references
        // behind.
        let fewer = |count: u32| count.checked_sub(1);
        if description.references.fetch_update(Ordering::AcqRel, Ordering::Relaxed, fewer) == Ok(1) {
            self.retire(description);
        }
    }

    fn retire(&self, description: &Description) {
        let opened = description.opened.swap(null_mut(), Ordering::AcqRel);
        if !opened.is_null() {
            // SAFETY: from `Box::into_raw` in `set_opened`. The last reference to the description is gone, so
            // nothing borrows the file.
            drop(unsafe { Box::from_raw(opened) });
        }
        if !description.has(flag::KEPT) {
            self.end_guard(description);
            self.vacate(description);
        }
    }

    fn vacate(&self, description: &Description) {
        self.live.fetch_sub(1, Ordering::Relaxed);
        // Pairs with the acquire in `free`.
        description.taken.store(false, Ordering::Release);
    }

    /// Closes the guard, unless the program has closed it meanwhile and uses the number for another file.
    fn end_guard(&self, description: &Description) {
        let guard = description.guard.swap(NO_GUARD, Ordering::Relaxed);
        if guard == NO_GUARD {
            return;
        }
        if let Some(slot) = self.slot(guard) {
            let _ = slot.compare_exchange(GUARD, null_mut(), Ordering::Relaxed, Ordering::Relaxed);
        }
        let is_ours = sys::file_id(guard).is_none_or(|id| id == description.id());
        if is_ours && sys::ends_at_exec(guard) == Some(true) {
            sys::close(guard);
        }
    }

    /// Called when the program has just closed a descriptor of this file, which dropped the
    /// program's record locks on the file: guards that were kept for these locks are closed.
    pub fn let_go(&self, id: FileId) {
        for description in self.all() {
            let kept = description.has(flag::KEPT) && description.references.load(Ordering::Acquire) == 0;
            if kept && description.id() == id {
                description.clear(flag::KEPT);
                self.end_guard(description);
                self.vacate(description);
            }
        }
    }

    /// Called in the child of a fork: counts references anew, and forgets the parent's state without closing
    /// anything of the parent's.
    pub fn adopt(&self) {
        for description in self.all() {
            description.opened.store(null_mut(), Ordering::Relaxed);
            description.references.store(0, Ordering::Relaxed);
        }
        for slot in self.numbers(0, RawFd::MAX).filter_map(|fd| self.slot(fd)) {
            if let Some(description) = self.borrow(slot.load(Ordering::Acquire)) {
                description.references.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.live.store(0, Ordering::Relaxed);
        for description in self.all().filter(|description| description.taken.load(Ordering::Acquire)) {
            self.live.fetch_add(1, Ordering::Relaxed);
            if description.references.load(Ordering::Relaxed) == 0 {
                self.end_guard(description); // a child has no record locks to lose
                self.vacate(description);
            }
        }
    }
}

// SAFETY: the raw pointers lead to descriptions, which are never freed and consist of atomics and of a `next`
// that is set before they are shared; what `opened` points to is `Send + Sync`.
unsafe impl Send for Table {}
// SAFETY: the raw pointers lead to descriptions, which are never freed and consist of atomics and of a `next`
// that is set before they are shared; what `opened` points to is `Send + Sync`.
unsafe impl Sync for Table {}
