//! Mishaps of members. They die, also while they recover others. They stop for longer than any heartbeat
//! timeout, as a whole or in one part. They are cut off, and they are closed while their clients are at work.

use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::Random;
use farpool_namdb::Ended;
use farpool_pool::ClientGrant;
use farpool_wire::{Epoch, Slot};

use super::Run;
use super::member::{Member, PartKind};
use crate::staying::Staying;

/// Mishaps of a run, at most.
const MOST: u64 = 6;
/// The most checks whether a recovery has begun, and the pause between two.
const LOOKS: u32 = 4_000;
const LOOK_PAUSE: Duration = Duration::from_micros(1);
/// The longest time from the beginning of a recovery until a mishap meets the recoverer.
const MOST_CARE_NS: u64 = 150_000;
/// The longest time from a fence in the region with a log until a recoverer of that log loses the region.
const MOST_HASTE_NS: u64 = 20_000;

/// The longest time from a member's write to a region that the database got later until the member dies.
const MOST_AFTER_WRITE_NS: u64 = 3_000;
/// The most looks at the regions that the database got later, and the pause between two.
const LOOKS_AT_LATER: u32 = 8_000;

/// The share of runs, in thousandths, in which members lose connections. In as many runs, drawn
/// independently, a grant of a recoverer is fenced.
const DISCONNECTS_PERMILLE: u32 = 400;
/// How often members of such a run lose connections, at most.
const MOST_DISCONNECTS: u64 = 20;

/// A part of a member stands still until another member has evicted the member. A member that watches all the
/// time must do so within this many heartbeat timeouts and this slack: the member with the stopped part stops
/// sending heartbeats after a few timeouts, and is declared dead one timeout later; fences are slow, and may
/// be lost.
const EVICTED_PATIENCES: u32 = 20;
const EVICTED_SLACK: Duration = Duration::from_millis(4);
/// If no other member watches all the time, the part continues after this time.
const STILL_PATIENCES: u32 = 25;
const STILL_SLACK: Duration = Duration::from_millis(6);
/// The pause between two checks whether the member was evicted.
const STILL_PAUSE: Duration = Duration::from_micros(20);

/// What may go wrong in a run: any combination, so that some runs test one fault alone, and some runs none.
#[derive(Clone, Copy)]
pub(super) struct FaultKinds {
    /// Members die and stop, and the network is slow at times.
    pub(super) mishaps: bool,
    /// Accesses are refused while a region's memory moves.
    pub(super) moves_take_time: bool,
    /// Members are cut off from nodes.
    pub(super) cuts: bool,
    /// Sessions abandon transactions half-way.
    pub(super) drops: bool,
}

impl FaultKinds {
    pub(super) fn draw(random: &mut Random) -> FaultKinds {
        let mishaps = random.chance(950);
        let mut is_drawn = |permille| mishaps && random.chance(permille);
        FaultKinds { mishaps, moves_take_time: is_drawn(300), cuts: is_drawn(250), drops: is_drawn(200) }
    }

    /// Whether any faults occur. Without faults every member does all its work, and none is declared dead.
    pub(super) fn are_any(self) -> bool {
        self.mishaps
    }
}

#[derive(Clone, Copy)]
enum Mishap {
    Death,
    Stop(Duration),
    /// All members stop together, as if one machine ran them all.
    StopOfAll(Duration),
    /// One part of a member stops while the rest goes on.
    StopOfPart(PartKind),
    Cut(usize, Duration),
    /// The member is closed, whatever operations it has in flight.
    Close,
    /// A member is closed while another member is about to evict it.
    CloseOfSuspect,
    /// The member's grant of a region is fenced. The number is the region's place in the layout.
    FencedGrant(usize),
    /// The member learns that it has lost the lease of a region.
    LostLease(usize),
}

