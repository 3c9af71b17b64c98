//! A directory of far files: the FUSE file system behind `farpool mount`.
//!
//! - [`check_mountpoint`] (or [`MountConfig::check`]) says before anything is leased whether the mount can work.
//! - [`start_watcher`] starts a small child while the process still has one thread; it sees to it that even a
//!   killed daemon leaves no mount behind.
//! - [`run`] mounts and serves until told to stop.
//!
//! ```text
//! fs         requests and replies                  worker   a thread's session, panics contained
//! namespace  directories, names, attributes (pure) body, handles   files and open files
//! flusher    has the kernel write back              mount    from making to end
//! guests     processes that work on files directly
//! keeping    names and attributes that a successor finds again
//! attach, helper, watcher, mountpoint, mountinfo       making and unmaking
//! ```
//! Not here: where far memory comes from (crate `pool`), what it holds (crate `file`), the command line.

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
