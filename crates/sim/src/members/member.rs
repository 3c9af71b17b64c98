//! A compute server: a member as it ships ([`MemberCore`]), in a run's world. Each of its threads is a task
//! here, with an endpoint of its own. A thread that may stand still while the rest goes on is a process of
//! its own in the world.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::Endpoint;
use farpool_fabric::sim::{HostId, Path, ProcessId, Random};
use farpool_namdb::{DatabaseError, DutyKind, Ended, MemberCore};
use farpool_txn::membership::list_grants;
use farpool_wire::Epoch;

use super::surroundings::Surroundings;
use super::{Run, broken, client, tables};
use crate::mutation;
use crate::staying::Staying;

/// The most members that a driver runs, one after the other.
const MOST_LIVES: u64 = 3;
/// Polls of a running thread's endpoint per heartbeat timeout.
const TURNS: u32 = 10;
/// Pause between two checks of a driver.
const PAUSE: Duration = Duration::from_micros(40);
/// Pause of a driver before its next member, at most.
const MOST_ABSENCE_NS: u64 = 200_000;
/// How long a member works before it lists its grants, under the mutation `list-after-other-grants`.
const LISTED_AFTER: Duration = Duration::from_micros(200);

/// What a compute server is to do.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// Clients that run transactions.
    pub(super) clients: u64,
    pub(super) changes_catalog: bool,
}

/// Parts of a member that may stand still while the rest goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PartKind {
    Duty(DutyKind),
    /// All of its clients.
    Clients,
}

impl PartKind {
    pub(super) const ALL: [PartKind; 4] = [
        PartKind::Duty(DutyKind::Publisher),
        PartKind::Duty(DutyKind::Collector),
        PartKind::Duty(DutyKind::Recoverer),
        PartKind::Clients,
    ];
}

/// A process with a seat.
pub(super) struct Member {
    pub(super) run: Rc<Run>,
    pub(super) core: Arc<MemberCore<Surroundings>>,
    /// The main process, which sends heartbeats.
    pub(super) process: ProcessId,
    duties: [(DutyKind, ProcessId); 3],
    clients: RefCell<Vec<ProcessId>>,
    place: (HostId, Path),
    /// Tasks of clients that have not ended.
    pub(super) busy: Cell<u64>,
}

impl Member {
    /// The claim of its seat, which names the member.
    pub(super) fn claim(&self) -> Epoch {
        self.core.seat().claim
    }

    /// Whether the member goes on and has not been evicted. A member may not know yet that it was evicted.
    pub(super) fn lives(&self) -> bool {
        let run = &self.run;
        !self.core.has_ended()
            && run.world.is_alive(self.process)
            && run.observer.lock().is_open(self.claim())
    }

    /// An endpoint of one of its processes.
    pub(super) fn endpoint(&self, part: ProcessId) -> Endpoint {
        self.run.endpoint(part, self.place)
    }

    /// Adds a process for a client.
    pub(super) fn add_client(&self) -> ProcessId {
        let client = self.run.world.add_process(self.place.0);
        self.clients.borrow_mut().push(client);
        client
    }

