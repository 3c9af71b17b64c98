//! The interface of the world to scenarios.

use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use farpool_wire::NodeId;
use rustix_futex_sync::{Mutex, MutexGuard};

use crate::host::Host;
use crate::op::Uncertain;
use crate::seam::{Peer, Transport};
use crate::sim::clock::{SimClock, shown, true_time_of};
use crate::sim::events::Event;
use crate::sim::link::{Path, SimTransport};
use crate::sim::mail::{Letter, Mailbox};
use crate::sim::network::HostId;
use crate::sim::node::NodeState;
use crate::sim::order::Reply;
use crate::sim::settings::{Service, WorldConfig};
use crate::sim::state::{ProcessId, ProcessState, State};

/// Hosts, nodes and processes on one virtual clock. Clones share it.
#[derive(Clone)]
pub struct World {
    state: Arc<Mutex<State>>,
}

impl World {
    /// An empty world.
    pub fn new(config: WorldConfig) -> Self {
        World { state: Arc::new(Mutex::new(State::new(config))) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Adds a machine whose clock runs at `rate_ppm` parts in a million of true time, at most 10 % off.
    pub fn add_host(&self, rate_ppm: u64) -> HostId {
        self.lock().wires.add_host(rate_ppm)
    }

    /// Adds a program that runs on `host`.
    pub fn add_process(&self, host: HostId) -> ProcessId {
        let mut state = self.lock();
        state.processes.push(ProcessState {
            host,
            alive: true,
            paused_until_ns: 0,
            has_arrivals: false,
            mailbox: Mailbox::default(),
        });
        ProcessId(state.processes.len() - 1)
    }

    /// Serves `served` on `host`; replaces a node with the same id, as a restart does.
    pub fn serve(&self, host: HostId, served: Arc<dyn Host>, service: Service) -> Peer {
        self.serve_when(host, served, service, None)
    }

    /// As [`World::serve`], but calls are answered only while `ready` says so, and wait otherwise.
    pub fn serve_when(
        &self,
        host: HostId,
        served: Arc<dyn Host>,
        service: Service,
        ready: Option<Box<dyn Fn() -> bool + Send>>,
    ) -> Peer {
        let node = served.identity().node;
        let mut state = self.lock();
        state.note("node {} starts", &[node.0]);
        state.nodes.insert(node, NodeState::new(host, served, service, ready));
        Peer { node, tcp: None, verbs: None, shm_socket: None }
    }

    /// Ends a node's process.
    pub fn crash_node(&self, node: NodeId) {
        self.lock().crash_node(node);
    }

    /// The transport by which a process reaches the nodes.
    pub fn transport(&self, process: ProcessId, path: Path) -> Rc<dyn Transport> {
        Rc::new(SimTransport { world: self.clone(), process, path })
    }

    /// A host's clock.
    pub fn clock(&self, host: HostId) -> SimClock {
        let state = self.lock();
        SimClock { time: state.time(), rate_ppm: state.wires.hosts[host.0].rate_ppm }
    }

    /// True time.
    pub fn now_ns(&self) -> u64 {
        self.lock().now_ns
    }

    /// Time by a host's clock.
    pub fn local_ns(&self, host: HostId) -> u64 {
        let state = self.lock();
        shown(state.now_ns, state.wires.hosts[host.0].rate_ppm)
    }

    /// Where a process runs.
    pub fn host_of(&self, process: ProcessId) -> HostId {
        self.lock().processes[process.0].host
    }

    /// Disconnects two hosts: packets between them wait, control messages are lost.
    pub fn cut(&self, one: HostId, other: HostId) {
        let mut state = self.lock();
        state.note("hosts {} and {} are cut off from each other", &[one.0 as u64, other.0 as u64]);
        state.wires.cut(one, other);
    }

    /// Undoes [`World::cut`].
    pub fn heal(&self, one: HostId, other: HostId) {
        let mut state = self.lock();
        state.note("hosts {} and {} hear each other again", &[one.0 as u64, other.0 as u64]);
        state.heal(one, other);
    }

    /// Ends all connections of a process. Nodes learn of that later, and carry out what they were sent until
    /// then.
    pub fn lose_connections(&self, process: ProcessId) {
        let mut state = self.lock();
        let lost = state.links.iter().filter(|(_, link)| link.process == process);
        let lost: Vec<u64> = lost.map(|(&connection, _)| connection).collect();
        for connection in lost {
            state.reach_client(connection, Reply::Closed(Uncertain::ConnectionLost));
        }
    }

    /// Pauses a process for a while, at whatever point it is.
    pub fn pause(&self, process: ProcessId, duration: Duration) {
        let mut state = self.lock();
        let until_ns = state.now_ns + duration.as_nanos() as u64;
        let numbers = [process.0 as u64, until_ns];
        state.note("process {} is preempted until {}", &numbers);
        let paused = &mut state.processes[process.0].paused_until_ns;
        *paused = until_ns.max(*paused);
        state.events.at(until_ns, Event::Resume);
    }

    /// Until when a process is paused; a past time when it is not.
    pub fn paused_until_ns(&self, process: ProcessId) -> u64 {
        self.lock().processes[process.0].paused_until_ns
    }

    /// Whether a process has not been killed.
    pub fn is_alive(&self, process: ProcessId) -> bool {
        self.lock().processes[process.0].alive
    }

    /// Sends a control message.
    pub fn send(&self, from: ProcessId, to: ProcessId, content: Arc<dyn std::any::Any + Send + Sync>) {
        self.lock().send_mail(to, Letter { from, content });
    }

    /// Waits for a process's next control message. Only one task of a process may do so.
    pub fn receive(&self, process: ProcessId) -> impl Future<Output = Letter> + use<> {
        let world = self.clone();
        std::future::poll_fn(move |context| {
            let mailbox = &mut world.lock().processes[process.0].mailbox;
            match mailbox.letters.pop_front() {
                Some(letter) => Poll::Ready(letter),
                None => {
                    mailbox.reader = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
    }

    /// Sleeps by true time.
    pub fn sleep(&self, duration: Duration) -> impl Future<Output = ()> + use<> {
        let world = self.clone();
        let until_ns = self.now_ns() + duration.as_nanos() as u64;
        sleep_until(world, until_ns)
    }

    /// Sleeps by a host's clock.
    pub fn sleep_by(&self, host: HostId, duration: Duration) -> impl Future<Output = ()> + use<> {
        let state = self.lock();
        let rate_ppm = state.wires.hosts[host.0].rate_ppm;
        let until_ns = true_time_of(shown(state.now_ns, rate_ppm) + duration.as_nanos() as u64, rate_ppm);
        drop(state);
        sleep_until(self.clone(), until_ns)
    }

    /// Enters a remark of the scenario; each `{}` stands for one of `numbers`. It is part of the history's
    /// hash.
    pub fn note(&self, what: &str, numbers: &[u64]) {
        self.lock().note(what, numbers);
    }

    /// Hash of everything that has happened.
    pub fn trace_hash(&self) -> u64 {
        self.lock().trace.hash()
    }

    /// How many events have happened.
    pub fn trace_events(&self) -> u64 {
        self.lock().trace.events()
    }

    /// The lines of the trace, if the world was told to keep them.
    pub fn trace_lines(&self) -> Vec<String> {
        self.lock().trace.lines().to_vec()
    }
}

fn sleep_until(world: World, until_ns: u64) -> impl Future<Output = ()> {
    let mut posted = false;
    std::future::poll_fn(move |context| {
        let mut state = world.lock();
        if state.now_ns >= until_ns {
            return Poll::Ready(());
        }
        if !posted {
            posted = true;
            state.events.at(until_ns, Event::Wake(context.waker().clone()));
        }
        Poll::Pending
    })
}
