//! When failed work is tried again: soon at first, then less and less often. Pure.

use farpool_lease::Millis;

use crate::error::FileError;

/// After the first failure, and after a failure that followed some progress: as often as the mover looks for
/// work.
const FIRST_PAUSE: Millis = Millis(250);
/// Longest pause: a node that joins is used within seconds, and a futile check of every missing extent costs
/// little.
const LONGEST_PAUSE: Millis = Millis(4_000);

/// The consecutive failures of a piece of work.
#[derive(Clone, Debug, Default)]
pub(crate) struct Retry {
    failure: Option<FileError>,
    pause: Millis,
    not_before: Millis,
}

impl Retry {
    /// Whether the work may be tried.
    pub(crate) fn is_due(&self, now: Millis) -> bool {
        now >= self.not_before
    }

    /// Makes the work due at once, because an operator or program has requested it.
    pub(crate) fn now(&mut self) {
        (self.pause, self.not_before) = (Millis(0), Millis(0));
    }

    /// Why the last attempt did not finish, if it did not.
    pub(crate) fn failure(&self) -> Option<FileError> {
        self.failure
    }

    /// Records a failure of the attempt in progress.
    pub(crate) fn waits_for(&mut self, failure: FileError) {
        self.failure = Some(failure);
    }

    /// An attempt has ended. `progressed`: some of the work was done.
    pub(crate) fn ended(&mut self, now: Millis, failure: Option<FileError>, progressed: bool) {
        self.failure = failure;
        self.pause = match failure {
            None => Millis(0),
            Some(_) if progressed || self.pause == Millis(0) => FIRST_PAUSE,
            Some(_) => Millis(self.pause.0 * 2).min(LONGEST_PAUSE),
        };
        self.not_before = now.plus(self.pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: Option<FileError> = Some(FileError::NoSpace);

    /// The pause after a failure, in milliseconds.
    fn pause_after(retry: &mut Retry, progressed: bool) -> u64 {
        retry.ended(Millis(1_000), FULL, progressed);
        (0..).find(|ms| retry.is_due(Millis(1_000 + ms))).unwrap()
    }

    #[test]
    fn a_failure_is_known_while_the_attempt_goes_on() {
        let mut retry = Retry::default();
        retry.waits_for(FileError::NoSpace);
        assert_eq!(retry.failure(), FULL);
        retry.ended(Millis(1_000), None, true);
        assert_eq!(retry.failure(), None);
    }

    #[test]
    fn pauses_double_up_to_a_bound_while_attempts_fail() {
        let mut retry = Retry::default();
        let pauses: Vec<u64> = (0..7).map(|_| pause_after(&mut retry, false)).collect();
        assert_eq!(pauses, [250, 500, 1_000, 2_000, 4_000, 4_000, 4_000]);
        assert_eq!(retry.failure(), FULL);
    }

    #[test]
    fn progress_success_and_a_request_end_the_pauses() {
        let mut retry = Retry::default();
        assert!((0..4).map(|_| pause_after(&mut retry, false)).is_sorted());
        assert_eq!(pause_after(&mut retry, true), 250);
        assert_eq!(pause_after(&mut retry, false), 500);
        retry.now();
        assert!(retry.is_due(Millis(0)));
        assert_eq!(pause_after(&mut retry, false), 250);
        retry.ended(Millis(1_000), None, true);
        assert!(retry.is_due(Millis(1_000)) && retry.failure().is_none());
    }
}
