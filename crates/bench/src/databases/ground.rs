//! Where databases are tried: a pool with a mount, and a folder on the local disk for comparison. Or, behind
//! a page cache, a folder on the local disk whose files are cached, and one whose files are not.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::cached_files::CachedFiles;
use crate::far_memory::{FarMemory, Guests, PoolOptions, REGION_MIB, Transport, interposer};
use crate::machine;
use crate::meanwhile::looking_meanwhile;
use crate::page_cache::CacheUse;
use crate::postgres::Server;
use crate::stop::StopFlag;

/// Two nodes, so that files are striped.
const NODES: u32 = 2;
/// How often the space that the mount's files take is read. Short compared with a query that spills; each
/// reading takes some 20 us.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The attribute of the mount's root that holds its state as JSON, and far more bytes than the JSON takes.
const STATE: &str = "user.farpool.volume";
const STATE_BYTES_MAX: usize = 4096;

/// One of the two places that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A folder on the local disk.
    Local,
    /// A folder on the mount; or one with a cache in far memory, with [`Access::Cached`].
    Far,
}

impl Place {
    /// Both places, the one to compare with first.
    pub const BOTH: [Self; 2] = [Self::Local, Self::Far];
}

/// Where the files of a database lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    /// The database.
    pub database: Place,
    /// Temporary files.
    pub temporary: Place,
}

impl Home {
    /// All files in one place.
    pub const fn in_one(place: Place) -> Self {
        Self { database: place, temporary: place }
    }

    /// The database on the local disk, and temporary files in a place.
    pub const fn spilling_to(place: Place) -> Self {
        Self { database: Place::Local, temporary: place }
    }
}

/// How databases access files in far memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Through the kernel.
    #[default]
    Kernel,
    /// With the interposer: the mount admits databases as direct clients.
    Direct,
    /// Files lie on the local disk, and databases read them through a page cache (`farpool run --cache`).
    Cached {
        /// The size of the cache.
        memory_mib: u64,
    },
}

/// How programs are run.
#[derive(Clone, Copy, Debug)]
pub struct Runner<'a> {
    /// A program with its first arguments that runs them; empty for none.
    pub wrapper: &'a [OsString],
    /// Raised to request a stop.
    pub stop: &'a StopFlag,
}

/// Bytes that databases read and wrote directly, with the interposer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectBytes {
    /// Read.
    pub read: u64,
    /// Written.
    pub written: u64,
}

/// The options of a ground.
#[derive(Clone, Debug)]
pub struct GroundOptions<'a> {
    /// The `farpool` binary.
    pub farpool: &'a Path,
    /// Where the local folder and the logs go; must be on a disk.
    pub work_dir: &'a Path,
    /// Memory that each of the two nodes lends.
    pub memory_per_node_mib: u64,
    /// The mount's transport.
    pub transport: Transport,
    /// How databases access the mount's files.
    pub access: Access,
    /// What else runs the databases: a program with its first arguments; empty for none.
    pub wrapper: Vec<OsString>,
}

/// A pool with a mount, and a local folder. Dropping the value removes all of it.
#[derive(Debug)]
pub struct Ground {
    cached: Option<CachedFiles>, // ended before the pool that it uses
    far: FarMemory,              // ended before the folder it is mounted in is removed
    work: TempDir,
    wrapper: Vec<OsString>,
    farpool: PathBuf,
    stop: StopFlag,
}

