//! Rate limit for repeated warnings: the first is logged at once, then at most one per period.
//!
//! T1. Each occurrence is either logged or counted. The next line says how many were counted since the
//!     previous line.
//! T2. Two lines of one kind are at least one period apart.
//! T3. Memory is bounded: of each kind only the number of occurrences is stored, and all kinds beyond
//!     [`MOST_KINDS`] count as one kind.
//! Not here: the clock (callers pass `now`), and the text of the lines.
//!
//! A rate-limiting layer of the log would need no calls, but would work only in our own binary. Besides, it
//! distinguishes kinds either by the values of all fields or by none. The former includes the address of a
//! peer, of which a flood can have any number; the latter ignores even which region was lost.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time between two lines of a repeated warning: at most 8,640 lines a day.
pub const PERIOD: Duration = Duration::from_secs(10);

/// Most kinds that are distinguished: more than any caller has kinds of warnings.
pub const MOST_KINDS: usize = 64;

/// Decides which occurrences of one warning are logged.
#[derive(Debug, Default)]
pub struct Throttle(Mutex<Lines>);

impl Throttle {
    /// A warning that has not occurred yet.
    pub const fn new() -> Self {
        Throttle(Mutex::new(Lines { last: None, left_out: 0 }))
    }

    /// The warning occurs. If a line is to be logged for it, returns how many occurrences were left out since
    /// the last line.
    pub fn occurs(&self, now: Instant) -> Option<u64> {
        locked(&self.0).occurs(now)
    }

    /// To be called regularly. Once a period has passed since the last line, returns how many occurrences
    /// were left out, if any were. The caller logs their number, so that the end of a flood is logged, too.
    pub fn overdue(&self, now: Instant) -> Option<u64> {
        locked(&self.0).overdue(now)
    }
}

/// A [`Throttle`] for each of several kinds of a warning. A flood of one kind does not hide another.
#[derive(Debug)]
pub struct Throttles<K>(Mutex<Kinds<K>>);

#[derive(Debug)]
struct Kinds<K> {
    known: HashMap<K, Lines>,
    /// Shared by all other kinds.
    others: Lines,
}

impl<K> Default for Throttles<K> {
    fn default() -> Self {
        Throttles(Mutex::new(Kinds { known: HashMap::new(), others: Lines::default() }))
    }
}

impl<K: Eq + Hash> Throttles<K> {
    /// As [`Throttle::occurs`], for this kind.
    pub fn occurs(&self, kind: K, now: Instant) -> Option<u64> {
        let Kinds { known, others } = &mut *locked(&self.0);
        let lines = match known.len() < MOST_KINDS || known.contains_key(&kind) {
            true => known.entry(kind).or_default(),
            false => others,
        };
        lines.occurs(now)
    }

    /// As [`Throttle::overdue`], for all kinds together; zero if nothing was left out.
    pub fn overdue(&self, now: Instant) -> u64 {
        let Kinds { known, others } = &mut *locked(&self.0);
        known.values_mut().chain([others]).filter_map(|lines| lines.overdue(now)).sum()
    }
}

#[derive(Debug, Default)]
struct Lines {
    /// When the last line was written.
    last: Option<Instant>,
    /// Occurrences since then.
    left_out: u64,
}

impl Lines {
    fn occurs(&mut self, now: Instant) -> Option<u64> {
        if self.may_write(now) {
            return Some(self.write(now));
        }
        self.left_out += 1;
        None
    }

    fn overdue(&mut self, now: Instant) -> Option<u64> {
        (self.left_out > 0 && self.may_write(now)).then(|| self.write(now))
    }

    fn may_write(&self, now: Instant) -> bool {
        self.last.is_none_or(|last| now.saturating_duration_since(last) >= PERIOD)
    }

    fn write(&mut self, now: Instant) -> u64 {
        self.last = Some(now);
        std::mem::take(&mut self.left_out)
    }
}

