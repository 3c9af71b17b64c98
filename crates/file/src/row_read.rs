//! Reading files with rows: blocks that one member does not give are reconstructed from the other members.
//!
//! A read changes no block, except that it repairs in place a block that does not match its word.
//!
//! A read does not wait for a slow node if the other members are enough: it reconstructs the blocks, and for
//! a while reads do not ask the slow node (hedged reads).

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::ArenaBuf;
use farpool_pool::{EXTENT_BYTES, Extent, SessionCore};
use farpool_wire::{BLOCK_BYTES, BlockWord};
use futures_util::future::{Either, select};

use crate::blocks::BLOCKS_PER_EXTENT;
use crate::error::FileError;
use crate::file_core::FileCore;
use crate::read::{MAX_OVERTAKEN, in_pieces, words_of};
use crate::reconstruct::{Remade, Unfit};
use crate::redundancy::Rows;
use crate::rules::Rules;
use crate::split::Piece;
use crate::staging::staging_in_time;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// A node is slow if a read takes longer: a hundred times what it takes over the slowest transport.
const SLOW_AFTER: Duration = Duration::from_millis(20);
/// For how long reads do not ask a slow node. An abandoned read keeps its buffer until the node answers or
/// its deadline passes, so there must not be many abandoned reads.
const SLOW_FOR_MS: u64 = 1_000;

/// The outcome of one attempt to read part of an extent.
enum Attempt {
    Done(ArenaBuf),
    Overtaken(ArenaBuf),
}

/// A part as it was read from its place.
struct Taken {
    buffer: ArenaBuf,
    /// Why the buffer holds nothing.
    failure: Option<Unfit>,
}

/// Why a part was not read.
enum Failed {
    /// Its node is slow, and keeps the buffer. The next try avoids the node.
    Slow,
    For(FileError),
}

impl From<FileError> for Failed {
    fn from(error: FileError) -> Self {
        Failed::For(error)
    }
}

impl<R: Rules> FileCore<R> {
    /// Reads a range, and returns it as whole blocks.
    pub(crate) async fn read_rows(
        &self,
        core: &SessionCore,
        rows: Rows,
        offset: u64,
        bytes: u64,
    ) -> Result<ArenaBuf, FileError> {
        let aligned = (offset % BLOCK + bytes).next_multiple_of(BLOCK) as usize;
        let mut patient = false;
        loop {
            let buffer = staging_in_time(core, aligned).await?;
            let read = |piece, own| self.read_in_row(core, rows, piece, own, patient);
            match in_pieces(offset, bytes, buffer, read).await {
                Ok(whole) => return Ok(whole),
                Err(Failed::For(error)) => return Err(error),
                Err(Failed::Slow) => {
                    self.store.volume.hedged();
                    // Wait for a second slow node: a row can do without only one member.
                    patient = true;
                }
            }
        }
    }

    /// Reads the blocks that a piece touches.
    async fn read_in_row(
        &self,
        core: &SessionCore,
        rows: Rows,
        piece: Piece,
        mut buffer: ArenaBuf,
        patient: bool,
    ) -> Result<ArenaBuf, Failed> {
        for _ in 0..MAX_OVERTAKEN {
            let extent = {
                let map = self.map.read();
                if let Some((offset, _)) = map.first_lost(&piece) {
                    return Err(FileError::Lost { offset }.into());
                }
                map.extent(piece.stripe)
            };
            let Some(extent) = extent else {
                buffer.fill(0);
                return Ok(buffer);
            };
            match self.read_member(core, rows, piece, &extent, buffer, patient).await? {
                Attempt::Done(buffer) => return Ok(buffer),
                Attempt::Overtaken(returned) => buffer = returned,
            }
        }
        Err(FileError::Unavailable { offset: piece.file_offset(piece.start) }.into())
    }

    async fn read_member(
        &self,
        core: &SessionCore,
        rows: Rows,
        piece: Piece,
        extent: &Arc<Extent>,
        mut buffer: ArenaBuf,
        patient: bool,
    ) -> Result<Attempt, Failed> {
        let mut before = [BlockWord::EMPTY; BLOCKS_PER_EXTENT as usize];
        let before = words_of(&self.store.words, core, piece, extent, &mut before).await?;
        if before.iter().all(|word| word.is_empty()) {
            buffer.fill(0);
            return Ok(Attempt::Done(buffer));
        }
        let is_slow = extent.region().node.is_slow(self.store.stock.now().0);
        if is_slow && self.make_piece(core, rows, piece, extent, before, &mut buffer).await {
            return Ok(Attempt::Done(buffer));
        }
        let taken = if extent.region().has_ended() {
            Taken { buffer, failure: Some(Unfit::Gone) }
        } else {
            self.take_from(core, piece, extent, buffer, patient).await?
        };
        self.put_right(core, rows, piece, extent, before, taken).await
    }

