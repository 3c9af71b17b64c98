//! A mutex that a thread can wait for with a deadline: `rustix_futex_sync::Mutex` cannot.
//!
//! T1. A thread that waits with a deadline gets a chance even if another thread unlocks and locks again at
//!     once: `lock` holds back while such a thread waits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix_futex_sync::{Mutex, MutexGuard};

/// Time between two tries of a thread that waits with a deadline.
const PAUSE: Duration = Duration::from_micros(50);
/// How long a thread holds back before it locks, if others wait: long enough for one of them to try (T1).
const HOLD_BACK: Duration = Duration::from_micros(300);

/// A value behind a mutex.
pub(crate) struct TimedMutex<T> {
    value: Mutex<T>,
    /// Threads that wait with a deadline.
    waiting: AtomicUsize,
}

impl<T> TimedMutex<T> {
    pub(crate) fn new(value: T) -> Self {
        TimedMutex { value: Mutex::new(value), waiting: AtomicUsize::new(0) }
    }

    /// Waits until the lock is free.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        // Relaxed: only fairness depends on it.
        if self.waiting.load(Ordering::Relaxed) > 0 {
            thread::sleep(HOLD_BACK);
        }
        self.value.lock()
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.value.try_lock()
    }

    /// Waits until the lock is free, at most for this long.
    pub(crate) fn lock_within(&self, limit: Duration) -> Option<MutexGuard<'_, T>> {
        if let Some(locked) = self.try_lock() {
            return Some(locked);
        }
        let give_up_at = Instant::now() + limit;
        // Relaxed, also below: see `lock`.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let locked = loop {
            thread::sleep(PAUSE);
            let locked = self.try_lock();
            if locked.is_some() || Instant::now() >= give_up_at {
                break locked;
            }
        };
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        locked
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn a_thread_that_waits_gets_its_turn_beside_one_that_locks_again_at_once() {
        /// By luck alone a wait would take longer.
        const SOON: Duration = Duration::from_secs(1);
        /// Far longer than the lock is free in between.
        const HELD: Duration = Duration::from_millis(1);
        let (mutex, stopped) = (TimedMutex::new(0_u64), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stopped.load(Ordering::Relaxed) {
                    let mut locked = mutex.lock();
                    let until = Instant::now() + HELD;
                    while Instant::now() < until {
                        *locked += 1;
                    }
                }
            });
            while mutex.try_lock().is_some() {
                thread::yield_now(); // the other thread has not begun
            }
            let got = (0..20).filter(|_| mutex.lock_within(SOON).is_some()).count();
            stopped.store(true, Ordering::Relaxed);
            assert_eq!(got, 20);
        });
    }

    #[test]
    fn waiting_ends_at_its_deadline() {
        let mutex = TimedMutex::new(());
        let _locked = mutex.lock();
        let begun = Instant::now();
        assert!(mutex.lock_within(Duration::from_millis(20)).is_none());
        assert!(begun.elapsed() >= Duration::from_millis(20));
        assert_eq!(mutex.waiting.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_thread_locks_without_holding_back_if_no_other_waits() {
        /// More than enough for one try that is not interrupted.
        const TRIES: usize = 1_000;
        let mutex = TimedMutex::new(());
        let is_quick = || {
            let begun = Instant::now();
            drop(mutex.lock());
            begun.elapsed() < HOLD_BACK
        };
        assert!((0..TRIES).any(|_| is_quick()));
    }
}