/// Draws the mishaps of this run and starts them.
pub(super) fn start(run: &Rc<Run>, random: &mut Random) {
    if !run.faults.mishaps {
        return;
    }
    for _ in 0..random.below(MOST + 1) {
        let patience_ns = run.patience.as_nanos() as u64;
        let lasting = Duration::from_nanos(10_000 + random.below(3 * patience_ns));
        let mishap = match random.below(17) {
            0..=3 if run.faults.cuts => Mishap::Cut(random.index(run.nodes.len()), lasting),
            0..=3 => Mishap::Death,
            4..=6 => Mishap::Stop(lasting),
            7 => Mishap::StopOfAll(lasting),
            8 => Mishap::Death,
            9 => Mishap::Close,
            10..=11 => Mishap::CloseOfSuspect,
            12..=13 => Mishap::StopOfPart(PartKind::ALL[random.index(PartKind::ALL.len())]),
            14 => Mishap::LostLease(random.index(run.layout.regions.len())),
            _ => Mishap::FencedGrant(1 + random.index(run.layout.regions.len() - 1)),
        };
        let after = draw_time(random);
        let is_of_recoverer = matches!(mishap, Mishap::FencedGrant(_)) || random.chance(400);
        let recoverer_delay = is_of_recoverer.then(|| Duration::from_nanos(random.below(MOST_CARE_NS)));
        let random = run.ledger.notes.random();
        run.tasks
            .spawn(run.nowhere, happen(run.clone(), mishap, after, recoverer_delay, random, run.left.stay()));
    }
    if run.is_tight {
        let random = run.ledger.notes.random();
        run.tasks.spawn(run.nowhere, die_at_later_write(run.clone(), random, run.left.stay()));
        let random = run.ledger.notes.random();
        run.tasks.spawn(run.nowhere, stop_while_leaving(run.clone(), random, run.left.stay()));
    }
}

/// In a run with little memory, a member dies soon after it has written to a region that the database got
/// later. It may have locked records there.
async fn die_at_later_write(run: Rc<Run>, mut random: Random, _staying: Staying) {
    run.world.sleep(draw_time(&mut random)).await;
    for _ in 0..LOOKS_AT_LATER {
        if let Some(member) = writes_later(&run) {
            run.world.sleep(Duration::from_nanos(random.below(MOST_AFTER_WRITE_NS))).await;
            if living(&run).len() > 1 {
                member.kill();
            }
            return;
        }
        run.world.sleep(LOOK_PAUSE).await;
    }
}

/// The live member that has written to a region that the database got later, while commits of it are in
/// flight.
fn writes_later(run: &Run) -> Option<Rc<Member>> {
    let writer = run.observer.lock().later_writer.take()?;
    let member = living(run).into_iter().find(|member| member.claim() == writer)?;
    run.observer.lock().has_commits(member.core.seat().slot).then_some(member)
}

/// In a run with little memory, a member stops when it is to leave a region that the database gives back.
async fn stop_while_leaving(run: Rc<Run>, mut random: Random, _staying: Staying) {
    run.world.sleep(draw_time(&mut random)).await;
    for _ in 0..LOOKS_AT_LATER {
        let has_later = !run.lent.borrow().is_empty();
        let is_leaving = has_later && run.observer.lock().look().is_region_leaving();
        let members = living(&run);
        if is_leaving && !members.is_empty() {
            let lasting = Duration::from_nanos(random.below(2 * run.patience.as_nanos() as u64));
            return members[random.index(members.len())].pause(lasting);
        }
        run.world.sleep(LOOK_PAUSE).await;
    }
}

/// Draws when something happens: often early, while members join and create tables, otherwise at any time of
/// their work.
fn draw_time(random: &mut Random) -> Duration {
    let most_ns = if random.chance(500) { 2_000_000 } else { 12_000_000 };
    Duration::from_nanos(20_000 + random.below(most_ns))
}

/// In some runs members lose connections now and then, reconnect, and go on. A recoverer reconnects as well,
/// so only a fenced grant keeps it from reading a copy of a log. This function therefore also fences grants
/// of recoverers, in more runs than [`start`] does, and often just before the recoverer reads that copy.
pub(super) fn start_disconnects(run: &Rc<Run>, random: &mut Random) {
    if !run.faults.mishaps {
        return;
    }
    if random.chance(DISCONNECTS_PERMILLE) {
        let (after, drawn, staying) = (draw_time(random), run.ledger.notes.random(), run.left.stay());
        run.tasks.spawn(run.nowhere, lose_log_copy(run.clone(), after, drawn, staying));
    }
    if random.chance(DISCONNECTS_PERMILLE) {
        let fenced = Mishap::FencedGrant(1 + random.index(run.layout.regions.len() - 1));
        let after = draw_time(random);
        let recoverer_delay = Some(Duration::from_nanos(random.below(MOST_CARE_NS)));
        let (drawn, staying) = (run.ledger.notes.random(), run.left.stay());
        run.tasks.spawn(run.nowhere, happen(run.clone(), fenced, after, recoverer_delay, drawn, staying));
    }
    if !random.chance(DISCONNECTS_PERMILLE) {
        return;
    }
    for _ in 0..1 + random.below(MOST_DISCONNECTS) {
        let after = draw_time(random);
        run.tasks
            .spawn(run.nowhere, disconnect(run.clone(), after, run.ledger.notes.random(), run.left.stay()));
    }
}

