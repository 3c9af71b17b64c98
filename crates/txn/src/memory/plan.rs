//! Plans: operations on one node that are posted together. Several plans, one for each node, may be in flight
//! at the same time.
//!
//! In the steady state nothing is allocated: the parts of a plan are kept for the next one.

use std::cell::RefCell;
use std::future::poll_fn;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use farpool_fabric::{ARENA_GRANULE_BYTES, Batch, OpError, Queue, Running};
use farpool_wire::{NodeId, RegionId};

use super::again::{MOVE_PAUSE, Posted, Trying};
use super::in_flight::is_in_doubt;
use super::{Memory, MemoryError, Piece, Traffic};

/// Buffer of a plan that is kept: the smallest that an arena gives.
const SPARE_BYTES: usize = ARENA_GRANULE_BYTES;
/// Most plans that are kept: as many as some transactions have at a time, and a small part of an arena.
const MOST_SPARES: usize = 32;

/// The parts of plans that are not in use.
#[derive(Default)]
pub(super) struct Spares(RefCell<Vec<Parts>>);

impl Spares {
    /// Gives their buffers back to the arena.
    pub(super) fn clear(&self) {
        self.0.borrow_mut().clear();
    }
}

struct Parts {
    batch: Batch,
    /// The regions that its operations go to.
    regions: Vec<RegionId>,
    swaps: Vec<Swap>,
}

/// Operations on one node that are posted together, in their order; afterwards, their results.
pub(crate) struct Plan<'a> {
    memory: &'a Memory,
    node: NodeId,
    queue: &'a Queue,
    stage: Stage<'a>,
    regions: Vec<RegionId>,
    swaps: Vec<Swap>,
    used: usize,
    asked: Traffic,
    /// It has WRITEs.
    writes: bool,
    /// This is a retry: the compare-and-swaps were tried before.
    is_again: bool,
    /// Why it could not be retried, if it had to be.
    ended: Option<OpError>,
}

enum Stage<'a> {
    Here(Batch),
    Posted(Running<'a>),
    /// On the way from one to the other.
    Passing,
}

/// A compare-and-swap of a plan.
struct Swap {
    /// Its index among the plan's operations.
    place: usize,
    expected: u64,
    new: u64,
}

const IS_HERE: &str = "a plan is not used while it is posted";

impl Memory {
    /// A plan for one node, which is posted with one doorbell.
    pub(crate) fn plan(&self, node: NodeId, bytes: usize) -> Result<Plan<'_>, MemoryError> {
        let queue = self.queue(node)?;
        let spare = if bytes <= SPARE_BYTES { self.spares.0.borrow_mut().pop() } else { None };
        let Parts { batch, regions, swaps } = match spare {
            Some(parts) => parts,
            None => {
                let batch = Batch::new(self.take(bytes.max(SPARE_BYTES))?);
                Parts { batch, regions: Vec::new(), swaps: Vec::new() }
            }
        };
        Ok(Plan {
            memory: self,
            node,
            queue,
            stage: Stage::Here(batch),
            regions,
            swaps,
            used: 0,
            asked: Traffic::default(),
            writes: false,
            is_again: false,
            ended: None,
        })
    }
}

