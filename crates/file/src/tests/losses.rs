//! Which blocks are lost, and which of them errors name.

use std::sync::Arc;

use farpool_pool::Where;

use super::bare::Bare;
use super::only_copy::{COLUMN, HALF, OneRow, PARITY};
use super::*;
use crate::map::Loss;
use crate::write::MAX_MOVES;

#[test]
fn a_read_names_the_first_block_that_is_lost_with_its_parity() {
    let rig = Rig::new(3, 1);
    let row = OneRow::new(&rig, 2 * HALF);
    row.lose(1);
    let lost = EXTENT_BYTES + COLUMN * BLOCK;
    for block in [COLUMN, COLUMN + 1] {
        row.lose_block(row.parity(), block);
    }
    let found = row.bare.read(&row.file, lost - BLOCK - 5, 3 * BLOCK_BYTES);
    assert_eq!(found, Err(FileError::Lost { offset: lost }));
}

#[test]
fn a_write_of_half_a_lost_block_names_it_although_the_parity_cannot_move() {
    let rig = Rig::new(3, 1);
    let row = OneRow::new(&rig, 2 * HALF);
    row.doubt_parity_without_room(&rig);
    row.lose_block(0, COLUMN);
    let written = row.write(COLUMN * BLOCK + 1, &[9; 50]);
    assert_eq!(written, Err(FileError::Lost { offset: COLUMN * BLOCK }));
}

#[test]
fn half_a_block_is_written_unless_that_very_block_is_recorded_as_lost() {
    let rig = Rig::new(3, 8);
    let bare = Bare::new(&rig);
    let at = |block: u64| EXTENT_BYTES + block * BLOCK;
    for redundancy in [Redundancy::Stripe, PARITY] {
        for lost in [0, 5] {
            let file = bare.filled(redundancy, &pattern(2 * HALF, 3));
            file.map.write().lose(at(lost), 1, Loss::Gone);
            for block in [0, 1, 2, 3, 5, 6] {
                let written = bare.run(async |core| file.write(core, at(block) + 100, &[9; 50]).await);
                let right = if block == lost { Err(FileError::Lost { offset: at(lost) }) } else { Ok(()) };
                assert_eq!(written, right, "{redundancy}: {block}, {lost} is lost");
            }
        }
    }
}

#[test]
fn a_hole_ends_the_losses_in_its_own_blocks_and_in_no_others() {
    let rig = Rig::new(3, 8);
    let bare = Bare::new(&rig);
    for redundancy in [Redundancy::Stripe, PARITY] {
        let file = bare.filled(redundancy, &pattern(2 * HALF, 3));
        file.map.write().lose(2 * BLOCK, 6 * BLOCK, Loss::Gone);
        bare.run(async |core| file.punch(core, 3 * BLOCK, BLOCK).await).unwrap();
        for block in 2..8 {
            let right = match block {
                3 => Ok(vec![0]),
                _ => Err(FileError::Lost { offset: block * BLOCK }),
            };
            assert_eq!(bare.read(&file, block * BLOCK, 1), right, "{redundancy}");
        }
    }
}

#[test]
fn a_hole_in_an_extent_that_moves_again_and_again_is_lost_and_its_neighbours_are_not() {
    let rig = Rig::new(1, 8);
    let bare = Bare::new(&rig);
    let words = &bare.store.words;
    for block in [0, COLUMN] {
        let file = bare.filled(Redundancy::Stripe, &pattern(HALF, 3));
        bare.run(async |core| {
            let lock = |place| words.lock(core.endpoint(), place);
            let mut now = file.extent_at(0).unwrap();
            let mut locked = lock(words.place(&now, block)).await.unwrap();
            // Each time the hole waits for a lock, the extent moves, and the new extent's lock is taken.
            let moves = async {
                for _ in 0..MAX_MOVES {
                    let fresh = bare.store.take_extent(0, &Where::Anywhere).await.unwrap();
                    let next = lock(words.place(&fresh, block)).await.unwrap();
                    while Arc::strong_count(&now) < 3 {
                        core.endpoint().yield_now().await; // the hole has not found this extent yet
                    }
                    assert!(file.map.write().replace(0, &now, fresh));
                    words.store(words.place(&now, block), locked);
                    (now, locked) = (file.extent_at(0).unwrap(), next);
                }
            };
            join(file.punch(core, block * BLOCK, BLOCK), moves).await.0.unwrap();
            words.store(words.place(&now, block), locked);
        });
        for neighbour in 0..HALF as u64 / BLOCK {
            let offset = neighbour * BLOCK;
            let right = if neighbour == block { Err(FileError::Lost { offset }) } else { Ok(vec![0]) };
            assert_eq!(bare.read(&file, offset, 1), right);
        }
    }
}

#[test]
fn a_row_that_has_lost_more_than_its_parity_replaces_counts_as_lost() {
    let rig = Rig::new(3, 1);
    let row = OneRow::new(&rig, 2 * HALF);
    row.lose(0);
    assert_eq!(row.file.lost_bytes(), 0);
    row.lose(1);
    assert_eq!(row.file.lost_bytes(), 2 * EXTENT_BYTES);
}

#[test]
fn a_lost_extent_that_could_not_be_written_anew_reads_as_an_error_and_not_as_zeros() {
    let mut rig = Rig::new(2, 4);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Stripe, &pattern(2 * HALF, 3));
    rig.kill_node(0);
    let has_ended = |stripe: u64| file.extent_at(stripe * EXTENT_BYTES).unwrap().region().has_ended();
    let mut lost = None;
    wait_until(|| {
        let _ = bare.read(&file, 0, 2 * HALF);
        lost = [0, 1].into_iter().find(|stripe| has_ended(*stripe));
        lost.is_some()
    });
    let (stripe, offset) = (lost.unwrap(), lost.unwrap() * EXTENT_BYTES);
    let written = bare.run(async |core| {
        let _taken: Vec<_> = std::iter::from_fn(|| core.buffer(BLOCK_BYTES).ok()).collect();
        file.write(core, offset, &[9; HALF]).await
    });
    assert_eq!(written, Err(FileError::NoStaging));
    assert!(!has_ended(stripe), "another extent has taken its place");
    assert_eq!(bare.read(&file, offset, 1), Err(FileError::Lost { offset }));
    bare.run(async |core| file.write(core, offset, &[9; HALF]).await).unwrap();
    assert!(bare.read(&file, offset, HALF).unwrap() == [9; HALF]);
}

#[test]
fn bytes_that_a_failed_write_has_stored_behind_the_end_never_become_a_part_of_the_file() {
    let rig = Rig::new(1, 1);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Stripe, &[1; 100]);
    bare.lose_all_regions(&rig); // the first extent can be written, and there is no second one
    let written = bare.run(async |core| file.write(core, 50, &[9; HALF + 100]).await);
    assert_eq!((written, file.size()), (Err(FileError::NoSpace), 100));
    bare.run(async |core| file.set_size(core, 1000).await).unwrap();
    assert!(bare.read(&file, 0, 50).unwrap() == [1; 50]);
    assert!(bare.read(&file, 100, 900).unwrap() == [0; 900]);
}
