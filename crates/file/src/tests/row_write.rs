//! Writes to rows of which some stores fail, or some members are lost.

use std::pin::pin;
use std::sync::Arc;

use farpool_pool::{AccessError, Extent, SessionCore};
use farpool_wire::{BlockWord, NodeId};
use futures_util::poll;

use super::bare::Bare;
use super::*;
use crate::blocks::BLOCKS_PER_EXTENT;
use crate::map::Loss;
use crate::row_write::Store;
use crate::split::Piece;
use crate::{FileCore, Rules, Shipped};

const PARITY: Redundancy = Redundancy::Parity { data: 2 };
const DATA: usize = 2 * EXTENT_BYTES as usize;
/// The block in which the tests look.
const COLUMN: u64 = 3;

type Block = Vec<u8>;

fn sum(one: &Block, other: &Block) -> Block {
    one.iter().zip(other).map(|(one, other)| one ^ other).collect()
}

/// The outcome of a store: `None` is *unknown*.
fn result_of(is_stored: Option<bool>) -> Result<(), AccessError> {
    match is_stored {
        Some(true) => Ok(()),
        Some(false) => Err(AccessError::ArenaFull),
        None => Err(AccessError::NodeLost { node: NodeId(1) }),
    }
}

/// A row of two extents with data and their parity: the old contents of a column, and the new ones.
struct Row {
    file: Arc<FileCore>,
    members: [u64; 3],
    old: [Block; 3],
    new: [Block; 3],
}

impl Row {
    fn new(file: Arc<FileCore>) -> Row {
        let parity = file.rows().unwrap().parity_of(0);
        let block = |extent: usize| {
            pattern(DATA, 3)[extent * EXTENT_BYTES as usize + COLUMN as usize * BLOCK_BYTES..][..BLOCK_BYTES]
                .to_vec()
        };
        let old = [block(0), block(1), sum(&block(0), &block(1))];
        let (first, second) = (pattern(BLOCK_BYTES, 101), pattern(BLOCK_BYTES, 203));
        let new = [first.clone(), second.clone(), sum(&first, &second)];
        Row { file, members: [0, 1, parity], old, new }
    }

    fn extent(&self, which: usize) -> Arc<Extent> {
        self.file.map.read().extent(self.members[which]).unwrap()
    }

    fn word(&self, which: usize) -> BlockWord {
        let words = &self.file.store.words;
        words.load(words.place(&self.extent(which), COLUMN))
    }

    fn set_word(&self, which: usize, word: BlockWord) {
        let words = &self.file.store.words;
        words.store(words.place(&self.extent(which), COLUMN), word);
    }

    /// Settles the column after stores with these outcomes; *no store at all* is the outer `None`. Returns
    /// whether the write has succeeded.
    async fn settle(&self, core: &SessionCore, outcomes: [Option<Option<bool>>; 3]) -> bool {
        let rows = self.file.rows().unwrap();
        let stored = (0..3).filter_map(|which| Some((which, outcomes[which]?)));
        let stores: Vec<Store> = stored
            .map(|(which, is_stored)| {
                let mut buffer = core.buffer(BLOCK_BYTES).unwrap();
                buffer.copy_from_slice(&self.new[which]);
                let stripe = self.members[which];
                Store { stripe, first_block: COLUMN, buffer, result: result_of(is_stored) }
            })
            .collect();
        let pieces: Vec<Piece> = (0..2)
            .filter(|which| outcomes[*which].is_some())
            .map(|which| Piece {
                stripe: self.members[which],
                start: COLUMN * BLOCK,
                end: (COLUMN + 1) * BLOCK,
            })
            .collect();
        let (mut held, row) = self.file.hold_row(core, rows, 0, &pieces, 0).await.unwrap().unwrap();
        let settled = self.file.settle_column(&row, &mut held, &stores, COLUMN);
        if let Err(error) = settled {
            let failed = (0..2).find(|which| outcomes[*which].is_some_and(|known| known != Some(true)));
            let which = failed.expect("the data were stored");
            let right = match outcomes[which] {
                Some(None) => FileError::Lost { offset: which as u64 * EXTENT_BYTES + COLUMN * BLOCK },
                _ => FileError::NoStaging,
            };
            assert_eq!(error, right, "{outcomes:?}");
        }
        settled.is_ok()
    }

