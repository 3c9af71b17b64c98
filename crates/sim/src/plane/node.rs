//! Nodes: the real core and the real regions, in a simulated shell.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use farpool_fabric::Scrubbed;
use farpool_fabric::sim::{HostId, ProcessId, Service};
use farpool_lease::{LeaseClass, Lending, Millis};
use farpool_node::{LimitChange, Measured, NodeCore, PRESSURE_GRACE, lease_message, renew_outcome, resize};
use farpool_wire::control::{
    AddGrantRequest, AddGrantResponse, AwaitRevocationRequest, AwaitRevocationResponse, FenceGrantRequest,
    GrantRequest, GrantResponse, HeartbeatRequest, LeaseRef, NodeAddress, RegionState, RegionsResponse,
    RegisterRequest, ReleaseRequest, RenewRequest, RenewResponse, ResizeRequest, RevokeRequest,
};
use farpool_wire::{AccessKey, Epoch, GrantMode, NodeId, OwnerId, RegionId};
use futures_util::future::{Either, select};

use super::post::{Answer, Post, Question};
use super::promises::Promises;
use super::shell::Shell;
use super::{
    EPOCH_REUSED, Ending, KEPT_GRANT, KEPT_MEMORY, LASTING_PRESSURE, NOT_PUSHED, Plane, UNCLEARED_MEMORY,
    UNCOUNTED_RENEWAL, UNNOTICED_PRESSURE,
};

/// As in production's keeper.
const TICK: Duration = Duration::from_millis(200);
/// As in production's registration.
const ANSWER_PATIENCE: Duration = Duration::from_secs(3);
/// As in production's control service.
const REVOCATION_WAIT: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// How much memory a node leaves to its machine, in regions.
pub(super) const RESERVE: u32 = 1;
/// Memory of the machine beyond the node's, in regions. While no other process demands any, the node may have
/// all of its regions: it leaves twice the reserve when it takes memory again.
const BESIDE: u32 = 2 * RESERVE + 1;

/// A node of the scenario. A restart replaces its process and its memory; its id and the number of its
/// incarnations stay.
pub(crate) struct Node {
    pub(crate) id: NodeId,
    pub(crate) host: HostId,
    pub(crate) process: Cell<ProcessId>,
    regions: u32,
    service: Service,
    /// How much memory other processes of its machine use, in regions.
    pub(crate) demand: Cell<u32>,
    /// For how long processes of its machine have waited for memory.
    stalled: Cell<Duration>,
    /// The number of its current incarnation, as its disk has it.
    incarnation: Cell<u32>,
    shell: RefCell<Option<Arc<Shell>>>,
    /// Leases that the broker has asked it to take back: region and epoch.
    asked_back: RefCell<BTreeSet<(u32, u64)>>,
}

impl Node {
    pub(crate) fn new(id: NodeId, host: HostId, process: ProcessId, regions: u32, service: Service) -> Self {
        let (process, incarnation, demand) = (Cell::new(process), Cell::new(0), Cell::new(0));
        let (shell, asked_back) = (RefCell::new(None), RefCell::default());
        let stalled = Cell::default();
        Node { id, host, process, regions, service, demand, stalled, incarnation, shell, asked_back }
    }

    /// How much memory of its machine is available while its core is this one, in regions.
    fn available(&self, core: &NodeCore) -> u32 {
        (BESIDE + self.regions - core.with_memory()).saturating_sub(self.demand.get())
    }

    /// Whether the node leaves its machine what it is to leave, as far as it can, and has all of its regions
    /// if nobody demands their memory.
    pub(crate) fn suits_its_machine(&self, core: &NodeCore) -> bool {
        let leaves_reserve = self.available(core) >= RESERVE || core.with_memory() == 0;
        leaves_reserve && (self.demand.get() > 0 || core.allowed() == self.regions)
    }

    /// Forgets which leases it was asked to take back.
    pub(crate) fn forget_asked_back(&self) {
        self.asked_back.borrow_mut().clear();
    }

    /// Whether a lease is still held that it was asked to take back.
    pub(crate) fn is_taking_back(&self) -> bool {
        let asked = self.asked_back.borrow();
        self.table().iter().any(|state| state.held && asked.contains(&(state.region, state.epoch)))
    }

