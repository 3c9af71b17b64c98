//! Requests about names and attributes.

use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{Errno, INodeNo, RenameFlags, ReplyDirectory, ReplyDirectoryPlus, ReplyStatfs};

use super::stat::{Stat, file_type};
use super::volume::{inherit, is_directory};
use super::{FarFs, GENERATION, Outcome};
use crate::body::Body;
use crate::errno::Failure;
use crate::namespace::{
    Change, INODE_BYTES, Ino, Kind, MAX_INODES, MAX_NAME_BYTES, NAME_BYTES, Namespace, Ownership, RenameMode,
};

/// Entries prepared at a time: slightly more than fit into a `getdents` buffer of 32 KiB. The kernel asks
/// again for the rest.
const LISTING_BATCH: usize = 256;
/// Unit of `statfs`; any divisor of a region's size would do.
const STATFS_BLOCK_BYTES: u32 = 4096;
/// `.` and `..`: the kernel does not remember their inodes when it lists them.
const DOT_ENTRIES: [&str; 2] = [".", ".."];

fn stat_of(names: &Namespace<Arc<Body>>, ino: Ino) -> Outcome<Stat> {
    Ok(Stat::new(&names.attributes(ino)?))
}

impl FarFs {
    pub(super) fn look_up(&self, parent: Ino, name: &OsStr) -> Outcome<Stat> {
        let mut names = self.names_mut()?;
        let ino = names.find(parent, name)?;
        names.remember(ino)?;
        stat_of(&names, ino)
    }

    pub(super) fn stat(&self, ino: Ino) -> Outcome<Stat> {
        stat_of(&*self.names()?, ino)
    }

    /// Changes the size first: if that fails, nothing else must have changed.
    pub(super) fn set_attributes(
        &self,
        ino: Ino,
        size: Option<u64>,
        change: Change,
        now: SystemTime,
    ) -> Outcome<Stat> {
        let body = self.stat(ino)?.body().cloned();
        if let Some(body) = &body {
            self.end_growth(body);
        }
        if let Some(size) = size {
            let body = body.as_ref().ok_or(Errno::EINVAL)?;
            self.resize(body, size)?;
            body.mark_written(now);
        }
        let mut names = self.names_mut()?;
        if size.is_some() {
            names.drop_privileges(ino)?;
        }
        if let Some(written) = body.and_then(|body| body.take_written()) {
            names.written(ino, written)?;
        }
        if change != Change::default() || size.is_none() {
            names.change(ino, change, now)?;
        }
        stat_of(&names, ino)
    }

    pub(super) fn make(
        &self,
        parent: Ino,
        name: &OsStr,
        kind: Kind<Arc<Body>>,
        own: Ownership,
    ) -> Outcome<Stat> {
        let is_directory = is_directory(&kind);
        let mut names = self.names_mut()?;
        let ino = names.make(parent, name, kind, own, SystemTime::now())?;
        names.remember(ino)?;
        if is_directory {
            inherit(&mut names, parent, ino)?;
        }
        stat_of(&names, ino)
    }

    /// Makes a file, pipe or socket. Devices are refused, since the mount is `nodev`.
    pub(super) fn make_node(&self, parent: Ino, name: &OsStr, own: Ownership) -> Outcome<Stat> {
        let kind = match own.mode & libc::S_IFMT {
            libc::S_IFREG => Kind::File(self.empty_body(parent)?),
            libc::S_IFIFO => Kind::Fifo,
            libc::S_IFSOCK => Kind::Socket,
            _ => return Err(Errno::EPERM.into()),
        };
        self.make(parent, name, kind, own)
    }

    pub(super) fn add_link(&self, ino: Ino, parent: Ino, name: &OsStr) -> Outcome<Stat> {
        if let Some(body) = self.stat(ino)?.body() {
            self.end_growth(body);
        }
        let mut names = self.names_mut()?;
        names.link(ino, parent, name, SystemTime::now())?;
        names.remember(ino)?;
        stat_of(&names, ino)
    }

    pub(super) fn remove_file(&self, parent: Ino, name: &OsStr) -> Outcome<()> {
        let ended = self.names_mut()?.unlink(parent, name, SystemTime::now())?;
        drop(ended); // frees far memory, without the lock
        Ok(())
    }

    pub(super) fn remove_directory(&self, parent: Ino, name: &OsStr) -> Outcome<()> {
        Ok(self.names_mut()?.rmdir(parent, name, SystemTime::now())?)
    }

