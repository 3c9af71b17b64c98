//! A mount from its making to its end.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::Duration;

use farpool_file::{FileStore, Redundancy};
use fuser::{Config, Session, SessionACL};

use crate::attach::{Attached, attach};
use crate::error::MountError;
use crate::flusher::Flusher;
use crate::fs::{FarFs, Kernel};
use crate::guests::{Growing, Hall, Opener, Server};
use crate::keeping::{KeptMount, Names};
use crate::mountpoint::{check_allow_other, check_mountpoint, resolve};
use crate::namespace::{Budget, MODE_MASK, Ownership};
use crate::watcher::Watcher;
use crate::worker::Bell;

/// Most worker threads: each holds a session with the pool, and more than this many requests of one machine at a
/// time would only wait for its processors.
pub const MAX_THREADS: usize = 64;
/// How soon a wish to stop is noticed.
const STOP_POLL: Duration = Duration::from_millis(50);
/// How long the workers may take to end once the mount is gone: an operation under way ends within the pool's
/// deadline for a node, twice that is plenty.
const END_LIMIT: Duration = Duration::from_secs(10);

/// What to mount where.
#[derive(Clone, Debug)]
pub struct MountConfig {
    /// An empty directory.
    pub mountpoint: PathBuf,
    /// Worker threads, at least one and at most [`MAX_THREADS`].
    pub threads: usize,
    /// Whether other users may use the mount, within the permissions of its files.
    pub allow_other: bool,
    /// How files bear the loss of a node, unless something else is chosen for one of them or its directory.
    pub redundancy: Redundancy,
    /// Most far memory. Names and attributes may take an eighth as much of this process's memory.
    pub limit_bytes: Option<u64>,
    /// Who may work on files directly; `None`: nobody.
    pub acceleration: Option<Acceleration>,
}

/// Who may work on files directly, without asking the kernel (`libfarpool_preload.so`). Where somebody may, the kernel keeps
/// no written data and no attributes back.
#[derive(Clone, Default, Debug)]
pub struct Acceleration {
    /// Users who are trusted with all files of the mount, besides root and the one who mounts.
    pub trusted_uids: Vec<u32>,
}

impl MountConfig {
    /// Whether this mount can work; to be asked before anything is leased for it.
    pub fn check(&self) -> Result<(), MountError> {
        if self.allow_other {
            check_allow_other()?;
        }
        check_mountpoint(&self.mountpoint)
    }
}

/// How serving came to an end.
enum End {
    /// The session ended by itself: somebody has unmounted.
    Unmounted(io::Result<()>),
    /// The owner of the mount wants it gone.
    Stopped,
    /// A worker thread has died.
    Crippled,
}

