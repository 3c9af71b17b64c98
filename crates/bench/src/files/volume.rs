//! Where a file may lie: in far memory on a mount, on a floor, on a peer or on a disk.
//!
//! V1. Dropping a volume removes it: first its client, then what is mounted, then what serves it.
//! V2. All clients are processes of this program, and read and write in the same way on every volume.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use farpool_fabric::TransportChoice;

use super::cached::Cached;
use super::client::{Answer, Ask, Opening, answer_of, ask_line};
use super::fuse_floor;
use super::ping_pong::PingPong;
use crate::child::{Child, Talk, tied_politely};
use crate::folder::{Folder, mountpoint};
use crate::local_pool::{Lend, LocalPool};
use crate::nbd_file::NbdFile;

/// How much longer than its slice a client may take: a disk may be busy with what others wrote.
const ANSWER_SLACK: Duration = Duration::from_secs(60);
/// Number of regions in a file's share of a node.
const REGIONS_PER_SHARE: u64 = 8;
/// Regions that a mount may lease from a node beyond that, since the file's share may begin anywhere in a
/// region.
const SPARE_REGIONS: u64 = 3;
/// The smallest region that a node lends, and the usual size.
const REGION_MIN_BYTES: u64 = 1 << 20;
const REGION_MAX_BYTES: u64 = 64 << 20;
/// Least number of threads that serve a FUSE file system, as for the mount.
const FUSE_THREADS_MIN: usize = 4;

/// A row of a figure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spec {
    /// How ratios and promises refer to it.
    pub id: &'static str,
    /// The name that readers see.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Arguments between `farpool` and the client's own ones: `run --` runs the client with the interposer.
    pub launcher: &'static [&'static str],
    /// How the client opens the file.
    pub opening: Opening,
}

/// The kinds of volumes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A bare FUSE file in the daemon's own memory.
    Floor,
    /// A mount of a pool with nodes on this machine.
    Far {
        /// The mount's transport: shm or tcp.
        transport: &'static str,
        /// Number of nodes.
        nodes: u32,
        /// Far memory that the file takes, in per cent of its bytes: more than 100 with redundancy.
        percent: u64,
        /// Further options of `farpool mount`.
        mount_args: &'static [&'static str],
    },
    /// No file: a bare request and its answer over loopback, of the same size as the operation.
    PingPong,
    /// A folder in the machine's memory.
    Tmpfs,
    /// A folder on the machine's disk.
    Disk,
    /// The same, with a file that the kernel has in its page cache.
    KernelCached,
    /// A file on the machine's disk, which the client reads through a page cache in far memory.
    Cached {
        /// The cache's transport: shm or tcp.
        transport: &'static str,
    },
    /// A folder on the throttled volume, if there is one.
    Throttled,
    /// A FUSE file in the memory of nbdkit, reached through a Unix socket.
    NbdfuseUnix,
    /// The same, reached over TCP.
    NbdfuseTcp,
}

/// What volumes need.
#[derive(Clone, Copy, Debug)]
pub struct Surroundings<'a> {
    /// This program's file.
    pub farpool: &'a Path,
    /// A folder on the machine's disk.
    pub disk: &'a Path,
    /// A folder on a throttled volume.
    pub throttled: Option<&'a Path>,
    /// Whether peers are to be measured.
    pub peers: bool,
    /// Size of each file.
    pub bytes: u64,
}

/// A running volume.
pub struct Volume {
    spec: Spec,
    worker: Worker,
}

/// What carries out a slice.
enum Worker {
    /// A process.
    Client(Box<Client>),
    /// This thread.
    PingPong(PingPong),
}

/// A client of a filled file. Fields are dropped in this order.
struct Client {
    talk: Talk,
    _process: Child,
    ground: Ground,
}

/// What lies below a file. Fields are dropped in this order.
#[derive(Default)]
struct Ground {
    cache: Option<Cached>,
    _server: Option<Child>,
    _nbd: Option<NbdFile>,
    _pool: Option<MountablePool>,
    /// The mount points are folders inside it. It is locked, so that no other run removes it as a leftover.
    _folder: Option<Folder>,
}

impl Spec {
    /// Whether this volume is available and asked for.
    pub fn is_wanted(&self, around: &Surroundings<'_>) -> bool {
        match self.kind {
            Kind::Throttled => around.throttled.is_some(),
            Kind::NbdfuseUnix | Kind::NbdfuseTcp => around.peers,
            _ => true,
        }
    }

