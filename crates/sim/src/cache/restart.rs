//! The database ends, programs change its files while it is not there, and it starts again.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use farpool_cache::{Caller, FileId, Rules, change_outside};
use farpool_fabric::sim::{ProcessId, Random};

use super::database::start_process;
use super::memory::Access;
use super::{BLOCKS, FileNumber, Run, broken, id_of};

/// How often it is looked whether all processes have ended.
pub(super) const LOOK: Duration = Duration::from_nanos(5_000);
/// The longest time between the end of the database and its signatures: less than a tick of the file system's
/// clock, or more.
const BEFORE_SIGNING_NS: [u64; 2] = [5_000, 200_000];
/// The share of ends at which nothing is signed because processes were killed, in thousandths.
const KILLED_PERMILLE: u32 = 250;
/// The share of restarts between which files are changed, in thousandths.
pub(super) const FOREIGN_PERMILLE: u32 = 600;

/// Ends all processes of the database, and starts as many again.
/// `process`: the one that carries this out.
pub(super) async fn restart<R: Rules + 'static>(
    run: &Rc<Run>,
    process: ProcessId,
    processes: u32,
    random: &mut Random,
) {
    let is_clean = !random.chance(KILLED_PERMILLE);
    end_database(run, is_clean).await;
    if is_clean {
        let longest_ns = BEFORE_SIGNING_NS[random.index(BEFORE_SIGNING_NS.len())];
        run.world.sleep(Duration::from_nanos(random.below(longest_ns))).await;
        sign::<R>(run, process).await;
    }
    if random.chance(FOREIGN_PERMILLE) {
        change_unannounced(run, random).await;
    }
    resume::<R>(run, process).await;
    run.is_stopping.set(false);
    (0..processes).for_each(|_| start_process::<R>(run));
}

/// Ends all processes of the database. The caller lets them start again.
pub(super) async fn end_database(run: &Rc<Run>, is_clean: bool) {
    run.world.note("the database ends, cleanly: {}", &[is_clean.into()]);
    run.is_stopping.set(true);
    while !run.living.borrow().is_empty() {
        let living: Vec<u64> = run.living.borrow().keys().copied().collect();
        // One that died as an outsider would leave the door closed for good.
        let may_die = |holder: &u64| !is_clean && !run.outsiders.borrow().contains(holder);
        living.into_iter().filter(may_die).for_each(|holder| run.kill(holder));
        run.world.sleep(LOOK).await;
    }
}

/// Signs the files, as `CacheClient` does.
pub(super) async fn sign<R: Rules>(run: &Rc<Run>, process: ProcessId) {
    let signatures = signatures(run, |number| run.disk.is_settled(number) || broken::signs_unsettled_files());
    let sign = async |caller: &mut Caller<Access, R>| caller.sign_files(&signatures).await;
    with_place(run, process, sign).await;
}

/// Keeps the pages of files that are as they were signed, as `CacheClient` does.
async fn resume<R: Rules>(run: &Rc<Run>, process: ProcessId) {
    let signatures = signatures(run, |_| true);
    let resume = async |caller: &mut Caller<Access, R>| caller.resume_files(&signatures).await;
    let kept = with_place(run, process, resume).await.flatten().unwrap_or(0);
    if kept == 0 {
        change_outside(&run.access(), async || ()).await;
    }
    run.world.note("the database starts with pages of {} files", &[kept as u64]);
}

/// Runs an operation in a place of this process. `None`: all are taken.
async fn with_place<R: Rules, T>(
    run: &Rc<Run>,
    process: ProcessId,
    operation: impl AsyncFnOnce(&mut Caller<Access, R>) -> T,
) -> Option<T> {
    let holder = run.notes.next_name();
    run.living.borrow_mut().insert(holder, process);
    let caller = Caller::<_, R>::join(run.access(), run.places(), holder).await;
    let mut done = None;
    if let Some(mut caller) = caller {
        done = Some(operation(&mut caller).await);
        caller.leave().await;
    }
    run.living.borrow_mut().remove(&holder);
    done
}

/// The signatures of the files that have names.
pub(super) fn signatures(run: &Run, is_signed: impl Fn(FileNumber) -> bool) -> BTreeMap<FileId, u64> {
    let files = run.files.borrow();
    let signed = files.iter().copied().filter(|number| is_signed(*number));
    signed.map(|number| (id_of(number), run.disk.changed_at(number) + 1)).collect()
}

/// A program changes a block of a file, and tells nobody.
pub(super) async fn change_unannounced(run: &Run, random: &mut Random) {
    let number = {
        let files = run.files.borrow();
        files[random.index(files.len())]
    };
    let block = random.below(BLOCKS.into()) as u32;
    let (name, writes) = (run.notes.next_name(), run.fresh_values(number, block..block + 1));
    run.begin_write(name, &writes);
    run.disk.write(&writes).await;
    run.end_write(name, true);
}
