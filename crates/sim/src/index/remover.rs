//! Clients that remove records. If it is in doubt whether one has removed a record, it stops.

use std::rc::Rc;
use std::time::Duration;

use farpool_txn::tree::{Looked, RemovedEntry, TreeError, TreeRules};

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
        let mut removed = Vec::new();
        for _ in 0..ROUNDS {
            if !remove(&here, &mut client, &mut removed).await
                || !empty(&here, &mut client, &mut removed).await
            {
                break;
            }
        }
        drop(staying);
    });
}

/// Removes a record. `false`: it is in doubt whether it has.
async fn remove<R: TreeRules>(
    run: &Rc<Run>,
    client: &mut Client<R>,
    places: &mut Vec<(u64, RemovedEntry)>,
) -> bool {
    let Some(memory) = client.connected().await else { return false };
    let wanted = run.ranks[client.random.index(run.ranks.len())].clone();
    let found = client.ask(async |tree| tree.look(&memory, &wanted).await).await;
    let Ok(Looked { entries, .. }) = found else { return true };
    let looked = run.history.borrow_mut().now();
    let pause = Duration::from_nanos(client.random.below(MOST_PAUSE_NS));
    run.setting.world.sleep(pause).await;
    let Some(seen) = entries.first() else {
        client.keep(memory);
        return true;
    };
    let rank = &seen.rank;
    run.setting.world.note("record {} is to be removed", &[run.place_of(rank)]);
    let begun = run.history.borrow_mut().begin_removal(rank, looked);
    match client.ask(async |tree| tree.remove(&memory, seen).await).await {
        Ok(removed) => {
            let is_removed = removed.is_some();
            places.extend(removed.map(|place| (run.next_operation.get(), place)));
            run.setting.world.note("record {} was removed: {}", &[run.place_of(rank), u64::from(is_removed)]);
            run.history.borrow_mut().end_removal(rank, begun, is_removed);
        }
        Err(TreeError::Memory(_)) => return false,
        Err(error) => run.setting.notes.complain(format!("{rank:?} cannot be removed: {error}")),
    }
    client.keep(memory);
    true
}

/// Lets the places of removed entries be used again, if all operations have ended that had begun by then.
async fn empty<R: TreeRules>(
    run: &Rc<Run>,
    client: &mut Client<R>,
    places: &mut Vec<(u64, RemovedEntry)>,
) -> bool {
    let oldest = run.operations.borrow().first().copied().unwrap_or(u64::MAX);
    let (ready, later) = std::mem::take(places).into_iter().partition(|(since, _)| *since <= oldest);
    *places = later;
    let Some(memory) = client.connected().await else { return false };
    let ready: Vec<(u64, RemovedEntry)> = ready;
    for (_, place) in &ready {
        match client.ask(async |tree| tree.empty(&memory, place).await).await {
            Ok(()) => {}
            Err(TreeError::Memory(_)) => return false,
            Err(error) => run.setting.notes.complain(format!("a place cannot be used again: {error}")),
        }
    }
    client.keep(memory);
    true
}
