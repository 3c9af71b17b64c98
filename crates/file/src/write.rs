//! Writing: a block is locked, then stored in far memory, and only then gets its new word (B3).

use std::marker::PhantomData;
use std::sync::Arc;

use farpool_pool::{AccessError, Extent, SessionCore};
use farpool_wire::{BLOCK_BYTES, BlockWord};
use futures_util::future::join_all;

use crate::blocks::{BlockPlace, BlockWords};
use crate::error::{FileError, nothing_was_stored};
use crate::file_core::FileCore;
use crate::map::Loss;
use crate::rules::Rules;
use crate::split::{Piece, pieces_of};
use crate::staging::staging;

/// How many times a write starts again because its extent was moved or truncated while the write waited. A
/// move causes one new start; more happen only if other operations truncate the file again and again.
pub(crate) const MAX_MOVES: u32 = 16;

/// The outcome of storing a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stored {
    Yes,
    /// Nothing was stored: the extent is no longer the file's.
    Elsewhere,
    /// Nothing was stored: a late write may still land on these blocks.
    MoveFirst,
}

/// Runs all writes to their end, even if one fails: a write dropped halfway would be in doubt.
pub(crate) async fn all_to_their_end<E>(
    mut writes: impl Iterator<Item: Future<Output = Result<(), E>>>,
) -> Result<(), E> {
    let Some(first) = writes.next() else { return Ok(()) };
    let Some(second) = writes.next() else {
        return first.await; // most writes have one piece
    };
    join_all([first, second].into_iter().chain(writes)).await.into_iter().collect()
}

impl<R: Rules> FileCore<R> {
    /// Writes all of `data` at `offset`, wherever the file ends; the file's size stays.
    pub(crate) async fn write_blocks(
        &self,
        core: &SessionCore,
        offset: u64,
        data: &[u8],
    ) -> Result<(), FileError> {
        if let Some(rows) = self.rows() {
            self.write_rows(core, rows, offset, data).await?;
            self.written_anew(offset, data);
            return Ok(());
        }
        let writes = pieces_of(offset, data).map(|(piece, own)| self.write_piece(core, piece, own));
        all_to_their_end(writes).await?;
        self.written_anew(offset, data);
        Ok(())
    }

    /// Forgets losses in a range that was written.
    fn written_anew(&self, offset: u64, data: &[u8]) {
        if self.map.read().has_lost() {
            self.map.write().unlose(offset, data.len() as u64);
        }
    }

    async fn write_piece(&self, core: &SessionCore, piece: Piece, data: &[u8]) -> Result<(), FileError> {
        if piece.is_whole_extent() {
            self.replace_lost(piece.stripe).await?;
        }
        for _ in 0..MAX_MOVES {
            let (extent, _) = self.ensure_extent(piece.stripe).await?;
            match self.store_piece(core, piece, &extent, |target| target.copy_from_slice(data)).await? {
                Stored::Yes => return Ok(()),
                Stored::Elsewhere => {}
                Stored::MoveFirst => self.move_extent(core, piece.stripe).await?,
            }
        }
        Err(FileError::Unavailable { offset: piece.file_offset(piece.start) })
    }

    /// Replaces a lost extent that is about to be written as a whole. Until the new contents are stored,
    /// reading still fails, even if they never are: a hole would read as zeros.
    async fn replace_lost(&self, stripe: u64) -> Result<(), FileError> {
        let lost = || self.map.read().extent(stripe).filter(|extent| extent.region().has_ended());
        if lost().is_none() {
            return Ok(());
        }
        let _turn = self.turn_to_take(stripe).await;
        let Some(lost) = lost() else { return Ok(()) };
        let fresh = self.take_extent(stripe, None).await?;
        self.store.words.lose(&fresh);
        let _by_us = self.map.write().replace(stripe, &lost, fresh); // or another task has done it
        Ok(())
    }

    /// Makes part of an extent read as zeros: whole blocks by their words alone. A block that cannot be
    /// zeroed is marked lost: its old contents must not appear again.
    pub(crate) async fn zero(&self, core: &SessionCore, piece: Piece) {
        for block in piece.first_block()..piece.end_block() {
            let start = block * BLOCK_BYTES as u64;
            let within = Piece {
                stripe: piece.stripe,
                start: piece.start.max(start),
                end: piece.end.min(start + BLOCK_BYTES as u64),
            };
            self.zero_block(core, within).await;
        }
    }

    async fn zero_block(&self, core: &SessionCore, within: Piece) {
        for _ in 0..MAX_MOVES {
            let Some(extent) = self.map.read().extent(within.stripe) else { return };
            match self.zero_in(core, within, &extent).await {
                Ok(true) => return,
                Ok(false) => {}
                // `lose_in` returns false if the extent was moved or truncated meanwhile: then the block that
                // failed is no longer the file's.
                Err(_) if self.map.write().lose_in(&within, &extent) => return,
                Err(_) => {}
            }
        }
        self.map.write().lose(within.file_offset(within.start), within.end - within.start, Loss::Gone);
    }

