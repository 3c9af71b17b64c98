//! Step-by-step tests of counts that a slot has given out and that its watermark has not reached.

use farpool_txn::recovery::{Fate, Recovered, fate, recover_by};
use farpool_txn::{CommitError, MAX_COUNTS_AHEAD, ReadError, SessionState, Worker};
use farpool_wire::{Slot, Version};
use futures_util::future::select;

use super::broken::Chosen;
use super::*;
use crate::mutation;

/// Distance of the slot's first word from the edge of its generation.
const TO_THE_EDGE: u64 = 100;
/// The number of counts that go to abandoned transactions, which leave no trace.
const GIVEN_UP: u64 = 150;
const EDGE: u64 = 1 << TIMESTAMP_BITS;

const RECORD: u64 = 0;
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_micros(20);

/// A slot with one client after another, and a recoverer.
struct Stage {
    run: Rc<Run>,
    process: ProcessId,
    place: (HostId, Path),
    slot: Slot,
    recoverer: Access,
    /// The grant of the current client.
    grant: Cell<Epoch>,
}

impl Stage {
    /// The slot's next client, which begins after `last`.
    async fn client(&self, last: u64) -> (Worker<Chosen>, Table) {
        let grant = self.run.grant();
        self.grant.set(grant);
        let memory = self.run.access(self.process, self.place, grant).await.unwrap().memory;
        let worker = Worker::new(memory, self.run.oracle(grant), self.run.logs(grant), self.slot, last);
        (worker.unwrap(), self.run.table(grant))
    }

    /// Evicts the client and recovers the slot.
    async fn recover(&self) -> Recovered {
        self.run.fence(self.grant.get(), &mut Random::new(1, 2)).await;
        let Access { memory, grant } = &self.recoverer;
        let (oracle, log) = (self.run.oracle(*grant), self.run.log(0, *grant));
        recover_by::<Chosen>(memory, &oracle, &log, self.slot).await.unwrap()
    }

    async fn fate(&self, version: Version) -> Fate {
        let Access { memory, grant } = &self.recoverer;
        fate(memory, &self.run.oracle(*grant), &self.run.log(0, *grant), version).await.unwrap()
    }
}

/// Prepares `many` transactions and abandons each. Returns the version of the last one.
async fn give_up(worker: &Worker<Chosen>, table: &Table, many: u64) -> Version {
    let (mut prepared, mut last) = (0, Version::INITIAL);
    while prepared < many {
        let mut session = SessionState::new();
        let transaction = worker.begin(&mut session).await.unwrap();
        transaction.write(table, RECORD, Some(&[1; DATA_WORDS * 8])).await.unwrap();
        match transaction.prepare() {
            Ok(committing) => last = committing.unwrap().version(),
            Err(CommitError::Busy) => continue,
            Err(error) => panic!("{error}"),
        }
        prepared += 1;
    }
    last
}

/// Leaves a commit in doubt: the client abandons it when it has run for the time `after`. Returns the version
/// of the commit.
async fn leave_in_doubt(run: &Run, worker: &Worker<Chosen>, table: &Table, after: Duration) -> Version {
    let mut session = SessionState::new();
    let transaction = worker.begin(&mut session).await.unwrap();
    transaction.write(table, RECORD, Some(&[2; DATA_WORDS * 8])).await.unwrap();
    let committing = transaction.prepare().unwrap().unwrap();
    let version = committing.version();
    drop(select(Box::pin(committing.commit()), Box::pin(run.world.sleep(after))).await);
    version
}

/// Commits a write. Returns `None` if every try fails, because the record stays locked or the commit
/// conflicts.
async fn commit(run: &Run, worker: &Worker<Chosen>, table: &Table) -> Option<Version> {
    for _ in 0..TRIES {
        let mut session = SessionState::new();
        let transaction = worker.begin(&mut session).await.unwrap();
        if let Err(ReadError::Conflict) = transaction.write(table, RECORD, Some(&[3; DATA_WORDS * 8])).await {
            run.world.sleep(PAUSE).await;
            continue;
        }
        match transaction.commit().await {
            Err(CommitError::Busy | CommitError::Conflict) => run.world.sleep(PAUSE).await,
            committed => return committed.unwrap(),
        }
    }
    None
}

