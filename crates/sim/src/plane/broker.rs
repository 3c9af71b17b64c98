//! The broker: the real pool and the real placement, in a simulated shell.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use farpool_broker::{Placing, Pool, TakingBack, Wish, are_sound};
use farpool_fabric::Clock;
use farpool_fabric::sim::{HostId, ProcessId};
use farpool_lease::{LeaseClass, Millis};
use farpool_wire::control::{
    AcquireRequest, AcquireResponse, GrantRequest, GrantResponse, HeartbeatResponse, NodeAddress,
    RegionsResponse, RegisterRequest, RevokeRequest, RevokeResponse,
};
use farpool_wire::{NodeId, OwnerId};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::post::{Answer, Answering, Post, Question};
use super::{FORGETFUL_BROKER, Plane, TWO_AT_ONCE};

/// The timeouts of production's broker.
const GRANT_PATIENCE: Duration = Duration::from_secs(2);
const REGIONS_PATIENCE: Duration = Duration::from_secs(1);
const ACQUIRE_NS: u64 = 5_000_000_000;

/// The broker's host and disk. A restart replaces its process; its disk survives unless it is lost.
pub(crate) struct Broker {
    pub(crate) host: HostId,
    pub(crate) process: Cell<ProcessId>,
    disk: RefCell<BTreeMap<NodeId, RegisterRequest>>,
    starts: Cell<u32>,
    /// The pool as the current process sees it.
    pub(crate) pool: RefCell<Rc<RefCell<Pool>>>,
}

impl Broker {
    pub(crate) fn new(host: HostId, process: ProcessId) -> Self {
        Broker {
            host,
            process: Cell::new(process),
            disk: RefCell::default(),
            starts: Cell::new(0),
            pool: RefCell::default(),
        }
    }

    pub(crate) fn lose_disk(&self) {
        self.disk.borrow_mut().clear();
    }
}

/// Starts a broker in its current process.
pub(crate) fn start(plane: &Rc<Plane>) {
    let broker = &plane.broker;
    broker.starts.set(broker.starts.get() + 1);
    let process = broker.process.get();
    let pool: Rc<RefCell<Pool>> = Rc::default();
    *broker.pool.borrow_mut() = pool.clone();
    let life = Rc::new(Life {
        plane: plane.clone(),
        pool,
        post: RefCell::new(None),
        is_ready: Cell::new(false),
        forgets: plane.is_broken(FORGETFUL_BROKER) && broker.starts.get() > 1,
        forgets_revocations: plane.is_broken(TWO_AT_ONCE),
    });
    let answering = life.clone();
    let post = Post::open(plane, process, move |question| answering.clone().answer(question));
    *life.post.borrow_mut() = Some(post);
    plane.tasks.spawn(process, async move { life.begin().await });
}

/// One process of the broker.
struct Life {
    plane: Rc<Plane>,
    pool: Rc<RefCell<Pool>>,
    post: RefCell<Option<Rc<Post>>>,
    /// Set once the broker has asked the nodes that it remembers.
    is_ready: Cell<bool>,
    /// Mutation: a restarted broker ignores which leases nodes hold.
    forgets: bool,
    /// Mutation: the broker does not notice which leases are being taken back.
    forgets_revocations: bool,
}

impl Life {
    fn now(&self) -> Millis {
        Millis(self.plane.world.clock(self.plane.broker.host).now_ns() / 1_000_000)
    }

    fn post(&self) -> Rc<Post> {
        self.post.borrow().clone().expect("opened at the start")
    }

    async fn begin(&self) {
        let remembered: Vec<RegisterRequest> = self.plane.broker.disk.borrow().values().cloned().collect();
        remembered.iter().for_each(|report| self.pool.borrow_mut().remember(self.now(), &self.heard(report)));
        self.learn_tables().await;
        self.is_ready.set(true);
    }

    /// Asks all nodes for their tables, and records these.
    async fn learn_tables(&self) {
        let nodes = self.pool.borrow().reachable(self.now());
        if self.forgets_revocations {
            *self.pool.borrow_mut() = Pool::default();
        }
        let mut tables: FuturesUnordered<_> = nodes.iter().map(|address| self.learn_table(address)).collect();
        while tables.next().await.is_some() {}
    }

    /// Asks a node for its table, and records it.
    async fn learn_table(&self, address: &NodeAddress) {
        let answer = self.post().ask(self.process_of(address), Question::Regions, REGIONS_PATIENCE).await;
        if let Some(Answer::Table(RegionsResponse { address, region_bytes, regions_total, lent, .. })) =
            answer
        {
            let report = RegisterRequest { address, region_bytes, regions_total, lent };
            let _ = self.pool.borrow_mut().report(self.now(), &self.heard(&report));
        }
    }

