//! In-flight writes: operations that were sent and may still land, because their future was dropped or their
//! outcome is unknown.
//!
//! Before memory is given back, they must have landed, or be known never to land. A queue's operations take
//! effect in their order. So a READ with the fence flag that is sent after them is answered only after they
//! have landed.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use farpool_fabric::{OpError, Uncertain};
use farpool_wire::{AccessKey, Epoch, NodeId, Refusal, RegionId};

use super::{Memory, MemoryError, Piece};

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// The nodes on which in-flight writes may still land.
#[derive(Default)]
pub(super) struct InFlight {
    /// For each node, the number of its last in-flight write.
    last: RefCell<BTreeMap<NodeId, u64>>,
    count: Cell<u64>,
}

/// An operation that changes memory was sent. If this is dropped before the operation has
/// [ended](Self::ended), the operation is an in-flight write.
#[must_use]
pub(super) struct Sent<'a> {
    in_flight: &'a InFlight,
    node: NodeId,
}

impl InFlight {
    pub(super) fn sent(&self, node: NodeId) -> Sent<'_> {
        Sent { in_flight: self, node }
    }

    /// Notes that something may still land on a node.
    pub(super) fn add(&self, node: NodeId) {
        self.count.set(self.count.get() + 1);
        self.last.borrow_mut().insert(node, self.count.get());
    }

    fn all(&self) -> Vec<(NodeId, u64)> {
        self.last.borrow().iter().map(|(&node, &last)| (node, last)).collect()
    }

    /// The number of the last in-flight write to a node, if there is one.
    pub(super) fn last_of(&self, node: NodeId) -> Option<u64> {
        self.last.borrow().get(&node).copied()
    }

    /// All in-flight writes to a node up to this one have landed, or never will.
    pub(super) fn settled(&self, node: NodeId, last: u64) {
        let mut in_flight = self.last.borrow_mut();
        if in_flight.get(&node) == Some(&last) {
            in_flight.remove(&node);
        }
    }
}

impl Sent<'_> {
    /// The operation has ended. It is an in-flight write only if its outcome is unknown.
    pub(super) fn ended<T>(self, result: &Result<T, OpError>) {
        if !is_in_doubt(result) {
            std::mem::forget(self);
        }
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        self.in_flight.add(self.node);
    }
}

/// Whether an operation that has ended may still land. It cannot if its memory has moved, or a newer
/// incarnation of its queue was answered.
pub(super) fn is_in_doubt<T>(result: &Result<T, OpError>) -> bool {
    matches!(result, Err(OpError::Unknown { cause, .. }) if *cause != Uncertain::EpochMoved)
}

impl Memory {
    /// Whether an operation that this thread has sent may still land although no future waits for it.
    pub(crate) fn has_writes_in_flight(&self) -> bool {
        !self.in_flight.last.borrow().is_empty()
    }

    /// Waits until no in-flight write of this thread can land any more.
    ///
    /// # Errors
    /// A node does not answer, or refuses this thread. Then its writes stay in flight.
    pub(crate) async fn settle(&self) -> Result<(), MemoryError> {
        for (node, last) in self.in_flight.all() {
            self.read_behind_all(node).await?;
            self.in_flight.settled(node, last);
        }
        Ok(())
    }

    /// Reads from a node behind all operations that were sent to it. Some of the regions may have been given
    /// back: any other one will do.
    async fn read_behind_all(&self, node: NodeId) -> Result<(), MemoryError> {
        let of_node = |(region, (epoch, _)): (&RegionId, &(Epoch, AccessKey))| {
            (region.node == node).then_some(Piece { region: *region, epoch: *epoch, start: 0 })
        };
        let regions: Vec<Piece> = self.grants.borrow().iter().filter_map(of_node).collect();
        let mut read = Err(MemoryError::NotConnected(node));
        for region in regions {
            let mut plan = self.plan(node, WORD_BYTES as usize)?;
            plan.fence();
            plan.read(&region, 0..WORD_BYTES);
            read = plan.run().await.check();
            if !matches!(read, Err(MemoryError::Failed(OpError::Refused(Refusal::StaleEpoch)))) {
                break;
            }
        }
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId(1);

    #[test]
    fn an_operation_that_is_dropped_or_in_doubt_is_in_flight_and_one_that_has_finished_is_not() {
        let in_flight = InFlight::default();
        in_flight.sent(NODE).ended(&Ok(()));
        in_flight.sent(NODE).ended(&Err::<(), _>(OpError::NotSent { node: NODE }));
        let unknown = |cause| Err::<(), _>(OpError::Unknown { node: NODE, cause });
        in_flight.sent(NODE).ended(&unknown(Uncertain::EpochMoved));
        assert_eq!(in_flight.all(), []);
        in_flight.sent(NODE).ended(&unknown(Uncertain::Deadline));
        assert_eq!(in_flight.all(), [(NODE, 1)]);
        drop(in_flight.sent(NODE));
        assert_eq!(in_flight.all(), [(NODE, 2)]);
    }

    #[test]
    fn an_operation_sent_after_a_fenced_read_is_not_settled_by_it() {
        let in_flight = InFlight::default();
        drop(in_flight.sent(NODE));
        drop(in_flight.sent(NODE));
        in_flight.settled(NODE, 1);
        assert_eq!(in_flight.all(), [(NODE, 2)]);
        in_flight.settled(NODE, 2);
        assert_eq!(in_flight.all(), []);
    }
}
