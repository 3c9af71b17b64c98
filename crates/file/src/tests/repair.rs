//! Rebuilds, repairs and scrubs of single members and blocks, without the thread that does them in a mount.

use std::pin::pin;
use std::sync::Arc;

use farpool_fabric::block_on;
use farpool_pool::{Extent, LeaseKeeper, NodeState, SessionCore, Sign};
use farpool_wire::BlockWord;
use futures_util::poll;

use super::bare::Bare;
use super::*;
use crate::FileCore;
use crate::blocks::BLOCKS_PER_EXTENT;
use crate::redundancy::Rows;
use crate::rows::replace_member;

const PARITY: Redundancy = Redundancy::Parity { data: 2 };
/// Two rows, with the members 0 and 1, and 2 and 3.
const DATA: usize = 4 * EXTENT_BYTES as usize;
const ROW: usize = 2 * EXTENT_BYTES as usize;
/// The block in which the tests look.
const COLUMN: u64 = 3;

/// A file with rows. Nothing moves or rebuilds it beside the test.
struct Rowed {
    bare: Bare,
    file: Arc<FileCore>,
    rows: Rows,
}

impl Rowed {
    fn new(rig: &Rig, bytes: usize) -> Rowed {
        let bare = Bare::new(rig);
        let file = bare.filled(PARITY, &pattern(bytes, 3));
        let rows = file.rows().unwrap();
        Rowed { bare, file, rows }
    }

    fn extent(&self, member: u64) -> Arc<Extent> {
        self.file.map.read().extent(member).unwrap()
    }

    fn lose(&self, member: u64) {
        self.extent(member).region().node.give_up();
    }

    fn word(&self, member: u64, block: u64) -> BlockWord {
        let words = &self.bare.store.words;
        words.load(words.place(&self.extent(member), block))
    }

    fn change_word(&self, member: u64, block: u64, change: impl Fn(BlockWord) -> BlockWord) {
        let words = &self.bare.store.words;
        words.store(words.place(&self.extent(member), block), change(self.word(member, block)));
    }

    /// Puts other bytes into a block without changing its word.
    fn damage(&self, member: u64, block: u64) {
        self.bare.put(&self.extent(member), block, &[0xEE; BLOCK_BYTES]);
    }

    fn repair(&self, member: u64, block: u64) -> Result<bool, FileError> {
        self.bare.run(async |core| self.file.repair_block(core, self.rows, member, block).await)
    }

    fn rebuild(&self, member: u64) -> Result<(), FileError> {
        self.bare.run(async |core| self.file.rebuild_extent(core, self.rows, member).await)
    }

    fn scrub(&self) {
        self.bare.run(async |core| self.bare.store.scrub(core, || false).await).unwrap();
    }

    /// What was counted so far: wrong, repaired and lost blocks, and those that the last scrub has not read.
    fn found(&self) -> (u64, u64, u64, u64) {
        let status = self.bare.store.volume_status();
        (status.wrong_blocks, status.repaired_blocks, status.lost_blocks, status.unread_blocks)
    }

    fn is_readable(&self, bytes: usize) -> bool {
        self.bare.read(&self.file, 0, bytes).is_ok_and(|found| found == pattern(bytes, 3))
    }
}

/// Leases that have run out, as far as a session knows, although none has ended.
struct RunOut;

impl LeaseKeeper for RunOut {
    fn now(&self) -> Millis {
        Millis(u64::MAX / 2)
    }

    fn node_failed(&self, _: &NodeState, _: Sign) -> bool {
        false
    }

    fn node_answered(&self, _: &NodeState) {}

    fn patience_ended(&self, _: &NodeState) -> bool {
        false
    }

    fn lease_lost(&self, _: RegionId, _: Epoch) {}
}

/// Runs a task in a session that reads and writes nothing for now, and loses its patience with a locked block
/// at once.
fn run_late<T>(task: impl AsyncFnOnce(&SessionCore) -> T) -> T {
    let core = SessionCore::new(Arc::new(RunOut), endpoint(Hasty::default()));
    block_on(core.endpoint(), task(&core))
}

