//! Rows of which a member is lost: whatever fails then, the rest of the row, from which that member's
//! contents follow, is not given up.

use std::sync::Arc;

use farpool_pool::Extent;
use farpool_wire::BlockWord;

use super::bare::Bare;
use super::*;
use crate::FileCore;
use crate::held::Held;
use crate::split::Piece;

pub(super) const PARITY: Redundancy = Redundancy::Parity { data: 2 };
pub(super) const HALF: usize = EXTENT_BYTES as usize;
/// The block in which the tests look.
pub(super) const COLUMN: u64 = 3;

/// A file of one row, with a parity. Nothing moves or rebuilds it.
pub(super) struct OneRow {
    pub(super) bare: Bare,
    pub(super) file: Arc<FileCore>,
    pub(super) contents: Vec<u8>,
}

impl OneRow {
    pub(super) fn new(rig: &Rig, bytes: usize) -> OneRow {
        let (bare, contents) = (Bare::new(rig), pattern(bytes, 3));
        let file = bare.filled(PARITY, &contents);
        OneRow { bare, file, contents }
    }

    pub(super) fn parity(&self) -> u64 {
        self.file.rows().unwrap().parity_of(0)
    }

    pub(super) fn extent(&self, member: u64) -> Arc<Extent> {
        self.file.map.read().extent(member).unwrap()
    }

    pub(super) fn lose(&self, member: u64) {
        self.extent(member).region().node.give_up();
    }

    /// A late write may land on the parity, and there is no room to which it could move.
    pub(super) fn doubt_parity_without_room(&self, rig: &Rig) {
        self.extent(self.parity()).doubt();
        self.bare.lose_all_regions(rig);
    }

    pub(super) fn is_readable(&self, from: usize, to: usize) -> bool {
        self.bare.read(&self.file, from as u64, to - from).is_ok_and(|found| found == self.contents[from..to])
    }

    pub(super) fn write(&self, at: u64, data: &[u8]) -> Result<(), FileError> {
        self.bare.run(async |core| self.file.write(core, at, data).await)
    }

    pub(super) fn word(&self, member: u64, block: u64) -> BlockWord {
        let words = &self.bare.store.words;
        words.load(words.place(&self.extent(member), block))
    }

    /// Makes the block of a member lost, as a failed store does.
    pub(super) fn lose_block(&self, member: u64, block: u64) {
        let words = &self.bare.store.words;
        words.store(words.place(&self.extent(member), block), self.word(member, block).lost());
    }

    /// Puts other bytes in the place of a member's block, whose word stays.
    pub(super) fn spoil_block(&self, member: u64, block: u64) {
        self.bare.put(&self.extent(member), block, &[0xEE; BLOCK_BYTES]);
    }
}

#[test]
fn a_write_behind_the_end_that_fails_leaves_the_last_block_readable() {
    let rig = Rig::new(3, 1);
    let size = 2 * HALF - 100;
    let row = OneRow::new(&rig, size);
    row.lose(0);
    row.doubt_parity_without_room(&rig);
    let appended = row.bare.run(async |core| row.file.write(core, size as u64, &[9; 50]).await);
    assert!(appended.is_err(), "it would have cost the first member's data");
    assert!(row.is_readable(0, size));
}

#[test]
fn a_hole_in_part_of_a_block_costs_no_other_part_where_the_parity_cannot_move() {
    let rig = Rig::new(3, 1);
    let row = OneRow::new(&rig, 2 * HALF);
    row.doubt_parity_without_room(&rig);
    row.bare.run(async |core| row.file.punch(core, 10, 20).await).unwrap();
    assert_eq!(row.bare.read(&row.file, 10, 20).unwrap(), vec![0; 20]);
    assert!(row.is_readable(0, 10) && row.is_readable(30, 2 * HALF));
}

