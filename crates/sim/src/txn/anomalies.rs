//! The anomalies of the literature as scripts on the shipped engine. Each script asserts what its steps see.
//! The anomalies come from Adya's thesis and the collection *Hermitage*. G0 to G-single and long forks do not
//! occur; write skew does.
//!
//! Each script runs in every combination of these settings: both sessions on one worker, on two workers that
//! share a slot, or on two compute servers; an oracle in one part or in two; with or without fetch threads.

use std::rc::Rc;
use std::time::Duration;

use farpool_txn::{CommitError, ReadError, SessionState, SharedSlot, Table, Transaction, Worker};
use farpool_wire::Slot;
use futures_util::future::join;

use super::broken::Chosen;
use super::oracle::Server;
use super::*;

/// After this time every finished commit is in the published cuts.
const PUBLISHED: Duration = Duration::from_micros(500);
/// Records of the scripts.
const X: u64 = 0;
const Y: u64 = 1;
/// A record that has no data at first.
const NEW: u64 = 2;
/// Others, more than are locked with one doorbell.
const OTHERS: std::ops::Range<u64> = 3..43;
const RECORDS_OF_SCRIPTS: u64 = OTHERS.end;
/// What X and Y hold at first.
const BEFORE: [u64; 2] = [10, 20];
/// The number of snapshots that read a record while a commit is rolled back.
const LOOKS: u32 = 20;

/// Where the two sessions of a script are.
#[derive(Clone, Copy, Debug)]
enum Sessions {
    OneWorker,
    OneSlot,
    TwoServers,
}

/// One combination of settings.
#[derive(Clone, Copy, Debug)]
struct Setting {
    sessions: Sessions,
    parts: u64,
    fetches: bool,
}

/// A script's workers, one for each session, and the run and table they work on.
struct Stage {
    run: Rc<Run>,
    table: Table,
    workers: [Rc<Worker<Chosen>>; 2],
}

impl Stage {
    async fn get(&self, transaction: &Transaction<'_, Chosen>, record: u64) -> Option<u64> {
        let row = transaction.read(&self.table, record).await.unwrap();
        row.data.map(|data| u64::from_le_bytes(*data.first_chunk().unwrap()))
    }

    async fn put<'a>(
        &'a self,
        transaction: &Transaction<'a, Chosen>,
        record: u64,
        value: u64,
    ) -> Result<(), ReadError> {
        transaction.write(&self.table, record, Some(&data_of(value))).await.map(drop)
    }

    /// What X and Y hold for a transaction that begins now.
    async fn now(&self) -> [Option<u64>; 2] {
        self.run.world.sleep(PUBLISHED).await;
        let mut seen = Vec::new();
        for worker in &self.workers {
            let mut session = SessionState::new();
            let transaction = worker.begin(&mut session).await.unwrap();
            seen.push([self.get(&transaction, X).await, self.get(&transaction, Y).await]);
        }
        assert_eq!(seen[0], seen[1], "both workers see the same");
        seen[0]
    }
}

fn data_of(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(DATA_WORDS)
}

/// Runs a script in every setting.
fn everywhere(script: impl AsyncFn(&Stage) + Clone + 'static) {
    for sessions in [Sessions::OneWorker, Sessions::OneSlot, Sessions::TwoServers] {
        for parts in [1, 2] {
            for fetches in [false, true] {
                in_setting(Setting { sessions, parts, fetches }, script.clone());
            }
        }
    }
}

fn in_setting(of: Setting, script: impl AsyncFn(&Stage) + 'static) {
    let mut random = Random::new(1, 1);
    let world = World::new(WorldConfig::new(1));
    let executor = Executor::new(world.clone());
    let mut setting = setting(world.clone(), executor.tasks(), 1, &mut random);
    setting.nodes.truncate(1);
    setting.slots = 2;
    setting.parts = of.parts;
    setting.records = RecordLayout::new(RECORDS_OF_SCRIPTS, DATA_WORDS * 8).unwrap();
    setting.log = LogLayout::new(8_192).unwrap();
    let run = Rc::new(setting);
    publishers::start(&run, &mut random);
    collector::start_one(&run, &mut random);
    let place = (world.add_host(1_000_000), Path::Checked);
    let process = world.add_process(place.0);
    let here = run.clone();
    run.tasks.spawn(process, async move {
        let grant = here.grant();
        let server = async |slot: u16, workers| {
            let shared = SharedSlot::after(Slot::new(slot).unwrap(), here.logs(grant), 0).unwrap();
            Server::of(workers, of.fetches).start(&here, process, place, grant, shared).await.unwrap()
        };
        let workers = match of.sessions {
            Sessions::OneWorker => vec![server(0, 1).await[0].clone(); 2],
            Sessions::OneSlot => server(0, 2).await,
            Sessions::TwoServers => [server(0, 1).await, server(1, 1).await].concat(),
        };
        let stage = Stage { table: here.table(grant), workers: workers.try_into().ok().unwrap(), run: here };
        let mut session = SessionState::new();
        let first = stage.workers[0].begin(&mut session).await.unwrap();
        for (record, value) in (X..).zip(BEFORE) {
            stage.put(&first, record, value).await.unwrap();
        }
        first.commit().await.unwrap();
        stage.run.world.sleep(PUBLISHED).await;
        script(&stage).await;
        stage.run.has_ended.set(true);
    });
    let (panicked, failure) = run_to_end(executor, RUN_NS, || 0);
    assert!(
        !panicked && failure.is_none() && run.ledger.notes.complaints.borrow().is_empty(),
        "{of:?}: {failure:?}"
    );
}