/// A member loses its connections, at any time or while it recovers another member.
async fn disconnect(run: Rc<Run>, after: Duration, mut random: Random, _staying: Staying) {
    run.world.sleep(after).await;
    let recoverer =
        if random.chance(300) { wait_for_recovery(&run, |recoverer, _| recoverer).await } else { None };
    if recoverer.is_some() {
        run.world.sleep(Duration::from_nanos(random.below(MOST_CARE_NS))).await;
    }
    let members = living(&run);
    if let Some(member) = recoverer.or_else(|| members.get(random.index(members.len().max(1))).cloned()) {
        member.lose_connections();
    }
}

/// Makes a mishap happen to a member; if `recoverer_delay` is set, to a recoverer, this long after it has
/// begun.
async fn happen(
    run: Rc<Run>,
    mishap: Mishap,
    after: Duration,
    recoverer_delay: Option<Duration>,
    mut random: Random,
    _staying: Staying,
) {
    run.world.sleep(after).await;
    if let Some(member) = choose_member(&run, mishap, recoverer_delay, &mut random).await {
        carry_out(&run, mishap, &member, &mut random).await;
    }
}

/// The live members.
fn living(run: &Run) -> Vec<Rc<Member>> {
    run.members.borrow().iter().filter(|member| member.lives()).cloned().collect()
}

/// Chooses the member that a mishap meets. Returns `None` if only one member is left, because a database
/// lasts only as long as one member lives.
async fn choose_member(
    run: &Run,
    mishap: Mishap,
    recoverer_delay: Option<Duration>,
    random: &mut Random,
) -> Option<Rc<Member>> {
    let mut chosen = None;
    if let Mishap::CloseOfSuspect = mishap {
        chosen = wait_for_recovery(run, |_, claim| claim).await;
    } else if let Some(later) = recoverer_delay {
        chosen = wait_for_recovery(run, |recoverer, _| recoverer).await;
        run.world.sleep(later).await;
    }
    let members = living(run);
    if members.len() < 2 {
        return None;
    }
    Some(chosen.unwrap_or_else(|| members[random.index(members.len())].clone()))
}

async fn carry_out(run: &Rc<Run>, mishap: Mishap, member: &Rc<Member>, random: &mut Random) {
    match mishap {
        Mishap::Death => member.kill(),
        Mishap::Stop(lasting) => {
            member.pause(lasting);
            run.world.sleep(lasting).await;
        }
        Mishap::StopOfAll(lasting) => {
            living(run).iter().for_each(|member| member.pause(lasting));
            run.world.sleep(lasting).await;
        }
        Mishap::StopOfPart(kind) => part_stops(run, member, kind, random).await,
        Mishap::Close | Mishap::CloseOfSuspect => member.core.end(Ended::Closed),
        Mishap::FencedGrant(region) => fence_grant(run, member, region),
        Mishap::LostLease(region) => member.core.environment().lose_lease(run.layout.regions[region]),
        Mishap::Cut(node, lasting) => {
            let (one, other) = (run.world.host_of(member.process), run.nodes[node].host);
            if one != other {
                run.world.cut(one, other);
                *run.cuts.borrow_mut().entry(one).or_default() += 1;
                run.world.sleep(lasting).await;
                run.world.heal(one, other);
                *run.cuts.borrow_mut().entry(one).or_default() -= 1;
            }
        }
    }
}

/// Fences a member's grant of a region, known by its place in the layout.
fn fence_grant(run: &Run, member: &Member, region: usize) {
    let ClientGrant { region, epoch, .. } = member.core.grants()[region];
    let regions = &run.node_of(region).memory.regions;
    regions.fence_grant(region.index, epoch).expect("a few pages of memory");
}

/// A recoverer loses the region with a copy of the log that it is about to read.
async fn lose_log_copy(run: Rc<Run>, after: Duration, mut random: Random, _staying: Staying) {
    run.world.sleep(after).await;
    let copy = random.index(2);
    for _ in 0..LOOKS {
        if let Some((recoverer, region)) = about_to_read_log(&run, copy) {
            run.world.sleep(Duration::from_nanos(random.below(MOST_HASTE_NS))).await;
            if living(&run).len() >= 2 {
                fence_grant(&run, &recoverer, region);
            }
            return;
        }
        run.world.sleep(LOOK_PAUSE).await;
    }
}

