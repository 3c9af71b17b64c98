//! Files that outlive their owner.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use farpool_fabric::create_sealed;
use farpool_keep::{Kept, MemoryJournal};
use farpool_pool::{EXTENT_BYTES, Extent, KeptState, Pool, PoolConfig, Where};
use farpool_wire::{BLOCK_BYTES, BlockWord};
use futures_util::future::join_all;
use rustix::fs::SeekFrom;

use super::{BLOCK, REGION_BYTES, Rig, pattern, read, taken_blocks};
use crate::blocks::{ECHOES, SLOTS, WITNESSES};
use crate::{FarFile, FileError, FileStore, KEPT_WORDS_BYTES, Redundancy, Session};

/// The state that outlives an owner, and that its successor takes over.
struct Keep {
    journal: Arc<MemoryJournal>,
    words: OwnedFd,
}

impl Keep {
    fn new() -> Keep {
        let words = create_sealed("kept", KEPT_WORDS_BYTES).unwrap();
        Keep { journal: Arc::default(), words }
    }

    fn kept(&self) -> Kept {
        self.journal.kept()
    }

    /// An owner, with the files that its predecessor has left.
    fn store(&mut self, rig: &Rig, ids: &[u64]) -> (FileStore, Vec<FarFile>) {
        self.journal.abandon();
        let kept = self.kept();
        self.journal = Arc::new(self.journal.successor());
        let (broker, transport) = (rig.broker.to_string(), farpool_fabric::TransportChoice::Tcp.into());
        let config = PoolConfig { broker, tls: None, transport, limit_bytes: None };
        let state = KeptState { journal: self.journal.clone(), kept: &kept, dir: Path::new("/") };
        let (pool, adoption) = Pool::connect_keeping(config, None, state).unwrap();
        let words = self.words.try_clone().unwrap();
        let (store, mut files) =
            FileStore::keeping(pool, words, &kept, adoption, |id| ids.contains(&id)).unwrap();
        let found = ids.iter().map(|id| files.remove(id).expect("it is found")).collect();
        assert!(files.is_empty());
        (store, found)
    }
}

/// Acts as if the process were killed: nothing that it does from now on changes the state that it leaves.
fn kill(store: FileStore, files: Vec<FarFile>) -> Vec<u64> {
    store.core().abandon();
    files.iter().map(|file| file.core().kept_id().unwrap()).collect()
}

const KINDS: [Redundancy; 4] =
    [Redundancy::None, Redundancy::Stripe, Redundancy::Mirror, Redundancy::Parity { data: 2 }];

#[test]
fn a_successor_finds_files_as_they_were_and_goes_on_with_them() {
    let rig = Rig::new(3, 16);
    let mut keep = Keep::new();
    let (mut store, _) = keep.store(&rig, &[]);
    let session = store.session();
    let data = pattern(3 * EXTENT_BYTES as usize + 12_345, 7);
    let mut files: Vec<FarFile> = KINDS.iter().map(|kind| store.create_as(*kind)).collect();
    for file in &files {
        file.write(&session, 5, &data[5..]).unwrap();
        file.punch(&session, 0, 3 * BLOCK).unwrap();
        file.core().keep_written_ns(99);
    }
    files[0].set_size(&session, 2 * EXTENT_BYTES + 77).unwrap();
    let dropped = store.create();
    dropped.write(&session, 0, &data).unwrap();
    drop(dropped);
    drop(session);
    for round in 0..2u8 {
        let ids = kill(store.clone(), files);
        let (next, found) = keep.store(&rig, &ids);
        let session = next.session();
        for (file, kind) in found.iter().zip(KINDS) {
            assert_eq!(
                (file.redundancy(), file.core().kept_written_ns(), file.core().lost_bytes()),
                (kind, 99, 0)
            );
            let mut right = data.clone();
            right[..3 * BLOCK as usize].fill(0);
            if round == 1 {
                right[100..200].fill(1);
            }
            if kind == Redundancy::None {
                right.truncate(2 * EXTENT_BYTES as usize + 77);
            }
            assert!(read(file, &session, 0, 1 << 20).unwrap() == right, "{kind}, round {round}");
            file.write(&session, 100, &[1; 100]).unwrap();
        }
        // A new file of the successor takes nothing of theirs.
        let fresh = next.create();
        fresh.write(&session, 0, &pattern(900_000, 3)).unwrap();
        drop(session);
        (store, files) = (next, found);
    }
}

