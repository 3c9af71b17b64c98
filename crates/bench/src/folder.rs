//! The folder of a measurement's own pool: gone with the value, and if that was killed, with the next of this
//! user.
//!
//! F1. A folder is locked (flock) while its run lives, whatever process ids mean in which container; only one
//!     that is not, and is this user's, is removed as a leftover.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::OFlags;
use rustix::process::geteuid;
use tempfile::TempDir;

use crate::child::complain;

const PREFIX: &str = "farpool-bench-";
/// How often another run may take a folder for a leftover between its making and its locking.
const ATTEMPTS: u32 = 16;

/// A folder of our own. Dropping it removes it.
#[derive(Debug)]
pub struct Folder {
    dir: Option<TempDir>,
    /// Holds the lock.
    _opened: File,
}

impl Folder {
    /// Makes one in the system's folder for such things, and clears that of what killed runs have left.
    pub fn make() -> Result<Self> {
        Self::make_in(&std::env::temp_dir())
    }

    /// As [`make`](Self::make), in another folder.
    pub fn make_in(parent: &Path) -> Result<Self> {
        remove_leftovers(parent);
        for _ in 0..ATTEMPTS {
            let dir = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent);
            let dir = dir.with_context(|| format!("cannot make a folder in {}", parent.display()))?;
            if let Ok(opened) = open_locked(dir.path()) {
                return Ok(Folder { dir: Some(dir), _opened: opened });
            }
        }
        bail!("folders in {} vanish as soon as they are made: set TMPDIR to another", parent.display())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.dir.as_ref().expect("there until drop").path()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let Some(dir) = self.dir.take() else { return };
        let path = dir.path().to_owned();
        if let Err(error) = dir.close() {
            complain(&format!("farpool bench: {} is left behind: {error}", path.display()));
        }
    }
}

/// Opens a folder of this user that nobody has locked, and locks it.
fn open_locked(path: &Path) -> io::Result<File> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let folder = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    let found = folder.metadata()?;
    if found.uid() != geteuid().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    folder.try_lock()?;
    // Whoever held the lock before may have removed what we have just locked.
    if fs::symlink_metadata(path)?.ino() != found.ino() {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(folder)
}

/// As far as that is possible: what is left of another run is no reason not to run.
fn remove_leftovers(parent: &Path) {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes())) {
        if let Ok(_locked) = open_locked(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_run_has_left_is_removed_by_the_next_and_what_is_in_use_or_foreign_is_not() {
        let parent = tempfile::tempdir().unwrap();
        let living = Folder::make_in(parent.path()).unwrap();
        let (left, other) = (parent.path().join(format!("{PREFIX}left")), parent.path().join("other"));
        for folder in [&left, &other] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("broker.redb"), "old").unwrap();
        }
        let link = parent.path().join(format!("{PREFIX}link"));
        std::os::unix::fs::symlink(&other, &link).unwrap();
        let next = Folder::make_in(parent.path()).unwrap();
        assert!(!left.exists());
        assert!(living.path().exists() && next.path().exists());
        assert!(other.join("broker.redb").exists() && link.exists());
        let path = living.path().to_owned();
        drop(living);
        assert!(!path.exists());
    }
}
