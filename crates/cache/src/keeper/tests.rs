mod admission;
mod buckets;
mod handover;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use super::*;
use crate::ground::PageSink;
use crate::words::Key;
use crate::{Caller, FileId, KnownFile, Outcome, Shape, at_once};

/// The memory of one process. Each slot has one byte.
#[derive(Clone)]
struct Memory {
    words: Rc<RefCell<Vec<u64>>>,
    /// `None`: no process can use the index.
    layout: Rc<Cell<Option<Layout>>>,
    slots: Rc<RefCell<Vec<Option<u8>>>>,
}

impl Ground for Memory {
    async fn load(&self, at: usize) -> u64 {
        self.words.borrow()[at]
    }

    async fn store(&self, at: usize, value: u64) {
        self.words.borrow_mut()[at] = value;
    }

    async fn replace(&self, at: usize, old: u64, new: u64) -> bool {
        let is_old = self.words.borrow()[at] == old;
        if is_old {
            self.words.borrow_mut()[at] = new;
        }
        is_old
    }

    async fn add(&self, at: usize, addend: u64) -> u64 {
        let word = &mut self.words.borrow_mut()[at];
        std::mem::replace(word, word.wrapping_add(addend))
    }

    async fn layout(&self) -> Option<Layout> {
        self.layout.get()
    }

    async fn barrier(&self) {}

    async fn read_slot(&self, slot: u32, sink: &mut PageSink<'_>) -> bool {
        let found = self.slots.borrow()[slot as usize];
        sink(0, &[!0]); // as if a first try had failed half-way
        found.map(|found| sink(0, &[found])).is_some()
    }

    async fn read_head(&self, slot: u32) -> Option<[u8; 8]> {
        Some([self.slots.borrow()[slot as usize]?; 8])
    }

    async fn write_slot(&self, slot: u32, page: &[u8]) -> bool {
        self.slots.borrow_mut()[slot as usize] = Some(page[0]);
        true
    }
}

const SLOTS: u32 = 64;
const FILES: u32 = 3;

struct Cache<R = Shipped> {
    memory: Memory,
    layout: Layout,
    keeper: Keeper<Memory, R>,
    file: KnownFile,
    /// Holders that live.
    living: BTreeSet<u64>,
}

/// A lap takes many sweeps.
enum Slow {}

impl Rules for Slow {
    const SLOTS_PER_SWEEP: u32 = 8;
    const CONSIDERED_PER_SWEEP: u32 = 256;
    const UNUSED_ROUNDS: u16 = 2;
}

impl Cache {
    /// An open cache with one file.
    fn open() -> Cache {
        Cache::of(SLOTS)
    }
}

impl<R: Rules> Cache<R> {
    fn of(slots: u32) -> Cache<R> {
        let layout = Layout::new(Shape { places: 4, files: FILES, slots });
        let words = Rc::new(RefCell::new(vec![0; layout.words()]));
        let slot_bytes = Rc::new(RefCell::new(vec![None; slots as usize]));
        let memory = Memory { words, layout: Rc::new(Cell::new(Some(layout))), slots: slot_bytes };
        let mut keeper = at_once(Keeper::<_, R>::start(memory.clone(), layout, |_| true));
        assert!((0..2).any(|_| at_once(keeper.turn_door(Door::Open))), "two turns open the door");
        at_once(keeper.sweep());
        let file = KnownFile::new(FileId { device: 1, inode: 2, generation: 3 });
        let mut cache = Cache { memory, layout, keeper, file, living: BTreeSet::new() };
        cache.open_file();
        cache
    }

    /// Asks for the file, and lets the keeper open it.
    fn open_file(&mut self) {
        at_once(crate::files::ask_for(&self.memory, &self.layout, self.file.id(), async || true));
        (0..2).for_each(|_| at_once(self.keeper.maintain_files()));
    }

    fn join(&mut self, holder: u64) -> Caller<Memory> {
        self.living.insert(holder);
        at_once(Caller::join(self.memory.clone(), self.layout.shape().places, holder)).unwrap()
    }

