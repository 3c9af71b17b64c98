//! Clients: the real holder, real endpoints and queues. An owner's main client leases; its other client uses
//! the grants that it is given.

mod guest;
mod leases;
mod work;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::{HostId, ProcessId, Random};
use farpool_fabric::{Clock, Endpoint, EndpointConfig, Queue};
use farpool_lease::{LeaseClass, Millis};
use farpool_pool::Holder;
use farpool_wire::{AccessKey, Epoch, NodeId, OwnerId, RegionId, SessionId};

use super::{Phase, REGION_BYTES, Run, TRUSTING_CLIENT};
use crate::place::Routed;
use crate::plane::oracle::LeaseNo;
use crate::plane::post::{Answer, Post, Question};

/// Staging memory of a client.
const ARENA_BYTES: usize = 8 * 4096;
/// The time from the posting of an operation until its outcome counts as *unknown*, by the client's clock.
const DEADLINE: Duration = Duration::from_millis(700);

/// A place for a client's process; a new process takes it after a crash.
pub(super) struct Seat {
    pub(super) index: usize,
    pub(super) host: HostId,
    /// Regions that the client leases when it can. With none, it uses the grants that it is given.
    pub(super) wants: usize,
    pub(super) class: LeaseClass,
    /// Seats of the clients to which it gives grants.
    pub(super) guests: Vec<usize>,
    /// Whether the client keeps leases that are being taken back until they end.
    pub(super) stays: bool,
    /// Whether a client with a grant asks for how long it may use the region. Otherwise it goes on until the
    /// node refuses it.
    pub(super) asks: bool,
}

/// A lease as its holder's shell keeps it.
struct Held {
    epoch: Epoch,
    key: AccessKey,
    lease: LeaseNo,
    /// When the holder sent its last request, for the lease or for a renewal, that was granted.
    since_ns: u64,
    fleeting: bool,
    guests: Vec<(usize, Epoch)>,
}

struct Connection {
    queue: Rc<Queue>,
    lost: bool,
    attached: BTreeMap<u32, Epoch>,
}

/// One life of a client.
pub(super) struct Client {
    run: Rc<Run>,
    seat: Rc<Seat>,
    pub(super) process: ProcessId,
    pub(super) owner: OwnerId,
    post: RefCell<Option<Rc<Post>>>,
    endpoint: Endpoint,
    random: RefCell<Random>,
    holder: RefCell<Holder>,
    held: RefCell<BTreeMap<RegionId, Held>>,
    invited: RefCell<Vec<guest::Invited>>,
    connections: RefCell<BTreeMap<NodeId, Rc<RefCell<Connection>>>>,
    /// The word that only this process writes. `written` is the last value that it wrote to this word under
    /// each lease.
    own_word: u64,
    written: RefCell<BTreeMap<LeaseNo, u64>>,
    has_left: Cell<bool>,
}

/// Starts a client's process; after a crash it has a new name, as in production.
pub(super) fn start(run: &Rc<Run>, seat: &Rc<Seat>) -> Rc<Client> {
    let process = run.world.add_process(seat.host);
    let owner = OwnerId(run.next_name());
    let here = run.nodes.iter().find(|node| node.host == seat.host).map(|node| node.id);
    let namer = run.clone();
    let endpoint = Endpoint::new(EndpointConfig {
        transport: Routed::of(&run.world, process, here),
        clock: Rc::new(run.world.clock(seat.host)),
        session_ids: Box::new(move || SessionId(namer.next_name())),
        arena_bytes: ARENA_BYTES,
        deadline: DEADLINE,
    });
    run.tasks.adopt(process, endpoint.clone());
    let client = Rc::new(Client {
        run: run.clone(),
        seat: seat.clone(),
        process,
        owner,
        post: RefCell::new(None),
        endpoint,
        random: RefCell::new(run.random(run.next_name())),
        holder: RefCell::new(Holder::new(owner, REGION_BYTES)),
        held: RefCell::default(),
        invited: RefCell::default(),
        connections: RefCell::default(),
        own_word: run.next_word(),
        written: RefCell::default(),
        has_left: Cell::new(false),
    });
    let answering = client.clone();
    let post = Post::open(&run.plane, process, move |question| {
        let answer = answering.answer(question);
        Box::pin(std::future::ready(answer))
    });
    *client.post.borrow_mut() = Some(post);
    run.tasks.spawn(process, client.clone().keep_leases());
    run.nodes.iter().for_each(|node| {
        run.tasks.spawn(process, client.clone().await_revocations(node.clone()));
    });
    run.tasks.spawn(process, client.clone().manage());
    run.tasks.spawn(process, client.clone().work());
    run.tasks.spawn(process, client.clone().ask_how_long());
    run.clients.borrow_mut()[seat.index] = Some(client.clone());
    client
}

impl Client {
    fn now(&self) -> Millis {
        Millis(self.run.world.clock(self.seat.host).now_ns() / 1_000_000)
    }

    fn post(&self) -> Rc<Post> {
        self.post.borrow().clone().expect("opened at the start")
    }

    fn below(&self, bound: u64) -> u64 {
        self.random.borrow_mut().below(bound)
    }

    fn chance(&self, permille: u32) -> bool {
        self.random.borrow_mut().chance(permille)
    }

    async fn sleep_ms(&self, least: u64, most: u64) {
        let ms = least + self.below(most - least + 1);
        self.run.world.sleep_by(self.seat.host, Duration::from_millis(ms)).await;
    }

    fn is_broken(&self) -> bool {
        self.run.is_broken(TRUSTING_CLIENT)
    }

    fn is_leaving(&self) -> bool {
        self.run.phase.get() == Phase::Leaving
    }

    /// Whether this client would use a region now under a lease of its own.
    pub(super) fn trusts(&self, region: RegionId, epoch: Epoch) -> bool {
        if self.is_broken() {
            return self.held.borrow().get(&region).is_some_and(|held| held.epoch == epoch);
        }
        let (now, holder) = (self.now(), self.holder.borrow());
        holder.usable(now, region).is_some_and(|held| held.epoch == epoch)
    }

    /// The leases of its own that it would use now.
    pub(super) fn trusted(&self) -> Vec<(RegionId, Epoch, AccessKey)> {
        let held = self.held.borrow();
        let all = held.iter().map(|(region, held)| (*region, held.epoch, held.key));
        all.filter(|(region, epoch, _)| self.trusts(*region, *epoch)).collect()
    }

    pub(super) fn has_left(&self) -> bool {
        self.has_left.get()
    }

    fn answer(&self, question: Question) -> Option<Answer> {
        match question {
            Question::LetIn(_) | Question::HowLong { .. } if self.is_leaving() => None,
            Question::LetIn(invitation) => {
                self.accept(invitation);
                Some(Answer::Done)
            }
            Question::HowLong { region, grant } => Some(self.how_long(region, grant)),
            _ => None,
        }
    }
}
