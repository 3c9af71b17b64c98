//! Anomalies by name: a history with the anomaly is rejected, and one without it is accepted.

use super::*;

const X: Record = 1;
const Y: Record = 2;

fn version(slot: u16, count: u64) -> Version {
    Version::new(farpool_wire::Slot::new(slot).unwrap(), count).unwrap()
}

fn cut(sequence: u64, counts: [u64; 3]) -> Cut {
    Cut::new(sequence, counts.into())
}

/// A transaction in a session of its own.
fn from(begun_from: Cut) -> Transaction {
    use std::sync::atomic::{AtomicU32, Ordering};
    static SESSIONS: AtomicU32 = AtomicU32::new(0);
    let session = SESSIONS.fetch_add(1, Ordering::Relaxed); // only has to differ
    Transaction { session, begun_from, reads: Vec::new(), writes: Vec::new(), outcome: Outcome::Aborted }
}

/// The value that a version writes to a record.
fn value(version: Version, record: Record) -> Value {
    (version != Version::INITIAL)
        .then(|| version.count() << 8 | (version.slot().index() as u64) << 4 | record)
}

impl Transaction {
    fn read(mut self, record: Record, version: Version) -> Self {
        self.reads.push(Read { record, version, value: value(version, record) });
        self
    }

    fn write(mut self, record: Record, replaced: Version) -> Self {
        self.writes.push(Write { record, replaced, value: None });
        self
    }

    fn commit(mut self, version: Version) -> Self {
        self.outcome = Outcome::Committed(version);
        self.written_as(version)
    }

    fn vanish(mut self, version: Version) -> Self {
        self.outcome = Outcome::Unknown(version);
        self.written_as(version)
    }

    fn written_as(mut self, version: Version) -> Self {
        self.writes.iter_mut().for_each(|write| write.value = value(version, write.record));
        self
    }

    fn of(mut self, session: u32) -> Self {
        self.session = session;
        self
    }
}

const INITIAL: Version = Version::INITIAL;

/// The first cut, before any commit.
fn first() -> Cut {
    cut(0, [0, 0, 0])
}

#[test]
fn reads_and_updates_one_after_another_are_fine() {
    let (a, b) = (version(0, 1), version(1, 1));
    let history = [
        from(first()).read(X, INITIAL).write(X, INITIAL).write(Y, INITIAL).commit(a),
        from(first()).read(X, INITIAL).read(Y, INITIAL),
        from(cut(1, [1, 0, 0])).read(Y, a).write(Y, a).commit(b),
        from(cut(1, [1, 0, 0])).read(X, a).read(Y, a),
        from(cut(2, [1, 1, 0])).read(X, a).read(Y, b),
    ];
    assert_eq!(judge(&history), Ok(()));
}

#[test]
fn write_skew_is_allowed() {
    let history = [
        from(first()).read(X, INITIAL).read(Y, INITIAL).write(X, INITIAL).commit(version(0, 1)),
        from(first()).read(X, INITIAL).read(Y, INITIAL).write(Y, INITIAL).commit(version(1, 1)),
    ];
    assert_eq!(judge(&history), Ok(()));
}

#[test]
fn g0_writes_of_two_transactions_in_different_orders_are_found() {
    let (a, b) = (version(0, 1), version(1, 1));
    let history = [
        from(cut(1, [1, 1, 0])).write(X, INITIAL).write(Y, b).commit(a),
        from(cut(1, [1, 1, 0])).write(Y, a).write(X, a).commit(b),
    ];
    assert_eq!(judge(&history), Err(Violation::BrokenChain { record: Y }));
}

#[test]
fn g1a_a_write_of_an_aborted_transaction_is_read() {
    let history = [
        from(first()).write(X, INITIAL).written_as(version(0, 1)),
        from(cut(1, [1, 0, 0])).read(X, version(0, 1)),
    ];
    assert_eq!(judge(&history), Err(Violation::DirtyRead { by: 1, record: X }));
}

#[test]
fn g1b_an_intermediate_write_of_a_transaction_is_read() {
    let a = version(0, 1);
    let mut reader = from(cut(1, [1, 0, 0])).read(X, a);
    reader.reads[0].value = Some(1);
    let history = [from(first()).write(X, INITIAL).commit(a), reader];
    assert_eq!(judge(&history), Err(Violation::WrongValue { by: 1, record: X }));
}

#[test]
fn g1c_two_transactions_read_each_other() {
    let (a, b) = (version(0, 1), version(1, 1));
    let history = [
        from(first()).read(Y, b).write(X, INITIAL).commit(a),
        from(first()).read(X, a).write(Y, INITIAL).commit(b),
    ];
    assert_eq!(judge(&history), Err(Violation::ReadFromTheFuture { by: 0, record: Y }));
}

