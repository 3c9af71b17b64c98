//! Do two descriptors name the same open file description?
//!
//! Linux 6.10 and later answer in a fraction of a microsecond (`F_DUPFD_QUERY`), older kernels in some
//! microseconds (`kcmp`). Where neither is allowed, nothing is accelerated.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::sys;

/// `F_DUPFD_QUERY` of `linux/fcntl.h`: 1 if both descriptors name the same description.
const F_DUPFD_QUERY: i32 = 1024 + 3;
/// `KCMP_FILE` of `linux/kcmp.h`: 0 if both descriptors name the same description.
const KCMP_FILE: i32 = 0;

const BY_QUERY: u8 = 0;
const BY_KCMP: u8 = 1;

/// How this kernel is asked. The byte changes only once, from the first way to the second, so it orders
/// nothing.
static WAY: AtomicU8 = AtomicU8::new(BY_QUERY);

/// Whether both descriptors are open and name the same description.
pub fn same(one: RawFd, other: RawFd) -> bool {
    if WAY.load(Ordering::Relaxed) == BY_KCMP {
        return same_by_kcmp(one, other);
    }
    match sys::fcntl(one, F_DUPFD_QUERY, other as usize) {
        1 => true,
        0 => false,
        // A kernel that does not know the command returns `EINVAL` for open descriptors. A kernel that knows
        // it never returns `EINVAL` for closed ones.
        _ if sys::last_error() == libc::EINVAL => {
            WAY.store(BY_KCMP, Ordering::Relaxed);
            same_by_kcmp(one, other)
        }
        _ => false,
    }
}

fn same_by_kcmp(one: RawFd, other: RawFd) -> bool {
    let process = sys::process_id();
    // SAFETY: takes numbers only.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_kcmp,
            process,
            process,
            KCMP_FILE,
            one as libc::c_ulong,
            other as libc::c_ulong,
        )
    };
    answer == 0
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn copies_of_a_descriptor_are_the_same_and_a_second_open_is_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let copy = file.as_file().try_clone().unwrap();
        let second = File::open(file.path()).unwrap();
        for same in [same, same_by_kcmp] {
            assert!(same(file.as_file().as_raw_fd(), copy.as_raw_fd()));
            assert!(!same(file.as_file().as_raw_fd(), second.as_raw_fd()));
            assert!(!same(file.as_file().as_raw_fd(), -1));
            assert!(!same(-1, file.as_file().as_raw_fd()));
        }
    }
}
