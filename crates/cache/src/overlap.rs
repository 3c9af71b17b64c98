//! Directories with caches must not overlap: a program announces its changes to one cache only.

use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::door::{DOOR_PREFIX, LOCK_PATIENCE, door_name, is_locked};
use crate::walk::entries_below;

/// Most directories below another one that are looked at.
const MAX_DIRECTORIES: usize = 1 << 16;
/// Pause between two looks at a door that is locked.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A directory above or below `data` to which a daemon has attached a cache. Doors lie in `doors`. Doors that
/// this user may not open do not count.
pub(crate) fn overlapping(doors: &Path, data: &Path) -> Option<PathBuf> {
    let above = data.ancestors().skip(1).find(|above| is_attached(doors, above)).map(Path::to_owned);
    above.or_else(|| find_below(doors, data))
}

/// What a directory is. `None`: it cannot be looked at, or it is something else. A link to a directory
/// elsewhere does not make that one overlap.
fn look_at(directory: &Path) -> Option<Metadata> {
    std::fs::symlink_metadata(directory).ok().filter(Metadata::is_dir)
}

/// Whether a directory has a cache. Commands have the lock of a door for a moment, daemons for long.
fn is_attached(doors: &Path, directory: &Path) -> bool {
    let Some(found) = look_at(directory) else { return false };
    let give_up_at = Instant::now() + LOCK_PATIENCE;
    while is_door_locked(&doors.join(door_name(&found)), found.uid()) {
        if Instant::now() >= give_up_at {
            return true;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    false
}

/// Whether this is a door that the owner of the files may have made, and is locked.
fn is_door_locked(path: &Path, owner: u32) -> bool {
    // Any user may have put something there: opening a FIFO would wait for a writer.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let Ok(door) = File::options().read(true).custom_flags(flags).open(path) else { return false };
    let is_door = door.metadata().is_ok_and(|found| found.is_file() && found.uid() == owner);
    is_door && is_locked(&door).unwrap_or(false)
}

/// A directory below `data` that has a cache. Looks through the directories only if there are other doors.
fn find_below(doors: &Path, data: &Path) -> Option<PathBuf> {
    let names =
        std::fs::read_dir(doors).ok()?.flatten().filter_map(|name| name.file_name().into_string().ok());
    let own = look_at(data).map(|found| door_name(&found));
    let others: BTreeSet<String> =
        names.filter(|name| name.starts_with(DOOR_PREFIX) && Some(name) != own.as_ref()).collect();
    if others.is_empty() {
        return None;
    }
    let directories =
        entries_below(data).map(|entry| entry.path()).filter_map(|path| Some((look_at(&path)?, path)));
    directories
        .take(MAX_DIRECTORIES)
        .find(|(found, path)| others.contains(&door_name(found)) && is_attached(doors, path))
        .map(|(_, path)| path)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, mknodat};

    use super::*;
    use crate::door::DoorFile;

    #[test]
    fn a_directory_above_or_below_overlaps_while_it_has_a_daemon() {
        let (doors, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let whole = data.path().canonicalize().unwrap();
        let [outer, middle, inner, beside] = ["a", "a/b", "a/b/c", "a/d"].map(|name| whole.join(name));
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::create_dir(&beside).unwrap();
        let door = DoorFile::open_in(doors.path(), &middle).unwrap();
        let found = |of: &Path| overlapping(doors.path(), of);
        assert_eq!([&outer, &middle, &inner].map(|of| found(of)), [None, None, None]);
        assert!(door.lock().unwrap());
        assert_eq!([&outer, &inner].map(|of| found(of)), [Some(middle.clone()), Some(middle.clone())]);
        assert_eq!([&middle, &beside].map(|of| found(of)), [None, None]);
        std::os::unix::fs::symlink(&middle, beside.join("link")).unwrap();
        assert_eq!(found(&beside), None);
        drop(door);
        assert_eq!(found(&outer), None);
    }

    #[test]
    fn what_is_no_door_is_neither_waited_for_nor_believed() {
        let (doors, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let below = data.path().join("below");
        std::fs::create_dir(&below).unwrap();
        let door = doors.path().join(door_name(&look_at(&below).unwrap()));
        mknodat(CWD, &door, FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(overlapping(doors.path(), data.path()), None);
        std::fs::remove_file(&door).unwrap();
        let file = File::create(&door).unwrap();
        file.lock().unwrap();
        let owner = file.metadata().unwrap().uid();
        assert!(is_door_locked(&door, owner) && !is_door_locked(&door, owner + 1));
    }
}