#[test]
fn a_file_is_emptied_although_a_lost_member_s_only_copy_cannot_move() {
    for lost in [0, 1] {
        let rig = Rig::new(3, 1);
        let row = OneRow::new(&rig, 2 * HALF);
        row.lose(lost);
        row.doubt_parity_without_room(&rig);
        row.bare.run(async |core| row.file.set_size(core, 0).await).unwrap();
        assert!(row.file.map.read().is_empty(), "{lost}");
        row.bare.run(async |core| row.file.set_size(core, 2 * EXTENT_BYTES).await).unwrap();
        assert_eq!(row.bare.read(&row.file, 0, 2 * HALF).unwrap(), vec![0; 2 * HALF], "{lost}");
    }
}

#[test]
fn a_parity_that_is_lost_itself_holds_up_no_write() {
    let rig = Rig::new(3, 1);
    let row = OneRow::new(&rig, 2 * HALF);
    row.lose(0);
    row.doubt_parity_without_room(&rig);
    let write = |column| {
        let at = EXTENT_BYTES + column * BLOCK;
        row.bare.run(async |core| row.file.write(core, at, &[9; BLOCK_BYTES]).await)
    };
    assert!(write(COLUMN).is_err());
    let words = &row.bare.store.words;
    let place = words.place(&row.extent(row.parity()), COLUMN);
    words.store(place, words.load(place).lost());
    write(COLUMN).unwrap();
    assert!(write(COLUMN + 1).is_err());
}

#[test]
fn a_member_whose_place_cannot_be_read_for_now_is_not_given_up_in_a_rebuild() {
    let rig = Rig::new(3, 8);
    let row = OneRow::new(&rig, 2 * HALF);
    row.lose(0);
    let parity = row.parity();
    row.bare.run(async |core| {
        let members = row.file.row(row.file.rows().unwrap(), 0).unwrap();
        let of_parity = row.extent(parity);
        let column = [(parity, &*of_parity, COLUMN..COLUMN + 1)];
        let mut held = Held::take(&row.bare.store, core, column, 0).await.unwrap();
        let mut data = vec![0; BLOCK_BYTES];
        for (read, right) in [(Err(Some(FileError::Short)), Some(FileError::Short)), (Err(None), None)] {
            // The parity in its place is wrong from the beginning: only the other members could give it.
            let at = (parity, COLUMN);
            let renewed = row.file.renewed(core, &members, &mut held, at, &mut data, read).await;
            assert_eq!(renewed.as_ref().err(), right.as_ref());
            assert_eq!(renewed.is_ok_and(BlockWord::is_lost), right.is_none());
        }
    });
}

#[test]
fn a_successor_finds_a_lost_member_where_a_write_beside_it_had_stored_nothing_yet() {
    let rig = Rig::new(3, 8);
    for (is_stored, is_empty) in [(false, false), (true, false), (false, true)] {
        let row = OneRow::new(&rig, 2 * HALF);
        let at = COLUMN as usize * BLOCK_BYTES;
        if is_empty {
            let hole = (EXTENT_BYTES + COLUMN * BLOCK, BLOCK);
            row.bare.run(async |core| row.file.punch(core, hole.0, hole.1).await).unwrap();
        }
        row.lose(0);
        let words = &row.bare.store.words;
        row.bare.run(async |core| {
            for member in [1, row.parity()] {
                words.lock(core.endpoint(), words.place(&row.extent(member), COLUMN)).await.unwrap();
            }
            if is_stored {
                let mut buffer = core.buffer(BLOCK_BYTES).unwrap();
                buffer.fill(9);
                core.write(&row.extent(1), COLUMN * BLOCK, buffer).await.1.unwrap();
            }
            let members = row.file.row(row.file.rows().unwrap(), 0).unwrap();
            row.file.settle_left_column(core, &members, COLUMN).await;
        });
        assert_eq!(row.is_readable(at, at + BLOCK_BYTES), !is_stored, "{is_stored} {is_empty}");
        let of_parity = words.load(words.place(&row.extent(row.parity()), COLUMN));
        assert_eq!(of_parity.is_lost(), is_stored, "a parity that is not right is to be rebuilt");
        assert!(row.is_readable(0, at) && row.is_readable(at + BLOCK_BYTES, HALF));
        let beside = row.bare.read(&row.file, EXTENT_BYTES + COLUMN * BLOCK, BLOCK_BYTES).unwrap();
        let right =
            if is_empty { vec![0; BLOCK_BYTES] } else { row.contents[HALF + at..][..BLOCK_BYTES].to_vec() };
        assert!(beside == if is_stored { vec![9; BLOCK_BYTES] } else { right });
    }
}

