//! Inspects far memory from outside every now and then. Clients may die at any moment, so what they have
//! written there must always suffice for a rollback.
//!
//! If a record's header, locked or not, names a commit that the slot's watermark has not reached, both copies
//! of the slot's log hold the commit's intents whole, and these name the record (`docs/src/txn.md`,
//! *committing*).

use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::AccessKind;
use farpool_fabric::sim::Random;
use farpool_txn::Piece;
use farpool_txn::log::Head;
use farpool_wire::{RecordHeader, Version};

use super::{OWNER, RECORDS, Run};

/// Pause between two inspections, at most.
const MOST_PAUSE_NS: u64 = 2_000;

/// Inspects until all clients have ended.
pub(super) fn start(run: &Rc<Run>, random: &mut Random) {
    let nowhere = run.world.add_process(run.world.add_host(1_000_000));
    let (here, mut random) = (run.clone(), Random::new(run.seed, 1_000_000 + random.below(1_000_000)));
    run.tasks.spawn(nowhere, async move {
        while !here.is_quiet.get() {
            inspect(&here);
            here.world.sleep(Duration::from_nanos(random.below(MOST_PAUSE_NS))).await;
        }
    });
}

fn inspect(run: &Run) {
    for (number, node) in (0..).zip(&run.nodes) {
        for index in 0..run.records.records() {
            let at = run.records.current(index).start;
            let version = RecordHeader(run.look(&run.piece(number, RECORDS, OWNER, 0), at)).version();
            let slot = version.slot().index() as u16;
            // The recoverer of a dead client's slot rolls back what it finds, so such slots are not checked.
            let is_live = run.lives.borrow().get(&slot).is_some_and(|life| !life.is_dead);
            if is_live
                && version.count() > run.word(slot)
                && !is_logged(run, slot, version, (node.peer.node, at))
            {
                run.ledger
                    .notes
                    .complain(format!("commit {version} has a record whose intent is not in its log"));
            }
        }
    }
}

/// Whether both copies of a slot's log have the intent of a commit to write the record at that place.
fn is_logged(run: &Run, slot: u16, version: Version, (node, at): (farpool_wire::NodeId, u64)) -> bool {
    let log = run.log(slot, OWNER);
    log.copies.iter().all(|copy| {
        let place = log.layout.head(version);
        let found = Head::decode(&bytes(run, copy, place.start..place.start + Head::PLACE_BYTES as u64));
        let Some((head, _)) = found.filter(|(head, _)| head.version == version) else { return false };
        let Some(place) = log.layout.intents(&head) else { return false };
        let intents = bytes(run, copy, place);
        let intents = head.intents(&intents).unwrap_or_default();
        intents.iter().any(|intent| intent.region.node == node && intent.header_at == at)
    })
}

pub(super) fn bytes(run: &Run, piece: &Piece, range: std::ops::Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    run.touch(piece.region, AccessKind::Read, &mut |memory| {
        memory.read(piece.start + range.start, &mut bytes)
    });
    bytes
}
