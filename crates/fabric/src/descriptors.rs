//! Descriptors: how many a process of ours may have, and those in processes that are not ours (databases by
//! the C library or the interposer).
//!
//! Such programs count on low numbers for their own, and some close all that they do not know and go on. A
//! descriptor of ours that was replaced by one of theirs would have us read what is meant for them, or close
//! it.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};

use rustix::process::{Resource, getrlimit, setrlimit};

/// Lowest number of a descriptor that stays open, or half the limit on open files if that is lower.
const FROM: u64 = 1024;

/// Most descriptors of one kind, each with memory mapped: half of how many maps Linux gives a process
/// (`vm.max_map_count`).
const MOST_OF_A_KIND: u64 = 32_767;

/// Lets this process have as many descriptors as it may. The usual limit of 1,024 is there for programs that
/// use `select`.
pub fn raise_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "the limit on open files stays as it is");
    }
}

/// Whether a descriptor just made leaves enough of them for what this process cannot do without, such as
/// connections. One that others ask for, one after another, should else be closed again. Numbers are given
/// out from the lowest, so this one's says how many there are.
pub fn leaves_room(descriptor: BorrowedFd<'_>) -> bool {
    let most =
        getrlimit(Resource::Nofile).current.map_or(MOST_OF_A_KIND, |limit| MOST_OF_A_KIND.min(limit / 2));
    u64::try_from(descriptor.as_raw_fd()).is_ok_and(|number| number < most)
}

/// A descriptor that stays open for long in a process which may close it behind our back. Dropping it closes
/// the number only while that still means what was opened: of sockets that is certain, since each has an
/// inode of its own; of an `eventfd` it is that some such thing is there.
#[derive(Debug)]
pub struct Descriptor {
    fd: ManuallyDrop<OwnedFd>,
    identity: Option<Identity>,
}

/// Device and inode: what a number means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    fn of(fd: BorrowedFd<'_>) -> Option<Self> {
        let stat = rustix::fs::fstat(fd).ok()?;
        Some(Identity { device: stat.st_dev, inode: stat.st_ino })
    }
}

impl Descriptor {
    /// The same descriptor under a number where no program looks for its own; or as it is, if there is none.
    pub fn out_of_the_way(fd: OwnedFd) -> Self {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let from = FROM.min(limit / 2) as i32;
        let fd = rustix::io::fcntl_dupfd_cloexec(&fd, from).unwrap_or(fd);
        Descriptor { identity: Identity::of(fd.as_fd()), fd: ManuallyDrop::new(fd) }
    }

    fn is_still_ours(&self) -> bool {
        self.identity.is_some() && self.identity == Identity::of(self.as_fd())
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let is_still_ours = self.is_still_ours();
        // SAFETY: taken once, since nothing follows a drop.
        let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
        if is_still_ours {
            drop(fd);
        } else {
            let _ = fd.into_raw_fd(); // closed already, or the program's by now
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{FromRawFd, RawFd};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn ours() -> (Descriptor, RawFd) {
        let (one, _) = UnixStream::pair().unwrap();
        let descriptor = Descriptor::out_of_the_way(one.into());
        let number = descriptor.as_fd().as_raw_fd();
        (descriptor, number)
    }

    fn is_open(number: RawFd) -> bool {
        // SAFETY: only asked whether it is open.
        Identity::of(unsafe { BorrowedFd::borrow_raw(number) }).is_some()
    }

    #[test]
    fn a_descriptor_of_the_upper_half_leaves_no_room() {
        let file = File::open("/dev/null").unwrap();
        assert!(leaves_room(file.as_fd()));
        let limit = getrlimit(Resource::Nofile).current.unwrap();
        let high = rustix::io::fcntl_dupfd_cloexec(&file, (limit / 2) as i32).unwrap();
        assert!(!leaves_room(high.as_fd()));
    }

    #[test]
    fn a_descriptor_out_of_the_way_has_a_high_number_and_ends_with_an_exec() {
        let (descriptor, number) = ours();
        assert!(number >= 256, "{descriptor:?}");
        assert!(rustix::io::fcntl_getfd(&descriptor).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        drop(descriptor);
        assert!(!is_open(number));
    }

    #[test]
    fn a_number_that_the_program_has_taken_for_its_own_is_left_open() {
        let (descriptor, number) = ours();
        let theirs = File::open("/dev/null").unwrap();
        // SAFETY: the number is `descriptor`'s, as if the program had closed it and used it again.
        assert_eq!(unsafe { libc::dup2(theirs.as_raw_fd(), number) }, number);
        drop(descriptor);
        assert!(is_open(number));
        // SAFETY: the copy made above, which nobody else closes.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
    }

    #[test]
    fn a_number_that_the_program_has_closed_is_not_closed_again() {
        let (descriptor, number) = ours();
        // SAFETY: `descriptor` bears it: that is the claim.
        assert_eq!(unsafe { libc::close(number) }, 0);
        drop(descriptor);
        assert!(!is_open(number));
    }
}
