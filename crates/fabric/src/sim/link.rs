//! The client's side of the seam: links of the simulated fabric.

use std::io;

use farpool_wire::{Hello, Refusal};

use crate::op::Uncertain;
use crate::seam::{Done, Link, LinkClosed, LocalSlice, Op, Outcome, Peer, Posted, Readiness, Transport};
use crate::sim::World;
use crate::sim::order::{Order, Reply, Request};
use crate::sim::state::{LinkState, ProcessId, State};
use crate::sim::trace::digest;

/// Time that passes per poll in a self-driven world in which nothing is due.
const IDLE_STEP_NS: u64 = 100_000;

/// How far a link that is dropped in a self-driven world lets time advance, so that its node learns of it.
const FAREWELL_NS: u64 = 10_000_000;

/// How a client reaches nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Path {
    /// By packets; the node checks each operation and may refuse it.
    Checked,
    /// By the node's memory, handed to processes of its host; a store cannot be refused.
    Shared,
}

/// Carries the fabric of one process of a world.
pub struct SimTransport {
    pub(super) world: World,
    pub(super) process: ProcessId,
    pub(super) path: Path,
}

impl Transport for SimTransport {
    fn open(&self, peer: &Peer, hello: Hello) -> io::Result<Box<dyn Link>> {
        let mut state = self.world.lock();
        let node = state.nodes.get(&peer.node).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let here = state.processes[self.process.0].host;
        if self.path == Path::Shared && node.host != here {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        }
        if self.path == Path::Shared && !node.alive {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let connection = state.next_id();
        let link = LinkState {
            process: self.process,
            node: peer.node,
            copier: (self.path == Path::Shared).then(Default::default),
            inbox: Vec::new(),
            closed: None,
            sent_until_ns: 0,
            answered_until_ns: 0,
        };
        state.links.insert(connection, link);
        let numbers = [connection, self.process.0 as u64, hello.session.0, hello.incarnation.0];
        state.note("connection {} of process {} opens: session {}, incarnation {}", &numbers);
        state.send_request(connection, Request::Hello(hello));
        drop(state);
        Ok(Box::new(SimLink {
            world: self.world.clone(),
            connection,
            path: self.path,
            waiting: Vec::new(),
            arrived: Vec::new(),
        }))
    }
}

/// One connection. Only this value knows the caller's memory: the world holds copies.
struct SimLink {
    world: World,
    connection: u64,
    path: Path,
    /// Local memory of operations in flight, by slot.
    waiting: Vec<Option<LocalSlice>>,
    /// Scratch, kept for its capacity.
    arrived: Vec<Reply>,
}

impl Link for SimLink {
    fn post(&mut self, posted: Posted) -> Option<Outcome> {
        let order = Order::of(&posted);
        let mut state = self.world.lock();
        if let Some(outcome) = state.post(self.connection, order) {
            return Some(outcome);
        }
        drop(state);
        let slot = posted.slot as usize;
        if slot >= self.waiting.len() {
            self.waiting.resize(slot + 1, None);
        }
        self.waiting[slot] = Some(posted.local);
        None
    }

    fn run_now(&mut self, posted: &Posted) -> Option<Outcome> {
        let (outcome, data) = self.world.lock().run_now(self.connection, posted)?;
        copy_to(posted.local, outcome, &data);
        Some(outcome)
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), LinkClosed> {
        let mut state = self.world.lock();
        if state.config.self_driven && state.links[&self.connection].inbox.is_empty() && !state.step() {
            let until_ns = state.now_ns + IDLE_STEP_NS;
            state.advance_to(until_ns);
        }
        let link = state.links.get_mut(&self.connection).expect("a link is there until it is dropped");
        std::mem::swap(&mut self.arrived, &mut link.inbox);
        let closed = link.closed;
        drop(state);
        let mut arrived = std::mem::take(&mut self.arrived);
        for reply in arrived.drain(..) {
            if let Reply::Outcome { slot, outcome, data, .. } = reply {
                done.extend(self.finish(slot, outcome, &data));
            }
        }
        self.arrived = arrived;
        closed.map_or(Ok(()), |cause| Err(LinkClosed { cause }))
    }

    fn readiness(&self) -> Option<Readiness<'_>> {
        None
    }

    fn transport(&self) -> &'static str {
        match self.path {
            Path::Checked => "sim",
            Path::Shared => "sim-shared",
        }
    }
}

impl SimLink {
    /// Moves the data of a READ or a call to its caller. An outcome that no operation waits for is dropped.
    fn finish(&mut self, slot: u32, outcome: Outcome, data: &[u8]) -> Option<Done> {
        let local = self.waiting.get_mut(slot as usize)?.take()?;
        copy_to(local, outcome, data);
        Some(Done { slot, outcome })
    }
}