    fn heard(&self, report: &RegisterRequest) -> RegisterRequest {
        let mut report = report.clone();
        if self.forgets {
            report.lent.clear();
        }
        if self.forgets_revocations {
            report.lent.iter_mut().for_each(|state| state.revoked = false);
        }
        report
    }

    fn process_of(&self, address: &NodeAddress) -> ProcessId {
        self.plane.node(NodeId(address.node)).process.get()
    }

    fn answer(self: Rc<Self>, question: Question) -> Answering {
        if !self.is_ready.get() {
            return Box::pin(std::future::ready(None));
        }
        Box::pin(async move {
            match question {
                Question::Register(report) => Some(self.register(&report)),
                Question::Heartbeat(beat) => {
                    let agreed = self.pool.borrow_mut().heartbeat(self.now(), &beat);
                    Some(Answer::Beat(HeartbeatResponse { register_again: !agreed }))
                }
                Question::Acquire(request) => self.acquire(&request).await.map(Answer::Acquired),
                Question::RevokeFrom(request) => Some(Answer::Revoked(self.take_back(request).await)),
                _ => None,
            }
        })
    }

    fn register(&self, report: &RegisterRequest) -> Answer {
        let answer = self.pool.borrow_mut().report(self.now(), &self.heard(report));
        if let (Err(refusal), Some(address)) = (&answer, &report.address)
            && address.incarnation >= self.plane.node(NodeId(address.node)).incarnation()
        {
            let node = address.node;
            self.plane
                .complain(format!("the broker refuses the incarnation of node {node} that runs: {refusal}"));
        }
        let (Ok(answer), Some(address)) = (answer, &report.address) else { return Answer::Refused };
        self.plane.broker.disk.borrow_mut().insert(NodeId(address.node), report.clone());
        Answer::Registered(answer)
    }

    async fn acquire(&self, request: &AcquireRequest) -> Option<AcquireResponse> {
        let class = LeaseClass::from_wire(request.class)?;
        let (owner, count) = (OwnerId(request.owner), request.count);
        let avoid = request.avoid.iter().copied().map(NodeId).collect();
        let until_ns = self.plane.world.now_ns() + ACQUIRE_NS;
        let mut placing = Placing::new(Wish { owner, class, count, avoid });
        while self.plane.world.now_ns() < until_ns {
            let plan = placing.next(&mut self.pool.borrow_mut(), self.now());
            if plan.is_empty() {
                break;
            }
            let mut answers: FuturesUnordered<_> =
                plan.into_iter().map(|(node, share)| self.ask_for(node, owner, class, share)).collect();
            while let Some((node, share, answer)) = answers.next().await {
                let mut pool = self.pool.borrow_mut();
                match answer {
                    Some(GrantResponse { leases }) if are_sound(&leases, node, class, share) => {
                        placing.granted(&mut pool, node, share, leases);
                    }
                    _ => placing.failed(&mut pool, self.now(), node),
                }
            }
        }
        Some(placing.answer(&self.pool.borrow(), self.now()))
    }

    async fn ask_for(
        &self,
        address: NodeAddress,
        owner: OwnerId,
        class: LeaseClass,
        count: u32,
    ) -> (NodeId, u32, Option<GrantResponse>) {
        let wish = GrantRequest { owner: owner.0, count, class: class.to_wire() };
        let answer = self.post().ask(self.process_of(&address), Question::Grant(wish), GRANT_PATIENCE).await;
        let granted = match answer {
            Some(Answer::Granted(granted)) => Some(granted),
            _ => None,
        };
        (NodeId(address.node), count, granted)
    }

    async fn take_back(&self, request: RevokeRequest) -> RevokeResponse {
        let until_ns = self.plane.world.now_ns() + ACQUIRE_NS;
        let mut back = TakingBack::new(OwnerId(request.owner), request.count);
        while self.plane.world.now_ns() < until_ns {
            let Some((address, share)) = back.next(&mut self.pool.borrow_mut(), self.now()) else { break };
            let question = Question::Revoke(RevokeRequest { count: share, ..request });
            let answer = self.post().ask(self.process_of(&address), question, GRANT_PATIENCE).await;
            let node = NodeId(address.node);
            match answer {
                Some(Answer::Revoked(said)) => {
                    back.revoked(&mut self.pool.borrow_mut(), self.now(), node, share, &said);
                    if self.forgets_revocations {
                        self.learn_tables().await;
                    }
                }
                _ => back.failed(&mut self.pool.borrow_mut(), self.now(), node, share),
            }
        }
        back.answer(&self.pool.borrow(), self.now())
    }
}
