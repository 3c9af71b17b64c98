//! A node's identity. It survives restarts if the node has a state directory.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::Path;

use farpool_control::own;
use farpool_wire::NodeId;

const FILE: &str = "node";
const HEADER: &str = "farpool node identity 1";
/// The lock has a file of its own, since the identity file is replaced at each start.
const LOCK: &str = "lock";

/// A node's id, and the number of the start under this id.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Identity {
    pub(crate) node: NodeId,
    /// Never repeats under one id, since epochs are derived from it.
    pub(crate) incarnation: u32,
}

/// Holds the state folder for this process alone (flock). The kernel releases the lock when the process ends,
/// however it ends.
#[derive(Debug)]
pub(crate) struct Held {
    _lock: File,
}

/// A new random id.
pub(crate) fn fresh() -> io::Result<Identity> {
    let node = NodeId(getrandom::u64().map_err(io::Error::other)?);
    Ok(Identity { node, incarnation: 1 })
}

/// The id stored in `directory`, with the next incarnation, or a fresh id, which is stored there. The process
/// keeps the folder locked: two processes under one id would answer for each other's leases.
pub(crate) fn next_life(directory: &Path) -> io::Result<(Identity, Held)> {
    own::make_folder(directory)?;
    let held = hold(directory)?;
    let path = directory.join(FILE);
    let identity = match fs::read_to_string(&path) {
        Ok(text) => {
            let known = parse(&text).ok_or_else(|| {
                let message = format!("{} is not a node's identity file; move it away", path.display());
                io::Error::new(io::ErrorKind::InvalidData, message)
            })?;
            let incarnation = known.incarnation.checked_add(1);
            let incarnation = incarnation
                .ok_or_else(|| io::Error::other("the node's incarnations are used up; remove its state"))?;
            Identity { incarnation, ..known }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => fresh()?,
        Err(error) => return Err(error),
    };
    keep(directory, &path, identity)?;
    Ok((identity, held))
}

fn hold(directory: &Path) -> io::Result<Held> {
    let lock = own::open_file(&directory.join(LOCK))?;
    match lock.try_lock() {
        Ok(()) => {
            own::keep_private(&lock)?;
            Ok(Held { _lock: lock })
        }
        Err(TryLockError::WouldBlock) => {
            let text = "another node uses this folder; end that one, or choose another folder with --state";
            Err(io::Error::new(io::ErrorKind::ResourceBusy, text))
        }
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Stores the identity durably before it is used: an incarnation used twice would repeat epochs.
fn keep(directory: &Path, path: &Path, identity: Identity) -> io::Result<()> {
    let draft = directory.join(format!("{FILE}.new"));
    let mut file = own::open_file(&draft)?;
    file.set_len(0)?;
    writeln!(file, "{HEADER}\n{} {}", identity.node, identity.incarnation)?;
    file.sync_all()?;
    fs::rename(&draft, path)?;
    File::open(directory)?.sync_all()
}

fn parse(text: &str) -> Option<Identity> {
    let (node, incarnation) = text.strip_prefix(HEADER)?.trim().split_once(' ')?;
    Some(Identity {
        node: NodeId(u64::from_str_radix(node, 16).ok()?),
        incarnation: incarnation.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_keeps_the_id_and_raises_the_incarnation() {
        let directory = tempfile::tempdir().unwrap();
        let (first, held) = next_life(directory.path()).unwrap();
        drop(held);
        let (second, _held) = next_life(directory.path()).unwrap();
        assert_eq!(second, Identity { node: first.node, incarnation: first.incarnation + 1 });
    }

    #[test]
    fn a_folder_in_use_is_refused_and_its_incarnation_is_unchanged() {
        let directory = tempfile::tempdir().unwrap();
        let (_, _held) = next_life(directory.path()).unwrap();
        let kept = fs::read_to_string(directory.path().join(FILE)).unwrap();
        let error = next_life(directory.path()).unwrap_err().to_string();
        assert!(error.contains("another node") && error.contains("--state"), "{error}");
        assert_eq!(fs::read_to_string(directory.path().join(FILE)).unwrap(), kept);
    }

    #[test]
    fn other_users_cannot_open_the_files_of_a_node() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("state");
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        drop(next_life(&directory).unwrap());
        assert_eq!(mode(&directory), 0o700);
        // An earlier release created the lock file with this mode.
        fs::set_permissions(directory.join(LOCK), fs::Permissions::from_mode(0o644)).unwrap();
        drop(next_life(&directory).unwrap());
        assert_eq!([mode(&directory.join(LOCK)), mode(&directory.join(FILE))], [0o600, 0o600]);
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
        let error = next_life(&directory).unwrap_err().to_string();
        assert!(error.contains("chmod go-w"), "{error}");
    }

    #[test]
    fn a_damaged_identity_file_is_an_error_that_names_it() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(FILE), "farpool node identity 1\nxyz").unwrap();
        let error = next_life(directory.path()).unwrap_err().to_string();
        assert!(error.contains("identity file"), "{error}");
    }

    #[test]
    fn an_identity_that_cannot_be_read_or_has_no_incarnation_left_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(FILE);
        let used_up = format!("{HEADER}\n{} {}\n", NodeId(7), u32::MAX);
        for (kept, reason) in [(&b"\xFF"[..], "UTF-8"), (used_up.as_bytes(), "used up")] {
            fs::write(&file, kept).unwrap();
            let error = next_life(directory.path()).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
            assert_eq!(fs::read(&file).unwrap(), kept);
        }
    }
}
