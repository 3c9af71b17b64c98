//! A file, and the blocking edge of its operations.

use std::ops::{Deref, Range};
use std::sync::Arc;

use farpool_fabric::ArenaBuf;
use farpool_pool::{EXTENT_BYTES, Extent, Session, SessionGuard};
use farpool_wire::{BLOCK_BYTES, MAX_TRANSFER_BYTES};
use parking_lot::RwLock;

use crate::error::FileError;
use crate::map::Map;
use crate::split::{Piece, pieces};
use crate::store::StoreShared;

/// Largest file: as much as the table of block words describes.
pub const MAX_FILE_BYTES: u64 = 4 << 40;

/// A file in far memory. Clones are the same file.
#[derive(Clone)]
pub struct FarFile {
    pub(crate) inner: Arc<FileInner>,
}

pub(crate) struct FileInner {
    pub(crate) store: Arc<StoreShared>,
    /// Where the file's striping starts.
    start: u64,
    pub(crate) map: RwLock<Map>,
}

/// Bytes that were read. They lie in the session's arena: drop them before the session is used again by this
/// thread, which would wait for itself.
pub struct FileBytes<'a> {
    // Dropped in this order: the buffer goes back to the arena while the session is still ours.
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
    pub(crate) fn new(store: Arc<StoreShared>, start: u64) -> Self {
        let inner = Arc::new(FileInner { store, start, map: RwLock::default() });
        inner.store.register(&inner);
        FarFile { inner }
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.inner.map.read().size
    }

    /// Far memory the file takes.
    pub fn allocated_bytes(&self) -> u64 {
        self.inner.map.read().allocated_bytes()
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
        // SAFETY: the buffer is kept beside the guard and dropped before it; the future ends in `block_on`.
        let core = unsafe { guard.core() };
        let (buffer, range) = guard.block_on(self.inner.read(core, offset, length))?;
        Ok(FileBytes { buffer, range, _session: guard })
    }

    /// Writes all of `data` at `offset`, making the file longer if need be.
    pub fn write(&self, session: &Session, offset: u64, data: &[u8]) -> Result<(), FileError> {
        if data.len() > MAX_TRANSFER_BYTES {
            return Err(FileError::TooLong);
        }
        let end = end_of(offset, data.len() as u64)?;
        let guard = session.lock();
        // SAFETY: all buffers and futures end in `block_on`.
        let core = unsafe { guard.core() };
        let written = guard.block_on(self.inner.write(core, offset, data));
        drop(guard);
        if let Err(error) = written {
            let size = self.size();
            if end > size {
                // What was stored behind the end must not show when the file grows; failing that, it is lost.
                let _ = self.punch(session, size, end - size);
            }
            return Err(error);
        }
        let mut map = self.inner.map.write();
        map.size = map.size.max(end);
        Ok(())
    }

    /// Cuts the file off at `size`, giving extents behind it back, or makes it longer by a hole.
    pub fn set_size(&self, session: &Session, size: u64) -> Result<(), FileError> {
        end_of(size, 0)?;
        let old = {
            let mut map = self.inner.map.write();
            std::mem::replace(&mut map.size, size)
        };
        // Also what was reserved behind the end goes.
        let end = old.div_ceil(EXTENT_BYTES).max(self.inner.end_stripe()) * EXTENT_BYTES;
        if size < end { self.punch(session, size, end - size) } else { Ok(()) }
    }

    /// Takes extents for a range, so that writing there cannot fail for want of space. The size stays.
    pub fn reserve(&self, session: &Session, offset: u64, length: u64) -> Result<(), FileError> {
        end_of(offset, length)?;
        let guard = session.lock();
        let mut fresh = Vec::new();
        for piece in pieces(offset, length) {
            match guard.block_on(self.inner.ensure_extent(piece.stripe)) {
                Ok((_, false)) => {}
                Ok((_, true)) => fresh.push(piece.stripe),
                Err(error) => {
                    // Somebody may have written into them meanwhile.
                    let words = &self.inner.store.words;
                    let mut map = self.inner.map.write();
                    for stripe in fresh {
                        map.remove_idle(stripe, |extent| words.are_empty(extent));
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Makes a range read as zeros, giving back the extents that lie in it.
    pub fn punch(&self, session: &Session, offset: u64, length: u64) -> Result<(), FileError> {
        end_of(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        let stripes = {
            let mut map = self.inner.map.write();
            map.unlose(offset, length);
            map.stripes(offset / EXTENT_BYTES, (offset + length).div_ceil(EXTENT_BYTES))
        };
        let of_range = |stripe: u64| {
            let base = stripe * EXTENT_BYTES;
            let start = offset.max(base);
            pieces(start, (offset + length).min(base + EXTENT_BYTES) - start)
        };
        // Whole extents first: they need no far memory, so they go whatever becomes of the ends.
        let (whole, ends): (Vec<_>, Vec<_>) =
            stripes.into_iter().flat_map(of_range).partition(Piece::is_whole_extent);
        {
            let mut map = self.inner.map.write();
            whole.iter().for_each(|piece| map.remove(piece.stripe));
        }
        let guard = session.lock();
        for piece in ends {
            // SAFETY: all buffers and futures end in `block_on`.
            let core = unsafe { guard.core() };
            guard.block_on(self.inner.zero(core, piece));
        }
        Ok(())
    }

    /// Notes that contents of a range, already promised to somebody, could not be stored: reading it fails until
    /// it is written anew, block by block. The file is made to reach to the range's end. For ranges of at most one
    /// transfer.
    pub fn mark_lost(&self, offset: u64, length: u64) {
        let mut map = self.inner.map.write();
        map.lose(offset, length);
        // Whoever promised the contents has told others how far the file reaches.
        map.size = map.size.max(offset.saturating_add(length).min(MAX_FILE_BYTES));
    }
}

impl FileInner {
    /// The extent of a stripe, taken now if there is none; says whether it is new.
    pub(crate) async fn ensure_extent(&self, stripe: u64) -> Result<(Arc<Extent>, bool), FileError> {
        if let Some(extent) = self.map.read().extent(stripe) {
            return Ok((extent, false));
        }
        let extent = self.take_extent(stripe).await?;
        Ok(self.map.write().put(stripe, extent))
    }

    /// A fresh extent for a stripe.
    pub(crate) async fn take_extent(&self, stripe: u64) -> Result<Extent, FileError> {
        self.store.take_extent(self.start.wrapping_add(stripe)).await
    }

    fn end_stripe(&self) -> u64 {
        self.map.read().stripes(0, u64::MAX).last().map_or(0, |stripe| stripe + 1)
    }
}

fn end_of(offset: u64, length: u64) -> Result<u64, FileError> {
    offset.checked_add(length).filter(|&end| end <= MAX_FILE_BYTES).ok_or(FileError::TooLarge)
}

const _: () = assert!(EXTENT_BYTES.is_multiple_of(BLOCK_BYTES as u64));