#[test]
fn a_lock_that_was_left_is_settled_to_the_present_contents() {
    let rig = Rig::new(3, 16);
    let mut keep = Keep::new();
    let (store, _) = keep.store(&rig, &[]);
    let session = store.session();
    let data = pattern(2 * EXTENT_BYTES as usize, 7);
    let files: Vec<FarFile> = KINDS.iter().map(|kind| store.create_as(*kind)).collect();
    let words = &store.core().words;
    for file in &files {
        file.write(&session, 0, &data).unwrap();
        let extent = file.core().extent_at(0).unwrap();
        let place = words.place(&extent, 1);
        words.store(place, words.load(place).locked());
        // This block's contents are unknown: its word is that of other data.
        let place = words.place(&extent, 2);
        words.store(place, BlockWord::EMPTY.written(5).locked());
        if let Some(rows) = file.core().rows() {
            let parity = file.core().map.read().extent(rows.parity_of(0)).unwrap();
            for block in 1..3 {
                let place = words.place(&parity, block);
                words.store(place, words.load(place).locked());
            }
        }
    }
    let place = |file: &FarFile| file.core().extent_at(0).unwrap().number();
    let places: Vec<u64> = files.iter().map(place).collect();
    drop(session);
    let ids = kill(store.clone(), files);
    let (store, found) = keep.store(&rig, &ids);
    // A late write to the old place changes nothing that the successor reads.
    assert_ne!(found[..2].iter().map(place).collect::<Vec<_>>(), places[..2]);
    let session = store.session();
    for file in &found {
        assert!(read(file, &session, 0, data.len()).unwrap() == data, "{}", file.redundancy());
        file.write(&session, BLOCK, &data[BLOCK as usize..3 * BLOCK as usize]).unwrap();
        assert!(read(file, &session, 0, data.len()).unwrap() == data);
    }
    super::wait_until(|| store.core().is_whole());
}

#[test]
fn data_on_a_node_that_ended_meanwhile_are_lost_unless_other_nodes_have_them() {
    let mut rig = Rig::new(3, 16);
    let mut keep = Keep::new();
    let (store, _) = keep.store(&rig, &[]);
    let session = store.session();
    let data = pattern(4 * EXTENT_BYTES as usize, 7);
    // The rows first: they lease regions of every node, over which the last file is then striped.
    let files: Vec<FarFile> = KINDS[1..].iter().rev().map(|kind| store.create_as(*kind)).collect();
    files.iter().for_each(|file| file.write(&session, 0, &data).unwrap());
    drop(session);
    let ids = kill(store.clone(), files);
    rig.kill_node(0);
    let (store, found) = keep.store(&rig, &ids);
    let session = store.session();
    assert!(read(&found[2], &session, 0, data.len()).is_err());
    assert!(found[2].core().lost_bytes() >= EXTENT_BYTES);
    for file in &found[..2] {
        assert_eq!(file.core().lost_bytes(), 0);
        assert!(read(file, &session, 0, data.len()).unwrap() == data, "{}", file.redundancy());
    }
}

const PAGE: usize = 4096;
/// Parts of the kept memory, which tests damage before a successor comes.
const WORDS: Range<u64> = 0..SLOTS;
const SIZES: Range<u64> = SLOTS..ECHOES;
const SIZES_AGAIN: Range<u64> = ECHOES..WITNESSES;
const WITNESS: Range<u64> = WITNESSES..KEPT_WORDS_BYTES;

/// Pages of kept memory that are not all zeros, by their offsets.
type Pages = BTreeMap<u64, Vec<u8>>;

fn pages(words: &OwnedFd, within: &Range<u64>) -> Pages {
    let mut found = Pages::new();
    let mut at = within.start;
    while let Ok(data) = rustix::fs::seek(words, SeekFrom::Data(at)) {
        at = data / PAGE as u64 * PAGE as u64;
        if at >= within.end {
            break;
        }
        let mut page = vec![0; PAGE];
        assert_eq!(rustix::io::pread(words, &mut page, at).unwrap(), PAGE);
        if page.iter().any(|byte| *byte != 0) {
            found.insert(at, page);
        }
        at += PAGE as u64;
    }
    assert!(!found.is_empty(), "nothing lies in {within:?}");
    found
}