#[test]
fn repairs_rebuilds_and_scrubs_name_the_place_that_stays_locked() {
    let rig = Rig::new(4, 8);
    let row = Rowed::new(&rig, DATA);
    row.change_word(2, COLUMN, BlockWord::locked);
    let (extent, block) = (2 * EXTENT_BYTES, 2 * EXTENT_BYTES + COLUMN * BLOCK);
    let repaired = run_late(async |core| row.file.repair_block(core, row.rows, 2, COLUMN).await);
    assert_eq!(repaired, Err(FileError::Unavailable { offset: block }));
    let rebuilt = run_late(async |core| row.file.rebuild_extent(core, row.rows, 2).await);
    assert_eq!(rebuilt, Err(FileError::Unavailable { offset: extent }));

    // A scrub reads nothing of a row that was only reserved.
    let bare = Bare::new(&rig);
    let file = bare.store.create_as(PARITY);
    bare.run(async |_| file.reserve(extent, EXTENT_BYTES).await).unwrap();
    let parity = file.map.read().extent(row.rows.parity_of(1)).unwrap();
    bare.store.words.store(bare.store.words.place(&parity, COLUMN), BlockWord::EMPTY.locked());
    let scrubbed = run_late(async |core| bare.store.scrub(core, || false).await);
    assert_eq!(scrubbed, Err(FileError::Unavailable { offset: block }));
    let status = bare.store.volume_status();
    assert_eq!((status.unread_blocks, status.scrub.done), (2, 2 * BLOCKS_PER_EXTENT));
}

#[test]
fn a_member_whose_only_copy_cannot_be_read_for_now_is_rebuilt_later() {
    let rig = Rig::new(4, 8);
    let row = Rowed::new(&rig, DATA);
    row.change_word(row.rows.parity_of(1), 0, BlockWord::lost);
    let rebuilt = run_late(async |core| row.file.rebuild_extent(core, row.rows, 2).await);
    assert_eq!(rebuilt, Err(FileError::Unavailable { offset: 2 * EXTENT_BYTES }));
    assert!(!row.word(2, 0).is_lost());
    row.rebuild(2).unwrap();
    assert!(row.is_readable(DATA));
}

#[test]
fn a_rebuild_whose_new_place_cannot_be_written_for_now_fails_and_tries_no_other_place() {
    let rig = Rig::new(4, 8);
    let row = Rowed::new(&rig, DATA);
    let parity = row.rows.parity_of(1);
    // The parity of holes is computed, so nothing has to be read.
    for block in 0..BLOCKS_PER_EXTENT {
        [2, 3].into_iter().for_each(|member| row.change_word(member, block, |_| BlockWord::EMPTY));
    }
    let rebuilt = run_late(async |core| row.file.rebuild_extent(core, row.rows, parity).await);
    assert_eq!(rebuilt, Err(FileError::Lost { offset: 2 * EXTENT_BYTES }));
}

#[test]
fn a_member_without_contents_is_rebuilt_even_if_nothing_can_be_read_or_written() {
    let rig = Rig::new(3, 8);
    let bare = Bare::new(&rig);
    let file = bare.store.create_as(PARITY);
    bare.run(async |_| file.reserve(0, EXTENT_BYTES).await).unwrap();
    let old = file.extent_at(0).unwrap();
    let rows = file.rows().unwrap();
    run_late(async |core| file.rebuild_extent(core, rows, 0).await).unwrap();
    assert!(!Arc::ptr_eq(&old, &file.extent_at(0).unwrap()));
}

#[test]
fn a_repair_leaves_a_right_block_alone_even_if_it_could_not_be_reconstructed() {
    let rig = Rig::new(3, 8);
    let row = Rowed::new(&rig, ROW);
    assert_eq!(row.repair(0, COLUMN), Ok(true));
    row.change_word(row.rows.parity_of(0), COLUMN, BlockWord::lost);
    assert_eq!(row.repair(0, COLUMN), Ok(true));
    assert_eq!(row.found(), (0, 0, 0, 0));
}

