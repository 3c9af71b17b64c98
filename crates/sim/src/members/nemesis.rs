//! What goes wrong with members: they die, also over looking after others, stop for longer than anybody waits, as a whole or in one part, are
//! cut off, and are closed while their clients are at work.

use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::Random;
use farpool_wire::Epoch;

use super::Run;
use super::member::{Member, PartKind};
use crate::staying::Staying;

/// Mishaps of a run, at most.
const MOST: u64 = 6;
/// Looks at whether somebody looks after a seat, and the time between two.
const LOOKS: u32 = 1_000;
const LOOK_PAUSE: Duration = Duration::from_micros(1);
/// From when somebody begins to look after a seat until it dies, stops or goes, at most.
const MOST_CARE_NS: u64 = 150_000;

/// A part of a member stands still until another one that looks on all the time has shut the member out: by then, in times of the patience
/// and so much later, it must have. The member is silent after a few patiences, taken for dead after one more, and fences are slow and lost.
const SHUT_OUT_PATIENCES: u32 = 20;
const SHUT_OUT_SLACK: Duration = Duration::from_millis(4);
/// Where no other looks on, the part goes on after so long.
const STILL_PATIENCES: u32 = 25;
const STILL_SLACK: Duration = Duration::from_millis(6);
/// Between two looks at whether it was.
const STILL_PAUSE: Duration = Duration::from_micros(20);

/// What may go wrong in a run: any of it, so that some runs look at one alone, and some at none.
#[derive(Clone, Copy)]
pub(super) struct Kinds {
    /// Members die and stop, and the network is slow at times.
    pub(super) mishaps: bool,
    /// Regions whose memory moves answer nobody meanwhile.
    pub(super) moves_take_time: bool,
    /// Members are cut off from nodes.
    pub(super) cuts: bool,
    /// Sessions give transactions up half-way.
    pub(super) drops: bool,
}

impl Kinds {
    pub(super) fn draw(random: &mut Random) -> Kinds {
        let mishaps = random.chance(950);
        let mut is_drawn = |permille| mishaps && random.chance(permille);
        Kinds { mishaps, moves_take_time: is_drawn(300), cuts: is_drawn(250), drops: is_drawn(200) }
    }

    /// Whether anything goes wrong: else every member does what it is to do, and none is taken for dead.
    pub(super) fn are_any(self) -> bool {
        self.mishaps
    }
}

#[derive(Clone, Copy)]
enum Mishap {
    Death,
    Stop(Duration),
    /// Of all members together, as where one machine has them.
    StopOfAll(Duration),
    /// Of one part of a member, while the rest goes on.
    StopOfPart(PartKind),
    Cut(usize, Duration),
    /// The member is closed, whatever it has under way.
    Close,
    /// A member is closed while another is about to shut it out.
    CloseOfSuspect,
    /// The member's grant of a region ends, by its place behind the root.
    Loss(usize),
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
            12..=14 => Mishap::StopOfPart(PartKind::ALL[random.index(PartKind::ALL.len())]),
            _ => Mishap::Loss(1 + random.index(run.plan.regions.len() - 1)),
        };
        let after = Duration::from_nanos(20_000 + random.below(1_500_000));
        let is_of_carer = matches!(mishap, Mishap::Loss(_)) || random.chance(400);
        let meets_carer = is_of_carer.then(|| Duration::from_nanos(random.below(MOST_CARE_NS)));
        let random = run.ledger.random();
        run.tasks
            .spawn(run.nowhere, happen(run.clone(), mishap, after, meets_carer, random, run.left.stay()));
    }
}

