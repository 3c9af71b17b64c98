use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::*;

/// Evicts one page of a cache whose visited slots are `visited`.
fn evict(sieve: &mut Sieve, visited: &mut [bool]) -> u32 {
    loop {
        let slot = sieve.hand().unwrap();
        if !std::mem::take(&mut visited[slot as usize]) {
            sieve.remove(slot);
            return slot;
        }
        sieve.pass();
    }
}

#[test]
fn the_hand_passes_what_was_visited_and_goes_on_where_it_was() {
    let mut sieve = Sieve::new(8);
    (0..5).for_each(|slot| sieve.insert(slot));
    let mut visited = [true, false, true, false, false, false, false, false];
    assert_eq!(evict(&mut sieve, &mut visited), 1);
    sieve.insert(5);
    assert_eq!(evict(&mut sieve, &mut visited), 3, "the hand is past 2 now");
    assert_eq!(evict(&mut sieve, &mut visited), 4);
    assert_eq!(evict(&mut sieve, &mut visited), 5, "the newest one, which nobody visited");
    assert_eq!(evict(&mut sieve, &mut visited), 0, "the hand has begun again");
    assert_eq!((sieve.len(), sieve.contains(2)), (1, true));
    assert_eq!(evict(&mut sieve, &mut visited), 2);
    assert!(sieve.len() == 0 && sieve.hand().is_none());
}

#[test]
fn slots_can_leave_and_come_again_at_any_time() {
    let mut sieve = Sieve::new(4);
    (0..4).for_each(|slot| sieve.insert(slot));
    sieve.pass();
    for slot in [1, 3, 0] {
        sieve.remove(slot);
        sieve.remove(slot);
    }
    sieve.insert(2);
    assert_eq!((sieve.len(), sieve.hand()), (1, Some(2)));
    sieve.insert(0);
    sieve.pass();
    assert_eq!(sieve.hand(), Some(0));
    sieve.pass();
    assert_eq!(sieve.hand(), Some(2));
}

#[test]
fn slots_that_are_added_and_removed_in_any_order_are_passed_once_a_round() {
    let mut random = Random(3);
    let (mut sieve, mut there) = (Sieve::new(50), BTreeSet::new());
    for _ in 0..20_000 {
        let slot = random.below(50);
        match random.below(5) {
            0 | 1 => {
                sieve.insert(slot);
                there.insert(slot);
            }
            2 => {
                sieve.remove(slot);
                there.remove(&slot);
            }
            3 => sieve.pass(),
            _ => {
                let at = sieve.hand();
                at.iter().for_each(|at| sieve.remove(*at));
                assert!(at.map_or(there.is_empty(), |at| there.remove(&at)), "{at:?}");
            }
        }
        assert_eq!(sieve.len() as usize, there.len());
        assert!((0..50).all(|slot| sieve.contains(slot) == there.contains(&slot)));
        let round: BTreeSet<u32> = (0..sieve.len()).filter_map(|_| (sieve.hand(), sieve.pass()).0).collect();
        assert_eq!(round, there);
    }
}

/// A cache of pages by SIEVE, and one by LRU, over the same trace.
struct Caches {
    sieve: Sieve,
    slots: HashMap<u32, u32>,
    pages: Vec<u32>,
    visited: Vec<bool>,
    recent: BTreeMap<u64, u32>,
    used: HashMap<u32, u64>,
    now: u64,
}

impl Caches {
    fn new(slots: u32) -> Self {
        Caches {
            sieve: Sieve::new(slots),
            slots: HashMap::new(),
            pages: Vec::new(),
            visited: vec![false; slots as usize],
            recent: BTreeMap::new(),
            used: HashMap::new(),
            now: 0,
        }
    }

    /// Reads a page. Returns whether it was in each of the caches.
    fn read(&mut self, page: u32) -> (bool, bool) {
        (self.read_by_sieve(page), self.read_by_lru(page))
    }

    fn read_by_sieve(&mut self, page: u32) -> bool {
        if let Some(slot) = self.slots.get(&page) {
            self.visited[*slot as usize] = true;
            return true;
        }
        let slot = if self.pages.len() < self.visited.len() {
            self.pages.push(page);
            self.pages.len() as u32 - 1
        } else {
            let slot = evict(&mut self.sieve, &mut self.visited);
            self.slots.remove(&self.pages[slot as usize]);
            self.pages[slot as usize] = page;
            slot
        };
        self.sieve.insert(slot);
        self.slots.insert(page, slot);
        false
    }

    fn read_by_lru(&mut self, page: u32) -> bool {
        self.now += 1;
        let before = self.used.insert(page, self.now);
        self.recent.insert(self.now, page);
        if let Some(before) = before {
            self.recent.remove(&before);
        } else if self.used.len() > self.visited.len() {
            let (_, oldest) = self.recent.pop_first().unwrap();
            self.used.remove(&oldest);
        }
        before.is_some()
    }
}

/// Numbers that look random, and are the same each time.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (((self.0 >> 33) * u64::from(bound)) >> 31) as u32
    }
}

const PAGES: u32 = 20_000;

/// Hit rates of SIEVE and of LRU, in percent, over the second half of a trace.
fn hit_rates(slots: u32, mut page: impl FnMut(u32) -> u32) -> (f64, f64) {
    let mut caches = Caches::new(slots);
    let reads = 20 * PAGES;
    let (mut sieve, mut lru) = (0, 0);
    for number in 0..reads {
        let (by_sieve, by_lru) = caches.read(page(number));
        if number >= reads / 2 {
            sieve += u32::from(by_sieve);
            lru += u32::from(by_lru);
        }
    }
    let percent = |hits| f64::from(hits) * 200.0 / f64::from(reads);
    (percent(sieve), percent(lru))
}

/// Pages by Zipf's law with exponent 0.99.
fn zipf(random: &mut Random) -> impl FnMut() -> u32 + '_ {
    let weights = (1..=PAGES).scan(0.0, |sum, rank| {
        *sum += 1.0 / f64::from(rank).powf(0.99);
        Some(*sum)
    });
    let sums: Vec<f64> = weights.collect();
    move || {
        let drawn = f64::from(random.below(1 << 30)) / f64::from(1 << 30) * sums[PAGES as usize - 1];
        let rank = sums.partition_point(|sum| *sum < drawn) as u32;
        // Ranks are scattered over the pages.
        (rank * 7919) % PAGES
    }
}

#[test]
fn the_hit_rate_on_a_hotspot_is_within_half_a_point_of_that_of_lru() {
    let mut random = Random(1);
    let hot = PAGES / 5;
    let (sieve, lru) = hit_rates(PAGES / 4, |_| match random.below(100) {
        0 => hot + random.below(PAGES - hot),
        _ => random.below(hot),
    });
    assert!(sieve >= lru - 0.5, "{sieve} {lru}");
}

#[test]
fn scans_do_not_drive_out_what_is_used_often() {
    let mut random = Random(2);
    let mut draw = zipf(&mut random);
    let mut next = 0;
    // Half of the reads are those of scans.
    let (sieve, lru) = hit_rates(PAGES / 2, |number| match number / 2_000 % 2 {
        0 => draw(),
        _ => {
            next = (next + 1) % PAGES;
            next
        }
    });
    assert!(sieve >= lru + 5.0, "{sieve} {lru}");
}
