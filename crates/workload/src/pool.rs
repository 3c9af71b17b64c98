//! Far memory as a user gets it: `farpool up` and `farpool mount` as child processes.
//!
//! Both say `ready` on standard output once they are, and end in good order on SIGTERM; what they print goes
//! to logs, which error messages quote. Nothing here reaches into the pool itself.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

use crate::child::{ChildProcess, Launch, run};
use crate::machine::{User, is_mount_point};
use crate::progress::complain;
use crate::stop::StopFlag;

/// Nodes lock and touch all their memory first: some seconds for gigabytes, more on a busy machine.
const UP_DEADLINE: Duration = Duration::from_secs(120);
const MOUNT_DEADLINE: Duration = Duration::from_secs(30);
const UNMOUNT_DEADLINE: Duration = Duration::from_secs(10);
/// The word a child's line starts with once it is ready.
const READY: &str = "ready";

/// How far memory is reached; `shm` and `tcp` are what there is on one machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Shared memory: loads and stores.
    #[default]
    Shm,
    /// Frames over loopback.
    Tcp,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        })
    }
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "shm" => Ok(Self::Shm),
            "tcp" => Ok(Self::Tcp),
            other => Err(format!("no transport is called {other:?}: use shm or tcp")),
        }
    }
}

/// What a pool is started with.
#[derive(Clone, Debug)]
pub struct PoolOptions<'a> {
    /// The `farpool` binary.
    pub farpool: &'a Path,
    /// Where broker and nodes keep their addresses, certificates and sockets; made by `farpool up`.
    pub run_dir: &'a Path,
    /// An existing empty folder to mount far memory on.
    pub mount_point: &'a Path,
    /// Where `up.log` and `mount.log` go.
    pub log_dir: &'a Path,
    /// How many nodes lend.
    pub nodes: u32,
    /// What each of them lends.
    pub memory_per_node_mib: u64,
    /// How the mount reaches them.
    pub transport: Transport,
    /// Whether other users than ours may enter the mount.
    pub allow_other: bool,
    /// Whose programs may work on its files directly.
    pub guests: Guests,
}

/// Whose programs may work on a mount's files directly, if they run with the interposer.
#[derive(Clone, Debug, Default)]
pub enum Guests {
    /// Nobody's.
    #[default]
    None,
    /// Our user's.
    Ours,
    /// This user's, too.
    Of(User),
}

/// The interposer's library.
const LIBRARY: &str = "libfarpool_preload.so";
/// Where it lies, from the binary's folder: in a folder of cargo's, or installed.
const LIBRARY_PLACES: [&str; 3] = ["", "../lib/farpool", "../lib"];

/// Copies the binary and the interposer's library to a folder from which every user can run them; returns the
/// binary's copy.
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

/// What runs a program with the interposer. Files of a mount that lets nobody in are the kernel's all the
/// same.
pub fn interposer(farpool: &Path) -> [OsString; 3] {
    [farpool.into(), "run".into(), "--".into()]
}

/// A pool with a mount; unmounted, then ended when dropped.
#[derive(Debug)]
pub struct FarMemory {
    // In this order: the mount must be gone before the pool it uses.
    mount: ChildProcess,
    up: ChildProcess,
    mount_point: PathBuf,
}

impl FarMemory {
    /// Starts the pool, then the mount, and waits until files can be made there.
    pub fn start(options: &PoolOptions<'_>, stop: &StopFlag) -> Result<Self> {
        let mut up = start_up(options)?;
        up.wait_until(UP_DEADLINE, stop, |child| child.has_said(READY))?;
        let address = options.run_dir.join("broker.addr");
        let broker = fs::read_to_string(&address)
            .with_context(|| format!("farpool up was ready but left no {}", address.display()))?;
        let mount = start_mount(options, broker.trim())?;
        let mut far = Self { mount, up, mount_point: options.mount_point.into() };
        far.mount.wait_until(MOUNT_DEADLINE, stop, |child| child.has_said(READY))?;
        if !is_mount_point(&far.mount_point) {
            bail!("farpool mount said ready, but nothing is mounted on {}", far.mount_point.display());
        }
        Ok(far)
    }

    /// Where it is mounted.
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// Process id of `farpool up`, whose children the nodes are.
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
                bail!("{name} has ended: {}", child.last_words());
            }
        }
        Ok(())
    }

    /// Unmounts and ends the pool; an error if either did not go well, after trying both.
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
        bail!("farpool mount ended and left its mount on {} behind", self.mount_point.display())
    }

    /// Detaches what a dead daemon left: by umount as root, by fusermount3 as anybody else.
    fn force_unmount(&self) {
        let dir = self.mount_point.as_os_str();
        if run("umount", &["-l".as_ref(), dir], UNMOUNT_DEADLINE).is_err()
            && let Err(error) = run("fusermount3", &["-u".as_ref(), "-z".as_ref(), dir], UNMOUNT_DEADLINE)
        {
            complain(&format!("farpool demo: {} is still mounted: {error:#}", self.mount_point.display()));
        }
    }
}

impl Drop for FarMemory {
    fn drop(&mut self) {
        if let Err(error) = self.mount.end() {
            complain(&format!("farpool demo: {error:#}"));
        }
        if is_mount_point(&self.mount_point) {
            self.force_unmount();
        }
        // `up` ends in its own drop, now that nobody uses it.
    }
}

fn start_up(options: &PoolOptions<'_>) -> Result<ChildProcess> {
    let launch = Launch {
        name: "farpool up",
        program: options.farpool,
        args: vec![
            "up".into(),
            "--nodes".into(),
            options.nodes.to_string().into(),
            "--memory".into(),
            format!("{}MiB", options.memory_per_node_mib).into(),
            // Any free port: the usual one may be that of a pool already running here.
            "--listen".into(),
            "127.0.0.1:0".into(),
            "--dir".into(),
            options.run_dir.into(),
        ],
        user: None,
        group_file: None,
        stop_signal: Signal::TERM,
        wrapper: &[],
    };
    ChildProcess::spawn(&launch, &options.log_dir.join("up.log"))
}

fn start_mount(options: &PoolOptions<'_>, broker: &str) -> Result<ChildProcess> {
    let mut args = vec![
        "mount".into(),
        options.mount_point.into(),
        "--broker".into(),
        broker.into(),
        "--tls-dir".into(),
        options.run_dir.join("tls").into(),
        "--transport".into(),
        options.transport.to_string().into(),
    ];
    if options.allow_other {
        args.push("--allow-other".into());
    }
    match &options.guests {
        Guests::None => {}
        Guests::Ours => args.push("--accelerate".into()),
        Guests::Of(user) => args.extend(["--accelerate-for".into(), user.uid.to_string().into()]),
    }
    let launch = Launch {
        name: "farpool mount",
        program: options.farpool,
        args,
        user: None,
        group_file: None,
        stop_signal: Signal::TERM,
        wrapper: &[],
    };
    ChildProcess::spawn(&launch, &options.log_dir.join("mount.log"))
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
            transport: Transport::Shm,
            allow_other: false,
            guests: Guests::None,
        };
        let error = FarMemory::start(&options, &StopFlag::default()).unwrap_err().to_string();
        assert!(error.contains("farpool up"), "{error}");
    }
}
