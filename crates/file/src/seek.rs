//! Where a file has data, and where it has holes: `lseek` with `SEEK_DATA` and `SEEK_HOLE`.
//!
//! S1. A block with contents counts as data, and so does a block that is being written or is lost. A block
//!     counts as a hole if it has no extent, or was reserved and never written, or was zeroed whole.
//! S2. A search touches neither far memory nor locks: the words and the list of extents are enough.

use std::sync::Arc;

use farpool_pool::{EXTENT_BYTES, Extent};
use farpool_wire::{BLOCK_BYTES, BlockWord};

use crate::blocks::BLOCKS_PER_EXTENT;
use crate::file::FarFile;
use crate::file_core::FileCore;
use crate::rules::Rules;

const BLOCK: u64 = BLOCK_BYTES as u64;

impl FarFile {
    /// The first byte at or after `offset` that lies in a block with data. `None`: there is none up to the
    /// end.
    pub fn seek_data(&self, offset: u64) -> Option<u64> {
        let found = self.inner.next_data(offset);
        found.filter(|&at| at < self.size())
    }

    /// The first byte at or after `offset` that lies in a hole; the end of the file counts as one. `None`:
    /// `offset` is not within the file.
    pub fn seek_hole(&self, offset: u64) -> Option<u64> {
        let size = self.size();
        if offset >= size {
            return None;
        }
        let mut at = offset;
        // Runs of data: each step passes one, at least a block.
        while at < size && self.inner.holds_data(at) {
            at = self.inner.end_of_data(at);
        }
        Some(at.min(size))
    }
}

impl<R: Rules> FileCore<R> {
    /// The first byte at or after `offset` in a block with data.
    fn next_data(&self, offset: u64) -> Option<u64> {
        let lost = self.map.read().next_lost(offset / BLOCK).map(|block| offset.max(block * BLOCK));
        let mut from = offset;
        // One extent at a time, and the list's lock only to find it: the list may be long.
        while lost.is_none_or(|lost| from < lost) {
            let next = self.map.read().next_extent(from / EXTENT_BYTES);
            let Some((stripe, extent)) = next else { break };
            let base = stripe * EXTENT_BYTES;
            let start = from.max(base);
            let mut blocks = (start - base) / BLOCK..BLOCKS_PER_EXTENT;
            if let Some(block) = blocks.find(|&block| self.is_data(&extent, block)) {
                let found = start.max(base + block * BLOCK);
                return Some(lost.map_or(found, |lost| lost.min(found)));
            }
            from = base + EXTENT_BYTES;
        }
        lost
    }

    fn holds_data(&self, offset: u64) -> bool {
        let map = self.map.read();
        let lost = map.next_lost(offset / BLOCK) == Some(offset / BLOCK);
        let extent = map.extent(offset / EXTENT_BYTES);
        drop(map);
        lost || extent.is_some_and(|extent| self.is_data(&extent, offset % EXTENT_BYTES / BLOCK))
    }

    /// The end of the data that begins in the block of `offset`, or an earlier point up to which there is
    /// data.
    fn end_of_data(&self, offset: u64) -> u64 {
        let (stripe, first) = (offset / EXTENT_BYTES, offset % EXTENT_BYTES / BLOCK);
        let mut end = first + 1;
        if let Some(extent) = self.map.read().extent(stripe) {
            while end < BLOCKS_PER_EXTENT && self.is_data(&extent, end) {
                end += 1;
            }
        }
        stripe * EXTENT_BYTES + end * BLOCK
    }

    /// A locked word that is otherwise empty is data, too: its first write is in progress.
    fn is_data(&self, extent: &Arc<Extent>, block: u64) -> bool {
        let words = &self.store.words;
        words.load(words.place(extent, block)) != BlockWord::EMPTY
    }
}
