//! Step-by-step tests of READs of the oracle that find an older image, because the latest one is torn: it is
//! being replaced, or its publisher has died in the middle of it.

use std::pin::pin;

use farpool_fabric::AccessKind;
use farpool_txn::{SessionState, Worker};
use farpool_wire::Slot;
use futures_util::future::{Either, select};

use super::broken::Chosen;
use super::*;

const PAUSE: Duration = Duration::from_micros(100);
/// A transaction begins sooner than this, if there is a cut that it can begin from.
const LONG: Duration = Duration::from_micros(400);
/// Commits before each test: both images of the oracle are written.
const COMMITS: u32 = 3;

struct Stage {
    run: Rc<Run>,
    process: ProcessId,
    place: (HostId, Path),
}

impl Stage {
    /// A worker in a slot of its own, which does not announce itself, and its grant.
    async fn worker(&self, slot: u16) -> (Worker<Chosen>, Epoch) {
        let run = &self.run;
        let grant = run.grant();
        let memory = run.access(self.process, self.place, grant).await.unwrap().memory;
        let (slot_of, first) = (Slot::new(slot).unwrap(), run.firsts[usize::from(slot)]);
        let worker = Worker::new(memory, run.oracle(grant), run.logs(grant), slot_of, first);
        (worker.unwrap(), grant)
    }

    /// Commits, and waits until both images are written. Returns the number of the last cut.
    async fn publish(&self, worker: &Worker<Chosen>) -> u64 {
        for _ in 0..COMMITS {
            worker.stamp(&mut SessionState::new()).await.unwrap();
            self.run.world.sleep(PAUSE).await;
        }
        worker.begin(&mut SessionState::new()).await.unwrap().cut().sequence()
    }

    /// Tears the image of a cut, or makes a torn image whole again.
    fn flip(&self, sequence: u64) {
        let at = self.run.oracle(OWNER).parts()[0];
        let sum = at.board.image(sequence).end as u64 - 8;
        let flipped = !self.run.look(&at.piece, sum);
        let sum = at.piece.start + sum;
        self.run.touch(at.piece.region, AccessKind::Write, &mut |memory| memory.store(sum, flipped));
    }

    /// The number of the last cut of the oracle's first part.
    fn last_of_first_part(&self) -> u64 {
        let at = self.run.oracle(OWNER).parts()[0];
        let number = |image| self.run.look(&at.piece, at.board.image(image).start as u64);
        number(0).max(number(1))
    }

    /// The number of the cut from which a transaction begins. `None`: it waits.
    async fn begins(&self, worker: &Worker<Chosen>, session: &mut SessionState) -> Option<u64> {
        match select(pin!(worker.begin(session)), pin!(self.run.world.sleep(LONG))).await {
            Either::Left((begun, _)) => Some(begun.unwrap().cut().sequence()),
            Either::Right(_) => None,
        }
    }

    /// Checks that a transaction does not begin while the image of a cut is torn, and then begins from it.
    async fn waits_for(&self, sequence: u64, worker: &Worker<Chosen>, session: &mut SessionState) {
        self.flip(sequence);
        assert_eq!(self.begins(worker, session).await, None, "the older image is whole");
        self.flip(sequence);
        assert_eq!(self.begins(worker, session).await, Some(sequence));
    }
}

fn on_stage(task: impl AsyncFnOnce(&Stage) + 'static) {
    on_stage_with(1, task);
}

/// The same, with an oracle in this many parts.
fn on_stage_with(parts: u64, task: impl AsyncFnOnce(&Stage) + 'static) {
    on_empty_stage_with(parts, async |stage| {
        publishers::start(&stage.run, &mut Random::new(1, 1));
        task(stage).await;
    });
}

/// As [`on_stage_with`], but starts no publishers.
fn on_empty_stage_with(parts: u64, task: impl AsyncFnOnce(&Stage) + 'static) {
    let mut random = Random::new(1, 1);
    let world = World::new(WorldConfig::new(1));
    let executor = Executor::new(world.clone());
    let mut setting = setting(world.clone(), executor.tasks(), 1, &mut random);
    setting.parts = parts;
    let run = Rc::new(setting);
    run.write_first_words();
    let place = (world.add_host(1_000_000), Path::Checked);
    let process = world.add_process(place.0);
    let here = run.clone();
    run.tasks.spawn(process, async move {
        task(&Stage { run: here.clone(), process, place }).await;
        here.has_ended.set(true);
    });
    let (panicked, failure) = run_to_end(executor, RUN_NS, || 0);
    assert!(!panicked && failure.is_none(), "{failure:?}");
}

#[test]
fn a_session_does_not_go_back_to_an_older_image() {
    on_stage(async |stage| {
        let (worker, _) = stage.worker(0).await;
        let last = stage.publish(&worker).await;
        let mut session = SessionState::new();
        assert_eq!(stage.begins(&worker, &mut session).await, Some(last));
        stage.waits_for(last, &worker, &mut session).await;
    });
}