    /// Zeros part of one block. `false`: the extent is no longer the file's.
    async fn zero_in(
        &self,
        core: &SessionCore,
        within: Piece,
        extent: &Arc<Extent>,
    ) -> Result<bool, FileError> {
        let words = &self.store.words;
        let block = within.first_block();
        if within.covers(block) {
            let locks = Locks::<R>::take(words, core, extent, within, block..block + 1).await?;
            if !self.is_in_place(within.stripe, extent) {
                return Ok(false);
            }
            locks.release(|_, _| BlockWord::EMPTY);
            self.forget_losses(within);
            return Ok(true);
        }
        if words.load(words.place(extent, block)).is_empty() {
            return Ok(true);
        }
        match self.store_piece(core, within, extent, |target| target.fill(0)).await? {
            Stored::Yes => Ok(true),
            Stored::Elsewhere => Ok(false),
            // Only an extent with lost blocks has to be moved first, and a lost block has no contents to
            // keep.
            Stored::MoveFirst => Err(FileError::Lost { offset: within.file_offset(within.start) }),
        }
    }

    /// Forgets losses in whole blocks that were cleared. Another task may have failed to clear part of one
    /// since clearing began.
    pub(crate) fn forget_losses(&self, cleared: Piece) {
        if self.map.read().has_lost() {
            self.map.write().unlose(cleared.file_offset(cleared.start), cleared.end - cleared.start);
        }
    }

    /// Whether a stripe still lies in this extent. The holder of a lock on one of its blocks may rely on the
    /// answer.
    fn is_in_place(&self, stripe: u64, extent: &Arc<Extent>) -> bool {
        self.map.read().extent(stripe).is_some_and(|now| Arc::ptr_eq(&now, extent))
    }

    /// Locks the blocks of a piece, lets `fill` put the new bytes among the old ones, and stores the blocks
    /// whole. Stores nothing if the extent was moved or truncated away meanwhile, or has to be moved first.
    pub(crate) async fn store_piece(
        &self,
        core: &SessionCore,
        piece: Piece,
        extent: &Arc<Extent>,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Stored, FileError> {
        let blocks = piece.first_block()..piece.end_block();
        let locks = Locks::<R>::take(&self.store.words, core, extent, piece, blocks).await?;
        if !self.is_in_place(piece.stripe, extent) {
            return Ok(Stored::Elsewhere);
        }
        // Blocks that a late write may hit are lost, or were lost and have been cleared since. Readable
        // blocks are not among them.
        if self.store.words.is_doubted(extent) {
            extent.doubt(); // a direct client may have recorded it
        }
        if R::may_still_change(extent) && locks.any(|word| word.is_lost() || word.is_empty()) {
            return Ok(Stored::MoveFirst);
        }
        match locks.store(core, piece, |block| self.recorded_loss(piece, block), fill).await {
            Ok(()) => Ok(Stored::Yes),
            Err(unstored) => Err(self.not_stored(unstored, piece, extent)),
        }
    }

    fn recorded_loss(&self, piece: Piece, block: u64) -> Option<Loss> {
        let start = block * BLOCK_BYTES as u64;
        let whole = Piece { start, end: start + BLOCK_BYTES as u64, ..piece };
        self.map.read().first_lost(&whole).map(|(_, loss)| loss)
    }

    fn not_stored(&self, unstored: Unstored, piece: Piece, extent: &Extent) -> FileError {
        let offset = |block: u64| piece.file_offset(block * BLOCK_BYTES as u64);
        match unstored {
            Unstored::NoRoom(error) => error,
            Unstored::Lost(block) => FileError::Lost { offset: offset(block) },
            Unstored::Recorded(block, loss) => loss.to_writer(offset(block)),
            Unstored::Unread(block, error) => FileError::from_access(error, offset(block)),
            Unstored::Wrong(block) => self.damaged(extent, offset(block)),
            Unstored::Failed(error) => FileError::from_access(error, piece.file_offset(piece.start)),
        }
    }
}

/// Why a piece was not stored. The numbers are those of blocks that the piece covers only in part.
pub(crate) enum Unstored {
    /// There is no room for the transfer.
    NoRoom(FileError),
    /// The block is lost.
    Lost(u64),
    /// A loss is recorded for the block.
    Recorded(u64, Loss),
    /// The block could not be read.
    Unread(u64, AccessError),
    /// The block does not match its word.
    Wrong(u64),
    /// Storing failed. Unless certainly nothing was stored, the blocks are in doubt.
    Failed(AccessError),
}

/// Locks on consecutive blocks of an extent. Dropping them leaves the blocks as they were, or lost if a write
/// to them was given up halfway.
pub(crate) struct Locks<'a, R: Rules> {
    words: &'a BlockWords,
    extent: &'a Extent,
    /// A write was posted and its outcome is not known yet.
    in_doubt: bool,
    first_block: u64,
    held: Vec<(BlockPlace, BlockWord)>,
    rules: PhantomData<R>,
}

