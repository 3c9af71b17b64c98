use std::io;
use std::path::PathBuf;

/// Why mounting or serving failed. Each message names the fix.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The mount point does not exist.
    #[error("mount point {} does not exist: create it with 'mkdir -p {}'", path.display(), path.display())]
    Missing {
        /// As given.
        path: PathBuf,
    },
    /// The mount point is a file.
    #[error("mount point {} is not a directory: name an empty directory", path.display())]
    NotADirectory {
        /// As given.
        path: PathBuf,
    },
    /// The mount would hide files.
    #[error("mount point {} is not empty: name an empty directory, the mount would hide its files", path.display())]
    NotEmpty {
        /// As given.
        path: PathBuf,
    },
    /// Another daemon already serves that directory.
    #[error("{} is already a Farpool mount: unmount it first with 'umount {}'", path.display(), path.display())]
    AlreadyMounted {
        /// As given.
        path: PathBuf,
    },
    /// The mount point cannot be read.
    #[error("cannot use mount point {}: {source}: choose a directory that this user may list", path.display())]
    Unusable {
        /// As given.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// FUSE is not available in the kernel.
    #[error(
        "cannot open /dev/fuse: {source}: run 'modprobe fuse', or run in a container with --device /dev/fuse"
    )]
    NoFuse {
        /// What the system said.
        source: io::Error,
    },
    /// This user may not open `/dev/fuse`; most systems allow it to every user.
    #[error("this user may not open /dev/fuse: 'chmod 666 /dev/fuse' as root, or mount as root")]
    FuseForbidden,
    /// `fusermount3` is missing, and only root can mount without it.
    #[error("fusermount3 is not installed, and only root mounts without it: 'apt-get install fuse3'")]
    NoHelper,
    /// `/etc/fuse.conf` does not allow an ordinary user to let other users in.
    #[error("--allow-other needs the line 'user_allow_other' in /etc/fuse.conf: add it, or mount as root")]
    AllowOtherForbidden,
    /// The kernel or the helper refused.
    #[error("cannot mount on {}: {reason}; in a container, run it with --cap-add SYS_ADMIN", path.display())]
    Refused {
        /// The mount point.
        path: PathBuf,
        /// The message of the kernel or the helper.
        reason: String,
    },
    /// The watcher cannot be started; without it a killed daemon would leave its mount behind.
    #[error(
        "cannot start the watcher process of the mount: {source}: raise the limit of processes ('ulimit -u')"
    )]
    NoWatcher {
        /// What the system said.
        source: io::Error,
    },
    /// The mount is gone, and open files give errors: mount again.
    #[error("the connection to the kernel broke: {0}; mount again")]
    Broken(#[source] io::Error),
}
