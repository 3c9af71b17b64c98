//! Rebuilding: extents on lost nodes and leases are reconstructed from the rest of their rows and stored
//! elsewhere, while the file is in use. Extents that have to leave their place, or on which a late write may
//! still land, are moved in the same way.
//!
//! U1. An extent is rebuilt under the locks of all its blocks and of their parity: no writer changes them
//!     meanwhile, so no write is missed. A writer that has waited for such a lock checks that the extent is
//!     still the file's before it writes.
//! U2. Each block is read or reconstructed, and checked against its word. A block for which neither succeeds
//!     becomes lost, and so does its parity. A place that cannot be read for now is tried again later.
//! U3. An extent for which there is no place now stays as it is, and is tried again.
//! U4. A block that is repaired in place keeps its word: even if the store fails, the rest of the row still
//!     gives its contents.

use std::sync::{Arc, Weak};

use farpool_fabric::ArenaBuf;
use farpool_pool::{AccessError, EXTENT_BYTES, Extent, SessionCore};
use farpool_wire::{BLOCK_BYTES, BlockWord};

use crate::blocks::BLOCKS_PER_EXTENT;
use crate::error::FileError;
use crate::file_core::FileCore;
use crate::held::Held;
use crate::moving::LOOK_EVERY;
use crate::reconstruct::Unfit;
use crate::redundancy::{Rows, is_parity};
use crate::rows::{Row, replace_member};
use crate::rules::Rules;
use crate::staging::staging;
use crate::store::StoreCore;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// How often a member that has to move is given another place because the last one was lost. Each loss is
/// that of another node or lease.
const MAX_PLACES: u32 = 8;

/// The outcome of moving a member.
enum Put {
    /// The member was moved, or no longer has to be.
    Done,
    /// The new place was lost before it was filled.
    PlaceLost,
}

impl<R: Rules> StoreCore<R> {
    /// Whether [`rebuild`](Self::rebuild) may find something to do.
    pub fn is_to_rebuild(&self) -> bool {
        self.volume.is_to_repair() || self.stock.losses() != self.volume.rebuilt_up_to()
    }

    /// Whether every row is whole: no member lies on a lost node or lease, or where a late write may land,
    /// and no parity is lost. Checks every row.
    pub fn is_whole(&self) -> bool {
        self.files().iter().filter_map(Weak::upgrade).all(|file| {
            let Some(rows) = file.rows() else { return true };
            file.members_to_rebuild().is_empty() && file.parity_to_repair(rows).is_empty()
        })
    }

    /// Whether there is something to rebuild now. After a failure, this waits for the end of a pause.
    pub(crate) fn is_rebuild_due(&self) -> bool {
        self.is_to_rebuild() && self.volume.may_rebuild(self.stock.now())
    }

    /// Rebuilds lost members, as far as the other members and the free memory allow, and returns a failure if
    /// there was one. Ends early when `stopped` says so.
    pub async fn rebuild(&self, core: &SessionCore, stopped: impl Fn() -> bool) -> Result<(), FileError> {
        if !self.is_to_rebuild() {
            return Ok(());
        }
        let losses = self.stock.losses();
        let _noted = self.volume.take_to_repair();
        let files: Vec<_> = self.files().iter().filter_map(Weak::upgrade).collect();
        let members = files.iter().map(|file| file.members_to_rebuild().len() as u64).sum::<u64>();
        self.volume.rebuild.begin(members * BLOCKS_PER_EXTENT);
        let (mut result, mut last_ns) = (Ok(()), core.endpoint().now_ns());
        for file in files {
            result = result.and(self.rebuild_file(core, &file, &mut last_ns, &stopped).await);
        }
        match result {
            Ok(()) if stopped() => self.volume.ask_for_repair(),
            Ok(()) => self.volume.note_rebuilt_up_to(losses),
            Err(_) => self.volume.ask_for_repair(),
        }
        self.volume.rebuild_ended(self.stock.now(), result.err());
        result
    }

