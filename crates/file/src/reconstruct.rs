//! Reconstructing the contents of a member of a row from the other members.
//!
//! P1. If a parity block's word is not *lost*, contents that match this word are the exclusive or of the data
//!     blocks of the column, where each data block has contents that match its own word. Empty and lost data
//!     blocks count as zeros.
//! P2. Reconstructed data are checked against their words like data that were read: a wrong byte does not
//!     pass.

use std::sync::Arc;

use farpool_pool::{AccessError, Extent, SessionCore};
use farpool_wire::{BLOCK_BYTES, BlockWord};
use futures_util::future::join_all;

use crate::error::FileError;
use crate::file_core::FileCore;
use crate::held::Held;
use crate::parity;
use crate::redundancy::{Rows, is_parity};
use crate::rows::Row;
use crate::rules::Rules;
use crate::staging::staging;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Why a block's contents are not available.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unfit {
    /// Its place is lost, or the bytes there do not match its word.
    Gone,
    /// It cannot be read for now; nothing is known to be wrong with it.
    Later(FileError),
}

impl Unfit {
    fn from_access(error: AccessError) -> Self {
        match FileError::from_access(error, 0) {
            FileError::Lost { .. } => Unfit::Gone,
            other => Unfit::Later(other),
        }
    }
}

/// The outcome of reconstructing a block.
pub(crate) enum Remade {
    Right(Vec<u8>),
    /// The block has a new word, so that the old one cannot be matched any more.
    Overtaken,
}

impl<R: Rules> FileCore<R> {
    /// A block as it was when its word was stored, read from its place. The caller holds the column.
    pub(crate) async fn stored_block(
        &self,
        core: &SessionCore,
        extent: &Extent,
        block: u64,
        word: BlockWord,
    ) -> Result<Vec<u8>, Unfit> {
        if extent.region().has_ended() {
            return Err(Unfit::Gone);
        }
        let buffer = staging(core, BLOCK_BYTES).map_err(Unfit::Later)?;
        let (buffer, read) = core.read(extent, block * BLOCK, buffer).await;
        read.map_err(|error| match Unfit::from_access(error) {
            // A node that is busy, or a lease that a renewal may still extend.
            Unfit::Gone if !extent.region().has_ended() => Unfit::Later(FileError::Unavailable { offset: 0 }),
            unfit => unfit,
        })?;
        if word.matches(R::checksum(&buffer)) { Ok(buffer.to_vec()) } else { Err(Unfit::Gone) }
    }

    /// The exclusive or of blocks of one column. Empty and lost blocks count as zeros (P1). The caller holds
    /// the column.
    pub(crate) async fn sum_of(
        &self,
        core: &SessionCore,
        members: &[(Arc<Extent>, BlockWord)],
        block: u64,
    ) -> Result<Vec<u8>, Unfit> {
        let with_data = members.iter().filter(|(_, word)| !word.is_empty() && !word.is_lost());
        let reads = with_data.map(|(extent, word)| self.stored_block(core, extent, block, *word));
        let mut sum = vec![0; BLOCK_BYTES];
        // All reads run to their end: an abandoned read would keep its buffer.
        for block in join_all(reads).await {
            parity::add(&mut sum, &block?);
        }
        Ok(sum)
    }

    /// The words of a column's members other than `stripe`. The caller holds the column, so a lock on one of
    /// them belongs to a writer that waits for the column.
    pub(crate) fn words_beside(
        &self,
        row: &Row,
        stripe: u64,
        block: u64,
        parity: BlockWord,
    ) -> Vec<(Arc<Extent>, BlockWord)> {
        let words = &self.store.words;
        let others = row.members().filter(|(member, _)| *member != stripe);
        let with_word = others.map(|(member, extent)| {
            let load = || words.load(words.place(extent, block)).unlocked();
            (extent.clone(), if is_parity(*member) { parity } else { load() })
        });
        with_word.collect()
    }

    /// Reconstructs a member's block from the other blocks of its column, which the caller holds. Data must
    /// match `word`. A parity is computed from the data, and need not match.
    pub(crate) async fn remake(
        &self,
        core: &SessionCore,
        row: &Row,
        (stripe, block): (u64, u64),
        word: BlockWord,
        parity: BlockWord,
    ) -> Result<Vec<u8>, Unfit> {
        if !is_parity(stripe) && parity.is_lost() {
            return Err(Unfit::Gone);
        }
        let sum = self.sum_of(core, &self.words_beside(row, stripe, block, parity), block).await?;
        let is_right = is_parity(stripe) || word.matches(R::checksum(&sum));
        if is_right { Ok(sum) } else { Err(Unfit::Gone) }
    }

    /// As [`remake`](Self::remake) for a reader, which holds no locks: takes the column while it works.
    /// `word` is the word that the reader has found.
    pub(crate) async fn remake_for_reader(
        &self,
        core: &SessionCore,
        rows: Rows,
        (stripe, block): (u64, u64),
        extent: &Arc<Extent>,
        word: BlockWord,
    ) -> Result<Remade, Unfit> {
        let number = rows.row_of(stripe);
        let offset = stripe * farpool_pool::EXTENT_BYTES + block * BLOCK;
        let Some(row) = self.row(rows, number) else { return Ok(Remade::Overtaken) };
        let (parity, parity_extent) = (row.parity.0, row.parity.1.clone());
        let words = &self.store.words;
        let members = [(parity, &*parity_extent, block..block + 1)];
        let held = Held::<R>::take(&self.store, core, members, offset).await.map_err(Unfit::Later)?;
        // Read under the lock, so that the column stays as it is.
        let Some(row) = self.row(rows, number) else { return Ok(Remade::Overtaken) };
        let in_place = row.member(stripe).is_some_and(|now| Arc::ptr_eq(now, extent))
            && Arc::ptr_eq(&row.parity.1, &parity_extent);
        if !in_place || words.load(words.place(extent, block)).unlocked() != word {
            return Ok(Remade::Overtaken);
        }
        let parity = held.word(parity, block).expect("it was just locked");
        self.remake(core, &row, (stripe, block), word, parity).await.map(Remade::Right)
    }
}
