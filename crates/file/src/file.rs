//! The blocking edge of a file.

use std::ops::{Deref, Range};
use std::sync::Arc;

use farpool_fabric::ArenaBuf;
use farpool_pool::{Pool, Session, SessionGuard};
use farpool_wire::MAX_TRANSFER_BYTES;

use crate::error::FileError;
use crate::file_core::FileCore;
use crate::redundancy::Redundancy;

/// A file in far memory. Clones are the same file.
#[derive(Clone)]
pub struct FarFile {
    pub(crate) inner: Arc<FileCore>,
    /// Keeps the leases while there is a handle of the file.
    _pool: Pool,
}

/// Bytes that were read. They lie in the session's arena and keep the session locked: drop them before this
/// thread uses the session again, or it waits for itself.
pub struct FileBytes<'a> {
    // Dropped in this order: the buffer returns to the arena while the guard still holds the session.
    buffer: Option<ArenaBuf>,
    range: Range<usize>,
    _session: SessionGuard<'a>,
}

impl Deref for FileBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.as_deref().map_or(&[], |bytes| &bytes[self.range.clone()])
    }
}

impl FarFile {
    pub(crate) fn new(inner: Arc<FileCore>, pool: Pool) -> Self {
        FarFile { inner, _pool: pool }
    }

    /// The file itself, for `async` code.
    pub fn core(&self) -> &Arc<FileCore> {
        &self.inner
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.inner.size()
    }

    /// How the file survives the loss of a node.
    pub fn redundancy(&self) -> Redundancy {
        self.inner.redundancy()
    }

    /// As [`FileCore::set_redundancy`].
    pub fn set_redundancy(&self, redundancy: Redundancy) -> bool {
        self.inner.set_redundancy(redundancy)
    }

    /// Far memory the file takes.
    pub fn allocated_bytes(&self) -> u64 {
        self.inner.allocated_bytes()
    }

    /// Reads up to `length` bytes at `offset`; fewer at the end of the file.
    pub fn read<'a>(
        &self,
        session: &'a Session,
        offset: u64,
        length: usize,
    ) -> Result<FileBytes<'a>, FileError> {
        if length > MAX_TRANSFER_BYTES {
            return Err(FileError::TooLong);
        }
        let guard = session.lock();
        // SAFETY: the buffer is kept beside the guard and dropped before it; the future ends in `block_on`,
        // before the guard.
        let core = unsafe { guard.core() };
        let (buffer, range) = guard.block_on(self.inner.read(core, offset, length))?;
        Ok(FileBytes { buffer, range, _session: guard })
    }

    /// As [`FileCore::write`].
    pub fn write(&self, session: &Session, offset: u64, data: &[u8]) -> Result<(), FileError> {
        if data.len() > MAX_TRANSFER_BYTES {
            return Err(FileError::TooLong);
        }
        let guard = session.lock();
        // SAFETY: all buffers and futures end in `block_on`, before the guard.
        let core = unsafe { guard.core() };
        guard.block_on(self.inner.write(core, offset, data))
    }

    /// As [`FileCore::set_size`].
    pub fn set_size(&self, session: &Session, size: u64) -> Result<(), FileError> {
        let guard = session.lock();
        // SAFETY: all buffers and futures end in `block_on`, before the guard.
        let core = unsafe { guard.core() };
        guard.block_on(self.inner.set_size(core, size))
    }

    /// As [`FileCore::reserve`].
    pub fn reserve(&self, session: &Session, offset: u64, length: u64) -> Result<(), FileError> {
        session.lock().block_on(self.inner.reserve(offset, length))
    }

    /// As [`FileCore::punch`].
    pub fn punch(&self, session: &Session, offset: u64, length: u64) -> Result<(), FileError> {
        let guard = session.lock();
        // SAFETY: all buffers and futures end in `block_on`, before the guard.
        let core = unsafe { guard.core() };
        guard.block_on(self.inner.punch(core, offset, length))
    }

    /// As [`FileCore::close_to_guests`].
    pub fn close_to_guests(&self, session: &Session) -> Result<(), FileError> {
        let guard = session.lock();
        // SAFETY: all buffers and futures end in `block_on`, before the guard.
        let core = unsafe { guard.core() };
        guard.block_on(self.inner.close_to_guests(core))
    }

    /// As [`FileCore::mark_lost`].
    pub fn mark_lost(&self, offset: u64, length: u64, error: FileError) {
        self.inner.mark_lost(offset, length, error);
    }
}
