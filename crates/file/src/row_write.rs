//! Writing files with rows: data and parity change together, or their words show that they do not belong
//! together.
//!
//! W1. The new parity is computed before anything is stored, so a write that fails because it cannot read
//!     changes nothing.
//! W2. A column takes the new words if all its new data are stored, or if the row can reconstruct the one
//!     block that was not stored. If the parity is the only copy of another block of the column, it is stored
//!     only after the data.
//! W3. A column keeps the old words if at most one of its blocks may have changed: then the rest of the
//!     column gives that block's old contents. Exception: a block that was stored gets its new word if a
//!     member is missing already, because then the rest does not give its old contents.
//! W4. Otherwise its parity is lost until it is computed from data again, and data whose outcome is
//!     indeterminate are lost, too.
//! W5. A write that is dropped halfway ends as W4 with all outcomes indeterminate.
//! W6. No write, truncation or hole begins by giving up a parity that is the only copy of a lost member's
//!     contents. If a late write may still land on such a parity, the parity moves first. If there is no room
//!     for it, a write fails, and a range to be zeroed becomes lost. If the store of the new parity fails, W2
//!     and W4 apply.

use std::sync::Arc;

use farpool_fabric::ArenaBuf;
use farpool_pool::{AccessError, EXTENT_BYTES, Extent, SessionCore};
use farpool_wire::{BLOCK_BYTES, BlockWord};
use futures_util::future::join_all;

use crate::error::{FileError, nothing_was_stored};
use crate::file_core::FileCore;
use crate::held::Held;
use crate::parity;
use crate::reconstruct::Unfit;
use crate::redundancy::{Rows, is_parity};
use crate::row_columns::{columns, runs};
use crate::rows::Row;
use crate::rules::Rules;
use crate::split::{Piece, pieces_of};
use crate::staging::staging;
use crate::write::MAX_MOVES;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// How many times a write is tried again after it found more members lost than the row survives. After a
/// node's restart, a region of the node counts as lost only after an operation or a renewal has failed there.
/// So each try may find one more lost region.
const MAX_RETRIES: u32 = 8;
/// Rows of one write that are stored at a time: their data, their parity, and the blocks read for the parity
/// fit in a session's arena.
const ROWS_AT_ONCE: usize = 2;
/// Columns whose old blocks are read at a time, for the same reason.
const COLUMNS_AT_ONCE: usize = 4;

/// The part of a write that goes to one member.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) piece: Piece,
    pub(crate) data: &'a [u8],
}

/// The outcome of storing parts of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RowStored {
    Yes,
    /// Nothing was stored: some member is missing or was replaced.
    Elsewhere,
    /// Nothing was stored: this member has to move first.
    MoveFirst(u64),
}

/// What is known about one member after its store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    New,
    /// Certainly not stored.
    Old,
    Unknown,
}

/// The parity that a column is to have.
pub(crate) enum Plan {
    Sum(Vec<u8>),
    /// All its data are empty.
    Empty,
    /// It cannot be computed, or there is no place for it.
    None,
}

/// Blocks that were stored in one operation.
pub(crate) struct Store {
    pub(crate) stripe: u64,
    pub(crate) first_block: u64,
    pub(crate) buffer: ArenaBuf,
    pub(crate) result: Result<(), AccessError>,
}

impl Store {
    pub(crate) fn fate(&self) -> Fate {
        match &self.result {
            Ok(()) => Fate::New,
            Err(error) if nothing_was_stored(error) => Fate::Old,
            Err(_) => Fate::Unknown,
        }
    }

    pub(crate) fn has(&self, block: u64) -> bool {
        (self.first_block..self.first_block + (self.buffer.len() / BLOCK_BYTES) as u64).contains(&block)
    }

    pub(crate) fn block(&self, block: u64) -> &[u8] {
        let at = (block - self.first_block) as usize * BLOCK_BYTES;
        &self.buffer[at..at + BLOCK_BYTES]
    }
}