    /// The contents of a column that the words promise, given what lies in far memory: what a reader gets of
    /// each data block, or `None` if the block is lost.
    fn readable(&self, memory: &[Option<&Block>; 3]) -> [Option<Block>; 2] {
        let word = |which| self.word(which);
        let fits = |which: usize, block: &Block| word(which).matches(Shipped::checksum(block));
        [0, 1].map(|which| {
            if word(which).is_lost() {
                return None;
            }
            if let Some(own) = memory[which].filter(|own| fits(which, own)) {
                return Some(own.clone());
            }
            let others = [1 - which, 2].map(|other| memory[other].filter(|block| fits(other, block)));
            let [Some(data), Some(parity)] = others else { panic!("a block is neither there nor lost") };
            let made = sum(data, parity);
            assert!(fits(which, &made), "the rest of the column gives other contents");
            Some(made)
        })
    }
}

/// All outcomes of a store.
const OUTCOMES: [Option<bool>; 3] = [Some(true), Some(false), None];

/// Checks a column after a write of both its data blocks, for everything that far memory may then hold.
async fn both_are_right(row: &Row, core: &SessionCore, outcomes: [Option<bool>; 3], has_parity: bool) {
    let before = [0, 1, 2].map(|which| row.word(which));
    let stores = [Some(outcomes[0]), Some(outcomes[1]), has_parity.then_some(outcomes[2])];
    let is_written = row.settle(core, stores).await;
    let failed = outcomes[..2].iter().filter(|outcome| **outcome != Some(true)).count();
    let parity_failed = !has_parity || outcomes[2] != Some(true);
    assert_eq!(is_written, failed == 0 || failed + usize::from(parity_failed) <= 1, "{outcomes:?}");
    for landed in 0..8 {
        let is_new = |which: usize| match stores[which] {
            Some(Some(known)) => known,
            Some(None) => landed >> which & 1 == 1,
            None => false,
        };
        let memory =
            [0, 1, 2].map(|which| Some(if is_new(which) { &row.new[which] } else { &row.old[which] }));
        let found = row.readable(&memory);
        if is_written {
            assert_eq!(found, [Some(row.new[0].clone()), Some(row.new[1].clone())], "{outcomes:?}");
        } else {
            for (which, found) in found.iter().enumerate() {
                let is_known =
                    found.as_ref().is_none_or(|block| *block == row.old[which] || *block == row.new[which]);
                assert!(is_known, "{outcomes:?}");
            }
        }
    }
    // If at most one block may have changed, the old contents are all there.
    let may_have_changed =
        stores.iter().filter(|store| store.is_some_and(|known| known != Some(false))).count();
    if !is_written && may_have_changed <= 1 && !before[2].is_lost() {
        assert_eq!([0, 1, 2].map(|which| row.word(which)), before, "{outcomes:?}");
    }
    (0..3).for_each(|which| row.set_word(which, before[which]));
}

#[test]
fn a_column_is_readable_whichever_of_its_stores_fail() {
    let rig = Rig::new(3, 8);
    let bare = Bare::new(&rig);
    let row = Row::new(bare.filled(PARITY, &pattern(DATA, 3)));
    bare.run(async |core| {
        for first in OUTCOMES {
            for second in OUTCOMES {
                both_are_right(&row, core, [first, second, Some(false)], false).await;
                for parity in OUTCOMES {
                    both_are_right(&row, core, [first, second, parity], true).await;
                }
            }
        }
        // Without a parity before the write, a block whose outcome is unknown cannot keep its word.
        row.set_word(2, row.word(2).lost());
        for first in OUTCOMES {
            let is_written = row.settle(core, [Some(first), None, None]).await;
            assert_eq!(is_written, first == Some(true), "there is no parity");
            assert_eq!(row.word(0).is_lost(), first.is_none());
            row.set_word(0, BlockWord::EMPTY.written(Shipped::checksum(&row.old[0])));
        }
    });
}

