//! Finding blocks that no snapshot needs any more.

use std::sync::Arc;
use std::time::Duration;

use super::Slab;
use super::chunks::{Of, Written};
use super::layout::{BlockAt, Class};
use super::need::{Need, is_replaced_for_all, need_of};
use crate::cut::Cut;
use crate::error::ReadError;
use crate::memory::{Memory, Plan, run_all};
use crate::record::{Label, RecordLayout};
use crate::rules::Rules;
use crate::table::{Place, Table};
use crate::transaction::{EarlierVersions, Followed};
use crate::worker::Worker;

/// Blocks whose records are looked at in one step, with a READ each.
const STEP: usize = 32;
/// Most bytes that are read in one step, unless a single record takes more: a small part of a thread's arena.
const STEP_BYTES: usize = 64 << 10;
/// Blocks of the wanted class that are looked at before another chunk is taken. The new chunk has many
/// blocks, so the cost for each of them is small.
const LOOKED_AT_FIRST: usize = 256;
/// Blocks that are looked at before *no space* is returned. The next caller goes on with the blocks after
/// them.
const LOOKED_AT: usize = 1 << 16;
/// Versions before the current one that are looked at for one block. If it takes more, the block counts as
/// needed for now.
const LINKS_FOLLOWED: usize = 64;
/// How often the search for a block is repeated when other threads of this member take the blocks that it
/// frees.
const TRIES: u64 = 16;
/// Most waits for a chunk that other tasks of this member are taking or giving up, and how long one is. In
/// doubt, such a chunk stays so.
const MOST_WAITS: u32 = 500;
const WAIT: Duration = Duration::from_micros(2);

/// A block in use, and the place of the record that it was written for.
struct Candidate {
    at: BlockAt,
    written: Written,
    place: Place,
}

impl Slab {
    /// Takes a block of this class for the caller alone. `None`: there is none at present.
    pub(super) async fn allocate<R: Rules>(
        self: &Arc<Self>,
        worker: &Worker<R>,
        table: &Table,
        class: Class,
    ) -> Result<Option<BlockAt>, ReadError> {
        let (mut has_looked_at_all, mut waits) = (false, MOST_WAITS);
        for _ in 0..TRIES + self.count_chunks() {
            if let Some(taken) = self.take_patiently(worker.memory(), class, &mut waits).await {
                return Ok(Some(taken));
            }
            if self.sweep(worker, table, Of::Class(class), LOOKED_AT_FIRST).await? > 0
                || self.take_free(worker, class, waits > 0).await?
                || self.use_empty(worker, class).await?
            {
                continue;
            }
            if !std::mem::replace(&mut has_looked_at_all, true)
                && self.sweep(worker, table, Of::All, LOOKED_AT).await? > 0
            {
                // Empty chunks are given up for the caller, and for other members that are short of room,
                // too.
                self.give_up_empty(worker, Some(class)).await?;
                continue;
            }
            let Some(chunk) = self.take_over(worker, class).await? else { return Ok(None) };
            self.sweep(worker, table, Of::Chunk(chunk), LOOKED_AT).await?;
        }
        Ok(None)
    }

    /// How many allocations that fail look at all blocks in use.
    pub(crate) fn tries(&self) -> u64 {
        1 + (self.chunks.lock().count_taken(Of::All) / LOOKED_AT) as u64
    }

    /// Takes a free block. While there is none and this member is taking a chunk, which may have blocks
    /// enough for all that need one, waits for it, as long as `waits` is not zero.
    async fn take_patiently(&self, memory: &Memory, class: Class, waits: &mut u32) -> Option<BlockAt> {
        loop {
            {
                let mut chunks = self.chunks.lock();
                let taken = chunks.take(class);
                if taken.is_some() || *waits == 0 || !chunks.is_any_moving() {
                    return taken;
                }
            }
            *waits -= 1;
            memory.endpoint().sleep(WAIT).await;
        }
    }

    /// Looks at the records of up to `most` blocks, and frees the blocks that no snapshot needs. Returns how
    /// many. If the blocks are of one class, it stops after the first step that frees some.
    ///
    /// The horizon is read before the records. A commit that it sees had finished by then, so a version of
    /// such a commit that is found in its place is committed, and will not be rolled back.
    pub(super) async fn sweep<R: Rules>(
        &self,
        worker: &Worker<R>,
        table: &Table,
        of: Of,
        most: usize,
    ) -> Result<usize, ReadError> {
        let most = most.min(self.chunks.lock().count_taken(of));
        let horizon = match &worker.announcer {
            Some(announcer) => announcer.refresh(worker.memory()).await?,
            None => Cut::first(0), // workers announce no snapshots
        };
        let step = (STEP_BYTES / table.layout().current_bytes()).clamp(1, STEP);
        let (mut looked, mut freed) = (0, 0);
        while looked < most && !(freed > 0 && matches!(of, Of::Class(_))) {
            let used = self.chunks.lock().used(of, step.min(most - looked));
            if used.is_empty() {
                break;
            }
            looked += used.len();
            freed += self.look_at(worker, table, &horizon, used).await?;
        }
        Ok(freed)
    }

