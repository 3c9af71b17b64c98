//! What a member does beside its transactions, on threads of its own. While something of that is under way, its seat is not given back:
//! who has the role next would meet writes of two. And the member says that it lives only while all of it makes progress
//! ([`Vouching`](super::Vouching)).

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::{Either, select};
use parking_lot::Mutex;

use super::vouching::{Part, Sign};
use crate::memory::Memory;

/// The duties of a member. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Duties(Arc<State>);

#[derive(Debug, Default)]
struct State {
    under_way: AtomicU32,
    are_in_doubt: AtomicBool,
    /// Of those that are under way.
    shown: Mutex<Vec<Arc<Shown>>>,
}

/// What a duty shows of its progress; in cache lines of its own, since it changes with each round.
#[derive(Debug)]
#[repr(align(64))]
struct Shown {
    name: &'static str,
    /// It shows something.
    is_shown: AtomicBool,
    /// How often its thread has come by.
    turns: AtomicU64,
    /// Rounds that it has begun.
    rounds: AtomicU64,
    /// What it has asked of far memory.
    operations: AtomicU64,
}

/// One of them. Dropped before it has [ended](Self::ends), nobody knows what of it is under way.
#[derive(Debug)]
pub struct Duty {
    duties: Arc<State>,
    shown: Arc<Shown>,
    has_ended: bool,
}

impl Duties {
    /// Begins one of that name.
    pub fn begin(&self, name: &'static str) -> Duty {
        self.0.under_way.fetch_add(1, Ordering::Relaxed); // by who has the member, before anybody asks
        let [turns, rounds, operations] = std::array::from_fn(|_| AtomicU64::new(0));
        let shown = Arc::new(Shown { name, is_shown: AtomicBool::new(false), turns, rounds, operations });
        self.0.shown.lock().push(shown.clone());
        Duty { duties: self.0.clone(), shown, has_ended: false }
    }

    /// Whether one has begun and is not over.
    pub fn are_under_way(&self) -> bool {
        // Acquire: pairs with the release of each that is over, whose writes have taken effect by then.
        self.0.under_way.load(Ordering::Acquire) > 0
    }

    /// Whether something of one that is over may be under way.
    pub fn are_in_doubt(&self) -> bool {
        // Relaxed: asked behind `are_under_way`, which orders it.
        self.0.are_in_doubt.load(Ordering::Relaxed)
    }

    /// What those show that are under way.
    pub(super) fn signs(&self) -> Vec<Sign> {
        let shown = self.0.shown.lock();
        // Relaxed, all: they carry no data.
        let shown = shown.iter().filter(|shown| shown.is_shown.load(Ordering::Relaxed));
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let signs = shown.flat_map(|shown| {
            let rounds = count(&shown.rounds);
            [
                Sign { part: Part::Thread(shown.name), progress: count(&shown.turns).wrapping_add(rounds) },
                Sign {
                    part: Part::Work(shown.name),
                    progress: count(&shown.operations).wrapping_add(rounds),
                },
            ]
        });
        signs.collect()
    }
}

impl Duty {
    /// Does what the duty is, on a thread of its own with `memory`, and shows every `pause` that this thread runs, and what it has asked of
    /// far memory. A duty asks again and again, also where it finds that another member does what is to be done. Work that never waits shows its
    /// [rounds](Self::rounds), too.
    pub async fn does<T>(&self, memory: &Memory, pause: Duration, work: impl Future<Output = T>) -> T {
        let shows = async {
            loop {
                self.shown.turns.fetch_add(1, Ordering::Relaxed); // carries no data, as below
                self.shown.operations.store(memory.traffic().operations, Ordering::Relaxed);
                self.shown.is_shown.store(true, Ordering::Relaxed);
                memory.endpoint().sleep(pause).await;
            }
        };
        let (mut work, mut shows) = (pin!(work), pin!(shows));
        let ended: Either<_, (std::convert::Infallible, _)> = select(&mut work, &mut shows).await;
        let Either::Left((done, _)) = ended;
        // It goes on with something else, or has ended.
        self.shown.is_shown.store(false, Ordering::Relaxed);
        done
    }

    /// What says that the duty is over, asked at the beginning of each round: a thread in shared memory goes from one round to the next, and
    /// never has to wait for anything.
    pub fn rounds(&self, is_over: impl Fn() -> bool) -> impl Fn() -> bool {
        move || {
            let rounds = &self.shown.rounds;
            // By the duty's own thread alone; carries no data.
            rounds.store(rounds.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
            is_over()
        }
    }

    /// It is over, and nothing of it is under way.
    pub fn ends(mut self) {
        self.has_ended = true;
    }
}

impl Drop for Duty {
    fn drop(&mut self) {
        self.duties.shown.lock().retain(|shown| !Arc::ptr_eq(shown, &self.shown));
        if !self.has_ended {
            self.duties.are_in_doubt.store(true, Ordering::Relaxed); // ordered by the release below
        }
        self.duties.under_way.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duties_are_over_once_each_has_ended_and_in_doubt_if_one_was_dropped() {
        let duties = Duties::default();
        let [one, other] = ["one", "other"].map(|name| duties.begin(name));
        one.ends();
        assert!(duties.are_under_way() && !duties.are_in_doubt());
        drop(other);
        assert!(!duties.are_under_way() && duties.are_in_doubt());
        assert_eq!(duties.signs(), []);
    }
}
