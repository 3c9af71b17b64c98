//! Taking over the files of an earlier process that was killed, from its records and the block words that it
//! left.
//!
//! D1. A late write of the earlier process can land only on blocks whose words it left locked, or on extents
//!     that it had marked as in doubt, because it posts no other stores. From here on all these extents are
//!     in doubt: nothing new is written there, and no other file gets them.
//! D2. A lock that the earlier process left is settled before any operation on the file. The block then has
//!     the contents that lie there now: each unit of eight bytes is old or new. Later reads find the same. A
//!     block that was never written stays empty. If the block's parity is not locked, the holder of the lock
//!     stored nothing, and the block keeps its word.
//! D3. A parity whose word was locked is right in two cases: it is the sum of its column as it is now; or a
//!     member is missing, nothing else in the column has changed, and the parity is what its word says.
//!     Otherwise it is lost, and is rebuilt.
//! D4. A file that was being truncated is truncated.
//! D5. Damage to kept memory costs contents, and never yields wrong bytes: words are believed only if their
//!     witness agrees (`blocks/witness.rs`), and a file whose end is unknown is not read before it is
//!     emptied.

use std::collections::BTreeMap;
use std::sync::Arc;

use farpool_fabric::ArenaBuf;
use farpool_keep::Kept;
use farpool_pool::{Adoption, EXTENT_BYTES, Extent, SessionCore};
use farpool_wire::{BLOCK_BYTES, BlockWord};

use crate::blocks::BLOCKS_PER_EXTENT;
use crate::error::FileError;
use crate::file_core::FileCore;
use crate::keeping::FoundFile;
use crate::map::Loss;
use crate::redundancy::{Rows, is_parity};
use crate::rows::Row;
use crate::rules::Rules;
use crate::store::StoreCore;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Upper bound of the stripes that a file's list may name: a damaged list must not make numbers overflow.
const MAX_STRIPES: u64 = 1 << 42;

/// Files that were taken over, by the numbers under which they are kept.
pub type Adopted<R> = BTreeMap<u64, Arc<FileCore<R>>>;

impl<R: Rules> StoreCore<R> {
    /// Takes over the wanted files. They must not be used before [`settle`](Self::settle) has ended.
    pub fn adopt(
        self: &Arc<Self>,
        kept: &Kept,
        mut adoption: Adoption,
        wanted: impl Fn(u64) -> bool,
    ) -> Adopted<R> {
        let Some(keeping) = &self.keeping else { return Adopted::new() };
        let found = keeping.find(kept, wanted);
        let adopted = found.into_iter().map(|(id, found)| {
            let place = keeping.found(id, &found, R::journals_frees());
            let file = Arc::new(FileCore::kept(self.clone(), found.start, place, found.redundancy));
            self.take_extents(&file, &found, &mut adoption);
            self.register(&file);
            (id, file)
        });
        let adopted: Adopted<R> = adopted.collect();
        // Extents that were being filled, or that were being written when their file dropped them (D1).
        let rest: Vec<u64> = adoption.extents_held().filter(|extent| !adoption.is_taken(*extent)).collect();
        for extent in rest.into_iter().filter(|extent| self.is_left_in_doubt(*extent)) {
            self.stock.shun_extent(&adoption, extent);
        }
        self.stock.finish_adoption(adoption);
        self.volume.ask_for_repair();
        adopted
    }

    fn is_left_in_doubt(&self, extent: u64) -> bool {
        R::doubts_what_was_left() && self.words.may_be_written(extent)
    }

    fn take_extents(&self, file: &FileCore<R>, found: &FoundFile, adoption: &mut Adoption) {
        let mut map = file.map.write();
        let size = self.words.file_size(found.slot).map(|size| size.bytes);
        if size.is_none() {
            tracing::error!("the kept size of a file is damaged: the file gives errors until it is emptied");
        }
        map.found(size, found.lost.clone());
        let mut disbelieved = 0;
        for (&stripe, &number) in found.extents.iter().filter(|(stripe, _)| **stripe < MAX_STRIPES) {
            match self.stock.adopt_extent(adoption, number).filter(|extent| self.words.covers(extent)) {
                Some(extent) => {
                    let is_in_doubt = self.is_left_in_doubt(number);
                    disbelieved += self.words.examine(&extent);
                    if is_in_doubt || self.is_left_in_doubt(number) {
                        extent.doubt();
                    }
                    map.found_extent(stripe, extent);
                }
                // The state is inconsistent: there is no such extent, or another file has it already.
                None => {
                    if !is_parity(stripe) {
                        map.lose(stripe * EXTENT_BYTES, EXTENT_BYTES, Loss::Gone);
                    }
                    if let Some(place) = map.place() {
                        place.lies(stripe, None);
                    }
                }
            }
        }
        if disbelieved > 0 {
            tracing::error!(
                blocks = disbelieved,
                "the kept words of some blocks of a file are damaged: these blocks are lost"
            );
        }
    }