    /// Its regions that are not free; none while it does not run.
    pub(crate) fn table(&self) -> Vec<RegionState> {
        self.shell().map_or_else(Vec::new, |shell| shell.core.lock().states(shell.now()))
    }

    /// The node's memory and table, while it runs.
    pub(crate) fn shell(&self) -> Option<Arc<Shell>> {
        self.shell.borrow().clone()
    }

    /// The number of its current incarnation.
    pub(super) fn incarnation(&self) -> u32 {
        self.incarnation.get()
    }

    fn region(&self, index: u32) -> RegionId {
        RegionId { node: self.id, index }
    }
}

/// Starts a node's next incarnation in its current process.
pub(crate) fn start(plane: &Rc<Plane>, node: &Rc<Node>) {
    if node.incarnation.get() == 0 || !plane.is_broken(EPOCH_REUSED) {
        node.incarnation.set(node.incarnation.get() + 1);
    }
    let shell = Shell::new(
        node.id,
        node.incarnation.get(),
        (node.regions, plane.region_bytes),
        plane.ttl,
        plane.world.clock(node.host),
        plane.mutation,
    );
    *node.shell.borrow_mut() = Some(shell.clone());
    plane.world.serve(node.host, shell.clone(), node.service);
    let process = node.process.get();
    let waiting = RefCell::default();
    let life = Rc::new(Life { plane: plane.clone(), node: node.clone(), shell, waiting });
    let answering = life.clone();
    let post = Post::open(plane, process, move |question| match question {
        Question::AwaitRevocation(request) => Box::pin(answering.clone().await_revocation(request)),
        question => Box::pin(std::future::ready(answering.answer(question))),
    });
    plane.tasks.spawn(process, keep(life.clone()));
    plane.tasks.spawn(process, stay_registered(life, post));
}

/// Kills a node's process, with its memory and all its leases.
pub(crate) fn crash(plane: &Plane, node: &Node) {
    plane.tasks.kill(node.process.get());
    plane.world.crash_node(node.id);
    *node.shell.borrow_mut() = None;
    plane.oracle.borrow_mut().dies(node.id);
}

/// One incarnation of a node.
struct Life {
    plane: Rc<Plane>,
    node: Rc<Node>,
    shell: Arc<Shell>,
    /// Owners that wait for a revocation.
    waiting: RefCell<Vec<Waker>>,
}

impl Life {
    /// Compares something that the node does with its promises.
    fn judge(&self, look: impl FnOnce(&mut Promises)) {
        let mut promises = self.shell.promises.lock();
        look(&mut promises);
        for complaint in promises.complaints() {
            self.plane.complain(format!("node {}: {complaint}", self.node.id));
        }
    }

    fn answer(&self, question: Question) -> Option<Answer> {
        let answer = match question {
            Question::Grant(wish) => Answer::Granted(self.grant(&wish)),
            Question::Renew(request) => Answer::Renewed(self.renew(&request)),
            Question::AddGrant(request) => self.add_grant(&request),
            Question::FenceGrant(request) => self.fence_grant(&request),
            Question::Revoke(request) => self.revoke(&request),
            Question::Release(request) => {
                request.leases.iter().for_each(|lease| self.release(&request, lease));
                Answer::Done
            }
            Question::Resize(request) => self.resize(&request),
            Question::Regions => Answer::Table(self.table()),
            // These questions are not for a node.
            _ => return None,
        };
        Some(answer)
    }

    fn address(&self) -> NodeAddress {
        let control = "node".to_owned(); // letters are routed by the node's id
        let (node, incarnation) = (self.node.id.0, self.node.incarnation.get());
        NodeAddress { node, incarnation, control, ..NodeAddress::default() }
    }

    fn grant(&self, wish: &GrantRequest) -> GrantResponse {
        let Some(class) = LeaseClass::from_wire(wish.class) else { return GrantResponse::default() };
        let (now, owner) = (self.shell.now(), OwnerId(wish.owner));
        let mut core = self.shell.core.lock();
        let keys = &mut || self.plane.fresh_key();
        let grants = core.grant(now, owner, class, wish.count, keys);
        let ttl = core.ttl();
        drop(core);
        for grant in &grants {
            let Lending { region, epoch } = grant.lending;
            let lease = self.plane.oracle.borrow_mut().lends(self.node.region(region), epoch);
            self.shell.open(region, epoch, grant.key);
            let told = Millis(lease_message(grant, class, ttl, self.address()).ttl_ms);
            self.judge(|promises| promises.lent(now, grant.lending, owner, class, told));
            let numbers = [self.node.id.0, u64::from(region), lease.0, epoch.0, wish.owner];
            self.plane.world.note("node {} lends region {} as lease {}, epoch {}, to owner {}", &numbers);
        }
        let message = |grant| lease_message(grant, class, ttl, self.address());
        GrantResponse { leases: grants.iter().map(message).collect() }
    }

