//! Far memory as a user gets it: `farpool up` and `farpool mount` as child processes.
//!
//! Both print `ready` on standard output when they are, and end cleanly on SIGTERM. Their output goes to log
//! files, which error messages quote. Nothing here accesses the pool itself.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::child::{Child, Launch, READY, run};
use crate::machine::{User, is_mount_point};
use crate::options::named;
use crate::progress::warn;
use crate::stop::StopFlag;

/// Nodes first lock and touch all their memory: some seconds for gigabytes, more on a busy machine.
const UP_DEADLINE: Duration = Duration::from_secs(120);
const MOUNT_DEADLINE: Duration = Duration::from_secs(30);
const UNMOUNT_DEADLINE: Duration = Duration::from_secs(10);
/// The usual region size of a pool.
pub const REGION_MIB: u64 = 64;
/// More than a mount's state has.
const MAX_STATE_BYTES: usize = 64 << 10;

/// The mount's transport: `shm` and `tcp` are those that work on a single machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Shared memory: loads and stores.
    #[default]
    Shm,
    /// Frames over loopback.
    Tcp,
}

named!(Transport, "transport", Shm = "shm", Tcp = "tcp");

/// The options of a pool and its mount.
#[derive(Clone, Debug)]
pub struct PoolOptions<'a> {
    /// The `farpool` binary.
    pub farpool: &'a Path,
    /// Where broker and nodes keep their addresses, certificates and sockets; created by `farpool up`.
    pub run_dir: &'a Path,
    /// An existing empty folder to mount far memory on.
    pub mount_point: &'a Path,
    /// Where `up.log` and `mount.log` go.
    pub log_dir: &'a Path,
    /// Number of nodes.
    pub nodes: u32,
    /// Memory that each node lends.
    pub memory_per_node_mib: u64,
    /// Size of a region: a power of two.
    pub region_mib: u64,
    /// The mount's overflow directory, if it has one.
    pub overflow: Option<&'a Path>,
    /// The mount's transport.
    pub transport: Transport,
    /// Whether users other than ours may access the mount.
    pub allow_other: bool,
    /// Whose programs the mount admits as direct clients.
    pub guests: Guests,
}

/// Whose programs a mount admits as direct clients, if they run with the interposer.
#[derive(Clone, Debug, Default)]
pub enum Guests {
    /// No user's.
    #[default]
    None,
    /// Our own user's.
    Ours,
    /// This user's as well as our own's.
    Of(User),
}

/// The interposer's library.
const LIBRARY: &str = "libfarpool_preload.so";
/// Folders that may contain it, relative to the binary's: cargo's, or those of an installation.
const LIBRARY_PLACES: [&str; 3] = ["", "../lib/farpool", "../lib"];

/// Copies the binary and the interposer's library to a folder from which every user can run them. Returns the
/// path of the binary's copy.
pub fn copied_for_others(farpool: &Path, to: &Path) -> Result<PathBuf> {
    fs::set_permissions(to, fs::Permissions::from_mode(0o755))?;
    let folder = farpool.parent().context("the binary has no folder")?;
    let library = LIBRARY_PLACES.iter().map(|place| folder.join(place).join(LIBRARY)).find(|it| it.exists());
    for file in [Some(farpool), library.as_deref()].into_iter().flatten() {
        let name = file.file_name().context("a file without a name")?;
        fs::copy(file, to.join(name)).with_context(|| format!("cannot copy {}", file.display()))?;
    }
    Ok(to.join(farpool.file_name().context("a binary without a name")?))
}

/// What runs a program with the interposer. On a mount that admits no direct clients, files still work
/// through the kernel.
pub fn interposer(farpool: &Path) -> [OsString; 3] {
    [farpool.into(), "run".into(), "--".into()]
}

/// A pool with a mount. Dropping it unmounts, then ends the pool.
#[derive(Debug)]
pub struct FarMemory {
    // Fields in this order: the mount must be gone before the pool that it uses.
    mount: Child,
    up: Child,
    mount_point: PathBuf,
    operator_args: Vec<OsString>,
}

impl FarMemory {
    /// Starts the pool, then the mount, and waits until it is mounted and ready.
    pub fn start(options: &PoolOptions<'_>, stop: &StopFlag) -> Result<Self> {
        let is_ready = |child: &Child| stop.check().map(|()| child.has_said(READY));
        let mut up = start_up(options)?;
        up.wait_until(UP_DEADLINE, is_ready)?;
        let address = options.run_dir.join("broker.addr");
        let broker = fs::read_to_string(&address)
            .with_context(|| format!("farpool up was ready but left no {}", address.display()))?;
        let tls = options.run_dir.join("tls");
        let operator_args =
            vec!["--broker".into(), broker.trim().into(), "--tls-dir".into(), tls.into_os_string()];
        let mount = start_mount(options, &operator_args)?;
        let mut far = Self { mount, up, mount_point: options.mount_point.into(), operator_args };
        far.mount.wait_until(MOUNT_DEADLINE, is_ready)?;
        if !is_mount_point(&far.mount_point) {
            bail!("farpool mount printed `ready`, but nothing is mounted on {}", far.mount_point.display());
        }
        Ok(far)
    }

