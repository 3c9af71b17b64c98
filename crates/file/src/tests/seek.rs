//! Data and holes.

use super::*;

fn map_of(file: &FarFile) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(start) = file.seek_data(at) {
        assert!(start >= at && start < file.size(), "data begins at {start}");
        at = file.seek_hole(start).unwrap();
        assert!(at > start && at <= file.size(), "a hole begins at {at}");
        found.push((start, at));
    }
    found
}

/// Checks that holes read as zeros, and that a search from any offset finds the same data and holes.
pub(super) fn holes_agree_with_model(file: &FarFile, model: &[u8]) -> Result<(), TestCaseError> {
    let mut data = vec![false; model.len()];
    for (start, end) in map_of(file) {
        data[start as usize..end as usize].fill(true);
    }
    for (at, byte) in model.iter().enumerate() {
        prop_assert!(data[at] || *byte == 0, "byte {} lies in a hole", at);
    }
    let size = model.len() as u64;
    for at in (0..size).step_by(BLOCK_BYTES / 2 + 1) {
        let next = |wanted: bool| (at..size).find(|&place| data[place as usize] == wanted);
        prop_assert_eq!(file.seek_data(at), next(true));
        prop_assert_eq!(file.seek_hole(at), Some(next(false).unwrap_or(size)));
    }
    prop_assert_eq!((file.seek_data(size), file.seek_hole(size)), (None, None));
    Ok(())
}

#[test]
fn only_what_was_written_is_data_and_a_reserved_or_punched_range_is_a_hole() {
    let rig = Rig::new(1, 4);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    file.set_size(&session, 3 * EXTENT_BYTES + 5).unwrap();
    assert_eq!((map_of(&file), file.seek_hole(7)), (vec![], Some(7)));
    file.reserve(&session, 0, EXTENT_BYTES).unwrap();
    assert_eq!(map_of(&file), []);
    file.write(&session, EXTENT_BYTES - 1, &[1; 2]).unwrap();
    file.write(&session, 3 * EXTENT_BYTES + 4, &[1]).unwrap();
    let tail = (3 * EXTENT_BYTES, 3 * EXTENT_BYTES + 5);
    assert_eq!(map_of(&file), [(EXTENT_BYTES - BLOCK, EXTENT_BYTES + BLOCK), tail]);
    file.punch(&session, EXTENT_BYTES - BLOCK, BLOCK).unwrap();
    assert_eq!(map_of(&file), [(EXTENT_BYTES, EXTENT_BYTES + BLOCK), tail]);
}

#[test]
fn what_is_lost_is_no_hole() {
    let rig = Rig::new(1, 4);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    file.set_size(&session, EXTENT_BYTES).unwrap();
    file.mark_lost(3 * BLOCK, 2 * BLOCK, FileError::NoSpace);
    assert_eq!(map_of(&file), [(3 * BLOCK, 5 * BLOCK)]);
    file.write(&session, 4 * BLOCK, &pattern(BLOCK_BYTES, 1)).unwrap();
    assert_eq!(map_of(&file), [(3 * BLOCK, 5 * BLOCK)]);
}
