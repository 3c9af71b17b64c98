//! Operations that were sent and are not known to have ended: their future was dropped, or their outcome is
//! unknown.
//!
//! They may still land. Before memory is given back, they must have landed, or be known never to land: a
//! queue's operations take effect in their order, and a fenced READ behind them is answered once they have.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use farpool_fabric::{OpError, Uncertain};
use farpool_wire::NodeId;

use super::{Memory, MemoryError, Piece};

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// Nodes to whose queues something was sent that may still land.
#[derive(Default)]
pub(super) struct LooseEnds {
    /// With the number of the last such thing.
    last: RefCell<BTreeMap<NodeId, u64>>,
    count: Cell<u64>,
}

/// An operation that changes memory is under way. Dropped before it is [over](Self::over), it is a loose end.
#[must_use]
pub(super) struct Sent<'a> {
    ends: &'a LooseEnds,
    node: NodeId,
}

impl LooseEnds {
    pub(super) fn sent(&self, node: NodeId) -> Sent<'_> {
        Sent { ends: self, node }
    }

    /// Something may still land there.
    pub(super) fn add(&self, node: NodeId) {
        self.count.set(self.count.get() + 1);
        self.last.borrow_mut().insert(node, self.count.get());
    }

    fn all(&self) -> Vec<(NodeId, u64)> {
        self.last.borrow().iter().map(|(&node, &last)| (node, last)).collect()
    }

    /// The number of the last one there, if there is one.
    pub(super) fn last_of(&self, node: NodeId) -> Option<u64> {
        self.last.borrow().get(&node).copied()
    }

    /// All up to this one has landed there, or never will.
    pub(super) fn settled(&self, node: NodeId, last: u64) {
        let mut ends = self.last.borrow_mut();
        if ends.get(&node) == Some(&last) {
            ends.remove(&node);
        }
    }
}

impl Sent<'_> {
    /// It has ended: it took effect or not, unless that is unknown.
    pub(super) fn over<T>(self, result: &Result<T, OpError>) {
        if !is_in_doubt(result) {
            std::mem::forget(self);
        }
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        self.ends.add(self.node);
    }
}

/// Whether an operation may still land though it has ended. Of one whose memory has moved, or whose queue was
/// answered anew, nothing takes effect any more.
pub(super) fn is_in_doubt<T>(result: &Result<T, OpError>) -> bool {
    matches!(result, Err(OpError::Unknown { cause, .. }) if *cause != Uncertain::EpochMoved)
}

impl Memory {
    /// Whether something that this thread has sent may still land, though no future waits for it.
    pub(crate) fn has_loose_ends(&self) -> bool {
        !self.loose.last.borrow().is_empty()
    }

    /// Waits until nothing lands any more of what was given up half-way before.
    ///
    /// # Errors
    /// When a node does not answer, or lets this thread in no longer: then it stays unknown.
    pub(crate) async fn settle(&self) -> Result<(), MemoryError> {
        for (node, last) in self.loose.all() {
            let there = self.grants.iter().find(|(region, _)| region.node == node);
            let (&region, &(epoch, _)) = there.ok_or(MemoryError::NotConnected(node))?;
            let mut plan = self.plan(node, WORD_BYTES as usize)?;
            plan.fence();
            plan.read(&Piece { region, epoch, start: 0 }, 0..WORD_BYTES);
            plan.run().await.check()?;
            self.loose.settled(node, last);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId(1);

    #[test]
    fn what_is_dropped_or_in_doubt_is_a_loose_end_and_what_is_over_is_none() {
        let ends = LooseEnds::default();
        ends.sent(NODE).over(&Ok(()));
        ends.sent(NODE).over(&Err::<(), _>(OpError::NotSent { node: NODE }));
        let unknown = |cause| Err::<(), _>(OpError::Unknown { node: NODE, cause });
        ends.sent(NODE).over(&unknown(Uncertain::EpochMoved));
        assert_eq!(ends.all(), []);
        ends.sent(NODE).over(&unknown(Uncertain::Deadline));
        assert_eq!(ends.all(), [(NODE, 1)]);
        drop(ends.sent(NODE));
        assert_eq!(ends.all(), [(NODE, 2)]);
    }

    #[test]
    fn what_was_sent_behind_a_look_is_not_settled_by_it() {
        let ends = LooseEnds::default();
        drop(ends.sent(NODE));
        drop(ends.sent(NODE));
        ends.settled(NODE, 1);
        assert_eq!(ends.all(), [(NODE, 2)]);
        ends.settled(NODE, 2);
        assert_eq!(ends.all(), []);
    }
}