    fn renew(&self, request: &RenewRequest) -> RenewResponse {
        let now = self.shell.now();
        let renew = |lease: &LeaseRef| {
            let renewed = match self.plane.is_broken(UNCOUNTED_RENEWAL) {
                true => self.shell.renew_without_counting(now, lease),
                false => self.shell.core.lock().renew(now, OwnerId(request.owner), lease),
            };
            let outcome = renew_outcome(renewed);
            self.judge(|promises| promises.renewed(now, named(lease), &outcome));
            outcome
        };
        RenewResponse { outcomes: request.leases.iter().map(renew).collect() }
    }

    fn add_grant(&self, request: &AddGrantRequest) -> Answer {
        let Some(lease) = &request.lease else { return Answer::Refused };
        let key = self.plane.fresh_key();
        let (now, owner) = (self.shell.now(), OwnerId(request.owner));
        let added = self.shell.core.lock().add_grant(now, owner, lease, GrantMode::ReadWrite, key);
        let grant = added.as_ref().ok().map(|grant| grant.lending.epoch);
        self.judge(|promises| promises.granted(now, named(lease), grant));
        let Ok(grant) = added else { return Answer::Refused };
        let Lending { region, epoch } = grant.lending;
        self.shell.open_grant(region, epoch, key);
        self.plane.oracle.borrow_mut().grants(self.node.region(region), epoch);
        self.plane
            .world
            .note("node {} adds grant {} to region {}", &[self.node.id.0, epoch.0, u64::from(region)]);
        Answer::GrantAdded(AddGrantResponse { epoch: epoch.0, key: key.as_bytes().to_vec() })
    }

    fn fence_grant(&self, request: &FenceGrantRequest) -> Answer {
        let Some(lease) = &request.lease else { return Answer::Refused };
        let (now, owner, grant) = (self.shell.now(), OwnerId(request.owner), Epoch(request.grant));
        let fenced = match self.plane.is_broken(KEPT_GRANT) {
            true => self.shell.fence_without_noting(now, lease, grant),
            false => self.shell.core.lock().fence_grant(now, owner, lease, grant),
        };
        self.judge(|promises| promises.fenced(now, named(lease), grant, fenced.is_ok()));
        let Ok(Lending { region, epoch }) = fenced else { return Answer::Refused };
        self.shell.fence_grant(Lending { region, epoch });
        self.plane.oracle.borrow_mut().fences(self.node.region(region), epoch);
        self.plane
            .world
            .note("node {} fences grant {} of region {}", &[self.node.id.0, epoch.0, u64::from(region)]);
        Answer::Done
    }

    fn revoke(&self, request: &RevokeRequest) -> Answer {
        let (now, owner) = (self.shell.now(), OwnerId(request.owner));
        let grace = Millis(request.grace_ms);
        let mut core = self.shell.core.lock();
        let before = core.states(now);
        let answer = core.revoke(now, owner, request.count, grace);
        let after = core.states(now);
        drop(core);
        let newly = after.into_iter().filter(|state| state.revoked && !before.contains(state));
        self.node.asked_back.borrow_mut().extend(newly.map(|state| (state.region, state.epoch)));
        self.judge(|promises| promises.revoked(now, owner, (request.count, grace), &answer));
        self.note_revoked(now);
        Answer::Revoked(answer)
    }

    /// Answers once a lease of the owner is taken back, or after a while, as production's control service
    /// does.
    async fn await_revocation(self: Rc<Self>, request: AwaitRevocationRequest) -> Option<Answer> {
        let AwaitRevocationRequest { owner, seen } = request;
        let revoked = std::future::poll_fn(|context| {
            let last = self.shell.core.lock().last_revocation(OwnerId(owner));
            if last > seen && !self.plane.is_broken(NOT_PUSHED) {
                return Poll::Ready(last);
            }
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        });
        let late = self.plane.world.sleep_by(self.node.host, REVOCATION_WAIT);
        let answer = match select(pin!(revoked), pin!(late)).await {
            Either::Left((last, _)) => AwaitRevocationResponse { seen: last, revoked: true },
            Either::Right(_) => AwaitRevocationResponse { seen, revoked: false },
        };
        Some(Answer::Revocation(answer))
    }

