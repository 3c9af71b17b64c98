//! A fabric for tests of sessions: its nodes do what a script says, and its clock moves only while a session
//! waits.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use farpool_fabric::{
    Clock, Done, Endpoint, EndpointConfig, Link, LinkClosed, Op, Outcome, Peer, Posted, Readiness, Transport,
    Uncertain,
};
use farpool_lease::Millis;
use farpool_wire::{AccessKey, Epoch, Hello, NodeId, Refusal, RegionId, SessionId};
use rustix::io::Errno;
use rustix_futex_sync::Mutex;

use super::SessionCore;
use crate::NODE_DEADLINE;
use crate::error::AccessError;
use crate::giving_up::Sign;
use crate::region::{LeasedRegion, NodeState};
use crate::space::{EXTENT_BYTES, Extent};
use crate::stock::{LeaseKeeper, RetryPolicy};

/// The retry policy of all sessions here.
pub(crate) const RETRIES: RetryPolicy = RetryPolicy { try_within: Millis(400), while_moved: Millis(200) };

const ARENA_BYTES: usize = 64 << 10;
/// Upper limit on requests, so that a session that never stops asking fails the test. No script needs more
/// than a few hundred.
const MOST_REQUESTS: usize = 10_000;
/// Upper limit on clock reads between two events, so that a wait that cannot end fails the test. Only
/// [`World::run`] advances the clock; a lender blocks outside it.
const MOST_LOOKS: usize = 100;

/// What a session asks a node for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Kind {
    Connect,
    Attach,
    Detach,
    Read,
    Write,
}

/// A request, as a script sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) node: NodeId,
    pub(crate) kind: Kind,
    pub(crate) region: u32,
    /// Connections are counted from 1, over all nodes.
    pub(crate) connection: u64,
    /// How many requests of this kind the node has had before.
    pub(crate) before: usize,
}

/// What a node does about a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    Serve,
    /// Serve it after this time.
    Late(Duration),
    Refuse(Refusal),
    /// The connection ends, and the request with it.
    Lose,
    Never,
    /// No connection can be started.
    Fail(Errno),
}

type Script = Box<dyn FnMut(&Asked) -> Answer + Send>;

/// All nodes, and the clock. Clones share them.
#[derive(Clone)]
pub(crate) struct World {
    now_ns: Arc<AtomicU64>,
    /// How often sessions have looked at the clock since something happened.
    looks: Arc<AtomicUsize>,
    state: Arc<Mutex<State>>,
}

struct State {
    script: Script,
    asked: Vec<Asked>,
    /// The node of each open connection.
    open: BTreeMap<u64, NodeId>,
    connections: u64,
    /// The first extent of each region.
    memory: BTreeMap<(NodeId, u32), Vec<u8>>,
}

impl World {
    /// A world whose nodes serve everything, until [`answers`](Self::answers) says otherwise.
    pub(crate) fn new() -> Self {
        let state = State {
            script: Box::new(|_| Answer::Serve),
            asked: Vec::new(),
            open: BTreeMap::new(),
            connections: 0,
            memory: BTreeMap::new(),
        };
        World { now_ns: Arc::default(), looks: Arc::default(), state: Arc::new(Mutex::new(state)) }
    }

    /// What nodes do from now on.
    pub(crate) fn answers(&self, script: impl FnMut(&Asked) -> Answer + Send + 'static) {
        self.state.lock().script = Box::new(script);
    }

    /// How many requests of a kind a node has had.
    pub(crate) fn asked(&self, node: NodeId, kind: Kind) -> usize {
        self.state.lock().had(node, kind)
    }

    /// How many connections to a node are open.
    pub(crate) fn connections(&self, node: NodeId) -> usize {
        self.state.lock().open.values().filter(|&&other| other == node).count()
    }

    /// The first bytes of a region.
    pub(crate) fn stored(&self, region: RegionId, bytes: usize) -> Vec<u8> {
        self.state.lock().memory(region)[..bytes].to_vec()
    }