fn put(words: &OwnedFd, at: u64, page: &[u8]) {
    assert_eq!(rustix::io::pwrite(words, page, at).unwrap(), PAGE);
}

/// How many blocks were read correctly, and how many gave errors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Tally {
    right: u64,
    errors: u64,
}

/// Reads a file block by block. Each block must be correct, or an error.
fn tally(file: &FarFile, session: &Session, right: &[u8]) -> Tally {
    let mut tally = Tally::default();
    for (block, right) in right.chunks(BLOCK as usize).enumerate() {
        // Asks for more than there is, so that an end that is too late is noticed as well as one that is too
        // early.
        let at = block as u64 * BLOCK;
        let wanted = if right.len() < BLOCK as usize { 2 * BLOCK as usize } else { right.len() };
        match read(file, session, at, wanted) {
            Ok(found) => {
                assert!(found == right, "{}, block {block}: other bytes", file.redundancy());
                tally.right += 1;
            }
            Err(FileError::Lost { .. } | FileError::Damaged { .. }) => tally.errors += 1,
            Err(error) => panic!("{}, block {block}: {error}", file.redundancy()),
        }
    }
    tally
}

/// Reads files after kept memory was changed between one owner and the next. `change` also gets the pages of
/// an earlier moment, half-way through the writing.
fn read_after(change: impl Fn(&OwnedFd, &Pages)) -> Tally {
    let rig = Rig::new(3, 16);
    let mut keep = Keep::new();
    let (store, _) = keep.store(&rig, &[]);
    let session = store.session();
    let files: Vec<FarFile> = KINDS.iter().map(|kind| store.create_as(*kind)).collect();
    let mut model = pattern(2 * EXTENT_BYTES as usize + 12_345, 7);
    files.iter().for_each(|file| file.write(&session, 0, &model).unwrap());
    let half_way = pages(&keep.words, &(0..KEPT_WORDS_BYTES));
    // Overwrites, punches, and appends after a hole.
    let (again, end) = (pattern(9 * BLOCK_BYTES, 8), model.len());
    model[3 * BLOCK_BYTES..12 * BLOCK_BYTES].copy_from_slice(&again);
    model[20 * BLOCK_BYTES..24 * BLOCK_BYTES].fill(0);
    model.resize(end + EXTENT_BYTES as usize, 0);
    model.extend(&again);
    for file in &files {
        file.write(&session, 3 * BLOCK, &again).unwrap();
        file.punch(&session, 20 * BLOCK, 4 * BLOCK).unwrap();
        for (part, bytes) in (0..).zip(again.chunks(3 * BLOCK_BYTES)) {
            file.write(&session, end as u64 + EXTENT_BYTES + part * 3 * BLOCK, bytes).unwrap();
        }
    }
    drop(session);
    let mut ids = kill(store.clone(), files);
    let mut _before = store;
    change(&keep.words, &half_way);
    let mut sum = Tally::default();
    // An error stays an error for later owners.
    for round in 0..2 {
        let (store, files) = keep.store(&rig, &ids);
        let session = store.session();
        let mut now = Tally::default();
        for file in &files {
            let Tally { right, errors } = tally(file, &session, &model);
            (now.right, now.errors) = (now.right + right, now.errors + errors);
        }
        assert!(round == 0 || now.right <= sum.right, "{now:?} after {sum:?}");
        sum = now;
        if round == 1 {
            for file in &files {
                file.set_size(&session, 0).unwrap();
                file.write(&session, 5, &model[..3 * BLOCK_BYTES]).unwrap();
                assert!(read(file, &session, 5, 1 << 20).unwrap() == model[..3 * BLOCK_BYTES]);
            }
        }
        drop(session);
        ids = kill(store.clone(), files);
        _before = store;
    }
    sum
}

fn zero(words: &OwnedFd, within: &Range<u64>) {
    pages(words, within).keys().for_each(|at| put(words, *at, &[0; PAGE]));
}

#[test]
fn unchanged_kept_memory_costs_nothing() {
    assert_eq!(read_after(|_, _| {}).errors, 0);
}

#[test]
fn zeroed_words_are_errors_and_never_holes() {
    let Tally { right, errors } = read_after(|words, _| zero(words, &WORDS));
    // Only holes can still be read.
    assert!(errors > right && right > 0, "{right} right, {errors} errors");
}

