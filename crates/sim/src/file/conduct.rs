//! Leads a run through its phases. At the end it checks that everything recovers by itself: clients finish,
//! files can be written and read again, and every region that was lent is returned.

use std::rc::Rc;
use std::time::Duration;

use farpool_file::FileError;

use super::client::{CELLS, Client};
use super::history::Asked;
use super::link::Shaking;
use super::{BUSY_TTLS, Phase, Run, inspector};
use crate::plane::node;
use crate::plane::post::Delivery;

const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The number of checks within which clients must finish once faults have ended. A write may wait for a lock,
/// then for a dead node; then it reconnects and cleans up.
const LAST_LOOKS: u32 = 200;
/// How often a write of an extent is tried before its failure counts as a violation: the owner first has to
/// learn that a node is dead.
const TRIES: u32 = 60;
/// The number of checks within which all regions must be returned: leases whose release was lost have to
/// expire.
const RETURN_LOOKS: u32 = 60;
const EXTENTS: u64 = 3;
/// The number of checks within which all rows must be rebuilt once faults have ended: a node that has come
/// back is asked for room again only after a while.
const WHOLE_LOOKS: u32 = 90;

pub(super) async fn conduct(run: Rc<Run>) {
    run.world.sleep(Duration::from_millis(BUSY_TTLS * run.ttl.0)).await;
    while run.mishaps.get() > 0 {
        run.world.sleep(LOOK_EVERY).await;
    }
    run.phase.set(Phase::Quiet);
    run.moving.ring(); // mishaps that wait for a move end
    run.delivery.set(Delivery::default());
    run.shaking.set(Shaking { lie: run.shaking.get().lie, ..Shaking::default() });
    run.world.note("nothing goes wrong any more", &[]);
    for _ in 0..LAST_LOOKS {
        if run.at_work.get() == 0 && run.late_letters.get() == 0 {
            break;
        }
        run.world.sleep(LOOK_EVERY).await;
    }
    if run.at_work.get() > 0 {
        run.complain(format!("{} clients have not finished", run.at_work.get()));
    }
    judge_no_loss(&run);
    lose_one_more(&run).await;
    let last = run.world.add_process(run.host);
    let (done, looking) = (Rc::new(std::cell::Cell::new(false)), run.clone());
    let is_done = done.clone();
    run.tasks.spawn(last, async move {
        write_and_read_anew(&looking, last).await;
        is_done.set(true);
    });
    while !done.get() {
        run.world.sleep(LOOK_EVERY).await;
    }
    run.files.borrow_mut().clear();
    run.phase.set(Phase::Leaving);
    run.world.note("everybody leaves", &[]);
    judge_returns(&run).await;
    run.tasks.kill(run.home());
    run.tasks.kill(last);
    run.clients.borrow().iter().for_each(|(process, _)| run.tasks.kill(*process));
    run.nodes.iter().for_each(|node| run.tasks.kill(node.process.get()));
    run.tasks.kill(run.broker.process.get());
}

/// Scrubs the files once everything that was lost is rebuilt, then kills a node: redundant files must survive
/// the loss of any node again.
async fn lose_one_more(run: &Rc<Run>) {
    if !run.becomes_whole().await {
        // After flips this is no violation: a wrong block in a column whose parity is in doubt stays wrong.
        let can_lose_one = run.excuses.survivable
            && !run.excuses.flips
            && run.nodes.iter().all(|node| node.shell().is_some());
        if can_lose_one && run.mutation.is_none() {
            run.complain("redundant files are not rebuilt".to_owned());
        }
        return;
    }
    let process = run.world.add_process(run.host);
    let scrub = run.store().clone();
    let mut client = Client::new(run, process);
    inspector::inspect(run);
    let scrubbed = client.scrub(&scrub).await;
    if run.excuses.survivable && !run.excuses.owner_dies && scrubbed {
        inspector::forget_flips_in_rows(run); // a whole row is repaired
    }
    inspector::inspect(run);
    let node = &run.nodes[run.drawing.borrow_mut().index(run.nodes.len())];
    if node.shell().is_none() {
        return;
    }
    node::crash(&run.plane, node);
    let files = run.files.borrow().clone();
    let redundant = |file: &&super::Numbered| file.1.redundancy().nodes() > 1;
    for file in files.iter().filter(redundant) {
        client.carry_out(file.0, &file.1, Asked::Read(0..CELLS)).await;
        client.work_on(file).await;
        client.carry_out(file.0, &file.1, Asked::Read(0..CELLS)).await;
    }
    run.plane.start_node_again(node);
    drop(client);
    run.tasks.kill(process);
}

impl Run {
    async fn becomes_whole(&self) -> bool {
        for _ in 0..WHOLE_LOOKS {
            if self.store().is_whole() {
                return true;
            }
            self.world.sleep(LOOK_EVERY).await;
        }
        false
    }
}

/// Checks that no lease is lost in runs in which no fault can cost one.
fn judge_no_loss(run: &Run) {
    run.note_regions();
    let held = run.stock().regions();
    for region in run
        .regions
        .borrow()
        .iter()
        .filter(|region| (run.excuses.calm || run.refuses) && region.node.is_lost())
    {
        run.complain(format!("{} is lost (of {} held), though no fault can cost it", region.id, held.len()));
    }
}

/// Checks that every extent of every file can be written again, and that reads then return what was written.
async fn write_and_read_anew(run: &Rc<Run>, process: farpool_fabric::sim::ProcessId) {
    let mut client = Client::new(run, process);
    let files = run.files.borrow().clone();
    for file in &files {
        client.carry_out(file.0, &file.1, Asked::Read(0..CELLS)).await;
        for extent in 0..EXTENTS {
            match client.write_anew(file, extent, TRIES).await {
                Ok(()) | Err(FileError::NoSpace | FileError::TooFewNodes { .. }) => {}
                Err(error) => run.complain(format!("file {} cannot be written again: {error}", file.0)),
            }
        }
        client.carry_out(file.0, &file.1, Asked::Read(0..CELLS)).await;
    }
}

/// Checks that every region that was lent is returned.
async fn judge_returns(run: &Rc<Run>) {
    for _ in 0..RETURN_LOOKS {
        run.world.sleep(LOOK_EVERY).await;
        let free = run.nodes.iter().all(|node| {
            let counts = node.shell().map(|shell| shell.core.lock().counts());
            counts.is_some_and(|counts| counts.held == 0 && counts.returning == 0)
        });
        if run.has_left.get() && free {
            return;
        }
    }
    run.complain(format!("regions are not returned; the owner has given all back: {}", run.has_left.get()));
}