/// Moves what an operation has found to its caller.
fn copy_to(local: LocalSlice, outcome: Outcome, data: &[u8]) {
    // More data arrives only if a world is broken on purpose: then it goes to another operation than the one
    // that asked for it.
    let bytes = data.len().min(local.bytes);
    if bytes > 0 && matches!(outcome, Outcome::Done(_)) {
        // SAFETY: in bounds by `min`; the buffer belongs to the operation that completes only now, so nothing
        // else accesses it, and the caller keeps it until then.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), local.start, bytes) };
    }
}

impl Drop for SimLink {
    fn drop(&mut self) {
        let mut state = self.world.lock();
        let link = &state.links[&self.connection];
        let (node, process) = (link.node, link.process);
        // For a process that was killed, its kernel closes the connection; a host that lost power sends
        // nothing.
        let silent = state.config.faults.silent_permille;
        let shared = self.path == Path::Shared;
        let alive = state.processes[process.0].alive;
        if shared || alive || !state.random.chance(silent) {
            state.send_request(self.connection, Request::Goodbye);
        }
        state.links.remove(&self.connection);
        if state.config.self_driven {
            // This thread may never poll again, yet the node has to learn of the end, unless it is busy with
            // what was sent before.
            let until_ns = state.now_ns + FAREWELL_NS;
            while state.nodes.get(&node).is_some_and(|node| node.serves(self.connection))
                && state.events.next_at().is_some_and(|at_ns| at_ns <= until_ns)
                && state.step()
            {}
        }
    }
}

impl State {
    fn post(&mut self, connection: u64, order: Order) -> Option<Outcome> {
        let (slot, at) = (u64::from(order.slot), order.offset);
        let name = match order.op {
            Op::Attach(_) => "connection {} slot {} posts an attach ({})",
            Op::Detach => "connection {} slot {} posts a detach ({})",
            Op::Read => "connection {} slot {} posts a read at {}",
            Op::Write => "connection {} slot {} posts a write at {}",
            Op::CompareAndSwap { .. } => "connection {} slot {} posts a swap at {}",
            Op::FetchAndAdd { .. } => "connection {} slot {} posts an addition at {}",
            Op::Call { .. } => "connection {} slot {} posts a call ({})",
        };
        self.note(name, &[connection, slot, at]);
        let link = self.links.get(&connection).expect("a link is there until it is dropped");
        if link.closed.is_some() {
            // The next poll says that the connection has ended.
            self.processes[link.process.0].has_arrivals = true;
        }
        let by_node = matches!(order.op, Op::Attach(_) | Op::Call { .. });
        match &link.copier {
            // What is posted after a detach reaches the node after it.
            Some(copier) if !by_node || copier.lets_go() => {
                if !by_node && !copier.can_try(order.region) && !matches!(order.op, Op::Detach) {
                    return Some(Outcome::Refused(Refusal::NotAttached));
                }
                self.begin_copy(connection, order);
            }
            _ => self.send_request(connection, Request::Operation(Box::new(order))),
        }
        None
    }

    pub(super) fn reach_client(&mut self, connection: u64, reply: Reply) {
        let Some(link) = self.links.get_mut(&connection) else { return };
        if link.closed.is_some() {
            return;
        }
        let process = link.process;
        let reply = match reply {
            Reply::Closed(cause) => {
                link.closed = Some(cause);
                self.processes[process.0].has_arrivals = true;
                self.note("connection {} is closed for its client", &[connection]);
                return;
            }
            Reply::Outcome { slot, shared: Some(handed), .. } => {
                let mapped = link.copier.as_mut().is_some_and(|copier| copier.map(&handed).is_ok());
                let exhausted = Outcome::Refused(Refusal::Exhausted);
                let outcome = if mapped { Outcome::Done(0) } else { exhausted };
                Reply::Outcome { slot, outcome, data: Vec::new(), shared: None }
            }
            reply @ Reply::Outcome { .. } => reply,
        };
        let Reply::Outcome { slot, outcome, data, .. } = &reply else { return };
        let numbers = match outcome {
            Outcome::Done(_) if !data.is_empty() => [connection, u64::from(*slot), 0, digest(data)],
            Outcome::Done(value) => [connection, u64::from(*slot), 0, *value],
            Outcome::Refused(refusal) => [connection, u64::from(*slot), 1, *refusal as u64],
            Outcome::Unknown(cause) => [connection, u64::from(*slot), 2, cause_number(*cause)],
        };
        link.inbox.push(reply);
        self.processes[process.0].has_arrivals = true;
        self.note("connection {} slot {} completes: kind {}, value {}", &numbers);
    }
}

fn cause_number(cause: Uncertain) -> u64 {
    match cause {
        Uncertain::ConnectionLost => 0,
        Uncertain::Deadline => 1,
        Uncertain::EpochMoved => 2,
        Uncertain::Protocol => 3,
        Uncertain::NotListening => 4,
    }
}
