//! Rename: a move that may replace, a move that replaces nothing, or an exchange.

use std::ffi::OsStr;
use std::time::SystemTime;

use super::{Ino, Namespace, NamespaceError, Outcome, Touched, check_name, name_bytes};

/// What a rename does with an entry that exists at the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RenameMode {
    /// It is replaced atomically.
    Replace,
    /// The rename fails.
    NoReplace,
    /// The two change places.
    Exchange,
}

/// One end of a rename.
#[derive(Clone, Copy)]
struct Place<'a> {
    parent: Ino,
    name: &'a OsStr,
}

impl<F> Namespace<F> {
    /// Moves an entry; returns the body of a file that was replaced and has no more users.
    pub fn rename(
        &mut self,
        from: (Ino, &OsStr),
        to: (Ino, &OsStr),
        mode: RenameMode,
        now: SystemTime,
    ) -> Outcome<Option<F>> {
        let (from, to) = (Place { parent: from.0, name: from.1 }, Place { parent: to.0, name: to.1 });
        let moved = self.find(from.parent, from.name)?;
        check_name(to.name)?;
        let there = self.directory(to.parent)?.get(to.name);
        self.check_alive(to.parent)?;
        self.check_not_inside(moved, to.parent)?;
        match (mode, there) {
            (RenameMode::NoReplace, Some(_)) => return Err(NamespaceError::Exists),
            (RenameMode::Exchange, None) => return Err(NamespaceError::NotFound),
            (RenameMode::Exchange, Some(other)) => self.check_not_inside(other, from.parent)?,
            (RenameMode::Replace, Some(other)) if other != moved => self.check_replaceable(moved, other)?,
            _ => {}
        }
        match there {
            // Two names of one file: POSIX says that both stay.
            Some(other) if other == moved => Ok(None),
            Some(other) if mode == RenameMode::Exchange => {
                self.exchange(from, to, (moved, other), now);
                Ok(None)
            }
            Some(other) => {
                self.remove_entry(to.parent, to.name, now);
                let ended = self.drop_name(other, now);
                self.relocate(from, to, moved, now);
                Ok(ended)
            }
            None => {
                self.relocate(from, to, moved, now);
                Ok(None)
            }
        }
    }

    /// Moves an entry to a name that is free.
    fn relocate(&mut self, from: Place<'_>, to: Place<'_>, moved: Ino, now: SystemTime) {
        self.remove_entry(from.parent, from.name, now);
        self.add_entry(to.parent, to.name, moved, now);
        self.mark_changed(moved, now);
    }

    fn exchange(&mut self, from: Place<'_>, to: Place<'_>, (moved, other): (Ino, Ino), now: SystemTime) {
        for (place, leaves, comes) in [(from, moved, other), (to, other, moved)] {
            self.touch(|| Touched::Entry(place.parent, place.name.to_owned()));
            let left_directory = self.directory(leaves).is_ok();
            let came_directory = self.adopt(comes, place.parent);
            let (nlink, directory) = self.edit(place.parent, now);
            *nlink = *nlink + u32::from(came_directory) - u32::from(left_directory);
            directory.replace(place.name, comes);
            self.discharge(leaves, name_bytes(place.name));
            self.charge(comes, name_bytes(place.name));
            self.mark_changed(comes, now);
        }
    }

    fn check_replaceable(&self, moved: Ino, other: Ino) -> Outcome<()> {
        match (self.directory(moved).is_ok(), self.directory(other)) {
            (true, Err(_)) => Err(NamespaceError::NotADirectory),
            (false, Ok(_)) => Err(NamespaceError::IsADirectory),
            (true, Ok(directory)) if !directory.is_empty() => Err(NamespaceError::NotEmpty),
            _ => Ok(()),
        }
    }

    /// Checks that a directory does not move into itself or below itself.
    fn check_not_inside(&self, moved: Ino, target: Ino) -> Outcome<()> {
        if self.directory(moved).is_err() {
            return Ok(());
        }
        let mut at = target;
        loop {
            if at == moved {
                return Err(NamespaceError::Invalid);
            }
            if at == Ino::ROOT {
                return Ok(());
            }
            at = self.directory(at)?.parent;
        }
    }

    fn mark_changed(&mut self, ino: Ino, now: SystemTime) {
        self.touch(|| Touched::Inode(ino));
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.times.changed = now;
        }
    }
}
