//! A barrier where the threads of a measurement wait for each other before each slice, and learn that one of
//! them has failed.
//!
//! M1. No thread waits for one that will not come: a thread that leaves, also by a panic, gives up its seat.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use anyhow::{Context, Result, anyhow};

/// A barrier for some threads.
pub struct Meeting<'a> {
    table: Mutex<Table>,
    all_there: Condvar,
    failed: AtomicBool,
    stop: &'a AtomicBool,
}

struct Table {
    seats: usize,
    waiting: usize,
    /// How often the barrier was passed.
    round: u64,
}

impl Table {
    /// Whether all threads that have a seat are waiting; if so, the next round begins.
    fn begin_next_if_complete(&mut self) -> bool {
        let complete = self.waiting >= self.seats;
        if complete {
            self.waiting = 0;
            self.round += 1;
        }
        complete
    }
}

impl<'a> Meeting<'a> {
    /// A meeting without seats. Once `stop` is set, its threads do no more work.
    pub fn new(stop: &'a AtomicBool) -> Self {
        let table = Mutex::new(Table { seats: 0, waiting: 0, round: 0 });
        Meeting { table, all_there: Condvar::new(), failed: AtomicBool::new(false), stop }
    }

    /// A seat for one more thread, which then has to come in every round. Take all seats before any thread
    /// waits.
    pub fn seat(&self) -> Seat<'_> {
        self.table().seats += 1;
        Seat { meeting: self }
    }

    /// Runs `work` in that many threads, each with its number and a seat. Returns their results once all have
    /// ended, or the first error.
    pub fn hold<T: Send>(
        &self,
        threads: usize,
        work: impl Fn(usize, &Seat<'_>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        std::thread::scope(|scope| {
            let starter = self.seat(); // until all are started, none passes its first meeting
            let seats: Vec<_> = (0..threads).map(|_| self.seat()).collect();
            let work = &work;
            let start = |(number, seat): (usize, _)| {
                let named = Builder::new().name(format!("bench {number}"));
                // If it cannot be started, the others do no work after their first meeting.
                named.spawn_scoped(scope, move || work(number, &seat)).inspect_err(|_| self.fail())
            };
            let started: Result<Vec<_>, _> = seats.into_iter().enumerate().map(start).collect();
            drop(starter);
            let started = started.context("cannot start all threads: lower --threads or --clients")?;
            joined(started.into_iter().map(|thread| thread.join()))
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // A panic of another thread leaves the table consistent: nothing panics while it is locked.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed); // the flag carries no data; see `Seat::attempt`
    }
}

/// Waits for all threads; returns their results, or the first error.
pub fn joined<T>(threads: impl Iterator<Item = std::thread::Result<Result<T>>>) -> Result<Vec<T>> {
    let all: Vec<_> = threads.collect();
    let panicked = || anyhow!("a thread of the measurement panicked, see above");
    all.into_iter().map(|outcome| outcome.unwrap_or_else(|_| Err(panicked()))).collect()
}

/// One thread's seat.
pub struct Seat<'a> {
    meeting: &'a Meeting<'a>,
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.meeting.fail();
        }
        let mut table = self.meeting.table();
        table.seats -= 1;
        if table.begin_next_if_complete() {
            self.meeting.all_there.notify_all();
        }
    }
}

impl Seat<'_> {
    /// Waits until all other threads with a seat wait as well.
    pub fn meet(&self) {
        let mut table = self.meeting.table();
        let round = table.round;
        table.waiting += 1;
        if table.begin_next_if_complete() {
            self.meeting.all_there.notify_all();
        }
        while table.round == round {
            table = self.meeting.all_there.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for all threads, then lets `work` run once, unless this worker or another one has failed.
    pub fn work<W, T>(&self, ready: Result<W>, work: impl FnOnce(&mut W) -> Result<T>) -> Result<T> {
        let mut ready = ready.map(Some);
        self.meet();
        let done = self.attempt(&mut ready, work);
        ready?;
        done.context("stopped, because another thread failed or a stop was requested")
    }

    /// Records a failure, so that the other threads stop.
    pub fn note<T>(&self, result: Result<T>) -> Result<T> {
        if result.is_err() {
            self.meeting.fail();
        }
        result
    }

    /// Lets `work` run, unless a thread has failed or `stop` is set. If it fails, the error replaces the
    /// worker.
    pub fn attempt<W, T>(
        &self,
        worker: &mut Result<Option<W>>,
        work: impl FnOnce(&mut W) -> Result<T>,
    ) -> Option<T> {
        // Relaxed: the flags carry no data.
        if self.meeting.failed.load(Ordering::Relaxed) || self.meeting.stop.load(Ordering::Relaxed) {
            return None;
        }
        let Ok(Some(present)) = worker else { return None };
        match self.note(work(present)) {
            Ok(done) => Some(done),
            Err(error) => {
                *worker = Err(error);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use anyhow::bail;

    use super::*;

    #[test]
    fn a_failed_worker_stops_the_work_of_all() {
        let stop = AtomicBool::new(false);
        let meeting = Meeting::new(&stop);
        let seat = meeting.seat();
        let mut worker = Ok(Some(7));
        assert_eq!(seat.attempt(&mut worker, |number| Ok(*number)), Some(7));
        assert_eq!(seat.attempt(&mut worker, |_| -> Result<()> { bail!("broken") }), None);
        assert!(worker.is_err());
        let mut other = Ok(Some(8));
        assert_eq!(seat.attempt(&mut other, |number| Ok(*number)), None);
    }

    #[test]
    fn no_thread_continues_before_all_have_come() {
        const THREADS: usize = 4;
        const ROUNDS: usize = 100;
        let (stop, came) = (AtomicBool::new(false), AtomicUsize::new(0));
        let meeting = Meeting::new(&stop);
        std::thread::scope(|scope| {
            for seat in std::iter::repeat_with(|| meeting.seat()).take(THREADS).collect::<Vec<_>>() {
                let came = &came;
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        came.fetch_add(1, Ordering::Relaxed); // the meeting's lock orders it
                        seat.meet();
                        assert!(came.load(Ordering::Relaxed) >= round * THREADS);
                        seat.meet();
                    }
                });
            }
        });
    }

    #[test]
    fn threads_that_leave_or_panic_are_not_waited_for() {
        let stop = AtomicBool::new(false);
        let meeting = Meeting::new(&stop);
        std::thread::scope(|scope| {
            let (staying, leaving, panicking) = (meeting.seat(), meeting.seat(), meeting.seat());
            let waiting = scope.spawn(move || {
                staying.meet();
                staying.attempt(&mut Ok(Some(1)), |number| Ok(*number))
            });
            drop(leaving);
            let panicked = scope.spawn(move || {
                let _seat = panicking;
                std::panic::resume_unwind(Box::new("on purpose"));
            });
            assert!(panicked.join().is_err());
            assert_eq!(waiting.join().unwrap(), None, "a panic is a failure");
        });
    }
}
