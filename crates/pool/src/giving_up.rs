//! When a node is given up: pure rules.
//!
//! Giving up is for good and costs all that lies there, so that it needs more than a connection that was refused: a
//! node whose places are all taken refuses connections and holds everything it holds.
//!
//! G1. A node that answers anything at its data plane is not given up.
//! G2. What is not answered on a connection that the node has answered on before: its data plane is silent. It is given
//!     up once nothing else was answered for [`SILENCE`].
//! G3. A connection that ends, or cannot be had, says nothing while the node answers renewals. Without those it is
//!     given up [`SILENCE`] after the trouble began.
//! G4. Where nobody listens any more a process has ended, and its memory with it: there [`GONE_AFTER`] is enough.
//! Not here: the clock (callers pass `now`), and who asks again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use farpool_fabric::Uncertain;
use farpool_lease::Millis;

use crate::NODE_DEADLINE;

/// How often a node is asked whether it lives, and how often who waits for one looks whether it was given up.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long a node may be silent. With the pause before it was asked, and the one before those who wait for it look, it
/// makes [`NODE_DEADLINE`].
pub(crate) const SILENCE: Duration = NODE_DEADLINE.saturating_sub(LOOK_EVERY.saturating_mul(2));
/// How long nobody may listen where the node does: its process has ended, but a firewall that is loaded anew or an
/// address that moves says so for a moment.
const GONE_AFTER: Duration = Duration::from_millis(500);

/// What a try that failed says of its node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sign {
    /// Its connection ended, or was not to be had.
    Closed,
    /// Nobody listens at its address.
    NobodyThere,
    /// There was no answer in time, on a connection that the node has answered on before.
    Silent,
}

impl Sign {
    /// What an operation says that ended as *unknown*, or was not sent at all.
    pub(crate) fn of(cause: Option<Uncertain>, has_answered: bool) -> Self {
        match cause {
            Some(Uncertain::NobodyThere) => Sign::NobodyThere,
            Some(Uncertain::Deadline) if has_answered => Sign::Silent,
            _ => Sign::Closed,
        }
    }

    /// What it says that a connection could not even be begun.
    pub(crate) fn of_error(error: &std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound => Sign::NobodyThere,
            _ => Sign::Closed,
        }
    }
}

/// When a node was last heard of, by the clock of the leases.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Heard {
    /// Its data plane has answered.
    pub answered: Millis,
    /// It has answered a renewal.
    pub renewed: Millis,
    /// The first trouble since its data plane last answered; `None`: there is none.
    pub trouble_since: Option<Millis>,
}

/// Whether a node is given up that was heard of then, now that there is such a sign.
pub fn is_given_up(now: Millis, sign: Sign, heard: Heard) -> bool {
    let trouble_since = heard.trouble_since.unwrap_or(now);
    let longer = |since: Millis, limit: Duration| u128::from(now.since(since).0) >= limit.as_millis();
    match sign {
        Sign::Silent => longer(heard.answered, SILENCE),
        Sign::NobodyThere if heard.renewed < trouble_since => longer(trouble_since, GONE_AFTER),
        Sign::Closed | Sign::NobodyThere => {
            longer(trouble_since.max(heard.answered).max(heard.renewed), SILENCE)
        }
    }
}

/// The same, as all threads of a process keep it of a node. Zero: never.
#[derive(Debug, Default)]
pub(crate) struct Hearing {
    answered_ms: AtomicU64,
    renewed_ms: AtomicU64,
    trouble_ms: AtomicU64,
}

// Relaxed throughout: times that guard no memory. A reader that misses one by a moment judges by the one before, and the
// limits are many times longer.
impl Hearing {
    pub(crate) fn answered(&self, now: Millis) {
        self.answered_ms.fetch_max(now.0, Ordering::Relaxed);
        self.trouble_ms.store(0, Ordering::Relaxed);
    }

    pub(crate) fn renewed(&self, now: Millis) {
        self.renewed_ms.fetch_max(now.0, Ordering::Relaxed);
    }

    /// There is trouble. Returns what is known.
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
    fn refused_connections_are_no_death_while_renewals_are_answered() {
        for after in [0, 1_000, 10_000, 100_000] {
            assert!(!given_up(after, Sign::Closed, 0, Some(after.saturating_sub(2_500))), "{after}");
            assert!(!given_up(after, Sign::NobodyThere, 0, Some(after.saturating_sub(2_500))), "{after}");
        }
    }

    #[test]
    fn a_node_that_answers_nothing_at_all_is_given_up_after_its_time() {
        let limit = SILENCE.as_millis() as u64;
        assert!(!given_up(limit - 1, Sign::Closed, 0, None) && given_up(limit, Sign::Closed, 0, None));
        assert!(!given_up(limit + 999, Sign::Closed, 0, Some(1_000)));
        assert!(given_up(limit + 1_000, Sign::Closed, 0, Some(1_000)), "counted from the last renewal");
    }

    #[test]
    fn a_node_whose_process_has_ended_is_given_up_soon() {
        assert!(!given_up(0, Sign::NobodyThere, 0, None), "not at the first sign");
        assert!(given_up(GONE_AFTER.as_millis() as u64, Sign::NobodyThere, 0, None));
    }

    #[test]
    fn a_silent_data_plane_is_given_up_though_renewals_are_answered_and_not_while_it_answers_others() {
        let limit = SILENCE.as_millis() as u64;
        assert!(given_up(0, Sign::Silent, limit, Some(0)));
        assert!(!given_up(0, Sign::Silent, limit - 1, None));
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
