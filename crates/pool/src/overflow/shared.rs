//! The file of a region of the overflow directory, as another process of its host uses it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use farpool_fabric::Descriptor;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::OverflowRegion;

/// A region's file that the owner of the directory has passed to this process. Transfers are done at once, by
/// the calling thread: it waits for the disk as it would for a file of its own.
#[derive(Debug)]
pub struct SharedFile(Descriptor);

impl SharedFile {
    /// A file that the owner has passed.
    pub fn new(file: OwnedFd) -> SharedFile {
        SharedFile(Descriptor::out_of_the_way(file))
    }

    /// Refuses a transfer that this process cannot do. The program may have closed the descriptor, and its
    /// number may stand for a file of the program. And a write beyond `RLIMIT_FSIZE` would end the process.
    fn check(&self, end: u64) -> io::Result<()> {
        let is_too_far = || getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < end);
        if self.0.is_still_ours() && !is_too_far() { Ok(()) } else { Err(io::ErrorKind::NotConnected.into()) }
    }

    // Raw system calls: under `farpool run`, `pread` and `pwrite` of the C library are the interposer's.

    fn read_all(&self, mut offset: u64, mut to: &mut [u8]) -> io::Result<()> {
        while !to.is_empty() {
            match rustix::io::pread(&self.0, &mut *to, offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    to = &mut to[read..];
                    offset += read as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn write_all(&self, mut offset: u64, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            match rustix::io::pwrite(&self.0, data, offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    data = &data[written..];
                    offset += written as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

impl OverflowRegion for SharedFile {
    fn read<'a>(&'a self, offset: u64, to: &'a mut [u8]) -> LocalBoxFuture<'a, io::Result<()>> {
        async move {
            self.check(0)?;
            self.read_all(offset, to)
        }
        .boxed_local()
    }

    fn write<'a>(&'a self, offset: u64, data: &'a [u8]) -> LocalBoxFuture<'a, io::Result<()>> {
        async move {
            self.check(offset + data.len() as u64)?;
            self.write_all(offset, data)
        }
        .boxed_local()
    }

    /// Only the owner gives a region up.
    fn discard(&self) {}

    /// Not if the program has closed the descriptor: its number may stand for a file of the program.
    fn guests_may_use(&self) -> bool {
        self.0.is_still_ours()
    }

    fn abandon(&self) {
        self.0.close_in_child();
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    /// The caller asks the owner instead, which logs what fails there.
    fn log_failure(&self, _: &str) {}
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd};

    use rustix::process::{Rlimit, setrlimit};

    use super::*;

    fn run<T>(future: impl Future<Output = T>) -> T {
        futures_util::FutureExt::now_or_never(future).expect("it does not wait")
    }

    #[test]
    fn what_is_written_is_read_again_and_what_is_not_there_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(100_000).unwrap();
        let shared = SharedFile::new(file.try_clone().unwrap().into());
        run(shared.write(50_000, &[7; 20_000])).unwrap();
        let mut found = vec![0; 30_000];
        run(shared.read(45_000, &mut found)).unwrap();
        let expected = [vec![0; 5_000], vec![7; 20_000], vec![0; 5_000]].concat();
        assert!(found == expected);
        // The owner has given the storage up.
        file.set_len(0).unwrap();
        assert_eq!(run(shared.read(45_000, &mut found)).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_file_whose_descriptor_the_program_has_closed_is_not_used() {
        let file = tempfile::tempfile().unwrap(); // kept, so that no other test's file gets its inode
        let shared = SharedFile::new(file.try_clone().unwrap().into());
        assert!(shared.guests_may_use());
        let number = shared.file().unwrap().as_raw_fd();
        // SAFETY: to close it behind the back of `shared` is what this test is about.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
        assert!(!shared.guests_may_use());
        let refused = [run(shared.write(0, &[1])), run(shared.read(0, &mut [1]))];
        assert!(refused.iter().all(|it| it.as_ref().unwrap_err().kind() == io::ErrorKind::NotConnected));
    }

    #[test]
    fn a_write_beyond_the_limit_on_the_size_of_files_is_refused() {
        let limit = 1 << 40; // beyond what other tests of this process write
        let shared = SharedFile::new(tempfile::tempfile().unwrap().into());
        let before = getrlimit(Resource::Fsize);
        setrlimit(Resource::Fsize, Rlimit { current: Some(limit), ..before }).unwrap();
        assert!(shared.check(limit).is_ok() && shared.check(limit + 1).is_err());
        assert_eq!(run(shared.write(limit, &[1])).unwrap_err().kind(), io::ErrorKind::NotConnected);
        setrlimit(Resource::Fsize, before).unwrap();
        assert!(shared.check(limit + 1).is_ok());
    }

    #[test]
    fn a_file_that_is_abandoned_is_closed() {
        let file = tempfile::tempfile().unwrap(); // as above
        let shared = SharedFile::new(file.try_clone().unwrap().into());
        shared.abandon();
        assert!(!shared.guests_may_use());
    }
}
