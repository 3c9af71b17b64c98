//! A description for which there is no room for a guard: the mount must not continue to count it as
//! registered.
//!
//! It has a process of its own, which runs out of descriptors. The hooks are linked into this test, as in
//! `model.rs`.

#[path = "../examples/double.rs"]
#[allow(dead_code)]
mod double;

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, RawFd};

const OPEN_FILES: u64 = 1024;
/// Guards begin at half the limit.
const GUARDS_FROM: RawFd = OPEN_FILES as RawFd / 2;

fn limit_descriptors() {
    let limit = libc::rlimit { rlim_cur: OPEN_FILES, rlim_max: OPEN_FILES };
    // SAFETY: the buffer is one `rlimit`, and lives until the call returns.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

/// Uses up the numbers that guards could have.
fn take_all_numbers(file: &File) {
    // SAFETY: takes numbers only; the copies are never closed, and nothing else owns them.
    while unsafe { libc::syscall(libc::SYS_fcntl, file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, GUARDS_FROM) } >= 0
    {
    }
}

fn read(file: &File) -> u8 {
    let mut byte = 0_u8;
    // SAFETY: the buffer is one byte, and lives until the call returns.
    assert_eq!(unsafe { libc::pread(file.as_raw_fd(), (&raw mut byte).cast(), 1, 0) }, 1);
    byte
}

fn is_direct(file: &File) -> bool {
    // SAFETY: the call takes and returns numbers only. It bypasses the hook, which would hide the bit.
    let flags = unsafe { libc::syscall(libc::SYS_fcntl, file.as_raw_fd(), libc::F_GETFL) };
    flags as i32 & libc::O_DIRECT != 0
}

#[test]
fn a_description_without_a_guard_is_not_left_registered() {
    limit_descriptors();
    let folder = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, [7; 100]).unwrap();
    let open = || OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let first = open();
    assert_eq!((read(&first), double::farpool_double_served()), (7, 1), "the stand-in knows the file");
    let second = open();
    take_all_numbers(&File::open("/dev/null").unwrap());
    let before = double::farpool_double_given_up();
    assert_eq!((read(&second), double::farpool_double_served()), (7, 1), "the kernel reads");
    assert_eq!(double::farpool_double_given_up(), before + 1);
    assert!(!is_direct(&second), "the kernel's pages are the program's again");
}
