//! The oracle of a run: whole or split over nodes; and compute servers, whose workers may share a slot, and may begin from what a
//! fetch thread has read. In the simulator a thread is a task with an endpoint of its own.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::{ProcessId, Random};
use farpool_txn::oracle::{fetch, publish};
use farpool_txn::{Fetched, Memory, Oracle, Piece, Rules};

use super::{Run, place};

/// Parts of an oracle, at most; several may lie on one node.
const MOST_PARTS: u64 = 3;
/// Workers of a compute server, at most.
const MOST_WORKERS: u64 = 3;
/// Of a fetch thread after each look.
const FETCH_PAUSE: Duration = Duration::from_micros(3);
/// A look at all parts takes so long while nothing is late.
const LOOK: Duration = Duration::from_micros(12);

/// An oracle of so many slots, in one part or several. `piece` says where a part lies.
pub(super) fn split(slots: u16, random: &mut Random, piece: impl Fn(u64) -> Piece) -> Oracle {
    let parts = if random.chance(400) { 2 + random.below(MOST_PARTS - 1) } else { 1 };
    let pieces: Vec<Piece> = (0..parts.min(slots.into())).map(piece).collect();
    Oracle::split(slots, &pieces).expect("each part has a slot")
}

/// Each part has a publisher, on that part's host or elsewhere.
pub(super) fn start_publishers<R: Rules>(run: &Rc<Run>, random: &mut Random) {
    let pace = run.oracle.pace(LOOK);
    for part in run.oracle.parts().iter().copied() {
        let (host, path) = place(run, random);
        let process = run.world.add_process(host);
        let here = run.clone();
        run.tasks.spawn(process, async move {
            let done = async {
                let memory = here.memory(process, host, path).await?;
                publish::<R>(&memory, part, pace, || *here.clients_left.borrow() == 0).await
            };
            if let Err(error) = done.await {
                here.complain(format!("a publisher stopped: {error}"));
            }
        });
    }
}

/// How a compute server works.
#[derive(Clone, Copy)]
pub(super) struct Server {
    /// Workers that share its slot.
    pub(super) workers: u64,
    /// Whether they begin from what a fetch thread has read.
    pub(super) fetches: bool,
}

impl Server {
    pub(super) fn draw(random: &mut Random) -> Server {
        let workers = if random.chance(400) { 2 + random.below(MOST_WORKERS - 1) } else { 1 };
        Server { workers, fetches: random.chance(400) }
    }
}

/// Starts a process's fetch thread, on its way to far memory.
pub(super) fn start_fetching<R: Rules>(run: &Rc<Run>, process: ProcessId, memory: Memory) -> Arc<Fetched> {
    let fetched = Arc::new(Fetched::new());
    let (here, into) = (run.clone(), fetched.clone());
    run.tasks.spawn(process, async move {
        let is_over = || *here.clients_left.borrow() == 0;
        if let Err(error) = fetch::<R>(&memory, &here.oracle, &into, FETCH_PAUSE, is_over).await {
            here.complain(format!("a fetch thread stopped: {error}"));
        }
    });
    fetched
}
