//! What goes wrong with members: they die, also over looking after others, stop for longer than anybody waits, are cut off, and are
//! closed while their clients are at work.

use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::Random;
use farpool_wire::Epoch;

use super::Run;
use super::member::Member;
use crate::staying::Staying;

/// Mishaps of a run, at most.
const MOST: u64 = 6;
/// Looks at whether somebody looks after a seat, and the time between two.
const LOOKS: u32 = 1_000;
const LOOK_PAUSE: Duration = Duration::from_micros(1);
/// From when somebody begins to look after a seat until it dies, stops or goes, at most.
const MOST_CARE_NS: u64 = 150_000;

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
        let mishap = match random.below(14) {
            0..=3 if run.faults.cuts => Mishap::Cut(random.index(run.nodes.len()), lasting),
            0..=3 => Mishap::Death,
            4..=6 => Mishap::Stop(lasting),
            7 => Mishap::StopOfAll(lasting),
            8 => Mishap::Death,
            9 => Mishap::Close,
            10..=11 => Mishap::CloseOfSuspect,
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
        Mishap::Death => run.tasks.kill(member.process),
        Mishap::Stop(lasting) => {
            run.world.pause(member.process, lasting);
            run.world.sleep(lasting).await;
        }
        Mishap::StopOfAll(lasting) => {
            members.iter().for_each(|member| run.world.pause(member.process, lasting));
            run.world.sleep(lasting).await;
        }
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
                run.world.sleep(lasting).await;
                run.world.heal(one, other);
            }
        }
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
