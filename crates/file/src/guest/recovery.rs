//! What guests leave when they die: their locks (G4). What they wrote behind the end of a file, and did not live to make
//! part of it, stays: it may show when the file grows, as what a write that never ended may always.

use std::sync::Weak;

use farpool_pool::{Extent, SessionCore};
use farpool_wire::{BLOCK_BYTES, BlockWord};

use super::owner::GuestId;
use crate::blocks::{BLOCKS_PER_EXTENT, BlockPlace};
use crate::error::FileError;
use crate::file_core::FileCore;
use crate::rules::Rules;
use crate::staging::staging;
use crate::store::StoreCore;

impl<R: Rules> StoreCore<R> {
    /// Looks after what a guest left that is dead for certain, and forgets it.
    pub async fn bury_guest(&self, core: &SessionCore, guest: GuestId) {
        // Its operations are over; but what it was at work on is not free before its locks are taken over.
        for file in self.files().iter().filter_map(Weak::upgrade) {
            file.take_over_locks(core, guest).await;
        }
        self.guests.free_places_of(guest);
        self.guests.remove(guest);
        self.guests.collect();
    }
}

impl<R: Rules> FileCore<R> {
    /// Takes over the locks that a dead guest has on blocks of the file.
    async fn take_over_locks(&self, core: &SessionCore, guest: GuestId) {
        if self.map.read().shared().is_none() {
            return;
        }
        let mut stripe = 0;
        while let Some((at, extent)) = { self.map.read().next_extent(stripe) } {
            stripe = at + 1;
            for block in 0..BLOCKS_PER_EXTENT {
                let place = self.store.words.place(&extent, block);
                if let Some(left) = self.store.words.take_over(place, guest.0) {
                    self.settle(core, &extent, block, place, left).await;
                }
            }
        }
    }

    /// Ends a write that nobody will end: the block is what it is now. A block that was never written stays so, since what
    /// lies there may be in part another's.
    async fn settle(
        &self,
        core: &SessionCore,
        extent: &Extent,
        block: u64,
        place: BlockPlace,
        left: BlockWord,
    ) {
        let word = if left.was_empty() {
            BlockWord::EMPTY
        } else if left.is_lost() {
            left.lost()
        } else {
            // The checksum is that of before, so the next generation differs from whatever a reader may have seen, but
            // for a chance of one in thousands; and then the data have to be the same, too.
            match self.contents(core, extent, block).await {
                Ok(checksum) => BlockWord::EMPTY.written(0).written(checksum),
                Err(_) => left.lost(), // the region is gone
            }
        };
        self.store.words.store(place, word);
        tracing::info!(region = %extent.region().id, block, "took over the lock of a process that died while writing");
    }

    async fn contents(&self, core: &SessionCore, extent: &Extent, block: u64) -> Result<u64, FileError> {
        let offset = block * BLOCK_BYTES as u64;
        let buffer = staging(core, BLOCK_BYTES)?;
        let (buffer, read) = core.read(extent, offset, buffer).await;
        read.map_err(|error| FileError::from_access(error, offset))?;
        Ok(R::checksum(&buffer))
    }
}
