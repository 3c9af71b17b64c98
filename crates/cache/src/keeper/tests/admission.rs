//! Which pages are admitted while hardly any is found.

use std::time::{Duration, Instant};

use super::*;
use crate::admission::admits_one_in;
use crate::advice::Adviser;
use crate::policy::tests::Random;

/// Slots: enough for a curve that is not rough.
const SLOTS_OF_CURVE: u32 = 8_192;
/// Blocks of the file: far more than fit.
const BLOCKS: u32 = 500_000;
const READS_PER_SECOND: u32 = 20_000;

struct Advised {
    cache: Cache,
    adviser: Adviser,
    now: Instant,
    random: Random,
}

impl Advised {
    /// Reads random blocks below `blocks` for a second. Returns how many of those that were missed are in the
    /// cache at its end.
    fn read_for_a_second(&mut self, caller: &mut Caller<Memory>, blocks: u32) -> usize {
        let mut missed = BTreeSet::new();
        for number in 0..READS_PER_SECOND {
            let block = self.random.below(blocks);
            if self.cache.read(caller, block) != Outcome::Hit(()) {
                missed.insert(block);
            }
            if number % 50 == 0 {
                self.cache.sweep();
            }
        }
        self.now += Duration::from_secs(1);
        let (memory, layout) = (&self.cache.memory, &self.cache.layout);
        let pages = at_once(self.cache.keeper.sweep()).pages;
        at_once(self.adviser.go_on(memory, layout, (pages, SLOTS_OF_CURVE), self.now));
        let there = |block: &&u32| {
            let words = memory.words.borrow();
            let mut keys = layout.entries(layout.buckets(0, **block)).map(|entry| {
                let is_valid = Entry(words[layout.entry(entry)]).state() == EntryState::Valid;
                (is_valid, Key(words[layout.key(entry)]).block())
            });
            keys.any(|found| found == (true, **block))
        };
        missed.iter().filter(there).count()
    }

    fn admits_one_in(&self) -> u64 {
        at_once(admits_one_in(&self.cache.memory, &self.cache.layout))
    }
}

#[test]
fn while_hardly_any_read_is_a_hit_only_one_block_in_16_and_pinned_files_are_admitted() {
    let cache = Cache::of(SLOTS_OF_CURVE);
    let now = Instant::now();
    let adviser = at_once(Adviser::new(&cache.memory, &cache.layout, now));
    let mut advised = Advised { cache, adviser, now, random: Random(1) };
    let (mut caller, mut loader) = (advised.cache.join(1), advised.cache.join(2));
    loader.count_no_reads();
    advised.read_for_a_second(&mut caller, BLOCKS);
    assert_eq!(advised.admits_one_in(), 1, "all blocks are read for the first time");
    assert!((0..5).any(|_| {
        advised.read_for_a_second(&mut caller, BLOCKS);
        advised.admits_one_in() == 16
    }));
    let part = advised.read_for_a_second(&mut caller, BLOCKS);
    assert!((900..1_600).contains(&part), "{part} of {READS_PER_SECOND}");
    let file = &mut { advised.cache.file };
    let mut admitted = 0;
    for block in BLOCKS..BLOCKS + 1_600 {
        let mut is_chosen = None;
        let pread = async |_: &mut [u8], chosen: bool| {
            is_chosen = Some(chosen);
            Ok(0)
        };
        let (mut sink, mut page) = (|_: usize, _: &[u8]| (), [0]);
        let read = caller.read_into(file, block, &mut sink, &mut page, async || true, pread);
        assert_eq!(at_once(read).unwrap(), Outcome::Disk(0));
        admitted += u32::from(is_chosen == Some(true));
    }
    assert!((50..200).contains(&admitted), "{admitted}: `pread` learns what is admitted");
    let loaded = advised.read_for_a_second(&mut loader, BLOCKS);
    assert!(loaded > 5_000, "{loaded}: a program loads them on purpose");
    assert!(at_once(caller.set_pinned(file, true)));
    let pinned = advised.read_for_a_second(&mut caller, BLOCKS);
    assert!(pinned > 5_000, "{pinned}");
    assert!(at_once(caller.set_pinned(file, false)));
    assert!((0..5).any(|_| {
        advised.read_for_a_second(&mut caller, SLOTS_OF_CURVE / 2);
        advised.admits_one_in() == 1
    }));
}
