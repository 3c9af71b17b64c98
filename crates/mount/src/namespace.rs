//! The namespace: directories, names and attributes of a mount, in the daemon's memory.
//!
//! N1. The link count of an inode is the number of entries that name it (for a directory: its own entry, its
//!     `.`, and the `..` of each directory in it). Every entry names an inode that exists.
//! N2. An inode without a name exists exactly as long as the kernel remembers it or holds it open. The call
//!     that removes it returns its body, so that the caller frees far memory without holding a lock.
//! N3. Exactly one path leads from the root to a directory; no directory lies inside itself.
//! N4. Inode numbers and directory cookies are never reused: a stale number finds nothing, and `readdir`
//!     continues where it stopped, whatever happened in between.
//! N5. A refused operation changes nothing.
//! N6. The memory of names and attributes is counted and bounded, in total and for each user (`budget`).
//! Not here: file contents (`F` stands for them), permissions (the kernel checks them,
//! `default_permissions`), the clock (callers pass `now`), I/O.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::time::SystemTime;

mod budget;
mod change;
mod directory;
mod keeping;
#[cfg(test)]
mod model;
mod rename;
#[cfg(test)]
mod tests;
mod xattr;

use budget::{Account, inode_bytes, name_bytes};
pub use budget::{Budget, INODE_BYTES, NAME_BYTES};
pub use change::Change;
use directory::Directory;
pub use directory::DirectoryEntry;
use keeping::Touched;
pub use keeping::kept_bodies;
pub use rename::RenameMode;
pub use xattr::XattrMode;
use xattr::Xattrs;

/// Most inodes, and most names, at a time. The directory of a database holds thousands. A million take about
/// half a GiB of the daemon's memory; there a runaway `mkdir` must end.
pub const MAX_INODES: usize = 1 << 20;
/// Most names of one file: the limit of ext4, so that no program meets a smaller one here.
pub const MAX_LINKS: u32 = 65_000;
/// Longest name in bytes (`NAME_MAX` of Linux).
pub const MAX_NAME_BYTES: usize = 255;
/// Longest target of a symbolic link in bytes (`PATH_MAX` of Linux without its terminating zero).
pub const MAX_SYMLINK_BYTES: usize = 4095;

/// Permission bits, including set-user-id, set-group-id and sticky.
pub const MODE_MASK: u32 = 0o7777;
const SET_GROUP_ID: u32 = 0o2000;

/// The number of an inode; it is never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ino(pub u64);

impl Ino {
    /// The root directory.
    pub const ROOT: Ino = Ino(1);
}

/// Why the namespace refused an operation. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NamespaceError {
    /// No entry of that name, or the directory was removed.
    #[error("no such file or directory")]
    NotFound,
    /// The kernel named an inode that no longer exists: a bug on one of the two sides.
    #[error("no such inode")]
    Stale,
    /// The name is taken.
    #[error("file exists")]
    Exists,
    /// A directory was needed.
    #[error("not a directory")]
    NotADirectory,
    /// Something other than a directory was needed.
    #[error("is a directory")]
    IsADirectory,
    /// Only an empty directory can be removed or replaced.
    #[error("directory not empty")]
    NotEmpty,
    /// The name is longer than [`MAX_NAME_BYTES`], or the target than [`MAX_SYMLINK_BYTES`].
    #[error("name too long")]
    NameTooLong,
    /// The file has [`MAX_LINKS`] names already.
    #[error("too many links")]
    TooManyLinks,
    /// [`MAX_INODES`], the [`Budget`] or a limit of extended attributes has been reached.
    #[error("no room for another inode or attribute")]
    Full,
    /// The user's share of the [`Budget`] is used up.
    #[error("the user has as many names and attributes as one user may have")]
    OverShare,
    /// A directory would be moved into itself, or the call does not apply to an inode of this kind.
    #[error("invalid argument")]
    Invalid,
    /// A directory has only one name.
    #[error("operation not permitted")]
    NotPermitted,
    /// No extended attribute of that name.
    #[error("no such attribute")]
    NoAttribute,
    /// An extended attribute's name is too long.
    #[error("name of attribute too long")]
    AttributeTooLong,
    /// An extended attribute's value is too large.
    #[error("value of attribute too large")]
    AttributeTooLarge,
}

/// What an inode is. `F` is the body of a regular file.
#[derive(Debug)]
pub enum Kind<F> {
    /// A regular file.
    File(F),
    /// A directory.
    Directory,
    /// A symbolic link to this target.
    Symlink(OsString),
    /// A named pipe; the kernel does everything else.
    Fifo,
    /// A Unix socket; the kernel does everything else.
    Socket,
}

