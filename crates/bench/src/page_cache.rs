//! A page cache as a user gets it: `farpool cache attach` as a child process, and what its commands say.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use farpool_fabric::TransportChoice;
use serde::Deserialize;

use crate::child::{Child, run};
use crate::local_pool::{Lend, LocalPool};
use crate::machine::kib;
use crate::progress::warn;
use crate::stop::StopFlag;

/// The unit of the cache.
const PAGE_BYTES: u64 = 8192;
/// Size of the regions of the pool.
const REGION_BYTES: u64 = 64 << 20;
/// How long the cache may take until it has all its memory and is open: some rounds of its keeper.
const OPEN_WITHIN: Duration = Duration::from_secs(60);
/// For commands that only look at the cache.
const LOOK_DEADLINE: Duration = Duration::from_secs(30);
/// For commands that read files.
const READ_DEADLINE: Duration = Duration::from_secs(300);

/// What stands behind the number of pages in the answer of `farpool cache verify`.
const VERIFIED: &str = " pages in the cache are as on the disk";

/// A cache of the files in a directory. Dropping it detaches it, ends its pool, and removes its door.
#[derive(Debug)]
pub struct PageCache {
    daemon: Child, // ended before its door is removed
    /// `None`: its memory comes from somebody else's pool.
    pool: Option<LocalPool>,
    _door: Door,
    farpool: PathBuf,
    data: PathBuf,
}

/// How large a cache is, and where its memory lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheOptions {
    /// Far memory.
    pub memory_bytes: u64,
    /// Number of nodes that lend it.
    pub nodes: u32,
    /// How they are reached: shm or tcp.
    pub transport: &'static str,
}

/// What `farpool cache status --json` says.
#[derive(Clone, Debug, Deserialize)]
pub struct CacheStatus {
    door: PathBuf,
    state: String,
    #[serde(flatten)]
    used: CacheUse,
    cache: Option<Used>,
}

/// What is in a cache.
#[derive(Clone, Debug, Deserialize)]
struct Used {
    wanted_bytes: u64,
    memory_bytes: u64,
    used_bytes: u64,
    index_bytes: u64,
    files: Vec<UsedByFile>,
}

#[derive(Clone, Debug, Deserialize)]
struct UsedByFile {
    path: Option<String>,
    bytes: u64,
    pinned: bool,
}

/// How a cache was used since its door was made, or since an earlier look.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub struct CacheUse {
    /// Blocks that were found in the cache.
    pub hits: u64,
    /// Blocks that were read from the disk.
    pub misses: u64,
    /// Changes of the cache's state: if there was one, the cache was off, and lost all pages.
    pub turns: u64,
}

impl PageCache {
    /// Attaches a cache to the files in `data`; `options` are those of `farpool cache attach`.
    pub fn attach(farpool: &Path, data: &Path, options: impl IntoIterator<Item = OsString>) -> Result<Self> {
        Self::with_pool(farpool, data, options, None)
    }

    /// Attaches a cache that has a pool of its own on this machine. `farpool` is this program's file.
    pub fn attach_with_pool(farpool: &Path, data: &Path, options: CacheOptions) -> Result<Self> {
        let CacheOptions { memory_bytes, nodes, transport } = options;
        // A region more: the share of a node may begin anywhere in a region.
        let bytes_each = memory_bytes.div_ceil(u64::from(nodes)) + REGION_BYTES;
        let lend = Lend { nodes, bytes_each, region_bytes: REGION_BYTES };
        let pool = LocalPool::lending(farpool, lend, TransportChoice::Auto)?;
        let memory = memory_bytes.to_string();
        let options = ["--memory", &memory, "--broker", &pool.broker, "--transport", transport];
        let options = options.map(OsString::from);
        Self::with_pool(farpool, data, options, Some(pool))
    }

    /// Hands the cache of a server that was shut down over to that of its standby, whose files are in `data`,
    /// and waits until the standby may be promoted. Meanwhile the standby needs a restartpoint. The cache
    /// must have a pool of its own.
    pub fn hand_over(mut self, data: &Path, transport: &'static str) -> Result<Self> {
        let mut handover = Command::new(&self.farpool);
        handover.args(["cache", "handover"]).arg(&self.data).stdout(Stdio::piped());
        let mut handover = handover.spawn().context("cannot start farpool cache handover")?;
        let list = handover.stdout.take().context("a child without output")?;
        let pool = self.pool.take().context("the cache has no pool of its own")?;
        let options = ["--take-over", "-", "--broker", &pool.broker, "--transport", transport];
        let options = options.map(OsString::from);
        let taken = Self::with_input(&self.farpool, data, options, Some(pool), list.into());
        // It has ended, or ends now that nobody reads its output.
        let status = handover.wait().context("cannot wait for farpool cache handover")?;
        ensure!(status.success(), "farpool cache handover failed ({status})");
        self.daemon.end()?; // it has ended by itself
        taken
    }

    fn with_pool(
        farpool: &Path,
        data: &Path,
        options: impl IntoIterator<Item = OsString>,
        pool: Option<LocalPool>,
    ) -> Result<Self> {
        Self::with_input(farpool, data, options, pool, Stdio::null())
    }

    /// Attaches a cache, and gives its daemon this standard input.
    fn with_input(
        farpool: &Path,
        data: &Path,
        options: impl IntoIterator<Item = OsString>,
        pool: Option<LocalPool>,
        input: Stdio,
    ) -> Result<Self> {
        let args = ["cache".into(), "attach".into(), data.into()].into_iter().chain(options);
        let (daemon, _) = Child::of_this_program(farpool, "the cache", args, input)?;
        let door = Door(status(farpool, data)?.door);
        Ok(PageCache { daemon, pool, _door: door, farpool: farpool.into(), data: data.into() })
    }

