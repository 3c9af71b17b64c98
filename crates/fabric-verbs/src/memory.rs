//! Protection domains, registered memory and memory windows.
//!
//! Each value holds the object that it was made from: a domain outlives its registrations, and a registration
//! outlives its windows.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::process::{Resource, getrlimit};

use crate::device::Device;
use crate::error::VerbsError;
use crate::ffi;
use crate::library::Library;

/// A protection domain: queue pairs reach memory of their own domain only.
pub(crate) struct Domain {
    library: &'static Library,
    raw: NonNull<ffi::Pd>,
}

// SAFETY: a handle of libibverbs, which may be called from any thread.
unsafe impl Send for Domain {}
// SAFETY: libibverbs locks what its calls on one handle share.
unsafe impl Sync for Domain {}

impl Domain {
    pub(crate) fn new(library: &'static Library, device: Device) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the device is open.
        let raw = NonNull::new(unsafe { (library.verbs.ibv_alloc_pd)(device.raw()) });
        let raw = raw.ok_or_else(|| VerbsError::last("making a protection domain"))?;
        Ok(Arc::new(Domain { library, raw }))
    }

    pub(crate) fn raw(&self) -> *mut ffi::Pd {
        self.raw.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: everything made in the domain holds a reference to it, so nothing is left in it.
        let failed = unsafe { (self.library.verbs.ibv_dealloc_pd)(self.raw()) };
        debug_assert_eq!(failed, 0, "a protection domain is still in use");
    }
}

/// Memory that the card may reach.
pub(crate) struct Registration {
    domain: Arc<Domain>,
    raw: NonNull<ffi::Mr>,
}

// SAFETY: a handle of libibverbs, which may be called from any thread; `domain` is counted atomically.
unsafe impl Send for Registration {}
// SAFETY: a shared reference gives access only to fields that never change after the object was made.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers `bytes` bytes from `start`. The kernel pins the pages, so that the card never reaches other
    /// pages. `access` says which local and remote operations may reach them through the card.
    ///
    /// # Safety
    /// The range is mapped. Until this value is dropped, no code relies on a Rust reference into the range
    /// while the card writes there. The card writes only for work requests posted here and for peers that
    /// know a remote key.
    pub(crate) unsafe fn new(
        domain: &Arc<Domain>,
        start: *mut u8,
        bytes: usize,
        access: i32,
    ) -> Result<Self, VerbsError> {
        // SAFETY: mapped by the caller's promise.
        let raw = unsafe { (domain.library.verbs.ibv_reg_mr)(domain.raw(), start.cast(), bytes, access) };
        let raw = NonNull::new(raw).ok_or_else(|| registration_error(bytes))?;
        Ok(Registration { domain: domain.clone(), raw })
    }

    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: alive until drop; the field never changes.
        unsafe { self.raw.as_ref() }.lkey
    }

    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: alive until drop; the field never changes.
        unsafe { self.raw.as_ref() }.rkey
    }

    pub(crate) fn raw(&self) -> *mut ffi::Mr {
        self.raw.as_ptr()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: made by `ibv_reg_mr` and freed once; windows hold a reference to it, so none is left.
        let failed = unsafe { (self.domain.library.verbs.ibv_dereg_mr)(self.raw()) };
        if failed != 0 {
            let error = io::Error::from_raw_os_error(failed);
            tracing::error!(%error, "memory stays registered with the network card");
        }
    }
}

fn registration_error(bytes: usize) -> VerbsError {
    let source = io::Error::last_os_error();
    let limit = getrlimit(Resource::Memlock).current;
    match (source.raw_os_error(), limit) {
        (Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM), Some(limit)) => {
            VerbsError::Memlock { bytes, limit_kib: limit / 1024 }
        }
        _ => VerbsError::Call { what: "registering memory with the network card", source },
    }
}

/// A memory window of type 2: part of a registration, open to one queue pair once it is bound to it.
pub(crate) struct Window {
    registration: Arc<Registration>,
    raw: NonNull<ffi::Mw>,
}

// SAFETY: a handle of libibverbs, which may be called from any thread; `registration` is counted atomically.
unsafe impl Send for Window {}
// SAFETY: a shared reference gives access only to fields that never change after the object was made.
unsafe impl Sync for Window {}

