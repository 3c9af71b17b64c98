//! What the figures about the page cache share: servers whose data are larger than their memory, and how a
//! cache is filled.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::{Advice, fadvise};
use tempfile::TempDir;

use super::Effort;
use super::range_scan;
use super::stage::subfolder;
use crate::cgroup::MemoryLimit;
use crate::page_cache::PageCache;
use crate::postgres::{Server, ServerOptions};
use crate::stop::StopFlag;

/// Fewest rows, at any scale: a hundred times as many as a scan reads.
const LEAST_ROWS: u64 = 10_000;
/// Bytes of a row in the table and in the index, about.
const BYTES_PER_ROW: u64 = 300;
/// The data are this many times as large as the memory of the server.
const DATA_OVER_LIMIT: u64 = 4;
/// The server's own buffers are this part of the data, within these limits; the larger one is PostgreSQL's
/// usual size.
const DATA_OVER_BUFFERS: u64 = 16;
const BUFFERS_MIN_MIB: u64 = 1;
const BUFFERS_MAX_MIB: u64 = 128;
/// The lowest limit: the server's own buffers and its processes need about that.
const LIMIT_MIN_MIB: u64 = 384;
/// Memory for what is not a page: processes of 32 sessions. On a disk: an empty cluster, and temporary
/// files.
pub(super) const SPARE_MIB: u64 = 1024;
/// Checkpoints keep the server's log at about this part of the data, within these limits. Freezing alone
/// logs a copy of each page, since there are checksums.
const LOG_DATA_DIVISOR: u64 = 3;
const LOG_MIN_MIB: u64 = 128;
const LOG_MAX_MIB: u64 = 1024;
/// Room for a log, in multiples of that size: it goes on growing until the checkpoint has ended.
const LOG_ROOM: u64 = 2;
/// The module beside the program, and its name in a folder that the server's user can read.
const MODULE: &str = "libfarpool_postgres.so";
/// How long the daemon may take until it has all the memory, and the pages may take to come in.
const FILL_WITHIN: Duration = Duration::from_secs(300);
/// A cache has this share of the data when it counts as full: some pages are in the server's own buffers.
pub(super) const FULL: f64 = 0.9;
/// Which part of the pages in a cache are compared with the disk after a measurement.
pub(super) const VERIFIED_ONE_IN: u32 = 20;
/// Settings of servers that may have a standby, and of the standby.
pub(super) const REPLICATION: [(&str, &str); 2] = [("wal_level", "replica"), ("max_wal_senders", "4")];

/// How large a database with so many rows is, and what it may use.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    rows: u64,
}

impl Sizes {
    /// Of a table with so many rows; with fewer than [`LEAST_ROWS`], of one with these.
    pub(super) fn of(rows: u64) -> Self {
        Sizes { rows: rows.max(LEAST_ROWS) }
    }

    pub(super) fn rows(self) -> u64 {
        self.rows
    }

    pub(super) fn data_mib(self) -> u64 {
        (self.rows * BYTES_PER_ROW).div_ceil(1 << 20)
    }

    /// Of a server and the kernel's page cache for it.
    pub(super) fn limit_mib(self) -> u64 {
        LIMIT_MIN_MIB.max(self.data_mib() / DATA_OVER_LIMIT)
    }

    /// PostgreSQL's own buffers.
    pub(super) fn buffers_mib(self) -> u64 {
        (self.data_mib() / DATA_OVER_BUFFERS).clamp(BUFFERS_MIN_MIB, BUFFERS_MAX_MIB)
    }

    pub(super) fn log_mib(self) -> u64 {
        (self.data_mib() / LOG_DATA_DIVISOR).clamp(LOG_MIN_MIB, LOG_MAX_MIB)
    }

    /// What a server may take on a disk.
    pub(super) fn room_mib(self) -> u64 {
        2 * self.data_mib() + LOG_ROOM * self.log_mib() + SPARE_MIB
    }

    /// Memory of a cache that has all pages, with a quarter more: updates make more pages.
    pub(super) fn cache_bytes(self) -> u64 {
        (self.data_mib() * 5 / 4) << 20
    }

    /// What a report says of a server of this size whose table has been loaded.
    pub(super) fn facts(self, server: &Server) -> Result<ServerFacts> {
        Ok(ServerFacts {
            rows: self.rows(),
            limit_mib: self.limit_mib(),
            buffers_mib: self.buffers_mib(),
            postgres: server.version()?,
            data_bytes: data_bytes(server)?,
        })
    }

    /// Calls `start` with the options of a server of this size. `more_settings` are added to those that
    /// depend on the size.
    pub(super) fn with_options<T>(
        self,
        place: &ServerPlace<'_>,
        more_settings: &[(&str, &str)],
        start: impl FnOnce(&ServerOptions<'_>) -> Result<T>,
    ) -> Result<T> {
        let ServerPlace { dir, log, limit, module } = *place;
        let module = module.map_or(String::new(), |module| module.display().to_string());
        let [buffers, log_size] = [self.buffers_mib(), self.log_mib()].map(|size| format!("{size}MB"));
        let own: [(&str, &str); 3] = [
            ("shared_preload_libraries", &module),
            ("shared_buffers", &buffers),
            ("max_wal_size", &log_size),
        ];
        start(&ServerOptions {
            limit: Some(limit),
            initdb_args: &["--data-checksums"],
            settings: &[&own[..], more_settings].concat(),
            ..ServerOptions::new(dir, log)
        })
    }
}

/// Where a server lies, and what it may use.
#[derive(Clone, Copy)]
pub(super) struct ServerPlace<'a> {
    /// A folder of its own for its files.
    pub(super) dir: &'a Path,
    pub(super) log: &'a Path,
    pub(super) limit: &'a MemoryLimit,
    /// Through which it uses a cache; `None`: it has none.
    pub(super) module: Option<&'a Path>,
}