    fn note_revoked(&self, now: Millis) {
        self.waiting.take().into_iter().for_each(Waker::wake);
        for state in self.shell.core.lock().states(now).iter().filter(|state| state.revoked) {
            self.plane.oracle.borrow_mut().revoked(self.node.region(state.region));
        }
    }

    fn resize(&self, request: &ResizeRequest) -> Answer {
        let (now, grace) = (self.shell.now(), Millis(request.grace_ms));
        let target = (request.memory_bytes / self.plane.region_bytes) as u32;
        let answer = resize(&mut self.shell.core.lock(), now, target, grace);
        self.judge(|promises| promises.resized(now, (target, grace), &answer));
        self.note_revoked(now);
        self.plane.world.note(
            "node {} is to have memory for {} regions",
            &[self.node.id.0, u64::from(answer.regions_target)],
        );
        Answer::Done
    }

    /// Gives memory back that other processes of the machine need, or takes it again.
    fn apply_pressure(&self) {
        let has_passed = self.node.demand.get() == 0;
        if self.plane.is_broken(UNNOTICED_PRESSURE) || has_passed && self.plane.is_broken(LASTING_PRESSURE) {
            return;
        }
        let (now, bytes) = (self.shell.now(), self.plane.region_bytes);
        let change = {
            let mut core = self.shell.core.lock();
            let available = self.node.available(&core);
            if available == 0 {
                self.node.stalled.set(self.node.stalled.get() + TICK);
            }
            let available_bytes = u64::from(available) * bytes;
            let measured = Measured { available_bytes, stalled: self.node.stalled.get() };
            self.shell.pressure.lock().apply(&mut core, now, measured, bytes)
        };
        let Some(LimitChange { allowed, taken_back, .. }) = change else { return };
        self.judge(|promises| promises.allowed(now, (allowed, PRESSURE_GRACE), &taken_back));
        self.note_revoked(now);
        let numbers = [self.node.id.0, u64::from(allowed)];
        self.plane.world.note("node {}: its machine has memory for {} regions", &numbers);
    }

    fn release(&self, request: &ReleaseRequest, lease: &LeaseRef) {
        let ended = self.shell.core.lock().release(OwnerId(request.owner), lease);
        self.judge(|promises| promises.released(named(lease), matches!(ended, Ok(Some(_)))));
        if let Ok(Some(lease)) = ended {
            self.end(lease, Ending::Released);
        }
    }

    /// Fences a lease that the table has ended, before any answer reports the end.
    fn end(&self, lease: Lending, ending: Ending) {
        let region = self.node.region(lease.region);
        let trusting = self.plane.trusting_processes(region, lease.epoch, ending);
        self.shell.fence(lease);
        self.plane.oracle.borrow_mut().ends(region, &trusting);
        let numbers = [self.node.id.0, u64::from(lease.region), lease.epoch.0];
        self.plane.world.note("node {} has fenced region {}, epoch {}", &numbers);
    }

    /// Ends leases on time, and makes fenced regions free again.
    fn expire_and_scrub(&self) {
        let now = self.shell.now();
        let ended = self.shell.expire(now);
        self.judge(|promises| promises.expired(now, &ended, self.awake()));
        ended.into_iter().for_each(|lease| self.end(lease, Ending::Expired));
        let next = || self.shell.core.lock().begin_scrub(|region| self.shell.regions.is_held(region));
        while let Some(lease) = next() {
            let is_excess = self.shell.core.lock().excess() > 0;
            let returned = match is_excess {
                true if self.plane.is_broken(UNCLEARED_MEMORY) => Scrubbed::Clean,
                true => self.shell.regions.withdraw(lease.region),
                false => self.shell.regions.scrub(lease.region).expect("a page of memory"),
            };
            let mut core = self.shell.core.lock();
            match returned {
                Scrubbed::Clean if is_excess => core.withdrawn(lease),
                Scrubbed::Clean => core.scrubbed(lease),
                Scrubbed::StillHeld => return core.not_scrubbed(lease),
            }
        }
        self.approach_limit();
    }

