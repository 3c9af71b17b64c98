//! Future events, in order of time, and in the order scheduled where times are equal.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::task::Waker;

use farpool_wire::NodeId;

use crate::sim::ProcessId;
use crate::sim::mail::Letter;
use crate::sim::order::{Reply, Request};

/// Something due at a time.
pub(super) enum Event {
    /// A packet reaches a node.
    ToNode { node: NodeId, connection: u64, request: Request },
    /// A packet reaches a client.
    ToClient { connection: u64, reply: Reply },
    /// A node carries out the next part of an operation.
    Part { node: NodeId, connection: u64, operation: u64 },
    /// A client's processor carries out the next part of a copy.
    Copy { connection: u64, operation: u64 },
    /// A control message reaches a process.
    Mail { to: ProcessId, letter: Letter },
    /// A sleep ends.
    Wake(Waker),
    /// A paused process runs again.
    Resume,
}

/// The queue of events.
pub(super) struct Events {
    heap: BinaryHeap<Reverse<(u64, u64, usize)>>,
    /// Events by their place in `heap`'s entries; places are reused.
    places: Vec<Option<Event>>,
    free: Vec<usize>,
    posted: u64,
}

impl Events {
    pub(super) fn new() -> Self {
        Events { heap: BinaryHeap::new(), places: Vec::new(), free: Vec::new(), posted: 0 }
    }

    pub(super) fn at(&mut self, at_ns: u64, event: Event) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.places[place] = Some(event);
        self.heap.push(Reverse((at_ns, self.posted, place)));
        self.posted += 1;
    }

    pub(super) fn next_at(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse((at_ns, ..))| *at_ns)
    }

    pub(super) fn pop(&mut self) -> Option<(u64, Event)> {
        let Reverse((at_ns, _, place)) = self.heap.pop()?;
        self.free.push(place);
        self.places[place].take().map(|event| (at_ns, event))
    }
}
