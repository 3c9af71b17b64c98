//! Pure rules for giving a node up.
//!
//! Giving a node up is final and loses all data there, so it needs more evidence than a refused connection: a
//! node whose places for connections are all taken refuses new ones, and has lost nothing.
//!
//! G1. A node whose data plane answers is not given up.
//! G2. A request that gets no answer on a connection on which the node has answered before shows that the
//!     data plane does not answer. The node is given up once its data plane has answered nothing for
//!     [`SILENCE`].
//! G3. A connection that ends, or cannot be made, says nothing while the node answers renewals. If it does
//!     not, the node is given up [`SILENCE`] after the trouble began, or after its last answer of any kind,
//!     whichever is later.
//! G4. If no process listens at the node's address and no renewal is answered, the process has ended, and its
//!     memory with it: [`GONE_AFTER`] is enough.
//! Not here: the clock (callers pass `now`), and trying again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use farpool_fabric::Uncertain;
use farpool_lease::Millis;

use crate::NODE_DEADLINE;

/// How often the watch asks a node whether it lives, and how often an operation that waits for a node checks
/// whether it was given up.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long a node may answer nothing. With one interval before the watch asks, and one before waiting
/// operations check, this makes [`NODE_DEADLINE`].
pub(crate) const SILENCE: Duration = NODE_DEADLINE.saturating_sub(LOOK_EVERY.saturating_mul(2));
/// How long connections may be refused for want of a listener. The process has ended; but a firewall that is
/// being reloaded, or an address that moves, looks the same for a moment.
const GONE_AFTER: Duration = Duration::from_millis(500);

/// What a failed try says about its node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sign {
    /// The connection ended, or could not be made.
    Closed,
    /// No process listens at the node's address.
    NotListening,
    /// No answer came in time on a connection on which the node has answered before.
    Silent,
}

impl Sign {
    /// The sign of an operation that ended as *unknown*, or was not sent at all.
    pub(crate) fn of(cause: Option<Uncertain>, has_answered: bool) -> Self {
        match cause {
            Some(Uncertain::NotListening) => Sign::NotListening,
            Some(Uncertain::Deadline) if has_answered => Sign::Silent,
            _ => Sign::Closed,
        }
    }

    /// The sign of a connection that could not even be started.
    pub(crate) fn of_error(error: &std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound => Sign::NotListening,
            _ => Sign::Closed,
        }
    }
}

/// When a node was last heard from, by the clock of the leases.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Heard {
    /// Its data plane has answered.
    pub answered: Millis,
    /// It has answered a renewal.
    pub renewed: Millis,
    /// The first trouble since its data plane last answered; `None`: there is none.
    pub trouble_since: Option<Millis>,
}

/// Whether to give a node up, given a sign of it and when it was last heard from.
pub fn is_given_up(now: Millis, sign: Sign, heard: Heard) -> bool {
    let trouble_since = heard.trouble_since.unwrap_or(now);
    let longer = |since: Millis, limit: Duration| u128::from(now.since(since).0) >= limit.as_millis();
    match sign {
        Sign::Silent => longer(heard.answered, SILENCE),
        Sign::NotListening if heard.renewed < trouble_since => longer(trouble_since, GONE_AFTER),
        Sign::Closed | Sign::NotListening => {
            longer(trouble_since.max(heard.answered).max(heard.renewed), SILENCE)
        }
    }
}

/// When a node was last heard from, shared by all threads of a process. Zero: never.
#[derive(Debug, Default)]
pub(crate) struct Hearing {
    answered_ms: AtomicU64,
    renewed_ms: AtomicU64,
    trouble_ms: AtomicU64,
}

// Relaxed throughout: the times guard no memory. A thread that misses the newest one judges by the one
// before, and the limits are many times longer than that.
impl Hearing {
    pub(crate) fn answered(&self, now: Millis) {
        self.answered_ms.fetch_max(now.0, Ordering::Relaxed);
        self.trouble_ms.store(0, Ordering::Relaxed);
    }

    pub(crate) fn renewed(&self, now: Millis) {
        self.renewed_ms.fetch_max(now.0, Ordering::Relaxed);
    }

