//! Compares the contents of far memory with the block words of files, at moments of the run that the seed
//! chooses, and before and after the last scrub. Reads by clients cannot replace this: a read does not notice
//! a wrong parity block unless it needs that block.
//!
//! I1. A parity block that counts as stored is the exclusive or of the data blocks of its column. If one
//!     block of the column cannot be read, the others yield it.
//! I2. In runs in which no store can fail, each block matches its word, unless one of its bits was flipped in
//!     its present place.
//! I3. In runs in which at most one node is hurt at a time and the owner lives, I2 holds for parity blocks.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::AccessKind;
use farpool_fabric::sim::Random;
use farpool_file::{Claim, ColumnClaim};
use farpool_wire::{BLOCK_BYTES, Epoch, RegionId};

use super::broken::Chosen;
use super::{Phase, Run};

/// The pause between two inspections, in milliseconds.
const PAUSE_MS: std::ops::Range<u64> = 200..2_500;

/// Blocks of which a bit was flipped: region, lease, and offset in the region.
pub(super) type Flipped = BTreeSet<(RegionId, Epoch, u64)>;

/// Inspects now and then until nothing goes wrong any more.
pub(super) fn start(run: &Rc<Run>) {
    let (looking, mut random) = (run.clone(), Random::new(run.seed, 34));
    run.tasks.spawn(run.nowhere, async move {
        while looking.phase.get() == Phase::Busy {
            let pause_ms = PAUSE_MS.start + random.below(PAUSE_MS.end - PAUSE_MS.start);
            looking.world.sleep(Duration::from_millis(pause_ms)).await;
            inspect(&looking);
        }
    });
}

/// Compares far memory with what all files believe of it, and complains of the first difference in each.
pub(super) fn inspect(run: &Run) {
    if run.successors_wanted.get() > 0 {
        return; // what a dead owner has left is not settled yet
    }
    for (number, file) in run.files.borrow().iter() {
        if let Some(what) = file.claims().iter().find_map(|column| fault_of(run, column)) {
            run.complain(format!("file {number}: {what}"));
        }
    }
}

/// Forgets the flips in the blocks of redundant files.
pub(super) fn forget_flips_in_rows(run: &Run) {
    let files = run.files.borrow();
    let columns = files.iter().flat_map(|(_, file)| file.claims()).filter(|column| column.blocks.len() > 1);
    for claim in columns.flat_map(|column| column.blocks) {
        run.flipped.borrow_mut().remove(&place(&claim));
    }
}

/// Where a block lies: region, lease, and offset in the region.
fn place(claim: &Claim) -> (RegionId, Epoch, u64) {
    let region = claim.extent.region();
    (region.id, region.epoch, claim.extent.address(claim.block * BLOCK_BYTES as u64).offset)
}

fn fault_of(run: &Run, column: &ColumnClaim) -> Option<String> {
    let (mut sum, mut absent) = (vec![0; BLOCK_BYTES], Vec::new());
    for claim in &column.blocks {
        match contents_of(run, claim) {
            Some(contents) if claim.is_met_by::<Chosen>(&contents) => {
                sum.iter_mut().zip(contents).for_each(|(sum, byte)| *sum ^= byte);
            }
            Some(_) if must_be_met(run, claim) => {
                let what = if claim.is_parity { "parity" } else { "data" };
                return Some(format!("{what} in {} is not what its word says", place_of(claim)));
            }
            _ => absent.push(claim),
        }
    }
    match absent[..] {
        [] if column.has_parity && sum.iter().any(|byte| *byte != 0) => {
            let place = column.blocks.last().map(place_of).unwrap_or_default();
            Some(format!("the parity of the column in {place} is not that of its data"))
        }
        [one] if column.has_parity && !one.is_met_by::<Chosen>(&sum) => {
            Some(format!("the others do not yield what lay in {}", place_of(one)))
        }
        _ => None,
    }
}

fn place_of(claim: &Claim) -> String {
    format!("block {} of {}", claim.block, claim.extent.address(0))
}

/// What lies in a block's place; `None`: its node is dead, or the lease has ended.
fn contents_of(run: &Run, claim: &Claim) -> Option<Vec<u8>> {
    let region = claim.extent.region();
    if region.is_overflow() {
        let offset = claim.extent.address(claim.block * BLOCK_BYTES as u64).offset;
        return run.disk.as_ref()?.contents(region.id.index, offset);
    }
    let shell = run.node(region.id.node).shell().filter(|_| !region.has_ended())?;
    let mut contents = vec![0; BLOCK_BYTES];
    let offset = claim.extent.address(claim.block * BLOCK_BYTES as u64).offset;
    let mut read = |memory: &farpool_fabric::Mapping| memory.read(offset, &mut contents);
    shell.regions.with_region(region.id.index, region.epoch, AccessKind::Read, &mut read).ok()?;
    Some(contents)
}

/// Whether nothing excuses that a block is not what its word says (I2, I3).
fn must_be_met(run: &Run, claim: &Claim) -> bool {
    let excuses = &run.excuses;
    let is_flipped = run.flipped.borrow().contains(&place(claim));
    let is_kept = excuses.survivable && claim.is_parity && !excuses.owner_dies;
    !is_flipped && (excuses.stores_succeed || is_kept)
}