    /// Puts bytes at the start of a region.
    pub(crate) fn store(&self, region: RegionId, bytes: &[u8]) {
        self.state.lock().memory(region)[..bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn now(&self) -> Millis {
        Millis(self.now_ns() / 1_000_000)
    }

    pub(crate) fn advance_to(&self, now: Millis) {
        self.advance_to_ns(now.0 * 1_000_000);
    }

    fn advance_to_ns(&self, now_ns: u64) {
        self.now_ns.fetch_max(now_ns, Ordering::Relaxed); // guards nothing
        self.looks.store(0, Ordering::Relaxed); // a count
    }

    /// A session.
    pub(crate) fn core(&self, leases: Arc<Leases>) -> SessionCore {
        let mut sessions = 0;
        let session_ids = Box::new(move || {
            sessions += 1;
            SessionId(sessions)
        });
        let endpoint = Endpoint::new(EndpointConfig {
            transport: Rc::new(self.clone()),
            clock: Rc::new(self.clone()),
            session_ids,
            arena_bytes: ARENA_BYTES,
            deadline: NODE_DEADLINE,
        });
        SessionCore::new(leases, endpoint)
    }

    /// Runs a future of a session to its end. Time passes whenever nothing else happens.
    pub(crate) fn run<F: Future>(&self, core: &SessionCore, future: F) -> F::Output {
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            if core.endpoint().poll() == 0 {
                let next_ns = core.endpoint().next_deadline_ns().expect("it waits for something");
                self.advance_to_ns(next_ns);
                core.endpoint().poll();
            }
        }
    }

    /// Reads the first bytes of an extent.
    pub(crate) fn read(
        &self,
        core: &SessionCore,
        from: &Extent,
        bytes: usize,
    ) -> Result<Vec<u8>, AccessError> {
        let mut buffer = core.buffer(bytes).unwrap();
        buffer.fill(0xEE);
        let (buffer, result) = self.run(core, core.read(from, 0, buffer));
        result.map(|()| buffer.to_vec())
    }

    /// Writes the first bytes of an extent.
    pub(crate) fn write(&self, core: &SessionCore, to: &Extent, bytes: &[u8]) -> Result<(), AccessError> {
        let mut buffer = core.buffer(bytes.len()).unwrap();
        buffer.copy_from_slice(bytes);
        self.run(core, core.write(to, 0, buffer)).1
    }

    fn ask(&self, node: NodeId, kind: Kind, region: u32, connection: u64) -> Answer {
        self.looks.store(0, Ordering::Relaxed); // a count
        let mut state = self.state.lock();
        let asked = Asked { node, kind, region, connection, before: state.had(node, kind) };
        assert!(state.asked.len() < MOST_REQUESTS, "a session asks without end: {asked:?}");
        state.asked.push(asked);
        (state.script)(&asked)
    }
}

impl State {
    fn had(&self, node: NodeId, kind: Kind) -> usize {
        self.asked.iter().filter(|asked| (asked.node, asked.kind) == (node, kind)).count()
    }

    fn memory(&mut self, region: RegionId) -> &mut Vec<u8> {
        let place = (region.node, region.index);
        self.memory.entry(place).or_insert_with(|| vec![0; EXTENT_BYTES as usize])
    }
}

impl Clock for World {
    fn now_ns(&self) -> u64 {
        let looks = self.looks.fetch_add(1, Ordering::Relaxed); // a count
        assert!(looks < MOST_LOOKS, "a session waits for time to pass where it does not");
        self.now_ns.load(Ordering::Relaxed) // guards nothing
    }
}

impl Transport for World {
    fn open(&self, peer: &Peer, _hello: Hello) -> io::Result<Box<dyn Link>> {
        let node = peer.node;
        let connection = {
            let mut state = self.state.lock();
            state.connections += 1;
            state.connections
        };
        match self.ask(node, Kind::Connect, 0, connection) {
            Answer::Serve => {}
            Answer::Fail(errno) => return Err(errno.into()),
            other => panic!("{other:?} is no answer to a connection"),
        }
        self.state.lock().open.insert(connection, node);
        let (attached, late) = (BTreeMap::new(), Vec::new());
        Ok(Box::new(ScriptedLink { world: self.clone(), node, connection, attached, late, is_lost: false }))
    }
}

struct ScriptedLink {
    world: World,
    node: NodeId,
    connection: u64,
    /// Regions, and the epochs under which they were attached.
    attached: BTreeMap<u32, Epoch>,
    /// Requests that are served later, and when.
    late: Vec<(u64, Posted)>,
    is_lost: bool,
}

impl Link for ScriptedLink {
    fn post(&mut self, posted: Posted) -> Option<Outcome> {
        let kind = match posted.op {
            Op::Attach(_) => Kind::Attach,
            Op::Detach => Kind::Detach,
            Op::Read => Kind::Read,
            Op::Write => Kind::Write,
            other => panic!("sessions do not ask for {other:?}"),
        };
        match self.world.ask(self.node, kind, posted.region, self.connection) {
            Answer::Serve => return Some(self.serve(&posted)),
            Answer::Refuse(refusal) => return Some(Outcome::Refused(refusal)),
            Answer::Late(after) => {
                let at_ns = self.world.now_ns() + after.as_nanos() as u64;
                self.late.push((at_ns, posted));
            }
            Answer::Lose => self.is_lost = true,
            Answer::Never => {}
            Answer::Fail(errno) => panic!("{errno} is an answer to a connection only"),
        }
        None
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), LinkClosed> {
        if self.is_lost {
            return Err(LinkClosed { cause: Uncertain::ConnectionLost });
        }
        let now_ns = self.world.now_ns();
        let due: Vec<_> = self.late.extract_if(.., |(at_ns, _)| *at_ns <= now_ns).collect();
        done.extend(due.iter().map(|(_, posted)| Done { slot: posted.slot, outcome: self.serve(posted) }));
        Ok(())
    }