impl Window {
    pub(crate) fn new(registration: Arc<Registration>, device: Device) -> Result<Self, VerbsError> {
        // SAFETY: the device is open; drivers without windows leave the pointer null.
        let alloc = unsafe { (*device.raw()).ops.alloc_mw };
        let what = "making a memory window";
        let alloc = alloc.ok_or(VerbsError::Call { what, source: io::ErrorKind::Unsupported.into() })?;
        // SAFETY: the domain belongs to the device.
        let raw = NonNull::new(unsafe { alloc(registration.domain.raw(), ffi::MW_TYPE_2) });
        Ok(Window { raw: raw.ok_or_else(|| VerbsError::last(what))?, registration })
    }

    pub(crate) fn raw(&self) -> *mut ffi::Mw {
        self.raw.as_ptr()
    }

    pub(crate) fn registration(&self) -> &Registration {
        &self.registration
    }

    /// The key that the window gets when it is bound: the device chooses the upper 24 bits, and we count up
    /// the lowest byte.
    pub(crate) fn next_key(&self) -> u32 {
        // SAFETY: alive until drop; only the user of a window of type 2 changes the field, and this code does
        // not.
        let key = unsafe { self.raw.as_ref() }.rkey;
        key & !0xFF | (key.wrapping_add(1) & 0xFF)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: alive until here; made by `alloc_mw` of the same driver, and freed once.
        let failed = unsafe {
            let dealloc = (*(*self.raw()).context).ops.dealloc_mw;
            dealloc.map_or(libc::EOPNOTSUPP, |dealloc| dealloc(self.raw()))
        };
        if failed != 0 {
            let error = io::Error::from_raw_os_error(failed);
            tracing::error!(%error, "a memory window stays open until its queue pair is gone");
        }
    }
}

/// Our own memory that the card may read and write for work requests posted here: messages, headers, and the
/// words before atomics.
///
/// Accessed only through raw pointers and copies, since the card writes it without the compiler's knowledge.
pub(crate) struct Block {
    // Fields drop in this order: the registration must end before `memory` is freed.
    registration: Registration,
    memory: Memory,
}

struct Memory {
    start: NonNull<u8>,
    layout: std::alloc::Layout,
}

// SAFETY: owned memory.
unsafe impl Send for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nothing refers to it any more.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Alignment and granularity of blocks: a page, so that no other memory is pinned with them.
const BLOCK_ALIGN: usize = 4096;

impl Block {
    pub(crate) fn new(domain: &Arc<Domain>, bytes: usize) -> Result<Self, VerbsError> {
        let bytes = bytes.next_multiple_of(BLOCK_ALIGN);
        let layout = std::alloc::Layout::from_size_align(bytes, BLOCK_ALIGN).expect("a block is small");
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) });
        let Some(start) = start else { std::alloc::handle_alloc_error(layout) };
        let memory = Memory { start, layout };
        // SAFETY: allocated above and freed after the registration; no references are made into it.
        let registration =
            unsafe { Registration::new(domain, start.as_ptr(), bytes, ffi::ACCESS_LOCAL_WRITE)? };
        Ok(Block { registration, memory })
    }

    /// A piece of the block for the card.
    pub(crate) fn piece(&self, at: usize, bytes: usize) -> ffi::Sge {
        assert!(at + bytes <= self.memory.layout.size(), "a piece within its block");
        ffi::Sge {
            addr: self.memory.start.as_ptr() as u64 + at as u64,
            length: bytes as u32,
            lkey: self.registration.local_key(),
        }
    }

    /// Copies out bytes that the card has written. It must not write them again until another work request
    /// names them.
    pub(crate) fn read(&self, at: usize, to: &mut [u8]) {
        let from = self.piece(at, to.len()).addr as *const u8;
        // SAFETY: in bounds by `piece`; `to` is an exclusive reference, and no reference points into the
        // block, so they do not overlap; the block lives as long as `self`.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
    }

    /// Copies in bytes that the card is to send.
    pub(crate) fn write(&mut self, at: usize, from: &[u8]) {
        let to = self.piece(at, from.len()).addr as *mut u8;
        // SAFETY: in bounds by `piece`; nothing else writes here: `self` is borrowed mutably, and callers
        // have no work request posted that lets the card write to the place.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }
}