impl<R: Rules> FileCore<R> {
    /// Writes all of `data` at `offset`, wherever the file ends; the file's size stays.
    pub(crate) async fn write_rows(
        &self,
        core: &SessionCore,
        rows: Rows,
        offset: u64,
        data: &[u8],
    ) -> Result<(), FileError> {
        let parts: Vec<Part<'_>> =
            pieces_of(offset, data).map(|(piece, data)| Part { piece, data }).collect();
        let by_row: Vec<_> = parts
            .chunk_by(|one, other| rows.row_of(one.piece.stripe) == rows.row_of(other.piece.stripe))
            .collect();
        let mut result = Ok(());
        for some in by_row.chunks(ROWS_AT_ONCE) {
            // All writes run to their end, even if one fails: a write dropped halfway would be in doubt.
            let written = join_all(some.iter().map(|parts| self.write_row(core, rows, parts))).await;
            result = result.and(written.into_iter().collect());
        }
        result
    }

    /// Writes the parts of one row.
    async fn write_row(&self, core: &SessionCore, rows: Rows, parts: &[Part<'_>]) -> Result<(), FileError> {
        let (mut without_parity, mut retries) = (false, 0);
        for _ in 0..MAX_MOVES {
            for part in parts {
                self.ensure_member(rows, part.piece.stripe).await?;
            }
            let stored = match self.store_row(core, rows, parts, without_parity).await {
                // Two members of a row may be unusable together if one of them lay on a node, or on the disk
                // of the overflow directory, where another member was lost before. The next try finds another
                // place for them.
                Err(FileError::Lost { .. } | FileError::Storage { .. })
                    if retries < MAX_RETRIES && self.is_overdrawn(rows, parts) =>
                {
                    retries += 1;
                    continue;
                }
                stored => stored?,
            };
            match stored {
                RowStored::Yes => return Ok(()),
                RowStored::Elsewhere => {}
                RowStored::MoveFirst(stripe) => match self.rebuild_extent(core, rows, stripe).await {
                    // No room for the parity: write without it. It is rebuilt once there is room.
                    Err(_) if is_parity(stripe) && !without_parity => without_parity = true,
                    moved => moved?,
                },
            }
        }
        Err(FileError::Unavailable { offset: parts[0].piece.file_offset(parts[0].piece.start) })
    }

    /// Whether a member has to move before these parts can be stored: more members of the row are lost than
    /// it survives, or a late write may land on one of the members.
    fn is_overdrawn(&self, rows: Rows, parts: &[Part<'_>]) -> bool {
        let pieces: Vec<Piece> = parts.iter().map(|part| part.piece).collect();
        let row = self.row(rows, rows.row_of(pieces[0].stripe));
        row.is_some_and(|row| self.to_be_moved(&row, &pieces, false).is_some())
    }

    /// Locks the blocks that the parts touch and their parity. Stores the parts and, unless its extent is
    /// lost or in doubt, the parity. Stores nothing if a member has to move first, is missing or was
    /// replaced.
    pub(crate) async fn store_row(
        &self,
        core: &SessionCore,
        rows: Rows,
        parts: &[Part<'_>],
        without_parity: bool,
    ) -> Result<RowStored, FileError> {
        let number = rows.row_of(parts[0].piece.stripe);
        let offset = parts[0].piece.file_offset(parts[0].piece.start);
        let pieces: Vec<Piece> = parts.iter().map(|part| part.piece).collect();
        let Some((mut held, row)) = self.hold_row(core, rows, number, &pieces, offset).await? else {
            return Ok(RowStored::Elsewhere);
        };
        let (parity, parity_extent) = &row.parity;
        if let Some(stripe) = self.to_be_moved(&row, &pieces, without_parity) {
            return Ok(RowStored::MoveFirst(stripe));
        }
        // Decided here, as `to_be_moved` has found it (W6). If another write puts the parity in doubt from
        // now on, its late store can land only in columns of its own.
        let skip = parity_extent.region().has_ended() || R::may_still_change(parity_extent);
        let buffers = self.new_blocks(core, &row, &held, parts).await?;
        let columns = columns(&pieces);
        let plans = if skip || !R::updates_parity() {
            columns.iter().map(|_| Plan::None).collect()
        } else {
            self.plans(core, &row, &held, &columns, &buffers).await?
        };
        let of_parity = self.parity_buffers(core, *parity, &columns, &plans)?;
        held.in_doubt = true;
        let is_degraded = self.is_degraded(&row, &pieces);
        let stores = self.store_members(core, &row, buffers, of_parity, is_degraded).await;
        if stores.iter().any(|store| store.result.is_err()) {
            self.store.volume.ask_for_repair();
        }
        let mut result = Ok(());
        for &block in &columns {
            result = result.and(self.settle_column(&row, &mut held, &stores, block));
        }
        drop(held);
        result.map(|()| RowStored::Yes)
    }

    /// Takes the locks of pieces of a row and of their parity. Returns them with the row as it is then;
    /// `None`: some member is missing or was replaced.
    pub(crate) async fn hold_row(
        &self,
        core: &SessionCore,
        rows: Rows,
        number: u64,
        pieces: &[Piece],
        offset: u64,
    ) -> Result<Option<(Held<'_, R>, Row)>, FileError> {
        let Some(before) = self.row(rows, number) else { return Ok(None) };
        let mut members = Vec::with_capacity(pieces.len() + 2);
        for piece in pieces {
            let Some(extent) = before.member(piece.stripe) else { return Ok(None) };
            members.push((piece.stripe, &**extent, piece.first_block()..piece.end_block()));
        }
        let (parity, parity_extent) = &before.parity;
        members.extend(runs(&columns(pieces)).map(|run| (*parity, &**parity_extent, run)));
        let held = Held::take(&self.store, core, members, offset).await?;
        // Read under the locks, so that these members stay as they are.
        let Some(row) = self.row(rows, number) else { return Ok(None) };
        let same = |stripe: u64| match (before.member(stripe), row.member(stripe)) {
            (Some(before), Some(now)) => Arc::ptr_eq(before, now),
            _ => false,
        };
        let in_place = pieces.iter().all(|piece| same(piece.stripe)) && same(*parity);
        Ok(in_place.then_some((held, row)))
    }

    /// A member that has to move before these pieces of the row can be stored.
    fn to_be_moved(&self, row: &Row, pieces: &[Piece], without_parity: bool) -> Option<u64> {
        let data = pieces.iter().filter_map(|piece| Some((piece.stripe, row.member(piece.stripe)?)));
        let needs_parity = !without_parity || self.parity_is_only_copy(row, pieces);
        let parity = needs_parity.then_some((row.parity.0, &row.parity.1));
        let mut concerned = data.chain(parity);
        let mut ended = Vec::new();
        let in_doubt = concerned.find(|(stripe, extent)| {
            if extent.region().has_ended() {
                ended.push(*stripe);
            }
            R::may_still_change(extent)
        });
        // A row survives one missing member. If two are missing, a lost one is rebuilt first. A parity that
        // this write gives up counts as missing.
        let (_, parity_extent) = &row.parity;
        let is_given_up = without_parity && R::may_still_change(parity_extent);
        let all_ended = row.members().filter(|(_, extent)| extent.region().has_ended()).count();
        let missing = all_ended + usize::from(is_given_up);
        in_doubt.map(|(stripe, _)| stripe).or_else(|| ended.first().copied().filter(|_| missing > 1))
    }

    /// Whether a lost member has contents in the columns of these pieces that only the parity can give back
    /// (W6). Members that the pieces themselves belong to do not count; `to_be_moved` rebuilds those.
    pub(crate) fn parity_is_only_copy(&self, row: &Row, pieces: &[Piece]) -> bool {
        let (words, parity) = (&self.store.words, &row.parity.1);
        let is_beside = |stripe: u64| pieces.iter().all(|piece| piece.stripe != stripe);
        let beside: Vec<_> = row.data.iter().filter(|(stripe, _)| is_beside(*stripe)).collect();
        let is_needed = |block: &u64| {
            !words.load(words.place(parity, *block)).unlocked().is_lost()
                && beside.iter().any(|(_, extent)| self.is_lost_with_contents(extent, *block))
        };
        !parity.region().has_ended() && columns(pieces).iter().any(is_needed)
    }

    /// Whether the parity is the only copy of some block to which these pieces write nothing, in a column to
    /// which they write (W2).
    pub(crate) fn is_degraded(&self, row: &Row, pieces: &[Piece]) -> bool {
        let writes = |stripe: u64, block: u64| {
            pieces.iter().any(|piece| {
                piece.stripe == stripe && (piece.first_block()..piece.end_block()).contains(&block)
            })
        };
        columns(pieces).into_iter().any(|block| {
            row.data
                .iter()
                .any(|(stripe, extent)| !writes(*stripe, block) && self.is_lost_with_contents(extent, block))
        })
    }

    /// Whether this member was lost while the block had contents.
    fn is_lost_with_contents(&self, extent: &Extent, block: u64) -> bool {
        let word = || self.store.words.load(self.store.words.place(extent, block)).unlocked();
        extent.region().has_ended() && !word().is_empty() && !word().is_lost()
    }

    /// The new contents of the blocks that the parts touch: stripe, first block, and whole blocks.
    async fn new_blocks(
        &self,
        core: &SessionCore,
        row: &Row,
        held: &Held<'_, R>,
        parts: &[Part<'_>],
    ) -> Result<Vec<(u64, u64, ArenaBuf)>, FileError> {
        let mut buffers = Vec::with_capacity(parts.len() + 1);
        for Part { piece, data } in parts {
            let mut buffer = staging(core, piece.aligned_bytes() as usize)?;
            for block in piece.partial_blocks() {
                let old = self.old_block_in_row(core, row, held, *piece, block).await?;
                buffer[piece.place_of(block)].copy_from_slice(&old);
            }
            let start = (piece.start - piece.aligned_start()) as usize;
            buffer[start..start + data.len()].copy_from_slice(data);
            buffers.push((piece.stripe, piece.first_block(), buffer));
        }
        Ok(buffers)
    }

    /// The old contents of a block whose column the caller holds.
    async fn old_block_in_row(
        &self,
        core: &SessionCore,
        row: &Row,
        held: &Held<'_, R>,
        piece: Piece,
        block: u64,
    ) -> Result<Vec<u8>, FileError> {
        let stripe = piece.stripe;
        let (offset, start) = (piece.file_offset(block * BLOCK), block * BLOCK);
        let one = Piece { stripe, start, end: start + BLOCK };
        let (word, parity, extent) = self.words_held(row, held, stripe, block);
        if word.is_lost() {
            return Err(FileError::Lost { offset });
        }
        if let Some((_, loss)) = self.map.read().first_lost(&one) {
            return Err(loss.to_writer(offset));
        }
        if word.is_empty() {
            return Ok(vec![0; BLOCK_BYTES]);
        }
        let unfit = match self.stored_block(core, extent, block, word).await {
            Ok(data) => return Ok(data),
            Err(unfit) => unfit,
        };
        match (self.remake(core, row, (stripe, block), word, parity).await, unfit) {
            (Ok(data), _) => Ok(data),
            (Err(Unfit::Later(error)), _) | (Err(Unfit::Gone), Unfit::Later(error)) => Err(error),
            (Err(Unfit::Gone), Unfit::Gone) => Err(FileError::Lost { offset }),
        }
    }

    /// The words of a member's block and of its parity, both held, and the extent in which the block lies.
    pub(crate) fn words_held<'r>(
        &self,
        row: &'r Row,
        held: &Held<'_, R>,
        stripe: u64,
        block: u64,
    ) -> (BlockWord, BlockWord, &'r Arc<Extent>) {
        let locked = "its lock was taken";
        let word = held.word(stripe, block).expect(locked);
        let parity = held.word(row.parity.0, block).expect(locked);
        (word, parity, row.member(stripe).expect(locked))
    }

    /// The parity that each column is to have.
    async fn plans(
        &self,
        core: &SessionCore,
        row: &Row,
        held: &Held<'_, R>,
        columns: &[u64],
        buffers: &[(u64, u64, ArenaBuf)],
    ) -> Result<Vec<Plan>, FileError> {
        let mut plans = Vec::with_capacity(columns.len());
        for some in columns.chunks(COLUMNS_AT_ONCE) {
            let of_column = some.iter().map(async |&block| {
                let in_buffer = |(stripe, first, buffer): &'_ (u64, u64, ArenaBuf)| {
                    let at = block.checked_sub(*first)? as usize * BLOCK_BYTES;
                    (at < buffer.len()).then_some((*stripe, at))
                };
                let mut sum = vec![0; BLOCK_BYTES];
                let mut written = Vec::with_capacity(buffers.len());
                for one in buffers {
                    if let Some((stripe, at)) = in_buffer(one) {
                        parity::add(&mut sum, &one.2[at..at + BLOCK_BYTES]);
                        written.push(stripe);
                    }
                }
                self.plan(core, row, held, block, &written, Some(sum)).await
            });
            for plan in join_all(of_column).await {
                plans.push(plan?);
            }
        }
        Ok(plans)
    }

    /// The parity of a column in which the members `written` get new contents with this `sum`, or become
    /// empty if there is none.
    ///
    /// The other members' part of the sum is either read from them, or computed from the old parity and the
    /// old contents, whichever takes fewer reads. If that fails, the other way is tried.
    pub(crate) async fn plan(
        &self,
        core: &SessionCore,
        row: &Row,
        held: &Held<'_, R>,
        block: u64,
        written: &[u64],
        sum: Option<Vec<u8>>,
    ) -> Result<Plan, FileError> {
        let parity = held.word(row.parity.0, block).expect("its lock was taken");
        let beside = self.words_beside(row, row.parity.0, block, parity);
        let is_written = row.data.iter().map(|(stripe, _)| written.contains(stripe));
        let counts = |word: &BlockWord| !word.is_empty() && !word.is_lost();
        let (mut old, mut others) = (vec![(row.parity.1.clone(), parity)], Vec::new());
        for (member, is_written) in beside.into_iter().zip(is_written).filter(|((_, word), _)| counts(word)) {
            if is_written { old.push(member) } else { others.push(member) }
        }
        if others.is_empty() {
            return Ok(sum.map_or(Plan::Empty, Plan::Sum));
        }
        let by_parity = async || {
            if parity.is_lost() { Err(Unfit::Gone) } else { self.sum_of(core, &old, block).await }
        };
        let first = if old.len() < others.len() {
            by_parity().await
        } else {
            self.sum_of(core, &others, block).await
        };
        let rest = match first {
            Ok(rest) => Ok(rest),
            Err(_) if old.len() < others.len() => self.sum_of(core, &others, block).await,
            Err(_) => by_parity().await,
        };
        match rest {
            Ok(mut rest) => {
                sum.iter().for_each(|sum| parity::add(&mut rest, sum));
                Ok(Plan::Sum(rest))
            }
            Err(Unfit::Gone) => Ok(Plan::None),
            Err(Unfit::Later(error)) => Err(error),
        }
    }

    /// The parity blocks to be stored, in one buffer for each run of consecutive columns.
    pub(crate) fn parity_buffers(
        &self,
        core: &SessionCore,
        parity: u64,
        columns: &[u64],
        plans: &[Plan],
    ) -> Result<Vec<(u64, u64, ArenaBuf)>, FileError> {
        let sums: Vec<(u64, &Vec<u8>)> = columns
            .iter()
            .zip(plans)
            .filter_map(|(block, plan)| if let Plan::Sum(sum) = plan { Some((*block, sum)) } else { None })
            .collect();
        let mut buffers = Vec::with_capacity(2);
        for run in sums.chunk_by(|one, other| one.0 + 1 == other.0) {
            let mut buffer = staging(core, run.len() * BLOCK_BYTES)?;
            for ((_, sum), place) in run.iter().zip(buffer.chunks_exact_mut(BLOCK_BYTES)) {
                place.copy_from_slice(sum);
            }
            buffers.push((parity, run[0].0, buffer));
        }
        Ok(buffers)
    }

    /// Stores new data of a row and its parity. Normally both at once. If the parity is the only copy of
    /// another block (`is_degraded`), the data are stored first. Then each run of parity blocks is stored,
    /// unless the parity could not reconstruct all that is missing in one of its columns (W2).
    pub(crate) async fn store_members(
        &self,
        core: &SessionCore,
        row: &Row,
        data: Vec<(u64, u64, ArenaBuf)>,
        parity: Vec<(u64, u64, ArenaBuf)>,
        is_degraded: bool,
    ) -> Vec<Store> {
        let to_store = |(stripe, first_block, buffer)| {
            let extent = row.member(stripe).expect("it was there when its locks were taken");
            store(core, stripe, extent, first_block, buffer)
        };
        if !is_degraded {
            return join_all(data.into_iter().chain(parity).map(to_store)).await;
        }
        let mut stores = join_all(data.into_iter().map(to_store)).await;
        let may_follow = |(_, first_block, buffer): &(u64, u64, ArenaBuf)| {
            let mut run = *first_block..first_block + (buffer.len() / BLOCK_BYTES) as u64;
            run.all(|block| {
                let column = Column::of(&stores, block);
                let failed = column.data.iter().filter(|store| store.fate() != Fate::New).count();
                failed + self.others_gone(row, &column, block) <= 1
            })
        };
        let parity: Vec<_> = parity.into_iter().filter(may_follow).collect();
        stores.extend(join_all(parity.into_iter().map(to_store)).await);
        stores
    }

    /// Gives the blocks of a column the words that follow from the outcomes of the stores.
    pub(crate) fn settle_column(
        &self,
        row: &Row,
        held: &mut Held<'_, R>,
        stores: &[Store],
        block: u64,
    ) -> Result<(), FileError> {
        let column = Column::of(stores, block);
        let others_gone = self.others_gone(row, &column, block);
        let missing = column.not_new() + others_gone;
        if column.data.iter().all(|store| store.fate() == Fate::New) || missing <= 1 {
            settle_new(row, held, &column, block);
            return Ok(());
        }
        settle_failed(row, held, &column, block, others_gone);
        let failure = column.data.iter().find_map(|store| {
            let offset = store.stripe * EXTENT_BYTES + block * BLOCK;
            store.result.err().map(|error| FileError::from_access(error, offset))
        });
        Err(failure.expect("a column fails only if a store of its data has failed"))
    }

    /// How many other members with data were lost before and hold contents in this column. Other members are
    /// those to which this write stores nothing.
    fn others_gone(&self, row: &Row, column: &Column<'_>, block: u64) -> usize {
        let gone = row.data.iter().filter(|(stripe, extent)| {
            let is_stored = column.data.iter().any(|store| store.stripe == *stripe);
            !is_stored && self.is_lost_with_contents(extent, block)
        });
        gone.count()
    }
}

/// The stores of one column.
struct Column<'a> {
    data: Vec<&'a Store>,
    parity: Option<&'a Store>,
}

impl<'a> Column<'a> {
    fn of(stores: &'a [Store], block: u64) -> Self {
        let (parity, data): (Vec<_>, Vec<_>) =
            stores.iter().filter(|store| store.has(block)).partition(|store| is_parity(store.stripe));
        Column { data, parity: parity.first().copied() }
    }