/// Ignores poisoning: only a kind's own `Hash` or `Eq` can panic under these locks. At worst, a count is
/// wrong then.
fn locked<T>(lines: &Mutex<T>) -> MutexGuard<'_, T> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Duration = Duration::from_millis(1);

    #[test]
    fn the_first_occurrence_is_written_at_once_and_then_one_a_period_with_the_number_left_out() {
        let start = Instant::now();
        let throttle = Throttle::new();
        assert_eq!(throttle.occurs(start), Some(0));
        for count in 1..=500 {
            assert_eq!(throttle.occurs(start + count * MOMENT), None);
        }
        assert_eq!(throttle.occurs(start + PERIOD - MOMENT), None);
        assert_eq!(throttle.occurs(start + PERIOD), Some(501));
        assert_eq!(throttle.occurs(start + PERIOD + MOMENT), None);
        assert_eq!(throttle.occurs(start + 2 * PERIOD), Some(1));
    }

    #[test]
    fn occurrences_that_are_rare_are_all_written() {
        let start = Instant::now();
        let throttle = Throttle::new();
        assert!((0..9).all(|count| throttle.occurs(start + count * PERIOD) == Some(0)));
    }

    #[test]
    fn the_end_of_a_flood_is_logged_once_without_another_occurrence() {
        let start = Instant::now();
        let throttle = Throttle::new();
        assert_eq!(throttle.overdue(start), None, "nothing has occurred");
        throttle.occurs(start);
        assert_eq!(throttle.overdue(start + 2 * PERIOD), None, "nothing was left out");
        for _ in 0..7 {
            throttle.occurs(start + MOMENT);
        }
        assert_eq!(throttle.overdue(start + PERIOD - MOMENT), None);
        assert_eq!(throttle.overdue(start + PERIOD), Some(7));
        assert_eq!(throttle.overdue(start + 3 * PERIOD), None);
        assert_eq!(throttle.occurs(start + PERIOD + MOMENT), None, "a period after the line about them");
    }

    #[test]
    fn every_occurrence_is_written_or_counted_whatever_the_times_and_threads() {
        const EACH: u64 = 1_000;
        let start = Instant::now();
        let throttle = Throttle::new();
        let told = std::thread::scope(|scope| {
            let one = |thread: u32| {
                let throttle = &throttle;
                let occurs = move |count| throttle.occurs(start + thread * MOMENT + count * PERIOD / 100);
                move || (0..EACH as u32).filter_map(occurs).map(|left_out| left_out + 1).sum::<u64>()
            };
            let threads: Vec<_> = (0..4).map(|thread| scope.spawn(one(thread))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u64>()
        });
        let untold = throttle.overdue(start + 1_000 * PERIOD).unwrap_or(0);
        assert_eq!(told + untold, 4 * EACH);
    }
    #[test]
    fn a_flood_of_one_kind_hides_no_other_and_all_are_logged_in_the_end() {
        let start = Instant::now();
        let throttles = Throttles::default();
        assert_eq!((0..1_000).filter_map(|_| throttles.occurs("garbage", start)).collect::<Vec<_>>(), [0]);
        assert_eq!(throttles.occurs("certificate", start), Some(0));
        assert_eq!(throttles.occurs("certificate", start), None);
        assert_eq!(throttles.overdue(start + PERIOD - MOMENT), 0);
        assert_eq!(throttles.overdue(start + PERIOD), 1_000);
        assert_eq!(throttles.overdue(start + 9 * PERIOD), 0);
    }

    #[test]
    fn any_number_of_kinds_takes_bounded_memory_and_shares_one_count() {
        let start = Instant::now();
        let throttles = Throttles::default();
        let lines = (0..10 * MOST_KINDS).filter_map(|kind| throttles.occurs(kind, start)).count();
        assert_eq!(lines, MOST_KINDS + 1);
        assert_eq!(locked(&throttles.0).known.len(), MOST_KINDS);
        assert_eq!(throttles.overdue(start + PERIOD), (9 * MOST_KINDS - 1) as u64);
    }
}
