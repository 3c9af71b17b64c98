//! When to ask for more regions, and for how long the outcome of the last attempt counts. Pure.

use farpool_lease::Millis;

use crate::holder::GrowthOutcome;

/// How long a caller that takes an extent waits for an unreachable broker before it gets *no space*: long
/// enough for a broker to restart.
pub(crate) const GROW_PATIENCE: Millis = Millis(3_000);
/// How long the answer *full* counts: a full pool is not asked again for each page that does not fit.
pub(crate) const FULL_FOR: Millis = Millis(500);
/// After [`GROW_PATIENCE`] has passed, callers fail at once for this long instead of waiting for an
/// unreachable broker. It is longer than an attempt on a broker that hangs.
pub(crate) const UNREACHABLE_FOR: Millis = Millis(10_000);
/// Pause after a failed attempt, so that a full pool is not asked for every page.
const RETRY_PAUSE: Millis = Millis(100);

/// Attempts to get more regions.
#[derive(Clone, Debug, Default)]
pub struct Growth {
    attempts: u64,
    last: GrowthOutcome,
    ended: Millis,
    /// When the first attempt ended that found no broker, if none has found one since.
    failing_since: Option<Millis>,
}

impl Growth {
    /// How many regions to ask for next when `held` are held: an eighth of that, at least 2 and at most 64,
    /// within the `limit`.
    pub fn wanted(held: u64, limit: Option<u64>) -> u32 {
        const LEAST: u64 = 2;
        const MOST: u64 = 64;
        let room = limit.map_or(u64::MAX, |limit| limit.saturating_sub(held));
        (held / 8).clamp(LEAST, MOST).min(room) as u32
    }

    /// Attempts that have ended.
    pub fn attempts(&self) -> u64 {
        self.attempts
    }

    /// The outcome of the last one.
    pub fn last(&self) -> GrowthOutcome {
        self.last
    }

    /// Records that an attempt has ended. Returns how long to pause before the next.
    pub fn ended(&mut self, now: Millis, outcome: GrowthOutcome) -> Millis {
        self.attempts += 1;
        (self.last, self.ended) = (outcome, now);
        match outcome {
            GrowthOutcome::Grown => {
                self.failing_since = None;
                Millis(0)
            }
            GrowthOutcome::Full => {
                self.failing_since = None; // the broker has answered
                RETRY_PAUSE
            }
            GrowthOutcome::Unreachable => {
                self.failing_since.get_or_insert(now);
                RETRY_PAUSE
            }
        }
    }

    /// Whether an attempt would bring nothing, judging by the last ones: during an outage the callers
    /// together wait for one `GROW_PATIENCE`, not each for its own.
    pub fn is_hopeless(&self, now: Millis) -> bool {
        match self.last {
            GrowthOutcome::Grown => false,
            GrowthOutcome::Full => now < self.ended.plus(FULL_FOR),
            GrowthOutcome::Unreachable => {
                let patience_used_up = |since: Millis| now >= since.plus(GROW_PATIENCE);
                now < self.ended.plus(UNREACHABLE_FOR) && self.failing_since.is_some_and(patience_used_up)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eighth_more_is_asked_for_within_the_limit() {
        assert_eq!(Growth::wanted(0, None), 2);
        assert_eq!(Growth::wanted(80, None), 10);
        assert_eq!(Growth::wanted(10_000, None), 64);
        assert_eq!(Growth::wanted(80, Some(83)), 3);
        assert_eq!(Growth::wanted(80, Some(80)), 0);
        assert_eq!(Growth::wanted(80, Some(10)), 0);
    }

    #[test]
    fn a_full_pool_is_asked_again_after_half_a_second() {
        let mut growth = Growth::default();
        assert!(!growth.is_hopeless(Millis(0)));
        assert!(growth.ended(Millis(1_000), GrowthOutcome::Full) > Millis(0));
        assert!(growth.is_hopeless(Millis(1_499)) && !growth.is_hopeless(Millis(1_500)));
    }

    #[test]
    fn an_outage_begins_with_its_first_failed_attempt_though_the_pool_was_full_before() {
        let mut growth = Growth::default();
        growth.ended(Millis(0), GrowthOutcome::Full);
        growth.ended(Millis(5_000), GrowthOutcome::Full);
        growth.ended(Millis(5_100), GrowthOutcome::Unreachable);
        assert_eq!((growth.last(), growth.attempts()), (GrowthOutcome::Unreachable, 3));
        assert!(!growth.is_hopeless(Millis(8_099)) && growth.is_hopeless(Millis(8_100)));
    }

    #[test]
    fn an_outage_costs_one_patience_for_all_takers() {
        let mut growth = Growth::default();
        growth.ended(Millis(0), GrowthOutcome::Unreachable);
        assert!(!growth.is_hopeless(Millis(2_999)), "a broker's restart fits in");
        growth.ended(Millis(2_500), GrowthOutcome::Unreachable);
        assert!(growth.is_hopeless(Millis(3_000)));
        assert!(!growth.is_hopeless(Millis(12_500)), "time for another try");
        assert_eq!(growth.ended(Millis(13_000), GrowthOutcome::Grown), Millis(0));
        assert!(!growth.is_hopeless(Millis(13_000)));
    }
}