    /// Reads a block. On the disk, each block holds the last byte of its number.
    fn read(&self, caller: &mut Caller<Memory>, block: u32) -> Outcome<()> {
        let mut page = [0];
        let pread = async |to: &mut [u8]| {
            to[0] = block as u8;
            Ok(1)
        };
        let found = at_once(caller.read(&mut { self.file }, block, &mut page, async || true, pread)).unwrap();
        assert_eq!(found.page_or(&page), [block as u8]);
        found.without_page()
    }

    fn sweep(&mut self) -> Census {
        let living = &self.living;
        at_once(self.keeper.clear_dead(|holder| living.contains(&holder)));
        at_once(self.keeper.sweep())
    }

    /// Lets calls get past the door and the file, and lets them find entries.
    fn leave_a_way_in(&self) {
        let mut words = self.memory.words.borrow_mut();
        words[layout::DOOR] = Door::Open as u64;
        words[self.layout.file(0)] = FileWord::open(1).0;
        words[self.layout.incarnation(0)] = 1;
        let FileId { device, inode, generation } = self.file.id();
        for (part, at) in [device, inode, generation].into_iter().zip(self.layout.file_id(0)) {
            words[at] = part;
        }
        for entry in 0..self.layout.all_entries() {
            words[self.layout.key(entry)] = Key::new(1, entry % 8).0;
        }
    }

    /// What a process has done that dies while it writes blocks to the disk.
    fn die_writing(&mut self, holder: u64, first: u32, blocks: u32) {
        let mut caller = self.join(holder);
        let memory = self.memory.clone();
        let dead = RefCell::new(Vec::new());
        let pwrite = async || {
            dead.replace(memory.words.borrow().clone());
            Ok(0)
        };
        at_once(caller.write(&mut { self.file }, (first, blocks), None, pwrite)).unwrap();
        self.memory.words.replace(dead.into_inner());
        self.living.remove(&holder);
    }
}

#[test]
fn a_lap_takes_four_sweeps_or_fewer_if_slices_would_be_tiny_or_more_if_they_would_be_huge() {
    let slots = [64, 1 << 13, 1 << 16, 1 << 18];
    assert_eq!(slots.map(|slots| Cache::<Shipped>::of(slots).keeper.sweeps_per_lap()), [1, 4, 4, 16]);
}

#[test]
fn a_keeper_has_work_after_callers_took_slots_and_none_when_all_is_done() {
    let mut cache = Cache::open();
    let mut caller = cache.join(1);
    let settle = |cache: &mut Cache| {
        let mut rounds = (0..10).map(|_| {
            at_once(cache.keeper.maintain_files());
            cache.sweep();
            cache.keeper.has_work()
        });
        rounds.any(|has_work| !has_work)
    };
    assert!(settle(&mut cache));
    cache.read(&mut caller, 5); // admitted
    cache.sweep();
    assert!(cache.keeper.has_work(), "a slot was taken");
    assert!(settle(&mut cache));
    let admitted = (0..SLOTS).filter(|block| cache.read(&mut caller, *block) == Outcome::Disk(1)).count();
    assert!(admitted > SLOTS as usize / 2, "{admitted} pages take most slots");
    cache.sweep();
    assert!(cache.keeper.has_work(), "slots are short");
    at_once(caller.change(&mut { cache.file }, async || Ok(()))).unwrap();
    assert!(settle(&mut cache));
    let other = FileId { device: 1, inode: 9, generation: 9 };
    at_once(crate::files::ask_for(&cache.memory, &cache.layout, other, async || true));
    at_once(cache.keeper.maintain_files());
    assert!(cache.keeper.has_work(), "a file waits to be opened");
    assert!(settle(&mut cache));
}

