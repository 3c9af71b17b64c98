//! A directory of far files: the FUSE file system behind `farpool mount`.
//!
//! - [`check_mountpoint`] (or [`MountConfig::check`]) checks that the mount can work, before any memory is
//!   leased.
//! - [`start_watcher`] starts a small child process, while this process still has one thread. The child
//!   removes the mount if the daemon is killed.
//! - [`run`] mounts, and serves requests until it is told to stop.
//!
//! ```text
//! fs         requests and replies                  worker   a thread's session; contains panics
//! namespace  directories, names, attributes (pure) body, handles   files and open files
//! flusher    has the kernel write back              mount    the life of a mount
//! guests     direct clients: processes that work on files without the kernel
//! keeping    names and attributes that survive a restart
//! attach, helper, watcher, mountpoint, mountinfo       mounting and unmounting
//! ```
//! Not here: where far memory comes from (crate `pool`), the contents of files (crate `file`), the command
//! line.

mod attach;
mod body;
mod errno;
mod error;
mod flusher;
mod fs;
mod guests;
mod handles;
mod helper;
mod keeping;
mod mount;
mod mountinfo;
mod mountpoint;
mod namespace;
mod watcher;
mod worker;

pub use error::MountError;
pub use keeping::{KeptMount, kept_files};
pub use mount::{Acceleration, MAX_THREADS, MountConfig, run};
pub use mountpoint::check_mountpoint;
pub use watcher::{Watcher, start_watcher};