    /// Waits until the cache is open and has all its memory.
    pub fn await_open(&mut self, stop: &StopFlag) -> Result<()> {
        self.daemon.wait_until(OPEN_WITHIN, |_| {
            stop.check()?;
            let status = status(&self.farpool, &self.data)?;
            let has_memory = |cache: &Used| cache.memory_bytes == cache.wanted_bytes;
            Ok(status.state == "open" && status.cache.as_ref().is_some_and(has_memory))
        })
    }

    /// Memory of the database's machine that it takes for each page for which it has room, in bytes: the
    /// index, and the daemon's own memory.
    pub fn local_bytes_per_page(&self) -> Result<f64> {
        let status = self.status()?;
        let cache = status.cache.context("the cache is closed")?;
        let id = self.daemon.id();
        let daemon = fs::read_to_string(format!("/proc/{id}/status")).context("the daemon has ended")?;
        let anonymous = kib(&daemon, "RssAnon").context("no RssAnon in the daemon's status")? << 10;
        Ok((cache.index_bytes + anonymous) as f64 / (cache.memory_bytes / PAGE_BYTES) as f64)
    }

    /// What it says of itself.
    pub fn status(&self) -> Result<CacheStatus> {
        status(&self.farpool, &self.data)
    }

    /// Pins a file of the directory. Returns how many of its bytes are in the cache.
    pub fn pin(&self, file: &str) -> Result<u64> {
        let pinned = self.command(&["pin".as_ref(), self.data.as_ref(), file.as_ref()]);
        let found = self.status()?.cache.map(|cache| cache.files).unwrap_or_default();
        let found = found.into_iter().find(|found| found.path.as_deref() == Some(file) && found.pinned);
        match (found, pinned) {
            // A file some of whose pages found no room is pinned all the same.
            (Some(found), _) => Ok(found.bytes),
            (None, Err(error)) => Err(error),
            (None, Ok(_)) => bail!("{file} was pinned, and the cache does not know it"),
        }
    }

    /// Compares one in so many pages in the cache with the disk, and returns how many that were; an error if
    /// one differs.
    pub fn verify(&self, one_in: u32) -> Result<u64> {
        let sample = format!("1/{one_in}");
        let said =
            self.command(&["verify".as_ref(), "--sample".as_ref(), sample.as_ref(), self.data.as_ref()]);
        let said = said.context("cannot verify the cache")?;
        // Without that text, nothing was compared.
        let pages = said.split_once(VERIFIED).and_then(|(before, _)| before.rsplit(' ').next());
        Ok(pages.map_or(Ok(0), str::parse)?)
    }

    fn command(&self, args: &[&OsStr]) -> Result<String> {
        run(&self.farpool, &[&["cache".as_ref()], args].concat(), READ_DEADLINE)
    }

    /// An error if the daemon has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        ensure!(self.daemon.is_running()?, "farpool cache attach has ended");
        Ok(())
    }

    /// Detaches it; an error unless it ends cleanly.
    pub fn detach(&mut self) -> Result<()> {
        self.daemon.end()
    }
}

impl CacheStatus {
    /// Bytes of all pages in the cache; none while it is not open.
    pub fn used_bytes(&self) -> u64 {
        self.cache.as_ref().map_or(0, |cache| cache.used_bytes)
    }

    /// How the cache was used since its door was made.
    pub fn cache_use(&self) -> CacheUse {
        self.used
    }
}

impl CacheUse {
    /// What was added since an earlier look.
    pub fn since(self, before: CacheUse) -> CacheUse {
        CacheUse {
            hits: self.hits.saturating_sub(before.hits),
            misses: self.misses.saturating_sub(before.misses),
            turns: self.turns.saturating_sub(before.turns),
        }
    }

    /// The share of hits; `None` if nothing was read.
    pub fn hit_rate(self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.hits as f64 / all as f64)
    }
}

/// The door of a cache, which lies outside of the folders that end with a measurement.
#[derive(Debug)]
struct Door(PathBuf);

impl Drop for Door {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            warn(&format!("cannot remove {}: {error}", self.0.display()));
        }
    }
}

fn status(farpool: &Path, data: &Path) -> Result<CacheStatus> {
    let args: [&OsStr; 4] = ["cache".as_ref(), "status".as_ref(), "--json".as_ref(), data.as_ref()];
    let said = run(farpool, &args, LOOK_DEADLINE)?;
    serde_json::from_str(&said).context("cannot parse the cache's status")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_read_as_the_command_prints_it() {
        let said = r#"{"door":"/dev/shm/d","state":"open","hits":12,"misses":4,"hit_rate":0.75,"threads":1,"turns":2,
            "cache":{"wanted_bytes":9,"memory_bytes":9,"used_bytes":8192,"max_bytes":9,"index_bytes":9,
            "files":[{"path":"data","bytes":8192,"pinned":true},{"path":null,"bytes":0,"pinned":false}]}}"#;
        let status: CacheStatus = serde_json::from_str(said).unwrap();
        assert_eq!((status.used_bytes(), status.cache_use().hit_rate()), (8192, Some(0.75)));
        let later = CacheUse { hits: 13, misses: 5, turns: 3 };
        assert_eq!(later.since(status.cache_use()), CacheUse { hits: 1, misses: 1, turns: 1 });
        assert_eq!(later.since(later).hit_rate(), None);
        let closed = r#"{"door":"/d","state":"closed","hits":0,"misses":0,"turns":0,"cache":null}"#;
        let closed: CacheStatus = serde_json::from_str(closed).unwrap();
        assert_eq!(closed.used_bytes(), 0);
    }
}
