//! The parts of a run's oracle, and the compute servers. The workers of a server may share a slot, and may
//! begin from cuts that a fetch thread has read. In the simulator a thread is a task with an endpoint of its
//! own.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::{HostId, Path, ProcessId, Random};
use farpool_txn::oracle::fetch;
use farpool_txn::{BeginError, Fetched, SharedSlot, Worker};
use farpool_wire::Epoch;

use super::broken::Chosen;
use super::{Access, Run};

/// Parts of an oracle, at most; several may lie on one node.
const MOST_PARTS: u64 = 3;
/// Workers of a compute server, at most.
pub(super) const MOST_WORKERS: u16 = 3;
/// The pause of a fetch thread after each read of the oracle.
const FETCH_PAUSE: Duration = Duration::from_micros(3);
/// The time that it takes to read all parts while nothing is late.
pub(super) const LOOK: Duration = Duration::from_micros(12);

/// Draws the number of parts of a run's oracle.
pub(super) fn parts(random: &mut Random, slots: u16) -> u64 {
    let parts = if random.chance(400) { 2 + random.below(MOST_PARTS - 1) } else { 1 };
    parts.min(slots.into())
}

/// How a compute server works.
#[derive(Clone, Copy)]
pub(super) struct Server {
    /// Workers that share its slot.
    workers: u16,
    /// Whether its transactions begin from cuts that a fetch thread has read.
    fetches: bool,
}

impl Server {
    #[cfg(test)]
    pub(super) fn of(workers: u16, fetches: bool) -> Server {
        Server { workers, fetches }
    }

    pub(super) fn draw(random: &mut Random) -> Server {
        let workers =
            if random.chance(400) { 2 + random.below(u64::from(MOST_WORKERS) - 1) as u16 } else { 1 };
        Server { workers, fetches: random.chance(400) }
    }

    /// Starts its workers, each with an access to far memory of its own, and its fetch thread.
    pub(super) async fn start(
        &self,
        run: &Rc<Run>,
        process: ProcessId,
        place: (HostId, Path),
        grant: Epoch,
        slot: SharedSlot,
    ) -> Result<Vec<Rc<Worker<Chosen>>>, BeginError> {
        let first_place = first_place(slot.slot().index() as u16);
        let slot = Arc::new(slot);
        let fetched = match self.fetches {
            true => Some(start_fetching(run, process, run.client_access(process, place, grant).await?)),
            false => None,
        };
        let mut workers = Vec::new();
        for number in 0..self.workers {
            let memory = run.client_access(process, place, grant).await?.memory;
            let worker = Worker::sharing(memory, run.oracle(grant), slot.clone());
            let worker = worker.expect("the oracle has the slot");
            let worker = match &fetched {
                Some(fetched) => worker.with_fetched(fetched.clone()),
                None => worker,
            };
            let worker = worker.announcing(run.horizon(grant), first_place + number).await?;
            workers.push(Rc::new(worker.expect("there is a place for each")));
        }
        Ok(workers)
    }
}

/// The first of the places in the horizon that belong to a slot's workers.
pub(super) fn first_place(slot: u16) -> u16 {
    slot * MOST_WORKERS
}

/// Starts a process's fetch thread. It ends with the process, or when the run has finished.
fn start_fetching(run: &Rc<Run>, process: ProcessId, Access { memory, grant }: Access) -> Arc<Fetched> {
    let fetched = Arc::new(Fetched::new());
    let (here, into) = (run.clone(), fetched.clone());
    run.tasks.spawn(process, async move {
        let oracle = here.oracle(grant);
        let done = fetch::<Chosen>(&memory, &oracle, &into, FETCH_PAUSE, || here.has_ended.get()).await;
        // In a run with faults it may be fenced; then its workers notice that no newer cut arrives.
        if let Err(error) = done
            && !here.has_mishaps.get()
        {
            here.ledger.notes.complain(format!("a fetch thread stopped: {error}"));
        }
    });
    fetched
}