    /// Blocks that are not certainly new. A parity that was not stored is one of them.
    fn not_new(&self) -> usize {
        let parity = self.parity.map_or(Fate::Old, Store::fate);
        let data = self.data.iter().filter(|store| store.fate() != Fate::New).count();
        data + usize::from(parity != Fate::New)
    }

    /// Blocks that may have changed.
    fn not_old(&self) -> usize {
        self.data.iter().chain(&self.parity).filter(|store| store.fate() != Fate::Old).count()
    }
}

/// The column takes the new words (W2).
fn settle_new<R: Rules>(row: &Row, held: &mut Held<'_, R>, column: &Column<'_>, block: u64) {
    for store in &column.data {
        let word = held.word(store.stripe, block).expect("its lock was taken");
        held.set(store.stripe, block, word.written(R::checksum(store.block(block))));
    }
    let parity = row.parity.0;
    let old = held.word(parity, block).expect("its lock was taken");
    let next = match column.parity {
        _ if !R::updates_parity() => old,
        Some(store) if store.fate() == Fate::New => old.written(R::checksum(store.block(block))),
        _ => old.lost(),
    };
    held.set(parity, block, next);
}

/// The column keeps the old words (W3), or what is indeterminate of it is lost (W4). `others_gone`: how many
/// lost members have contents in the column. With one, the rest cannot reconstruct a second block.
fn settle_failed<R: Rules>(
    row: &Row,
    held: &mut Held<'_, R>,
    column: &Column<'_>,
    block: u64,
    others_gone: usize,
) {
    let parity = row.parity.0;
    let old_parity = held.word(parity, block).expect("its lock was taken");
    // Without a parity, a block whose outcome is indeterminate cannot be reconstructed, so it cannot keep its
    // word. A block that was stored does not keep its old word if another one is missing: its old contents
    // cannot be reconstructed, and its new word at least makes the new ones readable.
    let is_stored = column.data.iter().any(|store| store.fate() == Fate::New);
    let keep = column.not_old() <= 1 && !old_parity.is_lost() && !(others_gone > 0 && is_stored);
    for store in &column.data {
        let word = held.word(store.stripe, block).expect("its lock was taken");
        let next = match store.fate() {
            _ if keep => word,
            Fate::Old => word,
            Fate::New => word.written(R::checksum(store.block(block))),
            Fate::Unknown => R::in_doubt(word),
        };
        held.set(store.stripe, block, next);
    }
    held.set(parity, block, if keep { old_parity } else { old_parity.lost() });
}

async fn store(
    core: &SessionCore,
    stripe: u64,
    extent: &Extent,
    first_block: u64,
    buffer: ArenaBuf,
) -> Store {
    let (buffer, result) = core.write(extent, first_block * BLOCK, buffer).await;
    Store { stripe, first_block, buffer, result }
}
