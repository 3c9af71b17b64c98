//! Reading: from far memory to the session's arena; every block is checked against its word (B1).

use std::iter;
use std::ops::Range;
use std::sync::Arc;

use farpool_fabric::ArenaBuf;
use farpool_pool::{AccessError, Extent, SessionCore};
use farpool_wire::{BLOCK_BYTES, BlockWord};
use futures_util::future::join_all;

use crate::blocks::{BLOCKS_PER_EXTENT, BlockWords};
use crate::error::FileError;
use crate::file_core::FileCore;
use crate::rules::Rules;
use crate::split::{Piece, pieces};
use crate::staging::staging;

/// How often a piece is read again because a writer changed it meanwhile, before the reader gives up.
pub(crate) const MAX_OVERTAKEN: u32 = 10_000;

impl<R: Rules> FileCore<R> {
    /// Reads up to `length` bytes. Returns a buffer of whole blocks, and where in it the bytes lie; no
    /// buffer: no bytes.
    pub async fn read(
        &self,
        core: &SessionCore,
        offset: u64,
        length: usize,
    ) -> Result<(Option<ArenaBuf>, Range<usize>), FileError> {
        let size = {
            let map = self.map.read();
            map.check_end()?;
            map.size()
        };
        let bytes = (length as u64).min(size.saturating_sub(offset));
        if bytes == 0 {
            return Ok((None, 0..0));
        }
        let skipped = offset % BLOCK_BYTES as u64;
        let whole = match self.rows() {
            None => {
                let aligned = (skipped + bytes).next_multiple_of(BLOCK_BYTES as u64);
                let buffer = staging(core, aligned as usize)?;
                let read = |piece, own| self.read_piece(core, piece, own);
                in_pieces(offset, bytes, buffer, read).await?
            }
            Some(rows) => self.read_rows(core, rows, offset, bytes).await?,
        };
        Ok((Some(whole), skipped as usize..(skipped + bytes) as usize))
    }

    /// Reads the blocks that a piece of a file without rows touches.
    pub(crate) async fn read_piece(
        &self,
        core: &SessionCore,
        piece: Piece,
        mut buffer: ArenaBuf,
    ) -> Result<ArenaBuf, FileError> {
        let extent = {
            let map = self.map.read();
            if let Some((offset, _)) = map.first_lost(&piece) {
                return Err(FileError::Lost { offset });
            }
            map.extent(piece.stripe)
        };
        match extent {
            None => {
                buffer.fill(0);
                Ok(buffer)
            }
            Some(extent) => self.read_extent(core, piece, extent, buffer).await,
        }
    }

    async fn read_extent(
        &self,
        core: &SessionCore,
        piece: Piece,
        extent: Arc<Extent>,
        buffer: ArenaBuf,
    ) -> Result<ArenaBuf, FileError> {
        let start = piece.file_offset(piece.aligned_start());
        let words = &self.store.words;
        read_verified::<R>(words, core, piece, &extent, buffer, MAX_OVERTAKEN).await.map_err(|unread| {
            match unread {
                Unread::Word(error) => error,
                Unread::Access(error) => FileError::from_access(error, start),
                Unread::Wrong(block) => self.damaged(&extent, piece.file_offset(block * BLOCK_BYTES as u64)),
                Unread::Overtaken => FileError::Unavailable { offset: piece.file_offset(piece.start) },
            }
        })
    }

    pub(crate) fn damaged(&self, extent: &Extent, offset: u64) -> FileError {
        if extent.region().node.is_lost() {
            return FileError::Lost { offset };
        }
        tracing::error!(region = %extent.region().id, offset, "a block does not hold the data that were written there");
        FileError::Damaged { offset }
    }
}

/// Why a piece was not read.
pub(crate) enum Unread {
    /// A block stayed locked, or is lost.
    Word(FileError),
    Access(AccessError),
    /// This block of the extent does not match its word.
    Wrong(u64),
    /// Writers changed the piece during each try.
    Overtaken,
}