#[test]
fn a_write_beside_a_lost_member_needs_all_its_stores_unless_that_block_is_empty() {
    let rig = Rig::new(3, 8);
    let bare = Bare::new(&rig);
    let row = Row::new(bare.filled(PARITY, &pattern(DATA, 3)));
    row.extent(1).region().node.give_up();
    bare.run(async |core| {
        let before = [0, 1, 2].map(|which| row.word(which));
        for (second, is_needed) in [(before[1], true), (BlockWord::EMPTY, false), (before[1].lost(), false)] {
            for parity in OUTCOMES {
                row.set_word(1, second);
                let is_written = row.settle(core, [Some(None), None, Some(parity)]).await;
                assert_eq!(is_written, !is_needed && parity == Some(true), "{second:?}, {parity:?}");
                let is_written = {
                    (0..3).for_each(|which| row.set_word(which, before[which]));
                    row.set_word(1, second);
                    row.settle(core, [Some(Some(true)), None, Some(parity)]).await
                };
                assert!(is_written, "the data were stored");
                assert_eq!(row.word(2).is_lost(), parity != Some(true));
                (0..3).for_each(|which| row.set_word(which, before[which]));
            }
        }
    });
}

#[test]
fn a_write_that_stores_nothing_beside_a_lost_member_leaves_the_column_as_it_was() {
    let rig = Rig::new(3, 8);
    let bare = Bare::new(&rig);
    let row = Row::new(bare.filled(PARITY, &pattern(DATA, 3)));
    row.extent(1).region().node.give_up();
    bare.run(async |core| {
        let words = || [0, 1, 2].map(|which| row.word(which));
        let before = words();
        for parity in [None, Some(Some(false))] {
            assert!(!row.settle(core, [Some(Some(false)), None, parity]).await);
            assert_eq!(words(), before, "{parity:?}");
        }
    });
    assert!(bare.read(&row.file, 0, DATA).unwrap() == pattern(DATA, 3));
}

#[test]
fn a_row_that_has_lost_two_members_takes_writes_of_whole_blocks_again() {
    let rig = Rig::new(5, 8);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create_as(PARITY);
    file.write(&session, 0, &pattern(DATA, 3)).unwrap();
    let row = Row::new(file.inner.clone());
    for which in [0, 2] {
        row.extent(which).region().node.give_up();
    }
    let next = pattern(EXTENT_BYTES as usize, 55);
    file.write(&session, 0, &next).unwrap();
    assert!(read(&file, &session, 0, EXTENT_BYTES as usize).unwrap() == next);
    let second = &pattern(DATA, 3)[EXTENT_BYTES as usize..];
    assert!(read(&file, &session, EXTENT_BYTES, EXTENT_BYTES as usize).unwrap() == second);
    wait_until(|| store.core().is_whole());
    assert!((0..3).all(|which| !row.extent(which).region().has_ended()));
    // Any member can now be lost again.
    row.extent(0).region().node.give_up();
    assert!(read(&file, &session, 0, EXTENT_BYTES as usize).unwrap() == next);
}

#[test]
fn half_a_block_of_a_lost_member_is_written_with_the_rest_reconstructed() {
    let rig = Rig::new(3, 8);
    for redundancy in [PARITY, Redundancy::Mirror] {
        let bare = Bare::new(&rig);
        let file = bare.filled(redundancy, &pattern(DATA, 3));
        file.extent_at(EXTENT_BYTES).unwrap().region().node.give_up();
        let write = |at| bare.run(async |core| file.write(core, at, &[9; 50]).await);
        let at = EXTENT_BYTES + 2 * BLOCK + 100;
        write(at).unwrap();
        let mut right = pattern(DATA, 3);
        right[at as usize..at as usize + 50].fill(9);
        assert!(bare.read(&file, 0, DATA).unwrap() == right, "{redundancy}");
        // A block that is lost with its parity cannot be written in part.
        let rows = file.rows().unwrap();
        let parity = file.map.read().extent(rows.parity_of(rows.row_of(1))).unwrap();
        let words = &bare.store.words;
        words.store(words.place(&parity, 5), words.load(words.place(&parity, 5)).lost());
        let at = EXTENT_BYTES + 5 * BLOCK;
        assert_eq!(write(at + 1), Err(FileError::Lost { offset: at }), "{redundancy}");
    }
}