#[test]
fn a_process_that_is_stopped_in_its_place_costs_few_pages() {
    let mut cache = Cache::open();
    let mut caller = cache.join(1);
    (0..SLOTS / 2).for_each(|block| assert_ne!(cache.read(&mut caller, block), Outcome::Hit(())));
    let stopped = Layout::place(3);
    at_once(grace::enter(&cache.memory, stopped));
    // So that some slots wait for it.
    (0..8).for_each(|block| cache.memory.slots.borrow_mut()[block] = None);
    for block in 0..SLOTS {
        cache.read(&mut caller, block);
        cache.sweep();
    }
    let pages = cache.sweep().pages;
    assert!(pages >= SLOTS / 2, "{pages} pages of {SLOTS} are left");
    at_once(grace::leave(&cache.memory, stopped));
    let census = (0..5).map(|_| cache.sweep()).last().unwrap();
    assert_eq!(census.free + census.pages, SLOTS, "{census:?}");
}

#[test]
fn a_page_that_is_damaged_is_admitted_again_and_one_that_cannot_be_read_is_kept() {
    let mut cache = Cache::open();
    let mut caller = cache.join(1);
    cache.read(&mut caller, 5);
    assert_eq!(cache.read(&mut caller, 5), Outcome::Hit(()));
    let slots = cache.memory.slots.replace(vec![None; SLOTS as usize]);
    assert_eq!(cache.read(&mut caller, 5), Outcome::Disk(1));
    cache.memory.slots.replace(slots);
    assert_eq!(cache.read(&mut caller, 5), Outcome::Hit(()));
    cache.memory.slots.borrow_mut().fill(Some(77));
    assert_eq!(cache.read(&mut caller, 5), Outcome::Disk(1));
    assert_eq!(cache.read(&mut caller, 5), Outcome::Hit(()));
}

#[test]
fn the_last_block_that_a_file_can_have_is_invalidated_too() {
    let mut cache = Cache::open();
    let mut caller = cache.join(1);
    let read = |caller: &mut Caller<Memory>, value: u8| {
        let mut page = [0];
        let pread = async |to: &mut [u8]| {
            to[0] = value;
            Ok(1)
        };
        let found =
            at_once(caller.read(&mut { cache.file }, u32::MAX, &mut page, async || true, pread)).unwrap();
        found.page_or(&page)[0]
    };
    assert_eq!([read(&mut caller, 1), read(&mut caller, 2)], [1, 1]);
    at_once(caller.write(&mut { cache.file }, (u32::MAX, 1), None, async || Ok(1))).unwrap();
    assert_eq!(read(&mut caller, 3), 3);
}

#[test]
fn a_retired_file_stays_retired_after_a_process_that_changed_it_has_died() {
    let mut cache = Cache::open();
    let mut caller = cache.join(1);
    at_once(caller.change(&mut cache.file, async || Ok(()))).unwrap(); // so that the file is known
    at_once(caller.retire(&mut cache.file));
    let mut dying = cache.join(2);
    let memory = cache.memory.clone();
    let dead = RefCell::new(Vec::new());
    at_once(dying.change(&mut cache.file, async || {
        dead.replace(memory.words.borrow().clone());
        Ok(())
    }))
    .unwrap();
    cache.memory.words.replace(dead.into_inner());
    cache.living.remove(&2);
    let word = |cache: &Cache| FileWord(cache.memory.words.borrow()[cache.layout.file(0)]);
    assert_eq!((word(&cache).is_open(), word(&cache).changes()), (false, 1));
    cache.sweep();
    assert_eq!((word(&cache).is_open(), word(&cache).changes()), (false, 0));
    assert_eq!(cache.read(&mut caller, 1), Outcome::Disk(1));
    assert_eq!(cache.read(&mut caller, 1), Outcome::Disk(1));
}

#[test]
fn slots_whose_memory_has_gone_are_left_alone_until_it_is_there_again() {
    let mut cache = Cache::open();
    let mut caller = cache.join(1);
    let fill = |cache: &mut Cache, caller: &mut Caller<Memory>| {
        for block in 0..SLOTS {
            cache.read(caller, block);
            cache.sweep();
        }
        (0..4).map(|_| cache.sweep()).last().unwrap()
    };
    assert!(fill(&mut cache, &mut caller).pages > SLOTS / 2);
    cache.keeper.withdraw_slots(8..SLOTS);
    // A write to one of these slots would leave a byte there.
    cache.memory.slots.borrow_mut()[8..].fill(None);
    let census = fill(&mut cache, &mut caller);
    assert_eq!((census.absent, census.free + census.pages), (SLOTS - 8, 8), "{census:?}");
    assert!(cache.memory.slots.borrow()[8..].iter().all(Option::is_none));
    cache.keeper.restore_slots(8..SLOTS);
    let census = fill(&mut cache, &mut caller);
    assert!(census.absent == 0 && census.pages > SLOTS / 2, "{census:?}");
}

