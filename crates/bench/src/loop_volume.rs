//! A file system in a file: an ext4 on a loop device. Needs root.
//!
//! Pitfalls, each found the hard way:
//! - ext4 initialises its tables lazily, in the background during the first minutes, unless told otherwise.
//! - Without direct I/O the kernel caches the file, and reads from the device are copies between caches.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::child::run;
use crate::progress::warn;

/// For losetup, mkfs, mount: each writes megabytes at most.
pub const COMMAND_DEADLINE: Duration = Duration::from_secs(60);
/// A file system stays busy for a moment after its last user has ended.
const UNMOUNT_DEADLINE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(100);

/// A mounted file system in a file. Dropping it unmounts it, and detaches the device; the file stays. If the
/// process is killed, mount and device stay as well: the owner of the file has to find and remove them.
#[derive(Debug)]
pub struct LoopVolume {
    mount_point: PathBuf,
    device: Option<String>,
    is_mounted: bool,
}

impl LoopVolume {
    /// Makes a file system in the file `image`, and mounts it on the existing directory `mount_point`.
    pub fn make(image: &Path, mount_point: &Path) -> Result<Self> {
        let mut volume = Self { mount_point: mount_point.into(), device: None, is_mounted: false };
        let attach: [&OsStr; 4] =
            ["--find".as_ref(), "--show".as_ref(), "--direct-io=on".as_ref(), image.as_ref()];
        let device = run("losetup", &attach, COMMAND_DEADLINE)?.trim().to_owned();
        volume.device = Some(device.clone());
        let now = "lazy_itable_init=0,lazy_journal_init=0";
        let format: [&OsStr; 4] = ["-q".as_ref(), "-E".as_ref(), now.as_ref(), device.as_ref()];
        run("mkfs.ext4", &format, COMMAND_DEADLINE)?;
        run("mount", &[device.as_ref(), mount_point.as_ref()], COMMAND_DEADLINE)?;
        volume.is_mounted = true;
        Ok(volume)
    }

    /// The device, as in `/dev/loop0`; an error once it is detached.
    pub fn device(&self) -> Result<&str> {
        self.device.as_deref().context("the volume has been removed")
    }

    /// Undoes everything that `make` did, and tries every step even if one fails. A second call does nothing.
    pub fn remove(&mut self) -> Result<()> {
        let unmounted = if std::mem::take(&mut self.is_mounted) { self.unmount() } else { Ok(()) };
        let detached = match self.device.take() {
            Some(device) => run("losetup", &["-d".as_ref(), device.as_ref()], COMMAND_DEADLINE).map(drop),
            None => Ok(()),
        };
        unmounted.and(detached)
    }

    fn unmount(&self) -> Result<()> {
        let started = Instant::now();
        loop {
            let Err(error) = run("umount", &[self.mount_point.as_ref()], COMMAND_DEADLINE) else {
                return Ok(());
            };
            if started.elapsed() > UNMOUNT_DEADLINE {
                return Err(error);
            }
            thread::sleep(POLL);
        }
    }
}

impl Drop for LoopVolume {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            warn(&format!("cannot remove the volume on {}: {error:#}", self.mount_point.display()));
        }
    }
}
