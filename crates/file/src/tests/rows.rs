//! Files with rows: what is lost with a node, what is rebuilt, what a scrub finds, and what the status says.

use farpool_wire::BlockWord;

use super::bare::Bare;
use super::*;
use crate::blocks::BLOCKS_PER_EXTENT;
use crate::{Rules, Shipped, VolumeStatus};

const PARITY: Redundancy = Redundancy::Parity { data: 2 };
/// Bytes of a file: four rows of a mirror, or two rows with a parity.
const DATA: usize = 4 * EXTENT_BYTES as usize;

/// Regions of each node.
const REGIONS_EACH: u64 = 8;

/// A file with four extents of data.
fn filled(store: &FileStore, session: &Session, redundancy: Redundancy) -> FarFile {
    let file = store.create_as(redundancy);
    file.write(session, 0, &pattern(DATA, 3)).unwrap();
    file
}

fn is_right(file: &FarFile, session: &Session) -> bool {
    read(file, session, 0, DATA).unwrap() == pattern(DATA, 3)
}

/// The parity of the file's first row, as a member of its list.
fn first_parity(file: &FarFile) -> u64 {
    file.inner.rows().expect("the file has rows").parity_of(0)
}

/// Changes the word of a member's block.
fn change_word(
    store: &FileStore,
    file: &FarFile,
    (member, block): (u64, u64),
    change: impl Fn(BlockWord) -> BlockWord,
) {
    let (words, extent) = (&store.core().words, file.inner.map.read().extent(member).unwrap());
    let place = words.place(&extent, block);
    words.store(place, change(words.load(place)));
}

/// Ends a node, and waits until this many extents of files with rows are missing and the loss is counted. A
/// session that finds the node dead comes first, and counts nothing.
fn lose_node(rig: &mut Rig, (store, session): (&FileStore, &Session), file: &FarFile, missing: u64) {
    rig.kill_node(0);
    wait_until(|| {
        let _ = read(file, session, 0, DATA); // a failed read shows that the node is lost
        let status = store.volume_status();
        status.missing_extents == missing && status.to_rebuild
    });
}

/// Scrubs, and returns the status afterwards.
fn scrubbed(store: &FileStore) -> VolumeStatus {
    let before = store.volume_status().scrub;
    store.start_scrub();
    wait_until(|| store.volume_status().scrub.attempts > before.attempts);
    let status = store.volume_status();
    assert_eq!((status.scrub.running, status.scrub.finished), (false, before.finished + 1));
    status
}

/// Counts of a scrub: wrong, repaired, lost and unread blocks.
fn found(status: &VolumeStatus) -> (u64, u64, u64, u64) {
    (status.wrong_blocks, status.repaired_blocks, status.lost_blocks, status.unread_blocks)
}

#[test]
fn the_status_counts_what_is_missing_and_what_is_lost() {
    let mut rig = Rig::new(2, 16);
    let (store, session) = rig.store(TransportChoice::Shm);
    let plain = store.create();
    plain.write(&session, 0, &pattern(DATA, 9)).unwrap();
    let reserved = store.create();
    reserved.reserve(&session, 0, DATA as u64).unwrap();
    let mirror = filled(&store, &session, Redundancy::Mirror);
    let status = store.volume_status();
    assert_eq!((status.files, status.redundant_files, status.extents), (3, 1, 8));
    assert_eq!((status.missing_extents, status.lost_extents, status.to_rebuild), (0, 0, false));
    assert_eq!(status.rebuild.attempts, 0, "writes ask for no rebuild");

    lose_node(&mut rig, (&store, &session), &mirror, 4);
    let status = store.volume_status();
    assert_eq!((status.extents, status.lost_extents), (8, 2), "half of the file without redundancy");
    assert!(status.to_rebuild && is_right(&mirror, &session));

    // Once the copies that are left are gone or wrong, the others cannot be reconstructed.
    for row in 0..4 {
        let members = [row, first_parity(&mirror) + row];
        for member in members {
            let extent = mirror.inner.map.read().extent(member).unwrap();
            if !extent.region().has_ended() {
                change_word(&store, &mirror, (member, 4), BlockWord::lost);
            }
        }
    }
    let lost = store.volume_status().lost_extents;
    let has_ended = |stripe: &u64| mirror.inner.map.read().extent(*stripe).unwrap().region().has_ended();
    assert_eq!(lost, 2 + (0..4).filter(has_ended).count() as u64, "only data count");

    lose_node(&mut rig, (&store, &session), &mirror, 8);
    assert_eq!(store.volume_status().lost_extents, 4 + 4);
}

