//! File descriptors: how many a process of ours may have, and how ours survive in other programs (databases
//! that use the C library or the interposer).
//!
//! Such programs use low numbers for their own descriptors, and some close every number that they do not know
//! and go on. If a number of ours then became one of theirs, we would read what is meant for them, or close
//! it.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};

use rustix::process::{Resource, getrlimit, setrlimit};

/// Lowest number for a descriptor that stays open, or half the limit on open files if that is lower.
const FROM: u64 = 1024;

/// Most descriptors of one kind, each with memory mapped: half of the mappings that Linux allows a process
/// (`vm.max_map_count`).
const MOST_OF_A_KIND: u64 = 32_767;

/// Raises the limit on open files of this process as far as it may. The usual limit of 1,024 is there for
/// programs that use `select`.
pub fn raise_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "the limit on open files stays as it is");
    }
}

/// Whether a descriptor just opened leaves enough numbers for what this process cannot do without, such as
/// connections. If not, a descriptor that was opened on request of another process should be closed again.
/// Numbers are given out from the lowest, so this descriptor's number says how many there are.
pub fn leaves_room(descriptor: BorrowedFd<'_>) -> bool {
    let most =
        getrlimit(Resource::Nofile).current.map_or(MOST_OF_A_KIND, |limit| MOST_OF_A_KIND.min(limit / 2));
    u64::try_from(descriptor.as_raw_fd()).is_ok_and(|number| number < most)
}

/// A descriptor that stays open for long in a process whose other code may close it without our
/// knowledge. Dropping it closes the number only if the number still refers to what was opened. For sockets
/// this is certain, since each has its own inode; for an `eventfd` it is only certain that the number refers
/// to a file of such a kind.
#[derive(Debug)]
pub struct Descriptor {
    fd: ManuallyDrop<OwnedFd>,
    identity: Option<Identity>,
}

/// Device and inode: what a number refers to.
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
    /// Moves the descriptor to a high number, which programs do not expect for their own; leaves it as it is
    /// if that fails.
    pub fn out_of_the_way(fd: OwnedFd) -> Self {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let from = FROM.min(limit / 2) as i32;
        let fd = rustix::io::fcntl_dupfd_cloexec(&fd, from).unwrap_or(fd);
        Descriptor { identity: Identity::of(fd.as_fd()), fd: ManuallyDrop::new(fd) }
    }

    /// For the child of a fork: closes the number there, without freeing memory.
    pub fn close_in_child(&self) {
        if self.is_still_ours() {
            // SAFETY: the number is this value's own. Dropping the value later finds that it no longer is.
            unsafe { rustix::io::close(self.fd.as_raw_fd()) };
        }
    }

    /// Whether the number still refers to what was opened.
    pub fn is_still_ours(&self) -> bool {
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
            let _ = fd.into_raw_fd(); // it is closed already, or belongs to the program by now
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
        // SAFETY: the number is only used to ask whether it is open.
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
        // SAFETY: the copy made above, which nothing else closes.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
    }

    #[test]
    fn a_number_that_the_program_has_closed_is_not_closed_again() {
        let (descriptor, number) = ours();
        // SAFETY: closing it behind the back of `descriptor` is what this test is about.
        assert_eq!(unsafe { libc::close(number) }, 0);
        drop(descriptor);
        assert!(!is_open(number));
    }
}
