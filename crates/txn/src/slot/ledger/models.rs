//! Models of the ledger: `loom` runs its code in every interleaving with at most [`PREEMPTIONS`] preemptions,
//! and with every outdated value that the memory model allows a load to find. Threads commit in one slot,
//! write its word when they have the turn, and sleep when they do not.
//!
//! A model holds if
//!
//! - the word never goes back;
//! - no thread is told that the watermark has reached a commit that the word does not have;
//! - a thread that writes the word finds everything installed up to the count that it writes;
//! - no thread sleeps for ever, which `loom` reports as a deadlock.
//!
//! Each fault below breaks the protocol on purpose, and must be caught.

use std::sync::Arc;

use loom::model::Builder;
use loom::sync::atomic::AtomicU64 as LoomWord;
use loom::sync::{Mutex, Notify};
use loom::thread;

use super::*;

/// Preemptions in one history: switches away from a thread that could go on. Known faults of such protocols
/// need two.
const PREEMPTIONS: usize = 3;
/// The last count of the slot's previous client.
const BEFORE: u64 = 7;
/// Most commits of a model.
const COMMITS: usize = 4;

const SOUND: u8 = 0;
/// The words order nothing.
const UNORDERED: u8 = 1;
/// A thread that is about to sleep does not say so.
const UNANNOUNCED: u8 = 2;
/// A thread that is about to sleep says so, and does not look again.
const NO_SECOND_LOOK: u8 = 3;
/// Every thread that wants the turn gets it.
const MANY_TURNS: u8 = 4;
/// A thread that has moved the watermark wakes no other thread.
const WAKES_NO_THREAD: u8 = 5;
/// A thread whose commit has vanished wakes no other thread.
const VANISHES_UNNOTICED: u8 = 6;

struct Faulty<const FAULT: u8>(LoomWord);

word!(LoomWord);

impl<const FAULT: u8> Faulty<FAULT> {
    fn order(order: Ordering) -> Ordering {
        if FAULT == UNORDERED { Ordering::Relaxed } else { order }
    }
}

impl<const FAULT: u8> Word for Faulty<FAULT> {
    fn new(value: u64) -> Self {
        Faulty(LoomWord::new(value))
    }

    fn load(&self, order: Ordering) -> u64 {
        self.0.load(Self::order(order))
    }

    fn store(&self, value: u64, order: Ordering) {
        let order = if order == Ordering::Release { Self::order(order) } else { order };
        self.0.store(value, order);
    }

    fn compare_exchange(&self, current: u64, new: u64, order: Ordering) -> Result<u64, u64> {
        // Of the words that are exchanged, only the turn is ordered.
        if FAULT == MANY_TURNS && order == Ordering::AcqRel {
            return Ok(self.0.fetch_or(0, order));
        }
        Word::compare_exchange(&self.0, current, new, Self::order(order))
    }

    fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
        let bits = if FAULT == UNANNOUNCED && bits == AWAITED { 0 } else { bits };
        self.0.fetch_or(bits, Self::order(order))
    }

    fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
        self.0.fetch_and(bits, Self::order(order))
    }

    fn fetch_sub(&self, subtrahend: u64, order: Ordering) -> u64 {
        let subtrahend = if FAULT == MANY_TURNS { 0 } else { subtrahend };
        self.0.fetch_sub(subtrahend, Self::order(order))
    }

    fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_max(value, Self::order(order))
    }
}

/// A slot with all that its threads share.
struct Shared<const FAULT: u8, const PLACES: usize> {
    ledger: Ledger<Faulty<FAULT>, PLACES>,
    /// The slot's word in far memory.
    word: LoomWord,
    /// What each commit installs.
    installed: [LoomWord; COMMITS],
    sleeping: Mutex<Vec<Arc<Notify>>>,
}

impl<const FAULT: u8, const PLACES: usize> Shared<FAULT, PLACES> {
    fn new() -> Arc<Self> {
        let word = || LoomWord::new(0);
        Arc::new(Shared {
            ledger: Ledger::after(BEFORE),
            word: LoomWord::new(BEFORE),
            installed: std::array::from_fn(|_| word()),
            sleeping: Mutex::new(Vec::new()),
        })
    }

    fn installed(&self, count: u64) -> &LoomWord {
        &self.installed[(count - BEFORE - 1) as usize]
    }

    fn begin(&self) -> u64 {
        loop {
            match self.ledger.begin() {
                Ok(count) => return count,
                Err(NotBegun::Full | NotBegun::TooFarAhead) => thread::yield_now(),
                Err(NotBegun::Closed) => panic!("no thread closes it"),
            }
        }
    }

    fn wake(&self, awaited: Awaited) {
        if awaited == Awaited(true) {
            let sleeping = std::mem::take(&mut *self.sleeping.lock().expect("no thread panics"));
            sleeping.iter().for_each(|sleeper| sleeper.notify());
        }
    }

    fn write(&self, up_to: u64) {
        // Relaxed: far memory orders nothing between queues.
        let before = self.word.load(Ordering::Relaxed);
        assert!(before < up_to, "the word goes back, or two threads have the turn");
        for count in BEFORE + 1..=up_to {
            assert_eq!(self.installed(count).load(Ordering::Relaxed), 1, "written before it is installed");
        }
        self.word.store(up_to, Ordering::Relaxed);
        let awaited = self.ledger.move_watermark(up_to);
        self.wake(if FAULT == WAKES_NO_THREAD { Awaited(false) } else { awaited });
    }

