//! A mount that ends with its test.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::{Output, Pool, Process, farpool};

/// Fails, and names the fix, if this machine cannot mount.
#[track_caller]
fn require_fuse() {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    assert!(
        opened.is_ok(),
        "these tests mount, and /dev/fuse does not open ({opened:?}): run `farpool doctor`"
    );
}

/// A running `farpool mount`.
pub struct Mount {
    pub process: Process,
    dir: PathBuf,
    /// Removed after the mount.
    _parent: Option<TempDir>,
}

impl Mount {
    /// Mounts a pool on a new folder.
    #[track_caller]
    pub fn of(pool: &Pool, options: &[&str]) -> Self {
        let parent = tempfile::tempdir().unwrap();
        // Other users (PostgreSQL's) must have access.
        fs::set_permissions(parent.path(), fs::Permissions::from_mode(0o711)).unwrap();
        let dir = parent.path().join("far");
        fs::create_dir(&dir).unwrap();
        let mut command = farpool(["mount"]);
        command.arg(&dir).args(["--broker", &pool.address]).args(options);
        let mut mount = Self::with(command, dir);
        mount._parent = Some(parent);
        mount
    }

    /// Runs a `farpool mount` that mounts on `dir`.
    #[track_caller]
    pub fn with(command: Command, dir: PathBuf) -> Self {
        require_fuse();
        // The guard exists before anything is mounted.
        let mut mount = Mount { process: Process::start("the mount", command), dir, _parent: None };
        mount.process.await_line("ready");
        assert!(is_mounted(&mount.dir), "it said ready, and nothing is mounted on {}", mount.dir.display());
        mount
    }

    /// The directory on which it is mounted.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// SIGTERM; the mount must be gone when the process is.
    #[track_caller]
    pub fn unmount(&mut self) -> Output {
        let output = self.process.end_well();
        assert!(!is_mounted(&self.dir), "{} is still mounted", self.dir.display());
        output
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.process.end();
        if is_mounted(&self.dir) {
            let umount = if super::root() { ("umount", "-l") } else { ("fusermount3", "-uz") };
            let _ = Command::new(umount.0).arg(umount.1).arg(&self.dir).status(); // a guard must not panic
        }
    }
}

/// Whether the kernel has a mount on this folder, even if the mount's daemon is dead.
pub fn is_mounted(dir: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let dir = dir.to_str().expect("test folders have plain names");
    mounts.lines().any(|line| line.split(' ').nth(4) == Some(dir))
}

/// Whether the kernel has a mount anywhere below this folder.
pub fn is_mounted_below(dir: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(4).is_some_and(|place| Path::new(place).starts_with(dir)))
}
