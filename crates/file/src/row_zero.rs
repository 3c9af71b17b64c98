//! Zeroing parts of files with rows: whole blocks by their words alone, and the parity with them.

use farpool_pool::{EXTENT_BYTES, Extent, SessionCore};
use farpool_wire::{BLOCK_BYTES, BlockWord};
use futures_util::future::join_all;

use crate::error::FileError;
use crate::file_core::FileCore;
use crate::held::Held;
use crate::map::Loss;
use crate::redundancy::{Rows, is_parity};
use crate::row_columns::columns;
use crate::row_write::{Fate, Part, Plan, RowStored, Store};
use crate::rows::{Row, remove_member};
use crate::rules::Rules;
use crate::split::Piece;
use crate::write::MAX_MOVES;

const BLOCK: u64 = BLOCK_BYTES as u64;
const ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

impl<R: Rules> FileCore<R> {
    /// Makes part of an extent read as zeros, and frees the extent if the part is all of it. Blocks that
    /// cannot be zeroed are marked lost: their old contents must not appear again.
    pub(crate) async fn zero_in_row(&self, core: &SessionCore, rows: Rows, piece: Piece) {
        for part in head_whole_tail(piece) {
            self.zero_part(core, rows, part).await;
        }
    }

    async fn zero_part(&self, core: &SessionCore, rows: Rows, piece: Piece) {
        let mut without_parity = false;
        for _ in 0..MAX_MOVES {
            let Some(extent) = self.map.read().extent(piece.stripe) else { return };
            let tried = match self.zero_in_member(core, rows, piece, &extent, without_parity).await {
                Ok(RowStored::Yes) => return,
                Ok(RowStored::Elsewhere) => Ok(()),
                Ok(RowStored::MoveFirst(stripe)) => match self.rebuild_extent(core, rows, stripe).await {
                    // No room for the parity, as in `write_row`.
                    Err(_) if is_parity(stripe) && !without_parity => {
                        without_parity = true;
                        Ok(())
                    }
                    moved => moved,
                },
                Err(error) => Err(error),
            };
            // `lose_in` returns false if the extent was moved or truncated meanwhile: then the blocks that
            // failed are no longer the file's.
            if tried.is_err() && self.map.write().lose_in(&piece, &extent) {
                return;
            }
        }
        self.map.write().lose(piece.file_offset(piece.start), piece.end - piece.start, Loss::Gone);
    }

    async fn zero_in_member(
        &self,
        core: &SessionCore,
        rows: Rows,
        piece: Piece,
        extent: &Extent,
        without_parity: bool,
    ) -> Result<RowStored, FileError> {
        if piece.start.is_multiple_of(BLOCK) && piece.end.is_multiple_of(BLOCK) {
            return self.empty_blocks(core, rows, piece).await;
        }
        let words = &self.store.words;
        let word = words.load(words.place(extent, piece.first_block()));
        if word.is_empty() || word.is_lost() {
            return Ok(RowStored::Yes); // an empty or lost block has no contents that could appear again
        }
        let data = &ZEROS[..(piece.end - piece.start) as usize];
        self.store_row(core, rows, &[Part { piece, data }], without_parity).await
    }

    /// Makes whole blocks empty. If their parity cannot be changed, it is lost until it is rebuilt. Exception
    /// (W6 of `row_write.rs`): a parity that is a lost member's only copy moves first; if it cannot move,
    /// `zero_part` marks the blocks lost.
    async fn empty_blocks(
        &self,
        core: &SessionCore,
        rows: Rows,
        piece: Piece,
    ) -> Result<RowStored, FileError> {
        let number = rows.row_of(piece.stripe);
        let offset = piece.file_offset(piece.start);
        let Some((mut held, row)) = self.hold_row(core, rows, number, &[piece], offset).await? else {
            return Ok(RowStored::Elsewhere);
        };
        if R::may_still_change(&row.parity.1) && self.parity_is_only_copy(&row, &[piece]) {
            return Ok(RowStored::MoveFirst(row.parity.0));
        }
        let changed = self.parities_without(core, &row, &held, piece).await?;
        let (wanted, plans): (Vec<u64>, Vec<Plan>) = changed.into_iter().unzip();
        let buffers = self.parity_buffers(core, row.parity.0, &wanted, &plans)?;
        for block in columns(&[piece]) {
            held.set(piece.stripe, block, BlockWord::EMPTY);
            if !wanted.contains(&block) {
                let word = held.word(row.parity.0, block).expect("its lock was taken");
                held.set(row.parity.0, block, word);
            }
        }
        // From here on a parity whose outcome is indeterminate is lost, and the data are empty either way.
        held.in_doubt = true;
        let writes = buffers.into_iter().map(async |(stripe, first_block, buffer)| {
            let (buffer, result) = core.write(&row.parity.1, first_block * BLOCK, buffer).await;
            Store { stripe, first_block, buffer, result }
        });
        let stores = join_all(writes).await;
        for (&block, plan) in wanted.iter().zip(&plans) {
            settle_parity(&row, &mut held, &stores, block, plan);
        }
        if piece.is_whole_extent() {
            // Before the locks are released: a task that waits for one finds that the extent is no longer the
            // file's.
            remove_member(&mut self.map.write(), rows, piece.stripe);
        }
        drop(held);
        self.forget_losses(piece);
        Ok(RowStored::Yes)
    }