impl Cache<Slow> {
    /// Reads new blocks, with enough sweeps in between.
    fn read_new(&mut self, caller: &mut Caller<Memory>, blocks: std::ops::Range<u32>) {
        for block in blocks {
            assert_ne!(self.read(caller, block), Outcome::Hit(()));
            if block.is_multiple_of(8) {
                self.sweep();
            }
        }
    }

    /// How many of these blocks are found, in a hundred.
    fn percent_found(&self, caller: &mut Caller<Memory>, blocks: std::ops::Range<u32>) -> usize {
        let is_found = |block: &u32| self.read(caller, *block) == Outcome::Hit(());
        100 * blocks.clone().filter(is_found).count() / blocks.len()
    }
}

#[test]
fn pages_are_admitted_as_fast_as_others_are_evicted_though_a_lap_takes_long() {
    let mut cache = Cache::<Slow>::of(2_000);
    let mut caller = cache.join(1);
    cache.read_new(&mut caller, 0..4_000);
    assert_eq!(cache.percent_found(&mut caller, 3_000..4_000), 100);
}

#[test]
fn pages_are_evicted_though_all_of_them_are_visited_before_the_hand_returns() {
    let mut cache = Cache::<Slow>::of(2_000);
    let mut caller = cache.join(1);
    cache.read_new(&mut caller, 0..2_000);
    let mut admitted = 0;
    for block in 2_000..2_400 {
        for entry in (0..cache.layout.all_entries()).map(|entry| cache.layout.entry(entry)) {
            let found = Entry(cache.memory.words.borrow()[entry]);
            if found.state() == EntryState::Valid {
                cache.memory.words.borrow_mut()[entry] = found.visited().0;
            }
        }
        cache.sweep();
        cache.read(&mut caller, block);
        admitted += u32::from(cache.read(&mut caller, block) == Outcome::Hit(()));
    }
    assert_eq!(admitted, 400);
}

#[test]
fn pages_of_pinned_files_are_evicted_only_where_there_are_no_others() {
    let mut cache = Cache::<Slow>::of(2_000);
    let mut caller = cache.join(1);
    let (pinned, other) = (cache.file, FileId { device: 1, inode: 9, generation: 3 });
    cache.read_new(&mut caller, 0..600);
    assert!(at_once(caller.set_pinned(&mut { pinned }, true)));
    cache.file = KnownFile::new(other);
    cache.open_file();
    cache.read_new(&mut caller, 0..6_000);
    assert_eq!(cache.percent_found(&mut caller, 5_500..6_000), 100, "others come and go");
    cache.file = pinned;
    // Three times as many others as there are slots have come.
    assert_eq!(cache.percent_found(&mut caller, 0..600), 100);
    // If all pages are pinned, some have to go, and new ones come.
    cache.read_new(&mut caller, 1_000..5_000);
    assert!(cache.percent_found(&mut caller, 4_900..5_000) > 50);
    assert_eq!(at_once(cache.keeper.pinned_ids()).len(), 1);
    assert!(at_once(caller.set_pinned(&mut { pinned }, false)));
    (0..2).for_each(|_| at_once(cache.keeper.maintain_files()));
    assert!(at_once(cache.keeper.pinned_ids()).is_empty());
    assert!(!at_once(
        caller.set_pinned(&mut KnownFile::new(FileId { device: 1, inode: 10, generation: 3 }), true)
    ));
}