    /// Starts it and fills its file.
    pub fn start(&self, around: &Surroundings<'_>) -> Result<Volume> {
        if self.kind == Kind::PingPong {
            let ping_pong = PingPong::start(around).with_context(|| format!("cannot start {}", self.name))?;
            return Ok(Volume { spec: *self, worker: Worker::PingPong(ping_pong) });
        }
        self.occupy(around, self.ground(around))
    }

    /// Starts a mount of a pool that other volumes share, and that outlives them.
    pub fn start_on(
        &self,
        pool: &MountablePool,
        transport: &str,
        around: &Surroundings<'_>,
    ) -> Result<Volume> {
        self.occupy(around, Ground::mount(around.farpool, pool, transport, &[]))
    }

    fn occupy(&self, around: &Surroundings<'_>, ground: Result<(Ground, PathBuf)>) -> Result<Volume> {
        let (ground, file) = ground.with_context(|| format!("cannot start {}", self.name))?;
        let (process, talk) = self.client(around, &file)?;
        let client = Client { talk, _process: process, ground };
        Ok(Volume { spec: *self, worker: Worker::Client(Box::new(client)) })
    }

    fn ground(&self, around: &Surroundings<'_>) -> Result<(Ground, PathBuf)> {
        match self.kind {
            Kind::Floor => Ground::floor(around),
            Kind::Far { transport, nodes, percent, mount_args } => {
                let pool = MountablePool::start(around.farpool, nodes, around.bytes * percent / 100, 1)?;
                let (mut ground, file) = Ground::mount(around.farpool, &pool, transport, mount_args)?;
                ground._pool = Some(pool);
                Ok((ground, file))
            }
            Kind::PingPong => bail!("a ping-pong has no file"),
            Kind::Tmpfs => Ground::folder(Path::new("/dev/shm")),
            Kind::Disk | Kind::KernelCached => Ground::folder(around.disk),
            Kind::Cached { transport } => {
                let (mut ground, file) = Ground::folder(around.disk)?;
                ground.cache = Some(Cached::attach(around, file.clone(), transport)?);
                Ok((ground, file))
            }
            Kind::Throttled => Ground::folder(around.throttled.context("there is no throttled volume")?),
            Kind::NbdfuseUnix => Ok(Ground::nbd(NbdFile::over_unix(around.bytes)?)),
            Kind::NbdfuseTcp => Ok(Ground::nbd(NbdFile::over_tcp(around.bytes)?)),
        }
    }

    fn client(&self, around: &Surroundings<'_>, file: &Path) -> Result<(Child, Talk)> {
        let mut command = tied_politely(around.farpool);
        if !self.launcher.is_empty() {
            command.args(self.launcher).arg(around.farpool);
        }
        if let (Kind::Cached { .. }, Some(folder)) = (self.kind, file.parent()) {
            command.args(["run", "--cache"]).arg(folder).arg("--").arg(around.farpool);
        }
        command.args(["bench", "file-client", "--bytes"]).arg(around.bytes.to_string()).arg(file);
        if self.opening == Opening::Buffered {
            command.arg("--buffered");
        }
        Child::talking(format!("the client of {}", self.name), command)
    }
}

/// A pool for some mounts, each with a file of a given size.
pub struct MountablePool {
    pool: LocalPool,
    /// The most that a mount may lease. Without it a mount leases ahead of its need as long as there is
    /// memory.
    limit_bytes: u64,
}

impl MountablePool {
    /// Starts a pool with this many nodes, for `mounts` mounts with a file of `bytes` each.
    pub fn start(farpool: &Path, nodes: u32, bytes: u64, mounts: u64) -> Result<Self> {
        let share = bytes.div_ceil(u64::from(nodes));
        // The share is divided into many regions, so that a mount leases little more than its file takes.
        let wanted = 1 << (share / REGIONS_PER_SHARE).max(1).ilog2();
        let region_bytes = u64::clamp(wanted, REGION_MIN_BYTES, REGION_MAX_BYTES);
        let each = share.next_multiple_of(region_bytes) + SPARE_REGIONS * region_bytes;
        let lend = Lend { nodes, bytes_each: mounts * each, region_bytes };
        let pool = LocalPool::lending(farpool, lend, TransportChoice::Auto)?;
        Ok(MountablePool { pool, limit_bytes: u64::from(nodes) * each })
    }

    /// A pool that was started otherwise. A mount may lease up to `limit_bytes`.
    pub fn of(pool: LocalPool, limit_bytes: u64) -> Self {
        MountablePool { pool, limit_bytes }
    }

