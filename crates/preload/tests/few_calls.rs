//! Small files that see only a few calls: opening them with their host would cost more than it gains.
//!
//! The hooks are linked into this test, as in `model.rs`. There is only one test, since it counts what the
//! process does.

#[path = "../examples/double.rs"]
#[allow(dead_code)]
mod double;

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// How many calls through the kernel cost as much as opening a file, in this test.
const WORTH: u32 = 5;
/// Larger than any small file.
const LARGE_BYTES: u64 = 1 << 20;

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// How many of `reads` reads of the first byte the library served.
fn served(file: &File, reads: u32) -> u64 {
    let before = double::farpool_double_served();
    for _ in 0..reads {
        let mut byte = 0_u8;
        // SAFETY: the buffer is one byte, and lives until the call returns.
        assert_eq!(unsafe { libc::pread(file.as_raw_fd(), (&raw mut byte).cast(), 1, 0) }, 1);
    }
    double::farpool_double_served() - before
}

/// As [`served`], in the child of a fork.
fn served_in_child(file: &File, reads: u32) -> u64 {
    // SAFETY: the child reads, and exits by `_exit`; no other thread of this process is running.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let served = served(file, reads);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(served as i32) };
    }
    let mut status = -1;
    // SAFETY: waits for the child made above; `status` lives until the call returns.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert!(libc::WIFEXITED(status), "the child died");
    libc::WEXITSTATUS(status) as u64
}

#[test]
fn small_file_is_opened_once_it_has_seen_as_many_calls_as_that_costs_and_a_large_one_at_once() {
    let folder = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let path = |name: &str| -> PathBuf { folder.path().join(name) };
    for (name, bytes) in [("small", 100), ("large", LARGE_BYTES)] {
        std::fs::write(path(name), vec![7; bytes as usize]).unwrap();
    }
    double::farpool_double_open_at(WORTH);

    let small = open(&path("small"));
    assert_eq!((served(&small, WORTH - 1), served(&small, 3)), (0, 3));
    assert_eq!(served(&open(&path("large")), 1), 1, "a large file at once");

    let number = open(&path("small"));
    assert_eq!(served(&number, WORTH - 1), 0);
    let fd = number.as_raw_fd();
    drop(number);
    let again = open(&path("small"));
    assert_eq!(again.as_raw_fd(), fd, "the lowest number that is free");
    assert_eq!((served(&again, WORTH - 1), served(&again, 1)), (0, 1), "counted from its own opening on");

    let copied = open(&path("small"));
    assert_eq!(served(&copied, 2), 0);
    // SAFETY: `dup` has just made this descriptor, and nothing else owns it.
    let copy = unsafe { File::from_raw_fd(libc::dup(copied.as_raw_fd())) };
    assert_eq!((served(&copy, WORTH - 3), served(&copied, 1)), (0, 1), "copies have one count");

    let growing = open(&path("growing"));
    growing.write_all_at(&[1], 0).unwrap();
    let before = double::farpool_double_served();
    growing.write_all_at(&[1], LARGE_BYTES).unwrap();
    assert_eq!(double::farpool_double_served(), before + 1, "a file that a call makes large");

    let grown = open(&path("grown"));
    grown.write_all_at(&[1], 0).unwrap();
    assert_eq!(served(&grown, 1), 0);
    open(&path("grown")).set_len(LARGE_BYTES).unwrap();
    assert_eq!(served(&grown, 1), 1, "a file that another opening has made large");

    assert_eq!(served_in_child(&small, 3), 3, "a child uses the count of its parent");
    let counted = open(&path("small"));
    assert_eq!(served(&counted, WORTH - 2), 0);
    assert_eq!(served_in_child(&counted, 3), 2, "a child continues the count");
}
