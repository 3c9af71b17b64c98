//! Signatures of files: what the file system says of their last change (rules R1 and R2).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::DirEntry;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirEntryExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags, fstat, openat};
use rustix::time::{ClockId, clock_gettime};

use crate::door::DoorFile;
use crate::files::FileId;
use crate::identity::{FdKind, id_of, stat_fd};
use crate::resuming::Signature;
use crate::walk::entries_below;

/// Longer than a tick of the kernel's clock, from which file systems take the times of changes.
pub(crate) const TICK: Duration = Duration::from_millis(50);
/// Longer than a tick of file systems that store whole seconds, or every other one.
const COARSE_TICK: Duration = Duration::from_secs(4);

/// Whether a file is signed whose last change may be followed by another one in the same tick (R2).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unsettled {
    Signed,
    LeftOut,
}

/// The time of a file's last change, in seconds and nanoseconds.
#[derive(Clone, Copy)]
struct Changed(i64, u32);

impl Changed {
    /// Whether a change from now on has another time.
    fn is_settled(self, now: Changed) -> bool {
        let nanoseconds = |time: Changed| i128::from(time.0) * 1_000_000_000 + i128::from(time.1);
        let tick = if self.1 == 0 { COARSE_TICK } else { TICK };
        nanoseconds(now) - nanoseconds(self) > tick.as_nanos() as i128
    }
}

/// The signatures of those files that have a name in the door's directory under which files are cached.
pub(crate) fn of_files(
    door: &DoorFile,
    files: &[FileId],
    unsettled: Unsettled,
) -> BTreeMap<FileId, Signature> {
    entries_of(door, files).filter_map(|entry| sign(&entry, unsettled)).collect()
}

/// The names of these files in the door's directory under which files are cached, as paths from there.
pub(crate) fn paths_of(door: &DoorFile, files: &[FileId]) -> impl Iterator<Item = (FileId, PathBuf)> {
    entries_of(door, files).filter_map(|entry| {
        let path = entry.path().strip_prefix(door.data()).ok()?.to_owned();
        Some((file_at(&entry.path())?.1, path))
    })
}

/// Entries below the door's directory under which files are cached, with the inode number of one of these
/// files. The caller checks which file an entry is.
fn entries_of(door: &DoorFile, files: &[FileId]) -> impl Iterator<Item = DirEntry> {
    let inodes: BTreeSet<u64> = files.iter().map(|id| id.inode).collect();
    entries_below(door.data())
        .filter(move |entry| {
            entry.file_type().is_ok_and(|kind| kind.is_file()) && inodes.contains(&entry.ino())
        })
        .filter(|entry| door.is_cacheable_path(&entry.path()))
}

/// Opens a file without access to its contents (`O_PATH`), and returns it with its id. `None`: there is no
/// regular file.
pub(crate) fn file_at(path: &Path) -> Option<(OwnedFd, FileId)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(CWD, path, flags, Mode::empty()).ok()?;
    let FdKind::File { stamp, .. } = stat_fd(file.as_fd()) else { return None };
    let id = id_of(file.as_fd(), stamp)?;
    Some((file, id))
}

fn sign(entry: &DirEntry, unsettled: Unsettled) -> Option<(FileId, Signature)> {
    // Before the file is looked at: what changes it afterwards is later.
    let now = clock_gettime(ClockId::Realtime);
    let (file, id) = file_at(&entry.path())?;
    let found = fstat(&file).ok()?;
    let changed = Changed(found.st_ctime, found.st_ctime_nsec as u32);
    if unsettled == Unsettled::LeftOut && !changed.is_settled(Changed(now.tv_sec, now.tv_nsec as u32)) {
        return None;
    }
    let told = [id.device, id.inode, id.generation, found.st_size as u64, changed.0 as u64, changed.1.into()];
    let bytes: Vec<u8> = told.iter().flat_map(|word| word.to_ne_bytes()).collect();
    Some((id, crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &bytes).max(1)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_file_has_another_signature_after_each_change() {
        let (doors, data) = (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir().unwrap());
        let door = DoorFile::open_in(doors.path(), data.path()).unwrap();
        std::fs::create_dir(data.path().join("below")).unwrap();
        let path = data.path().join("below/relation");
        let write = |bytes: &[u8]| std::fs::write(&path, bytes).unwrap();
        write(b"one");
        let file = File::open(&path).unwrap();
        let FdKind::File { stamp, .. } = stat_fd(file.as_fd()) else { panic!("a file") };
        let id = id_of(file.as_fd(), stamp).unwrap();
        let signature = |unsettled| of_files(&door, &[id], unsettled).get(&id).copied();
        let settled = || {
            std::thread::sleep(2 * TICK);
            signature(Unsettled::LeftOut).expect("the file has settled")
        };
        let one = settled();
        assert_eq!((settled(), signature(Unsettled::Signed)), (one, Some(one)));
        write(b"two");
        let two = settled();
        assert_ne!(two, one);
        std::fs::rename(&path, data.path().join("relation-wal")).unwrap();
        assert_eq!(signature(Unsettled::Signed), None, "files of this name are not cached");
    }

    #[test]
    fn a_change_is_settled_once_the_next_one_has_another_time() {
        let fine = Changed(100, 7);
        let coarse = Changed(100, 0);
        assert!(!fine.is_settled(Changed(100, 50_000_007)) && fine.is_settled(Changed(100, 50_000_008)));
        assert!(!coarse.is_settled(Changed(104, 0)) && coarse.is_settled(Changed(104, 1)));
        assert!(!fine.is_settled(Changed(99, 0)), "the clock was set back");
    }
}