    /// The columns whose parity changes when a piece of whole blocks becomes empty, and the new parity of
    /// each. Blocks that counted as zeros before change no parity.
    async fn parities_without(
        &self,
        core: &SessionCore,
        row: &Row,
        held: &Held<'_, R>,
        piece: Piece,
    ) -> Result<Vec<(u64, Plan)>, FileError> {
        let skip = row.parity.1.region().has_ended() || R::may_still_change(&row.parity.1);
        let mut changed = Vec::new();
        for block in columns(&[piece]) {
            let word = held.word(piece.stripe, block).expect("its lock was taken");
            if word.is_empty() || word.is_lost() || !R::updates_parity() {
                continue;
            }
            let plan = match self.plan(core, row, held, block, &[piece.stripe], None).await? {
                Plan::Sum(_) if skip => Plan::None,
                plan => plan,
            };
            changed.push((block, plan));
        }
        Ok(changed)
    }
}

/// Gives a parity block the word that follows from the outcome of its store.
fn settle_parity<R: Rules>(row: &Row, held: &mut Held<'_, R>, stores: &[Store], block: u64, plan: &Plan) {
    let parity = row.parity.0;
    let old = held.word(parity, block).expect("its lock was taken");
    let stored = stores.iter().find(|store| store.has(block) && store.fate() == Fate::New);
    let next = match (plan, stored) {
        (Plan::Empty, _) => BlockWord::EMPTY,
        (Plan::Sum(_), Some(store)) => old.written(R::checksum(store.block(block))),
        _ => old.lost(),
    };
    held.set(parity, block, next);
}

/// Cuts a piece into parts: its whole blocks together, and each partly covered block.
fn head_whole_tail(piece: Piece) -> impl Iterator<Item = Piece> {
    let Piece { stripe, start, end } = piece;
    let first_whole = start.next_multiple_of(BLOCK).min(end);
    let end_whole = (end - end % BLOCK).max(first_whole);
    let parts = [(start, first_whole), (first_whole, end_whole), (end_whole, end)];
    let parts = parts.map(|(start, end)| Piece { stripe, start, end });
    parts.into_iter().filter(|part| part.start < part.end)
}

const _: () = assert!(EXTENT_BYTES.is_multiple_of(BLOCK));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_cut_at_the_borders_of_whole_blocks() {
        let cut = |start, end| -> Vec<(u64, u64)> {
            head_whole_tail(Piece { stripe: 3, start, end }).map(|part| (part.start, part.end)).collect()
        };
        assert_eq!(cut(0, EXTENT_BYTES), [(0, EXTENT_BYTES)]);
        assert_eq!(cut(10, 20), [(10, 20)]);
        assert_eq!(cut(10, BLOCK), [(10, BLOCK)]);
        assert_eq!(cut(BLOCK, BLOCK + 1), [(BLOCK, BLOCK + 1)]);
        assert_eq!(cut(10, BLOCK + 10), [(10, BLOCK), (BLOCK, BLOCK + 10)]);
        assert_eq!(cut(10, 3 * BLOCK + 1), [(10, BLOCK), (BLOCK, 3 * BLOCK), (3 * BLOCK, 3 * BLOCK + 1)]);
    }
}
