//! Directories with caches must not overlap: a program announces its changes to one cache only.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::door::{DOOR_PREFIX, door_name};

/// A directory above or below `data` to which a daemon has attached a cache. Doors lie in `doors`.
pub(crate) fn overlapping(doors: &Path, data: &Path) -> Option<PathBuf> {
    let above = data.ancestors().skip(1).find(|above| has_daemon(doors, above)).map(Path::to_owned);
    above.or_else(|| find_below(doors, data))
}

/// The name of a directory's door. `None`: the directory cannot be looked at.
fn name_of(directory: &Path) -> Option<String> {
    // The directory itself: a link to one elsewhere does not make that one overlap.
    let found = std::fs::symlink_metadata(directory).ok().filter(std::fs::Metadata::is_dir)?;
    Some(door_name(&found))
}

/// Whether a directory has a cache. What this user may not open does not count.
fn has_daemon(doors: &Path, directory: &Path) -> bool {
    name_of(directory).is_some_and(|name| is_locked(&doors.join(name)))
}

fn is_locked(door: &Path) -> bool {
    File::open(door)
        .is_ok_and(|door| farpool_keep::lock_exclusive(&door, Duration::ZERO).is_ok_and(|locked| !locked))
}

/// A directory below `data` that has a cache. Looks through the directories only if there are other caches.
fn find_below(doors: &Path, data: &Path) -> Option<PathBuf> {
    let own = name_of(data);
    let names =
        std::fs::read_dir(doors).ok()?.flatten().filter_map(|name| name.file_name().into_string().ok());
    let others: Vec<String> = names
        .filter(|name| {
            name.starts_with(DOOR_PREFIX) && Some(name) != own.as_ref() && is_locked(&doors.join(name))
        })
        .collect();
    let mut left = if others.is_empty() { Vec::new() } else { vec![data.to_owned()] };
    while let Some(directory) = left.pop() {
        for below in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = below.path();
            let Some(name) = name_of(&path) else { continue };
            if others.contains(&name) {
                return Some(path);
            }
            left.push(path);
        }
    }
    None
}

#[cfg(test)]
mod tests {
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
}