/// Permission bits and owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ownership {
    /// Permission bits within [`MODE_MASK`].
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// When an inode was read, written and changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Times {
    /// Set by `utimens` only; reads do not change it (the mount is `noatime`).
    pub accessed: SystemTime,
    /// When the contents were last written.
    pub modified: SystemTime,
    /// When contents or attributes last changed.
    pub changed: SystemTime,
}

impl Times {
    fn at(now: SystemTime) -> Self {
        Times { accessed: now, modified: now, changed: now }
    }
}

/// The attributes of an inode that `stat` shows, without those that its body knows.
#[derive(Debug)]
pub struct Attributes<'a, F> {
    /// The inode's number.
    pub ino: Ino,
    /// What it is.
    pub kind: &'a Kind<F>,
    /// Permission bits and owner.
    pub ownership: Ownership,
    /// Its times.
    pub times: Times,
    /// How many names it has.
    pub nlink: u32,
}

#[derive(Debug)]
struct Inode<F> {
    kind: Kind<F>,
    /// `Some` for directories only.
    directory: Option<Directory>,
    ownership: Ownership,
    times: Times,
    nlink: u32,
    xattrs: Xattrs,
    /// Bytes charged to its owner.
    charged: usize,
    /// How many times the kernel has been told of the inode, less the times that it has forgotten it.
    lookups: u64,
    /// Open file handles.
    opens: u32,
}

/// All inodes of a mount.
#[derive(Debug)]
pub struct Namespace<F> {
    inodes: HashMap<Ino, Inode<F>>,
    /// Entries of all directories.
    names: usize,
    /// Bytes that the extended attributes of all inodes take.
    xattr_bytes: usize,
    last_ino: u64,
    limit: usize,
    account: Account,
    /// What has changed since the last write to the journal; `None` without a journal.
    touched: Option<Vec<Touched>>,
}

type Outcome<T> = Result<T, NamespaceError>;

impl<F> Namespace<F> {
    /// An empty root directory, and room for `limit` inodes and names ([`MAX_INODES`] outside tests).
    pub fn new(root: Ownership, now: SystemTime, limit: usize) -> Self {
        let root = Inode {
            kind: Kind::Directory,
            directory: Some(Directory::new(Ino::ROOT)),
            ownership: root,
            times: Times::at(now),
            nlink: 2,
            xattrs: Xattrs::default(),
            charged: 0,
            lookups: 1,
            opens: 0,
        };
        let inodes = HashMap::from([(Ino::ROOT, root)]);
        let account = Account::default();
        let mut names = Namespace {
            inodes,
            names: 0,
            xattr_bytes: 0,
            last_ino: Ino::ROOT.0,
            limit,
            account,
            touched: None,
        };
        names.charge_all();
        names
    }

    /// The number of inodes, with or without a name.
    pub fn inodes(&self) -> usize {
        self.inodes.len()
    }

