//! Extended attributes of class `user`. Other classes (`security`, `system` with its access lists, `trusted`)
//! are not kept; their callers get the error that they expect.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::SystemTime;

use fuser::{Errno, ReplyXattr};

use super::{FarFs, Outcome};
use crate::errno::Failure;
use crate::namespace::{Ino, XattrMode};

const USER_CLASS: &[u8] = b"user.";

impl FarFs {
    pub(super) fn set_xattr(&self, ino: Ino, name: &OsStr, value: &[u8], flags: i32) -> Outcome<()> {
        self.check_class(name)?;
        let mode = match flags {
            0 => XattrMode::Set,
            libc::XATTR_CREATE => XattrMode::Create,
            libc::XATTR_REPLACE => XattrMode::Replace,
            _ => return Err(Errno::EINVAL.into()),
        };
        if self.obeyed(ino, name, value)? {
            return Ok(());
        }
        Ok(self.names_mut()?.set_xattr(ino, name, value, mode, SystemTime::now())?)
    }

    pub(super) fn get_xattr(&self, ino: Ino, name: &OsStr) -> Outcome<Vec<u8>> {
        self.check_class(name)?;
        if let Some(answer) = self.answered(ino, name)? {
            return Ok(answer);
        }
        Ok(self.names()?.xattr(ino, name)?.to_vec())
    }

    /// All names, each with a terminating zero.
    pub(super) fn list_xattrs(&self, ino: Ino) -> Outcome<Vec<u8>> {
        self.check_kept()?;
        let names = self.names()?;
        let mut list = Vec::new();
        for name in names.xattr_names(ino)? {
            list.extend_from_slice(name.as_bytes());
            list.push(0);
        }
        Ok(list)
    }

    pub(super) fn remove_xattr(&self, ino: Ino, name: &OsStr) -> Outcome<()> {
        self.check_class(name)?;
        Ok(self.names_mut()?.remove_xattr(ino, name, SystemTime::now())?)
    }

    fn check_class(&self, name: &OsStr) -> Outcome<()> {
        self.check_kept()?;
        match name.as_bytes().strip_prefix(USER_CLASS) {
            None => Err(Errno::EOPNOTSUPP.into()),
            Some([]) => Err(Errno::EINVAL.into()),
            Some(_) => Ok(()),
        }
    }

    /// Fails with ENOSYS where attributes are not kept. It tells the kernel not to ask again, and the caller
    /// that they are not supported.
    fn check_kept(&self) -> Outcome<()> {
        if self.keeps_xattrs { Ok(()) } else { Err(Errno::ENOSYS.into()) }
    }
}

/// Replies with the bytes if they fit, or with their number if `size` is 0.
pub(super) fn send_bytes(reply: ReplyXattr, size: u32, result: Outcome<Vec<u8>>) {
    match result {
        Ok(bytes) if size == 0 => reply.size(bytes.len() as u32),
        Ok(bytes) if bytes.len() <= size as usize => reply.data(&bytes),
        Ok(_) => reply.error(Errno::ERANGE),
        Err(Failure(errno)) => reply.error(errno),
    }
}
