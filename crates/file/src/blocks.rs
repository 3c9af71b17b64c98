//! The words of all blocks, in memory that other processes of this host can share.

use std::io;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use farpool_fabric::{Endpoint, SharedMemory};
use farpool_pool::{EXTENT_BYTES, Extent};
use farpool_wire::{BLOCK_BYTES, BlockWord};

/// Blocks of an extent.
pub(crate) const BLOCKS_PER_EXTENT: u64 = EXTENT_BYTES / BLOCK_BYTES as u64;
/// Far memory that one store can describe: 4 TiB. The table is sparse: a word takes memory once it is touched.
const MAX_EXTENTS: u64 = (4 << 40) / EXTENT_BYTES;
const WORD_BYTES: u64 = 8;
/// How long a block may stay locked by a writer of this process before others give up: a writer ends within its
/// node's deadline, or a little later when it first has to reconnect.
const LOCK_PATIENCE: Duration = Duration::from_secs(12);
/// Looks at a locked word before sleeping between looks: most writers are done within microseconds.
const EAGER_LOOKS: u32 = 100;
const LOOK_INTERVAL: Duration = Duration::from_micros(100);

/// The table of words, indexed by extent number and block.
#[derive(Debug)]
pub(crate) struct BlockWords {
    table: SharedMemory,
}

/// One block's place in the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockPlace(u64);

/// The block stayed locked for longer than any writer needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StillLocked;

impl BlockWords {
    pub(crate) fn create() -> io::Result<Self> {
        let bytes = MAX_EXTENTS * BLOCKS_PER_EXTENT * WORD_BYTES;
        Ok(BlockWords { table: SharedMemory::create("farpool-blocks", bytes)? })
    }

    /// Whether an extent's number is within the table.
    pub(crate) fn covers(&self, extent: &Extent) -> bool {
        extent.number() < MAX_EXTENTS
    }

    /// Where the word of an extent's `block`-th block lies.
    pub(crate) fn place(&self, extent: &Extent, block: u64) -> BlockPlace {
        debug_assert!(block < BLOCKS_PER_EXTENT && self.covers(extent));
        BlockPlace((extent.number() * BLOCKS_PER_EXTENT + block) * WORD_BYTES)
    }

    /// Forgets all of an extent's blocks: it was just taken, and nobody else knows it.
    pub(crate) fn clear(&self, extent: &Extent) {
        for block in 0..BLOCKS_PER_EXTENT {
            self.store(self.place(extent, block), BlockWord::EMPTY);
        }
    }

    /// Marks all of an extent's blocks as lost: it was just taken, and stands for one whose contents are gone.
    pub(crate) fn lose(&self, extent: &Extent) {
        for block in 0..BLOCKS_PER_EXTENT {
            self.store(self.place(extent, block), BlockWord::EMPTY.lost());
        }
    }

    /// Whether none of an extent's blocks was ever written or is being written.
    pub(crate) fn are_empty(&self, extent: &Extent) -> bool {
        (0..BLOCKS_PER_EXTENT).all(|block| self.load(self.place(extent, block)) == BlockWord::EMPTY)
    }

    /// The word as it is now; acquires what was written before it was stored.
    pub(crate) fn load(&self, place: BlockPlace) -> BlockWord {
        BlockWord(self.table.mapping().load(place.0).expect("a place lies within the table"))
    }

    /// Stores a word and with it gives up its lock, after all that was done before.
    pub(crate) fn store(&self, place: BlockPlace, word: BlockWord) {
        self.table.mapping().store(place.0, word.0).expect("a place lies within the table");
    }

    /// Takes the lock; returns the word as it was.
    pub(crate) async fn lock(
        &self,
        endpoint: &Endpoint,
        place: BlockPlace,
    ) -> Result<BlockWord, StillLocked> {
        loop {
            let word = self.unlocked(endpoint, place).await?;
            let before = self.table.mapping().compare_and_swap(place.0, word.0, word.locked().0);
            if before.expect("a place lies within the table") == word.0 {
                // Keeps the stores to far memory behind the lock; pairs with the readers' acquiring loads.
                fence(Ordering::SeqCst);
                return Ok(word);
            }
        }
    }

    /// The word once nobody has its lock.
    pub(crate) async fn unlocked(
        &self,
        endpoint: &Endpoint,
        place: BlockPlace,
    ) -> Result<BlockWord, StillLocked> {
        let word = self.load(place);
        if !word.is_locked() {
            return Ok(word);
        }
        let give_up_at = endpoint.now_ns() + LOCK_PATIENCE.as_nanos() as u64;
        let mut looks = 0;
        loop {
            let word = self.load(place);
            if !word.is_locked() {
                return Ok(word);
            }
            if endpoint.now_ns() > give_up_at {
                return Err(StillLocked);
            }
            looks += 1;
            if looks < EAGER_LOOKS { endpoint.yield_now().await } else { endpoint.sleep(LOOK_INTERVAL).await }
        }
    }
}
