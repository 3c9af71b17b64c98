//! A file: its size, its extents, and what changes them. `async` over a session's core.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use farpool_pool::{EXTENT_BYTES, Extent, OVERFLOW_NODE, SessionCore, Where};
use farpool_wire::{BLOCK_BYTES, BlockWord};
use futures_util::lock;

use crate::error::FileError;
use crate::keeping::KeptFile;
use crate::map::{Loss, Map};
use crate::map_lock::MapLock;
use crate::redundancy::{END_OF_DATA, Redundancy, Rows};
use crate::rows::remove_bare_parity;
use crate::rules::{Rules, Shipped};
use crate::split::{Piece, pieces};
use crate::store::StoreCore;

/// Largest file: as many bytes as the table of block words can describe.
pub const MAX_FILE_BYTES: u64 = 4 << 40;

/// Locks of a file for taking extents. Neighbouring stripes, which one request may touch, have different
/// ones.
const TURNS: usize = 4;

fn turns() -> [lock::Mutex<()>; TURNS] {
    std::array::from_fn(|_| lock::Mutex::default())
}

/// A file in far memory, for `async` code. Any number of tasks may work on it, each over its own session.
///
/// An operation that is dropped halfway ends as one whose outcome is indeterminate.
pub struct FileCore<R: Rules = Shipped> {
    pub(crate) store: Arc<StoreCore<R>>,
    /// Where the file's striping starts.
    pub(crate) start: u64,
    pub(crate) map: MapLock,
    /// Direct clients (called *guests* in the code) may work on the file.
    pub(crate) is_open: AtomicBool,
    /// What [`turn_to_take`](Self::turn_to_take) waits for.
    turns: [lock::Mutex<()>; TURNS],
}

impl<R: Rules> FileCore<R> {
    pub(crate) fn new(store: Arc<StoreCore<R>>, start: u64) -> Self {
        FileCore { store, start, map: MapLock::default(), is_open: AtomicBool::new(false), turns: turns() }
    }

    /// A file that a successor finds again.
    pub(crate) fn kept(
        store: Arc<StoreCore<R>>,
        start: u64,
        place: KeptFile,
        redundancy: Redundancy,
    ) -> Self {
        let map = MapLock::new(Map::kept(redundancy, place));
        FileCore { store, start, map, is_open: AtomicBool::new(false), turns: turns() }
    }

    /// The number under which a successor finds the file; `None` if the file is not kept.
    pub fn kept_id(&self) -> Option<u64> {
        self.map.read().place().map(KeptFile::id)
    }

    /// Records for a successor when the file was written, in nanoseconds since 1970.
    pub fn keep_written_ns(&self, ns: u64) {
        if let Some(place) = self.map.read().place() {
            place.set_written_ns(ns);
        }
    }

    /// When the file was written, as recorded for a successor, in nanoseconds since 1970; zero: never.
    pub fn kept_written_ns(&self) -> u64 {
        self.map.read().place().map_or(0, KeptFile::written_ns)
    }

    /// How the file survives the loss of a node.
    pub fn redundancy(&self) -> Redundancy {
        self.map.read().redundancy()
    }

    /// Chooses how the file survives the loss of a node, while it is empty. Returns whether it was empty.
    pub fn set_redundancy(&self, redundancy: Redundancy) -> bool {
        let mut map = self.map.write();
        let is_empty = map.is_empty();
        if is_empty {
            map.set_redundancy(redundancy);
        }
        is_empty
    }

    pub(crate) fn rows(&self) -> Option<Rows> {
        self.redundancy().rows()
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.map.read().size()
    }

    /// Far memory that the file takes.
    pub fn allocated_bytes(&self) -> u64 {
        self.map.read().allocated_bytes()
    }

    /// The extent in which the bytes at `offset` lie now, if there is one.
    pub fn extent_at(&self, offset: u64) -> Option<Arc<Extent>> {
        self.map.read().extent(offset / EXTENT_BYTES)
    }

