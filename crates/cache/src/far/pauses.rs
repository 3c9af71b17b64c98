//! Nodes that fail are left alone for a while: each operation that waits for one holds up a call of the
//! program, which could read the disk instead.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use farpool_wire::NodeId;
use rustix_futex_sync::Mutex;

/// The first pause, and the longest: each further one takes twice as long as the one before, until the node
/// answers.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(32);

/// The nodes that one process leaves alone; its threads share them.
#[derive(Debug, Default)]
pub struct NodePauses {
    /// Whether there is any, so that nothing is locked while all is well.
    are_there: AtomicBool,
    nodes: Mutex<BTreeMap<NodeId, Pause>>,
}

#[derive(Clone, Copy, Debug)]
struct Pause {
    lasts: Duration,
    until_ns: u64,
}

impl Pause {
    fn begin(lasts: Duration, now_ns: u64) -> Pause {
        Pause { lasts, until_ns: now_ns.saturating_add(lasts.as_nanos() as u64) }
    }
}

impl NodePauses {
    /// Whether an operation may go to a node. After a pause, one caller may try the node; for all others a
    /// longer pause begins, which ends early if that one gets an answer.
    pub(super) fn may_try(&self, node: NodeId, now_ns: impl FnOnce() -> u64) -> bool {
        // Relaxed: a thread that does not see a new pause tries the node, and fails by itself.
        if !self.are_there.load(Ordering::Relaxed) {
            return true;
        }
        let mut nodes = self.nodes.lock();
        let Some(pause) = nodes.get_mut(&node) else { return true };
        let now_ns = now_ns();
        let is_over = now_ns >= pause.until_ns;
        if is_over {
            *pause = Pause::begin((pause.lasts * 2).min(PAUSE_MAX), now_ns);
        }
        is_over
    }

    /// A node has failed. Several threads may notice the same failure.
    pub(super) fn failed(&self, node: NodeId, now_ns: u64) {
        let mut nodes = self.nodes.lock();
        nodes.entry(node).or_insert_with(|| Pause::begin(PAUSE, now_ns));
        self.are_there.store(true, Ordering::Relaxed);
    }

    /// A node has answered.
    pub(super) fn answered(&self, node: NodeId) {
        if self.are_there.load(Ordering::Relaxed) {
            let mut nodes = self.nodes.lock();
            nodes.remove(&node);
            self.are_there.store(!nodes.is_empty(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_node_that_fails_is_left_alone_for_longer_and_longer_until_it_answers() {
        let (pauses, bad, good) = (NodePauses::default(), NodeId(1), NodeId(2));
        let may_try = |node, now| pauses.may_try(node, || now);
        let mut now = 7;
        assert!(may_try(bad, now));
        for seconds in [1, 2, 4, 8, 16, 32, 32] {
            // Three threads have waited for the same answer.
            (0..3).for_each(|_| pauses.failed(bad, now + SECOND / 2));
            assert!(!may_try(bad, now + SECOND / 2) && may_try(good, now));
            now += if seconds == 1 { SECOND * 3 / 2 } else { seconds * SECOND };
            assert!(!may_try(bad, now - 1), "{seconds} s");
            assert!(may_try(bad, now), "{seconds} s: one caller tries");
            assert!(!may_try(bad, now), "the others wait for its answer");
        }
        pauses.failed(good, now);
        pauses.answered(bad);
        assert!(may_try(bad, now) && !may_try(good, now));
        pauses.answered(good);
        pauses.failed(bad, now);
        assert!(may_try(bad, now + SECOND), "it begins anew");
    }
}