/// Reads a piece's blocks from their extent until all of them match their words. Tries at most `times` times,
/// because writers may change the blocks during a read.
pub(crate) async fn read_verified<R: Rules>(
    words: &BlockWords,
    core: &SessionCore,
    piece: Piece,
    extent: &Extent,
    mut buffer: ArenaBuf,
    times: u32,
) -> Result<ArenaBuf, Unread> {
    let mut before = [BlockWord::EMPTY; BLOCKS_PER_EXTENT as usize];
    for _ in 0..times {
        let before = words_of(words, core, piece, extent, &mut before).await.map_err(Unread::Word)?;
        if before.iter().all(|word| word.is_empty()) {
            buffer.fill(0);
            return Ok(buffer);
        }
        let (returned, result) = core.read(extent, piece.aligned_start(), buffer).await;
        buffer = returned;
        result.map_err(Unread::Access)?;
        match verify::<R>(words, extent, piece.first_block(), before, &mut buffer) {
            Verdict::Right => return Ok(buffer),
            Verdict::Wrong(block) => return Err(Unread::Wrong(block)),
            Verdict::Overtaken => {}
        }
    }
    Err(Unread::Overtaken)
}

/// The words of a piece's blocks, each read while its lock was free.
pub(crate) async fn words_of<'a>(
    words: &BlockWords,
    core: &SessionCore,
    piece: Piece,
    extent: &Extent,
    found: &'a mut [BlockWord],
) -> Result<&'a [BlockWord], FileError> {
    let count = (piece.end_block() - piece.first_block()) as usize;
    for (block, word) in (piece.first_block()..).zip(&mut found[..count]) {
        let offset = piece.file_offset(block * BLOCK_BYTES as u64);
        let unlocked = words.unlocked(core.endpoint(), words.place(extent, block)).await;
        *word = unlocked.map_err(|_| FileError::Unavailable { offset })?;
        if word.is_lost() {
            return Err(FileError::Lost { offset });
        }
    }
    Ok(&found[..count])
}

/// Reads all pieces of a range at once, each into its part of a buffer.
pub(crate) async fn in_pieces<F, E>(
    offset: u64,
    bytes: u64,
    buffer: ArenaBuf,
    read: impl Fn(Piece, ArenaBuf) -> F,
) -> Result<ArenaBuf, E>
where
    F: Future<Output = Result<ArenaBuf, E>>,
{
    let mut all = pieces(offset, bytes);
    let first = all.next().expect("at least one byte is read");
    if first.aligned_bytes() as usize == buffer.len() {
        return read(first, buffer).await; // most reads have one piece
    }
    let mut rest = Some(buffer);
    let mut reads = Vec::with_capacity(4);
    for piece in iter::once(first).chain(all) {
        let mut own = rest.take().expect("there is a part for each piece");
        let piece_bytes = piece.aligned_bytes() as usize;
        if piece_bytes < own.len() {
            rest = Some(own.split_off(piece_bytes));
        }
        reads.push(read(piece, own));
    }
    // All reads run to their end, even if one fails: an abandoned read would keep its buffer.
    let parts = join_all(reads).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    let mut parts = parts.into_iter();
    let mut whole = parts.next().expect("at least one byte is read");
    parts.for_each(|part| whole.join(part));
    Ok(whole)
}

enum Verdict {
    Right,
    /// Which block of the extent it is.
    Wrong(u64),
    /// A writer changed the blocks while they were read.
    Overtaken,
}

/// Checks blocks just read against the words that they had before the read, and fills empty ones with zeros.
///
/// Data that match the earlier word were the block's contents at a moment within the read. Data that do not
/// match are wrong if the word is still the same, because then no write happened meanwhile.
fn verify<R: Rules>(
    words: &BlockWords,
    extent: &Extent,
    first_block: u64,
    before: &[BlockWord],
    buffer: &mut [u8],
) -> Verdict {
    let blocks = (first_block..).zip(before).zip(buffer.chunks_exact_mut(BLOCK_BYTES));
    for ((block, word), data) in blocks {
        if word.is_empty() {
            data.fill(0);
        } else if !word.matches(R::checksum(data)) {
            let unchanged = words.load(words.place(extent, block)) == *word;
            return if unchanged { Verdict::Wrong(block) } else { Verdict::Overtaken };
        }
    }
    Verdict::Right
}
