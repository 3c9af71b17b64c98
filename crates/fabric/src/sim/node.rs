//! The node's side: connections, which incarnation is in force, and operations carried out part by part on
//! the memory of a real host.
//!
//! N1. A connection's operations start in the order posted; one that follows READs and atomics only may start
//!     before they have finished, unless it is fenced.
//! N2. A greeting of a newer incarnation ends the older connection, and all its operations in flight, before
//!     it is answered.
//! N3. Each part is carried out inside [`Host::with_region`], so that a fence falls between parts. If one
//!     falls between two parts of an operation, the connection ends and the operation is unknown; if it falls
//!     before the first, nothing has happened.
//! N4. After an access was refused because the memory was being moved, all accesses to its region are refused
//!     until it is attached again.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use farpool_wire::{Epoch, Hello, NodeId, Refusal};

use crate::host::Host;
use crate::memory::{AccessError, Mapping};
use crate::op::Uncertain;
use crate::seam::{Op, Outcome};
use crate::server::Sessions;
use crate::sim::events::Event;
use crate::sim::network::HostId;
use crate::sim::order::{Handed, Order, Reply, Request};
use crate::sim::settings::{Mutation, Service};
use crate::sim::state::State;

/// How often a node checks whether its host answers calls again.
const STALLED_RETRY_NS: u64 = 1_000_000;
/// The longest time after which a duplicated completion comes a second time.
const DUPLICATE_AFTER_NS: u64 = 20_000;
/// How often a completion is duplicated, in thousandths.
const DUPLICATE_PERMILLE: u32 = 100;

/// Tells whether a host would answer a call.
pub(super) type Ready = Box<dyn Fn() -> bool + Send>;

pub(super) struct NodeState {
    pub(super) host: HostId,
    pub(super) served: Arc<dyn Host>,
    pub(super) service: Service,
    pub(super) alive: bool,
    pub(super) ready: Option<Ready>,
    sessions: Sessions,
    connections: BTreeMap<u64, Served>,
}

#[derive(Default)]
struct Served {
    attached: BTreeMap<u32, Epoch>,
    pipeline: Vec<Running>,
    /// The client has closed the connection; what it had sent before is still carried out.
    ending: bool,
}

/// An operation that was posted and has not finished.
struct Running {
    id: u64,
    order: Order,
    started: bool,
    /// Some part has taken effect.
    touched: bool,
    parts: Vec<Range<usize>>,
    gathered: Vec<u8>,
}

impl NodeState {
    pub(super) fn new(host: HostId, served: Arc<dyn Host>, service: Service, ready: Option<Ready>) -> Self {
        let (sessions, connections) = (Sessions::new(), BTreeMap::new());
        NodeState { host, served, service, alive: true, ready, sessions, connections }
    }

    pub(super) fn serves(&self, connection: u64) -> bool {
        self.connections.contains_key(&connection)
    }
}