    /// The attributes of an inode.
    pub fn attributes(&self, ino: Ino) -> Outcome<Attributes<'_, F>> {
        let inode = self.inode(ino)?;
        let Inode { kind, ownership, times, nlink, .. } = inode;
        Ok(Attributes { ino, kind, ownership: *ownership, times: *times, nlink: *nlink })
    }

    /// The inode that `name` stands for in `parent`.
    pub fn find(&self, parent: Ino, name: &OsStr) -> Outcome<Ino> {
        check_name(name)?;
        self.directory(parent)?.get(name).ok_or(NamespaceError::NotFound)
    }

    /// Notes that the kernel has been told of the inode. It stays until [`forget`](Self::forget) has been
    /// called for as many times.
    pub fn remember(&mut self, ino: Ino) -> Outcome<()> {
        self.inode_mut(ino)?.lookups += 1;
        Ok(())
    }

    /// Notes that the kernel has forgotten the inode `count` times.
    #[must_use = "an inode may end here: its body is the caller's to free"]
    pub fn forget(&mut self, ino: Ino, count: u64) -> Option<F> {
        let inode = self.inodes.get_mut(&ino)?;
        inode.lookups = inode.lookups.saturating_sub(count);
        self.reap(ino)
    }

    /// Notes that a file handle was opened: the inode stays until it is [released](Self::release).
    pub fn open(&mut self, ino: Ino) -> Outcome<&F> {
        let inode = self.inode_mut(ino)?;
        match &inode.kind {
            Kind::File(body) => {
                inode.opens += 1;
                Ok(body)
            }
            Kind::Directory => Err(NamespaceError::IsADirectory),
            _ => Err(NamespaceError::Invalid),
        }
    }

    /// Notes that a file handle was closed.
    #[must_use = "an inode may end here: its body is the caller's to free"]
    pub fn release(&mut self, ino: Ino) -> Option<F> {
        let inode = self.inodes.get_mut(&ino)?;
        inode.opens = inode.opens.saturating_sub(1);
        self.reap(ino)
    }

    /// Makes an inode under a new name. In a set-group-id directory it takes the directory's group, as on
    /// Linux.
    pub fn make(
        &mut self,
        parent: Ino,
        name: &OsStr,
        kind: Kind<F>,
        ownership: Ownership,
        now: SystemTime,
    ) -> Outcome<Ino> {
        self.check_free(parent, name)?;
        if let Kind::Symlink(target) = &kind
            && target.len() > MAX_SYMLINK_BYTES
        {
            return Err(NamespaceError::NameTooLong);
        }
        if self.inodes.len() >= self.limit || self.names >= self.limit {
            return Err(NamespaceError::Full);
        }
        let is_directory = matches!(kind, Kind::Directory);
        let ownership = self.inherited(parent, ownership, is_directory)?;
        let bytes = inode_bytes(&kind);
        self.account.check(ownership.uid, bytes + name_bytes(name))?;
        self.last_ino += 1;
        let ino = Ino(self.last_ino);
        let directory = is_directory.then(|| Directory::new(parent));
        let nlink = if is_directory { 2 } else { 1 };
        let (times, xattrs) = (Times::at(now), Xattrs::default());
        let (charged, lookups, opens) = (0, 0, 0);
        let inode = Inode { kind, directory, ownership, times, nlink, xattrs, charged, lookups, opens };
        self.inodes.insert(ino, inode);
        self.charge(ino, bytes);
        self.add_entry(parent, name, ino, now);
        Ok(ino)
    }

    /// Gives a file another name.
    pub fn link(&mut self, ino: Ino, parent: Ino, name: &OsStr, now: SystemTime) -> Outcome<()> {
        self.check_free(parent, name)?;
        let inode = self.inode(ino)?;
        if inode.directory.is_some() {
            return Err(NamespaceError::NotPermitted);
        }
        if inode.nlink == 0 {
            return Err(NamespaceError::NotFound);
        }
        if inode.nlink >= MAX_LINKS {
            return Err(NamespaceError::TooManyLinks);
        }
        if self.names >= self.limit {
            return Err(NamespaceError::Full);
        }
        self.account.check(inode.ownership.uid, name_bytes(name))?;
        let inode = self.inode_mut(ino)?;
        inode.nlink += 1;
        inode.times.changed = now;
        self.add_entry(parent, name, ino, now);
        Ok(())
    }

    /// Removes a name that does not stand for a directory.
    pub fn unlink(&mut self, parent: Ino, name: &OsStr, now: SystemTime) -> Outcome<Option<F>> {
        let ino = self.find(parent, name)?;
        if self.inode(ino)?.directory.is_some() {
            return Err(NamespaceError::IsADirectory);
        }
        self.remove_entry(parent, name, now);
        Ok(self.drop_name(ino, now))
    }

    /// Removes an empty directory.
    pub fn rmdir(&mut self, parent: Ino, name: &OsStr, now: SystemTime) -> Outcome<()> {
        let ino = self.find(parent, name)?;
        if !self.directory(ino)?.is_empty() {
            return Err(NamespaceError::NotEmpty);
        }
        self.remove_entry(parent, name, now);
        let body = self.drop_name(ino, now);
        debug_assert!(body.is_none(), "a directory has no body");
        Ok(())
    }

    /// The target of a symbolic link.
    pub fn readlink(&self, ino: Ino) -> Outcome<&OsStr> {
        match &self.inode(ino)?.kind {
            Kind::Symlink(target) => Ok(target),
            _ => Err(NamespaceError::Invalid),
        }
    }

    /// The entries of a directory after `cookie` (zero for all) in the order in which they were made, `.` and
    /// `..` first.
    pub fn entries(&self, ino: Ino, cookie: u64) -> Outcome<impl Iterator<Item = DirectoryEntry<'_>>> {
        Ok(self.directory(ino)?.entries(ino, cookie))
    }

    fn inode(&self, ino: Ino) -> Outcome<&Inode<F>> {
        self.inodes.get(&ino).ok_or(NamespaceError::Stale)
    }

    fn inode_mut(&mut self, ino: Ino) -> Outcome<&mut Inode<F>> {
        self.inodes.get_mut(&ino).ok_or(NamespaceError::Stale)
    }

    fn directory(&self, ino: Ino) -> Outcome<&Directory> {
        self.inode(ino)?.directory.as_ref().ok_or(NamespaceError::NotADirectory)
    }

    /// Checks that a new entry may be made there.
    fn check_free(&self, parent: Ino, name: &OsStr) -> Outcome<()> {
        check_name(name)?;
        if self.directory(parent)?.get(name).is_some() {
            return Err(NamespaceError::Exists);
        }
        self.check_alive(parent)
    }

    /// Checks that the directory has not been removed: nothing is made in such a one.
    fn check_alive(&self, directory: Ino) -> Outcome<()> {
        if self.inode(directory)?.nlink == 0 { Err(NamespaceError::NotFound) } else { Ok(()) }
    }

    fn inherited(&self, parent: Ino, mut own: Ownership, is_directory: bool) -> Outcome<Ownership> {
        own.mode &= MODE_MASK;
        let parent = self.inode(parent)?.ownership;
        if parent.mode & SET_GROUP_ID != 0 {
            own.gid = parent.gid;
            if is_directory {
                own.mode |= SET_GROUP_ID;
            }
        }
        Ok(own)
    }

    /// Adds an entry. The caller has checked that `parent` is a directory without that name, and has counted
    /// the link.
    fn add_entry(&mut self, parent: Ino, name: &OsStr, ino: Ino, now: SystemTime) {
        self.names += 1;
        self.charge(ino, name_bytes(name));
        self.touch(|| Touched::Inode(ino));
        self.touch(|| Touched::Entry(parent, name.to_owned()));
        let child_is_directory = self.adopt(ino, parent);
        let (nlink, directory) = self.edit(parent, now);
        directory.insert(name, ino);
        *nlink += u32::from(child_is_directory);
    }

    /// Removes an entry that the caller has found. The link count of its inode does not change.
    fn remove_entry(&mut self, parent: Ino, name: &OsStr, now: SystemTime) {
        self.names -= 1;
        self.touch(|| Touched::Entry(parent, name.to_owned()));
        let ino = self.directory(parent).ok().and_then(|directory| directory.get(name));
        if let Some(ino) = ino {
            self.discharge(ino, name_bytes(name));
        }
        let child_is_directory = ino.is_some_and(|ino| self.directory(ino).is_ok());
        let (nlink, directory) = self.edit(parent, now);
        directory.remove(name);
        *nlink -= u32::from(child_is_directory);
    }

    /// Sets the parent of a directory; returns whether the inode is one.
    fn adopt(&mut self, ino: Ino, parent: Ino) -> bool {
        let directory = self.inodes.get_mut(&ino).and_then(|inode| inode.directory.as_mut());
        directory.map(|directory| directory.parent = parent).is_some()
    }

    /// The link count and the entries of a directory that is about to change. The caller has checked that it
    /// is one.
    fn edit(&mut self, ino: Ino, now: SystemTime) -> (&mut u32, &mut Directory) {
        self.touch(|| Touched::Inode(ino));
        let inode = self.inodes.get_mut(&ino).expect("the caller has checked the directory");
        inode.times.modified = now;
        inode.times.changed = now;
        (&mut inode.nlink, inode.directory.as_mut().expect("the caller has checked the directory"))
    }

    /// Counts one name less; the caller has removed the entry.
    fn drop_name(&mut self, ino: Ino, now: SystemTime) -> Option<F> {
        self.touch(|| Touched::Inode(ino));
        let inode = self.inodes.get_mut(&ino)?;
        inode.nlink = if inode.directory.is_some() { 0 } else { inode.nlink - 1 };
        inode.times.changed = now;
        self.reap(ino)
    }

    /// Removes an inode that can no longer be reached.
    fn reap(&mut self, ino: Ino) -> Option<F> {
        let inode = self.inodes.get(&ino)?;
        if inode.nlink > 0 || inode.lookups > 0 || inode.opens > 0 {
            return None;
        }
        self.xattr_bytes -= inode.xattrs.bytes();
        let ended = self.inodes.remove(&ino)?;
        self.settle_account(&ended);
        match ended.kind {
            Kind::File(body) => Some(body),
            _ => None,
        }
    }
}

fn check_name(name: &OsStr) -> Outcome<()> {
    if name.len() > MAX_NAME_BYTES { Err(NamespaceError::NameTooLong) } else { Ok(()) }
}
