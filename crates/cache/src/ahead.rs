//! Which blocks are fetched before a program reads them, where a READ of far memory takes a round trip.
//!
//! A database reads most blocks one by one, even if it goes through a table in order, and would wait for a
//! round trip each time. A *run* is a sequence of blocks that are read in order. For each descriptor, a
//! thread keeps the mean length of the runs. When a run begins, the thread fetches that many pages at once,
//! by READs that are in flight together. The blocks of an index are read in no order, so nothing is fetched
//! ahead there. If a run is longer than the mean, the rest is fetched in portions that double, up to a limit.

use std::ops::Range;

/// Most pages that a thread has fetched and not read yet: as many as PostgreSQL 18 reads in one call. They
/// take 128 KiB of the thread's arena.
pub(crate) const FETCHED_MAX: u32 = 16;
/// Most blocks that are fetched beyond those of the call: a wrong guess costs that many READs.
const AHEAD_MAX: u32 = 8;
/// The mean length of runs is counted in parts of a block.
const PARTS_PER_BLOCK: u32 = 64;
/// The last run counts for one part in so many of the mean.
const MEAN_DIVISOR: u32 = 8;
/// An allowance is counted in parts of a page. A read of a page that was not fetched adds one part, so that
/// fetching is tried again now and then.
const PARTS_PER_PAGE: u32 = 64;
/// Largest allowance, in parts of a page: four times as many pages as a thread keeps.
const ALLOWANCE_MAX: u32 = 4 * FETCHED_MAX * PARTS_PER_PAGE;

/// How the blocks of a file are read through a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Pattern {
    /// The block after the last one that was read.
    next: u32,
    /// Blocks in order that were read up to there.
    length: u32,
    /// Mean length of the earlier runs, in parts of a block ([`PARTS_PER_BLOCK`]).
    usual: u32,
    /// The first block of the run that has not been fetched.
    unfetched: u32,
}

impl Pattern {
    /// Notes that a call reads `block`, and goes on to `end` (exclusive). Returns the blocks to fetch now,
    /// which begin with `block`, or an empty range if `block` was fetched already.
    pub(crate) fn blocks_to_fetch(&mut self, block: u32, end: u32) -> Range<u32> {
        if block != self.next {
            let length = self.length.min(FETCHED_MAX) * PARTS_PER_BLOCK;
            self.usual = (self.usual * (MEAN_DIVISOR - 1) + length) / MEAN_DIVISOR;
            (self.length, self.unfetched) = (0, block);
        }
        self.next = block.saturating_add(1);
        self.length = self.length.saturating_add(1);
        if block < self.unfetched {
            return block..block;
        }
        let usual = (self.usual + PARTS_PER_BLOCK / 2) / PARTS_PER_BLOCK;
        let is_longer = self.length > 2 * usual;
        let ahead = if is_longer { self.length - 1 } else { usual.saturating_sub(self.length) };
        let wanted = self.next.saturating_add(ahead.min(AHEAD_MAX)).max(end);
        self.unfetched = wanted.min(block.saturating_add(FETCHED_MAX));
        block..self.unfetched
    }
}

/// How many pages may be fetched before any of them is read. Each fetched page that is read adds two, so in
/// the long run at most half of the fetched pages are never read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Allowance {
    /// In parts of a page ([`PARTS_PER_PAGE`]).
    parts: u32,
}

impl Allowance {
    pub(crate) fn new() -> Allowance {
        Allowance { parts: ALLOWANCE_MAX }
    }

    /// How many pages may be fetched now.
    pub(crate) fn pages(self) -> usize {
        (self.parts / PARTS_PER_PAGE) as usize
    }

    /// So many pages are fetched: more than are allowed if a call needs them.
    pub(crate) fn take(&mut self, pages: usize) {
        self.parts = self.parts.saturating_sub(PARTS_PER_PAGE.saturating_mul(pages as u32));
    }

    /// A page was read.
    pub(crate) fn note_read(&mut self, was_fetched: bool) {
        self.parts = (self.parts + if was_fetched { 2 * PARTS_PER_PAGE } else { 1 }).min(ALLOWANCE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is fetched when these blocks are read one by one.
    fn fetched(pattern: &mut Pattern, blocks: impl IntoIterator<Item = u32>) -> Vec<Range<u32>> {
        let fetched = blocks.into_iter().map(|block| pattern.blocks_to_fetch(block, block + 1));
        fetched.filter(|blocks| blocks.len() > 1).collect()
    }

    #[test]
    fn single_blocks_are_read_without_others() {
        let mut pattern = Pattern::default();
        assert_eq!(fetched(&mut pattern, (1..100).map(|number| 7 * number % 100)), []);
        assert_eq!(fetched(&mut pattern, [200, 201, 300, 301, 400]), [], "two in order now and then");
    }

    #[test]
    fn once_short_runs_are_usual_they_are_fetched_with_their_first_blocks() {
        let mut pattern = Pattern::default();
        let runs = |from: u32, count: u32| (from..from + count).flat_map(|run| 100 * run..100 * run + 4);
        fetched(&mut pattern, runs(1, 30));
        assert_eq!(fetched(&mut pattern, runs(50, 2)), [5000..5004, 5100..5104]);
        // Then single blocks again: for a few of them too much is fetched.
        let wasted = fetched(&mut pattern, (1..100).map(|number| 70 * number));
        assert!((1..=15).contains(&wasted.len()), "{wasted:?}");
    }

    #[test]
    fn a_long_run_is_fetched_in_portions_that_double_up_to_a_limit() {
        let mut pattern = Pattern::default();
        let found = fetched(&mut pattern, 10..50);
        assert_eq!(found[..4], [11..13, 13..17, 17..25, 25..34]);
        assert!(found[3..].iter().all(|blocks| blocks.len() == 9), "{found:?}");
        let whole = Pattern::default().blocks_to_fetch(0, 100);
        assert_eq!(whole, 0..FETCHED_MAX, "a call for many blocks");
        let last = Pattern::default().blocks_to_fetch(u32::MAX, u32::MAX);
        assert_eq!(last, u32::MAX..u32::MAX, "the last block");
    }

    #[test]
    fn at_most_half_of_the_pages_are_fetched_for_nothing() {
        let mut allowance = Allowance::new();
        let mut taken = 0;
        for _ in 0..1000 {
            let pages = allowance.pages().min(8);
            allowance.take(pages);
            taken += pages;
            allowance.note_read(true);
        }
        assert!((2000..2100).contains(&taken), "{taken}");
    }

    #[test]
    fn a_scan_that_is_not_allowed_to_fetch_may_try_again_later() {
        let mut allowance = Allowance::new();
        allowance.take(allowance.pages());
        let portions = (0..).take_while(|_| {
            (0..=AHEAD_MAX).for_each(|_| allowance.note_read(false));
            allowance.pages() < 2
        });
        assert!(portions.count() < 20);
    }
}
