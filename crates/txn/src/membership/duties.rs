//! Duties: the work of a member for all members beside its own transactions, on threads of its own. While a
//! duty is in flight, the seat is not given back: otherwise the next holder of a role would write at the same
//! time as this one. The member sends heartbeats only while all its duties make progress
//! ([`Vouching`](super::Vouching)).

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use farpool_fabric::Endpoint;
use futures_util::future::{Either, select};
use rustix_futex_sync::Mutex;

use super::vouching::{Part, Sign};
use crate::memory::Memory;

/// The duties of a member. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Duties(Arc<State>);

#[derive(Debug, Default)]
struct State {
    in_flight: AtomicU32,
    are_in_doubt: AtomicBool,
    /// The progress of the duties that have not finished.
    progress: Mutex<Vec<Arc<Progress>>>,
}

/// The duty has begun, and its thread is connecting to far memory. That may have to wait for a node: the
/// thread reports nothing yet, and gets as long as its work would.
const PREPARING: u8 = 0;
/// The thread does the duty's work, and reports its progress.
const WORKING: u8 = 1;
/// The work has finished: there is no more progress to report.
const FINISHED: u8 = 2;

/// The progress that a duty reports. It has cache lines of its own, since it changes with each round.
#[derive(Debug)]
#[repr(align(64))]
struct Progress {
    name: &'static str,
    /// [`PREPARING`], [`WORKING`] or [`FINISHED`].
    stage: AtomicU8,
    /// How often its thread has reported that it runs.
    turns: AtomicU64,
    /// Rounds begun.
    rounds: AtomicU64,
    /// Operations posted to far memory.
    operations: AtomicU64,
}

/// One duty. If it is dropped before it has [ended](Self::end), operations of it may still be in flight.
#[derive(Debug)]
pub struct Duty {
    duties: Arc<State>,
    progress: Arc<Progress>,
    has_ended: bool,
}

impl Duties {
    /// Begins a duty called `name`.
    pub fn begin(&self, name: &'static str) -> Duty {
        // Relaxed: the member's owner begins duties, before it first calls `are_in_flight`.
        self.0.in_flight.fetch_add(1, Ordering::Relaxed);
        let [turns, rounds, operations] = std::array::from_fn(|_| AtomicU64::new(0));
        let progress =
            Arc::new(Progress { name, stage: AtomicU8::new(PREPARING), turns, rounds, operations });
        self.0.progress.lock().push(progress.clone());
        Duty { duties: self.0.clone(), progress, has_ended: false }
    }

    /// Whether a duty has begun and has not finished.
    pub fn are_in_flight(&self) -> bool {
        // Acquire: pairs with the release of each duty that has finished, whose writes have taken effect by
        // then.
        self.0.in_flight.load(Ordering::Acquire) > 0
    }

    /// Whether operations of a duty that has ended may still be in flight.
    pub fn are_in_doubt(&self) -> bool {
        // Relaxed: asked after `are_in_flight`, which orders it.
        self.0.are_in_doubt.load(Ordering::Relaxed)
    }

    /// The signs of all duties that have not finished.
    pub(super) fn signs(&self) -> Vec<Sign> {
        let duties = self.0.progress.lock();
        let mut signs = Vec::with_capacity(2 * duties.len());
        for duty in duties.iter() {
            // Relaxed, all: they carry no data.
            let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
            let (stage, rounds) = (duty.stage.load(Ordering::Relaxed), count(&duty.rounds));
            if stage == WORKING {
                let progress = count(&duty.turns).wrapping_add(rounds);
                signs.push(Sign { part: Part::Thread(duty.name), progress });
            }
            if stage != FINISHED {
                let progress = count(&duty.operations).wrapping_add(rounds);
                signs.push(Sign { part: Part::Work(duty.name), progress });
            }
        }
        signs
    }
}

impl Duty {
    /// Does the duty's work, on a thread of its own with `memory`. Every `pause` it reports that the thread
    /// runs, and how many operations the thread has posted. A duty keeps posting operations, also while
    /// another member has the role. Work that never waits reports its [rounds](Self::rounds), too.
    pub async fn run<T>(&self, memory: &Memory, pause: Duration, work: impl Future<Output = T>) -> T {
        let reports = async {
            loop {
                self.progress.turns.fetch_add(1, Ordering::Relaxed); // carries no data, as below
                self.progress.operations.store(memory.traffic().operations, Ordering::Relaxed);
                self.progress.stage.store(WORKING, Ordering::Relaxed);
                memory.endpoint().sleep(pause).await;
            }
        };
        let (mut work, mut reports) = (pin!(work), pin!(reports));
        let ended: Either<_, (std::convert::Infallible, _)> = select(&mut work, &mut reports).await;
        let Either::Left((done, _)) = ended;
        // The thread does something else now, or has ended.
        self.progress.stage.store(FINISHED, Ordering::Relaxed);
        done
    }

    /// Wraps the test for the duty's end, which the work makes at the beginning of each round, so that rounds
    /// are counted: in shared memory a thread goes from one round to the next without ever waiting.
    pub fn rounds(&self, has_ended: impl Fn() -> bool) -> impl Fn() -> bool {
        move || {
            self.begins_round();
            has_ended()
        }
    }

    fn begins_round(&self) {
        let rounds = &self.progress.rounds;
        // Written by the duty's own thread alone; carries no data.
        rounds.store(rounds.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Waits for an answer that does not come from far memory and has a deadline of its own, `within`. Until
    /// then waiting counts as progress, which is reported every `pause`; after that it does not.
    pub async fn wait<T>(
        &self,
        endpoint: &Endpoint,
        within: Duration,
        pause: Duration,
        what: impl Future<Output = T>,
    ) -> T {
        let until_ns = endpoint.now_ns().saturating_add(within.as_nanos() as u64);
        let reports = async {
            while endpoint.now_ns() < until_ns {
                self.begins_round();
                endpoint.sleep(pause).await;
            }
            std::future::pending::<std::convert::Infallible>().await
        };
        let (mut what, mut reports) = (pin!(what), pin!(reports));
        let ended: Either<_, (std::convert::Infallible, _)> = select(&mut what, &mut reports).await;
        let Either::Left((done, _)) = ended;
        done
    }

    /// Ends the duty: none of its operations is in flight.
    pub fn end(mut self) {
        self.has_ended = true;
    }
}

impl Drop for Duty {
    fn drop(&mut self) {
        self.duties.progress.lock().retain(|progress| !Arc::ptr_eq(progress, &self.progress));
        if !self.has_ended {
            self.duties.are_in_doubt.store(true, Ordering::Relaxed); // ordered by the release below
        }
        self.duties.in_flight.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duties_have_finished_once_each_has_ended_and_are_in_doubt_if_one_was_dropped() {
        let duties = Duties::default();
        let [one, other] = ["one", "other"].map(|name| duties.begin(name));
        one.end();
        assert!(duties.are_in_flight() && !duties.are_in_doubt());
        drop(other);
        assert!(!duties.are_in_flight() && duties.are_in_doubt());
        assert_eq!(duties.signs(), []);
    }

    #[test]
    fn a_duty_vouches_for_its_work_before_its_thread_has_come_to_it() {
        let duties = Duties::default();
        let duty = duties.begin("recoverer");
        assert_eq!(duties.signs(), [Sign { part: Part::Work("recoverer"), progress: 0 }]);
        duty.end();
        assert_eq!(duties.signs(), []);
    }
}