    /// Records a failed try; returns what is known of the node.
    pub(crate) fn trouble(&self, now: Millis) -> Heard {
        let _began = self.trouble_ms.compare_exchange(0, now.0.max(1), Ordering::Relaxed, Ordering::Relaxed);
        let at = |time: &AtomicU64| Millis(time.load(Ordering::Relaxed));
        Heard {
            answered: at(&self.answered_ms),
            renewed: at(&self.renewed_ms),
            trouble_since: Some(at(&self.trouble_ms)).filter(|since| since.0 > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGAN: Millis = Millis(100_000);

    fn given_up(after_ms: u64, sign: Sign, answered_before_ms: u64, renewed: Option<u64>) -> bool {
        let heard = Heard {
            answered: Millis(BEGAN.0 - answered_before_ms),
            renewed: renewed.map_or(Millis(BEGAN.0 - 2_000), |after| Millis(BEGAN.0 + after)),
            trouble_since: Some(BEGAN),
        };
        is_given_up(Millis(BEGAN.0 + after_ms), sign, heard)
    }

    #[test]
    fn a_node_that_refuses_connections_is_not_given_up_while_it_answers_renewals() {
        for after in [0, 1_000, 10_000, 100_000] {
            assert!(!given_up(after, Sign::Closed, 0, Some(after.saturating_sub(2_500))), "{after}");
            assert!(!given_up(after, Sign::NotListening, 0, Some(after.saturating_sub(2_500))), "{after}");
        }
    }

    #[test]
    fn a_node_that_answers_nothing_is_given_up_after_the_silence() {
        let limit = SILENCE.as_millis() as u64;
        assert!(!given_up(limit - 1, Sign::Closed, 0, None) && given_up(limit, Sign::Closed, 0, None));
        assert!(!given_up(limit + 999, Sign::Closed, 0, Some(1_000)));
        assert!(given_up(limit + 1_000, Sign::Closed, 0, Some(1_000)), "counted from the last renewal");
    }

    #[test]
    fn a_node_whose_process_has_ended_is_given_up_soon() {
        assert!(!given_up(0, Sign::NotListening, 0, None), "not at the first sign");
        assert!(given_up(GONE_AFTER.as_millis() as u64, Sign::NotListening, 0, None));
    }

    #[test]
    fn a_silent_data_plane_is_given_up_though_renewals_are_answered() {
        let limit = SILENCE.as_millis() as u64;
        assert!(given_up(0, Sign::Silent, limit, Some(0)));
        assert!(!given_up(0, Sign::Silent, limit - 1, None));
    }

    #[test]
    fn a_failed_try_tells_whether_a_process_listens_and_whether_it_is_silent() {
        assert_eq!(Sign::of(Some(Uncertain::NotListening), true), Sign::NotListening);
        assert_eq!(Sign::of(Some(Uncertain::Deadline), true), Sign::Silent);
        assert_eq!(Sign::of(Some(Uncertain::Deadline), false), Sign::Closed, "it may have no place");
        assert_eq!(Sign::of(Some(Uncertain::ConnectionLost), true), Sign::Closed);
        assert_eq!(Sign::of(None, true), Sign::Closed);
        use std::io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied};
        let signs = [ConnectionRefused, NotFound, PermissionDenied].map(|kind| Sign::of_error(&kind.into()));
        assert_eq!(signs, [Sign::NotListening, Sign::NotListening, Sign::Closed]);
    }

    #[test]
    fn trouble_begins_once_and_ends_with_an_answer() {
        let hearing = Hearing::default();
        assert_eq!(hearing.trouble(Millis(7)).trouble_since, Some(Millis(7)));
        assert_eq!(hearing.trouble(Millis(9)).trouble_since, Some(Millis(7)));
        hearing.answered(Millis(10));
        hearing.renewed(Millis(11));
        let heard = hearing.trouble(Millis(12));
        assert_eq!(
            (heard.answered, heard.renewed, heard.trouble_since),
            (Millis(10), Millis(11), Some(Millis(12)))
        );
    }
}
