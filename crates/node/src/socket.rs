//! The socket by which processes of this host fetch memory.
//!
//! S1. Anyone on the host may connect: regions open only to their keys.
//! S2. Its path is there only once it is ready for all: it is bound and given its mode in a folder that nobody else can enter,
//!     and then moved to its place. (A mode that is set by path elsewhere may meet another file; the umask is the whole process's.)
//! S3. Nobody else can change the folder it lies in, and so put a socket of theirs in its place.

use std::fs::{DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use farpool_control::own;

/// Longest path of a Unix socket without its final zero (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// Read and write, which is what connecting takes, for all.
const SOCKET_MODE: u32 = 0o666;

/// Binds a socket path, over a socket that nobody listens on any more.
pub(crate) fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let folder = own::folder_of(path);
    own::check_folder(folder)?;
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::new(ErrorKind::AlreadyExists, "there is a file that is no socket"));
        }
        Ok(_) if UnixStream::connect(path).is_ok() => {
            return Err(io::Error::new(ErrorKind::AddrInUse, "another node listens there"));
        }
        _ => {}
    }
    let hidden = Hidden::make(folder)?;
    let bytes = path.as_os_str().len().max(hidden.socket().as_os_str().len());
    if bytes > SOCKET_PATH_MAX {
        let text = format!("a socket's path has at most {SOCKET_PATH_MAX} bytes, and this one {bytes}");
        return Err(io::Error::new(ErrorKind::InvalidFilename, text));
    }
    let listener = UnixListener::bind(hidden.socket())?;
    std::fs::set_permissions(hidden.socket(), Permissions::from_mode(SOCKET_MODE))?;
    std::fs::rename(hidden.socket(), path)?;
    Ok(listener)
}

/// A folder for this process alone, beside the place where the socket is to be; gone when dropped.
struct Hidden(PathBuf);

impl Hidden {
    fn make(folder: &Path) -> io::Result<Self> {
        // A process may have several nodes, which begin at the same time.
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed); // nothing else is read or written by it
        let hidden = Hidden(folder.join(format!(".{}-{number}", std::process::id())));
        hidden.clear(); // of a process of this id that was killed
        DirBuilder::new().mode(0o700).create(&hidden.0)?;
        Ok(hidden)
    }

    fn socket(&self) -> PathBuf {
        self.0.join("s")
    }

    fn clear(&self) {
        // Neither is there, as a rule; what else lies there is not ours to remove, and making the folder will say so.
        let _ = std::fs::remove_file(self.socket());
        let _ = std::fs::remove_dir(&self.0);
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_socket_left_by_a_dead_node_is_taken_over_and_a_living_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.sock");
        drop(UnixListener::bind(&path).unwrap());
        let living = bind_unix(&path).unwrap();
        assert!(bind_unix(&path).is_err());
        drop(living);
        std::fs::write(directory.path().join("file"), "precious").unwrap();
        assert!(bind_unix(&directory.path().join("file")).is_err());
        let error = bind_unix(&directory.path().join("n".repeat(108))).unwrap_err().to_string();
        assert!(error.contains("107"), "{error}");
    }

    #[test]
    fn nodes_of_one_process_bind_their_sockets_in_one_folder_at_the_same_time() {
        let directory = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let folder = directory.path();
                scope.spawn(move || {
                    for number in 0..50 {
                        bind_unix(&folder.join(format!("{thread}-{number}"))).unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_socket_is_for_all_from_the_moment_it_is_there_and_nothing_lies_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.sock");
        let _living = bind_unix(&path).unwrap();
        assert_eq!(mode(&path), SOCKET_MODE);
        UnixStream::connect(&path).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_in_which_others_may_swap_the_socket_is_refused_and_nothing_there_is_touched() {
        for folder_mode in [0o777, 0o1777, 0o770] {
            let directory = tempfile::tempdir().unwrap();
            let secret = directory.path().join("secret");
            std::fs::write(&secret, "").unwrap();
            std::fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
            std::fs::set_permissions(directory.path(), Permissions::from_mode(folder_mode)).unwrap();
            let error = bind_unix(&directory.path().join("node.sock")).unwrap_err().to_string();
            assert!(error.contains("chmod go-w"), "{error}");
            assert_eq!((mode(&secret), std::fs::read_dir(directory.path()).unwrap().count()), (0o600, 1));
        }
    }
}
