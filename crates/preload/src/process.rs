//! Which process does this memory belong to? A page that the kernel clears in the child of a fork answers
//! that without a system call.
//!
//! The kernel clears the page in every fork that copies memory, including those that run no handlers
//! (`_Fork`, `clone`). A `vfork` child shares its parent's memory and finds the page as the parent left it;
//! only its process id differs.

use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

use crate::sys;

const FRESH: u32 = 0;
const REBUILDING: u32 = 1;
const READY: u32 = 2;

/// The contents of the page. All zeros are valid, and are what a child finds.
#[repr(C)]
struct Page {
    state: AtomicU32,
    /// 1 while a thread changes the table or the hosts.
    locked: AtomicU32,
    /// The process to which this memory belongs; 0 until it is known.
    owner: AtomicI32,
}

/// Bytes to map: one page. The kernel rounds up where pages are larger.
const PAGE_BYTES: usize = 4096;

/// The page of this process, once there is one.
pub struct Process {
    page: AtomicPtr<Page>,
}

/// The right to change the state of the process: a lock for which no thread waits.
pub struct Right<'a>(&'a Page);

impl Drop for Right<'_> {
    fn drop(&mut self) {
        // Pairs with the exchange in `right`.
        self.0.locked.store(0, Ordering::Release);
    }
}

impl Process {
    /// A process without a page: nothing was ever accelerated.
    pub const fn new() -> Self {
        Process { page: AtomicPtr::new(std::ptr::null_mut()) }
    }

    fn page(&self) -> Option<&Page> {
        // SAFETY: null or a page from `start`, which is never unmapped once it is stored here; all its fields
        // are atomics. Acquire pairs with the exchange in `start`.
        unsafe { self.page.load(Ordering::Acquire).as_ref() }
    }

    /// Makes the page, on the first contact with a mount or the page cache. False if the kernel does not
    /// support such pages: then nothing may be accelerated.
    pub fn start(&self) -> bool {
        if self.page().is_some() {
            return true;
        }
        let Some(page) = map_page() else { return false };
        // SAFETY: freshly mapped, zero, aligned, and large enough; zero is a valid `Page`.
        let fresh = unsafe { &*page };
        fresh.owner.store(sys::process_id(), Ordering::Relaxed);
        fresh.state.store(READY, Ordering::Relaxed);
        // Release publishes the two stores; pairs with `page`.
        let ours =
            self.page.compare_exchange(std::ptr::null_mut(), page, Ordering::Release, Ordering::Relaxed);
        match ours {
            // SAFETY: the handler is a function of this library, which is never unloaded.
            Ok(_) => unsafe { libc::pthread_atfork(None, None, Some(note_child)) == 0 },
            Err(_) => {
                // SAFETY: this thread has mapped the page, and no other thread has seen it.
                unsafe { libc::syscall(libc::SYS_munmap, page, PAGE_BYTES) };
                true
            }
        }
    }

    /// Whether this process ever had contact with a mount or the page cache.
    pub fn is_started(&self) -> bool {
        self.page().is_some()
    }

    /// Whether the remembered state belongs to this process. In a child, the first thread to ask rebuilds it;
    /// threads that ask meanwhile get false.
    pub fn is_ready(&self, rebuild: impl FnOnce()) -> bool {
        let Some(page) = self.page() else { return false };
        // Acquire pairs with the store of READY below, and shows what was rebuilt.
        match page.state.load(Ordering::Acquire) {
            READY => true,
            REBUILDING => false,
            _ => {
                let first = page
                    .state
                    .compare_exchange(FRESH, REBUILDING, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok();
                if first {
                    rebuild();
                    let unknown = page.owner.load(Ordering::Relaxed) == 0;
                    if unknown {
                        page.owner.store(sys::process_id(), Ordering::Relaxed);
                    }
                    page.state.store(READY, Ordering::Release);
                }
                first
            }
        }
    }

    /// Whether the caller is the process itself, and not its `vfork` child. It takes one system call.
    pub fn is_owner(&self) -> bool {
        self.page().is_none_or(|page| page.owner.load(Ordering::Relaxed) == sys::process_id())
    }

    /// Takes the right to change table and hosts, unless it is taken.
    pub fn right(&self) -> Option<Right<'_>> {
        let page = self.page()?;
        // Acquire pairs with the drop of the last holder's right.
        let free = page.locked.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
        free.then_some(Right(page))
    }

    /// Called in the child of a fork: records that the memory belongs to the child from now on. It makes a
    /// single store, because a fork handler may do little.
    pub fn note_owner(&self) {
        if let Some(page) = self.page() {
            page.owner.store(sys::process_id(), Ordering::Relaxed);
        }
    }
}

extern "C" fn note_child() {
    crate::hooks::engine().process.note_owner();
}

fn map_page() -> Option<*mut Page> {
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let anywhere = std::ptr::null::<u8>();
    // SAFETY: makes a new mapping at an address of the kernel's choice; no existing memory is touched.
    let page = unsafe { libc::syscall(libc::SYS_mmap, anywhere, PAGE_BYTES, access, kind, -1, 0) };
    if page == -1 {
        return None;
    }
    // SAFETY: the whole of the mapping that was just made, which only this thread knows.
    let marked = unsafe { libc::syscall(libc::SYS_madvise, page, PAGE_BYTES, libc::MADV_WIPEONFORK) == 0 };
    if !marked {
        // SAFETY: this thread has just made the mapping, and no other thread has seen it.
        unsafe { libc::syscall(libc::SYS_munmap, page, PAGE_BYTES) };
        return None;
    }
    Some(std::ptr::with_exposed_provenance_mut::<Page>(page as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_right_has_at_most_one_holder() {
        let process = Process::new();
        assert!(process.right().is_none());
        assert!(process.start() && process.is_ready(|| panic!("nothing was forked")));
        let right = process.right();
        assert!(right.is_some() && process.right().is_none());
        drop(right);
        assert!(process.right().is_some());
    }

    #[test]
    fn a_forked_child_rebuilds_once_and_is_then_the_owner() {
        let process = Process::new();
        assert!(process.start() && process.is_owner());
        let held = process.right();
        // SAFETY: the child only uses this value, its stack and system calls, and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut rebuilt = 0;
            let ready = process.is_ready(|| rebuilt += 1) && process.is_ready(|| rebuilt += 1);
            let fine = ready && rebuilt == 1 && process.is_owner() && process.right().is_some();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!fine)) };
        }
        drop(held);
        let mut status = -1;
        // SAFETY: waits for the child made above; `status` is alive.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    }
}
