//! A file's size, extents and losses.

use std::collections::BTreeMap;
use std::sync::Arc;

use farpool_pool::{EXTENT_BYTES, Extent};
use farpool_wire::BLOCK_BYTES;

use crate::blocks::BLOCKS_PER_EXTENT;
use crate::error::FileError;
use crate::file_core::MAX_FILE_BYTES;
use crate::guest::Shared;
use crate::keeping::KeptFile;
use crate::redundancy::{END_OF_DATA, Redundancy, is_parity};
use crate::split::Piece;

/// Why the contents of a block are lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Loss {
    /// They were lost with a node or a lease, or it is indeterminate whether they were stored.
    Gone,
    /// The pool had no room for them.
    NoSpace,
}

impl Loss {
    /// The loss that follows from a failed store.
    pub(crate) fn from_store(error: FileError) -> Self {
        match error {
            FileError::NoSpace | FileError::TooFewNodes { .. } => Loss::NoSpace,
            _ => Loss::Gone,
        }
    }

    /// The error of a write that needs the lost contents, because it covers only part of the block.
    pub(crate) fn to_writer(self, offset: u64) -> FileError {
        match self {
            Loss::Gone => FileError::Lost { offset },
            Loss::NoSpace => FileError::NoSpace,
        }
    }
}

/// The metadata of a file on its owner's host.
#[derive(Default)]
pub(crate) struct Map {
    /// Where the file ends, unless it is shared with direct clients: then the size is in `shared`.
    size: u64,
    redundancy: Redundancy,
    extents: BTreeMap<u64, Arc<Extent>>,
    /// The file's end is unknown.
    is_end_unknown: bool,
    /// Blocks whose last contents could not be stored.
    lost: BTreeMap<u64, Loss>,
    /// The records of the file for a successor, if it is kept.
    kept: Option<KeptFile>,
    /// The view of direct clients (called *guests* in the code). It changes together with this map, under the
    /// same lock.
    shared: Option<Arc<Shared>>,
}

impl Map {
    /// The map of a file that is recorded for a successor.
    pub(crate) fn kept(redundancy: Redundancy, kept: KeptFile) -> Self {
        let mut map = Map::default();
        (map.redundancy, map.kept) = (redundancy, Some(kept));
        map
    }

    /// The records of the file.
    pub(crate) fn place(&self) -> Option<&KeptFile> {
        self.kept.as_ref()
    }

    /// Takes over the size and the losses that an earlier process has recorded. A file whose end is unknown
    /// gets at least one block, so that reading it gives an error.
    pub(crate) fn found(&mut self, size: Option<u64>, lost: BTreeMap<u64, Loss>) {
        self.is_end_unknown = size.is_none();
        (self.size, self.lost) = (size.unwrap_or(BLOCK_BYTES as u64), lost);
    }

    /// Checks that the file's end is known. If it is not, the file is neither read nor changed before it is
    /// emptied: with an end too late, reads would return bytes that are not its contents; with an end too
    /// early, contents would be lost silently.
    pub(crate) fn check_end(&self) -> Result<(), FileError> {
        if self.is_end_unknown { Err(FileError::Damaged { offset: 0 }) } else { Ok(()) }
    }

    /// Adds an extent that an earlier process had for a stripe.
    pub(crate) fn found_extent(&mut self, stripe: u64, extent: Extent) {
        self.extents.insert(stripe, Arc::new(extent));
        if self.is_end_unknown && !is_parity(stripe) {
            self.size = self.size.max(((stripe + 1) * EXTENT_BYTES).min(MAX_FILE_BYTES));
        }
    }

    /// How many blocks are recorded as lost, wherever they lie.
    pub(crate) fn lost_blocks(&self) -> u64 {
        self.lost.len() as u64
    }

    /// The size beyond which the file is to be cleared, if an earlier process was killed while it truncated
    /// the file.
    pub(crate) fn take_cut(&mut self) -> Option<u64> {
        let kept = self.kept.as_mut()?;
        kept.was_being_cut().then(|| {
            kept.cut_begins();
            self.size
        })
    }

    /// Truncates the file to `size`. Until [`cut_ends`](Self::cut_ends), bytes beyond may still have
    /// contents.
    pub(crate) fn cut(&mut self, size: u64) {
        if let Some(kept) = &mut self.kept {
            kept.cut_begins();
        }
        self.set_size(size);
    }

    pub(crate) fn cut_ends(&mut self) {
        let size = self.size();
        if let Some(kept) = &mut self.kept {
            kept.cut_ends(size);
        }
    }