    /// Where it is mounted.
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// Arguments with which operators' commands reach the pool.
    pub fn operator_args(&self) -> Vec<OsString> {
        self.operator_args.clone()
    }

    /// The state of the mount, as `farpool volume status --json` prints it.
    pub fn volume(&self) -> Result<serde_json::Value> {
        let mut state = vec![0; MAX_STATE_BYTES];
        let bytes = rustix::fs::getxattr(&self.mount_point, "user.farpool.volume", &mut state[..])
            .with_context(|| format!("{} does not tell its state", self.mount_point.display()))?;
        Ok(serde_json::from_slice(&state[..bytes])?)
    }

    /// Process id of `farpool up`, the parent of the nodes.
    pub fn pool_id(&self) -> u32 {
        self.up.id()
    }

    /// Process id of `farpool mount`.
    pub fn mount_id(&self) -> u32 {
        self.mount.id()
    }

    /// An error, with the last lines of its log, if the pool or the mount has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        for (name, child) in [("farpool up", &mut self.up), ("farpool mount", &mut self.mount)] {
            if !child.is_running()? {
                bail!("{name} has ended{}", child.last_words());
            }
        }
        Ok(())
    }

    /// Unmounts and ends the pool; an error if either fails, after trying both.
    pub fn stop(&mut self) -> Result<()> {
        let unmounted = self.mount.end().and_then(|()| self.check_unmounted());
        let ended = self.up.end();
        unmounted.and(ended)
    }

    fn check_unmounted(&self) -> Result<()> {
        if !is_mount_point(&self.mount_point) {
            return Ok(());
        }
        self.force_unmount();
        bail!("farpool mount ended without unmounting {}", self.mount_point.display())
    }

    /// Detaches the mount of a dead daemon: by umount as root, by fusermount3 as another user.
    fn force_unmount(&self) {
        let dir = self.mount_point.as_os_str();
        if run("umount", &["-l".as_ref(), dir], UNMOUNT_DEADLINE).is_err()
            && let Err(error) = run("fusermount3", &["-u".as_ref(), "-z".as_ref(), dir], UNMOUNT_DEADLINE)
        {
            warn(&format!("{} is still mounted: {error:#}", self.mount_point.display()));
        }
    }
}

impl Drop for FarMemory {
    fn drop(&mut self) {
        if let Err(error) = self.mount.end() {
            warn(&format!("{error:#}"));
        }
        if is_mount_point(&self.mount_point) {
            self.force_unmount();
        }
        // `up` ends when it is dropped, after this; nothing uses it any more.
    }
}

fn start_up(options: &PoolOptions<'_>) -> Result<Child> {
    let args = vec![
        "up".into(),
        "--nodes".into(),
        options.nodes.to_string().into(),
        "--memory".into(),
        format!("{}MiB", options.memory_per_node_mib).into(),
        "--region-size".into(),
        format!("{}MiB", options.region_mib).into(),
        // Any free port: a pool that already runs on this machine may have the usual one.
        "--listen".into(),
        "127.0.0.1:0".into(),
        "--dir".into(),
        options.run_dir.into(),
    ];
    let launch = Launch::new("farpool up", options.farpool, args);
    Child::logged(&launch, &options.log_dir.join("up.log"))
}

fn start_mount(options: &PoolOptions<'_>, operator_args: &[OsString]) -> Result<Child> {
    let mut args = vec!["mount".into(), options.mount_point.into()];
    args.extend_from_slice(operator_args);
    args.extend(["--transport".into(), options.transport.to_string().into()]);
    if let Some(dir) = options.overflow {
        args.extend(["--overflow".into(), dir.into()]);
    }
    if options.allow_other {
        args.push("--allow-other".into());
    }
    match &options.guests {
        Guests::None => {}
        Guests::Ours => args.push("--accelerate".into()),
        Guests::Of(user) => args.extend(["--accelerate-for".into(), user.uid.to_string().into()]),
    }
    let launch = Launch::new("farpool mount", options.farpool, args);
    Child::logged(&launch, &options.log_dir.join("mount.log"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transport_that_does_not_exist_is_refused_with_those_that_do() {
        assert_eq!("tcp".parse(), Ok(Transport::Tcp));
        let error = "rdma".parse::<Transport>().unwrap_err();
        assert!(error.contains("shm or tcp"), "{error}");
    }

    #[test]
    fn pool_that_cannot_start_is_an_error_that_names_the_program() {
        let dir = tempfile::tempdir().unwrap();
        let options = PoolOptions {
            farpool: Path::new("/no/such/farpool"),
            run_dir: &dir.path().join("run"),
            mount_point: dir.path(),
            log_dir: dir.path(),
            nodes: 2,
            memory_per_node_mib: 256,
            region_mib: REGION_MIB,
            overflow: None,
            transport: Transport::Shm,
            allow_other: false,
            guests: Guests::None,
        };
        let error = FarMemory::start(&options, &StopFlag::default()).unwrap_err().to_string();
        assert!(error.contains("farpool up"), "{error}");
    }
}