    /// The processes of all parts of this kind.
    pub(super) fn parts(&self, kind: PartKind) -> Vec<ProcessId> {
        match kind {
            PartKind::Clients => self.clients.borrow().clone(),
            PartKind::Duty(kind) => {
                let of_kind = self.duties.iter().filter(|(other, _)| *other == kind);
                of_kind.map(|&(_, process)| process).collect()
            }
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
    pub(super) fn lose_connections(&self) {
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

    /// Polls the endpoint of a client regularly, even when nothing arrives, as a running thread does.
    pub(super) fn keep_polling(self: &Rc<Self>, part: ProcessId, endpoint: &Endpoint) {
        let (here, endpoint) = (self.clone(), endpoint.clone());
        self.run.tasks.spawn(part, async move {
            while !here.core.has_ended() {
                endpoint.sleep(here.run.patience / TURNS).await;
            }
        });
    }
}

/// Starts the drivers. Each runs members one after the other.
pub(super) fn start_drivers(run: &Rc<Run>, random: &mut Random) {
    for _ in 0..2 + random.below(u64::from(run.layout.shape.slots) - 1) {
        let lives = 1 + random.below(MOST_LIVES);
        run.tasks.spawn(run.nowhere, drive(run.clone(), lives, run.left.stay()));
    }
}

async fn drive(run: Rc<Run>, lives: u64, _staying: Staying) {
    let mut random = run.ledger.notes.random();
    for life in 1..=lives {
        run.world.sleep(Duration::from_nanos(random.below(MOST_ABSENCE_NS))).await;
        let wanted = Wanted { clients: random.below(3), changes_catalog: random.chance(400) };
        let starting = start(&run, wanted, &mut random);
        while starting.goes_on(&run) {
            run.world.sleep(PAUSE).await;
        }
        let member = starting.member.borrow().clone();
        let Some(member) = member else { continue };
        // The last member of a driver may stay, and recover others.
        if life < lives || random.chance(500) {
            member.core.end(Ended::Closed);
        }
        while member.core.has_ended() && !starting.has_ended.get() && run.world.is_alive(starting.process) {
            run.world.sleep(PAUSE).await;
        }
    }
}

/// A process that is to become a member.
pub(super) struct Starting {
    pub(super) process: ProcessId,
    pub(super) has_ended: Rc<Cell<bool>>,
    pub(super) member: Rc<RefCell<Option<Rc<Member>>>>,
}

impl Starting {
    /// Whether the process still has something to do.
    pub(super) fn goes_on(&self, run: &Run) -> bool {
        let is_busy = self.member.borrow().as_ref().is_none_or(|member| member.busy.get() > 0);
        run.world.is_alive(self.process) && !self.has_ended.get() && is_busy
    }
}

/// Starts a process that takes a seat and does what `wanted` says.
pub(super) fn start(run: &Rc<Run>, wanted: Wanted, random: &mut Random) -> Starting {
    let place = run.place(random);
    let process = run.world.add_process(place.0);
    let starting = Starting { process, has_ended: Rc::default(), member: Rc::default() };
    let (here, seated, has_ended) = (run.clone(), starting.member.clone(), starting.has_ended.clone());
    run.tasks.spawn(process, async move {
        match take_seat(&here, process, place, wanted).await {
            Ok(member) => {
                *seated.borrow_mut() = Some(member.clone());
                live(&member, wanted).await;
            }
            Err(DatabaseError::NoSeat(_)) => {}
            Err(_) if here.faults.are_any() => here.world.note("a process cannot join", &[]),
            Err(why) => here.ledger.notes.complain(format!("a process cannot join: {why}")),
        }
        has_ended.set(true);
    });
    starting
}

async fn take_seat(
    run: &Rc<Run>,
    process: ProcessId,
    place: (HostId, Path),
    wanted: Wanted,
) -> Result<Rc<Member>, DatabaseError> {
    let surroundings = Surroundings::new(run, place.0);
    let endpoint = run.endpoint(process, place);
    let core = MemberCore::join(surroundings, run.layout.clone(), run.patience, None, endpoint).await?;
    let seat = core.seat();
    run.world.note("member {} has seat {}", &[seat.claim.0, seat.slot.index() as u64]);
    #[expect(
        clippy::arc_with_non_send_sync,
        reason = "a world has one thread, but members ship with several"
    )]
    let core = Arc::new(core);
    let member = Rc::new(Member {
        run: run.clone(),
        core,
        process,
        duties: DutyKind::ALL.map(|kind| (kind, run.world.add_process(place.0))),
        clients: RefCell::default(),
        place,
        busy: Cell::new(wanted.clients + u64::from(wanted.changes_catalog)),
    });
    run.members.borrow_mut().push(member.clone());
    Ok(member)
}

/// Runs all parts of a member, the main one in this task, until the member has ended.
async fn live(member: &Rc<Member>, wanted: Wanted) {
    // All duties must begin before any part can notice that the member has ended.
    let begun = member.duties.map(|(kind, part)| (member.core.begin_duty(kind), part));
    for (begun, part) in begun {
        let here = member.clone();
        member.run.tasks.spawn(part, async move { here.core.run_duty(begun, here.endpoint(part)).await });
    }
    (0..wanted.clients).for_each(|_| client::start(member));
    if wanted.changes_catalog {
        tables::start_changing(member);
    }
    if mutation::is(broken::LISTED_LATE) {
        let here = member.clone();
        member.run.tasks.spawn(member.process, async move {
            if let Err(error) = list_late(&here).await {
                here.core.end(Ended::Failed(error.to_string()));
            }
        });
    }
    if member.run.has_ended.get() {
        member.core.end(Ended::Closed);
    }
    member.core.run_main_part(member.endpoint(member.process)).await;
    member.run.world.note("member {} ends", &[member.claim().0]);
    if member.core.has_left() {
        member.core.fence_own_grants().await;
    }
}

/// Mutation: lists the member's grants only after it has used them for a while.
async fn list_late(member: &Member) -> Result<(), DatabaseError> {
    let (core, endpoint) = (&member.core, member.endpoint(member.process));
    let memory = core.memory(endpoint.clone()).await?;
    endpoint.sleep(LISTED_AFTER).await;
    Ok(list_grants(&memory, &core.at().members(), &core.seat(), core.at().grants).await?)
}
