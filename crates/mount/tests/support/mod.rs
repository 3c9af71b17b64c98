//! A pool, a mount of it, and directories to test in.
//!
//! A process of its own serves the mount: this test program run again. A process that maps a file of a mount
//! holds a lock on its address space while the kernel asks the daemon, so the daemon must be another process.

// Each test binary uses only a part of this module.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use farpool_fabric::TransportChoice;
use farpool_file::{FileStore, Redundancy};
use farpool_mount::{Acceleration, MountConfig, run, start_watcher};
use farpool_pool::{Pool, PoolConfig};
use tempfile::TempDir;
use tokio::runtime::Runtime;

pub mod mapped;

/// Most time that any step takes, unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Regions small enough that a test can fill a pool.
const REGION_BYTES: u64 = 4 << 20;
/// Names a directory of another file system, to check that the tests hold there too.
const ELSEWHERE: &str = "FARPOOL_POSIX_DIR";
/// Set for the process that serves: where to mount, and how many bytes to lend to the mount.
const SERVE_AT: &str = "FARPOOL_TEST_SERVE_AT";
const SERVE_BYTES: &str = "FARPOOL_TEST_SERVE_BYTES";
const SERVE_GUESTS: &str = "FARPOOL_TEST_SERVE_GUESTS";
const READY: &str = "mounted";

/// Waits until a condition holds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what}: still not after {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether something is mounted on exactly this path.
pub fn is_mounted(path: &Path) -> bool {
    let mountinfo = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    mountinfo.lines().any(|line| line.split(' ').nth(4) == path.to_str())
}

/// A broker and a node on loopback.
pub struct TestPool {
    runtime: Runtime,
    broker: String,
    _files: TempDir,
}

impl TestPool {
    pub fn start(memory_bytes: u64) -> Self {
        let files = tempfile::tempdir().unwrap();
        let runtime = Runtime::new().unwrap();
        let (ready, address) = mpsc::channel();
        let loopback = "127.0.0.1:0".parse().unwrap();
        let store = files.path().join("broker.redb");
        let broker = farpool_broker::BrokerConfig { listen: loopback, store, tls: None };
        runtime.spawn(async move {
            let on_ready = |address| ready.send(address).unwrap();
            farpool_broker::run(broker, on_ready, std::future::pending()).await.unwrap();
        });
        let broker = address.recv_timeout(PATIENCE).unwrap().to_string();
        let node = farpool_node::NodeConfig {
            broker: broker.clone(),
            control_listen: loopback,
            data_listen: loopback,
            advertise: None,
            register_within: PATIENCE,
            shm_socket: Some(files.path().join("node.sock")),
            card: None,
            memory_bytes,
            reserve_bytes: 0,
            region_bytes: REGION_BYTES,
            locking: farpool_node::Locking::None,
            state_dir: None,
            tls: None,
        };
        runtime.spawn(async move {
            farpool_node::run(node, |_| {}, std::future::pending()).await.unwrap();
        });
        let pool = TestPool { runtime, broker, _files: files };
        eventually("the node has registered", || pool.connect().capacity().total_bytes == memory_bytes);
        pool
    }

    pub fn connect(&self) -> Pool {
        let config = PoolConfig {
            broker: self.broker.clone(),
            tls: None,
            transport: TransportChoice::Auto.into(),
            limit_bytes: None,
        };
        Pool::connect(config).unwrap()
    }
}

/// Does nothing, unless another test has started it to serve a mount until its standard input ends.
#[test]
fn serve_when_another_test_asks() {
    let (Some(mountpoint), Ok(bytes)) = (std::env::var_os(SERVE_AT), std::env::var(SERVE_BYTES)) else {
        return;
    };
    let mountpoint = PathBuf::from(mountpoint);
    let watcher = start_watcher(&mountpoint).unwrap();
    let pool = TestPool::start(bytes.parse().unwrap());
    let store = FileStore::new(pool.connect()).unwrap();
    let allow_other = rustix::process::geteuid().is_root();
    let acceleration = std::env::var_os(SERVE_GUESTS).map(|_| Acceleration::default());
    let redundancy = Redundancy::default();
    let limit_bytes = None;
    let config = MountConfig { mountpoint, threads: 4, allow_other, redundancy, limit_bytes, acceleration };
    let (stop, stopped) = mpsc::channel();
    std::thread::spawn(move || {
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        stop.send(()).unwrap();
    });
    run(store, &config, None, watcher, || writeln!(std::io::stdout(), "\n{READY}").unwrap(), stopped)
        .unwrap();
}

