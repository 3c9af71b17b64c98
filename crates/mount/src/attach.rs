//! Mounting and unmounting: directly as root, through `fusermount3` for all other users.
//!
//! This module mounts, and passes an open device to the FUSE session, for three reasons: a busy mount is
//! detached instead of left behind; a later mount of another process at the same path is not touched; and a
//! daemon that fails early removes its mount.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::error::MountError;
use crate::helper;
use crate::mountpoint::open_fuse_device;
use crate::watcher::Device;

/// How the mount appears in `/proc/self/mountinfo`.
pub(crate) const FS_TYPE: &str = "fuse.farpool";
const SUBTYPE: &str = "farpool";
const SOURCE: &str = "farpool";

/// How far the kernel reads ahead of a sequential reader, if it lets the daemon set that. A reader of 8 KiB
/// pages gets 2.3 GiB/s with the kernel's default of 128 KiB, and 3.1 GiB/s with this; a larger value does
/// not help.
const READAHEAD_KIB: u32 = 512;

/// A mount that is removed when this value is dropped.
#[derive(Debug)]
pub(crate) struct Attached {
    mountpoint: PathBuf,
    /// Major and minor number of the mounted file system: they tell whether the mount on the path is still
    /// this one.
    device: Option<Device>,
    attached: bool,
}

/// Mounts on a resolved path, and opens the device through which the kernel sends requests.
pub(crate) fn attach(mountpoint: &Path, allow_other: bool) -> Result<(OwnedFd, Attached), MountError> {
    let refused = |reason: String| MountError::Refused { path: mountpoint.to_owned(), reason };
    let direct = mount_directly(mountpoint, allow_other);
    let device = match direct {
        Ok(device) => device,
        Err(Errno::PERM) if helper::find().is_some() => {
            helper::mount(mountpoint, &helper_options(allow_other))
                .map_err(|error| refused(error.to_string()))?
        }
        Err(Errno::PERM) if !rustix::process::geteuid().is_root() => return Err(MountError::NoHelper),
        Err(errno) => return Err(refused(io::Error::from(errno).to_string())),
    };
    let attached =
        Attached { mountpoint: mountpoint.to_owned(), device: device_at(mountpoint), attached: true };
    Ok((device, attached))
}

impl Attached {
    /// Unmounts. If files are still open, the mount is detached: it vanishes from its path at once, and open
    /// files give errors from then on.
    pub(crate) fn detach(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.attached) || device_at(&self.mountpoint) != self.device {
            return Ok(());
        }
        // `DETACH` removes the mount even if files are open. `FORCE` ends the connection first, so that
        // processes with open files, here or in a mount namespace that was copied from ours, get errors at
        // once instead of waiting for a daemon that is about to exit. Data that are not written back yet
        // would be lost with the daemon anyway.
        let flags = UnmountFlags::NOFOLLOW | UnmountFlags::FORCE | UnmountFlags::DETACH;
        match rustix::mount::unmount(&self.mountpoint, flags) {
            Err(Errno::PERM) => helper::unmount(&self.mountpoint),
            other => Ok(other?),
        }
    }

    /// Major and minor number of the mounted file system, if the kernel gave them.
    pub(crate) fn device(&self) -> Option<Device> {
        self.device
    }

    /// Notes that another process has already unmounted it.
    pub(crate) fn forget(&mut self) {
        self.attached = false;
    }

    /// Lets the kernel read further ahead than by default; only root may set that. Call it after the session
    /// has begun, because the beginning of a session sets the kernel's default.
    pub(crate) fn widen_readahead(&self) -> io::Result<()> {
        let (major, minor) = self.device.ok_or(io::ErrorKind::NotFound)?;
        std::fs::write(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"), READAHEAD_KIB.to_string())
    }

    /// Whether a watcher can end the connection when this process cannot: by unmounting with force, or by the
    /// kernel's `abort` file of the connection.
    pub(crate) fn can_be_ended(&self) -> bool {
        let Some((_, minor)) = self.device else { return false };
        rustix::process::geteuid().is_root()
            || Path::new(&format!("/sys/fs/fuse/connections/{minor}/abort")).exists()
    }

    /// Ends the connection to the kernel if unmounting did not: every waiting process gets an error.
    pub(crate) fn abort(&self) -> io::Result<()> {
        let (_, minor) = self.device.ok_or(io::ErrorKind::NotFound)?;
        std::fs::write(format!("/sys/fs/fuse/connections/{minor}/abort"), "1")
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Err(error) = self.detach() {
            tracing::warn!(mountpoint = %self.mountpoint.display(), %error, "the mount cannot be removed");
        }
    }
}

/// Removes a mount whose daemon has ended.
pub(crate) fn detach_dead(mountpoint: &Path) -> io::Result<()> {
    match rustix::mount::unmount(mountpoint, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH) {
        Err(Errno::PERM) => helper::unmount(mountpoint),
        other => Ok(other?),
    }
}

fn mount_directly(mountpoint: &Path, allow_other: bool) -> rustix::io::Result<OwnedFd> {
    let device = open_fuse_device().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    // `rootmode` tells the kernel that the root is a directory; its permissions come with the first
    // `getattr`.
    let fd = device.as_raw_fd();
    let mut options = format!("fd={fd},rootmode=40000,user_id={uid},group_id={gid},default_permissions");
    if allow_other {
        options.push_str(",allow_other");
    }
    let options = CString::new(options).map_err(|_| Errno::INVAL)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    rustix::mount::mount(SOURCE, mountpoint, FS_TYPE, flags, options.as_c_str())?;
    Ok(device)
}

fn helper_options(allow_other: bool) -> String {
    let allow_other = if allow_other { ",allow_other" } else { "" };
    format!("fsname={SOURCE},subtype={SUBTYPE},default_permissions,nosuid,nodev,noatime{allow_other}")
}

/// Device numbers of the file system at a path, from what the kernel knows without asking a daemon.
fn device_at(path: &Path) -> Option<Device> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT | AtFlags::SYMLINK_NOFOLLOW;
    let stat = statx(CWD, path, flags, StatxFlags::empty()).ok()?;
    Some((stat.stx_dev_major, stat.stx_dev_minor))
}