impl Plan<'_> {
    fn batch(&self) -> &Batch {
        let Stage::Here(batch) = &self.stage else { unreachable!("{IS_HERE}") };
        batch
    }

    fn batch_mut(&mut self) -> &mut Batch {
        let Stage::Here(batch) = &mut self.stage else { unreachable!("{IS_HERE}") };
        batch
    }

    /// Empties it for other operations, whose bytes fit the same buffer.
    pub(crate) fn clear(&mut self) {
        self.batch_mut().clear();
        self.regions.clear();
        self.swaps.clear();
        (self.used, self.asked) = (0, Traffic::default());
        (self.writes, self.is_again, self.ended) = (false, false, None);
    }

    fn place(&mut self, piece: &Piece, bytes: usize) -> Range<usize> {
        if !self.regions.contains(&piece.region) {
            self.regions.push(piece.region);
        }
        let place = self.used..self.used + bytes;
        self.used = place.end;
        self.asked = self.asked + Traffic::of(bytes);
        place
    }

    /// Adds a READ; returns where in the buffer its bytes will be.
    pub(crate) fn read(&mut self, piece: &Piece, range: Range<u64>) -> Range<usize> {
        let place = self.place(piece, (range.end - range.start) as usize);
        self.batch_mut().read(piece.address(range.start), piece.epoch, place.clone());
        place
    }

    /// Adds a WRITE, to a place that no other client writes to.
    pub(crate) fn write(&mut self, piece: &Piece, at: u64, bytes: &[u8]) {
        self.write_with(piece, at, bytes.len(), |place| place.copy_from_slice(bytes));
    }

    /// As [`write`](Self::write), with so many bytes that `fill` puts into the buffer.
    pub(crate) fn write_with(&mut self, piece: &Piece, at: u64, bytes: usize, fill: impl FnOnce(&mut [u8])) {
        self.writes = true;
        let place = self.place(piece, bytes);
        let batch = self.batch_mut();
        fill(&mut batch.buffer_mut()[place.clone()]);
        batch.write(piece.address(at), piece.epoch, place);
    }

    /// Adds a compare-and-swap that puts a word which no other client puts there.
    pub(crate) fn compare_and_swap(&mut self, piece: &Piece, at: u64, expected: u64, new: u64) {
        self.place(piece, 0);
        self.asked.bytes += size_of::<u64>() as u64;
        let place = self.batch().len();
        self.swaps.push(Swap { place, expected, new });
        self.batch_mut().compare_and_swap(piece.address(at), piece.epoch, expected, new);
    }

    /// Makes all operations after this wait for all READs and atomics before it.
    pub(crate) fn fence(&mut self) {
        self.batch_mut().fence();
    }

    /// Posts all of it, and waits for all of it.
    pub(crate) async fn run(mut self) -> Self {
        run_all(std::slice::from_mut(&mut self)).await;
        self
    }

    fn start(&mut self) {
        if let Stage::Here(batch) = std::mem::replace(&mut self.stage, Stage::Passing) {
            self.stage = Stage::Posted(self.queue.run(batch));
        }
    }

    fn poll_posted(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Stage::Posted(running) = &mut self.stage else { return Poll::Ready(()) };
        Pin::new(running).poll(context).map(|batch| {
            if self.changes_memory() && batch.results().iter().any(is_in_doubt) {
                self.memory.in_flight.add(self.node);
            }
            self.stage = Stage::Here(batch);
        })
    }

    /// Whether it does more than read.
    fn changes_memory(&self) -> bool {
        self.writes || !self.swaps.is_empty()
    }

    /// Why it failed, if all operations that failed may be retried once their regions are attached again. If
    /// one is in doubt, this is its error.
    fn to_do_again(&self) -> Option<OpError> {
        let error = self.failure()?;
        let mut failed = self.batch().results().iter().filter_map(|result| result.as_ref().err());
        failed.all(|error| self.memory.note_retryable(error)).then_some(error)
    }

    /// The error of the first operation in doubt, or else the first error.
    fn failure(&self) -> Option<OpError> {
        let failed = || self.batch().results().iter().filter_map(|result| result.as_ref().err());
        let unknown = failed().find(|error| matches!(error, OpError::Unknown { .. }));
        unknown.or_else(|| failed().next()).copied()
    }

    /// Waits until all of it may be retried; false: it must not be.
    async fn gets_ready_again(&mut self, error: OpError, trying: &mut Trying) -> bool {
        for &region in &self.regions {
            if let Err(error) = self.memory.ready_again(region, error, trying).await {
                self.ended = Some(error);
                return false;
            }
        }
        true
    }

    /// What was read into that place of the buffer. It means something only if all was done.
    pub(crate) fn bytes(&self, place: Range<usize>) -> &[u8] {
        &self.batch().buffer()[place]
    }

    /// Whether all was done. If not, the error of the first operation in doubt, or else the first error.
    pub(crate) fn check(&self) -> Result<(), MemoryError> {
        self.ended.or_else(|| self.failure()).map_or(Ok(()), |error| Err(error.into()))
    }

    /// What the plan's last operation, an atomic, found, if all was done.
    pub(crate) fn last_word(&self) -> Result<u64, MemoryError> {
        self.check()?;
        Ok(self.words().last().unwrap_or_default())
    }

    /// Whether it was tried again. Then [`words`](Self::words) may take another client's new word for this
    /// plan's, if another client may have put the same word there.
    pub(crate) fn was_tried_again(&self) -> bool {
        self.is_again
    }

    /// What the plan's atomics found, in their order and with zeros for its transfers. It means something
    /// only if all was done.
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> + '_ {
        let results = self.batch().results().iter().enumerate();
        results.map(|(place, result)| {
            let word = *result.as_ref().unwrap_or(&0);
            let tried = if self.is_again { self.swaps.as_slice() } else { &[] };
            // If the new word is found there, an earlier try has put it.
            let swap = tried.iter().find(|swap| swap.place == place && swap.new == word);
            swap.map_or(word, |swap| swap.expected)
        })
    }
}

impl Drop for Plan<'_> {
    fn drop(&mut self) {
        let Stage::Here(mut batch) = std::mem::replace(&mut self.stage, Stage::Passing) else {
            if self.changes_memory() {
                self.memory.in_flight.add(self.node);
            }
            return;
        };
        let mut spares = self.memory.spares.0.borrow_mut();
        if batch.buffer().len() != SPARE_BYTES || spares.len() == MOST_SPARES {
            return;
        }
        batch.clear();
        let (mut regions, mut swaps) = (std::mem::take(&mut self.regions), std::mem::take(&mut self.swaps));
        regions.clear();
        swaps.clear();
        spares.push(Parts { batch, regions, swaps });
    }
}

/// Posts all plans of a thread, each with a doorbell of its own, and waits for all of them.
pub(crate) async fn run_all(plans: &mut [Plan<'_>]) {
    let Some(memory) = plans.first().map(|plan| plan.memory) else { return };
    plans.iter().for_each(|plan| plan.asked.count(&memory.traffic));
    post(memory, plans).await;
    for plan in plans {
        let mut trying = Trying::default();
        while let Some(error) = plan.to_do_again()
            && plan.gets_ready_again(error, &mut trying).await
        {
            plan.is_again = true;
            post(memory, std::slice::from_mut(plan)).await;
        }
    }
}

async fn post(memory: &Memory, plans: &mut [Plan<'_>]) {
    let writing = plans.iter().filter(|plan| plan.writes).count() as u32;
    if writing > 0 {
        while memory.following.get() > 0 {
            memory.endpoint.sleep(MOVE_PAUSE).await;
        }
    }
    let posted = Posted::new(memory, writing);
    plans.iter_mut().for_each(Plan::start);
    poll_fn(|context| {
        let mut all = Poll::Ready(());
        for plan in &mut *plans {
            if plan.poll_posted(context).is_pending() {
                all = Poll::Pending;
            }
        }
        all
    })
    .await;
    posted.end();
}
