//! Which pages stay in the page cache: how many reads find theirs, beside a list of the least recently used
//! pages (LRU) of the same size.
//!
//! Question: what does the cache lose because its readers take no lock, and keep no common order of pages?
//! Method: the cache's callers and keeper, as they ship, read the same pages as an LRU list, over an index in
//! this process's memory. The slots have room for the number of a page, and there is no disk.
//! Check: each page that is found is compared with the one that was asked for.
//!
//! The same seed gives the same results.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use farpool_cache::{
    Caller, Door, FileId, Index, Keeper, KnownFile, Layout, Outcome, PageSink, Shape, Shared, Slots, at_once,
};
use farpool_fabric::{Mapping, SharedMemory};

use super::Effort;
use crate::kv::Chooser;
use crate::progress::Progress;
use crate::stop::StopFlag;

/// Pages of the data at scale 1: 400 MB.
const PAGES_PER_SCALE: f64 = 50_000.0;
/// Fewest pages, at any scale.
const LEAST_PAGES: u32 = 4_000;
/// Reads for each page. Those of the first half fill the caches, and are not counted.
pub const READS_PER_PAGE: u32 = 20;
/// Slots for each miss between two rounds of the keeper: half of the slots that it keeps free are taken
/// meanwhile, as it expects.
const SLOTS_PER_MISS: u32 = 128;
/// Fewest misses between two rounds of the keeper: half of the fewest slots that it keeps free.
const MISSES_MIN: u32 = 8;
const PLACES: u32 = 1;
/// The exponent of Zipf's law.
const SKEW: f64 = 0.99;
/// Rounds after which a file that is read must be in the table.
const OPENING_ROUNDS: u32 = 10;

/// Which pages are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reads {
    /// 99 % of the reads go to 20 % of the pages.
    Hotspot,
    /// Half of the reads follow Zipf's law; in between, scans read all pages one after the other.
    ZipfAndScans,
    /// All pages alike.
    Uniform,
}

impl Reads {
    /// In the order of the report.
    pub const ALL: [Reads; 3] = [Reads::Hotspot, Reads::ZipfAndScans, Reads::Uniform];

    /// The name that readers see.
    pub fn name(self) -> &'static str {
        match self {
            Reads::Hotspot => "hotspot: 99 % of reads on 20 % of pages",
            Reads::ZipfAndScans => "Zipf and scans",
            Reads::Uniform => "uniform",
        }
    }

    /// The size of the caches, in per cent of the data.
    pub fn cache_percent(self) -> u32 {
        match self {
            Reads::Hotspot | Reads::Uniform => 25,
            Reads::ZipfAndScans => 50,
        }
    }
}

/// The shares of reads that found their page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HitRates {
    /// Which pages were read.
    pub reads: Reads,
    /// In the page cache.
    pub cache: f64,
    /// In the LRU list.
    pub lru: f64,
}

/// The results of all rounds.
#[derive(Clone, Debug)]
pub struct CachedHitsReport {
    /// Each kind of reads once per round.
    pub rates: Vec<HitRates>,
    /// Pages of the data.
    pub pages: u32,
}

/// Measures each kind of reads in each round, with another seed in each.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<CachedHitsReport> {
    let pages = LEAST_PAGES.max((PAGES_PER_SCALE * effort.scale) as u32);
    let progress = Progress::on_stderr();
    let mut rates = Vec::new();
    for seed in 1..=effort.rounds as u64 {
        let step = progress.step(format!("hit rates, round {seed}"));
        for reads in Reads::ALL {
            rates.push(hit_rates(reads, pages, seed, stop)?);
        }
        step.done("measured");
    }
    Ok(CachedHitsReport { rates, pages })
}

fn hit_rates(reads: Reads, pages: u32, seed: u64, stop: &StopFlag) -> Result<HitRates> {
    let slots = pages / 100 * reads.cache_percent();
    let (mut cache, mut lru) = (Cache::open(slots)?, Lru::new(pages, slots));
    let mut trace = Trace::new(reads, pages, seed);
    let all = u64::from(pages) * u64::from(READS_PER_PAGE);
    let (mut by_cache, mut by_lru) = (0, 0);
    for number in 0..all {
        if number.is_multiple_of(u64::from(pages)) {
            stop.check()?;
        }
        let page = trace.next();
        let found = (cache.read(page)?, lru.read(page));
        if number >= all / 2 {
            by_cache += u64::from(found.0);
            by_lru += u64::from(found.1);
        }
    }
    let rate = |hits: u64| hits as f64 / (all - all / 2) as f64;
    Ok(HitRates { reads, cache: rate(by_cache), lru: rate(by_lru) })
}

