//! The world's state, which its parts share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farpool_wire::NodeId;

use crate::op::Uncertain;
use crate::sim::copying::Copier;
use crate::sim::events::{Event, Events};
use crate::sim::mail::{Letter, Mailbox};
use crate::sim::network::{HostId, Packet, Wires};
use crate::sim::node::NodeState;
use crate::sim::order::{Reply, Request};
use crate::sim::settings::{Faults, WorldConfig};
use crate::sim::trace::Trace;
use crate::sim::{Random, Span};

/// A program of the world: it has tasks and links, is paused and killed as one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ProcessId(pub(super) usize);

impl ProcessId {
    /// Its number in the trace.
    pub fn number(self) -> u64 {
        self.0 as u64
    }
}

pub(super) struct ProcessState {
    pub(super) host: HostId,
    pub(super) alive: bool,
    pub(super) paused_until_ns: u64,
    /// Completions wait to be collected.
    pub(super) has_arrivals: bool,
    pub(super) mailbox: Mailbox,
}

/// A client's end of a connection.
pub(super) struct LinkState {
    pub(super) process: ProcessId,
    pub(super) node: NodeId,
    /// Present when this client copies to and from memory itself.
    pub(super) copier: Option<Copier>,
    pub(super) inbox: Vec<Reply>,
    pub(super) closed: Option<Uncertain>,
    pub(super) sent_until_ns: u64,
    pub(super) answered_until_ns: u64,
}

pub(super) struct State {
    pub(super) now_ns: u64,
    /// The same, for clocks.
    time: Arc<AtomicU64>,
    pub(super) config: WorldConfig,
    pub(super) random: Random,
    pub(super) events: Events,
    pub(super) wires: Wires,
    pub(super) processes: Vec<ProcessState>,
    pub(super) nodes: BTreeMap<NodeId, NodeState>,
    pub(super) links: BTreeMap<u64, LinkState>,
    pub(super) trace: Trace,
    /// Names connections and operations.
    pub(super) last_id: u64,
}

impl State {
    pub(super) fn new(config: WorldConfig) -> Self {
        State {
            now_ns: 0,
            time: Arc::default(),
            random: Random::new(config.seed, 1),
            events: Events::new(),
            wires: Wires::new(),
            processes: Vec::new(),
            nodes: BTreeMap::new(),
            links: BTreeMap::new(),
            trace: Trace::new(config.trace),
            last_id: 0,
            config,
        }
    }

    pub(super) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    pub(super) fn note(&mut self, what: &str, numbers: &[u64]) {
        self.trace.note(self.now_ns, what, numbers);
    }

    /// Advances time; it never goes back.
    pub(super) fn advance_to(&mut self, at_ns: u64) {
        self.now_ns = self.now_ns.max(at_ns);
        self.time.store(self.now_ns, Ordering::Relaxed); // only under the world's lock
    }

    /// What clocks read.
    pub(super) fn time(&self) -> Arc<AtomicU64> {
        self.time.clone()
    }

    /// Carries out the next event; false when there is none.
    pub(super) fn step(&mut self) -> bool {
        let Some((at_ns, event)) = self.events.pop() else { return false };
        self.advance_to(at_ns);
        match event {
            Event::ToNode { node, connection, request } => self.reach_node(node, connection, request),
            Event::ToClient { connection, reply } => self.reach_client(connection, reply),
            Event::Part { node, connection, operation } => self.carry_out_part(node, connection, operation),
            Event::Copy { connection, operation } => self.copy_part(connection, operation),
            Event::Mail { to, letter } => self.deliver(to, letter),
            Event::Wake(waker) => waker.wake(),
            Event::Resume => {}
        }
        true
    }

    pub(super) fn send_packet(&mut self, packet: Packet) -> Option<u64> {
        let settings = (&self.config.network, &self.config.faults);
        self.wires.send(self.now_ns, packet, settings, &mut self.random, &mut self.events)
    }