#[test]
fn a_new_keeper_knows_what_has_pages_and_is_told_what_has_memory() {
    let mut cache = Cache::<Slow>::of(2_000);
    let mut caller = cache.join(1);
    cache.read_new(&mut caller, 0..2_000);
    // The first keeper ends before it carries out the last changes.
    cache.keeper.withdraw_slots(1_500..2_000);
    for _ in 0..1_000 {
        cache.sweep();
    }
    cache.keeper.restore_slots(1_500..2_000);
    cache.keeper.withdraw_slots(0..500);
    let start = Keeper::start(cache.memory.clone(), cache.layout, |slot| slot >= 500);
    cache.keeper = at_once(start);
    cache.read_new(&mut caller, 2_000..4_000);
    cache.memory.slots.borrow_mut()[..500].fill(None);
    cache.read_new(&mut caller, 4_000..6_000);
    assert_eq!(cache.percent_found(&mut caller, 5_000..6_000), 100);
    assert!(cache.memory.slots.borrow()[..500].iter().all(Option::is_none));
    assert!(cache.memory.slots.borrow()[1_500..].iter().all(Option::is_some));
}

#[test]
fn slots_that_come_back_in_the_middle_of_a_lap_do_not_keep_others_from_being_evicted() {
    let mut cache = Cache::<Slow>::of(20_000);
    let mut caller = cache.join(1);
    cache.keeper.withdraw_slots(2_000..20_000);
    cache.read_new(&mut caller, 0..20_000);
    cache.keeper.restore_slots(2_000..20_000);
    cache.read_new(&mut caller, 20_000..22_000);
    assert_eq!(cache.percent_found(&mut caller, 21_000..22_000), 100);
}

#[test]
fn idle_sweeps_come_round_to_every_slot() {
    let mut cache = Cache::open();
    let mut caller = cache.join(1);
    for block in 0..3 {
        cache.read(&mut caller, block);
    }
    cache.sweep();
    cache.keeper.withdraw_slots(8..SLOTS);
    let census = (0..3 * SLOTS).map(|_| at_once(cache.keeper.sweep_idly())).last().unwrap();
    assert_eq!(census, Census { free: 5, pages: 3, absent: SLOTS - 8 });
}

#[test]
fn a_cache_with_little_memory_keeps_half_of_its_pages() {
    let mut cache = Cache::open();
    let mut caller = cache.join(1);
    cache.keeper.withdraw_slots(8..SLOTS);
    for block in 0..SLOTS {
        cache.read(&mut caller, block);
        cache.sweep();
    }
    assert_eq!((cache.sweep(), cache.sweep()).1, Census { free: 4, pages: 4, absent: SLOTS - 8 });
}

#[test]
fn pages_of_before_the_door_was_closed_go_before_newer_ones() {
    let mut cache = Cache::<Slow>::of(20_000);
    let mut caller = cache.join(1);
    cache.read_new(&mut caller, 0..19_900);
    for door in [Door::Closed, Door::Open] {
        assert!((0..2).any(|_| at_once(cache.keeper.turn_door(door))));
    }
    (0..4).for_each(|_| at_once(cache.keeper.maintain_files()));
    cache.open_file();
    cache.read_new(&mut caller, 20_000..21_000);
    assert_eq!(cache.percent_found(&mut caller, 20_000..21_000), 100);
}

/// Words as a process with an error may leave them: random ones, and words that are likely to pass for valid
/// ones.
fn garbage(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let random = state ^ state >> 33;
        match state >> 61 {
            0 => u64::MAX,
            1 => 0,
            2 => random & 3,
            3 => (random & 15) << 32 | random >> 54,
            _ => random,
        }
    }
}

#[test]
fn garbage_in_the_index_ends_no_process() {
    for seed in 0..500 {
        let mut cache = Cache::open();
        let mut caller = cache.join(1);
        let mut random = garbage(seed);
        cache.memory.slots.borrow_mut().fill(Some(0));
        cache.memory.words.borrow_mut().iter_mut().for_each(|word| *word = random());
        cache.leave_a_way_in();
        for block in 0..8 {
            let pread = async |_: &mut [u8]| Ok(1);
            at_once(caller.read(&mut cache.file, block, &mut [0], async || true, pread)).unwrap();
            at_once(caller.write(&mut cache.file, (block, 3), None, async || Ok(1))).unwrap();
            at_once(caller.write(&mut cache.file, (block, 1), Some(&[0]), async || Ok(1))).unwrap();
        }
        at_once(caller.change(&mut cache.file, async || Ok(()))).unwrap();
        for _ in 0..3 {
            cache.sweep();
        }
        cache.keeper.withdraw_slots(0..SLOTS);
        cache.sweep();
        cache.keeper.restore_slots(0..SLOTS);
        cache.sweep();
        (0..3).for_each(|_| at_once(cache.keeper.maintain_files()));
        at_once(caller.retire(&mut cache.file));
        for door in [Door::Closed, Door::Closed, Door::Open, Door::Open] {
            at_once(cache.keeper.turn_door(door));
        }
        at_once(caller.leave());
    }
}

