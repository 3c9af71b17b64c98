//! Finding blocks that nobody needs any more.

use std::sync::Arc;

use super::Slab;
use super::chunks::{Of, Written};
use super::layout::{BlockAt, Class};
use super::need::is_needed;
use crate::cut::Cut;
use crate::error::ReadError;
use crate::memory::{Plan, run_all};
use crate::record::RecordLayout;
use crate::rules::Rules;
use crate::table::{Place, Table};
use crate::worker::Worker;

/// Blocks whose records are looked at in one step, each by two READs.
const STEP: usize = 32;
/// Bytes that are read in one step at most, but for what one record takes: a small part of a thread's arena.
const STEP_BYTES: usize = 64 << 10;
/// Blocks of the class that is wanted which are looked at before another chunk is taken: with the many blocks
/// of that, few for each.
const LOOKED_AT_FIRST: usize = 256;
/// Blocks that are looked at before it is said that there is no room: the next who asks goes on behind them.
const LOOKED_AT: usize = 1 << 16;
/// How often a block is looked for that others of this member take first.
const TRIES: u64 = 16;

/// A block that is used, and where the record lies for which it was.
struct Candidate {
    at: BlockAt,
    written: Written,
    place: Place,
}

impl Slab {
    /// A block of that class for the caller alone; `None`: there is none, now.
    pub(super) async fn allocate<R: Rules>(
        self: &Arc<Self>,
        worker: &Worker<R>,
        table: &Table,
        class: Class,
    ) -> Result<Option<BlockAt>, ReadError> {
        let mut has_looked_at_all = false;
        for _ in 0..TRIES + self.layout.chunks() * self.pieces.len() as u64 {
            let taken = self.chunks.lock().take(class);
            if taken.is_some() {
                return Ok(taken);
            }
            if self.sweep(worker, table, Of::Class(class), LOOKED_AT_FIRST).await? > 0
                || self.take_free(worker, class).await?
                || self.use_empty(worker, class).await?
            {
                continue;
            }
            if !std::mem::replace(&mut has_looked_at_all, true)
                && self.sweep(worker, table, Of::All, LOOKED_AT).await? > 0
            {
                // For whoever is as short of room as the caller, and for him.
                self.give_up_empty(worker, Some(class)).await?;
                continue;
            }
            let Some(chunk) = self.take_over(worker, class).await? else { return Ok(None) };
            self.sweep(worker, table, Of::Chunk(chunk), LOOKED_AT).await?;
        }
        Ok(None)
    }

    /// Looks at the records of so many blocks, and frees those that nobody needs; says how many. Of one
    /// class, some are enough.
    ///
    /// The horizon is read before the records: a version that it has was committed then, or nothing of it was
    /// left, so that it is not found in its place as one that will be undone.
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
            None => Cut::first(0), // nobody says what he needs
        };
        let each = table.layout().current_bytes() + table.layout().ring_bytes();
        let step = (STEP_BYTES / each).clamp(1, STEP);
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

    /// Frees those of some blocks that nobody needs; says how many.
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
                // Of none of this table's records: its writer died before he had written whole what is there.
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
                if !look.is_needed::<R>(plan, turn, horizon)? {
                    let is_free = self.chunks.lock().free_unneeded(candidate.at, candidate.written);
                    freed += usize::from(is_free);
                }
            }
        }
        Ok(freed)
    }
}

/// A look at the records of some blocks that lie on one node.
struct Look<'a> {
    group: &'a [Candidate],
    layout: RecordLayout,
    /// Where workers announce their snapshots, rings are read.
    has_rings: bool,
}

impl<'a> Look<'a> {
    fn new<'w, R: Rules>(
        worker: &'w Worker<R>,
        table: &Table,
        group: &'a [Candidate],
    ) -> Result<(Plan<'w>, Self), ReadError> {
        let (layout, has_rings) = (*table.layout(), worker.announcer.is_some());
        let bytes = group.len() * (layout.current_bytes() + layout.ring_bytes());
        let mut plan = worker.memory().plan(group[0].place.piece.region.node, bytes)?;
        for Candidate { place, .. } in group {
            plan.read(&place.piece, layout.current(place.index));
        }
        if has_rings {
            // Behind the versions: the rings have all before them.
            plan.fence();
            for Candidate { place, .. } in group {
                plan.read(&place.piece, layout.ring(place.index));
            }
        }
        Ok((plan, Look { group, layout, has_rings }))
    }

    /// Whether the block of the `turn`-th may be needed, by what the plan has found.
    fn is_needed<R: Rules>(&self, plan: &Plan<'_>, turn: usize, horizon: &Cut) -> Result<bool, ReadError> {
        let Candidate { at, written, place } = &self.group[turn];
        let (current, ring) = (self.layout.current_bytes(), self.layout.ring_bytes());
        let bytes = plan.bytes(turn * current..(turn + 1) * current);
        let (_, found) = self.layout.decode_current(place.record, bytes).ok_or(ReadError::Damaged)?;
        let rings = self.group.len() * current;
        let bytes = self.has_rings.then(|| plan.bytes(rings + turn * ring..rings + (turn + 1) * ring));
        let ring = bytes.and_then(|bytes| self.layout.decode_ring(bytes));
        Ok(is_needed::<R>((*at, written.number), &found, ring.as_ref(), horizon))
    }
}

impl<R: Rules> Worker<R> {
    /// Gives back what nobody needs any more of a table's slab: for a member that writes nothing there for a
    /// while, so that others have room.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn tend(&self, table: &Table) -> Result<(), ReadError> {
        let Some(slab) = table.slab() else { return Ok(()) };
        slab.sweep(self, table, Of::All, LOOKED_AT).await?;
        Ok(slab.give_up_empty(self, None).await?)
    }
}
