//! The Unix socket through which processes of this host map a node's memory.
//!
//! S1. Every user of the host may connect: only the key of a region gives access to it.
//! S2. The path appears only when the socket is ready for all users: the socket is bound and gets its mode in
//!     a folder that no other user can enter, and is then renamed into place. (Setting a mode by path
//!     elsewhere may change another file, and the umask is shared by the whole process.)
//! S3. No other user can change the folder of the socket, or add to it. So none can put another socket in its
//!     place, not even after the node has ended. The sticky bit does not help: it guards the socket only
//!     while it exists. Clients of a node that has just ended connect again, send their keys, and take
//!     whatever process answers there for the node, until a lease is not renewed.

use std::fs::{DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use farpool_control::own;
use farpool_fabric::MAX_SOCKET_PATH_BYTES;

/// Read and write for all users, which is what `connect` asks for.
const SOCKET_MODE: u32 = 0o666;

/// Binds a socket path; replaces a socket on which no process listens any more.
pub(crate) fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let folder = own::folder_of(path);
    own::check_folder(folder)?;
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::new(ErrorKind::AlreadyExists, "there is a file that is not a socket"));
        }
        Ok(_) if UnixStream::connect(path).is_ok() => {
            return Err(io::Error::new(ErrorKind::AddrInUse, "another node listens there"));
        }
        _ => {}
    }
    let hidden = Hidden::make(folder)?;
    let bytes = path.as_os_str().len().max(hidden.socket().as_os_str().len());
    if bytes > MAX_SOCKET_PATH_BYTES {
        let text = format!("the socket's path has {bytes} bytes; the limit is {MAX_SOCKET_PATH_BYTES}");
        return Err(io::Error::new(ErrorKind::InvalidFilename, text));
    }
    let listener = UnixListener::bind(hidden.socket())?;
    std::fs::set_permissions(hidden.socket(), Permissions::from_mode(SOCKET_MODE))?;
    std::fs::rename(hidden.socket(), path)?;
    Ok(listener)
}

/// A folder that only this process uses, beside the place where the socket is to be. It is removed when
/// dropped.
struct Hidden(PathBuf);

impl Hidden {
    fn make(folder: &Path) -> io::Result<Self> {
        // A process may start several nodes at the same time.
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed); // only has to be unique; pairs with nothing
        let hidden = Hidden(folder.join(format!(".{}-{number}", std::process::id())));
        hidden.clear(); // a killed process that had this process id may have left it
        DirBuilder::new().mode(0o700).create(&hidden.0)?;
        Ok(hidden)
    }

    fn socket(&self) -> PathBuf {
        self.0.join("s")
    }

    fn clear(&self) {
        // Usually neither exists. Anything else in the folder is not ours to remove: creating the folder then
        // fails, and the error says so.
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
    }

    #[test]
    fn a_path_of_107_bytes_is_bound_and_a_longer_one_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let name_bytes = 107 - directory.path().as_os_str().len() - 1;
        let longest = directory.path().join("n".repeat(name_bytes));
        let _living = bind_unix(&longest).unwrap();
        UnixStream::connect(&longest).unwrap();
        let error = bind_unix(&directory.path().join("n".repeat(name_bytes + 1))).unwrap_err().to_string();
        assert!(error.contains("108 bytes") && error.contains("107"), "{error}");
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
    fn a_socket_is_open_to_all_users_as_soon_as_its_path_exists_and_leaves_no_other_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.sock");
        let _living = bind_unix(&path).unwrap();
        assert_eq!(mode(&path), SOCKET_MODE);
        UnixStream::connect(&path).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_in_which_others_may_swap_the_socket_is_refused_and_nothing_there_is_touched() {
        for (folder_mode, fix) in
            [(0o777, "chmod go-w"), (0o1777, "a folder of your own"), (0o770, "chmod go-w")]
        {
            let directory = tempfile::tempdir().unwrap();
            let secret = directory.path().join("secret");
            std::fs::write(&secret, "").unwrap();
            std::fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
            std::fs::set_permissions(directory.path(), Permissions::from_mode(folder_mode)).unwrap();
            let error = bind_unix(&directory.path().join("node.sock")).unwrap_err().to_string();
            assert!(error.contains(fix), "{error}");
            assert_eq!((mode(&secret), std::fs::read_dir(directory.path()).unwrap().count()), (0o600, 1));
        }
    }
}
