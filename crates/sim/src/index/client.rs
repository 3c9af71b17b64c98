//! Clients: they enter records and search as the seed says, and record the answers.

use std::ops::Bound;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::{ProcessId, Random};
use farpool_txn::tree::{Rank, Tree, TreeError, TreeRules, TreeSpares};
use farpool_txn::{Direction, Memory};

use super::{Operation, Run};
use crate::indexing::{DEADLINE, LAST_DEADLINE, Setting};
use crate::place::ClientPlace;

/// Questions of each task.
const ROUNDS: u64 = 16;
/// Pause between two checks whether all others have ended.
const PAUSE: Duration = Duration::from_micros(100);

/// Starts the tasks of a client's current process.
pub(super) fn start<R: TreeRules>(run: &Rc<Run>, place: ClientPlace) {
    let setting = &run.setting;
    let process = setting.clients.borrow()[place.index];
    let mut random = setting.notes.random();
    let spares = run.spares();
    for _ in 0..1 + random.below(3) {
        let mut client = Client::<R>::new(run, &spares, process, place, DEADLINE);
        let staying = setting.left.stay();
        setting.tasks.spawn(process, async move {
            client.live().await;
            drop(staying);
        });
    }
}

/// Waits until all others have ended and no more faults occur, then enters everything and searches all of it.
pub(super) fn start_last<R: TreeRules>(run: &Rc<Run>, place: ClientPlace) {
    let setting = &run.setting;
    let process = setting.world.add_process(place.host);
    let here = run.clone();
    setting.tasks.spawn(process, async move {
        while here.setting.left.get() > 0 {
            here.setting.world.sleep(PAUSE).await;
        }
        here.setting.world.note("nothing goes wrong any more", &[]);
        let mut client = Client::<R>::new(&here, &here.spares(), process, place, LAST_DEADLINE);
        client.enter_all().await;
        for searches in [Direction::Ascending, Direction::Descending] {
            client.search(searches, usize::MAX, None).await;
        }
    });
}

/// A task of a client.
pub(super) struct Client<R> {
    run: Rc<Run>,
    spares: Arc<TreeSpares>,
    tree: Tree<R>,
    process: ProcessId,
    place: ClientPlace,
    deadline: Duration,
    pub(super) random: Random,
    /// Its connections, until one of them fails.
    memory: Option<Memory>,
}

impl<R: TreeRules> Client<R> {
    pub(super) fn new(
        run: &Rc<Run>,
        spares: &Arc<TreeSpares>,
        process: ProcessId,
        place: ClientPlace,
        deadline: Duration,
    ) -> Self {
        let mut random = run.setting.notes.random();
        let layers = run.pieces.len() / run.growth.layer;
        // As if it had opened the index before that grew.
        let tree = run.tree((1 + random.index(layers)) * run.growth.layer, spares);
        let (run, spares) = (run.clone(), spares.clone());
        Client { run, spares, tree, process, place, deadline, random, memory: None }
    }

    async fn live(&mut self) {
        for _ in 0..ROUNDS {
            if self.random.chance(600) {
                let rank = self.run.ranks[self.random.index(self.run.ranks.len())].clone();
                self.enter(&rank).await;
            } else {
                let direction =
                    if self.random.chance(500) { Direction::Ascending } else { Direction::Descending };
                let from = self.random.index(self.run.ranks.len() + 1);
                let from = self.run.ranks.get(from).cloned();
                let leaves = 1 + self.random.index(6);
                self.search(direction, leaves, from).await;
            }
            self.run.setting.world.sleep(Duration::from_nanos(self.random.below(20_000))).await;
        }
    }

    async fn enter_all(&mut self) {
        let mut ranks = self.run.ranks.clone();
        self.random.shuffle(&mut ranks);
        for rank in ranks {
            if !self.enter(&rank).await && self.run.is_roomy {
                self.complain(format!("{rank:?} cannot be entered, though faults have ended"));
            }
        }
    }

    fn complain(&self, what: String) {
        self.run.setting.notes.complain(what);
    }

    /// Its connections, opened again if they have failed.
    pub(super) async fn connected(&mut self) -> Option<Memory> {
        match self.memory.take() {
            Some(memory) => Some(memory),
            None => {
                let (process, place, deadline) = (self.process, self.place, self.deadline);
                Setting::connect(&self.run, process, place, deadline, &mut self.random).await
            }
        }
    }

    pub(super) fn keep(&mut self, memory: Memory) {
        self.memory = Some(memory);
    }