    /// Completes the operations that the earlier process had begun (D2 to D4).
    pub async fn settle(&self, core: &SessionCore, adopted: &Adopted<R>) {
        for file in adopted.values() {
            match file.rows() {
                None => {
                    for stripe in file.locked_stripes() {
                        file.settle_extent(core, stripe).await;
                    }
                }
                Some(rows) => {
                    let mut numbers: Vec<u64> =
                        file.locked_stripes().into_iter().map(|stripe| rows.row_of(stripe)).collect();
                    numbers.dedup();
                    for number in numbers {
                        file.settle_row(core, rows, number).await;
                    }
                }
            }
            file.end_cut(core).await;
        }
    }
}

impl<R: Rules> FileCore<R> {
    /// Stripes in which the earlier process has left a lock, with members of one row next to each other.
    fn locked_stripes(&self) -> Vec<u64> {
        if !R::settles_locks() {
            return Vec::new();
        }
        let rows = self.rows();
        let map = self.map.read();
        let is_locked =
            |stripe: &u64| map.extent(*stripe).is_some_and(|extent| self.store.words.has_locks(&extent));
        let mut stripes: Vec<u64> = map.stripes(0, u64::MAX).into_iter().filter(is_locked).collect();
        stripes.sort_by_key(|stripe| rows.map_or(*stripe, |rows| rows.row_of(*stripe)));
        stripes
    }

    /// Settles the locks of an extent of a file without rows, and moves the extent: a late write to the old
    /// place then changes nothing that was read.
    async fn settle_extent(&self, core: &SessionCore, stripe: u64) {
        let Some(old) = self.extent_at(stripe * EXTENT_BYTES) else { return };
        let words = &self.store.words;
        let mut left = [BlockWord::EMPTY; BLOCKS_PER_EXTENT as usize];
        for (block, word) in (0..).zip(&mut left) {
            *word = words.load(words.place(&old, block));
        }
        tracing::info!(region = %old.region().id, stripe, "a write was in progress when the mount was killed");
        let mut settled = left;
        let data = if old.region().has_ended() { None } else { self.extent_contents(core, &old).await };
        for (at, word) in settled.iter_mut().enumerate().filter(|(_, word)| word.is_locked()) {
            let contents = data.as_ref().map(|data| &data[at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES]);
            *word = settled_word::<R>(*word, contents);
        }
        let moved = match data {
            Some(data) if R::doubts_what_was_left() => {
                self.put_elsewhere(core, stripe, &old, data, &settled).await.is_ok()
            }
            _ => false,
        };
        if !moved {
            // The extent is in doubt, so it moves when there is room.
            for (block, word) in (0..).zip(settled) {
                words.store(words.place(&old, block), word);
            }
        }
    }

    async fn extent_contents(&self, core: &SessionCore, extent: &Extent) -> Option<ArenaBuf> {
        let buffer = core.buffer(EXTENT_BYTES as usize).ok()?;
        let (buffer, read) = core.read(extent, 0, buffer).await;
        read.is_ok().then_some(buffer)
    }

    async fn put_elsewhere(
        &self,
        core: &SessionCore,
        stripe: u64,
        old: &Arc<Extent>,
        data: ArenaBuf,
        settled: &[BlockWord],
    ) -> Result<(), FileError> {
        let fresh = self.take_extent(stripe, None).await?;
        let words = &self.store.words;
        words.doubt(&fresh); // until it is filled, a successor does not reuse it
        let (_, written) = core.write(&fresh, 0, data).await;
        written.map_err(|error| FileError::from_access(error, stripe * EXTENT_BYTES))?;
        words.clear(&fresh);
        for (block, word) in (0..).zip(settled) {
            words.store(words.place(&fresh, block), *word);
        }
        self.map.write().replace(stripe, old, fresh);
        Ok(())
    }

    /// Settles the locks of a row.
    async fn settle_row(&self, core: &SessionCore, rows: Rows, number: u64) {
        let Some(row) = self.row(rows, number) else { return };
        for block in 0..BLOCKS_PER_EXTENT {
            self.settle_left_column(core, &row, block).await;
        }
        self.store.volume.ask_for_repair();
    }

