//! A compute server, as `farpool-namdb` runs one in a process. Its threads are tasks here, each with an
//! access to far memory of its own. Threads that may stand still while the rest goes on are processes of
//! their own in the world.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::Endpoint;
use farpool_fabric::sim::{HostId, Path, ProcessId, Random};
use farpool_txn::horizon::{HorizonAt, collect};
use farpool_txn::log::LogAt;
use farpool_txn::membership::{
    Duties, Duty, Lookout, MembersAt, Premises, Role, Seat, Vouching, beat, fill_role, leave_seat,
    list_grants, signs_of, wait_for_seat,
};
use farpool_txn::oracle::publish;
use farpool_txn::recovery::recover;
use farpool_txn::{Cut, Memory, MemoryError, Oracle, SharedSlot};
use farpool_wire::{Epoch, Slot};

use super::broken::{self, Chosen, Engine};
use super::layout::{At, PLACES};
use super::{FenceLost, Run, catalog, client};
use crate::staying::Staying;

/// Members that each driver runs one after the other, at most.
const MOST_LIVES: u64 = 3;
/// Heartbeats of a member within one heartbeat timeout.
const BEATS: u32 = 10;
/// The time after which an unresponsive node counts as lost. No operation here waits so long for a node.
const NODE_SILENCE: Duration = Duration::from_millis(2);
/// Pause between two checks whether a seat or a role is free.
const PAUSE: Duration = Duration::from_micros(40);
/// Pause between two rounds of the collector.
const COLLECT_PAUSE: Duration = Duration::from_micros(50);
/// Pause of a driver before its next member, at most.
const MOST_ABSENCE_NS: u64 = 200_000;
/// Time that a member works before it lists its grants, under that mutation.
const LISTED_AFTER: Duration = Duration::from_micros(200);

/// What a compute server is to do.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// Workers that run transactions.
    pub(super) workers: u16,
    pub(super) changes_catalog: bool,
}

/// Parts of a member that may stand still while the rest goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PartKind {
    Publisher,
    Collector,
    Carer,
    /// All of its workers.
    Clients,
}

impl PartKind {
    pub(super) const ALL: [PartKind; 4] =
        [PartKind::Publisher, PartKind::Collector, PartKind::Carer, PartKind::Clients];
}

/// A process with a seat.
pub(super) struct Member {
    pub(super) run: Rc<Run>,
    /// Sends heartbeats.
    pub(super) process: ProcessId,
    publisher: ProcessId,
    collector: ProcessId,
    /// Watches the other members, and recovers them (recoverers are called *carers* in the code).
    carer: ProcessId,
    /// Its workers.
    clients: RefCell<Vec<ProcessId>>,
    place: (HostId, Path),
    pub(super) grants: Vec<Epoch>,
    pub(super) seat: Seat,
    pub(super) slot: Arc<SharedSlot>,
    duties: Duties,
    /// The member has ended, or is to end.
    pub(super) is_over: Cell<bool>,
    /// The member has ended because of an error, without being asked to.
    has_failed: Cell<bool>,
    /// Workers that have announced themselves, or will, and have not left.
    pub(super) workers: Cell<u32>,
    /// Tasks of workers and of catalog changes that have not ended.
    pub(super) busy: Cell<u32>,
    random: RefCell<Random>,
}

impl Member {
    pub(super) fn is_over(&self) -> bool {
        self.is_over.get() || self.run.is_over.get()
    }

    /// Whether the member goes on, and has not been evicted without knowing it yet.
    pub(super) fn lives(&self) -> bool {
        let run = &self.run;
        !self.is_over() && run.world.is_alive(self.process) && run.observer.lock().is_open(self.seat.claim)
    }

