//! How long to spin before sleeping.
//!
//! Answers come within microseconds, and a sleep costs tens of them (paper 1, section 4.1.3). But on a busy
//! machine a thread that spins takes the processor from the very peer that it waits for. So a spinner yields
//! to other runnable threads. It spins for long when recent waits were short, for less and less time when
//! they were not, and not at all on a single processor.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Longest spin: the round trip of a full queue of 8 KiB reads over loopback, with some reserve.
const LONGEST_SPIN: Duration = Duration::from_micros(100);
/// Longest wait that was, or would have been, worth spinning through: the longest spin, plus the time of a
/// wake-up, which is part of a wait that ended in a sleep.
const WORTH_SPINNING: Duration = Duration::from_micros(200);
/// Shortest budget: a turn or two, in case the next answer comes at once.
const SHORTEST_SPIN: Duration = Duration::from_micros(4);
/// Polls between two yields while no other thread wants the processor: a yield costs as much as two polls of
/// a socket.
const LOOKS_PER_YIELD: u32 = 4;
/// A yield that takes longer has let another thread run; one that has not takes a quarter of this.
const SHARED_YIELD: Duration = Duration::from_micros(1);

/// Whether the peer has a processor to run on while this thread spins. The system is asked once, since that
/// reads files. (Not a `LazyLock`: if the process forks while another thread computes it, a child would wait
/// for that thread for ever.)
pub(crate) fn may_spin() -> bool {
    static CORES: AtomicUsize = AtomicUsize::new(0);
    // Relaxed, also below: threads that find 0 compute the same.
    let mut cores = CORES.load(Ordering::Relaxed);
    if cores == 0 {
        cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        CORES.store(cores, Ordering::Relaxed);
    }
    cores > 1
}

/// The spin budget of one waiting thread.
#[derive(Debug)]
pub struct Spinner {
    budget: Duration,
    /// Start of the current wait, spinning and asleep.
    since: Option<Instant>,
    /// Polls left until the next yield.
    looks: u32,
    allowed: bool,
}

impl Default for Spinner {
    fn default() -> Self {
        Spinner::new()
    }
}

impl Spinner {
    /// A spinner that expects success.
    pub fn new() -> Self {
        Spinner { budget: LONGEST_SPIN, since: None, looks: LOOKS_PER_YIELD, allowed: may_spin() }
    }

    /// Something arrived: how long that took determines how long to spin the next time.
    pub fn progressed(&mut self) {
        if let Some(since) = self.since.take() {
            self.learn(since.elapsed());
        }
    }

    /// Nothing arrived: true to poll again at once, false to sleep.
    pub fn spin_again(&mut self) -> bool {
        if !self.allowed {
            return false;
        }
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        if now - since >= self.budget {
            return false;
        }
        self.looks -= 1;
        if self.looks == 0 {
            std::thread::yield_now();
            self.looks = looks_until_next(now.elapsed());
        }
        true
    }

    /// Time asleep counts as well: otherwise a budget that was a little too short once would never grow
    /// again.
    fn learn(&mut self, waited: Duration) {
        self.budget =
            if waited <= WORTH_SPINNING { LONGEST_SPIN } else { (self.budget / 2).max(SHORTEST_SPIN) };
    }
}

/// Polls until the next yield, from the time that the last yield took. A thread that ran meanwhile may well
/// be the peer that is waited for.
fn looks_until_next(took: Duration) -> u32 {
    if took > SHARED_YIELD { 1 } else { LOOKS_PER_YIELD }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_shrinks_without_success_and_recovers_with_it() {
        let mut spinner = Spinner { allowed: true, ..Spinner::new() };
        (0..10).for_each(|_| spinner.learn(2 * WORTH_SPINNING));
        assert_eq!(spinner.budget, SHORTEST_SPIN);
        spinner.learn(2 * SHORTEST_SPIN); // the budget was too short for this one, but need not have been
        assert_eq!(spinner.budget, LONGEST_SPIN);
    }

    #[test]
    fn a_spinner_without_budget_sleeps_until_something_arrives() {
        let mut spinner = Spinner { allowed: true, ..Spinner::new() };
        while spinner.spin_again() {}
        assert!(!spinner.spin_again());
        spinner.progressed();
        assert!(spinner.spin_again());
    }

    #[test]
    fn a_spinner_on_a_shared_processor_yields_after_every_poll() {
        assert_eq!(looks_until_next(2 * SHARED_YIELD), 1);
        assert_eq!(looks_until_next(SHARED_YIELD / 4), LOOKS_PER_YIELD);
    }

    #[test]
    fn a_single_processor_never_spins() {
        let mut spinner = Spinner { allowed: false, ..Spinner::new() };
        assert!(!spinner.spin_again());
    }
}