#[test]
fn a_zeroed_witness_costs_only_what_no_checksum_proves() {
    let Tally { right, errors } = read_after(|words, _| zero(words, &WITNESS));
    assert!(right > errors && errors > 0, "{right} right, {errors} errors");
}

#[test]
fn zeroed_kept_memory_gives_only_errors() {
    let all = read_after(|words, _| zero(words, &(0..KEPT_WORDS_BYTES)));
    assert_eq!(all.right, 0);
    let words = read_after(|words, _| [WORDS, WITNESS].iter().for_each(|part| zero(words, part)));
    assert_eq!(words.right, 0);
}

#[test]
fn one_copy_of_a_size_is_enough_and_a_file_without_any_gives_errors_until_it_is_emptied() {
    for part in [SIZES, SIZES_AGAIN] {
        assert_eq!(read_after(|words, _| zero(words, &part)).errors, 0);
    }
    let none = read_after(|words, _| [SIZES, SIZES_AGAIN].iter().for_each(|part| zero(words, part)));
    assert_eq!(none.right, 0);
}

#[test]
fn old_words_old_witnesses_and_old_sizes_are_noticed() {
    for part in [WORDS, SIZES, SIZES_AGAIN, WITNESS] {
        let tally = read_after(|words, half_way| {
            half_way.range(part.clone()).for_each(|(at, page)| put(words, *at, page));
        });
        assert!(tally.errors > 0, "{part:?}: {tally:?}");
    }
}

#[test]
fn garbage_and_swapped_words_give_no_wrong_bytes() {
    let garbage = read_after(|words, _| {
        for (at, page) in pages(words, &WORDS) {
            let seed = (at / PAGE as u64) as u8;
            let garbage: Vec<u8> =
                page.iter().zip(pattern(PAGE, seed.into())).map(|(a, b)| a ^ b | 1).collect();
            put(words, at, &garbage);
        }
    });
    assert!(garbage.errors > 0, "{garbage:?}");
    let swapped = read_after(|words, _| {
        let pages = pages(words, &WORDS);
        let contents: Vec<_> = pages.values().cycle().skip(1).take(pages.len()).collect();
        pages.keys().zip(contents).for_each(|(at, page)| put(words, *at, page));
    });
    assert!(swapped.errors > 0, "{swapped:?}");
}

#[test]
fn memory_to_which_a_dead_owner_may_still_write_is_not_reused() {
    let rig = Rig::new(1, 1);
    let mut keep = Keep::new();
    let (store, _) = keep.store(&rig, &[]);
    let session = store.session();
    let [kept, dropped] = [1, 2].map(|extents| {
        let file = store.create();
        file.write(&session, 0, &pattern(extents * EXTENT_BYTES as usize, 7)).unwrap();
        file
    });
    store.core().words.doubt(&dropped.core().extent_at(EXTENT_BYTES).unwrap());
    drop((dropped, session));
    let ids = kill(store.clone(), vec![kept]);
    let (store, _found) = keep.store(&rig, &ids);
    let session = store.session();
    let fresh = store.create();
    // Of four extents one is the kept file's, and one is in doubt.
    assert_eq!(fresh.reserve(&session, 0, 3 * EXTENT_BYTES), Err(FileError::NoSpace));
    fresh.reserve(&session, 0, 2 * EXTENT_BYTES).unwrap();
}

#[test]
fn an_extent_that_is_not_the_successor_s_is_lost_data_or_a_parity_to_rebuild() {
    let rig = Rig::new(3, 16);
    let mut keep = Keep::new();
    let (store, _) = keep.store(&rig, &[]);
    let session = store.session();
    let data = pattern(2 * EXTENT_BYTES as usize, 7);
    let files: Vec<FarFile> =
        [Redundancy::Stripe, KINDS[3]].iter().map(|kind| store.create_as(*kind)).collect();
    files.iter().for_each(|file| file.write(&session, 0, &data).unwrap());
    let parity = files[1].core().rows().unwrap().parity_of(0);
    for (file, member) in files.iter().zip([1, parity]) {
        file.core().map.read().place().unwrap().lies(member, Some(1 << 40)); // the store has no such region
    }
    drop(session);
    let ids = kill(store.clone(), files);
    let (store, found) = keep.store(&rig, &ids);
    let session = store.session();
    let half = EXTENT_BYTES as usize;
    assert!(read(&found[0], &session, 0, half).unwrap() == data[..half]);
    assert_eq!(read(&found[0], &session, EXTENT_BYTES, 1), Err(FileError::Lost { offset: EXTENT_BYTES }));
    assert_eq!(found[0].core().lost_bytes(), EXTENT_BYTES);
    assert!(read(&found[1], &session, 0, 2 * half).unwrap() == data);
    assert_eq!(found[1].core().lost_bytes(), 0);
}

