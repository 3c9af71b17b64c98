//! System calls that bypass the library's own hooks: libc's wrappers of the same names would lead back into
//! them.
//!
//! They set `errno` on failure; [`crate::entry`] restores it for callers within it.

use std::os::fd::RawFd;

/// `fcntl` with one argument.
pub fn fcntl(fd: RawFd, command: i32, argument: usize) -> i32 {
    // SAFETY: the commands used here take and return numbers; no memory is passed.
    unsafe { libc::syscall(libc::SYS_fcntl, fd, command, argument) as i32 }
}

/// The flags of an open file description, if the descriptor is open.
pub fn status_flags(fd: RawFd) -> Option<i32> {
    let flags = fcntl(fd, libc::F_GETFL, 0);
    (flags >= 0).then_some(flags)
}

/// Whether an `exec` closes the descriptor; `None` if it is not open.
pub fn ends_at_exec(fd: RawFd) -> Option<bool> {
    let flags = fcntl(fd, libc::F_GETFD, 0);
    (flags >= 0).then_some(flags & libc::FD_CLOEXEC != 0)
}

/// Closes a descriptor of the library's own. Linux closes it even if the call returns an error.
pub fn close(fd: RawFd) {
    // SAFETY: the caller owns this descriptor.
    unsafe { libc::syscall(libc::SYS_close, fd) };
}

/// Device and inode of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    /// Device of the file system.
    pub device: u64,
    /// The inode in that file system.
    pub inode: u64,
}

/// Facts about an open file that the kernel knows without asking a mount.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Which file it is.
    pub id: FileId,
    /// It is neither a directory nor a special file.
    pub is_regular: bool,
    /// Its size, as the kernel remembers it.
    pub bytes: u64,
}

/// Which file a descriptor is open on.
pub fn file_id(fd: RawFd) -> Option<FileId> {
    facts(fd).map(|facts| facts.id)
}

/// The kind of file system that a descriptor is open on (`f_type`).
pub fn file_system(fd: RawFd) -> Option<i64> {
    let mut system = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the buffer is one `statfs`, lives until the call returns, and is borrowed by nothing else.
    let answer = unsafe { libc::syscall(libc::SYS_fstatfs, fd, system.as_mut_ptr()) };
    // SAFETY: the call succeeded, so the kernel has filled it.
    (answer == 0).then(|| unsafe { system.assume_init() }.f_type)
}

/// The calling thread's `errno`.
pub fn last_error() -> i32 {
    // SAFETY: the thread's own `errno`.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's `errno`.
pub fn set_last_error(errno: i32) {
    // SAFETY: the thread's own `errno`.
    unsafe { *libc::__errno_location() = errno };
}

/// Reads from a file, as `pread`.
pub fn read_at(fd: RawFd, to: &mut [u8], offset: u64) -> std::io::Result<usize> {
    // SAFETY: `to` has room for as many bytes as are asked for, lives until the call returns, and is borrowed
    // by nothing else.
    let read = unsafe { libc::syscall(libc::SYS_pread64, fd, to.as_mut_ptr(), to.len(), offset) };
    usize::try_from(read).map_err(|_| std::io::Error::from_raw_os_error(last_error()))
}

/// Sets the length of a file.
pub fn truncate(fd: RawFd, bytes: libc::off_t) -> i32 {
    // SAFETY: takes numbers only.
    unsafe { libc::syscall(libc::SYS_ftruncate, fd, bytes) as i32 }
}

/// The facts that the kernel knows about an open file.
pub fn facts(fd: RawFd) -> Option<Facts> {
    let mut stat = std::mem::MaybeUninit::<libc::statx>::uninit();
    let how = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: the path is an empty C string, the buffer is one `statx`. Both live until the call returns, and
    // the buffer is borrowed by nothing else.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_statx,
            fd,
            c"".as_ptr(),
            how,
            libc::STATX_INO | libc::STATX_TYPE | libc::STATX_SIZE,
            stat.as_mut_ptr(),
        )
    };
    if answer != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so the kernel has filled it.
    let stat = unsafe { stat.assume_init() };
    let device = libc::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    let is_regular = u32::from(stat.stx_mode) & libc::S_IFMT == libc::S_IFREG;
    Some(Facts { id: FileId { device, inode: stat.stx_ino }, is_regular, bytes: stat.stx_size })
}

/// Bytes of directory entries read at a time; they lie on the stack.
const ENTRIES_BYTES: usize = 2048;
/// Offsets in a directory entry (`linux_dirent64`): of its length, and of its name.
const ENTRY_LENGTH: usize = 16;
const ENTRY_NAME: usize = 19;
/// Without `/proc`, numbers below this one are tried.
const NUMBERS_TRIED: RawFd = 1024;

/// Visits all open descriptors without allocating, since it runs in the children of forks.
pub fn each_open(mut visit: impl FnMut(RawFd)) {
    let how = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: the path is a C string.
    let folder = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, c"/proc/self/fd".as_ptr(), how) };
    let Ok(folder) =
        RawFd::try_from(folder).map_err(drop).and_then(|fd| if fd < 0 { Err(()) } else { Ok(fd) })
    else {
        return (0..NUMBERS_TRIED).for_each(visit);
    };
    let mut entries = [0_u8; ENTRIES_BYTES];
    loop {
        // SAFETY: the buffer has the length that is passed, lives until the call returns, and is borrowed by
        // nothing else.
        let filled =
            unsafe { libc::syscall(libc::SYS_getdents64, folder, entries.as_mut_ptr(), ENTRIES_BYTES) };
        let Ok(filled @ 1..) = usize::try_from(filled) else { break };
        let mut rest = entries.get(..filled).unwrap_or_default();
        while let Some((entry, behind)) = first_entry(rest) {
            if let Some(fd) = number(entry).filter(|fd| *fd != folder) {
                visit(fd);
            }
            rest = behind;
        }
    }
    close(folder);
}

fn first_entry(entries: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = entries.get(ENTRY_LENGTH..ENTRY_LENGTH + 2)?;
    entries.split_at_checked(u16::from_ne_bytes(length.try_into().ok()?).max(1).into())
}

/// The name of an entry, if it is a number.
fn number(entry: &[u8]) -> Option<RawFd> {
    let name = entry.get(ENTRY_NAME..)?.split(|byte| *byte == 0).next()?;
    std::str::from_utf8(name).ok()?.parse().ok()
}

/// The process id of the caller; asks the kernel each time.
pub fn process_id() -> i32 {
    // SAFETY: takes no arguments.
    unsafe { libc::syscall(libc::SYS_getpid) as i32 }
}

/// A soft limit of the process; `u64::MAX` if there is none or it cannot be read.
pub fn soft_limit(resource: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let nothing = std::ptr::null::<libc::rlimit>();
    // SAFETY: the buffer is one `rlimit` and lives until the call returns; no new limit is passed.
    let answer = unsafe { libc::syscall(libc::SYS_prlimit64, 0, resource, nothing, &raw mut limit) };
    if answer == 0 { limit.rlim_cur } else { u64::MAX }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn open_descriptors_are_all_found_and_closed_ones_are_not() {
        let files: Vec<_> = (0..200).map(|_| tempfile::tempfile().unwrap()).collect();
        let closed = files[150].try_clone().unwrap().as_raw_fd();
        let mut found = Vec::new();
        each_open(|fd| found.push(fd));
        assert!(files.iter().all(|file| found.contains(&file.as_raw_fd())));
        assert!(!found.contains(&closed) || files.iter().any(|file| file.as_raw_fd() == closed));
    }
}