impl State {
    pub(super) fn reach_node(&mut self, id: NodeId, connection: u64, request: Request) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let host = node.host;
        if !node.alive {
            let silent = self.config.faults.silent_permille;
            if !self.random.chance(silent) {
                let cause = match request {
                    Request::Hello(_) => Uncertain::NotListening,
                    _ => Uncertain::ConnectionLost,
                };
                self.send_reply(host, connection, Reply::Closed(cause));
            }
            return;
        }
        match request {
            Request::Hello(hello) => self.greet(id, connection, hello),
            Request::Goodbye => {
                if let Some(served) = node.connections.get_mut(&connection) {
                    served.ending = true;
                    self.end_if_idle(id, connection);
                }
            }
            Request::Operation(order) => self.accept(id, connection, *order),
        }
    }

    /// Ends a connection that its client has closed and whose operations have finished.
    fn end_if_idle(&mut self, id: NodeId, connection: u64) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let idle = |served: &Served| served.ending && served.pipeline.is_empty();
        if node.connections.get(&connection).is_some_and(idle) {
            node.sessions.closed(connection);
            node.connections.remove(&connection);
            self.note("connection {} ends at its node", &[connection]);
        }
    }

    fn greet(&mut self, id: NodeId, connection: u64, hello: Hello) {
        let mutation = self.config.mutation;
        let node = self.nodes.get_mut(&id).expect("the caller looked");
        let (in_force, older) = match hello.node == node.served.identity().node {
            true => node.sessions.greet(hello, connection),
            false => (hello.incarnation, None), // its session has nothing to do with this node
        };
        if let Some(older) = older
            && mutation != Some(Mutation::OldIncarnationStillApplied)
        {
            node.connections.remove(&older);
        }
        let accepted = in_force == hello.incarnation && hello.node == node.served.identity().node;
        if accepted {
            node.connections.insert(connection, Served::default());
        }
        let host = node.host;
        let numbers = [connection, hello.session.0, hello.incarnation.0, u64::from(accepted)];
        self.note("connection {} of session {}, incarnation {}, greets; let in: {}", &numbers);
        if !accepted {
            self.send_reply(host, connection, Reply::Closed(Uncertain::Protocol));
        }
    }

    fn accept(&mut self, id: NodeId, connection: u64, order: Order) {
        let running = self.next_id();
        let whole = self.nodes[&id].service == Service::Whole;
        let most = if whole { 1 } else { self.config.network.parts };
        let parts = order.parts(most, &mut self.random);
        let node = self.nodes.get_mut(&id).expect("the caller looked");
        let host = node.host;
        let Some(served) = node.connections.get_mut(&connection) else {
            let slot = u64::from(order.slot);
            self.note("connection {} is none of its node's; slot {} is dropped", &[connection, slot]);
            self.send_reply(host, connection, Reply::Closed(Uncertain::ConnectionLost));
            return;
        };
        let gathered = vec![0; if let Op::Read = order.op { order.length } else { 0 }];
        served.pipeline.push(Running { id: running, order, started: false, touched: false, parts, gathered });
        self.start_what_may(id, connection);
    }

    /// Starts every operation whose turn it is (N1).
    fn start_what_may(&mut self, id: NodeId, connection: u64) {
        let mutation = self.config.mutation;
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let Some(served) = node.connections.get_mut(&connection) else { return };
        let mut starting = Vec::new();
        let mut only_passable = true;
        for (place, running) in served.pipeline.iter_mut().enumerate() {
            let waits_for_all = running.order.waits_for_all(mutation);
            let may = if waits_for_all { place == 0 } else { only_passable };
            if may && !running.started {
                running.started = true;
                starting.push(running.id);
            }
            // An operation that waits for all earlier ones holds back those behind it, too.
            only_passable &= running.order.may_be_passed() && (may || !waits_for_all);
        }
        for operation in starting {
            let at_ns = self.now_ns + self.gap_ns();
            self.events.at(at_ns, Event::Part { node: id, connection, operation });
        }
    }

    pub(super) fn carry_out_part(&mut self, id: NodeId, connection: u64, operation: u64) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let host = node.host;
        let Some(served) = node.connections.get_mut(&connection) else { return };
        let Some(place) = served.pipeline.iter().position(|running| running.id == operation) else { return };
        if let Op::Call { .. } = served.pipeline[place].order.op
            && node.ready.as_ref().is_some_and(|ready| !ready())
        {
            self.events.at(self.now_ns + STALLED_RETRY_NS, Event::Part { node: id, connection, operation });
            return;
        }
        let busy_shuts = self.config.mutation != Some(Mutation::BusyForgotten);
        let hands_out = same_host(&self.links, connection);
        let (result, shared) = served.carry_out(&*node.served, place, hands_out);
        let order = &served.pipeline[place].order;
        if result == Err(Refusal::Busy) && busy_shuts && !matches!(order.op, Op::Attach(_)) {
            served.attached.remove(&order.region); // N4
        }
        let running = &mut served.pipeline[place];
        let slot = running.order.slot;
        let touched = std::mem::replace(&mut running.touched, true);
        let numbers = [connection, u64::from(slot), running.parts.len() as u64];
        match result {
            Err(_) if touched => {
                node.sessions.closed(connection);
                node.connections.remove(&connection);
                self.note("connection {} slot {} fenced with {} parts to go; closed", &numbers);
                self.send_reply(host, connection, Reply::Closed(Uncertain::EpochMoved));
            }
            Ok(_) if !running.parts.is_empty() => {
                self.note("connection {} slot {} took effect in part, {} to go", &numbers);
                let at_ns = self.now_ns + self.gap_ns();
                self.events.at(at_ns, Event::Part { node: id, connection, operation });
            }
            result => {
                let data = served.pipeline.remove(place).gathered;
                let outcome = result.map_or_else(Outcome::Refused, Outcome::Done);
                let told = if let Outcome::Done(value) = outcome { value } else { u64::MAX };
                self.note("connection {} slot {} over at its node with {}", &[connection, numbers[1], told]);
                self.answer(host, connection, slot, outcome, data, shared);
                self.start_what_may(id, connection);
                self.end_if_idle(id, connection);
            }
        }
    }

    fn answer(
        &mut self,
        host: HostId,
        connection: u64,
        slot: u32,
        outcome: Outcome,
        data: Vec<u8>,
        shared: Option<Box<Handed>>,
    ) {
        if self.config.mutation == Some(Mutation::DuplicateCompletion)
            && self.random.chance(DUPLICATE_PERMILLE)
        {
            let again = Reply::Outcome { slot, outcome, data: data.clone(), shared: None };
            let at_ns =
                self.now_ns + self.config.network.latency.most_ns + self.random.below(DUPLICATE_AFTER_NS);
            self.events.at(at_ns, Event::ToClient { connection, reply: again });
        }
        self.send_reply(host, connection, Reply::Outcome { slot, outcome, data, shared });
    }

    /// The node's process dies: its connections end, its memory is gone.
    pub(super) fn crash_node(&mut self, id: NodeId) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        node.alive = false;
        node.sessions = Sessions::new();
        let host = node.host;
        let connections = std::mem::take(&mut node.connections);
        self.note("node {} dies with {} connections", &[id.0, connections.len() as u64]);
        for connection in connections.into_keys() {
            let silent = self.config.faults.silent_permille;
            if !self.random.chance(silent) {
                self.send_reply(host, connection, Reply::Closed(Uncertain::ConnectionLost));
            }
        }
    }
}