    fn write_size_down(&self) {
        if let Some(kept) = &self.kept {
            kept.ends_at(self.size);
        }
    }

    /// From now on direct clients see the file, too.
    pub(crate) fn share(&mut self, shared: Arc<Shared>) {
        shared.layout.set_size(self.size);
        shared.layout.set_losses(self.has_lost());
        shared.layout.set_writable(self.redundancy.rows().is_none());
        for (&stripe, extent) in &self.extents {
            shared.layout.set_extent(stripe, Some(extent.number()));
        }
        self.shared = Some(shared);
    }

    /// How the file survives the loss of a node.
    pub(crate) fn redundancy(&self) -> Redundancy {
        self.redundancy
    }

    /// Chooses how the file survives the loss of a node. The file is empty.
    pub(crate) fn set_redundancy(&mut self, redundancy: Redundancy) {
        self.redundancy = redundancy;
        if let Some(kept) = &self.kept {
            kept.is(redundancy);
        }
        if let Some(shared) = &self.shared {
            shared.layout.set_writable(redundancy.rows().is_none());
        }
    }

    /// The view of direct clients.
    pub(crate) fn shared(&self) -> Option<&Arc<Shared>> {
        self.shared.as_ref()
    }

    /// Where the file ends. A size that direct clients have set counts only up to the largest file size.
    pub(crate) fn size(&self) -> u64 {
        self.shared.as_ref().map_or(self.size, |shared| shared.layout.size().min(MAX_FILE_BYTES))
    }

    /// Sets the size of a file on which no direct client is at work.
    pub(crate) fn set_size(&mut self, size: u64) {
        self.size = size;
        self.is_end_unknown = false;
        self.write_size_down();
        if let Some(shared) = &self.shared {
            shared.layout.set_size(size);
        }
    }

    /// Lets the file reach at least to `size`.
    pub(crate) fn grow(&mut self, size: u64) {
        if self.is_end_unknown {
            return;
        }
        if size > self.size {
            self.size = size;
            self.write_size_down();
        }
        if let Some(shared) = &self.shared {
            shared.layout.grow(size);
        }
    }

    /// Records a stripe's present extent, if any, for successors and direct clients.
    fn publish(&self, stripe: u64) {
        if let Some(kept) = &self.kept {
            kept.lies(stripe, self.extents.get(&stripe).map(|extent| extent.number()));
        }
        if let Some(shared) = &self.shared {
            shared.layout.set_extent(stripe, self.extents.get(&stripe).map(|extent| extent.number()));
        }
    }

    fn publish_losses(&self) {
        if let Some(shared) = &self.shared {
            shared.layout.set_losses(self.has_lost());
        }
    }

    /// Drops an extent that is no longer the file's. Direct clients may still be using it.
    fn retire(&self, extent: Arc<Extent>) {
        if let Some(shared) = &self.shared {
            shared.guests.retire(extent);
        }
    }

    pub(crate) fn extent(&self, stripe: u64) -> Option<Arc<Extent>> {
        self.extents.get(&stripe).cloned()
    }

    /// Puts an extent in place unless there is one. Returns the one that is in place now, and whether it is
    /// the new one.
    pub(crate) fn put(&mut self, stripe: u64, extent: Extent) -> (Arc<Extent>, bool) {
        let mut fresh = false;
        let kept = self.extents.entry(stripe).or_insert_with(|| {
            fresh = true;
            Arc::new(extent)
        });
        let kept = kept.clone();
        if fresh {
            self.publish(stripe);
        }
        (kept, fresh)
    }

    pub(crate) fn remove(&mut self, stripe: u64) {
        if let Some(extent) = self.extents.remove(&stripe) {
            self.publish(stripe);
            self.retire(extent);
        }
    }

    /// Replaces an extent by another. `false`: the old one is no longer the stripe's.
    pub(crate) fn replace(&mut self, stripe: u64, old: &Arc<Extent>, fresh: Extent) -> bool {
        let place = self.extents.get_mut(&stripe).filter(|there| Arc::ptr_eq(there, old));
        let Some(there) = place else { return false };
        let old = std::mem::replace(there, Arc::new(fresh));
        self.publish(stripe);
        self.retire(old);
        true
    }

    /// Removes an extent if no operation uses it and `condition` holds. Operations take their reference under
    /// this map's lock, so none can begin meanwhile.
    pub(crate) fn remove_idle(&mut self, stripe: u64, condition: impl FnOnce(&Extent) -> bool) {
        if self.extents.get(&stripe).is_some_and(|extent| Arc::strong_count(extent) == 1 && condition(extent))
        {
            self.remove(stripe);
        }
    }