    /// Frees those of some blocks that no snapshot needs. Returns how many.
    async fn look_at<R: Rules>(
        &self,
        worker: &Worker<R>,
        table: &Table,
        horizon: &Cut,
        used: Vec<(BlockAt, Written)>,
    ) -> Result<usize, ReadError> {
        let mut freed = 0;
        let mut candidates = Vec::with_capacity(used.len());
        for (at, written) in used {
            match table.place_of(written.record) {
                Some(place) => candidates.push(Candidate { at, written, place }),
                // Perhaps in a piece that this thread does not know yet: the block is kept.
                None if table.is_beyond(written.record) => {}
                // The header names no record of this table: its writer died before the header was whole.
                None => freed += usize::from(self.chunks.lock().free_unneeded(at, written)),
            }
        }
        let node = |candidate: &Candidate| candidate.place.piece.region.node;
        candidates.sort_by_key(node);
        let groups = candidates.chunk_by(|one, other| node(one) == node(other));
        let looks = groups.map(|group| Look::new(worker, table, group)).collect::<Result<Vec<_>, _>>()?;
        let (mut plans, looks): (Vec<_>, Vec<_>) = looks.into_iter().unzip();
        run_all(&mut plans).await;
        for (look, plan) in looks.iter().zip(&plans) {
            plan.check()?;
            for (turn, candidate) in look.group.iter().enumerate() {
                let (need, label) = look.need(plan, turn, horizon)?;
                let is_needed = match need {
                    Need::Needed => true,
                    Need::Free => false,
                    Need::UnlessReplaced => {
                        let is_replaced = is_replaced(worker, candidate, label, horizon).await?;
                        !R::frees_block(is_replaced)
                    }
                };
                if !is_needed {
                    let is_free = self.chunks.lock().free_unneeded(candidate.at, candidate.written);
                    freed += usize::from(is_free);
                }
            }
        }
        Ok(freed)
    }
}

/// Whether the horizon sees a version after that of a block, and before the current one.
async fn is_replaced<R>(
    worker: &Worker<R>,
    Candidate { written, place, .. }: &Candidate,
    current: Label,
    horizon: &Cut,
) -> Result<bool, ReadError> {
    let mut earlier = EarlierVersions::of(current);
    for _ in 0..LINKS_FOLLOWED {
        let Followed::Version(label, _) = earlier.next(worker, place).await? else { break };
        if let Some(answer) = is_replaced_for_all(written.number, &label, horizon) {
            return Ok(answer);
        }
    }
    Ok(false)
}

/// A look at the records of some blocks, all on one node.
struct Look<'a> {
    group: &'a [Candidate],
    layout: RecordLayout,
}

impl<'a> Look<'a> {
    fn new<'w, R: Rules>(
        worker: &'w Worker<R>,
        table: &Table,
        group: &'a [Candidate],
    ) -> Result<(Plan<'w>, Self), ReadError> {
        let layout = *table.layout();
        let node = group[0].place.piece.region.node;
        let mut plan = worker.memory().plan(node, group.len() * layout.current_bytes())?;
        for Candidate { place, .. } in group {
            plan.read(&place.piece, layout.current(place.index));
        }
        Ok((plan, Look { group, layout }))
    }

    /// What candidate number `turn`'s record says of its block, by what the plan has read; and which version
    /// the record has.
    fn need(&self, plan: &Plan<'_>, turn: usize, horizon: &Cut) -> Result<(Need, Label), ReadError> {
        let Candidate { at, written, place } = &self.group[turn];
        let current = self.layout.current_bytes();
        let bytes = plan.bytes(turn * current..(turn + 1) * current);
        let (_, found) = self.layout.decode_current(place.record, bytes).ok_or(ReadError::Damaged)?;
        Ok((need_of((*at, written.number), &found, horizon), found.label))
    }
}

impl<R: Rules> Worker<R> {
    /// Frees the blocks of a table's slab that no snapshot needs any more, and gives empty chunks back. For a
    /// member that does not write there for a while, so that others have room.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn tend(&self, table: &Table) -> Result<(), ReadError> {
        let Some(slab) = table.slab() else { return Ok(()) };
        slab.sweep(self, table, Of::All, LOOKED_AT).await?;
        Ok(slab.give_up_empty(self, None).await?)
    }
}
