//! The system's error numbers for this crate's errors.

use farpool_file::FileError;
use fuser::Errno;

use crate::handles::NoHandle;
use crate::namespace::NamespaceError;

/// An error number with the conversions that `?` needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure(pub(crate) Errno);

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Failure(errno)
    }
}

impl From<NoHandle> for Failure {
    fn from(_: NoHandle) -> Self {
        Failure(Errno::ENFILE)
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        Failure(match error {
            FileError::NoSpace | FileError::TooFewNodes { .. } => Errno::ENOSPC,
            FileError::TooLarge => Errno::EFBIG,
            FileError::Short => Errno::ENFILE,
            // Lost, damaged, unavailable, or on a disk that fails: the data cannot be read or written.
            _ => Errno::EIO,
        })
    }
}

impl From<NamespaceError> for Failure {
    fn from(error: NamespaceError) -> Self {
        use NamespaceError as E;
        Failure(match error {
            E::NotFound => Errno::ENOENT,
            E::Stale => Errno::from_i32(libc::ESTALE),
            E::Exists => Errno::EEXIST,
            E::NotADirectory => Errno::ENOTDIR,
            E::IsADirectory => Errno::EISDIR,
            E::NotEmpty => Errno::ENOTEMPTY,
            E::NameTooLong => Errno::ENAMETOOLONG,
            E::TooManyLinks => Errno::EMLINK,
            E::Full => Errno::ENOSPC,
            E::OverShare => Errno::EDQUOT,
            E::Invalid => Errno::EINVAL,
            E::NotPermitted => Errno::EPERM,
            E::NoAttribute => Errno::ENODATA,
            E::AttributeTooLong => Errno::ERANGE,
            E::AttributeTooLarge => Errno::E2BIG,
        })
    }
}
