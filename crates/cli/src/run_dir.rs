//! The folder with the files of the pool of `farpool up`, in which the other subcommands look for that pool.
//!
//! ```text
//! RUNDIR/            mode 0700, owned by this user; locked (flock) while `up` runs
//!   up.pid           the process that holds the lock
//!   up.log           standard error of a pool in the background
//!   broker.addr      the broker's real address; there once the pool is ready
//!   tls/             ca.pem, cert.pem, key.pem
//!   state/           the broker's store, the nodes' state and sockets
//! ```
//!
//! D1. A folder that another user owns or can write to is refused: that user could choose our broker and our
//!     certificates.
//! D2. The start of a pool deletes all files of an earlier one: the earlier pool's memory is lost, so its
//!     leases mean nothing.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use farpool_control::whereabouts::{BROKER_ADDRESS, TLS_FOLDER, default_run_dir, open_run_dir};
use rustix::fs::{FlockOperation, flock};

const PID: &str = "up.pid";
const LOG: &str = "up.log";
const STATE: &str = "state";

/// How often the folder may vanish between its creation and its locking: once per `up` that ends at this
/// moment.
const CLAIM_ATTEMPTS: u32 = 16;

/// The folder, locked by this process. Dropping it removes the pool's files.
pub struct RunDir {
    path: PathBuf,
    made_here: bool,
    /// Holds the lock.
    _folder: File,
}

impl RunDir {
    /// Creates the folder if it does not exist, locks it, and deletes the files of an earlier pool.
    pub fn claim(path: &Path) -> Result<Self> {
        for _ in 0..CLAIM_ATTEMPTS {
            let made_here = make(path)?;
            let folder = open_own(path)?;
            if flock(&folder, FlockOperation::NonBlockingLockExclusive).is_err() {
                bail!(
                    "{} has a pool already{}: end it, or choose another --dir",
                    path.display(),
                    holder(path)
                );
            }
            // The previous holder of the lock may have removed the folder that is locked now.
            if fs::metadata(path).is_ok_and(|now| folder.metadata().is_ok_and(|ours| now.ino() == ours.ino()))
            {
                let path = path.canonicalize().with_context(|| format!("cannot find {}", path.display()))?;
                let run_dir = RunDir { path, made_here, _folder: folder };
                run_dir.clear();
                run_dir.fill()?;
                return Ok(run_dir);
            }
        }
        bail!("{} vanishes as soon as it is made: choose another --dir", path.display())
    }

    fn fill(&self) -> Result<()> {
        for name in [TLS_FOLDER, STATE] {
            let folder = self.path.join(name);
            let made = DirBuilder::new().mode(0o700).create(&folder);
            made.with_context(|| in_the_way(&folder))?;
        }
        self.put(PID, &std::process::id().to_string())
    }

    /// Whether this is where the other subcommands look.
    pub fn is_default(&self) -> bool {
        default_run_dir().canonicalize().is_ok_and(|path| path == self.path)
    }

    /// Standard error of a pool in the background.
    pub fn log(&self) -> PathBuf {
        self.path.join(LOG)
    }

    /// Where the certificates go.
    pub fn tls_dir(&self) -> PathBuf {
        self.path.join(TLS_FOLDER)
    }

    /// Where the broker keeps its store.
    pub fn store(&self) -> PathBuf {
        self.path.join(STATE).join("broker.redb")
    }

    /// Where the `number`-th node keeps its state.
    pub fn node_state(&self, number: u32) -> PathBuf {
        self.path.join(STATE).join(format!("node-{number}"))
    }

    /// The `number`-th node's socket.
    pub fn node_socket(&self, number: u32) -> PathBuf {
        self.path.join(STATE).join(format!("node-{number}.sock"))
    }

    /// Tells the other subcommands where the broker is.
    pub fn publish(&self, broker: &str) -> Result<()> {
        self.put(BROKER_ADDRESS, broker)
    }

