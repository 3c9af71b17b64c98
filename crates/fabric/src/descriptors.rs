//! Descriptors in processes that are not ours: databases by the C library or the interposer.
//!
//! Programs count on low numbers for their own, and some close all that they do not know and go on. A descriptor of ours that
//! was replaced by one of theirs would have us read what is meant for them.

use std::os::fd::OwnedFd;

use rustix::process::{Resource, getrlimit};

/// Lowest number of a descriptor that stays open, or half the limit on open files if that is lower.
const FROM: u64 = 1024;

/// The same descriptor under a number where no program looks for its own; or as it is, if there is none.
pub fn out_of_the_way(descriptor: OwnedFd) -> OwnedFd {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let from = FROM.min(limit / 2) as i32;
    rustix::io::fcntl_dupfd_cloexec(&descriptor, from).unwrap_or(descriptor)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_descriptor_out_of_the_way_has_a_high_number_and_ends_with_an_exec() {
        let descriptor = out_of_the_way(std::fs::File::open("/dev/null").unwrap().into());
        assert!(descriptor.as_raw_fd() >= 256, "{descriptor:?}");
        assert!(rustix::io::fcntl_getfd(&descriptor).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
}