impl<'a, R: Rules> Locks<'a, R> {
    /// Takes them in ascending order, as every writer does, so that two writers cannot wait for each other.
    pub(crate) async fn take(
        words: &'a BlockWords,
        core: &SessionCore,
        extent: &'a Extent,
        piece: Piece,
        blocks: std::ops::Range<u64>,
    ) -> Result<Locks<'a, R>, FileError> {
        let count = (blocks.end - blocks.start) as usize;
        let mut locks = Locks {
            words,
            extent,
            in_doubt: false,
            first_block: blocks.start,
            held: Vec::with_capacity(count),
            rules: PhantomData,
        };
        for block in blocks {
            let place = words.place(extent, block);
            let word = words.lock(core.endpoint(), place).await.map_err(|_| FileError::Unavailable {
                offset: piece.file_offset(block * BLOCK_BYTES as u64),
            })?;
            locks.held.push((place, word));
        }
        Ok(locks)
    }

    /// A block's word as it was when it was locked.
    pub(crate) fn word(&self, block: u64) -> BlockWord {
        self.held[(block - self.first_block) as usize].1
    }

    /// Whether `is_such` holds for some block's word, as it was when it was locked.
    pub(crate) fn any(&self, is_such: impl Fn(BlockWord) -> bool) -> bool {
        self.held.iter().any(|&(_, word)| is_such(word))
    }

    /// Stores a piece, whose blocks are the locked ones, and unlocks them: reads the blocks that the piece
    /// covers only in part, lets `fill` put the new bytes among the old ones, and stores the blocks whole. No
    /// block is read for which `recorded` gives a loss.
    pub(crate) async fn store(
        mut self,
        core: &SessionCore,
        piece: Piece,
        recorded: impl Fn(u64) -> Option<Loss>,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), Unstored> {
        let mut buffer = staging(core, piece.aligned_bytes() as usize).map_err(Unstored::NoRoom)?;
        for block in piece.partial_blocks() {
            self.read_old(core, block, &recorded, &mut buffer[piece.place_of(block)]).await?;
        }
        let start = (piece.start - piece.aligned_start()) as usize;
        fill(&mut buffer[start..start + (piece.end - piece.start) as usize]);
        self.in_doubt = true; // until the blocks are released, their contents are indeterminate
        let (buffer, result) = core.write(self.extent, piece.aligned_start(), buffer).await;
        match result {
            Ok(()) => {
                self.release(|word, at| word.written(R::checksum(&buffer[at..at + BLOCK_BYTES])));
                Ok(())
            }
            Err(error) => {
                if nothing_was_stored(&error) {
                    self.release(|word, _| word);
                } // otherwise dropping the locks records the doubt
                Err(Unstored::Failed(error))
            }
        }
    }

    /// Reads a locked block.
    async fn read_old(
        &self,
        core: &SessionCore,
        block: u64,
        recorded: impl Fn(u64) -> Option<Loss>,
        to: &mut [u8],
    ) -> Result<(), Unstored> {
        let word = self.word(block);
        if word.is_lost() {
            return Err(Unstored::Lost(block));
        }
        if let Some(loss) = recorded(block) {
            return Err(Unstored::Recorded(block, loss));
        }
        if word.is_empty() {
            to.fill(0);
            return Ok(());
        }
        let buffer = staging(core, BLOCK_BYTES).map_err(Unstored::NoRoom)?;
        let (buffer, result) = core.read(self.extent, block * BLOCK_BYTES as u64, buffer).await;
        result.map_err(|error| Unstored::Unread(block, error))?;
        if !word.matches(R::checksum(&buffer)) {
            return Err(Unstored::Wrong(block));
        }
        to.copy_from_slice(&buffer);
        Ok(())
    }

    /// Unlocks all blocks. `next` makes each new word, from the old word and the block's offset in the
    /// buffer.
    pub(crate) fn release(mut self, next: impl Fn(BlockWord, usize) -> BlockWord) {
        for (index, (place, word)) in self.held.drain(..).enumerate() {
            self.words.store(place, next(word, index * BLOCK_BYTES));
        }
    }
}

impl<R: Rules> Drop for Locks<'_, R> {
    fn drop(&mut self) {
        if self.in_doubt && !self.held.is_empty() {
            self.words.doubt(self.extent);
        }
        for (place, word) in self.held.drain(..) {
            self.words.store(place, if self.in_doubt { R::in_doubt(word) } else { word });
        }
    }
}
