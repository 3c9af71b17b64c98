//! Leads a run through its phases. At the end, when nothing goes wrong any more, it checks that the broker's
//! beliefs are true, that leases can be taken back, and that everything that was lent is returned.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use farpool_lease::{LeaseClass, Millis};
use farpool_node::{CALM, STEP_PAUSE};
use farpool_wire::OwnerId;
use farpool_wire::control::{RegionState, RevokeRequest, StatusRequest};

use super::{BUSY_TTLS, Phase, REGIONS, Run};
use crate::plane::node::{self, Node};
use crate::plane::post::{Delivery, Post, Question};

/// The number of checks within which a broker must learn everything once faults have ended. Until then, its
/// nodes may wait for an answer that does not come, pause, and report; and they hold leases that no client
/// knows of until these expire.
const QUIET_LOOKS: u32 = 20;
/// The interval between two checks: longer than between two heartbeats, by any clock.
const LOOK_EVERY: Duration = Duration::from_millis(1_300);
const LOOKS_THAT_AGREE: u32 = 3;
/// How long a stall keeps a node from taking memory again, at the most: two windows of five seconds.
const STALL_COUNTS_FOR: Millis = Millis(10_000);
/// The number of checks within which all regions must be returned once all clients have left: the leases of
/// dead clients have to expire, and a node takes memory again only some time after its machine needed it.
const RETURN_LOOKS: u32 = 20
    + (STALL_COUNTS_FOR.0 + CALM.0 + REGIONS.end * STEP_PAUSE.0).div_ceil(LOOK_EVERY.as_millis() as u64)
        as u32;
/// How long an operator waits for an answer when it has leases taken back.
const TAKING_BACK_PATIENCE: Duration = Duration::from_secs(8);
/// Within this time an owner whose request to be told of revocations was lost sends another, by any clock.
const WAITS_AGAIN_WITHIN: Duration = Duration::from_secs(10);
/// Within this time an owner must have heard of a revocation: less than most pauses between two renewals.
const ANNOUNCED_WITHIN: Duration = Duration::from_millis(600);

/// Leads the run through its phases, and checks what can be checked only when nothing goes wrong any more.
pub(super) async fn conduct(run: Rc<Run>) {
    run.world.sleep(Duration::from_millis(BUSY_TTLS * run.ttl.0)).await;
    while run.mishaps.get() > 0 {
        run.world.sleep(LOOK_EVERY).await;
    }
    run.phase.set(Phase::Quiet);
    run.delivery.set(Delivery::default());
    run.world.note("nothing goes wrong any more", &[]);
    while run.late_letters.get() > 0 {
        run.world.sleep(LOOK_EVERY).await;
    }
    let operator = Post::open(&run.plane, run.world.add_process(run.broker.host), |_| {
        Box::pin(std::future::ready(None))
    });
    judge_beliefs(&run).await;
    judge_taking_back(&run, &operator).await;
    run.phase.set(Phase::Leaving);
    run.world.note("everybody leaves", &[]);
    judge_returns(&run).await;
    run.clients.borrow().iter().flatten().for_each(|client| run.tasks.kill(client.process));
    run.nodes.iter().for_each(|node| run.tasks.kill(node.process.get()));
    run.tasks.kill(run.broker.process.get());
    run.tasks.kill(operator.me);
}

/// Returns for each owner, from the nodes' tables, the number of its leases, and how many of these are
/// revocable and not yet revoked.
fn true_holdings(run: &Run) -> BTreeMap<OwnerId, (u64, u64)> {
    let mut holdings: BTreeMap<OwnerId, (u64, u64)> = BTreeMap::new();
    for node in &run.nodes {
        for state in node.table().iter().filter(|state| state.held) {
            let of_owner = holdings.entry(OwnerId(state.owner)).or_default();
            of_owner.0 += 1;
            let revocable = LeaseClass::from_wire(state.class) == Some(LeaseClass::Revocable);
            of_owner.1 += u64::from(revocable && !state.revoked);
        }
    }
    holdings
}

/// Compares the broker's view of every node and owner with the nodes' tables. The error says what differs.
fn compare_beliefs(run: &Run) -> Result<(), String> {
    let now = Millis(run.world.local_ns(run.broker.host) / 1_000_000);
    let status = run.broker.pool.borrow().borrow().status(now, &StatusRequest::default());
    for node in &run.nodes {
        let held = node.shell().map_or(0, |shell| shell.core.lock().counts().held);
        let known =
            status.nodes.iter().find(|known| known.address.as_ref().is_some_and(|at| at.node == node.id.0));
        let believed = known.filter(|known| known.alive).map(|known| known.regions_lent);
        if believed != Some(held) {
            return Err(format!(
                "node {} holds {held} leases, but the broker believes {believed:?}",
                node.id
            ));
        }
    }
    let believed = status.owners.iter().map(|owner| (OwnerId(owner.owner), u64::from(owner.regions)));
    let (believed, holdings): (BTreeMap<OwnerId, u64>, _) = (believed.collect(), true_holdings(run));
    let held = holdings.into_iter().map(|(owner, (held, _))| (owner, held)).collect();
    if believed == held {
        Ok(())
    } else {
        Err(format!("owners hold {held:?}, but the broker believes {believed:?}"))
    }
}