#[test]
fn a_process_that_cannot_use_the_index_closes_the_door_before_it_changes_a_file() {
    type Change = fn(&mut Caller<Memory>, &mut KnownFile, &dyn Fn());
    let write: Change = |caller, file, at_the_disk| {
        let pwrite = async || {
            at_the_disk();
            Ok(1)
        };
        at_once(caller.write(file, (0, 1), None, pwrite)).unwrap();
    };
    let truncate: Change = |caller, file, at_the_disk| {
        let change = async || {
            at_the_disk();
            Ok(())
        };
        at_once(caller.change(file, change)).unwrap();
    };
    let unlink: Change = |caller, file, at_the_disk| {
        at_once(caller.retire(file));
        at_the_disk();
    };
    for change in [write, truncate, unlink] {
        let mut cache = Cache::open();
        let mut caller = cache.join(1);
        cache.read(&mut caller, 0);
        assert_eq!(cache.read(&mut caller, 0), Outcome::Hit(()));
        cache.memory.layout.set(None);
        assert_eq!(cache.read(&mut caller, 0), Outcome::Disk(1), "a read needs no index");
        assert_eq!(at_once(cache.keeper.door()), Door::Open);
        let memory = cache.memory.clone();
        let door = || Door::of(memory.words.borrow()[layout::DOOR]);
        change(&mut caller, &mut cache.file, &|| assert_eq!(door(), Door::Closed));
        cache.memory.layout.set(Some(cache.layout));
        assert!((0..2).any(|_| at_once(cache.keeper.turn_door(Door::Open))));
        assert_eq!(cache.read(&mut caller, 0), Outcome::Disk(1), "the file has to be opened again");
        (0..4).for_each(|_| at_once(cache.keeper.maintain_files()));
        cache.open_file();
        assert_eq!(cache.read(&mut caller, 0), Outcome::Disk(1));
        assert_eq!(cache.read(&mut caller, 0), Outcome::Hit(()));
    }
}

/// How often an entry of the table has this file.
fn entries_of<R>(cache: &Cache<R>, id: FileId) -> usize {
    let found = |file| at_once(crate::files::load_id(&cache.memory, &cache.layout, file));
    let is_there = |file: &u32| cache.memory.words.borrow()[cache.layout.incarnation(*file)] != 0;
    (0..cache.layout.shape().files).filter(is_there).filter(|file| found(*file) == id).count()
}

#[test]
fn a_file_that_was_asked_for_is_opened_when_every_place_has_been_left() {
    let mut cache = Cache::open();
    let mut caller = cache.join(1);
    let mut other = KnownFile::new(FileId { device: 1, inode: 7, generation: 0 });
    let mut read = |caller: &mut Caller<Memory>, exists: bool| {
        let pread = async |_: &mut [u8]| Ok(1);
        at_once(caller.read(&mut other, 0, &mut [0], async || exists, pread)).unwrap().without_page()
    };
    assert_eq!(read(&mut caller, false), Outcome::Disk(1));
    let stopped = Layout::place(3);
    at_once(grace::enter(&cache.memory, stopped));
    let id = FileId { device: 1, inode: 7, generation: 0 };
    assert_eq!(entries_of(&cache, id), 0, "the file does not exist");
    assert_eq!(read(&mut caller, true), Outcome::Disk(1));
    for _ in 0..4 {
        at_once(cache.keeper.maintain_files());
        assert_eq!((read(&mut caller, true), read(&mut caller, true)), (Outcome::Disk(1), Outcome::Disk(1)));
    }
    assert_eq!(entries_of(&cache, id), 1);
    at_once(grace::leave(&cache.memory, stopped));
    (0..2).for_each(|_| at_once(cache.keeper.maintain_files()));
    read(&mut caller, true);
    assert_eq!(read(&mut caller, true), Outcome::Hit(()));
}

