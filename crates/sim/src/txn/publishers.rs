//! The publishers of a run: one for each part of the oracle. In some runs they die, often while they write an
//! image and others read it, and other publishers take over.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::{HostId, Path, ProcessId, Random};
use farpool_txn::oracle::publish;
use farpool_txn::{MemoryError, OracleAt};
use farpool_wire::Epoch;

use super::broken::Chosen;
use super::inspector::bytes;
use super::oracle::LOOK;
use super::{Access, ORACLE, OWNER, Run, place};

/// Deaths of a part's publishers, at most, and the longest time until each.
const MOST_DEATHS: u64 = 4;
const MOST_LIFE_NS: u64 = 600_000;
/// Deaths, in thousandths, that meet a publisher in the middle of an image.
const HALF_AN_IMAGE_PERMILLE: u32 = 700;
/// Checks whether an image is half-written, and the pause between two.
const LOOKS: u32 = 1_000;
const LOOK_PAUSE: Duration = Duration::from_nanos(250);
/// The longest time from a death until the publisher's grants are fenced.
const MOST_ABSENCE_NS: u64 = 60_000;
/// Random streams of the parts' deaths begin here.
const FIRST_STREAM: u64 = 20;

/// Starts a publisher for each part, on that part's host or elsewhere.
pub(super) fn start(run: &Rc<Run>, random: &mut Random) {
    for part in 0..run.parts {
        let place = place(run, random);
        if run.situations.publishers_die {
            let nowhere = run.world.add_process(run.world.add_host(1_000_000));
            run.tasks.spawn(nowhere, one_after_another(run.clone(), part, place));
        } else {
            start_one(run, part, place);
        }
    }
}

/// A publisher.
pub(super) struct Publishing {
    pub(super) process: ProcessId,
    grant: Epoch,
    /// It may be fenced from now on.
    is_given_up: Rc<Cell<bool>>,
}

async fn one_after_another(run: Rc<Run>, part: u64, place: (HostId, Path)) {
    let mut random = Random::new(run.seed, FIRST_STREAM + part);
    for _ in 0..1 + random.below(MOST_DEATHS) {
        let publisher = start_one(&run, part, place);
        run.world.sleep(Duration::from_nanos(random.below(MOST_LIFE_NS))).await;
        if random.chance(HALF_AN_IMAGE_PERMILLE) {
            half_an_image(&run, part).await;
        }
        if run.is_quiet.get() {
            return;
        }
        publisher.is_given_up.set(true);
        // What the publisher has sent takes effect until its grant is fenced. An image stays torn only if the
        // fence comes in the middle of the write.
        let at = run.oracle(OWNER).parts()[part as usize].piece;
        let memory = &run.node(at.region.node).memory;
        memory.regions.fence_grant(ORACLE, publisher.grant).expect("a few pages of memory");
        run.tasks.kill(publisher.process);
        run.world.sleep(Duration::from_nanos(random.below(MOST_ABSENCE_NS))).await;
        run.fence(publisher.grant, &mut random).await;
    }
    if !run.has_ended.get() {
        start_one(&run, part, place);
    }
}

/// Starts a publisher of this part, in a process of its own.
pub(super) fn start_one(run: &Rc<Run>, part: u64, place: (HostId, Path)) -> Publishing {
    let process = run.world.add_process(place.0);
    let publishing = Publishing { process, grant: run.grant(), is_given_up: Rc::default() };
    let (here, grant, is_given_up) = (run.clone(), publishing.grant, publishing.is_given_up.clone());
    run.tasks.spawn(process, async move {
        let done: Result<(), MemoryError> = async {
            let Access { memory, grant } = here.access(process, place, grant).await?;
            let oracle = here.oracle(grant);
            let part = oracle.parts()[part as usize];
            publish::<Chosen>(&memory, part, oracle.pace(LOOK), None, || here.has_ended.get()).await
        }
        .await;
        if let Err(error) = done
            && !is_given_up.get()
        {
            here.ledger.notes.complain(format!("a publisher stopped: {error}"));
        }
    });
    publishing
}

/// Waits until an image of the part is half-written. Gives up after [`LOOKS`] checks.
async fn half_an_image(run: &Run, part: u64) {
    let at = run.oracle(OWNER).parts()[part as usize];
    for _ in 0..LOOKS {
        if run.is_quiet.get() || has_torn_image(run, &at) {
            return;
        }
        run.world.sleep(LOOK_PAUSE).await;
    }
}

fn has_torn_image(run: &Run, at: &OracleAt) -> bool {
    let images = at.board.images();
    let images = bytes(run, &at.piece, images.start as u64..images.end as u64);
    let nothing = vec![0; images.len() / 2];
    // An image is whole if the board decodes a cut from it when the other image is all zeros.
    images
        .chunks_exact(nothing.len())
        .any(|image| *image != nothing[..] && at.board.decode(&[image, &nothing[..]].concat()).is_none())
}
