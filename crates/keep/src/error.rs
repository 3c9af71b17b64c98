use std::io;
use std::path::PathBuf;

/// Why a directory's state cannot be used. Each message names its fix; nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeepError {
    /// Another daemon uses the directory.
    #[error(
        "{} is in use by another farpool mount: unmount that one first, or give this one a directory of its \
         own",
        path.display()
    )]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The directory holds keys of far memory, so no other user may have access to it.
    #[error(
        "{} is open to other users or belongs to another user: name a directory of your own, such as \
         /dev/shm/farpool-NAME; it is created if it does not exist",
        path.display()
    )]
    NotPrivate {
        /// The directory.
        path: PathBuf,
    },
    /// Another version of Farpool wrote it.
    #[error(
        "{} holds state of format {found}, and this release of farpool reads format {known}: use the release \
         that wrote it, or delete the directory and, with it, the files that it describes",
        path.display()
    )]
    Version {
        /// The directory.
        path: PathBuf,
        /// What was found.
        found: u32,
        /// What this build reads.
        known: u32,
    },
    /// The state is damaged: using it could mix up files.
    #[error(
        "the state in {} is damaged ({what}): delete the directory to start empty; the files that it \
         describes are lost",
        path.display()
    )]
    Damaged {
        /// The directory.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// The directory cannot be read or written.
    #[error(
        "cannot use {}: {source}; name a directory that this user may write to, best on a tmpfs such as /run \
         or /dev/shm",
        path.display()
    )]
    Unusable {
        /// The directory, or a file in it.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}