#[test]
fn a_missing_member_is_lost_only_if_the_others_cannot_give_its_blocks() {
    let rig = Rig::new(3, 16);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = filled(&store, &session, PARITY);
    file.inner.extent_at(0).unwrap().region().node.give_up();
    let status = store.volume_status();
    assert!(status.missing_extents > 0 && status.lost_extents == 0, "{status:?}");
    // A data block that is empty takes part in no reconstruction: the parity does not contain it.
    change_word(&store, &file, (1, 7), |_| BlockWord::EMPTY);
    assert_eq!(store.volume_status().lost_extents, 0);
    change_word(&store, &file, (first_parity(&file), 8), BlockWord::lost);
    assert_eq!(store.volume_status().lost_extents, 1);
}

#[test]
fn a_scrub_repairs_data_and_parity_that_are_wrong() {
    let rig = Rig::new(3, 16);
    for redundancy in [Redundancy::Mirror, PARITY] {
        let (store, session) = rig.store(TransportChoice::Shm);
        let file = filled(&store, &session, redundancy);
        let extents = store.volume_status().extents;
        let status = scrubbed(&store);
        assert_eq!(found(&status), (0, 0, 0, 0), "{redundancy}");
        assert_eq!(
            (status.scrub.total, status.scrub.done),
            (extents * BLOCKS_PER_EXTENT, status.scrub.total)
        );
        tamper(&file, &session, 1, 3 * BLOCK + 9, &[0xEE; 100]);
        tamper(&file, &session, first_parity(&file), 5 * BLOCK, &[0xEE; 100]);
        // A parity that matches its word, but is not that of its data.
        let other = pattern(BLOCK_BYTES, 77);
        tamper(&file, &session, first_parity(&file), 6 * BLOCK, &other);
        let sum = Shipped::checksum(&other);
        change_word(&store, &file, (first_parity(&file), 6), |_| BlockWord::EMPTY.written(sum));
        assert_eq!(found(&scrubbed(&store)), (3, 3, 0, 0), "{redundancy}");
        assert!(is_right(&file, &session));
        assert_eq!(found(&scrubbed(&store)), (3, 3, 0, 0), "{redundancy}: the repaired blocks are right");
        let claims = file.inner.claims();
        assert!(claims.iter().all(|column| column.has_parity), "{redundancy}");
        assert_eq!(claims.iter().map(|column| column.blocks.len() as u64).sum::<u64>(), status.scrub.total);
    }
}

#[test]
fn a_scrub_counts_blocks_that_no_redundancy_can_repair() {
    let rig = Rig::new(2, 16);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = filled(&store, &session, Redundancy::Stripe);
    tamper(&file, &session, 1, 3 * BLOCK + 9, &[0xEE; 100]);
    change_word(&store, &file, (0, 2), BlockWord::lost);
    let status = scrubbed(&store);
    assert_eq!(found(&status), (1, 0, 2, 1), "one is wrong, one was lost before");
    assert_eq!((status.scrub.total, status.scrub.done), (4 * BLOCKS_PER_EXTENT, 4 * BLOCKS_PER_EXTENT));
    let mirror = filled(&store, &session, Redundancy::Mirror);
    for member in [0, first_parity(&mirror)] {
        tamper(&mirror, &session, member, 9 * BLOCK, &[0xEE; 100]);
    }
    let again = scrubbed(&store);
    assert_eq!(
        (again.wrong_blocks, again.repaired_blocks),
        (1 + 3, 0),
        "both copies, and the block of before"
    );
    assert!(matches!(
        read(&mirror, &session, 9 * BLOCK, 1),
        Err(FileError::Damaged { .. } | FileError::Lost { .. })
    ));
    assert_eq!(
        read(&mirror, &session, 10 * BLOCK, BLOCK_BYTES).unwrap(),
        pattern(DATA, 3)[10 * BLOCK_BYTES..][..BLOCK_BYTES]
    );
}

#[test]
fn a_scrub_passes_over_what_is_missing() {
    let mut rig = Rig::new(2, 16);
    let (store, session) = rig.store(TransportChoice::Shm);
    let mirror = filled(&store, &session, Redundancy::Mirror);
    lose_node(&mut rig, (&store, &session), &mirror, 4);
    let status = scrubbed(&store);
    assert_eq!(found(&status), (0, 0, 0, 4 * BLOCKS_PER_EXTENT));
    assert_eq!(status.scrub.done, 8 * BLOCKS_PER_EXTENT);
    assert!(is_right(&mirror, &session));
}