#[test]
fn a_block_that_is_repaired_keeps_its_word() {
    let rig = Rig::new(3, 8);
    let row = Rowed::new(&rig, ROW);
    for (count, member) in (1..).zip([0, 1, row.rows.parity_of(0)]) {
        let word = row.word(member, COLUMN);
        row.damage(member, COLUMN);
        assert_eq!(row.repair(member, COLUMN), Ok(true));
        assert_eq!((row.word(member, COLUMN), row.found()), (word, (0, count, 0, 0)));
    }
    row.lose(1);
    assert!(row.is_readable(ROW));
}

#[test]
fn a_block_that_cannot_be_repaired_is_counted_and_its_parity_is_not() {
    let rig = Rig::new(3, 8);
    let row = Rowed::new(&rig, ROW);
    row.damage(0, COLUMN);
    row.change_word(row.rows.parity_of(0), COLUMN, BlockWord::lost);
    assert_eq!((row.repair(0, COLUMN), row.found()), (Ok(false), (0, 0, 1, 0)));
    assert_eq!((row.repair(row.rows.parity_of(0), COLUMN), row.found()), (Ok(false), (0, 0, 1, 0)));
}

#[test]
fn nothing_is_repaired_in_place_where_a_late_write_may_land_or_the_node_is_lost() {
    let rig = Rig::new(3, 8);
    let row = Rowed::new(&rig, ROW);
    row.damage(0, COLUMN);
    row.extent(0).doubt();
    assert_eq!(row.repair(0, COLUMN), Ok(false));
    row.change_word(1, COLUMN + 1, BlockWord::lost);
    assert_eq!(row.repair(1, COLUMN + 1), Ok(false));
    row.lose(1);
    assert_eq!(row.repair(1, COLUMN + 2), Ok(false));
    assert_eq!(row.found(), (0, 0, 0, 0));
}

#[test]
fn a_repair_whose_row_changes_while_it_waits_asks_for_another() {
    let rig = Rig::new(3, 8);
    for of_parity in [false, true] {
        let row = Rowed::new(&rig, ROW);
        let (file, words) = (&row.file, &row.bare.store.words);
        let member = if of_parity { row.rows.parity_of(0) } else { 0 };
        let old = row.extent(member);
        row.bare.run(async |core| {
            let place = words.place(&old, COLUMN);
            let word = words.lock(core.endpoint(), place).await.unwrap();
            let mut repair = pin!(file.repair_block(core, row.rows, 0, COLUMN));
            assert!(poll!(&mut repair).is_pending(), "it waits for the lock");
            let fresh = file.take_member(row.rows, member, None).await.unwrap();
            assert!(replace_member(&mut file.map.write(), row.rows, member, &old, fresh));
            words.store(place, word);
            assert_eq!(repair.await, Ok(true));
        });
        assert!(row.bare.store.is_to_rebuild(), "{of_parity}");
    }
}

#[test]
fn a_rebuilt_parity_is_that_of_its_data_and_keeps_the_words_that_fit() {
    let rig = Rig::new(4, 8);
    let row = Rowed::new(&rig, ROW);
    let parity = row.rows.parity_of(0);
    let words = || (0..BLOCKS_PER_EXTENT).map(|block| row.word(parity, block)).collect::<Vec<_>>();
    let before = words();
    row.change_word(parity, 1, BlockWord::lost);
    row.change_word(parity, 2, |word| word.written(5));
    (0..BLOCKS_PER_EXTENT).for_each(|block| row.damage(parity, block));
    row.rebuild(parity).unwrap();
    let after = words();
    assert_eq!((after[0], &after[3..]), (before[0], &before[3..]));
    assert!(!after[1].is_lost() && after[2] != before[2]);
    row.lose(0);
    assert!(row.is_readable(ROW));
}

#[test]
fn a_rebuild_counts_the_blocks_that_it_gives_up_and_not_those_lost_before() {
    let rig = Rig::new(4, 8);
    let row = Rowed::new(&rig, ROW);
    let parity = row.rows.parity_of(0);
    row.change_word(0, 1, BlockWord::lost);
    for block in [2, 3] {
        row.damage(0, block);
        row.change_word(parity, block, BlockWord::lost);
    }
    row.rebuild(0).unwrap();
    assert_eq!(row.bare.store.volume_status().lost_blocks, 2);
    for block in 0..5 {
        let found = row.bare.read(&row.file, block * BLOCK, BLOCK_BYTES);
        assert_eq!(found.is_err(), (1..=3).contains(&block), "block {block}");
    }
}

