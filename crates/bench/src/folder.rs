//! The folder of a measurement's own pool. Dropping the value removes it; if the process was killed, the same
//! user's next run does. The folder of a document is only made, and written to.
//!
//! F1. A run holds a lock (flock) on its folder as long as it lives; unlike process ids, this works across
//!     containers. A folder is removed as a leftover only if it is not locked and belongs to this user.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::OFlags;
use rustix::process::geteuid;
use tempfile::TempDir;

use crate::progress::warn;

/// Only folders that their users lock may have this prefix: others are removed as leftovers.
const PREFIX: &str = "farpool-bench-";
/// How often making a folder is tried: another run may remove it between its creation and its locking.
const ATTEMPTS: u32 = 16;

/// An empty folder inside a locked one.
pub fn mountpoint() -> Result<(Folder, PathBuf)> {
    let folder = Folder::make()?;
    let dir = folder.path().join("mnt");
    fs::create_dir(&dir)?;
    Ok((folder, dir))
}

/// A folder of our own. Dropping it removes it.
#[derive(Debug)]
pub struct Folder {
    dir: Option<TempDir>,
    /// Holds the lock.
    _opened: File,
}

impl Folder {
    /// Makes a folder in the system's temporary directory, after removing the folders that killed runs left
    /// there.
    pub fn make() -> Result<Self> {
        Self::make_in(&std::env::temp_dir())
    }

    /// As [`make`](Self::make), in `parent`.
    pub fn make_in(parent: &Path) -> Result<Self> {
        remove_leftovers(parent);
        for _ in 0..ATTEMPTS {
            let dir = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent);
            let dir = dir.with_context(|| format!("cannot make a folder in {}", parent.display()))?;
            if let Ok(opened) = open_locked(dir.path()) {
                return Ok(Folder { dir: Some(dir), _opened: opened });
            }
        }
        bail!(
            "new folders in {} vanish before they can be locked: set TMPDIR to another directory",
            parent.display()
        )
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
            warn(&format!("cannot remove {}: {error}", path.display()));
        }
    }
}

/// Makes the folder of a document, unless it is there.
pub fn make_folder(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))
}

/// Writes a document, or a drawing of it.
pub fn save(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Opens and locks a folder; an error unless it is this user's and unlocked.
fn open_locked(path: &Path) -> io::Result<File> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let folder = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    let found = folder.metadata()?;
    if found.uid() != geteuid().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    folder.try_lock()?;
    // The previous holder of the lock may have removed this folder after we opened it.
    if fs::symlink_metadata(path)?.ino() != found.ino() {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(folder)
}

/// Removes leftovers as far as possible; a failure is no reason not to run.
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
    fn leftovers_of_killed_runs_are_removed_and_folders_in_use_or_of_others_are_not() {
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