    /// Reads a piece from its place. Gives up if its node is slow, unless the caller is `patient`.
    async fn take_from(
        &self,
        core: &SessionCore,
        piece: Piece,
        extent: &Extent,
        buffer: ArenaBuf,
        patient: bool,
    ) -> Result<Taken, Failed> {
        let read = pin!(core.read(extent, piece.aligned_start(), buffer));
        // A wait for the overflow directory says nothing about a node, and the rest of the row may lie there,
        // too.
        let (buffer, result) = if patient || extent.region().is_overflow() {
            read.await
        } else {
            match select(read, pin!(core.endpoint().sleep(SLOW_AFTER))).await {
                Either::Left((read, _)) => read,
                Either::Right(_) => {
                    extent.region().node.set_slow_until(self.store.stock.now().0 + SLOW_FOR_MS);
                    return Err(Failed::Slow);
                }
            }
        };
        let later = |error| Unfit::Later(FileError::from_access(error, piece.file_offset(piece.start)));
        Ok(Taken { buffer, failure: result.err().map(later) })
    }

    /// Checks the blocks that were read against their words, and reconstructs wrong ones from the other
    /// members.
    async fn put_right(
        &self,
        core: &SessionCore,
        rows: Rows,
        piece: Piece,
        extent: &Arc<Extent>,
        before: &[BlockWord],
        taken: Taken,
    ) -> Result<Attempt, Failed> {
        let Taken { mut buffer, failure } = taken;
        let is_read = failure.is_none();
        let words = &self.store.words;
        for ((block, word), data) in
            (piece.first_block()..).zip(before).zip(buffer.chunks_exact_mut(BLOCK_BYTES))
        {
            if word.is_empty() {
                data.fill(0);
                continue;
            }
            if is_read && word.matches(R::checksum(data)) {
                continue;
            }
            if words.load(words.place(extent, block)).unlocked() != *word {
                return Ok(Attempt::Overtaken(buffer));
            }
            match self.remake_for_reader(core, rows, (piece.stripe, block), extent, *word).await {
                Ok(Remade::Right(right)) => data.copy_from_slice(&right),
                Ok(Remade::Overtaken) => return Ok(Attempt::Overtaken(buffer)),
                Err(unfit) => return Err(unavailable(extent, piece, block, failure, unfit).into()),
            }
            if is_read {
                self.store.volume.found_wrong();
                // The repair is for later readers; this one has its data.
                let _tried = self.repair_block(core, rows, piece.stripe, block).await;
            }
        }
        Ok(Attempt::Done(buffer))
    }

    /// Reconstructs the blocks of a piece from the other blocks of their columns. Returns whether it could
    /// reconstruct all of them.
    async fn make_piece(
        &self,
        core: &SessionCore,
        rows: Rows,
        piece: Piece,
        extent: &Arc<Extent>,
        words: &[BlockWord],
        buffer: &mut ArenaBuf,
    ) -> bool {
        for ((block, word), data) in
            (piece.first_block()..).zip(words).zip(buffer.chunks_exact_mut(BLOCK_BYTES))
        {
            if word.is_empty() {
                data.fill(0);
                continue;
            }
            match self.remake_for_reader(core, rows, (piece.stripe, block), extent, *word).await {
                Ok(Remade::Right(right)) => data.copy_from_slice(&right),
                Ok(Remade::Overtaken) | Err(_) => return false,
            }
        }
        true
    }
}

/// The error if neither the member nor the rest of the row has a block. A block that does not match its word
/// gives the same error as a lost one: its store may have failed, and the rest of the row, which then had its
/// contents, may be lost since (W2 of `row_write`).
fn unavailable(extent: &Extent, piece: Piece, block: u64, failure: Option<Unfit>, unfit: Unfit) -> FileError {
    let offset = piece.stripe * EXTENT_BYTES + block * BLOCK;
    match (failure, unfit) {
        (Some(Unfit::Later(error)), _) | (_, Unfit::Later(error)) => error,
        (None, Unfit::Gone) if !extent.is_in_doubt() => {
            let region = extent.region().id;
            tracing::warn!(%region, offset, "a block does not hold the data that were written last, and the rest of its row does not have them");
            FileError::Lost { offset }
        }
        (_, Unfit::Gone) => FileError::Lost { offset },
    }
}
