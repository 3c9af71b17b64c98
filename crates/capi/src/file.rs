//! An open file, through which C reads and writes.

use std::sync::Arc;

use farpool_file::{FarFile, FileError};
use farpool_wire::MAX_TRANSFER_BYTES;
use rustix_futex_sync::{Condvar, Mutex};

use crate::error::Failure;
use crate::pool::Files;
use crate::workers::{Job, Queue};

/// The object behind a handle of type `farpool_file`.
pub struct OpenFile {
    file: FarFile,
    files: Arc<Files>,
    queue: Arc<Queue>,
    /// Number of asynchronous operations in progress.
    in_progress: Mutex<u64>,
    ended: Condvar,
}

/// Memory of the caller, for the duration of an operation.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: an address and a length. The caller of `new` has promised that only the operation uses the bytes,
// on any thread.
unsafe impl Send for Memory {}

impl Memory {
    /// # Safety
    /// Until the operation ends, `bytes` bytes at `start` are valid for writes (if the operation is a read)
    /// or for reads (if it is a write). Meanwhile no other code changes them or, if the operation is a read,
    /// reads them.
    pub(crate) unsafe fn new(start: *mut u8, bytes: usize) -> Result<Self, Failure> {
        match () {
            () if start.is_null() && bytes > 0 => Err(Failure::invalid("the buffer is a null pointer")),
            () if bytes > isize::MAX as usize => Err(Failure::invalid("the number of bytes is too large")),
            () => Ok(Memory { start, bytes }),
        }
    }
}

impl OpenFile {
    pub(crate) fn new(file: FarFile, files: Arc<Files>, queue: Arc<Queue>) -> Self {
        OpenFile { file, files, queue, in_progress: Mutex::new(0), ended: Condvar::new() }
    }

    pub(crate) fn size(&self) -> u64 {
        self.file.size()
    }

    pub(crate) fn resize(&self, size: u64) -> Result<(), FileError> {
        self.files.with_session(|session| self.file.set_size(session, size))
    }

    /// Reads as many bytes as there is room for, fewer at the end of the file; returns how many.
    pub(crate) fn read(&self, to: Memory, offset: u64) -> Result<i64, Failure> {
        self.files.with_session(|session| {
            let mut read = 0;
            while read < to.bytes {
                let wanted = (to.bytes - read).min(MAX_TRANSFER_BYTES);
                let at = offset.checked_add(read as u64).ok_or(FileError::TooLarge)?;
                let bytes = match self.file.read(session, at, wanted) {
                    Ok(bytes) => bytes,
                    Err(error) if read == 0 => return Err(error.into()),
                    Err(_) => break, // the next call returns the error
                };
                // SAFETY: `read + bytes.len()` is at most `to.bytes`; the memory is valid for writes, and
                // ours alone (`Memory::new`); the source lies in an arena of the library, so they do not
                // overlap.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.start.add(read), bytes.len()) };
                read += bytes.len();
                if bytes.len() < wanted {
                    break; // the end of the file
                }
            }
            Ok(read as i64)
        })
    }

    /// Writes all bytes; returns how many, fewer if an error came after some.
    pub(crate) fn write(&self, from: Memory, offset: u64) -> Result<i64, Failure> {
        self.files.with_session(|session| {
            let mut written = 0;
            while written < from.bytes {
                let bytes = (from.bytes - written).min(MAX_TRANSFER_BYTES);
                let at = offset.checked_add(written as u64).ok_or(FileError::TooLarge)?;
                // SAFETY: in bounds; valid for reads, and not changed until the operation ends
                // (`Memory::new`).
                let data = unsafe { std::slice::from_raw_parts(from.start.add(written), bytes) };
                match self.file.write(session, at, data) {
                    Ok(()) => written += bytes,
                    Err(error) if written == 0 => return Err(error.into()),
                    Err(_) => break, // the next call returns the error
                }
            }
            Ok(written as i64)
        })
    }

    /// Queues an asynchronous operation for a worker.
    pub(crate) fn start(self: Arc<Self>, job: impl FnOnce(Arc<Self>) -> Job) -> Result<(), Failure> {
        *self.in_progress.lock() += 1;
        let queue = self.queue.clone();
        queue.put(job(self.clone())).inspect_err(|_| self.operation_ended())
    }

    pub(crate) fn operation_ended(&self) {
        let mut in_progress = self.in_progress.lock();
        *in_progress -= 1;
        if *in_progress == 0 {
            self.ended.notify_all();
        }
    }

    /// Waits until no asynchronous operation is in progress.
    pub(crate) fn wait_for_its_operations(&self) {
        let mut in_progress = self.in_progress.lock();
        while *in_progress > 0 {
            in_progress = self.ended.wait(in_progress);
        }
    }
}