    async fn rebuild_file(
        &self,
        core: &SessionCore,
        file: &FileCore<R>,
        last_ns: &mut u64,
        stopped: &impl Fn() -> bool,
    ) -> Result<(), FileError> {
        let Some(rows) = file.rows() else { return Ok(()) };
        let mut result = Ok(());
        for stripe in file.members_to_rebuild() {
            if stopped() {
                return result;
            }
            match file.rebuild_extent(core, rows, stripe).await {
                Ok(()) => {
                    self.volume.rebuild.step(BLOCKS_PER_EXTENT);
                    self.pause(core, last_ns, stopped).await;
                }
                Err(error) => {
                    self.volume.rebuild_fails(error);
                    result = Err(error);
                    self.in_between(core, last_ns, stopped).await;
                }
            }
        }
        for (stripe, block) in file.parity_to_repair(rows) {
            result = result.and(file.repair_block(core, rows, stripe, block).await.map(drop));
        }
        result
    }
}

impl<R: Rules> StoreCore<R> {
    /// Pauses, so that rebuilding does not exceed its rate. At a low rate the pause may take hours, so it
    /// ends early when `stopped` says so.
    async fn pause(&self, core: &SessionCore, last_ns: &mut u64, stopped: &impl Fn() -> bool) {
        let mut left = self.volume.rebuild_pause();
        loop {
            let now = left.min(LOOK_EVERY);
            core.endpoint().sleep(now).await;
            left -= now;
            self.in_between(core, last_ns, stopped).await;
            if left.is_zero() || stopped() {
                return;
            }
        }
    }
}

impl<R: Rules> FileCore<R> {
    /// Members whose region is lost or given back, or which are in doubt: nothing may be written there.
    fn members_to_rebuild(&self) -> Vec<u64> {
        if self.rows().is_none() {
            return Vec::new();
        }
        let map = self.map.read();
        let is_to_rebuild = |extent: Arc<Extent>| extent.region().has_ended() || extent.is_in_doubt();
        let stripes = map.stripes(0, u64::MAX).into_iter();
        stripes.filter(|stripe| map.extent(*stripe).is_some_and(is_to_rebuild)).collect()
    }

    /// Parity blocks that are lost although their extent is there.
    fn parity_to_repair(&self, rows: Rows) -> Vec<(u64, u64)> {
        let parities: Vec<(u64, Arc<Extent>)> = {
            let map = self.map.read();
            let parities = map.stripes(rows.parity_of(0), u64::MAX).into_iter();
            parities.filter_map(|stripe| Some((stripe, map.extent(stripe)?))).collect()
        };
        let words = &self.store.words;
        let blocks = parities.iter().flat_map(|(stripe, extent)| {
            let lost =
                (0..BLOCKS_PER_EXTENT).filter(|block| words.load(words.place(extent, *block)).is_lost());
            lost.map(|block| (*stripe, block))
        });
        blocks.collect()
    }

    /// Moves a member with its contents. If the new place is lost before it is filled, another place is
    /// tried: the member itself may still be readable.
    pub(crate) async fn rebuild_extent(
        &self,
        core: &SessionCore,
        rows: Rows,
        stripe: u64,
    ) -> Result<(), FileError> {
        let offset = rows.data_of(rows.row_of(stripe)).start * EXTENT_BYTES;
        for _ in 0..MAX_PLACES {
            let Some(old) = self.map.read().extent(stripe) else { return Ok(()) };
            let fresh = match self.take_member(rows, stripe, Some(&old)).await {
                Err(_) if self.was_replaced(stripe, &old) => return Ok(()),
                taken => taken?,
            };
            match self.put_member(core, rows, (stripe, &old), fresh, offset).await? {
                Put::Done => return Ok(()),
                Put::PlaceLost => {}
            }
        }
        Err(FileError::Unavailable { offset })
    }