    fn readiness(&self) -> Option<Readiness<'_>> {
        None
    }

    fn transport(&self) -> &'static str {
        "scripted"
    }
}

impl ScriptedLink {
    fn serve(&mut self, posted: &Posted) -> Outcome {
        let region = RegionId { node: self.node, index: posted.region };
        if matches!(posted.op, Op::Attach(_)) {
            self.attached.insert(posted.region, posted.epoch);
            return Outcome::Done(0);
        }
        if self.attached.get(&posted.region) != Some(&posted.epoch) {
            return Outcome::Refused(Refusal::NotAttached);
        }
        let mut state = self.world.state.lock();
        let far = &mut state.memory(region)[posted.offset as usize..][..posted.local.bytes];
        match posted.op {
            Op::Detach => {
                self.attached.remove(&posted.region);
            }
            // SAFETY: in bounds, since the slice has as many bytes as the buffer. The endpoint keeps the
            // buffer, and nothing else uses it, until the outcome is returned, by the contract of `Link`.
            Op::Read => unsafe { far.as_ptr().copy_to_nonoverlapping(posted.local.start, far.len()) },
            // SAFETY: in bounds, since the slice has as many bytes as the buffer, which is only read. The
            // endpoint keeps the buffer until the outcome is returned, by the contract of `Link`.
            Op::Write => unsafe { far.as_mut_ptr().copy_from_nonoverlapping(posted.local.start, far.len()) },
            _ => unreachable!("`post` looked"),
        }
        Outcome::Done(0)
    }
}

impl Drop for ScriptedLink {
    fn drop(&mut self) {
        self.world.state.lock().open.remove(&self.connection);
    }
}

/// Keeps the leases of the sessions. It gives no node up by itself.
pub(crate) struct Leases {
    world: World,
    failures: AtomicUsize,
}

impl Leases {
    pub(crate) fn new(world: &World) -> Arc<Self> {
        Arc::new(Leases { world: world.clone(), failures: AtomicUsize::new(0) })
    }

    /// How many failed tries sessions have reported.
    pub(crate) fn failures(&self) -> usize {
        self.failures.load(Ordering::Relaxed) // a count
    }
}

impl LeaseKeeper for Leases {
    fn now(&self) -> Millis {
        self.world.now()
    }

    fn node_failed(&self, node: &NodeState, _sign: Sign) -> bool {
        self.failures.fetch_add(1, Ordering::Relaxed); // a count
        node.is_lost()
    }

    fn node_answered(&self, _node: &NodeState) {}

    fn patience_ended(&self, node: &NodeState) -> bool {
        node.is_lost()
    }

    fn lease_lost(&self, _region: RegionId, _epoch: Epoch) {}

    fn retries(&self) -> RetryPolicy {
        RETRIES
    }
}

pub(crate) fn node(number: u64) -> Arc<NodeState> {
    let peer = Peer { node: NodeId(number), tcp: None, verbs: None, shm_socket: None };
    Arc::new(NodeState::new(peer, String::new()))
}

/// The first extent of a region whose lease does not end by itself.
pub(crate) fn extent(node: &Arc<NodeState>, index: u32, epoch: u64) -> Extent {
    let id = RegionId { node: node.peer.node, index };
    let key = AccessKey::from_bytes([7; 16]);
    let region = LeasedRegion::new(id, Epoch(epoch), key, node.clone(), u64::MAX);
    Extent::of_guest(Arc::new(region), 0, 0)
}
