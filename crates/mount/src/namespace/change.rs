//! Changes of attributes: `chmod`, `chown`, `utimens`, and the times that a write updates.

use std::time::SystemTime;

use super::{Ino, MODE_MASK, Namespace, Outcome, SET_GROUP_ID, Touched};

const SET_USER_ID: u32 = 0o4000;
const GROUP_EXECUTE: u32 = 0o010;

/// What `setattr` changes; `None` leaves a value as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Change {
    /// New permission bits.
    pub mode: Option<u32>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New time of access.
    pub accessed: Option<SystemTime>,
    /// New time of modification.
    pub modified: Option<SystemTime>,
}

impl<F> Namespace<F> {
    /// Changes attributes, and sets the time of change to `now`. A change of owner clears privileges.
    pub fn change(&mut self, ino: Ino, change: Change, now: SystemTime) -> Outcome<()> {
        if change.mode.is_none() && (change.uid.is_some() || change.gid.is_some()) {
            self.drop_privileges(ino)?;
        }
        self.touch(|| Touched::Inode(ino));
        let inode = self.inode_mut(ino)?;
        let (own, times) = (&mut inode.ownership, &mut inode.times);
        let (before, charged) = (own.uid, inode.charged);
        own.mode = change.mode.map_or(own.mode, |mode| mode & MODE_MASK);
        own.uid = change.uid.unwrap_or(own.uid);
        own.gid = change.gid.unwrap_or(own.gid);
        let after = own.uid;
        times.accessed = change.accessed.unwrap_or(times.accessed);
        times.modified = change.modified.unwrap_or(times.modified);
        times.changed = now;
        self.pass_on(before, after, charged);
        Ok(())
    }

    /// Clears the set-user-id bit of a file, and the set-group-id bit if that gives privileges. Called
    /// when the file has got another owner or other contents.
    pub fn drop_privileges(&mut self, ino: Ino) -> Outcome<()> {
        self.touch(|| Touched::Inode(ino));
        let inode = self.inode_mut(ino)?;
        if inode.directory.is_none() {
            let mode = &mut inode.ownership.mode;
            *mode &= !SET_USER_ID;
            if *mode & GROUP_EXECUTE != 0 {
                *mode &= !SET_GROUP_ID;
            }
        }
        Ok(())
    }

    /// Notes that the contents were written at `when`.
    pub fn written(&mut self, ino: Ino, when: SystemTime) -> Outcome<()> {
        self.touch(|| Touched::Inode(ino));
        let times = &mut self.inode_mut(ino)?.times;
        times.modified = when;
        times.changed = times.changed.max(when);
        Ok(())
    }
}
