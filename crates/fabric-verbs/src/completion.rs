//! A completion queue with its event channel: busy threads poll the queue, idle threads sleep on the channel.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};

use crate::device::Device;
use crate::error::VerbsError;
use crate::ffi;
use crate::library::Library;

/// One completion queue.
pub(crate) struct CompletionQueue {
    library: &'static Library,
    channel: NonNull<ffi::CompChannel>,
    raw: NonNull<ffi::Cq>,
}

// SAFETY: handles of libibverbs, which may be called from any thread.
unsafe impl Send for CompletionQueue {}

impl CompletionQueue {
    pub(crate) fn new(library: &'static Library, device: Device, entries: u32) -> Result<Self, VerbsError> {
        let verbs = &library.verbs;
        // SAFETY: the device is open.
        let channel = NonNull::new(unsafe { (verbs.ibv_create_comp_channel)(device.raw()) });
        let channel = channel.ok_or_else(|| VerbsError::last("making a completion channel"))?;
        // SAFETY: both belong to the device.
        let raw =
            unsafe { (verbs.ibv_create_cq)(device.raw(), entries as i32, null_mut(), channel.as_ptr(), 0) };
        let Some(raw) = NonNull::new(raw) else {
            let error = VerbsError::last("making a completion queue");
            // SAFETY: made above, and nothing uses it.
            unsafe { (verbs.ibv_destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let queue = CompletionQueue { library, channel, raw };
        rustix::io::ioctl_fionbio(queue.fd(), true).map_err(|error| VerbsError::Call {
            what: "setting up a completion channel",
            source: error.into(),
        })?;
        Ok(queue)
    }

    pub(crate) fn raw(&self) -> *mut ffi::Cq {
        self.raw.as_ptr()
    }

    /// Becomes readable when a completion arrives after [`CompletionQueue::arm`].
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel and its descriptor live until drop.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    /// Takes completions; returns how many.
    pub(crate) fn poll(&self, completions: &mut [ffi::Wc]) -> io::Result<usize> {
        // SAFETY: the queue and its context live until drop; the call writes at most `completions.len()`
        // entries.
        let polled = unsafe {
            let poll = (*self.raw.as_ref().context).ops.poll_cq.ok_or(io::ErrorKind::Unsupported)?;
            poll(self.raw(), completions.len() as i32, completions.as_mut_ptr())
        };
        if polled < 0 { Err(io::Error::other("the completion queue is broken")) } else { Ok(polled as usize) }
    }

    /// Asks for an event at the next completion. Poll once more afterwards: one may have arrived before.
    pub(crate) fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue and its context live until drop; the call changes nothing but the queue's own
        // state.
        let failed = unsafe {
            let notify = (*self.raw.as_ref().context).ops.req_notify_cq.ok_or(io::ErrorKind::Unsupported)?;
            notify(self.raw(), 0)
        };
        if failed == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(failed)) }
    }

    /// Takes an event, if there is one, so that the descriptor is quiet again.
    pub(crate) fn take_event(&self) -> bool {
        let (mut queue, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel lives until drop and is non-blocking.
        let failed =
            unsafe { (self.library.verbs.ibv_get_cq_event)(self.channel.as_ptr(), &mut queue, &mut context) };
        if failed == 0 {
            // SAFETY: the event just taken was one of this queue, the only one of its channel.
            unsafe { (self.library.verbs.ibv_ack_cq_events)(queue, 1) };
        }
        failed == 0
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: all events were acknowledged when taken; the queue pairs that use this queue are gone,
        // since their owners drop them first; and the channel is destroyed after its only queue.
        unsafe {
            let failed = (self.library.verbs.ibv_destroy_cq)(self.raw());
            debug_assert_eq!(failed, 0, "a completion queue is still in use");
            (self.library.verbs.ibv_destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}
