//! How long to spin before sleeping.
//!
//! Answers come within microseconds, a sleep costs tens of them (paper 1, section 4.1.3); but a spinner on a
//! busy machine takes the processor from the very peer it waits for. So a spinner yields to whoever is
//! runnable, spins as long as waits of late were worth it, less and less while they were not, and not at all
//! on one processor.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Longest spin: the round trip of a full queue of 8 KiB reads over loopback, with some reserve.
const LONGEST_SPIN: Duration = Duration::from_micros(100);
/// A wait of up to this would have been, or was, worth spinning through: the longest spin, and what it takes
/// to be woken up, which is part of what was waited after a sleep.
const WORTH_SPINNING: Duration = Duration::from_micros(200);
/// Shortest budget kept: a turn or two, in case the next answer comes at once.
const SHORTEST_SPIN: Duration = Duration::from_micros(4);
/// Looks from one yield to the next while nobody else wants the processor: a yield costs as much as two looks
/// at a socket.
const LOOKS_PER_YIELD: u32 = 4;
/// A yield that takes longer has let somebody else run; one that has not takes a quarter of it.
const SHARED_YIELD: Duration = Duration::from_micros(1);

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
    /// Start of the present wait, spun and slept.
    since: Option<Instant>,
    /// Until the next yield.
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

    /// Something came: how long it took tells how long to spin the next time.
    pub fn progressed(&mut self) {
        if let Some(since) = self.since.take() {
            self.learn(since.elapsed());
        }
    }

    /// Nothing came: true to look again at once, false to sleep.
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

    /// A sleep counts as well: a budget that was once too short by a little must not stay so for ever.
    fn learn(&mut self, waited: Duration) {
        self.budget =
            if waited <= WORTH_SPINNING { LONGEST_SPIN } else { (self.budget / 2).max(SHORTEST_SPIN) };
    }
}

/// Looks until the next yield, by how long the last one took. Whoever else ran may well be the peer that is
/// waited for.
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
    fn whoever_has_spun_in_vain_sleeps_until_something_comes() {
        let mut spinner = Spinner { allowed: true, ..Spinner::new() };
        while spinner.spin_again() {}
        assert!(!spinner.spin_again());
        spinner.progressed();
        assert!(spinner.spin_again());
    }

    #[test]
    fn whoever_shares_a_processor_gives_way_after_every_look() {
        assert_eq!(looks_until_next(2 * SHARED_YIELD), 1);
        assert_eq!(looks_until_next(SHARED_YIELD / 4), LOOKS_PER_YIELD);
    }

    #[test]
    fn a_single_processor_never_spins() {
        let mut spinner = Spinner { allowed: false, ..Spinner::new() };
        assert!(!spinner.spin_again());
    }
}