    async fn put_member(
        &self,
        core: &SessionCore,
        rows: Rows,
        (stripe, old): (u64, &Arc<Extent>),
        fresh: Extent,
        offset: u64,
    ) -> Result<Put, FileError> {
        let Some((mut held, row)) =
            self.hold_member(core, rows, stripe, 0..BLOCKS_PER_EXTENT, offset).await?
        else {
            // A member was replaced meanwhile: this one may still have to move.
            self.store.volume.ask_for_repair();
            return Ok(Put::Done);
        };
        if !row.member(stripe).is_some_and(|now| Arc::ptr_eq(now, old)) {
            return Ok(Put::Done); // another task has done it
        }
        let (buffer, kept) = self.renewed_extent(core, &row, &mut held, stripe).await?;
        let newly_lost = |(block, word): &(u64, BlockWord)| {
            word.is_lost() && held.word(stripe, *block).is_some_and(|before| !before.is_lost())
        };
        let lost = (0..).zip(kept).filter(newly_lost).count() as u64;
        if !R::rebuild_keeps_locks() {
            drop(held);
            held = Held::take(&self.store, core, [], offset).await?;
        }
        if kept.iter().any(|word| !word.is_empty() && !word.is_lost()) {
            self.store.words.doubt(&fresh); // until it is filled, a successor does not reuse it
            let (_, written) = core.write(&fresh, 0, buffer).await;
            if written.is_err() && fresh.region().has_ended() {
                return Ok(Put::PlaceLost);
            }
            written.map_err(|error| FileError::from_access(error, offset))?;
            self.store.words.clear(&fresh);
        }
        for (block, word) in (0..).zip(kept) {
            self.store.words.store(self.store.words.place(&fresh, block), word);
        }
        let in_place = replace_member(&mut self.map.write(), rows, stripe, old, fresh);
        drop(held); // last, so that a task that waits for a lock finds the new extent
        if in_place {
            self.store.volume.beyond_repair(lost);
        } else {
            self.store.volume.ask_for_repair(); // truncated meanwhile, or another member is on that node
        }
        Ok(Put::Done)
    }

    /// The contents and words of a rebuilt member: read from its old place if that is still there, else
    /// reconstructed.
    async fn renewed_extent(
        &self,
        core: &SessionCore,
        row: &Row,
        held: &mut Held<'_, R>,
        stripe: u64,
    ) -> Result<(ArenaBuf, [BlockWord; BLOCKS_PER_EXTENT as usize]), FileError> {
        let old = row.member(stripe).expect("its locks were taken");
        let mut buffer = staging(core, EXTENT_BYTES as usize)?;
        let mut read = Err(None);
        if !old.region().has_ended() {
            let (returned, result) = core.read(old, 0, buffer).await;
            buffer = returned;
            let offset = row.data.first().map_or(0, |(first, _)| first * EXTENT_BYTES);
            read = result.map_err(|error| unread_for_now(error, old, offset));
        }
        let mut kept = [BlockWord::EMPTY; BLOCKS_PER_EXTENT as usize];
        for (block, (word, data)) in (0..).zip(kept.iter_mut().zip(buffer.chunks_exact_mut(BLOCK_BYTES))) {
            *word = self.renewed(core, row, held, (stripe, block), data, read).await?;
        }
        Ok((buffer, kept))
    }

    /// One block of a member that is rebuilt: puts its contents into `data` and returns its word. `read`:
    /// whether `data` holds the bytes of its old place. The error says why that place cannot be read for now;
    /// `None`: it is lost.
    pub(crate) async fn renewed(
        &self,
        core: &SessionCore,
        row: &Row,
        held: &mut Held<'_, R>,
        (stripe, block): (u64, u64),
        data: &mut [u8],
        read: Result<(), Option<FileError>>,
    ) -> Result<BlockWord, FileError> {
        let (word, parity, _) = self.words_held(row, held, stripe, block);
        if word.is_empty() || word.is_lost() && !is_parity(stripe) {
            return Ok(word);
        }
        if read.is_ok() && !word.is_lost() && word.matches(R::checksum(data)) {
            return Ok(word);
        }
        match self.remake(core, row, (stripe, block), word, parity).await {
            Ok(right) => {
                data.copy_from_slice(&right);
                let is_new = word.is_lost() || !word.matches(R::checksum(data));
                Ok(if is_new { word.written(R::checksum(data)) } else { word })
            }
            Err(Unfit::Later(error)) => Err(error),
            Err(Unfit::Gone) => {
                if let Err(Some(for_now)) = read {
                    return Err(for_now); // its old place may be its only copy (U2)
                }
                // The parity is lost, too: from now on the lost block counts as zeros.
                held.set(row.parity.0, block, parity.lost());
                Ok(word.lost())
            }
        }
    }