#[test]
fn of_two_entries_for_a_file_one_is_opened_and_the_other_is_freed() {
    let mut cache = Cache::open();
    let mut caller = cache.join(1);
    let id = FileId { device: 1, inode: 7, generation: 0 };
    // Two processes have asked for it at the same time.
    (0..2).for_each(|_| at_once(crate::files::ask_for(&cache.memory, &cache.layout, id, async || true)));
    assert_eq!(entries_of(&cache, id), 2);
    (0..6).for_each(|_| at_once(cache.keeper.maintain_files()));
    assert_eq!(entries_of(&cache, id), 1);
    let mut file = KnownFile::new(id);
    let mut read = || {
        let pread = async |_: &mut [u8]| Ok(1);
        at_once(caller.read(&mut file, 0, &mut [0], async || true, pread)).unwrap().without_page()
    };
    assert_eq!((read(), read()), (Outcome::Disk(1), Outcome::Hit(())));
}

#[test]
fn a_file_that_finds_the_table_full_gets_the_entry_that_was_unused_for_longest() {
    let mut cache = Cache::<Slow>::of(SLOTS);
    let mut caller = cache.join(1);
    let files = [1, 2, 3, 4].map(|inode| FileId { device: 1, inode, generation: 3 });
    let mut use_files = |cache: &mut Cache<Slow>, used: &[usize]| {
        for _ in 0..8 {
            for file in used {
                let pread = async |_: &mut [u8]| Ok(1);
                let mut file = KnownFile::new(files[*file]);
                at_once(caller.read(&mut file, 0, &mut [0], async || true, pread)).unwrap();
            }
            at_once(cache.keeper.maintain_files());
        }
        files.map(|id| entries_of(cache, id))
    };
    assert_eq!(use_files(&mut cache, &[0, 1, 2]), [1, 1, 1, 0]);
    assert_eq!(use_files(&mut cache, &[0, 1, 2, 3]), [1, 1, 1, 0], "all of them are used");
    assert_eq!(use_files(&mut cache, &[0, 2, 3]), [1, 0, 1, 1]);
}

#[test]
fn entries_of_unlinked_files_are_given_to_others() {
    let mut cache = Cache::open();
    let mut caller = cache.join(1);
    for generation in 0..3 * u64::from(FILES) {
        let mut file = KnownFile::new(FileId { device: 1, inode: 7, generation });
        let exists = Cell::new(true);
        let mut read = |caller: &mut Caller<Memory>| {
            let pread = async |to: &mut [u8]| {
                to[0] = generation as u8;
                Ok(1)
            };
            let mut page = [0];
            let exists = async || exists.get();
            let found = at_once(caller.read(&mut file, generation as u32, &mut page, exists, pread)).unwrap();
            assert_eq!(found.page_or(&page), [generation as u8]);
            found.without_page()
        };
        read(&mut caller);
        (0..2).for_each(|_| at_once(cache.keeper.maintain_files()));
        assert_eq!((read(&mut caller), read(&mut caller)), (Outcome::Disk(1), Outcome::Hit(())));
        exists.set(false);
        let mut unlinked = KnownFile::new(FileId { device: 1, inode: 7, generation });
        at_once(caller.retire(&mut unlinked));
        let mut read = |caller: &mut Caller<Memory>| {
            let pread = async |_: &mut [u8]| Ok(1);
            let exists = async || exists.get();
            at_once(caller.read(&mut unlinked, generation as u32, &mut [0], exists, pread)).unwrap()
        };
        for _ in 0..3 {
            assert_eq!(read(&mut caller), Outcome::Disk(1));
            at_once(cache.keeper.maintain_files());
        }
        cache.sweep();
    }
}