    /// Writes all of `data` at `offset`, and makes the file longer if need be. After an error, parts of the
    /// data may have been written, but the file is not longer than before.
    pub async fn write(&self, core: &SessionCore, offset: u64, data: &[u8]) -> Result<(), FileError> {
        let end = end_of(offset, data.len() as u64)?;
        let tail = {
            let map = self.map.read();
            map.check_end()?;
            let from = map.size().max(offset);
            (end > from).then_some(from)
        };
        let tail = tail.map(|from| (from, self.word_at(from)));
        if let Err(error) = self.write_blocks(core, offset, data).await {
            // Bytes stored beyond the end must not appear when the file grows. If they cannot be cleared,
            // they are marked as lost. Other operations may write beyond the end as well, so only the range
            // of this write is cleared. If a direct client does not finish its operation, nothing is cleared:
            // its bytes there may have just become part of the file.
            if let Ok(_alone) = self.without_guests(core).await {
                let mut from = R::failed_write_cleared_from(self.size(), offset);
                if tail == Some((from, self.word_at(from))) {
                    // Nothing was stored in the block of the end, and it has bytes before the end. It must
                    // not become lost if it cannot be written now.
                    from = from.next_multiple_of(BLOCK_BYTES as u64);
                }
                if end > from {
                    let _ = self.punch_alone(core, from, end - from).await;
                }
            }
            return Err(error);
        }
        let mut map = self.map.write();
        let size = R::size_after_write(map.size(), end);
        map.grow(size);
        Ok(())
    }

    /// The word of the block in which a byte lies; `None`: it lies in a hole.
    fn word_at(&self, offset: u64) -> Option<BlockWord> {
        let (extent, words) = (self.extent_at(offset)?, &self.store.words);
        Some(words.load(words.place(&extent, offset % EXTENT_BYTES / BLOCK_BYTES as u64)))
    }

    /// Truncates the file to `size` and frees the extents beyond, or makes the file longer by a hole.
    pub async fn set_size(&self, core: &SessionCore, size: u64) -> Result<(), FileError> {
        end_of(size, 0)?;
        if size > 0 {
            self.map.read().check_end()?;
        }
        let _alone = self.without_guests(core).await?;
        let old = {
            let mut map = self.map.write();
            let old = map.size();
            map.cut(size);
            old
        };
        let cleared = self.clear_up_to(core, size, old.div_ceil(EXTENT_BYTES)).await;
        self.map.write().cut_ends();
        cleared
    }

    /// Clears everything beyond `size`, where the file ends.
    pub(crate) async fn clear_behind(&self, core: &SessionCore, size: u64) -> Result<(), FileError> {
        self.clear_up_to(core, size, 0).await
    }

    async fn clear_up_to(&self, core: &SessionCore, size: u64, stripes: u64) -> Result<(), FileError> {
        // Extents that were reserved beyond the end go as well.
        let end = stripes.max(self.end_stripe()) * EXTENT_BYTES;
        let from = R::cleared_from(size);
        if from < end { self.punch_alone(core, from, end - from).await } else { Ok(()) }
    }

