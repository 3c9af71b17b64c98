//! Nodes that fail are left alone for a while: each operation that waits for one holds up a call of the
//! program, which could read the disk instead.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use farpool_wire::NodeId;
use rustix_futex_sync::Mutex;

/// The first pause, and the longest: each pause that follows without a success between them takes twice as
/// long as the one before.
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

impl NodePauses {
    /// Whether a node is left alone now. After a pause, one caller tries the node: for all others the pause
    /// goes on until that one has an answer.
    pub(super) fn is_paused(&self, node: NodeId, now_ns: u64) -> bool {
        // Relaxed: who does not see a new pause fails itself.
        if !self.are_there.load(Ordering::Relaxed) {
            return false;
        }
        let mut nodes = self.nodes.lock();
        let Some(pause) = nodes.get_mut(&node) else { return false };
        let is_over = now_ns >= pause.until_ns;
        if is_over {
            pause.until_ns = now_ns.saturating_add(pause.lasts.as_nanos() as u64);
        }
        !is_over
    }

    /// A node has failed.
    pub(super) fn failed(&self, node: NodeId, now_ns: u64) {
        let mut nodes = self.nodes.lock();
        let before = nodes.get(&node).map_or(Duration::ZERO, |pause| pause.lasts);
        let lasts = (before * 2).clamp(PAUSE, PAUSE_MAX);
        let until_ns = now_ns.saturating_add(lasts.as_nanos() as u64);
        nodes.insert(node, Pause { lasts, until_ns });
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
    fn a_node_that_fails_again_is_left_alone_for_longer_until_it_answers() {
        let (pauses, bad, good) = (NodePauses::default(), NodeId(1), NodeId(2));
        let mut now = 7;
        assert!(!pauses.is_paused(bad, now));
        for seconds in [1, 2, 4, 8, 16, 32, 32] {
            pauses.failed(bad, now);
            assert!(pauses.is_paused(bad, now) && !pauses.is_paused(good, now));
            now += seconds * SECOND;
            assert!(pauses.is_paused(bad, now - 1), "{seconds} s");
            assert!(!pauses.is_paused(bad, now), "{seconds} s: one caller tries");
            assert!(pauses.is_paused(bad, now), "the others wait for its answer");
        }
        pauses.failed(good, now);
        pauses.answered(bad);
        assert!(!pauses.is_paused(bad, now) && pauses.is_paused(good, now));
        pauses.answered(good);
        pauses.failed(bad, now);
        assert!(!pauses.is_paused(bad, now + SECOND), "it begins anew");
    }
}