/// The numbers of the pages that are read.
struct Trace {
    reads: Reads,
    pages: u32,
    chooser: Chooser,
    number: u64,
    /// Where the scans are.
    scanned: u32,
}

impl Trace {
    fn new(reads: Reads, pages: u32, seed: u64) -> Self {
        Trace { reads, pages, chooser: Chooser::new(pages.into(), SKEW, seed), number: 0, scanned: 0 }
    }

    fn next(&mut self) -> u32 {
        // A scan is interrupted when it has read a tenth of all pages.
        let is_scan = self.number / u64::from(self.pages / 10) % 2 == 1;
        self.number += 1;
        let hot = self.pages / 5;
        match self.reads {
            Reads::Hotspot => match self.below(100) {
                0 => hot + self.below(self.pages - hot),
                _ => self.below(hot),
            },
            Reads::ZipfAndScans if is_scan => {
                self.scanned = (self.scanned + 1) % self.pages;
                self.scanned
            }
            Reads::ZipfAndScans => {
                let [page] = self.chooser.choose();
                page as u32
            }
            Reads::Uniform => self.below(self.pages),
        }
    }

    fn below(&mut self, limit: u32) -> u32 {
        self.chooser.random().below(limit.into()) as u32
    }
}

/// What is in a slot: the number of a page.
type Content = [u8; 4];

/// Slots in this process's memory.
#[derive(Clone)]
struct Contents(Rc<RefCell<Vec<Content>>>);

impl Slots for Contents {
    fn read(&self, slot: u32, sink: &mut PageSink<'_>) -> bool {
        self.0.borrow().get(slot as usize).map(|content| sink(0, content)).is_some()
    }

    fn write(&self, slot: u32, page: &[u8]) -> bool {
        let (mut slots, content) = (self.0.borrow_mut(), page.try_into());
        match (slots.get_mut(slot as usize), content) {
            (Some(slot), Ok(content)) => {
                *slot = content;
                true
            }
            _ => false,
        }
    }
}

/// A page cache with one reader, and one file.
struct Cache {
    caller: Caller<Shared<Contents>>,
    keeper: Keeper<Shared<Contents>>,
    file: KnownFile,
    misses: u32,
    misses_per_round: u32,
}

impl Cache {
    fn open(slots: u32) -> Result<Self> {
        let shape = Shape { places: PLACES, files: 1, slots };
        let layout = Layout::new(shape);
        let contents = Contents(Rc::new(RefCell::new(vec![Content::default(); slots as usize])));
        let (door, words) = (memory(Layout::door_bytes(PLACES))?, memory(layout.index_bytes())?);
        let index = move |_, _| Index::new(words.clone(), shape, contents.clone());
        let ground = || Shared::new(door.clone(), PLACES, Box::new(index.clone()));
        let kept = index(0, shape).zip(ground()).map(|(index, ground)| ground.with_index(0, index));
        let kept = kept.context("the index does not fit its memory")?;
        let mut keeper: Keeper<_> = at_once(Keeper::start(kept, layout, |_| true));
        let caller = at_once(Caller::join(ground().context("no door")?, PLACES, 1)).context("no place")?;
        ensure!((0..2).any(|_| at_once(keeper.turn_door(Door::Open))), "the door does not open");
        let file = KnownFile::new(FileId { device: 1, inode: 2, generation: 3 });
        let misses_per_round = (slots / SLOTS_PER_MISS).max(MISSES_MIN);
        let mut cache = Cache { caller, keeper, file, misses: 0, misses_per_round };
        for _ in 0..OPENING_ROUNDS {
            cache.read(0)?;
            cache.round();
        }
        ensure!(cache.read(0)?, "a page that is read again and again is not in the cache");
        Ok(cache)
    }

