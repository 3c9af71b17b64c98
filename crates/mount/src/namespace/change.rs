//! Changes of attributes: `chmod`, `chown`, `utimens`, and the times that writing moves.

use std::time::SystemTime;

use super::{Ino, MODE_MASK, Namespace, Outcome};

/// What `setattr` changes; `None` leaves a value alone.
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
    /// Changes attributes, and the time of change to `now`.
    pub fn change(&mut self, ino: Ino, change: Change, now: SystemTime) -> Outcome<()> {
        let inode = self.inode_mut(ino)?;
        let (own, times) = (&mut inode.ownership, &mut inode.times);
        own.mode = change.mode.map_or(own.mode, |mode| mode & MODE_MASK);
        own.uid = change.uid.unwrap_or(own.uid);
        own.gid = change.gid.unwrap_or(own.gid);
        times.accessed = change.accessed.unwrap_or(times.accessed);
        times.modified = change.modified.unwrap_or(times.modified);
        times.changed = now;
        Ok(())
    }

    /// The contents were written at `when`.
    pub fn written(&mut self, ino: Ino, when: SystemTime) -> Outcome<()> {
        let times = &mut self.inode_mut(ino)?.times;
        times.modified = when;
        times.changed = times.changed.max(when);
        Ok(())
    }
}
