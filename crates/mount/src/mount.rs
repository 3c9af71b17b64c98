//! The life of a mount, from mounting to unmounting.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::Duration;

use farpool_file::{FileStore, Redundancy};
use farpool_pool::direct::Server;
use fuser::{Config, Session, SessionACL};

use crate::attach::{Attached, attach};
use crate::error::MountError;
use crate::flusher::Flusher;
use crate::fs::{FarFs, Kernel};
use crate::guests::{Growing, Opener, Registry, serve_guests};
use crate::keeping::{KeptMount, Names};
use crate::mountpoint::{check_allow_other, check_mountpoint, resolve};
use crate::namespace::{Budget, MODE_MASK, Ownership};
use crate::watcher::Watcher;
use crate::worker::Bell;

/// Most worker threads. Each holds a session with the pool; more than this many requests of one machine at a
/// time would only wait for its processors.
pub const MAX_THREADS: usize = 64;
/// How often the stop channel is polled.
const STOP_POLL: Duration = Duration::from_millis(50);
/// How long the workers may take to end once the mount is gone. Operations that take longer (up to 30 s, for
/// want of a connection) end with this process.
const END_LIMIT: Duration = Duration::from_secs(10);

/// What to mount, and where.
#[derive(Clone, Debug)]
pub struct MountConfig {
    /// An empty directory.
    pub mountpoint: PathBuf,
    /// Worker threads, at least one and at most [`MAX_THREADS`].
    pub threads: usize,
    /// Whether other users may use the mount, within the permissions of its files.
    pub allow_other: bool,
    /// The redundancy of files, unless another is chosen for a file or its directory.
    pub redundancy: Redundancy,
    /// Most far memory, in bytes. Names and attributes may take an eighth as much of this process's memory,
    /// in addition.
    pub limit_bytes: Option<u64>,
    /// Which users may run direct clients; `None`: no user.
    pub acceleration: Option<Acceleration>,
}

/// Which users may run direct clients: processes that work on files without the kernel
/// (`libfarpool_preload.so`; called *guests* in the code). On such a mount the kernel holds back no written
/// data and no attributes.
#[derive(Clone, Default, Debug)]
pub struct Acceleration {
    /// Users that are trusted with all files of the mount, in addition to root and the user that mounts.
    pub trusted_uids: Vec<u32>,
}

impl MountConfig {
    /// Checks that this mount can work. Call it before any memory is leased for it.
    pub fn check(&self) -> Result<(), MountError> {
        if self.allow_other {
            check_allow_other()?;
        }
        check_mountpoint(&self.mountpoint)
    }
}

/// Why serving ended.
enum End {
    /// The session has ended: the file system was unmounted.
    Unmounted(io::Result<()>),
    /// The owner of the mount has asked it to stop.
    Stopped,
    /// A worker thread has died.
    Crippled,
}