    /// Reads a page. Returns whether it was in the cache.
    fn read(&mut self, page: u32) -> Result<bool> {
        let (wanted, mut read) = (page.to_le_bytes(), Content::default());
        let pread = async |to: &mut [u8]| -> io::Result<usize> {
            to.copy_from_slice(&wanted);
            Ok(to.len())
        };
        let found = at_once(self.caller.read(&mut self.file, page, &mut read, async || true, pread))?;
        ensure!(found.page_or(&read) == wanted, "the cache returned another page than {page}");
        let is_hit = matches!(found, Outcome::Hit(_));
        if !is_hit {
            self.misses += 1;
            if self.misses.is_multiple_of(self.misses_per_round) {
                self.round();
            }
        }
        Ok(is_hit)
    }

    /// A round of the keeper, as the daemon makes one every ten milliseconds.
    fn round(&mut self) {
        at_once(self.keeper.maintain_files());
        at_once(self.keeper.sweep());
    }
}

fn memory(bytes: u64) -> Result<Arc<Mapping>> {
    let memory = SharedMemory::create("farpool-bench-cache", bytes).context("no memory for the index")?;
    Ok(memory.mapping().clone())
}

/// The pages that were read last.
struct Lru {
    /// Of each page, when it was read last; 0 if it is not in the list.
    used: Vec<u64>,
    /// Reads in their order. Those of pages that were read again, or are not in the list, do not count.
    reads: VecDeque<(u64, u32)>,
    pages: u32,
    most: u32,
    now: u64,
}

impl Lru {
    fn new(pages: u32, most: u32) -> Self {
        Lru { used: vec![0; pages as usize], reads: VecDeque::new(), pages: 0, most, now: 0 }
    }

    /// Reads a page. Returns whether it was in the list.
    fn read(&mut self, page: u32) -> bool {
        self.now += 1;
        self.reads.push_back((self.now, page));
        let is_hit = std::mem::replace(&mut self.used[page as usize], self.now) != 0;
        if !is_hit {
            self.pages += 1;
        }
        while self.pages > self.most {
            self.forget_oldest();
        }
        is_hit
    }

    /// Forgets the oldest read, and its page unless that was read again.
    fn forget_oldest(&mut self) {
        let Some((at, page)) = self.reads.pop_front() else { return };
        let used = &mut self.used[page as usize];
        if *used == at {
            *used = 0;
            self.pages -= 1;
        }
    }
}

impl CachedHitsReport {
    /// A value of one kind of reads, round by round.
    pub fn values(&self, reads: Reads, value: impl Fn(&HitRates) -> f64) -> Vec<f64> {
        self.rates.iter().filter(|rates| rates.reads == reads).map(value).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_that_was_not_read_for_the_longest_time_leaves_the_lru_list() {
        let mut lru = Lru::new(5, 2);
        let found: Vec<bool> = [0, 1, 0, 2, 0, 1, 2, 1, 2].into_iter().map(|page| lru.read(page)).collect();
        assert_eq!(found, [false, false, true, false, true, false, false, true, true]);
    }

    #[test]
    fn a_seed_gives_the_same_rates_each_time_and_another_seed_others() {
        let rates = |seed| hit_rates(Reads::ZipfAndScans, 1_000, seed, &StopFlag::default()).unwrap();
        assert_eq!(rates(1), rates(1));
        assert_ne!(rates(1), rates(2));
    }

    #[test]
    fn uniform_reads_find_as_large_a_share_as_the_list_has_pages() {
        let rates = hit_rates(Reads::Uniform, 4_000, 1, &StopFlag::default()).unwrap();
        assert!((0.24..0.26).contains(&rates.lru), "{rates:?}");
        assert!((0.20..0.26).contains(&rates.cache), "{rates:?}");
    }

    #[test]
    fn a_scan_reads_page_after_page_and_the_hotspot_gets_its_share() {
        let mut trace = Trace::new(Reads::ZipfAndScans, 1_000, 1);
        let read: Vec<u32> = (0..200).map(|_| trace.next()).collect();
        assert!(read[100..].windows(2).all(|pair| pair[1] == pair[0] + 1), "{read:?}");
        let mut trace = Trace::new(Reads::Hotspot, 1_000, 1);
        let hot = (0..100_000).filter(|_| trace.next() < 200).count();
        assert!((98_700..99_300).contains(&hot), "{hot}");
    }
}