impl Ground {
    /// Starts the pool and mounts it, and attaches a cache if there is to be one.
    pub fn prepare(options: &GroundOptions<'_>, stop: &StopFlag) -> Result<Self> {
        let work = machine::scratch_dir(options.work_dir, "farpool-databases-")?;
        let (mount_point, log_dir) = (work.path().join("far"), work.path().join("logs"));
        for dir in [&mount_point, &log_dir, &work.path().join("local")] {
            fs::create_dir(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        }
        let pool = PoolOptions {
            farpool: options.farpool,
            run_dir: &work.path().join("pool"),
            mount_point: &mount_point,
            log_dir: &log_dir,
            nodes: NODES,
            memory_per_node_mib: options.memory_per_node_mib,
            region_mib: REGION_MIB,
            overflow: None,
            transport: options.transport,
            allow_other: Server::is_other_user(),
            guests: match (options.access, Server::user()?) {
                (Access::Kernel | Access::Cached { .. }, _) => Guests::None,
                (Access::Direct, Some(user)) => Guests::Of(user),
                (Access::Direct, None) => Guests::Ours,
            },
        };
        let far = FarMemory::start(&pool, stop)?;
        let mut wrapper = options.wrapper.clone();
        if options.access == Access::Direct {
            wrapper.extend(interposer(options.farpool)); // last, so that only the database runs with it
        }
        let cached = match options.access {
            Access::Cached { memory_mib } => {
                Some(CachedFiles::prepare(options, work.path().join("cached"), memory_mib, &far, stop)?)
            }
            Access::Kernel | Access::Direct => None,
        };
        Ok(Self { cached, far, work, wrapper, farpool: options.farpool.into(), stop: stop.clone() })
    }

    /// A path in a place; nothing is created there.
    pub fn path(&self, place: Place, name: &str) -> PathBuf {
        match (place, &self.cached) {
            (Place::Local, _) => self.work.path().join("local").join(name),
            (Place::Far, None) => self.far.mount_point().join(name),
            (Place::Far, Some(cached)) => cached.dir.join(name),
        }
    }

    /// Creates a folder in a place; other users can reach it.
    pub fn dir(&self, place: Place, name: &str) -> Result<PathBuf> {
        let dir = self.path(place, name);
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o711))?;
        Ok(dir)
    }

    /// The path of a log file.
    pub fn log(&self, name: &str) -> PathBuf {
        self.work.path().join("logs").join(name)
    }

    /// How databases in a place are run.
    pub fn runner(&self, place: Place) -> Runner<'_> {
        let cached = self.cached.as_ref().filter(|_| place == Place::Far);
        Runner { wrapper: cached.map_or(&self.wrapper, |cached| &cached.wrapper), stop: &self.stop }
    }

    /// A program with its first arguments that runs the databases, but not those that are cached; empty for
    /// none.
    pub fn wrapper(&self) -> &[OsString] {
        &self.wrapper
    }

    /// The `farpool` binary under test.
    pub fn farpool(&self) -> &Path {
        &self.farpool
    }

    /// Raised to request a stop.
    pub fn stop(&self) -> &StopFlag {
        &self.stop
    }

    /// Bytes that files on the mount take, including deleted files that are still open.
    pub fn far_bytes(&self) -> Result<u64> {
        let space = rustix::fs::statvfs(self.far.mount_point()).context("the mount does not answer")?;
        Ok((space.f_blocks.saturating_sub(space.f_bfree)).saturating_mul(space.f_frsize))
    }

    /// Runs `work`, and returns by how much the bytes on the mount rose meanwhile, at most.
    pub fn far_bytes_during<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
        let before = self.far_bytes()?;
        let mut peak = before;
        let look = || peak = peak.max(self.far_bytes().unwrap_or(0));
        let result = looking_meanwhile(LOOK_EVERY, look, work)?;
        Ok((result, peak - before))
    }

    /// Runs `work`, and returns what was read and written directly meanwhile.
    pub fn direct_bytes_during<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<(T, DirectBytes)> {
        let before = self.direct_bytes()?;
        let result = work()?;
        let DirectBytes { read, written } = self.direct_bytes()?;
        Ok((result, DirectBytes { read: read - before.read, written: written - before.written }))
    }

    fn direct_bytes(&self) -> Result<DirectBytes> {
        let mut state = vec![0; STATE_BYTES_MAX];
        let length = rustix::fs::getxattr(self.far.mount_point(), STATE, &mut state[..])
            .context("the mount does not tell its state")?;
        let state: serde_json::Value = serde_json::from_slice(&state[..length])?;
        let field = |name: &str| state[name].as_u64().with_context(|| format!("no {name} in {state}"));
        Ok(DirectBytes { read: field("direct_read_bytes")?, written: field("direct_written_bytes")? })
    }

    /// Runs `work`, and returns how the cache was used meanwhile.
    pub fn cache_use_during<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<(T, CacheUse)> {
        let before = self.cached()?.used()?;
        let result = work()?;
        Ok((result, self.cached()?.used()?.since(before)))
    }

    /// Compares all pages in the cache with the disk, and returns how many that were; an error if one
    /// differs.
    pub fn verify_cache(&self) -> Result<u64> {
        self.cached()?.cache.verify(1)
    }

    fn cached(&self) -> Result<&CachedFiles> {
        self.cached.as_ref().context("no files are cached here")
    }

    /// An error if the pool, the mount or the cache has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        self.cached.as_mut().map_or(Ok(()), |cached| cached.cache.check_alive())?;
        self.far.check_alive()
    }

    /// Detaches the cache, unmounts, ends the pool and removes the folder; an error if any of it fails.
    pub fn tear_down(mut self) -> Result<()> {
        self.check_alive()?;
        self.cached.as_mut().map_or(Ok(()), |cached| cached.cache.detach())?;
        self.far.stop()?;
        self.work.close().context("cannot remove the work directory")
    }
}