/// Mounts, calls `on_ready`, and serves requests until `stop` yields a message, the sender of `stop` is
/// dropped, or the file system is unmounted. Returns when the mount is gone; files that are still open then
/// give errors. With `kept`, the names are those of an earlier process, and a later process can restore them
/// again.
pub fn run(
    store: FileStore,
    config: &MountConfig,
    kept: Option<KeptMount>,
    mut watcher: Watcher,
    on_ready: impl FnOnce(),
    stop: Receiver<()>,
) -> Result<(), MountError> {
    config.check()?;
    let mountpoint = resolve(&config.mountpoint)?;
    let bell = Bell::default();
    // The last handle of the store stays here, so that no worker has to return leases.
    let kernel = Kernel::default();
    let root = covered(&mountpoint)?;
    let (device, mut attached) = attach(&mountpoint, config.allow_other)?;
    if let Some(device) = attached.device() {
        watcher.mounted(device).map_err(MountError::Broken)?;
    }
    let flusher = attached.can_be_ended().then(|| Flusher::start(device.as_fd()));
    let flusher = flusher.transpose().map_err(MountError::Broken)?;
    let growing = if flusher.is_some() && kept.is_none() { Growing::ByGuests } else { Growing::ByKernel };
    let registry = config
        .acceleration
        .as_ref()
        .map(|acceleration| start_registry(acceleration, &kernel, &store, growing));
    let registry = registry.transpose().map_err(MountError::Broken)?;
    let (registry, guests) = registry.unzip();
    let budget = Budget::of(config.limit_bytes, rustix::process::geteuid().as_raw());
    let names = Names::of(root, budget, kept);
    let file_system =
        FarFs::new(store.clone(), names, bell.clone(), kernel.clone(), flusher, registry, config.redundancy);

    let mut options = Config::default();
    options.n_threads = Some(config.threads.clamp(1, MAX_THREADS));
    options.clone_fd = true;
    // The kernel has already checked which users may use the mount (`allow_other`, `default_permissions`).
    let session =
        Session::from_fd(file_system, device, SessionACL::All, options).map_err(MountError::Broken)?;
    if let Err(error) = attached.widen_readahead() {
        tracing::debug!(%error, "sequential reads stay at the kernel's readahead");
    }
    let _ = kernel.set(session.notifier()); // cannot fail: it is set only here
    let (ended, end) = mpsc::channel();
    let serve = move || {
        // The receiver is gone if the workers took longer than END_LIMIT.
        let _ = ended.send(session.run());
    };
    thread::Builder::new().name("mount".into()).spawn(serve).map_err(MountError::Broken)?;
    on_ready();

    let result = match serve_until(&end, &stop, &bell) {
        End::Unmounted(result) => {
            attached.forget();
            result.map_err(MountError::Broken)
        }
        End::Stopped => unmount(&mut attached, &end),
        End::Crippled => {
            tracing::error!("a worker thread died; the mount ends");
            unmount(&mut attached, &end).and(Err(MountError::Broken(io::ErrorKind::Other.into())))
        }
    };
    // The order matters: the mount first, then its watcher, then the leases.
    drop(attached);
    drop(guests);
    drop(watcher);
    drop(store);
    result
}

/// Starts the registry of direct clients, and the threads that serve them.
fn start_registry(
    acceleration: &Acceleration,
    kernel: &Kernel,
    store: &FileStore,
    growing: Growing,
) -> io::Result<(Arc<Registry>, (Opener, Server))> {
    let mut trusted = acceleration.trusted_uids.clone();
    trusted.push(rustix::process::geteuid().as_raw());
    let (registry, opener) = Registry::open(trusted, kernel.clone(), growing)?;
    let server = serve_guests(registry.clone(), store.clone())?;
    Ok((registry, (opener, server)))
}

fn serve_until(end: &Receiver<io::Result<()>>, stop: &Receiver<()>, bell: &Bell) -> End {
    loop {
        let crippled = bell.has_rung();
        match end.recv_timeout(STOP_POLL) {
            Ok(result) => return End::Unmounted(result),
            Err(RecvTimeoutError::Disconnected) => return End::Crippled,
            // After an unmount all workers end within one poll of each other. If only one has ended, it has
            // died.
            Err(RecvTimeoutError::Timeout) if crippled => return End::Crippled,
            Err(RecvTimeoutError::Timeout) => {}
        }
        match stop.try_recv() {
            Ok(()) | Err(TryRecvError::Disconnected) => return End::Stopped,
            Err(TryRecvError::Empty) => {}
        }
    }
}

/// Unmounts and waits for the workers. A connection that broke meanwhile is not an error.
fn unmount(attached: &mut Attached, end: &Receiver<io::Result<()>>) -> Result<(), MountError> {
    attached.detach().map_err(MountError::Broken)?;
    if end.recv_timeout(STOP_POLL).is_ok() {
        return Ok(());
    }
    // The helper only detaches the mount while files are open: the kernel still sends requests for them.
    if let Err(error) = attached.abort() {
        tracing::debug!(%error, "the connection ends with this process");
    }
    if end.recv_timeout(END_LIMIT).is_err() {
        tracing::warn!(
            "files are still open, or operations on far memory are in progress; they end with this process"
        );
    }
    Ok(())
}

/// The mode and owner of the mount's root: those of the directory that it covers.
fn covered(mountpoint: &Path) -> Result<Ownership, MountError> {
    let unusable = |source| MountError::Unusable { path: mountpoint.to_owned(), source };
    let metadata = std::fs::metadata(mountpoint).map_err(unusable)?;
    Ok(Ownership { mode: metadata.mode() & MODE_MASK, uid: metadata.uid(), gid: metadata.gid() })
}