#[test]
fn a_rebuild_that_is_stopped_goes_on_later_and_counts_blocks() {
    let rig = Rig::new(4, 8);
    let row = Rowed::new(&rig, DATA);
    let store = &row.bare.store;
    [0, 3].into_iter().for_each(|member| row.extent(member).doubt());
    store.volume.ask_for_repair();
    let rebuild = |is_stopped: bool| {
        row.bare.run(async |core| store.rebuild(core, || is_stopped).await).unwrap();
        let progress = store.volume_status().rebuild;
        (progress.total, progress.done, progress.finished)
    };
    assert_eq!(rebuild(true), (2 * BLOCKS_PER_EXTENT, 0, 0));
    assert!(store.is_to_rebuild());
    assert_eq!(rebuild(false), (2 * BLOCKS_PER_EXTENT, 2 * BLOCKS_PER_EXTENT, 1));
    assert!(!store.is_to_rebuild() && store.is_whole() && row.is_readable(DATA));
}

#[test]
fn a_rebuild_that_fails_is_repeated_after_a_pause_or_on_request() {
    let rig = Rig::new(2, 1);
    let bare = Bare::new(&rig);
    let mirror = bare.filled(Redundancy::Mirror, &pattern(DATA, 3)); // takes all that there is
    mirror.extent_at(0).unwrap().doubt();
    bare.store.volume.ask_for_repair();
    let attempts = || bare.store.volume_status().rebuild.attempts;
    let maintain = || bare.run(async |core| bare.store.maintain(core, || false).await);
    // After six failures, the pause lasts seconds.
    for count in 1..=6 {
        assert!(bare.run(async |core| bare.store.rebuild(core, || false).await).is_err());
        assert_eq!(attempts(), count);
    }
    maintain().unwrap();
    assert_eq!(attempts(), 6);
    bare.store.volume.ask_rebuild();
    assert!(maintain().is_err());
    assert_eq!(attempts(), 7);
}

#[test]
fn a_scrub_runs_once_for_each_request() {
    let rig = Rig::new(1, 1);
    let bare = Bare::new(&rig);
    let _file = bare.filled(Redundancy::Stripe, &pattern(BLOCK_BYTES, 3));
    let attempts = || {
        (0..2).for_each(|_| bare.run(async |core| bare.store.maintain(core, || false).await).unwrap());
        bare.store.volume_status().scrub.attempts
    };
    assert_eq!(attempts(), 0);
    bare.store.volume.want_scrub();
    assert_eq!(attempts(), 1);
}

#[test]
fn a_scrub_counts_lost_data_and_neither_holes_nor_lost_parity() {
    let rig = Rig::new(3, 8);
    let row = Rowed::new(&rig, BLOCK_BYTES);
    let parity = row.rows.parity_of(0);
    let beside = EXTENT_BYTES + COLUMN * BLOCK;
    for at in [COLUMN * BLOCK, beside] {
        row.bare.run(async |core| row.file.write(core, at, &[9; BLOCK_BYTES]).await).unwrap();
    }
    row.scrub();
    assert_eq!(row.found(), (0, 0, 0, 0));
    [0, 1, parity].into_iter().for_each(|member| row.change_word(member, COLUMN, BlockWord::lost));
    row.scrub();
    assert_eq!(row.found(), (0, 0, 2, 2));
    [0, 1].into_iter().for_each(|member| row.change_word(member, COLUMN, |_| BlockWord::EMPTY));
    row.scrub();
    assert_eq!(row.found(), (0, 0, 2, 0), "nothing more");
}

#[test]
fn a_scrub_counts_missing_blocks_as_lost_if_nothing_can_give_them_back() {
    let rig = Rig::new(3, 8);
    let row = Rowed::new(&rig, ROW);
    row.change_word(row.rows.parity_of(0), COLUMN, BlockWord::lost);
    row.lose(0);
    row.scrub();
    assert_eq!(row.found(), (0, 0, 1, BLOCKS_PER_EXTENT));
}
