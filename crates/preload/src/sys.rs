//! System calls made past the library's own hooks: libc's wrappers of the same names would lead back into them.
//!
//! They set `errno` on failure; whoever runs within [`crate::entry`] has it put back.

use std::os::fd::RawFd;

/// `fcntl` with one argument.
pub fn fcntl(fd: RawFd, command: i32, argument: usize) -> i32 {
    // SAFETY: the commands used here take and return numbers; no memory is handed over.
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

/// Closes a descriptor of the library's own. Linux closes it whatever it answers.
pub fn close(fd: RawFd) {
    // SAFETY: the caller owns this descriptor.
    unsafe { libc::syscall(libc::SYS_close, fd) };
}

/// Device and inode of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    /// Device of the file system.
    pub device: u64,
    /// The inode there.
    pub inode: u64,
}

/// Which file a descriptor is open on, from what the kernel knows without asking a mount.
pub fn file_id(fd: RawFd) -> Option<FileId> {
    let mut stat = std::mem::MaybeUninit::<libc::statx>::uninit();
    let how = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: the path is an empty string, the buffer is one `statx`; both are alive, and nobody else has the buffer.
    let answer =
        unsafe { libc::syscall(libc::SYS_statx, fd, c"".as_ptr(), how, libc::STATX_INO, stat.as_mut_ptr()) };
    if answer != 0 {
        return None;
    }
    // SAFETY: the kernel has filled it.
    let stat = unsafe { stat.assume_init() };
    let device = libc::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    Some(FileId { device, inode: stat.stx_ino })
}

/// The calling process, as the kernel says now.
pub fn process_id() -> i32 {
    // SAFETY: takes nothing.
    unsafe { libc::syscall(libc::SYS_getpid) as i32 }
}

/// A soft limit of the process; `u64::MAX` if there is none or it cannot be had.
pub fn soft_limit(resource: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let nothing = std::ptr::null::<libc::rlimit>();
    // SAFETY: the buffer is one `rlimit`, and alive; no new limit is given.
    let answer = unsafe { libc::syscall(libc::SYS_prlimit64, 0, resource, nothing, &raw mut limit) };
    if answer == 0 { limit.rlim_cur } else { u64::MAX }
}