#[test]
fn a_lost_block_that_was_being_written_stays_lost() {
    let rig = Rig::new(2, 8);
    let mut keep = Keep::new();
    let (store, _) = keep.store(&rig, &[]);
    let session = store.session();
    let data = pattern(EXTENT_BYTES as usize, 7);
    let file = store.create_as(Redundancy::Stripe);
    file.write(&session, 0, &data).unwrap();
    let words = &store.core().words;
    let place = words.place(&file.core().extent_at(0).unwrap(), 1);
    words.store(place, words.load(place).lost().locked());
    drop(session);
    let ids = kill(store.clone(), vec![file]);
    let (store, found) = keep.store(&rig, &ids);
    let session = store.session();
    assert_eq!(read(&found[0], &session, BLOCK, 1), Err(FileError::Lost { offset: BLOCK }));
    assert_eq!(found[0].core().lost_bytes(), BLOCK);
    for block in [0, 2] {
        let at = block * BLOCK_BYTES;
        assert!(read(&found[0], &session, at as u64, BLOCK_BYTES).unwrap() == data[at..][..BLOCK_BYTES]);
    }
}

#[test]
fn a_successor_knows_which_blocks_were_lost_and_not_written_anew() {
    let rig = Rig::new(2, 8);
    let mut keep = Keep::new();
    let (store, _) = keep.store(&rig, &[]);
    let session = store.session();
    let file = store.create_as(Redundancy::Stripe);
    file.write(&session, 0, &pattern(EXTENT_BYTES as usize, 7)).unwrap();
    file.mark_lost(BLOCK, 2 * BLOCK, FileError::Unavailable { offset: 0 });
    file.write(&session, BLOCK, &[9; BLOCK_BYTES]).unwrap();
    drop(session);
    let ids = kill(store.clone(), vec![file]);
    let (store, found) = keep.store(&rig, &ids);
    let session = store.session();
    assert_eq!(found[0].core().lost_bytes(), BLOCK);
    assert_eq!(read(&found[0], &session, BLOCK, 1), Ok(vec![9]));
    assert_eq!(read(&found[0], &session, 2 * BLOCK, 1), Err(FileError::Lost { offset: 2 * BLOCK }));
}

#[test]
fn a_truncation_that_has_ended_is_not_completed_again_by_a_successor() {
    let rig = Rig::new(2, 8);
    let mut keep = Keep::new();
    let (store, _) = keep.store(&rig, &[]);
    let session = store.session();
    let file = store.create();
    file.write(&session, 0, &pattern(2 * EXTENT_BYTES as usize, 7)).unwrap();
    file.set_size(&session, 100).unwrap();
    file.reserve(&session, 0, 3 * EXTENT_BYTES).unwrap();
    drop(session);
    let ids = kill(store.clone(), vec![file]);
    let (_store, found) = keep.store(&rig, &ids);
    assert_eq!((found[0].size(), found[0].allocated_bytes()), (100, 3 * EXTENT_BYTES));
}

#[test]
fn touching_the_words_of_an_extent_takes_no_more_memory_once_there_is_room_for_its_region() {
    // The words of the first four regions share a page, so this looks at the fifth.
    let regions = 5;
    let rig = Rig::new(1, regions);
    let mut keep = Keep::new();
    let (store, _) = keep.store(&rig, &[]);
    let (core, session) = (store.core(), store.session());
    let extents = session.lock().block_on(join_all(
        (0..regions * REGION_BYTES / EXTENT_BYTES)
            .map(|place| core.stock.take_extent_within(place, &Where::Anywhere)),
    ));
    let last = extents.into_iter().map(Result::unwrap).max_by_key(Extent::number).unwrap();
    core.make_room_for_words(&last).unwrap();
    let before = taken_blocks(&keep.words);
    core.words.clear(&last);
    core.words.doubt(&last);
    assert_eq!(taken_blocks(&keep.words), before);
}
