//! Blocks in their two buckets.

use super::*;
use crate::layout::ENTRIES;

#[test]
fn a_block_that_finds_both_its_buckets_full_takes_an_entry_that_was_not_visited_since() {
    let mut cache = Cache::open();
    let mut caller = cache.join(1);
    let layout = cache.layout;
    let pair = |block| BTreeSet::from(layout.buckets(0, block));
    let full = 2 * ENTRIES;
    let blocks: Vec<u32> = (0..).filter(|block| pair(*block) == pair(0)).take(full + 1).collect();
    for block in &blocks[..full] {
        assert_eq!(cache.read(&mut caller, *block), Outcome::Disk(1));
        cache.sweep();
    }
    let mut are_found = |cache: &Cache, blocks: &[u32]| {
        blocks.iter().all(|block| cache.read(&mut caller, *block) == Outcome::Hit(()))
    };
    assert!(are_found(&cache, &blocks[..full]), "they fill both buckets");
    assert!(!are_found(&cache, &blocks[full..]), "not cached before");
    // That has cleared all marks. All pages but one are visited again.
    assert!(are_found(&cache, &blocks[..5]) && are_found(&cache, &blocks[6..full]));
    assert!(!are_found(&cache, &blocks[full..]), "all entries were visited");
    assert!(are_found(&cache, &blocks[full..]));
    assert!(are_found(&cache, &blocks[..5]) && are_found(&cache, &blocks[6..full]));
    assert!(!are_found(&cache, &blocks[5..6]), "it was not visited again");
}

#[test]
fn a_write_empties_the_entry_in_either_bucket() {
    let mut cache = Cache::open();
    let mut caller = cache.join(1);
    let layout = cache.layout;
    let blocks: Vec<u32> = (0..).filter(|block| layout.home(0, *block) == 0).take(ENTRIES + 1).collect();
    let is_away = |cache: &Cache, block: u32| {
        let words = cache.memory.words.borrow();
        let [_, other] = layout.buckets(0, block);
        let mut keys = layout.entries_of(other).map(|entry| Key(words[layout.key(entry)]));
        keys.any(|key| key.id() != 0 && key.block() == block)
    };
    blocks.iter().for_each(|block| assert_eq!(cache.read(&mut caller, *block), Outcome::Disk(1)));
    let away = blocks.iter().filter(|block| is_away(&cache, **block)).count();
    assert!(away > 0 && away < blocks.len(), "{away} entries lie in other buckets");
    for block in &blocks {
        assert_eq!(cache.read(&mut caller, *block), Outcome::Hit(()));
        at_once(caller.write(&mut { cache.file }, (*block, 1), None, async || Ok(1))).unwrap();
        assert_eq!(cache.read(&mut caller, *block), Outcome::Disk(1));
    }
}

#[test]
fn as_many_pages_as_the_keeper_has_slots_for_are_all_found() {
    const PAGES: u32 = 9_800;
    let mut cache = Cache::<Slow>::of(20_000);
    let mut caller = cache.join(1);
    let files = [2, 9].map(|inode| KnownFile::new(FileId { device: 1, inode, generation: 3 }));
    for file in files {
        cache.file = file;
        cache.open_file();
        cache.read_new(&mut caller, 0..PAGES);
    }
    for file in files {
        cache.file = file;
        assert_eq!(cache.percent_found(&mut caller, 0..PAGES), 100);
    }
}

#[test]
fn the_buckets_of_a_dead_writer_are_cleared_one_by_one_as_they_are_idle() {
    let mut cache = Cache::open();
    cache.die_writing(1, 0, 2);
    let mut reader = cache.join(2);
    let buckets = [0, 1].map(|block| cache.layout.home(0, block));
    assert_ne!(buckets[0], buckets[1]);
    // While a living process writes to one of them, the other one is idle.
    let _writer = cache.join(3);
    let memory = cache.memory.clone();
    let place = Place::new(&memory, 2);
    for block in [1, 0] {
        let header = cache.layout.header(buckets[block as usize]);
        at_once(place.name(Named::Blocks { file: 0, first: block, blocks: 1 }));
        at_once(memory.add(header, Header::BEGIN));
        cache.sweep();
        at_once(memory.add(header, Header::END.wrapping_neg()));
        at_once(place.withdraw());
    }
    for block in [0, 1] {
        cache.read(&mut reader, block);
        assert_eq!(cache.read(&mut reader, block), Outcome::Hit(()), "block {block}");
    }
}