    pub(super) fn at(&self) -> At<'_> {
        At { plan: &self.run.plan, grants: &self.grants }
    }

    pub(super) async fn memory(&self) -> Result<Memory, MemoryError> {
        self.memory_of(self.process).await
    }

    /// A part's access to all memory.
    pub(super) async fn memory_of(&self, part: ProcessId) -> Result<Memory, MemoryError> {
        self.run.memory(part, self.place, &self.grants).await
    }

    /// Adds a process for a worker.
    pub(super) fn add_client(&self) -> ProcessId {
        let client = self.run.world.add_process(self.place.0);
        self.clients.borrow_mut().push(client);
        client
    }

    /// The processes of one kind of parts.
    pub(super) fn parts(&self, kind: PartKind) -> Vec<ProcessId> {
        match kind {
            PartKind::Publisher => vec![self.publisher],
            PartKind::Collector => vec![self.collector],
            PartKind::Carer => vec![self.carer],
            PartKind::Clients => self.clients.borrow().clone(),
        }
    }

    fn all_parts(&self) -> impl Iterator<Item = ProcessId> {
        let parts = PartKind::ALL.into_iter().flat_map(|kind| self.parts(kind));
        parts.chain([self.process])
    }

    /// Kills all parts.
    pub(super) fn kill(&self) {
        self.all_parts().for_each(|part| self.run.tasks.kill(part));
    }

    /// All parts lose their connections.
    pub(super) fn loses_connections(&self) {
        self.all_parts().for_each(|part| self.run.world.lose_connections(part));
    }

    /// Stops all parts for some time.
    pub(super) fn pause(&self, lasting: Duration) {
        self.all_parts().for_each(|part| self.run.world.pause(part, lasting));
    }

    /// Whether any part stands still.
    pub(super) fn stands_still(&self) -> bool {
        let world = &self.run.world;
        self.all_parts().any(|part| world.paused_until_ns(part) > world.now_ns())
    }

    /// Polls the endpoint of a part regularly, as a running thread does whether or not anything arrives.
    pub(super) fn keeps_turning(self: &Rc<Self>, part: ProcessId, endpoint: &Endpoint) {
        let (here, endpoint) = (self.clone(), endpoint.clone());
        self.run.tasks.spawn(part, async move {
            while !here.is_over() {
                endpoint.sleep(here.run.patience / BEATS).await;
            }
        });
    }

    /// Ends the member because of an error.
    pub(super) fn ends(&self, why: &str) {
        self.run.world.note("member {} ends", &[self.seat.claim.0]);
        if !self.run.faults.are_any() {
            self.run.ledger.complain(format!("member {} cannot go on: {why}", self.seat.claim));
        }
        // The first reason counts.
        if !self.is_over.replace(true) {
            self.has_failed.set(true);
        }
    }
}

impl Premises for Member {
    type FenceError = FenceLost;

    fn members(&self) -> MembersAt {
        self.at().members()
    }

    fn oracle(&self) -> Oracle {
        self.at().oracle().into()
    }

    fn horizon(&self) -> HorizonAt {
        self.at().horizon()
    }

    fn workers(&self, slot: Slot) -> Range<u16> {
        let first = slot.index() as u16 * PLACES;
        first..first + PLACES
    }

    fn log(&self, slot: Slot) -> LogAt {
        self.at().log(slot.index() as u16)
    }

    async fn fence(&self, region: usize, grant: Epoch) -> Result<(), FenceLost> {
        let mut random = Random::new(self.random.borrow_mut().bits(), 1);
        self.run.fence(region, grant, &mut random).await
    }
}

/// Starts the drivers. Each runs members one after the other.
pub(super) fn start_drivers(run: &Rc<Run>, random: &mut Random) {
    for _ in 0..2 + random.below(u64::from(run.plan.slots) - 1) {
        let lives = 1 + random.below(MOST_LIVES);
        run.tasks.spawn(run.nowhere, drive(run.clone(), lives, run.left.stay()));
    }
}

async fn drive(run: Rc<Run>, lives: u64, _staying: Staying) {
    let mut random = run.ledger.random();
    for life in 1..=lives {
        run.world.sleep(Duration::from_nanos(random.below(MOST_ABSENCE_NS))).await;
        let wanted = Wanted { workers: 1 + random.below(2) as u16, changes_catalog: random.chance(300) };
        let living = start(&run, wanted, &mut random);
        while living.goes_on(&run) {
            run.world.sleep(PAUSE).await;
        }
        let member = living.member.borrow().clone();
        let Some(member) = member else { continue };
        // The last member may stay, and recover the others.
        if life < lives || random.chance(500) {
            member.is_over.set(true);
        }
        while member.is_over() && !living.has_ended.get() && run.world.is_alive(living.process) {
            run.world.sleep(PAUSE).await;
        }
    }
}

/// A process that is to become a member.
pub(super) struct Living {
    pub(super) process: ProcessId,
    pub(super) has_ended: Rc<Cell<bool>>,
    pub(super) member: Rc<RefCell<Option<Rc<Member>>>>,
}

impl Living {
    /// Whether the process still has something to do.
    pub(super) fn goes_on(&self, run: &Run) -> bool {
        let is_busy = self.member.borrow().as_ref().is_none_or(|member| member.busy.get() > 0);
        run.world.is_alive(self.process) && !self.has_ended.get() && is_busy
    }
}

