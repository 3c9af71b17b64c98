//! The parity that a write or a hole leaves in a column.

use super::bare::Bare;
use super::only_copy::{COLUMN, HALF, OneRow};
use super::*;
use crate::row_write::{Part, Plan, RowStored};
use crate::split::Piece;

#[test]
fn nothing_new_is_stored_in_a_parity_on_which_a_late_write_may_land() {
    let rig = Rig::new(3, 1);
    let row = OneRow::new(&rig, 2 * HALF);
    row.doubt_parity_without_room(&rig);
    row.write(COLUMN * BLOCK, &[9; BLOCK_BYTES]).unwrap();
    assert!(row.word(row.parity(), COLUMN).is_lost());
    assert!(!row.word(row.parity(), COLUMN + 1).is_lost(), "nothing was written there");
}

#[test]
fn a_write_that_gave_the_parity_up_uses_one_that_has_moved_meanwhile() {
    let rig = Rig::new(3, 1);
    let row = OneRow::new(&rig, 2 * HALF);
    row.lose(0);
    let (piece, data) = (Piece { stripe: 0, start: 0, end: BLOCK }, &[9; BLOCK_BYTES]);
    let rows = row.file.rows().unwrap();
    let stored =
        row.bare.run(async |core| row.file.store_row(core, rows, &[Part { piece, data }], true).await);
    assert_eq!(stored, Ok(RowStored::Yes));
    assert_eq!(row.bare.read(&row.file, 0, BLOCK_BYTES).unwrap(), [9; BLOCK_BYTES]);
}

#[test]
fn a_column_without_data_has_an_empty_parity() {
    let rig = Rig::new(3, 1);
    let row = OneRow::new(&rig, 2 * HALF);
    for (member, is_last) in [(1, false), (0, true)] {
        let hole = member * EXTENT_BYTES + COLUMN * BLOCK;
        row.bare.run(async |core| row.file.punch(core, hole, BLOCK).await).unwrap();
        assert_eq!(row.word(row.parity(), COLUMN).is_empty(), is_last);
    }
    assert!(!row.word(row.parity(), COLUMN + 1).is_empty());
}

#[test]
fn a_hole_in_part_of_an_empty_block_changes_neither_the_block_nor_its_parity() {
    let rig = Rig::new(3, 1);
    let row = OneRow::new(&rig, 2 * HALF);
    let punch = |from, bytes| row.bare.run(async |core| row.file.punch(core, from, bytes).await).unwrap();
    let words = || [0, 1, row.parity()].map(|member| row.word(member, COLUMN));
    punch(COLUMN * BLOCK, BLOCK);
    let before = words();
    assert!(before[0].is_empty());
    punch(COLUMN * BLOCK + 10, 20);
    assert_eq!(words(), before);
}

#[test]
fn a_parity_is_computed_from_the_other_data_if_its_old_contents_are_wrong() {
    for spoiled in ["the parity", "the data that are written"] {
        let rig = Rig::new(5, 1);
        let (bare, contents) = (Bare::new(&rig), pattern(4 * HALF, 3));
        let file = bare.filled(Redundancy::Parity { data: 4 }, &contents);
        let row = OneRow { bare, file, contents };
        row.spoil_block(if spoiled == "the parity" { row.parity() } else { 0 }, COLUMN);
        row.write(COLUMN * BLOCK, &[9; BLOCK_BYTES]).unwrap();
        row.lose(1);
        assert!(row.is_readable(HALF, 2 * HALF), "{spoiled}");
    }
}

#[test]
fn parities_of_consecutive_columns_are_stored_in_one_operation() {
    let rig = Rig::new(1, 1);
    let bare = Bare::new(&rig);
    let file = bare.store.create_as(Redundancy::Mirror);
    let parity = file.rows().unwrap().parity_of(0);
    let sum = |byte: u8| vec![byte; BLOCK_BYTES];
    let plans = [Plan::Sum(sum(1)), Plan::Sum(sum(2)), Plan::None, Plan::Sum(sum(4)), Plan::Sum(sum(6))];
    let buffers: Vec<(u64, u64, Vec<u8>)> = bare.run(async |core| {
        let buffers = file.parity_buffers(core, parity, &[1, 2, 3, 4, 6], &plans).unwrap();
        buffers.into_iter().map(|(member, first, buffer)| (member, first, buffer.to_vec())).collect()
    });
    assert!(buffers == [(parity, 1, [sum(1), sum(2)].concat()), (parity, 4, sum(4)), (parity, 6, sum(6))]);
}