    /// Writes a file atomically.
    fn put(&self, name: &str, line: &str) -> Result<()> {
        let (path, new) = (self.path.join(name), self.path.join(format!("{name}.new")));
        let mut options = OpenOptions::new();
        let opened = options.write(true).create(true).truncate(true).mode(0o600).open(&new);
        let written = opened.and_then(|mut file| writeln!(file, "{line}"));
        written.and_then(|()| fs::rename(new, &path)).with_context(|| in_the_way(&path))
    }

    fn clear(&self) {
        for file in [PID, LOG, BROKER_ADDRESS, "up.pid.new", "broker.addr.new"] {
            report_unless_gone(fs::remove_file(self.path.join(file)));
        }
        for folder in [TLS_FOLDER, STATE] {
            report_unless_gone(fs::remove_dir_all(self.path.join(folder)));
        }
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        self.clear();
        if self.made_here {
            let _ = fs::remove_dir(&self.path); // fails only if it holds other files
        }
    }
}

/// Returns whether it created the folder.
fn make(path: &Path) -> Result<bool> {
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(error) => {
            Err(error).with_context(|| format!("cannot make {}; choose another --dir", path.display()))
        }
    }
}

/// Opens a folder that no other user can have written to (D1).
fn open_own(path: &Path) -> Result<File> {
    open_run_dir(path).map_err(|error| {
        anyhow!("{error}; choose a folder that only you may write to: --dir /tmp/farpool-NAME")
    })
}

/// The context of an error about a file or folder of the pool.
fn in_the_way(path: &Path) -> String {
    format!("cannot make {}; if something else is there, remove it, or choose another --dir", path.display())
}

fn holder(path: &Path) -> String {
    let pid = fs::read_to_string(path.join(PID)).unwrap_or_default(); // the holder may have just ended
    if pid.trim().is_empty() { String::new() } else { format!(" (process {})", pid.trim()) }
}

fn report_unless_gone(removed: std::io::Result<()>) {
    if let Err(error) = removed
        && error.kind() != ErrorKind::NotFound
    {
        tracing::warn!(%error, "cannot remove a file from the pool's folder");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_control::whereabouts::published_broker;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn folder_is_private_while_held_and_gone_afterwards() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("pool");
        let run_dir = RunDir::claim(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        assert!(published_broker(&path).unwrap().is_none());
        run_dir.publish("127.0.0.1:7").unwrap();
        assert_eq!(published_broker(&path).unwrap().unwrap(), "127.0.0.1:7");
        drop(run_dir);
        assert!(!path.exists());
    }

    #[test]
    fn second_claim_is_refused_and_names_the_holder() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("pool");
        let _held = RunDir::claim(&path).unwrap();
        let error = RunDir::claim(&path).map(drop).unwrap_err().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    }

    #[test]
    fn leftovers_of_a_killed_pool_are_cleared_and_foreign_files_stay() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("pool");
        std::mem::forget(RunDir::claim(&path).unwrap());
        fs::write(path.join("state/broker.redb"), "old").unwrap();
        fs::write(path.join("letter"), "mine").unwrap();
        // This process still holds the forgotten lock on the old folder, so the files move to a new one.
        let copy = parent.path().join("copy");
        fs::rename(&path, &copy).unwrap();
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        for name in ["state", "tls", "letter", "up.pid"] {
            fs::rename(copy.join(name), path.join(name)).unwrap();
        }
        let run_dir = RunDir::claim(&path).unwrap();
        assert!(!run_dir.store().exists());
        drop(run_dir);
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1, "only the letter stays");
    }

    #[test]
    fn folder_that_others_may_write_to_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("pool");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
        let error = RunDir::claim(&path).map(drop).unwrap_err().to_string();
        assert!(error.contains("--dir /tmp/") && !error.contains("chmod"), "{error}");
    }

    #[test]
    fn folder_in_place_of_a_file_is_an_error_that_names_it() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("pool");
        fs::create_dir_all(path.join("up.pid")).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        let error = RunDir::claim(&path).map(drop).unwrap_err().to_string();
        assert!(error.contains(path.join("up.pid").to_str().unwrap()) && error.contains("--dir"), "{error}");
    }

    #[test]
    fn link_in_place_of_the_folder_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("pool");
        std::os::unix::fs::symlink(parent.path(), &path).unwrap();
        assert!(RunDir::claim(&path).is_err());
    }
}
