//! A process that asks, while the run goes on, for the outcomes of commits that are in doubt for their
//! clients.

use std::rc::Rc;
use std::time::Duration;

use super::recovering::asking;
use super::{Run, place};
use crate::transacting::fates::Asked;

/// Pause between two rounds of questions, at most.
const MOST_PAUSE_NS: u64 = 400_000;

/// Asks until all clients have ended.
pub(super) fn start(run: &Rc<Run>) {
    let mut random = run.ledger.notes.random();
    let place = place(run, &mut random);
    let process = run.world.add_process(place.0);
    let here = run.clone();
    run.tasks.spawn(process, async move {
        let grant = here.grant();
        let asked = async {
            let access = here.access(process, place, grant).await?;
            let oracle = here.oracle(grant);
            let asking = asking(&here, &access, &oracle);
            while !here.is_quiet.get() {
                here.world.sleep(Duration::from_nanos(random.below(MOST_PAUSE_NS))).await;
                asking.learn_known_fates().await?;
                asking.ask_again(Asked::Both, |_| random.chance(100)).await?;
            }
            Ok::<_, farpool_txn::recovery::RecoveryError>(())
        };
        if let Err(error) = asked.await {
            here.ledger.notes.complain(format!("the outcomes of commits cannot be asked for: {error}"));
        }
    });
}