/// Starts a process that takes a seat and does what `wanted` says.
pub(super) fn start(run: &Rc<Run>, wanted: Wanted, random: &mut Random) -> Living {
    let place = run.place(random);
    let process = run.world.add_process(place.0);
    let living = Living { process, has_ended: Rc::default(), member: Rc::default() };
    let (here, seated, has_ended) = (run.clone(), living.member.clone(), living.has_ended.clone());
    run.tasks.spawn(process, async move {
        match join_in(&here, process, place, wanted).await {
            Ok(Some(member)) => {
                here.members.borrow_mut().push(member.clone());
                *seated.borrow_mut() = Some(member.clone());
                begin_tasks(&member, wanted);
                if let Err(error) = take_part(&member).await {
                    member.ends(&error.to_string());
                }
            }
            Ok(None) => {}
            Err(why) if here.faults.are_any() => here.world.note("nobody joins", &[why.len() as u64]),
            Err(why) => here.ledger.complain(format!("nobody can join: {why}")),
        }
        has_ended.set(true);
    });
    living
}

/// Takes a seat, if one is free. Fences the grants of a process that gets none.
async fn join_in(
    run: &Rc<Run>,
    process: ProcessId,
    place: (HostId, Path),
    wanted: Wanted,
) -> Result<Option<Rc<Member>>, String> {
    let mut random = run.ledger.random();
    let grants = run.grants(&mut random).await;
    let at = At { plan: &run.plan, grants: &grants };
    let seated = async {
        let memory = run.memory(process, place, &grants).await?;
        let waits = (run.patience, PAUSE);
        let seat = wait_for_seat::<Chosen>(&memory, &at.members(), &grants, waits).await?;
        Ok::<_, MemoryError>(seat.map(|seat| (seat, memory)))
    };
    let (seat, memory) = match seated.await {
        Ok(Some(seated)) => seated,
        no_seat => {
            for (region, grant) in grants.iter().enumerate() {
                // A grant whose fence fails ends with its lease.
                let _ = run.fence(region, *grant, &mut random).await;
            }
            return no_seat.map(|_| None).map_err(|error| error.to_string());
        }
    };
    run.world.note("member {} has seat {}", &[seat.claim.0, seat.slot.index() as u64]);
    let log = at.log(seat.slot.index() as u16);
    let recovered = recover(&memory, &at.oracle().into(), &log, seat.slot).await;
    let recovered = recovered.map_err(|error| error.to_string())?;
    let slot = Arc::new(SharedSlot::after(seat.slot, log, recovered.last));
    let busy = u32::from(wanted.workers) + u32::from(wanted.changes_catalog);
    Ok(Some(Rc::new(Member {
        run: run.clone(),
        process,
        publisher: run.world.add_process(place.0),
        collector: run.world.add_process(place.0),
        carer: run.world.add_process(place.0),
        clients: RefCell::default(),
        place,
        grants,
        seat,
        slot,
        duties: Duties::default(),
        is_over: Cell::new(false),
        has_failed: Cell::new(false),
        workers: Cell::new(0),
        busy: Cell::new(busy),
        random: RefCell::new(random),
    })))
}

/// Starts the tasks that run beside [`take_part`].
fn begin_tasks(member: &Rc<Member>, wanted: Wanted) {
    let spawn = |part, task: std::pin::Pin<Box<dyn Future<Output = Result<(), MemoryError>>>>| {
        let here = member.clone();
        member.run.tasks.spawn(part, async move {
            if let Err(error) = task.await {
                here.ends(&error.to_string());
            }
        });
    };
    let [publishes, collects, cares] =
        ["publisher", "collector", "carer"].map(|name| member.duties.begin(name));
    spawn(member.publisher, Box::pin(publish_if_nobody_does(member.clone(), publishes)));
    spawn(member.collector, Box::pin(collect_if_nobody_does(member.clone(), collects)));
    spawn(member.carer, Box::pin(look_after_others(member.clone(), cares)));
    for number in 0..wanted.workers {
        client::start(member, number);
    }
    if wanted.changes_catalog {
        catalog::start(member);
    }
    if broken::is(broken::LISTED_LATE) {
        spawn(member.process, Box::pin(list_late(member.clone())));
    }
}

