//! Extended attributes: small values by name, kept with the inode and dropped with it.
//!
//! X1. The memory of extended attributes is bounded, per inode, in total, and together with names for each
//!     user (`budget`): no user can fill the daemon's memory with them.
//! Not here: which classes of names are allowed (`fs`).

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::time::SystemTime;

use super::{Ino, Namespace, NamespaceError, Outcome, Touched};

/// Longest name in bytes (`XATTR_NAME_MAX` of Linux).
pub const MAX_XATTR_NAME_BYTES: usize = 255;
/// Largest value in bytes (`XATTR_SIZE_MAX` of Linux).
pub const MAX_XATTR_VALUE_BYTES: usize = 64 << 10;
/// Bytes of all names of an inode with their terminating zeros: the most that Linux lists (`XATTR_LIST_MAX`).
pub const MAX_XATTR_LIST_BYTES: usize = 64 << 10;
/// Bytes of names and values of one inode: one value of the largest size and a few more. The limit of ext4 is
/// lower.
pub const MAX_INODE_XATTR_BYTES: usize = 256 << 10;
/// Bytes of names and values of a mount: a small part of what [`MAX_INODES`](super::MAX_INODES) take, enough
/// for a label of 64 bytes on each.
pub const MAX_XATTR_BYTES: usize = 128 << 20;
/// Roughly the bytes of an entry beside its name and value: allocations and its place in a tree.
const ENTRY_BYTES: usize = 64;

/// What setting an attribute does, depending on whether it exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum XattrMode {
    /// Makes or replaces it.
    Set,
    /// Makes it; an error if it exists (`XATTR_CREATE`).
    Create,
    /// Replaces it; an error if it does not exist (`XATTR_REPLACE`).
    Replace,
}

/// The attributes of one inode.
#[derive(Debug, Default)]
pub(super) struct Xattrs {
    values: BTreeMap<OsString, Box<[u8]>>,
    bytes: usize,
    list_bytes: usize,
}

impl Xattrs {
    /// The bytes of all attributes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn get(&self, name: &OsStr) -> Option<&[u8]> {
        self.values.get(name).map(|value| &**value)
    }

    /// Adds an attribute that an earlier process had, where all inodes' attributes take `total` bytes.
    /// Returns the new total; `None` if there is no room, or the attribute exists.
    pub(super) fn enter(&mut self, name: &OsStr, value: &[u8], total: usize) -> Option<usize> {
        let (bytes, list_bytes) = (self.bytes + bytes_of(name, value), self.list_bytes + name.len() + 1);
        let total = total + bytes_of(name, value);
        let fits = name.len() <= MAX_XATTR_NAME_BYTES
            && value.len() <= MAX_XATTR_VALUE_BYTES
            && bytes <= MAX_INODE_XATTR_BYTES
            && list_bytes <= MAX_XATTR_LIST_BYTES
            && total <= MAX_XATTR_BYTES
            && !self.values.contains_key(name);
        if !fits {
            return None;
        }
        self.values.insert(name.to_owned(), value.into());
        (self.bytes, self.list_bytes) = (bytes, list_bytes);
        Some(total)
    }

    fn remove(&mut self, name: &OsStr) -> bool {
        let removed = self.values.remove(name);
        if let Some(value) = &removed {
            self.bytes -= bytes_of(name, value);
            self.list_bytes -= name.len() + 1;
        }
        removed.is_some()
    }
}

fn bytes_of(name: &OsStr, value: &[u8]) -> usize {
    name.len() + value.len() + ENTRY_BYTES
}

impl<F> Namespace<F> {
    /// The value of an attribute.
    pub fn xattr(&self, ino: Ino, name: &OsStr) -> Outcome<&[u8]> {
        let value = self.inode(ino)?.xattrs.values.get(name);
        value.map(|value| &**value).ok_or(NamespaceError::NoAttribute)
    }

    /// The names of all attributes of an inode.
    pub fn xattr_names(&self, ino: Ino) -> Outcome<impl Iterator<Item = &OsStr>> {
        Ok(self.inode(ino)?.xattrs.values.keys().map(OsString::as_os_str))
    }

    /// Sets an attribute.
    pub fn set_xattr(
        &mut self,
        ino: Ino,
        name: &OsStr,
        value: &[u8],
        mode: XattrMode,
        now: SystemTime,
    ) -> Outcome<()> {
        if name.len() > MAX_XATTR_NAME_BYTES {
            return Err(NamespaceError::AttributeTooLong);
        }
        if value.len() > MAX_XATTR_VALUE_BYTES {
            return Err(NamespaceError::AttributeTooLarge);
        }
        self.touch(|| Touched::Xattr(ino, name.to_owned()));
        self.touch(|| Touched::Inode(ino));
        let total = self.xattr_bytes;
        let inode = self.inodes.get_mut(&ino).ok_or(NamespaceError::Stale)?;
        let xattrs = &mut inode.xattrs;
        let old = xattrs.values.get(name).map(|old| bytes_of(name, old));
        match (mode, old) {
            (XattrMode::Create, Some(_)) => return Err(NamespaceError::Exists),
            (XattrMode::Replace, None) => return Err(NamespaceError::NoAttribute),
            _ => {}
        }
        let (new, old_bytes) = (bytes_of(name, value), old.unwrap_or(0));
        let bytes = xattrs.bytes - old_bytes + new;
        let list_bytes = xattrs.list_bytes + if old.is_none() { name.len() + 1 } else { 0 };
        let total = total - old_bytes + new;
        if bytes > MAX_INODE_XATTR_BYTES || list_bytes > MAX_XATTR_LIST_BYTES || total > MAX_XATTR_BYTES {
            return Err(NamespaceError::Full);
        }
        self.account.check(inode.ownership.uid, new.saturating_sub(old_bytes))?;
        xattrs.values.insert(name.to_owned(), value.into());
        (xattrs.bytes, xattrs.list_bytes) = (bytes, list_bytes);
        inode.times.changed = now;
        self.xattr_bytes = total;
        self.discharge(ino, old_bytes);
        self.charge(ino, new);
        Ok(())
    }

    /// Removes an attribute.
    pub fn remove_xattr(&mut self, ino: Ino, name: &OsStr, now: SystemTime) -> Outcome<()> {
        self.touch(|| Touched::Xattr(ino, name.to_owned()));
        self.touch(|| Touched::Inode(ino));
        let inode = self.inode_mut(ino)?;
        let before = inode.xattrs.bytes;
        if !inode.xattrs.remove(name) {
            return Err(NamespaceError::NoAttribute);
        }
        let freed = before - inode.xattrs.bytes;
        inode.times.changed = now;
        self.xattr_bytes -= freed;
        self.discharge(ino, freed);
        Ok(())
    }
}