#[test]
fn an_older_image_serves_a_session_that_has_seen_no_later_one() {
    on_stage(async |stage| {
        let (worker, _) = stage.worker(0).await;
        let last = stage.publish(&worker).await;
        stage.flip(last);
        assert_eq!(stage.begins(&worker, &mut SessionState::new()).await, Some(last - 1));
    });
}

#[test]
fn an_older_image_of_one_of_several_parts_serves_no_session() {
    on_stage_with(2, async |stage| {
        let (worker, _) = stage.worker(0).await;
        stage.publish(&worker).await;
        let last = stage.last_of_first_part();
        stage.flip(last);
        assert_eq!(stage.begins(&worker, &mut SessionState::new()).await, None);
        stage.flip(last);
        assert!(stage.begins(&worker, &mut SessionState::new()).await.is_some());
    });
}

#[test]
fn a_worker_that_has_joined_begins_from_no_older_image() {
    on_stage(async |stage| {
        let (worker, grant) = stage.worker(0).await;
        let last = stage.publish(&worker).await;
        let worker = worker.announcing(stage.run.horizon(grant), 0).await.unwrap().unwrap();
        stage.waits_for(last, &worker, &mut SessionState::new()).await;
    });
}

#[test]
fn a_worker_that_has_announced_a_cut_begins_from_no_older_image() {
    on_stage(async |stage| {
        let (worker, grant) = stage.worker(0).await;
        let worker = worker.announcing(stage.run.horizon(grant), 0).await.unwrap().unwrap();
        let last = stage.publish(&worker).await;
        worker.keep_up().await.unwrap();
        stage.waits_for(last, &worker, &mut SessionState::new()).await;
    });
}

#[test]
fn a_worker_begins_from_no_older_image_while_the_announcement_of_a_later_cut_is_in_flight() {
    let held = Rc::new(Cell::new(0));
    for after in (0..60).map(|step| Duration::from_nanos(500 * step)) {
        let count = held.clone();
        on_stage(async move |stage| {
            let (worker, grant) = stage.worker(0).await;
            let at = stage.run.horizon(grant);
            let worker = worker.announcing(at, 0).await.unwrap().unwrap();
            let (committing, _) = stage.worker(1).await;
            let last = stage.publish(&committing).await;
            let announcing = Box::pin(worker.keep_up());
            let paused = Box::pin(stage.run.world.sleep(after));
            let Either::Right(((), announcing)) = select(announcing, paused).await else { return };
            stage.flip(last);
            let mut session = SessionState::new();
            let begin = Box::pin(worker.begin(&mut session));
            let begun = select(begin, Box::pin(stage.run.world.sleep(LONG))).await;
            if let Either::Left((begun, _)) = begun {
                let transaction = begun.unwrap();
                announcing.await.unwrap();
                let word =
                    stage.run.look(&Piece { epoch: OWNER, ..at.piece }, at.layout.word(0).unwrap() as u64);
                let sequence = transaction.cut().sequence();
                assert!(word <= sequence + 1, "held after {after:?}: {word} for cut {sequence}");
            }
            count.set(count.get() + 1);
        });
    }
    assert!(held.get() > 5, "nearly all announcements ended before they were held: {held:?}");
}

#[test]
fn a_worker_joins_only_with_an_image_that_is_the_latest() {
    on_stage(async |stage| {
        let (committing, _) = stage.worker(0).await;
        let last = stage.publish(&committing).await;
        stage.flip(last);
        let (joining, grant) = stage.worker(1).await;
        let joining = Box::pin(joining.announcing(stage.run.horizon(grant), 0));
        let Either::Right(((), joining)) = select(joining, pin!(stage.run.world.sleep(LONG))).await else {
            panic!("the cut that it found may not be the latest");
        };
        stage.flip(last);
        let joined = joining.await.unwrap().unwrap();
        assert_eq!(stage.begins(&joined, &mut SessionState::new()).await, Some(last));
    });
}

#[test]
fn a_publisher_that_finds_a_torn_image_gives_its_number_to_no_other_cut() {
    on_empty_stage_with(1, async |stage| {
        let publisher = publishers::start_one(&stage.run, 0, stage.place);
        let (worker, _) = stage.worker(0).await;
        stage.publish(&worker).await;
        let mut session = SessionState::new();
        let last = stage.begins(&worker, &mut session).await.unwrap();
        stage.run.tasks.kill(publisher.process);
        stage.run.world.sleep(PAUSE).await;
        assert_eq!(stage.last_of_first_part(), last);
        stage.flip(last);
        publishers::start_one(&stage.run, 0, stage.place);
        let next = stage.begins(&worker, &mut session).await.unwrap();
        assert!(next > last, "a session that has seen cut {last} begins from another cut of number {next}");
    });
}