fn no_place(error: FileError) -> bool {
    matches!(error, FileError::NoSpace | FileError::TooFewNodes { .. })
}

/// A row whose first member is lost. Its only copy is the parity, on which a late write may still land.
fn with_a_doubtful_only_copy(rig: &Rig) -> (Bare, Row) {
    let bare = Bare::new(rig);
    let row = Row::new(bare.filled(PARITY, &pattern(DATA, 3)));
    row.extent(0).region().node.give_up();
    row.extent(2).doubt();
    (bare, row)
}

#[test]
fn a_parity_that_is_a_lost_member_s_only_copy_moves_before_its_row_changes() {
    let rig = Rig::new(3, 8);
    let half = EXTENT_BYTES as usize;
    type Change = fn(&Bare, &FileCore) -> Result<(), FileError>;
    let changes: [(Change, u8); 3] = [
        (|bare, file| bare.run(async |core| file.set_size(core, EXTENT_BYTES).await), 0),
        (|bare, file| bare.run(async |core| file.punch(core, EXTENT_BYTES, EXTENT_BYTES).await), 0),
        (|bare, file| bare.run(async |core| file.write(core, EXTENT_BYTES, &[9; DATA / 2]).await), 9),
    ];
    for (at, (change, byte)) in changes.into_iter().enumerate() {
        let (bare, row) = with_a_doubtful_only_copy(&rig);
        change(&bare, &row.file).unwrap();
        assert!(bare.read(&row.file, 0, half).unwrap() == pattern(DATA, 3)[..half], "{at}");
        let rest = bare.read(&row.file, EXTENT_BYTES, half).unwrap();
        assert!(rest.iter().all(|found| *found == byte), "{at}");
    }
}

#[test]
fn a_write_fails_if_a_lost_member_s_only_copy_has_no_place_to_move_to() {
    let rig = Rig::new(3, 1);
    let (bare, row) = with_a_doubtful_only_copy(&rig);
    bare.lose_all_regions(&rig); // no extent is taken there any more
    let half = EXTENT_BYTES as usize;
    let written = bare.run(async |core| row.file.write(core, EXTENT_BYTES, &[9; DATA / 2]).await);
    assert!(no_place(written.unwrap_err()), "it would have cost the first member's data");
    assert!(bare.read(&row.file, 0, half).unwrap() == pattern(DATA, 3)[..half]);
    // Where the lost member holds nothing, the write goes on without a parity.
    let words = &bare.store.words;
    (0..BLOCKS_PER_EXTENT)
        .for_each(|block| words.store(words.place(&row.extent(0), block), BlockWord::EMPTY));
    bare.run(async |core| row.file.write(core, EXTENT_BYTES, &[9; DATA / 2]).await).unwrap();
}

#[test]
fn a_hole_whose_parity_cannot_move_is_lost_and_the_lost_member_stays_readable() {
    let rig = Rig::new(3, 1);
    let (bare, row) = with_a_doubtful_only_copy(&rig);
    bare.lose_all_regions(&rig); // no extent is taken there any more
    bare.run(async |core| row.file.punch(core, EXTENT_BYTES, EXTENT_BYTES).await).unwrap();
    assert_eq!(bare.read(&row.file, EXTENT_BYTES, 1), Err(FileError::Lost { offset: EXTENT_BYTES }));
    let half = EXTENT_BYTES as usize;
    assert!(bare.read(&row.file, 0, half).unwrap() == pattern(DATA, 3)[..half]);
}