/// Two sessions on a stage with a transaction each. Both begin before any other step.
macro_rules! both_begin {
    ($stage:ident, $one:ident, $other:ident) => {
        let [mut session_one, mut session_other] = [SessionState::new(), SessionState::new()];
        #[allow(unused_mut)]
        let mut $one = $stage.workers[0].begin(&mut session_one).await.unwrap();
        #[allow(unused_mut)]
        let mut $other = $stage.workers[1].begin(&mut session_other).await.unwrap();
    };
}

#[test]
fn g0_writes_of_two_transactions_do_not_mix() {
    everywhere(async |stage| {
        both_begin!(stage, one, other);
        stage.put(&one, X, 11).await.unwrap();
        stage.put(&other, X, 12).await.unwrap();
        stage.put(&one, Y, 21).await.unwrap();
        one.commit().await.unwrap();
        assert!(matches!(stage.put(&other, Y, 22).await, Err(ReadError::Conflict)));
        drop(other);
        assert_eq!(stage.now().await, [Some(11), Some(21)]);
    });
}

#[test]
fn g1a_aborted_writes_are_never_read() {
    everywhere(async |stage| {
        both_begin!(stage, one, other);
        stage.put(&one, X, 101).await.unwrap();
        assert_eq!(stage.get(&other, X).await, Some(10));
        drop(one);
        assert_eq!(stage.get(&other, X).await, Some(10));
        assert_eq!(stage.now().await, [Some(10), Some(20)]);
    });
}

#[test]
fn g1a_writes_of_a_commit_that_is_rolled_back_are_never_read() {
    everywhere(async |stage| {
        both_begin!(stage, one, other);
        for (record, value) in [(X, 101), (Y, 102)] {
            stage.put(&one, record, value).await.unwrap();
        }
        stage.put(&other, Y, 22).await.unwrap();
        other.commit().await.unwrap();
        let look = async {
            let mut session = SessionState::new();
            for _ in 0..LOOKS {
                let third = stage.workers[1].begin(&mut session).await.unwrap();
                assert_eq!(stage.get(&third, X).await, Some(10));
            }
        };
        let (outcome, ()) = join(one.commit(), look).await;
        assert!(matches!(outcome, Err(CommitError::Conflict)), "{outcome:?}");
        assert_eq!(stage.now().await, [Some(10), Some(22)]);
    });
}

#[test]
fn a_commit_of_many_records_that_is_rolled_back_leaves_none_of_them_locked() {
    everywhere(async |stage| {
        both_begin!(stage, one, other);
        for record in OTHERS {
            stage.put(&one, record, 1).await.unwrap();
        }
        stage.put(&other, OTHERS.end - 1, 2).await.unwrap();
        other.commit().await.unwrap();
        assert!(matches!(one.commit().await, Err(CommitError::Conflict)));
        stage.run.world.sleep(PUBLISHED).await;
        let mut session = SessionState::new();
        let third = stage.workers[0].begin(&mut session).await.unwrap();
        for record in OTHERS {
            let expected = (record == OTHERS.end - 1).then_some(2);
            assert_eq!(stage.get(&third, record).await, expected);
            stage.put(&third, record, 3).await.unwrap();
        }
        third.commit().await.expect("none of them is locked");
    });
}

#[test]
fn g1b_intermediate_writes_are_never_read() {
    everywhere(async |stage| {
        both_begin!(stage, one, other);
        stage.put(&one, X, 101).await.unwrap();
        assert_eq!(stage.get(&other, X).await, Some(10));
        stage.put(&one, X, 11).await.unwrap();
        one.commit().await.unwrap();
        assert_eq!(stage.get(&other, X).await, Some(10));
        assert_eq!(stage.now().await, [Some(11), Some(20)]);
    });
}

#[test]
fn g1c_concurrent_transactions_do_not_read_each_others_writes() {
    everywhere(async |stage| {
        both_begin!(stage, one, other);
        stage.put(&one, X, 11).await.unwrap();
        stage.put(&other, Y, 22).await.unwrap();
        assert_eq!(stage.get(&one, Y).await, Some(20));
        assert_eq!(stage.get(&other, X).await, Some(10));
        one.commit().await.unwrap();
        other.commit().await.unwrap();
        assert_eq!(stage.now().await, [Some(11), Some(22)]);
    });
}