/// Whether a connection hands out memory.
fn same_host(links: &BTreeMap<u64, crate::sim::state::LinkState>, connection: u64) -> bool {
    links.get(&connection).is_some_and(|link| link.copier.is_some())
}

type Carried = (Result<u64, Refusal>, Option<Box<Handed>>);

impl Served {
    /// Carries out the next part of an operation; the value counts when no part is left.
    fn carry_out(&mut self, host: &dyn Host, place: usize, hands_out: bool) -> Carried {
        let running = &mut self.pipeline[place];
        let order = &running.order;
        let (region, epoch) = (order.region, order.epoch);
        match order.op {
            Op::Attach(_) => {
                running.parts.clear();
                match attach(host, order, hands_out) {
                    Ok(handed) => {
                        self.attached.insert(region, epoch);
                        (Ok(0), handed)
                    }
                    Err(refusal) => (Err(refusal), None),
                }
            }
            Op::Detach => {
                running.parts.clear();
                self.attached.remove(&region);
                (Ok(0), None)
            }
            Op::Call { .. } if self.attached.is_empty() => {
                running.parts.clear();
                (Err(Refusal::NotAttached), None)
            }
            Op::Call { .. } => {
                running.parts.clear();
                let answered = host.call(&order.data, &mut running.gathered).and_then(|()| {
                    let bytes = running.gathered.len();
                    if bytes <= order.length { Ok(bytes as u64) } else { Err(Refusal::TooLong) }
                });
                if answered.is_err() {
                    running.gathered.clear();
                }
                (answered, None)
            }
            _ => match self.attached.get(&region) {
                None => (Err(Refusal::NotAttached), None),
                Some(&attached) if attached != epoch => (Err(Refusal::StaleEpoch), None),
                Some(_) => (running.access(host), None),
            },
        }
    }
}

fn attach(host: &dyn Host, order: &Order, hands_out: bool) -> Result<Option<Box<Handed>>, Refusal> {
    let Op::Attach(key) = &order.op else { unreachable!("the caller looked") };
    let (region, epoch) = (order.region, order.epoch);
    if !hands_out {
        host.attach(region, epoch, key)?;
        return Ok(None);
    }
    let shared = host.share(region, epoch, key)?;
    let handed =
        Handed { region, epoch, memory: shared.memory, words: shared.words, layout: shared.attached };
    Ok(Some(Box::new(handed)))
}

impl Running {
    fn access(&mut self, host: &dyn Host) -> Result<u64, Refusal> {
        let part = self.parts.pop().unwrap_or(0..0);
        let (order, gathered) = (&self.order, &mut self.gathered);
        let mut value = 0;
        host.with_region(order.region, order.epoch, order.kind(), &mut |memory| {
            order.check_bounds(memory)?;
            value = order.touch(memory, part.clone(), gathered)?;
            Ok(())
        })?;
        Ok(value)
    }
}

impl Order {
    /// Checks that all of the operation lies in the region, so that no part of it takes effect when another
    /// could not.
    pub(super) fn check_bounds(&self, memory: &Mapping) -> Result<(), AccessError> {
        let end = self.offset.checked_add(self.length as u64).ok_or(AccessError::OutOfBounds)?;
        if end > memory.len() { Err(AccessError::OutOfBounds) } else { Ok(()) }
    }

    /// Carries out one part on memory; atomics have but one.
    pub(super) fn touch(
        &self,
        memory: &Mapping,
        part: Range<usize>,
        gathered: &mut [u8],
    ) -> Result<u64, AccessError> {
        let at = self.offset + part.start as u64;
        match self.op {
            Op::Read => memory.read(at, &mut gathered[part]).map(|()| 0),
            Op::Write => memory.write(at, &self.data[part]).map(|()| 0),
            Op::CompareAndSwap { expected, new } => memory.compare_and_swap(at, expected, new),
            Op::FetchAndAdd { addend } => memory.fetch_and_add(at, addend),
            Op::Attach(_) | Op::Detach | Op::Call { .. } => unreachable!("no access to memory"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::SuiteHost;

    #[test]
    fn an_answer_that_does_not_fit_the_callers_buffer_is_refused() {
        let (host, data) = (SuiteHost::new(), b"echo hello");
        for (length, expected) in [(5, Ok(5)), (4, Err(Refusal::TooLong))] {
            let order = Order {
                slot: 0,
                op: Op::Call { request: data.len() },
                region: 0,
                epoch: Epoch(0),
                offset: 0,
                length,
                data: data.to_vec(),
                fence: false,
            };
            let parts = std::iter::once(0..length).collect();
            let running =
                Running { id: 1, order, started: true, touched: false, parts, gathered: Vec::new() };
            let attached = BTreeMap::from([(0, Epoch(0))]);
            let mut served = Served { pipeline: vec![running], attached, ..Served::default() };
            assert_eq!(served.carry_out(&*host, 0, false).0, expected);
            assert_eq!(served.pipeline[0].gathered.is_empty(), expected.is_err());
        }
    }
}