    /// Takes the locks of a member's blocks and of their parity. Returns them with the row as it is then;
    /// `None`: the member or its parity is missing, or was replaced meanwhile.
    async fn hold_member(
        &self,
        core: &SessionCore,
        rows: Rows,
        stripe: u64,
        blocks: std::ops::Range<u64>,
        offset: u64,
    ) -> Result<Option<(Held<'_, R>, Row)>, FileError> {
        let number = rows.row_of(stripe);
        let Some(before) = self.row(rows, number) else { return Ok(None) };
        let Some(extent) = before.member(stripe) else { return Ok(None) };
        let (parity, parity_extent) = &before.parity;
        let own = (!is_parity(stripe)).then_some((stripe, &**extent, blocks.clone()));
        let members = own.into_iter().chain([(*parity, &**parity_extent, blocks)]);
        let held = Held::take(&self.store, core, members, offset).await?;
        let Some(row) = self.row(rows, number) else { return Ok(None) };
        let same = |member: u64| match (before.member(member), row.member(member)) {
            (Some(before), Some(now)) => Arc::ptr_eq(before, now),
            _ => false,
        };
        Ok((same(stripe) && same(*parity)).then_some((held, row)))
    }

    /// Repairs one block in place, if it does not match its word and can be reconstructed. Returns whether it
    /// now matches.
    pub(crate) async fn repair_block(
        &self,
        core: &SessionCore,
        rows: Rows,
        stripe: u64,
        block: u64,
    ) -> Result<bool, FileError> {
        let offset = rows.data_of(rows.row_of(stripe)).start * EXTENT_BYTES + block * BLOCK;
        let held = self.hold_member(core, rows, stripe, block..block + 1, offset).await?;
        let Some((mut held, row)) = held else {
            // A member was replaced meanwhile: this one may still need repair.
            self.store.volume.ask_for_repair();
            return Ok(true);
        };
        let (word, parity, extent) = self.words_held(&row, &held, stripe, block);
        if word.is_empty() {
            return Ok(true);
        }
        if extent.region().has_ended() || R::may_still_change(extent) || word.is_lost() && !is_parity(stripe)
        {
            return Ok(false); // to be rebuilt elsewhere, or lost
        }
        if !word.is_lost() {
            match self.stored_block(core, extent, block, word).await {
                Ok(_) => return Ok(true),
                Err(Unfit::Later(error)) => return Err(error),
                Err(Unfit::Gone) => {}
            }
        }
        let right = match self.remake(core, &row, (stripe, block), word, parity).await {
            Ok(right) => right,
            Err(Unfit::Later(error)) => return Err(error),
            Err(Unfit::Gone) => {
                // A parity block that cannot be computed does not count as lost: only data do.
                self.store.volume.beyond_repair(u64::from(!is_parity(stripe)));
                return Ok(false);
            }
        };
        let mut buffer = staging(core, BLOCK_BYTES)?;
        buffer.copy_from_slice(&right);
        held.repairing = true;
        let (buffer, written) = core.write(extent, block * BLOCK, buffer).await;
        written.map_err(|error| FileError::from_access(error, offset))?;
        held.repairing = false;
        if word.is_lost() || !word.matches(R::checksum(&buffer)) {
            held.set(stripe, block, word.written(R::checksum(&buffer)));
        }
        self.store.volume.repaired();
        Ok(true)
    }
}

/// Why a place cannot be read for now; `None`: it is lost.
fn unread_for_now(error: AccessError, extent: &Extent, offset: u64) -> Option<FileError> {
    let for_now = |error| match FileError::from_access(error, offset) {
        FileError::Lost { .. } => FileError::Unavailable { offset },
        other => other,
    };
    (!extent.region().has_ended()).then(|| for_now(error))
}