    /// Gives the memory of free regions back, or gets memory for regions that were withdrawn.
    fn approach_limit(&self) {
        let withdraw = || match self.plane.is_broken(KEPT_MEMORY) {
            true => None,
            false => self.shell.core.lock().begin_withdrawal(),
        };
        while let Some(lease) = withdraw() {
            let returned = self.shell.regions.withdraw(lease.region);
            assert_eq!(returned, Scrubbed::Clean, "no client has the memory of a free region");
            self.shell.core.lock().withdrawn(lease);
        }
        let restore = || self.shell.core.lock().next_to_restore();
        while let Some(region) = restore() {
            self.shell.regions.restore(region).expect("a page of memory");
            self.shell.core.lock().restored(region);
        }
    }

    /// How long the node's process has run since it last stood still.
    fn awake(&self) -> Millis {
        let since_ns = self.plane.world.paused_until_ns(self.node.process.get());
        Millis(self.plane.world.now_ns().saturating_sub(since_ns) / 1_000_000)
    }

    fn table(&self) -> RegionsResponse {
        let now = self.shell.now();
        let (lent, target, expired) = {
            let core = self.shell.core.lock();
            (core.states(now), core.target(), core.expired_revocations())
        };
        self.judge(|promises| promises.listed(now, &lent));
        RegionsResponse {
            address: Some(self.address()),
            region_bytes: self.plane.region_bytes,
            regions_total: self.node.regions,
            regions_target: target,
            expired_revocations: expired,
            lent,
        }
    }

    fn beat(&self) -> HeartbeatRequest {
        let now = self.shell.now();
        let core = self.shell.core.lock();
        let counts = core.counts();
        self.judge(|promises| promises.listed(now, &core.states(now)));
        HeartbeatRequest {
            node: self.node.id.0,
            incarnation: self.node.incarnation.get(),
            regions_free: counts.free,
            regions_lent: counts.held,
            regions_withdrawn: counts.withdrawn,
            frames_rejected: 0,
            table: core.table_sum(now),
        }
    }
}

/// The lease that a message names.
fn named(lease: &LeaseRef) -> Lending {
    Lending { region: lease.region, epoch: Epoch(lease.epoch) }
}

async fn keep(life: Rc<Life>) {
    loop {
        let due = life.shell.core.lock().next_deadline();
        let until_due = due.map_or(TICK, |due| Duration::from_millis(due.since(life.shell.now()).0));
        life.plane.world.sleep_by(life.node.host, until_due.min(TICK)).await;
        life.apply_pressure();
        life.expire_and_scrub();
    }
}

/// Reports, then sends heartbeats until asked to report again, as production does.
async fn stay_registered(life: Rc<Life>, post: Rc<Post>) {
    let mut pause = FIRST_PAUSE;
    loop {
        let RegionsResponse { address, region_bytes, regions_total, lent, .. } = life.table();
        let report = RegisterRequest { address, region_bytes, regions_total, lent };
        let broker = life.plane.broker.process.get();
        if let Some(Answer::Registered(answer)) =
            post.ask(broker, Question::Register(report), ANSWER_PATIENCE).await
        {
            pause = FIRST_PAUSE;
            let interval = Duration::from_millis(answer.heartbeat_interval_ms);
            if beat(&life, &post, interval).await {
                continue;
            }
        }
        life.plane.world.sleep_by(life.node.host, pause).await;
        pause = LONGEST_PAUSE.min(pause * 2);
    }
}

/// Sends heartbeats. Returns true when the broker wants a report, false when the broker does not answer.
async fn beat(life: &Life, post: &Post, interval: Duration) -> bool {
    loop {
        life.plane.world.sleep_by(life.node.host, interval).await;
        let broker = life.plane.broker.process.get();
        match post.ask(broker, Question::Heartbeat(life.beat()), ANSWER_PATIENCE).await {
            Some(Answer::Beat(answer)) if answer.register_again => return true,
            Some(Answer::Beat(_)) => {}
            _ => return false,
        }
    }
}

/// Whether the node's table says that `key` may use a region.
pub(crate) fn agrees(node: &Node, region: u32, epoch: Epoch, key: &AccessKey) -> bool {
    let Some(shell) = node.shell() else { return false };
    let agrees = shell.core.lock().check(shell.now(), Lending { region, epoch }, key);
    agrees.is_ok()
}
