//! What a member does beside its transactions, on threads of its own. While a duty is under way, the seat is
//! not given back: the next holder of the role would otherwise write beside this one. And the member beats
//! only while all its duties make progress ([`Vouching`](super::Vouching)).

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use farpool_fabric::Endpoint;
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
    /// What the duties that are under way show.
    shown: Mutex<Vec<Arc<Shown>>>,
}

/// The duty has begun, and its thread is on its way to far memory. That may have to wait for a node: the
/// thread shows nothing yet, and gets as long as its work would.
const PREPARING: u8 = 0;
/// The thread does the duty's work, and shows it.
const WORKING: u8 = 1;
/// The work is over: there is nothing to be shown any more.
const OVER: u8 = 2;

/// The progress that a duty shows; in cache lines of its own, since it changes with each round.
#[derive(Debug)]
#[repr(align(64))]
struct Shown {
    name: &'static str,
    /// [`PREPARING`], [`WORKING`] or [`OVER`].
    stage: AtomicU8,
    /// How often its thread has shown that it runs.
    turns: AtomicU64,
    /// Rounds begun.
    rounds: AtomicU64,
    /// Operations posted to far memory.
    operations: AtomicU64,
}

/// One duty. If it is dropped before it has [ended](Self::ends), it is unknown what of it is under way.
#[derive(Debug)]
pub struct Duty {
    duties: Arc<State>,
    shown: Arc<Shown>,
    has_ended: bool,
}

impl Duties {
    /// Begins a duty called `name`.
    pub fn begin(&self, name: &'static str) -> Duty {
        // By the member's owner, before the first call of `are_under_way`.
        self.0.under_way.fetch_add(1, Ordering::Relaxed);
        let [turns, rounds, operations] = std::array::from_fn(|_| AtomicU64::new(0));
        let shown = Arc::new(Shown { name, stage: AtomicU8::new(PREPARING), turns, rounds, operations });
        self.0.shown.lock().push(shown.clone());
        Duty { duties: self.0.clone(), shown, has_ended: false }
    }

    /// Whether one has begun and is not over.
    pub fn are_under_way(&self) -> bool {
        // Acquire: pairs with the release of each that is over, whose writes have taken effect by then.
        self.0.under_way.load(Ordering::Acquire) > 0
    }

    /// Whether operations of an ended duty may still be under way.
    pub fn are_in_doubt(&self) -> bool {
        // Relaxed: asked behind `are_under_way`, which orders it.
        self.0.are_in_doubt.load(Ordering::Relaxed)
    }

    /// The signs of all duties that are under way.
    pub(super) fn signs(&self) -> Vec<Sign> {
        let shown = self.0.shown.lock();
        let mut signs = Vec::with_capacity(2 * shown.len());
        for shown in shown.iter() {
            // Relaxed, all: they carry no data.
            let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
            let (stage, rounds) = (shown.stage.load(Ordering::Relaxed), count(&shown.rounds));
            if stage == WORKING {
                let progress = count(&shown.turns).wrapping_add(rounds);
                signs.push(Sign { part: Part::Thread(shown.name), progress });
            }
            if stage != OVER {
                let progress = count(&shown.operations).wrapping_add(rounds);
                signs.push(Sign { part: Part::Work(shown.name), progress });
            }
        }
        signs
    }
}

impl Duty {
    /// Does the duty's work, on a thread of its own with `memory`. Shows every `pause` that the thread runs,
    /// and how many operations it has posted. A duty posts operations again and again, also when another
    /// member has the role. Work that never waits shows its [rounds](Self::rounds), too.
    pub async fn does<T>(&self, memory: &Memory, pause: Duration, work: impl Future<Output = T>) -> T {
        let shows = async {
            loop {
                self.shown.turns.fetch_add(1, Ordering::Relaxed); // carries no data, as below
                self.shown.operations.store(memory.traffic().operations, Ordering::Relaxed);
                self.shown.stage.store(WORKING, Ordering::Relaxed);
                memory.endpoint().sleep(pause).await;
            }
        };
        let (mut work, mut shows) = (pin!(work), pin!(shows));
        let ended: Either<_, (std::convert::Infallible, _)> = select(&mut work, &mut shows).await;
        let Either::Left((done, _)) = ended;
        // The thread does something else now, or has ended.
        self.shown.stage.store(OVER, Ordering::Relaxed);
        done
    }

    /// Wraps the test for the duty's end, which the work makes at the beginning of each round, so that rounds
    /// are counted: in shared memory a thread goes from one round to the next and never waits.
    pub fn rounds(&self, is_over: impl Fn() -> bool) -> impl Fn() -> bool {
        move || {
            self.begins_round();
            is_over()
        }
    }

    fn begins_round(&self) {
        let rounds = &self.shown.rounds;
        // By the duty's own thread alone; carries no data.
        rounds.store(rounds.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Waits for an answer that does not come from far memory and has a deadline of its own, `within`. Until
    /// then waiting counts as progress, shown every `pause`; later it does not.
    pub async fn waits<T>(
        &self,
        endpoint: &Endpoint,
        within: Duration,
        pause: Duration,
        what: impl Future<Output = T>,
    ) -> T {
        let until_ns = endpoint.now_ns().saturating_add(within.as_nanos() as u64);
        let shows = async {
            while endpoint.now_ns() < until_ns {
                self.begins_round();
                endpoint.sleep(pause).await;
            }
            std::future::pending::<std::convert::Infallible>().await
        };
        let (mut what, mut shows) = (pin!(what), pin!(shows));
        let ended: Either<_, (std::convert::Infallible, _)> = select(&mut what, &mut shows).await;
        let Either::Left((done, _)) = ended;
        done
    }

    /// Ends the duty: none of its operations is under way.
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

    #[test]
    fn a_duty_vouches_for_its_work_before_its_thread_has_come_to_it() {
        let duties = Duties::default();
        let duty = duties.begin("carer");
        assert_eq!(duties.signs(), [Sign { part: Part::Work("carer"), progress: 0 }]);
        duty.ends();
        assert_eq!(duties.signs(), []);
    }
}
