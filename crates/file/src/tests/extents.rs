//! A file's list of extents, beside operations that use them at the same time.

use std::collections::BTreeMap;

use futures_util::future::try_join_all;

use super::bare::Bare;
use super::*;
use crate::split::Piece;

const DATA: usize = 2 * EXTENT_BYTES as usize;

#[test]
fn an_extent_is_given_back_after_a_failed_reservation_only_if_it_is_empty_and_unused() {
    let rig = Rig::new(1, 2);
    let bare = Bare::new(&rig);
    for (is_used, is_empty) in [(false, false), (true, true), (true, false), (false, true)] {
        let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
        let user = file.extent_at(0).filter(|_| is_used);
        file.map.write().remove_idle(0, |_| is_empty);
        assert_eq!(file.extent_at(0).is_none(), !is_used && is_empty, "{is_used} {is_empty}");
        drop(user);
    }
}

#[test]
fn contents_are_lost_only_in_the_extent_in_which_they_were_to_be_stored() {
    let rig = Rig::new(1, 2);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
    let piece = Piece { stripe: 1, start: BLOCK, end: 2 * BLOCK };
    let (here, elsewhere) = (file.extent_at(EXTENT_BYTES).unwrap(), file.extent_at(0).unwrap());
    assert!(!file.map.write().lose_in(&piece, &elsewhere));
    assert!(bare.read(&file, 0, DATA).unwrap() == pattern(DATA, 3));
    assert!(file.map.write().lose_in(&piece, &here));
    let at = EXTENT_BYTES + BLOCK;
    assert_eq!(bare.read(&file, at, 1), Err(FileError::Lost { offset: at }));
    assert!(bare.read(&file, 0, at as usize).unwrap() == pattern(DATA, 3)[..at as usize]);
}

#[test]
fn tasks_that_write_one_stripe_share_its_extent_in_a_pool_without_spare_extents() {
    let stripes = REGION_BYTES / EXTENT_BYTES;
    for (redundancy, nodes) in [(Redundancy::Stripe, 1), (Redundancy::Mirror, 2)] {
        let rig = Rig::new(nodes, 1);
        let bare = Bare::new(&rig);
        let file = bare.store.create_as(redundancy);
        let half = EXTENT_BYTES / 2;
        let data = pattern(half as usize, 3);
        // None of the tasks gets an extent before the pool's only regions have come.
        let written = bare.run(async |core| {
            try_join_all((0..2 * stripes).map(|n| file.write(core, n * half, &data))).await
        });
        assert!(written.is_ok(), "{redundancy:?}: {written:?}");
        assert_eq!(file.allocated_bytes(), u64::from(nodes) * REGION_BYTES);
    }
}

#[test]
fn a_plain_extent_is_not_taken_for_a_file_that_has_become_one_with_rows() {
    let rig = Rig::new(1, 2);
    let bare = Bare::new(&rig);
    let file = bare.store.create_as(Redundancy::Mirror);
    let ensured = bare.run(async |_| file.ensure_extent(2).await);
    assert_eq!(ensured.err(), Some(FileError::Unavailable { offset: 2 * EXTENT_BYTES }));
    assert_eq!(file.allocated_bytes(), 0);
}

#[test]
fn a_file_whose_end_is_unknown_is_truncated_only_to_nothing() {
    let rig = Rig::new(1, 2);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
    file.map.write().found(None, BTreeMap::new());
    let set_size = |size| bare.run(async |core| file.set_size(core, size).await);
    for size in [1, DATA as u64] {
        assert_eq!(set_size(size), Err(FileError::Damaged { offset: 0 }));
    }
    set_size(0).unwrap();
    set_size(1).unwrap();
    assert_eq!(bare.read(&file, 0, 10).unwrap(), [0]);
}
