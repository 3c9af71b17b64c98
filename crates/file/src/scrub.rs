//! Scrubbing: every block is read and compared with its word, and every parity with its data. Wrong blocks
//! are reconstructed from the rest of their rows.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use farpool_pool::{EXTENT_BYTES, Extent, SessionCore};
use farpool_wire::{BLOCK_BYTES, BlockWord};

use crate::blocks::BLOCKS_PER_EXTENT;
use crate::error::FileError;
use crate::file_core::FileCore;
use crate::held::Held;
use crate::parity;
use crate::reconstruct::Unfit;
use crate::redundancy::Rows;
use crate::rules::Rules;
use crate::split::Piece;
use crate::staging::staging;
use crate::store::StoreCore;

const BLOCK: u64 = BLOCK_BYTES as u64;

impl<R: Rules> StoreCore<R> {
    /// Reads every block of every file, and repairs wrong ones. Returns the first failure that is not the
    /// fault of a block. Ends early when `stopped` says so.
    pub async fn scrub(&self, core: &SessionCore, stopped: impl Fn() -> bool) -> Result<(), FileError> {
        let files: Vec<_> = self.files().iter().filter_map(Weak::upgrade).collect();
        let extents: u64 = files.iter().map(|file| file.map.read().allocated_bytes() / EXTENT_BYTES).sum();
        self.volume.begin_scrub(extents * BLOCKS_PER_EXTENT);
        let (mut result, mut last_ns) = (Ok(()), core.endpoint().now_ns());
        for file in files {
            let scrubbed = match file.rows() {
                Some(rows) => file.scrub_rows(core, rows, &mut last_ns, &stopped).await,
                None => file.scrub_plain(core, &mut last_ns, &stopped).await,
            };
            result = result.and(scrubbed);
            if stopped() {
                break;
            }
        }
        self.volume.scrub.end(!stopped());
        result
    }
}

/// The result of checking a column.
#[derive(Default)]
struct Column {
    /// Members whose block can be read but does not match its word, and the parity if it is not that of the
    /// data.
    wrong: Vec<u64>,
    /// Blocks whose region has ended, or whose word is *lost*.
    unread: u64,
    /// Those of them with data that cannot be reconstructed either.
    lost: u64,
}

impl<R: Rules> FileCore<R> {
    async fn scrub_plain(
        &self,
        core: &SessionCore,
        last_ns: &mut u64,
        stopped: &impl Fn() -> bool,
    ) -> Result<(), FileError> {
        let stripes = self.map.read().stripes(0, u64::MAX);
        let mut result = Ok(());
        for stripe in stripes {
            for block in 0..BLOCKS_PER_EXTENT {
                if stopped() {
                    return result;
                }
                let buffer = staging(core, BLOCK_BYTES)?;
                let piece = Piece { stripe, start: block * BLOCK, end: (block + 1) * BLOCK };
                match self.read_piece(core, piece, buffer).await.map(drop) {
                    Ok(()) => {}
                    Err(FileError::Damaged { .. }) => {
                        self.store.volume.found_wrong();
                        self.store.volume.beyond_repair(1);
                    }
                    Err(FileError::Lost { .. }) => {
                        self.store.volume.beyond_repair(1);
                        self.store.volume.unread(1);
                    }
                    Err(error) => {
                        self.store.volume.unread(1);
                        result = result.and(Err(error));
                    }
                }
                self.store.volume.scrub.step(1);
                self.store.in_between(core, last_ns, stopped).await;
            }
        }
        result
    }

    async fn scrub_rows(
        &self,
        core: &SessionCore,
        rows: Rows,
        last_ns: &mut u64,
        stopped: &impl Fn() -> bool,
    ) -> Result<(), FileError> {
        let stripes = self.map.read().stripes(0, u64::MAX);
        let numbers: BTreeSet<u64> = stripes.into_iter().map(|stripe| rows.row_of(stripe)).collect();
        let mut result = Ok(());
        for number in numbers {
            let members = self.row(rows, number).map_or(0, |row| row.members().count() as u64);
            for block in 0..BLOCKS_PER_EXTENT {
                if stopped() {
                    return result;
                }
                let scrubbed = self.scrub_column(core, rows, number, block).await;
                if scrubbed.is_err() {
                    self.store.volume.unread(members);
                }
                result = result.and(scrubbed);
                self.store.volume.scrub.step(members);
                self.store.in_between(core, last_ns, stopped).await;
            }
        }
        result
    }

    async fn scrub_column(
        &self,
        core: &SessionCore,
        rows: Rows,
        number: u64,
        block: u64,
    ) -> Result<(), FileError> {
        let found = self.look_at_column(core, rows, number, block).await?;
        self.store.volume.unread(found.unread);
        self.store.volume.beyond_repair(found.lost);
        for stripe in found.wrong {
            self.store.volume.found_wrong();
            self.repair_block(core, rows, stripe, block).await?;
        }
        Ok(())
    }

    /// Compares the readable blocks of a column with their words.
    async fn look_at_column(
        &self,
        core: &SessionCore,
        rows: Rows,
        number: u64,
        block: u64,
    ) -> Result<Column, FileError> {
        let Some(before) = self.row(rows, number) else { return Ok(Column::default()) };
        let (parity, parity_extent) = &before.parity;
        let offset = rows.data_of(number).start * EXTENT_BYTES + block * BLOCK;
        let members = [(*parity, &**parity_extent, block..block + 1)];
        let mut held = Held::<R>::take(&self.store, core, members, offset).await?;
        let Some(row) = self.row(rows, number) else { return Ok(Column::default()) };
        if !Arc::ptr_eq(&row.parity.1, parity_extent) {
            return Ok(Column::default()); // just rebuilt
        }
        let parity_word = held.word(*parity, block).expect("its lock was taken");
        let word_of = |stripe: u64, extent: &Extent| -> BlockWord {
            let words = &self.store.words;
            if stripe == *parity { parity_word } else { words.load(words.place(extent, block)).unlocked() }
        };
        let (mut found, mut sum, mut missing) = (Column::default(), vec![0; BLOCK_BYTES], Vec::new());
        for (stripe, extent) in row.members() {
            let word = word_of(*stripe, extent);
            if word.is_empty() || word.is_lost() {
                found.lost += u64::from(word.is_lost() && stripe != parity);
                continue;
            }
            match self.stored_block(core, extent, block, word).await {
                Ok(data) => parity::add(&mut sum, &data),
                Err(Unfit::Later(error)) => return Err(error),
                // Its node may have been lost only just now.
                Err(Unfit::Gone) if extent.region().has_ended() => missing.push(*stripe),
                Err(Unfit::Gone) => found.wrong.push(*stripe),
            }
        }
        let is_lost = |stripe: &&u64| *stripe != parity && self.is_block_lost(&row, **stripe, block);
        found.unread = found.lost + missing.len() as u64;
        found.lost += missing.iter().filter(is_lost).count() as u64;
        let is_whole = !parity_word.is_lost() && missing.is_empty() && found.wrong.is_empty();
        if is_whole && sum.iter().any(|byte| *byte != 0) {
            tracing::error!(offset, "a parity does not match its data");
            held.set(*parity, block, parity_word.lost());
            found.wrong.push(*parity);
        }
        Ok(found)
    }
}