    /// Sends a request on a connection.
    pub(super) fn send_request(&mut self, connection: u64, request: Request) {
        let Some(link) = self.links.get(&connection) else { return };
        let (node, process, after_ns) = (link.node, link.process, link.sent_until_ns);
        let Some(to) = self.nodes.get(&node).map(|node| node.host) else { return };
        let from = self.processes[process.0].host;
        let bytes = if let Request::Operation(order) = &request { order.data.len() } else { 0 };
        let event = Event::ToNode { node, connection, request };
        if let Some(at_ns) = self.send_packet(Packet { from, to, bytes, after_ns, event })
            && let Some(link) = self.links.get_mut(&connection)
        {
            link.sent_until_ns = at_ns;
        }
    }

    /// Sends an answer, unless the client has closed the connection.
    pub(super) fn send_reply(&mut self, from: HostId, connection: u64, reply: Reply) {
        let Some(link) = self.links.get(&connection) else { return };
        let (to, after_ns) = (self.processes[link.process.0].host, link.answered_until_ns);
        let bytes = if let Reply::Outcome { data, .. } = &reply { data.len() } else { 0 };
        let event = Event::ToClient { connection, reply };
        if let Some(at_ns) = self.send_packet(Packet { from, to, bytes, after_ns, event })
            && let Some(link) = self.links.get_mut(&connection)
        {
            link.answered_until_ns = at_ns;
        }
    }

    /// Connects two hosts again; what was sent meanwhile arrives first.
    pub(super) fn heal(&mut self, one: HostId, other: HostId) {
        for mut packet in self.wires.heal(one, other) {
            let (from, to) = (packet.from, packet.to);
            packet.after_ns = packet.after_ns.max(self.now_ns);
            if let Some(at_ns) = self.send_packet(packet) {
                self.wires.hold_back(from, to, at_ns + 1);
            }
        }
    }

    /// Sends a control message, which may be lost or duplicated. It is not held back: a scenario that wants a
    /// late message sends it later, and knows that it did.
    pub(super) fn send_mail(&mut self, to: ProcessId, letter: Letter) {
        let (from_host, to_host) = (self.processes[letter.from.0].host, self.processes[to.0].host);
        let faults = &self.config.faults;
        let (lost, duplicated) = (faults.lost_permille, faults.duplicated_permille);
        if self.wires.are_cut(from_host, to_host) || self.random.chance(lost) {
            self.note("message from process {} to {} lost", &[letter.from.0 as u64, to.0 as u64]);
            return;
        }
        let copies = if self.random.chance(duplicated) { 2 } else { 1 };
        for _ in 0..copies {
            let event = Event::Mail { to, letter: letter.clone() };
            let packet = Packet { from: from_host, to: to_host, bytes: 0, after_ns: 0, event };
            let settings = (&self.config.network, &Faults::default());
            self.wires.send(self.now_ns, packet, settings, &mut self.random, &mut self.events);
        }
    }

    fn deliver(&mut self, to: ProcessId, letter: Letter) {
        self.note("message from process {} reaches {}", &[letter.from.0 as u64, to.0 as u64]);
        let process = &mut self.processes[to.0];
        if process.alive {
            process.mailbox.put(letter);
        }
    }

    /// The time, `at_ns` or later, from which a process's processor runs.
    pub(super) fn when_running(&self, process: ProcessId, at_ns: u64) -> u64 {
        at_ns.max(self.processes[process.0].paused_until_ns)
    }

    /// A duration drawn from `span`, on `permille` of a thousand occasions; otherwise zero.
    pub(super) fn sometimes(&mut self, permille: u32, span: Option<Span>) -> u64 {
        match span {
            Some(span) if self.random.chance(permille) => span.draw(&mut self.random),
            _ => 0,
        }
    }

    /// The time from one part of a transfer to the next.
    pub(super) fn gap_ns(&mut self) -> u64 {
        let gap_ns = self.config.network.gap.draw(&mut self.random);
        let (permille, span) = (self.config.faults.stall_permille, self.config.faults.stall);
        gap_ns + self.sometimes(permille, span)
    }
}