#[test]
fn a_hole_that_is_given_up_halfway_shows_no_contents_that_were_lost() {
    let rig = Rig::new(3, 8);
    for redundancy in [PARITY, Redundancy::None] {
        let bare = Bare::new(&rig);
        let file = bare.filled(redundancy, &pattern(DATA, 3));
        let (first, bytes) = (EXTENT_BYTES + BLOCK, 2 * BLOCK);
        file.map.write().lose(first, bytes, Loss::Gone);
        let words = &bare.store.words;
        let place = words.place(&file.extent_at(first).unwrap(), 1);
        bare.run(async |core| {
            let word = words.lock(core.endpoint(), place).await.unwrap();
            assert!(poll!(pin!(file.punch(core, first, bytes))).is_pending(), "it waits for the lock");
            words.store(place, word);
        });
        for at in [first, first + BLOCK] {
            assert_eq!(bare.read(&file, at, 1), Err(FileError::Lost { offset: at }), "{redundancy}");
        }
        bare.run(async |core| file.punch(core, first, bytes).await).unwrap();
        assert_eq!(bare.read(&file, first, bytes as usize).unwrap(), vec![0; bytes as usize]);
        // Where a file has no extent any more, nothing is lost either.
        file.map.write().lose(0, bytes, Loss::Gone);
        bare.run(async |core| file.punch(core, 0, DATA as u64).await).unwrap();
        file.map.write().lose(0, bytes, Loss::Gone);
        bare.run(async |core| file.punch(core, 0, bytes).await).unwrap();
        assert_eq!(bare.read(&file, 0, bytes as usize).unwrap(), vec![0; bytes as usize]);
    }
}

#[test]
fn a_write_to_a_lost_member_whose_parity_is_in_doubt_needs_a_place_for_one_of_them() {
    let mut rig = Rig::new(2, 1);
    let bare = Bare::new(&rig);
    let bytes = EXTENT_BYTES as usize;
    let file = bare.filled(Redundancy::Mirror, &pattern(bytes, 3));
    let parity = file.rows().unwrap().parity_of(0);
    file.extent_at(0).unwrap().region().node.give_up();
    file.map.read().extent(parity).unwrap().doubt();
    bare.lose_all_regions(&rig); // no extent is taken there any more
    let write = || bare.run(async |core| file.write(core, 0, &pattern(bytes, 5)).await);
    assert!(no_place(write().unwrap_err()));
    assert!(bare.read(&file, 0, bytes).unwrap() == pattern(bytes, 3), "the mirror has it");
    rig.start_node(2);
    wait_until(|| write().map_err(|error| assert!(no_place(error), "{error}")).is_ok());
    assert!(bare.read(&file, 0, bytes).unwrap() == pattern(bytes, 5));
}

#[test]
fn a_stored_block_is_readable_where_its_column_cannot_give_the_old_contents_any_more() {
    let rig = Rig::new(4, 8);
    let bare = Bare::new(&rig);
    let (bytes, extent) = (3 * EXTENT_BYTES as usize, EXTENT_BYTES as usize);
    let file = bare.filled(Redundancy::Parity { data: 3 }, &pattern(bytes, 3));
    file.extent_at(2 * EXTENT_BYTES).unwrap().region().node.give_up();
    let new = pattern(BLOCK_BYTES, 101);
    let at = COLUMN * BLOCK;
    bare.run(async |core| {
        let filled = || {
            let mut buffer = core.buffer(BLOCK_BYTES).unwrap();
            buffer.copy_from_slice(&new);
            buffer
        };
        core.write(&file.extent_at(0).unwrap(), at, filled()).await.1.unwrap();
        let pieces = [0, 1].map(|stripe| Piece { stripe, start: at, end: at + BLOCK });
        let rows = file.rows().unwrap();
        let (mut held, row) = file.hold_row(core, rows, 0, &pieces, 0).await.unwrap().unwrap();
        let stores = [(0, Some(true)), (1, Some(false))].map(|(stripe, is_stored)| Store {
            stripe,
            first_block: COLUMN,
            buffer: filled(),
            result: result_of(is_stored),
        });
        assert_eq!(file.settle_column(&row, &mut held, &stores, COLUMN), Err(FileError::NoStaging));
    });
    assert!(bare.read(&file, at, BLOCK_BYTES).unwrap() == new);
    let second = &pattern(bytes, 3)[extent + at as usize..][..BLOCK_BYTES];
    assert!(bare.read(&file, EXTENT_BYTES + at, BLOCK_BYTES).unwrap() == second);
}
