//! Which file a descriptor means, as the kernel says.
//!
//! A process may close a descriptor and get the same number for another file, in ways that no library sees.
//! So the kernel is asked at each call, by one `statx`. A file's id costs another system call: a thread
//! remembers it for as long as the descriptor has the same *stamp*: device, inode and time of creation. A new
//! file that gets the inode of an unlinked one has the same stamp only if both were created within one tick
//! of the clock. No page of the first one was admitted by then (N2).

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::null;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FileType, makedev};
use rustix::io::Errno;

use crate::files::FileId;

/// Most bytes of a file handle (`MAX_HANDLE_SZ`).
const MAX_HANDLE_BYTES: usize = 128;

/// What tells open files apart quickly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct InodeStamp {
    device: u64,
    inode: u64,
    /// Seconds and nanoseconds.
    created: (i64, u32),
}

/// Longer than a tick of any file system's clock, in seconds.
const TICK_S: i64 = 2;

impl InodeStamp {
    /// Whether no later file gets it.
    pub(crate) fn is_unique(&self) -> bool {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse).tv_sec;
        self.created.0 < now - TICK_S
    }
}

/// What a descriptor means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FdKind {
    /// A regular file that can be told from others.
    File {
        stamp: InodeStamp,
        /// How many names it has: none once it was unlinked.
        names: u32,
    },
    /// Nothing that is ever cached: no regular file, or one on a file system that records no births. All
    /// processes see this alike.
    NotCached,
    /// The kernel does not say.
    Unknown,
}

/// Whether the kernel is older than 6.11 and needs an empty path. Newer kernels take a null pointer, which
/// saves the copy of the path: half the time of the call.
static NEEDS_PATH: AtomicBool = AtomicBool::new(false);

/// Which file a descriptor means.
pub(crate) fn stat_fd(fd: BorrowedFd<'_>) -> FdKind {
    // Relaxed: the flag guards nothing.
    let needs_path = NEEDS_PATH.load(Ordering::Relaxed);
    let answer = statx(fd, if needs_path { c"".as_ptr() } else { null() });
    let found = match answer {
        Ok(found) => found,
        Err(Errno::FAULT) if !needs_path => {
            NEEDS_PATH.store(true, Ordering::Relaxed);
            return stat_fd(fd);
        }
        Err(Errno::BADF) => return FdKind::NotCached, // the call itself will fail
        Err(_) => return FdKind::Unknown,
    };
    let is_regular = FileType::from_raw_mode(found.stx_mode.into()) == FileType::RegularFile;
    if !is_regular || found.stx_mask & libc::STATX_BTIME == 0 {
        return FdKind::NotCached;
    }
    let stamp = InodeStamp {
        device: makedev(found.stx_dev_major, found.stx_dev_minor),
        inode: found.stx_ino,
        created: (found.stx_btime.tv_sec, found.stx_btime.tv_nsec),
    };
    FdKind::File { stamp, names: found.stx_nlink }
}

/// `statx(2)` of an open file. `path` is null or empty.
fn statx(fd: BorrowedFd<'_>, path: *const libc::c_char) -> Result<libc::statx, Errno> {
    let wanted = libc::STATX_TYPE | libc::STATX_INO | libc::STATX_NLINK | libc::STATX_BTIME;
    // Not synchronised: the numbers that are asked for do not change.
    let how = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    let mut found = MaybeUninit::zeroed();
    let answer =
        // SAFETY: `path` is null or a constant C string. `found` has room for the answer, lives until the
        // call returns, and nothing else borrows it.
        unsafe { libc::syscall(libc::SYS_statx, fd.as_raw_fd(), path, how, wanted, found.as_mut_ptr()) };
    if answer != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    // SAFETY: `found` was zeroed, and `statx` has only integers: every value is valid.
    Ok(unsafe { found.assume_init() })
}

/// As `struct file_handle` of `name_to_handle_at(2)`, with room for the longest.
#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    handle: [u8; MAX_HANDLE_BYTES],
}

/// The id of a file with this stamp. `None`: the kernel does not say.
///
/// Its generation is a checksum of the file's birth and of its handle, which for most file systems has a
/// number that differs among the files which had the same inode. File systems without handles have the birth
/// alone.
pub(crate) fn id_of(fd: BorrowedFd<'_>, stamp: InodeStamp) -> Option<FileId> {
    let mut handle = Handle { bytes: MAX_HANDLE_BYTES as u32, kind: 0, handle: [0; MAX_HANDLE_BYTES] };
    let mut mount = 0_i32;
    // SAFETY: the path is an empty C string. The handle has room for as many bytes as it says, and `mount`
    // for one number. All live until the call returns, and nothing else borrows them.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            fd.as_raw_fd(),
            c"".as_ptr(),
            &raw mut handle,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    let mut told = Vec::with_capacity(2 * size_of::<u64>() + MAX_HANDLE_BYTES);
    told.extend(stamp.created.0.to_ne_bytes());
    told.extend(stamp.created.1.to_ne_bytes());
    if answer == 0 {
        told.extend(handle.kind.to_ne_bytes());
        told.extend(handle.handle.get(..handle.bytes as usize)?);
    } else if std::io::Error::last_os_error().raw_os_error() != Some(libc::EOPNOTSUPP) {
        return None;
    }
    let generation = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &told);
    Some(FileId { device: stamp.device, inode: stamp.inode, generation })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    fn stamp_of(file: &File) -> (InodeStamp, u32) {
        match stat_fd(file.as_fd()) {
            FdKind::File { stamp, names } => (stamp, names),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn two_descriptors_of_a_file_have_one_id_and_files_that_follow_each_other_have_two() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("relation");
        let mut ids = Vec::new();
        for _ in 0..50 {
            let (file, other) = (File::create(&path).unwrap(), File::open(&path).unwrap());
            let (stamp, names) = stamp_of(&file);
            assert_eq!((stamp_of(&other), names), ((stamp, 1), 1));
            let id = id_of(file.as_fd(), stamp).unwrap();
            assert_eq!(id_of(other.as_fd(), stamp), Some(id));
            assert!(!ids.contains(&id), "{id:?} was used before");
            ids.push(id);
            std::fs::remove_file(&path).unwrap();
            assert_eq!(stamp_of(&file).1, 0);
        }
    }

    #[test]
    fn what_is_no_regular_file_is_not_cached() {
        let (reader, writer) = std::io::pipe().unwrap();
        assert_eq!(stat_fd(reader.as_fd()), FdKind::NotCached);
        assert_eq!(stat_fd(writer.as_fd()), FdKind::NotCached);
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(stat_fd(File::open(dir.path()).unwrap().as_fd()), FdKind::NotCached);
    }
}