    pub(super) fn rename_entry(
        &self,
        from: (Ino, &OsStr),
        to: (Ino, &OsStr),
        flags: RenameFlags,
    ) -> Outcome<()> {
        let mode = match flags {
            flags if flags.is_empty() => RenameMode::Replace,
            RenameFlags::RENAME_NOREPLACE => RenameMode::NoReplace,
            RenameFlags::RENAME_EXCHANGE => RenameMode::Exchange,
            _ => return Err(Errno::EINVAL.into()),
        };
        let ended = self.names_mut()?.rename(from, to, mode, SystemTime::now())?;
        drop(ended); // frees far memory, without the lock
        Ok(())
    }

    pub(super) fn read_link(&self, ino: Ino) -> Outcome<OsString> {
        Ok(self.names()?.readlink(ino)?.to_owned())
    }

    pub(super) fn forget_all(&self, nodes: &[(Ino, u64)]) {
        let mut names = self.namespace.write();
        let ended: Vec<_> = nodes.iter().filter_map(|&(ino, count)| names.forget(ino, count)).collect();
        drop(names);
        drop(ended); // frees far memory, without the lock
    }

    pub(super) fn list(&self, ino: Ino, cookie: u64, mut reply: ReplyDirectory) {
        let filled = self.names().and_then(|names| {
            for entry in names.entries(ino, cookie)? {
                // `..` of a removed directory may lead nowhere.
                let kind =
                    names.attributes(entry.ino).map_or(fuser::FileType::Directory, |at| file_type(at.kind));
                if reply.add(INodeNo(entry.ino.0), entry.cookie, kind, entry.name) {
                    break;
                }
            }
            Ok(())
        });
        match filled {
            Ok(()) => reply.ok(),
            Err(Failure(errno)) => reply.error(errno),
        }
    }

    pub(super) fn list_with_attributes(&self, ino: Ino, cookie: u64, mut reply: ReplyDirectoryPlus) {
        let batch = match self.remember_entries(ino, cookie) {
            Ok(batch) => batch,
            Err(Failure(errno)) => return reply.error(errno),
        };
        let mut left_out = Vec::new();
        let mut full = false;
        for Listed { ino, cookie, name, stat, remembered } in batch {
            let cached = stat.lifetime();
            full = full || reply.add(INodeNo(ino.0), cookie, &name, &cached, &stat.complete(), GENERATION);
            if full && remembered {
                left_out.push((ino, 1));
            }
        }
        self.forget_all(&left_out);
        reply.ok();
    }

    /// The next entries of a directory. The kernel will know their inodes, so they are remembered before
    /// another request can remove them.
    fn remember_entries(&self, directory: Ino, cookie: u64) -> Outcome<Vec<Listed>> {
        let mut names = self.names_mut()?;
        let entries = names.entries(directory, cookie)?.take(LISTING_BATCH);
        let entries: Vec<_> = entries.map(|entry| (entry.ino, entry.cookie, entry.name.to_owned())).collect();
        let mut batch = Vec::with_capacity(entries.len());
        for (ino, cookie, name) in entries {
            let remembered = !DOT_ENTRIES.iter().any(|dots| name == *dots);
            // `..` of a removed directory may lead nowhere.
            let stat = stat_of(&names, ino).or_else(|_| stat_of(&names, directory))?;
            if remembered {
                names.remember(ino)?;
            }
            batch.push(Listed { ino, cookie, name, stat, remembered });
        }
        Ok(batch)
    }

    pub(super) fn send_capacity(&self, reply: ReplyStatfs) {
        let capacity = self.store.capacity();
        let block = u64::from(STATFS_BLOCK_BYTES);
        let (total, free) = (capacity.total_bytes / block, capacity.free_bytes / block);
        let (inodes, free_inodes) = {
            let names = self.namespace.read();
            let (taken, most) = names.metadata_bytes();
            let fit = most.saturating_sub(taken) / (INODE_BYTES + NAME_BYTES);
            (names.inodes() as u64, fit.min(MAX_INODES.saturating_sub(names.inodes())) as u64)
        };
        let name_bytes = MAX_NAME_BYTES as u32;
        reply.statfs(
            total,
            free,
            free,
            inodes + free_inodes,
            free_inodes,
            STATFS_BLOCK_BYTES,
            name_bytes,
            STATFS_BLOCK_BYTES,
        );
    }
}

/// An entry that is about to be sent to the kernel.
struct Listed {
    ino: Ino,
    cookie: u64,
    name: OsString,
    stat: Stat,
    remembered: bool,
}
