//! A file on the machine's disk behind a page cache that has all its pages.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::volume::Surroundings;
use crate::page_cache::{CacheOptions, CacheUse, PageCache};

/// The unit of the cache.
const PAGE_BYTES: u64 = 8192;
/// While a file is younger, each hit asks the kernel for more than usual: two seconds, and a tick.
const YOUNG: Duration = Duration::from_secs(4);
/// With fewer hits a figure does not show what a hit costs.
const HIT_RATE_AT_LEAST: f64 = 0.95;

/// The cache of a file.
pub struct Cached {
    cache: PageCache,
    file: PathBuf,
    pages: u64,
    /// Those that found no room.
    left_out: u64,
    /// What was read before the measurement.
    before: CacheUse,
}

impl Cached {
    /// Attaches a cache to a folder in which `file` will be the only file. The cache has room for a quarter
    /// more.
    pub fn attach(around: &Surroundings<'_>, file: PathBuf, transport: &'static str) -> Result<Self> {
        let folder = file.parent().context("a file without a folder")?;
        let memory_bytes = around.bytes * 5 / 4;
        let options = CacheOptions { memory_bytes, nodes: 1, transport };
        let cache = PageCache::attach_with_pool(around.farpool, folder, options)?;
        let before = cache.status()?.cache_use();
        Ok(Cached { cache, file, pages: around.bytes.div_ceil(PAGE_BYTES), left_out: 0, before })
    }

    /// Brings all pages of the filled file into the cache.
    pub fn warm(&mut self) -> Result<()> {
        let name = self.file.file_name().and_then(|name| name.to_str()).context("a file without a name")?;
        self.left_out = self.pages.saturating_sub(self.cache.pin(name)? / PAGE_BYTES);
        thread::sleep(YOUNG.saturating_sub(age(&self.file)?));
        self.before = self.cache.status()?.cache_use();
        Ok(())
    }

    /// An error if too few of what was read since [`warm`](Self::warm) were hits: at least `measured` pages.
    /// Returns what readers of the figure must know.
    pub fn check(&self, measured: f64) -> Result<Option<String>> {
        let read = self.cache.status()?.cache_use().since(self.before);
        ensure!(
            are_hits(read, measured),
            "of {measured:.0} reads that were to be hits, {} were, and {} were read from the disk",
            read.hits,
            read.misses
        );
        Ok(remark(read, self.left_out, self.pages))
    }
}

fn are_hits(read: CacheUse, measured: f64) -> bool {
    let rate = read.hit_rate().unwrap_or(0.0);
    rate >= HIT_RATE_AT_LEAST && read.hits as f64 >= HIT_RATE_AT_LEAST * measured
}

fn remark(read: CacheUse, left_out: u64, pages: u64) -> Option<String> {
    let misses = 100.0 * (1.0 - read.hit_rate().unwrap_or(1.0));
    let is_complete = left_out == 0 && read.misses == 0;
    (!is_complete).then(|| {
        format!(
            "of {pages} pages, {left_out} were not in the cache when it was filled; {misses:.2} % of the reads \
             were misses."
        )
    })
}

fn age(file: &Path) -> Result<Duration> {
    let created = fs::metadata(file).and_then(|found| found.created());
    let created = created.with_context(|| format!("cannot tell how old {} is", file.display()))?;
    Ok(created.elapsed().unwrap_or_default()) // zero for a file from the future
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_that_missed_or_went_past_the_cache_are_no_hits() {
        let read = |hits, misses| CacheUse { hits, misses, turns: 0 };
        assert!(are_hits(read(1000, 10), 1000.0));
        assert!(!are_hits(read(1000, 100), 1000.0), "misses");
        assert!(!are_hits(read(500, 0), 1000.0), "not counted at all");
        assert!(!are_hits(read(0, 0), 0.0));
    }

    #[test]
    fn a_remark_is_made_of_pages_that_are_not_in_the_cache() {
        assert_eq!(remark(CacheUse { hits: 9, misses: 0, turns: 0 }, 0, 64), None);
        let said = remark(CacheUse { hits: 199, misses: 1, turns: 0 }, 3, 64).unwrap();
        assert!(said.contains("of 64 pages, 3 were not in the cache") && said.contains("0.50 %"), "{said}");
    }
}
