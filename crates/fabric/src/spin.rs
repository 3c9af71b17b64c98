//! How long to spin before sleeping.
//!
//! Answers come within microseconds, a sleep costs tens of them (paper 1, section 4.1.3); but a spinner on a
//! busy machine takes the processor from the very peer it waits for. So every turn yields to whoever is
//! runnable, the budget grows when spinning paid off and halves when it did not, and one processor never spins.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Longest spin: a few times the round trip of an 8 KiB read over loopback.
const LONGEST_SPIN: Duration = Duration::from_micros(60);
/// Shortest budget kept, so that a change for the better is noticed.
const SHORTEST_SPIN: Duration = Duration::from_micros(4);

/// Whether there is a processor for whoever is waited for. Asked of the system once: it reads files.
pub(crate) fn may_spin() -> bool {
    static SEVERAL_CORES: LazyLock<bool> =
        LazyLock::new(|| std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1));
    *SEVERAL_CORES
}

/// The spin budget of one waiting thread.
#[derive(Debug)]
pub struct Spinner {
    budget: Duration,
    since: Option<Instant>,
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
        Spinner { budget: LONGEST_SPIN, since: None, allowed: may_spin() }
    }

    /// Something came: if it came while spinning, spin longer the next time.
    pub fn progressed(&mut self) {
        if self.since.take().is_some() {
            self.budget = (self.budget * 2).min(LONGEST_SPIN);
        }
    }

    /// Nothing came: true to look again at once, false to sleep.
    pub fn spin_again(&mut self) -> bool {
        if !self.allowed {
            return false;
        }
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        if now - since < self.budget {
            std::thread::yield_now();
            return true;
        }
        self.since = None;
        self.budget = (self.budget / 2).max(SHORTEST_SPIN);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_shrinks_without_success_and_recovers_with_it() {
        let mut spinner = Spinner { budget: LONGEST_SPIN, since: None, allowed: true };
        for _ in 0..10 {
            while spinner.spin_again() {}
        }
        assert_eq!(spinner.budget, SHORTEST_SPIN);
        for _ in 0..10 {
            spinner.spin_again();
            spinner.progressed();
        }
        assert_eq!(spinner.budget, LONGEST_SPIN);
    }

    #[test]
    fn a_single_processor_never_spins() {
        let mut spinner = Spinner { budget: LONGEST_SPIN, since: None, allowed: false };
        assert!(!spinner.spin_again());
    }
}