/// What a report says of its servers.
#[derive(Clone, Debug)]
pub struct ServerFacts {
    /// Rows of a table.
    pub rows: u64,
    /// The limit of each server's memory.
    pub limit_mib: u64,
    /// Each server's own buffers.
    pub buffers_mib: u64,
    /// The server's version.
    pub postgres: String,
    /// Bytes of a table and its index.
    pub data_bytes: u64,
}

impl ServerFacts {
    #[cfg(test)]
    pub(super) fn sample() -> Self {
        ServerFacts {
            rows: 10_000,
            limit_mib: 384,
            buffers_mib: 8,
            postgres: "15".into(),
            data_bytes: 3 << 20,
        }
    }
}

/// What all servers of a figure share.
pub(super) struct Shared<'a> {
    pub(super) effort: &'a Effort<'a>,
    /// A folder for logs, and for what is measured.
    pub(super) work: &'a Path,
    pub(super) sizes: Sizes,
    /// What pgbench repeats: RangeScan.
    pub(super) scan: [OsString; 1],
    module: PathBuf,
}

impl<'a> Shared<'a> {
    pub(super) fn prepare(effort: &'a Effort<'a>, work: &'a TempDir, sizes: Sizes) -> Result<Self> {
        let module = readable_module(effort.farpool, work)?;
        let script = work.path().join("scan.sql");
        fs::write(&script, range_scan::scan(sizes.rows())).context("cannot write the scan")?;
        Ok(Shared { effort, work: work.path(), sizes, scan: [script.into_os_string()], module })
    }

    /// Makes a folder with this name, and lets `start` start a server there. `module`: whether it can use a
    /// cache.
    pub(super) fn server(
        &self,
        parent: &Path,
        name: &str,
        module: bool,
        more_settings: &[(&str, &str)],
        start: impl FnOnce(&ServerOptions<'_>) -> Result<Server>,
    ) -> Result<LimitedServer> {
        let dir = subfolder(parent, name)?;
        let limit = MemoryLimit::create(
            &format!("farpool-cache-bench-{}-{name}", std::process::id()),
            self.sizes.limit_mib(),
        )?;
        let log = self.work.join(format!("{name}.log"));
        let place =
            ServerPlace { dir: &dir, log: &log, limit: &limit, module: module.then_some(&*self.module) };
        let server = self.sizes.with_options(&place, more_settings, start)?;
        Ok(LimitedServer { server, limit, dir })
    }
}

/// A server with its files and the limit of its memory. Fields are dropped in this order.
pub(super) struct LimitedServer {
    pub(super) server: Server,
    pub(super) limit: MemoryLimit,
    pub(super) dir: PathBuf,
}

impl LimitedServer {
    /// Stops the server if it runs, and removes its files.
    pub(super) fn remove(mut self) -> Result<()> {
        self.server.stop()?;
        self.limit.remove()?;
        fs::remove_dir_all(&self.dir).with_context(|| format!("cannot remove {}", self.dir.display()))
    }
}

/// Removes the pages of all files below a folder from the kernel's page cache: a base backup leaves them
/// there.
pub(super) fn forget_pages(dir: &Path) -> Result<()> {
    let cannot = || format!("cannot drop the cached pages of {}", dir.display());
    // Only pages that are on the disk can be dropped.
    rustix::fs::syncfs(File::open(dir).with_context(cannot)?).with_context(cannot)?;
    drop_pages_below(dir).with_context(cannot)
}

fn drop_pages_below(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            drop_pages_below(&entry.path())?;
        } else if kind.is_file()
            // A server may remove files meanwhile.
            && let Ok(file) = File::open(entry.path())
        {
            fadvise(file, 0, None, Advice::DontNeed)?;
        }
    }
    Ok(())
}

/// Copies the module to a folder that the server's user can read.
pub(super) fn readable_module(farpool: &Path, work: &TempDir) -> Result<PathBuf> {
    let module = farpool.with_file_name(MODULE);
    ensure!(module.exists(), "{} is missing: run make postgres-module", module.display());
    fs::set_permissions(work.path(), fs::Permissions::from_mode(0o755))?;
    let copy = work.path().join(MODULE);
    fs::copy(&module, &copy).with_context(|| format!("cannot copy {}", module.display()))?;
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755))?;
    Ok(copy)
}

/// Bytes of the table and its index.
pub(super) fn data_bytes(server: &Server) -> Result<u64> {
    let row = server.connect()?.query_one("SELECT pg_total_relation_size('ranges')", &[])?;
    Ok(row.get::<_, i64>(0) as u64)
}

/// Reads everything until the cache has so many bytes of the pages.
pub(super) fn fill(server: &Server, cache: &PageCache, bytes: u64, stop: &StopFlag) -> Result<()> {
    let started = Instant::now();
    let mut client = server.connect()?;
    loop {
        stop.check()?;
        let used = cache.status()?.used_bytes();
        if used >= bytes {
            return Ok(());
        }
        let (used_mib, wanted_mib) = (used >> 20, bytes >> 20);
        ensure!(started.elapsed() < FILL_WITHIN, "the cache has only {used_mib} of {wanted_mib} MiB");
        // By the index, and by the table.
        let read = "SET enable_seqscan = off; SELECT count(*) FROM ranges WHERE id > 0; \
                    SET enable_seqscan = on; SELECT sum(value) FROM ranges";
        client.batch_execute(read).context("cannot read the table")?;
    }
}