    /// Takes extents for a range, so that a write there cannot fail for lack of space. The size stays.
    pub async fn reserve(&self, offset: u64, length: u64) -> Result<(), FileError> {
        end_of(offset, length)?;
        let mut fresh = Vec::new();
        let rows = self.rows();
        for piece in pieces(offset, length) {
            let ensured = match rows {
                Some(rows) => self.ensure_member(rows, piece.stripe).await,
                None => self.ensure_extent(piece.stripe).await.map(|(_, is_fresh)| is_fresh),
            };
            match ensured {
                Ok(false) => {}
                Ok(true) => fresh.push(piece.stripe),
                Err(error) => {
                    // Others may have written to these extents meanwhile.
                    let words = &self.store.words;
                    let mut map = self.map.write();
                    for stripe in fresh {
                        map.remove_idle(stripe, |extent| words.are_empty(extent));
                        if let Some(rows) = rows {
                            remove_bare_parity(&mut map, rows, stripe);
                        }
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Makes a range read as zeros, and frees the extents that lie in it.
    pub async fn punch(&self, core: &SessionCore, offset: u64, length: u64) -> Result<(), FileError> {
        end_of(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        self.map.read().check_end()?;
        let _alone = self.without_guests(core).await?;
        self.punch_alone(core, offset, length).await
    }

    /// As [`punch`](Self::punch), while no direct client is at work.
    ///
    /// Forgets the loss of a block only once the block is empty, because this future may be dropped halfway.
    pub(crate) async fn punch_alone(
        &self,
        core: &SessionCore,
        offset: u64,
        length: u64,
    ) -> Result<(), FileError> {
        let stripes = {
            let mut map = self.map.write();
            map.unlose_holes(offset, length);
            let mut stripes = map.stripes(offset / EXTENT_BYTES, (offset + length).div_ceil(EXTENT_BYTES));
            // Lost members first: then no parity is their only copy any more (`row_write.rs`, W6).
            stripes.sort_by_key(|stripe| map.extent(*stripe).is_some_and(|it| !it.region().has_ended()));
            stripes
        };
        let rows = self.rows();
        let of_range = |stripe: u64| {
            let base = stripe * EXTENT_BYTES;
            let start = offset.max(base);
            pieces(start, (offset + length).min(base + EXTENT_BYTES) - start)
        };
        if let Some(rows) = rows {
            for piece in stripes.into_iter().flat_map(of_range) {
                self.zero_in_row(core, rows, piece).await;
            }
            return Ok(());
        }
        // Whole extents first: removing them needs no far memory, so it succeeds even if the ends fail.
        let (whole, ends): (Vec<_>, Vec<_>) =
            stripes.into_iter().flat_map(of_range).partition(Piece::is_whole_extent);
        {
            let mut map = self.map.write();
            for piece in whole {
                map.remove(piece.stripe);
                map.unlose(piece.file_offset(0), EXTENT_BYTES);
            }
        }
        for piece in ends {
            self.zero(core, piece).await;
        }
        Ok(())
    }

    /// Records that contents of a range could not be stored although the write was acknowledged, and why.
    /// Reading a block of the range fails until the whole block is written again. So does writing part of
    /// such a block, with `NoSpace` if that was the cause. The file grows at least to the end of the range.
    /// For ranges of at most one transfer.
    pub fn mark_lost(&self, offset: u64, length: u64, error: FileError) {
        let mut map = self.map.write();
        map.lose(offset, length, Loss::from_store(error));
        // The caller has acknowledged the write, so the file already reaches that far for its readers.
        map.grow(offset.saturating_add(length).min(MAX_FILE_BYTES));
    }

    /// The extent of a stripe, taken now if there is none, and whether it is new.
    pub(crate) async fn ensure_extent(&self, stripe: u64) -> Result<(Arc<Extent>, bool), FileError> {
        if let Some(extent) = self.map.read().extent(stripe) {
            return Ok((extent, false));
        }
        let _turn = self.turn_to_take(stripe).await;
        if let Some(extent) = self.map.read().extent(stripe) {
            return Ok((extent, false)); // another task has taken one meanwhile
        }
        let extent = self.take_extent(stripe, None).await?;
        let mut map = self.map.write();
        if map.redundancy().rows().is_some() {
            // The redundancy was chosen after the caller began under other rules. Nothing was written.
            return Err(FileError::Unavailable { offset: stripe * EXTENT_BYTES });
        }
        Ok(map.put(stripe, extent))
    }

    /// Waits for the turn to take an extent for this stripe, or for this row. Without turns, two tasks that
    /// write one stripe could each take an extent. One extent would be given back, but until then a third
    /// task could find the pool full.
    pub(crate) async fn turn_to_take(&self, stripe: u64) -> lock::MutexGuard<'_, ()> {
        self.turns[(stripe % TURNS as u64) as usize].lock().await
    }

    /// Whether another extent, or none, has taken this one's place.
    pub(crate) fn was_replaced(&self, stripe: u64, old: &Arc<Extent>) -> bool {
        self.map.read().extent(stripe).is_none_or(|now| !Arc::ptr_eq(&now, old))
    }

    /// A fresh extent for a stripe, in place of `old` if there is one.
    pub(crate) async fn take_extent(&self, stripe: u64, old: Option<&Extent>) -> Result<Extent, FileError> {
        if self.redundancy() == Redundancy::None {
            let first = self.map.read().next_extent(0).map(|(_, extent)| extent.region().clone());
            let node = first.filter(|region| !region.is_overflow()).map(|region| region.id.node);
            let within = node.map_or(Where::Anywhere, Where::On);
            match self.store.take_extent(self.start, &within).await {
                Err(FileError::NoSpace) => {} // the node is full or gone: another has to do
                taken => return taken,
            }
        }
        let within = if must_be_far(old) { Where::NotOn(vec![OVERFLOW_NODE]) } else { Where::Anywhere };
        self.store.take_extent(self.start.wrapping_add(stripe), &within).await
    }

    fn end_stripe(&self) -> u64 {
        self.map.read().stripes(0, END_OF_DATA).last().map_or(0, |stripe| stripe + 1)
    }
}

/// Whether the extent that replaces `old` must lie in far memory: `old` moves back from the overflow
/// directory. An extent of the directory that moves because of a late write may get another place there.
pub(crate) fn must_be_far(old: Option<&Extent>) -> bool {
    old.is_some_and(|old| old.region().is_overflow() && !old.is_in_doubt())
}

fn end_of(offset: u64, length: u64) -> Result<u64, FileError> {
    offset.checked_add(length).filter(|&end| end <= MAX_FILE_BYTES).ok_or(FileError::TooLarge)
}

const _: () = assert!(EXTENT_BYTES.is_multiple_of(BLOCK_BYTES as u64));
