//! The client that removes records: there is one at a time, since in a database one member will have the role
//! for that. If it is in doubt whether it has removed one, it stops: a member in doubt is evicted before
//! another has its role.

use std::rc::Rc;
use std::time::Duration;

use farpool_txn::tree::{Run as Found, TreeError, TreeRules};

use super::Run;
use super::client::Client;
use crate::indexing::DEADLINE;
use crate::place::ClientPlace;

/// Records that it removes, at most.
const ROUNDS: u64 = 12;
/// The longest pause between its look at a record and the removal, while it finds out whether anybody needs
/// it.
const MOST_PAUSE_NS: u64 = 40_000;

pub(super) fn start<R: TreeRules>(run: &Rc<Run>, place: ClientPlace) {
    let setting = &run.setting;
    let process = setting.world.add_process(place.host);
    let mut client = Client::<R>::new(run, &run.spares(), process, place, DEADLINE);
    let (here, staying) = (run.clone(), setting.left.stay());
    setting.tasks.spawn(process, async move {
        for _ in 0..ROUNDS {
            if !remove(&here, &mut client).await {
                break;
            }
        }
        drop(staying);
    });
}

/// Removes a record. `false`: it is in doubt whether it has.
async fn remove<R: TreeRules>(run: &Rc<Run>, client: &mut Client<R>) -> bool {
    let Some(memory) = client.connected().await else { return false };
    let wanted = run.ranks[client.random.index(run.ranks.len())].clone();
    let found = client.ask(async |tree| tree.run_from(&memory, &wanted).await).await;
    let Ok(Found { entries, .. }) = found else { return true };
    let looked = run.history.borrow_mut().now();
    let pause = Duration::from_nanos(client.random.below(MOST_PAUSE_NS));
    run.setting.world.sleep(pause).await;
    let Some((rank, word)) = entries.first().cloned() else {
        client.keep(memory);
        return true;
    };
    run.setting.world.note("record {} is to be removed", &[run.place_of(&rank)]);
    let begun = run.history.borrow_mut().begin_removal(&rank, looked);
    match client.ask(async |tree| tree.remove(&memory, &rank, word).await).await {
        Ok(is_removed) => {
            run.setting
                .world
                .note("record {} was removed: {}", &[run.place_of(&rank), u64::from(is_removed)]);
            run.history.borrow_mut().end_removal(&rank, begun, is_removed);
        }
        Err(TreeError::Memory(_)) => return false,
        Err(TreeError::Full) if !run.is_roomy => run.history.borrow_mut().end_removal(&rank, begun, false),
        Err(error) => run.setting.notes.complain(format!("{rank:?} cannot be removed: {error}")),
    }
    client.keep(memory);
    true
}
