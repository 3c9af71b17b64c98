//! A folder on the local disk whose files are cached in far memory.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use super::GroundOptions;
use crate::far_memory::FarMemory;
use crate::page_cache::{CacheUse, PageCache};
use crate::stop::StopFlag;

/// The folder and its cache.
#[derive(Debug)]
pub(super) struct CachedFiles {
    pub cache: PageCache,
    pub dir: PathBuf,
    /// What runs databases there.
    pub wrapper: Vec<OsString>,
}

impl CachedFiles {
    /// Makes the folder `dir`, and attaches a cache of the size `memory_mib` in the memory of a pool.
    pub fn prepare(
        options: &GroundOptions<'_>,
        dir: PathBuf,
        memory_mib: u64,
        far: &FarMemory,
        stop: &StopFlag,
    ) -> Result<Self> {
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let mut of_cache = far.operator_args();
        of_cache.extend(["--memory".into(), format!("{memory_mib}MiB").into()]);
        of_cache.extend(["--transport".into(), options.transport.to_string().into()]);
        let mut cache = PageCache::attach(options.farpool, &dir, of_cache)?;
        cache.await_open(stop)?;
        let mut wrapper = options.wrapper.clone();
        // Last, so that only the database runs with the interposer.
        let run = [options.farpool.into(), "run".into(), "--cache".into(), dir.clone().into(), "--".into()];
        wrapper.extend(run);
        Ok(Self { cache, dir, wrapper })
    }

    /// How the cache was used since its door was made.
    pub fn used(&self) -> Result<CacheUse> {
        Ok(self.cache.status()?.cache_use())
    }
}