    /// Stripes within a range that have an extent.
    pub(crate) fn stripes(&self, from: u64, end: u64) -> Vec<u64> {
        if from >= end {
            Vec::new()
        } else {
            self.extents.range(from..end).map(|(&stripe, _)| stripe).collect()
        }
    }

    /// The first extent at or after a stripe.
    pub(crate) fn next_extent(&self, from: u64) -> Option<(u64, Arc<Extent>)> {
        self.extents.range(from..END_OF_DATA).next().map(|(&stripe, extent)| (stripe, extent.clone()))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.size() == 0 && self.extents.is_empty()
    }

    pub(crate) fn allocated_bytes(&self) -> u64 {
        self.extents.len() as u64 * EXTENT_BYTES
    }

    /// Offset of the first lost block that a piece touches, and why the block is lost.
    pub(crate) fn first_lost(&self, piece: &Piece) -> Option<(u64, Loss)> {
        if self.lost.is_empty() {
            return None;
        }
        let first = piece.file_offset(piece.aligned_start()) / BLOCK_BYTES as u64;
        let count = piece.end_block() - piece.first_block();
        let mut lost = self.lost.range(first..first + count);
        lost.next().map(|(block, loss)| (block * BLOCK_BYTES as u64, *loss))
    }

    /// The first lost block of the file at or after a block.
    pub(crate) fn next_lost(&self, block: u64) -> Option<u64> {
        self.lost.range(block..).next().map(|(block, _)| *block)
    }

    pub(crate) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Notes that a range's contents are lost. A block that was lost before keeps its first reason.
    pub(crate) fn lose(&mut self, offset: u64, bytes: u64, loss: Loss) {
        let end = offset.saturating_add(bytes).min(MAX_FILE_BYTES);
        let block = BLOCK_BYTES as u64;
        let blocks = offset / block..end.div_ceil(block);
        let fresh: Vec<u64> = blocks.filter(|block| !self.lost.contains_key(block)).collect();
        if let Some(kept) = &self.kept {
            kept.lost(&fresh, loss);
        }
        self.lost.extend(fresh.into_iter().map(|block| (block, loss)));
        self.publish_losses();
    }

    /// Notes that the contents of a piece are lost, if it still lies in this extent. Returns whether it does.
    pub(crate) fn lose_in(&mut self, piece: &Piece, extent: &Arc<Extent>) -> bool {
        let in_place = self.extents.get(&piece.stripe).is_some_and(|there| Arc::ptr_eq(there, extent));
        if in_place {
            self.lose(piece.file_offset(piece.start), piece.end - piece.start, Loss::Gone);
        }
        in_place
    }

    /// Forgets losses in blocks that lie wholly within a range, which were written again or truncated.
    pub(crate) fn unlose(&mut self, offset: u64, bytes: u64) {
        self.unlose_if(offset, bytes, |_, _| true);
    }

    /// As [`unlose`](Self::unlose), but only where the file has no extent: there it reads as zeros.
    pub(crate) fn unlose_holes(&mut self, offset: u64, bytes: u64) {
        self.unlose_if(offset, bytes, |extents, block| !extents.contains_key(&(block / BLOCKS_PER_EXTENT)));
    }

    /// As [`unlose`](Self::unlose), but only for blocks that satisfy `forgets`.
    fn unlose_if(
        &mut self,
        offset: u64,
        bytes: u64,
        forgets: impl Fn(&BTreeMap<u64, Arc<Extent>>, u64) -> bool,
    ) {
        let block = BLOCK_BYTES as u64;
        let (first, end) = (offset.div_ceil(block), offset.saturating_add(bytes) / block);
        let (lost, extents) = (&mut self.lost, &self.extents);
        let found = lost.extract_if(first..end.max(first), |block, _| forgets(extents, *block));
        let found: Vec<u64> = found.map(|(block, _)| block).collect();
        if let Some(kept) = self.kept.as_ref().filter(|_| !found.is_empty()) {
            kept.unlost(&found);
        }
        self.publish_losses();
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        drop(self.kept.take()); // before its extents can be used again
        if let Some(shared) = self.shared.take() {
            shared.layout.pause(); // for good
            std::mem::take(&mut self.extents).into_values().for_each(|extent| shared.guests.retire(extent));
        }
    }
}