/// Checks that the broker's view becomes right, and that each client trusts only leases that are in force.
/// The view may be right by chance while messages are under way. So the check ends early only once the view
/// was right several times in a row, in which time every node has sent something; else the last look decides.
async fn judge_beliefs(run: &Rc<Run>) {
    let mut agreed = 0;
    for _ in 0..QUIET_LOOKS {
        run.world.sleep(LOOK_EVERY).await;
        agreed = if compare_beliefs(run).is_ok() { agreed + 1 } else { 0 };
        if agreed == LOOKS_THAT_AGREE {
            break;
        }
    }
    if let (Err(difference), true) = (compare_beliefs(run), agreed < LOOKS_THAT_AGREE) {
        run.complain(difference);
    }
    for client in run.clients.borrow().iter().flatten() {
        for (region, epoch, key) in client.trusted() {
            if !node::agrees(&run.node(region.node), region.index, epoch, &key) {
                let process = client.process.number();
                run.complain(format!(
                    "process {process} trusts epoch {epoch} of {region}, but its node does not"
                ));
            }
        }
    }
}

/// Checks that an owner's leases are taken back when an operator asks for them, on one node at a time, and
/// that the owner soon hears of it.
async fn judge_taking_back(run: &Rc<Run>, operator: &Post) {
    let revocable = |owner: OwnerId| true_holdings(run).get(&owner).map_or(0, |(_, revocable)| *revocable);
    let owner =
        run.clients.borrow().iter().flatten().map(|client| client.owner).find(|owner| revocable(*owner) > 0);
    let Some(owner) = owner else { return };
    // Requests to be told that were lost earlier are repeated.
    run.world.sleep(WAITS_AGAIN_WITHIN).await;
    run.nodes.iter().for_each(|node| node.forget_asked_back());
    let is_taken_back = |state: &RegionState| state.held && state.revoked && state.owner == owner.0;
    let had_begun = run.nodes.iter().any(|node| node.table().iter().any(is_taken_back));
    let request = RevokeRequest { owner: owner.0, count: revocable(owner) as u32, grace_ms: 0 };
    let answer =
        operator.ask(run.broker.process.get(), Question::RevokeFrom(request), TAKING_BACK_PATIENCE).await;
    let taking_back: Vec<_> = run.nodes.iter().filter(|node| node.is_taking_back()).collect();
    if taking_back.len() > 1 {
        run.complain(format!("{} nodes take leases of owner {owner} back at a time", taking_back.len()));
    }
    let is_left = |state: &RegionState| {
        let revocable = LeaseClass::from_wire(state.class) == Some(LeaseClass::Revocable);
        state.held && !state.revoked && revocable && state.owner == owner.0
    };
    let is_short = revocable(owner) > 0 && taking_back.iter().all(|node| node.table().iter().any(is_left));
    if is_short && !had_begun {
        run.complain(format!("no node has taken back all leases of owner {owner} that it could: {answer:?}"));
    }
    run.world.sleep(ANNOUNCED_WITHIN).await;
    for client in run.clients.borrow().iter().flatten().filter(|client| client.owner == owner) {
        for (region, epoch) in client.staying() {
            let is_revoked = |state: &RegionState| state.region == region.index && state.revoked;
            let table = run.node(region.node).table();
            if table.iter().any(|state| is_revoked(state) && state.epoch == epoch.0) {
                run.complain(format!("owner {owner} has not heard that {region} is taken back"));
            }
        }
    }
}

/// Checks that every region that was lent is returned, by its client or at the end of its lease, and that
/// each node has memory for as many regions as it is to have, and leaves enough to its machine but not more.
async fn judge_returns(run: &Rc<Run>) {
    for _ in 0..RETURN_LOOKS {
        run.world.sleep(LOOK_EVERY).await;
        let left = run.clients.borrow().iter().flatten().all(|client| client.has_left());
        let free = |node: &Rc<Node>| {
            node.shell().is_some_and(|shell| {
                let core = shell.core.lock();
                let counts = core.counts();
                let has_limit = core.excess() == 0 && core.next_to_restore().is_none();
                counts.held == 0 && counts.returning == 0 && has_limit && node.suits_its_machine(&core)
            })
        };
        if left && run.nodes.iter().all(free) {
            return;
        }
    }
    for node in &run.nodes {
        let counts = node.shell().map(|shell| shell.core.lock().counts());
        run.complain(format!("regions of node {} are not returned: {counts:?}", node.id));
    }
}