    pub(crate) async fn settle_left_column(&self, core: &SessionCore, row: &Row, block: u64) {
        let words = &self.store.words;
        let parity_place = words.place(&row.parity.1, block);
        let parity_left = words.load(parity_place);
        let mut is_torn = false;
        for (_, extent) in &row.data {
            let place = words.place(extent, block);
            let left = words.load(place);
            if !left.is_locked() {
                continue;
            }
            // The parity's lock is taken last and released last: without it, nothing was stored in the
            // column. And the contents of a lost member are what the rest of the row gives.
            if !parity_left.is_locked() || extent.region().has_ended() {
                words.store(place, left.unlocked());
                continue;
            }
            let contents = self.block_contents(core, extent, block).await;
            let is_as_before =
                contents.as_ref().is_some_and(|data| left.unlocked().matches(R::checksum(data)));
            is_torn |= !is_as_before && !left.was_empty();
            words.store(place, settled_word::<R>(left, contents.as_deref()));
        }
        if parity_left.is_locked() {
            let word = self.settled_parity(core, row, block, parity_left.unlocked(), is_torn).await;
            words.store(parity_place, word);
        }
    }

    /// The word of a parity whose writer died, once the data of its column are settled.
    async fn settled_parity(
        &self,
        core: &SessionCore,
        row: &Row,
        block: u64,
        left: BlockWord,
        is_torn: bool,
    ) -> BlockWord {
        let words = &self.store.words;
        let data = row.data.iter();
        let data: Vec<_> =
            data.map(|(_, extent)| (extent.clone(), words.load(words.place(extent, block)))).collect();
        if data.iter().all(|(_, word)| word.is_empty()) {
            return BlockWord::EMPTY;
        }
        let parity = self.block_contents(core, &row.parity.1, block).await;
        match (self.sum_of(core, &data, block).await, parity) {
            (Ok(sum), Some(parity)) if sum[..] == parity[..] => {
                BlockWord::EMPTY.written(0).written(R::checksum(&parity))
            }
            // A member is missing, and the parity is what it is reconstructed from.
            (Err(_), Some(parity)) if !is_torn && !left.is_lost() && left.matches(R::checksum(&parity)) => {
                left
            }
            _ => left.lost(),
        }
    }

    async fn block_contents(&self, core: &SessionCore, extent: &Extent, block: u64) -> Option<ArenaBuf> {
        let buffer = core.buffer(BLOCK_BYTES).ok()?;
        let (buffer, read) = core.read(extent, block * BLOCK, buffer).await;
        read.is_ok().then_some(buffer)
    }

    /// Completes a truncation that was in progress.
    async fn end_cut(&self, core: &SessionCore) {
        let Some(size) = self.map.write().take_cut() else { return };
        // Blocks that cannot be cleared become lost, so they do not appear either.
        let _ = self.clear_behind(core, size).await;
        self.map.write().cut_ends();
    }

    /// Bytes of the file that cannot be read: lost blocks, and blocks whose region has ended and that cannot
    /// be reconstructed from the rest of their row.
    pub fn lost_bytes(&self) -> u64 {
        let words = &self.store.words;
        let rows = self.rows();
        let map = self.map.read();
        let has_ended = |stripe: u64| map.extent(stripe).is_some_and(|extent| extent.region().has_ended());
        if map.check_end().is_err() {
            return map.size();
        }
        let mut lost = map.lost_blocks();
        for stripe in map.stripes(0, crate::redundancy::END_OF_DATA) {
            let Some(extent) = map.extent(stripe) else { continue };
            let is_reconstructible = rows.is_some_and(|rows| {
                let row = rows.row_of(stripe);
                let others = rows.data_of(row).chain([rows.parity_of(row)]).filter(|other| *other != stripe);
                !others.into_iter().any(has_ended)
            });
            for block in 0..BLOCKS_PER_EXTENT {
                let word = words.load(words.place(&extent, block));
                let is_gone = extent.region().has_ended() && !word.is_empty() && !is_reconstructible;
                lost += u64::from(word.is_lost() || is_gone);
            }
        }
        lost * BLOCK
    }
}

/// The word of a block whose writer died. `contents`: the bytes in its place; `None`: they cannot be read.
fn settled_word<R: Rules>(left: BlockWord, contents: Option<&[u8]>) -> BlockWord {
    if left.was_empty() {
        return BlockWord::EMPTY; // the bytes there may partly be another file's
    }
    match contents {
        Some(data) if !left.is_lost() => BlockWord::EMPTY.written(0).written(R::checksum(data)),
        _ => left.lost(),
    }
}