/// A mount and the process that serves it; dropping it unmounts.
pub struct TestMount {
    daemon: Child,
    /// `Some` until the next mount takes it.
    mountpoint: Option<TempDir>,
}

impl TestMount {
    pub fn start(memory_bytes: u64) -> Self {
        Self::start_at(tempfile::tempdir().unwrap(), memory_bytes)
    }

    pub fn start_at(mountpoint: TempDir, memory_bytes: u64) -> Self {
        Self::serve(mountpoint, memory_bytes, false)
    }

    /// A mount that admits direct clients (called *guests* in the code).
    pub fn with_guests(memory_bytes: u64) -> Self {
        Self::serve(tempfile::tempdir().unwrap(), memory_bytes, true)
    }

    fn serve(mountpoint: TempDir, memory_bytes: u64, guests: bool) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["support::serve_when_another_test_asks", "--exact", "--nocapture"]);
        command.env(SERVE_AT, mountpoint.path()).env(SERVE_BYTES, memory_bytes.to_string());
        if guests {
            command.env(SERVE_GUESTS, "1");
        }
        let mut daemon = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(daemon.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == READY), "the daemon mounts");
        // No test reads further output; it is drained, so that the daemon does not block on it.
        std::thread::spawn(move || lines.for_each(drop));
        TestMount { daemon, mountpoint: Some(mountpoint) }
    }

    pub fn path(&self) -> &Path {
        self.mountpoint.as_ref().unwrap().path()
    }

    /// Another mount on the same directory, once this one has ended.
    pub fn again(mut self, memory_bytes: u64) -> Self {
        self.wait();
        Self::start_at(self.mountpoint.take().unwrap(), memory_bytes)
    }

    /// Asks the mount to stop.
    pub fn stop(&mut self) {
        self.daemon.stdin = None;
    }

    /// Kills the daemon.
    pub fn kill(&mut self) {
        self.daemon.kill().unwrap();
    }

    /// Kills the watcher, then the daemon.
    pub fn kill_with_watcher(&mut self) {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.daemon.id())).unwrap();
        let children =
            tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).unwrap());
        let children: String = children.collect();
        let is_watcher = |child: &&str| {
            let name = std::fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default();
            name.trim() == "farpool-watcher"
        };
        let watcher = children.split_whitespace().find(is_watcher);
        Command::new("kill").args(["-9", watcher.expect("a watcher")]).status().unwrap();
        self.kill();
    }

    /// Waits until the daemon has ended, however it was asked to.
    pub fn wait(&mut self) -> ExitStatus {
        eventually("the mount has ended", || self.daemon.try_wait().unwrap().is_some());
        self.daemon.wait().unwrap()
    }
}

impl Drop for TestMount {
    fn drop(&mut self) {
        self.stop();
        let status = self.daemon.wait();
        if !std::thread::panicking() {
            let status = status.unwrap();
            assert!(status.success() || status.code().is_none(), "{status}");
            // Of a daemon that was killed, its watcher unmounts.
            eventually("nothing is mounted", || {
                self.mountpoint.as_ref().is_none_or(|mountpoint| !is_mounted(mountpoint.path()))
            });
        }
    }
}

/// An empty directory of a mount of its own, or of the file system that [`ELSEWHERE`] names.
pub struct Scratch {
    path: PathBuf,
    _kept: Kept,
}

// Held for their `Drop`.
enum Kept {
    Mount(#[expect(dead_code)] Box<TestMount>),
    Directory(#[expect(dead_code)] TempDir),
}

impl Scratch {
    pub fn new() -> Self {
        match std::env::var_os(ELSEWHERE) {
            Some(elsewhere) => {
                let directory = tempfile::tempdir_in(elsewhere).unwrap();
                Scratch { path: directory.path().to_owned(), _kept: Kept::Directory(directory) }
            }
            None => {
                let mount = Box::new(TestMount::start(64 << 20));
                Scratch { path: mount.path().to_owned(), _kept: Kept::Mount(mount) }
            }
        }
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}