/// A recoverer, and the region with a copy of the log that it is about to read: it has fenced its suspect's
/// grant there. The root does not count.
fn about_to_read_log(run: &Run, copy: usize) -> Option<(Rc<Member>, usize)> {
    let seats = run.observer.lock().look().seats(&run.layout);
    let members = run.members.borrow();
    let with_claim = |claim| members.iter().find(|member| member.claim() == claim);
    (0..).zip(seats).find_map(|(slot, seat)| {
        let (suspect, recoverer) = (with_claim(seat.claim?)?, with_claim(seat.recoverer?)?);
        let log = suspect.core.at().log(Slot::new(slot)?);
        let region = run.layout.regions.iter().position(|region| *region == log.copies[copy].region)?;
        let grant = suspect.core.grants()[region].epoch;
        let is_fenced = || !run.observer.lock().has_open(log.copies[copy].region, grant);
        (region > 0 && recoverer.lives() && is_fenced()).then(|| (recoverer.clone(), region))
    })
}

/// Stops a part of a member until the others have evicted the member, and for a little longer. They must
/// evict it although the rest of it goes on. Clients are stopped only while they hold something, that is, in
/// the middle of a commit or of a change of the catalog.
async fn part_stops(run: &Rc<Run>, member: &Rc<Member>, kind: PartKind, random: &mut Random) {
    for _ in 0..LOOKS {
        if kind != PartKind::Clients || member.core.slot().is_held() {
            break;
        }
        run.world.sleep(LOOK_PAUSE).await;
    }
    if kind == PartKind::Clients && !member.core.slot().is_held() {
        return; // clients that hold nothing may stop for as long as they like
    }
    let parts = member.parts(kind);
    let stand_still = || parts.iter().for_each(|&part| run.world.pause(part, 2 * STILL_PAUSE));
    let give_up_at = run.world.now_ns() + (run.patience * STILL_PATIENCES + STILL_SLACK).as_nanos() as u64;
    let mut witness: Option<(Epoch, u64)> = None;
    while has_seat(run, member) && run.world.now_ns() < give_up_at {
        if kind == PartKind::Clients && !member.core.slot().is_held() {
            return; // a change of the catalog held something, and has finished
        }
        stand_still();
        witness = looking_on(run, member, witness);
        if let Some((claim, since_ns)) = witness
            && run.world.now_ns() - since_ns
                > (run.patience * EVICTED_PATIENCES + EVICTED_SLACK).as_nanos() as u64
        {
            let still = member.claim();
            run.ledger
                .notes
                .complain(format!("member {claim} does not evict {still}, a part of which stands still"));
            return;
        }
        run.world.sleep(STILL_PAUSE).await;
    }
    let goes_on_at = run.world.now_ns() + random.below(run.patience.as_nanos() as u64);
    while run.world.now_ns() < goes_on_at {
        stand_still();
        run.world.sleep(STILL_PAUSE).await;
    }
}

/// Whether a member still has its seat and has not been evicted.
fn has_seat(run: &Run, member: &Member) -> bool {
    let seats = run.observer.lock().look().seats(&run.layout);
    let is_seated = seats.iter().any(|seat| seat.claim == Some(member.claim()));
    is_seated && run.observer.lock().is_open(member.claim())
}

/// A member that has watched without interruption, and since when: the one from `before` if it still watches,
/// otherwise one that starts now.
fn looking_on(run: &Run, still: &Member, before: Option<(Epoch, u64)>) -> Option<(Epoch, u64)> {
    let members = run.members.borrow();
    let looks_on = |other: &Member| {
        !run.are_any_cut_off() && other.claim() != still.claim() && other.lives() && !other.stands_still()
    };
    let mut able = members.iter().filter(|other| looks_on(other)).map(|other| other.claim());
    match before {
        Some((claim, since_ns)) if able.clone().any(|other| other == claim) => Some((claim, since_ns)),
        _ => able.next().map(|claim| (claim, run.world.now_ns())),
    }
}

/// Waits until a member recovers another member's seat. `choose` picks one of the two by their claims; the
/// first argument is the recoverer's. Returns the first member picked that lives, or `None` if there is none
/// after [`LOOKS`] looks.
async fn wait_for_recovery(run: &Run, choose: impl Fn(Epoch, Epoch) -> Epoch) -> Option<Rc<Member>> {
    for _ in 0..LOOKS {
        let seats = run.observer.lock().look().seats(&run.layout);
        for (claim, recoverer) in seats.iter().filter_map(|seat| seat.claim.zip(seat.recoverer)) {
            let chosen = choose(recoverer, claim);
            let found = run.members.borrow().iter().find(|member| member.claim() == chosen).cloned();
            if let Some(found) = found.filter(|member| member.lives()) {
                return Some(found);
            }
        }
        run.world.sleep(LOOK_PAUSE).await;
    }
    None
}
