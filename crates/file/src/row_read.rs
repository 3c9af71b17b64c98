//! Reading files with rows: what one member does not give is made again from the others.
//!
//! Nothing of a read changes a block, except that one which is not what was written is mended where it lies.

use std::sync::Arc;

use farpool_fabric::ArenaBuf;
use farpool_pool::{EXTENT_BYTES, Extent, SessionCore};
use farpool_wire::{BLOCK_BYTES, BlockWord};

use crate::blocks::BLOCKS_PER_EXTENT;
use crate::error::FileError;
use crate::file_core::FileCore;
use crate::reconstruct::{Remade, Unfit};
use crate::redundancy::Rows;
use crate::rules::Rules;
use crate::split::Piece;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// How often a piece is read anew because a writer changed it meanwhile, before the reader gives up.
const MAX_OVERTAKEN: u32 = 10_000;

/// What came of reading an extent's part once.
enum Attempt {
    Done(ArenaBuf),
    Overtaken(ArenaBuf),
}

impl<R: Rules> FileCore<R> {
    /// Reads the blocks that a piece touches.
    pub(crate) async fn read_in_row(
        &self,
        core: &SessionCore,
        rows: Rows,
        piece: Piece,
        mut buffer: ArenaBuf,
    ) -> Result<ArenaBuf, FileError> {
        for _ in 0..MAX_OVERTAKEN {
            let extent = {
                let map = self.map.read();
                if let Some(offset) = map.first_lost(&piece) {
                    return Err(FileError::Lost { offset });
                }
                map.extent(piece.stripe)
            };
            let Some(extent) = extent else {
                buffer.fill(0);
                return Ok(buffer);
            };
            match self.read_member(core, rows, piece, &extent, buffer).await? {
                Attempt::Done(buffer) => return Ok(buffer),
                Attempt::Overtaken(returned) => buffer = returned,
            }
        }
        Err(FileError::Unavailable { offset: piece.file_offset(piece.start) })
    }

    async fn read_member(
        &self,
        core: &SessionCore,
        rows: Rows,
        piece: Piece,
        extent: &Arc<Extent>,
        mut buffer: ArenaBuf,
    ) -> Result<Attempt, FileError> {
        let mut before = [BlockWord::EMPTY; BLOCKS_PER_EXTENT as usize];
        let before = self.words_of(core, piece, extent, &mut before).await?;
        if before.iter().all(|word| word.is_empty()) {
            buffer.fill(0);
            return Ok(Attempt::Done(buffer));
        }
        let mut is_read = false;
        let mut failure = Unfit::Gone;
        if !extent.region().is_over() {
            let (returned, result) = core.read(extent, piece.aligned_start(), buffer).await;
            buffer = returned;
            is_read = result.is_ok();
            if let Err(error) = result {
                failure = Unfit::Later(FileError::from_access(error, piece.file_offset(piece.start)));
            }
        }
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
                Err(unfit) => return Err(not_to_be_had(extent, piece, block, is_read, failure, unfit)),
            }
            if is_read {
                self.store.volume.found_wrong();
                // Mending is for the next reader; this one has what it wanted.
                let _tried = self.mend_block(core, rows, piece.stripe, block).await;
            }
        }
        Ok(Attempt::Done(buffer))
    }
}

/// Neither the member nor the others have it. A block that is not what its word says is not told apart from one that is lost:
/// its store may have failed, and the others that bore it be gone since (W2 of `row_write`).
fn not_to_be_had(
    extent: &Extent,
    piece: Piece,
    block: u64,
    is_read: bool,
    failure: Unfit,
    unfit: Unfit,
) -> FileError {
    let offset = piece.stripe * EXTENT_BYTES + block * BLOCK;
    match (failure, unfit) {
        (Unfit::Later(error), _) | (Unfit::Gone, Unfit::Later(error)) => error,
        (Unfit::Gone, Unfit::Gone) => {
            if is_read && !extent.is_in_doubt() {
                let region = extent.region().id;
                tracing::warn!(%region, offset, "a block is not what was written last, and the rest of its row does not have it");
            }
            FileError::Lost { offset }
        }
    }
}