#[test]
fn otv_a_transaction_that_was_observed_vanishes() {
    let (a, b) = (version(0, 1), version(1, 1));
    let history = [
        from(first()).write(X, INITIAL).write(Y, INITIAL).commit(a),
        from(cut(1, [1, 0, 0])).write(X, a).commit(b),
        // Sees the second commit, but not the first, which the second depends on.
        from(cut(2, [0, 1, 0])).read(X, b).read(Y, INITIAL),
    ];
    assert_eq!(judge(&history), Err(Violation::CrossingCuts { one: 1, other: 2 }));
    assert_eq!(judge(&[&history[..1], &history[1..2]].concat()), Ok(()));
}

#[test]
fn a_cut_that_sees_an_effect_without_its_cause_is_found_where_no_other_cut_tells() {
    let a = version(0, 1);
    let history = [from(cut(2, [1, 1, 0])).write(X, INITIAL).commit(a), from(cut(1, [1, 0, 0])).read(X, a)];
    let verdict = judge(&history);
    assert!(matches!(verdict, Err(Violation::CutWithoutCause { by: 1, of: 0 })), "{verdict:?}");
}

#[test]
fn a_cut_that_sees_an_effect_without_its_cause_crosses_that_of_the_cause() {
    let (a, b) = (version(0, 1), version(1, 1));
    let history = [
        from(first()).write(X, INITIAL).commit(a),
        from(cut(2, [1, 0, 0])).read(X, a).write(Y, INITIAL).commit(b),
        from(cut(1, [0, 1, 0])).read(Y, b),
    ];
    let verdict = judge(&history);
    assert!(matches!(verdict, Err(Violation::CrossingCuts { .. })), "{verdict:?}");
}

#[test]
fn pmp_a_predicate_read_twice_gives_the_same() {
    let a = version(0, 1);
    let history = [from(first()).write(X, INITIAL).commit(a), from(first()).read(X, INITIAL).read(X, a)];
    assert_eq!(judge(&history), Err(Violation::ReadFromTheFuture { by: 1, record: X }));
}

#[test]
fn p4_an_update_is_lost() {
    let (a, b) = (version(0, 1), version(1, 1));
    let history = [
        from(first()).read(X, INITIAL).write(X, INITIAL).commit(a),
        from(first()).read(X, INITIAL).write(X, INITIAL).commit(b),
    ];
    let verdict = judge(&history);
    assert!(matches!(verdict, Err(Violation::LostUpdate { record: X, .. })), "{verdict:?}");
}

#[test]
fn p4_an_update_is_lost_where_the_second_replaces_a_version_that_it_did_not_see() {
    let (a, b) = (version(0, 1), version(1, 1));
    let history = [
        from(first()).read(X, INITIAL).write(X, INITIAL).commit(a),
        from(first()).read(X, INITIAL).write(X, a).commit(b),
    ];
    assert_eq!(judge(&history), Err(Violation::ReplacedUnseen { by: 1, record: X }));
}

#[test]
fn g_single_half_of_a_transaction_is_read() {
    let a = version(0, 1);
    let history = [
        from(first()).write(X, INITIAL).write(Y, INITIAL).commit(a),
        from(cut(1, [1, 0, 0])).read(X, a).read(Y, INITIAL),
    ];
    assert_eq!(judge(&history), Err(Violation::StaleRead { by: 1, record: Y }));
}

#[test]
fn long_fork_two_readers_see_two_writers_in_different_orders() {
    let (a, b) = (version(0, 1), version(1, 1));
    let history = [
        from(first()).write(X, INITIAL).commit(a),
        from(first()).write(Y, INITIAL).commit(b),
        from(cut(1, [1, 0, 0])).read(X, a).read(Y, INITIAL),
        from(cut(2, [0, 1, 0])).read(X, INITIAL).read(Y, b),
    ];
    assert_eq!(judge(&history), Err(Violation::CrossingCuts { one: 2, other: 3 }));
}

#[test]
fn a_session_that_does_not_see_its_own_commit_is_found() {
    let history = [
        from(first()).write(X, INITIAL).commit(version(0, 1)).of(7),
        from(cut(1, [0, 1, 0])).read(X, INITIAL).of(7),
    ];
    assert_eq!(judge(&history), Err(Violation::SessionWentBack { before: 0, after: 1 }));
}

#[test]
fn two_commits_of_one_version_are_found() {
    let a = version(0, 1);
    let history = [from(first()).write(X, INITIAL).commit(a), from(first()).write(Y, INITIAL).commit(a)];
    assert_eq!(judge(&history), Err(Violation::SameVersion { one: 0, other: 1 }));
}

#[test]
fn a_transaction_of_unknown_outcome_is_all_there_or_not_at_all() {
    let a = version(0, 1);
    let vanished = from(first()).write(X, INITIAL).write(Y, INITIAL).vanish(a);
    let sees = cut(1, [1, 0, 0]);
    let nothing = from(sees.clone()).read(X, INITIAL).read(Y, INITIAL);
    let all = from(sees.clone()).read(X, a).read(Y, a);
    let half = from(sees).read(X, a).read(Y, INITIAL);
    assert_eq!(judge(&[vanished.clone(), nothing]), Ok(()));
    assert_eq!(judge(&[vanished.clone(), all]), Ok(()));
    assert_eq!(judge(&[vanished, half]), Err(Violation::StaleRead { by: 1, record: Y }));
}