    /// The pool itself, for adding nodes.
    pub fn pool(&mut self) -> &mut LocalPool {
        &mut self.pool
    }

    /// Where its broker listens.
    pub fn broker(&self) -> &str {
        &self.pool.broker
    }
}

/// Number of threads, as many as a mount has.
pub fn fuse_threads() -> usize {
    std::thread::available_parallelism().map_or(FUSE_THREADS_MIN, |cores| cores.get().max(FUSE_THREADS_MIN))
}

impl Ground {
    fn floor(around: &Surroundings<'_>) -> Result<(Self, PathBuf)> {
        let (folder, dir) = mountpoint()?;
        let mut command = tied_politely(around.farpool);
        command.args(["bench", "floor", "fuse", "--bytes"]).arg(around.bytes.to_string());
        command.arg("--threads").arg(fuse_threads().to_string()).arg(&dir);
        let (server, _) = Child::ready("the bare FUSE file", command)?;
        let file = dir.join(fuse_floor::FILE);
        Ok((Ground { _server: Some(server), _folder: Some(folder), ..Ground::default() }, file))
    }

    fn mount(
        farpool: &Path,
        pool: &MountablePool,
        transport: &str,
        mount_args: &[&str],
    ) -> Result<(Self, PathBuf)> {
        let (folder, dir) = mountpoint()?;
        let server = mount(farpool, pool, &dir, transport, mount_args)?;
        Ok((Ground { _server: Some(server), _folder: Some(folder), ..Ground::default() }, dir.join("data")))
    }

    fn folder(parent: &Path) -> Result<(Self, PathBuf)> {
        let folder = Folder::make_in(parent)?;
        let file = folder.path().join("data");
        Ok((Ground { _folder: Some(folder), ..Ground::default() }, file))
    }

    fn nbd(nbd: NbdFile) -> (Self, PathBuf) {
        let file = nbd.path().to_owned();
        (Ground { _nbd: Some(nbd), ..Ground::default() }, file)
    }
}

/// Mounts a pool, and checks that it is mounted.
fn mount(farpool: &Path, pool: &MountablePool, dir: &Path, transport: &str, args: &[&str]) -> Result<Child> {
    let mut command: Command = tied_politely(farpool);
    command.arg("mount").arg(dir).args(["--broker", pool.broker()]);
    command.arg("--limit").arg(pool.limit_bytes.to_string());
    command.args(["--transport", transport]).args(args);
    let (child, _) = Child::ready("the mount", command)?;
    let parent = dir.parent().context("a mount on the root folder")?;
    let is_mounted = fs::metadata(dir)?.dev() != fs::metadata(parent)?.dev();
    ensure!(is_mounted, "the mount was ready, and nothing is mounted on {}", dir.display());
    Ok(child)
}

impl Volume {
    /// The volume's description.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Makes the file what its kind says, after all files were filled.
    pub fn warm(&mut self) -> Result<()> {
        let name = self.spec.name;
        self.cache().map_or(Ok(()), Cached::warm).with_context(|| format!("cannot fill the cache: {name}"))
    }

    /// Checks that the pages that the client has read came from where its kind says. Returns what readers of
    /// the figure must know.
    pub fn check(&mut self, pages: f64) -> Result<Option<String>> {
        let name = self.spec.name;
        let Some(cache) = self.cache() else { return Ok(None) };
        let remark = cache.check(pages).with_context(|| name)?;
        Ok(remark.map(|remark| format!("{name}: {remark}")))
    }

    fn cache(&mut self) -> Option<&mut Cached> {
        match &mut self.worker {
            Worker::Client(client) => client.ground.cache.as_mut(),
            Worker::PingPong(_) => None,
        }
    }

    /// Makes the client begin a slice. A volume without a client process does all the work in
    /// [`end`](Self::end).
    pub fn begin(&mut self, ask: &Ask) -> Result<()> {
        match &mut self.worker {
            Worker::Client(client) => client.talk.tell(&ask_line(ask)?),
            Worker::PingPong(_) => Ok(()),
        }
    }

    /// Waits for the slice to end, and returns its result.
    pub fn end(&mut self, ask: &Ask, stop: &AtomicBool) -> Result<Answer> {
        match &mut self.worker {
            Worker::Client(client) => {
                answer_of(&client.talk.hear(Duration::from_secs_f64(ask.seconds) + ANSWER_SLACK, stop)?)
            }
            Worker::PingPong(ping_pong) => ping_pong.slice(ask),
        }
    }
}
