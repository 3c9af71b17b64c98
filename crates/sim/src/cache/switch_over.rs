//! The database ends, and another server, which has followed it, takes its place and takes over its pages.

use std::collections::BTreeSet;
use std::rc::Rc;

use farpool_cache::{Caller, HandedPage, Keeper, KnownFile, Rules, WatchedFiles, close_and_list};
use farpool_fabric::sim::{ProcessId, Random};

use super::database::{start_keeper, start_process};
use super::memory::Access;
use super::restart::{FOREIGN_PERMILLE, LOOK, change_unannounced, end_database, sign, signatures};
use super::{History, Run};

/// How often the simulation checks whether all files of the new server are known. Afterwards, only pages of
/// known files are taken over.
const LOOKS: u32 = 60;
/// The share of switchovers at which the new server has not everything on its disk, in thousandths.
const LAGGING_PERMILLE: u32 = 400;
/// How likely a page is to be taken over in a round of the keeper, in thousandths.
const TAKEN_PERMILLE: u32 = 300;

/// The pages of the old server, for the keeper of the new one.
#[derive(Clone)]
pub(super) struct Handover {
    files: Vec<KnownFile>,
    pages: Vec<HandedPage>,
    /// Up to this position of the log, the new server has everything on its disk.
    restartpoint: u64,
    /// The files as they were while the new server was a standby.
    seen: Option<WatchedFiles>,
    is_standby: bool,
}

/// Ends the database and its keeper, and starts both on another server. `process` carries this out. `turns`:
/// how often the new keeper wants another state of the door, in thousandths.
pub(super) async fn switch_over<R: Rules + 'static>(
    run: &Rc<Run>,
    (process, keeper): (ProcessId, ProcessId),
    processes: u32,
    turns: u32,
    random: &mut Random,
) {
    end_database(run, true).await;
    run.world.sleep(LOOK).await;
    sign::<R>(run, process).await;
    run.tasks.kill(keeper);
    if random.chance(FOREIGN_PERMILLE) {
        change_unannounced(run, random).await;
    }
    let signatures = signatures(run, |_| true);
    let handed = close_and_list::<_, R>(&run.access(), &run.layout, &signatures).await.unwrap_or_default();
    let end = run.disk.log_end();
    let restartpoint = if random.chance(LAGGING_PERMILLE) { random.below(end + 1) } else { end };
    run.world.note("another server takes over from position {} of {}", &[restartpoint, end]);
    let initial = run.disk.replay_until(restartpoint);
    let past = run.history.replace(History { initial, ..History::default() });
    run.past.borrow_mut().push(past);
    let memory = Rc::new(run.memory.borrow().successor());
    run.memory.replace(memory);
    let files = handed.files.into_iter().map(KnownFile::new).collect();
    let handover = Handover { files, pages: handed.pages, restartpoint, seen: None, is_standby: true };
    run.handover.replace(Some(handover));
    start_keeper::<R>(run, turns, 0);
    for _ in 0..LOOKS {
        run.world.sleep(LOOK).await;
        if run.handover.borrow().as_ref().is_some_and(Handover::knows_all_files) {
            break;
        }
    }
    if let Some(handover) = &mut *run.handover.borrow_mut() {
        handover.is_standby = false; // the server is promoted
    }
    run.is_stopping.set(false);
    (0..processes).for_each(|_| start_process::<R>(run));
}

impl Handover {
    fn knows_all_files(&self) -> bool {
        self.seen.as_ref().is_some_and(|seen| seen.unknown() == 0)
    }
}

/// What a keeper takes over.
pub(super) struct TakingOver {
    /// Slots with pages, which nobody else may take.
    withheld: BTreeSet<u32>,
}

impl TakingOver {
    pub(super) fn new(run: &Run) -> TakingOver {
        let handover = run.handover.borrow();
        let pages = handover.iter().flat_map(|handover| &handover.pages);
        TakingOver { withheld: pages.map(|page| page.slot).collect() }
    }

    pub(super) fn withholds(&self, slot: u32) -> bool {
        self.withheld.contains(&slot)
    }

    /// Looks at the new server while it is a standby, and takes pages over afterwards.
    pub(super) async fn step<R: Rules>(
        &mut self,
        run: &Rc<Run>,
        keeper: &mut Keeper<Access, R>,
        told: &[bool],
        random: &mut Random,
    ) {
        let Some(mut handover) = run.handover.borrow().clone() else { return };
        let joining = Caller::<_, R>::join(run.access(), run.places(), run.notes.next_name());
        let Some(mut caller) = joining.await else { return };
        if handover.is_standby {
            let seen = caller.watch(&mut handover.files).await;
            if let Some(shared) = run.handover.borrow_mut().as_mut().filter(|shared| shared.is_standby) {
                (shared.files, shared.seen) = (handover.files, seen);
            }
        } else {
            for page in handover.pages.extract_if(.., |_| random.chance(TAKEN_PERMILLE)) {
                self.release(page.slot, keeper, told);
                let Some(seen) = &handover.seen else { continue };
                let lsn_of = |head| run.disk.position(u64::from_le_bytes(head));
                let is_taken = caller.take_over(seen, &page, handover.restartpoint, lsn_of).await;
                run.world.note("the page in slot {} is taken over: {}", &[page.slot.into(), is_taken.into()]);
            }
            run.handover.replace(Some(handover).filter(|handover| !handover.pages.is_empty()));
        }
        caller.leave().await;
    }

    /// Gives back the slots whose pages were not taken over.
    pub(super) fn end<R: Rules>(&mut self, keeper: &mut Keeper<Access, R>, told: &[bool]) {
        for slot in std::mem::take(&mut self.withheld) {
            self.release(slot, keeper, told);
        }
    }

    /// A slot may be used. Several pages may have named it.
    fn release<R: Rules>(&mut self, slot: u32, keeper: &mut Keeper<Access, R>, told: &[bool]) {
        self.withheld.remove(&slot);
        if told[slot as usize] {
            keeper.restore_slots(slot..slot + 1);
        }
    }
}