/// Mounts, calls `on_ready`, and serves until `stop` says so (a message, or the end of its sender) or somebody
/// unmounts. Returns when the mount is gone. Files still open then give errors. With `kept` the names are those of an earlier
/// process, and a later one finds them again.
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
    // The last handle of the store stays here: giving leases back is not for the workers' time.
    let kernel = Kernel::default();
    let root = covered(&mountpoint)?;
    let (device, mut attached) = attach(&mountpoint, config.allow_other)?;
    if let Some(device) = attached.device() {
        watcher.mounted(device).map_err(MountError::Broken)?;
    }
    let flusher = attached.can_be_ended().then(|| Flusher::start(device.as_fd()));
    let flusher = flusher.transpose().map_err(MountError::Broken)?;
    let growing = if flusher.is_some() && kept.is_none() { Growing::ByGuests } else { Growing::ByKernel };
    let hall =
        config.acceleration.as_ref().map(|acceleration| open_hall(acceleration, &kernel, &store, growing));
    let hall = hall.transpose().map_err(MountError::Broken)?;
    let (hall, guests) = hall.unzip();
    let budget = Budget::of(config.limit_bytes, rustix::process::geteuid().as_raw());
    let names = Names::of(root, budget, kept);
    let file_system =
        FarFs::new(store.clone(), names, bell.clone(), kernel.clone(), flusher, hall, config.redundancy);

    let mut options = Config::default();
    options.n_threads = Some(config.threads.clamp(1, MAX_THREADS));
    options.clone_fd = true;
    // The kernel has checked who may come in (`allow_other`, `default_permissions`) before it asks us.
    let session =
        Session::from_fd(file_system, device, SessionACL::All, options).map_err(MountError::Broken)?;
    if let Err(error) = attached.widen_readahead() {
        tracing::debug!(%error, "sequential reads stay at the kernel's readahead");
    }
    let _ = kernel.set(session.notifier()); // empty until now
    let (ended, end) = mpsc::channel();
    let serve = move || {
        // Nobody listens any more if the workers took longer than END_LIMIT.
        let _ = ended.send(session.run());
    };
    thread::Builder::new().name("mount".into()).spawn(serve).map_err(MountError::Broken)?;
    on_ready();

    let result = match serve_until(&end, &stop, &bell) {
        End::Unmounted(result) => {
            attached.forget();
            result.map_err(MountError::Broken)
        }
        End::Stopped => take_away(&mut attached, &end),
        End::Crippled => {
            tracing::error!("a worker thread died; the mount ends");
            take_away(&mut attached, &end).and(Err(MountError::Broken(io::ErrorKind::Other.into())))
        }
    };
    // The mount first, then its watcher, then the leases.
    drop(attached);
    drop(guests);
    drop(watcher);
    drop(store);
    result
}

/// Receives processes that work on files directly.
fn open_hall(
    acceleration: &Acceleration,
    kernel: &Kernel,
    store: &FileStore,
    growing: Growing,
) -> io::Result<(Arc<Hall>, (Opener, Server))> {
    let mut trusted = acceleration.trusted_uids.clone();
    trusted.push(rustix::process::geteuid().as_raw());
    let (hall, opener) = Hall::open(trusted, kernel.clone(), growing)?;
    let server = Server::start(hall.clone(), store.clone())?;
    Ok((hall, (opener, server)))
}

fn serve_until(end: &Receiver<io::Result<()>>, stop: &Receiver<()>, bell: &Bell) -> End {
    loop {
        let crippled = bell.has_rung();
        match end.recv_timeout(STOP_POLL) {
            Ok(result) => return End::Unmounted(result),
            Err(RecvTimeoutError::Disconnected) => return End::Crippled,
            // All workers end within one another's reach when somebody unmounts; one alone has died.
            Err(RecvTimeoutError::Timeout) if crippled => return End::Crippled,
            Err(RecvTimeoutError::Timeout) => {}
        }
        match stop.try_recv() {
            Ok(()) | Err(TryRecvError::Disconnected) => return End::Stopped,
            Err(TryRecvError::Empty) => {}
        }
    }
}

/// Unmounts and waits for the workers. That their connection broke meanwhile is no news.
fn take_away(attached: &mut Attached, end: &Receiver<io::Result<()>>) -> Result<(), MountError> {
    attached.detach().map_err(MountError::Broken)?;
    if end.recv_timeout(STOP_POLL).is_ok() {
        return Ok(());
    }
    // Only detached, by the helper, while files were open: the kernel still asks on their behalf.
    if let Err(error) = attached.abort() {
        tracing::debug!(%error, "the connection ends with this process");
    }
    if end.recv_timeout(END_LIMIT).is_err() {
        tracing::warn!("files are still open, or far memory is awaited; both end with this process");
    }
    Ok(())
}

/// The root of the mount looks like the directory it covers.
fn covered(mountpoint: &Path) -> Result<Ownership, MountError> {
    let unusable = |source| MountError::Unusable { path: mountpoint.to_owned(), source };
    let metadata = std::fs::metadata(mountpoint).map_err(unusable)?;
    Ok(Ownership { mode: metadata.mode() & MODE_MASK, uid: metadata.uid(), gid: metadata.gid() })
}