    /// Commits what has begun, and waits until the watermark has reached it; false: it never will.
    fn commit(&self, count: u64, sleeper: &Arc<Notify>) -> bool {
        self.installed(count).store(1, Ordering::Relaxed);
        let (up_to, awaited) = self.ledger.end(count);
        self.wake(awaited);
        up_to.into_iter().for_each(|up_to| self.write(up_to));
        loop {
            self.sleeping.lock().expect("no thread panics").push(sleeper.clone());
            let (look, awaited) = match FAULT {
                NO_SECOND_LOOK => {
                    self.ledger.turn.fetch_or(AWAITED, Ordering::AcqRel);
                    (
                        if self.ledger.watermark() >= count { Look::Reached } else { Look::Sleep },
                        Awaited(false),
                    )
                }
                _ => self.ledger.look(count),
            };
            self.wake(awaited);
            match look {
                Look::Reached => break,
                Look::Stuck => return false,
                Look::Write(up_to) => self.write(up_to),
                Look::Soon | Look::Sleep => sleeper.wait(),
            }
        }
        assert!(self.word.load(Ordering::Relaxed) >= count, "the word does not have it");
        true
    }

    fn vanish(&self) {
        let count = self.begin();
        self.installed(count).store(1, Ordering::Relaxed); // there is nothing to be installed
        let awaited = self.ledger.vanish(count);
        self.wake(if FAULT == VANISHES_UNNOTICED { Awaited(false) } else { awaited });
    }
}

fn explore<const FAULT: u8, const PLACES: usize>(
    one: impl Fn(&Shared<FAULT, PLACES>) + Copy + Send + Sync + 'static,
    other: impl Fn(&Shared<FAULT, PLACES>) + Copy + Send + Sync + 'static,
) {
    let mut model = Builder::new();
    model.preemption_bound = Some(PREEMPTIONS);
    model.check(move || {
        let shared = Shared::<FAULT, PLACES>::new();
        let here = shared.clone();
        let thread = thread::spawn(move || one(&here));
        other(&shared);
        thread.join().expect("it holds");
    });
}

fn commits<const FAULT: u8, const PLACES: usize>(shared: &Shared<FAULT, PLACES>, commits: usize) {
    let sleeper = Arc::new(Notify::new());
    (0..commits).for_each(|_| assert!(shared.commit(shared.begin(), &sleeper), "no commit fails"));
}

/// Two threads commit; one of them first has a commit that vanishes.
fn two_commit<const FAULT: u8>() {
    explore::<FAULT, 2>(
        |shared| commits(shared, 1),
        |shared| {
            shared.vanish();
            commits(shared, 1);
        },
    );
}

#[track_caller]
fn is_caught<const FAULT: u8>(as_what: &str) {
    let caught = std::panic::catch_unwind(two_commit::<FAULT>).expect_err("the fault goes unnoticed");
    let said = caught.downcast_ref::<String>().cloned();
    let said = said.or_else(|| caught.downcast_ref::<&str>().map(|said| (*said).to_owned()));
    let said = said.expect("a message");
    assert!(said.contains(as_what), "it was caught as: {said}");
}

/// What `loom` says when all threads sleep.
const DEADLOCK: &str = "deadlock";

#[test]
fn every_commit_is_reached_and_the_word_never_goes_back() {
    two_commit::<SOUND>();
}

#[test]
fn places_are_used_again_while_other_threads_look_at_them() {
    explore::<SOUND, 1>(|shared| commits(shared, 1), |shared| (0..2).for_each(|_| shared.vanish()));
    explore::<SOUND, 2>(|shared| commits(shared, 1), |shared| (0..3).for_each(|_| shared.vanish()));
    explore::<SOUND, 1>(|shared| commits(shared, 2), |shared| commits(shared, 1));
}

#[test]
fn a_sleeping_thread_learns_that_the_slot_is_stuck() {
    explore::<SOUND, 2>(
        |shared| {
            shared.begin();
            shared.ledger.mark_stuck();
            shared.wake(Awaited(true));
        },
        |shared| {
            if let Ok(count) = shared.ledger.begin() {
                let is_reached = shared.commit(count, &Arc::new(Notify::new()));
                assert!(!is_reached || count == BEFORE + 1, "after a commit that is stuck");
            }
        },
    );
}

#[test]
fn a_slot_is_closed_only_if_nothing_is_in_flight() {
    explore::<SOUND, 2>(
        |shared| {
            let (closed, awaited) = shared.ledger.close(Ledger::settled);
            shared.wake(awaited);
            if let Some(far) = closed {
                assert_eq!(far, shared.word.load(Ordering::Relaxed), "something is in flight");
                shared.wake(shared.ledger.give_turn_back());
            }
        },
        |shared| match shared.ledger.begin() {
            Ok(count) => assert!(shared.commit(count, &Arc::new(Notify::new())), "it had begun"),
            Err(not_begun) => assert_eq!(not_begun, NotBegun::Closed),
        },
    );
}

#[test]
fn words_that_order_nothing_are_caught() {
    is_caught::<UNORDERED>("written before it is installed");
}

#[test]
fn a_sleeper_that_does_not_say_so_is_caught() {
    is_caught::<UNANNOUNCED>(DEADLOCK);
}

#[test]
fn a_sleeper_that_does_not_look_again_is_caught() {
    is_caught::<NO_SECOND_LOOK>(DEADLOCK);
}

#[test]
fn two_threads_with_the_turn_are_caught() {
    is_caught::<MANY_TURNS>("the word does not have it");
}

#[test]
fn a_sleeper_that_is_not_woken_is_caught() {
    is_caught::<WAKES_NO_THREAD>(DEADLOCK);
}

#[test]
fn a_gap_that_is_closed_without_waking_is_caught() {
    is_caught::<VANISHES_UNNOTICED>(DEADLOCK);
}
