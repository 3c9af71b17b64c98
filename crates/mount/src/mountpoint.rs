//! Checks of a mount point before any memory is leased for it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;

use crate::attach::{FS_TYPE, detach_dead};
use crate::error::MountError;
use crate::helper;
use crate::mountinfo::type_mounted_at;

/// A mounted file system that does not answer within this time is taken for alive, and left alone.
const PROBE_LIMIT: Duration = Duration::from_secs(2);
const MOUNTINFO: &str = "/proc/self/mountinfo";
const FUSE_DEVICE: &str = "/dev/fuse";
const FUSE_CONF: &str = "/etc/fuse.conf";

/// Checks that a mount on `path` can work; call it before any memory is leased. A dead Farpool mount that an
/// earlier daemon left there is removed.
pub fn check_mountpoint(path: &Path) -> Result<(), MountError> {
    open_fuse_device().map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied if !rustix::process::geteuid().is_root() => MountError::FuseForbidden,
        _ => MountError::NoFuse { source },
    })?;
    if !rustix::process::geteuid().is_root() && helper::find().is_none() {
        return Err(MountError::NoHelper);
    }
    let resolved = resolve(path)?;
    if is_farpool_mount(&resolved) {
        if !is_dead(&resolved) {
            return Err(MountError::AlreadyMounted { path: path.to_owned() });
        }
        detach_dead(&resolved).map_err(|source| MountError::Unusable { path: path.to_owned(), source })?;
    }
    let unusable = |source| MountError::Unusable { path: path.to_owned(), source };
    if !fs::metadata(&resolved).map_err(unusable)?.is_dir() {
        return Err(MountError::NotADirectory { path: path.to_owned() });
    }
    if fs::read_dir(&resolved).map_err(unusable)?.next().is_some() {
        return Err(MountError::NotEmpty { path: path.to_owned() });
    }
    Ok(())
}

/// Checks that this user may let other users into the mount.
pub(crate) fn check_allow_other() -> Result<(), MountError> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let text = fs::read_to_string(FUSE_CONF).unwrap_or_default();
    if text.lines().any(|line| line.trim() == "user_allow_other") {
        Ok(())
    } else {
        Err(MountError::AllowOtherForbidden)
    }
}

pub(crate) fn open_fuse_device() -> io::Result<std::os::fd::OwnedFd> {
    Ok(fs::File::options().read(true).write(true).open(FUSE_DEVICE)?.into())
}

/// The absolute path without links. A dead mount does not answer about itself, so its parent is resolved
/// instead.
pub(crate) fn resolve(path: &Path) -> Result<PathBuf, MountError> {
    let unusable = |source| MountError::Unusable { path: path.to_owned(), source };
    match path.canonicalize() {
        Ok(resolved) => Ok(resolved),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(MountError::Missing { path: path.to_owned() })
        }
        Err(error) if says_dead(&error) => {
            let absolute = std::path::absolute(path).map_err(unusable)?;
            match (absolute.parent(), absolute.file_name()) {
                (Some(parent), Some(name)) => Ok(parent.canonicalize().map_err(unusable)?.join(name)),
                _ => Err(unusable(error)),
            }
        }
        Err(error) => Err(unusable(error)),
    }
}

fn is_farpool_mount(resolved: &Path) -> bool {
    fs::read(MOUNTINFO).is_ok_and(|text| type_mounted_at(&text, resolved) == Some(FS_TYPE))
}

/// Whether the daemon of the mount on `resolved` has ended. A thread of its own asks, because a daemon that
/// is alive but stopped would never answer.
fn is_dead(resolved: &Path) -> bool {
    let (answer, verdict) = mpsc::channel();
    let probed = resolved.to_owned();
    let probe = thread::Builder::new().name("mount-probe".into()).spawn(move || {
        let dead = fs::metadata(&probed).is_err_and(|error| says_dead(&error));
        // The receiver is gone once the limit has passed.
        let _ = answer.send(dead);
    });
    probe.is_ok() && verdict.recv_timeout(PROBE_LIMIT).unwrap_or(false)
}

fn says_dead(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::NOTCONN | Errno::CONNABORTED))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(path: &Path) -> String {
        check_mountpoint(path).unwrap_err().to_string()
    }

    #[test]
    fn an_unusable_mount_point_is_refused_with_its_fix() {
        if open_fuse_device().is_err() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        assert!(check_mountpoint(dir.path()).is_ok());
        let file = dir.path().join("file");
        assert!(message(&file).contains("mkdir -p"));
        fs::write(&file, b"x").unwrap();
        assert!(message(&file).contains("is not a directory"));
        assert!(message(dir.path()).contains("is not empty"));
    }
}