#[test]
fn otv_an_observed_transaction_does_not_vanish() {
    everywhere(async |stage| {
        both_begin!(stage, one, other);
        for (record, value) in [(X, 11), (Y, 19)] {
            stage.put(&one, record, value).await.unwrap();
        }
        stage.put(&other, X, 12).await.unwrap();
        one.commit().await.unwrap();
        stage.run.world.sleep(PUBLISHED).await;
        let mut session = SessionState::new();
        let third = stage.workers[0].begin(&mut session).await.unwrap();
        assert_eq!(stage.get(&third, X).await, Some(11));
        assert!(matches!(other.commit().await, Err(CommitError::Conflict)));
        assert_eq!((stage.get(&third, Y).await, stage.get(&third, X).await), (Some(19), Some(11)));
    });
}

#[test]
fn pmp_a_second_scan_does_not_find_records_inserted_meanwhile() {
    everywhere(async |stage| {
        both_begin!(stage, one, other);
        let look = async |transaction: &Transaction<'_, Chosen>| {
            let mut found = Vec::new();
            for record in 0..RECORDS_OF_SCRIPTS {
                found.extend(stage.get(transaction, record).await);
            }
            found
        };
        assert_eq!(look(&one).await, BEFORE);
        stage.put(&other, NEW, 30).await.unwrap();
        other.commit().await.unwrap();
        stage.run.world.sleep(PUBLISHED).await;
        assert_eq!(look(&one).await, BEFORE);
    });
}

#[test]
fn p4_no_update_is_lost() {
    everywhere(async |stage| {
        both_begin!(stage, one, other);
        assert_eq!((stage.get(&one, X).await, stage.get(&other, X).await), (Some(10), Some(10)));
        stage.put(&one, X, 11).await.unwrap();
        stage.put(&other, X, 12).await.unwrap();
        one.commit().await.unwrap();
        assert!(matches!(other.commit().await, Err(CommitError::Conflict)));
        assert_eq!(stage.now().await, [Some(11), Some(20)]);
    });
}

#[test]
fn g_single_a_snapshot_does_not_skew() {
    everywhere(async |stage| {
        both_begin!(stage, one, other);
        assert_eq!(stage.get(&one, X).await, Some(10));
        for (record, value) in [(X, 12), (Y, 18)] {
            stage.put(&other, record, value).await.unwrap();
        }
        other.commit().await.unwrap();
        stage.run.world.sleep(PUBLISHED).await;
        assert_eq!((stage.get(&one, Y).await, stage.get(&one, X).await), (Some(20), Some(10)));
        assert_eq!(stage.now().await, [Some(12), Some(18)]);
    });
}

#[test]
fn write_skew_occurs() {
    everywhere(async |stage| {
        both_begin!(stage, one, other);
        for transaction in [&one, &other] {
            assert_eq!(stage.get(transaction, X).await, Some(10));
            assert_eq!(stage.get(transaction, Y).await, Some(20));
        }
        stage.put(&one, X, 11).await.unwrap();
        stage.put(&other, Y, 21).await.unwrap();
        one.commit().await.unwrap();
        other.commit().await.unwrap();
        assert_eq!(
            stage.now().await,
            [Some(11), Some(21)],
            "each has committed a write that the other has not seen"
        );
    });
}

/// Two transactions write a record each at the same time, while sessions of both workers read both records.
#[test]
fn long_fork_all_sessions_see_two_commits_in_the_same_order() {
    const LOOKS: u64 = 60;
    everywhere(async |stage| {
        let write = async |worker: usize, record: u64| {
            let mut session = SessionState::new();
            let transaction = stage.workers[worker].begin(&mut session).await.unwrap();
            stage.put(&transaction, record, 99).await.unwrap();
            transaction.commit().await.unwrap();
        };
        let look = async |worker: usize| {
            let (mut session, mut seen) = (SessionState::new(), Vec::new());
            for _ in 0..LOOKS {
                let transaction = stage.workers[worker].begin(&mut session).await.unwrap();
                seen.push([X, Y].map(|_| false));
                for (place, record) in [X, Y].into_iter().enumerate() {
                    seen.last_mut().unwrap()[place] = stage.get(&transaction, record).await == Some(99);
                }
            }
            seen
        };
        let (_, (one, other)) = join(join(write(0, X), write(1, Y)), join(look(0), look(1))).await;
        let seen = [one, other].concat();
        assert!(!(seen.contains(&[true, false]) && seen.contains(&[false, true])), "{seen:?}");
        assert!(seen.contains(&[true, true]), "both are seen in the end");
    });
}