/// Something goes wrong with a member; or, after a while, with one that looks after others.
async fn happen(
    run: Rc<Run>,
    mishap: Mishap,
    after: Duration,
    meets_carer: Option<Duration>,
    mut random: Random,
    _staying: Staying,
) {
    run.world.sleep(after).await;
    let mut chosen = None;
    if let Mishap::CloseOfSuspect = mishap {
        chosen = under_care(&run, |_, claim| claim).await;
    } else if let Some(later) = meets_carer {
        chosen = under_care(&run, |carer, _| carer).await;
        run.world.sleep(later).await;
    }
    let members: Vec<Rc<Member>> =
        run.members.borrow().iter().filter(|member| member.lives()).cloned().collect();
    // A database lasts as long as one member lives.
    if members.len() < 2 {
        return;
    }
    let member = chosen.unwrap_or_else(|| members[random.index(members.len())].clone());
    match mishap {
        Mishap::Death => member.kill(),
        Mishap::Stop(lasting) => {
            member.pause(lasting);
            run.world.sleep(lasting).await;
        }
        Mishap::StopOfAll(lasting) => {
            members.iter().for_each(|member| member.pause(lasting));
            run.world.sleep(lasting).await;
        }
        Mishap::StopOfPart(kind) => part_stops(&run, &member, kind, &mut random).await,
        Mishap::Close | Mishap::CloseOfSuspect => member.is_over.set(true),
        Mishap::Loss(region) => {
            let (place, grant) = (run.plan.regions[region], member.grants[region]);
            let regions = &run.nodes[place.node.0 as usize - 1].memory.regions;
            regions.fence_grant(place.index, grant).expect("a few pages of memory");
        }
        Mishap::Cut(node, lasting) => {
            let (one, other) = (run.world.host_of(member.process), run.nodes[node].host);
            if one != other {
                run.world.cut(one, other);
                run.cuts.set(run.cuts.get() + 1);
                run.world.sleep(lasting).await;
                run.world.heal(one, other);
                run.cuts.set(run.cuts.get() - 1);
            }
        }
    }
}

/// A part of a member stands still until the others have shut that member out, which they must, though the rest of it goes on, and a little
/// longer. Its clients stand still in the middle of a commit, if they come to one.
async fn part_stops(run: &Rc<Run>, member: &Rc<Member>, kind: PartKind, random: &mut Random) {
    for _ in 0..LOOKS {
        if kind != PartKind::Clients || member.slot.is_held() {
            break;
        }
        run.world.sleep(LOOK_PAUSE).await;
    }
    if kind == PartKind::Clients && !member.slot.is_held() {
        return; // clients that hold nothing may stand still for as long as they like
    }
    let parts = member.parts(kind);
    let stand_still = || parts.iter().for_each(|&part| run.world.pause(part, 2 * STILL_PAUSE));
    let give_up_at = run.world.now_ns() + (run.patience * STILL_PATIENCES + STILL_SLACK).as_nanos() as u64;
    let mut witness: Option<(Epoch, u64)> = None;
    while has_seat(run, member) && run.world.now_ns() < give_up_at {
        if kind == PartKind::Clients && !member.slot.is_held() {
            return; // it was a change of the catalog that held something, and that has gone on
        }
        stand_still();
        witness = looking_on(run, member, witness);
        if let Some((claim, since_ns)) = witness
            && run.world.now_ns() - since_ns
                > (run.patience * SHUT_OUT_PATIENCES + SHUT_OUT_SLACK).as_nanos() as u64
        {
            let still = member.seat.claim;
            run.ledger.complain(format!("member {claim} lets {still} be, a part of which stands still"));
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

/// Whether a member has its seat, and was not shut out.
fn has_seat(run: &Run, member: &Member) -> bool {
    let seats = run.observer.lock().look().seats(&run.plan);
    let is_seated = seats.iter().any(|seat| seat.claim == Some(member.seat.claim));
    is_seated && run.observer.lock().is_open(member.seat.claim)
}

/// Another member that has looked on since a time, with nothing that keeps it from doing so: the one of before, or one from now on.
fn looking_on(run: &Run, still: &Member, before: Option<(Epoch, u64)>) -> Option<(Epoch, u64)> {
    let members = run.members.borrow();
    let looks_on = |other: &Member| {
        run.cuts.get() == 0 && other.seat.claim != still.seat.claim && other.lives() && !other.stands_still()
    };
    let mut able = members.iter().filter(|other| looks_on(other)).map(|other| other.seat.claim);
    match before {
        Some((claim, since_ns)) if able.clone().any(|other| other == claim) => Some((claim, since_ns)),
        _ => able.next().map(|claim| (claim, run.world.now_ns())),
    }
}

/// Waits until a member looks after another's seat, and returns one of the two, chosen by their claims, if it lives.
async fn under_care(run: &Run, choose: impl Fn(Epoch, Epoch) -> Epoch) -> Option<Rc<Member>> {
    for _ in 0..LOOKS {
        let seats = run.observer.lock().look().seats(&run.plan);
        for (claim, carer) in seats.iter().filter_map(|seat| seat.claim.zip(seat.carer)) {
            let chosen = choose(carer, claim);
            let found = run.members.borrow().iter().find(|member| member.seat.claim == chosen).cloned();
            if let Some(found) = found.filter(|member| member.lives()) {
                return Some(found);
            }
        }
        run.world.sleep(LOOK_PAUSE).await;
    }
    None
}