    /// Asks the index. If it has no room in the pieces that are known, or names another piece, the task
    /// learns of all pieces, and asks again.
    pub(super) async fn ask<T>(
        &mut self,
        question: impl AsyncFn(&Tree<R>) -> Result<T, TreeError>,
    ) -> Result<T, TreeError> {
        let _operation = Operation::begin(&self.run);
        match question(&self.tree).await {
            Err(TreeError::BeyondPieces | TreeError::Full)
                if self.tree.layout().pieces() < self.run.pieces.len() as u64 => {}
            answer => return answer,
        }
        self.tree = self.run.tree(self.run.pieces.len(), &self.spares);
        question(&self.tree).await
    }

    /// Enters a record. Returns false if there was no answer.
    async fn enter(&mut self, rank: &Rank) -> bool {
        let Some(memory) = self.connected().await else { return false };
        let numbers = [self.place.index as u64, self.run.place_of(rank)];
        self.run.setting.world.note("client {} enters record {}", &numbers);
        let begun = self.run.history.borrow_mut().begin_enter(rank);
        let entered = self.ask(async |tree| tree.enter(&memory, &rank.key, rank.number).await).await;
        match entered {
            Ok(()) => {
                self.run.setting.world.note("client {} has entered record {}", &numbers);
                self.run.history.borrow_mut().end_enter(rank, begun);
            }
            // The outcome is in doubt, and the connections are unusable.
            Err(TreeError::Memory(_)) => return false,
            Err(TreeError::Full) if !self.run.is_roomy => {}
            Err(error) => self.complain(format!("{rank:?} cannot be entered: {error}")),
        }
        self.keep(memory);
        true
    }

    /// Searches so many leaves from a rank on; `None`: from the end that comes first in this direction.
    async fn search(&mut self, direction: Direction, leaves: usize, from: Option<Rank>) {
        let Some(memory) = self.connected().await else { return };
        let begun = self.run.history.borrow_mut().now();
        let lowest = Rank::new(&vec![0; self.run.growth.leaf.key_bytes()], 0);
        let (mut found, mut at) = (Vec::new(), from.clone());
        let mut reached_end = false;
        for _ in 0..leaves {
            let run = match direction {
                Direction::Ascending => {
                    let first = at.clone().unwrap_or(lowest.clone());
                    self.ask(async |tree| tree.run_from(&memory, &first).await).await
                }
                Direction::Descending => {
                    self.ask(async |tree| tree.run_below(&memory, at.as_ref()).await).await
                }
            };
            let run = match run {
                Ok(run) => run,
                Err(TreeError::Memory(_)) => return,
                Err(error) => return self.complain(format!("the index cannot be searched: {error}")),
            };
            let ranks = run.entries.into_iter().map(|(rank, _)| rank);
            match direction {
                Direction::Ascending => found.extend(ranks),
                Direction::Descending => found.extend(ranks.rev()),
            }
            let goes_on = match (direction, &at, &run.next) {
                (_, None, _) | (_, _, None) => true,
                (Direction::Ascending, Some(here), Some(next)) => here < next,
                (Direction::Descending, Some(here), Some(next)) => next < here,
            };
            if !goes_on {
                return self.complain(format!("a search at {at:?} goes back to {:?}", run.next));
            }
            at = run.next;
            if at.is_none() {
                reached_end = true;
                break;
            }
        }
        let far = if reached_end { None } else { at };
        for rank in &found {
            let numbers = [self.place.index as u64, self.run.place_of(rank)];
            self.run.setting.world.note("client {} has found record {}", &numbers);
        }
        self.judge_order(direction, &found);
        let range = match direction {
            Direction::Ascending => (
                from.map_or(Bound::Unbounded, Bound::Included),
                far.map_or(Bound::Unbounded, Bound::Excluded),
            ),
            Direction::Descending => (
                far.map_or(Bound::Unbounded, Bound::Included),
                from.map_or(Bound::Unbounded, Bound::Excluded),
            ),
        };
        self.run.history.borrow_mut().note_search(range, begun, found);
        self.keep(memory);
    }

    fn judge_order(&self, direction: Direction, found: &[Rank]) {
        let is_right = |pair: &[Rank]| match direction {
            Direction::Ascending => pair[0] < pair[1],
            Direction::Descending => pair[0] > pair[1],
        };
        if !found.windows(2).all(is_right) {
            self.complain(format!("a search does not find records in order: {found:?}"));
        }
    }
}