fn on_stage(task: impl AsyncFnOnce(&Stage) + 'static) {
    let mut random = Random::new(1, 1);
    let world = World::new(WorldConfig::new(1));
    let executor = Executor::new(world.clone());
    let mut setting = setting(world.clone(), executor.tasks(), 1, &mut random);
    setting.firsts[0] = EDGE - TO_THE_EDGE;
    // No worker announces itself, so logs are used again once the watermark has reached their commits.
    let run = Rc::new(setting);
    run.write_first_words();
    publishers::start(&run, &mut random);
    let place = (run.world.add_host(1_000_000), Path::Checked);
    let process = world.add_process(place.0);
    let here = run.clone();
    run.tasks.spawn(process, async move {
        let recoverer = here.access(process, place, here.grant()).await.unwrap();
        let stage = Stage {
            run: here.clone(),
            process,
            place,
            slot: Slot::new(0).unwrap(),
            recoverer,
            grant: Cell::new(OWNER),
        };
        task(&stage).await;
        here.has_ended.set(true);
    });
    let (panicked, failure) = run_to_end(executor, RUN_NS, || 0);
    assert!(!panicked && failure.is_none(), "{failure:?}");
}

/// The number of timings for which a version in doubt was used by another commit, or for which its fate
/// changed. A timing is the point within the commit at which the client abandons it.
fn used_twice(mutation: Option<&'static str>) -> u32 {
    const TIMINGS_NS: [u64; 6] = [0, 3_000, 8_000, 14_000, 20_000, 26_000];
    mutation::set(mutation);
    let twice = Rc::new(Cell::new(0));
    for after in TIMINGS_NS.map(Duration::from_nanos) {
        let twice = twice.clone();
        on_stage(async move |stage| {
            let (worker, table) = stage.client(EDGE - TO_THE_EDGE).await;
            let given_up = give_up(&worker, &table, GIVEN_UP).await;
            let in_doubt = leave_in_doubt(&stage.run, &worker, &table, after).await;
            assert_eq!(in_doubt.count(), EDGE + GIVEN_UP - TO_THE_EDGE + 1);
            let recovered = stage.recover().await;
            let (worker, table) = stage.client(recovered.last).await;
            let is_there = stage.fate(in_doubt).await;
            let told = stage.fate(given_up).await;
            assert!(mutation.is_some() || told == Fate::RolledBack, "{given_up} has left no trace: {told:?}");
            let (mut is_again, mut committed) = (false, 0);
            for _ in 0..=GIVEN_UP {
                let Some(version) = commit(&stage.run, &worker, &table).await else { break };
                is_again |= version == in_doubt;
                assert!(mutation.is_some() || stage.fate(version).await == Fate::Committed, "{version}");
                committed += 1;
            }
            assert!(mutation.is_some() || committed > GIVEN_UP, "{committed} commits");
            let told = stage.fate(in_doubt).await;
            is_again |= told != is_there && told != Fate::Forgotten;
            twice.set(twice.get() + u32::from(is_again));
        });
    }
    mutation::set(None);
    twice.get()
}

#[test]
fn counts_of_the_next_generation_are_not_given_out_again_after_a_recovery() {
    assert_eq!(used_twice(None), 0);
    assert!(used_twice(Some(broken::COUNTS_AHEAD_FORGOTTEN)) > 3, "the test does not notice the mutation");
}

#[test]
fn the_watermark_follows_the_counts_of_a_slot_with_only_abandoned_transactions() {
    on_stage(async |stage| {
        let first = EDGE - TO_THE_EDGE;
        let (worker, table) = stage.client(first).await;
        for many in 1..=4 * MAX_COUNTS_AHEAD {
            give_up(&worker, &table, 1).await;
            let word = stage.run.word(0);
            assert!(first + many - word <= MAX_COUNTS_AHEAD, "{many} counts used, watermark {word}");
        }
        let last = commit(&stage.run, &worker, &table).await;
        assert_eq!(last.unwrap().count(), first + 4 * MAX_COUNTS_AHEAD + 1);
    });
}
