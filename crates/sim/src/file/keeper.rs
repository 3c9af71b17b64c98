//! Does for a process that holds leases what production's keeper, watch and mover do, with letters and in
//! virtual time.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_lease::{LeaseClass, Millis};
use farpool_pool::{GrowthOutcome, LeasedRegion, Renewal, SessionCore, watch_nodes};
use farpool_wire::NodeId;
use farpool_wire::control::AwaitRevocationRequest;

use super::{Phase, Run};
use crate::plane::node::Node;
use crate::plane::post::{Answer, Post, Question};

/// As in production's keeper and mover.
const TICK: Duration = Duration::from_millis(100);
const ACQUIRE_PATIENCE: Duration = Duration::from_secs(8);
const REQUEST_PATIENCE: Duration = Duration::from_secs(3);
const REVOCATION_PATIENCE: Duration = Duration::from_secs(7);
const REVOCATION_PAUSE: Duration = Duration::from_secs(1);
const LINGER: Duration = Duration::from_secs(5);
const LOOK_TO_MOVE_EVERY: Duration = Duration::from_millis(250);
/// Leases in one renewal: few, so that there are several renewals.
pub(super) const LEASES_PER_REQUEST: usize = 3;

/// Starts the tasks that maintain the leases of the process `home`.
pub(super) fn start(run: &Rc<Run>) {
    start_keeper(run, post_of(run));
    start_mover(run);
}

/// The post of the process `home`, through which it asks others.
pub(super) fn post_of(run: &Run) -> Rc<Post> {
    Post::open(&run.plane, run.home(), |_| Box::pin(std::future::ready(None)))
}

/// Starts the tasks that maintain leases. They move no data of files.
pub(super) fn start_keeper(run: &Rc<Run>, post: Rc<Post>) {
    let keeper = Rc::new(Keeper { run: run.clone(), post });
    run.tasks.spawn(run.home(), keeper.clone().maintain_leases());
    for node in &run.nodes {
        run.tasks.spawn(run.home(), keeper.clone().await_revocations(node.clone()));
    }
    run.tasks.spawn(run.home(), keeper.grow_when_wanted());
    let (watching, endpoint) = (run.clone(), run.endpoint(run.home()));
    run.tasks.spawn(run.home(), async move { watch_nodes(&watching.stock(), &endpoint).await });
}

/// Starts the task that moves data off nodes. It needs settled files.
pub(super) fn start_mover(run: &Rc<Run>) {
    let (moving, core) = (run.clone(), run.session(run.home()));
    run.tasks.spawn(run.home(), async move { move_out(&moving, &core).await });
}

async fn move_out(run: &Run, core: &SessionCore) {
    while run.phase.get() != Phase::Leaving {
        run.world.sleep_by(run.host, LOOK_TO_MOVE_EVERY).await;
        run.store().maintain_guests();
        // The next round tries again what could not be moved or rebuilt.
        let _ = run.store().maintain(core, || run.phase.get() == Phase::Leaving).await;
        core.let_go().await;
    }
}

struct Keeper {
    run: Rc<Run>,
    post: Rc<Post>,
}

impl Keeper {
    async fn maintain_leases(self: Rc<Self>) {
        let run = &self.run;
        while run.phase.get() != Phase::Leaving {
            let now = run.stock().now();
            let lapsed = run.stock().with_holder(|holder| holder.lapsed(now));
            lapsed.into_iter().for_each(|(region, epoch)| run.stock().lease_lost(region, epoch));
            for renewal in run.stock().with_holder(|holder| holder.renewals(now, LEASES_PER_REQUEST)) {
                run.tasks.spawn(run.home(), self.clone().renew(renewal));
            }
            let idle = run.stock().shrink(LINGER);
            let releasing = self.clone();
            run.tasks.spawn(run.home(), async move { releasing.release(idle).await });
            run.stock().forget_idle_nodes();
            let next = run.stock().with_holder(|holder| holder.next_deadline());
            let next = next.map_or(TICK, |due| Duration::from_millis(due.since(now).0.max(1)).min(TICK));
            run.world.sleep_by(run.host, next).await;
        }
        let all = run.stock().retire_all();
        self.release(all).await;
        run.has_left.set(true);
    }

