//! The budget of the daemon's memory for names and attributes: in total, and for each user.
//!
//! U1. The owner of an inode is charged for all that it takes: the inode, its names, the target of a link,
//!     its extended attributes. So the user that runs out is the one that can remove inodes, wherever their
//!     names are.
//! U2. A change that would exceed a bound is refused before anything changes. The exception is `chown`, where
//!     an administrator has decided: the new owner is charged in any case.

use std::collections::HashMap;
use std::ffi::OsStr;

use super::{Ino, Inode, Kind, Namespace, NamespaceError, Outcome};

/// Roughly the bytes that an inode takes: itself, its place in the table, a file's body and its places in the
/// tables of the file store.
pub const INODE_BYTES: usize = 768;
/// Roughly the bytes that a name takes beside its own: two places in its directory.
pub const NAME_BYTES: usize = 128;
/// The budget of a mount without a limit: more than [`MAX_INODES`](super::MAX_INODES) with names of usual
/// length and all extended attributes take.
pub const MAX_METADATA_BYTES: usize = 2 << 30;
/// The budget is one part in this many of a mount's limit of far memory, in addition to that limit.
pub const METADATA_PART: u64 = 8;
/// Each user may have one part in this many of the budget, except root and the user that mounts.
const SHARE: usize = 4;

/// The most memory that names and attributes may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Budget {
    /// In total.
    pub bytes: usize,
    /// The user that mounts. The bound of a user's share does not apply to it, nor to root.
    pub host: u32,
}

impl Budget {
    /// The budget of a mount with this limit of far memory.
    pub fn of(limit_bytes: Option<u64>, host: u32) -> Self {
        let part = |limit| usize::try_from(limit / METADATA_PART).unwrap_or(usize::MAX);
        Budget { bytes: limit_bytes.map_or(MAX_METADATA_BYTES, part).min(MAX_METADATA_BYTES), host }
    }

    fn share_of(&self, uid: u32) -> usize {
        if uid == 0 || uid == self.host { self.bytes } else { self.bytes / SHARE }
    }
}

impl Default for Budget {
    fn default() -> Self {
        Budget::of(None, 0)
    }
}

/// The bytes charged at present.
#[derive(Debug, Default)]
pub(super) struct Account {
    budget: Budget,
    bytes: usize,
    users: HashMap<u32, usize>,
}

impl Account {
    /// Checks that a user may have `more` bytes.
    pub(super) fn check(&self, uid: u32, more: usize) -> Outcome<()> {
        let had = self.users.get(&uid).copied().unwrap_or(0);
        if self.bytes + more > self.budget.bytes {
            Err(NamespaceError::Full)
        } else if had + more > self.budget.share_of(uid) {
            Err(NamespaceError::OverShare)
        } else {
            Ok(())
        }
    }

    fn add(&mut self, uid: u32, bytes: usize) {
        self.bytes += bytes;
        *self.users.entry(uid).or_default() += bytes;
    }

    fn remove(&mut self, uid: u32, bytes: usize) {
        self.bytes -= bytes;
        if let Some(had) = self.users.get_mut(&uid) {
            *had -= bytes;
            if *had == 0 {
                self.users.remove(&uid); // so that the map stays as small as the number of users with files
            }
        }
    }
}

/// Bytes that a name takes.
pub(super) fn name_bytes(name: &OsStr) -> usize {
    NAME_BYTES + name.len()
}

/// Bytes that an inode takes without names and extended attributes.
pub(super) fn inode_bytes<F>(kind: &Kind<F>) -> usize {
    match kind {
        Kind::Symlink(target) => INODE_BYTES + target.len(),
        _ => INODE_BYTES,
    }
}

impl<F> Namespace<F> {
    /// Bounds the memory that names and attributes may take from now on.
    pub fn limit_to(&mut self, budget: Budget) {
        self.account.budget = budget;
    }

    /// The bytes that names and attributes take, and the most that they may take.
    pub fn metadata_bytes(&self) -> (usize, usize) {
        (self.account.bytes, self.account.budget.bytes)
    }

    /// Charges an inode's owner.
    pub(super) fn charge(&mut self, ino: Ino, bytes: usize) {
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.charged += bytes;
            self.account.add(inode.ownership.uid, bytes);
        }
    }

    /// Reduces the charge of an inode's owner.
    pub(super) fn discharge(&mut self, ino: Ino, bytes: usize) {
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.charged -= bytes;
            self.account.remove(inode.ownership.uid, bytes);
        }
    }

    /// Cancels the whole charge of an inode that was removed.
    pub(super) fn settle_account(&mut self, ended: &Inode<F>) {
        self.account.remove(ended.ownership.uid, ended.charged);
    }

    /// Moves the charge for an inode to its new owner.
    pub(super) fn pass_on(&mut self, from: u32, to: u32, bytes: usize) {
        self.account.remove(from, bytes);
        self.account.add(to, bytes);
    }

    /// Counts all charges from scratch.
    pub(super) fn charge_all(&mut self) {
        self.inodes.values_mut().for_each(|inode| inode.charged = 0);
        self.account = Account { budget: self.account.budget, ..Account::default() };
        let charges = self.all_charges();
        charges.into_iter().for_each(|(ino, bytes)| self.charge(ino, bytes));
    }

    /// What each inode takes, counted from scratch.
    fn all_charges(&self) -> HashMap<Ino, usize> {
        let own = |inode: &Inode<F>| inode_bytes(&inode.kind) + inode.xattrs.bytes();
        let mut charges: HashMap<Ino, usize> =
            self.inodes.iter().map(|(ino, inode)| (*ino, own(inode))).collect();
        for (ino, inode) in &self.inodes {
            let entries = inode.directory.iter().flat_map(|directory| directory.named(*ino));
            for entry in entries {
                *charges.entry(entry.ino).or_default() += name_bytes(entry.name);
            }
        }
        charges
    }

    /// U1, counted from scratch.
    #[cfg(test)]
    pub(super) fn check_account(&self) {
        let charges = self.all_charges();
        for (ino, inode) in &self.inodes {
            assert_eq!(inode.charged, charges[ino], "{ino:?}");
        }
        assert_eq!(self.account.bytes, charges.values().sum::<usize>());
        let mut users = HashMap::new();
        for inode in self.inodes.values() {
            *users.entry(inode.ownership.uid).or_default() += inode.charged;
        }
        assert_eq!(self.account.users, users);
    }
}