#[test]
fn a_block_whose_writer_died_before_it_had_the_parity_s_lock_keeps_its_word() {
    let rig = Rig::new(3, 8);
    let row = OneRow::new(&rig, 2 * HALF);
    let words = &row.bare.store.words;
    row.bare.run(async |core| {
        words.lock(core.endpoint(), words.place(&row.extent(1), COLUMN)).await.unwrap();
        // What lies in its place is not what its word says: the rest of the row has the contents.
        let mut buffer = core.buffer(BLOCK_BYTES).unwrap();
        buffer.fill(9);
        core.write(&row.extent(1), COLUMN * BLOCK, buffer).await.1.unwrap();
        let members = row.file.row(row.file.rows().unwrap(), 0).unwrap();
        row.file.settle_left_column(core, &members, COLUMN).await;
    });
    assert!(row.is_readable(0, 2 * HALF));
}

#[test]
fn a_write_of_blocks_of_two_members_is_readable_whichever_is_lost() {
    for lost in [0, 1] {
        let rig = Rig::new(3, 1);
        let mut row = OneRow::new(&rig, 2 * HALF);
        row.lose(lost);
        let (at, data) = (HALF - 2 * BLOCK_BYTES, pattern(3 * BLOCK_BYTES, 55));
        row.bare.run(async |core| row.file.write(core, at as u64, &data).await).unwrap();
        row.contents[at..at + data.len()].copy_from_slice(&data);
        assert!(row.is_readable(0, 2 * HALF), "{lost}");
    }
}

#[test]
fn a_parity_waits_for_the_data_in_columns_where_it_is_a_lost_member_s_only_copy() {
    let rig = Rig::new(3, 1);
    let row = OneRow::new(&rig, 2 * HALF);
    row.bare.run(async |core| row.file.punch(core, EXTENT_BYTES, BLOCK).await).unwrap();
    let is_degraded = |blocks: &[(u64, u64)]| {
        let pieces: Vec<Piece> = blocks
            .iter()
            .map(|(stripe, block)| Piece { stripe: *stripe, start: block * BLOCK, end: (block + 1) * BLOCK })
            .collect();
        let members = row.file.row(row.file.rows().unwrap(), 0).unwrap();
        row.file.is_degraded(&members, &pieces)
    };
    assert!(!is_degraded(&[(0, COLUMN)]));
    row.lose(1);
    assert!(is_degraded(&[(0, COLUMN)]));
    assert!(!is_degraded(&[(1, COLUMN)]));
    assert!(!is_degraded(&[(0, COLUMN), (1, COLUMN)]));
    assert!(is_degraded(&[(0, COLUMN), (1, COLUMN + 1)]));
    assert!(!is_degraded(&[(0, 0)]), "the lost member is empty there");
}

#[test]
fn a_parity_that_is_a_lost_member_s_only_copy_is_stored_only_after_the_data() {
    let rig = Rig::new(3, 1);
    let row = OneRow::new(&rig, 2 * HALF);
    let parity = row.parity();
    // The members to which a write of the first member's block has stored, or tried to store.
    let tried = |is_degraded| {
        row.bare.run(async |core| {
            let members = row.file.row(row.file.rows().unwrap(), 0).unwrap();
            let [data, of_parity] =
                [0, parity].map(|member| vec![(member, COLUMN, core.buffer(BLOCK_BYTES).unwrap())]);
            let stores = row.file.store_members(core, &members, data, of_parity, is_degraded).await;
            stores.iter().map(|store| store.stripe).collect::<Vec<_>>()
        })
    };
    row.lose(1);
    assert_eq!(tried(true), [0, parity]);
    row.lose(0);
    assert_eq!(tried(true), [0], "the data were not stored");
    assert_eq!(tried(false), [0, parity], "both at once");
}
