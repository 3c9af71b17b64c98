//! Recovers the locks of dead direct clients (called *guests* in the code; G4). If a client died after it
//! wrote beyond the end of a file, and before it raised the size, its bytes stay there. They may appear when
//! the file grows, as the data of any unfinished write may.

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
    /// Recovers the locks of a direct client that is certainly dead, and forgets the client.
    pub async fn recover_guest(&self, core: &SessionCore, guest: GuestId) {
        // The dead client's operations have ended. But its places are freed only after its locks were taken
        // over, so that the extents that it used are not reused before.
        for file in self.files().iter().filter_map(Weak::upgrade) {
            file.take_over_locks(core, guest).await;
        }
        self.guests.free_places_of(guest);
        self.guests.remove(guest);
        self.guests.collect();
    }
}

impl<R: Rules> FileCore<R> {
    /// Takes over the locks that a dead direct client holds on blocks of the file.
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

    /// Settles a write whose writer is dead: the block keeps its present contents. A block that was never
    /// written stays empty, since the bytes in its place may partly be another file's.
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
            // The lock has overwritten the block's generation, so the generations start again at the first.
            // A reader compares the word from before its READ with the word after it. If it read the old one
            // before, and finds the new one, it is misled only when the two are equal: then they hold the
            // same generation, a chance of one in thousands, and the same checksum, so the same data.
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