#[test]
fn lost_members_are_rebuilt_on_other_nodes() {
    for (redundancy, nodes) in [(Redundancy::Mirror, 3), (PARITY, 4)] {
        let mut rig = Rig::new(nodes, REGIONS_EACH);
        let (store, session) = rig.store(TransportChoice::Shm);
        // Makes the store lease all regions: then each node has a member of the next file.
        let other = store.create();
        other.reserve(&session, 0, u64::from(nodes) * REGIONS_EACH * REGION_BYTES).unwrap();
        other.set_size(&session, 0).unwrap();
        let file = filled(&store, &session, redundancy);
        rig.kill_node(0);
        wait_until(|| {
            let _ = read(&file, &session, 0, DATA); // a failed read shows that the node is lost
            let status = store.volume_status();
            status.rebuild.finished > 0 && !status.to_rebuild && status.missing_extents == 0
        });
        assert_eq!(store.volume_status().lost_extents, 0, "{redundancy}");
        assert!(is_right(&file, &session) && store.core().is_whole(), "{redundancy}");
        assert_eq!(found(&scrubbed(&store)), (0, 0, 0, 0), "{redundancy}");
    }
}

#[test]
fn a_rebuild_that_has_too_few_nodes_says_so_and_ends_once_another_node_joins() {
    let mut rig = Rig::new(2, 16);
    let (store, session) = rig.store(TransportChoice::Shm);
    let mirror = filled(&store, &session, Redundancy::Mirror);
    lose_node(&mut rig, (&store, &session), &mirror, 4);
    wait_until(|| store.volume_status().rebuild_waits_for.is_some());
    let status = store.volume_status();
    assert_eq!(status.rebuild_waits_for, Some(FileError::TooFewNodes { wanted: 2, found: 1 }));
    assert!(status.to_rebuild && status.rebuild.finished == 0 && !store.core().is_whole());
    rig.start_node(16);
    store.start_rebuild();
    wait_until(|| store.core().is_whole());
    assert!(is_right(&mirror, &session));
    wait_until(|| !store.volume_status().to_rebuild);
    assert_eq!(store.volume_status().rebuild_waits_for, None);
}

#[test]
fn a_lost_parity_is_computed_again_from_its_data() {
    let rig = Rig::new(3, 16);
    let (store, session) = rig.store(TransportChoice::Shm);
    for redundancy in [Redundancy::Mirror, PARITY] {
        let file = filled(&store, &session, redundancy);
        let parity = first_parity(&file);
        change_word(&store, &file, (parity, 3), BlockWord::lost);
        assert!(!store.core().is_whole());
        store.start_rebuild();
        wait_until(|| store.core().is_whole());
        let wrong = scrubbed(&store).wrong_blocks;
        assert_eq!(wrong, 0, "{redundancy}");
    }
}

#[test]
fn a_store_that_is_dropped_leaves_no_thread_with_its_files() {
    let rig = Rig::new(1, 4);
    let (store, session) = rig.store(TransportChoice::Shm);
    let core = std::sync::Arc::downgrade(store.core());
    drop((session, store));
    assert!(core.upgrade().is_none(), "the mover is still at work");
}

#[test]
fn a_failed_write_beyond_the_end_leaves_no_bytes_there() {
    let rig = Rig::new(1, 1);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    file.write(&session, 0, &[1; 100]).unwrap();
    // There is room for three more extents.
    let too_much = pattern(MAX_TRANSFER_BYTES, 5);
    assert_eq!(file.write(&session, EXTENT_BYTES, &too_much), Err(FileError::NoSpace));
    assert_eq!(file.size(), 100);
    file.set_size(&session, 4 * EXTENT_BYTES).unwrap();
    for block in 1..4 * EXTENT_BYTES / BLOCK {
        assert_eq!(read(&file, &session, block * BLOCK, BLOCK_BYTES).unwrap(), [0; BLOCK_BYTES], "{block}");
    }
}

#[test]
fn a_row_without_room_has_no_space_on_as_many_nodes_as_it_needs_and_too_few_nodes_on_fewer() {
    let rig = Rig::new(2, 1);
    let bare = Bare::new(&rig);
    let too_few = FileError::TooFewNodes { wanted: 3, found: 2 };
    for (redundancy, error) in [(Redundancy::Mirror, FileError::NoSpace), (PARITY, too_few)] {
        let file = bare.store.create_as(redundancy);
        let reserved = bare.run(async |_| file.reserve(0, 2 * REGION_BYTES).await);
        assert_eq!(reserved, Err(error));
    }
}