    /// Has leases on a node renewed as soon as the node says that some of them are taken back.
    async fn await_revocations(self: Rc<Self>, node: Rc<Node>) {
        let run = &self.run;
        let mut seen = 0;
        while run.phase.get() != Phase::Leaving {
            let has_lease = run.stock().nodes().iter().any(|state| state.peer.node == node.id);
            let answer = match has_lease {
                true => {
                    let request = AwaitRevocationRequest { owner: run.stock().owner().0, seen };
                    let question = Question::AwaitRevocation(request);
                    self.post.ask(node.process.get(), question, REVOCATION_PATIENCE).await
                }
                false => None,
            };
            let Some(Answer::Revocation(answer)) = answer else {
                seen = 0;
                run.world.sleep_by(run.host, REVOCATION_PAUSE).await;
                continue;
            };
            seen = answer.seen;
            if answer.revoked {
                let now = run.stock().now();
                run.stock().with_holder(|holder| holder.revocation_announced(now, node.id));
            }
        }
    }

    async fn renew(self: Rc<Self>, renewal: Renewal) {
        let node = self.run.node(renewal.node).process.get();
        let question = Question::Renew(renewal.request(self.run.stock().owner()));
        if let Some(Answer::Renewed(answer)) = self.post.ask(node, question, REQUEST_PATIENCE).await {
            self.run.stock().renewal_answered(&renewal, &answer);
        }
    }

    async fn release(&self, regions: Vec<Arc<LeasedRegion>>) {
        let mut by_node: BTreeMap<NodeId, Vec<Arc<LeasedRegion>>> = BTreeMap::new();
        for region in regions {
            by_node.entry(region.id.node).or_default().push(region);
        }
        for (node, regions) in by_node {
            let question = Question::Release(self.run.stock().release_request(&regions));
            let node = self.run.node(node).process.get();
            // Without an answer the leases expire by themselves.
            let _ = self.post.ask(node, question, REQUEST_PATIENCE).await;
        }
    }

    async fn grow_when_wanted(self: Rc<Self>) {
        let run = &self.run;
        while run.phase.get() != Phase::Leaving {
            run.stock().growth_wanted().await;
            let outcome = if run.stock().is_low() { self.grow().await } else { GrowthOutcome::Grown };
            let pause = run.stock().attempt_ended(outcome).await;
            run.world.sleep_by(run.host, pause).await;
        }
    }

    async fn grow(&self) -> GrowthOutcome {
        let run = &self.run;
        let count = run.stock().regions_wanted();
        if count == 0 {
            return GrowthOutcome::Full;
        }
        let asked_at: Millis = run.stock().now();
        let request =
            run.stock().with_holder(|holder| holder.acquisition(asked_at, LeaseClass::Revocable, count));
        let broker = run.broker.process.get();
        let answer = match self.post.ask(broker, Question::Acquire(request), ACQUIRE_PATIENCE).await {
            Some(Answer::Acquired(answer)) => Some(answer),
            _ => None,
        };
        let (outcome, unusable) = run.stock().acquisition_answered(asked_at, answer);
        run.note_regions();
        for lease in unusable {
            let (Some(region), Some(key)) = (lease.region_id(), lease.access_key()) else { continue };
            let lease = (region.index, farpool_wire::Epoch(lease.epoch), &key);
            let request = run.stock().with_holder(|holder| holder.release(std::iter::once(lease)));
            let node = run.node(region.node).process.get();
            let _ = self.post.ask(node, Question::Release(request), REQUEST_PATIENCE).await;
        }
        outcome
    }
}