/// Sends heartbeats. At the end gives the seat back.
async fn take_part(member: &Rc<Member>) -> Result<(), MemoryError> {
    let memory = member.memory().await?;
    let mut alive = say_alive(member, &memory).await?;
    // A member with workers or commits in flight keeps its seat: the others declare it dead and recover it.
    if member.workers.get() == 0 && member.slot.retire() {
        let (at, duties) = (member.members(), &member.duties);
        let meanwhile = async || match member.has_failed.get() {
            false => alive.say(member, &memory).await,
            true => Ok(()),
        };
        let pause = PAUSE.min(member.run.patience / BEATS);
        leave_seat::<Chosen, _>(&memory, &at, &member.seat, duties, pause, meanwhile).await?;
    }
    Ok(())
}

/// The heartbeats of a member.
struct Alive {
    vouching: Vouching<Chosen>,
    count: u64,
}

impl Alive {
    async fn say(&mut self, member: &Member, memory: &Memory) -> Result<(), MemoryError> {
        let signs = signs_of(&member.duties, &member.slot);
        if self.vouching.look(memory.endpoint().now_ns(), &signs).is_none() {
            self.count += 1;
            beat(memory, &member.members(), &member.seat, self.count).await?;
        } else if !member.run.faults.are_any() {
            member.run.ledger.complain("a part of a member was taken for stuck where nothing is".to_owned());
        }
        Ok(())
    }
}

async fn say_alive(member: &Member, memory: &Memory) -> Result<Alive, MemoryError> {
    let mut alive = Alive { vouching: Vouching::new(member.run.patience, NODE_SILENCE), count: 0 };
    while !member.is_over() {
        if let Err(error) = alive.say(member, memory).await {
            member.ends(&error.to_string());
            return Err(error);
        }
        if member.slot.is_in_doubt() {
            member.ends("a commit is in doubt");
        }
        memory.endpoint().sleep(member.run.patience / BEATS).await;
    }
    Ok(alive)
}

async fn look_after_others(member: Rc<Member>, duty: Duty) -> Result<(), MemoryError> {
    let memory = member.memory_of(member.carer).await?;
    let looks = look_until_over(&member, &memory, duty.rounds(|| member.is_over()));
    duty.does(&memory, member.run.patience / BEATS, looks).await?;
    duty.ends();
    Ok(())
}

async fn look_until_over(
    member: &Rc<Member>,
    memory: &Memory,
    is_over: impl Fn() -> bool,
) -> Result<(), MemoryError> {
    let run = &member.run;
    let mut lookout = Lookout::<_, Chosen>::new(memory, &**member, member.seat, run.patience);
    while !is_over() {
        lookout
            .look(|slot, cared| {
                if let Ok(Some(recovered)) = cared {
                    let numbers = [slot.index() as u64, recovered.last];
                    run.world.note("seat {} was looked after; its slot goes on behind {}", &numbers);
                    if !run.faults.are_any() {
                        run.ledger.complain(format!("the member of seat {} lived", slot.index()));
                    }
                }
            })
            .await?;
        memory.endpoint().sleep(run.patience / BEATS).await;
    }
    Ok(())
}

async fn publish_if_nobody_does(member: Rc<Member>, duty: Duty) -> Result<(), MemoryError> {
    let memory = member.memory_of(member.publisher).await?;
    let work =
        || publish::<Engine>(&memory, member.at().oracle(), Duration::ZERO, duty.rounds(|| member.is_over()));
    let role = (Role::Publisher, member.seat.claim);
    let at = member.members();
    let publishes = fill_role(&memory, &at, role, PAUSE, || member.is_over(), work);
    duty.does(&memory, member.run.patience / BEATS, publishes).await?;
    duty.ends();
    Ok(())
}

async fn collect_if_nobody_does(member: Rc<Member>, duty: Duty) -> Result<(), MemoryError> {
    let memory = member.memory_of(member.collector).await?;
    let (oracle, horizon) = (member.oracle(), member.horizon());
    let work = || {
        let tables = async |_: &Cut| Ok::<_, MemoryError>(None);
        collect::<Engine, _>(
            &memory,
            &oracle,
            &horizon,
            tables,
            COLLECT_PAUSE,
            duty.rounds(|| member.is_over()),
        )
    };
    let role = (Role::Collector, member.seat.claim);
    let at = member.members();
    let collects = fill_role(&memory, &at, role, PAUSE, || member.is_over(), work);
    duty.does(&memory, member.run.patience / BEATS, collects).await?;
    duty.ends();
    Ok(())
}

/// Mutation: lists the member's grants only after it has used them for a while.
async fn list_late(member: Rc<Member>) -> Result<(), MemoryError> {
    let memory = member.memory().await?;
    memory.endpoint().sleep(LISTED_AFTER).await;
    list_grants(&memory, &member.members(), &member.seat, &member.grants).await
}
